"""Prepared rows: tokenised, checked, counted, packed or streamed; and the collator that batches them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import torch
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..blocks.plan import MAX_SAMPLE_ID
from ..files import digest_number
from .labels import tokenize_row
from .packing import PACKING_WINDOW, pack_rows, pack_stream

logger = logging.get_logger(__name__)

PREPARED_COLUMNS = ("input_ids", "supervised_mask", "sample_id", "segment_ids")
NO_DOCUMENT = -1  # segment id of padding

TOO_LONG = "longer than max_length, with nothing supervised left"
UNSUPERVISED = "nothing supervised"


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
    Tokenise one row and check all that would fail later, far from its cause.

    Args:
        row (`Mapping`):
            As in [`tokenize_row`], with an optional integer `sample_id`.
        index (`int`):
            Number of the row, which is its id if it has none.
        tokenizer, max_length, eos_token_ids, chat_template_kwargs:
            As in [`tokenize_row`].
        forbidden_token_id (`int`, *optional*):
            The draft's mask token: an error if the row contains it, since it could not be told from "not yet known".
        num_embeddings (`int`, *optional*):
            Rows of the target's embedding: an error if a token lies outside.
        description (`str`, defaults to `"train"`):
            Names the set in messages.

    Returns:
        `dict`: `input_ids`, `supervised_mask`, `sample_id`, `drop_reason` (empty if a block can be trained on the row)
        and `is_cut` (it was longer than `max_length`).

    Raises:
        ValueError: the row breaks a rule; the message names row, id and rule.
    """
    sample_id = row.get("sample_id")
    sample_id = index if sample_id is None else sample_id
    name = f"Row {index} (sample_id {sample_id!r}) of the {description} set"
    if type(sample_id) is not int or not 0 <= sample_id <= MAX_SAMPLE_ID:
        raise ValueError(
            f"{name}: a sample_id must be an integer in 0 … {MAX_SAMPLE_ID}. Rename or remove the column; the row "
            "number is used then."
        )
    try:
        full_ids, full_mask = tokenize_row(
            row,
            tokenizer,
            max_length=2**62,
            eos_token_ids=eos_token_ids,
            chat_template_kwargs=chat_template_kwargs,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if full_ids and (min(full_ids) < 0 or (num_embeddings is not None and max(full_ids) >= num_embeddings)):
        wrong = min(full_ids) if min(full_ids) < 0 else max(full_ids)
        rule = "token ids are not negative" if wrong < 0 else f"the target has {num_embeddings} embedding rows"
        raise ValueError(f"{name} contains token {wrong}, and {rule}. Tokenise with the target's own tokenizer.")
    ids, mask = full_ids[:max_length], full_mask[:max_length]
    reason = ""
    if not any(mask[1:]):
        reason = TOO_LONG if any(full_mask[1:]) else UNSUPERVISED
    if not reason and forbidden_token_id in ids:
        raise ValueError(
            f"{name} contains the mask token {forbidden_token_id}. Choose another mask_token_id when making the "
            "draft, one that never occurs in text."
        )
    return {
        "input_ids": ids,
        "supervised_mask": mask,
        "sample_id": sample_id,
        "drop_reason": reason,
        "is_cut": len(full_ids) > max_length,
    }


_PREPARED_FEATURES = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int64")),
        "supervised_mask": datasets.Sequence(datasets.Value("bool")),
        "sample_id": datasets.Value("int64"),
        "drop_reason": datasets.Value("string"),
        "is_cut": datasets.Value("bool"),
    }
)


