"""Inspected rows in a terminal: numbers, histograms, coloured text, a strip of the row and its blocks."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .inspect_rows import InspectedRow, StepPlan
from .row_statistics import Histogram, RowStatistics
from .row_text import visible

BAR_WIDTH, STRIP_WIDTH, MAX_BINS, BLOCKS_LISTED = 40, 100, 10, 12
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
            console.print(histogram_table(Histogram.of(values, MAX_BINS)))


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
