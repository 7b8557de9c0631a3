"""Continuous batching: a batch of fixed size in which a finished sequence makes room for the next prompt."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ..decoding.kv_cache import ATTENTION_TYPES
from ..decoding.masks import target_masks
from .sampling import AnswerRules, Draws, Prompt, draw

GROWTH_COLUMNS = 256


class SlotPlan:
    """
    What the next forward pass writes; shared by all layers of a cache.

    Args:
        first (`int`): the first slot it writes.
        count (`int`): slots that it writes.
        end (`int`): columns `0 … end - 1` are what it may look at.
        columns (`torch.LongTensor` of shape `[count]`, *optional*): the column that each slot writes, one a slot.
            `None`: whole texts from column 0 on.
    """

    def __init__(self) -> None:
        self.first, self.count, self.end = 0, 0, 0
        self.columns: torch.Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """
    Keys and values of one attention layer, written in place: nothing is copied when texts grow, come or go.

    A text stands in its slot from column 0 on, so that columns are positions and no padding is ever read.

    Args:
        plan (`SlotPlan`): of the cache.
        num_slots (`int`): texts that there is room for.
    """

    is_compileable = False
    is_sliding = False  # a window is a matter of the mask alone

    def __init__(self, plan: SlotPlan, num_slots: int) -> None:
        super().__init__()
        self.plan, self.num_slots = plan, num_slots
        self.keys: Any = None
        self.values: Any = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first `update` allocates."""

    def _reserve(self, stored: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if stored is not None and self.plan.end <= stored.shape[2]:
            return stored
        size = (self.plan.end // GROWTH_COLUMNS + 1) * GROWTH_COLUMNS
        # zeros: a masked column takes part in the products with weight 0, and 0 · NaN would be NaN
        buffer = new.new_zeros(self.num_slots, new.shape[1], size, new.shape[3])
        if stored is not None:
            buffer[:, :, : stored.shape[2]] = stored
        return buffer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the new keys and values and return all that the pass may look at.

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
        rows, columns = torch.arange(plan.count, device=key_states.device), plan.columns.to(key_states.device)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer[rows, :, columns] = new[:, :, 0]
        return self.keys[: plan.count, :, : plan.end], self.values[: plan.count, :, : plan.end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the text of one slot to another."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[target, :, :length] = buffer[source, :, :length]

    def get_seq_length(self) -> int:
        """Columns before the ones that the next pass writes, if it writes the same ones in all slots."""
        return 0 if self.plan.columns is None else self.plan.end - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and offset of the columns that `update` returns."""
        return self.plan.end, 0

    def get_max_length(self) -> int:
        """-1: a layer grows as it must."""
        return -1


class SlotCache(Cache):
    """
    Cache of a target that answers many prompts, of which the finished ones make room for others.

    Slots in use are the first ones. Call [`place_texts`][SlotCache.place_texts] or
    [`place_tokens`][SlotCache.place_tokens] before every forward pass.

    Args:
        config (`PreTrainedConfig`): of the model.
        num_slots (`int`): texts that there is room for.

    Raises:
        ValueError: the model has layers that are no attention over all columns or a window; they are named.
    """

    def __init__(self, config: PreTrainedConfig, num_slots: int) -> None:
        self.plan = SlotPlan()
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        unknown = sorted(set(layer_types) - set(ATTENTION_TYPES))
        if unknown:
            raise ValueError(
                f"The model {config.name_or_path!r} has layers of type {', '.join(unknown)}, but only "
                f"{' and '.join(ATTENTION_TYPES)} can have slots that are refilled. Use `generate`."
            )
        super().__init__(layers=[SlotLayer(self.plan, num_slots) for _ in layer_types])

    @property
    def is_compileable(self) -> bool:
        """False: what a pass sees changes from one to the next."""
        return False

    def place_texts(self, first: int, count: int, length: int) -> None:
        """The next pass reads whole texts of up to `length` tokens into the slots from `first` on."""
        self.plan.first, self.plan.count, self.plan.end, self.plan.columns = first, count, length, None

    def place_tokens(self, columns: torch.Tensor, end: int) -> None:
        """The next pass reads one token of each slot in use, at these columns (`[slots in use]`, all below `end`)."""
        self.plan.first, self.plan.count, self.plan.end, self.plan.columns = 0, len(columns), end, columns

    def first_column(self, window: int | None) -> int:
        """First column that a layer of this window shows: all of them show all."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the text of one slot to another."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.move(source, target, length)


REFILL_SHARE = 16  # slots are refilled when this part of them is free: a pass over a few prompts costs less than each
PREFILL_SHARE = 8  # prompts read in one pass; few, so that prompts of one pass are about equally long


def why_not_slots(target: PreTrainedModel, rules: AnswerRules) -> str | None:
    """
    Say why slots cannot be refilled for a target.

    Returns:
        `str`, *optional*: the reason, or `None` if they can.
    """
    config = target.config.get_text_config(decoder=True)
    layer_types = get_layer_types_and_kwargs(config)[0]
    others = sorted(set(layer_types) - set(ATTENTION_TYPES))
    if others:
        return f"it has layers of type {', '.join(others)}"
    if target.config.is_encoder_decoder or getattr(target, "_is_stateful", False):
        return "its cache is not one of attention over the text alone"
    if config is not target.config:
        return "it reads more than text"
    if hasattr(config, "attention_types"):  # GPT-Neo: a query is taken to stand at the last column
        return "its layers make masks of their own"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention {config._attn_implementation!r} takes no masks of rows of different lengths"
    if "position_ids" not in inspect.signature(target.forward).parameters or getattr(config, "alibi", False):
        return "it takes no positions"
    if rules.tells_rows_apart:
        return "a logits processor of its generation config keeps a state from token to token"
    return None


class _Slot:
    """An answer under way."""

    def __init__(self, prompt: Prompt, of_text: LogitsProcessorList) -> None:
        self.prompt, self.of_text = prompt, of_text
        self.draws = Draws(prompt.seed)
        self.answer: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt.ids) + len(self.answer)


class SlotDecoder:
    """
    Decode prompts in slots of one batch.

    Every pass reads one token of each slot in use. A prompt is read into its slot without its last token, which then
    goes through the common pass like any other: one pass, one set of logits a slot, whatever the slots are up to.

    Args:
        target (`PreTrainedModel`): one for which [`why_not_slots`] has no reason.
        rules ([`AnswerRules`]): how tokens are chosen.
        batch_size (`int`): slots.
    """

    def __init__(self, target: PreTrainedModel, rules: AnswerRules, batch_size: int) -> None:
        self.target, self.rules, self.batch_size = target, rules, batch_size
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(target.forward).parameters
        self.slots: list[_Slot] = []
        self._start()

    def _start(self) -> None:
        self.cache = SlotCache(self.target.config, self.batch_size)
        self.tokens = torch.zeros(self.batch_size, 0, dtype=torch.long, device=self.target.device)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return not self.slots

    @torch.no_grad()
    def advance(self, waiting: deque[Prompt]) -> list[tuple[Prompt, list[int]]]:
        """
        Take prompts into free slots if it is time to, and decode one token of each slot in use.

        Args:
            waiting (`deque[Prompt]`): prompts are taken from its left; neighbours should be about equally long.

        Returns:
            `list[tuple[Prompt, list[int]]]`: the answers that ended, with the token that ended them.
        """
        try:
            free = self.batch_size - len(self.slots)
            if free >= max(1, self.batch_size // REFILL_SHARE) or not self.slots:
                self._take(waiting, free)
            return self._decode() if self.slots else []
        except torch.OutOfMemoryError:
            if self.batch_size == 1:
                raise
            self._halve(waiting)
            return []

    def _halve(self, waiting: deque[Prompt]) -> None:
        """Begin anew with half the slots; answers under way are repeated, and come out the same."""
        waiting.extendleft(slot.prompt for slot in reversed(self.slots))
        self.slots, self.batch_size = [], self.batch_size // 2
        self._start()

    def _take(self, waiting: deque[Prompt], count: int) -> None:
        group_size = max(1, self.batch_size // PREFILL_SHARE)
        count = min(count, len(waiting))
        while count:
            first = len(self.slots)
            for _ in range(min(count, group_size)):
                prompt = waiting.popleft()
                self.slots.append(_Slot(prompt, self.rules.of_text(prompt)))
                count -= 1
            self._read(first)

    def _read(self, first: int) -> None:
        """Read the prompts of the slots from `first` on, each without its last token."""
        prompts = [slot.prompt.ids for slot in self.slots[first:]]
        longest = max(map(len, prompts))
        needed = max(slot.length + slot.prompt.max_new_tokens for slot in self.slots[first:])
        if needed > self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, needed - self.tokens.shape[1]))
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=self.tokens.device)
        self.tokens[first : len(self.slots), :longest] = padded
        if longest == 1:
            return
        # No row can see what stands after its end, so that padding on the right needs no mask.
        inputs = padded[:, :-1]
        self.cache.place_texts(first, *inputs.shape)
        positions = torch.arange(longest - 1, device=inputs.device).expand_as(inputs)
        self._run(inputs, positions, None)

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        options = {"logits_to_keep": 1} if self.takes_logits_to_keep else {}
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
        count, device = len(self.slots), self.tokens.device
        lengths = [slot.length for slot in self.slots]
        columns = torch.tensor(lengths, device=device)[:, None] - 1
        self.cache.place_tokens(columns[:, 0], max(lengths))
        mask = target_masks(self.target, self.cache, columns, [0] * count, max(lengths), None)
        scores = self._run(self.tokens[:count].gather(1, columns), columns, mask).to(device).float()
        for row, slot in enumerate(self.slots if self.rules.num_of_text else ()):
            text = self.tokens[row : row + 1, : lengths[row]]
            scores[row : row + 1] = slot.of_text(text, scores[row : row + 1])  # type: ignore[arg-type]  # tensors they are
        scores = self.rules.of_scores(self.tokens[:count, :1], scores)  # type: ignore[arg-type]  # likewise
        if self.rules.do_sample:
            chosen = draw(scores, [slot.draws.next() for slot in self.slots])
        else:
            chosen = scores.argmax(dim=-1)
        self.tokens[:count].scatter_(1, columns + 1, chosen[:, None])
        for slot, token in zip(self.slots, chosen.tolist(), strict=True):
            slot.answer.append(token)
        return self._pop_finished()

    def _pop_finished(self) -> list[tuple[Prompt, list[int]]]:
        """Take the finished answers out; the last slots in use move into their places."""
        finished = []
        for index in reversed(range(len(self.slots))):
            slot = self.slots[index]
            if slot.answer[-1] in self.rules.end_ids or len(slot.answer) == slot.prompt.max_new_tokens:
                finished.append((slot.prompt, slot.answer))
                last = self.slots.pop()
                if last is not slot:
                    self.slots[index] = last
                    self.cache.move(len(self.slots), index, last.length)
                    self.tokens[index, : last.length] = self.tokens[len(self.slots), : last.length]
        return finished
