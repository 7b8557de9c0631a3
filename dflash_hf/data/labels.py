"""A row of text or messages → token ids, and which of them the target itself would have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .chat_template import ChatRenderer, RenderedAnswer, TemplateError, shared_length, without_nulls

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SupervisedRow:
    """
    A row as token ids.

    Args:
        ids (`list[int]`): all of it.
        mask (`list[bool]`): True at tokens that the target itself would have written.
        lost_answers (`tuple[int, ...]`): positions in `messages` of answers that carry no loss, since the conversation
            no longer has them as they were written.
    """

    ids: list[int]
    mask: list[bool]
    lost_answers: tuple[int, ...] = ()


def tokenize_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """
    Turn one row into token ids and the mask of tokens that carry loss.

    The ids before the last answer are those of `apply_chat_template(messages[:-1], add_generation_prompt=True)`, token
    for token, also where the tokenizer would join the end of the prompt and the beginning of the answer. The one
    exception is an empty thinking block that the template puts before an answer without thought: it is context.

    Args:
        row (`Mapping`):
            `messages` (a conversation; every assistant turn is supervised), or `prompt` and `completion` (texts or
            message lists; the completion is supervised), or `input_ids` with an optional `loss_mask` (in prepared rows
            `supervised_mask`; all tokens are supervised without it). `finish_reason == "length"` says that the last
            answer was cut off, so that no end of turn is learned there. `tools` and `chat_template_kwargs` reach the
            chat template.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's; not needed for rows of `input_ids`.
        max_length (`int`):
            In tokens; what is longer is cut at the end.
        eos_token_ids (`Sequence[int]`):
            Ids that end an answer: nothing after the first of them is supervised in a turn.
        chat_template_kwargs (`Mapping`, *optional*):
            For every row.

    Returns:
        `tuple[list[int], list[bool]]`: the ids, and True at tokens the target itself would have generated.

    Raises:
        ValueError: the columns are unknown, `input_ids` are no flat list of integers, or the chat template refuses the
            row or renders its last answer so that the beginning cannot be found.
    """
    read = read_row(row, tokenizer, eos_token_ids=eos_token_ids, chat_template_kwargs=chat_template_kwargs)
    if read.lost_answers:
        logger.warning_once(
            "The chat template renders earlier answers of a conversation otherwise once it goes on (it strips "
            "thinking, for instance): such answers are context and carry no loss. To train on them, give each "
            "beginning of a conversation that ends with an answer as a row of its own, as dflash-hf prepare "
            "--split-turns does."
        )
    return read.ids[:max_length], read.mask[:max_length]


def read_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> SupervisedRow:
    """
    Turn one row into token ids, whole, and say which of its answers carry no loss.

    Args:
        row, tokenizer, eos_token_ids, chat_template_kwargs:
            As in [`tokenize_row`].

    Returns:
        [`SupervisedRow`]

    Raises:
        ValueError: as [`tokenize_row`]; a [`TemplateError`] if the chat template is the reason.
    """
    if row.get("input_ids") is not None:
        return _given_ids(row)
    if tokenizer is None:
        raise ValueError("Rows of text need a tokenizer: pass processing_class=tokenizer.")
    is_cut = row.get("finish_reason") == "length"
    tokens = _Tokens(tokenizer, eos_token_ids)
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str) and row.get("messages") is None:
        prompt_ids, answer_ids, count = tokens.of_answer(RenderedAnswer(row["prompt"], "", row["completion"]), is_cut)
        return _join(prompt_ids, answer_ids, count)
    messages, first_supervised = conversation_of(row)
    if not messages:
        return SupervisedRow([], [])
    renderer = row_renderer(row, tokenizer, chat_template_kwargs)
    answers = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= first_supervised
    ]
    if not answers:
        ids = tokens.encode(renderer.text(messages))
        return SupervisedRow(ids, [False] * len(ids))
    *earlier, last = answers
    rendered = renderer.answer(messages[: last + 1], is_cut)
    read = _join(*tokens.of_answer(rendered, is_cut))
    lost = [
        index
        for index in earlier
        if not _supervise_earlier(read, rendered.prompt, renderer, tokens, messages[: index + 1])
    ]
    return SupervisedRow(read.ids, read.mask, tuple(lost))


def conversation_of(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """
    The messages of a row, without nulls, and the position of the first that may be supervised.

    Raises:
        ValueError: the columns are unknown, or a message has no role.
    """
    if row.get("messages") is not None:
        messages, first_supervised = list(row["messages"]), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages, first_supervised = [*row["prompt"], *row["completion"]], len(row["prompt"])
    else:
        raise ValueError(
            f"A row has the columns {sorted(row)}; it needs `messages`, or `prompt` and `completion`, or `input_ids`."
        )
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") is None:
            raise ValueError(f"A message is {message!r}: it must be a mapping with `role` and `content`.")
    return without_nulls(messages), first_supervised


def row_renderer(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None
) -> ChatRenderer:
    """
    The chat template with the arguments of a row.

    Args:
        row (`Mapping`): its `tools` and `chat_template_kwargs` reach the template.
        tokenizer (`PreTrainedTokenizerBase`): has the template.
        chat_template_kwargs (`Mapping`, *optional*): for every row; those of the row come first.

    Returns:
        [`ChatRenderer`]
    """
    own = without_nulls(row.get("chat_template_kwargs") or {})
    return ChatRenderer(tokenizer, without_nulls(row.get("tools")), {**(chat_template_kwargs or {}), **own})


def answers_without_loss(
    row: Mapping[str, Any],
    read: SupervisedRow,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """
    Which earlier answers of a row with recorded ids carry no loss there.

    Args:
        row (`Mapping`): with `messages` beside its `input_ids`.
        read ([`SupervisedRow`]): the same row as ids.
        tokenizer, chat_template_kwargs: as in [`tokenize_row`].

    Returns:
        `tuple[int, ...]`: their positions in `messages`; none if as many stretches carry loss as there are answers.
    """
    messages, _ = conversation_of(row)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    num_stretches = sum(keep and not before for before, keep in zip([False, *read.mask[:-1]], read.mask, strict=True))
    if num_stretches >= len(answers):
        return ()
    renderer, tokens = row_renderer(row, tokenizer, chat_template_kwargs), _Tokens(tokenizer, ())
    lost = []
    for index in answers[:-1]:
        try:
            prompt_ids = tokens.encode(renderer.text(messages[:index], add_generation_prompt=True))
        except TemplateError:
            continue  # a row of its own could not be rendered
        start = len(prompt_ids)
        if read.ids[:start] != prompt_ids or not any(read.mask[start : start + 1]):
            lost.append(index)
    return tuple(lost)


def split_turns(row: Mapping[str, Any], lost_answers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """
    Give answers rows of their own: each the conversation up to that answer.

    Args:
        row (`Mapping`): a row of `messages`.
        lost_answers (`Sequence[int]`): positions of the answers in `messages`.

    Yields:
        `dict`: rows in which the answer is the last message and carries the loss alone.
    """
    of_whole_row = {"messages", "input_ids", "loss_mask", "finish_reason", "sample_id"}
    kept = {name: value for name, value in row.items() if name not in of_whole_row}
    for index in lost_answers:
        messages = list(row["messages"])
        yield {**kept, "prompt": messages[:index], "completion": [messages[index]]}


class _Tokens:
    """Tokenises a prompt as generation does, and an answer as what comes after it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ends = {*eos_token_ids, tokenizer.eos_token_id}

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def of_answer(self, rendered: RenderedAnswer, is_cut: bool) -> tuple[list[int], list[int], int]:
        """Ids of the prompt, ids of the answer, and how many of these the target wrote."""
        prompt = rendered.prompt + rendered.inserted
        prompt_ids = self.encode(prompt)
        answer_ids = self._after(prompt_ids, prompt, rendered.answer)
        end = next((index for index, token in enumerate(answer_ids) if token in self.ends), None)
        if end is None:
            return prompt_ids, answer_ids, len(answer_ids)
        return (prompt_ids, answer_ids[:end], end) if is_cut else (prompt_ids, answer_ids, end + 1)

    def _after(self, prompt_ids: list[int], prompt: str, answer: str) -> list[int]:
        """
        Ids of an answer after the ids of its prompt.

        Where the tokenizer joins the end of the prompt and the beginning of the answer in one token, the answer is
        tokenised without the prompt: behind a special token or by itself, less the space that some tokenizers put
        before a text.
        """
        together = self.encode(prompt + answer)
        if together[: len(prompt_ids)] == prompt_ids:
            return together[len(prompt_ids) :]
        text = self._decode(together)
        alone = [self.encode(answer)]
        if self.tokenizer.eos_token is not None:
            alone.insert(0, self.encode(self.tokenizer.eos_token + answer)[1:])
        for ids in alone:
            for candidate in (ids, ids[1:]):
                if self._decode(prompt_ids + candidate) == text:
                    return candidate
        raise TemplateError(
            "The tokenizer joins the end of the prompt and the beginning of the answer, and tokenised apart they are "
            "another text. Pass `input_ids` with `loss_mask`, as the target read and wrote them."
        )

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _join(prompt_ids: list[int], answer_ids: list[int], num_written: int) -> SupervisedRow:
    mask = [False] * len(prompt_ids) + [index < num_written for index in range(len(answer_ids))]
    return SupervisedRow(prompt_ids + answer_ids, mask)


