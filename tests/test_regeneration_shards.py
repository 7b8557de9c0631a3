from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import datasets
import pytest

from dflash_hf.regeneration import shards as shards_module
from dflash_hf.regeneration.shards import RowShards

SETTINGS = {"target": "me/mine", "sampling": {"temperature": 0.0}}


def row(name: str, **columns: object) -> dict[str, object]:
    messages = [{"role": "user", "content": name}, {"role": "assistant", "content": name.upper()}]
    return {"conversation_id": name, "messages": messages, "finish_reason": "stop", **columns}


def names_in(folder: Path) -> list[str]:
    return list(datasets.load_dataset(str(folder), split="train")["conversation_id"])


def fill(folder: Path, names: str, **arguments: object) -> None:
    with RowShards(folder, SETTINGS, **arguments) as shards:
        for name in names:
            shards.add(row(name))


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_rows_come_back_as_they_went_in_and_a_later_run_goes_on(tmp_path, file_format):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "integer"}}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    full = {
        "messages": [{"role": "user", "content": "naïve\n\u2028 text"}, call],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": True},
        "input_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "sampling": {"max_new_tokens": 9, "temperature": 0.7, "top_p": None, "top_k": None, "seed": 3},
        "target": "me/mine",
        "target_revision": "abc",
    }
    with RowShards(tmp_path, SETTINGS, file_format=file_format, rows_per_shard=2) as shards:
        shards.add(row("a"))
        shards.add(row("b", **full))
        shards.add(row("c"))
    fill(tmp_path, "d", file_format=file_format)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        f"train-0000{number}.{file_format}" for number in range(3)
    ]
    read = datasets.load_dataset(str(tmp_path), split="train")
    assert read["conversation_id"][:] == ["a", "b", "c", "d"]
    second = read[1]
    # Columnar storage fills missing keys of a message with None
    second["messages"] = [{key: value for key, value in m.items() if value is not None} for m in second["messages"]]
    call.pop("content")
    assert {name: second[name] for name in full} == full


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_shards_whose_rows_have_other_columns_filled_are_read_together(tmp_path, file_format):
    with RowShards(tmp_path, SETTINGS, file_format=file_format, rows_per_shard=1) as shards:
        shards.add(row("a"))
        shards.add(row("b", tools=[{"name": "f"}], input_ids=[1], loss_mask=[True]))
        shards.add(row("c", tools=[{"x": {"y": 1}}], chat_template_kwargs={"enable_thinking": False}))
    read = datasets.load_dataset(str(tmp_path), split="train")
    assert read["tools"][:] == [None, [{"name": "f"}], [{"x": {"y": 1}}]]
    assert read["input_ids"][:] == [None, [1], None]
    assert read["chat_template_kwargs"][:] == [None, None, {"enable_thinking": False}]
    card = (tmp_path / "README.md").read_text()
    assert "# Completions of me/mine" in card
    assert '"temperature": 0.0' in card


def test_a_row_is_safe_when_it_was_added_and_becomes_part_of_a_shard_later(tmp_path):
    with RowShards(tmp_path, SETTINGS) as shards:
        shards.add(row("a"))
        journal = (tmp_path / "newest.jsonl").read_text().splitlines()
        assert [json.loads(line)["conversation_id"] for line in journal] == ["a"]
        assert not list((tmp_path / "data").iterdir())
    assert names_in(tmp_path) == ["a"]
    assert not (tmp_path / "newest.jsonl").exists()


@pytest.mark.parametrize("half", ['{"conversation_id": "c", "mess', '{"conversation_id": "c"}', "{"])
def test_half_a_line_that_a_kill_left_is_dropped(tmp_path, half):
    fill(tmp_path, "a")
    (tmp_path / "newest.jsonl").write_text(json.dumps(row("b")) + "\n" + half)
    with RowShards(tmp_path, SETTINGS) as shards:
        assert shards.done_ids == {"a", "b"}
        shards.add(row("c"))
    assert names_in(tmp_path) == ["a", "b", "c"]


