"""The picture of a model card: a share for each drafted slot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_slots(shares: Sequence[float], label: str, title: str, path: str | Path) -> None:
    """
    Draw a share for each drafted slot.

    Args:
        shares (`Sequence[float]`): of slots 1 … B - 1, in 0 … 1.
        label (`str`): what they are.
        title (`str`): above the picture.
        path (`str` or `Path`): PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # an extra; the rest of the package works without it

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    slots = range(1, len(shares) + 1)
    bars = axes.bar(slots, shares, color="#4c78a8")
    axes.bar_label(bars, [f"{value:.0%}" for value in shares], padding=2, fontsize=9)
    axes.set(xlabel="slot k", ylabel=label, ylim=(0, 1), xticks=list(slots), title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
