"""Settings of a preparation. The module does not import torch, so that the command shows its help quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_LENGTH = 2048  # default number of tokens after which a row is truncated
TRUNCATIONS = ("cut", "drop")
MISMATCH_POLICIES = ("keep", "drop", "error")


@dataclass(frozen=True)
class PreparationSettings:
    """
    Settings of a preparation.

    Args:
        max_length (`int`, defaults to 2048):
            The longest row in tokens.
        truncation (`str`, defaults to `"cut"`):
            What happens to longer rows: `"cut"` truncates them at the end, and `"drop"` drops them.
        block_size (`int`, *optional*):
            Drop rows that have no room for a whole block of this many tokens with a supervised token after its anchor.
            None keeps every row with a supervised token, since training also uses blocks that extend past the end of
            a row.
        on_mismatch (`str`, defaults to `"keep"`):
            What happens to rows whose prompt differs from that of the chat template: `"keep"`, `"drop"`, or
            `"error"`, which stops the preparation.
        split_turns (`bool`, defaults to `False`):
            Whether assistant turns that the template renders differently once the conversation continues become rows
            of their own.
        keep_repeats (`bool`, defaults to `False`):
            Whether to keep several rows with one prompt, for example several sampled responses to it. Identical rows
            are always dropped.
        eval_rows (`int` or `float`, defaults to 0):
            The held-out rows: a fraction below 1, or the smallest number of rows.
        seed (`int`, defaults to 0):
            The seed for the choice of held-out prompts.
        chat_template_kwargs (`Mapping`):
            Arguments for the chat template that apply to every row. Those of a row take precedence.

    Raises:
        ValueError: A value is outside its range.
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
                raise ValueError(f"{name}={value} must be at least {least}. Pass a larger number of tokens.")
        if self.block_size is not None and self.block_size > self.max_length:
            raise ValueError(
                f"block_size={self.block_size} must be at most max_length={self.max_length}. Pass a smaller one."
            )
        if self.truncation not in TRUNCATIONS:
            raise ValueError(
                f"truncation={self.truncation!r} must be one of {', '.join(TRUNCATIONS)}. Pass one of them."
            )
        if self.on_mismatch not in MISMATCH_POLICIES:
            raise ValueError(
                f"on_mismatch={self.on_mismatch!r} must be one of {', '.join(MISMATCH_POLICIES)}. Pass one of them."
            )
        if self.eval_rows < 0 or (self.eval_rows >= 1 and self.eval_rows != int(self.eval_rows)):
            raise ValueError(
                f"eval_rows={self.eval_rows} must be a fraction below 1 or a whole number of rows. Pass one of them."
            )
