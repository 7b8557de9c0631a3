"""The folder of an evaluation: its settings, and a line for every pair of answers, so that a later run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from ..files import LOCK, append_line, lock_folder, replace_file
from .answer_pairs import AnswerPair

SETTINGS = "settings.json"
JOURNALS = "answers-*.jsonl"  # one a process
SAMPLED_VALUES = 1024


class SuiteJournal:
    """
    What an evaluation has answered, kept so that a kill at any moment loses no pair that was finished.

    Every process writes a file of its own, one line a pair. A later run reads all of them, whatever its number of
    processes, and drops the half line that a kill can leave.

    Args:
        folder (`str` or `Path`): made if it is not there.
        settings (`Mapping`): what all answers of the folder have in common (JSON values); other settings are refused.
        process_index (`int`, defaults to 0): of this process; the first one locks the folder.

    Raises (when entered):
        ValueError: the folder has other settings, other files or a damaged journal.
        RuntimeError: another run is writing there.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], process_index: int = 0) -> None:
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self.process_index = process_index
        self.pairs: dict[Any, AnswerPair] = {}
        self.runs: list[dict[str, Any]] = []
        self._file = -1
        self._lock: FileLock | None = None  # of the first process

    def __enter__(self) -> SuiteJournal:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file. Results are several files: name a folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        if self.process_index == 0:
            self._lock = lock_folder(self.folder)
            text = json.dumps(self.settings, indent=1, ensure_ascii=False) + "\n"
            replace_file(self.folder / SETTINGS, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self.read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock is not None:
            self._lock.release()

    @property
    def _path(self) -> Path:
        return self.folder / JOURNALS.replace("*", f"{self.process_index:05d}")

    def begin(self, run: Mapping[str, Any]) -> None:
        """
        Open the file of this process, and say in it where the pairs after it are made.

        Args:
            run (`Mapping`): hardware, software and whatever else may differ between runs.
        """
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        content = self._path.read_bytes()
        os.ftruncate(self._file, content.rfind(b"\n") + 1)
        append_line(self._file, self._path, {"run": dict(run)})

    def add(self, pair: AnswerPair) -> None:
        """Keep a pair: it is safe from a kill when this returns."""
        append_line(self._file, self._path, asdict(pair))
        self.pairs[pair.key] = pair

    def read(self) -> None:
        """Read the files of all processes anew, whole lines only."""
        self.pairs, self.runs = {}, []
        for path in sorted(self.folder.glob(JOURNALS)):
            lines = path.read_bytes().split(b"\n")[:-1]  # behind the last line break there is nothing, or half a line
            for number, line in enumerate(lines, start=1):
                try:
                    entry = json.loads(line)
                    if "run" in entry:
                        if entry["run"] not in self.runs:
                            self.runs.append(entry["run"])
                    else:
                        pair = AnswerPair(**entry)
                        self.pairs.setdefault(pair.key, pair)
                except (ValueError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number} is damaged ({error}). Delete that line; what it held is answered anew."
                    ) from error

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS
        if not path.is_file():
            present = sorted(file.name for file in self.folder.iterdir() if file.name != LOCK)
            if self.process_index == 0 and any(not name.startswith(".") for name in present):
                raise ValueError(
                    f"{self.folder} has files ({', '.join(present[:3])}), but no {SETTINGS} of ours. Name a folder of "
                    "its own."
                )
            return
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error.msg}). Restore it, or name another folder.") from error
        differing = _differences(earlier, self.settings)
        if differing:
            raise ValueError(
                f"The answers in {self.folder} were made with other settings: {'; '.join(differing)}. Use the same "
                "settings, or name another folder."
            )


def _differences(earlier: Any, wanted: Any, name: str = "") -> list[str]:
    """Settings that differ, in words, those inside an object by their own names."""
    if earlier == wanted:
        return []
    if isinstance(earlier, dict) and isinstance(wanted, dict):
        prefix = f"{name} " if name else ""
        return [
            words
            for key in {**earlier, **wanted}
            for words in _differences(earlier.get(key), wanted.get(key), f"{prefix}{key}")
        ]
    return [f"{name} {earlier!r} (now {wanted!r})"]


def model_digest(model: nn.Module) -> str:
    """
    Tell models of the same name apart: a digest of names, shapes and the first values of all parameters.

    Args:
        model (`nn.Module`): on any device.

    Returns:
        `str`
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:SAMPLED_VALUES].to("cpu", torch.float32)
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()
