"""What could be wrong with a pair, tried out: the same measurement with one thing altered at a time."""

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
from .forced_decoding import AnsweredPrompts, accepted_slots

# An alteration counts from this gain in tokens a pass on, and only beyond the noise of the anchors: other prompts of
# the same kind move the mean of a good draft by about half of it, and a wrong setting costs more.
MARKED_GAIN = 0.3
STANDARD_ERRORS = 4  # neighbouring anchors are drafted for the same tokens, so that their plain error is too small
WHOLE_SHARE = 0.9  # of the block: nothing is left to find above it
MAX_PERMUTED = 4  # taps whose orders are all tried; of more, the reversed one and those of two neighbours
MAX_MASK_TOKENS = 12
# Bare text often repeats itself, which any good draft likes: other prompts are tried where little is accepted.
TRY_PROMPTS_BELOW = 1.5
NO_WINDOW = 2**20

FAMILIES = (
    "tapped layers",
    "order of layers",
    "rotary angles",
    "causality",
    "sliding window",
    "mask token id",
    "embedding scale",
    "prompt form",
)


@dataclass(frozen=True)
class Alteration:
    """
    One thing altered.

    Args:
        what (`str`): the altered thing, in words.
        advice (`str`): what to do if it helps.
        fields (`dict`): of the configuration of a copied draft.
        layer_ids (`list[int]`, *optional*): layers to read; these may be ones that no configuration can name.
        noise_factor (`float`, defaults to 1.0): for the embeddings of the block.
        answered (`Callable`, *optional*): other answers to measure on.
    """

    what: str
    advice: str
    fields: dict[str, Any] = field(default_factory=dict)
    layer_ids: list[int] | None = None
    noise_factor: float = 1.0
    answered: Callable[[], AnsweredPrompts] | None = None


