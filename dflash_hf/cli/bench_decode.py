"""`dflash-hf bench decode`: compare decoding with a draft, plain generation and the loops of other packages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..benchmarks.decoding_settings import BenchmarkSettings
from ..files import write_text
from .options import INTERRUPTED, values_between_commas

if TYPE_CHECKING:
    from ..benchmarks.decoding import DecodingBenchmark
    from ..benchmarks.decoding_results import DecodingRun, DecodingSummary

QUESTIONS = files("dflash_hf") / "demo_data" / "gsm8k_test_questions.jsonl"
DEFAULTS = BenchmarkSettings()
BATCH_SIZES = ",".join(map(str, DEFAULTS.batch_sizes))
TEMPERATURES = ",".join(format(value, "g") for value in DEFAULTS.temperatures)


def decode(
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of target and draft: auto, bfloat16, float16 or float32.")
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of JSON lines with turns, prompt or messages; default: 64 GSM8K test questions."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts to use, a multiple of every batch size.")] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(help="Greatest length of a response in tokens.")
    ] = DEFAULTS.max_new_tokens,
    batch_sizes: Annotated[
        str, typer.Option(help="Numbers of sequences to decode together; loops of other packages take one.")
    ] = BATCH_SIZES,
    temperatures: Annotated[
        str,
        typer.Option(
            help="0 decodes greedily, above 0 samples. Of the target's generation config, only end tokens and stop "
            "strings are used."
        ),
    ] = TEMPERATURES,
    block_sizes: Annotated[
        str,
        typer.Option(help="Slots that our loop verifies: numbers, 'trained' for the draft's own number, or 'auto'."),
    ] = "trained,auto",
    tree_sizes: Annotated[
        str,
        typer.Option(help="Tokens that our loop verifies in trees, each number larger than a block, such as 12,24."),
    ] = "",
    proposal: Annotated[
        str, typer.Option(help="How our loop proposes tokens when it samples: argmax, sample, or argmax,sample.")
    ] = "argmax",
    repeats: Annotated[int, typer.Option(help="How often each method decodes each batch.")] = DEFAULTS.repeats,
    against: Annotated[
        str | None, typer.Option(help="Pass dflash to measure the decoder of that package, too (batch 1).")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File of the results, which is written after every batch.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = DEFAULTS.seed,
) -> None:
    """Compare speed, acceptance and times of plain generation, the loop of transformers and our loop."""
    from transformers.utils import logging

    from ..benchmarks.decoding import DecodingBenchmark
    from ..benchmarks.decoding_results import summarize_runs
    from ..data.prompts import read_prompts
    from ..model.modeling_dflash import DFlashDraftModel
    from ..provenance import environment
    from ..target.loading import load_target_of

    if against not in (None, "dflash"):
        raise ValueError(f"--against {against!r} must be 'dflash'. Pass that, or leave the option out.")
    given = read_prompts(str(prompts or QUESTIONS))
    if not 1 <= num_prompts <= len(given):
        raise ValueError(
            f"--num-prompts {num_prompts} must be 1 to {len(given)}, the number of prompts in the file. Pass such a "
            "number."
        )
    pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    trained = pair.config.tokens_per_block
    settings = BenchmarkSettings(
        max_new_tokens=max_new_tokens,
        batch_sizes=values_between_commas("--batch-sizes", batch_sizes, int),
        temperatures=values_between_commas("--temperatures", temperatures, float),
        block_sizes=values_between_commas(
            "--block-sizes", block_sizes, lambda word: {"trained": trained, "auto": "auto"}.get(word) or int(word)
        ),
        tree_sizes=values_between_commas("--tree-sizes", tree_sizes, int) if tree_sizes else (),
        proposals=values_between_commas("--proposal", proposal, str),
        repeats=repeats,
        against_reference=against == "dflash",
        seed=seed,
    )
    settings.check(num_prompts, trained)
    logging.set_verbosity_error()
    model, tokenizer = load_target_of(pair, target, dtype)

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    benchmark = DecodingBenchmark(model, pair, tokenizer, given[:num_prompts], settings)
    head = {
        **environment(),
        "target": model.name_or_path,
        "draft": draft,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "trained_block_size": trained,
        "prompts": str(prompts or QUESTIONS.name),
        "num_prompts": num_prompts,
        "settings": asdict(settings),
    }
    also = ""
    if benchmark.reference is not None:
        head["reference"] = f"dflash {benchmark.reference.version}"
        also = f"; against {head['reference']}"
    console.print(
        f"{head['hardware']}; {head['software']}; target {head['target']}, {head['dtype']}, on {model.device}; "
        f"draft {draft}, {trained} slots a block; {num_prompts} prompts, at most {max_new_tokens} new tokens{also}",
        highlight=False,
        soft_wrap=True,
    )
    if benchmark.protocol.ignored is not None:
        console.print(benchmark.protocol.ignored, style="yellow", markup=False, highlight=False, soft_wrap=True)
    runs: list[DecodingRun] = []

    def write(summaries: list[DecodingSummary], is_complete: bool) -> None:
        """Write the results to the file of --json."""
        if json_file is not None:
            results = [asdict(summary) for summary in summaries]
            record = {**head, "is_complete": is_complete, "left_out": benchmark.left_out, "results": results}
            write_text(json_file, json.dumps(record, indent=1, allow_nan=False))

    write([], False)
    is_complete = _run(benchmark, runs, lambda: write(summarize_runs(runs), False), console)
    summaries = summarize_runs(runs, benchmark.logit_gap if is_complete else None)
    write(summaries, is_complete)
    for temperature in settings.temperatures:
        same = [summary for summary in summaries if summary.temperature == temperature]
        if same:
            console.print(*tables(same), sep="\n", highlight=False)
    for method, reason in benchmark.left_out.items():
        console.print(f"The method {method!r} was left out: {reason}", markup=False)
    if not is_complete:
        console.print("[bold yellow]Interrupted[/]: the tables contain the runs that were measured before.")
        raise typer.Exit(INTERRUPTED)


def _run(benchmark: DecodingBenchmark, runs: list[DecodingRun], write: Callable[[], None], console: Console) -> bool:
    """Measure, and return whether all runs were completed."""
    # a thread that refreshes the display would disturb the measurement
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=benchmark.num_runs)

        def show(description: str) -> None:
            progress.update(task, description=description, total=benchmark.num_runs, refresh=True)

        try:
            for run in benchmark.run(show):
                runs.append(run)
                progress.update(task, advance=1, refresh=True)
                write()
        except KeyboardInterrupt:
            return False
    return True


def tables(summaries: Sequence[DecodingSummary]) -> list[Table | str]:
    """
    Make tables of speed, acceptance and times of one temperature.

    With four batch sizes each table is at most 100 columns wide.

    Args:
        summaries (`Sequence[DecodingSummary]`): summaries of one temperature.

    Returns:
        `list[Table | str]`: headings, tables and notes in the order in which they are printed.
    """
    temperature = summaries[0].temperature
    decoding = "greedy" if temperature == 0 else f"sampling at T = {temperature:g}"
    speed = _by_batch_size(
        summaries, lambda summary: f"{summary.tokens_per_s:.1f} {_number(summary.speed_up, '{:.2f}×'):>6}"
    )
    acceptance = _by_batch_size(summaries, _greedy_cell if temperature == 0 else _sampling_cell)
    note = "the expected value counts tokens past the end of a response, too"
    if temperature == 0:
        beside = "responses identical to plain generation"
        note = "plain generation is compared with its own responses at the first batch size"
        gaps = [difference["logit_gap"] for summary in summaries for difference in summary.first_differences]
        if gaps and None not in gaps:
            note += f"; where responses differ first, the logits are at most {max(gaps):.2g} apart"
    else:
        beside = "(expected value)"
    return [
        f"[bold]{decoding}: tokens/s, prefill included, and speed-up over plain (median over the batches)",
        speed,
        "[dim]ours, N: our loop verifies N slots of a block, the anchor included\n",
        f"[bold]{decoding}: acceptance length ± standard error, and {beside}",
        acceptance,
        f"[dim]{note}\n",
        f"[bold]{decoding}: ms per pass of the target, and their shares",
        _times(summaries),
        "[dim]draft: its forward pass and the output head; overhead: outside both models; prefill: ms per call\n",
    ]


def _by_batch_size(summaries: Sequence[DecodingSummary], cell: Callable[[DecodingSummary], str]) -> Table:
    """Make a table with a row for each method and a column for each batch size."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    batch_sizes = list(dict.fromkeys(summary.batch_size for summary in summaries))
    for batch_size in batch_sizes:
        table.add_column(f"batch {batch_size}", justify="right", no_wrap=True)
    cells = {(summary.label, summary.batch_size): cell(summary) for summary in summaries}
    for label in dict.fromkeys(summary.label for summary in summaries):
        table.add_row(label, *(cells.get((label, batch_size), "–") for batch_size in batch_sizes))
    return table


