"""The terminal view of inspected rows."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .rows import InspectedRow, StepPlan
from .statistics import Histogram, RowStatistics
from .text import visible

BAR_WIDTH = 40
STRIP_WIDTH = 100
MAX_BINS = 10
MAX_LISTED_BLOCKS = 12
# By (carries loss in a block of the step, is supervised)
STYLES = {(True, True): "bold green", (False, True): "green", (False, False): "dim"}
ANCHOR_STYLE, SPECIAL_STYLE = "reverse", "italic"


def print_statistics(console: Console, statistics: RowStatistics, plan: StepPlan, num_rows: int) -> None:
    """
    Print the statistics of a data set and the histograms of its lengths.

    Args:
        console (`rich.console.Console`): The console to print to.
        statistics ([`RowStatistics`]): The statistics of the rows that were read.
        plan ([`StepPlan`]): The plan of the step.
        num_rows (`int`): The number of rows of the whole data set.
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


def print_row(console: Console, row: InspectedRow, plan: StepPlan) -> None:
    """
    Print a row: its text with supervised tokens and anchors marked, a strip of its positions, and its blocks.

    Args:
        console (`rich.console.Console`): The console to print to.
        row ([`InspectedRow`]): The row with its blocks.
        plan ([`StepPlan`]): The plan of the step.
    """
    console.print()
    console.rule(style="dim")
    console.print(Text(row.describe(), style="bold"))
    console.print(styled_text(row))
    if row.input_ids:
        console.print()
        for line in strip(row, min(console.width, STRIP_WIDTH)):
            console.print(Text(line), no_wrap=True)
    if row.blocks:
        console.print()
        console.print(_block_table(row, plan))


def histogram_table(histogram: Histogram) -> Table:
    """
    Draw a histogram with bars of block characters.

    Args:
        histogram ([`Histogram`]): A histogram with at least one value.

    Returns:
        `rich.table.Table`
    """
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    highest = max(histogram.counts)
    for index, count in enumerate(histogram.counts):
        width = -(-count * BAR_WIDTH // highest)  # rounded up, so that every bin with a value shows a bar
        table.add_row(histogram.name(index), Text("█" * width, style="green"), f"{count:,}")
    return table


def styled_text(row: InspectedRow) -> Text:
    """
    Style the text of a row by what each token is.

    Supervised tokens are green, and bold where a block of the step covers them. Anchors are reversed, special tokens
    are italic, and the context is dim.

    Args:
        row ([`InspectedRow`]): The row with its blocks.

    Returns:
        `rich.text.Text`
    """
    text = Text()
    covered, anchors = row.covered, {block.anchor for block in row.blocks}
    for position, piece in enumerate(row.pieces):
        style = STYLES[position in covered, row.supervised_mask[position]]
        style += f" {ANCHOR_STYLE}" if position in anchors else ""
        style += f" {SPECIAL_STYLE}" if row.is_special[position] else ""
        text.append(visible(piece), style=style)
    return text


def strip(row: InspectedRow, width: int) -> list[str]:
    """
    Draw a row as three lines of characters: anchors, supervised tokens, and tokens that the blocks of the step cover.

    Args:
        row ([`InspectedRow`]): A row with at least one token.
        width (`int`): The largest number of characters per line; each stands for the same number of tokens.

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
    """List the first blocks of a row."""
    listed = row.blocks[:MAX_LISTED_BLOCKS]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("anchor at", "context", "slots with a token", "labels"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("anchor", no_wrap=True)
    table.add_column("labels as text")  # the only column that shrinks in a narrow terminal
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