def with_fields(draft: DFlashDraftModel, fields: dict[str, Any]) -> DFlashDraftModel:
    """
    A copy of a draft with another configuration and the same weights in memory.

    Args:
        draft ([`DFlashDraftModel`]): unchanged.
        fields (`dict`): configuration values; not checked.

    Returns:
        [`DFlashDraftModel`]
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in draft.parameters()}
    altered = copy.deepcopy(draft, shared)
    for name, value in fields.items():
        setattr(altered.config, name, value)
    return altered


def how_to_set(**fields: Any) -> str:
    """
    How to change values of a draft's configuration.

    Args:
        **fields: names and values.

    Returns:
        `str`

    Example:

    ```python
    >>> how_to_set(block_size=16)
    "Set block_size to 16: dflash-hf convert DRAFT NEW-FOLDER --layout native --set 'block_size=16'."

    ```
    """
    values = " and ".join(f"{name} to {json.dumps(value)}" for name, value in fields.items())
    options = " ".join(f"--set '{name}={json.dumps(value)}'" for name, value in fields.items())
    return f"Set {values}: dflash-hf convert DRAFT NEW-FOLDER --layout native {options}."


def measure_alterations(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    answered: AnsweredPrompts,
    answer_again: Callable[..., AnsweredPrompts],
    on_family: Callable[[str], None] = lambda name: None,
) -> Iterator[Finding]:
    """
    Measure acceptance with one thing altered at a time.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        answered ([`AnsweredPrompts`]): the text that acceptance is measured on.
        answer_again (`Callable`): makes answers with other `use_template` or `chat_template_kwargs`.
        on_family (`Callable`): called with the name of a family before it is measured.

    Yields:
        [`Finding`], one a family of alterations. The alteration that helps most is the fault; others that help, too,
        are warnings.
    """
    as_it_is = _per_anchor(draft, answered)
    base = as_it_is.mean().item()
    if base >= WHOLE_SHARE * draft.config.block_size:
        for name in FAMILIES:
            yield Finding(name, SKIPPED, f"{base:.2f} of {draft.config.block_size} are accepted as it is")
        return
    families: dict[str, Callable[[], Iterator[Alteration]]] = {
        "tapped layers": lambda: _other_taps(draft.config),
        "order of layers": lambda: _other_orders(draft.config),
        "rotary angles": lambda: _other_angles(target, draft.config),
        "causality": lambda: _other_causality(draft.config),
        "sliding window": lambda: _no_window(draft.config),
        "mask token id": lambda: _other_mask_tokens(target, draft.config, tokenizer),
        "embedding scale": lambda: _other_scale(draft),
        "prompt form": lambda: _other_prompts(draft.config, tokenizer, answer_again, base),
    }
    results = []
    for name, make in families.items():
        on_family(name)
        try:
            results.append(_measure(name, list(make()), draft, answered, as_it_is))
        except CHECK_ERRORS as error:
            results.append(_Result(name, 0, failure=f"{type(error).__name__}: {' '.join(str(error).split())}"))
    best = max(results, key=_Result.rank)
    for result in results:
        yield result.finding(base, is_best=result is best)


@dataclass(frozen=True)
class _Result:
    """The best alteration of a family, if there was any, and its gain in tokens a pass."""

    name: str
    count: int
    best: Alteration | None = None
    gain: float = -math.inf
    is_marked: bool = False
    failure: str | None = None

    def rank(self) -> tuple[bool, float]:
        return self.is_marked, self.gain

    def finding(self, base: float, *, is_best: bool) -> Finding:
        if self.failure is not None:
            return Finding(self.name, SKIPPED, f"could not be measured: {self.failure}")
        if self.best is None:
            return Finding(self.name, SKIPPED, "nothing to alter")
        measured = (
            f"{base:.2f} tokens a pass as it is, {base + self.gain:.2f} with {self.best.what}"
            f"{f' (best of {self.count})' if self.count > 1 else ''}"
        )
        if not self.is_marked:
            return Finding(self.name, OK, measured)
        return Finding(self.name, FAULT if is_best else WARNING, measured, self.best.advice)


def _per_anchor(
    draft: DFlashDraftModel, answered: AnsweredPrompts, alteration: Alteration | None = None
) -> torch.Tensor:
    """Tokens that a pass would commit at each anchor, the bonus token included: more anchors than serving lands on."""
    if alteration is None:
        accepted = accepted_slots(draft, answered)
    else:
        altered, factor = with_fields(draft, alteration.fields), alteration.noise_factor

        def run(noise_embeds: torch.Tensor, **kwargs: Any) -> Any:
            return altered(noise_embeds=noise_embeds * factor, **kwargs)

        accepted = accepted_slots(altered, answered, alteration.layer_ids, run)
    return 1 + accepted[answered.anchor_mask].float()


def _measure(
    name: str,
    alterations: Sequence[Alteration],
    draft: DFlashDraftModel,
    answered: AnsweredPrompts,
    as_it_is: torch.Tensor,
) -> _Result:
    results = [_Result(name, len(alterations))]
    for alteration in alterations:
        if alteration.answered is None:
            altered = _per_anchor(draft, answered, alteration)
            difference = altered - as_it_is
            variance = difference.var() / len(difference)
        else:  # other text, which has no pairs
            altered = _per_anchor(draft, alteration.answered(), alteration)
            variance = altered.var() / len(altered) + as_it_is.var() / len(as_it_is)
        gain = (altered.mean() - as_it_is.mean()).item()
        is_marked = gain >= max(MARKED_GAIN, STANDARD_ERRORS * variance.sqrt().item())
        results.append(_Result(name, len(alterations), alteration, gain, is_marked))
    return max(results, key=_Result.rank)


def _other_taps(config: DFlashConfig) -> Iterator[Alteration]:
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
                "It was trained on the target's embedding or on its last state after the final norm (-1 and "
                f"{depth - 1} in {moved_ids}), which servers do not hand over alike. Train it on layers 0 to "
                f"{depth - 2}."
            )
        else:
            advice = how_to_set(target_layer_ids=moved_ids)
        yield Alteration(f"layers {moved_ids} instead of {ids}", advice, layer_ids=moved_ids)


def _other_orders(config: DFlashConfig) -> Iterator[Alteration]:
    ids = config.target_layer_ids or []
    if len(ids) <= MAX_PERMUTED:
        orders = [list(order) for order in itertools.permutations(ids)]
    else:
        swaps = range(len(ids) - 1)
        orders = [sorted(ids), sorted(ids, reverse=True), ids[::-1]]
        orders += [[*ids[:at], ids[at + 1], ids[at], *ids[at + 2 :]] for at in swaps]
    for order in orders:
        if order != ids:
            yield Alteration(
                f"layers in the order {order} instead of {ids}", how_to_set(target_layer_ids=order), layer_ids=order
            )


def _other_angles(target: PreTrainedModel, config: DFlashConfig) -> Iterator[Alteration]:
    own = dict(config.rope_parameters or {})
    of_target = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    of_target = of_target.get("full_attention", of_target)
    kept = {name: value for name, value in of_target.items() if name != "partial_rotary_factor" and value is not None}
    candidates = [kept] if kept.get("rope_type") in ROPE_TYPES and kept.get("rope_theta") else []
    thetas = (kept.get("rope_theta"), config.default_theta, 10_000.0)
    candidates += [{"rope_type": "default", "rope_theta": theta} for theta in thetas if theta]
    tried = [own]
    for rope in candidates:
        if rope in tried:
            continue
        tried.append(rope)
        whose = " of the target" if rope == kept else ""
        fields = {"rope_parameters": rope}
        yield Alteration(f"the angles {rope}{whose} instead of {own}", how_to_set(**fields), fields)


def _other_causality(config: DFlashConfig) -> Iterator[Alteration]:
    causal = {config.in_block_causal(index) for index in range(config.num_hidden_layers)}
    for value, words in ((False, "slots that see all of their block"), (True, "slots that see the ones before them")):
        if causal != {value}:
            yield Alteration(words, how_to_set(is_causal=value), {"is_causal": value})


def _no_window(config: DFlashConfig) -> Iterator[Alteration]:
    if "sliding_attention" not in (config.layer_types or []):
        return
    full: dict[str, Any] = {"layer_types": ["full_attention"] * config.num_hidden_layers, "sliding_window": None}
    causal = {config.in_block_causal(index) for index in range(config.num_hidden_layers)}
    if len(causal) == 1:  # full layers would else see all of their block
        full["is_causal"] = causal.pop()
    yield Alteration(
        f"no sliding window instead of {config.sliding_window} tokens",
        f"{how_to_set(**full)} If it was trained with a larger window, set sliding_window to that.",
        {"sliding_window": NO_WINDOW},
    )


def _other_mask_tokens(
    target: PreTrainedModel, config: DFlashConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Alteration]:
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
        *special[::-1],  # reserved ones mostly come last
    ]
    known = [token_id for token_id in candidates if token_id is not None and token_id < config.vocab_size]
    others = [token_id for token_id in dict.fromkeys(known) if token_id != config.mask_token_id]
    for token_id in others[:MAX_MASK_TOKENS]:
        yield Alteration(
            f"mask token {token_id} ({tokenizer.convert_ids_to_tokens(token_id) or 'no token'}) instead of "
            f"{config.mask_token_id}",
            how_to_set(mask_token_id=token_id),
            {"mask_token_id": token_id},
        )


def _other_scale(draft: DFlashDraftModel) -> Iterator[Alteration]:
    scale = embedding_scale(draft.get_input_embeddings())
    if scale is not None and scale != 0 and not math.isclose(scale, 1, rel_tol=0.01):
        yield Alteration(
            f"the embeddings of the block without the target's factor {scale:g}",
            f"It was trained on rows of the embedding as they are, and generation scales them by {scale:g}. Train it "
            "with this package, which takes the target's embedding module.",
            noise_factor=1 / scale,
        )


def _other_prompts(
    config: DFlashConfig,
    tokenizer: PreTrainedTokenizerBase,
    answer_again: Callable[..., AnsweredPrompts],
    base: float,
) -> Iterator[Alteration]:
    if tokenizer.chat_template is None or base >= TRY_PROMPTS_BELOW:
        return
    yield Alteration(
        "prompts without the chat template",
        "It was trained on bare text. Give it such prompts, or train it on rows of messages.",
        answered=partial(answer_again, use_template=False),
    )
    recorded = config.chat_template_kwargs or {}
    variants: list[dict[str, Any]] = [{}] if recorded else []
    if "enable_thinking" in str(tokenizer.chat_template):
        variants += [{**recorded, "enable_thinking": value} for value in (False, True)]
    for variant in variants:
        if variant != recorded:
            yield Alteration(
                f"chat_template_kwargs {json.dumps(variant)} instead of {json.dumps(recorded)}",
                how_to_set(chat_template_kwargs=variant) + " Give the target the same when serving.",
                answered=partial(answer_again, chat_template_kwargs=variant),
            )
