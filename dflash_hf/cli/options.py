"""Values of options that are more than a word, and what else commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended
Value = TypeVar("Value")


def json_object(option: str, text: str) -> dict[str, Any]:
    """
    Read the value of an option that takes a JSON object.

    Args:
        option (`str`): its name, for messages.
        text (`str`): its value.

    Returns:
        `dict`

    Raises:
        ValueError: it is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{option} {text!r} is no JSON ({error.msg}). Write for example {{"enable_thinking": false}}.'
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text!r} must be a JSON object of names and values.")
    return value


def values_between_commas(option: str, text: str, convert: Callable[[str], Value]) -> tuple[Value, ...]:
    """
    Read the value of an option that takes several, separated by commas.

    Args:
        option (`str`): its name, for messages.
        text (`str`): its value.
        convert (`Callable`): makes a value of a word, or raises `ValueError`.

    Returns:
        `tuple`: each value once.

    Raises:
        ValueError: a word is no value.
    """
    values: dict[Value, None] = {}
    for word in text.split(","):
        try:
            values[convert(word.strip())] = None
        except ValueError as error:
            raise ValueError(
                f"{option} {text!r}: {word.strip()!r} is no value for it. Separate values by commas."
            ) from error
    return tuple(values)
