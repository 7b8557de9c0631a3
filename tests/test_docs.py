from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import nbformat
import pytest
from conftest import make_draft
from nbclient import NotebookClient
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


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_readme_python_runs_on_a_tiny_pair(index, saved_target, tmp_path, monkeypatch):
    """The blocks as they stand, with the two names in them replaced by folders of tiny random models."""
    monkeypatch.chdir(tmp_path)
    target = saved_target(num_hidden_layers=8)
    draft = make_draft(AutoModelForCausalLM.from_pretrained(target), mask_token_id=270)
    draft.save_pretrained(tmp_path / "draft")
    block = python_blocks()[index]
    block = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", target)
    block = block.replace("dflash-demo/draft", str(tmp_path / "draft"))
    exec(compile(block, f"README.md, Python block {index}", "exec"), {"__name__": "readme"})


def test_readme_opens_with_the_two_set_up_commands_and_stays_short():
    text = (ROOT / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", text, flags=re.DOTALL).group(1).splitlines()
    assert commands == ['pip install -e ".[demo]" && dflash-hf demo', 'pip install -e ".[test]" && pytest']
    assert len(text.splitlines()) <= 200


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert all(link.startswith("https://") or (path.parent / link).exists() for link in links)


def test_arguments_named_in_the_training_guide_exist():
    from dflash_hf.cli.train import DraftAndDataArguments
    from dflash_hf.training_args import DFlashTrainingArguments

    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    names = set(re.findall(r"`([a-z]+_[a-z_0-9]+)(?:=[^`]*)?`", (ROOT / "docs" / "training.md").read_text()))
    columns = {"input_ids", "loss_mask", "accept_len", "device_map"}
    metrics = {"eval_loss", "eval_accept_len", "eval_slot_accuracy_k", "eval_serving_accept_len"}
    assert names - columns - metrics <= known
    assert len(names) > 15


def test_readme_shell_flags_exist():
    from dflash_hf.cli.train import DraftAndDataArguments
    from dflash_hf.training_args import DFlashTrainingArguments

    known = {*DraftAndDataArguments.__dataclass_fields__, *DFlashTrainingArguments.__dataclass_fields__}
    (command,) = re.findall(r"(dflash-hf train --.*?)\ndflash-hf", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    flags = re.findall(r"--(\w+)", command)
    assert flags
    assert set(flags) <= known


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom_and_keeps_its_outputs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny models lose more to threads than they gain
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
