"""Rows of text or messages → token ids, supervised mask, sample id; and the collator that batches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

TOO_LONG = "longer than max_length, with nothing supervised left"
UNSUPERVISED = "nothing supervised"


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
            message lists; the completion is supervised), or `input_ids` with an optional `loss_mask` (all tokens are
            supervised without it). `finish_reason == "length"` says that the last answer was cut off, so that no end
            of turn is learned there. `tools` and `chat_template_kwargs` reach the chat template.
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
        ValueError: the columns are unknown, or the chat template renders an answer so that its beginning cannot be
            found.
    """
    if row.get("input_ids") is not None:
        ids = list(row["input_ids"])
        mask = [bool(value) for value in row["loss_mask"]] if row.get("loss_mask") is not None else [True] * len(ids)
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


def prepare_dataset(
    dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    forbidden_token_id: int | None = None,
    description: str = "train",
) -> datasets.Dataset:
    """
    Tokenise a data set and drop the rows that no block can be trained on, with a count of each reason.

    Args:
        dataset (`datasets.Dataset` or a sequence of rows):
            Rows as [`tokenize_row`] takes them, with an optional integer `sample_id` (by default the row number).
        tokenizer, max_length, eos_token_ids, chat_template_kwargs:
            As in [`tokenize_row`].
        forbidden_token_id (`int`, *optional*):
            The draft's mask token: an error if a row contains it, since it could not be told from "not yet known".
        description (`str`, defaults to `"train"`):
            Names the set in messages.

    Returns:
        `datasets.Dataset` with `input_ids`, `supervised_mask` and `sample_id`.

    Raises:
        ValueError: no row is left, or a row contains the mask token.
    """
    if not isinstance(dataset, datasets.Dataset):
        dataset = datasets.Dataset.from_list([dict(row) for row in dataset])

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        full_ids, full_mask = tokenize_row(
            row,
            tokenizer,
            max_length=2**62,
            eos_token_ids=eos_token_ids,
            chat_template_kwargs=chat_template_kwargs,
        )
        ids, mask = full_ids[:max_length], full_mask[:max_length]
        reason = None
        if not any(mask[1:]):
            reason = TOO_LONG if any(full_mask[1:]) else UNSUPERVISED
        sample_id = row.get("sample_id")
        return {
            "input_ids": ids,
            "supervised_mask": mask,
            "sample_id": index if sample_id is None else sample_id,
            "drop_reason": reason or "",
        }

    converted = dataset.map(
        convert, with_indices=True, remove_columns=dataset.column_names, desc=f"Tokenising {description}"
    )
    reasons = Counter(converted["drop_reason"] if len(converted) else [])
    dropped = {reason: count for reason, count in reasons.items() if reason}
    if dropped:
        details = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        logger.warning(f"The {description} set: {sum(dropped.values())} of {len(converted)} rows dropped ({details}).")
        converted = converted.filter(lambda reason: not reason, input_columns="drop_reason", desc="Dropping rows")
    if len(converted) == 0:
        raise ValueError(
            f"The {description} set has no usable row: {len(dataset)} rows came in, "
            f"{', '.join(f'{count} were {reason}' for reason, count in dropped.items()) or 'the set is empty'}. "
            "Give it rows with answers, or raise max_length."
        )
    if forbidden_token_id is not None:
        for row in converted:
            if forbidden_token_id in row["input_ids"]:
                raise ValueError(
                    f"Row {row['sample_id']} of the {description} set contains the mask token {forbidden_token_id}. "
                    "Choose another mask_token_id when making the draft, one that never occurs in text."
                )
    return converted.remove_columns("drop_reason")


@dataclass
class DFlashCollator:
    """
    Pad prepared rows into a batch.

    Args:
        pad_token_id (`int`, defaults to 0): fills `input_ids`; never seen by the draft.
        padding_side (`str`, defaults to `"right"`): training gives the same result with `"left"`.

    Returns (when called):
        `dict`: `input_ids` (int64), `token_valid_mask` and `supervised_mask` (bool), each `[R, S]`, and `sample_ids`
        (int64 `[R]`).
    """

    pad_token_id: int = 0
    padding_side: str = "right"

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        input_ids = torch.full((len(rows), length), self.pad_token_id)
        token_valid_mask = torch.zeros(len(rows), length, dtype=torch.bool)
        supervised_mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for index, row in enumerate(rows):
            count = len(row["input_ids"])
            columns = slice(0, count) if self.padding_side == "right" else slice(length - count, length)
            input_ids[index, columns] = torch.as_tensor(row["input_ids"])
            token_valid_mask[index, columns] = True
            supervised_mask[index, columns] = torch.as_tensor(row["supervised_mask"], dtype=torch.bool)
        sample_ids = torch.tensor([int(row["sample_id"]) for row in rows])
        return {
            "input_ids": input_ids,
            "token_valid_mask": token_valid_mask,
            "supervised_mask": supervised_mask,
            "sample_ids": sample_ids,
        }
