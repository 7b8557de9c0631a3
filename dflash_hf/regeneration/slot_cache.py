"""A key-value cache whose rows are slots: texts of different lengths, each of which may leave and be replaced."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ..decoding.kv_cache import ATTENTION_TYPES

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
