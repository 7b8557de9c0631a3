"""The figure of inspected rows, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .layout import assign_lanes, true_ranges
from .rows import InspectedRow, StepPlan
from .statistics import Histogram, RowStatistics

MAX_BINS = 24
CONTEXT, SUPERVISED, LABEL, ANCHOR, SLOT = "#dddddd", "#bfe3c5", "#4f9d69", "#f58518", "#b5b5b5"
LEGEND = {
    CONTEXT: "context",
    SUPERVISED: "supervised",
    LABEL: "label of a block of this step",
    ANCHOR: "anchor",
    SLOT: "slot without loss",
}


def draw_rows(
    title: str,
    statistics: RowStatistics,
    rows: Sequence[InspectedRow],
    plan: StepPlan,
    num_rows: int,
    path: str | Path,
) -> None:
    """
    Draw the histograms of a data set and some of its rows with their blocks.

    Args:
        title (`str`): The title, which names the data set and the target.
        statistics ([`RowStatistics`]): The statistics of the rows that were read.
        rows (`Sequence[InspectedRow]`): The rows to show. Rows without a token are left out.
        plan ([`StepPlan`]): The plan of the step.
        num_rows (`int`): The number of rows of the whole data set.
        path (`str` or `Path`): The PNG file to write.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # installed with the extra `demo`; only this view needs it
    from matplotlib.patches import Patch

    rows = [row for row in rows if row.input_ids]
    figure = Figure(figsize=(11, 3.2 + 1.7 * len(rows)), layout="constrained")
    figure.suptitle(_escape_math(title), fontsize=11, x=0.01, ha="left")
    keys = [Patch(color=color, label=name) for color, name in LEGEND.items()]
    figure.legend(handles=keys, loc="outside upper right", ncols=len(keys), fontsize=8, frameon=False)
    grid = figure.add_gridspec(1 + len(rows), 2, height_ratios=[1.9, *[1] * len(rows)])
    for column, (label, values) in enumerate(
        (("tokens", statistics.lengths), ("supervised tokens", statistics.supervised))
    ):
        _draw_histogram(figure.add_subplot(grid[0, column]), values, label)
    for number, row in enumerate(rows, start=1):
        _draw_row(figure.add_subplot(grid[number, :]), row)
    lines = [f"{name}: {value}" for name, value in statistics.summary(plan, num_rows)]
    figure.supxlabel(_escape_math("\n".join(lines)), fontsize=8, x=0.01, ha="left")
    with Path(path).open("wb") as stream:
        figure.savefig(stream, format="png", dpi=110)


def _escape_math(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as the start of a formula."""
    return text.replace("$", r"\$")


def _draw_histogram(axes: Any, values: Sequence[int], label: str) -> None:
    """Draw the histogram of one quantity of the rows."""
    histogram = Histogram.of(values, MAX_BINS)
    axes.bar(histogram.starts, histogram.counts, width=0.92 * histogram.width, align="edge", color=LABEL)
    axes.set(xlabel=f"{label} per row", ylabel="rows")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_row(axes: Any, row: InspectedRow) -> None:
    """Draw a row by position: its supervised tokens, and below them its blocks in lanes."""
    length, lanes = len(row.input_ids), assign_lanes(row.blocks)
    covered = true_ranges([position in row.covered for position in range(length)])

    def draw(ranges: Sequence[tuple[int, int]], bottom: float, height: float, color: str) -> None:
        spans = [(first, after - first) for first, after in ranges]
        axes.broken_barh(spans, (bottom, height), facecolors=color, linewidth=0)

    draw([(0, length)], 0.5, 2, CONTEXT)
    draw(true_ranges(row.supervised_mask), 0.5, 2, SUPERVISED)
    draw(covered, 0.5, 2, LABEL)
    for block, lane in zip(row.blocks, lanes, strict=True):
        draw([(block.anchor, block.end)], -1 - lane, 0.8, SLOT)
        draw([(block.labels.start, block.labels.stop)], -1 - lane, 0.8, LABEL)
        draw([(block.anchor, block.anchor + 1)], -1 - lane, 0.8, ANCHOR)
    axes.set_xlim(0, length)
    axes.set_ylim(-1.5 - max(lanes, default=0), 3)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_escape_math(row.describe()), fontsize=9, loc="left")
