"""Which drafted tokens a verify pass accepts, and what it commits after them. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Acceptance:
    """
    What one verify pass decided, for each row.

    Args:
        num_accepted (`torch.LongTensor` of shape `[rows]`): leading drafted tokens that stay.
        next_tokens (`torch.LongTensor` of shape `[rows]`): the target's own token after them.
        expected (`torch.FloatTensor` of shape `[rows]`): number of tokens this pass commits in expectation, given the
            drafted tokens and the target's probabilities; with greedy decoding it is what was committed.
    """

    num_accepted: torch.Tensor
    next_tokens: torch.Tensor
    expected: torch.Tensor


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """
    The token with the highest score, the first of equals, as `argmax`, which takes three times as long on a CPU.

    Args:
        scores (`torch.FloatTensor` of shape `[..., vocabulary]`): any dtype.

    Returns:
        `torch.LongTensor` of shape `[...]`.
    """
    return scores.max(-1).indices


def accept_greedily(drafted: torch.Tensor, scores: torch.Tensor) -> Acceptance:
    """
    Accept drafted tokens as long as each is the one the target would have chosen.

    Args:
        drafted (`torch.LongTensor` of shape `[rows, slots - 1]`): proposals for slots 1 … slots - 1.
        scores (`torch.FloatTensor` of shape `[rows, slots, vocabulary]`): what the target says comes after each slot.

    Returns:
        [`Acceptance`]

    Example:

    ```python
    >>> scores = torch.eye(4)[torch.tensor([[2, 3, 1]])]
    >>> accept_greedily(torch.tensor([[2, 0]]), scores).num_accepted.tolist()
    [1]

    ```
    """
    chosen = best_tokens(scores)
    num_accepted = (drafted == chosen[:, :-1]).long().cumprod(1).sum(1)
    return Acceptance(num_accepted, chosen.gather(1, num_accepted[:, None])[:, 0], num_accepted + 1.0)


def accept_by_probability(
    drafted: torch.Tensor, scores: torch.Tensor, draft_scores: torch.Tensor | None = None
) -> Acceptance:
    """
    Accept drafted tokens at random so that what is committed has exactly the target's distribution.

    A token `x` with target probability `p(x)` that was drawn from `q` is accepted with probability
    `min(1, p(x) / q(x))`; after the first rejection the next token comes from `max(0, p - q)`, renormalised, and after
    a full acceptance from `p`. A token that was chosen without chance, such as the draft's argmax, has `q(x) = 1`: it
    is accepted with probability `p(x)`, and a rejection draws from `p` without `x`.

    Args:
        drafted (`torch.LongTensor` of shape `[rows, slots - 1]`): proposals for slots 1 … slots - 1.
        scores (`torch.FloatTensor` of shape `[rows, slots, vocabulary]`): log-probabilities of the target after each
            slot, up to a constant; `-inf` where a processor forbids a token.
        draft_scores (`torch.FloatTensor` of shape `[rows, slots - 1, vocabulary]`, *optional*): the same of the
            distribution that each proposal was drawn from; `None` if nothing was drawn.

    Returns:
        [`Acceptance`]

    Source: algorithm 1 of "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
    """
    probabilities = scores.softmax(-1)
    num_drafted = drafted.shape[1]
    of_drafted = probabilities[:, :num_drafted].gather(2, drafted[..., None])[..., 0]
    if draft_scores is None:
        ratio = of_drafted
    else:
        draft_probabilities = draft_scores.softmax(-1)
        ratio = of_drafted / draft_probabilities.gather(2, drafted[..., None])[..., 0]
    accepted = torch.rand_like(ratio) < ratio
    num_accepted = accepted.long().cumprod(1).sum(1)

    rows = torch.arange(len(drafted), device=drafted.device)
    residual = probabilities[rows, num_accepted]
    if num_drafted:
        is_rejected = num_accepted < num_drafted
        slot = num_accepted.clamp(max=num_drafted - 1)
        if draft_scores is None:
            taken = torch.zeros_like(residual).scatter_(1, drafted.gather(1, slot[:, None]), 1.0)
        else:
            taken = draft_probabilities[rows, slot]
        reduced = (residual - taken).clamp(min=0)
        # nothing left can only be rounding: the two distributions are equal
        is_rejected = is_rejected & (reduced.sum(1) > 0)
        residual = torch.where(is_rejected[:, None], reduced, residual)
    next_tokens = torch.multinomial(residual, 1)[:, 0]
    return Acceptance(num_accepted, next_tokens, 1 + ratio.clamp(max=1).cumprod(1).sum(1))
