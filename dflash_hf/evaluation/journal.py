"""The journal of an evaluation, which survives an interruption at any moment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock

from ..files import (
    SETTINGS,
    Journal,
    lock_folder,
    read_journal,
    read_settings,
    refuse_foreign_files,
    refuse_other_settings,
    remove_partial_files,
    without_lone_surrogates,
    write_text,
)
from .response_pairs import ResponsePair

JOURNALS = "answers-*.jsonl"  # one file for each process


class SuiteJournal:
    """
    Record response pairs in a folder, so that a killed evaluation can be resumed without losing a completed pair.

    Every process writes a file of its own with one line per pair. A later run reads all files, whatever its number of
    processes, and drops an incomplete last line.

    Args:
        folder (`str` or `Path`): folder of the evaluation, which is created if it does not exist.
        settings (`Mapping`): JSON values that all pairs of the folder share. A folder with other settings is refused.
        process_index (`int`, defaults to 0): index of this process. The first process locks the folder.

    Attributes:
        pairs (`dict`): recorded pairs by [`ResponsePair.key`].
        runs (`list[dict]`): hardware, software and number of processes of each run.

    Raises (when the context is entered):
        ValueError: the folder has other settings or other files, or its journal is damaged.
        RuntimeError: another run is writing there.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], process_index: int = 0) -> None:
        self.folder, self.settings = Path(folder), without_lone_surrogates(json.loads(json.dumps(settings)))
        self.process_index = process_index
        self.pairs: dict[Any, ResponsePair] = {}
        self.runs: list[dict[str, Any]] = []
        self._journal: Journal | None = None  # `begin` opens it
        self._lock: FileLock | None = None  # held by the first process

    def __enter__(self) -> SuiteJournal:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file, and the results are several files. Pass the name of a folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        if self.process_index == 0:
            self._lock = lock_folder(self.folder)
            remove_partial_files(self.folder)
            text = json.dumps(self.settings, indent=1, ensure_ascii=False) + "\n"
            write_text(self.folder / SETTINGS, text)
        self.read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            self._lock.release()

    def begin(self, run: Mapping[str, Any]) -> None:
        """
        Open the file of this process, and record the circumstances of the pairs that follow.

        Args:
            run (`Mapping`): hardware, software and everything else that may differ between runs.
        """
        self._journal = Journal(self.folder / JOURNALS.replace("*", f"{self.process_index:05d}"))
        self._journal.append({"run": dict(run)})

    def add(self, pair: ResponsePair) -> None:
        """Record a pair. When this returns, the pair is on the disk."""
        if self._journal is None:
            raise RuntimeError("A pair was added before the run began. Call SuiteJournal.begin first.")
        self._journal.append(asdict(pair))
        self.pairs[pair.key] = pair

    def read(self) -> None:
        """Read the complete lines of the files of all processes."""
        self.pairs, self.runs = {}, []
        for path in sorted(self.folder.glob(JOURNALS)):
            for entry in read_journal(path, _run_or_pair):
                if isinstance(entry, ResponsePair):
                    self.pairs.setdefault(entry.key, entry)
                elif entry not in self.runs:
                    self.runs.append(entry)

    def _check_settings(self) -> None:
        """Refuse a folder of other settings, or of another program."""
        earlier = read_settings(self.folder)
        if earlier is not None:
            refuse_other_settings(self.folder, earlier, self.settings)
        elif self.process_index == 0:
            refuse_foreign_files(self.folder)


def _run_or_pair(entry: dict[str, Any]) -> dict[str, Any] | ResponsePair:
    """Convert a line of a journal."""
    return entry["run"] if "run" in entry else ResponsePair.from_dict(entry)
