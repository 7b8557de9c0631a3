"""Tokenisation of rows, and the mask of the tokens that carry loss: those that the target itself would write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .chat_template import (
    ChatRenderer,
    ChatTemplateError,
    RenderedCompletion,
    encode,
    shared_length,
    without_nulls,
)

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TokenizedRow:
    """
    A tokenised row that is not truncated.

    Args:
        input_ids (`list[int]`): The tokens of the row.
        supervised_mask (`list[bool]`): True at the tokens that the target itself would write.
        unsupervised_turns (`tuple[int, ...]`): Positions in `messages` of assistant turns that carry no loss, since
            the template renders them differently once the conversation continues.
    """

    input_ids: list[int]
    supervised_mask: list[bool]
    unsupervised_turns: tuple[int, ...] = ()


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
            A row in one of three forms. With `messages`, a conversation, every assistant turn is supervised. With
            `prompt` and `completion`, texts or lists of messages, the completion is supervised. With `input_ids` the
            optional `loss_mask` (in prepared rows `supervised_mask`) marks the supervised tokens, and all tokens are
            supervised without it. If `finish_reason` is `"length"`, the last completion is truncated, so that no end
            of turn is learned there. `tools` and `chat_template_kwargs` are passed to the chat template.
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
        ValueError: The columns are unknown, `input_ids` is not a flat list of integers, or the chat template refuses
            the row or renders it so that the last completion cannot be found.
    """
    tokenized = read_row(row, tokenizer, eos_token_ids=eos_token_ids, chat_template_kwargs=chat_template_kwargs)
    if tokenized.unsupervised_turns:
        logger.warning_once(
            "The chat template renders earlier assistant turns differently once a conversation continues, for example "
            "without their thinking. Such turns are context and carry no loss. To train on them, pass each "
            "conversation up to such a turn as a row of its own, as dflash-hf prepare --split-turns does."
        )
    return tokenized.input_ids[:max_length], tokenized.supervised_mask[:max_length]


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
        ValueError: See [`tokenize_row`]. It is a [`ChatTemplateError`] if the chat template is the cause.
    """
    if row.get("input_ids") is not None:
        return _from_input_ids(row)
    if tokenizer is None:
        raise ValueError("The row has text, and text needs a tokenizer. Pass processing_class=tokenizer.")
    is_truncated = row.get("finish_reason") == "length"
    turn_tokenizer = _TurnTokenizer(tokenizer, eos_token_ids)
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str) and row.get("messages") is None:
        rendered = RenderedCompletion(row["prompt"], "", row["completion"])
        return _join(*turn_tokenizer.tokenize(rendered, is_truncated))
    messages, first_supervised = conversation_of(row)
    if not messages:
        return TokenizedRow([], [])
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    turns = [turn for turn in assistant_turns(messages) if turn >= first_supervised]
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
    return TokenizedRow(tokenized.input_ids, tokenized.supervised_mask, tuple(unsupervised))


def conversation_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """
    Return the messages of a row, without nulls, and the position of the first that may be supervised.

    Raises:
        ValueError: The columns are unknown, or a message has no role.
    """
    if row.get("messages") is not None:
        messages, first_supervised = list(row["messages"]), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages, first_supervised = [*row["prompt"], *row["completion"]], len(row["prompt"])
    else:
        raise ValueError(
            f"The row has the columns {sorted(row)}, and a row needs `messages`, or `prompt` and `completion`, or "
            "`input_ids`. Rename the columns."
        )
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") is None:
            raise ValueError(
                f"A message of the row is {message!r}, and a message must be a mapping with `role` and `content`. "
                "Correct the message."
            )
    return without_nulls(messages), first_supervised


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """
    Return the messages of a row, without nulls, or None if the row has text or tokens only.

    Raises:
        ValueError: See [`conversation_of`].
    """
    if row.get("messages") is None and not isinstance(row.get("completion"), (list, tuple)):
        return None
    return conversation_of(row)[0]


def assistant_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the positions of the assistant turns of a conversation."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


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
    own = without_nulls(row.get("chat_template_kwargs") or {})
    return ChatRenderer(tokenizer, without_nulls(row.get("tools")), {**(chat_template_kwargs or {}), **own})


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
    turns = assistant_turns(messages)
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
    not_shared = {"messages", "input_ids", "loss_mask", "finish_reason", "sample_id"}
    shared = {name: value for name, value in row.items() if name not in not_shared}
    for turn in turns:
        messages = list(row["messages"])
        yield {**shared, "prompt": messages[:turn], "completion": [messages[turn]]}


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


def _from_input_ids(row: Mapping[str, Any]) -> TokenizedRow:
    """Read a row that has its tokens, and its mask if it has one."""
    ids = _as_list(row["input_ids"])
    for token in ids:
        if type(token) is not int:
            raise ValueError(
                f"The row's input_ids contain {token!r}, and they must be a flat list of integers. Convert the column."
            )
    if row.get("segment_ids") is not None:
        raise ValueError(
            "The row is packed, and packed rows are only accepted in a datasets.Dataset. Pass the documents, and set "
            "packing=True."
        )
    given = row.get("loss_mask") if row.get("loss_mask") is not None else row.get("supervised_mask")
    mask = [True] * len(ids) if given is None else [bool(keep) for keep in given]
    if len(mask) != len(ids):
        raise ValueError(
            f"The row's loss_mask has {len(mask)} entries for {len(ids)} input_ids, and the lengths must be equal. "
            "Correct the column."
        )
    return TokenizedRow(ids, mask)


def _as_list(values: Any) -> list[Any]:
    """Return a list of Python numbers from a list, an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)
