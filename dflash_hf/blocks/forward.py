"""Forward pass and loss of a batch's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device

from ..model.modeling_dflash import DFlashDraftModel, module_tensor
from .attention import anchors_of_rows, training_masks
from .batch import TokenBatch
from .head_losses import chunked_head_losses
from .losses import CROSS_ENTROPY, LossTerms, dpace_weights, position_weights
from .plan import DFlashBatchPlan


@dataclass
class BlockLosses:
    """
    The losses of a batch's blocks, slot by slot.

    Args:
        plan ([`DFlashBatchPlan`]): the blocks.
        loss (`torch.FloatTensor` of shape `[N, B]`): unweighted loss of each slot; 0 where it carries none.
        weights (`torch.FloatTensor` of shape `[N, B]`): weight of each slot; 0 where it carries no loss.
        is_correct (`torch.BoolTensor` of shape `[N, B]`): True where the most likely token is the label.
    """

    plan: DFlashBatchPlan
    loss: torch.Tensor
    weights: torch.Tensor
    is_correct: torch.Tensor


def block_hidden_states(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    batch: TokenBatch,
    *,
    block_attention: str = "auto",
) -> torch.Tensor:
    """
    Run the draft on the blocks of a plan.

    Args:
        model, draft, plan, batch, block_attention: as in [`block_losses`].

    Returns:
        `torch.FloatTensor` of shape `[N, B, hidden_size]`: the input of the head; 0 at invalid slots.

    Raises:
        ValueError: the batch has no hidden states of the target.
    """
    if batch.hidden_states is None:
        raise ValueError(
            "The batch has hidden_states=None, and the draft reads the hidden states of the target as its context. "
            "Add them with batch.with_hidden_states(target_hidden_states(...))."
        )
    anchors = anchors_of_rows(plan, batch)
    positions = batch.position_ids
    slots = torch.arange(plan.block_size, device=positions.device)
    slot_positions = (positions.gather(1, anchors)[..., None] + slots).flatten(1)
    return model(
        noise_embeds=draft.embed_blocks(batch.input_ids.gather(1, anchors)),
        context_hidden_states=batch.hidden_states,
        attention_mask=training_masks(draft.config, plan, batch, block_attention),
        position_ids=torch.cat([positions, slot_positions], dim=1),
    ).last_hidden_state.view(*plan.loss_mask.shape, -1)


def block_losses(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    batch: TokenBatch,
    *,
    slot_weights: str = "decay",
    loss_decay: float | None = None,
    dpace_alpha: float = 0.5,
    terms: LossTerms = CROSS_ENTROPY,
    compute_target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    head_chunk_size: int | None = None,
    block_attention: str = "auto",
) -> BlockLosses:
    """
    Run the draft on the blocks of a plan and compare its supervised slots with the text and the target.

    Args:
        model (`Callable`):
            The draft, its wrapper for distributed training, or a function that calls it.
        draft ([`DFlashDraftModel`]):
            The draft itself, tied to its target.
        plan ([`DFlashBatchPlan`]):
            The blocks.
        batch ([`TokenBatch`]):
            The sequences with the hidden states of the target; terms that need the target's logits also read its
            `final_hidden_states`.
        slot_weights, loss_decay, dpace_alpha, head_chunk_size, block_attention:
            As in [`DFlashTrainingArguments`].
        terms ([`LossTerms`]):
            The terms of a slot's loss and their weights.
        compute_target_logits (`Callable`, *optional*):
            Computes the target's logits from its final hidden states.

    Returns:
        [`BlockLosses`]; `loss` is attached to the graph even if no slot is supervised.

    Raises:
        ValueError: a term needs the target's logits, and they cannot be computed.
    """
    hidden_states = block_hidden_states(model, draft, plan, batch, block_attention=block_attention)
    supervised = plan.loss_mask
    supervised_rows = plan.sample_rows[:, None].expand_as(supervised)[supervised]
    label_positions = plan.label_positions[supervised]
    labels = batch.input_ids[supervised_rows, label_positions].long()
    target_states = None
    if batch.final_hidden_states is not None:  # the target predicts a token from its state one position earlier
        target_states = batch.final_hidden_states[supervised_rows, label_positions - 1]
    head = draft.get_output_embeddings()
    # accelerate (seen with 1.15) may have offloaded the weight of the head; inside this context it is loaded
    with align_module_device(head):
        tensor = module_tensor(head)
        device = labels.device if tensor is None else tensor.device
        losses = chunked_head_losses(
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
