"""Timed generation with and without a draft, and what its verify passes committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from ..blocks.metrics import AcceptanceRecord
from ..decoding.generate import speculative_generate
from ..decoding.generation_settings import ONE_RESPONSE
from ..decoding.statistics import DecodingStatistics
from ..decoding.stopping_criteria import stop_string_ends
from ..model.configuration_dflash import describe_target, text_tokenizer
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.learned_positions import learned_positions, room_for_new_tokens
from ..target.token_ids import check_prompt_ids, padding_token_id

Result = TypeVar("Result")
LOOPS = ("dflash_hf", "transformers")
# Entries of a generation config that a measurement keeps, or has its own values for.
MEASURED_SETTINGS = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "max_length", "max_new_tokens"),
    *("do_sample", "temperature", "top_k", "top_p", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "cache_config", "prefill_chunk_size"),  # without influence on a text
    *ONE_RESPONSE,
)


@dataclass
class Generation:
    """
    One response and the cost of generating it.

    Args:
        token_ids (`list[int]`): new tokens, the end token included.
        seconds (`float`): wall time of `generate`.
        committed (`list[int]`): tokens that each verify pass with a draft committed, the bonus token included; empty
            for plain generation. The last entry does not count tokens past the end of the response.
        verified (`list[int]`, *optional*): drafted tokens that each of these passes verified; `None` if every pass
            verified a whole block.
    """

    token_ids: list[int]
    seconds: float
    committed: list[int]
    verified: list[int] | None = None

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens per second, prefill included."""
        return len(self.token_ids) / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """`float` or `None`: acceptance length of the response; `None` if no pass had a draft."""
        return self.acceptance(block_size=1).acceptance_length

    def acceptance(self, block_size: int) -> AcceptanceRecord:
        """
        Count the verify passes.

        Args:
            block_size (`int`): slots of a block, the anchor included.

        Returns:
            [`AcceptanceRecord`]
        """
        return AcceptanceRecord.of(self.committed, self.verified, block_size=block_size)


@dataclass(frozen=True)
class TimedBatch:
    """
    The output of one call of `generate` for a batch.

    Args:
        sequences (`torch.LongTensor` of shape `[batch, length]`): prompts and new tokens.
        seconds (`float`): wall time of the call.
        statistics ([`DecodingStatistics`], *optional*): of this package's loop; `None` for every other loop.
    """

    sequences: torch.Tensor
    seconds: float
    statistics: DecodingStatistics | None


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """
    Call a function that computes on a device, and wait for the device before reading the clock.

    Args:
        device (`torch.device`): the device.
        call (`Callable`): the function, which takes no arguments.

    Returns:
        `tuple`: the result of the function and its wall time in seconds.
    """
    _wait_for(device)
    start = time.perf_counter()
    result = call()
    _wait_for(device)
    return result, time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    """Wait until an accelerator has finished its queue. A CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def run_loop(
    target: PreTrainedModel,
    draft: DFlashDraftModel | None,
    arguments: dict[str, Any],
    loop: str = LOOPS[0],
    **options: Any,
) -> tuple[torch.Tensor, DecodingStatistics | None]:
    """
    Generate once, without a draft or with one of the two loops that take one.

    Args:
        target (`PreTrainedModel`): the target.
        draft ([`DFlashDraftModel`], *optional*): its draft; plain generation if `None`.
        arguments (`dict`): arguments of `generate`.
        loop (`str`, defaults to `"dflash_hf"`): `"dflash_hf"` is [`speculative_generate`], `"transformers"` is the
            loop that transformers has for DFlash drafts.
        **options: further arguments of [`speculative_generate`]; `"transformers"` takes none.

    Returns:
        `tuple`: sequences of shape `[batch, length]`, and the [`DecodingStatistics`] of this package's loop, else
        `None`.

    Raises:
        ValueError: `loop` is not known.
    """
    if loop not in LOOPS:
        raise ValueError(f"loop={loop!r} must be one of {', '.join(LOOPS)}. Choose one of them.")
    generate: Any = target.generate  # a mixin's method, which type checkers do not see
    if draft is None:
        return generate(**arguments), None
    if loop == "transformers":
        # This loop of transformers 5.24 needs a cache from which it can remove tokens.
        own_cache: dict[str, Any] = {"use_cache": True, "cache_implementation": None}
        return generate(**{**arguments, **own_cache}, assistant_model=draft, speculation_type="dflash"), None
    output = speculative_generate(target, draft, **options, **arguments)
    return output.sequences, output.statistics


def generate_batch(
    target: PreTrainedModel, draft: DFlashDraftModel | None, arguments: dict[str, Any], **options: Any
) -> TimedBatch:
    """
    Generate once and record the wall time.

    Args:
        target, draft, arguments, **options: see [`run_loop`].

    Returns:
        [`TimedBatch`]

    Raises:
        ValueError: a token of a prompt has no row in the target's embedding, or a text may become longer than its
            table of positions.
    """
    check_prompt_ids(target, arguments["input_ids"], arguments.get("tokenizer"))
    # The loop of transformers (5.24) verifies whole blocks, also past the greatest length of the text.
    block_size = draft.config.tokens_per_block if draft is not None and options.get("loop") == "transformers" else 1
    _check_room(target, arguments, block_size)
    (sequences, statistics), seconds = timed(target.device, lambda: run_loop(target, draft, arguments, **options))
    return TimedBatch(sequences, seconds, statistics)


def _check_room(target: PreTrainedModel, arguments: Mapping[str, Any], block_size: int) -> None:
    """Refuse texts for which a pass may read beyond the target's table of positions, and fail there."""
    mask, new = arguments.get("attention_mask"), arguments.get("max_new_tokens")
    longest = arguments["input_ids"].shape[1] if mask is None else int(mask.sum(1).max())
    room = room_for_new_tokens(target, longest, block_size)
    if new is not None and room is not None and new > room:
        advice = f"max_new_tokens={room} or less" if room > 0 else "a shorter prompt"
        raise ValueError(
            f"max_new_tokens={new} after a prompt of {longest} tokens, read in blocks of {block_size}, exceeds the "
            f"{learned_positions(target)} positions that {describe_target(target)} has learned. Pass {advice}."
        )


