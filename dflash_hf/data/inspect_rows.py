"""What training sees of a row: tokens, labels, anchors and blocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from .dataset import DFlashCollator, prepare_row
from .detokenize import IncrementalDetokenizer


def token_pieces(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> list[str]:
    """
    What each token adds to the text; joined, they are the decoded text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): of the target.
        input_ids (`Sequence[int]`): token ids.

    Returns:
        `list[str]`, one for each token: empty if its bytes end inside a character, which then belongs to the token
        that completes it.
    """
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.put(token_id) for token_id in input_ids]
    if pieces:
        pieces[-1] += detokenizer.end()
    return pieces


def visible(text: str) -> str:
    """
    Text that can be shown anywhere: line ends are marked, and what would steer a terminal or turn the line is named.

    Args:
        text (`str`): any text.

    Returns:
        `str`

    Example:

    ```python
    >>> visible("a" + chr(10) + chr(27) + "[31m" + chr(0x202E))
    'a↵\\n␛[31m<U+202E>'

    ```
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)  # control pictures
    if 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"<U+{code:04X}>"
    return character


@dataclass(frozen=True)
class StepPlan:
    """
    How a step of training chooses its blocks, by the rules of [`DFlashTrainer`].

    Args:
        block_size (`int`): slots a block, the anchor included.
        anchors_per_sample (`int`): most blocks of a row.
        optimizer_step (`int`): completed optimizer steps.
        seed (`int`): of the run.

    Raises:
        ValueError: the block has no slot to draft.
    """

    block_size: int
    anchors_per_sample: int
    optimizer_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: the anchor and one slot to draft.")

    def build(self, batch: Mapping[str, torch.Tensor], anchors_per_sample: int | None = None) -> DFlashBatchPlan:
        """
        The plan of a batch.

        Args:
            batch (`Mapping`): as [`DFlashCollator`] makes it.
            anchors_per_sample (`int`, *optional*): replaces that of the step.

        Returns:
            [`DFlashBatchPlan`]

        Raises:
            ValueError: a number is below its minimum.
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
            partial_windows=True,
        )


@dataclass(frozen=True)
class Block:
    """
    A block of a row. Its labels are the `num_labels` tokens after the anchor.

    Args:
        anchor (`int`): position of the anchor in the row, from 0.
        context_length (`int`): tokens before the anchor that the draft sees, of the anchor's document.
        num_slots (`int`): slots that hold a token, the anchor included.
        num_labels (`int`): slots that carry loss.
    """

    anchor: int
    context_length: int
    num_slots: int
    num_labels: int

    @property
    def end(self) -> int:
        """Position after the last slot that holds a token."""
        return self.anchor + self.num_slots

    @property
    def labels(self) -> range:
        """Positions that carry loss."""
        return range(self.anchor + 1, self.anchor + 1 + self.num_labels)

    @property
    def label_range(self) -> str:
        """First and last of these positions, as text."""
        return f"{self.labels[0]} – {self.labels[-1]}" if self.num_labels > 1 else f"{self.labels[0]}"


@dataclass(frozen=True)
class InspectedRow:
    """
    A row with its blocks of a step.

    Args:
        index (`int`): number of the row in its data set, from 0.
        sample_id (`int`): decides the anchors.
        input_ids (`list[int]`): token ids.
        supervised_mask (`list[bool]`): True at tokens that carry loss.
        pieces (`list[str]`): what each token adds to the text; empty if a character goes on in the next token.
        special (`list[bool]`): True at special tokens.
        blocks (`list[Block]`): in ascending order; none if the row is dropped.
        drop_reason (`str`): why training leaves the row out; empty if it does not.
        is_cut (`bool`): the row was longer.
    """

    index: int
    sample_id: int
    input_ids: list[int]
    supervised_mask: list[bool]
    pieces: list[str]
    special: list[bool]
    blocks: list[Block]
    drop_reason: str
    is_cut: bool

    @cached_property
    def covered(self) -> set[int]:
        """Positions that carry loss in at least one block."""
        return {position for block in self.blocks for position in block.labels}

    def text(self, positions: Iterable[int]) -> str:
        """The visible text of some tokens, in one line."""
        return "".join(visible(self.pieces[position]) for position in positions).replace("\n", "")

    def describe(self) -> str:
        """The row in one line."""
        if self.drop_reason:
            fate = f"dropped: {self.drop_reason}"
        else:
            fate = f"{len(self.blocks)} blocks, which cover {len(self.covered)} of them"
        cut = ", cut at max_length" if self.is_cut else ""
        return (
            f"Row {self.index} (sample id {self.sample_id}): {len(self.input_ids):,} tokens{cut}, "
            f"{sum(self.supervised_mask):,} supervised; {fate}"
        )


class TrainingRows:
    """
    Rows of a data set as the trainer prepares them, one at a time and only when asked for.

    Args:
        dataset (`datasets.Dataset`):
            Rows as [`prepare_row`] takes them; rows with a `supervised_mask` are taken as they are, as in training.
        tokenizer, max_length, eos_token_ids, num_embeddings:
            As in [`prepare_row`].

    Raises:
        ValueError: there is no row; rows of messages meet a tokenizer without a chat template; prepared rows have no
            `sample_id`; or, when a row is asked for, it breaks a rule of [`prepare_row`].
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
            raise ValueError("The data set has no row. Give one with rows.")
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1.")
        self.is_prepared = "supervised_mask" in columns
        if self.is_prepared and not {"input_ids", "sample_id"} <= columns:
            raise ValueError(
                f"The rows have the columns {sorted(columns)}: rows with a supervised_mask count as prepared, and "
                "need input_ids and a sample_id, too. Name the mask loss_mask, or add them."
            )
        if "messages" in columns and "input_ids" not in columns and not tokenizer.chat_template:
            raise ValueError(
                f"The rows are messages, and the tokenizer of {tokenizer.name_or_path} has no chat template. Give "
                "rows of prompt and completion texts, rows of input_ids with a loss_mask, or a chat target."
            )
        self.dataset, self.tokenizer = dataset.with_format(None), tokenizer
        self._how: dict[str, Any] = {
            "max_length": max_length,
            "eos_token_ids": tuple(eos_token_ids),
            "num_embeddings": num_embeddings,
        }

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row with `input_ids`, `supervised_mask`, `sample_id`, `drop_reason` and `is_cut`."""
        row: dict[str, Any] = self.dataset[index]
        if not self.is_prepared:
            return prepare_row(row, index, self.tokenizer, **self._how, description="inspected")
        names = ("input_ids", "supervised_mask", "sample_id", "segment_ids")
        return {**{name: row[name] for name in names if name in row}, "drop_reason": "", "is_cut": False}

    def sample(self, limit: int) -> Sequence[int]:
        """
        Numbers of the rows that statistics are made of.

        Args:
            limit (`int`): most rows.

        Returns:
            `Sequence[int]`: all rows, or as many at random (the same in every call), in ascending order.

        Raises:
            ValueError: `limit` is below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1.")
        every = range(len(self))
        return every if len(every) <= limit else sorted(random.Random(0).sample(every, limit))

    def first(self, count: int) -> Iterator[int]:
        """The numbers of the first `count` rows that training does not drop; of the first `count` if it drops all."""
        kept = islice((index for index in range(len(self)) if not self[index]["drop_reason"]), count)
        yield from list(kept) or range(min(count, len(self)))

    def inspect(self, index: int, plan: StepPlan) -> InspectedRow:
        """
        Look at one row.

        Args:
            index (`int`): number of the row, from 0.
            plan ([`StepPlan`]): of the step.

        Returns:
            [`InspectedRow`]

        Raises:
            ValueError: there is no such row, or it breaks a rule.
        """
        if not 0 <= index < len(self):
            raise ValueError(f"Row {index} does not exist: the data set has rows 0 … {len(self) - 1}.")
        row = self[index]
        ids = list(row["input_ids"])
        specials = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return InspectedRow(
            index=index,
            sample_id=row["sample_id"],
            input_ids=ids,
            supervised_mask=list(row["supervised_mask"]),
            pieces=token_pieces(self.tokenizer, ids),
            special=[token in specials for token in ids],
            blocks=blocks_of(row, plan),
            drop_reason=row["drop_reason"],
            is_cut=row["is_cut"],
        )


