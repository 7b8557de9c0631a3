"""Loading of rows from a local file, a local folder or the Hub."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import lzma
import re
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from ..files import JOURNAL, SETTINGS

_KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
READ_FILES = f"{', '.join(_KINDS)}, each also with {', '.join(_COMPRESSIONS)}"
# Escapes of JSON texts: pairs of surrogates, halves of them, and all others
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_MAY_BE_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_TEXT_KINDS = ("json", "csv", "text")
_CHUNK_BYTES = 2**24
_READ_ERRORS = (
    datasets.exceptions.DatasetGenerationError,
    OSError,
    EOFError,  # a compressed file that ends early
    ImportError,  # a compression whose package is not installed
    ValueError,  # text in another encoding
    lzma.LZMAError,
    zlib.error,
)


def load_rows(name: str, config: str | None, split: str) -> datasets.Dataset:
    """
    Load rows from a local file, a local folder or the Hub.

    A name that is a local file, or that ends like a data file, is never looked up on the Hub.

    Args:
        name (`str`):
            The path of a JSON, JSON-lines, CSV, TSV, text, Parquet or Arrow file, which may be compressed, or of a
            folder of such files, or a Hub name. All values of CSV and TSV files are texts, except a `sample_id`. A
            text file has a row with the column `text` for each line.
        config (`str`, *optional*): The configuration of a Hub data set.
        split (`str`): The split of a Hub data set or of a folder.

    Returns:
        `datasets.Dataset`

    Raises:
        FileNotFoundError: The name has the suffix of a data file, and there is no such file.
        ValueError: A file cannot be read, or the folder has files that belong to no split, or it has completions
            that an interrupted `regenerate` has not written into a shard yet.
    """
    path = Path(name)
    if path.is_file() or (data_suffix(path) and not path.is_dir()):
        return _load_file(path)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _load_from_disk(path, split)
    if path.is_dir():
        _check_journal_is_empty(path)
    try:
        if path.is_dir() and not (path / "README.md").is_file():  # a data-set card may declare which files hold rows
            files = _check_files_of_folder(path, config).get(split, [])
            if any(map(_has_half_pairs, files)):
                return _load_mended(files)
        return datasets.load_dataset(name, config, split=split)
    except (datasets.exceptions.DatasetGenerationError, UnicodeEncodeError) as error:  # or the name is not in UTF-8
        raise ValueError(f"The rows of {name} cannot be read: {_reason(error)}") from error


def data_suffix(path: Path) -> str:
    """
    Return the end of a file's name that says that it holds rows.

    Args:
        path (`Path`): The path or the name of a file.

    Returns:
        `str`: For example `".jsonl"` or `".jsonl.gz"`, in the letter case of the name; empty for any other name.
    """
    compression = path.suffix if path.suffix.lower() in _COMPRESSIONS else ""
    kind = Path(path.name.removesuffix(compression)).suffix
    return kind + compression if kind.lower() in _KINDS else ""


def _kind(suffix: str) -> str | None:
    """Return the kind of a suffix from [`data_suffix`], or None if it is empty."""
    return _KINDS.get(f".{suffix.lower().split('.')[1]}") if suffix else None


def _load_file(path: Path) -> datasets.Dataset:
    """Load the rows of a local file."""
    suffix = data_suffix(path)
    if not suffix:
        raise ValueError(f"The file {path} is of no kind that is read: {READ_FILES}. Rename or convert it.")
    if not path.is_file():
        raise FileNotFoundError(f"The data file {path} does not exist. Pass one of {READ_FILES}, or a Hub name.")
    if path.stat().st_size == 0:
        raise ValueError(f"The data file {path} is empty. Pass a file with rows.")
    kind = _kind(suffix)
    options: dict[str, Any] = {}
    if kind == "csv":
        # An empty field is an empty text, and words such as "None" and "NA" are texts
        options = {"sep": "\t" if ".tsv" in suffix.lower() else ",", "keep_default_na": False}
    try:
        if kind in _TEXT_KINDS:
            _check_encoding(path)
        if _has_half_pairs(path):
            return _load_mended([path])
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", **options)
        return _with_texts(rows, path, options) if kind == "csv" else rows
    except _READ_ERRORS as error:
        raise ValueError(
            f"The data file {path} cannot be read as {kind}: {_reason(error)}. Pass a whole file of one of the kinds "
            f"{READ_FILES}; text files must be in UTF-8."
        ) from error


def _open(path: Path) -> Any:
    """Open a file whose name says how it is compressed, and return a stream of its decompressed bytes."""
    compression = path.suffix.lower()
    if compression == ".gz":
        return gzip.open(path)
    if compression == ".bz2":
        return bz2.open(path)
    if compression == ".xz":
        return lzma.open(path)
    if compression == ".zst":
        return importlib.import_module("zstandard").open(path)
    return path.open("rb")


def _check_encoding(path: Path) -> None:
    """Raise an error if a text file is not in UTF-8, which pyarrow would notice at the first access to such a row."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            decoder.decode(chunk)
            if b"\0" in chunk:
                raise ValueError("it has zero bytes, as UTF-16 has")
        decoder.decode(b"", final=True)


