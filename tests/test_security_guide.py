"""What docs/security.md promises of the package as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_draft
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashConfig, DFlashDraftModel, convert_checkpoint, publish_draft
from dflash_hf.checkpoints.compatibility import check_checkpoint

PACKAGE = Path(__file__).parent.parent / "dflash_hf"
HUB_CODE = ("configuration_dflash.py", "modeling_dflash.py")
# What runs code that a file or a string holds, or another program.
RUNS_CODE = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "os.system", "os.popen"}
RUNS_CODE_MODULES = {"pickle", "dill", "marshal", "shelve", "joblib", "runpy"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def modules_of(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def reads_tensors_alone(call: ast.Call) -> bool:
    """Tell whether a call of `torch.load` has `weights_only=True`."""
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)


def catches_pickle_errors_alone(tree: ast.AST) -> bool:
    """Tell whether nothing of `pickle` is used but the class of its errors."""
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
    }
    is_renamed = any(isinstance(node, ast.ImportFrom) and node.module == "pickle" for node in ast.walk(tree))
    return used == {"UnpicklingError"} and not is_renamed


TREES = {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


def test_the_package_runs_no_code_of_a_file_and_only_the_demo_runs_another_program():
    assert len(TREES) > 100
    for name, tree in TREES.items():
        # Of the optimizer's file of the user's own run, tensors and numbers alone are read.
        risky = {called for called, call in calls(tree) if called != "torch.load" or not reads_tensors_alone(call)}
        assert not RUNS_CODE & risky, name
        harmless = {"pickle"} if catches_pickle_errors_alone(tree) else set()
        assert not (RUNS_CODE_MODULES & modules_of(tree)) - harmless, name
    loading = {name for name, tree in TREES.items() if "torch.load" in {called for called, _ in calls(tree)}}
    assert loading == {"checkpoints/io.py", "training/resume.py"}
    assert {name for name, tree in TREES.items() if "subprocess" in modules_of(tree)} == {"target/demo.py"}


def test_no_call_of_the_package_trusts_remote_code():
    keywords = {name: {word.arg for _, call in calls(tree) for word in call.keywords} for name, tree in TREES.items()}
    assert not {name for name, words in keywords.items() if "trust_remote_code" in words}


@pytest.fixture
def draft_with_foreign_code(target, tmp_path) -> tuple[Path, Path]:
    """A saved draft whose source files leave a trace when they run, and the file that they would leave."""
    folder, trace = tmp_path / "draft", tmp_path / "trace"
    draft = make_draft(target)
    draft.config.target_name_or_path = "org/target"
    draft.save_pretrained(folder)
    for name in HUB_CODE:
        assert (folder / name).is_file()
        (folder / name).write_text(f"open({str(trace)!r}, 'w').close()\n" + (folder / name).read_text())
    return folder, trace


def test_source_files_beside_a_draft_do_not_run_where_the_package_is_installed(draft_with_foreign_code, hub, tmp_path):
    folder, trace = draft_with_foreign_code
    DFlashDraftModel.from_pretrained(folder, target=False)
    assert check_checkpoint(folder).verdicts[0].can_load
    convert_checkpoint(folder, tmp_path / "converted", "native")
    publish_draft(folder, "org/published")
    for trusts in (False, True):
        assert type(AutoConfig.from_pretrained(folder, trust_remote_code=trusts)) is DFlashConfig
        assert type(AutoModel.from_pretrained(folder, trust_remote_code=trusts)) is DFlashDraftModel
    assert not trace.exists()
    installed = {name: (PACKAGE / "model" / name).read_text() for name in HUB_CODE}
    assert {name: (tmp_path / "converted" / name).read_text() for name in HUB_CODE} == installed
    published = hub.repositories["org/published"].files()
    assert {name: published[name].decode() for name in HUB_CODE} == installed


def test_a_trace_would_be_found(draft_with_foreign_code):
    folder, trace = draft_with_foreign_code
    code = (folder / HUB_CODE[0]).read_text().splitlines()[0]
    subprocess.run([sys.executable, "-c", code], check=True)
    assert trace.exists()
