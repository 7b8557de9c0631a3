"""Prompts from the columns people have them in → conversations whose turns the target shall answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..files import json_digest

PROMPT_COLUMNS = ("messages", "conversations", "turns", "prompt", "text")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """
    What a user says, turn by turn, before the target has answered.

    Args:
        turns (`list[list[dict]]`):
            The messages that come before each answer: the last one of a turn is the user's; a system message precedes
            it in the first.
        tools (`list[dict]`, *optional*):
            Reach the chat template.
    """

    turns: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None = None

    @property
    def conversation_id(self) -> str:
        """A name made of the content: equal prompts have equal ones, in any file, at any place."""
        return json_digest([self.turns, self.tools], size=16, ensure_ascii=False)


def conversation_of_row(
    row: Mapping[str, Any], *, column: str | None = None, system_prompt: str | None = None
) -> Conversation:
    """
    Find the prompt of a row.

    What an assistant says in the row is left out, since the target will answer itself. A conversation ends before the
    first tool call: nobody is there to run the tool that the target may call.

    Args:
        row (`Mapping`):
            `messages` (or `conversations`; `role` and `content`, or `from` and `value`), `turns` (texts of the user),
            `prompt` (a text or messages) or `text`; and `tools`.
        column (`str`, *optional*):
            Take this column, of any of these forms, instead of the first that the row has.
        system_prompt (`str`, *optional*):
            Begin with it, in place of the row's own if it has one.

    Returns:
        [`Conversation`]

    Raises:
        ValueError: no prompt is there, or it has another form.
    """
    names = [column] if column is not None else [name for name in PROMPT_COLUMNS if row.get(name) is not None]
    value = row.get(names[0]) if names else None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        wanted = f"`{column}`" if column is not None else ", ".join(f"`{name}`" for name in PROMPT_COLUMNS)
        raise ValueError(f"no prompt: it needs {wanted}, a text or a list.")
    turns: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    for entry in value:
        message = {"role": "user", "content": entry} if isinstance(entry, str) else _message(entry)
        role, content = message["role"], message.get("content")
        if role == "tool" or message.get("tool_calls"):
            break
        if role == "assistant" or (role == "system" and system_prompt is not None):
            continue
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"a message of role {role!r} has the content {content!r}: it must be a text.")
        waiting.append({"role": role, "content": content})
        if role == "user":
            turns.append(waiting)
            waiting = []
    if not turns:
        raise ValueError("no message of a user is in it.")
    if system_prompt is not None:
        turns[0] = [{"role": "system", "content": system_prompt}, *turns[0]]
    return Conversation(turns, row.get("tools") or None)


def _message(entry: Any) -> dict[str, Any]:
    """A message with `role` and `content`, from either of the two spellings."""
    if isinstance(entry, Mapping) and entry.get("role") is None and entry.get("from") is not None:
        entry = {"role": _SHAREGPT_ROLES.get(entry["from"], entry["from"]), "content": entry.get("value")}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise ValueError(f"a message is {entry!r}: it must be a text, or have `role` and `content`.")
    return dict(entry)


def sample_rows(rows: datasets.Dataset, limit: int | None, seed: int) -> datasets.Dataset:
    """
    Draw rows at random; a larger limit takes the same rows and more.

    Args:
        rows (`datasets.Dataset`): all rows.
        limit (`int`, *optional*): how many; None takes all, in their order.
        seed (`int`): of the draw.

    Returns:
        `datasets.Dataset`

    Raises:
        ValueError: the limit is below 1.
    """
    if limit is None:
        return rows
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1.")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return rows.select(order[:limit])


def check_columns(rows: datasets.Dataset, column: str | None) -> None:
    """
    Refuse a data set in which no row can have a prompt.

    Raises:
        ValueError: none of the columns is there, or the data set is empty.
    """
    if not len(rows):
        raise ValueError("There is no prompt: the data set is empty.")
    if column is not None and column not in rows.column_names:
        raise ValueError(f"There is no column {column!r}. The prompts have {', '.join(rows.column_names)}.")
    if column is None and not set(PROMPT_COLUMNS) & set(rows.column_names):
        raise ValueError(
            f"The prompts have the columns {', '.join(rows.column_names)}; known are {', '.join(PROMPT_COLUMNS)}. "
            "Name the one that holds the prompt."
        )


def read_prompts(path: str | Path) -> list[str]:
    """
    Read the first user message of each line of a small JSON-lines file.

    Args:
        path (`str` or `Path`): one JSON object a line, as [`conversation_of_row`] takes them.

    Returns:
        `list[str]`: the prompts in file order.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a line is no JSON object, or has no prompt; the message names the line.
    """
    return [_first_words(path, number, line) for number, line in _lines(path)]


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            yield number, line


def _first_words(path: str | Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg}). Write one JSON object a line.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: {line[:40]} is no JSON object. Write one a line.")
    try:
        return str(conversation_of_row(row).turns[0][-1]["content"])
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
