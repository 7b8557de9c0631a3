"""Values of options that are more than a word."""

from __future__ import annotations

import json
from typing import Any


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
