"""Trees of drafted tokens, which verify later choices of the draft together with its first ones."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

# The draft's choice of rank r (0 = best) at a slot is assumed to be right with probability
# FIRST_CHOICE_PROBABILITY · (r + 1) ^ -RANK_EXPONENT. Only the order of the nodes that follows from this matters.
# Trees made from measured acceptance gained no more.
FIRST_CHOICE_PROBABILITY, RANK_EXPONENT = 0.5, 1.5
MAX_RANKS = 16  # choices that are considered at a slot


@dataclass(frozen=True, eq=False)
class TreeLevel:
    """
    The nodes of a tree in one slot.

    Args:
        nodes, ranks (`torch.LongTensor` of shape `[nodes of the level]`):
            The nodes, and the rank of each among the choices after its parent.
        parents (`torch.LongTensor` of shape `[parents of the level]`):
            The nodes of the slot before that have children, without repetition.
        parent_indices (`torch.LongTensor` of shape `[nodes of the level]`):
            The place of each node's parent in `parents`.
        num_ranks (`int`):
            Number of choices that the level uses after a parent.
    """

    nodes: torch.Tensor
    ranks: torch.Tensor
    parents: torch.Tensor
    parent_indices: torch.Tensor
    num_ranks: int


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    A tree of drafted tokens. Node 0 is the anchor, and the depth of a node is its slot in the block.

    A plain block is a chain, with one choice at every slot. In every tree the nodes of that chain come first.

    Args:
        depths, ranks, parents (`torch.LongTensor` of shape `[nodes]`):
            The slot of each node, its rank among the draft's choices for that slot, and the node before it. The anchor
            is its own parent.
        ancestors (`torch.BoolTensor` of shape `[nodes, nodes]`):
            `[i, j]` is True if node `j` is on the path from the anchor to node `i`, both ends included.
        elder_siblings (`torch.BoolTensor` of shape `[nodes, nodes]`):
            `[i, j]` is True if `j` has the parent of `i` and a better rank.
        paths (`torch.LongTensor` of shape `[nodes, slots]`):
            The nodes on the path from the anchor to each node, by depth. The node itself fills the remaining places.
        chain_length (`int`):
            Number of nodes of the chain of first choices, the anchor included.
        num_ranks (`int`):
            Number of choices that the tree uses at a slot.
        levels (`tuple` of [`TreeLevel`]):
            The nodes of slot 1, slot 2 and so on.
    """

    depths: torch.Tensor
    ranks: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    elder_siblings: torch.Tensor
    paths: torch.Tensor
    chain_length: int
    num_ranks: int
    levels: tuple[TreeLevel, ...]

    @property
    def num_nodes(self) -> int:
        """`int`: number of tokens that a pass verifies, the anchor included."""
        return len(self.depths)

    @property
    def num_slots(self) -> int:
        """`int`: number of slots of the block that are used, the anchor included."""
        return self.paths.shape[1]

    @property
    def is_chain(self) -> bool:
        """`bool`: whether there is one choice at every slot."""
        return self.chain_length == self.num_nodes


@lru_cache(maxsize=256)
def draft_tree(num_slots: int, num_nodes: int, device: torch.device) -> DraftTree:
    """
    Build the tree of the likeliest nodes.

    Args:
        num_slots (`int`): number of slots that may be used, the anchor included.
        num_nodes (`int`): number of tokens to verify, the anchor included. Up to `num_slots` they form a chain.
        device (`torch.device`): device of the tensors.

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
        probabilities = [FIRST_CHOICE_PROBABILITY * (rank + 1) ** -RANK_EXPONENT for rank in range(MAX_RANKS)]
        chosen = []
        heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while len(chosen) < num_nodes and heap:
            negative, choice = heapq.heappop(heap)
            if choice:
                chosen.append(choice)
            if len(chosen) == num_nodes - 1:
                break
            if len(choice) < num_slots - 1:
                for rank, probability in enumerate(probabilities):
                    heapq.heappush(heap, (negative * probability, (*choice, rank)))
    nodes = sorted([(), *chosen], key=lambda choice: (any(choice), len(choice), choice))
    index = {choice: position for position, choice in enumerate(nodes)}
    depths = [len(choice) for choice in nodes]
    paths = [[index[choice[: min(depth, len(choice))]] for depth in range(max(depths) + 1)] for choice in nodes]
    parents = [index[choice[:-1]] for choice in nodes]

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, device=device)

    def level(depth: int) -> TreeLevel:
        members = [node for node, length in enumerate(depths) if length == depth]
        before = sorted({parents[node] for node in members})
        ranks = [nodes[node][-1] for node in members]
        places = [before.index(parents[node]) for node in members]
        return TreeLevel(tensor(members), tensor(ranks), tensor(before), tensor(places), 1 + max(ranks))

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
        levels=tuple(level(depth) for depth in range(1, max(depths) + 1)),
    )
