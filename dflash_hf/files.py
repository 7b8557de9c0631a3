"""
Files and folders that stay complete when the process is killed at any moment.

Everything in the package that is written to go on after an interruption uses this module. [`replace_file`] and
[`replace_folder`] put complete files and folders into place in one step, [`Journal`] appends JSON lines,
[`lock_folder`] admits one writer, [`differences`] compares settings, and [`digest`] identifies content.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from filelock import FileLock, Timeout

LOCK = ".lock"
SETTINGS = "settings.json"  # the settings under which everything in the folder was made
JOURNAL = "newest.jsonl"  # rows that no shard contains yet

_Entry = TypeVar("_Entry")


def lock_folder(folder: Path) -> FileLock:
    """
    Lock a folder for writing.

    Args:
        folder (`Path`): must exist.

    Returns:
        `FileLock`: the acquired lock; release it at the end. The operating system frees the lock of a killed process.

    Raises:
        RuntimeError: another process holds the lock.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RuntimeError(
            f"Another run is writing into {folder}, and only one run at a time may do so. Wait for it to finish, stop "
            "it, or name another folder."
        ) from error
    return lock


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """
    Write a file under a temporary name and rename it to `path` once it is complete and on the disk.

    Several processes may write the same path at the same time; the last one wins. A killed process leaves a hidden
    temporary file beside `path`, which [`remove_partial_files`] deletes.

    Args:
        path (`Path`): the final name. An existing file is replaced.
        write (`Callable`): called with the temporary path; writes the whole file.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write(temporary)
        _sync(temporary, os.O_RDWR)
        os.replace(temporary, path)
        if os.name == "posix":  # other systems cannot open a folder
            _sync(path.parent, os.O_RDONLY)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(
                f"{path} could not be written: {error.strerror or error}. Free some space, and run the same command "
                "again."
            ) from error
        raise


def write_text(path: Path, text: str) -> None:
    """
    Write a UTF-8 text file by [`replace_file`]; line ends are `\\n` on every system.

    Args:
        path (`Path`): an existing file is replaced.
        text (`str`): the whole content, in which halves of surrogate pairs are replaced.

    Raises:
        OSError: the file cannot be written.
    """
    text = without_lone_surrogates(text)
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def remove_partial_files(folder: Path, pattern: str = ".*.partial", older_than_s: float = 0.0) -> None:
    """
    Delete the temporary files that killed processes left in a folder.

    Args:
        folder (`Path`): its subfolders are not searched.
        pattern (`str`, defaults to `".*.partial"`): of the file names.
        older_than_s (`float`, defaults to 0): seconds since the last write. Where other processes may be writing,
            choose more than a file takes them.
    """
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process may have deleted it
            if time.time() - path.stat().st_mtime >= older_than_s:
                path.unlink()


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """
    Fill a new folder, and put it in the place of `folder` when the block ends without an error.

    Args:
        folder (`Path`): an existing folder is replaced; it stays unchanged if the block or the renaming fails.

    Yields:
        `Path`: an empty folder on the same file system.

    Raises:
        OSError: the folder cannot be made or renamed.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as both:
        new, old = Path(both) / "new", Path(both) / "old"
        new.mkdir()
        yield new
        if folder.exists():
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except OSError:
            if old.exists():
                os.rename(old, folder)
            raise


class Journal:
    """
    An append-only file of JSON lines, in which every line is complete.

    Opening the file removes the incomplete last line that a killed process can leave.

    Args:
        path (`Path`): created if it does not exist.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    def append(self, entry: Mapping[str, Any]) -> None:
        """
        Append one line. When this returns, the line survives a kill of the process.

        Args:
            entry (`Mapping`): JSON values, in whose texts halves of surrogate pairs are replaced.

        Raises:
            OSError: the line cannot be written, for instance because the disk is full. No part of it stays.
        """
        line = without_lone_surrogates(json.dumps(entry, ensure_ascii=False)).encode() + b"\n"
        start = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BaseException as error:
            os.ftruncate(self._descriptor, start)
            if isinstance(error, OSError):
                raise OSError(
                    f"A row could not be written into {self.path}: {error.strerror}. All rows before it are kept. "
                    "Free some space, and run the same command again."
                ) from error
            raise

    def clear(self) -> None:
        """Remove all lines."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Close the file, and delete it if it is empty."""
        is_empty = os.fstat(self._descriptor).st_size == 0
        os.close(self._descriptor)
        if is_empty:
            self.path.unlink()


def read_journal(path: Path, parse: Callable[[dict[str, Any]], _Entry]) -> list[_Entry]:
    """
    Read the complete lines of a [`Journal`], which another process may be writing.

    Args:
        path (`Path`): the file.
        parse (`Callable`): turns the JSON object of a line into an entry; may raise `ValueError` or `TypeError`.

    Returns:
        `list`: one entry a line.

    Raises:
        ValueError: a line is damaged; the message names it.
    """
    entries = []
    lines = path.read_bytes().split(b"\n")[:-1]  # the last part is empty, or an incomplete line
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("it is not a JSON object")
            entries.append(parse(value))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}). Delete that line, and run the same command again; what "
                "the line contained is computed again."
            ) from error
    return entries


