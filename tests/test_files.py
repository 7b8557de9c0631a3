from __future__ import annotations

import hashlib
import json

import pytest

from dflash_hf.files import (
    Journal,
    differences,
    digest,
    digest_number,
    json_digest,
    read_journal,
    replace_file,
    replace_folder,
)


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")

    def interrupted(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, interrupted)
    assert path.read_text() == "old"
    replace_file(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"missing/results\.json could not be written: No such file"):
        replace_file(tmp_path / "missing" / "results.json", lambda temporary: temporary.write_text("new"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_replaced_folder_is_the_old_one_or_the_new_one(tmp_path, exists):
    folder = tmp_path / "parent" / "rows"
    if exists:
        folder.mkdir(parents=True)
        (folder / "old").write_text("old")

    def fill(fails):
        with replace_folder(folder) as new:
            (new / "new").write_text("new")
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(fails=True)
    assert [path.name for path in folder.glob("*")] == (["old"] if exists else [])
    fill(fails=False)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["rows"]


def test_a_journal_drops_an_incomplete_line_and_names_a_damaged_one(tmp_path):
    path = tmp_path / "newest.jsonl"
    path.write_text('{"a": 1}\n{"a": "naïve\\u2028"}\n{"a": 3')
    assert read_journal(path, lambda entry: entry["a"]) == [1, "naïve\u2028"]  # while another process may be writing
    journal = Journal(path)
    journal.append({"a": 4})
    assert read_journal(path, lambda entry: entry["a"]) == [1, "naïve\u2028", 4]
    journal.append([])
    with pytest.raises(ValueError, match=r"newest\.jsonl, line 4 is damaged \(it is not a JSON object\)"):
        read_journal(path, dict)
    journal.clear()
    journal.close()
    assert not path.exists()


def test_differences_name_nested_settings_and_missing_ones_equal_none():
    before = {"seed": 0, "tools": None, "loss": {"decay": 4, "weights": "decay"}, "old": 1}
    now = {"seed": 1, "loss": {"decay": 4, "weights": "dpace"}, "new": [2]}
    assert differences(before, now) == [
        ("seed", 0, 1),
        ("loss.weights", "decay", "dpace"),
        ("old", 1, None),
        ("new", None, [2]),
    ]
    assert differences(before, json.loads(json.dumps(before))) == []


def test_digests_are_those_that_folders_of_version_0_1_0_contain():
    value = {"b": ["naïve", None], "a": 1}
    for ensure_ascii in (True, False):
        text = json.dumps(value, sort_keys=True, ensure_ascii=ensure_ascii)
        assert json_digest(value, 16, ensure_ascii=ensure_ascii) == digest(text, 16)
    expected = hashlib.blake2b(b"0 1 abc", digest_size=4).digest()
    assert digest("0 1 abc", 4) == digest(b"0 1 abc", 4) == expected.hex() == "4a63dc8f"
    assert digest_number("0 1 abc", 4) == int.from_bytes(expected, "big")
    assert len(digest("a lone surrogate \ud800")) == 16


@pytest.mark.parametrize("brackets", ["[", '{"a":'], ids=["lists", "objects"])
def test_a_journal_line_that_is_nested_too_deeply_is_named_as_damaged(tmp_path, brackets):
    path = tmp_path / "newest.jsonl"
    path.write_text('{"a": 1}\n' + brackets * 100_000 + "\n")
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_journal(path, dict)
