"""Seconds that a generation call spends in its phases, whatever loop it uses."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..decoding.statistics import Stopwatch
from ..evaluation.timed_generation import PassRecorder

PHASES = ("prefill", "draft", "verify", "overhead")


class PhaseRecorder(PassRecorder):
    """
    Record the passes of one generation call and the seconds of its phases while the context is open.

    Hooks on target, draft and output head read the clock, so that this works for every loop. On an accelerator the
    clock is a stopwatch of events in its queue and does not wait for the device.

    Args:
        target (`PreTrainedModel`): the target.
        draft (`nn.Module`, *optional*): the draft.
        context_name (`str`, defaults to `"context_hidden_states"`): see [`PassRecorder`].

    Attributes:
        phase_s (`dict[str, float]`): after the context, the seconds in the target's pass over the prompts (`prefill`),
            in the draft's forward passes and the head on their results (`draft`), in the target's other passes
            (`verify`), and outside all of these (`overhead`).
    """

    def __init__(
        self, target: PreTrainedModel, draft: nn.Module | None, context_name: str = "context_hidden_states"
    ) -> None:
        super().__init__(target, draft, context_name)
        self.phase_s: dict[str, float] = {}
        self._in_target = False

    def __enter__(self) -> PhaseRecorder:
        head: Any = self.target.get_output_embeddings()
        self._handles = [
            self.target.register_forward_pre_hook(self._target_starts),
            self.target.register_forward_hook(self._target_ends),
            head.register_forward_pre_hook(self._head_starts),
            head.register_forward_hook(self._head_ends),
        ]
        if self.draft is not None:
            self._handles += [
                self.draft.register_forward_pre_hook(self._draft_starts, with_kwargs=True),
                self.draft.register_forward_hook(self._draft_ends),
            ]
        self._watch = Stopwatch(self.target.device)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._watch.lap("overhead")
        self.phase_s = {**dict.fromkeys(PHASES, 0.0), **self._watch.totals()}
        super().__exit__(*exception)

    def _target_starts(self, module: nn.Module, args: Any) -> None:
        """End the overhead before a pass of the target."""
        self._watch.lap("overhead")
        self._in_target = True

    def _target_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a pass of the target, the first of which is the prefill."""
        self._watch.lap("verify" if self.num_target_passes else "prefill")
        self._count_target_pass(module, args, output)
        self._in_target = False

    def _head_starts(self, module: nn.Module, args: Any) -> None:
        """End the overhead before the output head computes logits of the draft."""
        if not self._in_target:
            self._watch.lap("overhead")

    def _head_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count the output head outside a pass of the target as a part of drafting."""
        if not self._in_target:
            self._watch.lap("draft")

    def _draft_starts(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """End the overhead before a pass of the draft."""
        self._watch.lap("overhead")
        self._note_context(module, args, kwargs)

    def _draft_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a pass of the draft."""
        self._watch.lap("draft")
