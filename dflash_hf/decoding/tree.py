"""Which second choices of the draft are verified together with its first ones: a tree of tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

# The choice of rank r (0 = best) at a slot is taken to be right with probability RIGHT · (r + 1) ^ -DECAY. What counts
# is the order that this gives; trees made from measured acceptance gained no more.
RIGHT, DECAY = 0.5, 1.5
MAX_RANKS = 16


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    Nodes of a tree of drafted tokens; node 0 is the anchor, and a node's depth is its slot in the block.

    One choice at every slot makes a chain, the plain block. The nodes of that chain come first.

    Args:
        depths, ranks, parents (`torch.LongTensor` of shape `[nodes]`): slot, rank among the draft's choices there, and
            the node before. The anchor is its own parent.
        ancestors (`torch.BoolTensor` of shape `[nodes, nodes]`): `[i, j]`: node `j` is on the way to `i`, or is `i`.
        elder_siblings (`torch.BoolTensor` of shape `[nodes, nodes]`): `[i, j]`: `j` is a better choice at that place.
        paths (`torch.LongTensor` of shape `[nodes, slots]`): the nodes on the way to each, by depth; then itself.
        chain_length (`int`): nodes of the chain of first choices, the anchor included.
        num_ranks (`int`): choices that are looked at in a slot.
    """

    depths: torch.Tensor
    ranks: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    elder_siblings: torch.Tensor
    paths: torch.Tensor
    chain_length: int
    num_ranks: int

    @property
    def num_nodes(self) -> int:
        """`int`: tokens that a pass verifies, the anchor included."""
        return len(self.depths)

    @property
    def num_slots(self) -> int:
        """`int`: slots of the block that are drafted, the anchor included."""
        return self.paths.shape[1]

    @property
    def is_chain(self) -> bool:
        """`bool`: one choice at every slot."""
        return self.chain_length == self.num_nodes


@lru_cache(maxsize=256)
def draft_tree(num_slots: int, num_nodes: int, device: torch.device) -> DraftTree:
    """
    The tree of the likeliest choices.

    Args:
        num_slots (`int`): slots that may be used, the anchor included.
        num_nodes (`int`): tokens to verify, the anchor included. Up to `num_slots` they are a chain.
        device (`torch.device`): of the tensors.

    Returns:
        [`DraftTree`]

    Example:

    ```python
    >>> tree = draft_tree(3, 5, torch.device("cpu"))
    >>> tree.parents.tolist(), tree.ranks.tolist()
    ([0, 0, 1, 0, 0], [0, 0, 0, 1, 2])

    ```
    """
    if num_nodes <= num_slots:
        chosen = [(0,) * depth for depth in range(1, num_nodes)]
    else:
        right = [RIGHT * (rank + 1) ** -DECAY for rank in range(MAX_RANKS)]
        chosen = []
        heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while len(chosen) < num_nodes and heap:
            negative, choice = heapq.heappop(heap)
            if choice:
                chosen.append(choice)
            if len(chosen) == num_nodes - 1:
                break
            if len(choice) < num_slots - 1:
                for rank, probability in enumerate(right):
                    heapq.heappush(heap, (negative * probability, (*choice, rank)))
    nodes = sorted([(), *chosen], key=lambda choice: (any(choice), len(choice), choice))
    index = {choice: position for position, choice in enumerate(nodes)}
    depths = [len(choice) for choice in nodes]
    paths = [[index[choice[: min(depth, len(choice))]] for depth in range(max(depths) + 1)] for choice in nodes]
    parents = [index[choice[:-1]] for choice in nodes]

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return DraftTree(
        depths=tensor(depths),
        ranks=tensor([choice[-1] if choice else 0 for choice in nodes]),
        parents=tensor(parents),
        ancestors=tensor([[other == choice[: len(other)] for other in nodes] for choice in nodes]),
        elder_siblings=tensor(
            [
                [len(other) == len(choice) > 0 and other[:-1] == choice[:-1] and other < choice for other in nodes]
                for choice in nodes
            ]
        ),
        paths=tensor(paths),
        chain_length=sum(not any(choice) for choice in nodes),
        num_ranks=1 + max((choice[-1] for choice in chosen), default=0),
    )
