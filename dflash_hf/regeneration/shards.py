"""A folder of rows that grows over many runs: whole shards, a journal of the newest rows, one writer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets import Json, List, Value
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData

from ..files import (
    JOURNAL,
    SETTINGS,
    Journal,
    lock_folder,
    read_journal,
    read_settings,
    refuse_foreign_files,
    refuse_other_settings,
    remove_partial_files,
    replace_file,
    write_text,
)
from ..provenance import target_label
from .defaults import FORMATS, ROWS_PER_SHARD

ROW_FEATURES = datasets.Features(
    {
        "conversation_id": Value("string"),
        "messages": List(
            {
                "role": Value("string"),
                "content": Value("string"),
                "reasoning_content": Value("string"),
                "tool_calls": Json(),
            }
        ),
        "tools": Json(),
        "chat_template_kwargs": Json(),
        "input_ids": List(Value("int64")),
        "loss_mask": List(Value("bool")),
        "finish_reason": Value("string"),
        "target": Value("string"),
        "target_revision": Value("string"),
        "sampling": {
            "max_new_tokens": Value("int64"),
            "temperature": Value("float64"),
            "top_p": Value("float64"),
            "top_k": Value("int64"),
            "seed": Value("int64"),
        },
    }
)
CARD, FAILED = "README.md", "failed.jsonl"
_CARD_TEXT = """
# Answers of {target}

One row a conversation, made by `dflash-hf regenerate`: the assistant's messages are the target's own.

| Column | What |
|---|---|
| `messages`, `tools`, `chat_template_kwargs` | the conversation, as the chat template gets it |
| `input_ids` | the whole conversation as the target read and wrote it (null: a server did not tell) |
| `loss_mask` | true at the tokens that the target wrote |
| `finish_reason` | of the last answer: `stop`, or `length` if it was cut |
| `target`, `target_revision`, `sampling` | who answered, and how |
| `conversation_id` | a digest of the prompt |

Settings:

