"""Data sets and streams of prepared rows: tokenised, labelled, checked and, on request, packed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import datasets
import torch
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..blocks.plan import MAX_SAMPLE_ID
from ..files import digest_number
from ..model.configuration_dflash import text_tokenizer
from .chat_template import ChatTemplateError
from .conversations import UnreadableRowError
from .labels import convert_row, read_converted_row, warn_of_unlearned_text
from .packing import pack_dataset, pack_stream
from .prepared_rows import are_trainable, check_packed_rows
from .text import short
from .token_rows import TokenizedRow

logger = logging.get_logger(__name__)

PREPARED_COLUMNS = ("input_ids", "supervised_mask", "sample_id", "segment_ids")

# Reasons to drop a row. They complete the sentence "3 rows were …".
UNSUPERVISED = "without supervised tokens"
TOO_LONG = "without supervised tokens within max_length"
REFUSED = "refused by the chat template"
UNREADABLE = "without readable messages or texts"
UNEMBEDDED = "with text of a token that the target's embedding has no row for"

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int64")),
        "supervised_mask": datasets.Sequence(datasets.Value("bool")),
        "sample_id": datasets.Value("int64"),
        "drop_reason": datasets.Value("string"),
        "is_truncated": datasets.Value("bool"),
        "refusal": datasets.Value("string"),
        "ignored_keys": datasets.List(datasets.Value("string")),
    }
)
_COUNTED = ("drop_reason", "is_truncated", "refusal", "ignored_keys")


def prepare_rows(
    dataset: Any, *, max_length: int, is_packed: bool = False, is_repeated: bool = True, **kwargs: Any
) -> datasets.Dataset | PreparedStream:
    """
    Prepare the data set of a trainer. Rows that are already prepared are checked, and not changed if they are right.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or a sequence of rows):
            Rows in any form that [`prepare_row`] accepts, or prepared rows.
        max_length (`int`):
            The largest number of tokens of a row, and of a packed row.
        is_packed (`bool`, defaults to `False`):
            Whether to pack the rows.
        is_repeated (`bool`, defaults to `True`):
            Whether a stream starts again at its end, without limit. It has no effect on a data set.
        **kwargs:
            The further arguments of [`prepare_dataset`].

    Returns:
        `datasets.Dataset`, or [`PreparedStream`] for a stream.

    Raises:
        ValueError: See [`prepare_dataset`] and [`pack_dataset`].
        TypeError: The data set has another type.
    """
    if isinstance(dataset, PreparedStream):
        return dataset.with_repetition(is_repeated)
    if isinstance(dataset, datasets.IterableDataset):
        return PreparedStream(dataset, max_length=max_length, is_packed=is_packed, is_repeated=is_repeated, **kwargs)
    messages = {name: kwargs[name] for name in ("description", "is_quiet") if name in kwargs}
    if isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
        raise TypeError(
            f"The {messages.get('description', 'train')} set is a {type(dataset).__name__}: it must be one "
            "datasets.Dataset or datasets.IterableDataset, or a sequence of rows. Choose a split of a DatasetDict, "
            "or make a stream with datasets.IterableDataset.from_generator."
        )
    columns = set(getattr(dataset, "column_names", None) or ())
    limits: dict[str, Any] = {
        "max_length": max_length,
        "forbidden_token_id": kwargs.get("forbidden_token_id"),
        "num_embeddings": kwargs.get("num_embeddings"),
    }
    if "segment_ids" in columns:
        check_packed_rows(dataset, description=kwargs.get("description", "train"), **limits)
    elif "supervised_mask" not in columns or not are_trainable(dataset, **limits):
        dataset = prepare_dataset(dataset, max_length=max_length, **kwargs)
    if is_packed and "segment_ids" not in dataset.column_names:
        dataset = pack_dataset(dataset, max_length, **messages)
    return dataset


def prepare_dataset(
    dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    description: str = "train",
    is_quiet: bool = False,
    **kwargs: Any,
) -> datasets.Dataset:
    """
    Tokenise a data set and drop the rows that give no block to train on, with a count of each reason.

    Args:
        dataset (`datasets.Dataset` or a sequence of rows):
            Rows in any form that [`prepare_row`] accepts.
        tokenizer, max_length, description:
            The arguments of [`prepare_row`].
        is_quiet (`bool`, defaults to `False`):
            Whether to log no warnings, as every process but the first should.
        **kwargs:
            The further arguments of [`prepare_row`].

    Returns:
        `datasets.Dataset` with `input_ids`, `supervised_mask` and `sample_id`.

    Raises:
        ValueError: No row is left, or a row breaks a rule of [`prepare_row`].
    """
    tokenizer = text_tokenizer(tokenizer)
    counts = _RowCounts(description, max_length)
    if not len(dataset):
        raise counts.no_usable_row()
    prepare: Callable[..., dict[str, Any]] = partial(
        prepare_row, tokenizer=tokenizer, max_length=max_length, description=description, **kwargs
    )
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)
        converted = dataset.map(
            prepare,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=_FEATURES,
            desc=f"Tokenising {description}",
        )
    else:  # the rows may have forms that no column of a data set can hold together, such as texts and lists
        converted = datasets.Dataset.from_list(
            [prepare(row, index) for index, row in enumerate(dataset)], features=_FEATURES
        )
    # The rows are counted from the columns, so that a result from the cache of `map` is counted too
    for values in zip(*(converted[name] for name in _COUNTED), strict=True):
        counts.add(dict(zip(_COUNTED, values, strict=True)))
    if counts.num_affected and not is_quiet:
        logger.warning(str(counts))
    if not counts.num_kept:
        raise counts.no_usable_row()
    if counts.dropped:
        converted = converted.filter(lambda reason: not reason, input_columns="drop_reason", desc="Dropping rows")
    num_repeated = len(converted) - len(set(converted["sample_id"]))
    if num_repeated and not is_quiet:
        logger.warning(
            f"The {description} set: {num_repeated} of {len(converted)} rows repeat the sample_id of another row. "
            "Rows with equal ids and masks train on the same anchors in a step. Give each row an id of its own, or "
            "remove the column."
        )
    return converted.remove_columns(list(_COUNTED))


def prepare_row(
    row: Mapping[str, Any],
    index: int,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    forbidden_token_id: int | None = None,
    num_embeddings: int | None = None,
    description: str = "train",
) -> dict[str, Any]:
    """
    Tokenise one row and check everything that would otherwise fail in the middle of training.

    Args:
        row (`Mapping`):
            A row in any form that [`tokenize_row`] accepts, with an optional integer `sample_id`.
        index (`int`):
            The index of the row, which serves as its id if it has none.
        tokenizer, eos_token_ids, chat_template_kwargs:
            The arguments of [`tokenize_row`].
        max_length (`int`):
            The number of tokens after which the row is truncated.
        forbidden_token_id (`int`, *optional*):
            The draft's mask token. A row that contains it is an error, since the draft reads that token as a slot
            that is still to be predicted.
        num_embeddings (`int`, *optional*):
            The number of rows of the target's embedding. A token outside them is an error in `input_ids`, and a reason
            to drop a row of text.
        description (`str`, defaults to `"train"`):
            The name of the set in messages.

    Returns:
        `dict`: `input_ids`, `supervised_mask`, `sample_id`, `drop_reason` (empty if a block can be trained on the
        row), `is_truncated` (whether the row was longer than `max_length`), `refusal` (why its text cannot be
        read, rendered or embedded, which is a reason to drop it; empty otherwise) and `ignored_keys` (keys of its
        messages that the template does not render).

    Raises:
        ValueError: The row breaks a rule. The message names the row, its id and the rule.
    """
    tokenizer = text_tokenizer(tokenizer)
    sample_id = index if row.get("sample_id") is None else row["sample_id"]
    name = f"Row {index} (sample_id {short(sample_id)}) of the {description} set"
    try:
        check_sample_id(sample_id)
        _, tokenized, reason, refusal = read_or_drop(
            row,
            tokenizer,
            eos_token_ids=eos_token_ids,
            chat_template_kwargs=chat_template_kwargs,
            num_embeddings=num_embeddings,
        )
        full_ids, full_mask = tokenized.input_ids, tokenized.supervised_mask
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    warn_of_unlearned_text(tokenized, of_keys=False)
    ids, mask = full_ids[:max_length], full_mask[:max_length]
    if not reason and not any(mask[1:]):
        reason = TOO_LONG if any(full_mask[1:]) else UNSUPERVISED
    if not reason and forbidden_token_id in ids:
        raise ValueError(
            f"{name} contains the mask token {forbidden_token_id}, which must not occur in text. Choose another "
            "mask_token_id when you create the draft."
        )
    return {
        "input_ids": ids,
        "supervised_mask": mask,
        "sample_id": sample_id,
        "drop_reason": reason,
        "is_truncated": len(full_ids) > max_length,
        "refusal": refusal,
        "ignored_keys": list(tokenized.ignored_keys),
    }


def read_or_drop(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    eos_token_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_embeddings: int | None = None,
) -> tuple[dict[str, Any], TokenizedRow, str, str]:
    """
    Tokenise a row, or say why it is dropped.

    A row is dropped if its messages cannot be read, if the chat template refuses them, or if its text has a token that
    the target cannot read. A tokenizer may have special tokens for which the embedding was never resized.

    Args:
        row, tokenizer, eos_token_ids, chat_template_kwargs:
            The arguments of [`read_row`].
        num_embeddings (`int`, *optional*):
            The number of rows of the target's embedding.

    Returns:
        `tuple[dict, TokenizedRow, str, str]`: The row as [`convert_row`] returns it (empty if it cannot), the same row
        tokenised (empty if it is dropped), the reason to drop it in the words of counts, and the error in full.

    Raises:
        ValueError: The row breaks another rule of [`read_row`], or its `input_ids` are outside the embedding.
    """
    converted: dict[str, Any] = {}
    try:
        converted = convert_row(row, tokenizer, chat_template_kwargs)
        tokenized = read_converted_row(
            converted, tokenizer, eos_token_ids=eos_token_ids, chat_template_kwargs=chat_template_kwargs
        )
    except (ChatTemplateError, UnreadableRowError) as error:
        reason = REFUSED if isinstance(error, ChatTemplateError) else UNREADABLE
        return converted, TokenizedRow([], []), reason, str(error)
    try:
        check_token_ids(tokenized.input_ids, num_embeddings)
    except ValueError as error:
        if row.get("input_ids") is not None:  # the ids are probably those of another tokenizer, in all rows
            raise
        return converted, TokenizedRow([], []), UNEMBEDDED, str(error)
    return converted, tokenized, "", ""


def check_sample_id(sample_id: Any) -> None:
    """Raise a `ValueError` if a sample id is not an integer in the range of [`build_dflash_batch_plan`]."""
    if type(sample_id) is not int or not 0 <= sample_id <= MAX_SAMPLE_ID:
        raise ValueError(
            f"The sample_id is {short(sample_id)}, and it must be an integer in 0 … {MAX_SAMPLE_ID}. Rename or "
            "remove the column; ids are then assigned automatically."
        )


def check_token_ids(input_ids: Sequence[int], num_embeddings: int | None) -> None:
    """Raise a `ValueError` if a token has no row in the target's embedding of `num_embeddings` rows."""
    if not input_ids:
        return
    low, high = min(input_ids), max(input_ids)
    if low < 0 or (num_embeddings is not None and high >= num_embeddings):
        rule = "are not negative" if num_embeddings is None else f"of the target are 0 … {num_embeddings - 1}"
        raise ValueError(
            f"The row contains token {low if low < 0 else high}, and the token ids {rule}. Tokenise the row with the "
            "target's own tokenizer."
        )


