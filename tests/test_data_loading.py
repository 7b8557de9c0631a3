from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import sys
from pathlib import Path

import datasets
import pytest
from conftest import error_line

from dflash_hf.data.loading import load_rows

LINES = '{"prompt": "2+2?é", "completion": "4"}\n'.encode()


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


def write_bytes(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.ndjson", LINES),
        ("rows.jsonl.gz", gzip.compress(LINES)),
        ("ROWS.JSONL.GZ", gzip.compress(LINES)),
        ("rows.jsonl.bz2", bz2.compress(LINES)),
        ("rows.jsonl.xz", lzma.compress(LINES)),
        ("rows.json.gz", gzip.compress(b"[" + LINES.strip() + b"]")),
        ("rows.jsonl", b"\xef\xbb\xbf" + LINES),
        ("rows.csv", "prompt,completion\n2+2?é,4\n".encode()),
        ("rows.csv.gz", gzip.compress("prompt,completion\n2+2?é,4\n".encode("utf-8-sig"))),
        ("rows.tsv", "prompt\tcompletion\n2+2?é\t4\n".encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # archives hold the time
)
def test_a_local_file_is_read_and_never_looked_up_on_the_hub(tmp_path, monkeypatch, name, content):
    """A compressed file was taken for the name of a data set on the Hub."""
    path = write_bytes(tmp_path / name, content)
    assert list(load_rows(path, None, "train")) == [{"prompt": "2+2?é", "completion": "4"}]
    monkeypatch.chdir(tmp_path)
    assert len(load_rows(name, None, "train")) == 1
    Path(name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{re.escape(name)} does not exist"):
        load_rows(name, None, "train")


def test_other_kinds_of_files_and_folders_are_read(tmp_path):
    write_bytes(tmp_path / "rows.txt", b"one\ntwo\n")
    assert load_rows(str(tmp_path / "rows.txt"), None, "train")["text"] == ["one", "two"]
    rows = datasets.Dataset.from_list([{"prompt": "2+2?"}])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    arrow = next((tmp_path / "disk").glob("*.arrow"))
    for path in (tmp_path / "rows.parquet", tmp_path / "disk", tmp_path / "splits", arrow):
        assert list(load_rows(str(path), None, "train")) == [{"prompt": "2+2?"}]
    with pytest.raises(ValueError, match="has the splits train, and not 'test'"):
        load_rows(str(tmp_path / "splits"), None, "test")
    for name in ("a", "b"):
        (tmp_path / "compressed").mkdir(exist_ok=True)
        write_bytes(tmp_path / "compressed" / f"{name}.jsonl.gz", gzip.compress(LINES))
    assert len(load_rows(str(tmp_path / "compressed"), None, "train")) == 2


def test_values_of_a_csv_file_stay_texts(tmp_path):
    """pandas makes 7 of 007 and nothing of "None", which are answers like any other."""
    path = write_bytes(tmp_path / "rows.csv", b"prompt,completion,sample_id\n1,007,3\nx,None,4\n,NA,5\n")
    assert list(load_rows(path, None, "train")) == [
        {"prompt": "1", "completion": "007", "sample_id": 3},
        {"prompt": "x", "completion": "None", "sample_id": 4},
        {"prompt": "", "completion": "NA", "sample_id": 5},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"rows{suffix}", LINES.decode().encode("utf-16")) for suffix in (".jsonl", ".csv", ".tsv", ".txt")),
        ("rows.txt", b"a\n".decode().encode("utf-16-le")),
        *((f"rows{suffix}", LINES.decode().encode("latin-1")) for suffix in (".jsonl", ".json", ".csv", ".txt")),
        ("rows.jsonl.gz", gzip.compress(LINES.decode().encode("latin-1"))),
        ("rows.jsonl.gz", gzip.compress(LINES)[:-12]),
        ("rows.jsonl.gz", LINES),
        ("rows.jsonl.xz", lzma.compress(LINES)[:-12]),
        ("rows.jsonl.bz2", LINES),
        ("rows.parquet", LINES),
        ("rows.arrow", LINES),
        ("rows.docx", LINES),
        ("rows", LINES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # archives hold the time
)
def test_a_file_that_cannot_be_read_is_one_line_with_its_name_and_what_is_read(tmp_path, name, content):
    path = write_bytes(tmp_path / name, content)
    with pytest.raises(ValueError, match=f"^The (data )?file {re.escape(path)} .*\\.ndjson, .*\\.gz") as error:
        load_rows(path, None, "train")
    assert "\n" not in str(error.value)


def test_a_file_of_a_folder_in_another_encoding_is_named(tmp_path):
    write_bytes(tmp_path / "a.jsonl", LINES)
    write_bytes(tmp_path / "b.jsonl", LINES.decode().encode("latin-1"))
    with pytest.raises(ValueError, match=r"b\.jsonl cannot be read: .*must be in UTF-8"):
        load_rows(str(tmp_path), None, "train")


def test_files_of_another_kind_are_not_left_out_in_silence(tmp_path):
    write_bytes(tmp_path / "a.jsonl", LINES)
    write_bytes(tmp_path / "b.csv", b"prompt,completion\n1,2\n")
    with pytest.raises(ValueError, match=r"belong to no split: b\.csv.*of one kind"):
        load_rows(str(tmp_path), None, "train")


def test_half_a_surrogate_pair_in_a_file_becomes_a_replacement_character(tmp_path):
    path = write_bytes(tmp_path / "rows.jsonl", b'{"prompt": "a\\ud83d"}\n{"prompt": "\\ud83d\\ude00"}\n')
    assert load_rows(path, None, "train")["prompt"] == ["a\ufffd", "\U0001f600"]


HALF = b'{"prompt": "a\\ud83d", "x": "\\\\ud83d"}'  # the second text has a backslash and no surrogate


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", b"[" + HALF + b', {"prompt": "b"}]'),
        ("rows.json", HALF.replace(b",", b",\n") + b'\n{"prompt": "b"}'),
        ("rows.jsonl.gz", gzip.compress(HALF + b'\n{"prompt": "b", "x": null}\n')),
        ("folder/one.jsonl", HALF + b'\n{"prompt": "b"}\n'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_half_a_surrogate_pair_is_mended_in_every_file_of_json(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    file = Path(write_bytes(tmp_path / name, content))
    rows = load_rows(str(file.parent if "/" in name else file), None, "train")
    assert (rows["prompt"][:], rows[0]["x"]) == (["a\ufffd", "b"], r"\ud83d")


def test_a_folder_whose_name_is_not_in_utf_8_is_named(tmp_path):
    folder = tmp_path / b"rows\xff".decode(errors="surrogateescape")
    folder.mkdir()
    write_bytes(folder / "a.jsonl", b'{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"The rows of .*rows.* cannot be read: .*surrogates not allowed"):
        load_rows(str(folder), None, "train")


def test_a_file_with_a_compression_that_is_not_installed_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = write_bytes(tmp_path / "rows.jsonl.zst", b"\x28\xb5\x2f\xfd")
    with pytest.raises(ValueError, match=r"rows\.jsonl\.zst .*zstandard"):
        load_rows(path, None, "train")


def test_a_command_names_the_file_that_it_cannot_read(tmp_path, run, saved_target):
    path = write_bytes(tmp_path / "rows.jsonl", LINES.decode().encode("utf-16"))
    code, _, err = run("prepare", "--target", saved_target(), "--dataset", path, "--out", tmp_path / "out")
    assert code == 1
    assert f"{path} cannot be read as json" in error_line(err)
