"""The collator that pads prepared rows into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

PADDING_SEGMENT_ID = -1  # padding belongs to no document


@dataclass
class DFlashCollator:
    """
    Pad prepared rows into a batch.

    Args:
        pad_token_id (`int`, defaults to 0):
            The token that fills `input_ids`. The draft never sees it.
        padding_side (`str`, defaults to `"right"`):
            Training gives the same result with `"left"`.
        pad_to_multiple_of (`int`, defaults to 1):
            Rounds up the length of every batch, which bounds the number of shapes that kernels are compiled for.

    Returns (when called):
        `dict`: `input_ids` (int64), `token_valid_mask` and `supervised_mask` (bool) of shape `[R, S]`, and
        `sample_ids` (int64) of shape `[R]`. Packed rows also give `segment_ids` (int64) of shape `[R, S]`, which are
        -1 at padding.

    Raises:
        ValueError: An argument is outside its range. When called: there is no row, or a row is not prepared.
    """

    pad_token_id: int = 0
    padding_side: str = "right"
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={self.padding_side!r} must be 'left' or 'right'. Pass one of them.")
        if self.pad_to_multiple_of < 1:
            raise ValueError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} must be at least 1. Pass 1 for no rounding."
            )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        _check_rows(rows)
        length = max(len(row["input_ids"]) for row in rows)
        length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (len(rows), length)
        input_ids = torch.full(shape, self.pad_token_id)
        token_valid_mask = torch.zeros(shape, dtype=torch.bool)
        supervised_mask = torch.zeros(shape, dtype=torch.bool)
        segment_ids = torch.full(shape, PADDING_SEGMENT_ID)
        for index, row in enumerate(rows):
            count = len(row["input_ids"])
            columns = slice(0, count) if self.padding_side == "right" else slice(length - count, length)
            input_ids[index, columns] = torch.as_tensor(row["input_ids"])
            token_valid_mask[index, columns] = True
            supervised_mask[index, columns] = torch.as_tensor(row["supervised_mask"], dtype=torch.bool)
            if "segment_ids" in row:
                segment_ids[index, columns] = torch.as_tensor(row["segment_ids"])
        batch = {
            "input_ids": input_ids,
            "token_valid_mask": token_valid_mask,
            "supervised_mask": supervised_mask,
            "sample_ids": torch.tensor([int(row["sample_id"]) for row in rows]),
        }
        return {**batch, "segment_ids": segment_ids} if "segment_ids" in rows[0] else batch


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error if there is no row, or if a row lacks a column or has columns of different lengths."""
    if not rows:
        raise ValueError("A batch needs at least one row, and there is none. Pass prepared rows.")
    per_token = ("supervised_mask", "segment_ids") if "segment_ids" in rows[0] else ("supervised_mask",)
    for row in rows:
        missing = [name for name in ("input_ids", *per_token, "sample_id") if name not in row]
        if missing:
            raise ValueError(
                f"A row of the batch has the columns {sorted(row)}, and it lacks {', '.join(missing)}. Prepare the "
                "rows with prepare_dataset first."
            )
        for name in per_token:
            if len(row[name]) != len(row["input_ids"]):
                raise ValueError(
                    f"A row of the batch has {len(row[name])} entries in {name} for {len(row['input_ids'])} "
                    "input_ids. Prepare the rows with prepare_dataset first."
                )
