"""Damaged and malicious checkpoints end in one clear error each. No code runs and nothing is written."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target
from foreign_checkpoints import ARGUMENTS, PRODUCERS
from safetensors.torch import load_file, save_file

from dflash_hf import DFlashConfig, DFlashDraftModel, UntiedDraftError, convert_checkpoint
from dflash_hf.checkpoints.compatibility import check_checkpoint


class Bomb:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (os.path.join(os.environ["BOMB_FOLDER"], "exploded"),)


def header_of(size: int, text: bytes = b"{}") -> bytes:
    return struct.pack("<Q", size) + text


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def change_tensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def write_index(weight_map: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def change_config(**values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return damage


def loop(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return damage


def replace(name: str, content: bytes | None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)

    return damage


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def set_values(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (truncate, "damaged"),
    "no header": (replace("model.safetensors", b""), "damaged"),
    "header larger than the file": (replace("model.safetensors", header_of(10**6)), "damaged"),
    "header of exabytes": (replace("model.safetensors", header_of(2**63)), "damaged"),
    "header that is no JSON": (replace("model.safetensors", header_of(4, b"\xff\xfe{}")), "damaged"),
    "pickle named safetensors": (lambda folder: replace("model.safetensors", pickle.dumps(Bomb()))(folder), "damaged"),
    "pickle alone": (only_a_pickle, r"holds no model\.safetensors"),
    "folder named safetensors": (replace("model.safetensors", None), r"model\.safetensors"),
    "weights that are a loop": (loop("model.safetensors"), r"model\.safetensors"),
    "tensor of another shape": (
        change_tensor(lambda t: t.update({"fc.weight": torch.ones(32, 96)})),
        r"fc\.weight \[32, 96\] instead of \[32, 64\]",
    ),
    "tensor missing": (change_tensor(lambda t: t.pop("norm.weight")), r"missing: norm\.weight"),
    "tensor unknown": (change_tensor(lambda t: t.update({"extra": torch.ones(1)})), "unknown: extra"),
    "NaN": (change_tensor(set_values("layers.1.mlp.up_proj.weight", float("nan"))), r"not finite: layers\.1\.mlp"),
    "infinity": (change_tensor(set_values("fc.weight", float("inf"))), r"not finite: fc\.weight"),
    "index that leaves the folder": (write_index({"fc.weight": "../outside.safetensors"}), "of the same folder"),
    "index with an absolute path": (write_index({"fc.weight": "/etc/passwd"}), "of the same folder"),
    "index that is a list": (write_index(["model.safetensors"]), "weight_map"),
    "index of numbers": (write_index({"fc.weight": 3}), "weight_map"),
    "index of nothing": (write_index({}), "weight_map"),
    "index of a file that is not there": (write_index({"fc.weight": "model-1.safetensors"}), "model-1"),
    "configuration missing": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    "configuration empty": (replace("config.json", b""), "not valid JSON"),
    "configuration of bytes": (replace("config.json", b"\xff\xfe\x00"), "not valid JSON"),
    "configuration nested without end": (replace("config.json", b"[" * 10**5), "not valid JSON"),
    "configuration that is a list": (replace("config.json", b"[]"), "JSON object"),
    "configuration that is an empty object": (replace("config.json", b"{}"), "no DFlash draft"),
    "configuration that is a folder": (replace("config.json", None), r"config\.json"),
    "configuration that is a loop": (loop("config.json"), r"config\.json"),
    "negative size": (change_config(hidden_size=-1), "hidden_size=-1"),
    "size as text": (change_config(hidden_size="32"), "hidden_size='32'"),
    "size beyond memory": (change_config(intermediate_size=10**15), "at most 67108864"),
    "layers beyond memory": (change_config(num_hidden_layers=10**12), "from 1 to 1024"),
    "layer ids as text": (change_config(target_layer_ids="02"), "target_layer_ids='02'"),
    "layer ids out of range": (change_config(target_layer_ids=[0, 9]), "target_layer_ids"),
    "rope that is a list": (change_config(rope_parameters=[1]), r"rope_parameters=\[1\]"),
    "rope of text": (change_config(rope_parameters={"rope_theta": "big"}), "rope_theta"),
    "dflash_config that is a list": (change_config(dflash_config=[1]), r"dflash_config=\[1\]"),
    "architectures of numbers": (change_config(architectures=[7]), r"architectures=\[7\]"),
    "norm constant that is no number": (change_config(rms_norm_eps=float("nan")), "rms_norm_eps=nan must be"),
    "norm constant of zero": (change_config(rms_norm_eps=0.0), "rms_norm_eps=0.0 must be"),
    "dropout above one": (change_config(attention_dropout=2.0), "attention_dropout=2.0 must be"),
    "unknown activation": (change_config(hidden_act="nope"), "hidden_act='nope'"),
    "rotary base that is infinite": (
        change_config(rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
        "rope_theta=inf must be",
    ),
    "rotary base that is no number, twice": (
        change_config(rope_theta=float("nan"), rope_parameters={"rope_type": "default", "rope_theta": float("nan")}),
        "rope_theta=nan must be",
    ),
    "rotary factor missing": (
        change_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "rope_parameters has no 'factor'",
    ),
    "a hundred thousand layer ids": (change_config(target_layer_ids=list(range(10**5))), "target_layer_ids="),
    "a hundred thousand layer types": (change_config(layer_types=["full_attention"] * 10**5), "layer_types="),
    "a block of a thousand million slots": (change_config(block_size=10**9), "block_size=1000000000 must be at most"),
    "a block of one slot": (change_config(block_size=1), "block_size=1 must be at least 2"),
    "a boolean as a number": (change_config(num_key_value_heads=True), "num_key_value_heads=True must be int"),
    "a number as text": (change_config(mask_token_id="96"), "mask_token_id='96' must be int"),
    "odd head size": (change_config(head_dim=7), "head_dim=7 must be even"),
    "heads that do not divide": (change_config(num_key_value_heads=3), "must be a multiple"),
    "dtype that does not exist": (change_config(dtype="nope"), "dtype='nope'"),
    "value named like a method": (change_config(layer_window=3), "'layer_window' is a value"),
    "checksum that is no checksum": (
        change_config(target_tensor_checksums={"lm_head.weight": 7}),
        "target_tensor_checksums",
    ),
}


@pytest.fixture
def damaged(tmp_path, monkeypatch) -> Callable[[str], Path]:
    monkeypatch.setenv("BOMB_FOLDER", str(tmp_path))

    def make(name: str) -> Path:
        folder = tmp_path / "draft"
        make_draft(make_target()).save_pretrained(folder)
        DAMAGES[name][0](folder)
        return folder

    return make


@pytest.mark.parametrize("name", DAMAGES)
def test_a_harmful_checkpoint_is_one_clear_error_and_leaves_nothing_behind(damaged, name, tmp_path):
    folder = damaged(name)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for attempt in (
        lambda: DFlashDraftModel.from_pretrained(folder, target=make_target()),
        lambda: convert_checkpoint(folder, tmp_path / "out", "serving"),
    ):
        with pytest.raises((OSError, ValueError), match=DAMAGES[name][1]) as error:
            attempt()
        assert len(str(error.value).replace(str(tmp_path), "")) < 500
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", DAMAGES)
def test_check_gives_one_short_reason_for_a_harmful_checkpoint(damaged, name):
    folder = damaged(name)
    verdicts = check_checkpoint(folder).verdicts
    (reason,) = verdicts[0].reasons
    assert re.search(DAMAGES[name][1], reason)
    assert len(reason.replace(str(folder.parent), "")) < 500
    assert not verdicts[0].can_load


def test_check_prints_the_field_that_is_wrong(damaged, run):
    code, stdout, _ = run("check", damaged("norm constant that is no number"))
    assert code == 1
    assert "rms_norm_eps=nan" in stdout


JUNK = (None, 0, -1, 2**70, 3.5, "x", [], [None], {"a": 1}, True, float("nan"), {"full_attention": 3})


@pytest.mark.parametrize("producer", ["z-lab, all nested", "TorchSpec", "speculators", "muse"])
def test_whatever_stands_in_a_configuration_the_error_is_a_value_error(producer):
    config = PRODUCERS[producer][0]
    places = [(name,) for name in config]
    places += [(name, inner) for name, value in config.items() if isinstance(value, dict) for inner in value]
    refused = 0
    for *outer, last in places:
        for junk in JUNK:
            changed = copy.deepcopy(config)
            inner = changed
            for name in outer:
                inner = inner[name]
            inner[last] = junk
            try:
                DFlashConfig.from_dict(changed, **ARGUMENTS.get(producer, {}))
            except ValueError:
                refused += 1
    assert refused > 2 * len(places)


def test_a_file_given_as_a_checkpoint_is_an_error_that_says_folder(tmp_path):
    (tmp_path / "draft.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="is not a folder"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft.safetensors")


def test_a_configuration_that_names_a_missing_target_loads_and_says_what_to_pass(draft, tmp_path):
    draft.config.target_name_or_path = str(tmp_path / "gone")
    draft.save_pretrained(tmp_path / "draft")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    with pytest.raises(UntiedDraftError, match=r"gone.*target="):
        loaded.compute_logits(torch.ones(1, 32))


def test_sharded_weights_are_read_and_a_tensor_in_two_shards_is_refused(draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    shards = sorted((tmp_path / "draft").glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    tensors = load_file(shards[0])
    save_file({**tensors, **load_file(shards[1])}, shards[0], {"format": "pt"})
    with pytest.raises(OSError, match=r"is in .* and in"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft")


def test_a_failed_save_leaves_no_half_written_folder(draft, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("dflash_hf.checkpoints.io.save_file", fail)
    draft.save_pretrained(tmp_path / "draft")
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(tmp_path / "draft", tmp_path / "out", "serving")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_destination_with_files_is_not_touched(draft, tmp_path):
    draft.save_pretrained(tmp_path / "draft")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match="not an empty folder"):
        convert_checkpoint(tmp_path / "draft", tmp_path / "out", "serving")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_float16_is_warned_about(draft, tmp_path, caplog):
    """The activations of a float16 draft may overflow, and then no token is accepted."""
    draft.save_pretrained(tmp_path / "draft")
    logger = logging.getLogger("dflash_hf.model.modeling_dflash")
    logger.addHandler(caplog.handler)
    try:
        DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
        assert "float16" not in caplog.text
        DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float16)
    finally:
        logger.removeHandler(caplog.handler)
    assert "float16, in which the activations" in caplog.text
