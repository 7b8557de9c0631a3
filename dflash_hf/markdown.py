"""Formats facts for Markdown. A missing fact is printed as such, and no value can break a table or open HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

NOT_RECORDED = "not recorded"


def format_fact(value: Any, form: str = "{}") -> str:
    """
    Format a fact that may be missing or not a finite number.

    Args:
        value: The fact, or `None` if it is not known.
        form (`str`, defaults to `"{}"`): The format of a known fact.

    Returns:
        `str`

    Example:

    ```python
    >>> format_fact(None), format_fact(True), format_fact(1234, "{:,}"), format_fact(float("nan"), "{:.2f}")
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


def format_number(value: float | None, digits: int = 2) -> str:
    """Format a number that may be missing, with the given number of decimals."""
    return format_fact(value, f"{{:.{digits}f}}")


def format_percent(value: float | None) -> str:
    """Format a share between 0 and 1 that may be missing as a percentage."""
    return format_fact(value, "{:.0%}")


def format_arguments(arguments: Mapping[str, Any] | None) -> str:
    """Format arguments as in a call. No arguments are "none", and `None` is "not recorded"."""
    if arguments is None:
        return NOT_RECORDED
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "none"


def one_line(value: Any) -> str:
    """Put text on one line and escape what would open HTML."""
    return " ".join(str(value).split()).replace("<", "&lt;")


def inline_code(value: Any) -> str:
    """Format text as inline code on one line, whatever backticks it contains."""
    line = " ".join(str(value).split())
    runs = re.findall(r"`+", line)
    fence = "`" * (max(map(len, runs), default=0) + 1)
    return f"{fence} {line} {fence}" if runs else f"{fence}{line}{fence}"


def table_cell(value: Any) -> str:
    """Format a fact as the cell of a table, which no `|` or line break in it can break."""
    cell = one_line(value if isinstance(value, str) else format_fact(value))
    return cell.replace("\\", "\\\\").replace("|", "\\|")


def table_cells(rows: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Format names and facts as the two cells of each table row."""
    return [(table_cell(name), table_cell(value)) for name, value in rows]