```json
{settings}
```
"""


class RowShards:
    """
    The rows of a folder, written so that a kill at any moment loses none and repeats none.

    A row is one line of the journal as soon as [`add`] returns. `rows_per_shard` of them become a shard of
    `data/train-*`, which is renamed into its place when it is complete. Whoever opens the folder next drops the half
    line that a kill can leave, and goes on. `datasets.load_dataset(folder)` reads the shards.

    Args:
        folder (`str` or `Path`):
            Made if it is not there.
        settings (`Mapping`):
            What all rows of the folder have in common (JSON values). A folder of other settings is refused.
        file_format (`str`, defaults to `"parquet"`):
            Of the shards: `"parquet"` or `"jsonl"`.
        rows_per_shard (`int`, defaults to 1000):
            Rows of a shard; the last one of a run has fewer.

    Raises (when entered):
        ValueError: the folder has other settings, other files, or a damaged shard.
        RuntimeError: another process is writing there.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: Mapping[str, Any],
        *,
        file_format: str = FORMATS[0],
        rows_per_shard: int = ROWS_PER_SHARD,
    ) -> None:
        if file_format not in FORMATS:
            raise ValueError(f"The format {file_format!r} is not known. Take one of {', '.join(FORMATS)}.")
        if rows_per_shard < 1:
            raise ValueError(f"rows_per_shard={rows_per_shard} must be at least 1.")
        self.folder, self.settings = Path(folder), dict(settings)
        self.file_format, self.rows_per_shard = file_format, rows_per_shard
        self.done_ids: set[str] = set()
        self._newest: list[dict[str, Any]] = []

    @property
    def num_rows(self) -> int:
        """Rows in the folder, those of earlier runs included."""
        return len(self.done_ids)

    def __enter__(self) -> RowShards:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file. Rows are written as shards: name a folder.")
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        if read_settings(self.folder) is None:
            for folder in (self.folder, self.folder / "data"):
                refuse_foreign_files(folder, known=("data", CARD, JOURNAL))
        self._lock = lock_folder(self.folder)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            self._read_shards()
            self._journal = Journal(self.folder / JOURNAL)
            undo.callback(self._journal.close)
            self._read_journal()
            self._check_settings()
            self._failures = Journal(self.folder / FAILED)
            self._failures.clear()  # requests that failed in the last run are made again
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left as a last shard, also after an interrupt."""
        try:
            self._write_shard()
        finally:
            self._journal.close()
            self._failures.close()
            self._lock.release()

    def add(self, row: Mapping[str, Any]) -> None:
        """
        Keep a row: it is safe from a kill when this returns.

        Args:
            row (`Mapping`): the columns of `ROW_FEATURES`; those left out are null.

        Raises:
            OSError: it cannot be written, for instance because the disk is full. No part of it stays.
        """
        whole = _whole_row(row)
        self._journal.append(whole)
        self._newest.append(whole)
        self.done_ids.add(whole["conversation_id"])
        if len(self._newest) >= self.rows_per_shard:
            self._write_shard()

    def add_failure(self, row: Mapping[str, Any]) -> None:
        """Write a line into the file of failures, which each run begins anew."""
        self._failures.append(row)

    def _check_settings(self) -> None:
        """Refuse other settings; a folder without rows takes any."""
        text = json.dumps(self.settings, indent=1)
        earlier, wanted = read_settings(self.folder), json.loads(text)
        if earlier == wanted:
            return
        if self.done_ids:
            refuse_other_settings(self.folder, earlier or {}, wanted)
        write_text(self.folder / CARD, _card(self.settings))
        write_text(self.folder / SETTINGS, text + "\n")

    def _shards(self) -> list[Path]:
        return sorted(path for path in (self.folder / "data").glob("train-*") if path.suffix[1:] in FORMATS)

    def _read_shards(self) -> None:
        for folder in (self.folder, self.folder / "data"):
            remove_partial_files(folder)
        for path in self._shards():
            try:
                if path.suffix == ".parquet":
                    column = pyarrow.parquet.read_table(path, columns=["conversation_id"])["conversation_id"]
                    self.done_ids.update(column.to_pylist())
                else:
                    with path.open(encoding="utf-8") as lines:
                        self.done_ids.update(json.loads(line)["conversation_id"] for line in lines)
            except (pyarrow.ArrowException, ValueError, KeyError) as error:
                raise ValueError(
                    f"The shard {path} is damaged ({error}). Delete it; its rows are made anew."
                ) from error

    def _read_journal(self) -> None:
        """Take over the rows that no shard has, and cut off half a line."""
        for row in read_journal(self._journal.path, _whole_row):
            if row["conversation_id"] not in self.done_ids:  # the kill came between the shard and the journal's end
                self.done_ids.add(row["conversation_id"])
                self._newest.append(row)
        if not self._newest:
            self._journal.clear()

    def _write_shard(self) -> None:
        if not self._newest:
            return
        rows, self._newest = self._newest, []  # an interrupt from here on leaves them to the journal alone
        number = 1 + max((int(path.stem.rsplit("-", 1)[1]) for path in self._shards()), default=-1)
        path = self.folder / "data" / f"train-{number:05d}.{self.file_format}"
        dataset = datasets.Dataset.from_list(rows, features=ROW_FEATURES)
        write = dataset.to_parquet if self.file_format == "parquet" else dataset.to_json
        with _quiet_datasets():
            replace_file(path, lambda temporary: write(str(temporary)))
        self._journal.clear()


def _card(settings: Mapping[str, Any]) -> str:
    """A data set card. It declares the columns: JSON files whose first rows have no tools are read like the others."""
    head = DatasetCardData()
    DatasetInfosDict({"default": datasets.DatasetInfo(features=ROW_FEATURES)}).to_dataset_card_data(head)
    shown = {**settings, "target": target_label(settings.get("target"))}
    return f"---\n{head.to_yaml()}\n---\n" + _CARD_TEXT.format(
        target=shown["target"], settings=json.dumps(shown, indent=1)
    )


def _whole_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ROW_FEATURES}


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bars of `datasets`, which would break the live line."""
    was_quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            datasets.enable_progress_bars()
