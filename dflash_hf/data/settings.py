"""Settings of data preparation. No torch, so that the command shows its help at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_LENGTH = 2048  # tokens of a training row
TRUNCATIONS = ("cut", "drop")
MISMATCH_POLICIES = ("keep", "drop", "error")


@dataclass(frozen=True)
class PreparationSettings:
    """
    How rows are prepared.

    Args:
        max_length (`int`, defaults to 2048):
            Longest row in tokens.
        truncation (`str`, defaults to `"cut"`):
            What becomes of longer rows: `"cut"` at the end, or `"drop"`.
        block_size (`int`, *optional*):
            Drop rows that have no room for a whole block of this many tokens with a supervised token behind its
            anchor. None keeps rows with anything supervised: training also uses blocks that the end of a row cuts.
        on_mismatch (`str`, defaults to `"keep"`):
            What becomes of rows whose prompt is not the one that the chat template gives: `"keep"`, `"drop"`, or
            `"error"`, which ends the whole preparation.
        split_turns (`bool`, defaults to `False`):
            Give answers that the template renders otherwise once the conversation goes on rows of their own.
        keep_repeats (`bool`, defaults to `False`):
            Keep several rows of one prompt, for instance several answers drawn for it. Equal rows are never kept.
        eval_rows (`int` or `float`, defaults to 0):
            Held-out rows: a share below 1, or at least this many.
        seed (`int`, defaults to 0):
            Of the choice of held-out prompts.
        chat_template_kwargs (`Mapping`):
            For every row; those of a row come first.

    Raises:
        ValueError: a value is out of its range.
    """

    max_length: int = MAX_LENGTH
    truncation: str = "cut"
    block_size: int | None = None
    on_mismatch: str = "keep"
    split_turns: bool = False
    keep_repeats: bool = False
    eval_rows: float = 0
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, least in (("max_length", self.max_length, 2), ("block_size", self.block_size, 2)):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if self.block_size is not None and self.block_size > self.max_length:
            raise ValueError(f"block_size={self.block_size} must be at most max_length={self.max_length}.")
        if self.truncation not in TRUNCATIONS:
            raise ValueError(f"truncation={self.truncation!r} must be one of {', '.join(TRUNCATIONS)}.")
        if self.on_mismatch not in MISMATCH_POLICIES:
            raise ValueError(f"on_mismatch={self.on_mismatch!r} must be one of {', '.join(MISMATCH_POLICIES)}.")
        if self.eval_rows < 0 or (self.eval_rows >= 1 and self.eval_rows != int(self.eval_rows)):
            raise ValueError(f"eval_rows={self.eval_rows} must be a share below 1, or a whole number of rows.")
