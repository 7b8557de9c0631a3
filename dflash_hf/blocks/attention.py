"""Attention of training blocks: structured attention, a dense mask or a FlexAttention mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..model.configuration_dflash import DFlashConfig
from ..model.modeling_dflash import product_dtype
from .batch import TokenBatch
from .plan import DFlashBatchPlan

QUERIES_PER_GROUP = 128
# Context ranges begin and end at multiples of this, since on a CPU torch compiles a kernel for every new shape of a
# matrix product.
COLUMNS_STEP = 64


@dataclass(frozen=True)
class BlockGroup:
    """
    Neighbouring blocks that attend together, and the part of the context that any of them sees.

    Args:
        blocks (`slice`): the blocks of the group, of the `M` blocks of every row.
        columns (`slice`): columns of the context outside of which the group sees nothing.
        masked_columns (`slice`): part of `columns`, relative to its start, outside of which the group sees everything.
        hidden (`torch.BoolTensor` of shape `[R, 1, n, 1, B or 1, width of masked_columns]`): True = hidden.
    """

    blocks: slice
    columns: slice
    masked_columns: slice
    hidden: torch.Tensor


def anchors_of_rows(plan: DFlashBatchPlan, batch: TokenBatch) -> torch.Tensor:
    """
    Return the anchors of a plan by row, and refuse a batch on which the plan cannot be run.

    Args:
        plan ([`DFlashBatchPlan`]): the `N = R * M` blocks.
        batch ([`TokenBatch`]): the sequences for which the plan was built.

    Returns:
        `torch.LongTensor` of shape `[R, M]`.

    Raises:
        ValueError: the batch has no token, or the blocks cannot be divided among its rows.
    """
    shape, num_blocks = list(batch.input_ids.shape), len(plan.anchor_positions)
    if 0 in shape:
        raise ValueError(f"The batch has the shape {shape}, in which no block has an anchor. Leave such a batch out.")
    if num_blocks % batch.num_rows:
        raise ValueError(
            f"The plan has {num_blocks} blocks, which is no multiple of the {batch.num_rows} rows of the batch. Build "
            "the plan from the masks of this batch."
        )
    return plan.anchor_positions.view(batch.num_rows, -1)


class BlockAttention:
    """
    Attention of the blocks of a plan in which no block is multiplied with the keys of another block.

    Blocks are in ascending order of their anchors, so neighbouring blocks see nearly the same prefix of the context,
    and a group of them is multiplied with that prefix only. Scores of the context and of the own block share one
    softmax. Time and memory are linear in the number of blocks. The values are those of attention under
    [`dense_block_mask`], except at invalid slots, whose output is finite and has no meaning. The draft's forward pass
    reads `query_valid_mask`, of shape `[R, M * B]`, and zeroes the invalid slots.

    Args:
        plan ([`DFlashBatchPlan`]): the `N = R * M` blocks.
        batch ([`TokenBatch`]): the sequences, of which `valid` and `segment_ids` are read.
        window (`int`, *optional*): a context key must be closer than this to the position of the query.
        causal (`bool`, defaults to `False`): hide the later slots of a block from a slot.
    """

    def __init__(
        self,
        plan: DFlashBatchPlan,
        batch: TokenBatch,
        *,
        window: int | None = None,
        causal: bool = False,
    ) -> None:
        self.length = batch.length
        self.query_valid_mask = plan.slot_valid.view(batch.num_rows, -1)
        block_size, device = plan.block_size, batch.valid.device
        anchors = anchors_of_rows(plan, batch)
        visible = visible_context(plan, batch, window=window)  # [R, M, B or 1, S]
        self.groups = _group_blocks(visible, max(QUERIES_PER_GROUP // block_size, 1))

        slots = torch.arange(block_size, device=device)
        own_visible = plan.slot_valid.view(*anchors.shape, 1, block_size).expand(-1, -1, block_size, -1)
        if causal:
            own_visible = own_visible & (slots <= slots[:, None])
        # An invalid slot sees its own key, so that no softmax is empty.
        self.own_hidden = ~(own_visible | torch.eye(block_size, dtype=torch.bool, device=device))[:, None, :, None]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float, dropout: float = 0.0
    ) -> torch.Tensor:
        """
        Compute the attention of all slots.

        Args:
            query (`torch.FloatTensor` of shape `[R, heads, M * B, head_dim]`): queries of the slots.
            key, value (`torch.FloatTensor` of shape `[R, key_value_heads, S + M * B, head_dim]`): those of the
                context, then those of the slots.
            scaling (`float`): factor of the scores.
            dropout (`float`, defaults to 0.0): dropout probability of the attention weights.

        Returns:
            `torch.FloatTensor` of shape `[R, M * B, heads, head_dim]`.
        """
        dtype = product_dtype(query)
        query, key, value = (query * scaling).to(dtype), key.to(dtype), value.to(dtype)
        with torch.autocast(query.device.type, enabled=False):  # autocast computes softmax in fp32
            return self._attend(query, key, value, dropout)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Attend with scaled queries, all in one dtype and outside of autocast."""
        rows, heads, _, head_dim = query.shape
        kv_heads, block_size, blocks = key.shape[1], self.own_hidden.shape[-1], self.own_hidden.shape[2]
        heads_per_key = heads // kv_heads
        sharing = heads_per_key * block_size  # queries of a block that share keys
        lowest = torch.finfo(query.dtype).min

        query = query.view(rows, kv_heads, heads_per_key, blocks, block_size, head_dim).transpose(2, 3)
        query = query.reshape(rows, kv_heads, blocks, sharing, head_dim)
        own_key, own_value = (
            part[:, :, self.length :].view(rows, kv_heads, blocks, block_size, head_dim) for part in (key, value)
        )
        own_scores = (query @ own_key.transpose(3, 4)).view(
            rows, kv_heads, blocks, heads_per_key, block_size, block_size
        )
        own_scores = own_scores.masked_fill(self.own_hidden, lowest).view(rows, kv_heads, blocks, sharing, block_size)

        context_outputs, own_weights = [], []
        for group in self.groups:
            group_key, group_value = key[:, :, group.columns], value[:, :, group.columns]
            group_query, group_own_scores = query[:, :, group.blocks], own_scores[:, :, group.blocks]
            num_blocks, num_columns = group_query.shape[2], group_key.shape[2]
            scores = group_query.reshape(rows, kv_heads, num_blocks * sharing, head_dim) @ group_key.transpose(2, 3)
            by_slot = scores.view(rows, kv_heads, num_blocks, heads_per_key, block_size, num_columns)
            by_slot[..., group.masked_columns].masked_fill_(group.hidden, lowest)
            scores = scores.view(rows, kv_heads, num_blocks, sharing, num_columns)
            weights = functional.dropout(torch.cat([scores, group_own_scores], dim=-1).softmax(-1), dropout)
            context_weights = weights[..., :num_columns].reshape(rows, kv_heads, num_blocks * sharing, num_columns)
            context_outputs.append((context_weights @ group_value).view_as(group_query))
            own_weights.append(weights[..., num_columns:])
        output = torch.cat(context_outputs, dim=2) + torch.cat(own_weights, dim=2) @ own_value
        output = output.view(rows, kv_heads, blocks, heads_per_key, block_size, head_dim)
        return output.permute(0, 2, 4, 1, 3, 5).reshape(rows, blocks * block_size, heads, head_dim)


