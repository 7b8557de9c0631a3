"""Comparison of plain generation and generation with a draft on the same prompts."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.metrics import AcceptanceRecord
from ..data.chat_template import chat_inputs
from ..data.text import short
from ..decoding.generation_settings import ONE_RESPONSE, check_generation_config
from ..model.configuration_dflash import describe_target, text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.hidden_states import unwrap_peft
from ..target.learned_positions import room_for_new_tokens
from .near_ties import FirstDifference, first_difference
from .timed_generation import LOOPS, Generation, generate_timed

WARM_UP_TOKENS = 8
PROBE_TOKENS = 4  # the first token, and at least one verify pass whose rejected tokens leave the cache
# The loop of transformers 5.24 looks for stop strings at the end of a block alone, and guides whole blocks at once.
OTHER_TEXT_IN_BLOCKS = ("stop_strings", "guidance_scale")


@dataclass
class Comparison:
    """
    Two responses to one prompt, generated without and with the draft.

    Args:
        prompt (`str`): the user message.
        plain ([`Generation`]), drafted ([`Generation`]): the responses.
        difference ([`FirstDifference`], *optional*): where two greedy responses differ first; `None` if they have the
            same tokens, or if tokens were sampled.
    """

    prompt: str
    plain: Generation
    drafted: Generation
    difference: FirstDifference | None = None

    @property
    def speed_up(self) -> float:
        """`float`: tokens per second with the draft, divided by those without."""
        return self.drafted.tokens_per_s / self.plain.tokens_per_s

    @property
    def is_identical(self) -> bool:
        """`bool`: both responses have the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "speed_up": self.speed_up, "identical": self.is_identical}


