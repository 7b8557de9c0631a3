"""The command `dflash-hf check`, which shows which software can load a draft."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .convert import Fields, parse_fields


def check(
    draft: Annotated[str, typer.Argument(help="Folder or Hub name of a draft, in any layout.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the target, to be compared with the draft.")
    ] = None,
    fields: Fields = None,
) -> None:
    """Show which software can load a draft and how to convert it (exit code 1 if this package cannot load it)."""
    from ..checkpoints.compatibility import READERS, check_checkpoint

    report = check_checkpoint(draft, target=target, **parse_fields(fields))
    console = Console()
    if report.config is not None:
        config = report.config
        depth = "?" if config.target_num_hidden_layers is None else config.target_num_hidden_layers
        console.print(
            f"{draft}: {config.kind}, {report.layout} layout, {report.num_parameters / 1e6:.1f} M values, "
            f"{config.num_hidden_layers} "
            f"layers, block {config.block_size}, target layers {config.target_layer_ids} of {depth}, mask token "
            f"{config.mask_token_id}, target {config.target_name_or_path or 'not named'}",
            markup=False,
            highlight=False,
        )
    table = Table("reader", "loads it", "reasons or conditions", show_lines=True)
    for verdict in report.verdicts:
        answer = "[green]yes[/]" if verdict.can_load else "[red]no[/]"
        table.add_row(READERS[verdict.reader], answer, "; ".join(verdict.reasons).replace("[", r"\["))
    console.print(table)
    if not report.verdicts[0].can_load:
        raise typer.Exit(1)
