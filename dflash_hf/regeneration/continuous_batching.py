"""Continuous batching: as soon as a completion of the batch ends, the next prompt takes its place."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ..decoding.gqa_attention import MASKED_ATTENTION
from ..decoding.kv_cache import ATTENTION_TYPES
from ..decoding.masks import target_masks
from ..decoding.stopping_criteria import NO_TOKEN
from ..target.rotary import exclusive_angles
from .sampling import Prompt, RandomNumbers, TokenSelection, sample_tokens

GROWTH_COLUMNS = 256
ADMISSION_SHARE = 16  # prompts are admitted when this part of the batch is free; fewer and larger passes cost less
PREFILL_SHARE = 8  # this part of the batch is prefilled in one pass; small, so that its prompts have similar lengths


class WritePlan:
    """
    The places of the cache that the next forward pass writes; shared by all layers.

    Attributes:
        first (`int`): the first batch index that the pass writes.
        count (`int`): the number of sequences that the pass writes.
        end (`int`): the pass attends to columns `0 … end - 1`.
        columns (`torch.LongTensor` of shape `[count]`, *optional*): the column that the pass writes for each sequence.
            None if the pass writes whole prompts from column 0 on.
    """

    def __init__(self) -> None:
        self.first, self.count, self.end = 0, 0, 0
        self.columns: torch.Tensor | None = None


class ContinuousBatchingLayer(CacheLayerMixin):
    """
    Keys and values of one attention layer, written in place, so that nothing is copied when sequences grow, start or
    end.

    Every sequence starts at column 0 of its batch index. Columns therefore equal positions, and no padding is read.

    Args:
        plan ([`WritePlan`]): of the cache.
        batch_size (`int`): the maximum number of sequences.
    """

    is_compileable = False
    is_sliding = False  # sliding windows are applied by the mask alone

    def __init__(self, plan: WritePlan, batch_size: int) -> None:
        super().__init__()
        self.plan, self.batch_size = plan, batch_size
        self.keys: Any = None
        self.values: Any = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the first `update` allocates the buffers."""

    def _reserve(self, stored: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if stored is not None and self.plan.end <= stored.shape[2]:
            return stored
        size = (self.plan.end // GROWTH_COLUMNS + 1) * GROWTH_COLUMNS
        # Zeros, because a masked column is multiplied by weight 0, and 0 · NaN would be NaN.
        buffer = new.new_zeros(self.batch_size, new.shape[1], size, new.shape[3])
        if stored is not None:
            buffer[:, :, : stored.shape[2]] = stored
        return buffer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the new keys and values, and return those that the pass attends to.

        Args:
            key_states, value_states (`torch.Tensor` of shape `[count, heads, written, head_dim]`): of the pass.

        Returns:
            two tensors of shape `[count, heads, end, head_dim]`.
        """
        plan = self.plan
        self.keys, self.values = self._reserve(self.keys, key_states), self._reserve(self.values, value_states)
        self.is_initialized = True
        if plan.columns is None:
            for buffer, new in ((self.keys, key_states), (self.values, value_states)):
                buffer[plan.first : plan.first + plan.count, :, : plan.end] = new
            return key_states, value_states
        indices, columns = torch.arange(plan.count, device=key_states.device), plan.columns.to(key_states.device)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[indices, :, columns] = new[:, :, 0]
        return self.keys[: plan.count, :, : plan.end], self.values[: plan.count, :, : plan.end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of batch index `source` to batch index `target`."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[target, :, :length] = buffer[source, :, :length]

    def get_seq_length(self) -> int:
        """Return the number of columns before the next pass, as if all sequences were of equal length."""
        return 0 if self.plan.columns is None else self.plan.end - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number and the offset of the columns that `update` returns."""
        return self.plan.end, 0

    def get_max_length(self) -> int:
        """Return -1, because a layer grows as needed."""
        return -1


class ContinuousBatchingCache(Cache):
    """
    Key-value cache of a batch whose sequences have different lengths, and start and end at different times.

    The sequences in progress have the first batch indices. Call [`plan_prompts`][ContinuousBatchingCache.plan_prompts]
    or [`plan_tokens`][ContinuousBatchingCache.plan_tokens] before every forward pass.

    Args:
        config (`PreTrainedConfig`): of the model.
        batch_size (`int`): the maximum number of sequences.

    Raises:
        ValueError: the model has layers other than full or sliding-window attention; the message names them.
    """

    def __init__(self, config: PreTrainedConfig, batch_size: int) -> None:
        self.plan = WritePlan()
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        unsupported = sorted(set(layer_types) - set(ATTENTION_TYPES))
        if unsupported:
            raise ValueError(
                f"The model {config.name_or_path!r} has layers of type {', '.join(unsupported)}, but continuous "
                f"batching supports only {' and '.join(ATTENTION_TYPES)}. Use `generate`."
            )
        super().__init__(layers=[ContinuousBatchingLayer(self.plan, batch_size) for _ in layer_types])

    @property
    def is_compileable(self) -> bool:
        """False, because the shapes change from pass to pass."""
        return False

    def plan_prompts(self, first: int, count: int, length: int) -> None:
        """Let the next pass write `length` columns of `count` new sequences, from batch index `first` on."""
        self.plan.first, self.plan.count, self.plan.end, self.plan.columns = first, count, length, None

    def plan_tokens(self, columns: torch.Tensor, end: int) -> None:
        """Let the next pass write one token of each sequence, at these columns (`[sequences]`, all below `end`)."""
        self.plan.first, self.plan.count, self.plan.end, self.plan.columns = 0, len(columns), end, columns

    def first_column(self, window: int | None) -> int:
        """Return 0, because every layer returns all columns, whatever its window."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of batch index `source` to batch index `target`."""
        for layer in self.layers:
            if isinstance(layer, ContinuousBatchingLayer):
                layer.move(source, target, length)


def continuous_batching_obstacle(target: PreTrainedModel, selection: TokenSelection) -> str | None:
    """
    Say why continuous batching is not possible for a target.

    Args:
        target (`PreTrainedModel`): any causal language model.
        selection ([`TokenSelection`]): of the run.

    Returns:
        `str`, *optional*: the reason, or None if it is possible.
    """
    config = target.config.get_text_config(decoder=True)
    layer_types = get_layer_types_and_kwargs(config)[0]
    unsupported = sorted(set(layer_types) - set(ATTENTION_TYPES))
    if unsupported:
        return f"it has layers of type {', '.join(unsupported)}"
    if target.config.is_encoder_decoder or getattr(target, "_is_stateful", False):
        return "its cache holds more than the keys and values of the text"
    if config is not target.config:
        return "it reads more than text"
    if hasattr(config, "attention_types"):  # GPT-Neo assumes that every query is at the last column
        return "its layers make masks of their own"
    if config._attn_implementation not in MASKED_ATTENTION:
        return f"its attention {config._attn_implementation!r} takes no masks for sequences of different lengths"
    if "position_ids" not in inspect.signature(target.forward).parameters or getattr(config, "alibi", False):
        return "it takes no positions"
    if selection.is_stateful:
        return "a logits processor of its generation config keeps a state from token to token"
    return None


class _Sequence:
    """A completion in progress."""

    def __init__(self, prompt: Prompt, prefix_processors: LogitsProcessorList) -> None:
        self.prompt, self.prefix_processors = prompt, prefix_processors
        self.numbers = RandomNumbers(prompt.seed)
        self.token_ids: list[int] = []

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and of the completion so far."""
        return len(self.prompt.ids) + len(self.token_ids)


class ContinuousBatcher:
    """
    Decode prompts by continuous batching.

    Every pass reads one token of each sequence in progress. The prefill of a new prompt leaves out its last token,
    which the next pass reads together with the tokens of all other sequences. One pass therefore gives the logits of
    all sequences, whether they have just started or not.

    Args:
        target (`PreTrainedModel`): [`continuous_batching_obstacle`] must be None for it.
        selection ([`TokenSelection`]): selects the tokens.
        batch_size (`int`): the maximum number of sequences in progress.
    """

    def __init__(self, target: PreTrainedModel, selection: TokenSelection, batch_size: int) -> None:
        self.target, self.selection, self.batch_size = target, selection, batch_size
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(target.forward).parameters
        self.exclusive_angles = exclusive_angles(target.config)
        self.sequences: list[_Sequence] = []  # by batch index
        self._start()

    def _start(self) -> None:
        self.cache = ContinuousBatchingCache(self.target.config, self.batch_size)
        self.tokens = torch.zeros(self.batch_size, 0, dtype=torch.long, device=self.target.device)

    @property
    def is_idle(self) -> bool:
        """Whether no completion is in progress."""
        return not self.sequences

    @torch.no_grad()
    def advance(self, waiting: deque[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """
        Admit prompts if enough of the batch is free, and decode one token of each sequence.

        Args:
            waiting (`deque[Prompt]`): prompts are taken from its left; neighbours should have similar lengths.

        Returns:
            `list[tuple[Prompt, list[int]]]`: the completions that ended, including their end tokens.
        """
        try:
            free = self.batch_size - len(self.sequences)
            if free >= max(1, self.batch_size // ADMISSION_SHARE) or not self.sequences:
                self._admit(waiting, free)
            return self._decode() if self.sequences else []
        except torch.OutOfMemoryError:
            if self.batch_size == 1:
                raise
            self._halve(waiting)
            return []

    def _halve(self, waiting: deque[Prompt]) -> None:
        """Restart with half the batch size; the completions in progress are repeated with the same result."""
        waiting.extendleft(sequence.prompt for sequence in reversed(self.sequences))
        self.sequences, self.batch_size = [], self.batch_size // 2
        self._start()

    def _admit(self, waiting: deque[Prompt], count: int) -> None:
        """Take up to `count` prompts, and prefill them in groups."""
        group_size = max(1, self.batch_size // PREFILL_SHARE)
        count = min(count, len(waiting))
        while count:
            first = len(self.sequences)
            for _ in range(min(count, group_size)):
                prompt = waiting.popleft()
                self.sequences.append(_Sequence(prompt, self.selection.prefix_processors(prompt)))
                count -= 1
            self._prefill(first)

    def _prefill(self, first: int) -> None:
        """Read the prompts of the sequences from batch index `first` on, each without its last token."""
        prompts = [sequence.prompt.ids for sequence in self.sequences[first:]]
        longest = max(map(len, prompts))
        self._reserve(max(sequence.length for sequence in self.sequences[first:]))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=self.tokens.device)
        self.tokens[first : len(self.sequences), :longest] = padded
        if longest == 1:
            return
        # Padding on the right needs no mask, because no token attends to later columns.
        inputs = padded[:, :-1]
        self.cache.plan_prompts(first, *inputs.shape)
        positions = torch.arange(longest - 1, device=inputs.device).expand_as(inputs)
        self._forward(inputs, positions, None)

    def _reserve(self, needed: int) -> None:
        """Make room for a number of columns; the buffer grows with the texts, not with `max_new_tokens`."""
        if needed > self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, needed + needed // 4 - self.tokens.shape[1]))

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        options = {"logits_to_keep": 1} if self.takes_logits_to_keep else {}
        with self.exclusive_angles:
            outputs: Any = self.target(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=mask,
                cache=self.cache,
                use_cache=True,
                return_dict=True,
                **options,
            )
        return outputs.logits[:, -1]

    def _decode(self) -> list[tuple[Prompt, list[int]]]:
        """Decode one token of each sequence, and return the completions that ended."""
        count, device = len(self.sequences), self.tokens.device
        lengths = [sequence.length for sequence in self.sequences]
        columns = torch.tensor(lengths, device=device)[:, None] - 1
        self._reserve(max(lengths) + 1)
        self.cache.plan_tokens(columns[:, 0], max(lengths))
        mask = target_masks(self.target, self.cache, columns, [0] * count, max(lengths), None)
        scores: Any = self._forward(self.tokens[:count].gather(1, columns), columns, mask).to(device).float()
        for index, sequence in enumerate(self.sequences if self.selection.num_prefix_processors else ()):
            prefix: Any = self.tokens[index : index + 1, : lengths[index]]
            scores[index : index + 1] = sequence.prefix_processors(prefix, scores[index : index + 1])
        any_token: Any = self.tokens[:count, :1]  # these processors do not read the tokens
        scores = self.selection.processors(any_token, scores)
        if self.selection.do_sample:
            chosen = sample_tokens(scores, [sequence.numbers.next() for sequence in self.sequences])
        else:
            chosen = scores.argmax(dim=-1)
        self.tokens[:count].scatter_(1, columns + 1, chosen[:, None])
        for sequence, token in zip(self.sequences, chosen.tolist(), strict=True):
            sequence.token_ids.append(token)
        return self._pop_finished(self._complete_stop_strings(columns + 1))

    def _complete_stop_strings(self, columns: torch.Tensor) -> list[bool]:
        """Return whether the last token of each sequence, in columns `[sequences, 1]`, completes a stop string."""
        criterion = self.selection.stop_strings
        if criterion is None:
            return [False] * len(columns)
        last = columns + torch.arange(1 - criterion.maximum_token_len, 1, device=columns.device)
        texts: Any = self.tokens[: len(columns)].gather(1, last.clamp(min=0)).masked_fill(last < 0, NO_TOKEN)
        ends: Any = criterion(texts, None)
        return [bool(end) for end in ends]

    def _pop_finished(self, is_stopped: list[bool]) -> list[tuple[Prompt, list[int]]]:
        """Remove the completions that ended, and move the last sequences to their batch indices."""
        finished = []
        for index in reversed(range(len(self.sequences))):
            sequence = self.sequences[index]
            is_at_end = is_stopped[index] or sequence.token_ids[-1] in self.selection.eos_token_ids
            if is_at_end or len(sequence.token_ids) == sequence.prompt.max_new_tokens:
                finished.append((sequence.prompt, sequence.token_ids))
                last = self.sequences.pop()
                if last is not sequence:
                    self.sequences[index] = last
                    self.cache.move(len(self.sequences), index, last.length)
                    self.tokens[index, : last.length] = self.tokens[len(self.sequences), : last.length]
        return finished