class _RowCounts:
    """What became of the rows of a set, in one line."""

    def __init__(self, description: str, max_length: int) -> None:
        self.description, self.max_length = description, max_length
        self.num_rows = self.num_cut = 0
        self.dropped: Counter[str] = Counter()

    def add(self, drop_reason: str, is_cut: bool) -> None:
        self.num_rows += 1
        if drop_reason:
            self.dropped[drop_reason] += 1
        elif is_cut:
            self.num_cut += 1

    @property
    def num_troubled(self) -> int:
        return self.dropped.total() + self.num_cut

    @property
    def num_kept(self) -> int:
        return self.num_rows - self.dropped.total()

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return (
            f"The {self.description} set: {self.dropped.total()} of {self.num_rows} rows dropped"
            f"{f' ({reasons})' if reasons else ''}, {self.num_cut} of the others cut at max_length={self.max_length}."
        )

    def no_usable_row(self) -> ValueError:
        reasons = ", ".join(f"{count} were {reason}" for reason, count in self.dropped.items())
        return ValueError(
            f"The {self.description} set has no usable row: {self.num_rows} rows came in, "
            f"{reasons or 'the set is empty'}. Give it rows with answers, or raise max_length."
        )


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
    Tokenise a data set and drop the rows that no block can be trained on, with a count of each reason.

    Args:
        dataset (`datasets.Dataset` or a sequence of rows):
            Rows as [`prepare_row`] takes them.
        tokenizer, max_length, description:
            As in [`prepare_row`].
        is_quiet (`bool`, defaults to `False`):
            No warnings: for every process but the first.
        **kwargs:
            The further arguments of [`prepare_row`].

    Returns:
        `datasets.Dataset` with `input_ids`, `supervised_mask` and `sample_id`.

    Raises:
        ValueError: no row is left, or a row breaks a rule of [`prepare_row`].
    """
    if not isinstance(dataset, datasets.Dataset):
        rows = list(dataset)
        columns = dict.fromkeys(name for row in rows for name in row)  # `from_list` takes those of the first row
        dataset = datasets.Dataset.from_list([{name: row.get(name) for name in columns} for row in rows])
    counts = _RowCounts(description, max_length)
    if not len(dataset):
        raise counts.no_usable_row()
    dataset = dataset.with_format(None)
    converted = dataset.map(
        partial(prepare_row, tokenizer=tokenizer, max_length=max_length, description=description, **kwargs),
        with_indices=True,
        remove_columns=dataset.column_names,
        features=_PREPARED_FEATURES,
        desc=f"Tokenising {description}",
    )
    # Counted from the columns: a result that comes out of the cache is counted too
    for drop_reason, is_cut in zip(converted["drop_reason"], converted["is_cut"], strict=True):
        counts.add(drop_reason, is_cut)
    if counts.num_troubled and not is_quiet:
        logger.warning(str(counts))
    if not counts.num_kept:
        raise counts.no_usable_row()
    if counts.dropped:
        converted = converted.filter(lambda reason: not reason, input_columns="drop_reason", desc="Dropping rows")
    num_repeated = len(converted) - len(set(converted["sample_id"]))
    if num_repeated and not is_quiet:
        logger.warning(
            f"The {description} set: {num_repeated} of {len(converted)} rows repeat the sample_id of another row. "
            "Rows with equal ids and masks train on the same anchors in a step: give each row an id of its own, or "
            "remove the column."
        )
    return converted.remove_columns(["drop_reason", "is_cut"])


def pack_dataset(
    dataset: datasets.Dataset, max_length: int, description: str = "train", is_quiet: bool = False
) -> datasets.Dataset:
    """
    Pack prepared rows into rows of several whole documents.

    Args:
        dataset (`datasets.Dataset`): prepared rows.
        max_length (`int`): most tokens of a packed row.
        description (`str`, defaults to `"train"`): names the set in messages.
        is_quiet (`bool`, defaults to `False`): no message: for every process but the first.

    Returns:
        `datasets.Dataset` with `input_ids`, `supervised_mask`, `sample_id` and `segment_ids`.

    Raises:
        ValueError: a row is longer than `max_length`.
    """
    packed = dataset.map(
        pack_rows,
        batched=True,
        batch_size=PACKING_WINDOW,
        fn_kwargs={"max_length": max_length},
        remove_columns=dataset.column_names,
        desc=f"Packing {description}",
    )
    if not is_quiet:
        num_tokens = sum(len(ids) for ids in packed["input_ids"])
        logger.warning_advice(
            f"The {description} set: {len(dataset):,} rows packed into {len(packed):,} of at most {max_length:,} "
            f"tokens, {num_tokens / len(packed) / max_length:.0%} full; anchors_per_sample counts for each packed row."
        )
    return packed


class PreparedStream(torch.utils.data.IterableDataset):
    """
    Rows of a stream, tokenised and checked as they are read.

    A row without a `sample_id` gets a number made of its tokens and mask: the same in any order, shard, worker and
    process, and after a resume. The order is that of the source; a training stream starts again when it ends, and the
    source is told the number of the pass (`set_epoch`), so that a shuffled one is shuffled anew.

    Args:
        source (`datasets.IterableDataset`):
            Rows as [`prepare_row`] takes them. In several loader workers each reads its own shards.
        tokenizer, max_length, description:
            As in [`prepare_row`].
        is_packed (`bool`, defaults to `False`):
            Yield packed rows, made of `PACKING_WINDOW` documents at a time.
        is_repeated (`bool`, defaults to `True`):
            Start again at the end, without limit.
        is_quiet (`bool`, defaults to `False`):
            No warnings: for every process but the first.
        **kwargs:
            The further arguments of [`prepare_row`].

    Raises (when iterated):
        ValueError: a row breaks a rule of [`prepare_row`], or a whole pass had no usable row.
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
        """The same rows, once or without limit."""
        stream = copy(self)
        stream.is_repeated = is_repeated
        return stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A new object with a pass counter of its own: that of the source is shared by all workers.
        source = self.source.with_format(None)
        for number in itertools.count() if self.is_repeated else (0,):
            source.set_epoch(number)
            counts = _RowCounts(self.description, self.max_length)
            is_reported = number == 0 and not self.is_quiet  # later passes read the same rows
            rows = self._pass(source, counts, is_reported)
            yield from pack_stream(rows, self.max_length) if self.is_packed else rows
            if is_reported and counts.num_troubled:
                logger.warning(f"{counts} The stream has been read once.")
            if not counts.num_kept:
                if not counts.num_rows and get_worker_info() is not None:
                    return  # more workers than shards
                raise counts.no_usable_row()

    def _pass(
        self, source: datasets.IterableDataset, counts: _RowCounts, is_reported: bool
    ) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(source):
            prepared = self._prepare(row, index)
            drop_reason, is_cut = prepared.pop("drop_reason"), prepared.pop("is_cut")
            counts.add(drop_reason, is_cut)
            if (drop_reason or is_cut) and is_reported and str(counts.num_troubled).rstrip("0") == "1":
                logger.warning(str(counts))  # the 1st, 10th, 100th …: a long stream is heard of early, and not often
            if not drop_reason:
                if row.get("sample_id") is None:
                    prepared["sample_id"] = content_id(prepared["input_ids"], prepared["supervised_mask"])
                yield prepared


