"""The command `dflash-hf inspect`, which shows the rows of a data set as training sees them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from ..training.block_arguments import BlockTrainingArguments
from .train import DraftAndDataArguments

TRAINING_SEED = 42  # the default of transformers.TrainingArguments, whose import would take seconds


def inspect(
    data: Annotated[str, typer.Argument(help="Rows as for train --dataset: a data file, a folder or a Hub name.")],
    target: Annotated[str, typer.Option(help="Hub name or folder of the target. Its weights are not read.")],
    rows: Annotated[int, typer.Option(help="Number of rows to show: the first ones that training keeps.")] = 3,
    row: Annotated[
        list[int] | None, typer.Option(help="Index of a row to show instead, from 0. The option can be repeated.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Slots of a block, the anchor included.")] = (
        DraftAndDataArguments.block_size
    ),
    anchors: Annotated[
        int, typer.Option(help="Largest number of blocks of a row in one step.")
    ] = BlockTrainingArguments.anchors_per_sample,
    step: Annotated[int, typer.Option(help="Optimizer step whose blocks are shown.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the training run.")] = TRAINING_SEED,
    max_length: Annotated[
        int, typer.Option(help="Longest row in tokens. Longer rows are truncated.")
    ] = BlockTrainingArguments.max_length,
    limit: Annotated[
        int, typer.Option(help="Largest number of rows from which statistics and histograms are computed.")
    ] = 2000,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hub data set or of a folder.")] = "train",
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write a PNG figure to this file.")] = None,
) -> None:
    """Show rows as training sees them: supervised tokens, anchors, the blocks of a step, lengths and dropped rows."""
    from ..data.inspection.figure import draw_rows
    from ..data.inspection.page import render_page
    from ..data.inspection.rows import StepPlan, TrainingRows
    from ..data.inspection.statistics import RowStatistics
    from ..data.inspection.terminal import print_row, print_statistics
    from ..data.loading import load_rows
    from ..files import write_text
    from ..target.learned_positions import row_length
    from ..target.loading import read_target

    if rows < 0:
        raise ValueError(f"--rows {rows} must be at least 0. Pass the number of rows to show.")
    plan = StepPlan(block_size, anchors, step, seed)
    _check_outputs(html, png)
    target_text = read_target(target)
    training_rows = TrainingRows(
        load_rows(data, dataset_config, dataset_split),
        target_text.tokenizer,
        max_length=row_length(max_length, target_text.num_positions),
        eos_token_ids=target_text.eos_token_ids,
        num_embeddings=target_text.num_embeddings,
    )
    shown = [training_rows.inspect(index, plan) for index in row or training_rows.first(rows)]

    sample = training_rows.sample(limit)
    statistics = RowStatistics()
    progress = track(sample, description="Reading rows", console=Console(stderr=True), transient=True)
    statistics.add((training_rows[index] for index in progress), plan)

    console, num_rows = Console(), len(training_rows)
    print_statistics(console, statistics, plan, num_rows)
    for inspected in shown:
        print_row(console, inspected, plan)
    title = f"{Path(data).name} for {Path(target).name}, blocks of {block_size}"
    if html is not None:
        write_text(html, render_page(title, statistics, shown, plan, num_rows))
        console.print(f"The page is in {html}.", soft_wrap=True, markup=False, highlight=False)
    if png is not None:
        draw_rows(title, statistics, shown, plan, num_rows, png)
        console.print(f"The figure is in {png}.", soft_wrap=True, markup=False, highlight=False)


def _check_outputs(html: Path | None, png: Path | None) -> None:
    """
    Refuse an output file that cannot be written, before any row is read.

    Args:
        html, png (`Path`, *optional*): The files to write.

    Raises:
        OSError: The folder does not exist or is not writable, or the path is a folder.
        ImportError: A PNG file is requested, and matplotlib is not installed.
    """
    for option, path in (("--html", html), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"{option} {path}: the folder {path.parent} does not exist. Create it, or choose another folder."
            )
        if path.is_dir():
            raise IsADirectoryError(f"{option} {path} is a folder, and a file is needed. Pass the name of a file.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{option} {path} is not writable. Choose another file.")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--png needs matplotlib, which is not installed. Run: pip install 'dflash-hf[demo]'")
