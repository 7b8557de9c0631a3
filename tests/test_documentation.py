"""Guides, README and site: links lead somewhere, commands and Python are right, every page is in the navigation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from conftest import make_draft
from transformers import AutoModelForCausalLM

import dflash_hf
from dflash_hf.cli import app
from dflash_hf.cli.train import DraftAndDataArguments
from dflash_hf.training.arguments import DFlashTrainingArguments

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    *GUIDES,
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted(ROOT.glob("model_cards/**/README.md")),
]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    return [text for _, kind, text in FENCED.findall(path.read_text()) if kind == language]


def anchors(path: Path) -> set[str]:
    """Names of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in words}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_and_their_anchors_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def test_a_wrong_anchor_would_be_found():
    assert "the-loss-exactly" in anchors(ROOT / "docs" / "training.md")
    assert "the-loss" not in anchors(ROOT / "docs" / "training.md")


# ---- Python ----

# Pages whose blocks another test runs, because they need more than a tiny pair.
RUN_ELSEWHERE = {
    "docs/decoding.md": "test_docs.py: compares the texts with plain generation",
    "docs/checkpoints.md": "test_docs.py",
    "docs/data.md": "test_docs.py: looks at what the blocks made",
    "docs/sharing.md": "test_docs.py: needs a Hub",
    "docs/training.md": "test_model_card.py: looks at the card",
    "README.md": "test_docs.py",
    **{
        f"model_cards/{facts.parent.name}/README.md": "test_model_card.py: the snippets of fresh cards"
        for facts in ROOT.glob("model_cards/*/card_facts.json")
    },
}
# Blocks that cannot run here, by their page and number.
NOT_RUN = {
    ("docs/scaling.md", 1): "needs eight accelerators; tests/distributed_worker.py does it on two CPU processes",
}


@pytest.mark.parametrize("path", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_of_a_page_runs_from_top_to_bottom_or_is_known_to_run_elsewhere(
    path, saved_target, tmp_path, monkeypatch
):
    name = name_of(path)
    if name in RUN_ELSEWHERE:
        where = RUN_ELSEWHERE[name].split(":")[0].split()[0]
        text = (ROOT / "tests" / where).read_text()
        assert Path(name).name in text or "model_cards" in text
        return
    monkeypatch.chdir(tmp_path)
    target = saved_target(num_hidden_layers=8)
    draft = make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=270)
    for folder in ("draft", "my-draft"):
        draft.save_pretrained(tmp_path / folder)
    row = '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]}\n'
    (tmp_path / "answers.jsonl").write_text(row * 3)
    (tmp_path / "answers-0" / "data").mkdir(parents=True)
    script = "\n".join(block for index, block in enumerate(blocks(path, "python")) if (name, index) not in NOT_RUN)
    script = script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", target)
    script = script.replace("dflash-demo/draft", str(tmp_path / "draft"))
    if "fully_shard" in script:
        run_in_a_process_group(script, tmp_path)
    else:
        exec(compile(script, name, "exec"), {"__name__": "guide"})


def run_in_a_process_group(script: str, folder: Path) -> None:
    """As `torchrun` would, in one process."""
    rows = "import datasets; datasets.load_dataset('json', data_files='answers.jsonl', split='train')"
    rows += ".to_parquet('answers-0/data/train-00000.parquet')\n"
    (folder / "script.py").write_text(rows + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (folder / "draft" / "training_args.bin").is_file()  # it was trained


def test_blocks_that_are_not_run_are_there():
    for name, index in NOT_RUN:
        assert index < len(blocks(ROOT / name, "python"))
    assert all(blocks(ROOT / name, "python") for name in RUN_ELSEWHERE)


# ---- shell ----


def commands_in(text: str) -> list[list[str]]:
    """Words of every `dflash-hf` command of a block of shell lines, whatever runs it."""
    text = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words, current = list(lexer), None
        for index, word in enumerate(words):
            if set(word) <= set("();<>|&"):
                current = None
            elif current is not None:
                current.append(word)
            elif word == "dflash-hf" or (word == "dflash_hf" and words[index - 1] == "-m"):
                current = []
                found.append(current)
    return found


USAGE_ERROR: Any = typer.BadParameter.__base__  # of click, or of the copy inside typer


def check_command(words: list[str]) -> None:
    """Fail unless command and options exist and needed ones are given."""
    if words[:1] == ["train"]:
        known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
        flags = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        assert flags <= known, flags - known
        assert {"target", "dataset"} <= flags or words[1].endswith((".yaml", ".json"))
        return
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    command.make_context("dflash-hf", list(words))


@pytest.mark.parametrize("path", [page for page in PAGES if "dflash-hf " in page.read_text()], ids=name_of)
def test_every_command_in_a_shell_block_is_understood(path):
    for block in blocks(path, "bash"):
        for words in commands_in(block):
            check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "dflash-hf trian --target T --dataset D",
        "dflash-hf train --target T --dataset D --learning_rte 1",
        "dflash-hf convert a",
        "CUDA_VISIBLE_DEVICES=0 dflash-hf bench decode --drafts d &",
        "torchrun --nproc-per-node 2 -m dflash_hf train --batch 2",
    ],
)
def test_a_command_that_is_wrong_would_be_found(line):
    (words,) = commands_in(line)
    with pytest.raises((AssertionError, USAGE_ERROR)):
        check_command(words)


