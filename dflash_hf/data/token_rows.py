"""Rows that have their tokens, with the masks that this and other training software writes beside them."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .text import short

IGNORED_LABEL = -100  # marks a label without loss in transformers, TRL and axolotl

# A token carries loss if it does in every mask of its row
_MASK_COLUMNS = ("loss_mask", "supervised_mask", "completion_mask", "assistant_masks", "assistant_mask")
# Values that differ between the tokens of a row show that it has several documents
_DOCUMENT_COLUMNS = ("document_ids", "doc_ids", "sequence_ids", "seq_idx")
# So do several values in one of these columns
_LENGTH_COLUMNS = ("seq_lengths", "lengths")
_BOUNDARY_COLUMNS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")
TOKEN_COLUMNS = (*_MASK_COLUMNS, "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class TokenizedRow:
    """
    A tokenised row that is not truncated.

    Args:
        input_ids (`list[int]`): The tokens of the row.
        supervised_mask (`list[bool]`): True at the tokens that the target itself would write.
        unsupervised_turns (`tuple[int, ...]`): Positions in `messages` of assistant turns that carry no loss, since
            the template renders them differently once the conversation continues.
        ignored_keys (`tuple[str, ...]`): Keys of messages that the chat template does not render.
    """

    input_ids: list[int]
    supervised_mask: list[bool]
    unsupervised_turns: tuple[int, ...] = ()
    ignored_keys: tuple[str, ...] = ()


def read_token_row(row: Mapping[str, Any]) -> TokenizedRow:
    """
    Read a row that has its tokens.

    Padding is removed. A token carries loss if every mask of the row says so, and its label, if there are labels, is
    the token itself. Without masks and labels all tokens do.

    Args:
        row (`Mapping`):
            A row with `input_ids`. The masks are `loss_mask`, `supervised_mask` (of prepared rows),
            `completion_mask`, `assistant_masks` and `assistant_mask`. `labels` are -100 at tokens without loss, and
            they are not shifted. `attention_mask` is 0 at padding. All of them are lists, arrays, tensors or JSON
            texts of the length of `input_ids`.

    Returns:
        [`TokenizedRow`]

    Raises:
        ValueError: A column has other values or another length than `input_ids`, the labels differ from the tokens,
            padding is inside the row, or the row is packed. The message names the column.
    """
    ids = [_integer("input_ids", token) for token in _values("input_ids", row["input_ids"])]
    if row.get("segment_ids") is not None:
        raise ValueError(
            "The row is packed, and packed rows are only accepted in a datasets.Dataset. Pass the documents, and set "
            "packing=True."
        )
    columns = {name: _column(row, name, len(ids)) for name in TOKEN_COLUMNS if row.get(name) is not None}
    first, end = _range_without_padding(columns, len(ids))
    mask = [True] * len(ids)
    for name in _MASK_COLUMNS:
        for position, value in enumerate(columns.get(name, ())):
            mask[position] = _flag(name, value) and mask[position]
    for position, label in enumerate(columns.get("labels", ())):
        mask[position] = _carries_label(label, ids[position], position) and mask[position]
    _check_is_one_document(row, columns, first, end)
    return TokenizedRow(ids[first:end], mask[first:end])


def _values(name: str, values: Any) -> list[Any]:
    """Return a flat list of Python values from a list, an array, a tensor or JSON text."""
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except (ValueError, RecursionError):
            values = None
    elif hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"The row's {name} must be a flat list with a value for each token. Correct the column.")
    return list(values)


def _column(row: Mapping[str, Any], name: str, length: int) -> list[Any]:
    """Return the values of a column that has one for each token."""
    values = _values(name, row[name])
    if len(values) != length:
        raise ValueError(
            f"The row's {name} has {len(values)} entries for {length} input_ids, and the lengths must be equal. "
            "Correct the column."
        )
    return values


def _integer(name: str, value: Any) -> int:
    """Return an integer of Python, numpy or torch as one of Python."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"The row's {name} contain {short(value)}, and they must be a flat list of integers. Convert the column."
        ) from None


def _flag(name: str, value: Any) -> bool:
    """Return the value of a mask, which is 0 or 1 in any type."""
    if isinstance(value, (str, list, tuple)) or getattr(value, "ndim", 0) > 0 or value not in (0, 1):
        raise ValueError(
            f"The row's {name} contains {short(value)}, and a mask must contain 0 and 1, or False and True, alone. "
            "Convert the column."
        )
    return bool(value)


def _carries_label(label: Any, token: int, position: int) -> bool:
    """Return whether a label is the token itself, and refuse other labels."""
    label = _integer("labels", label)
    if label not in (IGNORED_LABEL, token):
        raise ValueError(
            f"The row's labels have {label} at position {position}, where input_ids has {token}. A label must be "
            f"{IGNORED_LABEL} or the token itself; labels are not shifted. Convert the column, or pass a loss_mask."
        )
    return label == token


def _range_without_padding(columns: Mapping[str, list[Any]], length: int) -> tuple[int, int]:
    """Return the first position that is not padding, and the position after the last one."""
    if "attention_mask" not in columns:
        return 0, length
    given = columns["attention_mask"]
    if any(_is_integer(value) and value > 1 for value in given):
        raise _packed("attention_mask", "numbers several documents")
    kept = [position for position, value in enumerate(given) if _flag("attention_mask", value)]
    first, end = (kept[0], kept[-1] + 1) if kept else (0, 0)
    if end - first != len(kept):
        raise ValueError(
            "The row's attention_mask has 0 between tokens, and it may be 0 only at the ends, where it marks padding. "
            "Remove the hidden tokens, or the column."
        )
    return first, end


def _check_is_one_document(row: Mapping[str, Any], columns: Mapping[str, list[Any]], first: int, end: int) -> None:
    """Raise an error if a column says that the row has several documents."""
    positions = [_integer("position_ids", value) for value in columns.get("position_ids", ())][first:end]
    if positions != list(range(len(positions))):
        raise _packed("position_ids", "does not count up from 0 by one")
    for name in _DOCUMENT_COLUMNS:
        if row.get(name) is None or _is_integer(row[name]):
            continue
        if len({_integer(name, value) for value in _values(name, row[name])[first:end]}) > 1:
            raise _packed(name, "numbers several documents")
    for name, at_most in (*((name, 1) for name in _LENGTH_COLUMNS), *((name, 2) for name in _BOUNDARY_COLUMNS)):
        if row.get(name) is None or _is_integer(row[name]):
            continue
        if len(_values(name, row[name])) > at_most:
            raise _packed(name, "has several documents")


def _is_integer(value: Any) -> bool:
    """Return whether a value is one integer of Python, numpy or torch, and not a list or an array."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _packed(name: str, reason: str) -> ValueError:
    """Return the error for a row of several documents."""
    return ValueError(
        f"The row's {name} {reason}, so the row is packed, and its documents would read each other. Pass each "
        "document as a row of its own, and set packing=True."
    )
