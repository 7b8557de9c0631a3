"""The command `dflash-hf prompts`, with which a target writes prompts itself."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..regeneration.defaults import BATCH_SIZE, CONCURRENCY
from ..regeneration.requests import GenerationBackend, SamplingParameters
from .options import INTERRUPTED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..regeneration.self_prompts import PromptProgress

LINE_S = 10.0  # a log file gets a line this often


def prompts(
    target: Annotated[str, typer.Option(help="Hub name or folder of a chat model; with --server its name there.")],
    out: Annotated[Path, typer.Option(help="File to write, as JSON lines. The same command continues it.")],
    number: Annotated[int, typer.Option(help="Prompts of the file. A larger number adds to them.")] = 1000,
    domain: Annotated[str | None, typer.Option(help="Subject of the prompts, for the system message.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message under which the prompts are written. It is not part of them.")
    ] = None,
    follow_ups: Annotated[float, typer.Option(help="Share of conversations with a second user turn, 0 to 1.")] = 0.0,
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 0.9,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, above 0 and at most 1.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(help="Longest user turn in tokens. Longer ones are refused.")] = 256,
    seed: Annotated[int, typer.Option(help="Every attempt has a seed of its own, which this one decides.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of a target in this process: auto, bfloat16, float16, float32.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts in progress in this process.")] = BATCH_SIZE,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server with raw completions (/v1/completions).")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of a target on a server; by default that of --target.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in progress on a server.")] = CONCURRENCY,
) -> None:
    """Let a chat model write prompts, as its users would. They are filtered, and `regenerate` answers them."""
    from transformers import AutoTokenizer

    from ..regeneration.local import LocalBackend
    from ..regeneration.self_prompts import DOMAIN_SYSTEM_PROMPT, PromptSettings, SelfPrompts
    from ..regeneration.server import ServerBackend
    from ..target.loading import load_target

    if domain is not None and system_prompt is not None:
        raise ValueError("--domain writes a system message, and --system-prompt is one. Leave one of them out.")
    if tokenizer is not None and server is None:
        raise ValueError("--tokenizer is for a target on a --server. Leave it out.")
    if domain is not None:
        system_prompt = DOMAIN_SYSTEM_PROMPT.format(domain=domain)
    console = Console()
    sampling = SamplingParameters(max_new_tokens, temperature, top_p, None, seed)
    settings = PromptSettings(target, sampling, system_prompt, follow_ups)
    words: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer or target)
    writer = SelfPrompts(out, words, settings)
    stop_strings = [writer.end] if writer.end and writer.end != words.eos_token else []
    backend: GenerationBackend
    if server is not None:
        backend = ServerBackend(server, target, sampling, concurrency=concurrency, stop_strings=stop_strings)
        backend.check()
    else:
        model, words = load_target(target, dtype)
        backend = LocalBackend(model, words, sampling, batch_size=batch_size, stop_strings=stop_strings)
    is_complete = _show(writer.write(backend, number), writer.progress, number, console)
    console.print(_table(writer.progress))
    console.print(f"{min(number, writer.progress.num_accepted)} prompts in {out}.", highlight=False, soft_wrap=True)
    if not is_complete:
        console.print("Interrupted. The same command continues.")
        raise typer.Exit(INTERRUPTED)


def _show(steps: Generator[PromptProgress], progress: PromptProgress, number: int, console: Console) -> bool:
    """Show the progress of a run. Returns False after Ctrl-C."""
    live = Progress(
        TextColumn("[bold]writing prompts"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]:.0f} tokens/s  of {task.fields[attempts]} attempts"),
        console=console,
    )
    start = last_line = time.monotonic()
    try:
        with closing(steps), live:
            task = live.add_task("", total=number, speed=0.0, attempts=0)
            for _ in steps:
                now = time.monotonic()
                speed = progress.num_tokens / max(now - start, 1e-9)
                live.update(task, completed=progress.num_accepted, speed=speed, attempts=progress.num_attempts)
                if not console.is_terminal and now - last_line > LINE_S:  # a log file has no live progress line
                    console.print(
                        f"{progress.num_accepted} of {number} prompts, {progress.num_attempts} attempts, "
                        f"{speed:.0f} tokens/s",
                        highlight=False,
                    )
                    last_line = now
    except KeyboardInterrupt:
        return False
    return True


def _table(progress: PromptProgress) -> Table:
    """Make the table of what became of the attempts."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("texts that the target wrote", f"{progress.num_attempts:,}")
    for reason, count in progress.refused.most_common():
        table.add_row(f"[yellow]refused:[/] {reason}", f"{count:,}")
    table.add_row("[bold]prompts", f"[bold]{progress.num_accepted:,}")
    return table
