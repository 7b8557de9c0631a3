"""Positions of blocks and ranges in a drawing, shared by the page and the figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rows import Block


def assign_lanes(blocks: Sequence[Block]) -> list[int]:
    """
    Assign each block to a lane so that the blocks of one lane do not overlap.

    Args:
        blocks (`Sequence[Block]`): Blocks in ascending order of their anchors.

    Returns:
        `list[int]`: The lane of each block, counted from 0. As few lanes as possible are used.

    Example:

    ```python
    >>> assign_lanes([Block(0, 0, 4, 3), Block(2, 2, 4, 3), Block(4, 4, 4, 3)])
    [0, 1, 0]

    ```
    """
    ends: list[int] = []
    lanes = []
    for block in blocks:
        lane = next((number for number, end in enumerate(ends) if end <= block.anchor), len(ends))
        ends[lane : lane + 1] = [block.end]
        lanes.append(lane)
    return lanes


def true_ranges(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """
    Return the ranges of consecutive True entries.

    Args:
        mask (`Sequence[bool]`): A mask of any length.

    Returns:
        `list[tuple[int, int]]`: The first position of each range and the position after its last.

    Example:

    ```python
    >>> true_ranges([False, True, True, False, True])
    [(1, 3), (4, 5)]

    ```
    """
    edges = np.flatnonzero(np.diff(np.asarray([False, *mask, False], dtype=np.int8)))
    return [(int(first), int(after)) for first, after in edges.reshape(-1, 2)]
