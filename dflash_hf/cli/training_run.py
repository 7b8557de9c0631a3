"""Run a trainer in a terminal: live progress, and an interrupt that keeps what was learned."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..trainer import DFlashTrainer


class LiveProgress(TrainerCallback):
    """
    One line that shows how far training is, the loss and the acceptance length.

    Args:
        console (`Console`): where to draw.
        trainer ([`DFlashTrainer`]): asked for its time budget.
    """

    def __init__(self, console: Console, trainer: DFlashTrainer) -> None:
        self.trainer = trainer
        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("step {task.fields[step]}  loss {task.fields[loss]}  accepted {task.fields[accept_len]}"),
            console=console,
        )
        self.task: TaskID | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.task = self.progress.add_task("", total=1.0, step=state.global_step, loss="–", accept_len="–")
            self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.task is not None:
            budget = self.trainer.time_budget
            share = budget.progress if budget is not None else state.global_step / max(state.max_steps, 1)
            self.progress.update(self.task, completed=share, step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.task is None or not logs:
            return
        if "accept_len" in logs:
            self.progress.update(self.task, loss=f"{logs['loss']:.3f}", accept_len=f"{logs['accept_len']:.2f}")
        if "eval_accept_len" in logs:
            self.progress.console.print(
                f"step {state.global_step}: held-out loss {logs['eval_loss']:.3f}, "
                f"acceptance length {logs['eval_accept_len']:.2f}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.stop()


class StopOnInterrupt(TrainerCallback):
    """Ctrl-C ends training after the current step, with a checkpoint to resume from; a second one ends at once."""

    def __init__(self) -> None:
        self.was_interrupted = False
        self._previous: Any = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.was_interrupted:
            raise KeyboardInterrupt
        self.was_interrupted = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._previous = signal.signal(signal.SIGINT, self._handle)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.was_interrupted:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)


def run_training(trainer: DFlashTrainer, console: Console, *, resume: bool) -> bool:
    """
    Train with live progress, from the last checkpoint in the output folder if asked to.

    Args:
        trainer ([`DFlashTrainer`]): ready to train.
        console (`Console`): where to draw.
        resume (`bool`): continue from the last checkpoint if there is one.

    Returns:
        `bool`: False if it was interrupted; the output folder then has a checkpoint of the last step.
    """
    output_dir = Path(str(trainer.args.output_dir))
    checkpoint = get_last_checkpoint(str(output_dir)) if resume and output_dir.is_dir() else None
    if checkpoint is not None:
        console.print(f"Resuming from {checkpoint}")
    interrupt = StopOnInterrupt()
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LiveProgress(console, trainer))
    trainer.add_callback(interrupt)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    if interrupt.was_interrupted:
        console.print(f"Interrupted: checkpoint of step {trainer.state.global_step} kept in {output_dir}.")
        return False
    console.print(
        f"Step {trainer.state.global_step} reached after {result.metrics['train_runtime']:.0f} s of training."
    )
    return True
