"""Diagnosis of a pair of which the target accepts too few drafted tokens: every known cause is checked in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.metrics import AcceptanceRecord, record_of_counts
from ..evaluation.timed_generation import Generation, generate_timed
from ..model.configuration_dflash import text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.hidden_states import unwrap_peft
from .checks import (
    check_activations,
    check_mask_token,
    check_pair,
    check_paths,
    check_target_states,
    check_template,
)
from .finding import CHECK_ERRORS, FAULT, MAX_NEW_TOKENS, OK, SKIPPED, WARNING, Finding, guarded
from .forced_decoding import (
    TargetResponses,
    accepted_tokens,
    check_slots,
    generate_responses,
    response_length,
    simulated_passes,
)
from .perturbations import measure_perturbations

# Acceptance lengths below which a draft slows decoding down, and below which it gains little
USELESS_BELOW, WEAK_BELOW = 1.2, 1.5
# Relative difference of the acceptance length between decoding and simulated decoding of the same text. In half
# precision some passes propose another token, after which the two reach different anchors.
ALLOWED_GAP, ALLOWED_GAP_HALF = 0.1, 0.25


@dataclass
class Diagnosis:
    """
    A target and a draft to be diagnosed, and the findings so far.

    Args:
        target (`PreTrainedModel`): The target.
        draft ([`DFlashDraftModel`]): The draft, tied to the target and on its device.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        prompts (`list[str]`): User messages to which the target responds.
        max_new_tokens (`int`, defaults to 64): The longest response in tokens.
        target_name (`str`, *optional*): The name of the target as the user gave it.
        findings (`list[Finding]`): The findings so far, those of loading the pair included.
    """

    target: PreTrainedModel
    draft: DFlashDraftModel
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[str]
    max_new_tokens: int = MAX_NEW_TOKENS
    target_name: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.target, self.draft = unwrap_peft(self.target), local_draft(self.draft)
        self.tokenizer = text_tokenizer(self.tokenizer)

    def run(self, on_check: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
        """
        Run all checks in turn, the most fundamental first.

        Args:
            on_check (`Callable`): Called with the name of a check before it runs.

        Yields:
            [`Finding`]
        """
        yield from self._each(
            on_check,
            {"pair": self._pair, "mask token": lambda: check_mask_token(self.draft, self.target, self.tokenizer)},
        )
        on_check("target generation")
        try:
            responses = self.responses
        except CHECK_ERRORS as error:
            message = f"the target cannot generate: {type(error).__name__}: {' '.join(str(error).split())}"
            yield self._keep(
                Finding("target generation", FAULT, message, "First make target.generate work without a draft.")
            )
            return
        if (shortest := min(map(self._response_length, responses.inputs))) < self.max_new_tokens:
            measured = (
                f"responses are truncated after {shortest} tokens or more, where the target's table of positions ends"
            )
            yield self._keep(Finding("target generation", OK, measured))
        yield from self._each(
            on_check,
            {
                "chat template": self._template,
                "target states": lambda: check_target_states(self.target, self.draft, responses),
                "activations": lambda: check_activations(self.draft, responses),
                "training and generation": lambda: check_paths(self.draft, responses),
                "slot layout": lambda: check_slots(self.draft, responses),
            },
        )
        # Other faults would distort the comparison
        if all(finding.name in ("pair", "chat template") for finding in self.faults):
            try:
                for finding in measure_perturbations(
                    self.target, self.draft, self.tokenizer, responses, self._respond, on_check
                ):
                    yield self._keep(finding)
            except CHECK_ERRORS as error:
                message = f"the measurement failed: {type(error).__name__}: {' '.join(str(error).split())}"
                yield self._keep(Finding("perturbations", SKIPPED, message))
        yield from self._each(on_check, {"generation": self._generation, "acceptance": self._acceptance})

    @property
    def faults(self) -> list[Finding]:
        """`list[Finding]`: the faults found so far."""
        return [finding for finding in self.findings if finding.status == FAULT]

    @cached_property
    def responses(self) -> TargetResponses:
        """[`TargetResponses`]: the greedy responses of the target, generated on first use."""
        return self._respond()

    @cached_property
    def simulated(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `[R, B]`: simulated passes of each response by the tokens they commit."""
        accepted = accepted_tokens(self.draft, self.responses)
        return simulated_passes(accepted, self.responses, self.draft.config.tokens_per_block)

    @cached_property
    def generations(self) -> list[Generation]:
        """`list[Generation]`: the responses to the same prompts with the draft."""
        return [
            generate_timed(
                self.target,
                inputs,
                self.draft,
                max_new_tokens=self._response_length(inputs),
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id,
                tokenizer=self.tokenizer,
            )
            for inputs in self.responses.inputs
        ]

    @property
    def acceptance_length(self) -> float | None:
        """`float` or `None`: the acceptance length of all generations; `None` if no pass had a draft."""
        return self._acceptance_of(self.generations).acceptance_length

    def _response_length(self, inputs: dict[str, torch.Tensor]) -> int:
        """Return the greatest length of the response to a prompt."""
        return response_length(self.target, inputs["input_ids"].shape[1], self.max_new_tokens)

    def _acceptance_of(self, generations: Sequence[Generation]) -> AcceptanceRecord:
        """Return the acceptance record of some generations."""
        block_size = self.draft.config.tokens_per_block
        return sum((generation.acceptance(block_size) for generation in generations), AcceptanceRecord())

    def _each(self, on_check: Callable[[str], None], checks: dict[str, Callable[[], Finding]]) -> Iterator[Finding]:
        """Run checks in turn and yield their findings."""
        for name, check in checks.items():
            on_check(name)
            yield self._keep(guarded(name, check))

    def _keep(self, finding: Finding) -> Finding:
        """Add a finding to the findings and return it."""
        self.findings.append(finding)
        return finding

    def _respond(
        self, *, use_template: bool = True, chat_template_kwargs: dict[str, Any] | None = None
    ) -> TargetResponses:
        """Generate responses of the target, with the template arguments of training unless told otherwise."""
        kwargs = self.draft.config.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs
        return generate_responses(
            self.target,
            self.tokenizer,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            chat_template_kwargs=kwargs,
            use_template=use_template,
        )

    def _pair(self) -> Finding:
        """Compare the draft with the target and its tokenizer."""
        name = self.target_name or self.target.config.name_or_path
        return check_pair(self.draft, self.target, self.tokenizer, name)

    def _template(self) -> Finding:
        """Compare the prompt of generation with the start of a training row, on the first response."""
        ids = self.responses.completions[0]
        response = str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip() or "Yes."
        is_truncated = ids[-1] not in self.responses.end_token_ids
        return check_template(self.tokenizer, self.draft.config, self.prompts[0], response, is_truncated)

    def _generation(self) -> Finding:
        """Compare decoding with plain decoding, and its acceptance length with that of simulated decoding."""
        pairs = zip(self.generations, self.responses.completions, strict=True)
        is_equal = [generation.token_ids == completion for generation, completion in pairs]
        texts = f"{sum(is_equal)} of {len(is_equal)} responses have the tokens of plain decoding"
        is_exact = self.target.dtype == torch.float32
        if is_exact and not all(is_equal):
            return Finding(
                "generation",
                FAULT,
                texts,
                "In float32 greedy text must not depend on the draft. The target's cache does not remove rejected "
                "tokens. Try attn_implementation='sdpa', and report it.",
            )
        equal = [index for index, is_same in enumerate(is_equal) if is_same]
        decoded = self._acceptance_of([self.generations[index] for index in equal]).acceptance_length
        simulated = record_of_counts(self.simulated[equal]).acceptance_length
        if decoded is None or simulated is None:
            return Finding("generation", SKIPPED, f"{texts}: there is nothing to compare", "Use more prompts.")
        measured = f"acceptance length {decoded:.2f} in decoding, {simulated:.2f} in simulated decoding; {texts}"
        if abs(decoded - simulated) <= (ALLOWED_GAP if is_exact else ALLOWED_GAP_HALF) * simulated:
            return Finding("generation", OK, measured)
        return Finding(
            "generation",
            FAULT,
            measured,
            "The draft reads other values in decoding: its cache or its positions are wrong for this target. Try "
            "attn_implementation='sdpa' for both models. If the difference stays, report it as a bug.",
        )

    def _acceptance(self) -> Finding:
        """Judge the acceptance length."""
        faults, length = self.faults, self.acceptance_length
        if length is None:
            return Finding("acceptance", SKIPPED, "the responses have one token each", "Use other prompts.")
        measured = (
            f"acceptance length {length:.2f} of {self.draft.config.tokens_per_block} on {len(self.prompts)} prompts"
        )
        if length >= WEAK_BELOW:
            return Finding("acceptance", OK, measured)
        if faults:
            return Finding("acceptance", WARNING, measured, f'First correct the fault "{faults[0].name}".')
        return Finding(
            "acceptance",
            FAULT if length < USELESS_BELOW else WARNING,
            measured,
            "No check found a fault: the draft is undertrained, or it was trained on another target's hidden states "
            "(a fine-tune, or another checkpoint of the same shape) or on rows that differ from these prompts. "
            "Compare with eval_acceptance_length of its training. If that was high, check the target, and pass "
            "prompts of the training with --prompts. If it was low, train longer and on more rows that this target "
            "wrote (dflash-hf regenerate).",
        )


Examination = Diagnosis  # the name in version 0.1.0, kept for one release


def verdict(findings: Sequence[Finding]) -> str:
    """
    Summarise the findings.

    Args:
        findings (`Sequence[Finding]`): The findings in the order of the checks.

    Returns:
        `str`: One line if there is no fault, otherwise the numbered faults in the order of the checks with advice.

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
        summary = f"{'healthy' if last.status == OK else 'no fault'}: {last.measured}"
        return f"{summary} ({num_warnings} warning{'s' * (num_warnings > 1)} above)" if num_warnings else summary
    lines = [f"{len(faults)} fault{'s' * (len(faults) > 1)}:"]
    for number, finding in enumerate(faults, start=1):
        lines += [f"{number}. {finding.name}: {finding.measured}", f"   → {finding.advice}"]
    return "\n".join(lines)
