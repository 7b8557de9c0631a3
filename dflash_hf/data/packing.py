"""Several documents in one row: packing of prepared rows, and the way back to the documents for the target."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

PACKING_WINDOW = 1000  # documents packed with each other; more gains less than one row in this many documents


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """
    Put documents into rows of at most `capacity` tokens: best fit, longest document first.

    The result depends on the lengths alone. Documents are never split.

    Args:
        lengths (`Sequence[int]`): tokens of each document.
        capacity (`int`): most tokens of a row.

    Returns:
        `list[list[int]]`: the documents of each row in ascending order, the rows in the order of their first document.

    Raises:
        ValueError: a document is longer than a row.

    Example:

    ```python
    >>> pack_lengths([5, 3, 8, 2, 4], capacity=10)
    [[0, 4], [1], [2, 3]]

    ```
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(
            f"Document {list(lengths).index(max(lengths))} has {max(lengths)} tokens and a packed row at most "
            f"{capacity}: documents are not split. Cut it, or raise max_length."
        )
    rows_by_space: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    spaces: list[int] = []  # free tokens that some row has, ascending
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


def pack_rows(columns: Mapping[str, Sequence[Any]], max_length: int) -> dict[str, list[Any]]:
    """
    Join prepared rows into packed rows, in the form that `datasets` calls with `batched=True`.

    A packed row has the id of its first document: ids stay distinct, since every document is in one row.

    Args:
        columns (`Mapping`): `input_ids`, `supervised_mask` and `sample_id` of prepared rows.
        max_length (`int`): most tokens of a packed row.

    Returns:
        `dict` of the same columns and `segment_ids`, which counts the documents of a row from 0.

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


def pack_stream(rows: Iterable[Mapping[str, Any]], max_length: int) -> Iterator[dict[str, Any]]:
    """
    Pack rows as they come, a window of `PACKING_WINDOW` documents at a time.

    Args:
        rows (`Iterable[Mapping]`): prepared rows.
        max_length (`int`): most tokens of a packed row.

    Yields:
        `dict`: packed rows as [`pack_rows`] makes them.
    """
    rows = iter(rows)
    while window := list(islice(rows, PACKING_WINDOW)):
        packed = pack_rows({name: [row[name] for row in window] for name in window[0]}, max_length)
        for values in zip(*packed.values(), strict=True):
            yield dict(zip(packed, values, strict=True))
