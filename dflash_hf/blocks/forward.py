"""Forward pass and loss of a batch's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device

from ..model.modeling_dflash import DFlashDraftModel, DFlashOutput, module_tensor
from .attention import anchors_of_rows, training_masks
from .batch import TokenBatch
from .head_losses import HeadLosses, chunked_head_losses, corrected_head_losses
from .losses import CROSS_ENTROPY, LossTerms, dpace_weights, position_weights
from .plan import DFlashBatchPlan


@dataclass
class BlockLosses:
    """
    The losses of a batch's blocks, slot by slot.

    Args:
        plan ([`DFlashBatchPlan`]): the blocks.
        loss (`torch.FloatTensor` of shape `[N, T]`): unweighted loss of each token; 0 where it carries none.
        weights (`torch.FloatTensor` of shape `[N, T]`): weight of each token; 0 where it carries no loss.
        is_correct (`torch.BoolTensor` of shape `[N, T]`): True where the draft would propose the label.
    """

    plan: DFlashBatchPlan
    loss: torch.Tensor
    weights: torch.Tensor
    is_correct: torch.Tensor


def run_blocks(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    batch: TokenBatch,
    *,
    block_attention: str = "auto",
    head_function: Callable[[torch.Tensor], Any] | None = None,
) -> DFlashOutput:
    """
    Run the draft on the blocks of a plan.

    Args:
        model, draft, plan, batch, block_attention: as in [`block_losses`].
        head_function (`Callable`, *optional*): as in the forward pass of the draft.

    Returns:
        [`DFlashOutput`]

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
    heads: dict[str, Any] = {} if head_function is None else {"head_function": head_function}
    return model(
        noise_embeds=draft.embed_blocks(batch.input_ids.gather(1, anchors)),
        context_hidden_states=batch.hidden_states,
        attention_mask=training_masks(draft.config, plan, batch, block_attention),
        position_ids=torch.cat([positions, slot_positions], dim=1),
        **heads,
    )


def block_hidden_states(
    model: Callable[..., Any],
    draft: DFlashDraftModel,
    plan: DFlashBatchPlan,
    batch: TokenBatch,
    *,
    block_attention: str = "auto",
) -> torch.Tensor:
    """
    Return the hidden states from which the tokens of a plan's blocks are predicted.

    Args:
        model, draft, plan, batch, block_attention: as in [`block_losses`].

    Returns:
        `torch.FloatTensor` of shape `[N, T, hidden_size]`: the input of the head; 0 at slots that do not exist.

    Raises:
        ValueError: the batch has no hidden states of the target.
    """
    output = run_blocks(model, draft, plan, batch, block_attention=block_attention)
    return output.last_hidden_state.view(*plan.loss_mask.shape, -1)  # type: ignore[union-attr]


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
    head = draft.draft_head()
    labels = head.draft_indices(_tokens_at(batch, plan, plan.label_positions))
    is_known = labels >= 0  # other tokens are not in a reduced vocabulary
    supervised = plan.loss_mask & is_known
    rows = plan.sample_rows[:, None].expand_as(supervised)[supervised]
    target_states = None
    if batch.final_hidden_states is not None:  # the target predicts a token from its state one position earlier
        target_states = batch.final_hidden_states[rows, plan.label_positions[supervised] - 1]
    options: dict[str, Any] = {
        "terms": terms,
        "compute_target_logits": compute_target_logits,
        "chunk_size": head_chunk_size,
    }
    # accelerate (seen with 1.15) may have offloaded the weight of the head; inside this context it is loaded
    with align_module_device(head.head):
        tensor = module_tensor(head.head)
        device = labels.device if tensor is None else tensor.device
        if head.has_weights:
            before = _tokens_at(batch, plan, (plan.label_positions - 1).clamp(min=0))

            def losses_of(hidden_states: torch.Tensor) -> HeadLosses:
                with torch.autocast(hidden_states.device.type, enabled=False):
                    return corrected_head_losses(
                        head,
                        hidden_states.view(*supervised.shape, -1),
                        before,
                        supervised,
                        labels[supervised],
                        target_states=target_states,
                        **options,
                    )

            losses = run_blocks(
                model, draft, plan, batch, block_attention=block_attention, head_function=losses_of
            ).head_output
        else:
            hidden_states = block_hidden_states(model, draft, plan, batch, block_attention=block_attention)
            losses = chunked_head_losses(
                head.head,
                hidden_states[supervised].to(device),
                labels[supervised].to(device),
                target_states=None if target_states is None else target_states.to(device),
                vocabulary=head.vocabulary,
                **options,
            )

    def scatter(values: torch.Tensor) -> torch.Tensor:
        values = values.to(labels.device)
        return torch.zeros(supervised.shape, dtype=values.dtype, device=values.device).masked_scatter(
            supervised, values
        )

    if slot_weights == "dpace":
        # A token that the draft cannot propose is never accepted.
        cross_entropy = scatter(losses.cross_entropy).masked_fill(~is_known, torch.inf)
        weights = dpace_weights(cross_entropy, plan.loss_mask, dpace_alpha) * is_known
    else:
        weights = position_weights(supervised, slot_weights, loss_decay)
    return BlockLosses(plan, scatter(losses.loss), weights, scatter(losses.is_correct))


def _tokens_at(batch: TokenBatch, plan: DFlashBatchPlan, positions: torch.Tensor) -> torch.Tensor:
    """Return the token at columns of shape `[N, T]` in the rows of the blocks; any token past the end of a row."""
    return batch.input_ids[plan.sample_rows[:, None], positions.clamp(max=batch.length - 1)].long()


def loss_mask_of(draft: DFlashDraftModel, plan: DFlashBatchPlan, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return which predictions of a plan carry loss: those of its mask whose label the draft can propose.

    Args:
        draft ([`DFlashDraftModel`]): the draft, tied to its target.
        plan ([`DFlashBatchPlan`]): the blocks.
        input_ids (`torch.LongTensor` of shape `[R, S]`): the tokens.

    Returns:
        `torch.BoolTensor` of shape `[N, T]`.
    """
    if draft.d2t is None:
        return plan.loss_mask
    positions = plan.label_positions.clamp(max=input_ids.shape[1] - 1)
    labels = input_ids[plan.sample_rows[:, None], positions]
    return plan.loss_mask & torch.isin(labels, draft.draft_vocabulary().to(labels.device))