def prepare_rows(
    dataset: Any, *, max_length: int, is_packed: bool = False, is_repeated: bool = True, **kwargs: Any
) -> datasets.Dataset | PreparedStream:
    """
    Prepare whatever a trainer is given; what is prepared already is left alone.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or a sequence of rows):
            Rows as [`prepare_row`] takes them, or prepared ones.
        max_length (`int`):
            In tokens, of a row and of a packed row.
        is_packed (`bool`, defaults to `False`):
            Pack the rows.
        is_repeated (`bool`, defaults to `True`):
            Start a stream again at its end, without limit; a set is not changed by this.
        **kwargs:
            The further arguments of [`prepare_dataset`].

    Returns:
        `datasets.Dataset`, or [`PreparedStream`] of a stream.

    Raises:
        ValueError: as in [`prepare_dataset`] and [`pack_dataset`].
        TypeError: the data set is of another kind.
    """
    if isinstance(dataset, PreparedStream):
        return dataset.with_repetition(is_repeated)
    if isinstance(dataset, datasets.IterableDataset):
        return PreparedStream(dataset, max_length=max_length, is_packed=is_packed, is_repeated=is_repeated, **kwargs)
    said = {name: kwargs[name] for name in ("description", "is_quiet") if name in kwargs}
    if isinstance(dataset, (dict, torch.utils.data.IterableDataset)):
        raise TypeError(
            f"The {said.get('description', 'train')} set is a {type(dataset).__name__}: it must be one "
            "datasets.Dataset or datasets.IterableDataset, or a sequence of rows. Choose a split of a DatasetDict; "
            "make a stream with datasets.IterableDataset.from_generator."
        )
    if "supervised_mask" not in (getattr(dataset, "column_names", None) or ()):
        dataset = prepare_dataset(dataset, max_length=max_length, **kwargs)
    if is_packed and "segment_ids" not in dataset.column_names:
        dataset = pack_dataset(dataset, max_length, **said)
    return dataset


def content_id(input_ids: Sequence[int], supervised_mask: Sequence[bool]) -> int:
    """A sample id that depends on the row alone, wherever and whenever it is read."""
    text = f"{input_ids} {supervised_mask}"
    return digest_number(text, size=8) & MAX_SAMPLE_ID


@dataclass
class DFlashCollator:
    """
    Pad prepared rows into a batch.

    Args:
        pad_token_id (`int`, defaults to 0): fills `input_ids`; never seen by the draft.
        padding_side (`str`, defaults to `"right"`): training gives the same result with `"left"`.
        pad_to_multiple_of (`int`, defaults to 1): batches get one of few lengths, for kernels compiled by shape.

    Returns (when called):
        `dict`: `input_ids` (int64), `token_valid_mask` and `supervised_mask` (bool), each `[R, S]`, and `sample_ids`
        (int64 `[R]`). Packed rows also give `segment_ids` (int64 `[R, S]`), -1 at padding: it is of no document.
    """

    pad_token_id: int = 0
    padding_side: str = "right"
    pad_to_multiple_of: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        input_ids = torch.full((len(rows), length), self.pad_token_id)
        token_valid_mask = torch.zeros(len(rows), length, dtype=torch.bool)
        supervised_mask = torch.zeros(len(rows), length, dtype=torch.bool)
        segment_ids = torch.full((len(rows), length), NO_DOCUMENT)
        for index, row in enumerate(rows):
            count = len(row["input_ids"])
            columns = slice(0, count) if self.padding_side == "right" else slice(length - count, length)
            input_ids[index, columns] = torch.as_tensor(row["input_ids"])
            token_valid_mask[index, columns] = True
            supervised_mask[index, columns] = torch.as_tensor(row["supervised_mask"], dtype=torch.bool)
            if "segment_ids" in row:
                segment_ids[index, columns] = torch.as_tensor(row["segment_ids"])
        sample_ids = torch.tensor([int(row["sample_id"]) for row in rows])
        batch = {
            "input_ids": input_ids,
            "token_valid_mask": token_valid_mask,
            "supervised_mask": supervised_mask,
            "sample_ids": sample_ids,
        }
        return {**batch, "segment_ids": segment_ids} if "segment_ids" in rows[0] else batch