def _load_from_disk(folder: Path, split: str) -> datasets.Dataset:
    """Load the rows of a folder that `save_to_disk` wrote."""
    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise ValueError(
            f"The folder {folder} has the splits {', '.join(loaded)}, and not {split!r}. Pass one of them."
        )
    return loaded[split]


def _with_texts(rows: datasets.Dataset, path: Path, options: dict[str, Any]) -> datasets.Dataset:
    """Read a CSV file again if pandas has taken texts such as `007` for numbers."""
    columns = {
        column: feature if column == "sample_id" else datasets.Value("string")
        for column, feature in rows.features.items()
    }
    if columns == dict(rows.features):
        return rows
    return datasets.load_dataset(
        "csv", data_files=str(path), split="train", features=datasets.Features(columns), **options
    )


def _has_half_pairs(path: Path) -> bool:
    r"""Return whether a JSON file has escapes such as `\ud800`, half a pair of surrogates, which pyarrow refuses."""
    if _kind(data_suffix(path)) != "json":
        return False
    with _open(path) as stream:
        return any(_MAY_BE_HALF_PAIR.search(line) and _mended_line(line) != line for line in stream)


def _mended_line(line: bytes) -> bytes:
    """Replace halves of surrogate pairs in a line of JSON by U+FFFD."""
    return _ESCAPES.sub(lambda escape: rb"\ufffd" if escape["half"] else escape[0], line)


def _load_mended(files: Sequence[Path]) -> datasets.Dataset:
    """Load the rows of JSON files in which halves of surrogate pairs are replaced."""
    with tempfile.TemporaryDirectory() as folder:
        mended = []
        for number, path in enumerate(files):
            mended.append(str(Path(folder, f"{number}.jsonl")))
            with _open(path) as stream, open(mended[-1], "wb") as copy:
                copy.writelines(map(_mended_line, stream))
        return datasets.load_dataset("json", data_files=mended, split="train", cache_dir=folder, keep_in_memory=True)


def _reason(error: BaseException) -> str:
    """Return the first line of the first cause of an error of `datasets`."""
    cause = error.__cause__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")


def _check_journal_is_empty(folder: Path) -> None:
    """Raise an error if `regenerate` has completions in its journal that are not in a shard yet."""
    journal = folder / JOURNAL
    if (folder / SETTINGS).is_file() and journal.is_file() and journal.stat().st_size > 0:
        raise ValueError(
            f"The folder {folder} has completions in {JOURNAL} that are in no shard yet: `dflash-hf regenerate` is "
            "still running there or was killed. Run it again to finish it; when it ends or is stopped with Ctrl-C, it "
            f"writes them into a shard. To read only the present shards, pass {folder / 'data'}."
        )


def _check_files_of_folder(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """
    Return the data files of each split of a folder.

    An error is raised if `datasets` would ignore a data file, or if a text file is not in UTF-8.

    datasets 5.2 assigns files to splits by their names. If one file name contains the name of a split, as
    `gsm8k-train.jsonl` does, all files without such a name are ignored. Of several kinds of files it reads one.
    """
    splits: dict[str, list[str]] = dict(datasets.load_dataset_builder(str(folder), config).config.data_files or {})
    assigned = {Path(file) for files in splits.values() for file in files}
    suffixes = {file.suffix for file in assigned}
    ignored = [
        file.name
        for parent in sorted({file.parent for file in assigned})
        for file in sorted(parent.iterdir())
        if file not in assigned and (file.suffix in suffixes or _is_surely_of_rows(file))
    ]
    if ignored:
        found = "; ".join(
            f"{split}: {', '.join(Path(file).name for file in files)}" for split, files in splits.items()
        )
        raise ValueError(
            f"The folder {folder} has files that belong to no split: {', '.join(ignored)}. File names decide the "
            f"split ({found}), and all files must be of one kind. Name all files after splits (train-1.jsonl, "
            "train-2.jsonl) or none, or pass one file."
        )
    for file in sorted(assigned):
        if file.is_file() and _kind(data_suffix(file)) in _TEXT_KINDS:
            try:
                _check_encoding(file)
            except _READ_ERRORS as error:
                raise ValueError(
                    f"The data file {file} cannot be read: {_reason(error)}. Text files must be in UTF-8."
                ) from error
    return {name: [Path(file) for file in files] for name, files in splits.items()}


def _is_surely_of_rows(file: Path) -> bool:
    """Return whether a file has rows: notes and settings are often `.txt` and `.json` files."""
    suffix = data_suffix(file)
    return bool(suffix) and not suffix.startswith((".txt", ".json.")) and suffix != ".json"
