"""Inspected rows as one picture: histograms of the data set, and each row as a strip with its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .inspect_rows import InspectedRow, StepPlan, lanes_of, ranges_of
from .row_statistics import Histogram, RowStatistics

CONTEXT, SUPERVISED, LABEL, ANCHOR, SLOT = "#dddddd", "#bfe3c5", "#4f9d69", "#f58518", "#b5b5b5"
NAMES = {
    CONTEXT: "context",
    SUPERVISED: "supervised",
    LABEL: "label of a block of this step",
    ANCHOR: "anchor",
    SLOT: "slot without loss",
}
MAX_BINS = 24


def draw_rows(
    title: str,
    statistics: RowStatistics,
    rows: Sequence[InspectedRow],
    plan: StepPlan,
    num_rows: int,
    path: str | Path,
) -> None:
    """
    Draw the picture.

    Args:
        title (`str`): names data and target.
        statistics ([`RowStatistics`]): of the rows looked at.
        rows (`Sequence[InspectedRow]`): those that are shown; rows without a token are left out.
        plan ([`StepPlan`]): of the step.
        num_rows (`int`): of the whole data set.
        path (`str` or `Path`): PNG to write.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # an extra; the rest of the package works without it
    from matplotlib.patches import Patch

    rows = [row for row in rows if row.input_ids]
    figure = Figure(figsize=(11, 3.2 + 1.7 * len(rows)), layout="constrained")
    figure.suptitle(_plain(title), fontsize=11, x=0.01, ha="left")
    keys = [Patch(color=color, label=name) for color, name in NAMES.items()]
    figure.legend(handles=keys, loc="outside upper right", ncols=len(keys), fontsize=8, frameon=False)
    grid = figure.add_gridspec(1 + len(rows), 2, height_ratios=[1.9, *[1] * len(rows)])
    for column, (label, values) in enumerate(
        (("tokens", statistics.lengths), ("supervised tokens", statistics.supervised))
    ):
        _draw_histogram(figure.add_subplot(grid[0, column]), values, label)
    for number, row in enumerate(rows, start=1):
        _draw_row(figure.add_subplot(grid[number, :]), row)
    lines = [f"{name}: {value}" for name, value in statistics.summary(plan, num_rows)]
    figure.supxlabel(_plain("\n".join(lines)), fontsize=8, x=0.01, ha="left")
    with Path(path).open("wb") as stream:
        figure.savefig(stream, format="png", dpi=110)


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def _draw_histogram(axes: Any, values: Sequence[int], label: str) -> None:
    histogram = Histogram.of(values, MAX_BINS)
    axes.bar(histogram.starts, histogram.counts, width=0.92 * histogram.width, align="edge", color=LABEL)
    axes.set(xlabel=f"{label} of a row", ylabel="rows")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_row(axes: Any, row: InspectedRow) -> None:
    """Positions from left to right: what is supervised, and under it the blocks, in lanes."""
    length, lanes = len(row.input_ids), lanes_of(row.blocks)
    covered = ranges_of([position in row.covered for position in range(length)])

    def draw(ranges: Sequence[tuple[int, int]], bottom: float, height: float, color: str) -> None:
        widths = [(first, after - first) for first, after in ranges]
        axes.broken_barh(widths, (bottom, height), facecolors=color, linewidth=0)

    draw([(0, length)], 0.5, 2, CONTEXT)
    draw(ranges_of(row.supervised_mask), 0.5, 2, SUPERVISED)
    draw(covered, 0.5, 2, LABEL)
    for block, lane in zip(row.blocks, lanes, strict=True):
        draw([(block.anchor, block.end)], -1 - lane, 0.8, SLOT)
        draw([(block.labels.start, block.labels.stop)], -1 - lane, 0.8, LABEL)
        draw([(block.anchor, block.anchor + 1)], -1 - lane, 0.8, ANCHOR)
    axes.set_xlim(0, length)
    axes.set_ylim(-1.5 - max(lanes, default=0), 3)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_plain(row.describe()), fontsize=9, loc="left")
