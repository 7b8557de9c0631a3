"""`dflash-hf inspect`: what training will see of a data set, to look at."""

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


def check_outputs(html: Path | None, png: Path | None) -> None:
    """
    Refuse, before any work, a file that cannot be written.

    Args:
        html, png (`Path`, *optional*): files to write.

    Raises:
        OSError: the folder does not exist or must not be written to, or the path is a folder.
        ImportError: a PNG needs matplotlib, and it is not installed.
    """
    for option, path in (("--html", html), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{option} {path}: the folder {path.parent} does not exist. Make it first.")
        if path.is_dir():
            raise IsADirectoryError(f"{option} {path} is a folder. Give the name of a file.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{option} {path} must not be written to. Choose another place.")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--png needs matplotlib, which is not installed. Run: pip install 'dflash-hf[demo]'")


def inspect(
    data: Annotated[str, typer.Argument(help="As train's --dataset: JSON lines or Parquet file, folder or Hub name.")],
    target: Annotated[str, typer.Option(help="Hub name or folder of the target; its weights are not read.")],
    rows: Annotated[int, typer.Option(help="Show so many rows, the first that training does not drop.")] = 3,
    row: Annotated[list[int] | None, typer.Option(help="Show this row instead, counted from 0; repeatable.")] = None,
    block_size: Annotated[int, typer.Option(help="Slots of a block, the anchor included.")] = (
        DraftAndDataArguments.block_size
    ),
    anchors: Annotated[int, typer.Option(help="Blocks a row in a step.")] = BlockTrainingArguments.anchors_per_sample,
    step: Annotated[int, typer.Option(help="Step whose blocks are drawn.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 42,
    max_length: Annotated[int, typer.Option(help="Longest row in tokens.")] = BlockTrainingArguments.max_length,
    limit: Annotated[int, typer.Option(help="Rows that numbers and histograms are made of.")] = 2000,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hub data set or folder.")] = "train",
    html: Annotated[Path | None, typer.Option(help="Also write a page to look at in a browser.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also write a picture.")] = None,
) -> None:
    """Show what training will see: supervised tokens, anchors and blocks of a step, lengths, rows that are dropped."""
    from ..data.inspect_rows import StepPlan, TrainingRows
    from ..data.inspect_views import draw_rows, print_row, print_statistics, render_page
    from ..data.loading import load_rows
    from ..data.row_statistics import RowStatistics
    from ..target.loading import read_target

    if rows < 0:
        raise ValueError(f"--rows {rows} must be at least 0.")
    plan = StepPlan(block_size, anchors, step, seed)
    check_outputs(html, png)
    of_target = read_target(target)
    training_rows = TrainingRows(
        load_rows(data, dataset_config, dataset_split),
        of_target.tokenizer,
        max_length=max_length,
        eos_token_ids=of_target.eos_token_ids,
        num_embeddings=of_target.num_embeddings,
    )
    shown = [training_rows.inspect(index, plan) for index in row or training_rows.first(rows)]

    sample = training_rows.sample(limit)
    statistics = RowStatistics()
    progress = track(sample, description="reading rows", console=Console(stderr=True), transient=True)
    statistics.add((training_rows[index] for index in progress), plan)

    console, num_rows = Console(), len(training_rows)
    print_statistics(console, statistics, plan, num_rows)
    for inspected in shown:
        print_row(console, inspected, plan)
    title = f"{Path(data).name} for {Path(target).name}, blocks of {block_size}"
    if html is not None:
        html.write_text(render_page(title, statistics, shown, plan, num_rows), encoding="utf-8")
        console.print(f"Page written to {html}.", soft_wrap=True, markup=False, highlight=False)
    if png is not None:
        draw_rows(title, statistics, shown, plan, num_rows, png)
        console.print(f"Picture written to {png}.", soft_wrap=True, markup=False, highlight=False)
