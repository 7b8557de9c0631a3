"""Losses and weights of the slots of blocks, one value for each slot. The caller sums and divides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_LOSS_DECAY = 0.02  # below it the weight of the second drafted slot is close to the smallest number of fp32
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
        loss_decay (`float`, *optional*): decay constant in slots, at least 0.02; `None` gives all slots the same
            weight.

    Returns:
        `torch.FloatTensor` of shape `[N, B]`, fp32. The loss is divided by their sum over the whole optimizer step.

    Raises:
        ValueError: `loss_decay` is smaller, or not a number.
    """
    if loss_decay is not None and not loss_decay >= MIN_LOSS_DECAY:
        raise ValueError(f"loss_decay={loss_decay} must be at least {MIN_LOSS_DECAY}. Pass a larger number.")
    slots = torch.arange(loss_mask.shape[1], device=loss_mask.device, dtype=torch.float32)
    weights = torch.ones_like(slots) if loss_decay is None else torch.exp(-(slots - 1).clamp(min=0) / loss_decay)
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
    if slot_weights == "uniform":
        return decay_weights(loss_mask, None)
    return decay_weights(loss_mask, default_loss_decay(loss_mask.shape[1]) if loss_decay is None else loss_decay)


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
        selector_weight (`float`, defaults to 1.0): weight of the cross-entropy of a candidate selector, where the
            draft has one.
        confidence_weight (`float`, defaults to 1.0): weight of the binary cross-entropy of a confidence head, where
            the draft has one.
    """

    ce_weight: float = 1.0
    l1_weight: float = 0.0
    kl_weight: float = 0.0
    kl_top_k: int = 10
    kl_temperature: float = 1.0
    soft_labels: bool = False
    selector_weight: float = 1.0
    confidence_weight: float = 1.0

    @property
    def needs_target_logits(self) -> bool:
        """`bool`: whether a term needs the logits of the target."""
        return self.soft_labels or self.l1_weight > 0 or self.kl_weight > 0


CROSS_ENTROPY = LossTerms()


def l1_distance(
    logits: torch.Tensor, target_logits: torch.Tensor, vocabulary: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return the L1 distance of two distributions over the vocabulary, 0 to 2.

    Args:
        logits (`torch.FloatTensor` of shape `[P, draft_vocab_size or vocab_size]`): logits of the draft.
        target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`): logits of the target.
        vocabulary (`torch.LongTensor` of shape `[draft_vocab_size]`, *optional*): the tokens of a reduced vocabulary,
            outside of which the draft's probabilities are zero.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32. Half of it is the probability that a sampled token is rejected.

    Example:

    ```python
    >>> l1_distance(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -100.0]]))
    tensor([1.])

    ```
    """
    probabilities = target_logits.float().softmax(-1)
    if vocabulary is None:
        return (logits.float().softmax(-1) - probabilities).abs().sum(-1)
    kept = probabilities[:, vocabulary]
    return (logits.float().softmax(-1) - kept).abs().sum(-1) + (1 - kept.sum(-1)).clamp(min=0)


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


def selector_loss(scores: torch.Tensor, candidates: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Return the cross-entropy of a selector over the candidates of each slot, which is 0 where the label is none.

    Args:
        scores (`torch.FloatTensor` of shape `[P, K]`): scores of the candidates.
        candidates (`torch.LongTensor` of shape `[P, K]`): their token ids.
        labels (`torch.LongTensor` of shape `[P]`): token ids.

    Returns:
        `torch.FloatTensor` of shape `[P]`, fp32.

    Example:

    ```python
    >>> selector_loss(torch.zeros(2, 2), torch.tensor([[3, 5], [3, 5]]), torch.tensor([5, 4]))
    tensor([0.6931, 0.0000])

    ```
    """
    is_label = candidates == labels[:, None]
    losses = -scores.float().log_softmax(-1)
    return losses.masked_fill(~is_label, 0).sum(-1)


def slot_loss(
    logits: torch.Tensor,
    cross_entropy: torch.Tensor,
    target_logits: torch.Tensor | None,
    terms: LossTerms,
    vocabulary: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Combine the terms of the loss of each slot.

    With a reduced vocabulary the L1 distance counts the target's probability of all other tokens, which cannot be
    accepted. The other terms compare with the target's distribution over the reduced vocabulary alone.

    Args:
        logits (`torch.FloatTensor` of shape `[P, draft_vocab_size or vocab_size]`): logits of the draft.
        cross_entropy (`torch.FloatTensor` of shape `[P]`): cross-entropy against the token of the text.
        target_logits (`torch.FloatTensor` of shape `[P, vocab_size]`, *optional*): logits of the target.
        terms ([`LossTerms`]): the terms and their weights.
        vocabulary (`torch.LongTensor` of shape `[draft_vocab_size]`, *optional*): the tokens of a reduced vocabulary.

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
    distance = l1_distance(logits, target_logits, vocabulary) if terms.l1_weight > 0 else None
    if vocabulary is not None:
        target_logits = target_logits[:, vocabulary]
    loss = terms.ce_weight * (soft_cross_entropy(logits, target_logits) if terms.soft_labels else cross_entropy)
    if distance is not None:
        loss = loss + terms.l1_weight * distance
    if terms.kl_weight > 0:
        divergence = top_k_kl(logits, target_logits, terms.kl_top_k, terms.kl_temperature)
        loss = terms.kl_weight * divergence + (1 - terms.kl_weight) * loss
    return loss
