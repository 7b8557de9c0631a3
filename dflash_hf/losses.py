"""Losses of a draft's slots: pure functions that return sums, so that the caller chooses the denominator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DEFAULT_LOSS_DECAY = {7: 4.0, 8: 4.0, 10: 5.0, 16: 7.0}


def default_loss_decay(block_size: int) -> float:
    """
    The position decay that published drafts of this block size were trained with; in between, the nearest one.

    Example:

    ```python
    >>> default_loss_decay(16), default_loss_decay(8), default_loss_decay(4)
    (7.0, 4.0, 4.0)

    ```
    """
    return DEFAULT_LOSS_DECAY[min(DEFAULT_LOSS_DECAY, key=lambda size: abs(size - block_size))]


def decay_weights(loss_mask: torch.Tensor, loss_decay: float | None) -> torch.Tensor:
    """
    Weights that fall with the slot: `exp(-(k - 1) / loss_decay)` where `loss_mask` is True, 0 elsewhere.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): slots that carry loss; never slot 0.
        loss_decay (`float`, *optional*): in slots; `None` weighs all alike.

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32. The loss divides by their sum over the whole optimizer step.
    """
    slots = torch.arange(loss_mask.shape[1], device=loss_mask.device, dtype=torch.float32)
    weights = torch.ones_like(slots) if loss_decay is None else torch.exp(-(slots - 1) / loss_decay)
    return weights * loss_mask


def dpace_weights(cross_entropy: torch.Tensor, loss_mask: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """
    D-PACE weights: a slot weighs what its block's later slots have at stake in it being right.

    With `s = (1 - alpha) * exp(-CE) + alpha` and `P_k` the product of `s` up to slot `k` (unsupervised slots count 1),
    the weight of slot `k` is the sum of `P_j` over the supervised slots `j >= k`. Detached from the graph.

    Args:
        cross_entropy (`torch.FloatTensor` of shape `[N, B]`): per slot; any value where `loss_mask` is False.
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): slots that carry loss.
        alpha (`float`, defaults to 0.5): 1.0 makes every `s` one.

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32, 0 where `loss_mask` is False. The loss divides by the step's
        number of supervised slots, since these weights are unknown before the forward pass.
    """
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach().float()) + alpha
    reach = confidence.masked_fill(~loss_mask, 1.0).cumprod(-1) * loss_mask
    return reach.flip(-1).cumsum(-1).flip(-1) * loss_mask


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen linear head; the gradient at the hidden state is formed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_slots, vocab_size = labels.shape[0], weight.shape[0]
        cross_entropy = torch.empty(num_slots, dtype=torch.float32, device=labels.device)
        predictions = torch.empty_like(labels)
        gradient = torch.empty_like(hidden_states) if ctx.needs_input_grad[0] else None
        # One pair of buffers for all chunks: on a CPU, fresh pages cost as much as the arithmetic.
        chunk_size = min(chunk_size, max(num_slots, 1))
        logits_buffer = weight.new_empty(chunk_size, vocab_size)
        exponentials_buffer = torch.empty(chunk_size, vocab_size, dtype=torch.float32, device=weight.device)
        for start in range(0, num_slots, chunk_size):
            rows = slice(start, min(start + chunk_size, num_slots))
            logits, exponentials = (buffer[: rows.stop - start] for buffer in (logits_buffer, exponentials_buffer))
            torch.mm(hidden_states[rows].to(weight.dtype), weight.t(), out=logits)
            exponentials.copy_(logits)
            best, predictions[rows] = exponentials.max(-1)
            label_logits = exponentials.gather(1, labels[rows, None])[:, 0]
            total = exponentials.sub_(best[:, None]).exp_().sum(-1)
            cross_entropy[rows] = total.log() + best - label_logits
            if gradient is not None:  # softmax @ W - W[label]
                mean_row = (logits.copy_(exponentials) @ weight).float() / total[:, None]
                gradient[rows] = (mean_row - weight[labels[rows]].float()).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(predictions)
        return cross_entropy, predictions

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None


def head_cross_entropy(
    head: nn.Module, hidden_states: torch.Tensor, labels: torch.Tensor, *, chunk_size: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cross-entropy of a frozen head's logits, in chunks, so that peak memory does not grow with slots × vocabulary.

    A plain linear head forms the gradient while its logits are at hand; any other head (biased, quantised, adapted)
    is recomputed in the backward pass.

    Args:
        head (`nn.Module`): the target's head; its parameters get no gradient.
        hidden_states (`torch.FloatTensor` of shape `[P, hidden_size]`): supervised slots only; `P` may be 0.
        labels (`torch.LongTensor` of shape `[P]`): token ids.
        chunk_size (`int`, defaults to 256): slots whose logits exist at one time.

    Returns:
        `tuple[torch.FloatTensor, torch.LongTensor]`, each of shape `[P]`: the cross-entropy of each slot in fp32,
        differentiable in `hidden_states` (not reduced), and the most likely token.
    """
    weight = head.weight if isinstance(head.weight, torch.Tensor) and head.weight.is_floating_point() else None
    is_plain = type(head) is nn.Linear and head.bias is None and type(weight) in (nn.Parameter, torch.Tensor)
    if is_plain and weight is not None:
        return _FrozenHeadCrossEntropy.apply(hidden_states, weight.detach(), labels, chunk_size)

    frozen = {name: parameter.detach() for name, parameter in head.named_parameters()}

    def chunk_loss(chunk: torch.Tensor, chunk_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = chunk if weight is None else chunk.to(weight.dtype)
        logits = functional_call(head, frozen, (chunk,)).float()
        return functional.cross_entropy(logits, chunk_labels, reduction="none"), logits.argmax(-1)

    chunks = [
        checkpoint(chunk_loss, chunk, chunk_labels, use_reentrant=False)
        for chunk, chunk_labels in zip(hidden_states.split(chunk_size), labels.split(chunk_size), strict=True)
    ]
    cross_entropies, predictions = zip(*chunks, strict=True)
    return torch.cat(cross_entropies), torch.cat(predictions)
