"""Files that a kill at any moment leaves whole: appended lines, replaced files, one writer a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK = ".lock"
SETTINGS = "settings.json"  # what all rows of a folder have in common
JOURNAL = "newest.jsonl"  # rows that are in no shard yet


def lock_folder(folder: Path) -> FileLock:
    """
    Become the one that writes into a folder.

    Args:
        folder (`Path`): must exist.

    Returns:
        `FileLock`: held; release it at the end. The lock of a killed process is free.

    Raises:
        RuntimeError: another run holds it.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RuntimeError(
            f"Another run is writing into {folder}. Wait for its end, stop it, or name another folder."
        ) from error
    return lock


def append_line(descriptor: int, path: Path, row: Mapping[str, Any]) -> None:
    """
    Write a row as a line at the end of a file, whole or not at all.

    Args:
        descriptor (`int`): of the file, open for writing.
        path (`Path`): of the file, for messages.
        row (`Mapping`): JSON values.

    Raises:
        OSError: it cannot be written.
    """
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    start = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except BaseException as error:
        os.ftruncate(descriptor, start)
        if isinstance(error, OSError):
            raise OSError(
                f"A row could not be written into {path}: {error.strerror}. All rows before it are kept; make room, "
                "and run the same again."
            ) from error
        raise


def partial_path(path: Path) -> Path:
    """Where [`replace_file`] keeps a file until it is complete: hidden, beside its place."""
    return path.with_name(f".{path.name}.partial")


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """
    Let `write(temporary path)` make a file, and put it into its place when it is complete.

    Args:
        path (`Path`): the place.
        write (`Callable`): called with the temporary path.

    Raises:
        OSError: it cannot be written.
    """
    temporary = partial_path(path)
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{path} could not be written: {error.strerror or error}. Make room, and run the same again."
        ) from error