def generate_timed(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    draft: DFlashDraftModel | None = None,
    *,
    loop: str = LOOPS[0],
    **kwargs: Any,
) -> Generation:
    """
    Generate one response, and record its wall time and its acceptance.

    Args:
        target (`PreTrainedModel`): the target.
        inputs (`dict`): `input_ids` of shape `[1, length]` and `attention_mask`.
        draft ([`DFlashDraftModel`], *optional*): its draft; plain generation if `None`.
        loop (`str`, defaults to `"dflash_hf"`): the loop that takes the draft, see [`run_loop`].
        **kwargs: arguments of `generate`, which otherwise decodes one response without beams. Stop strings of the
            target's generation config need the `tokenizer`.

    Returns:
        [`Generation`]

    Raises:
        ValueError: see [`generate_batch`].
    """
    draft = None if draft is None else local_draft(draft)
    with PassRecorder(target, draft) as recorder:
        output = generate_batch(target, draft, {**ONE_RESPONSE, **inputs, **kwargs}, loop=loop)
    token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    if output.statistics is not None:
        return Generation(token_ids, output.seconds, output.statistics.committed[0], output.statistics.verified[0])
    return Generation(token_ids, output.seconds, recorder.committed(len(token_ids)))


class PassRecorder:
    """
    Count the forward passes of target and draft while the context is open.

    This works for every loop: the draft is called with the hidden states of the tokens that the pass before it
    committed, so that the lengths of these inputs say what each pass committed.

    Args:
        target (`PreTrainedModel`): the target.
        draft (`nn.Module`, *optional*): the draft.
        context_name (`str`, defaults to `"context_hidden_states"`): the draft's argument that holds the target's
            hidden states, of shape `[1, tokens, width]`.

    Attributes:
        num_target_passes (`int`): passes of the target, the prefill included.
        context_lengths (`list[int]`): tokens whose hidden states each call of the draft got.
    """

    def __init__(
        self, target: PreTrainedModel, draft: nn.Module | None, context_name: str = "context_hidden_states"
    ) -> None:
        self.target, self.draft, self.context_name = target, draft, context_name
        self.num_target_passes = 0
        self.context_lengths: list[int] = []
        self._handles: list[Any] = []

    def __enter__(self) -> PassRecorder:
        self._handles = [self.target.register_forward_hook(self._count_target_pass)]
        if self.draft is not None:
            self._handles.append(self.draft.register_forward_pre_hook(self._note_context, with_kwargs=True))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def committed(self, num_tokens: int) -> list[int]:
        """
        Count the tokens that each verify pass with a draft committed, for a batch of one sequence.

        Args:
            num_tokens (`int`): new tokens of the response.

        Returns:
            `list[int]`: see [`committed_by_pass`].
        """
        return committed_by_pass(self.context_lengths, self.num_target_passes, num_tokens)

    def _count_target_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count a pass of the target."""
        self.num_target_passes += 1

    def _note_context(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the number of tokens whose hidden states the draft gets."""
        self.context_lengths.append(kwargs[self.context_name].shape[1])


def committed_by_pass(context_lengths: list[int], num_target_passes: int, num_tokens: int) -> list[int]:
    """
    Count the tokens that each verify pass with a draft committed.

    Args:
        context_lengths (`list[int]`): for each call of the draft, the tokens whose target states it got: those of the
            prompt, then those that the pass before it committed.
        num_target_passes (`int`): passes of the target, the prefill included.
        num_tokens (`int`): new tokens of the response.

    Returns:
        `list[int]`: one count for each call of the draft. The last one does not count tokens past the end of the
        response.

    Example:

    ```python
    >>> committed_by_pass([7, 2, 4], num_target_passes=5, num_tokens=11)
    [2, 4, 3]

    ```
    """
    if not context_lengths:
        return []
    undrafted_passes = num_target_passes - len(context_lengths)  # the prefill, and a last token without a draft
    return [*context_lengths[1:], num_tokens - undrafted_passes - sum(context_lengths[1:])]


