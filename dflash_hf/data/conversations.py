"""Rows of texts and messages in the forms that data sets have them, converted to one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..files import without_lone_surrogates
from .chat_template import LOSS_KEYS, REASONING_FIELDS, content_text, without_nulls
from .text import short

CONVERSATION_COLUMNS = ("messages", "conversations")
SYSTEM_COLUMNS = ("system", "system_prompt")
# Columns of images, sounds and what a processor makes of them
_MEDIA_COLUMNS = (
    "image", "images", "video", "videos", "audio", "audios", "pixel_values", "pixel_values_videos", "image_grid_thw",
    "video_grid_thw", "input_features",
)  # fmt: skip
# Keys that leave parts of an assistant message out of the loss
_DETAIL_KEYS = ("train_detail", "training_detail")

_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "model", "bot", "assistant")
_TOOLS = ("tool", "function", "observation", "function_response", "tool_response", "ipython")
_CALLS = ("function_call", "tool_call")
_CONVERTED_KEYS = ("from", "value", "function_call")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "system": "system",
    "developer": "developer",
    **dict.fromkeys((*_ASSISTANTS, *_CALLS), "assistant"),
    **dict.fromkeys(_TOOLS, "tool"),
}
# In messages with a `role` the chat template may know further roles, such as `observation`
_ROLES = {"human": "user", **dict.fromkeys(_ASSISTANTS, "assistant")}


class UnreadableRowError(ValueError):
    """The texts or messages of a row cannot be read."""


class ParsedRow(dict[str, Any]):
    """A row from [`parse_row`], whose nulls in tools and arguments are those of JSON text and not of columns."""


def parse_row(row: Mapping[str, Any]) -> ParsedRow:
    """
    Convert the conversation of a row to messages with `role` and `content`. A parsed row is returned as it is.

    Args:
        row (`Mapping`):
            A row with `messages` or `conversations`, or with `prompt` and `completion`, as lists or as JSON text. The
            messages have `role` and `content`, or `from` and `value`. `tools` and `chat_template_kwargs` may be JSON
            text. `system` or `system_prompt` is a system message that is not among the messages.

    Returns:
        [`ParsedRow`]: The row without nulls, with `messages`, or with `prompt` and `completion` as texts or as lists
        of messages. The content of a message is a text or a list of text parts. Halves of surrogate pairs are
        replaced.

    Raises:
        UnreadableRowError: JSON text cannot be parsed, a speaker is unknown, a content is no text, or the row has
            images or other media.
        ValueError: A message is not a mapping with a role.
    """
    if isinstance(row, ParsedRow):
        return row
    check_has_no_media(row)
    parsed = ParsedRow({name: value for name, value in row.items() if value is not None})
    if "tools" in parsed:
        parsed["tools"] = parse_tools(parsed["tools"])
    if "chat_template_kwargs" in parsed:
        parsed["chat_template_kwargs"] = parse_template_kwargs(parsed["chat_template_kwargs"])
    learned: list[Any] = []
    found = [name for name in CONVERSATION_COLUMNS if name in parsed]
    if found:
        messages = parse_messages(found[0], parsed[found[0]])
        for other in CONVERSATION_COLUMNS:
            parsed.pop(other, None)
        parsed["messages"] = with_system_prompt(messages, parsed)
        learned = parsed["messages"]
    elif "prompt" in parsed and "completion" in parsed and parsed.get("input_ids") is None:
        prompt, completion = (_text_or_messages(name, parsed[name]) for name in ("prompt", "completion"))
        _check_pair(prompt, completion, parsed)
        if not isinstance(prompt, str):
            prompt = with_system_prompt(prompt, parsed)
            learned = [*prompt, *completion]
        parsed.update(prompt=prompt, completion=completion)
    for message in learned:
        _check_learnable(message)
    return parsed


def check_has_no_media(row: Mapping[str, Any]) -> None:
    """Raise an [`UnreadableRowError`] if a row has images, sounds, or what a processor makes of them."""
    for name in _MEDIA_COLUMNS:
        value = row.get(name)
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            raise UnreadableRowError(
                f"The row has {name}, and drafts read text alone. Remove the rows that need the column, or the column."
            )


def parse_messages(name: str, value: Any) -> list[dict[str, Any]]:
    """
    Read the messages of a column.

    Args:
        name (`str`): The name of the column.
        value: Its value: a list of messages, or JSON text.

    Returns:
        `list[dict]`: Messages with `role`, and `content` as a text or a list of text parts.

    Raises:
        UnreadableRowError, ValueError: See [`parse_row`].
    """
    if isinstance(value, str):
        value = _json(name, value) if value.strip() else []
    else:
        value = without_lone_surrogates(without_nulls(value.tolist() if hasattr(value, "tolist") else value))
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UnreadableRowError(f"The row's {name} is {short(value)}, and it must be a list of messages. Convert it.")
    return [_message(entry) for entry in value]


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """
    Read a column of tools, which are mappings or JSON text, or None if there are none.

    Raises:
        UnreadableRowError: The value is neither.
    """
    tools = _json("tools", value) if isinstance(value, str) else without_nulls(value)
    if not tools:
        return None
    tools = [tools] if isinstance(tools, Mapping) else tools
    tools = [_json("tools", tool) if isinstance(tool, str) else tool for tool in tools] if _is_list(tools) else [None]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise UnreadableRowError(
            f"The row's tools are {short(value)}, and they must be a list of mappings, or JSON text of it. Convert "
            "the column."
        )
    return [dict(tool) for tool in without_lone_surrogates(tools)]


def parse_template_kwargs(value: Any) -> dict[str, Any]:
    """
    Read a column of arguments for the chat template, which is a mapping or JSON text.

    Raises:
        UnreadableRowError: The value is neither.
    """
    kwargs = (_json("chat_template_kwargs", value) or {}) if isinstance(value, str) else without_nulls(value)
    if not isinstance(kwargs, Mapping):
        raise UnreadableRowError(
            f"The row's chat_template_kwargs are {short(value)}, and they must be a mapping, or JSON text of it. "
            "Convert the column."
        )
    return dict(without_lone_surrogates(kwargs))


def with_system_prompt(messages: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """
    Put the system prompt of a row before its messages, and remove it from the row.

    Args:
        messages (`list[dict]`): Messages from [`parse_messages`].
        row (`dict`): The row, changed in place: a text in the column `system` or `system_prompt` is removed.

    Returns:
        `list[dict]`

    Raises:
        UnreadableRowError: The messages begin with another system message.
    """
    for name in SYSTEM_COLUMNS:
        text = row.get(name)
        if not isinstance(text, str) or not text.strip() or not messages:
            continue
        del row[name]
        system = {"role": "system", "content": without_lone_surrogates(text)}
        if messages[0]["role"] not in ("system", "developer"):
            messages = [system, *messages]
        elif content_text(messages[0].get("content")) != system["content"]:
            raise UnreadableRowError(
                f"The row has the system prompt {short(text)} in `{name}` and another one in its messages. Remove "
                "one of them."
            )
    return messages


def as_messages(text: str) -> list[Any] | None:
    """Return the messages that a text contains as JSON, or None if it is any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_messages = isinstance(value, list) and all(
        isinstance(entry, Mapping) and ("role" in entry or "from" in entry) for entry in value
    )
    return value if is_messages and value else None


