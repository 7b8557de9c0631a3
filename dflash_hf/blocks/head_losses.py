"""Losses of the slots from the hidden states of the draft: the head of the target and the loss, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..model.modeling_dflash import DraftHead, cast_for
from .losses import CROSS_ENTROPY, LossTerms, l1_distance, selector_loss, slot_loss

# Slots and vocabulary entries whose logits exist at one time. On a CPU such a tile fits the caches, where passes over
# it are cheap next to the matrix products. Other devices need larger tiles to be busy.
HEAD_TILES = {"cpu": (512, 2048)}
DEFAULT_HEAD_TILE = (4096, 8192)
SLOTS_STEP = 64


@dataclass
class HeadLosses:
    """
    Losses of slots, as [`chunked_head_losses`] returns them.

    Args:
        loss (`torch.FloatTensor` of shape `[P]`): loss of each slot, fp32, differentiable in the hidden states.
        cross_entropy (`torch.FloatTensor` of shape `[P]`): cross-entropy against the text, fp32, detached.
        is_correct (`torch.BoolTensor` of shape `[P]`): True where the label is the most likely token; ties go to the
            lowest token id.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    is_correct: torch.Tensor


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """
    Chunked linear cross-entropy with a frozen weight, which never holds a whole row of logits.

    The maximum, the sum of exponentials and `softmax @ W` are carried from tile to tile and rescaled when the maximum
    grows, so that one pass over the vocabulary gives the loss and its gradient at the hidden state.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_slots, vocab_size = labels.shape[0], weight.shape[0]
        max_slots, max_columns = HEAD_TILES.get(weight.device.type, DEFAULT_HEAD_TILE)
        max_columns = min(max_columns, vocab_size)
        cross_entropy = torch.empty(num_slots, dtype=torch.float32, device=labels.device)
        is_correct = torch.empty(num_slots, dtype=torch.bool, device=labels.device)
        gradient = torch.empty_like(hidden_states) if ctx.needs_input_grad[0] else None
        # Slots are sorted by label: those whose label is in a tile are neighbours, and only they are looked up there.
        labels, order = labels.sort()
        # The last slot is repeated up to a round number, since torch compiles a kernel for every new shape of a matrix
        # product on a CPU.
        surplus = -num_slots % SLOTS_STEP if num_slots else 0
        labels, order = (torch.cat([part, part[-1:].expand(surplus)]) for part in (labels, order))
        tile_starts = torch.arange(0, vocab_size + max_columns, max_columns, device=labels.device)
        first_slot_of_tile = torch.searchsorted(labels, tile_starts).tolist()
        # All tiles share two buffers, since on a CPU fresh memory pages cost as much as the arithmetic.
        logits_buffer = weight.new_empty(max_slots * max_columns)
        exponentials_buffer = torch.empty(max_slots * max_columns, dtype=torch.float32, device=weight.device)
        for start in range(0, len(order), max_slots):
            slots = order[start : start + max_slots]
            slot_states, slot_labels = hidden_states[slots].to(weight.dtype), labels[start : start + max_slots, None]
            best = torch.full(slot_labels.shape, float("-inf"), device=weight.device)
            total, label_logits = torch.zeros_like(best), torch.zeros_like(best)
            leads = torch.zeros_like(best, dtype=torch.bool)  # the label has the first highest logit so far
            weighted_rows = torch.zeros(slot_states.shape, dtype=torch.float32, device=weight.device)
            for tile, first in enumerate(range(0, vocab_size, max_columns)):
                tile_weight = weight[first : first + max_columns]
                shape = (len(slot_states), len(tile_weight))
                logits = logits_buffer[: shape[0] * shape[1]].view(shape)
                exponentials = exponentials_buffer[: shape[0] * shape[1]].view(shape)
                torch.mm(slot_states, tile_weight.t(), out=logits)

                here = slice(*(max(slot - start, 0) for slot in first_slot_of_tile[tile : tile + 2]))
                column = slot_labels[here] - first
                label_logits[here] = logits[here].gather(1, column).float()
                tile_best, tile_token = logits[here].max(-1, keepdim=True)
                leads[here] = (tile_token == column) & (tile_best > best[here])

                new_best = torch.maximum(best, logits.amax(-1, keepdim=True).float())
                shrink = (best - new_best).exp_()
                torch.sub(logits, new_best, out=exponentials).exp_()
                total = total * shrink + exponentials.sum(-1, keepdim=True)
                if gradient is not None:
                    weighted_rows.mul_(shrink).add_(logits.copy_(exponentials) @ tile_weight)
                best = new_best
            cross_entropy[slots] = (total.log() + best - label_logits)[:, 0]
            is_correct[slots] = (leads & (label_logits == best))[:, 0]
            if gradient is not None:  # softmax @ W - W[label]
                gradient[slots] = (weighted_rows / total - weight[slot_labels[:, 0]]).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(is_correct)
        return cross_entropy, is_correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None


class _ChunkedHeadLoss(torch.autograd.Function):
    """Any loss of any head in chunks of slots. The gradient of a chunk is computed before the next chunk begins."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        chunk_losses: Callable[[torch.Tensor, slice], HeadLosses],
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_slots, device = hidden_states.shape[0], hidden_states.device
        loss, cross_entropy = torch.empty(2, num_slots, dtype=torch.float32, device=device)
        is_correct = torch.empty(num_slots, dtype=torch.bool, device=device)
        gradient = torch.empty_like(hidden_states) if ctx.needs_input_grad[0] else None
        for start in range(0, num_slots, chunk_size):
            slots = slice(start, min(start + chunk_size, num_slots))
            chunk = hidden_states[slots].detach()
            with torch.set_grad_enabled(gradient is not None):
                losses = chunk_losses(chunk.requires_grad_(gradient is not None), slots)
                if gradient is not None:
                    (gradient[slots],) = torch.autograd.grad(losses.loss.sum(), chunk)
            loss[slots], cross_entropy[slots] = losses.loss.detach(), losses.cross_entropy.detach()
            is_correct[slots] = losses.is_correct
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, is_correct)
        return loss, cross_entropy, is_correct

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None


