"""Prompts from the columns of common data sets, as conversations without completions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..files import json_digest, without_lone_surrogates
from .conversations import (
    as_messages,
    check_has_no_media,
    content_text,
    parse_messages,
    parse_tools,
    with_system_prompt,
)
from .text import short

PROMPT_COLUMNS = ("messages", "conversations", "turns", "prompt", "text")
_PROMPT_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """
    The messages of a conversation without the assistant's.

    Args:
        turns (`list[list[dict]]`):
            The messages before each completion. The last one of each turn is the user's; the first turn may begin with
            a system message.
        tools (`list[dict]`, *optional*):
            Passed to the chat template.
    """

    turns: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None = None

    @property
    def conversation_id(self) -> str:
        """`str`: a digest of the content, so that equal prompts have equal ids in all files."""
        return json_digest([self.turns, self.tools], size=16, ensure_ascii=False)


def conversation_of_row(
    row: Mapping[str, Any], *, column: str | None = None, system_prompt: str | None = None
) -> Conversation:
    """
    Read the prompt of a row.

    Assistant messages are left out, because the target generates its own. A conversation ends before its first tool
    call, because the tools that the target may call cannot be run.

    Args:
        row (`Mapping`):
            A row with a column `messages` or `conversations` (`role` and `content`, or `from` and `value`), `turns`
            (the user's texts), `prompt` (a text or messages) or `text`, and optionally `tools` and `system`. Lists
            may be JSON text, and a content may be a list of text parts. Halves of surrogate pairs are replaced.
        column (`str`, *optional*):
            The column to read, in any of these forms. By default the first of these that the row has.
        system_prompt (`str`, *optional*):
            The first message; it replaces the row's own system message.

    Returns:
        [`Conversation`]

    Raises:
        ValueError: the row has no prompt, one of another form, an unknown speaker, an image, or values that are nested
            too deeply.
    """
    try:
        return _conversation(row, column, system_prompt)
    except RecursionError as error:
        raise ValueError("a value is nested too deeply. Flatten it, or remove the row.") from error


def _conversation(row: Mapping[str, Any], column: str | None, system_prompt: str | None) -> Conversation:
    """Read the prompt of a row; see [`conversation_of_row`]."""
    check_has_no_media(row)
    names = [column] if column is not None else [name for name in PROMPT_COLUMNS if row.get(name) is not None]
    value = row.get(names[0]) if names else None
    if isinstance(value, str):
        value = _listed(names[0], value)
    if not isinstance(value, Sequence) or not value:
        wanted = f"`{column}`" if column is not None else ", ".join(f"`{name}`" for name in PROMPT_COLUMNS)
        raise ValueError(f"there is no prompt. The row needs {wanted}, with a text or a list.")
    turns: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    for message in with_system_prompt([_message(entry) for entry in value], dict(row)):
        role, content = message["role"], message.get("content")
        if role == "tool" or message.get("tool_calls"):
            break
        if role == "assistant" or (role == "system" and system_prompt is not None):
            continue
        content = content_text(content) if isinstance(content, list) else content
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"a message of role {role!r} has the content {short(content)}, which must be a text.")
        waiting.append({"role": role, "content": content})
        if role == "user":
            turns.append(waiting)
            waiting = []
    if not turns:
        raise ValueError("there is no message of a user.")
    if system_prompt is not None:
        turns[0] = [{"role": "system", "content": without_lone_surrogates(system_prompt)}, *turns[0]]
    return Conversation(turns, parse_tools(row.get("tools")))


def _listed(name: str, text: str) -> Sequence[Any]:
    """Return the list that a text contains as JSON, or the text as the only entry of a list."""
    if name in ("messages", "conversations") and text.lstrip().startswith(("[", "{")):
        return parse_messages(name, text)
    if name == "turns" and text.lstrip().startswith("["):
        try:
            turns: list[Any] = json.loads(text)
            return turns
        except ValueError:
            return [text]
    return as_messages(text) or [text]


def _message(entry: Any) -> dict[str, Any]:
    """Return a message with `role` and `content`, from a user's text or from a message in any form."""
    if isinstance(entry, str):
        return {"role": "user", "content": without_lone_surrogates(entry)}
    if not isinstance(entry, Mapping) or not any(isinstance(entry.get(name), str) for name in ("role", "from")):
        raise ValueError(f"a message is {short(entry)}, but must be a text, or have `role` and `content`.")
    message = parse_messages("messages", [entry])[0]
    if message["role"] not in _PROMPT_ROLES:
        raise ValueError(
            f"a message has the role {short(message['role'])}, and the roles of prompts are "
            f"{', '.join(_PROMPT_ROLES)}. Rename the role."
        )
    return message


def sample_rows(rows: datasets.Dataset, limit: int | None, seed: int) -> datasets.Dataset:
    """
    Sample rows without replacement. The rows of a smaller limit are among those of a larger one.

    Args:
        rows (`datasets.Dataset`): all rows.
        limit (`int`, *optional*): the number of rows. None returns all rows in their order.
        seed (`int`): of the sampling.

    Returns:
        `datasets.Dataset`

    Raises:
        ValueError: the limit is below 1.
    """
    if limit is None:
        return rows
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1. Pass a larger number, or None for all rows.")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return rows.select(order[:limit])


def check_columns(rows: datasets.Dataset, column: str | None) -> None:
    """
    Refuse a data set in which no row can have a prompt.

    Args:
        rows (`datasets.Dataset`): all rows.
        column (`str`, *optional*): the column of the prompt; by default one of `PROMPT_COLUMNS`.

    Raises:
        ValueError: the data set is empty, or has none of the columns.
    """
    if not len(rows):
        raise ValueError("The data set of the prompts is empty. Name one with rows.")
    if column is not None and column not in rows.column_names:
        raise ValueError(
            f"There is no column {column!r}. Name one of those that the prompts have: {', '.join(rows.column_names)}."
        )
    if column is None and not set(PROMPT_COLUMNS) & set(rows.column_names):
        raise ValueError(
            f"The prompts have the columns {', '.join(rows.column_names)}, of which none is "
            f"{', '.join(PROMPT_COLUMNS)}. Name the column that contains the prompt."
        )


def read_prompts(path: str | Path) -> list[str]:
    """
    Read the first user message of each line of a small JSON-lines file.

    Args:
        path (`str` or `Path`): each line is a JSON object of a form that [`conversation_of_row`] reads.

    Returns:
        `list[str]`: the prompts in file order.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a line is not a JSON object, or has no prompt; the message names the line.
    """
    return [_first_words(path, number, line) for number, line in _lines(path)]


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error.reason}). Convert the file.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _first_words(path: str | Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number} is not JSON ({error}). Write one JSON object on each line."
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: {line[:40]} is not a JSON object. Write one on each line.")
    try:
        return str(conversation_of_row(row).turns[0][-1]["content"])
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
