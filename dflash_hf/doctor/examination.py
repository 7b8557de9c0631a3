"""Examine a pair whose draft is accepted too rarely: every known cause in turn, and what to do about the one it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.metrics import record_of_counts
from ..evaluation.timed_generation import Generation, generate_timed
from ..model.modeling_dflash import DFlashDraftModel
from .checks import (
    check_activations,
    check_mask_token,
    check_pair,
    check_paths,
    check_target_states,
    check_template,
)
from .finding import CHECK_ERRORS, FAULT, MAX_NEW_TOKENS, OK, SKIPPED, WARNING, Finding, guarded
from .forced_decoding import AnsweredPrompts, accepted_slots, answer_prompts, check_slots, simulated_passes
from .perturbations import measure_perturbations

USELESS_BELOW, WEAK_BELOW = 1.2, 1.5  # tokens a pass: below them a block costs more than it saves, or about as much
# Relative, between drafting on the finished text and real decoding of the same text: in half precision a pass here and
# there proposes another token, after which the two land on other anchors.
ALLOWED_GAP, ALLOWED_GAP_HALF = 0.1, 0.25


@dataclass
class Examination:
    """
    A pair on the table.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair, tied, on one device.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        prompts (`list[str]`): user messages that the target answers.
        max_new_tokens (`int`, defaults to 64): longest answer in tokens.
        target_name (`str`, *optional*): as the user gave it.
        findings (`list[Finding]`): so far; what was found when loading goes in.
    """

    target: PreTrainedModel
    draft: DFlashDraftModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[str]
    max_new_tokens: int = MAX_NEW_TOKENS
    target_name: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def run(self, on_check: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
        """
        Make all checks in turn, the most fundamental first.

        Args:
            on_check (`Callable`): called with the name of a check before it runs.

        Yields:
            [`Finding`]
        """
        yield from self._each(
            on_check,
            {"pair": self._pair, "mask token": lambda: check_mask_token(self.draft, self.target, self.tokenizer)},
        )
        on_check("answers of the target")
        try:
            answered = self.answered
        except CHECK_ERRORS as error:
            message = f"the target cannot generate: {type(error).__name__}: {' '.join(str(error).split())}"
            yield self._keep(
                Finding("target generation", FAULT, message, "First make target.generate work without a draft.")
            )
            return
        yield from self._each(
            on_check,
            {
                "chat template": self._template,
                "target states": lambda: check_target_states(self.target, self.draft, answered),
                "activations": lambda: check_activations(self.draft, answered),
                "training and generation": lambda: check_paths(self.draft, answered),
                "slot layout": lambda: check_slots(self.draft, answered),
            },
        )
        if all(finding.name in ("pair", "chat template") for finding in self.faults):  # these leave slots comparable
            try:
                for finding in measure_perturbations(
                    self.target, self.draft, self.tokenizer, answered, self._answer, on_check
                ):
                    yield self._keep(finding)
            except CHECK_ERRORS as error:
                message = f"the measurement failed: {type(error).__name__}: {' '.join(str(error).split())}"
                yield self._keep(Finding("perturbations", SKIPPED, message))
        yield from self._each(on_check, {"generation": self._generation, "acceptance": self._acceptance})

    @property
    def faults(self) -> list[Finding]:
        """`list[Finding]`: so far."""
        return [finding for finding in self.findings if finding.status == FAULT]

    @cached_property
    def answered(self) -> AnsweredPrompts:
        """[`AnsweredPrompts`]: the target's own answers, made on first use."""
        return self._answer()

    @cached_property
    def forced(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `[R, B]`: simulated passes of each answer by the tokens they commit."""
        accepted = accepted_slots(self.draft, self.answered)
        return simulated_passes(accepted, self.answered, self.draft.config.block_size)

    @cached_property
    def drafted(self) -> list[Generation]:
        """`list[Generation]`: the same prompts decoded with the draft."""
        return [
            generate_timed(
                self.target,
                inputs,
                self.draft,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            for inputs in self.answered.inputs
        ]

    @property
    def accept_len(self) -> float:
        """`float`: tokens a verify pass with a draft committed in real decoding."""
        committed = [count for generation in self.drafted for count in generation.committed]
        return sum(committed) / len(committed) if committed else math.nan

    def _each(self, on_check: Callable[[str], None], checks: dict[str, Callable[[], Finding]]) -> Iterator[Finding]:
        for name, check in checks.items():
            on_check(name)
            yield self._keep(guarded(name, check))

    def _keep(self, finding: Finding) -> Finding:
        self.findings.append(finding)
        return finding

    def _answer(
        self, *, use_template: bool = True, chat_template_kwargs: dict[str, Any] | None = None
    ) -> AnsweredPrompts:
        kwargs = self.draft.config.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
        return answer_prompts(
            self.target,
            self.tokenizer,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            chat_template_kwargs=kwargs,
            use_template=use_template,
        )

    def _pair(self) -> Finding:
        name = self.target_name or self.target.config.name_or_path
        return check_pair(self.draft, self.target, self.tokenizer, name)

    def _template(self) -> Finding:
        ids = self.answered.answers[0]
        answer = str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip() or "Yes."
        is_cut = ids[-1] not in self.answered.end_token_ids
        return check_template(self.tokenizer, self.draft.config, self.prompts[0], answer, is_cut)

    def _generation(self) -> Finding:
        same = [ours.token_ids == theirs for ours, theirs in zip(self.drafted, self.answered.answers, strict=True)]
        texts = f"{sum(same)} of {len(same)} answers have the tokens of plain decoding"
        is_exact = self.target.dtype == torch.float32
        if is_exact and not all(same):
            return Finding(
                "generation",
                FAULT,
                texts,
                "In float32 greedy text must not depend on the draft: the target's cache does not take back rejected "
                "tokens. Try attn_implementation='sdpa', and report it.",
            )
        kept = [index for index, is_same in enumerate(same) if is_same]
        committed = [count for index in kept for count in self.drafted[index].committed]
        forced = record_of_counts(self.forced[kept]).acceptance_length
        if not committed or forced is None:
            return Finding("generation", SKIPPED, f"{texts}: nothing to compare", "Use more prompts.")
        decoded = sum(committed) / len(committed)
        measured = f"{decoded:.2f} tokens a pass when decoding, {forced:.2f} on the finished text; {texts}"
        if abs(decoded - forced) <= (ALLOWED_GAP if is_exact else ALLOWED_GAP_HALF) * forced:
            return Finding("generation", OK, measured)
        return Finding(
            "generation",
            FAULT,
            measured,
            "The draft does not see the same in decoding: its cache or its positions are wrong for this target. Try "
            "attn_implementation='sdpa' for both; if it stays, it is a bug to report.",
        )

    def _acceptance(self) -> Finding:
        block, found = self.draft.config.block_size, self.faults
        measured = f"acceptance length {self.accept_len:.2f} of {block} on {len(self.prompts)} prompts"
        if math.isnan(self.accept_len):
            return Finding("acceptance", SKIPPED, "the answers are one token long", "Use other prompts.")
        if self.accept_len >= WEAK_BELOW:
            return Finding("acceptance", OK, measured)
        if found:
            return Finding("acceptance", WARNING, measured, f"First mend {found[0].name}.")
        return Finding(
            "acceptance",
            FAULT if self.accept_len < USELESS_BELOW else WARNING,
            measured,
            "Nothing is broken: the draft is undertrained, or it was trained on another target's states (a fine-tune, "
            "another checkpoint of the same shape) or on rows unlike these prompts. Compare with eval_accept_len of "
            "its training: if that was high, check target and prompts (--prompts with some of its own); if not, train "
            "longer, on more rows, answered by this very target (dflash-hf regenerate).",
        )


def verdict(findings: Sequence[Finding]) -> str:
    """
    Sum up what was found.

    Args:
        findings (`Sequence[Finding]`): in the order of the checks.

    Returns:
        `str`: one line if healthy, else the numbered faults, most fundamental first, with what to do.

    Example:

    ```python
    >>> broken = Finding("weights", "fault", "not finite: fc", "Train again.")
    >>> print(verdict([Finding("pair", "ok", "width 32"), broken]))
    1 fault:
    1. weights: not finite: fc
       → Train again.
    >>> verdict([Finding("acceptance", "ok", "acceptance length 2.40 of 6 on 5 prompts")])
    'healthy: acceptance length 2.40 of 6 on 5 prompts'

    ```
    """
    faults = [finding for finding in findings if finding.status == FAULT]
    num_warnings = sum(finding.status == WARNING for finding in findings)
    if not faults:
        last = findings[-1]
        words = f"{'healthy' if last.status == OK else 'no fault'}: {last.measured}"
        return f"{words} ({num_warnings} warning{'s' * (num_warnings > 1)} above)" if num_warnings else words
    lines = [f"{len(faults)} fault{'s' * (len(faults) > 1)}:"]
    for number, finding in enumerate(faults, start=1):
        lines += [f"{number}. {finding.name}: {finding.measured}", f"   → {finding.advice}"]
    return "\n".join(lines)
