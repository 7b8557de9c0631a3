"""Perturbations of a pair: the acceptance is measured again with one setting changed at a time."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.configuration_dflash import ROPE_TYPES, DFlashConfig
from ..model.modeling_dflash import DFlashDraftModel, embedding_scale
from .finding import CHECK_ERRORS, FAULT, OK, SKIPPED, WARNING, Finding
from .forced_decoding import TargetResponses, accepted_tokens

# A perturbation is significant from this gain in tokens per pass on. Other prompts of the same kind change the mean of
# a good draft by about half of it, and a wrong setting costs more.
SIGNIFICANT_GAIN = 0.3
# The gain must also exceed this many standard errors. Neighbouring anchors draft the same tokens, so that the standard
# error of independent samples is too small.
STANDARD_ERRORS = 4
NEAR_PERFECT = 0.9  # fraction of the block size from which on no perturbation can gain much
MAX_PERMUTED = 4  # layers whose permutations are all tried; of more layers, reversal and swaps of neighbours are tried
MAX_MASK_TOKENS = 12
# Text without a template often repeats itself, which raises the acceptance of any good draft. Other prompts are
# therefore tried only where little is accepted.
TRY_PROMPTS_BELOW = 1.5
NO_WINDOW = 2**20

FAMILIES = (
    "target layers",
    "layer order",
    "rotary embedding",
    "causality",
    "sliding window",
    "mask token id",
    "embedding scale",
    "prompt format",
)


@dataclass(frozen=True)
class Perturbation:
    """
    One change of a pair's settings.

    Args:
        description (`str`): What is changed.
        advice (`str`): What to do if the change raises the acceptance.
        fields (`dict`): Values to change in the configuration of a copy of the draft.
        layer_ids (`list[int]`, *optional*): The target layers that the draft reads. They may be layers that a
            configuration does not allow.
        noise_factor (`float`, defaults to 1.0): A factor for the embeddings of the block.
        responses (`Callable`, *optional*): Returns other text to measure on.
    """

    description: str
    advice: str
    fields: dict[str, Any] = field(default_factory=dict)
    layer_ids: list[int] | None = None
    noise_factor: float = 1.0
    responses: Callable[[], TargetResponses] | None = None


def with_fields(draft: DFlashDraftModel, fields: dict[str, Any]) -> DFlashDraftModel:
    """
    Copy a draft with other configuration values. The copy shares the weights.

    Args:
        draft ([`DFlashDraftModel`]): The draft, which is not changed.
        fields (`dict`): Configuration values, which are not checked.

    Returns:
        [`DFlashDraftModel`]
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in draft.parameters()}
    changed = copy.deepcopy(draft, shared)
    for name, value in fields.items():
        setattr(changed.config, name, value)
    return changed


def set_command(**fields: Any) -> str:
    """
    Name the command that changes values of a draft's configuration.

    Args:
        **fields: Names and values.

    Returns:
        `str`

    Example:

    ```python
    >>> set_command(block_size=16)
    "Set block_size to 16: dflash-hf convert DRAFT NEW-FOLDER --layout native --set 'block_size=16'."

    ```
    """
    values = " and ".join(f"{name} to {json.dumps(value)}" for name, value in fields.items())
    options = " ".join(f"--set '{name}={json.dumps(value)}'" for name, value in fields.items())
    return f"Set {values}: dflash-hf convert DRAFT NEW-FOLDER --layout native {options}."


def measure_perturbations(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    responses: TargetResponses,
    respond_again: Callable[..., TargetResponses],
    on_family: Callable[[str], None] = lambda name: None,
) -> Iterator[Finding]:
    """
    Measure the acceptance with one setting changed at a time.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): The pair.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        responses ([`TargetResponses`]): The text on which the acceptance is measured.
        respond_again (`Callable`): Generates responses with other `use_template` or `chat_template_kwargs`.
        on_family (`Callable`): Called with the name of a family of perturbations before it is measured.

    Yields:
        [`Finding`]: One finding for each family. The perturbation with the largest significant gain is a fault, and
        other significant ones are warnings.
    """
    unperturbed = _committed_per_anchor(draft, responses)
    base = unperturbed.mean().item()
    if base >= NEAR_PERFECT * draft.config.tokens_per_block:
        for name in FAMILIES:
            yield Finding(
                name,
                SKIPPED,
                f"a pass commits {base:.2f} tokens of {draft.config.tokens_per_block} without a perturbation",
            )
        return
    families: dict[str, Callable[[], Iterator[Perturbation]]] = {
        "target layers": lambda: _other_layers(draft.config),
        "layer order": lambda: _other_orders(draft.config),
        "rotary embedding": lambda: _other_rotary_embeddings(target, draft.config),
        "causality": lambda: _other_causality(draft.config),
        "sliding window": lambda: _no_window(draft.config),
        "mask token id": lambda: _other_mask_tokens(target, draft.config, tokenizer),
        "embedding scale": lambda: _other_scale(draft),
        "prompt format": lambda: _other_prompts(draft.config, tokenizer, respond_again, base),
    }
    results = []
    for name, make in families.items():
        on_family(name)
        try:
            results.append(_measure(name, list(make()), draft, responses, unperturbed))
        except CHECK_ERRORS as error:
            results.append(_Result(name, 0, failure=f"{type(error).__name__}: {' '.join(str(error).split())}"))
    best = max(results, key=_Result.rank)
    for result in results:
        yield result.finding(base, is_best=result is best)


