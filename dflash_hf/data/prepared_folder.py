"""The folder of prepared rows: it is written atomically, recognised again, and checked before training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..files import differences, json_digest, replace_folder, without_lone_surrogates, write_text
from ..target.loading import TargetText
from .prepare import PreparedRows
from .settings import PreparationSettings

REPORT, MISMATCHES = "report.json", "mismatches.jsonl"
EVALUATION_SPLIT = "validation"
SHARD_BYTES = 2**29

# Names that the counts of rows had in the reports of version 0.1.0
_RENAMED_COUNTS = {
    "answers": "after_split",
    "cut": "truncated",
    "earlier_answers_without_loss": "unsupervised_turns",
    "other_prompt": "prompt_mismatches",
}


def folder_settings(
    target: str, source: Mapping[str, Any], text: TargetText, settings: PreparationSettings
) -> dict[str, Any]:
    """
    Collect everything that determines the content of a prepared folder.

    Args:
        target (`str`): The name of the target.
        source (`Mapping`): What identifies the source rows.
        text ([`TargetText`]): The tokenizer and the token ids of the target.
        settings ([`PreparationSettings`]): The settings of the preparation.

    Returns:
        `dict`: JSON values.
    """
    return {
        "target": target,
        **source,
        **asdict(settings),
        "eos_token_ids": list(text.eos_token_ids),
        "vocabulary_hash": vocabulary_hash(text.tokenizer),
        "chat_template_hash": json_digest(text.tokenizer.chat_template),
    }


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the tokens of a tokenizer and their ids."""
    return json_digest(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))


def is_prepared_already(folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> bool:
    """
    Return whether a folder holds the rows that would be written, and refuse a folder with any other content.

    Args:
        folder (`Path`): The output folder.
        settings (`Mapping`): The settings from [`folder_settings`].
        overwrite (`bool`): Whether rows that were prepared before may be replaced.

    Returns:
        `bool`

    Raises:
        ValueError: The folder holds other content.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    report = read_report(folder) if folder.is_dir() else None
    if report is None:
        raise ValueError(
            f"{folder} exists and contains no prepared rows, and only prepared rows are replaced. Choose a folder "
            "that does not exist."
        )
    if overwrite:
        return False
    earlier, wanted = report["settings"], without_lone_surrogates(json.loads(json.dumps(dict(settings))))
    if earlier == wanted:
        return True
    changes = "; ".join(map(str, differences(earlier, wanted)))
    raise ValueError(
        f"{folder} contains rows that were prepared with other settings: {changes}. Choose another folder, or pass "
        "--overwrite to replace them."
    )


def read_report(folder: str | Path) -> dict[str, Any] | None:
    """
    Read the report of a prepared folder. Reports of earlier versions are converted to the present names.

    Args:
        folder (`str` or `Path`): A folder, or any other name.

    Returns:
        `dict`, or None if it is not a prepared folder.
    """
    path = Path(folder) / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict) or not {"settings", "rows"} <= set(report):
        return None
    counts = {_RENAMED_COUNTS.get(name, name): count for name, count in report["rows"].items()}
    return {**report, "rows": counts}


def make_report(prepared: PreparedRows, settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    Summarise a preparation.

    Args:
        prepared ([`PreparedRows`]): The prepared rows.
        settings (`Mapping`): The settings from [`folder_settings`].

    Returns:
        `dict`: JSON values: the `settings`, counts of `rows` and `tokens`, and the `chat_template_kwargs` that all
        rows share.
    """
    parts = {"train": prepared.train, EVALUATION_SPLIT: prepared.evaluation}
    refused, differing = (
        dict(Counter(line["reason"] for line in prepared.mismatches if line["is_refused"] == is_refused).most_common())
        for is_refused in (True, False)
    )
    return {
        "settings": dict(settings),
        "rows": {
            "read": prepared.num_rows,
            "after_split": prepared.num_after_split,
            "dropped": prepared.dropped,
            "truncated": prepared.num_truncated,
            "unsupervised_turns": prepared.num_unsupervised_turns,
            "refused": refused,
            "prompt_mismatches": differing,
            "ignored_message_keys": prepared.ignored_keys,
            **{name: 0 if part is None else len(part) for name, part in parts.items()},
        },
        "tokens": {
            name: {
                "all": sum(part["length"]),
                "supervised": pyarrow.compute.sum(_values(part, "supervised_mask")).as_py() or 0,
                "longest": max(part["length"]),
            }
            for name, part in parts.items()
            if part is not None
        },
        "chat_template_kwargs": prepared.chat_template_kwargs,
    }


def write_folder(folder: Path, prepared: PreparedRows, report: Mapping[str, Any]) -> None:
    """
    Write prepared rows atomically: the folder appears when it is complete.

    Args:
        folder (`Path`): The folder to write. An existing folder is replaced, so call [`is_prepared_already`] before.
        prepared ([`PreparedRows`]): The prepared rows.
        report (`Mapping`): The report from [`make_report`].

    Raises:
        OSError: The folder cannot be written. An existing folder is then unchanged.
    """
    with replace_folder(folder) as unfinished:
        (unfinished / "data").mkdir()
        _write_split(prepared.train, unfinished / "data", "train")
        if prepared.evaluation is not None:
            _write_split(prepared.evaluation, unfinished / "data", EVALUATION_SPLIT)
        if prepared.mismatches:
            lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in prepared.mismatches]
            write_text(unfinished / MISMATCHES, "".join(lines))
        write_text(unfinished / REPORT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def check_prepared(
    rows: datasets.Dataset, name: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, mask_token_id: int
) -> None:
    """
    Refuse prepared rows that do not fit a training run.

    Args:
        rows (`datasets.Dataset`): Rows with a `supervised_mask`.
        name (`str`): The folder or the name of the data set.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the run's target.
        max_length (`int`): The longest row of the run, in tokens.
        mask_token_id (`int`): The mask token of the draft.

    Raises:
        ValueError: The rows were tokenised with another vocabulary, are longer than `max_length`, or contain the mask
            token.
    """
    report = read_report(name)
    if report is not None and report["settings"].get("vocabulary_hash") != vocabulary_hash(tokenizer):
        raise ValueError(
            f"{name} was prepared for the tokenizer of {report['settings'].get('target')!r}, and this target has a "
            "different one. Prepare the rows again with this --target."
        )
    longest = pyarrow.compute.max(pyarrow.compute.list_value_length(rows.data["input_ids"])).as_py()
    if longest is not None and longest > max_length:
        raise ValueError(
            f"{name} has rows of up to {longest} tokens, and max_length={max_length} is the limit of this run. Pass "
            f"--max_length {longest}, or prepare the rows again."
        )
    values = _values(rows, "input_ids")
    if pyarrow.compute.any(pyarrow.compute.equal(values, mask_token_id)).as_py():
        raise ValueError(
            f"{name} contains the mask token {mask_token_id}, which must not occur in text. Choose another "
            "mask_token_id when you create the draft."
        )


def _values(rows: datasets.Dataset, column: str) -> Any:
    """Return all values of a column of lists as one array."""
    return pyarrow.compute.list_flatten(rows.data[column])


def _write_split(rows: datasets.Dataset, folder: Path, split: str) -> None:
    """Write the rows of a split as Parquet shards of about `SHARD_BYTES`."""
    num_shards = min(len(rows), -(-rows.data.nbytes // SHARD_BYTES))
    for index in range(num_shards):
        shard = rows.shard(num_shards, index, contiguous=True)
        shard.to_parquet(folder / f"{split}-{index:05d}-of-{num_shards:05d}.parquet")
