"""Which drafted tokens a verify pass accepts, and what it commits after them. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .tree import DraftTree


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


def accept_in_tree(
    drafted: torch.Tensor, scores: torch.Tensor, tree: DraftTree, *, do_sample: bool
) -> tuple[Acceptance, torch.Tensor]:
    """
    Accept the path of a tree of drafted tokens that the target takes.

    At each node the target's token is its best one, or one drawn from its distribution; if a child of the node has
    that token, the walk goes on there. So what is committed has exactly the target's distribution, whatever was
    drafted.

    Args:
        drafted (`torch.LongTensor` of shape `[rows, nodes - 1]`): tokens of nodes 1 … nodes - 1.
        scores (`torch.FloatTensor` of shape `[rows, nodes, vocabulary]`): of the target after each node, as for
            [`accept_greedily`] and [`accept_by_probability`].
        tree ([`DraftTree`]): of the nodes.
        do_sample (`bool`): draw from the target's distribution.

    Returns:
        `tuple`: [`Acceptance`], and the last accepted node of each row, `torch.LongTensor` of shape `[rows]`.
    """
    rows = torch.arange(len(drafted), device=drafted.device)
    parents, vocabulary = tree.parents[1:], scores.shape[-1]
    if do_sample:
        of_drafted = scores.flatten(1).gather(1, parents * vocabulary + drafted)
        log_probabilities = of_drafted - scores.logsumexp(-1)[:, parents]
        probabilities = log_probabilities.exp()
        before = probabilities @ tree.elder_siblings[1:, 1:].t().to(probabilities.dtype)
        drawn = torch.rand(scores.shape[:2], device=scores.device)[:, parents]
        accepted = (drawn >= before) & (drawn < before + probabilities)
    else:
        chosen = best_tokens(scores)
        accepted = drafted == chosen[:, parents]
    on_the_way = tree.ancestors[1:, 1:].float()
    is_reached = (accepted.float() @ on_the_way.t()) == tree.depths[1:]
    depths = nn.functional.pad(is_reached.long() * tree.depths[1:], (1, 0))
    num_accepted, node = depths.max(1)
    if not do_sample:
        return Acceptance(num_accepted, chosen[rows, node], num_accepted + 1.0), node

    distribution = scores[rows, node].softmax(-1)
    is_child = parents == node[:, None]
    kept = torch.where(is_child, 0.0, distribution.gather(1, drafted))
    reduced = distribution.scatter_reduce(1, drafted, kept, "amin")
    # nothing left can only be rounding: the children have all of the probability
    distribution = torch.where(reduced.sum(1, keepdim=True) > 0, reduced, distribution)
    possible = log_probabilities.clamp(min=-1e4)  # -inf · 0 would be NaN
    expected = 1 + (possible @ on_the_way.t()).exp().sum(1)
    return Acceptance(num_accepted, torch.multinomial(distribution, 1)[:, 0], expected), node
