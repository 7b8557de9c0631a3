from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target
from foreign_checkpoints import ARGUMENTS, PRODUCERS, Z_LAB, network, write_checkpoint, write_producer
from safetensors.torch import save_file

from dflash_hf import save_in_layout
from dflash_hf.checkpoints import LAYOUTS
from dflash_hf.checkpoints.compatibility import READERS, check_checkpoint

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def verdicts(folder: Path, **kwargs) -> dict[str, tuple[bool, str]]:
    report = check_checkpoint(folder, **kwargs)
    assert [verdict.reader for verdict in report.verdicts] == list(READERS)
    return {verdict.reader: (verdict.can_load, "; ".join(verdict.reasons)) for verdict in report.verdicts}


def who(folder: Path, **kwargs) -> set[str]:
    return {reader for reader, (can_load, _) in verdicts(folder, **kwargs).items() if can_load}


GOOD = {
    "native": {"dflash_hf", "transformers", "vllm", "dflash"},
    "serving": {"dflash_hf", "vllm", "sglang", "dflash"},
    "speculators": {"dflash_hf", "vllm", "speculators"},
    "muse": {"dflash_hf", "transformers", "vllm", "sglang"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_good_folder_of_every_layout_is_loaded_by_the_readers_it_was_written_for(layout, tmp_path):
    folder = save_in_layout(make_draft(make_target()), tmp_path / "tiny-DFlash", layout)
    assert check_checkpoint(folder).layout == layout
    assert who(folder) == GOOD[layout]
    assert check_checkpoint(folder).num_parameters == sum(value.numel() for value in network().values())


PRODUCER_READERS = {
    "z-lab, block size at the top": {"dflash_hf", "vllm", "sglang", "dflash"},
    "z-lab, all nested": {"dflash_hf", "vllm", "sglang", "dflash"},
    "SpecForge, with its old head": {"dflash_hf", "sglang", "dflash"},
    "NeMo Automodel": {"dflash_hf"},
    "TorchSpec": {"dflash_hf"},
    # full layers, and a key from which vLLM makes them causal
    "speculators": {"dflash_hf", "speculators"},
    "speculators, older": {"dflash_hf", "speculators"},
    "muse": {"dflash_hf", "transformers", "vllm", "sglang"},
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_the_folder_of_every_producer_is_judged(producer, target, tmp_path):
    folder = write_producer(tmp_path / "tiny-DFlash", producer, target)
    assert who(folder, target=target, **ARGUMENTS.get(producer, {})) == PRODUCER_READERS[producer]


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def drop_tensor(folder: Path) -> None:
    tensors = network()
    del tensors["norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# layout, options of the draft, damage, reader, whether it can load, words
BAD = {
    "native without its code": (
        "native",
        {},
        lambda folder: (folder / "modeling_dflash.py").unlink(),
        "transformers",
        "does not find configuration_dflash.py and modeling_dflash.py",
    ),
    "native for a server": ("native", {}, None, "sglang", "--layout serving"),
    "native without a value": (
        "native",
        {},
        lambda folder: change(folder, target_num_hidden_layers=None),
        "vllm",
        "target_num_hidden_layers is None",
    ),
    "serving without nested ids": (
        "serving",
        {},
        lambda folder: change(folder, dflash_config={"mask_token_id": 96}, target_layer_ids=[0, 2]),
        "vllm",
        "only from dflash_config",
    ),
    "serving with another activation": (
        "serving",
        {"hidden_act": "gelu"},
        None,
        "sglang",
        "hidden_act=gelu",
    ),
    "serving with a window that is dropped": (
        "serving",
        {**WINDOWS, "is_causal": False},
        lambda folder: change(folder, use_sliding_window=False),
        "dflash",
        "use_sliding_window",
    ),
    "serving with taps for a depth": (
        "serving",
        {},
        lambda folder: change(folder, num_target_layers=2),
        "sglang",
        "num_target_layers=2",
    ),
    "serving with another architecture": (
        "serving",
        {},
        lambda folder: change(folder, architectures=["Qwen3DFlashDraftModel"]),
        "vllm",
        "Qwen3DFlashDraftModel",
    ),
    "serving with a scaled embedding": ("serving", {"input_embedding_scale": 8.0}, None, "vllm", "factor, 8"),
    "speculators with two causalities": ("speculators", WINDOWS, None, "vllm", "one causality"),
    "speculators with its default causality": (
        "speculators",
        {},
        lambda folder: change(
            folder, sliding_window_non_causal=False, transformer_layer_config=inner_without_causality(folder)
        ),
        "vllm",
        "causal=True",
    ),
    "speculators for a server that does not read it": ("speculators", {}, None, "sglang", "--layout serving"),
    "muse for speculators": ("muse", {}, None, "speculators", "--layout speculators"),
    "muse with biases": (
        "muse",
        {},
        lambda folder: change(folder, attention_bias=True),
        "dflash_hf",
        "missing",
    ),
    "weights missing": ("serving", {}, drop_tensor, "dflash_hf", r"missing: norm.weight"),
    "other names": (
        "serving",
        {},
        lambda folder: save_file(
            {name.replace("hidden_norm", "context_norm"): value for name, value in network().items()},
            folder / "model.safetensors",
            {"format": "pt"},
        ),
        "sglang",
        "context_norm.weight",
    ),
}


def inner_without_causality(folder: Path) -> dict:
    inner = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    del inner["is_causal"]
    return inner


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_of_every_layout_is_explained(name, tmp_path):
    layout, options, damage, reader, words = BAD[name]
    draft = make_draft(make_target(), **{key: value for key, value in options.items() if "scale" not in key})
    if "input_embedding_scale" in options:
        draft.config.input_embedding_scale = options["input_embedding_scale"]
    folder = save_in_layout(draft, tmp_path / "tiny-DFlash", layout)
    if damage is not None:
        damage(folder)
    can_load, reasons = verdicts(folder)[reader]
    assert not can_load
    assert words in reasons


def test_a_wrong_target_and_another_method_are_explained(target, tmp_path):
    folder = save_in_layout(make_draft(target), tmp_path / "tiny-DFlash", "serving")
    make_target(hidden_size=48).save_pretrained(tmp_path / "other")
    can_load, reasons = verdicts(folder, target=str(tmp_path / "other"))["dflash_hf"]
    assert not can_load
    assert "width 32 against 48" in reasons
    other = write_checkpoint(tmp_path / "two", {**Z_LAB, "architectures": ["Gemma4DSparkModel"]}, network())
    assert who(other) == set()
    assert verdicts(other)["dflash_hf"][1].startswith(
        "'Gemma4DSparkModel' in config.json is a draft whose layers differ"
    )


def test_the_layer_ids_of_a_muse_folder_are_where_both_runners_of_vllm_look(tmp_path):
    folder = save_in_layout(make_draft(make_target()), tmp_path / "tiny-DFlash", "muse")
    assert "second model runner" not in verdicts(folder)["vllm"][1]
    change(folder, dflash_config=None)
    assert "second model runner" in verdicts(folder)["vllm"][1]


def test_conditions_are_said_of_readers_that_can_load(tmp_path):
    folder = save_in_layout(make_draft(make_target()), tmp_path / "my-draft", "serving", dtype=torch.float32)
    found = verdicts(folder)
    assert '"method": "dflash"' in found["vllm"][1]
    assert "at most 3" in found["vllm"][1]
    assert "on a CPU" in found["vllm"][1]
    assert "--dtype bfloat16" in found["sglang"][1]
    assert "dtype=" in found["dflash"][1]


def test_vllm_opens_a_native_folder_under_a_condition_beside_which_the_command_stands(tmp_path):
    folder = save_in_layout(make_draft(make_target()), tmp_path / "my-draft", "native")
    can_load, conditions = verdicts(folder)["vllm"]
    assert can_load
    assert conditions.startswith("needs this package in its environment (pip install --no-deps)")
    assert f"dflash-hf convert {folder} NEW-FOLDER --layout serving" in conditions
    native = save_in_layout(make_draft(make_target()), tmp_path / "native", "native")
    assert verdicts(native)["transformers"] == (True, "needs trust_remote_code=True")


@pytest.fixture
def run(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return run


def test_convert_and_check_from_the_shell(run, target, tmp_path):
    native = tmp_path / "native"
    make_draft(target).save_pretrained(native)
    code, out, _ = run("convert", native, tmp_path / "tiny-DFlash")
    assert code == 0
    assert "serving layout" in out
    code, out, _ = run("check", tmp_path / "tiny-DFlash")
    assert code == 0
    assert "layers [0, 2] of 4" in out
    assert "vLLM" in out
    code, out, _ = run("check", tmp_path / "nowhere")
    assert code == 1
    target.save_pretrained(tmp_path / "target")
    code, out, _ = run("check", tmp_path / "target")
    assert code == 1
    assert "This is no DFlash draft" in out


def test_convert_says_what_is_missing_and_takes_it_from_set(run, target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    source = write_producer(tmp_path / "torchspec", "TorchSpec", target)
    code, _, err = run("convert", source, tmp_path / "out", "--target", tmp_path / "target")
    assert code == 1
    assert "block_size is missing" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = run("convert", source, tmp_path / "out", "--target", tmp_path / "target", "--set", "block_size=4")
    assert code == 0
    assert "rename the folder" in out
    for wrong in (["--set", "blocks=4"], ["--set", "block_size"], ["--layout", "gguf"], ["--dtype", "int8"]):
        code, _, err = run("convert", source, tmp_path / "again", "--target", tmp_path / "target", *wrong)
        assert code == 1
        assert len([line for line in err.splitlines() if line.startswith("Error:")]) == 1
        assert not (tmp_path / "again").exists()


READ_BY = {
    "DFlash 2": ({"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3}, {
        "native": {"dflash_hf", "transformers"},
        "serving": {"dflash_hf", "vllm", "dflash"},
        "speculators": {"dflash_hf", "vllm", "speculators"},
    }),
    "DSpark": ({"sample_from_anchor": True, "markov_rank": 3, "enable_confidence_head": True}, {
        "native": {"dflash_hf", "transformers", "vllm"},
        "serving": {"dflash_hf", "vllm"},
        "speculators": {"dflash_hf", "vllm", "speculators"},
    }),
    "DSpark, gated": ({"sample_from_anchor": True, "markov_rank": 3, "markov_head_type": "gated"}, {
        "native": {"dflash_hf", "transformers"},
        "serving": {"dflash_hf"},
        "speculators": {"dflash_hf", "speculators"},
    }),
    "slots that start at the anchor": ({"sample_from_anchor": True}, {
        "native": {"dflash_hf", "transformers"},
        "serving": {"dflash_hf", "vllm"},
        "speculators": {"dflash_hf", "speculators"},
    }),
    "reduced vocabulary": ({"draft_vocab_size": 40}, {
        "native": {"dflash_hf", "transformers"},
        "serving": {"dflash_hf", "vllm"},
        "speculators": {"dflash_hf", "vllm", "speculators"},
    }),
    "mask vector": ({"learned_mask_embedding": True}, {
        "native": {"dflash_hf", "transformers"},
        "serving": {"dflash_hf", "vllm"},
    }),
    "both": ({"selector_rank": 3, "enable_confidence_head": True}, {"native": {"dflash_hf", "transformers"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ_BY)
def test_each_kind_is_read_by_those_who_have_its_parts(kind, tmp_path):
    fields, layouts = READ_BY[kind]
    target = make_target()
    for layout, readers in layouts.items():
        folder = save_in_layout(make_draft(target, **fields), tmp_path / f"{layout}-DFlash", layout)
        found = check_checkpoint(folder, target=target)
        assert {verdict.reader for verdict in found.verdicts if verdict.can_load} == readers, layout


def test_a_served_kind_names_its_method_and_its_runner(tmp_path):
    draft = make_draft(make_target(), sample_from_anchor=True, markov_rank=3)
    folder = save_in_layout(draft, tmp_path / "served", "serving")
    reasons = verdicts(folder)["vllm"][1]
    assert '"method": "dspark"' in reasons
    assert "second model runner" in reasons
    assert "num_speculative_tokens of at most 4" in reasons
