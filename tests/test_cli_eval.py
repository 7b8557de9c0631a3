"""`dflash-hf eval` as a shell runs it: files, interrupts, several processes, the model card, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from conftest import error_line, make_draft, make_target
from prompt_files import NAMES, write_prompts
from transformers import AutoModelForCausalLM

from dflash_hf.cli import app
from dflash_hf.evaluation.journal import SuiteJournal
from dflash_hf.evaluation.prompt_sets import HUB_PROMPTS
from dflash_hf.hub.model_card import DraftCard

PICTURES = ["eval_along.png", "eval_slots.png", "eval_speed.png"]
QUICK = ("--max-new-tokens", 8, "--dtype", "float32")


@pytest.fixture
def pair(saved_target, tmp_path) -> tuple[str, str]:
    """Folders of a target and a draft."""
    target = saved_target()
    draft = make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=270)
    draft.save_pretrained(tmp_path / "draft")
    return target, str(tmp_path / "draft")


@pytest.fixture
def own(tmp_path) -> Path:
    """A file of three prompts."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"{number}+1?"]}) + "\n" for number in range(3)))
    return file


def results_of(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def told(out: Path) -> list[tuple]:
    """What was found but for the times."""
    names = ("set_name", "temperature", "batch", "turn", "num_drafted_tokens", "committed", "num_identical")
    return [tuple(map(str, (pair[name] for name in names))) for pair in results_of(out)["pairs"]]


def test_the_standard_suite_is_measured_written_and_put_into_the_card(run, pair, tmp_path):
    target, draft = pair
    folder, out = write_prompts(tmp_path / "prompts"), tmp_path / "results"
    arguments = ("eval", "--target", target, "--draft", draft, "--prompts-folder", folder, "--limit", 2, *QUICK)
    code, stdout, err = run(*arguments, "--out", out, "--card")
    assert code == 0, err
    for words in ("greedy, batch 1", "T = 1, batch 1", "GSM8K", "MT-Bench", "mean of sets", "bonus token included"):
        assert words in stdout
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".png") == PICTURES
    results = results_of(out)
    assert results["is_complete"]
    assert [each["name"] for each in results["sets"]] == NAMES
    assert [(row["set_name"], row["setting"]["temperature"]) for row in results["results"]] == [
        (name, temperature) for temperature in (0, 1) for name in NAMES
    ]
    greedy = results["results"][:5]
    assert [(row["num_prompts"], row["num_responses"], row["identical_share"]) for row in greedy] == [
        *[(2, 2, 1.0)] * 4, (2, 4, 1.0),
    ]  # fmt: skip
    assert {row["num_identical"] for row in results["results"][5:]} == {None}
    assert len(results["pairs"]) == 2 * 12
    report = (out / "results.md").read_text()
    for words in (
        "# `draft` on prompts for `target`", "| GSM8K | 2 | ", "bonus token of the target counts", "T = 1, batch 1",
        "float32",
        "2 of 5, file gsm8k.jsonl", "CPU threads",
        "```bash\ndflash-hf eval --target target --draft draft --suite standard ",
        *PICTURES,
    ):  # fmt: skip
        assert words in report
    card = (Path(draft) / "README.md").read_text()
    section = card.split("\n## Measured: suite\n")[1].split("\n## ")[0]
    assert "| GSM8K | greedy, batch 1 | " in section
    assert "| mean of sets | T = 1, batch 1 | " in section
    assert all(f"]({name})" in section and (Path(draft) / name).is_file() for name in PICTURES)
    assert DraftCard.from_folder(draft).suite.rows[0].num_prompts == 2
    for text in (report, card, json.dumps(results), (out / "settings.json").read_text()):
        assert str(tmp_path) not in text


@pytest.mark.usefixtures("blank_pictures")
def test_ctrl_c_keeps_what_was_answered_and_the_same_command_goes_on(run, pair, own, tmp_path, monkeypatch):
    target, draft = pair
    arguments = ("eval", "--target", target, "--draft", draft, "--prompts", own, *QUICK)
    assert run(*arguments, "--out", tmp_path / "whole")[0] == 0
    add, calls = SuiteJournal.add, []

    def press_ctrl_c(journal, pair) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(pair)
        add(journal, pair)

    out = tmp_path / "results"
    monkeypatch.setattr(SuiteJournal, "add", press_ctrl_c)
    code, stdout, _ = run(*arguments, "--out", out, "--card")
    assert code == 130
    assert "2 of 6 response pairs are saved. Run the same command to resume." in " ".join(stdout.split())
    assert not results_of(out)["is_complete"]
    assert "**Not complete**: 2 of 6" in (out / "results.md").read_text()
    assert not (Path(draft) / "eval_slots.png").exists()
    monkeypatch.setattr(SuiteJournal, "add", add)
    code, stdout, err = run(*arguments, "--out", out)
    assert code == 0, err
    assert "2 of 6 response pairs exist" in " ".join(stdout.split())
    assert told(out) == told(tmp_path / "whole")
    lines = (out / "answers-00000.jsonl").read_text().splitlines()
    assert run(*arguments, "--out", out)[0] == 0
    assert (out / "answers-00000.jsonl").read_text().splitlines() == lines


