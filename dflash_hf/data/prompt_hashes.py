"""Numbers made of prompts: which rows ask the same, and which of them are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .labels import SupervisedRow, conversation_of

HASH_BITS = 60


def prompt_hash(row: Mapping[str, Any], read: SupervisedRow, seed: int) -> int:
    """
    A number made of what the user says before the first answer, in any spacing.

    Args:
        row (`Mapping`): as [`tokenize_row`] takes it.
        read ([`SupervisedRow`]): the same row as ids; what precedes the first answer counts where there is no text.
        seed (`int`): gives other numbers.

    Returns:
        `int`: 0 … 2^60 - 1, spread evenly.
    """
    messages = _messages_or_none(row)
    if messages is None:
        words = _text_or_ids(row, read)
    else:
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        words = [_words(message) for message in messages[:first] if message["role"] == "user"]
        words = words or [_words(message) for message in messages[:first]]
    return _hash([seed, words])


def question_hash(row: Mapping[str, Any], read: SupervisedRow) -> int:
    """
    A number made of all that the target is asked with, in any spacing: every turn, the tools, the template arguments.

    Args:
        row, read: as in [`prompt_hash`].

    Returns:
        `int`: 0 … 2^60 - 1.
    """
    messages = _messages_or_none(row)
    if messages is None:
        return _hash(_text_or_ids(row, read))
    asked = [[message["role"], _words(message)] for message in messages if message["role"] != "assistant"]
    return _hash([asked, row.get("tools"), row.get("chat_template_kwargs")])


def _messages_or_none(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if row.get("messages") is None and not isinstance(row.get("completion"), (list, tuple)):
        return None
    return conversation_of(row)[0]


def _text_or_ids(row: Mapping[str, Any], read: SupervisedRow) -> Any:
    if isinstance(row.get("prompt"), str):
        return " ".join(row["prompt"].split())
    first = read.mask.index(True) if any(read.mask) else 0
    return read.ids[:first] or read.ids


def _words(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    return " ".join(text.split())


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - HASH_BITS)
