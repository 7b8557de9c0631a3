"""Texts that are too long for a message."""

from __future__ import annotations

from typing import Any


def short(value: Any) -> str:
    """Return the beginning of the representation of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
