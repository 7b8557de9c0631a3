from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_hf.data.loading import load_rows


def write(path: Path, *values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"value": value}) + "\n" for value in values))
    return path


def test_all_files_of_a_folder_are_read(tmp_path):
    write(tmp_path / "maths.jsonl", 1, 2)
    write(tmp_path / "code.jsonl", 3)
    (tmp_path / "notes.txt").write_text("not rows")
    assert sorted(load_rows(str(tmp_path), None, "train")["value"]) == [1, 2, 3]


def test_files_named_after_splits_stay_apart(tmp_path):
    write(tmp_path / "train.jsonl", 1)
    write(tmp_path / "test.jsonl", 2)
    assert load_rows(str(tmp_path), None, "train")["value"] == [1]
    assert load_rows(str(tmp_path), None, "test")["value"] == [2]


def test_a_file_that_belongs_to_no_split_is_not_left_out_in_silence(tmp_path):
    write(tmp_path / "gsm8k-train.jsonl", 1)
    write(tmp_path / "code.jsonl", 2)
    with pytest.raises(ValueError, match=r"belong to no split: code\.jsonl.*train: gsm8k-train\.jsonl"):
        load_rows(str(tmp_path), None, "train")


def test_completions_that_are_in_no_shard_yet_are_an_error(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    write(tmp_path / "newest.jsonl", 3)
    (tmp_path / "failed.jsonl").touch()
    write(tmp_path / "data" / "train-00000.jsonl", 1, 2)
    with pytest.raises(ValueError, match=r"in newest\.jsonl that are in no shard yet.*Run it again"):
        load_rows(str(tmp_path), None, "train")
    assert load_rows(str(tmp_path / "data"), None, "train")["value"] == [1, 2]


@pytest.mark.parametrize("name", ["broken.jsonl", "."])
def test_a_file_that_cannot_be_parsed_is_named_alone_or_with_its_folder(tmp_path, name):
    (tmp_path / "broken.jsonl").write_text('{"value": 1}\n{"value": \n')
    with pytest.raises(ValueError, match=r"cannot be read.*: "):
        load_rows(str(tmp_path / name), None, "train")
