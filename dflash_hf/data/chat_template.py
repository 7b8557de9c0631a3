"""What a chat template makes of an answer: the prompt that the target reads, and the text that it writes after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

_MARK = "\ue000answer\ue001"  # private-use characters: no text has them, and no template trims them
_OPENED_THINKING = re.compile(r"<think>\s*\Z")
_OWN_OPENING = re.compile(r"\A\s*<think>\s*")
_EMPTY_THINKING = re.compile(r"\s*(?:<think>\s*)?</think>\s*")


class TemplateError(ValueError):
    """The chat template refuses a conversation, or renders it so that an answer cannot be found in it."""


@dataclass(frozen=True)
class RenderedAnswer:
    """
    A conversation that ends with an answer, in three pieces.

    Args:
        prompt (`str`): what the target reads: the template with its generation prompt.
        inserted (`str`): what the template itself puts between the two when it renders a finished answer, such as an
            empty thinking block; mostly empty.
        answer (`str`): what the target writes, and what the template adds behind the token that ends the turn.
    """

    prompt: str
    inserted: str
    answer: str


class ChatRenderer:
    """
    A chat template with the arguments of one row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): has the template.
        tools (`list[dict]`, *optional*), template_kwargs (`Mapping`): reach the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[Any] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, tools, template_kwargs

    def text(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """
        Render messages.

        Raises:
            TemplateError: the template refuses them.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: it adds up values of another kind
            raise TemplateError(f"The chat template refuses the conversation: {error}") from error
        return str(text)

    def answer(self, messages: list[dict[str, Any]], is_cut: bool = False) -> RenderedAnswer:
        """
        Take the last message of a conversation apart from what the target read before.

        The content of a message is what the target wrote: where the template trims it, or drops the thinking in it, it
        is taken as it stands in the message, with what the template writes before and behind it.

        Args:
            messages (`list[dict]`): the last one is the assistant's.
            is_cut (`bool`, defaults to `False`): the answer did not end by itself; nothing follows its text then.

        Returns:
            [`RenderedAnswer`]

        Raises:
            TemplateError: as [`text`], or the template leaves out tool calls, or the answer cannot be told from the
                prompt, or the prompt begins to think and the answer has no thought.
        """
        *history, message = messages
        prompt = self.text(history, add_generation_prompt=True)
        whole = self.text(messages)
        content = message.get("content")
        is_own = isinstance(content, str) and bool(content.strip()) and not _reasoning(message)
        _check_calls(message, whole)
        if is_own and not is_cut and whole.startswith(prompt + str(content)):
            return RenderedAnswer(prompt, "", whole[len(prompt) :])

        opening = match.group() if (match := _OPENED_THINKING.search(prompt)) else ""
        if is_own and is_cut and opening and "</think>" not in str(content):  # cut in its thought
            return RenderedAnswer(prompt, "", _without_opening(str(content), opening))
        plain = self.text([*history, {"role": message["role"], "content": _MARK}])
        has_thought = bool(_reasoning(message)) or (isinstance(content, str) and "think>" in content)
        written = self._written(whole, plain, history, prompt, opening)
        if written is None and not has_thought:
            raise TemplateError(
                "The generation prompt begins to think, and the answer has no thought. Pass the answer with its "
                "thinking in `content`, or chat_template_kwargs that turn thinking off."
            )
        if is_own:
            text = self.text([*history, {**message, "content": _MARK}])
            marked = self._written(text, plain, history, prompt, opening)
            lead, _, tail = (text[len(prompt) - len(opening) :] if marked is None else marked).partition(_MARK)
            return _own_words(prompt, lead, str(content), "" if is_cut and not message.get("tool_calls") else tail)
        if written is None:
            raise TemplateError(
                "The generation prompt begins to think, and the template leaves the thought out of the answer. Pass "
                "the answer with its thinking in `content`."
            )
        block = _EMPTY_THINKING.match(written)
        inserted = block.group() if block else ""
        written = written[len(inserted) :]
        last_words = str(content or _reasoning(message) or "").strip()
        if is_cut and not message.get("tool_calls") and last_words in written:
            written = written[: written.rindex(last_words) + len(last_words)]
        return RenderedAnswer(prompt, inserted, written)

    def _written(self, whole: str, plain: str, history: list[dict[str, Any]], prompt: str, opening: str) -> str | None:
        """
        What follows the prompt in `whole`; None if the thinking that the prompt begins is left out there.

        Templates may render the history otherwise once it has been answered. Then the answer begins after the
        generation prompt's own words, where they last occur before `whole` parts from `plain`, the same conversation
        with another answer.
        """
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        if opening and whole.startswith(prompt.removesuffix(opening)):
            return None
        context = self.text(history)
        header = prompt.removeprefix(context)
        start = whole.rfind(header, 0, shared_length(whole, plain))
        if header in ("", prompt) or start < 0:
            raise TemplateError(
                "The chat template renders the conversation so that it does not begin with the prompt of its last "
                "answer, and the answer cannot be found in it. Pass rows of `prompt` and `completion` texts, or "
                "`input_ids` with `loss_mask`, or other chat_template_kwargs."
            )
        return whole[start + len(header) :]


def _check_calls(message: Mapping[str, Any], whole: str) -> None:
    names = [(call.get("function") or call).get("name") for call in message.get("tool_calls") or ()]
    for name in names:
        if str(name) not in whole:
            raise TemplateError(
                f"The chat template leaves out the answer's call of {name!r}: it knows no tool calls. Leave such rows "
                "out, or pass `input_ids` with `loss_mask`."
            )


def _own_words(prompt: str, lead: str, content: str, tail: str) -> RenderedAnswer:
    """The answer as its content has it, between what the template writes before and behind a content."""
    is_empty_block = bool(_EMPTY_THINKING.fullmatch(lead))
    if "think>" not in content:
        if is_empty_block:
            return RenderedAnswer(prompt, lead, content + tail)
        return RenderedAnswer(prompt, "", lead + content + tail)
    if match := _OPENED_THINKING.search(prompt):
        content = _without_opening(content, match.group())
    return RenderedAnswer(prompt, "", ("" if is_empty_block else lead) + content + tail)


def _without_opening(content: str, opening: str) -> str:
    """What is written after a prompt that begins to think already."""
    return content.removeprefix(opening) if content.startswith(opening) else _OWN_OPENING.sub("", content)


def _reasoning(message: Mapping[str, Any]) -> Any:
    """The thought of a message, where it has a field of its own."""
    return next((message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)), None)


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items two sequences have in common from their beginning on."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def without_nulls(value: Any) -> Any:
    """The same nested value without the keys that columnar storage fills with None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def chat_inputs(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, str]],
    device: torch.device,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """
    A user message or a conversation as inputs of `generate`, through the chat template if there is one.

    Without a template an answer continues the line it answers, and everything else takes a line of its own.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        prompt (`str` or `Sequence[Mapping]`): the user's words, or messages with `role` and `content`.
        device (`torch.device`): of the result.
        chat_template_kwargs (`dict`, *optional*): for the template.

    Returns:
        `dict`: `input_ids` and `attention_mask`, each of shape `[1, S]`.

    Raises:
        ValueError: the template refuses the messages.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [dict(message) for message in prompt]
    if tokenizer.chat_template is None:
        lines = "".join(message["content"] + "\n" * (message["role"] != "user") for message in messages)
        return dict(tokenizer(lines, return_tensors="pt").to(device))
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **(chat_template_kwargs or {})
        )
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} refuses messages of the roles {roles}: {error} Many "
            "templates take no system message: leave it out."
        ) from error
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
