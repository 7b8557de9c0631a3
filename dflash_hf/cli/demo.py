"""`dflash-hf demo`: train a draft for a real chat model and see it answer faster."""

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
ANSWERS_FOR_ANOTHER_TARGET = 256
EVAL_ROWS = 32


@dataclass(frozen=True)
class Task:
    """What a demo learns from, and what it is asked: `rows` is a folder of answers, `questions` a file."""

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
        typer.Option(help="Draft, card, picture and checkpoints go here; default: dflash-demo or dflash-demo-code."),
    ] = None,
    task: Annotated[str, typer.Option(help="What the draft learns and is asked: maths or code.")] = "maths",
    minutes: Annotated[float, typer.Option(help="Training time; the rest comes on top.")] = 5.0,
    questions: Annotated[int, typer.Option(help="Held-out questions to answer, 1 to 64.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 160,
    draft_layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 3,
    block_size: Annotated[int, typer.Option(help="Slots a block, the anchor included.")] = 6,
    anchors: Annotated[int, typer.Option(help="Blocks trained in each row and step.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Rows a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of Muon.")] = 4e-3,
    rows: Annotated[int, typer.Option(help="Learn from at most this many answers.")] = 768,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train anew although a draft is there.")] = False,
) -> None:
    """Train a draft for a real chat model in a few minutes and compare its answers with and without it."""
    import torch
    from torch import nn
    from transformers import set_seed
    from transformers.utils import logging

    from ..data.loading import load_rows
    from ..data.prompts import read_prompts
    from ..evaluation.compare import compare_on_prompts, summarize_comparisons
    from ..hub.model_card import FACTS_NAME, DraftCard, write_model_card
    from ..model.modeling_dflash import DFlashDraftModel
    from ..target.demo import DEMO_TARGET, prepare_demo_target
    from ..target.loading import load_target
    from ..training.arguments import DFlashTrainingArguments

    console = Console()
    if minutes <= 0:
        raise ValueError(f"--minutes {minutes} must be positive.")
    if task not in TASKS:
        raise ValueError(f"--task {task!r} must be one of {', '.join(TASKS)}.")
    data, output_dir = TASKS[task], output_dir or Path(TASKS[task].folder)
    heldout = read_prompts(str(DATA / data.questions))
    if rows < 1:
        raise ValueError(f"--rows {rows} must be at least 1.")
    if not 1 <= questions <= len(heldout):
        raise ValueError(f"--questions {questions} must be 1 to {len(heldout)}.")
    output_dir.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()

    console.rule("[bold]1 · target")
    folder = target or str(prepare_demo_target())
    model, tokenizer = load_target(folder, torch.bfloat16)
    name = target or DEMO_TARGET.name
    console.print(f"{name}, {model.num_parameters() / 1e6:.0f} M parameters, bf16, on {model.device}")

    console.rule("[bold]2 · draft")
    draft_dir = output_dir / "draft"
    if retrain or not ((draft_dir / "model.safetensors").is_file() and (draft_dir / FACTS_NAME).is_file()):
        if retrain:
            shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
        answers = load_rows(str(DATA / data.rows), None, "train")
        if target is not None:
            answers = _own_answers(model, tokenizer, answers, output_dir / f"answers-{task}", console)
        answers = answers.shuffle(seed=0)  # short answers are written before long ones
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
        rows_used = answers.take(min(rows + EVAL_ROWS, len(answers)))
        card = _train(draft, model, tokenizer, rows_used, args, console)
        draft.save_pretrained(draft_dir)
        write_model_card(draft_dir, card)
    else:
        learned = DraftCard.from_folder(draft_dir).training_data or "rows that its card does not name"
        console.print(f"Using the draft in {draft_dir}, which learned from {learned} (--retrain makes a new one).")

    console.rule("[bold]3 · with and without the draft")
    draft = DFlashDraftModel.from_pretrained(draft_dir, dtype=model.dtype, target=model)
    nn.Module.to(draft, model.device)
    pairs = compare_on_prompts(model, draft, tokenizer, heldout[:questions], max_new_tokens=max_new_tokens)
    comparisons = list(track(pairs, total=questions, description="answering twice", console=console))
    summary = summarize_comparisons(comparisons, draft.config.block_size)
    _show(summary, comparisons[0], tokenizer, console)
    questions_asked = f"{questions} {data.questions_description}"
    _save(
        output_dir, draft_dir, summary, comparisons, None if target else name, questions_asked, max_new_tokens, console
    )
    console.print(f"Draft, model card and picture: {draft_dir}. All numbers: {output_dir / 'results.json'}.")


def _train(
    draft: DFlashDraftModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    args: DFlashTrainingArguments,
    console: Console,
) -> DraftCard:
    """Train the draft on all rows but the last, which are held out, and return what its card says so far."""
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


def _own_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    bundled: datasets.Dataset,
    folder: Path,
    console: Console,
) -> datasets.Dataset:
    """Rows with the prompts of the bundled ones, answered by another target: made once, and kept."""
    from ..data.loading import load_rows
    from ..regeneration.local import LocalBackend
    from ..regeneration.run import RegenerationSettings, regenerate_rows
    from ..regeneration.shards import RowShards

    sampling = SamplingParameters()
    settings = RegenerationSettings(str(model.name_or_path), sampling=sampling)
    prompts = bundled.take(min(ANSWERS_FOR_ANOTHER_TARGET, len(bundled))).select_columns("messages")
    console.print(f"The target answers {len(prompts)} questions to learn from …")
    with RowShards(folder, asdict(settings)) as shards:
        steps = regenerate_rows(prompts, LocalBackend(model, tokenizer, sampling), shards, settings)
        with closing(steps):
            for _ in track(steps, total=len(prompts), description="answering", console=console):
                pass
    return load_rows(str(folder), None, "train")


