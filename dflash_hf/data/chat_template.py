"""Chat templates: the prompt that the target reads, and the completion that it writes after the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from ..files import without_lone_surrogates
from ..model.configuration_dflash import text_tokenizer

# Private-use characters mark the place of a content: no text has them, and no template strips them
_CONTENT_MARK = "\ue000content\ue001"
_OPENED_THINKING = re.compile(r"<think>\s*\Z")
_LEADING_OPENING = re.compile(r"\A\s*<think>\s*")
_EMPTY_THINKING = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Keys of assistant messages with which other training software leaves messages out of the loss
LOSS_KEYS = ("weight", "train", "training", "loss")
# Texts that stand for a content or for the arguments of a tool call, to see what a template makes of them
_PROBE, _PROBE_TEXT, _PROBE_ARGUMENTS = "dflash-probe", '{"dflash_probe": "x"}', {"dflash_probe": "x"}
_MAY_LOOP_OVER_CONTENT = re.compile(r"\bin\s[^%}]*content")


# Templates raise errors of their own, and expressions in them those of Python: they add values of different types,
# index or convert texts; transformers (5.24) raises a ValueError for tools that are no mappings
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class ChatTemplateError(ValueError):
    """The chat template refuses a conversation, or renders it so that a completion cannot be found in it."""


def chat_inputs(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Mapping[str, str]],
    device: torch.device,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """
    Turn a user message or a conversation into inputs of `generate`, through the chat template if there is one.

    Halves of surrogate pairs are replaced. Without a template the contents are joined: a user message ends without a
    line break, so that the completion continues its line, and every other message ends with one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the target.
        prompt (`str` or `Sequence[Mapping]`): The text of a user message, or messages with `role` and `content`.
        device (`torch.device`): The device of the result.
        chat_template_kwargs (`dict`, *optional*): Arguments for the template.

    Returns:
        `dict`: `input_ids` and `attention_mask`, each of shape `[1, S]`.

    Raises:
        ChatTemplateError: The template refuses the messages.
    """
    tokenizer = text_tokenizer(tokenizer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = without_lone_surrogates([dict(message) for message in prompt])
    if tokenizer.chat_template is None:
        text = "".join(message["content"] + "\n" * (message["role"] != "user") for message in messages)
        return dict(tokenizer(text, return_tensors="pt").to(device))
    try:
        text = ChatRenderer(tokenizer, None, chat_template_kwargs or {}).render(messages, add_generation_prompt=True)
    except ChatTemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(
            f"The chat template of {tokenizer.name_or_path!r} refuses messages of the roles {roles}: "
            f"{error.__cause__} Use roles that the template supports; many templates support no system message."
        ) from error
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise rendered text, which contains its special tokens already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class RenderedCompletion:
    """
    A conversation that ends with an assistant turn, in three pieces.

    Args:
        prompt (`str`): What the target reads: the rendered history with the generation prompt.
        inserted (`str`): What the template itself adds after the generation prompt when it renders a finished turn,
            such as an empty thinking block. It is mostly empty.
        completion (`str`): What the target writes, and what the template adds after the token that ends the turn.
    """

    prompt: str
    inserted: str
    completion: str


class ChatRenderer:
    """
    A chat template with the arguments of one row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer that has the template.
        tools (`list[dict]`, *optional*): Tools that are passed to the template.
        template_kwargs (`Mapping`): Further arguments that are passed to the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[Any] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self.tokenizer, self.tools, self.template_kwargs = tokenizer, tools, template_kwargs

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        """
        Render messages as text.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"The chat template refuses the conversation: {reason}") from error
        return str(text)

    def prompt_ids(self, history: list[dict[str, Any]]) -> list[int]:
        """
        Return the tokens that the target reads before it writes the turn after `history`.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        return encode(self.tokenizer, self.render(history, add_generation_prompt=True))

    def adapt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Give messages the form that the template renders: arguments of tool calls and contents, as texts or not.

        Arguments are JSON text in requests and responses of servers. A template that serialises them gets mappings,
        since it would escape text, and a template that writes them as they are gets text. Contents in text parts
        become texts, unless the template loops over the parts.

        Args:
            messages (`list[dict]`): A conversation whose contents are texts, lists of text parts, or missing.

        Returns:
            `list[dict]`: The same conversation. Serving gives the template such messages, too.

        Raises:
            ChatTemplateError: The template serialises arguments, and a tool call has a text that is not JSON.
        """
        return self._with_contents(self._with_arguments(messages))

    def ignored_keys(self, messages: list[dict[str, Any]]) -> tuple[str, ...]:
        """
        Find keys of messages that the template does not render.

        A key is ignored if the last message that has it is rendered in the same way without it, at the end of the
        conversation.

        Args:
            messages (`list[dict]`): A conversation that the template renders.

        Returns:
            `tuple[str, ...]`: Sorted names.
        """
        last = {
            name: index
            for index, message in enumerate(messages)
            for name, value in message.items()
            if name not in ("role", "content", *LOSS_KEYS) and value not in (None, "", [], {})
        }
        ignored = []
        for name, index in last.items():
            *history, message = messages[: index + 1]
            without = {key: value for key, value in message.items() if key != name}
            text = self._render_or_none([*history, message])
            if text is not None and text == self._render_or_none([*history, without]):
                ignored.append(name)
        return tuple(sorted(ignored))

    def _render_or_none(self, messages: list[dict[str, Any]]) -> str | None:
        """Render messages, or return None if the template refuses them."""
        try:
            return self.render(messages)
        except ChatTemplateError:
            return None

    def _with_arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose tool calls have arguments in the form that the template renders."""
        arguments = [
            _function(call).get("arguments") for message in messages for call in message.get("tool_calls", ())
        ]
        if not arguments:
            return messages
        text = self._render_or_none(_with_all_arguments(messages, lambda _: _PROBE_TEXT)) or ""
        if _PROBE_TEXT not in text:
            return _with_all_arguments(messages, _parsed_arguments)
        if all(isinstance(value, str) for value in arguments):
            return messages
        text = self._render_or_none(_with_all_arguments(messages, lambda _: _PROBE_ARGUMENTS)) or ""
        if text and str(_PROBE_ARGUMENTS) not in text:
            return messages  # the template renders both
        return _with_all_arguments(
            messages, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        )

    def _with_contents(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose contents are texts or parts, whichever the template renders."""
        texts = [_with_content(message, content_text(message.get("content"))) for message in messages]
        in_parts = [index for index, message in enumerate(messages) if isinstance(message.get("content"), list)]
        if in_parts and self._render_or_none(messages) != self._render_or_none(texts):
            messages = [
                message if index in in_parts and self._loops_over_parts(texts, index) else texts[index]
                for index, message in enumerate(messages)
            ]
        else:
            messages = texts
        if not _MAY_LOOP_OVER_CONTENT.search(str(self.tokenizer.chat_template)):
            return messages
        rendered = self._render_or_none(
            [_with_content(message, f"{_PROBE}-{index}-") for index, message in enumerate(texts)]
        )
        return [
            _with_content(message, [{"type": "text", "text": message["content"]}])
            if isinstance(message.get("content"), str)
            and f"{_PROBE}-{index}-" not in (rendered or "")
            and self._loops_over_parts(texts, index)
            else message
            for index, message in enumerate(messages)
        ]

    def _loops_over_parts(self, texts: list[dict[str, Any]], index: int) -> bool:
        """Return whether the template renders the text of a part of a message, and not the part itself."""
        with_text, with_part = (
            self._render_or_none([*texts[:index], {**texts[index], "content": content}, *texts[index + 1 :]])
            for content in (_PROBE, [{"type": "text", "text": _PROBE}])
        )
        if with_part is None or _PROBE not in with_part:
            return False
        return with_part == with_text or _PROBE not in (with_text or "")

    def split_completion(self, messages: list[dict[str, Any]], is_truncated: bool = False) -> RenderedCompletion:
        """
        Split a conversation into the prompt that the target reads and the completion that it writes.

        The content of the last message is what the target wrote. Where the template strips its white space or its
        thinking, the completion has the content of the message, between what the template writes before and after a
        content.

        Args:
            messages (`list[dict]`): A conversation whose last message is an assistant turn.
            is_truncated (`bool`, defaults to `False`): Whether generation stopped at the maximum length. Nothing
                follows the text of the last message then.

        Returns:
            [`RenderedCompletion`]

        Raises:
            ChatTemplateError: The template refuses the messages or omits tool calls, the completion cannot be told
                from the prompt, or the generation prompt opens a thinking block and the last message has no thinking.
        """
        *history, message = messages
        prompt = self.render(history, add_generation_prompt=True)
        full_text = self.render(messages)
        content = message.get("content")
        said = content_text(content)
        is_verbatim = isinstance(content, str) and bool(content.strip()) and not _reasoning(message)
        _check_tool_calls(message, full_text)
        if is_verbatim and not is_truncated and full_text.startswith(prompt + str(content)):
            return RenderedCompletion(prompt, "", full_text[len(prompt) :])

        opening = match.group() if (match := _OPENED_THINKING.search(prompt)) else ""
        if is_verbatim and is_truncated and opening and "</think>" not in str(content):  # truncated while thinking
            return RenderedCompletion(prompt, "", _without_opening(str(content), opening))
        marked_text = self.render([*history, {"role": message["role"], "content": _CONTENT_MARK}])
        has_thinking = bool(_reasoning(message)) or "think>" in said
        completion = self._after_prompt(full_text, marked_text, history, prompt, opening)
        if completion is None and not has_thinking:
            raise ChatTemplateError(
                "The generation prompt opens a thinking block, and the assistant message has no thinking. Pass the "
                "message with its thinking in `content`, or pass chat_template_kwargs that disable thinking."
            )
        if is_verbatim:
            text = self.render([*history, {**message, "content": _CONTENT_MARK}])
            marked = self._after_prompt(text, marked_text, history, prompt, opening)
            lead, _, tail = (text[len(prompt) - len(opening) :] if marked is None else marked).partition(_CONTENT_MARK)
            return _from_content(
                prompt, lead, str(content), "" if is_truncated and not message.get("tool_calls") else tail
            )
        if completion is None:
            raise ChatTemplateError(
                "The generation prompt opens a thinking block, and the template omits the thinking of the assistant "
                "message. Pass the message with its thinking in `content`."
            )
        block = _EMPTY_THINKING.match(completion)
        inserted = block.group() if block else ""
        completion = completion[len(inserted) :]
        last_text = str(said or _reasoning(message) or "").strip()
        if is_truncated and not message.get("tool_calls") and last_text in completion:
            completion = completion[: completion.rindex(last_text) + len(last_text)]
        return RenderedCompletion(prompt, inserted, completion)

    def _after_prompt(
        self, full_text: str, marked_text: str, history: list[dict[str, Any]], prompt: str, opening: str
    ) -> str | None:
        """
        Return what follows the prompt in `full_text`, or None if the thinking block that the prompt opens is missing.

        A template may render the history in another way once a further turn follows it. The completion then starts
        after the last occurrence of the generation prompt before the place where `full_text` differs from
        `marked_text`, which is the same conversation with another content.
        """
        if full_text.startswith(prompt):
            return full_text[len(prompt) :]
        if opening and full_text.startswith(prompt.removesuffix(opening)):
            return None
        header = prompt.removeprefix(self.render(history))
        start = full_text.rfind(header, 0, shared_length(full_text, marked_text))
        if header in ("", prompt) or start < 0:
            raise ChatTemplateError(
                "The chat template renders the conversation so that it does not begin with the prompt of its last "
                "assistant turn, and the completion cannot be found in it. Pass rows of `prompt` and `completion` "
                "texts, rows of `input_ids` with `loss_mask`, or other chat_template_kwargs."
            )
        return full_text[start + len(header) :]


def _check_tool_calls(message: Mapping[str, Any], full_text: str) -> None:
    """Raise an error if the template omits a tool call of the message."""
    names = [_function(call).get("name") for call in message.get("tool_calls") or ()]
    for name in names:
        if str(name) not in full_text:
            raise ChatTemplateError(
                f"The chat template does not render tool calls, and the assistant message calls {name!r}. Remove such "
                "rows, or pass rows of `input_ids` with `loss_mask`."
            )


def content_text(content: Any) -> str:
    """Return the text of a content, which is a text, a list of text parts, or None."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_content(message: dict[str, Any], content: Any) -> dict[str, Any]:
    """Return a message with another content. A message without content is returned as it is."""
    return message if message.get("content") is None else {**message, "content": content}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and the arguments of a tool call, which has them in `function` or by itself."""
    return call.get("function") or call


def _with_all_arguments(messages: list[dict[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return messages with converted arguments of all tool calls."""

    def converted(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": converted(call["function"])}
        return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else dict(call)

    return [
        {**message, "tool_calls": [converted(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parsed_arguments(arguments: Any) -> Any:
    """Return the mapping of arguments in JSON text. Other arguments are returned as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ChatTemplateError(
            f"The chat template serialises the arguments of tool calls, and a call has the text {arguments[:80]!r}, "
            "which is not a JSON object. Correct the text, or remove the row."
        )
    return parsed


def _from_content(prompt: str, lead: str, content: str, tail: str) -> RenderedCompletion:
    """Return the completion with the content of its message between the texts that the template adds around it."""
    is_empty_block = bool(_EMPTY_THINKING.fullmatch(lead))
    if "think>" not in content:
        if is_empty_block:
            return RenderedCompletion(prompt, lead, content + tail)
        return RenderedCompletion(prompt, "", lead + content + tail)
    if match := _OPENED_THINKING.search(prompt):
        content = _without_opening(content, match.group())
    return RenderedCompletion(prompt, "", ("" if is_empty_block else lead) + content + tail)


def _without_opening(content: str, opening: str) -> str:
    """Return a content without the tag that opens its thinking, which the prompt contains already."""
    return content.removeprefix(opening) if content.startswith(opening) else _LEADING_OPENING.sub("", content)


def _reasoning(message: Mapping[str, Any]) -> Any:
    """Return the thinking of a message that has it in a field of its own."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def without_nulls(value: Any) -> Any:
    """Return a nested value without the keys whose value is None, which columnar storage adds."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value
