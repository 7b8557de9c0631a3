"""`dflash-hf regenerate`: training rows that the target itself answers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..regeneration.defaults import BATCH_SIZE, CONCURRENCY, FORMATS, ROWS_PER_SHARD, TIMEOUT_S
from ..regeneration.requests import GenerationBackend, SamplingParameters
from .options import json_object

if TYPE_CHECKING:
    from ..regeneration.run import RegenerationProgress

PROMPTS, ANSWERS, SERVER, ROWS = "Prompts", "Answers", "Server", "Output"


def regenerate(
    prompts: Annotated[
        str,
        typer.Option(
            help="JSON lines, Parquet, a folder or a Hub data set with messages, turns, prompt or text.",
            rich_help_panel=PROMPTS,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the rows; a later run goes on there.", rich_help_panel=ROWS)],
    target: Annotated[
        str | None, typer.Option(help="Hub name or folder; with --server, its name there. Default: the demo target.")
    ] = None,
    prompts_config: Annotated[
        str | None, typer.Option(help="Configuration of a Hub data set.", rich_help_panel=PROMPTS)
    ] = None,
    prompts_split: Annotated[str, typer.Option(help="Split of a Hub data set.", rich_help_panel=PROMPTS)] = "train",
    prompt_column: Annotated[
        str | None,
        typer.Option(help="Column that holds the prompt, a text or messages or texts.", rich_help_panel=PROMPTS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Completion this many prompts, drawn at random.", rich_help_panel=PROMPTS)
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="Begins each conversation, in place of its own.", rich_help_panel=PROMPTS)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest answer in tokens.", rich_help_panel=ANSWERS)
    ] = SamplingParameters.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=ANSWERS)] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Above 0, at most 1.", rich_help_panel=ANSWERS)] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is no limit.", rich_help_panel=ANSWERS)] = None,
    own_sampling: Annotated[
        bool,
        typer.Option("--own-sampling", help="Sample as the target's generation config says.", rich_help_panel=ANSWERS),
    ] = False,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON object for the chat template.", rich_help_panel=ANSWERS)
    ] = "{}",
    thinking_share: Annotated[
        float | None,
        typer.Option(
            help="Share of conversations with enable_thinking=true, the others having false.", rich_help_panel=ANSWERS
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the sample_tokens of prompts and of sampling.", rich_help_panel=ANSWERS)
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target here: auto, bfloat16, float16, float32.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Answers written at a time here.")] = BATCH_SIZE,
    server: Annotated[
        str | None,
        typer.Option(help="URL of an OpenAI-compatible server that answers instead.", rich_help_panel=SERVER),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.", rich_help_panel=SERVER)] = CONCURRENCY,
    requests_per_minute: Annotated[float | None, typer.Option(help="At most so many.", rich_help_panel=SERVER)] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for an answer.", rich_help_panel=SERVER)] = TIMEOUT_S,
    file_format: Annotated[str, typer.Option("--format", help="parquet or jsonl.", rich_help_panel=ROWS)] = FORMATS[0],
    rows_per_shard: Annotated[int, typer.Option(help="Rows of a file.", rich_help_panel=ROWS)] = ROWS_PER_SHARD,
) -> None:
    """Let the target answer prompts: rows to train a draft on. Run the same again after an interrupt: it goes on."""
    from ..data.loading import load_rows
    from ..data.prompts import check_columns, sample_rows
    from ..regeneration.local import LocalBackend
    from ..regeneration.run import RegenerationSettings, regenerate_rows
    from ..regeneration.server import ServerBackend
    from ..regeneration.shards import FAILED, RowShards
    from ..target.demo import DEMO_TARGET, prepare_demo_target
    from ..target.loading import load_target, load_target_config

    sampling = SamplingParameters(max_new_tokens, temperature, top_p, top_k, seed)
    if own_sampling:
        if temperature or top_p is not None or top_k is not None:
            raise ValueError("--own-sampling takes temperature, top-p and top-k from the target: leave them out.")
        sampling = SamplingParameters(max_new_tokens, None, None, None, seed)
    template_kwargs = json_object("--chat-template-kwargs", chat_template_kwargs)
    rows = load_rows(prompts, prompts_config, prompts_split)
    check_columns(rows, prompt_column)
    rows = sample_rows(rows, limit, seed)
    console = Console()

    backend: GenerationBackend | None = None
    if server is not None:
        backend = ServerBackend(
            server,
            target,
            sampling,
            concurrency=concurrency,
            timeout_s=timeout_s,
            requests_per_minute=requests_per_minute,
        )
        name, revision = backend.check(), None
    else:
        folder, name = target or str(prepare_demo_target()), target or DEMO_TARGET.name
        revision = getattr(load_target_config(folder), "_commit_hash", None)
    settings = RegenerationSettings(name, revision, sampling, system_prompt, template_kwargs, thinking_share)
    with RowShards(out, asdict(settings), file_format=file_format, rows_per_shard=rows_per_shard) as shards:
        if backend is None:
            model, tokenizer = load_target(folder, dtype)
            backend = LocalBackend(model, tokenizer, sampling, batch_size=batch_size)
        steps = regenerate_rows(rows, backend, shards, settings, column=prompt_column)
        is_complete = _show(steps, len(rows), console)
    console.print(f"{shards.num_rows} rows in {out}.", highlight=False, soft_wrap=True)
    if isinstance(backend, ServerBackend) and backend.retried:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in backend.retried.most_common(5))
        console.print(f"Calls that were tried again: {kinds}.", highlight=False, soft_wrap=True)
    if (out / FAILED).is_file():
        console.print(f"What failed, and why: {out / FAILED}. The same command tries it again.", soft_wrap=True)
    if not is_complete:
        console.print("Interrupted. The same command goes on.")
        raise typer.Exit(130)


def _show(steps: Generator[RegenerationProgress], total: int, console: Console) -> bool:
    """Draw how far a run is; False after Ctrl-C."""
    from ..regeneration.run import RegenerationProgress

    progress = RegenerationProgress()
    live = Progress(
        TextColumn("[bold]answering"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s  failed {task.fields[failed]}"),
        console=console,
    )
    speed, next_line = 0.0, 1
    try:
        with closing(steps), live:
            task = live.add_task("", total=total, speed=0.0, failed=0)
            for progress in steps:
                speed = progress.num_tokens / max(live.tasks[0].elapsed or 0.0, 1e-9)
                live.update(task, completed=progress.num_seen, speed=speed, failed=progress.num_failed)
                if progress.num_seen >= next_line and not console.is_terminal:  # a log file has no live line
                    console.print(f"{progress.num_seen} of {total} prompts, {speed:.0f} tokens/s", highlight=False)
                    next_line = progress.num_seen + max(1, total // 20)
    except KeyboardInterrupt:
        return False
    finally:
        console.print(
            f"{progress.num_answered} answered ({progress.num_tokens:,} tokens, {speed:.0f} a second), "
            f"{progress.num_done} answered before, {progress.num_repeated} repeated, {progress.num_failed} failed.",
            highlight=False,
        )
    return True