def _show(summary: Summary, first: Comparison, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    table = Table(title=f"{summary.num_prompts} held-out questions, greedy")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("with the draft", justify="right")
    table.add_row("tokens/s", f"{summary.plain_tokens_per_s:.1f}", f"{summary.drafted_tokens_per_s:.1f}")
    table.add_row("speed-up (median of the questions)", "1.00×", f"{summary.speed_up:.2f}×")
    table.add_row("acceptance length", "1.00", f"{summary.accept_len:.2f}")
    for slot, share in enumerate(summary.slot_acceptance, start=1):
        table.add_row(f"  first {slot} drafted accepted", "", f"{share:.0%}")
    table.add_row("identical answers", "", f"{summary.num_identical} of {summary.num_prompts}")
    console.print(table)
    console.print(f"[bold]Question:[/] {first.prompt}", highlight=False)
    answer = tokenizer.decode(first.drafted.token_ids, skip_special_tokens=True)
    console.print(f"[bold]Answer:[/] {answer}", highlight=False)


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
    from ..hub.model_card import DraftCard, Protocol, write_model_card
    from ..provenance import environment
    from ..target.demo import DEMO_TARGET

    where = environment()
    protocol = Protocol(
        prompts=f"{questions_asked} without instructions",
        temperature=0,
        max_new_tokens=max_new_tokens,
        dtype="bfloat16",
        decoding="`dflash-hf demo`: batch 1, transformers' own loop; plain and drafted answers alternate",
        target_weights=DEMO_TARGET.weights_in_words if base_model else "its own",
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
        console.print(f"{draft_dir / 'README.md'} is not one of ours as it stands, so it was kept.")
    results = {
        "summary": summary.as_dict(),
        "environment": where,
        "training": {name: value for name, value in card.as_facts().items() if name not in ("measured", "protocol")},
        "prompts": [
            {**asdict(comparison), "speed_up": comparison.speed_up, "identical": comparison.is_identical}
            for comparison in comparisons
        ],
    }
    (output_dir / "results.json").write_text(json.dumps(results, indent=1))
