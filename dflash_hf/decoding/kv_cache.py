"""The key-value cache of a batch with sequences of different lengths, and the check that a target can use it."""

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
GROWTH_COLUMNS = 256  # columns by which a buffer grows at least


class Placement:
    """
    The columns at which the next forward pass writes its keys and values. All layers of a cache share it.

    A column is a position of the padded text; column 0 is the first column of the prompt batch.
    """

    def __init__(self) -> None:
        self.start, self.end, self.is_open = 0, 0, False
        self.columns: torch.Tensor | None = None
        self._by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def set(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """
        Set the columns of the next pass.

        Args:
            start (`int`):
                The smallest column that any sequence writes.
            end (`int`):
                Number of columns that the pass may see. The attention mask says which of them each query sees.
            columns (`torch.LongTensor` of shape `[sequences, written]`, *optional*):
                The column of each new key. Keys that no query may see go to column `end`. By default every sequence
                writes the columns `start … end - 1`.
        """
        self.start, self.end, self.columns, self.is_open = start, end, columns, True
        self._by_device = {}

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of sequences and columns to write, on the device of a layer."""
        if device not in self._by_device and self.columns is not None:
            sequences = torch.arange(len(self.columns), device=device)[:, None]
            self._by_device[device] = (sequences, self.columns.to(device))
        return self._by_device[device]


class RaggedLayer(CacheLayerMixin):
    """
    The keys and values of one attention layer, in buffers that are written in place.

    The next pass overwrites the keys and values of rejected tokens, so they are never moved or cropped. A sliding
    layer returns only the columns that some sequence can still see, and drops the others when its buffer grows.

    Args:
        placement (`Placement`): the placement of the cache.
        window (`int`, *optional*): the window of a sliding layer, in tokens.
    """

    is_compileable = False

    def __init__(self, placement: Placement, window: int | None = None) -> None:
        super().__init__()
        self.placement, self.window = placement, window
        self.keys: Any = None
        self.values: Any = None
        self.origin = 0  # the column of the first stored key
        self.is_sliding = window is not None

    @property
    def first(self) -> int:
        """`int`: the first column that the next pass can see."""
        return 0 if self.window is None else max(0, self.placement.start - self.window + 1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the first `update` allocates the buffers."""

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make the buffers large enough for the next pass."""
        needed = self.placement.end + 1  # one more column, for keys that no query may see
        if self.keys is not None and needed - self.origin <= self.keys.shape[2]:
            return
        first = self.first
        size = needed - first + max(GROWTH_COLUMNS, (needed - first) // 4)
        buffers = []
        for stored, new in ((self.keys, keys), (self.values, values)):
            # A masked column enters the attention output with weight 0, and 0 · NaN is NaN, so the buffer holds zeros.
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
        Write the new keys and values and return all that the pass may see.

        Args:
            key_states, value_states (`torch.Tensor` of shape `[sequences, heads, written, head_dim]`): those of the
                pass.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: keys and values of shape `[sequences, heads, end - first, head_dim]`.

        Raises:
            RuntimeError: The cache belongs to a finished call, and plain `generate` tries to use it.
        """
        if not self.placement.is_open:
            raise RuntimeError(
                "The cache comes from decoding with a draft, and only decoding with a draft can continue from it. "
                "Pass custom_generate=dflash_decoding and the draft again, or leave the cache out."
            )
        self._reserve(key_states, value_states)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if self.placement.columns is None:
                start = self.placement.start - self.origin
                buffer[:, :, start : start + new.shape[2]] = new
            else:
                sequences, columns = self.placement.index(new.device)
                buffer[sequences, :, columns - self.origin] = new.transpose(1, 2)
        visible = slice(self.first - self.origin, self.placement.end - self.origin)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy columns to other columns. The arguments are those of [`RaggedCache.move`]."""
        if self.keys is not None:
            sequences = torch.arange(len(source), device=self.keys.device)[:, None]
            source, target = (columns.to(self.keys.device) - self.origin for columns in (source, target))
            for buffer in (self.keys, self.values):
                buffer[sequences, :, target] = buffer[sequences, :, source]

    def get_seq_length(self) -> int:
        """Return the number of columns before the first one that the next pass writes."""
        return self.placement.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that `update` returns, and the first of them."""
        return self.placement.end - self.first, self.first

    def get_max_length(self) -> int:
        """Return -1, because a layer grows without a limit."""
        return -1

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at these indices."""
        if self.keys is not None:
            self.keys = self.keys[indices.to(self.keys.device)]
            self.values = self.values[indices.to(self.values.device)]


class RaggedHybridLayer(LinearAttentionLayer, RaggedLayer):  # type: ignore[override]  # `is_croppable`
    """
    A layer that has both attention and a recurrent state.

    As in the hybrid layers of transformers 5.24, `is_croppable` is a property of one base class and a plain attribute
    of the other.
    """

    is_compileable = False

    def __init__(self, placement: Placement, window: int | None = None, number_of_states: int = 1) -> None:
        RaggedLayer.__init__(self, placement, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def get_max_length(self) -> int:
        """Return -1, because a layer grows without a limit."""
        return -1


class RaggedCache(Cache):
    """
    The cache of a target or a draft for sequences of different lengths.

    Call [`place`][RaggedCache.place] before every forward pass. The state of a recurrent layer cannot be reset to an
    earlier token, so it is saved before a pass and restored after it.

    Args:
        config (`PreTrainedConfig`): the configuration of the model.

    Raises:
        ValueError: The model has layers of an unknown type, whose cache may not support rejected tokens.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.placement = Placement()
        layer_types, layer_kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        known = (*ATTENTION_TYPES, *RECURRENT_TYPES, *BOTH_TYPES, "dummy")
        unknown = sorted({layer_type for layer_type in layer_types if layer_type not in known})
        if unknown:
            raise ValueError(
                f"The model {config.name_or_path!r} has layers of type {', '.join(unknown)}, and decoding with a "
                "draft needs layers whose cache can be reset when drafted tokens are rejected: "
                f"{', '.join(known[:-1])}. Use plain generate, or the loop of transformers "
                "(assistant_model=draft, speculation_type='dflash')."
            )
        layers: list[Any] = []
        for layer_type, values in zip(layer_types, layer_kwargs, strict=True):
            window, number_of_states = values.get("sliding_window"), values.get("number_of_states", 1)
            if layer_type in ATTENTION_TYPES:
                layers.append(RaggedLayer(self.placement, window))
            elif layer_type in RECURRENT_TYPES:
                layers.append(LinearAttentionLayer(number_of_states=number_of_states))
            elif layer_type in BOTH_TYPES:
                layers.append(RaggedHybridLayer(self.placement, window, number_of_states))
            else:
                layers.append(DummyLayer())
        super().__init__(layers=layers)
        self.recurrent_layer_types = sorted({t for t in layer_types if t in (*RECURRENT_TYPES, *BOTH_TYPES)})
        self._saved: list[list[dict[int, torch.Tensor | None]]] | None = None
        self.continuation: Any = None  # what the decoding loop needs to continue from the end of a call

    @property
    def is_compileable(self) -> bool:
        """`bool`: False, because the shape of what a pass sees changes from one pass to the next."""
        return False

    @property
    def is_recurrent(self) -> bool:
        """`bool`: whether some layer has a recurrent state."""
        return bool(self.recurrent_layer_types)

    def place(self, start: int, end: int, columns: torch.Tensor | None = None) -> None:
        """Set the columns of the next pass. The arguments are those of [`Placement.set`]."""
        self.placement.set(start, end, columns)

    def close(self, length: int) -> None:
        """Refuse all writes until the next `place`. The first `length` columns hold text."""
        self.placement.set(length, length)
        self.placement.is_open = False

    def shows(self, start: int) -> bool:
        """Return whether the cache still holds all columns that a pass starting at this column can see."""
        return all(
            layer.origin <= max(0, start - layer.window + 1)
            for layer in self.layers
            if isinstance(layer, RaggedLayer) and layer.window is not None
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the first column that the next pass writes."""
        return self.placement.start

    def first_column(self, window: int | None) -> int:
        """Return the first column that a layer with this window returns in the next pass."""
        return 0 if window is None else max(0, self.placement.start - window + 1)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """
        Move the keys and values of the accepted path of a tree to the columns of its tokens in the text.

        Args:
            source, target (`torch.LongTensor` of shape `[sequences, n]`): the columns to copy from and to.
        """
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.move(source, target)

    def _recurrent_layers(self) -> list[Any]:
        """Return the layers that have a recurrent state."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]

    def save_states(self) -> None:
        """Copy the recurrent states, unless a copy exists, because models change them in place."""
        if self._saved is None:
            self._saved = [
                [
                    {index: None if state is None else state.clone() for index, state in states.items()}
                    for states in (layer.conv_states, layer.recurrent_states)
                ]
                for layer in self._recurrent_layers()
            ]

    def restore_states(self) -> None:
        """Restore the saved states and keep the copy."""
        self._restore(slice(None))

    def _restore(self, sequences: torch.Tensor | slice) -> None:
        """Restore the saved states of some sequences."""
        for layer, (conv_states, recurrent_states) in zip(self._recurrent_layers(), self._saved or [], strict=True):
            for live, saved in ((layer.conv_states, conv_states), (layer.recurrent_states, recurrent_states)):
                for index, state in saved.items():
                    if state is not None:
                        live[index][sequences] = state[sequences]

    def accept_states(self, is_accepted: torch.Tensor | None = None) -> None:
        """
        Keep the current recurrent states, which are those of committed text, and forget the saved ones.

        Args:
            is_accepted (`torch.BoolTensor` of shape `[sequences]`, *optional*): the sequences that keep their current
                states; the states of the others are restored. By default all sequences keep them.
        """
        if is_accepted is not None and not is_accepted.all():
            self._restore(~is_accepted)
        self._saved = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at these indices, in this order."""
        for layer in self.layers:
            if isinstance(layer, RaggedLayer):
                layer.batch_select_indices(indices)
        for layer, saved in zip(self._recurrent_layers(), self._saved or self._nothing_saved(), strict=True):
            for states in (layer.conv_states, layer.recurrent_states, *saved):
                for index, state in states.items():
                    states[index] = None if state is None else state[indices.to(state.device)]

    def _nothing_saved(self) -> list[list[dict[int, torch.Tensor | None]]]:
        """Return an empty list of saved states for each recurrent layer."""
        return [[] for _ in self._recurrent_layers()]


# Numbers of tokens in the passes of the check: shorter and longer than the usual convolution, and a single token.
PROBE_PARTS = (5, 1, 2, 4)
# Allowed difference of the logits relative to their norm. Kernels differ by rounding alone, while the logits after a
# lost state differ by about their own norm.
ALLOWED_SHARE = {torch.float32: 0.01}
ALLOWED_SHARE_OF_SHORT_DTYPES = 0.1
_continues_exactly: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


@torch.no_grad()
def check_cache_continuation(target: PreTrainedModel) -> None:
    """
    Check that a target can read several tokens after those that its cache holds.

    A verify pass reads several tokens, and those that are rejected are read again differently. Some models use no
    cache or one of their own, take one token at a time, or start from an empty recurrent state whenever they receive
    more than one, so that their text would be wrong without an error. The check reads a few tokens at once, and again
    in parts with a rejected part in between, and compares the logits. It runs once for each target, and only for
    recurrent layers and for attention that is not that of transformers.

    Args:
        target (`PreTrainedModel`): the target in evaluation mode.

    Raises:
        ValueError: The logits differ, or the layers use a cache of their own kind.
    """
    if "cache" not in inspect.signature(target.forward).parameters:
        raise ValueError(
            f"The target {describe_target(target)} takes no cache, and verifying drafted tokens needs one. Use plain "
            "generate for this target."
        )
    cache = RaggedCache(target.config)
    has_usual_attention = target._supports_attention_backend and not getattr(target, "_is_stateful", False)
    if has_usual_attention and not cache.is_recurrent:
        return
    if target not in _continues_exactly:
        _continues_exactly[target] = _logits_in_parts_agree(target, cache)
    if not _continues_exactly[target]:
        kinds = f"layers of type {', '.join(cache.recurrent_layer_types)}" if cache.is_recurrent else "layers"
        raise ValueError(
            f"The target {describe_target(target)} has {kinds} that do not continue from a cache with several tokens: "
            "a text that was read in parts gave other logits than the same text read at once, and verifying drafted "
            "tokens needs equal ones. Use plain generate for this target."
        )


def _logits_in_parts_agree(target: PreTrainedModel, cache: RaggedCache) -> bool:
    """Return whether a text that is read in parts gives the logits of the same text read at once."""
    length = sum(PROBE_PARTS)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, 1 + length, device=target.device)[None] % vocabulary
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters

    def logits_of(cache: RaggedCache, tokens: torch.Tensor, start: int) -> torch.Tensor:
        end = start + tokens.shape[1]
        cache.place(start, end)
        inputs: dict[str, Any] = {"input_ids": tokens, "cache": cache, "use_cache": True}
        if takes_positions:
            inputs["position_ids"] = torch.arange(start, end, device=tokens.device)[None]
        return target(**inputs).logits.float()

    try:
        expected = logits_of(RaggedCache(target.config), tokens, 0)
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
    except torch.OutOfMemoryError:
        raise
    # the model uses a cache of its own kind, or reads one token at a time
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    allowed = ALLOWED_SHARE.get(target.dtype, ALLOWED_SHARE_OF_SHORT_DTYPES)
    difference = (torch.cat(parts, dim=1) - expected).norm(dim=-1)
    return bool((difference <= allowed * expected.norm(dim=-1)).all())
