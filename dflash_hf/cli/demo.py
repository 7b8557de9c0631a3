"""`dflash-hf demo`: train a draft for a real chat model, and compare generation with and without it."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..regeneration.requests import SamplingParameters

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.compare import Comparison, Summary
    from ..hub.model_card import DraftCard
    from ..model.modeling_dflash import DFlashDraftModel
    from ..training.arguments import DFlashTrainingArguments

DATA = files("dflash_hf") / "demo_data"
PROMPTS_FOR_ANOTHER_TARGET = 256
EVAL_ROWS = 32


@dataclass(frozen=True)
class Task:
    """
    Training rows and held-out questions of a demo.

    Args:
        folder (`str`): default output folder.
        rows (`str`): folder of the training rows in the package.
        questions (`str`): file of the held-out questions in the package.
        rows_description, questions_description (`str`): descriptions of both for the model card.
    """

    folder: str
    rows: str
    questions: str
    rows_description: str
    questions_description: str


TASKS = {
    "maths": Task(
        "dflash-demo", "maths", "gsm8k_test_questions.jsonl", "GSM8K train questions", "GSM8K test questions"
    ),
    "code": Task("dflash-demo-code", "code", "code_test_questions.jsonl", "Python tasks", "Python tasks"),
}


def demo(
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: SmolLM2-135M-Instruct.")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for draft, model card, figure and checkpoints; default: dflash-demo or dflash-demo-code."
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(help="Subject of the training rows and of the questions: maths or code.")
    ] = "maths",
    minutes: Annotated[
        float, typer.Option(help="Minutes of training. Preparation and measurement take additional time.")
    ] = 5.0,
    questions: Annotated[int, typer.Option(help="Number of held-out questions to answer, 1 to 64.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Greatest length of a response in tokens.")] = 160,
    draft_layers: Annotated[int, typer.Option(help="Number of layers of the draft.")] = 3,
    block_size: Annotated[int, typer.Option(help="Slots per block, the anchor included.")] = 6,
    anchors: Annotated[int, typer.Option(help="Blocks that are trained per row and step.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of Muon.")] = 4e-3,
    rows: Annotated[int, typer.Option(help="Greatest number of training rows.")] = 768,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train again although the folder has a draft.")] = False,
) -> None:
    """Train a draft for a chat model in a few minutes, and compare generation with and without it."""
    import torch
    from torch import nn
    from transformers import set_seed
    from transformers.utils import logging

    from ..data.loading import load_rows
    from ..data.prompts import read_prompts
    from ..decoding.generation_settings import ONE_RESPONSE, check_generation_config
    from ..evaluation.compare import compare_on_prompts, summarize_comparisons
    from ..hub.model_card import FACTS_NAME, DraftCard, write_model_card
    from ..model.modeling_dflash import DFlashDraftModel
    from ..target.demo import DEMO_TARGET, prepare_demo_target
    from ..target.loading import load_target
    from ..training.arguments import DFlashTrainingArguments

    console = Console()
    if minutes <= 0:
        raise ValueError(f"--minutes {minutes} must be positive. Pass a number above 0.")
    if task not in TASKS:
        raise ValueError(f"--task {task!r} is not known. Pass one of {', '.join(TASKS)}.")
    data, output_dir = TASKS[task], output_dir or Path(TASKS[task].folder)
    heldout = read_prompts(str(DATA / data.questions))
    if rows < 1:
        raise ValueError(f"--rows {rows} must be at least 1. Pass a positive number.")
    if not 1 <= questions <= len(heldout):
        raise ValueError(f"--questions {questions} must be 1 to {len(heldout)}. Pass such a number.")
    output_dir.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()

    console.rule("[bold]1 · target")
    folder = target or str(prepare_demo_target())
    model, tokenizer = load_target(folder, torch.bfloat16)
    check_generation_config(model, **ONE_RESPONSE, do_sample=False)
    name = target or DEMO_TARGET.name
    console.print(f"{name}, {model.num_parameters() / 1e6:.0f} M parameters, bfloat16, on {model.device}")

    console.rule("[bold]2 · draft")
    draft_dir = output_dir / "draft"
    if retrain or not ((draft_dir / "model.safetensors").is_file() and (draft_dir / FACTS_NAME).is_file()):
        if retrain:
            shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
        responses = load_rows(str(DATA / data.rows), None, "train")
        if target is not None:
            responses = _regenerate(model, tokenizer, responses, output_dir / f"answers-{task}", console)
        responses = responses.shuffle(seed=0)  # regeneration writes short responses before long ones
        args = DFlashTrainingArguments(
            output_dir=str(output_dir / "checkpoints"),
            max_train_minutes=minutes,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            anchors_per_sample=anchors,
            max_length=512,
            cache_target_states="memory",
            bf16=True,
            logging_steps=5,
            save_steps=100,
            save_total_limit=1,
            disable_tqdm=False,
            report_to="none",
            dataset_description=f"{data.rows_description}, answered greedily by the target",
            answers_by_target=True,
        )
        set_seed(args.seed)
        draft = DFlashDraftModel.from_target(
            model, tokenizer=tokenizer, num_hidden_layers=draft_layers, block_size=block_size
        )
        rows_used = responses.take(min(rows + EVAL_ROWS, len(responses)))
        card = _train(draft, model, tokenizer, rows_used, args, console)
        draft.save_pretrained(draft_dir)
        write_model_card(draft_dir, card)
    else:
        learned = DraftCard.from_folder(draft_dir).training_data or "rows that its card does not describe"
        console.print(f"Using the draft in {draft_dir}, which was trained on {learned} (--retrain trains a new one).")

    console.rule("[bold]3 · with and without the draft")
    draft = DFlashDraftModel.from_pretrained(draft_dir, dtype=model.dtype, target=model)
    nn.Module.to(draft, model.device)
    pairs = compare_on_prompts(model, draft, tokenizer, heldout[:questions], max_new_tokens=max_new_tokens)
    comparisons = list(
        track(pairs, total=questions, description="answering without and with the draft", console=console)
    )
    summary = summarize_comparisons(comparisons, draft.config.tokens_per_block)
    _show(summary, comparisons[0], tokenizer, console)
    questions_asked = f"{questions} {data.questions_description}"
    _save(
        output_dir, draft_dir, summary, comparisons, None if target else name, questions_asked, max_new_tokens, console
    )
    console.print(f"Draft, model card and figure: {draft_dir}. All results: {output_dir / 'results.json'}.")


def _train(
    draft: DFlashDraftModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    args: DFlashTrainingArguments,
    console: Console,
) -> DraftCard:
    """Train the draft on all rows but the last 32, evaluate it on these, and return its model card."""
    from ..training.trainer import DFlashTrainer
    from .training_run import run_training

    trainer = DFlashTrainer(
        model=draft,
        target=model,
        args=args,
        train_dataset=rows.take(len(rows) - EVAL_ROWS),
        eval_dataset=rows.skip(len(rows) - EVAL_ROWS),
        processing_class=tokenizer,
    )
    console.print(f"{sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters")
    if not run_training(trainer, console, resume=True):
        raise typer.Exit(130)
    trainer.evaluate()
    return trainer.draft_card()


def _regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    bundled: datasets.Dataset,
    folder: Path,
    console: Console,
) -> datasets.Dataset:
    """Let another target answer the prompts of the bundled rows. A later call reads the rows from the folder."""
    from ..data.loading import load_rows
    from ..regeneration.local import LocalBackend
    from ..regeneration.run import RegenerationSettings, regenerate_rows
    from ..regeneration.shards import RowShards

    sampling = SamplingParameters()
    settings = RegenerationSettings(str(model.name_or_path), sampling=sampling)
    prompts = bundled.take(min(PROMPTS_FOR_ANOTHER_TARGET, len(bundled))).select_columns("messages")
    console.print(f"The target answers {len(prompts)} training prompts …")
    with RowShards(folder, asdict(settings)) as shards:
        steps = regenerate_rows(prompts, LocalBackend(model, tokenizer, sampling), shards, settings)
        with closing(steps):
            for _ in track(steps, total=len(prompts), description="answering", console=console):
                pass
    return load_rows(str(folder), None, "train")


def results_table(summary: Summary) -> Table:
    """
    Make the table of the results.

    Args:
        summary ([`Summary`]): of the held-out questions.

    Returns:
        `rich.table.Table`: at most 80 columns wide.
    """
    table = Table(title=f"{summary.num_prompts} held-out questions, greedy, bf16")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("with the draft", justify="right")
    table.add_row("tokens/s", f"{summary.plain_tokens_per_s:.1f}", f"{summary.drafted_tokens_per_s:.1f}")
    table.add_row("speed-up (median of the questions)", "1.00×", f"{summary.speed_up:.2f}×")
    table.add_row("acceptance length", "1.00", _form(summary.acceptance_length, "{:.2f}"))
    for slot, share in enumerate(summary.slot_acceptance, start=1):
        table.add_row(f"  slots 1 … {slot} accepted" if slot > 1 else "  slot 1 accepted", "", _form(share, "{:.0%}"))
    table.add_row("identical answers", "", f"{summary.num_identical} of {summary.num_prompts}")
    if summary.num_near_ties is not None and summary.num_different:
        table.add_row("differ first at a near-tie", "", f"{summary.num_near_ties} of {summary.num_different}")
        table.caption = (
            "At a near-tie, the logits of both tokens are at most "
            f"{summary.near_tie_gap:g} below the best one in a plain forward pass of the target."
        )
    return table


def _show(summary: Summary, first: Comparison, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Print the results, and the first question with its response."""
    console.print(results_table(summary))
    console.print(f"[bold]Question:[/] {first.prompt}", highlight=False)
    response = tokenizer.decode(first.drafted.token_ids, skip_special_tokens=True)
    console.print(f"[bold]Answer:[/] {response}", highlight=False)


