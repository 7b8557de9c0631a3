"""Inspected rows as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .inspect_rows import InspectedRow, StepPlan, lanes_of, ranges_of
from .row_statistics import Histogram, RowStatistics
from .row_text import visible

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
