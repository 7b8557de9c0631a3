"""Does a row begin as the target would read it today? Where it does not, why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat_template import ChatRenderer, TemplateError, shared_length
from .labels import SupervisedRow, conversation_of, row_renderer

TEXT_BEFORE, TEXT_AFTER = 12, 24  # tokens shown around the first difference

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = rf"\d{{4}}[-/.]\d\d[-/.]\d\d|\d{{1,2}}\.? {_MONTH},? \d{{4}}|{_MONTH} \d{{1,2}},? \d{{4}}|\d\d?:\d\d(?::\d\d)?"
_THOUGHT = (
    r"<think>(?=\s*[^\s<]).*?</think>\s*|<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant"
    r"|<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?=<\|start\|>)"
)
_OTHER_DATE = "only another date: the template writes that of the day"
_INSERTED = "the template puts an empty thinking block before an answer without thought"
# What may differ: how it looks, and what to say if the row has more of it, if the template has, if both have others
_DIFFERENCES = (
    (
        re.compile(_DATE),
        "the row has a date that the template does not write",
        "the template writes a date that the row has not",
        _OTHER_DATE,
    ),
    (
        re.compile(r"<think>\s*</think>\s*"),
        "the row has an empty thinking block that is not in the prompt",
        "the template puts an empty thinking block into the prompt",
        "other line breaks in the empty thinking block",
    ),
    (
        re.compile(r"<think>\s*\Z"),
        "the row's prompt begins to think, the template's does not",
        "the template's prompt begins to think, the row's does not",
        "other line breaks where the prompt begins to think",
    ),
    (
        re.compile(_THOUGHT, re.DOTALL),
        "the template strips thinking from earlier answers",
        "the row lacks thinking that the template keeps in earlier answers",
        "other thinking in earlier answers",
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
class PrefixMismatch:
    """
    A row whose ids before its last answer are not those of the target's generation prompt.

    Args:
        position (`int`): first token that differs.
        row_text (`str`), template_text (`str`): the text around it.
        reason (`str`): why, in words.
        is_recorded (`bool`): the row's ids were given; otherwise they are rendered by the same template.
    """

    position: int
    row_text: str
    template_text: str
    reason: str
    is_recorded: bool

    def as_dict(self) -> dict[str, Any]:
        """Its values, for a line of JSON."""
        return asdict(self)


def check_prefix(
    row: Mapping[str, Any],
    read: SupervisedRow,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PrefixMismatch | None:
    """
    Compare what comes before the last answer with `apply_chat_template(messages[:-1], add_generation_prompt=True)`.

    Args:
        row (`Mapping`): with messages; others have nothing to be compared with.
        read ([`SupervisedRow`]): the same row as ids. Its last supervised tokens are the last answer.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        chat_template_kwargs (`Mapping`, *optional*): for every row.

    Returns:
        [`PrefixMismatch`], or None where all tokens are equal.
    """
    if not any(read.mask) or (row.get("messages") is None and not isinstance(row.get("completion"), (list, tuple))):
        return None
    messages, _ = conversation_of(row)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return None
    start = max(index for index, keep in enumerate(read.mask) if keep)
    while start and read.mask[start - 1]:
        start -= 1
    found, history = read.ids[:start], messages[: answers[-1]]
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    is_recorded = row.get("input_ids") is not None
    try:
        expected = _prompt_ids(renderer, history)
    except TemplateError as error:
        return PrefixMismatch(0, _around(tokenizer, found, 0), "", str(error), is_recorded)
    if found == expected:
        return None
    position = shared_length(found, expected)
    return PrefixMismatch(
        position,
        _around(tokenizer, found, position),
        _around(tokenizer, expected, position),
        _why(found, expected, renderer, history, is_recorded),
        is_recorded,
    )


def _prompt_ids(renderer: ChatRenderer, history: list[dict[str, Any]]) -> list[int]:
    text = renderer.text(history, add_generation_prompt=True)
    return list(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


def _around(tokenizer: PreTrainedTokenizerBase, ids: list[int], position: int) -> str:
    return str(tokenizer.decode(ids[max(0, position - TEXT_BEFORE) : position + TEXT_AFTER]))


def _why(
    found: list[int], expected: list[int], renderer: ChatRenderer, history: list[dict[str, Any]], is_recorded: bool
) -> str:
    own, other = (str(renderer.tokenizer.decode(ids)) for ids in (found, expected))
    if own == other:
        return "the same text in other tokens: tokens were joined across a boundary"
    if not is_recorded:  # the template rendered both: only what it inserts before an answer can differ
        return _INSERTED + _variant_words(found, renderer, history)
    reasons, bare_own, bare_other = [], own, other
    for pattern, more_in_row, more_in_template, both in _DIFFERENCES:
        in_row, in_template = pattern.findall(bare_own), pattern.findall(bare_other)
        bare_own, bare_other = pattern.sub("", bare_own), pattern.sub("", bare_other)
        if len(in_row) != len(in_template):
            reasons.append(more_in_row if len(in_row) > len(in_template) else more_in_template)
        elif in_row != in_template:
            reasons.append(both)
    if bare_own != bare_other:
        reasons = [_why_system(own, other, history) or "another text"]
    words = "; ".join(reasons or ["another text"])
    return words if reasons == [_OTHER_DATE] else words + _variant_words(found, renderer, history)


def _variant_words(found: list[int], renderer: ChatRenderer, history: list[dict[str, Any]]) -> str:
    """Which arguments make the template give the row's prompt, if any are known."""
    template = str(renderer.tokenizer.chat_template)
    for variant in _VARIANTS:
        if next(iter(variant)) not in template:
            continue
        kwargs = {**renderer.template_kwargs, **variant}
        try:
            ids = _prompt_ids(ChatRenderer(renderer.tokenizer, renderer.tools, kwargs), history)
        except TemplateError:
            continue
        if ids == found:
            return f"; the row's is the prompt of chat_template_kwargs {json.dumps(variant)}"
    return ""


def _why_system(own: str, other: str, history: list[dict[str, Any]]) -> str | None:
    """Whether one text is the other with a system prompt more."""
    short, long = sorted((own, other), key=len)
    start = shared_length(short, long)
    end = shared_length(short[start:][::-1], long[start:][::-1])
    more = long[start : len(long) - end]
    if start + end < len(short) or ("system" not in more and "developer" not in more):
        return None
    if long is own:
        return "the row has a system prompt that is not in its messages or that the template does not add"
    has_system = bool(history) and history[0]["role"] == "system"
    return f"the row lacks the system prompt {'of its messages' if has_system else 'that the template adds'}"