def visible_context(plan: DFlashBatchPlan, batch: TokenBatch, *, window: int | None = None) -> torch.Tensor:
    """
    Return the context that each block sees: valid tokens of its document before its anchor and inside the window.

    Args:
        plan, batch, window: as in [`BlockAttention`].

    Returns:
        `torch.BoolTensor` of shape `[R, M, B, S]` with a window, which is measured from the position of each slot, and
        of shape `[R, M, 1, S]` without one; all False for an invalid block.
    """
    anchors = anchors_of_rows(plan, batch)
    columns = torch.arange(batch.length, device=batch.valid.device)
    visible = (columns < anchors[..., None]) & batch.valid[:, None] & plan.block_valid.view(batch.num_rows, -1, 1)
    if batch.segment_ids is not None:
        visible = visible & (batch.segment_ids[:, None] == batch.segment_ids.gather(1, anchors)[..., None])
    visible = visible[:, :, None]
    if window is not None:
        queries = plan.query_positions.view(*anchors.shape, -1, 1)
        visible = visible & (queries - columns < window)
    return visible


def _group_blocks(visible: torch.Tensor, blocks_per_group: int) -> list[BlockGroup]:
    """Group neighbouring blocks by the columns they see, with one read from the device for all groups."""
    blocks, length = visible.shape[1], visible.shape[3]
    slices = [slice(start, min(start + blocks_per_group, blocks)) for start in range(0, blocks, blocks_per_group)]
    first, end = _bounds(torch.stack([visible[:, part].flatten(0, 2).any(0) for part in slices]))
    first = first // COLUMNS_STEP * COLUMNS_STEP
    end = (-(-end // COLUMNS_STEP) * COLUMNS_STEP).clamp(max=length)
    seen_by_all = torch.stack([visible[:, part].flatten(0, 2).all(0) for part in slices])
    columns = torch.arange(length, device=visible.device)
    masked = _bounds(~seen_by_all & (columns >= first[:, None]) & (columns < end[:, None]))
    bounds = torch.stack([first, end, *masked], dim=-1).tolist()
    return [
        BlockGroup(
            blocks=part,
            columns=slice(start, stop),
            masked_columns=slice(max(masked_start - start, 0), max(masked_stop - start, 0)),
            hidden=~visible[:, part, :, masked_start:masked_stop][:, None, :, None],
        )
        for part, (start, stop, masked_start, masked_stop) in zip(slices, bounds, strict=True)
    ]


def _bounds(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first True and one past the last True of each line; both are 0 where there is none."""
    found = columns.any(-1)
    first = columns.int().argmax(-1)
    end = columns.shape[1] - columns.flip(-1).int().argmax(-1)
    return first * found, end * found


def dense_block_mask(
    plan: DFlashBatchPlan, batch: TokenBatch, *, window: int | None = None, causal: bool = False
) -> torch.Tensor:
    """
    Make a mask in which a block sees the context strictly before its anchor and itself.

    An invalid slot sees its own key, so that no row of the softmax is empty. No other slot sees that key, by which the
    draft's forward pass knows the invalid slots and zeroes them.

    Args:
        plan ([`DFlashBatchPlan`]): the `N = R * M` blocks.
        batch ([`TokenBatch`]): the sequences, of which `valid` and `segment_ids` are read.
        window (`int`, *optional*): a context key must be closer than this to the position of the query.
        causal (`bool`, defaults to `False`): hide the later slots of a block from a slot.

    Returns:
        `torch.BoolTensor` of shape `[R, 1, M * B, S + M * B]`, True = visible; keys are the context, then the slots.
    """
    blocks = anchors_of_rows(plan, batch).shape[1]
    rows, block_size, device = batch.num_rows, plan.block_size, batch.valid.device
    sees_context = visible_context(plan, batch, window=window)
    sees_context = sees_context.expand(-1, -1, block_size, -1).flatten(1, 2)  # [R, M * B, S]

    slot_index = torch.arange(blocks * block_size, device=device)
    same_block = slot_index[:, None] // block_size == slot_index // block_size
    if causal:
        same_block = same_block & (slot_index <= slot_index[:, None])
    slot_valid = plan.slot_valid.view(rows, 1, blocks * block_size)
    own_key = torch.eye(blocks * block_size, dtype=torch.bool, device=device)
    sees_slots = (same_block & slot_valid & slot_valid.transpose(1, 2)) | own_key
    sees_context = sees_context & slot_valid.transpose(1, 2)
    return torch.cat([sees_context, sees_slots], dim=-1)[:, None]


def flex_block_mask(
    plan: DFlashBatchPlan, batch: TokenBatch, *, window: int | None = None, causal: bool = False
) -> BlockMask:
    """
    Make the mask of [`dense_block_mask`] for FlexAttention.

    Args:
        plan, batch, window, causal: as in [`dense_block_mask`].

    Returns:
        `BlockMask` over `M * B` queries and `S + M * B` keys.
    """
    rows, length, valid = batch.num_rows, batch.length, batch.valid
    block_size = plan.block_size
    anchors = anchors_of_rows(plan, batch)
    num_slots = anchors.shape[1] * block_size
    slot_valid = plan.slot_valid.view(rows, num_slots)
    documents = torch.zeros_like(batch.input_ids) if batch.segment_ids is None else batch.segment_ids

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # FlexAttention (torch 2.13) also evaluates indices of its padding. They are clamped into range, and their
        # results are not used.
        query = query.clamp(max=num_slots - 1)
        block, column = query // block_size, key.clamp(max=length - 1)
        anchor = anchors[row, block]
        sees_context = (key < length) & (column < anchor) & valid[row, column] & slot_valid[row, query]
        sees_context = sees_context & (documents[row, column] == documents[row, anchor])
        if window is not None:
            sees_context = sees_context & (anchor + query % block_size - column < window)
        slot = (key - length).clamp(min=0, max=num_slots - 1)
        sees_slot = (slot // block_size == block) & slot_valid[row, slot] & slot_valid[row, query]
        if causal:
            sees_slot = sees_slot & (slot <= query)
        return sees_context | ((key >= length) & (sees_slot | (slot == query)))

    visible.__dict__["query_valid_mask"] = slot_valid  # the draft's forward pass zeroes the other slots
    device = valid.device
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return create(visible, rows, None, num_slots, length + num_slots, device=device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Return a compiled `create_block_mask`; uncompiled, it would hold every query-key pair in memory (torch 2.13)."""
    return torch.compile(create_block_mask)


def attention_kind(kind: str, device: torch.device) -> str:
    """Resolve `"auto"`: `"flex"` on CUDA, where FlexAttention has a backward pass, and `"structured"` elsewhere."""
    if kind != "auto":
        return kind
    return "flex" if device.type == "cuda" else "structured"


def training_masks(
    config: DFlashConfig,
    plan: DFlashBatchPlan,
    batch: TokenBatch,
    kind: str = "auto",
) -> dict[str, torch.Tensor | BlockMask | BlockAttention]:
    """
    Make one mask for each layer type of the draft, in the form that its attention kernel needs.

    Args:
        config ([`DFlashConfig`]): gives layer types, window and causality.
        plan ([`DFlashBatchPlan`]): the blocks.
        batch ([`TokenBatch`]): the sequences, of which `valid` and `segment_ids` are read.
        kind (`str`, defaults to `"auto"`):
            `"flex"` for FlexAttention, `"structured"` for [`BlockAttention`] on any device, or `"dense"` for a tensor
            that the attention implementation of the configuration reads, which is slow. `"auto"` chooses as
            [`attention_kind`] does.

    Returns:
        `dict` from layer type to [`BlockAttention`], `BlockMask` or `torch.BoolTensor`: the `attention_mask` of the
        draft's `forward`.
    """
    kinds: dict[str, Any] = {"flex": flex_block_mask, "structured": BlockAttention, "dense": dense_block_mask}
    if config.attention_sinks and kind == "auto":
        kind = "dense"
    build = kinds[attention_kind(kind, batch.valid.device)]
    layer_types = config.layer_types or []
    return {
        layer_type: build(plan, batch, window=config.layer_window(index), causal=config.in_block_causal(index))
        for layer_type, index in {kind: layer_types.index(kind) for kind in layer_types}.items()
    }
