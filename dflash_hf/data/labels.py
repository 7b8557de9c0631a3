"""Tokenisation of rows, and the mask of the tokens that carry loss: those that the target itself would write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..model.configuration_dflash import text_tokenizer
from .chat_template import (
    ChatRenderer,
    ChatTemplateError,
    RenderedCompletion,
    encode,
    shared_length,
)
from .conversations import (
    CONVERSATION_COLUMNS,
    ParsedRow,
    as_messages,
    carries_loss,
    parse_row,
)
from .token_rows import TOKEN_COLUMNS, TokenizedRow, read_token_row

logger = logging.get_logger(__name__)

_ANY_TEXT = "a"  # no tokenizer takes it for a special token


def tokenize_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int | None,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """
    Tokenise one row and mark the tokens that carry loss.

    The tokens before the last completion are exactly those of `apply_chat_template(messages[:-1],
    add_generation_prompt=True)`, even where the tokenizer would merge the end of the prompt with the start of the
    completion. The only exception is an empty thinking block that the template inserts before a completion without
    thinking: it is part of the context.

    Args:
        row (`Mapping`):
            A row in one of three forms. With `messages` or `conversations`, every assistant turn is supervised. With
            `prompt` and `completion`, texts or lists of messages, the completion is supervised. With `input_ids` the
            masks and labels beside them mark the supervised tokens, and all tokens are supervised without them; see
            [`read_token_row`]. If `finish_reason` is `"length"`, the last completion is truncated, so that no end of
            turn is learned there. `tools` and `chat_template_kwargs` are passed to the chat template. [`parse_row`]
            has the forms of messages.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the target. Rows of `input_ids` do not need it.
        max_length (`int`, *optional*):
            The number of tokens after which the row is truncated. None keeps all tokens.
        eos_token_ids (`Sequence[int]`):
            Tokens that end a turn. No token after the first of them is supervised in that turn.
        chat_template_kwargs (`Mapping`, *optional*):
            Arguments for the chat template that apply to every row. Those of the row take precedence.

    Returns:
        `tuple[list[int], list[bool]]`: The token ids, and a mask that is True at the tokens that carry loss.

    Raises:
        ValueError: The columns are unknown, `input_ids` is not a flat list of integers, a mask does not fit to them,
            the messages cannot be read, or the chat template refuses the row or renders it so that the last
            completion cannot be found.
    """
    tokenizer = text_tokenizer(tokenizer)
    tokenized = read_row(row, tokenizer, eos_token_ids=eos_token_ids, chat_template_kwargs=chat_template_kwargs)
    warn_of_unlearned_text(tokenized)
    return tokenized.input_ids[:max_length], tokenized.supervised_mask[:max_length]


def warn_of_unlearned_text(tokenized: TokenizedRow, *, of_keys: bool = True) -> None:
    """
    Warn, once in a process, of assistant turns without loss and of keys that the chat template does not render.

    Args:
        tokenized ([`TokenizedRow`]): A row.
        of_keys (`bool`, defaults to `True`): Whether to warn of keys, which callers may count instead.
    """
    if tokenized.unsupervised_turns:
        logger.warning_once(
            "The chat template renders earlier assistant turns differently once a conversation continues, for example "
            "without their thinking. Such turns are context and carry no loss. To train on them, pass each "
            "conversation up to such a turn as a row of its own, as dflash-hf prepare --split-turns does."
        )
    if tokenized.ignored_keys and of_keys:
        logger.warning_once(
            f"The chat template does not render {', '.join(tokenized.ignored_keys)} of a message, so that nothing of "
            "it is learned. Rename such keys to those that the template reads, or remove them."
        )


def read_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenizedRow:
    """
    Tokenise one row without truncation, and find the assistant turns that carry no loss.

    Args:
        row, tokenizer, eos_token_ids, chat_template_kwargs:
            The arguments of [`tokenize_row`].

    Returns:
        [`TokenizedRow`]

    Raises:
        ValueError: See [`tokenize_row`]. It is a [`ChatTemplateError`] if the chat template is the cause, and an
            [`UnreadableRowError`] if the texts or messages are.
    """
    return read_converted_row(
        convert_row(row, tokenizer, chat_template_kwargs),
        tokenizer,
        eos_token_ids=eos_token_ids,
        chat_template_kwargs=chat_template_kwargs,
    )


def convert_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ParsedRow:
    """
    Convert the messages of a row to the form that the chat template renders.

    Args:
        row, tokenizer, chat_template_kwargs:
            The arguments of [`tokenize_row`].

    Returns:
        [`ParsedRow`]: The row as [`parse_row`] returns it, with arguments of tool calls and contents as
        [`ChatRenderer.adapt`] returns them.

    Raises:
        ValueError: See [`read_row`].
    """
    parsed = parse_row(row)
    if tokenizer is None or not tokenizer.chat_template or messages_of(parsed) is None:
        return parsed
    renderer = row_renderer(parsed, tokenizer, chat_template_kwargs)
    if "messages" in parsed:
        return ParsedRow({**parsed, "messages": renderer.adapt(parsed["messages"])})
    count = len(parsed["prompt"])
    messages = renderer.adapt([*parsed["prompt"], *parsed["completion"]])
    return ParsedRow({**parsed, "prompt": messages[:count], "completion": messages[count:]})


def read_converted_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenizedRow:
    """
    Tokenise a row from [`convert_row`].

    Args:
        row, tokenizer, eos_token_ids, chat_template_kwargs:
            The arguments of [`read_row`].

    Returns:
        [`TokenizedRow`]

    Raises:
        ValueError: See [`read_row`].
    """
    if row.get("input_ids") is not None:
        return read_token_row(row)
    _check_has_no_token_columns(row)
    if tokenizer is None:
        raise ValueError("The row has text, and text needs a tokenizer. Pass processing_class=tokenizer.")
    is_truncated = row.get("finish_reason") == "length"
    turn_tokenizer = _TurnTokenizer(tokenizer, eos_token_ids)
    if row.get("messages") is None and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return _join(*turn_tokenizer.tokenize_texts(row["prompt"], row["completion"], is_truncated))
    messages, first_supervised = conversation_of(row)
    if not messages:
        return TokenizedRow([], [])
    if not tokenizer.chat_template:
        raise ValueError(
            "The row has messages, and the tokenizer has no chat template to render them. Pass `prompt` and "
            "`completion` texts, or `input_ids`, or a target with a chat template."
        )
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    turns = [turn for turn in supervised_turns(messages) if turn >= first_supervised]
    if not turns:
        ids = encode(tokenizer, renderer.render(messages))
        return TokenizedRow(ids, [False] * len(ids))
    *earlier, last = turns
    rendered = renderer.split_completion(messages[: last + 1], is_truncated)
    tokenized = _join(*turn_tokenizer.tokenize(rendered, is_truncated))
    unsupervised = [
        turn
        for turn in earlier
        if not _supervise_turn(tokenized, rendered.prompt, renderer, turn_tokenizer, messages[: turn + 1])
    ]
    return TokenizedRow(
        tokenized.input_ids,
        tokenized.supervised_mask,
        tuple(unsupervised),
        renderer.ignored_keys(messages[: last + 1]),
    )


def _check_has_no_token_columns(row: Mapping[str, Any]) -> None:
    """Raise an error if a row without tokens has a column of values for each token."""
    found = [name for name in TOKEN_COLUMNS if row.get(name) is not None]
    if found:
        raise ValueError(
            f"The row has {', '.join(found)} and no input_ids, to which they belong. Add the tokens, or remove the "
            "columns."
        )


def conversation_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """
    Return the messages of a row, and the position of the first that may be supervised.

    Raises:
        ValueError: The columns are unknown, or a message cannot be read.
    """
    parsed = parse_row(row)
    if "messages" in parsed:
        return parsed["messages"], 0
    if "prompt" in parsed and "completion" in parsed and not isinstance(parsed["prompt"], str):
        return [*parsed["prompt"], *parsed["completion"]], len(parsed["prompt"])
    raise ValueError(
        f"The row has the columns {sorted(parsed)}, and a row needs `messages`, or `prompt` and `completion`, or "
        "`input_ids`. Rename the columns."
    )


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """
    Return the messages of a row, or None if the row has text or tokens only.

    Raises:
        ValueError: See [`conversation_of`].
    """
    is_text = isinstance(row.get("completion"), str) and as_messages(row["completion"]) is None
    has_messages = any(row.get(name) is not None for name in CONVERSATION_COLUMNS)
    if not has_messages and (is_text or row.get("completion") is None):
        return None
    return conversation_of(row)[0]


def assistant_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the positions of the assistant turns of a conversation."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def supervised_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the positions of the assistant turns that no key, such as `weight`, leaves out of the loss."""
    return [index for index in assistant_turns(messages) if carries_loss(messages[index])]


