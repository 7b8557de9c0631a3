"""Compares the prompt of a row with the prompt that the chat template gives today, and explains differences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat_template import ChatRenderer, ChatTemplateError, shared_length
from .labels import messages_of, row_renderer, supervised_turns
from .token_rows import TokenizedRow

TOKENS_BEFORE, TOKENS_AFTER = 12, 24  # tokens shown before and after the start of the first difference

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = rf"\d{{4}}[-/.]\d\d[-/.]\d\d|\d{{1,2}}\.? {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}},? \d{{4}}|\d\d?:\d\d(?::\d\d)?"
_THINKING = (
    r"<think>(?=\s*[^\s<]).*?</think>\s*|<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant"
    r"|<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?=<\|start\|>)"
)
_OTHER_DATE = "only the date differs: the template writes the current date"
_OTHER_TEXT = "the text differs"
_INSERTED_THINKING = "the template inserts an empty thinking block before a response without thinking"
# Parts of a prompt that may differ: their pattern, and the reason to give if the row has more of them, if the template
# writes more of them, and if both have the same number with different text
_DIFFERENCES = (
    (
        re.compile(_DATE),
        "the row has a date that the template does not write",
        "the template writes a date that the row does not have",
        _OTHER_DATE,
    ),
    (
        re.compile(r"<think>\s*</think>\s*"),
        "the row has an empty thinking block that the template does not write",
        "the template writes an empty thinking block that the row does not have",
        "the line breaks in the empty thinking block differ",
    ),
    (
        re.compile(r"<think>\s*\Z"),
        "the row's prompt opens a thinking block and the template's does not",
        "the template's prompt opens a thinking block and the row's does not",
        "the line breaks after the opened thinking block differ",
    ),
    (
        re.compile(_THINKING, re.DOTALL),
        "the template strips the thinking of earlier turns",
        "the row lacks thinking of earlier turns that the template keeps",
        "the thinking of earlier turns differs",
    ),
)
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": False},
    {"thinking": True},
    *({"reasoning_effort": effort} for effort in ("low", "medium", "high")),
)


@dataclass(frozen=True)
class PromptMismatch:
    """
    The first difference between the tokens before the last completion of a row and the target's generation prompt.

    Args:
        position (`int`): The position of the first token that differs.
        row_text (`str`): The text of the row around that position.
        template_text (`str`): The text of the generation prompt around that position.
        reason (`str`): An explanation of the difference.
        is_recorded (`bool`): Whether the row has recorded tokens. Otherwise the same template rendered both prompts.
    """

    position: int
    row_text: str
    template_text: str
    reason: str
    is_recorded: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a line of JSON."""
        return asdict(self)


def check_prompt(
    row: Mapping[str, Any],
    tokenized: TokenizedRow,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptMismatch | None:
    """
    Compare a row's prompt with `apply_chat_template(messages[:-1], add_generation_prompt=True)`.

    The prompt of a row is everything before its last completion.

    Args:
        row (`Mapping`): A row of messages. Other rows have no template to be compared with.
        tokenized ([`TokenizedRow`]): The same row, tokenised. Its last supervised tokens are the last completion.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        chat_template_kwargs (`Mapping`, *optional*): Arguments for the chat template that apply to every row.

    Returns:
        [`PromptMismatch`], or None if all tokens are equal.
    """
    ids, mask = tokenized.input_ids, tokenized.supervised_mask
    if not any(mask):
        return None
    messages = messages_of(row)
    turns = supervised_turns(messages or ())
    if messages is None or not turns:
        return None
    start = max(index for index, is_supervised in enumerate(mask) if is_supervised)
    while start and mask[start - 1]:
        start -= 1
    found, history = ids[:start], messages[: turns[-1]]
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    is_recorded = row.get("input_ids") is not None
    try:
        expected = renderer.prompt_ids(history)
    except ChatTemplateError as error:
        return PromptMismatch(0, _text_around(tokenizer, found, 0), "", str(error), is_recorded)
    if found == expected:
        return None
    position = shared_length(found, expected)
    return PromptMismatch(
        position,
        _text_around(tokenizer, found, position),
        _text_around(tokenizer, expected, position),
        _reason(found, expected, renderer, history, is_recorded),
        is_recorded,
    )


def _text_around(tokenizer: PreTrainedTokenizerBase, ids: list[int], position: int) -> str:
    """Return the text of the tokens around a position."""
    return str(tokenizer.decode(ids[max(0, position - TOKENS_BEFORE) : position + TOKENS_AFTER]))


def _reason(
    found: list[int], expected: list[int], renderer: ChatRenderer, history: list[dict[str, Any]], is_recorded: bool
) -> str:
    """Explain why the prompt of a row differs from the expected one."""
    row_text, template_text = (str(renderer.tokenizer.decode(ids)) for ids in (found, expected))
    if row_text == template_text:
        return "the text is the same and the tokens differ: tokens were merged across a boundary"
    if not is_recorded:  # the template rendered both, so only what it inserts before a completion can differ
        return _INSERTED_THINKING + _matching_arguments(found, renderer, history)
    reasons, row_rest, template_rest = [], row_text, template_text
    for pattern, more_in_row, more_in_template, other in _DIFFERENCES:
        in_row, in_template = pattern.findall(row_rest), pattern.findall(template_rest)
        row_rest, template_rest = pattern.sub("", row_rest), pattern.sub("", template_rest)
        if len(in_row) != len(in_template):
            reasons.append(more_in_row if len(in_row) > len(in_template) else more_in_template)
        elif in_row != in_template:
            reasons.append(other)
    if row_rest != template_rest:
        reasons = [_system_prompt_reason(row_text, template_text, history) or _OTHER_TEXT]
    reason = "; ".join(reasons or [_OTHER_TEXT])
    return reason if reasons == [_OTHER_DATE] else reason + _matching_arguments(found, renderer, history)


def _matching_arguments(found: list[int], renderer: ChatRenderer, history: list[dict[str, Any]]) -> str:
    """Name the known template arguments with which the template gives the prompt of the row, if there are any."""
    template = str(renderer.tokenizer.chat_template)
    for variant in _VARIANTS:
        if next(iter(variant)) not in template:
            continue
        kwargs = {**renderer.template_kwargs, **variant}
        try:
            ids = ChatRenderer(renderer.tokenizer, renderer.tools, kwargs).prompt_ids(history)
        except ChatTemplateError:
            continue
        if ids == found:
            return f"; the template gives the row's prompt with chat_template_kwargs {json.dumps(variant)}"
    return ""


def _system_prompt_reason(row_text: str, template_text: str, history: list[dict[str, Any]]) -> str | None:
    """Return a reason if the only difference is that one of the texts has an additional system prompt."""
    short, long = sorted((row_text, template_text), key=len)
    start = shared_length(short, long)
    end = shared_length(short[start:][::-1], long[start:][::-1])
    added = long[start : len(long) - end]
    if start + end < len(short) or ("system" not in added and "developer" not in added):
        return None
    if long is row_text:
        return "the row has a system prompt that is not in its messages or that the template does not write"
    has_system = bool(history) and history[0]["role"] == "system"
    return f"the row lacks the system prompt {'of its messages' if has_system else 'that the template adds'}"
