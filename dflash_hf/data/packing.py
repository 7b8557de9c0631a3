"""Several documents in one row: packing of prepared rows, and the way back to the documents for the target."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import datasets
import torch

from ..blocks.plan import tokens_before

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


def documents_of(dataset: datasets.Dataset) -> datasets.Dataset:
    """
    The documents of a set of packed rows.

    Args:
        dataset (`datasets.Dataset`): prepared rows, packed or not.

    Returns:
        `datasets.Dataset` with the `input_ids` of every document; `dataset` itself if its rows are not packed.
    """
    if "segment_ids" not in dataset.column_names:
        return dataset

    def split(columns: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        documents = []
        for ids, segments in zip(columns["input_ids"], columns["segment_ids"], strict=True):
            starts = [0, *(i for i in range(1, len(ids)) if segments[i] != segments[i - 1]), len(ids)]
            documents += [ids[first:after] for first, after in pairwise(starts)]
        return {"input_ids": documents}

    return dataset.map(split, batched=True, remove_columns=dataset.column_names, desc="Documents of packed rows")


class Documents(NamedTuple):
    """
    The `D` documents of a packed batch, as a batch of its own, padded on the right.

    Args:
        input_ids (`torch.LongTensor` of shape `[D, L]`): tokens; 0 at padding.
        token_valid_mask (`torch.BoolTensor` of shape `[D, L]`): True at real tokens.
        token_indices (`torch.LongTensor` of shape `[D, L]`): place of each token in the flattened packed batch; 0 at
            padding.
    """

    input_ids: torch.Tensor
    token_valid_mask: torch.Tensor
    token_indices: torch.Tensor


def split_documents(input_ids: torch.Tensor, token_valid_mask: torch.Tensor, segment_ids: torch.Tensor) -> Documents:
    """
    Take a packed batch apart, in the order of its rows.

    Args:
        input_ids (`torch.LongTensor` of shape `[R, S]`): packed rows.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`): document of each token, without gaps inside a document.

    Returns:
        [`Documents`]

    Example:

    ```python
    >>> documents = split_documents(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]),
    ...     torch.tensor([[0, 0, 1, -1]]))
    >>> documents.input_ids.tolist(), documents.token_indices.tolist()
    ([[5, 6], [7, 0]], [[0, 1], [2, 0]])

    ```
    """
    positions = tokens_before(token_valid_mask, segment_ids)[token_valid_mask]
    document_numbers = (positions == 0).cumsum(0) - 1
    indices = token_valid_mask.flatten().nonzero()[:, 0]
    shape = (int(document_numbers.max()) + 1, int(positions.max()) + 1) if len(positions) else (0, 0)
    document_ids, token_indices = input_ids.new_zeros(shape), indices.new_zeros(shape)
    document_valid = token_valid_mask.new_zeros(shape)
    document_ids[document_numbers, positions] = input_ids[token_valid_mask]
    token_indices[document_numbers, positions] = indices
    document_valid[document_numbers, positions] = True
    return Documents(document_ids, document_valid, token_indices)


def states_of_packed_rows(
    states_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    segment_ids: torch.Tensor,
) -> torch.Tensor:
    """
    Target states of packed rows, each document by itself: the target need not know of packing.

    Documents of similar length go through the target together, no more tokens at a time than the packed batch has.

    Args:
        states_of (`Callable`):
            `(input_ids, token_valid_mask)` of documents, `[D, L]` each, to their states `[D, L, width]`.
        input_ids (`torch.LongTensor` of shape `[R, S]`): packed rows.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`): document of each token.

    Returns:
        `torch.FloatTensor` of shape `[R, S, width]`; zero at padding.

    Raises:
        ValueError: the batch has no token at all.
    """
    documents = split_documents(input_ids, token_valid_mask, segment_ids)
    states: torch.Tensor | None = None
    lengths = documents.token_valid_mask.sum(-1).tolist()
    for members in _batches_of_similar_length(lengths, input_ids.numel()):
        length = lengths[members[-1]]
        valid = documents.token_valid_mask[members, :length]
        part = states_of(documents.input_ids[members, :length], valid)
        if states is None:
            states = part.new_zeros(input_ids.numel(), part.shape[-1])
        states[documents.token_indices[members, :length][valid]] = part[valid]
    if states is None:
        raise ValueError(f"A batch of {len(input_ids)} packed rows has no token. Leave empty rows out.")
    return states.view(*input_ids.shape, -1)


def _batches_of_similar_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in the order of their lengths; a batch padded to its longest has at most `max_tokens` tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
