"""Run a trainer in a terminal with live progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from ..training.checkpoint_files import last_complete_checkpoint
from ..training.metric_names import logged_metric
from ..training.trainer import DFlashTrainer


class LiveProgress(TrainerCallback):
    """
    Show a line with the progress of training, the loss and the acceptance length.

    Args:
        console (`Console`): the console.
        trainer ([`DFlashTrainer`]): the trainer, whose clock is read.
    """

    def __init__(self, console: Console, trainer: DFlashTrainer) -> None:
        self.trainer = trainer
        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("step {task.fields[step]}  loss {task.fields[loss]}  accepted {task.fields[length]}"),
            console=console,
        )
        self.task: TaskID | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.task = self.progress.add_task("", total=1.0, step=state.global_step, loss="–", length="–")
            self.progress.start()

    def _share(self, state: Any) -> float:
        """Return the share of the run that is done, by the clock if it has a budget."""
        clock = self.trainer.clock
        return clock.progress if clock.minutes is not None else state.global_step / max(state.max_steps, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=self._share(state), step=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.task is None or not logs:
            return
        if "loss" in logs:
            loss, length = f"{logs['loss']:.3f}", _two_digits(logged_metric(logs, "acceptance_length"))
            self.progress.update(self.task, loss=loss, length=length)
            if not self.progress.console.is_terminal:  # a log file shows no live line
                self.progress.console.print(
                    f"step {state.global_step} ({self._share(state):.0%}): loss {loss}, acceptance length {length}"
                )
        if "eval_loss" in logs:
            self.progress.console.print(
                f"step {state.global_step}: held-out loss {logs['eval_loss']:.3f}, {describe_acceptance(logs)}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.stop()


def describe_acceptance(metrics: dict[str, Any]) -> str:
    """Describe the acceptance length of an evaluation: of a block and, if it was simulated, when serving."""
    text = f"acceptance length {_two_digits(logged_metric(metrics, 'eval_acceptance_length'))} a block"
    serving = logged_metric(metrics, "eval_serving_acceptance_length")
    return text if serving is None else f"{text}, {_two_digits(serving)} when serving"


def _two_digits(value: float | None) -> str:
    """Format a number with two digits after the point, and a missing one as a dash."""
    return "–" if value is None else f"{value:.2f}"


def run_training(trainer: DFlashTrainer, console: Console, *, resume: bool) -> bool:
    """
    Train with live progress, and optionally resume from the last checkpoint in the output folder.

    Args:
        trainer ([`DFlashTrainer`]): the trainer.
        console (`Console`): the console.
        resume (`bool`): resume from the last checkpoint if there is one.

    Returns:
        `bool`: False after Ctrl-C; the output folder then holds a checkpoint of the last step.
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
