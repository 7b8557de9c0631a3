"""`dflash-hf bench decode`: decoding with a draft beside plain generation and other loops."""

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

from ..benchmarks.decoding_results import DecodingRun, DecodingSummary, summarize_runs
from ..benchmarks.decoding_settings import BenchmarkSettings
from ..files import write_text
from .options import INTERRUPTED, values_between_commas

if TYPE_CHECKING:
    from ..benchmarks.decoding import DecodingBenchmark

QUESTIONS = files("dflash_hf") / "demo_data" / "gsm8k_test_questions.jsonl"
DEFAULTS = BenchmarkSettings()
BATCH_SIZES = ",".join(map(str, DEFAULTS.batch_sizes))
TEMPERATURES = ",".join(format(value, "g") for value in DEFAULTS.temperatures)


def decode(
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    dtype: Annotated[str, typer.Option(help="Of target and draft: auto, bfloat16, float16, float32.")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with turns, prompt or messages; default: 64 GSM8K test questions.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Take so many; a multiple of every batch size.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = DEFAULTS.max_new_tokens,
    batch_sizes: Annotated[str, typer.Option(help="Rows decoded together; the other loops take one.")] = BATCH_SIZES,
    temperatures: Annotated[str, typer.Option(help="0 decodes greedily, above 0 samples.")] = TEMPERATURES,
    block_sizes: Annotated[
        str, typer.Option(help="Slots that ours verifies: numbers, 'trained' for the draft's own, 'auto'.")
    ] = "trained,auto",
    tree_sizes: Annotated[
        str, typer.Option(help="Tokens that ours verifies in trees, each more than a block; e.g. 12,24.")
    ] = "",
    proposal: Annotated[str, typer.Option(help="How ours proposes when sampling: argmax, sample or both.")] = "argmax",
    repeats: Annotated[int, typer.Option(help="Times that each method decodes each batch.")] = DEFAULTS.repeats,
    against: Annotated[str | None, typer.Option(help="'dflash': also the decoder of that package (batch 1).")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here, after every batch.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = DEFAULTS.seed,
) -> None:
    """Decode the same prompts by plain generate, transformers' loop and ours; print speed, acceptance and times."""
    from transformers.utils import logging

    from ..benchmarks.decoding import DecodingBenchmark
    from ..data.prompts import read_prompts
    from ..model.modeling_dflash import DFlashDraftModel
    from ..provenance import environment
    from ..target.loading import load_target_of

    if against not in (None, "dflash"):
        raise ValueError(f"--against {against!r} must be 'dflash'.")
    given = read_prompts(str(prompts or QUESTIONS))
    if not 1 <= num_prompts <= len(given):
        raise ValueError(f"--num-prompts {num_prompts} must be 1 to {len(given)}, the prompts in the file.")
    pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    trained = pair.config.block_size
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
    runs: list[DecodingRun] = []

    def write(summaries: list[DecodingSummary], is_complete: bool) -> None:
        if json_file is not None:
            results = [asdict(summary) for summary in summaries]
            record = {**head, "is_complete": is_complete, "left_out": benchmark.left_out, "results": results}
            write_text(json_file, json.dumps(record, indent=1, allow_nan=False))

    write([], False)
    is_complete = _run(benchmark, runs, lambda: write(summarize_runs(runs), False), console)
    summaries = summarize_runs(runs, benchmark.top_two_gap if is_complete else None)
    write(summaries, is_complete)
    for temperature in settings.temperatures:
        same = [summary for summary in summaries if summary.temperature == temperature]
        if same:
            console.print(*tables(same), sep="\n", highlight=False)
    for method, reason in benchmark.left_out.items():
        console.print(f"{method} was left out: {reason}", markup=False)
    if not is_complete:
        console.print("[bold yellow]interrupted[/]: the tables hold what was measured until then.")
        raise typer.Exit(INTERRUPTED)


def _run(benchmark: DecodingBenchmark, runs: list[DecodingRun], write: Callable[[], None], console: Console) -> bool:
    """Collect the runs; returns whether all were made."""
    # no refreshing in the background: its thread would take time from what is measured
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

        def show(words: str) -> None:
            progress.update(task, description=words, total=benchmark.num_runs, refresh=True)

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
    Speed, acceptance and times of one temperature, each at most 100 columns wide with four batch sizes.

    Args:
        summaries (`Sequence[DecodingSummary]`): of one temperature.

    Returns:
        `list[Table | str]`: headings, tables and notes, to be printed one below the other.
    """
    temperature = summaries[0].temperature
    decoding = "greedy" if temperature == 0 else f"sampling at T = {temperature:g}"
    speed = _by_batch_size(
        summaries, lambda summary: f"{summary.tokens_per_s:.1f} {_number(summary.speed_up, '{:.2f}×'):>6}"
    )
    acceptance = _by_batch_size(summaries, _greedy_cell if temperature == 0 else _sampling_cell)
    note = "the expectation counts whole passes, also where an answer ends inside one"
    if temperature == 0:
        beside = "answers identical to plain's"
        note = "plain itself: compared with its answers at the first batch size"
        gaps = [difference["top_two_gap"] for summary in summaries for difference in summary.first_differences]
        if gaps and None not in gaps:
            note += f"; where answers part, the best two logits are at most {max(gaps):.2g} apart"
    else:
        beside = "(expected by the target's probabilities)"
    return [
        f"[bold]{decoding}: tokens/s, prefill included, and × plain (median over the batches)",
        speed,
        "[dim]ours, N: N slots of a block are verified, the anchor included\n",
        f"[bold]{decoding}: tokens a pass ± standard error, and {beside}",
        acceptance,
        f"[dim]{note}\n",
        f"[bold]{decoding}: ms a pass of the target, and their shares",
        _times(summaries),
        "[dim]draft: its forward pass and the head on it; rest: outside both models; prefill: ms a call\n",
    ]


def _by_batch_size(summaries: Sequence[DecodingSummary], cell: Callable[[DecodingSummary], str]) -> Table:
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
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("passes", "ms", "draft", "verify", "rest", "prefill", "total s"):
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
    same = f"{summary.num_identical}/{summary.num_compared}" if summary.num_compared else ""
    return f"{_acceptance(summary)} {same:>5}"


def _sampling_cell(summary: DecodingSummary) -> str:
    return f"{_acceptance(summary)} {_number(summary.expected_accept_len, '({:.2f})'):>6}"


def _acceptance(summary: DecodingSummary) -> str:
    if summary.accept_len is None:
        return ""
    return f"{summary.accept_len:.2f}{_number(summary.accept_len_error, '±{:.2f}').replace('±0.', '±.')}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