def default_chunk_size(device: torch.device) -> int:
    """Return the number of slots whose rows of logits exist at one time; on a CPU they are to fit the caches."""
    return 64 if device.type == "cpu" else 1024


def is_plain_head(head: nn.Module) -> TypeGuard[nn.Linear]:
    """
    Return whether the head is one floating-point matrix that can be read directly.

    It is not if it has a bias or another class than `nn.Linear` (quantised, adapted, sharded by FSDP2), if its weight
    is split over ranks, or if accelerate's hooks load its weight only for a forward pass.
    """
    weight: Any = getattr(head, "weight", None)
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight.is_floating_point()
        and weight.device.type != "meta"
    )


def chunked_head_losses(
    head: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    *,
    terms: LossTerms = CROSS_ENTROPY,
    target_states: torch.Tensor | None = None,
    compute_target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int | None = None,
    vocabulary: torch.Tensor | None = None,
) -> HeadLosses:
    """
    Compute the losses of slots through a frozen head with a peak memory that does not grow with slots × vocabulary.

    The gradient at the hidden states is computed in the forward pass, so that logits are neither stored nor computed
    twice. Plain cross-entropy of a plain linear head is a chunked linear cross-entropy with a single pass over the
    vocabulary. `torch.nn.functional.linear_cross_entropy` (torch 2.13) does not replace it: on a CPU its
    chunked form takes 1.3 times the time or more, its other form holds all logits, and neither tells which predictions
    are right.

    Args:
        head (`nn.Module`): the raw head of the target; its parameters get no gradient.
        hidden_states (`torch.FloatTensor` of shape `[P, hidden_size]`): of slots that carry loss; `P` may be 0.
        labels (`torch.LongTensor` of shape `[P]`): indices of the tokens in the vocabulary of the head.
        terms ([`LossTerms`]): the terms of the loss and their weights.
        target_states (`torch.FloatTensor` of shape `[P, hidden_size]`, *optional*):
            States of the target after its final norm, one position before each slot, which predict its token.
        compute_target_logits (`Callable`, *optional*):
            Computes the target's logits from such states, with cap and scale.
        chunk_size (`int`, *optional*):
            Slots whose logits exist at one time where whole rows are needed; by default [`default_chunk_size`].
        vocabulary (`torch.LongTensor` of shape `[draft_vocab_size]`, *optional*):
            The tokens of the head if it does not cover the vocabulary of the target.

    Returns:
        [`HeadLosses`], not reduced.

    Raises:
        ValueError: a term needs the logits of the target, and there are none.
    """
    if terms.needs_target_logits and (target_states is None or compute_target_logits is None):
        raise ValueError(
            f"{terms} compares with the target's distribution, and target_states or compute_target_logits is None. "
            "Pass both, or leave l1_weight, kl_weight and soft_labels at their defaults."
        )
    if not terms.needs_target_logits and is_plain_head(head):
        weight: Any = head.weight
        cross_entropy, is_correct = _ChunkedLinearCrossEntropy.apply(hidden_states, weight.detach(), labels)
        return HeadLosses(terms.ce_weight * cross_entropy, cross_entropy.detach(), is_correct)

    def chunk_losses(chunk: torch.Tensor, slots: slice) -> HeadLosses:
        logits = head(cast_for(head, chunk)).float()
        cross_entropy = functional.cross_entropy(logits, labels[slots], reduction="none")
        target_logits = None
        if terms.needs_target_logits and target_states is not None and compute_target_logits is not None:
            with torch.no_grad():
                target_logits = compute_target_logits(target_states[slots]).float()
        is_correct = logits.argmax(-1) == labels[slots]
        return HeadLosses(
            slot_loss(logits, cross_entropy, target_logits, terms, vocabulary), cross_entropy, is_correct
        )

    chunk_size = chunk_size or default_chunk_size(hidden_states.device)
    return HeadLosses(*_ChunkedHeadLoss.apply(hidden_states, chunk_losses, chunk_size))


