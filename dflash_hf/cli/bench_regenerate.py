"""`dflash-hf bench regenerate`: the local engine beside plain padded batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..regeneration.defaults import BATCH_SIZE
from ..regeneration.requests import Sampling, TurnRequest

if TYPE_CHECKING:
    from ..benchmarks.regeneration import AnsweringMeasurement


def regenerate(
    target: Annotated[str, typer.Option(help="Folder or Hub name of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with turns, prompt or messages.")],
    limit: Annotated[int, typer.Option(help="Take so many prompts.", min=1)] = 256,
    batch_size: Annotated[int, typer.Option(help="Answers under way at once, in both.", min=1)] = BATCH_SIZE,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = Sampling.max_new_tokens,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write the numbers here, as JSON.")] = None,
) -> None:
    """Answer the same prompts greedily by the local engine and by plain padded batches, in turns; print tokens/s."""
    import torch

    from ..benchmarks.regeneration import measure_answers, share_of_same, warm_up
    from ..data.prompts import read_prompts
    from ..regeneration.local import LocalEngine
    from ..target.loading import load_target

    model, tokenizer = load_target(target, dtype)
    requests = [
        TurnRequest(str(number), [{"role": "user", "content": prompt}])
        for number, prompt in enumerate(read_prompts(prompts)[:limit])
    ]
    if not requests:
        raise ValueError(f"{prompts} has no prompt. Write one JSON object a line.")
    engines = {
        name: LocalEngine(model, tokenizer, Sampling(max_new_tokens), batch_size=batch_size, refill=refill)
        for name, refill in (("plain batches", False), ("engine", None))
    }
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("warming up", total=2 * len(requests))
        warm_up(engines, requests)
        progress.update(task, description="answers")
        measured = measure_answers(engines, requests, lambda: progress.advance(task))
    plain, engine = measured["plain batches"], measured["engine"]
    if not (plain.answers and engine.answers):
        raise ValueError(f"No prompt of {prompts} could be answered; they may be longer than the target reads.")
    _show(measured, f"{len(requests)} prompts, {model.device}, {str(model.dtype).removeprefix('torch.')}", console)
    if out is not None:
        record = {
            "target": target,
            "prompts": len(requests),
            "batch_size": batch_size,
            "max_new_tokens": max_new_tokens,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "ratio": engine.tokens_per_s / plain.tokens_per_s,
            "same_answers": share_of_same(plain, engine),
            **{
                name: {"tokens": item.num_tokens, "seconds": item.seconds, "tokens_per_s": item.tokens_per_s}
                for name, item in measured.items()
            },
        }
        out.write_text(json.dumps(record, indent=1), encoding="utf-8")


def _show(measured: dict[str, AnsweringMeasurement], title: str, console: Console) -> None:
    from ..benchmarks.regeneration import share_of_same

    plain = measured["plain batches"]
    table = Table(title=title)
    for heading in ("", "answers", "tokens", "seconds", "tokens/s", "ratio", "same answers"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, item in measured.items():
        table.add_row(
            name,
            f"{len(item.answers):,}",
            f"{item.num_tokens:,}",
            f"{item.seconds:.1f}",
            f"{item.tokens_per_s:.1f}",
            f"{item.tokens_per_s / plain.tokens_per_s:.2f}×",
            f"{share_of_same(plain, item):.1%}",
        )
    console.print(table)
