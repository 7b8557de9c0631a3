"""Prompts from several sources, mixed by weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from .loading import load_rows
from .prompts import check_columns, conversation_of_row, sample_rows

logger = logging.get_logger(__name__)
OWN = "self"  # the source of prompts that the target writes itself


class PromptSource(NamedTuple):
    """A source of prompts, and its weight among the others."""

    name: str
    weight: float


def parse_source(text: str) -> PromptSource:
    """
    Read a source with an optional weight.

    Args:
        text (`str`): `self`, a data file, a folder or a Hub name, optionally with a colon and a weight.

    Returns:
        [`PromptSource`]: the weight is 1 by default.

    Raises:
        ValueError: the weight is not positive.

    Example:
        >>> parse_source("rows.jsonl:0.5"), parse_source("self")
        (PromptSource(name='rows.jsonl', weight=0.5), PromptSource(name='self', weight=1.0))
    """
    name, colon, last = text.rpartition(":")
    if not colon or not name or Path(text).exists():
        return PromptSource(text, 1.0)
    try:
        weight = float(last)
    except ValueError:
        return PromptSource(text, 1.0)
    if not 0 < weight < float("inf"):
        raise ValueError(f"The weight of {text!r} must be positive. Write for example {name}:0.5.")
    return PromptSource(name, weight)


def divide(number: int, weights: Sequence[float]) -> list[int]:
    """
    Divide a number by weights, so that the parts are whole and their sum is the number.

    Args:
        number (`int`): at least 0.
        weights (`Sequence[float]`): positive.

    Returns:
        `list[int]`: the parts with the largest remainders are rounded up.

    Example:
        >>> divide(10, [1, 1, 1])
        [4, 3, 3]
    """
    exact = [number * weight / sum(weights) for weight in weights]
    parts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (parts[index] - exact[index], index))
    for index in order[: number - sum(parts)]:
        parts[index] += 1
    return parts


def sampled_prompts(source: str, number: int, seed: int, known: set[str]) -> list[dict[str, Any]]:
    """
    Sample prompts of a file or a Hub data set.

    Args:
        source (`str`): file, folder or Hub name.
        number (`int`): prompts at most.
        seed (`int`): of the sampling.
        known (`set[str]`): ids of the conversations that are left out; those of the sampled prompts are added.

    Returns:
        `list[dict]`: rows with `messages`, `tools` and `source`, which [`conversation_of_row`] reads. They are fewer
        than `number` if the source has no more; a warning says so.

    Raises:
        ValueError: the source has no prompts at all.
    """
    rows = load_rows(source, None, "train")
    check_columns(rows, None)
    found: list[dict[str, Any]] = []
    num_unreadable = 0
    for row in sample_rows(rows, len(rows), seed):
        if len(found) == number:
            break
        try:
            conversation = conversation_of_row(row)
        except ValueError:
            num_unreadable += 1
            continue
        if conversation.conversation_id not in known:
            known.add(conversation.conversation_id)
            messages = [message for turn in conversation.turns for message in turn]
            found.append({"messages": messages, "tools": conversation.tools, "source": Path(source).name})
    if not found and number:
        raise ValueError(f"{source} has no prompt that can be read. Name another source.")
    if len(found) < number:
        logger.warning(
            f"{source} has {len(found):,} prompts, and {number:,} were wanted"
            + (f"; {num_unreadable:,} of its rows cannot be read." if num_unreadable else ".")
        )
    return found
