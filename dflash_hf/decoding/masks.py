"""What the tokens of a pass may look at when rows have different lengths, or when they are a tree."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..model.configuration_dflash import DFlashConfig
from .kv_cache import BOTH_TYPES, RECURRENT_TYPES, RowCache
from .tree import DraftTree


class ColumnCache(Protocol):
    """A key-value cache whose layers show the columns from some column on."""

    def first_column(self, window: int | None) -> int:
        """First column that a layer of this window shows in the next pass."""


def draft_masks(
    config: DFlashConfig, cache: RowCache, block_columns: torch.Tensor, padding: torch.Tensor, end: int
) -> dict[str, torch.Tensor]:
    """
    What each slot of a block sees in the draft.

    Args:
        config ([`DFlashConfig`]): of the draft.
        cache ([`RowCache`]): of the draft, placed for the pass.
        block_columns (`torch.LongTensor` of shape `[rows, block_size]`): columns of the slots; slot 0 is the anchor.
        padding (`torch.LongTensor` of shape `[rows, 1]`): columns at the left that hold no text.
        end (`int`): columns that the pass may look at.

    Returns:
        `dict[str, torch.BoolTensor]`: by layer type, True = visible, of shape `[rows, 1, block_size or 1, columns
        shown]`; a sliding layer shows the last columns only.
    """
    masks: dict[str, torch.Tensor] = {}
    for index, layer_type in enumerate(config.layer_types or []):
        if layer_type not in masks:
            window = config.layer_window(index)
            columns = torch.arange(cache.first_column(window), end, device=block_columns.device)
            query, anchor = block_columns[..., None], block_columns[:, :1, None]
            is_context = columns < anchor
            if window is not None:
                is_context = is_context & (query - columns < window)
            last = query if config.in_block_causal(index) else block_columns[:, -1:, None]
            visible = (is_context | ((columns >= anchor) & (columns <= last))) & (columns >= padding[..., None])
            masks[layer_type] = visible[:, None]
    return masks


def target_masks(
    target: PreTrainedModel,
    cache: ColumnCache,
    columns: torch.Tensor,
    num_padding: list[int],
    end: int,
    tree: DraftTree | None,
) -> Any:
    """
    What the target may look at, in the form that transformers itself hands to models.

    One row needs no more than its padding. Rows of different lengths, and trees, need a mask of their own.

    Args:
        target (`PreTrainedModel`): with attention `sdpa` or `eager`, unless there is one row and no tree.
        cache ([`ColumnCache`]): of the target, placed for the pass.
        columns (`torch.LongTensor` of shape `[rows, n]`): columns that the pass writes.
        num_padding (`list[int]`): columns at the left of each row that hold no text.
        end (`int`): columns that the pass may look at.
        tree ([`DraftTree`], *optional*): its tokens are the ones in `columns`.

    Returns:
        `None` if plain causality says it all, or the padding `[1, end]`; else `[rows, 1, n, columns shown]`, bool
        (True = visible) or for eager attention added to the scores, alone or by layer type.
    """
    device = columns.device
    if len(num_padding) == 1 and tree is None:
        if not num_padding[0]:
            return None
        return (torch.arange(end, device=device) >= num_padding[0]).long()[None]
    config = target.config.get_text_config(decoder=True)
    padding = torch.tensor(num_padding, device=device)[:, None, None]

    def mask(window: int | None) -> torch.Tensor:
        keys, queries = torch.arange(cache.first_column(window), end, device=device), columns
        key_positions = keys
        if tree is None:
            visible = keys <= queries[..., None]
        else:
            nodes = keys - columns[:, :1]
            is_node = (nodes >= 0) & (nodes < tree.num_nodes)
            nodes_or_first, queries = nodes.clamp(0, tree.num_nodes - 1), columns[:, :1] + tree.depths
            of_tree = tree.ancestors.t()[nodes_or_first].transpose(1, 2)
            key_positions = torch.where(is_node, columns[:, :1] + tree.depths[nodes_or_first], keys)[:, None]
            visible = (nodes < 0)[:, None] | (is_node[:, None] & of_tree)
        visible = visible & (keys >= padding)
        if window is not None:
            visible = visible & (queries[..., None] - key_positions < window)
        visible = visible[:, None]
        if config._attn_implementation != "eager":
            return visible
        return torch.zeros_like(visible, dtype=target.dtype).masked_fill(~visible, torch.finfo(target.dtype).min)

    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask(window)
    masks: dict[str, torch.Tensor | None] = {}
    for layer_type in set(layer_types):
        if layer_type in (*RECURRENT_TYPES, *BOTH_TYPES):
            masks["conv" if layer_type == "conv" else "linear_attention"] = None  # generated text has no padding
        if layer_type in ("sliding_attention", "hybrid_sliding"):
            masks["sliding_attention"] = mask(window)
        elif layer_type in ("full_attention", "hybrid"):
            masks["full_attention"] = mask(None)
    return masks if any(values is not None for values in masks.values()) else None