class Difference(NamedTuple):
    """A setting with two values: `name`, its value `before`, and its value `now`; None where it is missing."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} was {self.before!r} and is now {self.now!r}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """
    Compare two sets of settings.

    Args:
        before (`Mapping`), now (`Mapping`): JSON values. A missing setting equals None; mappings are compared key by
            key.

    Returns:
        `list[Difference]`: in the order of the settings. A setting inside another one is named `outer.inner`.

    Example:
        >>> [str(each) for each in differences({"seed": 0, "loss": {"decay": 4}}, {"seed": 0, "loss": {"decay": 7}})]
        ['loss.decay was 4 and is now 7']
    """
    found = []
    for name in {**before, **now}:
        earlier, later = before.get(name), now.get(name)
        if isinstance(earlier, Mapping) and isinstance(later, Mapping):
            found += [inner._replace(name=f"{name}.{inner.name}") for inner in differences(earlier, later)]
        elif earlier != later:
            found.append(Difference(name, earlier, later))
    return found


def read_settings(folder: Path) -> dict[str, Any] | None:
    """
    Read the settings under which the files of a folder were made.

    Args:
        folder (`Path`): may not exist.

    Returns:
        `dict`, or None if the folder has no settings.

    Raises:
        ValueError: the file is not a JSON object.
    """
    path = folder / SETTINGS
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Restore it, or name another folder.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object. Restore it, or name another folder.")
    return settings


def refuse_other_settings(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """
    Refuse to add to a folder whose content was made with other settings.

    Args:
        folder (`Path`): for the message.
        before (`Mapping`), now (`Mapping`): the settings of the folder and of this run, for [`differences`].

    Raises:
        ValueError: the settings differ; the message names every difference.
    """
    if changes := differences(before, now):
        raise ValueError(
            f"What {folder} contains was made with other settings: {'; '.join(map(str, changes))}. Everything in a "
            "folder must have the same settings. Use the earlier ones, or name another folder."
        )


def refuse_foreign_files(folder: Path, known: Collection[str] = ()) -> None:
    """
    Refuse a folder that contains files but no settings, because something else wrote them.

    Args:
        folder (`Path`): must exist.
        known (`Collection[str]`): names of files that may be there before the settings. Hidden files always may.

    Raises:
        ValueError: there are other files.
    """
    if (folder / SETTINGS).is_file():
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name[0] != "." and path.name not in known)
    if foreign:
        raise ValueError(
            f"{folder} has files ({', '.join(foreign[:3])}) but no {SETTINGS}, so that another program wrote them. "
            "Name a new or empty folder."
        )


def digest(content: str | bytes, size: int = 8) -> str:
    """
    Return the BLAKE2b digest of a text or of bytes.

    Args:
        content (`str` or `bytes`): a text is encoded as UTF-8; lone surrogates are allowed.
        size (`int`, defaults to 8): bytes of the digest.

    Returns:
        `str`: `2 * size` hexadecimal digits.

    Example:
        >>> digest("text", size=4)
        '9dd1f00b'
    """
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def json_digest(value: Any, size: int = 8, *, ensure_ascii: bool = True) -> str:
    """
    Return the [`digest`] of a JSON value; the order of keys does not matter.

    Args:
        value (`Any`): JSON values.
        size (`int`, defaults to 8): bytes of the digest.
        ensure_ascii (`bool`, defaults to `True`): as in `json.dumps`. It changes the digest of text beyond ASCII.

    Returns:
        `str`: `2 * size` hexadecimal digits.
    """
    return digest(json.dumps(value, sort_keys=True, ensure_ascii=ensure_ascii), size)


def digest_number(text: str, size: int) -> int:
    """
    Return the [`digest`] of a text as a number, for seeds and shares that depend on the text alone.

    Args:
        text (`str`): any text.
        size (`int`): bytes of the digest.

    Returns:
        `int`: 0 … 2 ** (8 · size) - 1.
    """
    return int(digest(text, size), 16)


def without_lone_surrogates(value: Any) -> Any:
    r"""
    Replace halves of surrogate pairs by U+FFFD in all texts of a nested value.

    Neither UTF-8 nor a tokenizer encodes such halves. They come from JSON escapes of truncated texts, and from file
    names and arguments that are not in UTF-8. The two halves of a pair become their character.

    Args:
        value: A JSON value.

    Returns:
        The same value with mended texts.

    Example:

    ```python
    >>> without_lone_surrogates({"content": "a\ud83d"})
    {'content': 'a�'}

    ```
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_lone_surrogates(item) for item in value]
    return value


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
