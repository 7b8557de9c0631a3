"""Views of training rows: the terminal, an HTML page, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .inspect_rows import InspectedRow, StepPlan, lanes_of, ranges_of, visible
from .row_statistics import Histogram, RowStatistics

BAR_WIDTH, STRIP_WIDTH, TERMINAL_BINS, BLOCKS_LISTED = 40, 100, 10, 12
# By what a token is: (carries loss in a block of the step, is supervised)
STYLES = {(True, True): "bold green", (False, True): "green", (False, False): "dim"}
ANCHOR_STYLE, SPECIAL_STYLE = "reverse", "italic"


def print_statistics(console: Console, statistics: RowStatistics, plan: StepPlan, num_rows: int) -> None:
    """
    Print the numbers of a data set and the histograms of its lengths.

    Args:
        console (`rich.console.Console`): where to.
        statistics ([`RowStatistics`]): of the rows looked at.
        plan ([`StepPlan`]): of the step.
        num_rows (`int`): of the whole data set.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in statistics.summary(plan, num_rows):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    for title, values in (("tokens", statistics.lengths), ("supervised tokens", statistics.supervised)):
        if values:
            console.print()
            console.print(Text(f"rows by {title}", style="bold"))
            console.print(histogram_table(Histogram.of(values, TERMINAL_BINS)))


