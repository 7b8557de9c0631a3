"""Draws the picture of a model card, a bar chart over the drafted slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SlotChart:
    """
    A share for each drafted slot.

    Args:
        shares (`Sequence[float]`): The shares of slots 1 … B - 1, from 0 to 1.
        label (`str`): What the shares are.
        title (`str`): The heading of the picture.
    """

    shares: Sequence[float]
    label: str
    title: str

    def save(self, path: str | Path) -> None:
        """
        Draw the chart into a PNG file.

        Args:
            path (`str` or `Path`): The file to write.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure  # matplotlib is an optional dependency.

        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        slots = range(1, len(self.shares) + 1)
        bars = axes.bar(slots, self.shares, color="#4c78a8")
        axes.bar_label(bars, [f"{share:.0%}" for share in self.shares], padding=2, fontsize=9)
        axes.set(xlabel="slot k", ylabel=self.label, ylim=(0, 1), xticks=list(slots), title=self.title)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
