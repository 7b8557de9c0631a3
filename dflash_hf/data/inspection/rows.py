"""Rows as the trainer prepares them, with the blocks that a training step chooses in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from ...blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from ..collator import DFlashCollator
from ..conversations import CONVERSATION_COLUMNS
from ..dataset import PREPARED_COLUMNS, prepare_row
from .text import token_pieces, visible


class TrainingRows:
    """
    Rows of a data set, prepared one at a time and only on access, exactly as the trainer prepares them.

    Args:
        dataset (`datasets.Dataset`):
            Rows in any form that [`prepare_row`] accepts, or packed rows.
        tokenizer, max_length, eos_token_ids, num_embeddings:
            The arguments of [`prepare_row`].

    Raises:
        ValueError: The data set is empty, `max_length` is below 1, rows of messages come with a tokenizer that has no
            chat template, or packed rows lack a column. On access: the row breaks a rule of [`prepare_row`].
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        eos_token_ids: Sequence[int] = (),
        num_embeddings: int | None = None,
    ) -> None:
        columns = set(dataset.column_names)
        if not len(dataset):
            raise ValueError(
                "The data set is empty, and inspecting needs at least one row. Pass a data set with rows."
            )
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1. Pass a positive number of tokens.")
        self.is_packed = "segment_ids" in columns
        if self.is_packed and not {"input_ids", "supervised_mask", "sample_id"} <= columns:
            raise ValueError(
                f"The rows have the columns {sorted(columns)}. Rows with segment_ids are packed and need input_ids, "
                "supervised_mask and sample_id too. Pass the output of pack_dataset, or the documents."
            )
        if columns & set(CONVERSATION_COLUMNS) and "input_ids" not in columns and not tokenizer.chat_template:
            raise ValueError(
                f"The rows contain messages, but the tokenizer of {tokenizer.name_or_path} has no chat template to "
                "render them. Pass rows with prompt and completion texts, rows of input_ids with a loss_mask, or a "
                "target that has a chat template."
            )
        self.dataset, self.tokenizer = dataset.with_format(None), tokenizer
        self._preparation: dict[str, Any] = {
            "max_length": max_length,
            "eos_token_ids": tuple(eos_token_ids),
            "num_embeddings": num_embeddings,
        }

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row with `input_ids`, `supervised_mask`, `sample_id`, `drop_reason` and `is_truncated`."""
        row: dict[str, Any] = self.dataset[index]
        if not self.is_packed:
            return prepare_row(row, index, self.tokenizer, **self._preparation, description="inspected")
        return {**{name: row[name] for name in PREPARED_COLUMNS}, "drop_reason": "", "is_truncated": False}

    def sample(self, limit: int) -> Sequence[int]:
        """
        Choose the rows from which statistics are computed.

        Args:
            limit (`int`): The largest number of rows.

        Returns:
            `Sequence[int]`: The indices of all rows, or of `limit` random rows (the same ones in every call), in
            ascending order.

        Raises:
            ValueError: `limit` is below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1. Pass the number of rows to compute statistics from.")
        indices = range(len(self))
        return indices if len(indices) <= limit else sorted(random.Random(0).sample(indices, limit))

    def first(self, count: int) -> Iterator[int]:
        """Yield the indices of the first `count` rows that training keeps, or of the first rows if it keeps none."""
        kept = islice((index for index in range(len(self)) if not self[index]["drop_reason"]), count)
        yield from list(kept) or range(min(count, len(self)))

    def inspect(self, index: int, plan: StepPlan) -> InspectedRow:
        """
        Return a row with its tokens as text and the blocks of a step.

        Args:
            index (`int`): The index of the row, from 0.
            plan ([`StepPlan`]): The plan of the step.

        Returns:
            [`InspectedRow`]

        Raises:
            ValueError: There is no such row, or it breaks a rule of [`prepare_row`].
        """
        if not 0 <= index < len(self):
            raise ValueError(
                f"Row {index} does not exist: the data set has rows 0 … {len(self) - 1}. Choose one of them."
            )
        row = self[index]
        ids = list(row["input_ids"])
        special_ids = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return InspectedRow(
            index=index,
            sample_id=row["sample_id"],
            input_ids=ids,
            supervised_mask=list(row["supervised_mask"]),
            pieces=token_pieces(self.tokenizer, ids),
            is_special=[token in special_ids for token in ids],
            blocks=plan.blocks_of(row),
            drop_reason=row["drop_reason"],
            is_truncated=row["is_truncated"],
        )