def histogram_table(histogram: Histogram) -> Table:
    """
    A histogram made of bars of text.

    Args:
        histogram ([`Histogram`]): with at least one value.

    Returns:
        `rich.table.Table`
    """
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(histogram.counts)
    for index, count in enumerate(histogram.counts):
        width = -(-count * BAR_WIDTH // most)  # a bin that holds anything shows
        table.add_row(histogram.name(index), Text("█" * width, style="green"), f"{count:,}")
    return table


def print_row(console: Console, row: InspectedRow, plan: StepPlan) -> None:
    """
    Print a row: its text with supervised tokens and anchors marked, a strip of its length, and its blocks.

    Args:
        console (`rich.console.Console`): where to.
        row ([`InspectedRow`]): with its blocks.
        plan ([`StepPlan`]): of the step.
    """
    console.print()
    console.rule(style="dim")
    console.print(Text(row.describe(), style="bold"))
    console.print(coloured_text(row))
    if row.input_ids:
        console.print()
        for line in strip(row, min(console.width, STRIP_WIDTH)):
            console.print(Text(line), no_wrap=True)
    if row.blocks:
        console.print()
        console.print(_block_table(row, plan))


def coloured_text(row: InspectedRow) -> Text:
    """
    The text of a row. Green: supervised, bold where a block of the step learns it; reverse: an anchor; italic: a
    special token; dim: context.

    Args:
        row ([`InspectedRow`]): with its blocks.

    Returns:
        `rich.text.Text`
    """
    text = Text()
    covered, anchors = row.covered, {block.anchor for block in row.blocks}
    for position, piece in enumerate(row.pieces):
        style = STYLES[position in covered, row.supervised_mask[position]]
        style += f" {ANCHOR_STYLE}" if position in anchors else ""
        style += f" {SPECIAL_STYLE}" if row.special[position] else ""
        text.append(visible(piece), style=style)
    return text


def strip(row: InspectedRow, width: int) -> list[str]:
    """
    A row as three lines of characters: anchors, supervised parts, and parts that blocks of the step learn.

    Args:
        row ([`InspectedRow`]): with at least one token.
        width (`int`): characters a line, at most; each stands for equally many tokens.

    Returns:
        `list[str]`
    """
    length = len(row.input_ids)
    width = min(width, length)
    anchors, supervised, covered = [" "] * width, ["·"] * width, [" "] * width
    for block in row.blocks:
        anchors[block.anchor * width // length] = "▾"
    for position in range(length):
        column = position * width // length
        if row.supervised_mask[position]:
            supervised[column] = "█"
        if position in row.covered:
            covered[column] = "▔"
    return ["".join(line) for line in (anchors, supervised, covered)]


def _block_table(row: InspectedRow, plan: StepPlan) -> Table:
    listed = row.blocks[:BLOCKS_LISTED]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("anchor at", "context", "slots", "labels"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("anchor", no_wrap=True)
    table.add_column("labels as text")  # the one column that gives way to a narrow terminal
    for block in listed:
        table.add_row(
            f"{block.anchor}",
            f"{block.context_length}",
            f"{block.num_slots}",
            block.label_range,
            Text(row.text([block.anchor]), style=ANCHOR_STYLE),
            Text(row.text(block.labels), style=STYLES[True, True], no_wrap=True, overflow="ellipsis"),
        )
    if len(row.blocks) > len(listed):
        table.caption = f"and {len(row.blocks) - len(listed)} further blocks of step {plan.optimizer_step}"
        table.caption_justify = "left"
    return table


WIDTH = 1000  # units of a picture; it is stretched to the page
MAX_BINS = 24
CHART_HEIGHT, LANE_HEIGHT = 120, 6

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --dim: #767676; --line: #d9d9d9;
  --supervised: #d7ecd9; --label: #8fd19e; --anchor: #f58518; --slot: #c9c9c9; --special: #7b3fb0; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --text: #e6e6e6; --dim: #9a9a9a; --line: #3a3d44;
  --supervised: #1d3a26; --label: #2f7d46; --anchor: #f58518; --slot: #55585f; --special: #c79bf0; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .5rem; }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; }
th, td { padding: .15rem 1.5rem .15rem 0; vertical-align: top; }
svg { display: block; width: 100%; height: auto; margin: .5rem 0; } svg text { fill: var(--dim); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 2rem; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.7 ui-monospace, monospace; margin: .5rem 0;
  border: 1px solid var(--line); border-radius: 6px; padding: .75rem; }
.tokens span, .legend span { border-radius: 2px; }
.c { color: var(--dim); } .s { background: var(--supervised); } .l { background: var(--label); }
.x { color: var(--special); font-style: italic; } .a { box-shadow: inset 0 -3px var(--anchor); font-weight: 700; }
.legend span { padding: 0 .4rem; margin-right: .75rem; font: 14px ui-monospace, monospace; }
details td:nth-child(-n + 5) { white-space: nowrap; } .o { background: var(--slot); }
.f-s { fill: var(--supervised); } .f-l { fill: var(--label); } .f-a { fill: var(--anchor); }
.f-o { fill: var(--slot); } .f-c { fill: var(--line); }
"""

LEGEND = (
    '<p class="legend"><span class="c">context</span><span class="s">supervised</span>'
    '<span class="l">label of a block of this step</span><span class="a">anchor</span>'
    '<span class="o">slot without loss</span><span class="x">special token</span></p>'
)


def render_page(
    title: str, statistics: RowStatistics, rows: Sequence[InspectedRow], plan: StepPlan, num_rows: int
) -> str:
    """
    Make the page.

    Args:
        title (`str`): names data and target.
        statistics ([`RowStatistics`]): of the rows looked at.
        rows (`Sequence[InspectedRow]`): those that are shown.
        plan ([`StepPlan`]): of the step.
        num_rows (`int`): of the whole data set.

    Returns:
        `str`: HTML. Whatever the rows hold is text in it.
    """
    heading = escape(visible(title))
    numbers = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in statistics.summary(plan, num_rows)
    )
    charts = "".join(
        f"<figure>{_chart(Histogram.of(values, MAX_BINS), label)}</figure>"
        for label, values in (("tokens", statistics.lengths), ("supervised tokens", statistics.supervised))
        if values
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{heading}</h1>\n<table>{numbers}</table>\n"
        f'<div class="charts">{charts}</div>\n{LEGEND}\n' + "\n".join(map(_row, rows)) + "\n</body>\n</html>\n"
    )


def _row(row: InspectedRow) -> str:
    parts = [f"<section>\n<h2>{escape(row.describe())}</h2>", f'<div class="tokens">{"".join(_tokens(row))}</div>']
    if row.input_ids:
        parts.append(_strip(row))
    if row.blocks:
        lines = "".join(
            f"<tr><td>{block.anchor}</td><td>{block.context_length}</td><td>{block.num_slots}</td>"
            f"<td>{block.label_range}</td><td>{escape(row.text([block.anchor]))}</td>"
            f"<td>{escape(row.text(block.labels))}</td></tr>"
            for block in row.blocks
        )
        head = "".join(f"<th>{name}</th>" for name in ("anchor at", "context", "slots", "labels", "anchor", "text"))
        parts.append(f"<details><summary>Blocks</summary><table><tr>{head}</tr>{lines}</table></details>")
    return "\n".join([*parts, "</section>"])


def _tokens(row: InspectedRow) -> Iterator[str]:
    """A span for each token, coloured by what it is; hovering tells the rest."""
    anchors = {block.anchor: number for number, block in enumerate(row.blocks)}
    label_in: dict[int, list[int]] = {}
    for number, block in enumerate(row.blocks):
        for position in block.labels:
            label_in.setdefault(position, []).append(number)
    for position, (token, piece) in enumerate(zip(row.input_ids, row.pieces, strict=True)):
        is_supervised = row.supervised_mask[position]
        kind = "l" if position in label_in else "s" if is_supervised else "c"
        classes = [kind, *(["a"] if position in anchors else []), *(["x"] if row.special[position] else [])]
        facts = [f"token {token}", f"position {position}", "supervised" if is_supervised else "context"]
        if position in label_in:
            facts.append(f"label in block {', '.join(map(str, label_in[position]))}")
        if position in anchors:
            facts.append(f"anchor of block {anchors[position]}")
        shown = escape(visible(piece)) or "‥"  # the character is completed by a later token
        yield f'<span class="{" ".join(classes)}" title="{escape(" · ".join(facts))}">{shown}</span>'


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{inside}</rect>'


def _strip(row: InspectedRow) -> str:
    """Positions from left to right: what is supervised, and under it the blocks, in lanes."""
    length, lanes = len(row.input_ids), lanes_of(row.blocks)
    scale = WIDTH / length
    parts = [_rect(0, 4, WIDTH, 14, "f-c", "context")]
    for first, after in ranges_of(row.supervised_mask):
        parts.append(_rect(first * scale, 4, (after - first) * scale, 14, "f-s", f"supervised: {first} – {after - 1}"))
    for position in sorted(row.covered):
        parts.append(_rect(position * scale, 4, scale, 14, "f-l"))
    for number, (block, lane) in enumerate(zip(row.blocks, lanes, strict=True)):
        y = 24 + lane * LANE_HEIGHT
        title = f"block {number}: anchor {block.anchor}, labels {block.label_range}"
        parts.append(_rect(block.anchor * scale, y, block.num_slots * scale, LANE_HEIGHT - 1, "f-o", title))
        parts.append(_rect(block.labels.start * scale, y, block.num_labels * scale, LANE_HEIGHT - 1, "f-l", title))
        parts.append(_rect(block.anchor * scale, y, max(scale, 2), LANE_HEIGHT - 1, "f-a", title))
    bottom = 24 + (max(lanes, default=0) + 1) * LANE_HEIGHT
    parts += [
        f'<text x="0" y="{bottom + 14}">0</text>',
        f'<text x="{WIDTH}" y="{bottom + 14}" text-anchor="end">position {length - 1}</text>',
    ]
    return _svg(bottom + 18, "supervised tokens and blocks by position", parts)


def _chart(histogram: Histogram, label: str) -> str:
    """Bars of equal width; hovering tells bin and count."""
    step, most = WIDTH / 2 / len(histogram.counts), max(histogram.counts)
    parts = []
    for index, count in enumerate(histogram.counts):
        height = CHART_HEIGHT * count / most
        title = f"{histogram.name(index)} {label}: {count:,} rows"
        parts.append(_rect(index * step, 20 + CHART_HEIGHT - height, max(step - 2, 1), height, "f-l", title))
    y = CHART_HEIGHT + 36
    end = histogram.starts[-1] + histogram.width - 1
    parts += [
        f'<text x="0" y="13">rows by {label}; highest bar: {most:,}</text>',
        f'<text x="0" y="{y}">{histogram.starts[0]:,}</text>',
        f'<text x="{WIDTH / 2:.0f}" y="{y}" text-anchor="end">{end:,}</text>',
    ]
    return _svg(CHART_HEIGHT + 42, f"rows by {label}", parts, WIDTH // 2)


def _svg(height: float, label: str, parts: Sequence[str], width: int = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


CONTEXT, SUPERVISED, LABEL, ANCHOR, SLOT = "#dddddd", "#bfe3c5", "#4f9d69", "#f58518", "#b5b5b5"
NAMES = {
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
