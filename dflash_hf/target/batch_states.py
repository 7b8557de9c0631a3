"""Hidden states of the target for whole batches: from the cache or a forward pass, also for packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from ..blocks.batch import TokenBatch
from ..model.configuration_dflash import describe_target
from .hidden_state_cache import (
    DiskHiddenStateCache,
    HiddenStateCache,
    MemoryHiddenStateCache,
    cached_hidden_states,
    fill_hidden_state_cache,
    hidden_state_fingerprint,
)
from .hidden_states import target_hidden_states


class TargetStates:
    """
    Provide batches with the hidden states of a target.

    The states of a batch come from the cache if it holds all of its rows, and otherwise from a forward pass. Documents
    of packed rows are computed separately, so that the target need not support packing.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        layer_ids (`Sequence[int]`): decoder layers, counted from 0.
        include_final_state (`bool`, defaults to `False`): also provide the state after the final norm.

    Attributes:
        cache ([`MemoryHiddenStateCache`] or [`DiskHiddenStateCache`]): empty until [`fill_cache`] is called.
    """

    def __init__(
        self, target: PreTrainedModel, layer_ids: Sequence[int], *, include_final_state: bool = False
    ) -> None:
        self.target = target
        self.layer_ids = list(layer_ids)
        self.include_final_state = include_final_state
        self.cache: HiddenStateCache = MemoryHiddenStateCache()
        self._hidden_size = target.config.get_text_config(decoder=True).hidden_size
        self._are_checked = False

    def attach_to(self, batch: TokenBatch) -> TokenBatch:
        """
        Return a batch with the hidden states of the target.

        The first batch is checked for values that are not finite.

        Args:
            batch ([`TokenBatch`]): sequences or, with `segment_ids`, packed rows.

        Returns:
            [`TokenBatch`] with `hidden_states` and, if asked for, `final_hidden_states`; both are 0 at padding.

        Raises:
            ValueError: a hidden state is infinite or NaN, or a batch of packed rows has no token.
        """
        if batch.segment_ids is None:
            states = self.of_sequences(batch.input_ids, batch.valid)
        else:
            states = self._of_packed_rows(batch)
        if not self._are_checked:
            self._check_finite(states)
            self._are_checked = True
        width = len(self.layer_ids) * self._hidden_size
        return batch.with_hidden_states(states[..., :width], states[..., width:] if self.include_final_state else None)

    def of_sequences(self, input_ids: torch.Tensor, token_valid_mask: torch.Tensor) -> torch.Tensor:
        """
        Return the states of sequences that are one document each.

        Args:
            input_ids (`torch.LongTensor` of shape `[R, S]`): token ids.
            token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.

        Returns:
            `torch.FloatTensor` of shape `[R, S, width]`: those of [`target_hidden_states`].
        """
        if self.cache:
            states = cached_hidden_states(self.cache, input_ids, token_valid_mask)
            if states is not None:
                return states
        return target_hidden_states(
            self.target,
            input_ids,
            token_valid_mask,
            self.layer_ids,
            include_final_state=self.include_final_state,
        )

    def _of_packed_rows(self, batch: TokenBatch) -> torch.Tensor:
        """
        Return the states of packed rows, each document computed separately.

        Documents of similar length share a forward pass, which has no more tokens than the packed batch.
        """
        documents = split_documents(batch)
        states: torch.Tensor | None = None
        lengths = documents.token_valid_mask.sum(-1).tolist()
        for members in _batches_of_similar_length(lengths, batch.input_ids.numel()):
            length = lengths[members[-1]]
            valid = documents.token_valid_mask[members, :length]
            part = self.of_sequences(documents.input_ids[members, :length], valid)
            if states is None:
                states = part.new_zeros(batch.input_ids.numel(), part.shape[-1])
            states[documents.token_indices[members, :length][valid]] = part[valid]
        if states is None:
            raise ValueError(f"A batch of {batch.num_rows} packed rows has no token. Leave out empty rows.")
        return states.view(*batch.input_ids.shape, -1)

    def _check_finite(self, states: torch.Tensor) -> None:
        is_finite = states.isfinite().flatten(0, 1).all(0).unflatten(-1, (-1, self._hidden_size)).all(-1).tolist()
        layers = [*self.layer_ids, "final"] if self.include_final_state else self.layer_ids
        bad = [layer for layer, finite in zip(layers, is_finite, strict=True) if not finite]
        if bad:
            raise ValueError(
                f"The hidden states of the target {describe_target(self.target)} ({str(self.target.dtype)[6:]}) are "
                f"not finite in layers {bad}, and a draft cannot learn from them. Load the target in bfloat16 or "
                "float32."
            )

    def fill_cache(
        self,
        rows: Sequence[Sequence[int]],
        *,
        folder: str | Path | None = None,
        description: str = "train",
        batch_tokens: int | None = None,
        accelerator: Accelerator | None = None,
        show_progress: bool = True,
    ) -> None:
        """
        Compute the states of all rows that the cache does not hold.

        Args:
            rows (`Sequence[Sequence[int]]`): token ids of each row or document.
            folder (`str` or `Path`, *optional*): keeps the states on disk instead of in memory.
            description, batch_tokens, accelerator, show_progress: as in [`fill_hidden_state_cache`].

        Raises:
            ValueError: the folder holds the states of another target or of other layers; each difference is named.
            OSError: a file of the folder is damaged, or the disk is too small.
        """
        if folder is not None and not isinstance(self.cache, DiskHiddenStateCache):
            fingerprint = hidden_state_fingerprint(
                self.target, self.layer_ids, include_final_state=self.include_final_state
            )
            self.cache = DiskHiddenStateCache(folder, fingerprint)
        fill_hidden_state_cache(
            self.cache,
            self.target,
            rows,
            self.layer_ids,
            include_final_state=self.include_final_state,
            description=description,
            batch_tokens=batch_tokens,
            accelerator=accelerator,
            show_progress=show_progress,
        )


class Documents(NamedTuple):
    """
    The `D` documents of a packed batch as a batch of their own, padded on the right.

    Args:
        input_ids (`torch.LongTensor` of shape `[D, L]`): token ids; 0 at padding.
        token_valid_mask (`torch.BoolTensor` of shape `[D, L]`): True at real tokens.
        token_indices (`torch.LongTensor` of shape `[D, L]`): index of each token in the flattened packed batch; 0 at
            padding.
    """

    input_ids: torch.Tensor
    token_valid_mask: torch.Tensor
    token_indices: torch.Tensor


def split_documents(batch: TokenBatch) -> Documents:
    """
    Split a batch of packed rows into its documents, in the order of the rows.

    Args:
        batch ([`TokenBatch`]): packed rows; the tokens of a document are adjacent.

    Returns:
        [`Documents`]

    Example:

    ```python
    >>> packed = TokenBatch(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]),
    ...     segment_ids=torch.tensor([[0, 0, 1, -1]]))
    >>> documents = split_documents(packed)
    >>> documents.input_ids.tolist(), documents.token_indices.tolist()
    ([[5, 6], [7, 0]], [[0, 1], [2, 0]])

    ```
    """
    positions = batch.position_ids[batch.valid]
    document_numbers = (positions == 0).cumsum(0) - 1
    indices = batch.valid.flatten().nonzero()[:, 0]
    shape = (int(document_numbers.max()) + 1, int(positions.max()) + 1) if len(positions) else (0, 0)
    document_ids, token_indices = batch.input_ids.new_zeros(shape), indices.new_zeros(shape)
    document_valid = batch.valid.new_zeros(shape)
    document_ids[document_numbers, positions] = batch.input_ids[batch.valid]
    token_indices[document_numbers, positions] = indices
    document_valid[document_numbers, positions] = True
    return Documents(document_ids, document_valid, token_indices)


def _batches_of_similar_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield indices in the order of their lengths; a batch padded to its longest has at most `max_tokens` tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def documents_of(dataset: datasets.Dataset) -> datasets.Dataset:
    """
    Return the documents of a data set of packed rows.

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
