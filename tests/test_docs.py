from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from conftest import make_draft
from transformers import AutoModelForCausalLM

import dflash_hf

ROOT = Path(__file__).parent.parent
MODULES = [
    module.name
    for module in pkgutil.walk_packages(dflash_hf.__path__, "dflash_hf.")
    if module.name != "dflash_hf.__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, extraglobs=vars(module), optionflags=doctest.ELLIPSIS)
    assert failures == 0


def test_some_docstrings_have_examples():
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len({test.name for test in tests}) >= 8


def python_blocks(name: str = "README.md") -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


@pytest.fixture
def run_block(saved_target, tmp_path, monkeypatch):
    """Runs a block as it stands, with the two names in it replaced by folders of tiny random models."""
    monkeypatch.chdir(tmp_path)
    target = saved_target(num_hidden_layers=8)
    draft = make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=270)
    draft.save_pretrained(tmp_path / "draft")

    def run(block: str, where: str, names: dict) -> None:
        block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", target)
        block = block.replace("dflash-demo/draft", str(tmp_path / "draft"))
        exec(compile(block, where, "exec"), names)

    return run


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_readme_python_runs_on_a_tiny_pair(index, run_block):
    run_block(python_blocks()[index], f"README.md, Python block {index}", {"__name__": "readme"})


def test_python_of_the_decoding_guide_runs_from_top_to_bottom(run_block):
    names: dict = {"__name__": "guide"}
    blocks = python_blocks("docs/decoding.md")
    for index, block in enumerate(blocks):
        run_block(block, f"docs/decoding.md, Python block {index}", names)
    assert len(blocks) >= 4
    target, tokenizer = names["target"], names["tokenizer"]
    plain = target.generate(**names["inputs"], max_new_tokens=32)
    assert torch.equal(names["sequences"], plain)
    continued = target.generate(**names["longer"], max_new_tokens=32)
    assert torch.equal(names["answer"].sequences, continued)
    assert tokenizer.padding_side == "left"


def test_python_of_the_checkpoint_guide_runs(run_block):
    for index, block in enumerate(python_blocks("docs/checkpoints.md")):
        run_block(block, f"docs/checkpoints.md, Python block {index}", {"__name__": "guide"})


def test_python_of_the_data_guide_runs_from_top_to_bottom(run_block):
    names: dict = {"__name__": "guide"}
    for index, block in enumerate(python_blocks("docs/data.md")):
        run_block(block, f"docs/data.md, Python block {index}", names)
    assert names["written"] == "It is 4.<|end|>"
    assert names["progress"].num_answered == 1


@pytest.mark.parametrize("name", ["regenerate", "prepare", "inspect"])
def test_options_in_the_data_guide_are_those_of_the_commands(name):
    import typer

    from dflash_hf.cli import app

    text = (ROOT / "docs" / "data.md").read_text().split(f"\n## {name.capitalize()}\n")[1].split("\n## ")[0]
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("dflash-hf train ", "vllm ")))
    command = typer.main.get_command(app).commands[name]
    named = set(re.findall(r"--[a-z][a-z-]*", text.replace("`train --dataset`", "")))
    assert named == {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_python_of_the_sharing_guide_runs_against_a_hub(hub, saved_target):
    target = AutoModelForCausalLM.from_pretrained(saved_target(num_hidden_layers=8))
    draft = make_draft(target, mask_token_id=270)
    draft.config.target_name_or_path = "org/target"
    inputs = {"input_ids": torch.tensor([[5, 9, 11]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    names: dict = {"__name__": "guide", "draft": draft, "target": target, "inputs": inputs}
    blocks = python_blocks("docs/sharing.md")
    for index, block in enumerate(blocks):
        exec(compile(block.replace('"me/', '"writer/'), f"docs/sharing.md, Python block {index}", "exec"), names)
    assert len(blocks) == 3
    assert set(names["commits"]) == {"writer/my-draft", "writer/my-draft-serving-DFlash"}
    assert torch.equal(names["output"], target.generate(**inputs, max_new_tokens=32))


def test_shell_lines_of_the_sharing_guide_name_options_of_the_command():
    import typer

    from dflash_hf.cli import app

    text = (ROOT / "docs" / "sharing.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("dflash-hf push")]
    known = {option for each in typer.main.get_command(app).commands["push"].params for option in each.opts}
    named = {option for line in lines for option in re.findall(r"--[a-z-]+", line)} | {"--target-name"}
    assert len(lines) == 2
    assert named == {option for option in known if option.startswith("--")} - {"--help"}


def test_readme_opens_with_the_two_set_up_commands_and_stays_short():
    text = (ROOT / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", text, flags=re.DOTALL).group(1).splitlines()
    assert commands == ['pip install -e ".[demo]" && dflash-hf demo', 'pip install -e ".[test]" && pytest']
    assert len(text.splitlines()) <= 200


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "notebooks" / "README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert all(link.startswith("https://") or (path.parent / link).exists() for link in links)


def test_arguments_named_in_the_training_guide_exist():
    from dflash_hf.cli.train import DraftAndDataArguments
    from dflash_hf.training.arguments import DFlashTrainingArguments

    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    names = set(re.findall(r"`([a-z]+_[a-z_0-9]+)(?:=[^`]*)?`", (ROOT / "docs" / "training.md").read_text()))
    columns = {"input_ids", "loss_mask", "accept_len", "device_map"}
    metrics = {"eval_loss", "eval_accept_len", "eval_slot_accuracy_k", "eval_serving_accept_len"}
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
    assert sorted(named) == sorted(DecodingStatistics(block_size=4, num_tokens=1, rest_s=1.0).as_dict())


def test_processors_in_the_decoding_guide_are_treated_as_it_says():
    from dflash_hf.decoding.logits_processing import PREFIX_FREE, ROW_NUMBERED, STATEFUL

    cells = guide_cells("Stopping, processors, chats")
    for line, kinds in ((0, PREFIX_FREE), (3, STATEFUL), (4, ROW_NUMBERED)):
        assert set(re.findall(r"`(\w+)`", cells[line][0])) == {kind.__name__ for kind in kinds}


def test_arguments_and_constants_in_the_decoding_guide_exist():
    from transformers import GenerationConfig

    from dflash_hf.decoding.loop import WAITING_TOKENS

    text = (ROOT / "docs" / "decoding.md").read_text()
    own = {*inspect.signature(dflash_hf.dflash_decoding).parameters}
    own |= {*inspect.signature(dflash_hf.speculative_generate).parameters}
    of_generate = {*vars(GenerationConfig()), "custom_generate", "assistant_model", "speculation_type", "cache"}
    arguments = set(re.findall(r"`(\w+)=[^`]*`", text))
    assert arguments <= own | of_generate
    assert arguments >= {"block_size", "tree_size", "proposal", "cache"}
    assert f"`WAITING_TOKENS` = {WAITING_TOKENS} " in text


def test_shell_options_in_the_decoding_guide_are_those_of_the_commands():
    import typer

    from dflash_hf.cli import app

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
    import typer

    from dflash_hf.cli import app

    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^dflash-hf (\w+) ([^#\n]*)", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)
    assert {command for command, _ in lines} == {"convert", "check"}
    for command, arguments in lines:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known


def test_readme_shell_flags_exist():
    from dflash_hf.cli.train import DraftAndDataArguments
    from dflash_hf.training.arguments import DFlashTrainingArguments

    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    (command,) = re.findall(r"(dflash-hf train --.*?)\ndflash-hf", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    flags = re.findall(r"--(\w+)", command)
    assert flags
    assert set(flags) <= known
