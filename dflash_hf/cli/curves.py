"""`dflash-hf curves`: acceptance over the minutes and the rows of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def curves(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of finished or unfinished training runs.")],
    out: Annotated[Path, typer.Option(help="PNG file to write. The numbers are written beside it as JSON.")] = Path(
        "curves.png"
    ),
) -> None:
    """Show the acceptance length on held-out rows over the minutes and the training rows of runs."""
    from ..training.curves import draw_curves, read_curve, write_curves

    read = [read_curve(folder) for folder in runs]
    table = Table("run", "rows", "steps", "minutes", "acceptance length, a block", "when serving")
    for curve in read:
        last = curve.last
        serving = "–" if last.serving_acceptance_length is None else f"{last.serving_acceptance_length:.2f}"
        rows = "–" if curve.num_rows is None else f"{curve.num_rows:,}"
        table.add_row(
            curve.name, rows, f"{last.step:,}", f"{last.minutes:.1f}", f"{last.acceptance_length:.2f}", serving
        )
    console = Console()
    console.print(table)
    numbers = out.with_suffix(".json")
    write_curves(read, numbers)
    try:
        draw_curves(read, out)
    except ImportError:
        console.print(f"Numbers: {numbers}. For the picture: pip install matplotlib.", soft_wrap=True)
        return
    console.print(f"Picture: {out}. Numbers: {numbers}.", soft_wrap=True)
