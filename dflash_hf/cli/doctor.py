"""The command `dflash-hf doctor`, which diagnoses a pair of target and draft."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..doctor.finding import FAULT, MAX_NEW_TOKENS, OK, SKIPPED, WARNING, Finding, guarded

QUESTIONS = files("dflash_hf") / "demo_data" / "gsm8k_test_questions.jsonl"
SIGNS = {
    OK: "[green]ok[/]     ",
    WARNING: "[yellow]warning[/]",
    FAULT: "[bold red]FAULT[/]  ",
    SKIPPED: "[dim]skipped[/]",
}


def doctor(
    draft: Annotated[str, typer.Option(help="Hub name or folder of the draft.")],
    target: Annotated[
        str | None, typer.Option(help="Hub name or folder of the target. By default, the target that the draft names.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="dtype of the target and the draft: auto, bfloat16, float16 or float32.")
    ] = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with turns, prompt or messages. By default, test questions of GSM8K."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts to use.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Longest response in tokens.")] = MAX_NEW_TOKENS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the findings to this file.")] = None,
) -> None:
    """Diagnose why the target accepts few or no tokens of a draft. The exit code is 1 if there is a fault."""
    from ..data.prompts import read_prompts
    from ..doctor.diagnosis import verdict

    questions = read_prompts(str(prompts or QUESTIONS))
    if not 1 <= num_prompts <= len(questions):
        raise ValueError(
            f"--num-prompts {num_prompts} must be in 1 … {len(questions)}, the number of prompts in the file. Pass a "
            "number in this range."
        )
    if max_new_tokens < 2:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} must be at least 2: the anchor and one drafted token. Pass a larger "
            "number."
        )
    if json_file is not None and not json_file.parent.is_dir():
        raise FileNotFoundError(f"--json {json_file}: the folder {json_file.parent} does not exist. Create it first.")
    console = Console()
    findings: list[Finding] = []
    with console.status("Loading …") as status:
        for finding in _diagnose(draft, target, dtype, questions[:num_prompts], max_new_tokens, status.update):
            findings.append(finding)
            console.print(
                f"{SIGNS[finding.status]} [bold]{finding.name}[/]: {escape(finding.measured)}",
                highlight=False,
                soft_wrap=True,
            )
            if finding.status == WARNING:
                console.print(f"        → {escape(finding.advice)}", highlight=False, soft_wrap=True)
    summary = verdict(findings)
    console.rule()
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        record = {
            "draft": draft,
            "target": target,
            "verdict": summary,
            "findings": [item.as_dict() for item in findings],
        }
        json_file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    if any(finding.status == FAULT for finding in findings):
        raise typer.Exit(1)


def _diagnose(
    draft: str, target: str | None, dtype: str, prompts: list[str], max_new_tokens: int, show: Callable[[str], None]
) -> Iterator[Finding]:
    """Load the pair, with a finding for each part, and yield the findings of its diagnosis."""
    from safetensors import SafetensorError
    from torch import nn

    from ..doctor.checks import check_weights
    from ..doctor.diagnosis import Diagnosis
    from ..model.modeling_dflash import DFlashDraftModel
    from ..target.loading import load_target

    try:
        pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    except (OSError, ValueError) as error:
        yield Finding(
            "draft files",
            FAULT,
            " ".join(str(error).split()),
            "Copy the whole folder again from where the draft was trained. If values are not finite, the training "
            "diverged: use an earlier checkpoint. To correct a wrong config.json, run dflash-hf convert --set.",
        )
        return
    config = pair.config
    yield Finding("draft files", OK, f"{draft}: {config.num_hidden_layers} layers, block size {config.block_size}")
    weights = guarded("weights", lambda: check_weights(pair))
    yield weights
    name = target or config.target_name_or_path
    if name is None:
        yield Finding("target files", FAULT, "config.json of the draft names no target", "Pass --target.")
        return
    try:
        model, tokenizer = load_target(name, dtype)
    except (OSError, ValueError, SafetensorError) as error:
        advice = "Pass a --target with a configuration, weights and a tokenizer."
        yield Finding("target files", FAULT, " ".join(str(error).split()), advice)
        return
    yield Finding("target files", OK, f"{name} in {str(model.dtype)[6:]} on {model.device}")
    try:
        pair.tie_target(model)
    except ValueError as error:
        yield Finding(
            "pair", FAULT, " ".join(str(error).split()), "Use the draft with the target for which it was trained."
        )
        return
    nn.Module.to(pair, model.device, model.dtype)
    diagnosis = Diagnosis(model, pair, tokenizer, prompts, max_new_tokens, name, [weights])
    yield from diagnosis.run(lambda check: show(f"{check} …"))
