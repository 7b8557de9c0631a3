"""The facts of a model card in words, for Markdown: what is missing says so, and nothing breaks a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

NOT_RECORDED = "not recorded"


def words(value: Any, form: str = "{}") -> str:
    """
    A fact in words: what is missing says so, and what is no number says so.

    Args:
        value: the fact; `None` if it is not known.
        form (`str`): format of a known one.

    Returns:
        `str`

    Example:

    ```python
    >>> words(None), words(True), words(1234, "{:,}"), words(float("nan"), "{:.2f}")
    ('not recorded', 'yes', '1,234', 'undefined (nothing was counted)')

    ```
    """
    if value is None:
        return NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not math.isfinite(value):
        return "undefined (nothing was counted)" if math.isnan(value) else "infinite"
    return form.format(value)


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point, or why there is none."""
    return words(value, f"{{:.{digits}f}}")


def share(value: float | None) -> str:
    """A share in percent, or why there is none."""
    return words(value, "{:.0%}")


def arguments_in_words(arguments: Mapping[str, Any] | None) -> str:
    """Arguments as they are written in a call; "none" if there are none, which is not "not recorded"."""
    if arguments is None:
        return NOT_RECORDED
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "none"


def text(value: Any) -> str:
    """Text on one line that opens no HTML."""
    return " ".join(str(value).split()).replace("<", "&lt;")


def code(value: Any) -> str:
    """Text as Markdown code on one line, whatever backticks it holds."""
    line = " ".join(str(value).split())
    runs = re.findall(r"`+", line)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    return f"{fence} {line} {fence}" if runs else f"{fence}{line}{fence}"


def table_cell(value: Any) -> str:
    """A fact as the cell of a Markdown table, which no `|` or line break in it can break."""
    return text(value if isinstance(value, str) else words(value)).replace("\\", "\\\\").replace("|", "\\|")


def table_cells(rows: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Name and fact of each row as cells of a Markdown table."""
    return [(table_cell(name), table_cell(value)) for name, value in rows]