@pytest.mark.spawns
def test_two_processes_share_the_prompts_and_one_goes_on_from_them(run, pair, own, tmp_path):
    target, draft = pair
    arguments = [*map(str, ("eval", "--target", target, "--draft", draft, "--prompts", own, *QUICK))]
    out = tmp_path / "results"
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    launch = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dflash_hf",
         *arguments, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert launch.returncode == 0, launch.stderr[-8000:]
    shares = [(out / f"answers-0000{index}.jsonl").read_text().splitlines() for index in range(2)]
    assert [len(share) for share in shares] == [1 + 3, 1 + 3]
    assert launch.stdout.count("greedy, batch 1") == 1 + launch.stdout.count("own, greedy, batch 1")
    assert "speeds and speed-ups are not reliable" in " ".join(launch.stdout.split())
    assert results_of(out)["is_contended"]
    assert results_of(out)["runs"][0]["num_processes"] == 2
    (out / "answers-00001.jsonl").unlink()
    code, stdout, err = run(*arguments, "--out", out)
    assert code == 0, err
    assert "3 of 6 response pairs exist" in " ".join(stdout.split())
    assert run(*arguments, "--out", tmp_path / "alone")[0] == 0
    assert told(out) == told(tmp_path / "alone")
    assert not results_of(tmp_path / "alone")["is_contended"]
    assert "not reliable" in (out / "results.md").read_text()


def test_without_matplotlib_a_sentence_stands_for_the_pictures(run, pair, own, tmp_path, monkeypatch):
    target, draft = pair
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "results"
    arguments = ("--target", target, "--draft", draft, "--prompts", own, "--temperatures", 0, *QUICK)
    code, stdout, err = run("eval", *arguments, "--out", out, "--card")
    assert code == 0, err
    assert "no figures, since matplotlib is not installed" in " ".join(stdout.split())
    assert not list(out.glob("*.png"))
    assert results_of(out)["pictures"] == {}
    assert "## Measured: suite" in (Path(draft) / "README.md").read_text()


@pytest.mark.usefixtures("blank_pictures")
def test_a_card_that_somebody_edited_is_kept(run, pair, own, tmp_path):
    target, draft = pair
    (Path(draft) / "README.md").write_text("# Mine\n")
    arguments = ("--target", target, "--draft", draft, "--prompts", own, "--temperatures", 0, *QUICK)
    code, stdout, err = run("eval", *arguments, "--out", tmp_path / "results", "--card")
    assert code == 0, err
    assert "README.md was edited or written by someone else, and is kept unchanged." in stdout
    assert (Path(draft) / "README.md").read_text() == "# Mine\n"
    assert DraftCard.from_folder(draft).suite.dtype == "float32"


def test_what_is_wrong_is_one_line_before_anything_runs(run, pair, own, saved_target, tmp_path):
    target, draft = pair
    out, folder = tmp_path / "results", write_prompts(tmp_path / "prompts", ["gsm8k"])

    def refused(*arguments: object) -> str:
        code, _, err = run("eval", "--draft", draft, "--target", target, "--out", out, *QUICK, *arguments)
        assert code == 1
        assert not out.exists()
        return error_line(err)

    assert "--suite 'gsm9k' is not known. Pass standard" in refused("--suite", "gsm9k")
    assert "no math500.jsonl for the set 'math500'" in refused("--prompts-folder", folder)
    assert "limit=0 must be at least 1" in refused("--prompts", own, "--limit", 0)
    assert "--temperatures '0;1': '0;1' is not a valid value" in refused("--prompts", own, "--temperatures", "0;1")
    assert "--block-size 'big' must be a number of slots" in refused("--prompts", own, "--block-size", "big")
    assert "block_size=9 must be 2 to 4" in refused("--prompts", own, "--block-size", 9)
    assert "may get 1 responses of 9000" in refused("--prompts", own, "--max-new-tokens", 9000)
    other = saved_target("other", hidden_size=64)
    assert "does not fit the target" in refused("--prompts", own, "--target", other)
    assert "--card writes into the folder of the draft, and --draft 'org/draft' is not a folder" in refused(
        "--prompts", own, "--draft", "org/draft", "--card"
    )


@pytest.mark.usefixtures("blank_pictures")
def test_other_weights_or_settings_for_a_folder_of_results_are_refused(run, pair, own, tmp_path):
    target, draft = pair
    arguments = (
        "eval",
        "--target",
        target,
        "--draft",
        draft,
        "--prompts",
        own,
        "--temperatures",
        0,
        "--dtype",
        "float32",
    )
    out = tmp_path / "results"
    assert run(*arguments, "--max-new-tokens", 4, "--out", out)[0] == 0
    code, _, err = run(*arguments, "--max-new-tokens", 5, "--out", out)
    assert code == 1
    assert "made with other settings: max_new_tokens was 4 and is now 5. Everything" in error_line(err)
    trained = make_draft(make_target(vocab_size=272), seed=5, mask_token_id=270)
    trained.save_pretrained(draft)
    code, _, err = run(*arguments, "--max-new-tokens", 4, "--out", out)
    assert code == 1
    assert "other settings: draft weights was " in error_line(err)


def test_options_in_the_guide_are_those_of_the_command():
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    cells = [line.split("|")[1] for line in text.split("| Option | What |\n")[1].split("\n\n")[0].splitlines()[1:]]
    named = [option for cell in cells for option in re.findall(r"--[a-z-]+", cell)]
    command = typer.main.get_command(app).commands["eval"]
    known = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert sorted(named) == sorted(known)
    assert set(re.findall(r"--[a-z-]+[a-z]", text)) <= known | {"--nproc-per-node", "--num"}


def test_sets_in_the_guide_are_those_of_the_package():
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
    rows = [
        line.split("|") for line in text.split("\n## Sets\n")[1].split("\n## ")[0].splitlines() if line[:3] == "| `"
    ]
    named = {row[1].strip(" `"): row[2].replace("`", "").strip() for row in rows}
    assert named == {name: hub.source for name, hub in HUB_PROMPTS.items()}
