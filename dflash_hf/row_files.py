"""Rows from a local file, a local folder or the Hub."""

from __future__ import annotations

from pathlib import Path

import datasets


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
        ValueError: the file cannot be parsed.
    """
    path = Path(name)
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(path.suffix)
    if kind is None or path.is_dir():
        return datasets.load_dataset(name, config, split=split)
    if not path.is_file():
        raise FileNotFoundError(
            f"The data file {name} does not exist. Give a JSON-lines or Parquet file or a Hub name."
        )
    if path.stat().st_size == 0:
        raise ValueError(f"The data file {name} is empty.")
    try:
        return datasets.load_dataset(kind, data_files=name, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"The data file {name} cannot be read as {kind}: {reason}") from error
