"""SmolLM2-135M-Instruct with real weights: the demo end to end, and exactness of decoding in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from demo_runs import QUESTIONS, run_demo
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_hf import DFlashDraftModel, speculative_generate
from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.data.prompts import read_prompts
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.target.demo import prepare_demo_target

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory) -> Path:
    """A short demo: a few rows, a minute of training."""
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder, "--minutes", "1", "--rows", "96", "--questions", "2", "--max-new-tokens", "48")
    return folder


def test_the_demo_learns_measures_and_saves(demo_folder):
    results = json.loads((demo_folder / "results.json").read_text())
    assert len(results["prompts"]) == 2
    assert results["summary"]["acceptance_length"] > 1.1  # 1.0 is an untrained draft
    assert (
        len(results["summary"]["slot_acceptance"])
        == DFlashDraftModel.from_pretrained(demo_folder / "draft").config.block_size - 1
    )
    card = (demo_folder / "draft" / "README.md").read_text()
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in card
    assert str(demo_folder) not in card
    assert (demo_folder / "draft" / "slot_acceptance.png").stat().st_size > 5000


def test_a_second_demo_reuses_the_draft(demo_folder):
    before = (demo_folder / "draft" / "model.safetensors").read_bytes()
    output = run_demo(demo_folder, "--questions", "1", "--max-new-tokens", "16")
    assert "Using the draft in" in output
    assert (demo_folder / "draft" / "model.safetensors").read_bytes() == before


def test_fp32_greedy_answers_are_identical_with_and_without_the_draft(demo_folder):
    folder = prepare_demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = DFlashDraftModel.from_pretrained(demo_folder / "draft", target=target)
    accepted = []
    for prompt in read_prompts(QUESTIONS)[:4]:
        inputs = chat_inputs(tokenizer, prompt, target.device)
        kwargs = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": tokenizer.pad_token_id}
        drafted = generate_timed(target, inputs, draft, loop="transformers", **kwargs)
        assert drafted.token_ids == generate_timed(target, inputs, **kwargs).token_ids
        accepted += drafted.committed
    assert sum(accepted) / len(accepted) > 1.05


def test_fp32_greedy_answers_of_our_own_loop_are_the_plain_ones_in_a_batch(demo_folder):
    """Rows of different lengths, chains and trees; a difference is allowed at a near-tie, and counted."""
    folder = prepare_demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    draft = DFlashDraftModel.from_pretrained(demo_folder / "draft", target=target)
    chats = [[{"role": "user", "content": prompt}] for prompt in read_prompts(QUESTIONS)[:8]]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    kwargs = {**inputs, "do_sample": False, "max_new_tokens": 40, "pad_token_id": tokenizer.pad_token_id}
    plain = target.generate(**kwargs)
    num_ties = 0
    for settings in ({}, {"tree_size": 12}, {"block_size": "auto"}):
        output = speculative_generate(target, draft, **settings, **kwargs)
        assert output.statistics.acceptance_length > 1.05
        for row, (ours, theirs) in enumerate(zip(output.sequences, plain, strict=True)):
            size = min(len(ours), len(theirs))
            if not torch.equal(ours[:size], theirs[:size]):
                first = int((ours[:size] != theirs[:size]).long().argmax())
                text = theirs[:first][inputs["attention_mask"][row].argmax() :]
                best, second = target(text[None]).logits[0, -1].topk(2).values
                assert best - second < 1e-4
                num_ties += 1
    assert num_ties <= 1


def test_prepare_prints_what_the_first_guide_shows(tmp_path):
    root = Path(__file__).parent.parent
    guide = (root / "docs" / "first_draft.md").read_text()
    shown = guide.split("it prints:\n\n```\n")[1].split("```")[0]
    command = [sys.executable, "-m", "dflash_hf", "prepare", "--target", str(prepare_demo_target())]
    command += ["--dataset", "dflash_hf/demo_data/maths", "--out", str(tmp_path / "prepared")]
    command += ["--max-length", "2048", "--eval-rows", "32"]
    result = subprocess.run(
        command, cwd=root, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True
    )
    assert [line.split() for line in shown.splitlines()] == [
        line.split()
        for line in result.stdout.splitlines()
        if line.startswith((" rows read", " train:", " validation:"))
    ]