def blocks_of(row: Mapping[str, Any], plan: StepPlan) -> list[Block]:
    """
    The blocks of a prepared row.

    Args:
        row (`Mapping`): `input_ids`, `supervised_mask`, `sample_id` and, if packed, `segment_ids`.
        plan ([`StepPlan`]): of the step.

    Returns:
        `list[Block]` in ascending order of their anchors.
    """
    if not len(row["input_ids"]):
        return []
    built = plan.build(DFlashCollator()([row]))
    numbers = (built.anchor_positions, built.trunk_lengths, built.slot_valid.sum(-1), built.loss_mask.sum(-1))
    return [
        Block(*values)
        for is_valid, *values in zip(built.block_valid.tolist(), *(part.tolist() for part in numbers), strict=True)
        if is_valid
    ]


def lanes_of(blocks: Sequence[Block]) -> list[int]:
    """
    A lane for each block, so that blocks of one lane do not overlap.

    Args:
        blocks (`Sequence[Block]`): in ascending order of their anchors.

    Returns:
        `list[int]`: lanes, counted from 0; as few as possible.

    Example:

    ```python
    >>> lanes_of([Block(0, 0, 4, 3), Block(2, 2, 4, 3), Block(4, 4, 4, 3)])
    [0, 1, 0]

    ```
    """
    ends: list[int] = []
    lanes = []
    for block in blocks:
        lane = next((number for number, end in enumerate(ends) if end <= block.anchor), len(ends))
        ends[lane : lane + 1] = [block.end]
        lanes.append(lane)
    return lanes


def ranges_of(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """
    The runs of True.

    Args:
        mask (`Sequence[bool]`): any length.

    Returns:
        `list[tuple[int, int]]`: first position and the position after the last.

    Example:

    ```python
    >>> ranges_of([False, True, True, False, True])
    [(1, 3), (4, 5)]

    ```
    """
    edges = np.flatnonzero(np.diff(np.asarray([False, *mask, False], dtype=np.int8)))
    return [(int(first), int(after)) for first, after in edges.reshape(-1, 2)]
