"""Sequence packing: several whole documents in one row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import datasets
from transformers.utils import logging

logger = logging.get_logger(__name__)

PACKING_WINDOW = 1000  # documents packed together; a larger window saves less than one row per 1,000 documents


def pack_dataset(
    dataset: datasets.Dataset, max_length: int, description: str = "train", is_quiet: bool = False
) -> datasets.Dataset:
    """
    Pack prepared rows into rows of several whole documents.

    Args:
        dataset (`datasets.Dataset`): Prepared rows.
        max_length (`int`): The largest number of tokens of a packed row.
        description (`str`, defaults to `"train"`): The name of the set in messages.
        is_quiet (`bool`, defaults to `False`): Whether to log nothing, as every process but the first should.

    Returns:
        `datasets.Dataset` with `input_ids`, `supervised_mask`, `sample_id` and `segment_ids`.

    Raises:
        ValueError: A row is longer than `max_length`.
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
            f"The {description} set: {len(dataset):,} rows were packed into {len(packed):,} rows of at most "
            f"{max_length:,} tokens, which are {num_tokens / len(packed) / max_length:.0%} full. anchors_per_sample "
            "now counts for each packed row."
        )
    return packed


def pack_stream(rows: Iterable[Mapping[str, Any]], max_length: int) -> Iterator[dict[str, Any]]:
    """
    Pack rows of a stream in windows of `PACKING_WINDOW` documents.

    Args:
        rows (`Iterable[Mapping]`): Prepared rows.
        max_length (`int`): The largest number of tokens of a packed row.

    Yields:
        `dict`: Packed rows in the form of [`pack_rows`].
    """
    rows = iter(rows)
    while window := list(islice(rows, PACKING_WINDOW)):
        packed = pack_rows({name: [row[name] for row in window] for name in window[0]}, max_length)
        for values in zip(*packed.values(), strict=True):
            yield dict(zip(packed, values, strict=True))


def pack_rows(columns: Mapping[str, Sequence[Any]], max_length: int) -> dict[str, list[Any]]:
    """
    Join prepared rows into packed rows, in the form that `datasets` uses with `batched=True`.

    A packed row takes the id of its first document. Ids stay distinct, since every document is in one row only.

    Args:
        columns (`Mapping`): `input_ids`, `supervised_mask` and `sample_id` of prepared rows.
        max_length (`int`): The largest number of tokens of a packed row.

    Returns:
        `dict`: The same columns and `segment_ids`, which number the documents of a row from 0.

    Example:

    ```python
    >>> pack_rows({"input_ids": [[5, 6], [7]], "supervised_mask": [[False, True], [True]], "sample_id": [3, 4]}, 4)
    {'input_ids': [[5, 6, 7]], 'supervised_mask': [[False, True, True]], 'sample_id': [3], 'segment_ids': [[0, 0, 1]]}

    ```
    """
    rows = pack_lengths([len(ids) for ids in columns["input_ids"]], max_length)
    packed: dict[str, list[Any]] = {
        name: [[value for document in row for value in columns[name][document]] for row in rows]
        for name in ("input_ids", "supervised_mask")
    }
    packed["sample_id"] = [columns["sample_id"][row[0]] for row in rows]
    packed["segment_ids"] = [
        [number for number, document in enumerate(row) for _ in columns["input_ids"][document]] for row in rows
    ]
    return packed


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Assign documents to rows of at most `capacity` tokens by best-fit decreasing bin packing.

    The result depends on the lengths alone. Documents are never split.

    Args:
        lengths (`Sequence[int]`): The number of tokens of each document.
        capacity (`int`): The largest number of tokens of a row.

    Returns:
        `list[list[int]]`: The documents of each row in ascending order. The rows are in the order of their first
        document.

    Raises:
        ValueError: A document is longer than a row.

    Example:

    ```python
    >>> pack_lengths([5, 3, 8, 2, 4], capacity=10)
    [[0, 4], [1], [2, 3]]

    ```
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(
            f"Document {list(lengths).index(max(lengths))} has {max(lengths)} tokens, but a packed row has at most "
            f"{capacity} and documents are not split. Truncate the document, or raise max_length."
        )
    rows_by_space: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    spaces: list[int] = []  # the distinct numbers of free tokens among the rows, in ascending order
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, lengths[document])
        if place < len(spaces):
            space = spaces[place]
            row = rows_by_space[space].popleft()
            if not rows_by_space[space]:
                del spaces[place]
        else:
            space, row = capacity, []
        row.append(document)
        space -= lengths[document]
        if not rows_by_space[space]:
            insort(spaces, space)
        rows_by_space[space].append(row)
    return sorted(sorted(row) for rows in rows_by_space.values() for row in rows)
