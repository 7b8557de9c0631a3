"""Parsing of option values that are more than one word, and constants that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ..data.text import short
from ..files import without_lone_surrogates

INTERRUPTED = 130  # the exit code that shells use for a command stopped by Ctrl-C
Value = TypeVar("Value")


def json_object(option: str, text: str) -> dict[str, Any]:
    """
    Parse the value of an option that takes a JSON object.

    Args:
        option (`str`): The name of the option, for messages.
        text (`str`): The value of the option.

    Returns:
        `dict`

    Raises:
        ValueError: The value is not valid JSON, or not an object.
    """
    try:
        value = without_lone_surrogates(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{option} {short(text)} is not valid JSON ({error}). Write a JSON object, for example "
            '{"enable_thinking": false}.'
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{option} {short(text)} must be a JSON object of names and values. Write for example "
            '{"enable_thinking": false}.'
        )
    return value


def values_between_commas(option: str, text: str, convert: Callable[[str], Value]) -> tuple[Value, ...]:
    """
    Parse the value of an option that takes several values separated by commas.

    Args:
        option (`str`): The name of the option, for messages.
        text (`str`): The value of the option.
        convert (`Callable`): Converts one word to a value, or raises a `ValueError`.

    Returns:
        `tuple`: The distinct values in the order in which they were given.

    Raises:
        ValueError: A word is not a valid value.
    """
    values: dict[Value, None] = {}
    for word in text.split(","):
        try:
            values[convert(word.strip())] = None
        except ValueError as error:
            raise ValueError(
                f"{option} {text!r}: {word.strip()!r} is not a valid value. Separate valid values by commas."
            ) from error
    return tuple(values)
