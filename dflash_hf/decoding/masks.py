"""Attention masks of draft and target for sequences of different lengths and for trees of tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..model.configuration_dflash import DFlashConfig
from .kv_cache import BOTH_TYPES, RECURRENT_TYPES, RaggedCache
from .tree import DraftTree


class ColumnCache(Protocol):
    """A key-value cache whose layers return all columns from a first one on."""

    def first_column(self, window: int | None) -> int:
        """Return the first column that a layer with this window returns in the next pass."""


def draft_masks(
    config: DFlashConfig, cache: RaggedCache, block_columns: torch.Tensor, padding: torch.Tensor, end: int
) -> dict[str, torch.Tensor]:
    """
    Build the attention masks of the draft for one block of each sequence.

    Args:
        config ([`DFlashConfig`]):
            The configuration of the draft.
        cache ([`RaggedCache`]):
            The cache of the draft, placed for the pass.
        block_columns (`torch.LongTensor` of shape `[sequences, block_size]`):
            Columns of the slots; slot 0 is the anchor.
        padding (`torch.LongTensor` of shape `[sequences, 1]`):
            Number of padding columns at the left.
        end (`int`):
            Number of columns that the pass may see.

    Returns:
        `dict[str, torch.BoolTensor]`: for each layer type a mask of shape `[sequences, 1, block_size or 1, columns]`,
        True where a column is visible. The columns of a sliding layer start at the first one that its cache returns.
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
    Build the attention mask of the target in the form that transformers hands to its models.

    A single sequence without a tree needs its padding mask alone. Sequences of different lengths and trees need a mask
    for each query.

    Args:
        target (`PreTrainedModel`):
            The target. Its attention is `sdpa` or `eager`, unless there is one sequence and no tree.
        cache ([`ColumnCache`]):
            The cache of the target, placed for the pass.
        columns (`torch.LongTensor` of shape `[sequences, n]`):
            Columns that the pass writes.
        num_padding (`list[int]`):
            Number of padding columns at the left of each sequence.
        end (`int`):
            Number of columns that the pass may see.
        tree ([`DraftTree`], *optional*):
            The tree whose tokens are the ones in `columns`.

    Returns:
        `None` if the causal mask of the model is enough; the padding mask `[1, end]` for one padded sequence;
        otherwise a mask `[sequences, 1, n, columns]`, alone or by layer type. It is boolean (True = visible), except
        that eager attention gets values to add to its scores.
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
            masks["conv" if layer_type == "conv" else "linear_attention"] = None  # generated tokens are never padding
        # In transformers 5.24 Zaya looks for the mask under the type of the layer, and Falcon-H1 under its attention.
        if layer_type in ("sliding_attention", "hybrid_sliding"):
            masks["sliding_attention"] = masks[layer_type] = mask(window)
        elif layer_type in ("full_attention", "hybrid"):
            masks["full_attention"] = masks[layer_type] = mask(None)
    return masks if any(values is not None for values in masks.values()) else None
