"""How many slots of a block a pass verifies."""

from __future__ import annotations


class BlockLength:
    """
    A fixed number of slots.

    Args:
        num_slots (`int`): slots to verify, the anchor included.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def choose(self, num_rows: int) -> int:
        """Slots of the next pass."""
        return self.num_slots

    def start_pass(self) -> None:
        """Nothing is measured."""

    def end_pass(self, num_rows: int, num_slots: int, counts: list[int]) -> None:
        """Nothing is learned."""
