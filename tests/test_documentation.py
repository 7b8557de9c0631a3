"""Guides, README and site: links lead somewhere, commands and Python are right, every page is in the navigation."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from conftest import make_draft
from decoding_pairs import FAMILIES as DECODED_FAMILIES
from decoding_pairs import STATE_SPACE
from test_target_hidden_states import FAMILIES as READ_FAMILIES
from transformers import AutoModelForCausalLM

import dflash_hf
from dflash_hf.cli import app
from dflash_hf.cli.train import DraftAndDataArguments
from dflash_hf.training.arguments import DFlashTrainingArguments
from dflash_hf.training.metric_names import old_name

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


# Blocks that cannot run here, by their page and number.
NOT_RUN = {
    ("docs/scaling.md", 1): "needs eight accelerators; tests/distributed_worker.py does it on two CPU processes",
}
CARDS = [name_of(facts.parent / "README.md") for facts in sorted(ROOT.glob("model_cards/*/card_facts.json"))]
EACH_BLOCK_ALONE = {"README.md", "docs/checkpoints.md", *CARDS}  # the others are read from top to bottom
IN_A_PROCESS_GROUP = {"docs/scaling.md"}


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    if name_of(page) in IN_A_PROCESS_GROUP:
        return [pytest.mark.spawns]
    return [pytest.mark.families] if name_of(page) in CARDS[1:] else []  # the cards' blocks are of one template


WITH_PYTHON = [pytest.param(page, id=name_of(page), marks=marks_of(page)) for page in PAGES if blocks(page, "python")]


@pytest.fixture
def tiny_pair(saved_target, tokenizer, tmp_path, monkeypatch) -> dict[str, Any]:
    """Enter a folder with a saved tiny pair and some rows; returns the pair under the names that guides give it."""
    monkeypatch.chdir(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(saved_target(num_hidden_layers=8))
    draft = make_draft(target, mask_token_id=270)
    draft.save_pretrained(tmp_path / "my-draft")
    row = '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]}\n'
    (tmp_path / "answers.jsonl").write_text(row * 3)
    inputs = {"input_ids": torch.tensor([[5, 9, 11]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    return {"target": target, "draft": draft, "tokenizer": tokenizer, "inputs": inputs}


def runnable_blocks(path: Path, target: str) -> list[str]:
    """Python blocks of a page that can run here, with the names of models and repositories replaced by ours."""
    found = []
    for index, block in enumerate(blocks(path, "python")):
        if (name_of(path), index) not in NOT_RUN:
            block = re.sub(r'"(HuggingFaceTB/SmolLM2-135M-Instruct|google/gemma-3-270m)"', repr(target), block)
            block = re.sub(r'"(dflash-demo/draft|[\w.-]+-DFlash(-demo)?)"', '"my-draft"', block)
            found.append(block.replace('"me/', '"writer/'))
    return found


def run_blocks(path: Path, pair: dict[str, Any]) -> dict[str, Any]:
    """Run every Python block of a page and return the names it made."""
    names = {**pair, "__name__": "guide"}
    for index, block in enumerate(runnable_blocks(path, pair["target"].name_or_path)):
        if name_of(path) in EACH_BLOCK_ALONE:
            names = {"__name__": "guide"}
        exec(compile(block, f"{name_of(path)}, Python block {index}", "exec"), names)
    return names


def check_decoding_guide(names: dict[str, Any]) -> None:
    target, tokenizer = names["target"], names["tokenizer"]
    plain = target.generate(**names["inputs"], max_new_tokens=32)
    assert torch.equal(names["sequences"], plain)
    continued = target.generate(**names["longer"], max_new_tokens=32)
    assert torch.equal(names["answer"].sequences, continued)
    assert tokenizer.padding_side == "left"


def check_data_guide(names: dict[str, Any]) -> None:
    assert names["written"] == "It is 4.<|end|>"
    assert names["progress"].num_completed == 1


def check_sharing_guide(names: dict[str, Any]) -> None:
    assert set(names["commits"]) == {"writer/my-draft", "writer/my-draft-serving-DFlash"}
    assert torch.equal(names["output"], names["target"].generate(**names["inputs"], max_new_tokens=32))


def check_training_guide(names: dict[str, Any]) -> None:
    measured = names["card"].measured
    card = Path("my-draft", "README.md").read_text()
    assert f"| acceptance length | {measured.acceptance_length:.2f} of 4 |" in card
    assert "| responses identical token by token | 1 of 1 |" in card
    assert "| prompts | one sum |" in card
    assert "not recorded" in card  # which loop, say


CHECKS = {
    "docs/decoding.md": check_decoding_guide,
    "docs/data.md": check_data_guide,
    "docs/sharing.md": check_sharing_guide,
    "docs/training.md": check_training_guide,
}


@pytest.mark.parametrize("path", WITH_PYTHON)
def test_python_of_a_page_runs(path, tiny_pair, request):
    name = name_of(path)
    if name in IN_A_PROCESS_GROUP:
        run_in_a_process_group(path, tiny_pair["target"].name_or_path)
        return
    if name == "docs/sharing.md":
        request.getfixturevalue("hub")
        tiny_pair["draft"].config.target_name_or_path = "org/target"
    names = run_blocks(path, tiny_pair)
    if name in CHECKS:
        CHECKS[name](names)


def run_in_a_process_group(path: Path, target: str) -> None:
    """As `torchrun` would, in one process."""
    rows = "import datasets; datasets.load_dataset('json', data_files='answers.jsonl', split='train')"
    rows += ".to_parquet('answers-0/data/train-00000.parquet')\n"
    Path("answers-0/data").mkdir(parents=True)
    Path("script.py").write_text("\n".join([rows, *runnable_blocks(path, target)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert Path("draft", "training_args.bin").is_file()  # it was trained


def test_blocks_that_are_not_run_are_there_and_pages_of_their_own_kind_too():
    for name, index in NOT_RUN:
        assert index < len(blocks(ROOT / name, "python"))
    with_python = {name_of(page) for page in PAGES if blocks(page, "python")}
    assert with_python >= {*EACH_BLOCK_ALONE, *IN_A_PROCESS_GROUP, *CHECKS}


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


def pytest_commands(path: Path) -> list[str]:
    """Return the arguments of the `pytest` commands of a page that name tests."""
    return re.findall(r"`pytest ([^`]*(?:-k|tests/test_[a-z])[^`]*)`", path.read_text())


WITH_TESTS = sorted({command for page in PAGES for command in pytest_commands(page)})
NOT_IN_THE_FAST_TIER = re.compile(r"mark\.(spawns|trains|families|real_model|consumers|cuda)\b")


def fast_and_all_tests(file: Path) -> tuple[set[str], set[str]]:
    """Return the names of the tests of a file that plain `pytest` runs, and of all."""
    tree = ast.parse(file.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    is_slow = any(
        NOT_IN_THE_FAST_TIER.search(ast.unparse(node))
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    slow = {
        node.name
        for node in found
        if is_slow or any(map(NOT_IN_THE_FAST_TIER.search, map(ast.unparse, node.decorator_list)))
    }
    return {node.name for node in found} - slow, {node.name for node in found}


@pytest.mark.parametrize("command", WITH_TESTS)
def test_a_pytest_command_of_a_page_selects_tests(command):
    words = shlex.split(command)
    files = [ROOT / word for word in words if word.startswith("tests/")] or sorted((ROOT / "tests").glob("test_*.py"))
    names = set().union(*(fast_and_all_tests(file)["-m" in words] for file in files))
    assert names
    if "-k" in words:
        for part in words[words.index("-k") + 1].split(" or "):
            assert any(part in name for name in names), part


def test_a_pytest_command_that_selects_nothing_would_be_found():
    fast, every = fast_and_all_tests(ROOT / "tests" / "test_consumers.py")
    assert any("muse_class" in name for name in fast)
    assert not any("vllm" in name for name in fast)
    assert any("vllm" in name for name in every)
    assert len(WITH_TESTS) >= 5


def family_key(name: str) -> str:
    """Return a name of a family without spelling: `OLMo 2` and `Olmo2` are one."""
    return re.sub(r"text|[^a-z0-9]", "", name.lower())


@pytest.mark.parametrize(
    ("line", "families"),
    [("targets, decoding", DECODED_FAMILIES | STATE_SPACE), ("targets, hidden states", READ_FAMILIES)],
)
def test_the_families_in_the_readme_are_those_of_the_tests(line, families):
    (cell,) = re.findall(rf"^\| {line}[^|]*\|[^|]*\|([^|]*)\|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    cell = cell.split("the same of ")[-1].split("tiny random models of ")[-1].split(":")[0]
    cell = re.sub(r"Qwen3 \(dense, MoE, Next\)", "Qwen3, Qwen3-MoE, Qwen3-Next", cell)
    named = {family_key(name) for name in re.sub(r"\([^)]*\)", "", cell).split(",")}
    assert named == {family_key(name) for name in families}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_yaml_blocks_name_arguments_of_training(path):
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    for block in blocks(path, "yaml"):
        assert set(yaml.safe_load(block)) <= known


@pytest.mark.parametrize("name", ["hyperparameters.md", "scaling.md"])
def test_arguments_named_in_the_guides_exist(name):
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    others = {"acceptance_length", "eval_acceptance_length", "eval_serving_acceptance_length"}
    others |= {"num_hidden_layers", "target_layer_ids"}
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


@pytest.mark.parametrize("name", ["regenerate", "prepare", "inspect"])
def test_options_in_the_data_guide_are_those_of_the_commands(name):
    text = (ROOT / "docs" / "data.md").read_text().split(f"\n## {name.capitalize()}\n")[1].split("\n## ")[0]
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("dflash-hf train ", "vllm ")))
    command = typer.main.get_command(app).commands[name]
    named = set(re.findall(r"--[a-z][a-z-]*", text.replace("`train --dataset`", "")))
    assert named == {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_shell_lines_of_the_sharing_guide_name_options_of_the_command():
    text = (ROOT / "docs" / "sharing.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("dflash-hf push")]
    known = {option for each in typer.main.get_command(app).commands["push"].params for option in each.opts}
    named = {option for line in lines for option in re.findall(r"--[a-z-]+", line)} | {"--target-name"}
    assert len(lines) == 2
    assert named == {option for option in known if option.startswith("--")} - {"--help"}


def test_readme_opens_with_the_two_set_up_commands_and_stays_short():
    text = (ROOT / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", text, flags=re.DOTALL).group(1).splitlines()
    assert commands == [
        "git clone ADDRESS_OF_THIS_REPOSITORY dflash_hf && cd dflash_hf",
        'pip install -e ".[demo]" && dflash-hf demo',
        'pip install -e ".[test]" && pytest',
    ]
    assert len(text.splitlines()) <= 200


def test_arguments_named_in_the_training_guide_exist():
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    names = set(re.findall(r"`([a-z]+_[a-z_0-9]+)(?:=[^`]*)?`", (ROOT / "docs" / "training.md").read_text()))
    columns = {"input_ids", "loss_mask", "device_map"}
    lengths = {f"{part}acceptance_length" for part in ("", "eval_", "eval_serving_", "eval_generate_")}
    metrics = {"eval_loss", "eval_slot_accuracy_k", *lengths, *map(old_name, lengths)}
    assert names - columns - metrics <= known
    assert len(names) > 15


def guide_cells(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading of the decoding guide, row by row."""
    text = (ROOT / "docs" / "decoding.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    first_end = next((i for i, row in enumerate(rows) if i > 1 and set(row[0]) == {"-"}), len(rows))
    return rows[2:first_end]


def test_statistics_in_the_decoding_guide_are_those_of_a_call():
    from dflash_hf import DecodingStatistics

    named = [name for cells in guide_cells("Statistics") for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(DecodingStatistics(block_size=4, num_tokens=1, overhead_s=1.0).as_dict())


def test_processors_in_the_decoding_guide_are_treated_as_it_says():
    from dflash_hf.decoding.logits_processing import PREFIX_FREE, SEQUENCE_WISE

    cells = guide_cells("Stopping, processors, chats")
    names = [re.findall(r"`(\w+)`", line[0]) for line in cells[:3]]
    assert set(names[0]) == {kind.__name__ for kind in PREFIX_FREE}
    assert set(names[0] + names[1] + names[2]) == {kind.__name__ for kind in SEQUENCE_WISE}


def test_arguments_and_constants_in_the_decoding_guide_exist():
    from transformers import GenerationConfig

    from dflash_hf.decoding.target_runner import MAX_PENDING_TOKENS

    text = (ROOT / "docs" / "decoding.md").read_text()
    own = {*inspect.signature(dflash_hf.dflash_decoding).parameters}
    own |= {*inspect.signature(dflash_hf.speculative_generate).parameters}
    of_generate = {*vars(GenerationConfig()), "custom_generate", "assistant_model", "speculation_type", "cache"}
    arguments = set(re.findall(r"`(\w+)=[^`]*`", text))
    assert arguments <= own | of_generate
    assert arguments >= {"block_size", "tree_size", "proposal", "cache"}
    assert f"`MAX_PENDING_TOKENS` = {MAX_PENDING_TOKENS} " in text


def test_shell_options_in_the_decoding_guide_are_those_of_the_commands():
    commands = typer.main.get_command(app).commands
    text = (ROOT / "docs" / "decoding.md").read_text().split("## From the shell\n")[1].split("\n## ")[0]
    block, prose = text.split("```bash\n")[1].split("```", 1)
    of_chat, of_bench = (part for part in prose.split("\n\n") if part.strip().startswith(("`chat`", "`bench")))
    for start, prose_part, command in (
        ("dflash-hf chat", of_chat, commands["chat"]),
        ("dflash-hf bench decode", of_bench, commands["bench"].commands["decode"]),
    ):
        lines = " ".join(line[line.index(start) :] for line in block.splitlines() if start in line)
        named = set(re.findall(r"--[a-z][a-z-]*", lines + prose_part))
        assert named == {option for parameter in command.params for option in parameter.opts} - {"--help"}


@pytest.mark.parametrize("name", ["checkpoints.md", "serving.md"])
def test_shell_lines_of_the_guides_about_checkpoints_are_understood(name):
    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^dflash-hf (\w+) ([^#\n]*)", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)
    assert {command for command, _ in lines} == {"convert", "check"}
    for command, arguments in lines:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known


def test_readme_shell_flags_exist():
    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    (command,) = re.findall(r"(dflash-hf train --.*?)\ndflash-hf", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    flags = [flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]*)", command)]
    assert flags
    assert set(flags) <= known


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


@pytest.mark.spawns
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