@dataclass(frozen=True)
class _Result:
    """The perturbation of a family with the largest gain in tokens per pass, if the family has perturbations."""

    name: str
    count: int
    best: Perturbation | None = None
    gain: float = -math.inf
    is_significant: bool = False
    failure: str | None = None

    def rank(self) -> tuple[bool, float]:
        """Return the key by which results are compared."""
        return self.is_significant, self.gain

    def finding(self, base: float, *, is_best: bool) -> Finding:
        """Return the finding of the family, given the tokens per pass without a perturbation."""
        if self.failure is not None:
            return Finding(self.name, SKIPPED, f"the measurement failed: {self.failure}")
        if self.best is None:
            return Finding(self.name, SKIPPED, "there is no perturbation to try for this draft")
        measured = (
            f"{base:.2f} tokens per pass without a perturbation, {base + self.gain:.2f} with {self.best.description}"
            f"{f' (best of {self.count})' if self.count > 1 else ''}"
        )
        if not self.is_significant:
            return Finding(self.name, OK, measured)
        return Finding(self.name, FAULT if is_best else WARNING, measured, self.best.advice)


def _committed_per_anchor(
    draft: DFlashDraftModel, responses: TargetResponses, perturbation: Perturbation | None = None
) -> torch.Tensor:
    """
    Return the tokens that a pass would commit at every anchor, the bonus token included.

    Decoding reaches only some of these anchors. The mean over all of them has a smaller standard error.
    """
    if perturbation is None:
        accepted = accepted_tokens(draft, responses)
    else:
        changed, factor = with_fields(draft, perturbation.fields), perturbation.noise_factor

        def run(noise_embeds: torch.Tensor, **kwargs: Any) -> Any:
            return changed(noise_embeds=noise_embeds * factor, **kwargs)

        accepted = accepted_tokens(changed, responses, perturbation.layer_ids, run)
    return 1 + accepted[responses.anchor_mask].float()


def _measure(
    name: str,
    perturbations: Sequence[Perturbation],
    draft: DFlashDraftModel,
    responses: TargetResponses,
    unperturbed: torch.Tensor,
) -> _Result:
    """Measure the perturbations of a family and return the best."""
    results = [_Result(name, len(perturbations))]
    for perturbation in perturbations:
        if perturbation.responses is None:
            committed = _committed_per_anchor(draft, responses, perturbation)
            difference = committed - unperturbed
            variance = difference.var() / len(difference)
        else:  # the anchors of other text cannot be paired with those of the first text
            committed = _committed_per_anchor(draft, perturbation.responses(), perturbation)
            variance = committed.var() / len(committed) + unperturbed.var() / len(unperturbed)
        gain = (committed.mean() - unperturbed.mean()).item()
        is_significant = gain >= max(SIGNIFICANT_GAIN, STANDARD_ERRORS * variance.sqrt().item())
        results.append(_Result(name, len(perturbations), perturbation, gain, is_significant))
    return max(results, key=_Result.rank)


def _other_layers(config: DFlashConfig) -> Iterator[Perturbation]:
    """Yield target layers one below and one above the present ones, all at once and one by one."""
    ids, depth = config.target_layer_ids or [], config.target_num_hidden_layers or 0
    moves = [[step] * len(ids) for step in (-1, 1)]
    if len(ids) > 1:
        moves += [
            [step * (index == moved) for index in range(len(ids))] for moved in range(len(ids)) for step in (-1, 1)
        ]
    for move in moves:
        moved_ids = [layer_id + step for layer_id, step in zip(ids, move, strict=True)]
        if len(set(moved_ids)) < len(ids) or min(moved_ids) < -1 or max(moved_ids) >= depth:
            continue
        if min(moved_ids) < 0 or max(moved_ids) == depth - 1:
            advice = (
                "The draft was trained on the target's embedding or on its last hidden state after the final norm (-1 "
                f"and {depth - 1} in {moved_ids}), which servers do not provide in the same form. Train it on layers "
                f"0 to {depth - 2}."
            )
        else:
            advice = set_command(target_layer_ids=moved_ids)
        yield Perturbation(f"layers {moved_ids} instead of {ids}", advice, layer_ids=moved_ids)


def _other_orders(config: DFlashConfig) -> Iterator[Perturbation]:
    """Yield other orders of the target layers."""
    ids = config.target_layer_ids or []
    if len(ids) <= MAX_PERMUTED:
        orders = [list(order) for order in itertools.permutations(ids)]
    else:
        swaps = range(len(ids) - 1)
        orders = [sorted(ids), sorted(ids, reverse=True), ids[::-1]]
        orders += [[*ids[:at], ids[at + 1], ids[at], *ids[at + 2 :]] for at in swaps]
    for order in orders:
        if order != ids:
            yield Perturbation(
                f"layers in the order {order} instead of {ids}", set_command(target_layer_ids=order), layer_ids=order
            )