def carries_loss(message: Mapping[str, Any]) -> bool:
    """Return whether no key of an assistant message leaves it out of the loss."""
    return all(message.get(name) in (None, 1) for name in LOSS_KEYS)


def _text_or_messages(name: str, value: Any) -> str | list[dict[str, Any]]:
    """Return a text, or the messages of a list or of JSON text."""
    if isinstance(value, str):
        messages = as_messages(value)
        if messages is None:
            return str(without_lone_surrogates(value))
        value = messages
    if not _is_list(value):
        raise UnreadableRowError(
            f"The row's {name} is {short(value)}, and it must be a text or a list of messages. Convert the column."
        )
    return parse_messages(name, value)


def _check_pair(prompt: str | list[Any], completion: str | list[Any], row: Mapping[str, Any]) -> None:
    """Raise an error if a prompt and a completion do not belong together, or must not be learned."""
    if isinstance(prompt, str) != isinstance(completion, str):
        raise UnreadableRowError(
            "One of the row's prompt and completion is a text and the other a list of messages, and both must be of "
            "one kind. Convert one of them."
        )
    if isinstance(row.get("label"), bool) and not row["label"]:
        raise UnreadableRowError(
            "The row's label is False, so its completion is an example of what not to write. Pass rows whose label is "
            "True, or remove the column."
        )
    system = next((name for name in SYSTEM_COLUMNS if isinstance(row.get(name), str) and row[name].strip()), None)
    if isinstance(prompt, str) and system is not None:
        raise UnreadableRowError(
            f"The row has a prompt text and a system prompt in `{system}`, and only a chat template joins them. Pass "
            "`messages`, or put the system prompt into the prompt and remove the column."
        )


