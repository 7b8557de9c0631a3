"""Run a trainer in a terminal, with live progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..training.resume import last_complete_checkpoint
from ..training.trainer import DFlashTrainer


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

    def _share(self, state: Any) -> float:
        clock = self.trainer.clock
        return clock.progress if clock.minutes is not None else state.global_step / max(state.max_steps, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=self._share(state), step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.task is None or not logs:
            return
        if "accept_len" in logs:
            self.progress.update(self.task, loss=f"{logs['loss']:.3f}", accept_len=f"{logs['accept_len']:.2f}")
            if not self.progress.console.is_terminal:  # a log file has no live line
                self.progress.console.print(
                    f"step {state.global_step} ({self._share(state):.0%}): loss {logs['loss']:.3f}, "
                    f"acceptance length {logs['accept_len']:.2f}"
                )
        if "eval_accept_len" in logs:
            self.progress.console.print(
                f"step {state.global_step}: held-out loss {logs['eval_loss']:.3f}, {describe_acceptance(logs)}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.stop()


def describe_acceptance(metrics: dict[str, Any]) -> str:
    """The acceptance length of an evaluation, a block and, where it was asked for, when serving."""
    text = f"acceptance length {metrics['eval_accept_len']:.2f} a block"
    if "eval_serving_accept_len" in metrics:
        text += f", {metrics['eval_serving_accept_len']:.2f} when serving"
    return text


def run_training(trainer: DFlashTrainer, console: Console, *, resume: bool) -> bool:
    """
    Train with live progress, from the last checkpoint in the output folder if asked to.

    Args:
        trainer ([`DFlashTrainer`]): ready to train.
        console (`Console`): where to draw.
        resume (`bool`): continue from the last checkpoint if there is one.

    Returns:
        `bool`: False after Ctrl-C; the output folder then has a checkpoint of the last step.
    """
    output_dir = Path(str(trainer.args.output_dir))
    checkpoint = last_complete_checkpoint(output_dir) if resume else None
    if checkpoint is not None:
        console.print(f"Resuming from {checkpoint}")
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    live = LiveProgress(console, trainer)
    trainer.add_callback(live)
    try:
        result = trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt as interrupt:
        console.print(str(interrupt) or "Interrupted before the first step.", soft_wrap=True)
        return False
    finally:
        live.progress.stop()
    console.print(
        f"Step {trainer.state.global_step} reached after {result.metrics['train_runtime']:.0f} s of training."
    )
    return True