def _supervise_earlier(
    read: SupervisedRow,
    last_prompt: str,
    renderer: ChatRenderer,
    tokens: _Tokens,
    messages: list[dict[str, Any]],
) -> bool:
    """
    Mark an earlier answer in the mask, where the row still has its prompt and the answer token for token.

    The token that ended it may be another one since (a return that became an end of message): that one is left out.
    """
    try:
        rendered = renderer.answer(messages)
        if not last_prompt.startswith(rendered.prompt + rendered.inserted):
            return False
        prompt_ids, answer_ids, num_written = tokens.of_answer(rendered, is_cut=False)
    except TemplateError:
        return False
    start, written = len(prompt_ids), answer_ids[:num_written]
    same = shared_length(read.ids[start:], written)
    is_whole = same == num_written or (same == num_written - 1 and written[-1] in tokens.ends)
    if read.ids[:start] != prompt_ids or not is_whole or not same:
        return False
    read.mask[start : start + same] = [True] * same
    return True


def _given_ids(row: Mapping[str, Any]) -> SupervisedRow:
    ids = _plain_list(row["input_ids"])
    for token in ids:
        if type(token) is not int:
            raise ValueError(f"input_ids hold {token!r}: they must be one flat list of integers.")
    if row.get("segment_ids") is not None:
        raise ValueError(
            "It is a packed row, and packed rows are read from a datasets.Dataset alone. Give the documents, and "
            "packing=True."
        )
    given = row.get("loss_mask") if row.get("loss_mask") is not None else row.get("supervised_mask")
    mask = [True] * len(ids) if given is None else [bool(keep) for keep in given]
    if len(mask) != len(ids):
        raise ValueError(f"loss_mask has {len(mask)} entries for {len(ids)} input_ids: they must be equally long.")
    return SupervisedRow(ids, mask)


def _plain_list(values: Any) -> list[Any]:
    """A list of Python numbers, also from an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)
