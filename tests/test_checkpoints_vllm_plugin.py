"""The plugin by which vLLM opens native folders. `test_consumers.py` runs it in vLLM."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from conftest import make_draft
from foreign_checkpoints import write_producer
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config

import dflash_hf
from dflash_hf import DFlashConfig, save_in_layout
from dflash_hf.checkpoints.vllm_plugin import NativeDraftConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 512}
DRAFTS = {
    "full layers": {},
    "both kinds of layers": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "causal layers": {"is_causal": True},
    "biases and YaRN": {"attention_bias": True, "rope_parameters": YARN},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_vllm_reads_from_a_native_folder_what_the_serving_folder_holds(name, target, tmp_path):
    draft = make_draft(target, **DRAFTS[name])
    native = save_in_layout(draft, tmp_path / "native", "native", dtype=torch.bfloat16)
    serving = save_in_layout(draft, tmp_path / "serving", "serving")
    read, expected = NativeDraftConfig.from_pretrained(native), Qwen3Config.from_pretrained(serving)
    assert type(read) is Qwen3Config
    assert read.to_dict() | {"_name_or_path": None} == expected.to_dict() | {"_name_or_path": None}
    assert read.dflash_config["target_layer_ids"] == [0, 2]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (native, serving))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_entry_point_makes_auto_config_translate_native_folders(target, tmp_path):
    folder = save_in_layout(make_draft(target), tmp_path / "native", "native")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    plugin = EntryPoint(name, value, "vllm.general_plugins")
    try:
        plugin.load()()
        plugin.load()()  # vLLM may call a plugin more than once in a process
        assert type(AutoConfig.from_pretrained(folder)) is Qwen3Config
    finally:
        dflash_hf.register()
    assert type(AutoConfig.from_pretrained(folder)) is DFlashConfig


def test_a_native_folder_that_lacks_a_value_is_refused_by_name(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "TorchSpec", target)
    with pytest.raises(ValueError, match="block_size is missing"):
        NativeDraftConfig.from_pretrained(folder)