def _form(value: float | None, form: str) -> str:
    """Format a number, or a dash if no pass was counted."""
    return "–" if value is None else form.format(value)


def _save(
    output_dir: Path,
    draft_dir: Path,
    summary: Summary,
    comparisons: list[Comparison],
    base_model: str | None,
    questions_asked: str,
    max_new_tokens: int,
    console: Console,
) -> None:
    """Write model card and results.json."""
    from ..hub.model_card import DraftCard, Protocol, write_model_card
    from ..provenance import environment
    from ..target.demo import DEMO_TARGET

    where = environment()
    protocol = Protocol(
        prompts=f"{questions_asked} without instructions",
        temperature=0,
        max_new_tokens=max_new_tokens,
        dtype="bfloat16",
        decoding="`dflash-hf demo`: batch 1, `speculative_generate` with its defaults; plain and drafted responses "
        "alternate",
        target_weights=DEMO_TARGET.weights_description if base_model else "its own",
        hardware=where["hardware"],
        software=where["software"],
    )
    card = replace(
        DraftCard.from_folder(draft_dir),
        title=f"{output_dir.name}/{draft_dir.name}",
        measured=summary,
        protocol=protocol,
    )
    if base_model is not None:
        card = replace(card, target_id=base_model, target_folder=None)
    if not write_model_card(draft_dir, card):
        console.print(f"{draft_dir / 'README.md'} was edited or written by someone else, and is kept unchanged.")
    results = {
        "summary": summary.as_dict(),
        "environment": where,
        "training": {name: value for name, value in card.as_facts().items() if name not in ("measured", "protocol")},
        "prompts": [comparison.as_dict() for comparison in comparisons],
    }
    (output_dir / "results.json").write_text(json.dumps(results, indent=1))