def _times(summaries: Sequence[DecodingSummary]) -> Table:
    """Make the table of times."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("passes", "ms", "draft", "verify", "overhead", "prefill", "total s"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, summary in enumerate(summaries):
        passes = max(summary.num_passes, 1)
        in_steps = {phase: summary.phase_s[phase] * 1e3 / passes for phase in summary.phase_share}
        is_last = index + 1 == len(summaries) or summaries[index + 1].batch_size != summary.batch_size
        table.add_row(
            str(summary.batch_size),
            summary.label,
            str(summary.num_passes),
            f"{sum(in_steps.values()):.1f}",
            *(f"{ms:.1f} {summary.phase_share[phase]:>3.0%}" for phase, ms in in_steps.items()),
            f"{summary.phase_s['prefill'] * 1e3 / summary.num_batches:.0f}",
            f"{summary.seconds:.1f}",
            end_section=is_last,
        )
    return table


def _greedy_cell(summary: DecodingSummary) -> str:
    """Format acceptance and the number of identical responses."""
    same = f"{summary.num_identical}/{summary.num_compared}" if summary.num_compared else ""
    return f"{_acceptance(summary)} {same:>5}"


def _sampling_cell(summary: DecodingSummary) -> str:
    """Format acceptance and its expected value."""
    return f"{_acceptance(summary)} {_number(summary.expected_acceptance_length, '({:.2f})'):>6}"


def _acceptance(summary: DecodingSummary) -> str:
    """Format the acceptance length with its standard error, in few columns."""
    if summary.acceptance_length is None:
        return ""
    error = _number(summary.acceptance_length_error, "±{:.2f}").replace("±0.", "±.")
    return f"{summary.acceptance_length:.2f}{error}"


def _number(value: float | None, form: str) -> str:
    """Format a number, or nothing if there is none."""
    return "" if value is None else form.format(value)