def _message(entry: Any) -> dict[str, Any]:
    """Return a message with `role` and `content`, or convert one with `from` and `value`."""
    if isinstance(entry, Mapping):
        entry = {name: value for name, value in entry.items() if value is not None}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role", entry.get("from")), str):
        raise ValueError(
            f"A message of the row is {short(entry)}, and a message must be a mapping with `role` and `content`. "
            "Correct the message."
        )
    speaker = entry.get("role", entry.get("from"))
    role = _ROLES.get(speaker.lower(), speaker) if "role" in entry else _SPEAKERS.get(speaker.lower())
    if role is None:
        raise UnreadableRowError(
            f"A message of the row is from {short(speaker)}, and the known speakers are {', '.join(_SPEAKERS)}. "
            "Rename the speaker."
        )
    content, calls = entry.get("content", entry.get("value")), entry.get("tool_calls")
    if "role" not in entry and speaker.lower() in _CALLS:
        content, calls = None, _calls_of_text(content)
    elif calls is None and "function_call" in entry:
        calls = _calls_of_text(entry["function_call"])
    converted = {"role": role, "content": _content(content, role), "tool_calls": _tool_calls(calls)}
    others = {name: value for name, value in entry.items() if name not in (*converted, *_CONVERTED_KEYS)}
    message = {name: value for name, value in converted.items() if value is not None} | others
    return message


def _content(content: Any, role: str) -> str | list[dict[str, Any]] | None:
    """Return a content as a text, as a list of text parts, or as None."""
    if content is None or isinstance(content, str):
        return content
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) and _is_list(content) else part
        for part in (content if _is_list(content) else [content])
    ]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UnreadableRowError(
                f"A message of role {short(role)} has a content of the type {short(kind)}, and only texts "
                "and parts of the type 'text' are read. Remove the row, or convert the content to text."
            )
    return [{**part, "type": "text"} for part in parts]


def _tool_calls(calls: Any) -> list[dict[str, Any]] | None:
    """Return tool calls, which may be JSON text, as mappings, or None if there are none."""
    if calls is None:
        return None
    calls = _json("tool_calls", calls)
    parsed = [_json("tool_calls", call) for call in (calls if _is_list(calls) else [calls] if calls else [])]
    for call in parsed:
        function = _json("tool_calls", call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UnreadableRowError(
                f"A message has the tool call {short(call)}, and a call must be a mapping with `name` and "
                "`arguments`, by itself or in `function`. Correct the message."
            )
    return [
        {**call, "function": _json("tool_calls", call["function"])} if "function" in call else dict(call)
        for call in parsed
    ]


def _calls_of_text(text: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a `function_call`, which is one call or a list of calls, or JSON text of them."""
    calls = _json("function_call", text)
    calls = calls if isinstance(calls, list) else [calls]
    return [
        {"type": "function", "function": call} if isinstance(call, Mapping) and "function" not in call else call
        for call in calls
    ]


def _check_learnable(message: Mapping[str, Any]) -> None:
    """Raise an error if a message has no content, or if a key leaves a part of it out of the loss."""
    if not any(message.get(name) is not None for name in ("content", "tool_calls", *REASONING_FIELDS)):
        raise UnreadableRowError(
            f"A message of role {short(message['role'])} has no content. Remove the row, or give the message a text."
        )
    if message["role"] != "assistant":
        return
    for name in (*LOSS_KEYS, *_DETAIL_KEYS):
        value = message.get(name)
        if value is not None and (name in _DETAIL_KEYS or value not in (0, 1)):
            raise UnreadableRowError(
                f"An assistant message has {name}={short(value)}, and a message carries loss as a whole or not at "
                "all: 1 or True, or 0 or False. Change or remove the key."
            )


def _json(name: str, value: Any) -> Any:
    """Parse JSON text. An empty text is None, and other values are returned as they are."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return without_lone_surrogates(json.loads(value))
    except (ValueError, RecursionError):
        raise UnreadableRowError(
            f"The row's {name} is the text {short(value)}, which is not JSON. Correct the text."
        ) from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
