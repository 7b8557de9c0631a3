"""Plain and drafted generation of the same prompts, timed and compared."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import chat_inputs
from ..decoding.generate import speculative_generate
from ..model.modeling_dflash import DFlashDraftModel

Result = TypeVar("Result")


@dataclass
class Generation:
    """
    One answer and what it took.

    Args:
        token_ids (`list[int]`): new tokens, the end token included.
        seconds (`float`): wall time of `generate`.
        committed (`list[int]`): tokens committed by each verify pass that had a draft, the bonus token included;
            empty for plain generation. The last entry is cut where the answer ends.
    """

    token_ids: list[int]
    seconds: float
    committed: list[int]

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens a second, prefill included."""
        return len(self.token_ids) / self.seconds

    @property
    def accept_len(self) -> float:
        """`float`: mean tokens a verify pass with a draft committed; NaN if there was none."""
        return sum(self.committed) / len(self.committed) if self.committed else float("nan")


@dataclass
class Comparison:
    """The same prompt, answered without and with the draft."""

    prompt: str
    plain: Generation
    drafted: Generation

    @property
    def speed_up(self) -> float:
        """`float`: tokens a second with the draft, divided by those without."""
        return self.drafted.tokens_per_s / self.plain.tokens_per_s

    @property
    def is_identical(self) -> bool:
        """`bool`: both answers have the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids


@dataclass
class Summary:
    """
    What a draft is worth on a set of prompts.

    Args:
        num_prompts (`int`): prompts answered twice.
        accept_len (`float`): mean tokens committed a verify pass with a draft, the bonus token included.
        slot_acceptance (`list[float]`): share of those passes in which slots 1 … k were all accepted.
        plain_tokens_per_s, drafted_tokens_per_s (`float`): all new tokens over all seconds.
        speed_up (`float`): median of the ratios of each prompt.
        num_identical (`int`): prompts whose two answers have the same tokens.
    """

    num_prompts: int
    accept_len: float
    slot_acceptance: list[float]
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speed_up: float
    num_identical: int

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain values, for JSON."""
        return asdict(self)


def _wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done its work, so that a clock can be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """
    Call a function that computes on a device.

    Args:
        device (`torch.device`): where.
        call (`Callable`): without arguments.

    Returns:
        `tuple`: what it returned, and the seconds until the device was done.
    """
    _wait_for_device(device)
    start = time.perf_counter()
    result = call()
    _wait_for_device(device)
    return result, time.perf_counter() - start


