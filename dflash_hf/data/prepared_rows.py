"""Checks of prepared rows on whole columns, which take a small part of the time of preparing the rows again."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute

from ..blocks.plan import MAX_SAMPLE_ID

_BATCH_ROWS = 1000


def are_trainable(
    rows: datasets.Dataset, *, max_length: int, forbidden_token_id: int | None, num_embeddings: int | None
) -> bool:
    """
    Return whether prepared rows obey every rule of [`prepare_row`], so that training can use them as they are.

    Args:
        rows (`datasets.Dataset`): Rows with a `supervised_mask`.
        max_length, forbidden_token_id, num_embeddings: The arguments of [`prepare_row`].

    Returns:
        `bool`: False if a row has a token outside the embedding or the mask token, is longer than `max_length`, has a
        mask of another length or no supervised token after its first, or if a column has another type, nulls, or is
        missing.
    """
    if not _has_types(rows, ("input_ids", "supervised_mask")):
        return False
    for table in _batches(rows, ("input_ids", "supervised_mask", "sample_id")):
        if _first_fault(table, ("input_ids", "supervised_mask"), max_length, forbidden_token_id, num_embeddings):
            return False
        if not _has_supervised_token(table["supervised_mask"].combine_chunks()).all():
            return False
    return True


def check_packed_rows(
    rows: datasets.Dataset,
    *,
    max_length: int,
    forbidden_token_id: int | None,
    num_embeddings: int | None,
    description: str = "train",
) -> None:
    """
    Refuse packed rows that would fail or be learned wrongly. Unlike other rows they cannot be truncated or dropped.

    Args:
        rows (`datasets.Dataset`): Rows with `segment_ids`.
        max_length, forbidden_token_id, num_embeddings, description: The arguments of [`prepare_row`].

    Raises:
        ValueError: A column is missing, or a row breaks a rule. The message names the set and the rule.
    """
    columns = ("input_ids", "supervised_mask", "segment_ids")
    if not _has_types(rows, columns):
        raise ValueError(
            f"The {description} set has packed rows with the columns {dict(rows.features)}, and they need lists of "
            "integers in input_ids and segment_ids, lists of bools in supervised_mask, and an integer sample_id. Pass "
            "the output of pack_dataset."
        )
    has_supervised = False
    for table in _batches(rows, (*columns, "sample_id")):
        fault = _first_fault(table, columns, max_length, forbidden_token_id, num_embeddings)
        if fault:
            raise ValueError(f"The {description} set has packed rows, of which {fault}.")
        has_supervised |= bool(_has_supervised_token(table["supervised_mask"].combine_chunks()).any())
    if not has_supervised:
        raise ValueError(
            f"The {description} set has no usable row: no packed row has a supervised token. Pass rows with "
            "completions."
        )


def _has_types(rows: datasets.Dataset, columns: tuple[str, ...]) -> bool:
    """Return whether the columns are lists of integers, the mask one of bools, and the id an integer."""
    schema = rows.features.arrow_schema
    if not {*columns, "sample_id"} <= set(schema.names) or not pyarrow.types.is_integer(
        schema.field("sample_id").type
    ):
        return False
    for name in columns:
        kind = schema.field(name).type
        if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
            return False
        is_right = pyarrow.types.is_boolean if name == "supervised_mask" else pyarrow.types.is_integer
        if not is_right(kind.value_type):
            return False
    return True


def _batches(rows: datasets.Dataset, columns: tuple[str, ...]) -> Any:
    """Return an iterator of tables of some columns."""
    return rows.select_columns(list(columns)).with_format("arrow").iter(batch_size=_BATCH_ROWS)


def _first_fault(
    table: pyarrow.Table,
    columns: tuple[str, ...],
    max_length: int,
    forbidden_token_id: int | None,
    num_embeddings: int | None,
) -> str:
    """Describe the first rule that a row of a table breaks, or return an empty text."""
    lists = {name: table[name].combine_chunks() for name in columns}
    values = {name: column.flatten() for name, column in lists.items()}
    sample_ids = table["sample_id"]
    if any(column.null_count for column in (*lists.values(), *values.values(), sample_ids)):
        return "one has a null. Prepare the rows again"
    lengths = pyarrow.compute.list_value_length(lists["input_ids"])
    for name in columns[1:]:
        if pyarrow.compute.list_value_length(lists[name]) != lengths:
            return f"one has a {name} of another length than its input_ids. Prepare the rows again"
    longest = pyarrow.compute.max(lengths).as_py()
    if longest > max_length:
        return f"one has {longest} tokens, and max_length={max_length} is the limit. Raise max_length, or pack again"
    ids = values["input_ids"]
    if len(ids):
        low, high = pyarrow.compute.min_max(ids).as_py().values()
        if low < 0 or (num_embeddings is not None and high >= num_embeddings):
            last = "" if num_embeddings is None else f" … {num_embeddings - 1}"
            return (
                f"one contains token {low if low < 0 else high}, and the token ids of the target are 0{last}. "
                "Tokenise the rows with the target's own tokenizer"
            )
        if (
            forbidden_token_id is not None
            and pyarrow.compute.any(pyarrow.compute.equal(ids, forbidden_token_id)).as_py()
        ):
            return (
                f"one contains the mask token {forbidden_token_id}, which must not occur in text. Choose another "
                "mask_token_id when you create the draft"
            )
    low, high = pyarrow.compute.min_max(sample_ids).as_py().values()
    if low < 0 or high > MAX_SAMPLE_ID:
        return f"one has a sample_id outside 0 … {MAX_SAMPLE_ID}. Remove the column before packing"
    return ""


def _has_supervised_token(masks: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether a token after its first is supervised."""
    ends = pyarrow.compute.list_value_length(masks).to_numpy().cumsum()
    starts = np.concatenate([[0], ends[:-1]])
    is_supervised = masks.flatten().to_numpy(zero_copy_only=False).astype(bool)
    is_supervised[starts[starts < ends]] = False
    total = np.concatenate([[0], is_supervised.cumsum()])
    return np.asarray(total[ends] > total[starts])