@dataclass
class Summary:
    """
    Acceptance, speed and exactness of a draft on a set of prompts.

    Args:
        num_prompts (`int`): number of prompts, each answered without and with the draft.
        acceptance_length (`float`, *optional*): mean number of tokens that a verify pass with a draft committed, the
            bonus token included; `None` if there was no such pass.
        slot_acceptance (`list[float | None]`): of the passes that verified slots 1 … k, the share that accepted all of
            them.
        plain_tokens_per_s, drafted_tokens_per_s (`float`): all new tokens divided by all seconds.
        speed_up (`float`): median over the prompts of the ratio of tokens per second with and without the draft.
        num_identical (`int`): prompts whose two responses have the same tokens.
        num_near_ties (`int`, *optional*): prompts whose greedy responses differ first at a near-tie of the target;
            `None` if this was not examined.
        near_tie_gap (`float`, *optional*): greatest logit gap that counted as a near-tie; `None` if no two responses
            were examined.
    """

    num_prompts: int
    acceptance_length: float | None
    slot_acceptance: list[float | None]
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speed_up: float
    num_identical: int
    num_near_ties: int | None = None
    near_tie_gap: float | None = None

    @property
    def num_different(self) -> int:
        """`int`: prompts whose two responses differ."""
        return self.num_prompts - self.num_identical

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """
        Read what [`~Summary.as_dict`] returned, in this version or in version 0.1.0.

        Args:
            values (`Mapping`): plain values. Version 0.1.0 called the acceptance length `accept_len`.

        Returns:
            [`Summary`]

        Raises:
            TypeError: a value is missing or unknown.
        """
        return cls(**{"acceptance_length" if name == "accept_len" else name: value for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def compare_on_prompts(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    loop: str = LOOPS[0],
    **generate_kwargs: Any,
) -> Iterator[Comparison]:
    """
    Answer each prompt without and with the draft.

    Both methods are warmed up once. Which of the two comes first alternates from prompt to prompt, so that a change of
    the machine's speed affects both.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]), tokenizer (`PreTrainedTokenizerBase`): the pair.
        prompts (`Sequence[str]`): user messages.
        loop (`str`, defaults to `"dflash_hf"`): the loop that takes the draft. `"dflash_hf"` is
            [`speculative_generate`] with its defaults, `"transformers"` is the loop of transformers.
        **generate_kwargs: arguments of `generate`, which decodes greedily unless `do_sample=True` is among them.

    Yields:
        [`Comparison`], one for each prompt.
    """
    target, draft, tokenizer = unwrap_peft(target), local_draft(draft), text_tokenizer(tokenizer)
    check_generation_config(target, **{**ONE_RESPONSE, "do_sample": False, **generate_kwargs})
    # Stop strings of a generation config need the tokenizer.
    kwargs = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, "tokenizer": tokenizer, **generate_kwargs}
    for index, prompt in enumerate(prompts):
        inputs = chat_inputs(tokenizer, prompt, target.device, draft.config.chat_template_kwargs)
        if index == 0:
            warm_up = min(WARM_UP_TOKENS, kwargs.get("max_new_tokens") or WARM_UP_TOKENS)
            for member in (None, draft):
                generate_timed(target, inputs, member, loop=loop, **{**kwargs, "max_new_tokens": warm_up})
        results = {}
        for is_drafted in (True, False) if index % 2 else (False, True):
            results[is_drafted] = generate_timed(target, inputs, draft if is_drafted else None, loop=loop, **kwargs)
        plain, drafted = results[False], results[True]
        difference = None
        if not kwargs["do_sample"]:
            difference = first_difference(target, inputs["input_ids"][0], plain.token_ids, drafted.token_ids)
        yield Comparison(prompt, plain, drafted, difference)


def summarize_comparisons(comparisons: Sequence[Comparison], block_size: int) -> Summary:
    """
    Summarize the comparisons of a set of prompts.

    Args:
        comparisons (`Sequence[Comparison]`): at least one.
        block_size (`int`): slots of a block, the anchor included.

    Returns:
        [`Summary`]
    """
    acceptance = sum((each.drafted.acceptance(block_size) for each in comparisons), AcceptanceRecord())
    num_identical = sum(each.is_identical for each in comparisons)
    differences = [each.difference for each in comparisons if each.difference is not None]
    is_examined = len(differences) == len(comparisons) - num_identical
    return Summary(
        num_prompts=len(comparisons),
        acceptance_length=acceptance.acceptance_length,
        slot_acceptance=acceptance.slot_acceptance,
        plain_tokens_per_s=_rate([each.plain for each in comparisons]),
        drafted_tokens_per_s=_rate([each.drafted for each in comparisons]),
        speed_up=statistics.median(each.speed_up for each in comparisons),
        num_identical=num_identical,
        num_near_ties=sum(each.is_near_tie for each in differences) if is_examined else None,
        near_tie_gap=differences[0].near_tie_gap if is_examined and differences else None,
    )


def _rate(generations: Sequence[Generation]) -> float:
    """Return the tokens per second of several generations."""
    return sum(len(each.token_ids) for each in generations) / sum(each.seconds for each in generations)


def generated_acceptance_length(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    rows: Iterable[Mapping[str, Any]],
    *,
    max_new_tokens: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> float | None:
    """
    Generate greedily from the prompts of rows, and return the acceptance length.

    The loop is that of transformers, or that of this package where the draft has a selector or a Markov head, or where
    the target's generation config has an entry of which the former makes another text than plain generation.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        rows (`Iterable[Mapping]`): prepared rows. The tokens before the first supervised one are the prompt, and a row
            without supervised tokens is skipped, and so is one that ends where the target's table of positions ends.
        max_new_tokens (`int`): greatest length of a response in tokens. It is shorter where the table ends.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer, which stop strings of its generation
            config need.

    Returns:
        `float`, or `None` if no pass had a draft.
    """
    draft, acceptance = local_draft(draft), AcceptanceRecord()
    loop = _measured_loop(target, draft)
    for row in rows:
        if not any(row["supervised_mask"]):
            continue
        prompt_length = max(list(row["supervised_mask"]).index(True), 1)
        room = room_for_new_tokens(target, prompt_length, draft.config.tokens_per_block)
        if room is not None and room < 1:
            continue
        input_ids = torch.tensor([row["input_ids"][:prompt_length]], device=target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        kwargs = {
            "max_new_tokens": max_new_tokens if room is None else min(max_new_tokens, room),
            "do_sample": False,
            "tokenizer": tokenizer,
        }
        generation = generate_timed(target, inputs, draft, loop=loop, **kwargs)
        acceptance += generation.acceptance(draft.config.tokens_per_block)
    return acceptance.acceptance_length


def _measured_loop(target: PreTrainedModel, draft: DFlashDraftModel) -> str:
    """Return the loop of [`generated_acceptance_length`]."""
    config = target.generation_config
    if draft.candidate_selector is not None or draft.markov_head is not None:
        return LOOPS[0]
    is_other_text = any(getattr(config, name, None) is not None for name in OTHER_TEXT_IN_BLOCKS)
    return LOOPS[0] if is_other_text else LOOPS[1]


def check_generation(
    target: PreTrainedModel, draft: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """
    Refuse a target that the loop of [`generated_acceptance_length`] cannot decode, by generating a few tokens.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair, on one device.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer.

    Raises:
        ValueError: the generation fails; the message gives the reason.
    """
    was_training = draft.training
    inputs = {
        name: torch.ones(1, 1, dtype=torch.long, device=target.device) for name in ("input_ids", "attention_mask")
    }
    loop = _measured_loop(target, draft)
    kwargs = {"max_new_tokens": PROBE_TOKENS, "min_new_tokens": PROBE_TOKENS, "do_sample": False}
    try:
        generate_timed(target, inputs, draft.eval(), loop=loop, tokenizer=tokenizer, **kwargs)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"eval_generate_prompts asks for generation with the draft, and the loop of {loop} cannot decode "
            f"the target {describe_target(target)} ({short(reason)}). Leave eval_generate_prompts out; "
            "eval_serving_acceptance_length needs no generation."
        ) from error
    finally:
        draft.train(was_training)


@contextlib.contextmanager
def plain_forward(draft: DFlashDraftModel) -> Iterator[None]:
    """
    Remove, inside the context, a `forward` that a trainer has assigned to the draft in place of its own.

    Args:
        draft ([`DFlashDraftModel`]): the draft.
    """
    replaced = draft.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            draft.__dict__["forward"] = replaced