def test_commands_are_found_whatever_stands_before_them():
    text = (
        "a | dflash-hf chat --draft d # dflash-hf no\ndflash-hf convert \\\n    a b && dflash-hf check b; dflash-hfx"
    )
    assert commands_in(text) == [["chat", "--draft", "d"], ["convert", "a", "b"], ["check", "b"]]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_yaml_blocks_name_arguments_of_training(path):
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    for block in blocks(path, "yaml"):
        assert set(yaml.safe_load(block)) <= known


@pytest.mark.parametrize("name", ["hyperparameters.md", "scaling.md"])
def test_arguments_named_in_the_guides_exist(name):
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    others = {"accept_len", "eval_accept_len", "eval_serving_accept_len", "num_hidden_layers", "target_layer_ids"}
    others |= {"fully_shard", "device_map"}
    text = FENCED.sub("", (ROOT / "docs" / name).read_text())
    named = set(re.findall(r"`([a-z]+_[a-z_0-9]+)(?:[=:][^`]*)?`", text))
    assert named - others <= known
    assert len(named & known) > 5


def test_defaults_in_the_guide_to_hyperparameters_are_those_of_the_package():
    fields = {**DFlashTrainingArguments.__dataclass_fields__, **DraftAndDataArguments.__dataclass_fields__}
    text = (ROOT / "docs" / "hyperparameters.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(`\w+`\))? \| (\w+) \|", text, flags=re.MULTILINE)
    told = {name: {"off": "False"}.get(value, value) for name, value in rows if value.isdigit() or value == "off"}
    assert told == {name: str(fields[name].default) for name in told}
    assert len(told) >= 7


# ---- README and site ----


def test_the_readme_is_at_most_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def pages_in(entries: list) -> list[str]:
    """Paths in a navigation, sections opened."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (pages_in(value) if isinstance(value, list) else [value])]


def test_the_navigation_lists_every_page_once():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in GUIDES]
    assert sorted(pages_in(navigation)) == pages


def test_the_overview_leads_to_every_guide():
    text = (ROOT / "docs" / "index.md").read_text()
    guides = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert guides == set(re.findall(r"\]\((\w+\.md)\)", text))


def test_public_names_and_those_that_pages_import_are_in_the_reference():
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: (dflash_hf\.[\w.]+)$", text, flags=re.MULTILINE))
    assert entries >= {f"dflash_hf.{name}" for name in dflash_hf.__all__}
    code = "\n".join(block for page in PAGES for block in blocks(page, "python"))
    for module, names in re.findall(r"^from (dflash_hf(?:\.\w+)?) import (.*)$", code, flags=re.MULTILINE):
        for name in names.split(", "):
            assert entries & {module, f"{module}.{name}", f"dflash_hf.{name}"}, (module, name)


def test_the_site_builds_without_a_warning_and_its_names_are_links(tmp_path):
    pytest.importorskip("mkdocs", reason='the site needs pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "api" / "decoding" / "index.html").read_text()
    assert '<a href="../draft/#dflash_hf.DFlashDraftModel"><code>DFlashDraftModel</code></a>' in page
    prose = re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    assert "[<code>" not in prose
    assert "anchors_per_sample" in (tmp_path / "api" / "training" / "index.html").read_text()
    assert (tmp_path / "notebooks" / "01_draft_and_verify.ipynb").is_file()
    elsewhere = {
        link
        for html in tmp_path.rglob("*.html")
        for link in re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?://[^"]+)"', html.read_text())
    }
    assert elsewhere == set()
