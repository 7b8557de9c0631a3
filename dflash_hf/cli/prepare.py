"""The command `dflash-hf prepare`, which turns rows into a tokenised data set for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.settings import PreparationSettings
from ..files import json_digest
from .options import INTERRUPTED, json_object

if TYPE_CHECKING:
    import datasets

SHOWN_MISMATCHES = 3


def prepare(
    target: Annotated[str, typer.Option(help="Hub name or folder of the target. Only its tokenizer is loaded.")],
    dataset: Annotated[
        str, typer.Option(help="Rows: a data file (JSON lines, CSV, Parquet …), a folder, or a Hub name.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write. It appears when it is complete.")],
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hub data set or of a folder.")] = "train",
    max_length: Annotated[
        int,
        typer.Option(help="Longest row in tokens. It is at most the number of positions that the target has learned."),
    ] = PreparationSettings.max_length,
    truncation: Annotated[
        str, typer.Option(help="What happens to longer rows: cut truncates them at the end, drop drops them.")
    ] = PreparationSettings.truncation,
    block_size: Annotated[
        int | None, typer.Option(help="Drop rows without room for a whole block of this many tokens.")
    ] = None,
    on_mismatch: Annotated[
        str,
        typer.Option(help="What happens to rows whose prompt differs from the chat template's: keep, drop, error."),
    ] = PreparationSettings.on_mismatch,
    split_turns: Annotated[
        bool,
        typer.Option(
            "--split-turns",
            help="Make separate rows for assistant turns that the template changes once the conversation continues.",
        ),
    ] = False,
    keep_repeats: Annotated[
        bool,
        typer.Option("--keep-repeats", help="Keep several rows with one prompt. Identical rows are still dropped."),
    ] = False,
    eval_rows: Annotated[
        str,
        typer.Option(
            help="Rows to hold out: a number, or a fraction such as 0.02. All rows of a prompt are in one split."
        ),
    ] = "0",
    seed: Annotated[int, typer.Option(help="Seed for the choice of held-out prompts.")] = PreparationSettings.seed,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON object of arguments for the chat template. Those of a row take precedence.")
    ] = "{}",
    num_proc: Annotated[int | None, typer.Option(help="Number of processes that tokenise.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace rows that were prepared before.")] = False,
) -> None:
    """Tokenise rows, mark the tokens that carry loss, check the prompts, drop repeats, and hold out rows."""
    from ..data.loading import load_rows
    from ..data.prepare import prepare_for_training
    from ..data.prepared_folder import MISMATCHES, folder_settings, is_prepared_already, make_report, write_folder
    from ..target.learned_positions import row_length
    from ..target.loading import read_target

    if num_proc is not None and num_proc < 1:
        raise ValueError(f"--num-proc {num_proc} must be at least 1. Pass a number of processes.")
    settings = PreparationSettings(
        max_length=max_length,
        truncation=truncation,
        block_size=block_size,
        on_mismatch=on_mismatch,
        split_turns=split_turns,
        keep_repeats=keep_repeats,
        eval_rows=_number(eval_rows),
        seed=seed,
        chat_template_kwargs=json_object("--chat-template-kwargs", chat_template_kwargs),
    )
    console = Console()
    text = read_target(target)
    settings = replace(settings, max_length=row_length(max_length, text.num_positions))
    rows = load_rows(dataset, dataset_config, dataset_split)
    source = {
        "dataset": dataset,
        "dataset_config": dataset_config,
        "dataset_split": dataset_split,
        "dataset_version": _version(rows),
    }
    all_settings = folder_settings(target, source, text, settings)
    if is_prepared_already(out, all_settings, overwrite=overwrite):
        _print(console, f"{out} already contains these rows, prepared with these settings.")
        return
    try:
        prepared = prepare_for_training(rows, text, settings, num_proc=num_proc)
        report = make_report(prepared, all_settings)
        write_folder(out, prepared, report)
    except KeyboardInterrupt:
        _print(console, f"The command was interrupted, and {out} was not written.")
        raise typer.Exit(INTERRUPTED) from None
    console.print(_report_table(report), highlight=False)
    for line in prepared.mismatches[:SHOWN_MISMATCHES]:
        _print(console, f"Row {line['row']}: {line['reason']}")
        if not line["is_refused"]:
            _print(console, f"  text of the row at token {line['position']}: {line['row_text']!r}")
            _print(console, f"  text of the template there: {line['template_text']!r}")
    if len(prepared.mismatches) > SHOWN_MISMATCHES:
        _print(console, f"All {len(prepared.mismatches):,} such rows are in {out / MISMATCHES}.")
    _print(console, f"The prepared rows are in {out}. Train on them with: dflash-hf train --dataset {out}")


def _print(console: Console, text: str) -> None:
    """Print a line without markup, colours and wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _report_table(report: Mapping[str, Any]) -> Table:
    """Return a table with the counts of a report."""
    from ..data.prepared_folder import EVALUATION_SPLIT

    rows, tokens = report["rows"], report["tokens"]
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_row("rows read", f"{rows['read']:,}")
    if rows["after_split"] != rows["read"]:
        table.add_row("rows after assistant turns were split off", f"{rows['after_split']:,}")
    for reason, count in rows["dropped"].items():
        table.add_row(f"[yellow]dropped:[/] {escape(reason)}", f"{count:,}")
    if rows["truncated"]:
        table.add_row(f"truncated at {report['settings']['max_length']:,} tokens", f"{rows['truncated']:,}")
    if rows["unsupervised_turns"]:
        table.add_row(
            "[yellow]assistant turns without loss[/] (the template renders them differently once the conversation "
            "continues; --split-turns makes rows of them)",
            f"{rows['unsupervised_turns']:,}",
        )
    for label, name in (
        ("refused", "refused"),
        ("prompt differs", "prompt_mismatches"),
        ("not rendered by the chat template, so not learned: the key of messages", "ignored_message_keys"),
    ):
        for reason, count in rows[name].items():
            table.add_row(f"[yellow]{label}:[/] {escape(reason)}", f"{count:,}")
    for name, counts in tokens.items():
        table.add_row(
            f"[bold]{name}[/]: {counts['all']:,} tokens, {counts['supervised']:,} of them supervised, at most "
            f"{counts['longest']:,} per row",
            f"[bold]{rows[name]:,}[/]",
        )
    if EVALUATION_SPLIT not in tokens and report["settings"]["eval_rows"]:
        table.add_row(f"[yellow]{EVALUATION_SPLIT}[/]: the fraction is less than one row", "0")
    return table


def _number(text: str) -> float:
    """Parse a whole number, or a fraction if the text has a decimal point."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(
            f"--eval-rows {text!r} is not a number. Pass a number of rows, or a fraction such as 0.02."
        ) from None


def _version(rows: datasets.Dataset) -> str:
    """Return a hash of the files from which the rows were read, or of rows in memory, which changes with the rows."""
    files: list[Any] = [Path(file["filename"]).parts[-4:] for file in rows.cache_files]
    return json_digest([len(rows), files or list(rows)])
