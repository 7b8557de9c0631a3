"""Texts that cannot be encoded or are too long for a message, and how they are mended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_lone_surrogates(value: Any) -> Any:
    r"""
    Replace halves of surrogate pairs in all texts of a nested value by U+FFFD, since no tokenizer encodes them.

    Such halves come from JSON escapes of truncated texts. The two halves of a pair become their character.

    Args:
        value: A JSON value.

    Returns:
        The same value with mended texts.

    Example:

    ```python
    >>> without_lone_surrogates({"content": "a\ud83d"})
    {'content': 'a�'}

    ```
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_lone_surrogates(item) for item in value]
    return value


def short(value: Any) -> str:
    """Return the beginning of the representation of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