def test_a_kill_between_a_shard_and_the_end_of_its_journal_repeats_no_row(tmp_path):
    fill(tmp_path, "ab")
    (tmp_path / "newest.jsonl").write_text("".join(json.dumps(row(name)) + "\n" for name in "abc"))
    (tmp_path / "data" / ".train-00001.parquet.partial").write_bytes(b"PAR1 half a file")
    with RowShards(tmp_path, SETTINGS) as shards:
        assert shards.done_ids == {"a", "b", "c"}
    assert names_in(tmp_path) == ["a", "b", "c"]
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_an_interrupt_while_a_shard_is_written_neither_loses_nor_repeats_a_row(tmp_path, monkeypatch):
    written = shards_module.replace_file

    def interrupted_before(path, write):
        raise KeyboardInterrupt

    def interrupted_after(path, write):
        written(path, write)
        raise KeyboardInterrupt

    for number, interrupted in enumerate((interrupted_before, interrupted_after)):
        folder = tmp_path / str(number)
        fill(folder, "a")
        monkeypatch.setattr(shards_module, "replace_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(folder, "bc", rows_per_shard=2)
        monkeypatch.setattr(shards_module, "replace_file", written)
        fill(folder, "d")
        assert sorted(names_in(folder)) == ["a", "b", "c", "d"]


def test_a_second_run_on_one_folder_is_refused_and_the_first_goes_on(tmp_path):
    with RowShards(tmp_path, SETTINGS) as shards:
        shards.add(row("a"))
        with pytest.raises(RuntimeError, match="Another run is writing"), RowShards(tmp_path, SETTINGS):
            pass
        shards.add(row("b"))
    assert names_in(tmp_path) == ["a", "b"]


def test_a_folder_of_other_settings_is_refused_and_names_the_difference(tmp_path):
    fill(tmp_path, "a")
    other = {"target": "me/mine", "sampling": {"temperature": 1.0}}
    with pytest.raises(ValueError, match=r"sampling\.temperature was 0\.0 and is now 1\.0"):
        RowShards(tmp_path, other).__enter__()
    fill(tmp_path, "b")  # and the refusal released the folder
    assert names_in(tmp_path) == ["a", "b"]
    with RowShards(tmp_path / "empty", SETTINGS):
        pass
    with RowShards(tmp_path / "empty", other) as shards:  # no row is there yet
        shards.add(row("a"))
    assert json.loads((tmp_path / "empty" / "settings.json").read_text()) == other


def test_foreign_folders_files_and_damaged_shards_are_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "photo.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"has files \(photo\.png\) but no settings"):
        RowShards(tmp_path / "theirs", SETTINGS).__enter__()
    (tmp_path / "file.jsonl").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        RowShards(tmp_path / "file.jsonl", SETTINGS).__enter__()
    for file_format, content in (("parquet", b"PAR1 no more"), ("jsonl", b"{}\n"), ("jsonl", b"{\n")):
        folder = tmp_path / f"{file_format}{len(content)}"
        fill(folder, "a", file_format=file_format)
        (folder / "data" / f"train-00000.{file_format}").write_bytes(content)
        with pytest.raises(ValueError, match=r"train-00000.* is damaged .* Delete it"):
            RowShards(folder, SETTINGS).__enter__()
    fill(tmp_path / "settings", "a")
    (tmp_path / "settings" / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        RowShards(tmp_path / "settings", SETTINGS).__enter__()


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'csv' is not known"):
        RowShards(tmp_path, SETTINGS, file_format="csv")
    with pytest.raises(ValueError, match="rows_per_shard=0"):
        RowShards(tmp_path, SETTINGS, rows_per_shard=0)


def test_failures_have_a_file_of_their_own_which_each_run_begins_anew(tmp_path):
    with RowShards(tmp_path, SETTINGS) as shards:
        shards.add(row("a"))
        shards.add_failure({"conversation_id": "b", "reason": "too long"})
    assert json.loads((tmp_path / "failed.jsonl").read_text()) == {"conversation_id": "b", "reason": "too long"}
    assert names_in(tmp_path) == ["a"]
    fill(tmp_path, "b")
    assert not (tmp_path / "failed.jsonl").exists()


FULL_DISK = """
import resource, signal, sys
from dflash_hf.regeneration.shards import RowShards
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (100, 3000):  # of the second row, nothing or a part fits
    try:
        with RowShards(f"{sys.argv[1]}/{limit}", {}) as shards:
            shards.add({"conversation_id": "a", "messages": [], "finish_reason": "stop"})
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            shards.add({"conversation_id": "b" * 5000, "messages": [], "finish_reason": "stop"})
    except OSError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.spawns
def test_a_full_disk_ends_in_one_error_and_leaves_no_part_of_a_row(tmp_path):
    """A limit on the size of files stands for the disk."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    for folder, line in ((tmp_path / "100", first), (tmp_path / "3000", second)):
        assert f"could not be written into {folder}" in line or f"{folder}/data" in line
        assert "File too large" in line
        assert (folder / "newest.jsonl").read_text().count("\n") == 1
        with RowShards(folder, {}) as shards:
            assert shards.done_ids == {"a"}
        assert names_in(folder) == ["a"]


KILLED = """
import os, signal, sys
from dflash_hf.regeneration.shards import RowShards

moment = int(sys.argv[2])
for name in ("write", "ftruncate", "fsync"):
    def dying(*args, real=getattr(os, name)):
        global moment
        moment -= 1
        if moment == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(os, name, dying)
with RowShards(sys.argv[1], {}, rows_per_shard=2) as shards:
    for name in "abcde":
        if name not in shards.done_ids:
            shards.add({"conversation_id": name, "messages": [], "finish_reason": "stop"})
"""


@pytest.mark.spawns
def test_a_kill_at_any_moment_neither_loses_nor_repeats_a_row(tmp_path):
    """One process after another on the same folder, killed before its first, second, … touch of a file."""
    script = textwrap.dedent(KILLED)
    runner = (
        "import os, signal, sys\n"
        "import dflash_hf.regeneration.shards\n"  # imported once; each run is a fork
        f"script = {script!r}\n"
        "for moment in range(1, 40):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        f"        sys.argv[1:] = [{str(tmp_path)!r}, str(moment)]\n"
        "        exec(script)\n"
        "        os._exit(0)\n"
        "    status = os.waitpid(child, 0)[1]\n"
        "    if status != signal.SIGKILL:\n"
        "        print(moment)\n"
        "        sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", runner], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5  # several of the runs were killed, and the last one was not
    assert sorted(names_in(tmp_path)) == list("abcde")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "README.md", "data", "settings.json"]