class GenerationProtocol:
    """
    Settings that a measurement fixes, so that all methods generate from the same distribution.

    Args:
        target (`PreTrainedModel`): the target. Its generation config names the tokens and the stop strings that end a
            response.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, which names the padding token.

    Attributes:
        end_token_ids (`list[int]`): the tokens that end a response.
        stop_strings (`list[str]`, *optional*): the strings that end a response.
        ignored (`str`, *optional*): a sentence about the entries of the generation config that are not used; `None` if
            there are none.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.target, self.tokenizer = target, text_tokenizer(tokenizer)
        given: Any = target.generation_config
        self.stop_strings: Any = None if given is None else given.stop_strings
        self._criterion = StopStringCriteria(self.tokenizer, self.stop_strings) if self.stop_strings else None
        self.ignored = _ignored_settings(given)
        end_token_ids = [] if given is None or given.eos_token_id is None else given.eos_token_id
        self.end_token_ids: list[int] = end_token_ids if isinstance(end_token_ids, list) else [end_token_ids]
        self.pad_token_id = padding_token_id(target, [self.tokenizer.pad_token_id, *self.end_token_ids])

    @contextmanager
    def override_generation_config(self) -> Iterator[None]:
        """Replace the target's generation config, inside the context, by one that keeps only what ends a response."""
        original = self.target.generation_config
        self.target.generation_config = GenerationConfig(
            eos_token_id=self.end_token_ids or None, pad_token_id=self.pad_token_id, stop_strings=self.stop_strings
        )
        try:
            yield
        finally:
            self.target.generation_config = original

    def arguments(self, prompts: Sequence[torch.Tensor], temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """
        Make the arguments of `generate` for a batch.

        Args:
            prompts (`Sequence[torch.LongTensor]`): token ids of each prompt, of shape `[length]`.
            temperature (`float`): 0 decodes greedily. Above 0, tokens are sampled from the whole distribution of the
                target, without top-k and top-p.
            max_new_tokens (`int`): greatest length of a response in tokens.

        Returns:
            `dict`: `input_ids` and `attention_mask`, padded on the left, and the settings.
        """

        def padded(values: list[torch.Tensor], padding: int) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding, padding_side="left")

        arguments: dict[str, Any] = {
            "input_ids": padded(list(prompts), self.pad_token_id),
            "attention_mask": padded([torch.ones_like(prompt) for prompt in prompts], 0),
            "max_new_tokens": max_new_tokens,
            "do_sample": temperature > 0,
        }
        if self.stop_strings:
            arguments["tokenizer"] = self.tokenizer
        if temperature > 0:
            arguments.update(temperature=temperature, top_k=0, top_p=1.0)
        return arguments

    def responses(self, sequences: torch.Tensor, num_prompt_tokens: int) -> list[list[int]]:
        """
        Take the responses out of the sequences that `generate` returned.

        Args:
            sequences (`torch.LongTensor` of shape `[batch, length]`): prompts and new tokens.
            num_prompt_tokens (`int`): length of the padded prompts.

        Returns:
            `list[list[int]]`: new tokens of each sequence up to and including the first that ends the response;
            padding follows behind it.
        """
        responses = []
        for sequence in sequences:
            tokens, is_end = sequence[num_prompt_tokens:].tolist(), self._ends(sequence, num_prompt_tokens)
            responses.append(tokens[: is_end.index(True) + 1] if any(is_end) else tokens)
        return responses

    def is_truncated(self, prompt: torch.Tensor, response: list[int]) -> bool:
        """
        Return whether a response was ended by its length alone.

        Args:
            prompt (`torch.LongTensor` of shape `[length]`): its prompt.
            response (`list[int]`): its tokens, at least one.

        Returns:
            `bool`
        """
        text = torch.cat([prompt, prompt.new_tensor(response)])
        return not self._ends(text, len(text) - 1)[0]

    def _ends(self, sequence: torch.Tensor, start: int) -> list[bool]:
        """Return whether each token of a sequence from `start` on ends a response."""
        is_end = [token in self.end_token_ids for token in sequence[start:].tolist()]
        if self._criterion is None:
            return is_end
        is_stop = stop_string_ends(self._criterion, sequence, start)
        return [end or stop for end, stop in zip(is_end, is_stop, strict=True)]


def _ignored_settings(config: GenerationConfig | None) -> str | None:
    """Say which entries of a generation config a measurement does not use."""
    entries = {} if config is None else config.to_diff_dict()
    ignored = [f"{name}={value!r}" for name, value in entries.items() if name not in MEASURED_SETTINGS]
    if not ignored:
        return None
    return (
        f"Not used of the target's generation config: {', '.join(ignored)}. Both methods decode from the distribution "
        "that the temperature alone gives."
    )