def corrected_head_losses(
    head: DraftHead,
    hidden_states: torch.Tensor,
    previous_token_ids: torch.Tensor,
    supervised: torch.Tensor,
    labels: torch.Tensor,
    *,
    terms: LossTerms = CROSS_ENTROPY,
    target_states: torch.Tensor | None = None,
    compute_target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int | None = None,
) -> HeadLosses:
    """
    Compute the losses of slots whose logits a selector or a Markov head corrects, with the true token before each.

    The corrections have trained weights, so that chunks of slots are computed once more in the backward pass. The
    cross-entropy is that of the corrected logits of a Markov head, and that of the uncorrected ones before a selector,
    whose own cross-entropy over the candidates is added.

    Args:
        head ([`DraftHead`]): the head of the draft.
        hidden_states (`torch.FloatTensor` of shape `[N, T, hidden_size]`): states of all tokens of the blocks.
        previous_token_ids (`torch.LongTensor` of shape `[N, T]`): the token before each of them.
        supervised (`torch.BoolTensor` of shape `[N, T]`): `P` tokens that carry loss.
        labels (`torch.LongTensor` of shape `[P]`): their indices in the vocabulary of the draft.
        terms, target_states, compute_target_logits, chunk_size: as in [`chunked_head_losses`].

    Returns:
        [`HeadLosses`], not reduced. `is_correct` is True where the corrected choice is the label.

    Raises:
        ValueError: a term or a confidence head needs the logits of the target, and there are none.
    """
    predicts_confidence = head.draft.confidence_head is not None and terms.confidence_weight > 0
    needs_target_logits = terms.needs_target_logits or predicts_confidence
    if needs_target_logits and (target_states is None or compute_target_logits is None):
        raise ValueError(
            f"{terms} or the confidence head of the draft compares with the target's distribution, and target_states "
            "or compute_target_logits is None. Pass both, or leave these terms at 0."
        )
    features = _features_of_blocks(head, hidden_states, previous_token_ids)
    confidence = head.confidence(previous_token_ids[supervised], hidden_states[supervised])
    parts: list[torch.Tensor | None] = [
        hidden_states[supervised],
        None if features is None else features[supervised],
        confidence if predicts_confidence else None,
    ]

    def chunk_losses(start: int, *chunk: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states, chunk_features, chunk_confidence = chunk
        slots = slice(start, start + len(labels[start:][:chunk_size]))
        logits = head.logits(states)  # type: ignore[arg-type]
        scores, candidates = head.correct(logits, chunk_features)
        full_scores = logits.float() if candidates is not None else scores
        cross_entropy = functional.cross_entropy(full_scores, labels[slots], reduction="none")
        target_logits = None
        if needs_target_logits and target_states is not None and compute_target_logits is not None:
            with torch.no_grad():
                target_logits = compute_target_logits(target_states[slots]).float()
        loss = slot_loss(full_scores, cross_entropy, target_logits, terms, head.vocabulary)
        choices = scores.argmax(-1, keepdim=True)
        if candidates is not None:
            loss = loss + terms.selector_weight * selector_loss(scores, candidates, labels[slots])
            choices = candidates.gather(-1, choices)
        if chunk_confidence is not None and target_logits is not None:
            with torch.no_grad():
                accepted = (1 - l1_distance(full_scores, target_logits, head.vocabulary) / 2).clamp(0, 1)
            loss = loss + terms.confidence_weight * functional.binary_cross_entropy_with_logits(
                chunk_confidence, accepted, reduction="none"
            )
        return loss, cross_entropy.detach(), choices[:, 0] == labels[slots]

    chunk_size = chunk_size or default_chunk_size(hidden_states.device)
    results = []
    for start in range(0, max(len(labels), 1), chunk_size):
        chunk = [None if part is None else part[start : start + chunk_size] for part in parts]
        results.append(checkpoint(chunk_losses, start, *chunk, use_reentrant=False))
    return HeadLosses(*(torch.cat(values) for values in zip(*results, strict=True)))


def _features_of_blocks(
    head: DraftHead, hidden_states: torch.Tensor, previous_token_ids: torch.Tensor
) -> torch.Tensor | None:
    """Return the features of all tokens of blocks, of shape `[N, T, rank]`, or `None` if nothing is corrected."""
    markov_head = head.draft.markov_head
    if markov_head is None or markov_head.kind != "rnn":
        return head.features(previous_token_ids, hidden_states)[0]
    state, features = None, []
    for place in range(1, hidden_states.shape[1]):
        feature, state = head.features(previous_token_ids[:, place], hidden_states[:, place], state)
        features.append(feature)
    return functional.pad(torch.stack(features, dim=1), (0, 0, 1, 0))  # type: ignore[arg-type]
