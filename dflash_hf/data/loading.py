"""Rows from a local file, a local folder or the Hub."""

from __future__ import annotations

from pathlib import Path

import datasets

from ..files import JOURNAL, SETTINGS


def load_rows(name: str, config: str | None, split: str) -> datasets.Dataset:
    """
    Load rows from a local file, a local folder or the Hub.

    Args:
        name (`str`): path of a `.json`, `.jsonl` or `.parquet` file, of a folder of such files, or a Hub name.
        config (`str`, *optional*): configuration of a Hub data set.
        split (`str`): split of a Hub data set or a folder.

    Returns:
        `datasets.Dataset`

    Raises:
        FileNotFoundError: it looks like a file and is none.
        ValueError: a file cannot be parsed; the folder has files that no split would take, or answers of a
            `regenerate` that was killed before it wrote them as a shard.
    """
    path = Path(name)
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(path.suffix)
    if path.is_dir():
        _check_that_all_answers_are_in_shards(path)
        if not (path / "README.md").is_file():  # whose card may say which files are rows
            _check_that_all_files_are_read(path, config)
        kind = None
    elif kind is not None:
        if not path.is_file():
            raise FileNotFoundError(
                f"The data file {name} does not exist. Give a JSON-lines or Parquet file or a Hub name."
            )
        if path.stat().st_size == 0:
            raise ValueError(f"The data file {name} is empty.")
    try:
        if kind is None:
            return datasets.load_dataset(name, config, split=split)
        return datasets.load_dataset(kind, data_files=name, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        what = f"The data file {name} cannot be read as {kind}" if kind else f"The rows of {name} cannot be read"
        raise ValueError(f"{what}: {reason}") from error


def _check_that_all_answers_are_in_shards(folder: Path) -> None:
    journal = folder / JOURNAL
    if (folder / SETTINGS).is_file() and journal.is_file() and journal.stat().st_size > 0:
        raise ValueError(
            f"The folder {folder} has answers in {JOURNAL} that are in no shard yet: `dflash-hf regenerate` writes "
            "there or was killed. Run it again, which goes on; its end, or Ctrl-C, makes a shard of them. For the "
            f"shards alone name {folder / 'data'}."
        )


def _check_that_all_files_are_read(folder: Path, config: str | None) -> None:
    """One file with the name of a split in its own, `gsm8k-train.jsonl`, makes `datasets` pass over all others."""
    splits: dict[str, list[str]] = dict(datasets.load_dataset_builder(str(folder), config).config.data_files or {})
    taken = {Path(file) for files in splits.values() for file in files}
    kinds = {file.suffix for file in taken}
    left_out = [file.name for file in sorted(folder.resolve().iterdir()) if file.suffix in kinds and file not in taken]
    if left_out:
        found = "; ".join(
            f"{split}: {', '.join(Path(file).name for file in files)}" for split, files in splits.items()
        )
        raise ValueError(
            f"The folder {folder} has files that belong to no split: {', '.join(left_out)}. Names decide ({found}). "
            "Name them all after splits (train-1.jsonl, train-2.jsonl), or none, or give one file."
        )