def generate_timed(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    draft: DFlashDraftModel | None = None,
    *,
    own_loop: bool = False,
    **kwargs: Any,
) -> Generation:
    """
    Run `target.generate` once and record time and acceptance.

    What each verify pass of transformers' loop committed is read off the draft's inputs: a draft call gets the states
    of the tokens that the pass before it committed.

    Args:
        target (`PreTrainedModel`): the target.
        inputs (`dict`): `input_ids` of shape `[1, S]` and `attention_mask`.
        draft ([`DFlashDraftModel`], *optional*): plain generation without it.
        own_loop (`bool`, defaults to `False`): decode with [`speculative_generate`] instead of transformers' loop.
        **kwargs: for `generate`.

    Returns:
        [`Generation`]
    """
    generate: Any = target.generate  # a mixin's method, which type checkers do not see
    if draft is not None and own_loop:
        arguments: dict[str, Any] = {**inputs, **kwargs}
        drafted: Any  # with its statistics
        drafted, seconds = timed(target.device, lambda: speculative_generate(target, draft, **arguments))
        token_ids = drafted.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Generation(token_ids, seconds, drafted.statistics.committed[0])
    context_lengths: list[int] = []
    target_passes: list[None] = []
    handles = [target.register_forward_pre_hook(lambda module, args: target_passes.append(None))]
    if draft is not None:

        def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            context_lengths.append(kwargs["context_hidden_states"].shape[1])

        handles.append(draft.register_forward_pre_hook(record, with_kwargs=True))
        kwargs.update(assistant_model=draft, speculation_type="dflash")
    try:
        output, seconds = timed(target.device, lambda: generate(**inputs, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    committed = committed_by_pass(context_lengths, len(target_passes), len(token_ids))
    return Generation(token_ids, seconds, committed)


def committed_by_pass(context_lengths: list[int], num_target_passes: int, num_tokens: int) -> list[int]:
    """
    Tokens that each verify pass with a draft committed, from what the draft was called with.

    Args:
        context_lengths (`list[int]`): for each call of the draft, the tokens whose target states it got: the prompt,
            then what the pass before it committed.
        num_target_passes (`int`): passes of the target, the prefill included.
        num_tokens (`int`): new tokens of the answer.

    Returns:
        `list[int]`: the last entry is cut where the answer ends.

    Example:

    ```python
    >>> committed_by_pass([7, 2, 4], num_target_passes=5, num_tokens=11)
    [2, 4, 3]

    ```
    """
    if not context_lengths:
        return []
    undrafted_passes = num_target_passes - len(context_lengths)  # prefill, and a last token without a draft
    return [*context_lengths[1:], num_tokens - undrafted_passes - sum(context_lengths[1:])]


@contextlib.contextmanager
def plain_forward(draft: DFlashDraftModel) -> Iterator[None]:
    """
    Take away, inside the context, a `forward` that a trainer has put in place of the draft's own.

    Args:
        draft ([`DFlashDraftModel`]): the draft.
    """
    replaced = draft.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            draft.__dict__["forward"] = replaced


def generated_accept_len(
    target: PreTrainedModel, draft: DFlashDraftModel, rows: Iterable[Mapping[str, Any]], *, max_new_tokens: int
) -> float:
    """
    Acceptance length of greedy generation from the prompts of rows.

    Args:
        target (`PreTrainedModel`), draft ([`DFlashDraftModel`]): the pair.
        rows (`Iterable[Mapping]`): prepared rows; the prompt is what comes before the first supervised token, and a
            row without one is passed over.
        max_new_tokens (`int`): longest answer in tokens.

    Returns:
        `float`: mean tokens a verify pass with a draft committed, over all prompts; NaN if there was none.
    """
    committed: list[int] = []
    for row in rows:
        if not any(row["supervised_mask"]):
            continue
        prompt_length = max(list(row["supervised_mask"]).index(True), 1)
        input_ids = torch.tensor([row["input_ids"][:prompt_length]], device=target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        generation = generate_timed(target, inputs, draft, max_new_tokens=max_new_tokens, do_sample=False)
        committed += generation.committed
    return sum(committed) / len(committed) if committed else float("nan")


def compare_on_prompts(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    **generate_kwargs: Any,
) -> Iterator[Comparison]:
    """
    Answer each prompt without and with the draft, in turn, after one warm-up of both.

    The order of the two alternates from prompt to prompt, so that a drift of the machine hits both.

    Args:
        target, draft, tokenizer: the pair.
        prompts (`Sequence[str]`): user messages.
        **generate_kwargs: for `generate` (greedy unless told otherwise).

    Yields:
        [`Comparison`], one a prompt.
    """
    generate_kwargs = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, **generate_kwargs}
    for index, prompt in enumerate(prompts):
        inputs = chat_inputs(tokenizer, prompt, target.device, draft.config.chat_template_kwargs)
        if index == 0:
            for pair_member in (None, draft):
                generate_timed(target, inputs, pair_member, **{**generate_kwargs, "max_new_tokens": 8})
        results = {}
        for use_draft in (True, False) if index % 2 else (False, True):
            results[use_draft] = generate_timed(target, inputs, draft if use_draft else None, **generate_kwargs)
        yield Comparison(prompt, plain=results[False], drafted=results[True])


def summarize_comparisons(comparisons: Sequence[Comparison], block_size: int) -> Summary:
    """
    Add up the comparisons of a set of prompts.

    Args:
        comparisons (`Sequence[Comparison]`): at least one.
        block_size (`int`): slots a block, the anchor included.

    Returns:
        [`Summary`]
    """
    committed = [count for comparison in comparisons for count in comparison.drafted.committed]
    passes = len(committed) or float("nan")  # an answer of one token needs no pass with a draft

    def rate(generations: list[Generation]) -> float:
        return sum(len(g.token_ids) for g in generations) / sum(g.seconds for g in generations)

    return Summary(
        num_prompts=len(comparisons),
        accept_len=sum(committed) / passes,
        slot_acceptance=[sum(count > slot for count in committed) / passes for slot in range(1, block_size)],
        plain_tokens_per_s=rate([comparison.plain for comparison in comparisons]),
        drafted_tokens_per_s=rate([comparison.drafted for comparison in comparisons]),
        speed_up=statistics.median(comparison.speed_up for comparison in comparisons),
        num_identical=sum(comparison.is_identical for comparison in comparisons),
    )


class PairDecoding:
    """
    What measurements of decoding have in common, whatever the method.

    Args:
        target (`PreTrainedModel`): the target; its generation config names the tokens that end an answer.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer; names the padding token.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.target = target
        given: Any = target.generation_config
        end_token_ids = [] if given is None or given.eos_token_id is None else given.eos_token_id
        self.end_token_ids: list[int] = end_token_ids if isinstance(end_token_ids, list) else [end_token_ids]
        padding = [tokenizer.pad_token_id, *self.end_token_ids, 0]
        self.pad_token_id: int = next(token_id for token_id in padding if token_id is not None)

    @contextmanager
    def own_settings_aside(self) -> Iterator[None]:
        """Set the target's settings for generation aside, apart from its special tokens."""
        own_settings = self.target.generation_config
        self.target.generation_config = GenerationConfig(
            eos_token_id=self.end_token_ids or None, pad_token_id=self.pad_token_id
        )
        try:
            yield
        finally:
            self.target.generation_config = own_settings

    def arguments(self, rows: Sequence[torch.Tensor], temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """
        Arguments of `generate` for a batch.

        Args:
            rows (`Sequence[torch.LongTensor]`): prompts, each of shape `[columns]`.
            temperature (`float`): 0 decodes greedily; above, the target's distribution is not cut.
            max_new_tokens (`int`): longest answer.

        Returns:
            `dict`: `input_ids` and `attention_mask`, padded on the left, and the settings.
        """

        def padded(values: list[torch.Tensor], padding: int) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding, padding_side="left")

        arguments: dict[str, Any] = {
            "input_ids": padded(list(rows), self.pad_token_id),
            "attention_mask": padded([torch.ones_like(row) for row in rows], 0),
            "max_new_tokens": max_new_tokens,
            "do_sample": temperature > 0,
        }
        if temperature > 0:
            arguments.update(temperature=temperature, top_k=0, top_p=1.0)
        return arguments

    def answer(self, tokens: list[int]) -> list[int]:
        """Tokens up to and including the first that ends the answer; behind it there is padding."""
        ends = [index for index, token in enumerate(tokens) if token in self.end_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens
