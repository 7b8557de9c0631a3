"""Losses and weights of the slots of blocks, one value for each slot. The caller sums and divides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional

DEFAULT_LOSS_DECAY = {7: 4.0, 8: 4.0, 10: 5.0, 16: 7.0}


def default_loss_decay(block_size: int) -> float:
    """
    Return the decay constant with which published drafts of this or the nearest block size were trained.

    Example:

    ```python
    >>> default_loss_decay(16), default_loss_decay(8), default_loss_decay(4)
    (7.0, 4.0, 4.0)

    ```
    """
    return DEFAULT_LOSS_DECAY[min(DEFAULT_LOSS_DECAY, key=lambda size: abs(size - block_size))]


def decay_weights(loss_mask: torch.Tensor, loss_decay: float | None) -> torch.Tensor:
    """
    Return weights that decay with the slot: `exp(-(k - 1) / loss_decay)` where `loss_mask` is True, 0 elsewhere.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): True at slots that carry loss; never at slot 0.
        loss_decay (`float`, *optional*): decay constant in slots; `None` gives all slots the same weight.

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32. The loss is divided by their sum over the whole optimizer step.
    """
    slots = torch.arange(loss_mask.shape[1], device=loss_mask.device, dtype=torch.float32)
    weights = torch.ones_like(slots) if loss_decay is None else torch.exp(-(slots - 1) / loss_decay)
    return weights * loss_mask


def position_weights(loss_mask: torch.Tensor, slot_weights: str, loss_decay: float | None) -> torch.Tensor:
    """
    Return the weights that depend on the slot only, which are known before the forward pass.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): True at slots that carry loss.
        slot_weights (`str`): `"decay"` or `"uniform"`.
        loss_decay (`float`, *optional*): decay constant in slots; by default [`default_loss_decay`].

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32, 0 where `loss_mask` is False.
    """
    is_uniform = slot_weights == "uniform"
    return decay_weights(loss_mask, None if is_uniform else loss_decay or default_loss_decay(loss_mask.shape[1]))


def loss_denominator(loss_mask: torch.Tensor, slot_weights: str, loss_decay: float | None) -> torch.Tensor:
    """
    Return what a batch adds to the divisor of the loss, which is known before the forward pass.

    Args:
        loss_mask, loss_decay: as in [`position_weights`].
        slot_weights (`str`): `"decay"`, `"uniform"` or `"dpace"`. D-PACE weights are not known before the forward
            pass, so that the loss is divided by the number of slots that carry loss.

    Returns:
        `torch.FloatTensor`, a scalar in fp32.
    """
    if slot_weights == "dpace":
        return loss_mask.sum().float()
    return position_weights(loss_mask, slot_weights, loss_decay).sum()


def dpace_weights(cross_entropy: torch.Tensor, loss_mask: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """
    Return D-PACE weights: the expected number of accepted slots from a slot on, under smoothed confidences.

    Let `s = (1 - alpha) * exp(-CE) + alpha` be the smoothed confidence of a slot, and `P_k` the product of `s` up to
    slot `k`, in which slots without loss count as 1. The weight of slot `k` is the sum of `P_j` over the slots
    `j >= k` that carry loss. It is detached from the graph.

    Args:
        cross_entropy (`torch.FloatTensor` of shape `[N, B]`): of each slot; any value where `loss_mask` is False.
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): True at slots that carry loss.
        alpha (`float`, defaults to 0.5): smallest confidence of a slot; with 1.0 every `s` is one.

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32, 0 where `loss_mask` is False. The loss is divided by the number of
        slots that carry loss in the step, since these weights are unknown before the forward pass.
    """
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach().float()) + alpha
    reach = confidence.masked_fill(~loss_mask, 1.0).cumprod(-1) * loss_mask
    return reach.flip(-1).cumsum(-1).flip(-1) * loss_mask


@dataclass(frozen=True)
class LossTerms:
    """
    Terms of a slot's loss: `kl_weight * KL + (1 - kl_weight) * (ce_weight * CE + l1_weight * L1)`.

    All terms but the plain cross-entropy compare with the distribution of the target.

    Args:
        ce_weight (`float`, defaults to 1.0): weight of the cross-entropy.
        l1_weight (`float`, defaults to 0.0): weight of [`l1_distance`].
        kl_weight (`float`, defaults to 0.0): weight of [`top_k_kl`], 0 to 1.
        kl_top_k (`int`, defaults to 10): number of most likely tokens of the target in the KL divergence.
        kl_temperature (`float`, defaults to 1.0): temperature of both distributions in the KL divergence.
        soft_labels (`bool`, defaults to `False`): compute the cross-entropy against the distribution of the target
            instead of the token of the text.
    """

    ce_weight: float = 1.0
    l1_weight: float = 0.0
    kl_weight: float = 0.0
    kl_top_k: int = 10
    kl_temperature: float = 1.0
    soft_labels: bool = False

    @property
    def needs_target_logits(self) -> bool:
        """`bool`: whether a term needs the logits of the target."""
        return self.soft_labels or self.l1_weight > 0 or self.kl_weight > 0


CROSS_ENTROPY = LossTerms()


def l1_distance(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """
    Return the L1 distance of two distributions over the vocabulary, 0 to 2.

    Args:
        logits, target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`): of the draft and of the target.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32. Half of it is the probability that a sampled token is rejected.

    Example:

    ```python
    >>> l1_distance(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -100.0]]))
    tensor([1.])

    ```
    """
    return (logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)


def top_k_kl(
    logits: torch.Tensor, target_logits: torch.Tensor, top_k: int = 10, temperature: float = 1.0
) -> torch.Tensor:
    """
    Return the KL divergence over the target's most likely tokens, whose probabilities are normalised to one.

    It is `T² · Σ p (log p - log q)` over the target's top K. Both softmaxes run over the whole vocabulary at
    temperature T, and only `p` is normalised over the K tokens.

    Args:
        logits, target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`): of the draft and of the target.
        top_k (`int`, defaults to 10): K.
        temperature (`float`, defaults to 1.0): T.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32.

    Example:

    ```python
    >>> top_k_kl(torch.tensor([[3.0, 3.0, 0.0]]), torch.tensor([[9.0, 9.0, 0.0]]), top_k=2).round(decimals=3)
    tensor([0.0250])

    ```
    """
    best, tokens = (target_logits.float() / temperature).topk(min(top_k, target_logits.shape[-1]), dim=-1)
    log_p = best.log_softmax(-1)  # normalised over K, so the rest of the vocabulary cancels
    log_q = (logits.float() / temperature).log_softmax(-1).gather(-1, tokens)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """
    Return the cross-entropy against the whole distribution of the target.

    Args:
        logits, target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`): of the draft and of the target.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32.

    Example:

    ```python
    >>> soft_cross_entropy(torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([0.6931])

    ```
    """
    return -(target_logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def slot_loss(
    logits: torch.Tensor, cross_entropy: torch.Tensor, target_logits: torch.Tensor | None, terms: LossTerms
) -> torch.Tensor:
    """
    Combine the terms of the loss of each slot.

    Args:
        logits (`torch.FloatTensor` of shape `[P, vocab_size]`): logits of the draft.
        cross_entropy (`torch.FloatTensor` of shape `[P]`): cross-entropy against the token of the text.
        target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`, *optional*): logits of the target.
        terms ([`LossTerms`]): the terms and their weights.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32.

    Raises:
        ValueError: a term needs the logits of the target, and there are none.
    """
    if target_logits is None:
        if terms.needs_target_logits:
            raise ValueError(
                f"{terms} compares with the target's distribution, and target_logits is None. Pass target_logits."
            )
        return terms.ce_weight * cross_entropy
    loss = terms.ce_weight * (soft_cross_entropy(logits, target_logits) if terms.soft_labels else cross_entropy)
    if terms.l1_weight > 0:
        loss = loss + terms.l1_weight * l1_distance(logits, target_logits)
    if terms.kl_weight > 0:
        divergence = top_k_kl(logits, target_logits, terms.kl_top_k, terms.kl_temperature)
        loss = terms.kl_weight * divergence + (1 - terms.kl_weight) * loss
    return loss


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


# Slots and vocabulary entries whose logits exist at one time. On a CPU such a tile fits the caches, where passes over
# it are cheap next to the matrix products. Other devices need larger tiles to be busy.
HEAD_TILES = {"cpu": (512, 2048)}
DEFAULT_HEAD_TILE = (4096, 8192)
SLOTS_STEP = 64


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
    weight: Any = head.weight
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
        labels (`torch.LongTensor` of shape `[P]`): token ids.
        terms ([`LossTerms`]): the terms of the loss and their weights.
        target_states (`torch.FloatTensor` of shape `[P, hidden_size]`, *optional*):
            States of the target after its final norm, one position before each slot, which predict its token.
        compute_target_logits (`Callable`, *optional*):
            Computes the target's logits from such states, with cap and scale.
        chunk_size (`int`, *optional*):
            Slots whose logits exist at one time where whole rows are needed; by default [`default_chunk_size`].

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
        weight = head.weight
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():  # a quantised head converts by itself
            chunk = chunk.to(weight.dtype)
        logits = head(chunk).float()
        cross_entropy = functional.cross_entropy(logits, labels[slots], reduction="none")
        target_logits = None
        if terms.needs_target_logits and target_states is not None and compute_target_logits is not None:
            with torch.no_grad():
                target_logits = compute_target_logits(target_states[slots]).float()
        is_correct = logits.argmax(-1) == labels[slots]
        return HeadLosses(slot_loss(logits, cross_entropy, target_logits, terms), cross_entropy, is_correct)

    chunk_size = chunk_size or default_chunk_size(hidden_states.device)
    return HeadLosses(*_ChunkedHeadLoss.apply(hidden_states, chunk_losses, chunk_size))
