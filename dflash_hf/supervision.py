"""A row of text or messages → token ids, and which of them the target itself would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)


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
        ValueError: the columns are unknown, `input_ids` are no flat list of integers, or the chat template renders an
            answer so that its beginning cannot be found.
    """
    if row.get("input_ids") is not None:
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
        return ids[:max_length], mask[:max_length]
    if tokenizer is None:
        raise ValueError("Rows of text need a tokenizer: pass processing_class=tokenizer.")

    ends = {*eos_token_ids, tokenizer.eos_token_id}
    text, spans = _render(row, tokenizer, {**(chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})})
    ids, mask = _mask_spans(tokenizer, text, spans)
    open_turn = True
    for index, supervised in enumerate(mask):
        if not supervised:
            open_turn = True
        elif not open_turn:
            mask[index] = False
        elif ids[index] in ends:
            open_turn = False
    return ids[:max_length], mask[:max_length]


def _plain_list(values: Any) -> list[Any]:
    """A list of Python numbers, also from an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _render(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The row as one text, and the character spans of its answers."""
    if row.get("messages") is not None:
        messages, first_supervised = list(row["messages"]), 0
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        messages, first_supervised = [*prompt, *completion], len(prompt)
    else:
        raise ValueError(
            f"A row has the columns {sorted(row)}; it needs `messages`, or `prompt` and `completion`, or `input_ids`."
        )
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") is None:
            raise ValueError(f"A message is {message!r}: it must be a mapping with `role` and `content`.")
    if not messages:
        return "", []
    # Columnar storage fills missing keys of a message with None
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]

    def render(part: list[dict[str, Any]], **kwargs: Any) -> str:
        text = tokenizer.apply_chat_template(part, tools=row.get("tools"), tokenize=False, **kwargs, **template_kwargs)
        return str(text)

    answers = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= first_supervised
    ]
    if not answers:
        return render(messages), []
    last = answers[-1]
    messages = messages[: last + 1]
    was_cut = row.get("finish_reason") == "length"
    text = render(messages, continue_final_message=True) if was_cut else render(messages)
    spans = []
    for index in answers:
        prompt_text = render(messages[:index], add_generation_prompt=True)
        answer_end = len(text) if index == last else len(render(messages[: index + 1]))
        if text.startswith(prompt_text) and (index == last or text.startswith(render(messages[: index + 1]))):
            spans.append((len(prompt_text), answer_end))
        elif index == last:
            raise ValueError(
                "The chat template renders the conversation so that it does not begin with the prompt of its last "
                "answer (a template that strips thinking or adds dates does this). Pass rows of `prompt` and "
                "`completion` texts, or `input_ids` with `loss_mask`, or other chat_template_kwargs."
            )
        else:
            logger.warning_once(
                "The chat template renders earlier answers of a conversation otherwise once it goes on (it strips "
                "thinking, for instance): such answers are context and carry no loss. To train on them, give each "
                "beginning of a conversation that ends with an answer as a row of its own."
            )
    return text, spans


def _mask_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of `text`, and True at tokens that begin inside one of the character spans."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), [any(a <= start < b for a, b in spans) for start in starts]
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    mask = [False] * len(ids)
    for span in spans:
        first, after = (len(tokenizer(text[:end], add_special_tokens=False)["input_ids"]) for end in span)
        mask[first:after] = [True] * (after - first)
    return ids, mask