def _other_rotary_embeddings(target: PreTrainedModel, config: DFlashConfig) -> Iterator[Perturbation]:
    """Yield the rotary embedding of the target and usual ones."""
    own = dict(config.rope_parameters or {})
    target_rope = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    target_rope = target_rope.get("full_attention", target_rope)
    usable = {
        name: value for name, value in target_rope.items() if name != "partial_rotary_factor" and value is not None
    }
    candidates = [usable] if usable.get("rope_type") in ROPE_TYPES and usable.get("rope_theta") else []
    thetas = (usable.get("rope_theta"), config.default_theta, 10_000.0)
    candidates += [{"rope_type": "default", "rope_theta": theta} for theta in thetas if theta]
    tried = [own]
    for rope in candidates:
        if rope in tried:
            continue
        tried.append(rope)
        source = " of the target" if rope == usable else ""
        fields = {"rope_parameters": rope}
        yield Perturbation(f"the rope_parameters {rope}{source} instead of {own}", set_command(**fields), fields)


def _other_causality(config: DFlashConfig) -> Iterator[Perturbation]:
    """Yield bidirectional and causal attention inside a block, unless the draft has it already."""
    causal = {config.in_block_causal(index) for index in range(config.num_hidden_layers)}
    for value, description in (
        (False, "bidirectional attention inside a block"),
        (True, "causal attention inside a block"),
    ):
        if causal != {value}:
            yield Perturbation(description, set_command(is_causal=value), {"is_causal": value})


def _no_window(config: DFlashConfig) -> Iterator[Perturbation]:
    """Yield full attention if the draft has a sliding window."""
    if "sliding_attention" not in (config.layer_types or []):
        return
    full: dict[str, Any] = {"layer_types": ["full_attention"] * config.num_hidden_layers, "sliding_window": None}
    causal = {config.in_block_causal(index) for index in range(config.num_hidden_layers)}
    if len(causal) == 1:  # full attention is bidirectional inside a block unless is_causal says otherwise
        full["is_causal"] = causal.pop()
    yield Perturbation(
        f"no sliding window instead of one of {config.sliding_window} tokens",
        f"{set_command(**full)} If the draft was trained with a larger window, set sliding_window to that window.",
        {"sliding_window": NO_WINDOW},
    )


def _other_mask_tokens(
    target: PreTrainedModel, config: DFlashConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Perturbation]:
    """Yield other mask tokens: the tokenizer's own, the first unused row, the last row, and special tokens."""
    first_unused = max(tokenizer.get_vocab().values()) + 1
    special = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
    candidates = [
        getattr(tokenizer, "mask_token_id", None),
        first_unused,
        config.vocab_size - 1,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
        0,
        *special[::-1],  # reserved tokens mostly have the largest ids
    ]
    known = [token_id for token_id in candidates if token_id is not None and token_id < config.vocab_size]
    others = [token_id for token_id in dict.fromkeys(known) if token_id != config.mask_token_id]
    for token_id in others[:MAX_MASK_TOKENS]:
        yield Perturbation(
            f"mask token {token_id} ({tokenizer.convert_ids_to_tokens(token_id) or 'no token'}) instead of "
            f"{config.mask_token_id}",
            set_command(mask_token_id=token_id),
            {"mask_token_id": token_id},
        )


def _other_scale(draft: DFlashDraftModel) -> Iterator[Perturbation]:
    """Yield unscaled embeddings of the block if the target scales its embedding."""
    scale = embedding_scale(draft.get_input_embeddings())
    if scale is not None and scale != 0 and not math.isclose(scale, 1, rel_tol=0.01):
        yield Perturbation(
            f"the embeddings of the block without the target's factor {scale:g}",
            f"The draft was trained on unscaled rows of the embedding, and generation scales them by {scale:g}. Train "
            "it with this package, which calls the target's embedding module.",
            noise_factor=1 / scale,
        )


def _other_prompts(
    config: DFlashConfig,
    tokenizer: PreTrainedTokenizerBase,
    respond_again: Callable[..., TargetResponses],
    base: float,
) -> Iterator[Perturbation]:
    """Yield prompts without the chat template and with other template arguments, if little is accepted."""
    if tokenizer.chat_template is None or base >= TRY_PROMPTS_BELOW:
        return
    yield Perturbation(
        "prompts without the chat template",
        "The draft was trained on text without a template. Use such prompts, or train it on rows of messages.",
        responses=partial(respond_again, use_template=False),
    )
    recorded = config.chat_template_kwargs or {}
    variants: list[dict[str, Any]] = [{}] if recorded else []
    if "enable_thinking" in str(tokenizer.chat_template):
        variants += [{**recorded, "enable_thinking": value} for value in (False, True)]
    for variant in variants:
        if variant != recorded:
            yield Perturbation(
                f"chat_template_kwargs {json.dumps(variant)} instead of {json.dumps(recorded)}",
                set_command(chat_template_kwargs=variant) + " Use the same arguments when serving.",
                responses=partial(respond_again, chat_template_kwargs=variant),
            )
