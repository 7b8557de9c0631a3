"""The key-value cache of a batch with sequences of different lengths, and whether a call can go on from it."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from ..model.configuration_dflash import describe_target

ATTENTION_TYPES = ("full_attention", "sliding_attention")
RECURRENT_TYPES = ("linear_attention", "conv")
BOTH_TYPES = ("hybrid", "hybrid_sliding")
GROWTH_COLUMNS = 256


class Placement:
    """
    Where the next forward pass puts its keys and values; shared by all layers of a cache.

    Columns are positions in the padded text: column 0 is the first column of the prompt batch.

    Args:
        start (`int`): the smallest column that any row writes.
        end (`int`): columns `0 … end - 1` are what the pass may look at; the mask says which of them.
        columns (`torch.LongTensor` of shape `[rows, written]`, *optional*): the column of each new key; column `end`
            is for keys that nobody may see. `None`: columns `start … end - 1` in every row.
    """

    def __init__(self) -> None:
        self.start, self.end, self.is_open = 0, 0, False
        self.columns: torch.Tensor | None = None
        self._by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def set(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """Plan the next pass."""
        self.start, self.end, self.columns, self.is_open = start, end, columns, True
        self._by_device = {}

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns to write, for indexing on the device of a layer."""
        if device not in self._by_device and self.columns is not None:
            rows = torch.arange(len(self.columns), device=device)[:, None]
            self._by_device[device] = (rows, self.columns.to(device))
        return self._by_device[device]