@dataclass(frozen=True)
class InspectedRow:
    """
    A row with the blocks that a step chooses in it.

    Args:
        index (`int`): The index of the row in its data set, from 0.
        sample_id (`int`): The id from which the anchors are derived.
        input_ids (`list[int]`): Token ids.
        supervised_mask (`list[bool]`): True at tokens that carry loss.
        pieces (`list[str]`): The text that each token adds; empty if its last character is completed by a later token.
        is_special (`list[bool]`): True at special tokens.
        blocks (`list[Block]`): The blocks in ascending order of their anchors; none if the row is dropped.
        drop_reason (`str`): Why training drops the row; empty if it keeps the row.
        is_truncated (`bool`): Whether the row was longer than `max_length`.
    """

    index: int
    sample_id: int
    input_ids: list[int]
    supervised_mask: list[bool]
    pieces: list[str]
    is_special: list[bool]
    blocks: list[Block]
    drop_reason: str
    is_truncated: bool

    @cached_property
    def covered(self) -> set[int]:
        """`set[int]`: positions that carry loss in at least one block."""
        return {position for block in self.blocks for position in block.labels}

    def text(self, positions: Iterable[int]) -> str:
        """Return the visible text of some tokens in one line."""
        return "".join(visible(self.pieces[position]) for position in positions).replace("\n", "")

    def describe(self) -> str:
        """Describe the row in one line."""
        if self.drop_reason:
            outcome = f"dropped: {self.drop_reason}"
        else:
            outcome = f"{len(self.blocks)} blocks cover {len(self.covered)} of them"
        truncated = ", truncated at max_length" if self.is_truncated else ""
        return (
            f"Row {self.index} (sample id {self.sample_id}): {len(self.input_ids):,} tokens{truncated}, "
            f"{sum(self.supervised_mask):,} supervised; {outcome}"
        )


@dataclass(frozen=True)
class Block:
    """
    A block of a row. Its labels are the `num_labels` tokens after the anchor.

    Every block has all its slots. Those past the end of the text attend as mask tokens and carry no loss; they are not
    counted here, since no token of the row belongs to them.

    Args:
        anchor (`int`): The position of the anchor in the row, from 0.
        context_length (`int`): The number of tokens before the anchor that the draft sees. In a packed row only the
            tokens of the anchor's document count.
        num_slots (`int`): The number of slots that hold a token, the anchor included.
        num_labels (`int`): The number of slots that carry loss.
    """

    anchor: int
    context_length: int
    num_slots: int
    num_labels: int

    @property
    def end(self) -> int:
        """`int`: the position after the last slot that holds a token."""
        return self.anchor + self.num_slots

    @property
    def labels(self) -> range:
        """`range`: the positions that carry loss."""
        return range(self.anchor + 1, self.anchor + 1 + self.num_labels)

    @property
    def label_range(self) -> str:
        """`str`: the first and the last position that carries loss, as text."""
        return f"{self.labels[0]} – {self.labels[-1]}" if self.num_labels > 1 else f"{self.labels[0]}"


@dataclass(frozen=True)
class StepPlan:
    """
    The settings with which a training step chooses its blocks, in the same way as [`DFlashTrainer`].

    Args:
        block_size (`int`): Slots of a block, the anchor included.
        anchors_per_sample (`int`): The largest number of blocks of a row.
        optimizer_step (`int`): The number of completed optimizer steps.
        seed (`int`): The seed of the run.

    Raises:
        ValueError: `block_size` leaves no slot to draft.
    """

    block_size: int
    anchors_per_sample: int
    optimizer_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size} must be at least 2: the anchor and one drafted slot. Pass a larger one."
            )

    def build(
        self,
        batch: Mapping[str, torch.Tensor],
        anchors_per_sample: int | None = None,
        *,
        partial_windows: bool = True,
    ) -> DFlashBatchPlan:
        """
        Build the plan of a batch.

        Args:
            batch (`Mapping`): A batch of [`DFlashCollator`].
            anchors_per_sample (`int`, *optional*): Replaces the number of blocks of the step.
            partial_windows (`bool`, defaults to `True`): Allow blocks that run past the end of the text.

        Returns:
            [`DFlashBatchPlan`]

        Raises:
            ValueError: A number is below its minimum.
        """
        return build_dflash_batch_plan(
            batch["token_valid_mask"],
            batch["sample_ids"],
            supervised_mask=batch["supervised_mask"],
            segment_ids=batch.get("segment_ids"),
            anchors_per_sample=self.anchors_per_sample if anchors_per_sample is None else anchors_per_sample,
            gamma=self.block_size - 1,
            optimizer_step=self.optimizer_step,
            seed=self.seed,
            replacement=False,
            partial_windows=partial_windows,
        )

    def blocks_of(self, row: Mapping[str, Any]) -> list[Block]:
        """
        Choose the blocks of one prepared row.

        Args:
            row (`Mapping`): `input_ids`, `supervised_mask`, `sample_id` and, if the row is packed, `segment_ids`.

        Returns:
            `list[Block]`: The blocks in ascending order of their anchors.
        """
        if not len(row["input_ids"]):
            return []
        plan = self.build(DFlashCollator()([row]))
        documents = list(row.get("segment_ids") or [0] * len(row["input_ids"]))
        columns = (plan.anchor_positions, plan.trunk_lengths, plan.loss_mask.sum(-1))
        blocks = zip(plan.block_valid.tolist(), *(part.tolist() for part in columns), strict=True)
        return [
            Block(
                anchor,
                context_length,
                num_slots=documents[anchor : anchor + self.block_size].count(documents[anchor]),
                num_labels=num_labels,
            )
            for is_valid, anchor, context_length, num_labels in blocks
            if is_valid
        ]
