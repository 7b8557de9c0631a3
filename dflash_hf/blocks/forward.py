"""The loss of one batch's blocks: the plan's blocks through the draft, its supervised slots against the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device

from ..model.modeling_dflash import DFlashDraftModel
from .attention import training_masks
from .losses import CROSS_ENTROPY, LossTerms, dpace_weights, head_losses, position_weights
from .plan import DFlashBatchPlan, position_ids_of


@dataclass
class BlockLosses:
    """
    What one batch's blocks lost.

    Args:
        plan ([`DFlashBatchPlan`]): the blocks.
        loss (`torch.FloatTensor` of shape `[N, B]`): per slot, unweighted; 0 where nothing is supervised.
        weights (`torch.FloatTensor` of shape `[N, B]`): per slot, 0 where nothing is supervised.
        is_correct (`torch.BoolTensor` of shape `[N, B]`): the most likely token is the label.
    """

    plan: DFlashBatchPlan
    loss: torch.Tensor
    weights: torch.Tensor
    is_correct: torch.Tensor


def block_hidden_states(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    context_hidden_states: torch.Tensor,
    *,
    segment_ids: torch.Tensor | None = None,
    block_attention: str = "auto",
) -> torch.Tensor:
    """
    Run the draft on the blocks of a plan.

    Args are those of [`block_losses`].

    Returns:
        `torch.FloatTensor` of shape `[N, B, hidden_size]`: what the head is applied to; 0 at invalid slots.
    """
    rows = input_ids.shape[0]
    block_size = draft.config.block_size
    anchors = plan.anchor_positions.view(rows, -1)
    positions = position_ids_of(token_valid_mask, segment_ids)
    slots = torch.arange(block_size, device=input_ids.device)
    slot_positions = (positions.gather(1, anchors)[..., None] + slots).flatten(1)
    return model(
        noise_embeds=draft.embed_blocks(input_ids.gather(1, anchors)),
        context_hidden_states=context_hidden_states,
        attention_mask=training_masks(draft.config, plan, token_valid_mask, segment_ids, block_attention),
        position_ids=torch.cat([positions, slot_positions], dim=1),
        query_valid_mask=plan.slot_valid.view(rows, -1),
    ).last_hidden_state.view(plan.loss_mask.shape[0], block_size, -1)


def block_losses(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    context_hidden_states: torch.Tensor,
    *,
    segment_ids: torch.Tensor | None = None,
    slot_weights: str = "decay",
    loss_decay: float | None = None,
    dpace_alpha: float = 0.5,
    terms: LossTerms = CROSS_ENTROPY,
    final_hidden_states: torch.Tensor | None = None,
    compute_target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    head_chunk_size: int | None = None,
    block_attention: str = "auto",
) -> BlockLosses:
    """
    Run the draft on the blocks of a plan and compare its supervised slots with the text and the target.

    Args:
        model (`Callable`): the draft, its wrapper for distributed training, or a function that calls it.
        draft ([`DFlashDraftModel`]): the draft itself, tied.
        plan ([`DFlashBatchPlan`]): the blocks.
        input_ids (`torch.LongTensor` of shape `[R, S]`): the text.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        context_hidden_states (`torch.FloatTensor` of shape `[R, S, num_target_layers * hidden_size]`): of the target.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.
        slot_weights, loss_decay, dpace_alpha, head_chunk_size, block_attention:
            As in [`DFlashTrainingArguments`].
        terms ([`LossTerms`]): what the loss of a slot is made of.
        final_hidden_states (`torch.FloatTensor` of shape `[R, S, hidden_size]`, *optional*):
            Of the target after its final norm, for terms that need the target's logits.
        compute_target_logits (`Callable`, *optional*): turns such states into the target's logits.

    Returns:
        [`BlockLosses`]; `loss` is attached to the graph even if no slot is supervised.

    Raises:
        ValueError: a term needs the target's logits, and there are none.
    """
    hidden_states = block_hidden_states(
        model,
        draft,
        plan,
        input_ids,
        token_valid_mask,
        context_hidden_states,
        segment_ids=segment_ids,
        block_attention=block_attention,
    )
    supervised = plan.loss_mask
    supervised_rows = plan.sample_rows[:, None].expand_as(supervised)[supervised]
    label_positions = plan.label_positions[supervised]
    labels = input_ids[supervised_rows, label_positions]
    # the target's state before a token predicts it
    target_states = None if final_hidden_states is None else final_hidden_states[supervised_rows, label_positions - 1]
    head = draft.get_output_embeddings()
    with align_module_device(head):  # fetches a weight that accelerate offloaded
        device = head.weight.device if isinstance(head.weight, torch.Tensor) else labels.device
        losses = head_losses(
            head,
            hidden_states[supervised].to(device),
            labels.to(device),
            terms=terms,
            target_states=None if target_states is None else target_states.to(device),
            compute_target_logits=compute_target_logits,
            chunk_size=head_chunk_size,
        )

    def scatter(values: torch.Tensor) -> torch.Tensor:
        values = values.to(labels.device)
        return torch.zeros(supervised.shape, dtype=values.dtype, device=values.device).masked_scatter(
            supervised, values
        )

    if slot_weights == "dpace":
        weights = dpace_weights(scatter(losses.cross_entropy), supervised, dpace_alpha)
    else:
        weights = position_weights(supervised, slot_weights, loss_decay)
    return BlockLosses(plan, scatter(losses.loss), weights, scatter(losses.is_correct))
