"""What version 0.1.0 wrote and what its users import, before the modules moved into packages."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from dflash_hf import DFlashConfig, DFlashDraftModel

FOLDER = Path(__file__).parent / "data" / "draft_0.1.0"
PACKAGE = Path(__file__).parent.parent / "dflash_hf"
SAVED_FILES = {"config.json", "configuration_dflash.py", "model.safetensors", "modeling_dflash.py"}
AUTO_MAP = {"AutoConfig": "configuration_dflash.DFlashConfig", "AutoModel": "modeling_dflash.DFlashDraftModel"}


@pytest.fixture
def old_draft(tmp_path) -> Path:
    """The folder as version 0.1.0 saved it, without the tensors that the tests compare with."""
    names = SAVED_FILES & {file.name for file in FOLDER.iterdir()}
    assert names == SAVED_FILES
    (tmp_path / "draft").mkdir()
    for name in names:
        shutil.copyfile(FOLDER / name, tmp_path / "draft" / name)
    return tmp_path / "draft"


def assert_expected_states(draft: torch.nn.Module) -> None:
    tensors = load_file(FOLDER / "expected_states.safetensors")
    expected = tensors.pop("last_hidden_state")
    assert set(tensors) == {"context_hidden_states", "noise_embeds", "position_ids"}
    with torch.no_grad():
        states = draft(**tensors).last_hidden_state
    assert states.dtype == torch.float32
    torch.testing.assert_close(states, expected, atol=1e-6, rtol=0)


def assert_same_tensors(saved: Path) -> None:
    old, new = load_file(FOLDER / "model.safetensors"), load_file(saved / "model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("load", [DFlashDraftModel.from_pretrained, AutoModel.from_pretrained])
def test_a_draft_of_version_0_1_0_loads_and_is_saved_again(load, old_draft, tmp_path):
    draft = load(old_draft)
    assert type(draft) is DFlashDraftModel
    assert type(AutoConfig.from_pretrained(old_draft)) is DFlashConfig
    assert_expected_states(draft)
    draft.save_pretrained(tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == SAVED_FILES
    assert_same_tensors(tmp_path / "again")
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (old_draft, tmp_path / "again"))
    assert new == old
    assert new["auto_map"] == AUTO_MAP
    for name in ("configuration_dflash.py", "modeling_dflash.py"):
        assert (tmp_path / "again" / name).read_text() == (PACKAGE / "model" / name).read_text()
    assert_expected_states(load(tmp_path / "again"))


WITHOUT_THE_PACKAGE = """
import sys
class Block:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "dflash_hf": raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
from safetensors.torch import load_file
from transformers import AutoModel
def check(folder):
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert "dflash_hf" not in sys.modules and "transformers_modules" in type(draft).__module__
    tensors = load_file({expected!r})
    expected = tensors.pop("last_hidden_state")
    with torch.no_grad():
        torch.testing.assert_close(draft(**tensors).last_hidden_state, expected, atol=1e-6, rtol=0)
    return draft
check("draft").save_pretrained("again")
check("again")
print("done")
"""


@pytest.mark.spawns
@pytest.mark.spawns
@pytest.mark.parametrize("code", ["of version 0.1.0", "of this version"])
def test_a_draft_of_version_0_1_0_runs_as_remote_code_and_is_saved_again(code, old_draft, tmp_path):
    """The code that travels with the folder is what runs: that of the old version, and ours once it is saved anew."""
    if code == "of this version":
        DFlashDraftModel.from_pretrained(old_draft).save_pretrained(old_draft)
    source = PACKAGE / "model" if code == "of this version" else FOLDER
    script = WITHOUT_THE_PACKAGE.format(expected=str(FOLDER / "expected_states.safetensors"))
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip().endswith("done"), result.stderr[-2000:]
    assert {file.name for file in (tmp_path / "again").iterdir()} == SAVED_FILES
    assert_same_tensors(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == AUTO_MAP
    for name in ("configuration_dflash.py", "modeling_dflash.py"):
        assert (tmp_path / "again" / name).read_text() == (source / name).read_text()


DOCUMENTED_NAMES = {
    "checkpoints": ["convert_checkpoint", "read_checkpoint", "save_in_layout"],
    "data": ["DFlashCollator", "PreparedStream", "pack_dataset", "prepare_dataset", "prepare_row"],
    "decoding": ["DFlashGenerateOutput", "dflash_decoding", "speculative_generate"],
    "doctor": ["verdict"],
    "evaluation": [
        "Comparison",
        "Generation",
        "Summary",
        "chat_inputs",
        "compare_on_prompts",
        "generate_timed",
        "summarize_comparisons",
    ],
    "target": ["target_hidden_states", "target_logits_function"],
}


@pytest.mark.parametrize("package", DOCUMENTED_NAMES)
def test_names_documented_in_version_0_1_0_are_imported_from_where_they_were(package):
    module = importlib.import_module(f"dflash_hf.{package}")
    names = DOCUMENTED_NAMES[package]
    assert set(names) <= set(module.__all__)
    assert all(callable(getattr(module, name)) for name in names)
