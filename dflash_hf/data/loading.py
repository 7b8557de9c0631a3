"""Loading of rows from a local file, a local folder or the Hub."""

from __future__ import annotations

from pathlib import Path

import datasets

from ..files import JOURNAL, SETTINGS


def load_rows(name: str, config: str | None, split: str) -> datasets.Dataset:
    """
    Load rows from a local file, a local folder or the Hub.

    Args:
        name (`str`): The path of a `.json`, `.jsonl` or `.parquet` file or of a folder of such files, or a Hub name.
        config (`str`, *optional*): The configuration of a Hub data set.
        split (`str`): The split of a Hub data set or of a folder.

    Returns:
        `datasets.Dataset`

    Raises:
        FileNotFoundError: The name has the suffix of a data file, and there is no such file.
        ValueError: A file cannot be parsed, or the folder has files that belong to no split, or it has completions
            that an interrupted `regenerate` has not written into a shard yet.
    """
    path = Path(name)
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(path.suffix)
    if path.is_dir():
        _check_journal_is_empty(path)
        if not (path / "README.md").is_file():  # a data-set card may itself declare which files hold the rows
            _check_every_file_is_in_a_split(path, config)
        kind = None
    elif kind is not None:
        if not path.is_file():
            raise FileNotFoundError(
                f"The data file {name} does not exist. Pass a JSON-lines or Parquet file, or a Hub name."
            )
        if path.stat().st_size == 0:
            raise ValueError(f"The data file {name} is empty. Pass a file with rows.")
    try:
        if kind is None:
            return datasets.load_dataset(name, config, split=split)
        return datasets.load_dataset(kind, data_files=name, split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        source = f"The data file {name} cannot be read as {kind}" if kind else f"The rows of {name} cannot be read"
        raise ValueError(f"{source}: {reason}") from error


def _check_journal_is_empty(folder: Path) -> None:
    """Raise an error if `regenerate` has completions in its journal that are not in a shard yet."""
    journal = folder / JOURNAL
    if (folder / SETTINGS).is_file() and journal.is_file() and journal.stat().st_size > 0:
        raise ValueError(
            f"The folder {folder} has completions in {JOURNAL} that are in no shard yet: `dflash-hf regenerate` is "
            "still running there or was killed. Run it again to finish it; when it ends or is stopped with Ctrl-C, it "
            f"writes them into a shard. To read only the present shards, pass {folder / 'data'}."
        )


def _check_every_file_is_in_a_split(folder: Path, config: str | None) -> None:
    """
    Raise an error if `datasets` would ignore a data file of the folder.

    datasets 5.2 assigns files to splits by their names. If one file name contains the name of a split, as
    `gsm8k-train.jsonl` does, all files without such a name are ignored.
    """
    splits: dict[str, list[str]] = dict(datasets.load_dataset_builder(str(folder), config).config.data_files or {})
    assigned = {Path(file) for files in splits.values() for file in files}
    suffixes = {file.suffix for file in assigned}
    ignored = [
        file.name for file in sorted(folder.resolve().iterdir()) if file.suffix in suffixes and file not in assigned
    ]
    if ignored:
        found = "; ".join(
            f"{split}: {', '.join(Path(file).name for file in files)}" for split, files in splits.items()
        )
        raise ValueError(
            f"The folder {folder} has files that belong to no split: {', '.join(ignored)}. File names decide the "
            f"split ({found}). Name all files after splits (train-1.jsonl, train-2.jsonl) or none, or pass one file."
        )
