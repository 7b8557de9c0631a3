"""A folder of prepared rows: written whole or not at all, recognised again, and checked against its user."""

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

from ..files import differences, json_digest, replace_folder
from ..target.loading import TargetText
from .prepare import PreparedRows
from .settings import PreparationSettings

REPORT, MISMATCHES = "report.json", "mismatches.jsonl"
EVALUATION_SPLIT = "validation"
SHARD_BYTES = 2**29


def folder_settings(
    target: str, source: Mapping[str, Any], text: TargetText, settings: PreparationSettings
) -> dict[str, Any]:
    """
    All that decides what a prepared folder holds.

    Args:
        target (`str`): its name.
        source (`Mapping`): what names the rows.
        text ([`TargetText`]): of the target.
        settings ([`PreparationSettings`]): of the preparation.

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
    """A name of the tokens and their ids."""
    return json_digest(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))


def read_report(folder: str | Path) -> dict[str, Any] | None:
    """
    The report of a prepared folder.

    Args:
        folder (`str` or `Path`): any folder or name.

    Returns:
        `dict`, or None: it is no prepared folder.
    """
    path = Path(folder) / REPORT
    if not path.is_file():
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    return report if isinstance(report, dict) and {"settings", "rows"} <= set(report) else None


def is_prepared_already(folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> bool:
    """
    Whether a folder holds what would be written; an error if it holds anything else.

    Args:
        folder (`Path`): the output folder.
        settings (`Mapping`): of [`folder_settings`].
        overwrite (`bool`): replace an earlier preparation, whatever its settings.

    Returns:
        `bool`

    Raises:
        ValueError: the folder holds something else.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return False
    if not folder.exists():
        return False
    report = read_report(folder) if folder.is_dir() else None
    if report is None:
        raise ValueError(f"{folder} exists and holds no prepared rows. Name a folder that does not exist.")
    if overwrite:
        return False
    earlier, wanted = report["settings"], json.loads(json.dumps(dict(settings)))
    if earlier == wanted:
        return True
    changes = "; ".join(map(str, differences(earlier, wanted)))
    raise ValueError(
        f"{folder} holds rows that were prepared with other settings: {changes}. Name another folder, or pass "
        "--overwrite."
    )


def make_report(prepared: PreparedRows, settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    What was prepared, in numbers.

    Args:
        prepared ([`PreparedRows`]): the rows.
        settings (`Mapping`): of [`folder_settings`].

    Returns:
        `dict`: JSON values: `settings`, counts of `rows` and `tokens`, and the `chat_template_kwargs` of all rows.
    """
    parts = {"train": prepared.train, EVALUATION_SPLIT: prepared.evaluation}
    refused, other_prompt = (
        dict(Counter(line["reason"] for line in prepared.mismatches if line["is_refused"] == is_refused).most_common())
        for is_refused in (True, False)
    )
    return {
        "settings": dict(settings),
        "rows": {
            "read": prepared.num_rows,
            "answers": prepared.num_answers,
            "dropped": prepared.dropped,
            "cut": prepared.num_cut,
            "earlier_answers_without_loss": prepared.num_lost_answers,
            "refused": refused,
            "other_prompt": other_prompt,
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
    Write prepared rows so that the folder is there whole or not at all.

    Args:
        folder (`Path`): replaced if it exists: ask [`is_prepared_already`] before.
        prepared ([`PreparedRows`]): the rows.
        report (`Mapping`): of [`make_report`].

    Raises:
        OSError: it cannot be written. What was there before is left as it was.
    """
    with replace_folder(folder) as unfinished:
        (unfinished / "data").mkdir()
        _write_part(prepared.train, unfinished / "data", "train")
        if prepared.evaluation is not None:
            _write_part(prepared.evaluation, unfinished / "data", EVALUATION_SPLIT)
        if prepared.mismatches:
            with (unfinished / MISMATCHES).open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in prepared.mismatches)
        (unfinished / REPORT).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check_prepared(
    rows: datasets.Dataset, name: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int, mask_token_id: int
) -> None:
    """
    Refuse prepared rows that a training run would misread.

    Args:
        rows (`datasets.Dataset`): with `supervised_mask`.
        name (`str`): the folder or data set.
        tokenizer (`PreTrainedTokenizerBase`): of the target of the run.
        max_length (`int`): of the run.
        mask_token_id (`int`): of the draft.

    Raises:
        ValueError: the rows were tokenised for another vocabulary, are longer than `max_length`, or hold the mask
            token.
    """
    report = read_report(name)
    if report is not None and report["settings"].get("vocabulary_hash") != vocabulary_hash(tokenizer):
        raise ValueError(
            f"{name} was prepared for the tokenizer of {report['settings'].get('target')!r}, which is another one "
            "than this target's. Prepare the rows again, with --target."
        )
    longest = pyarrow.compute.max(pyarrow.compute.list_value_length(rows.data["input_ids"])).as_py()
    if longest is not None and longest > max_length:
        raise ValueError(
            f"{name} has rows of up to {longest} tokens, and max_length={max_length}. Pass --max_length {longest}, or "
            "prepare the rows again."
        )
    values = _values(rows, "input_ids")
    if pyarrow.compute.any(pyarrow.compute.equal(values, mask_token_id)).as_py():
        raise ValueError(
            f"{name} contains the mask token {mask_token_id}. Choose another mask_token_id when making the draft, one "
            "that never occurs in text."
        )


def _values(rows: datasets.Dataset, column: str) -> Any:
    """All values of a column of lists, as one array."""
    return pyarrow.compute.list_flatten(rows.data[column])


def _write_part(part: datasets.Dataset, folder: Path, split: str) -> None:
    num_shards = min(len(part), -(-part.data.nbytes // SHARD_BYTES))
    for index in range(num_shards):
        shard = part.shard(num_shards, index, contiguous=True)
        shard.to_parquet(folder / f"{split}-{index:05d}-of-{num_shards:05d}.parquet")
