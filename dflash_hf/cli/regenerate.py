"""The command `dflash-hf regenerate`."""

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

PROMPTS, COMPLETIONS, SERVER, ROWS = "Prompts", "Completions", "Server", "Output"


def regenerate(
    prompts: Annotated[
        str,
        typer.Option(
            help="Data file, folder or Hub data set with a column messages, turns, prompt or text.",
            rich_help_panel=PROMPTS,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the rows. A later run continues there.", rich_help_panel=ROWS)],
    target: Annotated[
        str | None,
        typer.Option(help="Hub name or folder, or with --server the name there. By default the demo target."),
    ] = None,
    prompts_config: Annotated[
        str | None, typer.Option(help="Configuration of a Hub data set.", rich_help_panel=PROMPTS)
    ] = None,
    prompts_split: Annotated[str, typer.Option(help="Split of a Hub data set.", rich_help_panel=PROMPTS)] = "train",
    prompt_column: Annotated[
        str | None,
        typer.Option(help="Column with the prompt: a text, messages or several texts.", rich_help_panel=PROMPTS),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Sample this many prompts.", rich_help_panel=PROMPTS)] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="Replaces the system message of each conversation.", rich_help_panel=PROMPTS)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum length of a completion in tokens.", rich_help_panel=COMPLETIONS)
    ] = SamplingParameters.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=COMPLETIONS)] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling, above 0 and at most 1.", rich_help_panel=COMPLETIONS)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this many tokens; 0 is no limit.", rich_help_panel=COMPLETIONS)
    ] = None,
    own_sampling: Annotated[
        bool,
        typer.Option(
            "--own-sampling",
            help="Use the sampling parameters of the target's generation config.",
            rich_help_panel=COMPLETIONS,
        ),
    ] = False,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="Arguments of the chat template, as a JSON object.", rich_help_panel=COMPLETIONS)
    ] = "{}",
    thinking_share: Annotated[
        float | None,
        typer.Option(
            help="Share of conversations with enable_thinking=true; the others have false.",
            rich_help_panel=COMPLETIONS,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the sampling of prompts and of tokens.", rich_help_panel=COMPLETIONS)
    ] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of a target in this process: auto, bfloat16, float16, float32.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Completions in progress in this process.")] = BATCH_SIZE,
    server: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenAI-compatible server that generates the completions.", rich_help_panel=SERVER
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in progress.", rich_help_panel=SERVER)] = CONCURRENCY,
    requests_per_minute: Annotated[
        float | None, typer.Option(help="Maximum rate of requests.", rich_help_panel=SERVER)
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Maximum seconds of one request.", rich_help_panel=SERVER)
    ] = TIMEOUT_S,
    file_format: Annotated[
        str, typer.Option("--format", help="Of the shards: parquet or jsonl.", rich_help_panel=ROWS)
    ] = FORMATS[0],
    rows_per_shard: Annotated[int, typer.Option(help="Rows of a shard.", rich_help_panel=ROWS)] = ROWS_PER_SHARD,
) -> None:
    """Generate training rows: the target completes prompts. After an interrupt, the same command continues."""
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
            raise ValueError(
                "--own-sampling uses the temperature, top-p and top-k of the target. Leave these options out."
            )
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
        console.print(f"Retried requests: {kinds}.", highlight=False, soft_wrap=True)
    if (out / FAILED).is_file():
        console.print(
            f"Failed prompts and their reasons: {out / FAILED}. The same command tries them again.", soft_wrap=True
        )
    if not is_complete:
        console.print("Interrupted. The same command continues.")
        raise typer.Exit(130)


def _show(steps: Generator[RegenerationProgress], total: int, console: Console) -> bool:
    """Show the progress of a run. Returns False after Ctrl-C."""
    from ..regeneration.run import RegenerationProgress

    progress = RegenerationProgress()
    live = Progress(
        TextColumn("[bold]generating"),
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
                if progress.num_seen >= next_line and not console.is_terminal:  # a log file has no live progress line
                    console.print(f"{progress.num_seen} of {total} prompts, {speed:.0f} tokens/s", highlight=False)
                    next_line = progress.num_seen + max(1, total // 20)
    except KeyboardInterrupt:
        return False
    finally:
        console.print(
            f"{progress.num_completed} conversations completed ({progress.num_tokens:,} tokens, {speed:.0f} per "
            f"second), {progress.num_existing} completed before, {progress.num_duplicates} duplicates, "
            f"{progress.num_failed} failed.",
            highlight=False,
        )
    return True
