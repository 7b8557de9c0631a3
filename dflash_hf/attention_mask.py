"""What each slot of a batch plan may see, for the attention backends."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .batch_plan import DFlashBatchPlan
from .configuration_dflash import DFlashConfig


def dense_block_mask(
    plan: DFlashBatchPlan,
    token_valid_mask: torch.Tensor,
    *,
    window: int | None = None,
    causal: bool = False,
    segment_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Visibility as a tensor: the context strictly before a block's anchor, and the block itself.

    Invalid slots see their own key, so that no softmax row is empty; nobody else sees that key, and
    `query_valid_mask` zeroes what comes out.

    Args:
        plan ([`DFlashBatchPlan`]): `N = R * M` blocks.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        window (`int`, *optional*): a context key must be closer than this to the query's own position.
        causal (`bool`, defaults to `False`): a slot sees no later slot of its block.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.

    Returns:
        `torch.BoolTensor` of shape `[R, 1, M * B, S + M * B]`, True = visible; keys are the context, then the slots.
    """
    rows, length = token_valid_mask.shape
    block_size = plan.block_size
    anchors = plan.anchor_positions.view(rows, -1)
    blocks = anchors.shape[1]
    device = token_valid_mask.device
    columns = torch.arange(length, device=device)

    queries = plan.query_positions.view(rows, blocks * block_size, 1)
    block_valid = plan.block_valid.view(rows, blocks)
    sees_context = (columns < anchors[..., None]) & token_valid_mask[:, None] & block_valid[..., None]
    if segment_ids is not None:
        sees_context = sees_context & (segment_ids[:, None] == segment_ids.gather(1, anchors)[..., None])
    sees_context = sees_context.repeat_interleave(block_size, dim=1)  # [R, M * B, S]
    if window is not None:
        sees_context = sees_context & (queries - columns < window)

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
    plan: DFlashBatchPlan,
    token_valid_mask: torch.Tensor,
    *,
    window: int | None = None,
    causal: bool = False,
    segment_ids: torch.Tensor | None = None,
) -> BlockMask:
    """
    The same visibility as [`dense_block_mask`] for FlexAttention.

    Args and rules are those of [`dense_block_mask`].

    Returns:
        `BlockMask` over `M * B` queries and `S + M * B` keys.
    """
    rows, length = token_valid_mask.shape
    block_size = plan.block_size
    anchors = plan.anchor_positions.view(rows, -1)
    num_slots = anchors.shape[1] * block_size
    slot_valid = plan.slot_valid.view(rows, num_slots)
    documents = torch.zeros_like(token_valid_mask, dtype=torch.int64) if segment_ids is None else segment_ids

    def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # FlexAttention asks about padded indices too: clamp them into range, their answers are thrown away
        query = query.clamp(max=num_slots - 1)
        block, column = query // block_size, key.clamp(max=length - 1)
        anchor = anchors[row, block]
        sees_context = (key < length) & (column < anchor) & token_valid_mask[row, column] & slot_valid[row, query]
        sees_context = sees_context & (documents[row, column] == documents[row, anchor])
        if window is not None:
            sees_context = sees_context & (anchor + query % block_size - column < window)
        slot = (key - length).clamp(min=0, max=num_slots - 1)
        sees_slot = (slot // block_size == block) & slot_valid[row, slot] & slot_valid[row, query]
        if causal:
            sees_slot = sees_slot & (slot <= query)
        return sees_context | ((key >= length) & (sees_slot | (slot == query)))

    return create_block_mask(visible, rows, None, num_slots, length + num_slots, device=token_valid_mask.device)


def training_masks(
    config: DFlashConfig,
    plan: DFlashBatchPlan,
    token_valid_mask: torch.Tensor,
    segment_ids: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | BlockMask]:
    """
    One mask for each layer type of the draft, in the form its attention implementation takes.

    Args:
        config ([`DFlashConfig`]): layer types, window, causality and attention implementation.
        plan ([`DFlashBatchPlan`]): the blocks.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.

    Returns:
        `dict`: layer type to `torch.BoolTensor` or `BlockMask`, the `attention_mask` of the draft's `forward`.
    """
    build = flex_block_mask if config._attn_implementation == "flex_attention" else dense_block_mask
    layer_types = config.layer_types or []
    return {
        layer_type: build(
            plan,
            token_valid_mask,
            window=config.layer_window(index),
            causal=config.in_block_causal(index),
            segment_ids=segment_ids,
        )
        for layer_type, index in {kind: layer_types.index(kind) for kind in layer_types}.items()
    }
