"""The command `dflash-hf bench regenerate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..regeneration.defaults import BATCH_SIZE
from ..regeneration.requests import SamplingParameters, TurnRequest

if TYPE_CHECKING:
    from ..benchmarks.regeneration import ThroughputMeasurement

STATIC, CONTINUOUS = "static batches", "continuous batching"


def regenerate(
    target: Annotated[str, typer.Option(help="Folder or Hub name of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON-lines file with turns, prompt or messages.")],
    limit: Annotated[int, typer.Option(help="Use this many prompts.", min=1)] = 256,
    batch_size: Annotated[int, typer.Option(help="Completions in progress, in both cases.", min=1)] = BATCH_SIZE,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum length of a completion in tokens.", min=1)
    ] = SamplingParameters.max_new_tokens,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, bfloat16, float16, float32.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Also write the numbers to this JSON file.")] = None,
) -> None:
    """Compare the throughput of continuous batching and of static batches on the same prompts, decoded greedily."""
    import torch

    from ..benchmarks.regeneration import measure_throughput, share_of_identical, warm_up
    from ..data.prompts import read_prompts
    from ..regeneration.local import LocalBackend
    from ..target.loading import load_target

    model, tokenizer = load_target(target, dtype)
    requests = [
        TurnRequest(str(number), [{"role": "user", "content": prompt}])
        for number, prompt in enumerate(read_prompts(prompts)[:limit])
    ]
    if not requests:
        raise ValueError(f"{prompts} has no prompt. Write one JSON object on each line.")
    sampling = SamplingParameters(max_new_tokens)
    backends = {
        name: LocalBackend(model, tokenizer, sampling, batch_size=batch_size, continuous_batching=continuous)
        for name, continuous in ((STATIC, False), (CONTINUOUS, None))
    }
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("warm-up", total=2 * len(requests))
        warm_up(backends, requests)
        progress.update(task, description="completions")
        measured = measure_throughput(backends, requests, lambda: progress.advance(task))
    static, continuous = measured[STATIC], measured[CONTINUOUS]
    if not (static.completions and continuous.completions):
        raise ValueError(
            f"No prompt of {prompts} has a completion. Prompts must be shorter than the target's longest sequence: "
            "use shorter ones."
        )
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
            "ratio": continuous.tokens_per_s / static.tokens_per_s,
            "identical_share": share_of_identical(static, continuous),
            **{
                name: {"tokens": item.num_tokens, "seconds": item.seconds, "tokens_per_s": item.tokens_per_s}
                for name, item in measured.items()
            },
        }
        out.write_text(json.dumps(record, indent=1), encoding="utf-8")


def _show(measured: dict[str, ThroughputMeasurement], title: str, console: Console) -> None:
    from ..benchmarks.regeneration import share_of_identical

    static = measured[STATIC]
    table = Table(title=title)
    for heading in ("", "completions", "tokens", "seconds", "tokens/s", "ratio", "identical"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, item in measured.items():
        table.add_row(
            name,
            f"{len(item.completions):,}",
            f"{item.num_tokens:,}",
            f"{item.seconds:.1f}",
            f"{item.tokens_per_s:.1f}",
            f"{item.tokens_per_s / static.tokens_per_s:.2f}×",
            f"{share_of_identical(static, item):.1%}",
        )
    console.print(table)