def content_id(input_ids: Sequence[int], supervised_mask: Sequence[bool]) -> int:
    """Return a sample id that depends on the tokens and the mask of a row alone."""
    return digest_number(f"{input_ids} {supervised_mask}", size=8) & MAX_SAMPLE_ID


class PreparedStream(torch.utils.data.IterableDataset):
    """
    A stream of rows that are tokenised and checked as they are read.

    A row without a `sample_id` gets an id computed from its tokens and its mask. The id is the same in any order,
    shard, worker and process, and after a resume. Rows keep the order of the source. A training stream starts again
    when it ends, and it passes the number of the epoch to the source (`set_epoch`), which reshuffles a shuffled one.

    Args:
        source (`datasets.IterableDataset`):
            Rows in any form that [`prepare_row`] accepts. With several loader workers, each reads its own shards.
        tokenizer, max_length, description:
            The arguments of [`prepare_row`].
        is_packed (`bool`, defaults to `False`):
            Whether to yield packed rows, which are made from `PACKING_WINDOW` documents at a time.
        is_repeated (`bool`, defaults to `True`):
            Whether to start again at the end, without limit.
        is_quiet (`bool`, defaults to `False`):
            Whether to log no warnings, as every process but the first should.
        **kwargs:
            The further arguments of [`prepare_row`].

    Raises (when iterated):
        ValueError: A row breaks a rule of [`prepare_row`], or a whole epoch had no usable row.
    """

    def __init__(
        self,
        source: datasets.IterableDataset,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_length: int,
        description: str = "train",
        is_packed: bool = False,
        is_repeated: bool = True,
        is_quiet: bool = False,
        **kwargs: Any,
    ) -> None:
        self.source = source
        self.max_length, self.description = max_length, description
        self.is_packed, self.is_repeated, self.is_quiet = is_packed, is_repeated, is_quiet
        self._prepare: Callable[..., dict[str, Any]] = partial(
            prepare_row, tokenizer=tokenizer, max_length=max_length, description=description, **kwargs
        )

    def with_repetition(self, is_repeated: bool) -> PreparedStream:
        """Return a stream of the same rows that ends after one epoch, or that repeats without limit."""
        stream = copy(self)
        stream.is_repeated = is_repeated
        return stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # datasets 5.2: `with_format` returns a new object with an epoch counter of its own, while that of the source
        # is shared by all loader workers
        source = self.source.with_format(None)
        for epoch in itertools.count() if self.is_repeated else (0,):
            source.set_epoch(epoch)
            counts = _RowCounts(self.description, self.max_length)
            is_logged = epoch == 0 and not self.is_quiet  # later epochs read the same rows
            rows = self._read_epoch(source, counts, is_logged)
            yield from pack_stream(rows, self.max_length) if self.is_packed else rows
            if is_logged and counts.num_affected:
                logger.warning(f"{counts} The stream has been read once.")
            if not counts.num_kept:
                if not counts.num_rows and get_worker_info() is not None:
                    return  # there are more workers than shards
                raise counts.no_usable_row()

    def _read_epoch(
        self, source: datasets.IterableDataset, counts: _RowCounts, is_logged: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the usable rows of the source and count all rows."""
        for index, row in enumerate(source):
            prepared = self._prepare(row, index)
            facts = {name: prepared.pop(name) for name in _COUNTED}
            is_affected = counts.add(facts)
            is_power_of_ten = str(counts.num_affected).rstrip("0") == "1"
            if is_affected and is_logged and is_power_of_ten:
                logger.warning(str(counts))  # at the 1st, 10th, 100th … row: early in a long stream, and seldom later
            if not facts["drop_reason"]:
                if row.get("sample_id") is None:
                    prepared["sample_id"] = content_id(prepared["input_ids"], prepared["supervised_mask"])
                yield prepared


class _RowCounts:
    """Counts of the dropped, truncated and kept rows of a set, and of rows of which not everything is learned."""

    def __init__(self, description: str, max_length: int) -> None:
        self.description, self.max_length = description, max_length
        self.num_rows = self.num_truncated = self.num_affected = 0
        self.dropped: Counter[str] = Counter()
        self.ignored_keys: Counter[str] = Counter()
        self.first_refusal = ""

    def add(self, facts: Mapping[str, Any]) -> bool:
        """Count one row from its `_COUNTED` values, and return whether something happened to it."""
        if facts["drop_reason"]:
            self.dropped[facts["drop_reason"]] += 1
            if facts["refusal"] and not self.first_refusal:
                self.first_refusal = f" The first refusal is of row {self.num_rows}: {facts['refusal']}"
        else:
            self.num_truncated += facts["is_truncated"]
            self.ignored_keys.update(facts["ignored_keys"])
        self.num_rows += 1
        is_affected = bool(facts["drop_reason"] or facts["is_truncated"] or facts["ignored_keys"])
        self.num_affected += is_affected
        return is_affected

    @property
    def num_kept(self) -> int:
        """`int`: rows that were not dropped."""
        return self.num_rows - self.dropped.total()

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        text = (
            f"The {self.description} set: {self.dropped.total()} of {self.num_rows} rows were dropped"
            f"{f' ({reasons})' if reasons else ''}, and {self.num_truncated} of the others were truncated at "
            f"max_length={self.max_length}.{self.first_refusal}"
        )
        if not self.ignored_keys:
            return text
        keys = ", ".join(f"{name} ({count} rows)" for name, count in self.ignored_keys.most_common())
        return (
            f"{text} The chat template does not render these keys of messages, so nothing of them is learned: {keys}."
        )

    def no_usable_row(self) -> ValueError:
        """Return the error for a set of which every row was dropped."""
        reasons = ", ".join(f"{count} were {reason}" for reason, count in self.dropped.items())
        return ValueError(
            f"The {self.description} set has no usable row: {self.num_rows} rows were read, and "
            f"{reasons or 'the set is empty'}.{self.first_refusal} Pass rows with completions, or raise max_length."
        )