def row_renderer(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None
) -> ChatRenderer:
    """
    Return the chat template with the arguments of a row.

    Args:
        row (`Mapping`): A row whose `tools` and `chat_template_kwargs` are passed to the template.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer that has the template.
        chat_template_kwargs (`Mapping`, *optional*): Arguments of every row. Those of the row take precedence.

    Returns:
        [`ChatRenderer`]
    """
    parsed = parse_row(row)
    own = parsed.get("chat_template_kwargs", {})
    return ChatRenderer(tokenizer, parsed.get("tools"), {**(chat_template_kwargs or {}), **own})


def unsupervised_turns(
    row: Mapping[str, Any],
    tokenized: TokenizedRow,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """
    Find the earlier assistant turns that carry no loss in a row with recorded tokens.

    Args:
        row (`Mapping`): A row with `messages` and `input_ids`.
        tokenized ([`TokenizedRow`]): The same row, tokenised.
        tokenizer, chat_template_kwargs: The arguments of [`tokenize_row`].

    Returns:
        `tuple[int, ...]`: The positions of these turns in `messages`. There are none if the row has as many ranges of
        supervised tokens as assistant turns.
    """
    mask = tokenized.supervised_mask
    messages, _ = conversation_of(row)
    turns = supervised_turns(messages)
    num_ranges = sum(is_in and not was_in for was_in, is_in in zip([False, *mask[:-1]], mask, strict=True))
    if num_ranges >= len(turns):
        return ()
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    unsupervised = []
    for turn in turns[:-1]:
        try:
            prompt_ids = renderer.prompt_ids(messages[:turn])
        except ChatTemplateError:
            continue  # the turn could not be rendered in a row of its own either
        start = len(prompt_ids)
        if tokenized.input_ids[:start] != prompt_ids or not any(mask[start : start + 1]):
            unsupervised.append(turn)
    return tuple(unsupervised)


def split_turns(row: Mapping[str, Any], turns: Sequence[int]) -> Iterator[dict[str, Any]]:
    """
    Make a row of its own for each of some assistant turns: the conversation up to that turn.

    Args:
        row (`Mapping`): A row of `messages`.
        turns (`Sequence[int]`): The positions of the turns in `messages`.

    Yields:
        `dict`: Rows in which only the last message, an assistant turn, is supervised.
    """
    not_shared = {"messages", "prompt", "completion", "input_ids", *TOKEN_COLUMNS, "finish_reason", "sample_id"}
    messages, _ = conversation_of(row)
    shared = {name: value for name, value in parse_row(row).items() if name not in not_shared}
    for turn in turns:
        yield ParsedRow({**shared, "prompt": messages[:turn], "completion": [messages[turn]]})


class _TurnTokenizer:
    """Tokenises a prompt in the way of generation, and a completion as the continuation of its prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = {*eos_token_ids, tokenizer.eos_token_id}

    def tokenize(self, rendered: RenderedCompletion, is_truncated: bool) -> tuple[list[int], list[int], int]:
        """Return the tokens of the prompt and of the completion, and how many of the latter the target wrote."""
        prompt = rendered.prompt + rendered.inserted
        prompt_ids = encode(self.tokenizer, prompt)
        completion_ids = self._continue(prompt_ids, prompt, rendered.completion)
        end = next((index for index, token in enumerate(completion_ids) if token in self.end_token_ids), None)
        if end is None:
            return prompt_ids, completion_ids, len(completion_ids)
        return (prompt_ids, completion_ids[:end], end) if is_truncated else (prompt_ids, completion_ids, end + 1)

    def tokenize_texts(self, prompt: str, completion: str, is_truncated: bool) -> tuple[list[int], list[int], int]:
        """
        Tokenise texts that no template has rendered: the tokens of the prompt are those of `tokenizer(prompt)`.

        The prompt begins with the special tokens that the tokenizer adds before a text. Those that it adds after a
        text are left out, since the completion follows.
        """
        prompt_ids, completion_ids, num_written = self.tokenize(
            RenderedCompletion(prompt, "", completion), is_truncated
        )
        return self._added_before() + prompt_ids, completion_ids, num_written

    def _added_before(self) -> list[int]:
        """Return the special tokens that the tokenizer adds before a text, whichever text it is."""
        alone, added = encode(self.tokenizer, _ANY_TEXT), list(self.tokenizer(_ANY_TEXT)["input_ids"])
        starts = range(len(added) - len(alone) + 1)
        num_before = next((start for start in starts if added[start : start + len(alone)] == alone), None)
        if num_before is None:
            raise ChatTemplateError(
                "The tokenizer gives a text other tokens when it adds special tokens, so that the prompt of serving "
                "cannot be continued. Pass rows of `input_ids` with `loss_mask`, as the target read and wrote them."
            )
        return added[:num_before]

    def _continue(self, prompt_ids: list[int], prompt: str, completion: str) -> list[int]:
        """
        Return the tokens of a completion after the tokens of its prompt.

        Where the tokenizer merges the end of the prompt and the start of the completion into one token, the completion
        is tokenised without the prompt: after a special token or alone, and without the space that some tokenizers
        add before a text.
        """
        together = encode(self.tokenizer, prompt + completion)
        if together[: len(prompt_ids)] == prompt_ids:
            return together[len(prompt_ids) :]
        text = self._decode(together)
        separate = [encode(self.tokenizer, completion)]
        if self.tokenizer.eos_token is not None:
            separate.insert(0, encode(self.tokenizer, self.tokenizer.eos_token + completion)[1:])
        for ids in separate:
            for candidate in (ids, ids[1:]):
                if self._decode(prompt_ids + candidate) == text:
                    return candidate
        raise ChatTemplateError(
            "The tokenizer merges the end of the prompt and the start of the completion into one token, and the two "
            "give a different text when they are tokenised separately. Pass rows of `input_ids` with `loss_mask`, as "
            "the target read and wrote them."
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _join(prompt_ids: list[int], completion_ids: list[int], num_written: int) -> TokenizedRow:
    """Return a row of which the first `num_written` tokens of the completion are supervised."""
    mask = [False] * len(prompt_ids) + [index < num_written for index in range(len(completion_ids))]
    return TokenizedRow(prompt_ids + completion_ids, mask)


def _supervise_turn(
    tokenized: TokenizedRow,
    last_prompt: str,
    renderer: ChatRenderer,
    turn_tokenizer: _TurnTokenizer,
    messages: list[dict[str, Any]],
) -> bool:
    """
    Mark an earlier assistant turn in the mask if the row still contains its prompt and its completion exactly.

    The history may end the turn with another token than the target wrote (an end of message in place of a return).
    That token stays unsupervised.

    Args:
        tokenized ([`TokenizedRow`]): The row, whose mask is changed in place.
        last_prompt (`str`): The prompt of the last turn of the row.
        renderer ([`ChatRenderer`]), turn_tokenizer (`_TurnTokenizer`): The template and the tokenizer of the row.
        messages (`list[dict]`): The conversation up to and with the turn.

    Returns:
        `bool`: Whether the turn is supervised now.
    """
    try:
        rendered = renderer.split_completion(messages)
        if not last_prompt.startswith(rendered.prompt + rendered.inserted):
            return False
        prompt_ids, completion_ids, num_written = turn_tokenizer.tokenize(rendered, is_truncated=False)
    except ChatTemplateError:
        return False
    start, written = len(prompt_ids), completion_ids[:num_written]
    num_equal = shared_length(tokenized.input_ids[start:], written)
    is_complete = num_equal == num_written or (
        num_equal == num_written - 1 and written[-1] in turn_tokenizer.end_token_ids
    )
    if tokenized.input_ids[:start] != prompt_ids or not is_complete or not num_equal:
        return False
    tokenized.supervised_mask[start : start + num_equal] = [True] * num_equal
    return True
