"""`dflash-hf regenerate`: training rows that the target itself answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..demo_target import prepare_demo_target
from ..regenerate import generate_answers, read_prompts
from .loading import load_target


def regenerate(
    prompts: Annotated[Path, typer.Option(help="JSON lines with `turns`, `prompt` or `messages`.")],
    out: Annotated[Path, typer.Option(help="JSON lines to write; prompts already answered there are skipped.")],
    target: Annotated[str | None, typer.Option(help="Hub name or folder; default: the demo target.")] = None,
    limit: Annotated[int | None, typer.Option(help="Answer this many prompts, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts a batch.")] = 64,
) -> None:
    """Let the target answer prompts greedily: rows to train a draft on."""
    console = Console()
    questions = read_prompts(prompts)
    if limit is not None and limit < len(questions):
        questions = random.Random(seed).sample(questions, limit)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = set(read_prompts(out)) if out.exists() else set()
    todo = [question for question in questions if question not in done]
    console.print(f"{len(questions)} prompts, {len(questions) - len(todo)} answered already.")

    name = target or str(prepare_demo_target())
    model, tokenizer = load_target(name, torch.bfloat16)
    with out.open("a", encoding="utf-8") as stream:
        rows = generate_answers(model, tokenizer, todo, max_new_tokens=max_new_tokens, batch_size=batch_size)
        for count, row in enumerate(rows, start=1):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            if count % batch_size == 0 or count == len(todo):
                stream.flush()
                console.print(f"{count} of {len(todo)} answered")
