"""Callbacks that stop training on a signal without loss, and that warn of a draft that does not learn."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from .metric_names import logged_metric
from .optimizer import TrainingClock

logger = logging.get_logger(__name__)

# Only Python's default handlers are replaced. A handler that the user or another library has set stays in place.
REPLACED_HANDLERS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
STALLED_ACCEPTANCE_LENGTH = 1.02


class TrainingInterruptedError(Exception):
    """Signal an interrupt between two micro-batches; [`DFlashTrainer.train`] catches it."""


class StopOnSignal(TrainerCallback):
    """
    Leave the training loop after the running micro-batch once Ctrl-C or SIGTERM was received.

    Parameters and optimizer are then those of the last complete optimizer step. A second Ctrl-C ends training at once.
    Several processes agree before each optimizer step, so that all of them stop at the same step.

    Args:
        any_rank (`Callable`, *optional*): takes the answer of this rank and returns whether any rank answers yes. It
            is a collective operation and needed in several processes only.

    Attributes:
        was_interrupted (`bool`): whether this or another rank received a signal.
        saved_step (`int`, *optional*): the step of the last checkpoint of this run.
    """

    def __init__(self, any_rank: Callable[[bool], bool] | None = None) -> None:
        self.any_rank = any_rank
        self.was_interrupted = False
        self.saved_step: int | None = None
        self._signal_number: int = signal.SIGTERM  # of a rank that learns of the signal from another rank
        self._is_watching = False
        self._starts_epoch = False
        self._random_modules: list[Any] = [torch]
        self._random_states: list[torch.Tensor] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Handle both signals inside the context, in the main thread, and restore the earlier handlers after it."""
        self.was_interrupted, self._is_watching, self.saved_step = False, True, None
        previous = {}
        if threading.current_thread() is threading.main_thread():
            for number, replaced in REPLACED_HANDLERS.items():
                if signal.getsignal(number) == replaced:
                    previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._is_watching = False
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, and end training at once on a second Ctrl-C."""
        if self.was_interrupted:
            if number == signal.SIGTERM:
                return  # a launcher forwards a signal that every process has already received
            self._signal_number = number
            raise self.exception("Training was stopped at once, without a checkpoint.")
        self._signal_number, self.was_interrupted = number, True
        logger.warning(
            f"{signal.Signals(number).name} was received: training stops after this micro-batch and keeps a "
            "checkpoint. Another Ctrl-C stops it at once, without a checkpoint."
        )

    def exception(self, message: str) -> BaseException:
        """Return `KeyboardInterrupt` after Ctrl-C, and otherwise `SystemExit` with the exit code of the signal."""
        if self._signal_number == signal.SIGINT:
            return KeyboardInterrupt(message)
        return SystemExit(128 + self._signal_number)

    def agreed(self) -> bool:
        """Return whether any rank received a signal; a collective operation in several processes."""
        if self.any_rank is not None:
            self.was_interrupted = self.any_rank(self.was_interrupted)
        return self.was_interrupted

    def _leave_if_asked(self) -> None:
        """Leave the training loop if any rank received a signal."""
        if self._is_watching and self.agreed():
            raise TrainingInterruptedError

    def restore_random_states(self) -> None:
        """Restore the random states after the last optimizer step, since a resumed run repeats what came after it."""
        for module, state in zip(self._random_modules, self._random_states, strict=True):
            module.set_rng_state(state)

    def _note_random_states(self) -> None:
        """Keep the random states of this moment."""
        self._random_states = [module.get_rng_state() for module in self._random_modules]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_step = state.global_step  # training resumed from that checkpoint, or has nothing to save yet
        if args.device.type != "cpu":
            self._random_modules = [torch, torch.get_device_module(args.device)]
        self._note_random_states()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_step = state.global_step

    # The loop is not left here, since other callbacks, the log and a due checkpoint still follow.
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()  # needed if the following evaluation is interrupted

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_random_states()
        self._starts_epoch = True
        self._leave_if_asked()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._starts_epoch:  # the data loader uses random numbers when an epoch starts or is resumed
            self._note_random_states()
        self._starts_epoch = False
        self._leave_if_asked()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.any_rank is None:
            self._leave_if_asked()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave_if_asked()


class AcceptanceWatch(TrainerCallback):
    """
    Warn once if the target accepts almost nothing although the learning rate has reached its peak long ago.

    The acceptance length of the training logs is read after 50 optimizer steps and twice the warm-up.

    Args:
        clock ([`TrainingClock`], *optional*): clock of the run; if it has a budget, the warm-up is a share of it.
    """

    def __init__(self, clock: TrainingClock | None = None) -> None:
        self.clock = clock
        self.best = 0.0
        self._is_done = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        length = logged_metric(logs or {}, "acceptance_length")
        if length is None or self._is_done or not state.is_world_process_zero:
            return
        self.best = max(self.best, length)
        self._is_done = self.best >= STALLED_ACCEPTANCE_LENGTH
        if self._is_done or state.global_step < 50 or not self._is_past_warmup(args, state):
            return
        self._is_done = True
        logger.warning(
            f"After {state.global_step} steps the acceptance length is still {length:.3f}, so the target accepts "
            f"almost nothing; a draft that learns is above {STALLED_ACCEPTANCE_LENGTH} by now. Check that this target "
            "wrote the responses with this chat template, that the learning rate is right, that target_layer_ids and "
            "mask_token_id fit if the draft was made elsewhere, and that loss_mask is True at responses, False at "
            "prompts, and not shifted."
        )

    def _is_past_warmup(self, args: Any, state: Any) -> bool:
        """Return whether twice the warm-up is over."""
        if self.clock is not None and self.clock.minutes is not None:
            return self.clock.progress >= 2 * args.warmup_steps
        return state.global_step >= 2 * args.get_warmup_steps(state.max_steps)