class RowLayer(CacheLayerMixin):
    """
    Keys and values of one attention layer, in buffers that are written in place.

    Rejected tokens are simply overwritten by the next pass; nothing is ever shifted or cropped. A sliding layer shows,
    and keeps when it has to grow, only the columns that some row can still see.

    Args:
        placement (`Placement`): of the cache.
        window (`int`, *optional*): of a sliding layer, in tokens.
    """

    is_compileable = False

    def __init__(self, placement: Placement, window: int | None = None) -> None:
        super().__init__()
        self.placement, self.window = placement, window
        self.keys: Any = None
        self.values: Any = None
        self.origin = 0  # the column that the first stored one is
        self.is_sliding = window is not None

    @property
    def first(self) -> int:
        """First column that the next pass can see."""
        return 0 if self.window is None else max(0, self.placement.start - self.window + 1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first `update` allocates."""

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        needed = self.placement.end + 1  # one more, for keys that nobody may see
        if self.keys is not None and needed - self.origin <= self.keys.shape[2]:
            return
        first = self.first
        size = needed - first + max(GROWTH_COLUMNS, (needed - first) // 4)
        buffers = []
        for stored, new in ((self.keys, keys), (self.values, values)):
            # zeros: a masked column takes part in the products with weight 0, and 0 · NaN would be NaN
            buffer = new.new_zeros(new.shape[0], new.shape[1], size, new.shape[3])
            if stored is not None:
                kept = stored[:, :, first - self.origin :]
                buffer[:, :, : kept.shape[2]] = kept
            buffers.append(buffer)
        self.keys, self.values = buffers
        self.origin, self.is_initialized = first, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the new keys and values and return all that the pass may look at.

        Args:
            key_states, value_states (`torch.Tensor` of shape `[rows, heads, written, head_dim]`): of the pass.

        Returns:
            two tensors of shape `[rows, heads, end - first, head_dim]`.
        """
        if not self.placement.is_open:
            raise RuntimeError(
                "This cache comes from decoding with a draft, and only that can go on with it. Pass "
                "custom_generate=dflash_decoding and the draft again, or leave the cache out."
            )
        self._reserve(key_states, value_states)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if self.placement.columns is None:
                start = self.placement.start - self.origin
                buffer[:, :, start : start + new.shape[2]] = new
            else:
                rows, columns = self.placement.index(new.device)
                buffer[rows, :, columns - self.origin] = new.transpose(1, 2)
        visible = slice(self.first - self.origin, self.placement.end - self.origin)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy columns to other columns; the arguments are those of [`RowCache.move`]."""
        if self.keys is not None:
            rows = torch.arange(len(source), device=self.keys.device)[:, None]
            source, target = (columns.to(self.keys.device) - self.origin for columns in (source, target))
            for buffer in (self.keys, self.values):
                buffer[rows, :, target] = buffer[rows, :, source]

    def get_seq_length(self) -> int:
        """Columns before the ones that the next pass writes, if all rows write the same ones."""
        return self.placement.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and offset of the columns that `update` returns."""
        return self.placement.end - self.first, self.first

    def get_max_length(self) -> int:
        """-1: a layer grows as it must."""
        return -1

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows only."""
        if self.keys is not None:
            self.keys, self.values = self.keys[rows.to(self.keys.device)], self.values[rows.to(self.values.device)]


class RowHybridLayer(LinearAttentionLayer, RowLayer):  # type: ignore[override]  # `is_croppable`
    """
    A layer that has attention and a recurrent state at once.

    As in transformers' own such layers, `is_croppable` is a property of one base and a plain attribute of the other.
    """

    is_compileable = False

    def __init__(self, placement: Placement, window: int | None = None, number_of_states: int = 1) -> None:
        RowLayer.__init__(self, placement, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def get_max_length(self) -> int:
        """-1: a layer grows as it must."""
        return -1


class RowCache(Cache):
    """
    Cache of a target or a draft for rows that commit different numbers of tokens.

    Call [`place`][RowCache.place] before every forward pass. Recurrent states cannot be taken back token by token, so
    they are saved before a pass and restored after it.

    Args:
        config (`PreTrainedConfig`): of the model.

    Raises:
        ValueError: the model has layers of a type that cannot be taken back; they are named.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.placement = Placement()
        layer_types, layer_kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        known = (*ATTENTION_TYPES, *RECURRENT_TYPES, *BOTH_TYPES, "dummy")
        unknown = sorted({layer_type for layer_type in layer_types if layer_type not in known})
        if unknown:
            raise ValueError(
                f"The model {config.name_or_path!r} has layers of type {', '.join(unknown)}, whose cache cannot be "
                f"taken back when drafted tokens are rejected. Known types: {', '.join(known[:-1])}. Use plain "
                "`generate`, or transformers' own loop (assistant_model=draft, speculation_type='dflash')."
            )
        layers: list[Any] = []
        for layer_type, values in zip(layer_types, layer_kwargs, strict=True):
            window, number_of_states = values.get("sliding_window"), values.get("number_of_states", 1)
            if layer_type in ATTENTION_TYPES:
                layers.append(RowLayer(self.placement, window))
            elif layer_type in RECURRENT_TYPES:
                layers.append(LinearAttentionLayer(number_of_states=number_of_states))
            elif layer_type in BOTH_TYPES:
                layers.append(RowHybridLayer(self.placement, window, number_of_states))
            else:
                layers.append(DummyLayer())
        super().__init__(layers=layers)
        self.recurrent_layer_types = sorted({t for t in layer_types if t in (*RECURRENT_TYPES, *BOTH_TYPES)})
        self._saved: list[list[dict[int, torch.Tensor | None]]] | None = None
        self.continuation: Any = None  # what the decoding loop needs to go on from here

    @property
    def is_compileable(self) -> bool:
        """False: what a pass sees changes from one to the next."""
        return False

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer has a state that cannot be taken back token by token."""
        return bool(self.recurrent_layer_types)

    def place(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """Plan the next pass; the arguments are those of [`Placement`]."""
        self.placement.set(start, end, columns)

    def close(self, length: int) -> None:
        """Nothing but a new `place` may write from here on; so many columns hold text."""
        self.placement.set(length, length)
        self.placement.is_open = False

    def shows(self, start: int) -> bool:
        """Whether a pass that starts at this column finds all earlier columns that it can see."""
        return all(
            layer.origin <= max(0, start - layer.window + 1)
            for layer in self.layers
            if isinstance(layer, RowLayer) and layer.window is not None
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The first column that the next pass writes."""
        return self.placement.start

    def first_column(self, window: int | None) -> int:
        """First column that a layer of this window shows in the next pass."""
        return 0 if window is None else max(0, self.placement.start - window + 1)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """
        Bring the tokens of an accepted path of a tree to where the text has them.

        Args:
            source, target (`torch.LongTensor` of shape `[rows, n]`): columns to copy from, and to.
        """
        for layer in self.layers:
            if isinstance(layer, RowLayer):
                layer.move(source, target)

    def _recurrent_layers(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def save_states(self) -> None:
        """Keep a copy of the recurrent states; models change them in place."""
        if self._saved is None:
            self._saved = [
                [
                    {index: None if state is None else state.clone() for index, state in states.items()}
                    for states in (layer.conv_states, layer.recurrent_states)
                ]
                for layer in self._recurrent_layers()
            ]

    def restore_states(self) -> None:
        """Go back to the saved states, which stay saved."""
        self._restore(slice(None))

    def _restore(self, rows: torch.Tensor | slice) -> None:
        for layer, (conv_states, recurrent_states) in zip(self._recurrent_layers(), self._saved or [], strict=True):
            for live, saved in ((layer.conv_states, conv_states), (layer.recurrent_states, recurrent_states)):
                for index, state in saved.items():
                    if state is not None:
                        live[index][rows] = state[rows]

    def accept_states(self, rows: torch.Tensor | None = None) -> None:
        """
        The states are those of committed text now: forget the saved ones.

        Args:
            rows (`torch.BoolTensor` of shape `[rows]`, *optional*): only in these; the others go back.
        """
        if rows is not None and not rows.all():
            self._restore(~rows)
        self._saved = None

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        for layer in self.layers:
            if isinstance(layer, RowLayer):
                layer.select_rows(rows)
        for layer, saved in zip(self._recurrent_layers(), self._saved or self._no_states(), strict=True):
            for states in (layer.conv_states, layer.recurrent_states, *saved):
                for index, state in states.items():
                    states[index] = None if state is None else state[rows.to(state.device)]

    def _no_states(self) -> list[list[dict[int, torch.Tensor | None]]]:
        return [[] for _ in self._recurrent_layers()]


PROBE_PARTS = (5, 1, 2, 4)  # tokens of each pass; shorter and longer than the usual convolution, and a single token
# The logits of a state that was lost differ by about their own size, those of other kernels by rounding.
ALLOWED_SHARE = {torch.float32: 0.01}
ALLOWED_SHARE_OF_SHORT_DTYPES = 0.1
_goes_on_exactly: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def check_cache_continuation(target: PreTrainedModel) -> None:
    """
    Refuse a target whose recurrent layers cannot read several tokens from a saved state.

    A verify pass reads several tokens at once after those in the cache, and goes back when some are rejected. Some
    models start from nothing whenever they get more than one token, or keep their state where no cache reaches it;
    their text would be wrong without any error. So a few tokens are read at once and in parts, with a rejected part in
    between, and the logits are compared. Once for each target, and only if it has recurrent layers.

    Args:
        target (`PreTrainedModel`): in evaluation mode.

    Raises:
        ValueError: the logits differ, or the layers have a cache of their own kind; their types are named.
    """
    cache = RowCache(target.config)
    if not (cache.is_recurrent or getattr(target, "_is_stateful", False)):
        return
    if target not in _goes_on_exactly:
        _goes_on_exactly[target] = _logits_in_parts_agree(target, cache)
    if not _goes_on_exactly[target]:
        kinds = (
            f"layers of type {', '.join(cache.recurrent_layer_types)}" if cache.is_recurrent else "recurrent layers"
        )
        raise ValueError(
            f"The target {describe_target(target)} has {kinds} that do not go on from a cache with several tokens at "
            "once, which verifying drafted tokens needs: read in parts, a text gave other logits than read at once. "
            "Use plain generate for this target."
        )


def _logits_in_parts_agree(target: PreTrainedModel, cache: RowCache) -> bool:
    length = sum(PROBE_PARTS)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, 1 + length, device=target.device)[None] % vocabulary
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters

    def logits_of(cache: RowCache, tokens: torch.Tensor, start: int) -> torch.Tensor:
        end = start + tokens.shape[1]
        cache.place(start, end)
        inputs: dict[str, Any] = {"input_ids": tokens, "cache": cache, "use_cache": True}
        if takes_positions:
            inputs["position_ids"] = torch.arange(start, end, device=tokens.device)[None]
        return target(**inputs).logits.float()

    try:
        expected = logits_of(RowCache(target.config), tokens, 0)
        parts, start = [], 0
        for count in PROBE_PARTS:
            part = tokens[:, start : start + count]
            if start:
                cache.save_states()
                logits_of(cache, (part + vocabulary // 2) % vocabulary, start)  # rejected
                cache.restore_states()
            parts.append(logits_of(cache, part, start))
            cache.accept_states()
            start += count
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # the model has a cache of its own kind
        return False
    allowed = ALLOWED_SHARE.get(target.dtype, ALLOWED_SHARE_OF_SHORT_DTYPES)
    difference = (torch.cat(parts, dim=1) - expected).norm(dim=-1)
    return bool((difference <= allowed * expected.norm(dim=-1)).all())
