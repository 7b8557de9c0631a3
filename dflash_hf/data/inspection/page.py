"""The HTML page of inspected rows. Python computes what the page shows, and `page.html.jinja` is its markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .layout import assign_lanes, true_ranges
from .rows import InspectedRow, StepPlan
from .statistics import Histogram, RowStatistics
from .text import visible

TEMPLATE = Path(__file__).with_name("page.html.jinja")
WIDTH = 1000  # units of a drawing, which the browser scales to the width of the page
MAX_BINS = 24
CHART_HEIGHT = 120
STRIP_TOP, STRIP_HEIGHT = 4, 14
LANES_TOP, LANE_HEIGHT = 24, 6


def render_page(
    title: str, statistics: RowStatistics, rows: Sequence[InspectedRow], plan: StepPlan, num_rows: int
) -> str:
    """
    Render a self-contained page with the statistics of a data set and some of its rows.

    Args:
        title (`str`): The title, which names the data set and the target.
        statistics ([`RowStatistics`]): The statistics of the rows that were read.
        rows (`Sequence[InspectedRow]`): The rows to show.
        plan ([`StepPlan`]): The plan of the step.
        num_rows (`int`): The number of rows of the whole data set.

    Returns:
        `str`: HTML. Everything that comes from the rows is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE.name).render(
        title=visible(title),
        summary=statistics.summary(plan, num_rows),
        charts=[
            _histogram_drawing(Histogram.of(values, MAX_BINS), label)
            for label, values in (("tokens", statistics.lengths), ("supervised tokens", statistics.supervised))
            if values
        ],
        rows=[
            {
                "heading": row.describe(),
                "tokens": _tokens(row),
                "drawing": _row_drawing(row) if row.input_ids else None,
                "blocks": [
                    (
                        block.anchor,
                        block.context_length,
                        block.num_slots,
                        block.label_range,
                        row.text([block.anchor]),
                        row.text(block.labels),
                    )
                    for block in row.blocks
                ],
            }
            for row in rows
        ],
    )


@dataclass(frozen=True)
class _Bar:
    """A filled rectangle. `kind` is its CSS class, and `title` is shown when the pointer hovers over it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str = ""


@dataclass(frozen=True)
class _Caption:
    """A text of a drawing that starts, or with `ends_at_x` ends, at `x`."""

    text: str
    x: int
    y: int
    ends_at_x: bool = False


@dataclass(frozen=True)
class _Drawing:
    """An SVG drawing. `label` describes it to screen readers."""

    label: str
    width: int
    height: int
    bars: list[_Bar]
    captions: list[_Caption]


def _tokens(row: InspectedRow) -> Iterator[dict[str, Any]]:
    """Yield the CSS classes, the hover text and the visible text of each token."""
    anchors = {block.anchor: number for number, block in enumerate(row.blocks)}
    label_in: dict[int, list[int]] = {}
    for number, block in enumerate(row.blocks):
        for position in block.labels:
            label_in.setdefault(position, []).append(number)
    for position, (token, piece) in enumerate(zip(row.input_ids, row.pieces, strict=True)):
        is_supervised = row.supervised_mask[position]
        classes = ["l" if position in label_in else "s" if is_supervised else "c"]
        facts = [f"token {token}", f"position {position}", "supervised" if is_supervised else "context"]
        if position in label_in:
            facts.append(f"label in block {', '.join(map(str, label_in[position]))}")
        if position in anchors:
            classes.append("a")
            facts.append(f"anchor of block {anchors[position]}")
        if row.is_special[position]:
            classes.append("x")
        # The two dots stand for a token whose character is completed by a later token
        yield {"classes": " ".join(classes), "title": " · ".join(facts), "text": visible(piece) or "‥"}


def _row_drawing(row: InspectedRow) -> _Drawing:
    """Draw a row by position: its supervised tokens, and below them its blocks in lanes."""
    length, lanes = len(row.input_ids), assign_lanes(row.blocks)
    scale = WIDTH / length

    def strip_bar(kind: str, first: int, after: int, title: str = "") -> _Bar:
        return _Bar(kind, first * scale, STRIP_TOP, (after - first) * scale, STRIP_HEIGHT, title)

    bars = [strip_bar("f-c", 0, length, "context")]
    for first, after in true_ranges(row.supervised_mask):
        bars.append(strip_bar("f-s", first, after, f"supervised: {first} – {after - 1}"))
    bars += [strip_bar("f-l", position, position + 1) for position in sorted(row.covered)]
    for number, (block, lane) in enumerate(zip(row.blocks, lanes, strict=True)):
        y, height = LANES_TOP + lane * LANE_HEIGHT, LANE_HEIGHT - 1
        title = f"block {number}: anchor {block.anchor}, labels {block.label_range}"
        bars.append(_Bar("f-o", block.anchor * scale, y, block.num_slots * scale, height, title))
        bars.append(_Bar("f-l", block.labels.start * scale, y, block.num_labels * scale, height, title))
        bars.append(_Bar("f-a", block.anchor * scale, y, max(scale, 2), height, title))
    bottom = LANES_TOP + (max(lanes, default=0) + 1) * LANE_HEIGHT
    captions = [
        _Caption("0", 0, bottom + 14),
        _Caption(f"position {length - 1}", WIDTH, bottom + 14, ends_at_x=True),
    ]
    return _Drawing("supervised tokens and blocks by position", WIDTH, bottom + 18, bars, captions)


def _histogram_drawing(histogram: Histogram, label: str) -> _Drawing:
    """Draw a histogram with bars of equal width."""
    width, top, bottom = WIDTH // 2, 20, 20 + CHART_HEIGHT
    step, highest = width / len(histogram.counts), max(histogram.counts)
    bars = []
    for index, count in enumerate(histogram.counts):
        height = CHART_HEIGHT * count / highest
        title = f"{histogram.name(index)} {label}: {count:,} rows"
        bars.append(_Bar("f-l", index * step, bottom - height, max(step - 2, 1), height, title))
    end = histogram.starts[-1] + histogram.width - 1
    captions = [
        _Caption(f"rows by {label}; highest bar: {highest:,}", 0, top - 7),
        _Caption(f"{histogram.starts[0]:,}", 0, bottom + 16),
        _Caption(f"{end:,}", width, bottom + 16, ends_at_x=True),
    ]
    return _Drawing(f"rows by {label}", width, bottom + 22, bars, captions)
