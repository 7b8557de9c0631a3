"""`dflash-hf make` and `dflash-hf prompts`, with tiny targets."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import error_line

from dflash_hf import DFlashDraftModel
from dflash_hf.cli.make import RUN_FILE, STAGES, WORK

make_command = importlib.import_module("dflash_hf.cli.make")  # the package's name `make` is the command

SMALL = (
    "--hours", 0.02, "--rows", 64, "--eval-prompts", 2, "--max-new-tokens", 8, "--max-length", 64, "--draft-layers", 1,
    "--block-size", 4,
)  # fmt: skip


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {index} + {index}?"}) + "\n" for index in range(200)))
    return str(path)


def test_a_plan_alone_measures_and_writes_what_a_run_would_do(run, saved_target, questions, tmp_path):
    out = tmp_path / "draft"
    arguments = ("--target", saved_target(), "--out", out, "--prompts", questions)
    code, stdout, err = run("make", *arguments, *SMALL, "--plan")
    assert code == 0, err
    assert "64 prompts and answers" in " ".join(stdout.split())
    values = yaml.safe_load((out / WORK / RUN_FILE).read_text())
    assert values["plan"]["num_rows"] == 64
    assert values["settings"]["hours"] == 0.02
    assert not (out / WORK / "answers").exists()
    # another budget is no contradiction as long as nothing has begun
    code, stdout, err = run("make", *arguments, *SMALL, "--hours", 0.03, "--plan")
    assert code == 0, err
    assert yaml.safe_load((out / WORK / RUN_FILE).read_text())["settings"]["hours"] == 0.03
    # and a file of another run is taken with its plan, without measuring
    code, stdout, err = run("make", "--config", out / WORK / RUN_FILE, "--out", tmp_path / "other", "--plan")
    assert code == 0, err
    assert "measuring this machine" not in stdout
    assert (tmp_path / "other" / WORK / RUN_FILE).read_text() == (out / WORK / RUN_FILE).read_text()


@pytest.mark.spawns
def test_a_run_ends_with_a_measured_card_and_goes_on_after_interruptions(
    run, saved_target, questions, tmp_path, monkeypatch
):
    out = tmp_path / "draft"
    arguments = ("make", "--target", saved_target(), "--out", out, "--prompts", questions, *SMALL)
    run_command = make_command.run_command
    commands: list[str] = []

    def interrupted_before(name: str):
        def run_or_stop(words, console):
            if words[0] == name:
                raise KeyboardInterrupt
            commands.append(words[0])
            run_command(words, console)

        return run_or_stop

    for name in ("prepare", "train", "eval"):
        monkeypatch.setattr(make_command, "run_command", interrupted_before(name))
        code, stdout, err = run(*arguments)
        assert code == 130, err
        assert "The same command continues" in stdout
    monkeypatch.setattr(make_command, "run_command", interrupted_before("none"))
    code, stdout, err = run(*arguments)
    assert code == 0, err
    assert commands == ["regenerate", "prepare", "train", "eval"]  # each ran once
    assert "took" in stdout
    assert json.loads((out / WORK / "progress.json").read_text())["complete"] == list(STAGES)
    draft = DFlashDraftModel.from_pretrained(out)
    assert draft.config.block_size == 4
    card = (out / "README.md").read_text()
    assert "prompts of questions.jsonl, answered greedily by the target" in card
    assert "held_out" in card
    prompts, held_out = (
        set((out / WORK / name).read_text().splitlines()) for name in ("prompts.jsonl", "held_out.jsonl")
    )
    assert (len(prompts), len(held_out), len(prompts & held_out)) == (64, 2, 0)
    assert not (out / WORK / "states").exists()
    code, stdout, err = run(*arguments)  # complete: nothing runs
    assert code == 0, err
    assert len(commands) == 4
    code, _, err = run(*arguments, "--seed", 1)
    assert code == 1
    assert "seed was 0 and is now 1" in error_line(err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "draft"), "needs --target"),
        (("--target", "TARGET"), "needs --out"),
        (("--target", "TARGET", "--out", "draft", "--kind", "domino"), "--kind 'domino' is not known"),
        (("--target", "TARGET", "--out", "draft", "--hours", "-1"), "hours=-1.0 must be a positive number"),
        (("--target", "TARGET", "--out", "draft", "--rows", "3"), "rows=3 must be at least 64"),
        (("--target", "TARGET", "--out", "draft", "--hours", "0.0001"), "leave time for 0 rows"),
        (("--target", "TARGET", "--out", "draft", "--prompts", "Q:0"), "must be positive"),
        (("--target", "TARGET", "--out", "draft", "--prompts", "nothing.jsonl"), "nothing.jsonl"),
        (("--target", "nothing", "--out", "draft"), "nothing"),
        (("--config", "nothing.yaml", "--out", "draft"), "nothing.yaml does not exist"),
        (("--target", "TARGET", "--out", "draft", "--eval-prompts", "0"), "--eval-prompts 0"),
        (("--target", "TARGET", "--out", "draft", "--max-length", "100"), "shorter than an answer"),
        (("--target", "TARGET", "--out", "draft", "--draft", "d", "--kind", "dflash2"), "Leave one of them out"),
        (("--target", "TARGET", "--out", "draft", "--disk", "-1"), "disk must be at least 0"),
    ],
)
def test_bad_input_ends_in_one_line(run, saved_target, questions, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    names = {"TARGET": saved_target(), "Q:0": f"{questions}:0"}
    arguments = [names.get(word, word) for word in arguments]
    if "--prompts" not in arguments:
        arguments += ["--prompts", questions]
    small = ("--draft-layers", 1, "--block-size", 4, *(() if "--max-length" in arguments else ("--max-new-tokens", 8)))
    code, _, err = run("make", *arguments, *small)
    assert code == 1
    assert words in error_line(err)


def test_a_base_model_is_told_to_bring_texts(run, saved_target, tmp_path):
    target = saved_target()
    (Path(target) / "chat_template.jinja").unlink()
    code, _, err = run("prompts", "--target", target, "--out", tmp_path / "p.jsonl", "--number", 3)
    assert code == 1
    assert "base model are beginnings of texts" in error_line(err)
    code, _, err = run("make", "--target", target, "--out", tmp_path / "draft")
    assert code == 1
    assert "base model are beginnings of texts" in error_line(err)
    shutil.rmtree(target)


def test_prompts_of_a_target_that_writes_noise_stop_with_a_reason(run, saved_target, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_hf.regeneration.self_prompts.WINDOW", 20)
    code, _, err = run(
        "prompts", "--target", saved_target(), "--out", tmp_path / "p.jsonl", "--number", 300, "--max-new-tokens", 6
    )
    assert code == 1
    assert "usable prompts" in error_line(err)
