"""What each slot of a batch plan may see, for the attention backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..model.configuration_dflash import DFlashConfig
from .attention import BlockAttention, visible_context
from .plan import DFlashBatchPlan


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
    rows, block_size = token_valid_mask.shape[0], plan.block_size
    blocks, device = plan.anchor_positions.numel() // rows, token_valid_mask.device
    sees_context = visible_context(plan, token_valid_mask, window=window, segment_ids=segment_ids)
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

    device = token_valid_mask.device
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return create(visible, rows, None, num_slots, length + num_slots, device=device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """One compiled function for all masks: uncompiled, it would hold every query-key pair in memory."""
    return torch.compile(create_block_mask)


def attention_kind(kind: str, device: torch.device) -> str:
    """Form of mask for a device: `"auto"` is `"flex"` on CUDA, where its backward pass runs, else `"structured"`."""
    if kind != "auto":
        return kind
    return "flex" if device.type == "cuda" else "structured"


def training_masks(
    config: DFlashConfig,
    plan: DFlashBatchPlan,
    token_valid_mask: torch.Tensor,
    segment_ids: torch.Tensor | None = None,
    kind: str = "auto",
) -> dict[str, torch.Tensor | BlockMask | BlockAttention]:
    """
    One mask for each layer type of the draft, in the form of the kernel that is to run.

    Args:
        config ([`DFlashConfig`]): layer types, window and causality.
        plan ([`DFlashBatchPlan`]): the blocks.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.
        kind (`str`, defaults to `"auto"`):
            `"flex"` (FlexAttention), `"structured"` (no block meets another block's keys; plain matrix products on any
            device) or `"dense"` (a tensor for the configuration's attention implementation: the slow oracle); `"auto"`
            as in [`attention_kind`].

    Returns:
        `dict`: layer type to [`BlockAttention`], `BlockMask` or `torch.BoolTensor`, the `attention_mask` of the
        draft's `forward`.
    """
    kinds: dict[str, Any] = {"flex": flex_block_mask, "structured": BlockAttention, "dense": dense_block_mask}
    build = kinds[attention_kind(kind, token_valid_mask.device)]
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
