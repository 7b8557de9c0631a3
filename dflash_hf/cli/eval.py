"""`dflash-hf eval`: measure acceptance, speed and identical responses of a draft on prompt sets."""

from __future__ import annotations

import itertools
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..evaluation.settings import THINKING, SuiteSettings
from .options import INTERRUPTED, values_between_commas

if TYPE_CHECKING:
    from ..evaluation.output import SuiteJournal, SuiteOutput
    from ..evaluation.suite import Batch, SuiteEvaluation

DEFAULTS = SuiteSettings()
BATCH_SIZES = ",".join(map(str, DEFAULTS.batch_sizes))
TEMPERATURES = ",".join(format(value, "g") for value in DEFAULTS.temperatures)
GREATEST_WAIT = timedelta(days=7)  # time for which a process waits for the slowest one
PROMPTS, RESPONSES = "Prompts", "Responses"


def evaluate(
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    out: Annotated[Path, typer.Option(help="Folder of the results. An interrupted evaluation is resumed there.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="standard (the default), gsm8k, math500, humaneval, mbpp or mt-bench. May be repeated.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with turns, prompt or messages in each row, which becomes a set. May be repeated.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    prompts_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a file NAME.jsonl for each set; default: the sets on the Hub.", rich_help_panel=PROMPTS
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Number of prompts per set, chosen at random.", rich_help_panel=PROMPTS)
    ] = 128,
    max_new_tokens: Annotated[
        int, typer.Option(help="Greatest length of a response in tokens.", rich_help_panel=RESPONSES)
    ] = DEFAULTS.max_new_tokens,
    temperatures: Annotated[
        str,
        typer.Option(
            help="Temperatures to measure: 0 decodes greedily, above 0 samples. Of the target's generation config, "
            "only end tokens and stop strings are used.",
            rich_help_panel=RESPONSES,
        ),
    ] = TEMPERATURES,
    thinking: Annotated[
        str,
        typer.Option(
            help="enable_thinking of the chat template, if it has one: both, on or off.", rich_help_panel=RESPONSES
        ),
    ] = THINKING[0],
    batch_sizes: Annotated[
        str, typer.Option(help="Numbers of conversations to decode together.", rich_help_panel=RESPONSES)
    ] = BATCH_SIZES,
    block_size: Annotated[
        str, typer.Option(help="Slots to verify: a number, trained or auto.", rich_help_panel=RESPONSES)
    ] = "trained",
    tree_size: Annotated[
        int | None,
        typer.Option(help="Tokens to verify in trees, instead of a block.", rich_help_panel=RESPONSES),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of target and draft: auto, bfloat16, float16 or float32.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts and of sampling.")] = DEFAULTS.seed,
    card: Annotated[
        bool, typer.Option("--card", help="Write the results into the model card of the draft, too.")
    ] = False,
) -> None:
    """Compare a draft with plain generation on prompt sets. After an interruption, run the same command to resume."""
    import datasets
    import torch
    from accelerate import PartialState
    from transformers.utils import logging

    from ..evaluation.output import SuiteJournal, collect, suite_settings
    from ..evaluation.prompt_sets import load_prompt_sets
    from ..evaluation.report import CONTENTION
    from ..evaluation.suite import SuiteEvaluation
    from ..hub.model_card import CARD_NAME, write_suite_card
    from ..model.modeling_dflash import DFlashDraftModel
    from ..provenance import environment
    from ..target.loading import load_target_of

    if card and not Path(draft).is_dir():
        raise ValueError(
            f"--card writes into the folder of the draft, and --draft {draft!r} is not a folder. Pass a folder, or "
            "leave --card out."
        )
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=GREATEST_WAIT)
    console = Console(quiet=not state.is_main_process)
    if not console.is_terminal:
        console = Console(width=110, quiet=not state.is_main_process)
    settings = SuiteSettings(
        max_new_tokens=max_new_tokens,
        temperatures=values_between_commas("--temperatures", temperatures, float),
        thinking=thinking,
        batch_sizes=values_between_commas("--batch-sizes", batch_sizes, int),
        block_size=_block_size(block_size),
        tree_size=tree_size,
        seed=seed,
    )
    datasets.disable_progress_bars()
    suites = suite or ([] if prompts else ["standard"])
    sets = load_prompt_sets(suites, prompts or (), folder=prompts_folder, limit=limit, seed=seed)
    pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    logging.set_verbosity_error()
    model, tokenizer = load_target_of(pair, target, dtype)
    evaluation = SuiteEvaluation(model, pair, tokenizer, sets, settings)
    names = (str(target or pair.config.target_name_or_path), draft)
    command = _command(*names, suites, prompts or [], prompts_folder, limit, settings, block_size, dtype, out)

    with SuiteJournal(out, suite_settings(evaluation, *names), state.process_index) as journal:
        state.wait_for_everyone()  # now all processes have read the same pairs and agree on the missing ones
        batches = evaluation.share(journal.pairs, state.process_index, state.num_processes)
        where = environment()
        console.print(
            f"{where['hardware']}; {where['software']}; target {journal.settings['target']}, "
            f"{journal.settings['dtype']}, on {model.device}; draft {journal.settings['draft']}, "
            f"{pair.config.block_size} slots per block; {len(journal.pairs)} of {evaluation.num_pairs} response "
            "pairs exist",
            highlight=False,
            soft_wrap=True,
        )
        for line in evaluation.notes:
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        if state.num_processes > 1:
            console.print(f"[yellow]{CONTENTION}[/]", highlight=False, soft_wrap=True)
        is_whole = _run(evaluation, batches, journal, {**where, "num_processes": state.num_processes}, console)
        if is_whole:
            state.wait_for_everyone()
        if state.is_main_process:
            journal.read()
            output = collect(evaluation, journal, command)
            reason = output.write(out)
            _show(output, reason, out, console)
            if card and output.record["is_complete"]:
                readme = Path(draft) / CARD_NAME
                if write_suite_card(draft, output, out):
                    message = f"{readme} contains the results, too."
                else:
                    message = f"{readme} was edited or written by someone else, and is kept unchanged."
                console.print(message, highlight=False, soft_wrap=True)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def _block_size(word: str) -> int | str | None:
    """Convert the value of --block-size."""
    if word in ("trained", "auto"):
        return None if word == "trained" else word
    try:
        return int(word)
    except ValueError as error:
        raise ValueError(
            f"--block-size {word!r} must be a number of slots, 'trained' or 'auto'. Pass one of these."
        ) from error


def _run(
    evaluation: SuiteEvaluation, batches: list[Batch], journal: SuiteJournal, run: dict[str, object], console: Console
) -> bool:
    """Decode and record the missing pairs, and return whether all were completed."""
    from ..blocks.metrics import AcceptanceRecord

    if not batches:
        return True
    total = sum(batch.key(turn) not in journal.pairs for batch in batches for turn in range(batch.num_turns))
    # a thread that refreshes the display would disturb the measurement
    live = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    journal.begin(run)
    acceptance, num_done, block_size = AcceptanceRecord(), 0, evaluation.draft.config.tokens_per_block
    try:
        with live:
            task = live.add_task("", total=total, status="")

            def show(description: str) -> None:
                live.update(task, description=description, refresh=True)

            for pair in evaluation.run(batches, journal.pairs, show):
                journal.add(pair)
                num_done += 1
                acceptance += AcceptanceRecord.of(itertools.chain(*pair.committed), block_size=block_size)
                length = "–" if acceptance.acceptance_length is None else f"{acceptance.acceptance_length:.2f}"
                status = f"acceptance length {length}, last speed-up {pair.speed_up:.2f}×"
                live.update(task, advance=1, status=status, refresh=True)
                if not console.is_terminal and num_done * 20 // total > (num_done - 1) * 20 // total:
                    console.print(f"{num_done} of {total} response pairs, {status}", highlight=False)  # for a log file
    except KeyboardInterrupt:
        return False
    return True


def _show(output: SuiteOutput, reason: str | None, out: Path, console: Console) -> None:
    """Print the tables, and where the files are."""
    from ..evaluation.report import terminal_table

    for mean in output.means:
        console.print(
            terminal_table([result for result in output.results if result.setting == mean.setting], mean),
            highlight=False,
        )
    if reason is not None:
        console.print(reason, highlight=False, markup=False)
    console.print(f"Tables, results and figures: {out}.", highlight=False, soft_wrap=True)
    if not output.record["is_complete"]:
        console.print(
            f"[bold yellow]Interrupted[/]: {output.record['num_pairs']} of {output.record['num_pairs_wanted']} "
            "response pairs are saved. Run the same command to resume.",
            highlight=False,
        )


def _command(
    target: str,
    draft: str,
    suites: list[str],
    prompts: list[Path],
    prompts_folder: Path | None,
    limit: int,
    settings: SuiteSettings,
    block_size: str,
    dtype: str,
    out: Path,
) -> str:
    """Write the command that repeats the evaluation, with names instead of paths."""
    from ..provenance import target_label

    parts = ["dflash-hf", "eval", "--target", target_label(target), "--draft", target_label(draft)]
    parts += [part for suite in suites for part in ("--suite", suite)]
    parts += [part for file in prompts for part in ("--prompts", file.name)]
    parts += ["--prompts-folder", prompts_folder.resolve().name] if prompts_folder else []
    parts += ["--limit", str(limit), "--max-new-tokens", str(settings.max_new_tokens)]
    parts += ["--temperatures", ",".join(format(value, "g") for value in settings.temperatures)]
    parts += ["--thinking", settings.thinking, "--batch-sizes", ",".join(map(str, settings.batch_sizes))]
    parts += (
        ["--tree-size", str(settings.tree_size)] if settings.tree_size is not None else ["--block-size", block_size]
    )
    parts += ["--dtype", dtype, "--seed", str(settings.seed), "--out", out.resolve().name]
    return shlex.join(parts)
