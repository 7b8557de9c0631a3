"""`dflash-hf prepare`: rows → a tokenised data set that training reads as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import multiprocess
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..data.settings import PreparationSettings
from ..files import json_digest
from .options import json_object

if TYPE_CHECKING:
    import datasets

SHOWN_MISMATCHES = 3


def prepare(
    target: Annotated[str, typer.Option(help="Folder or Hub name of the target; only its tokenizer is loaded.")],
    dataset: Annotated[
        str, typer.Option(help="Rows: a JSON-lines or Parquet file, a folder of regenerate, or a Hub name.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, whole or not at all.")],
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")] = None,
    dataset_split: Annotated[str, typer.Option(help="Split of a Hub data set or a folder.")] = "train",
    max_length: Annotated[int, typer.Option(help="Longest row in tokens.")] = PreparationSettings.max_length,
    truncation: Annotated[
        str, typer.Option(help="Longer rows: cut at the end, or drop.")
    ] = PreparationSettings.truncation,
    block_size: Annotated[
        int | None, typer.Option(help="Drop rows that have no room for a whole block of this many tokens.")
    ] = None,
    on_mismatch: Annotated[
        str, typer.Option(help="Rows with another prompt than the chat template gives now: keep, drop, error.")
    ] = PreparationSettings.on_mismatch,
    split_turns: Annotated[
        bool,
        typer.Option(
            "--split-turns", help="Answers that the template changes once the conversation goes on: rows of their own."
        ),
    ] = False,
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Keep several rows of one prompt; equal rows are dropped anyway.")
    ] = False,
    eval_rows: Annotated[
        str, typer.Option(help="Rows to hold out: a number, or a share such as 0.02. A prompt is on one side only.")
    ] = "0",
    seed: Annotated[int, typer.Option(help="Of the choice of held-out prompts.")] = PreparationSettings.seed,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON object for the chat template; values of a row come first.")
    ] = "{}",
    num_proc: Annotated[int | None, typer.Option(help="Processes that tokenise.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace rows that were prepared before.")] = False,
) -> None:
    """Tokenise rows, mark what the target wrote, check the prompts, drop repeats, and hold some out."""
    from ..data.loading import load_rows
    from ..data.prepare import prepare_for_training
    from ..data.prepared_folder import MISMATCHES, folder_settings, is_prepared_already, make_report, write_folder
    from ..target.loading import read_target

    if num_proc is not None and num_proc < 1:
        raise ValueError(f"--num-proc {num_proc} must be at least 1.")
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
    rows = load_rows(dataset, dataset_config, dataset_split)
    source = {
        "dataset": dataset,
        "dataset_config": dataset_config,
        "dataset_split": dataset_split,
        "dataset_version": _version(rows),
    }
    whole_settings = folder_settings(target, source, text, settings)
    if is_prepared_already(out, whole_settings, overwrite=overwrite):
        _say(console, f"{out} holds these rows, prepared with these settings, already.")
        return
    try:
        prepared = prepare_for_training(rows, text, settings, num_proc=num_proc)
        report = make_report(prepared, whole_settings)
        write_folder(out, prepared, report)
    except (KeyboardInterrupt, multiprocess.TimeoutError) as error:
        # Waiting for its processes after Ctrl-C, datasets raises a TimeoutError in place of the interrupt
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        _say(console, f"Interrupted: {out} was not written.")
        raise typer.Exit(130) from None
    console.print(_report_table(report), highlight=False)
    for line in prepared.mismatches[:SHOWN_MISMATCHES]:
        _say(console, f"Row {line['row']}: {line['reason']}")
        if not line["is_refused"]:
            _say(console, f"  the row at token {line['position']}: {line['row_text']!r}")
            _say(console, f"  the template there: {line['template_text']!r}")
    if len(prepared.mismatches) > SHOWN_MISMATCHES:
        _say(console, f"… {len(prepared.mismatches):,} such rows in all: {out / MISMATCHES}")
    _say(console, f"Prepared rows are in {out}: dflash-hf train --dataset {out}")


def _say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colours, no line breaks within paths."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _report_table(report: Mapping[str, Any]) -> Table:
    """The counts of a report, one a line."""
    from ..data.prepared_folder import EVALUATION_SPLIT

    rows, tokens = report["rows"], report["tokens"]
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("", overflow="fold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_row("rows read", f"{rows['read']:,}")
    if rows["answers"] != rows["read"]:
        table.add_row("with the answers that got rows of their own", f"{rows['answers']:,}")
    for reason, count in rows["dropped"].items():
        table.add_row(f"[yellow]dropped:[/] {escape(reason)}", f"{count:,}")
    if rows["cut"]:
        table.add_row(f"cut at {report['settings']['max_length']:,} tokens", f"{rows['cut']:,}")
    if rows["earlier_answers_without_loss"]:
        table.add_row(
            "[yellow]earlier answers without loss[/] (the template renders them otherwise now; --split-turns gives "
            "them rows of their own)",
            f"{rows['earlier_answers_without_loss']:,}",
        )
    for label, name in (("refused", "refused"), ("another prompt", "other_prompt")):
        for reason, count in rows[name].items():
            table.add_row(f"[yellow]{label}:[/] {escape(reason)}", f"{count:,}")
    for name, counts in tokens.items():
        table.add_row(
            f"[bold]{name}[/]: {counts['all']:,} tokens, {counts['supervised']:,} of them supervised, at most "
            f"{counts['longest']:,} a row",
            f"[bold]{rows[name]:,}[/]",
        )
    if EVALUATION_SPLIT not in tokens and report["settings"]["eval_rows"]:
        table.add_row(f"[yellow]{EVALUATION_SPLIT}[/]: the share is less than a row", "0")
    return table


def _number(text: str) -> float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"--eval-rows {text!r} must be a number of rows, or a share such as 0.02.") from None


def _version(rows: datasets.Dataset) -> str:
    """A name of the files that the rows were read from; it changes when they do."""
    files = [Path(file["filename"]).parts[-4:] for file in rows.cache_files]
    return json_digest([len(rows), files])
