"""What the rows of a data set hold, in numbers: lengths, supervision, possible anchors, and what a step covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from .dataset import DFlashCollator
from .inspect_rows import StepPlan

ROWS_PER_BATCH = 8  # every possible block of so many rows exists at one time


@dataclass
class RowStatistics:
    """
    What rows hold; a list has one entry for each row that training does not drop.

    Args:
        lengths (`list[int]`): tokens.
        supervised (`list[int]`): tokens that carry loss.
        eligible (`list[int]`): positions at which an anchor may stand.
        has_whole_block (`list[bool]`): at least one block of the row has all of its slots.
        covered (`list[int]`): tokens that carry loss in a block of the step.
        dropped (`Counter`): rows that training leaves out, by reason.
        num_cut (`int`): rows that were longer.
    """

    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    eligible: list[int] = field(default_factory=list)
    has_whole_block: list[bool] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    num_cut: int = 0

    @property
    def num_rows(self) -> int:
        """Rows looked at, with the dropped ones."""
        return len(self.lengths) + self.dropped.total()

    @property
    def num_without_block(self) -> int:
        """Rows that are not dropped and in which no anchor can stand."""
        return self.eligible.count(0)

    def add(self, rows: Iterable[Mapping[str, Any]], plan: StepPlan) -> None:
        """
        Count further rows.

        Args:
            rows (`Iterable[Mapping]`): as [`TrainingRows`] gives them; read a few at a time.
            plan ([`StepPlan`]): of the step.
        """
        rows = iter(rows)
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            self.dropped.update(row["drop_reason"] for row in batch if row["drop_reason"])
            self._add_kept([row for row in batch if not row["drop_reason"]], plan)

    def _add_kept(self, rows: list[Mapping[str, Any]], plan: StepPlan) -> None:
        lengths = [len(row["input_ids"]) for row in rows]
        self.num_cut += sum(row["is_cut"] for row in rows)
        self.lengths += lengths
        self.supervised += [sum(row["supervised_mask"]) for row in rows]
        if not any(lengths):
            for numbers in (self.eligible, self.has_whole_block, self.covered):
                numbers += [0] * len(rows)
            return
        batch = DFlashCollator()(rows)
        shape = batch["supervised_mask"].shape
        every = plan.build(batch, anchors_per_sample=shape[1])
        self.eligible += every.block_valid.view(shape).sum(1).tolist()
        self.has_whole_block += (every.block_valid & every.slot_valid.all(-1)).view(shape).any(1).tolist()
        step = plan.build(batch)
        is_covered = torch.zeros(shape, dtype=torch.bool)
        sample_rows = step.sample_rows[:, None].expand_as(step.label_positions)
        is_covered[sample_rows[step.loss_mask], step.label_positions[step.loss_mask]] = True
        self.covered += is_covered.sum(1).tolist()

    def summary(self, plan: StepPlan, num_rows: int) -> list[tuple[str, str]]:
        """
        The numbers in words.

        Args:
            plan ([`StepPlan`]): of the step.
            num_rows (`int`): of the whole data set.

        Returns:
            `list[tuple[str, str]]`: names and values.
        """
        kept, tokens, supervised = len(self.lengths), sum(self.lengths), sum(self.supervised)
        rows = f"{num_rows:,}"
        if self.num_rows < num_rows:
            rows += f"; what follows is of {self.num_rows:,} of them, drawn at random"
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())
        return [
            ("rows", rows),
            ("rows dropped", f"{self.dropped.total():,}" + (f" ({reasons})" if reasons else "")),
            ("rows cut", f"{self.num_cut:,}"),
            ("tokens", f"{tokens:,}, of them {supervised:,} supervised ({_share(supervised, tokens)})"),
            ("length of a row", _spread(self.lengths)),
            ("supervised in a row", _spread(self.supervised)),
            ("possible anchors in a row", _spread(self.eligible)),
            ("rows without a block", f"{self.num_without_block:,} ({_share(self.num_without_block, kept)})"),
            (
                f"rows without a whole block of {plan.block_size}",
                f"{self.has_whole_block.count(False):,} ({_share(self.has_whole_block.count(False), kept)})",
            ),
            (
                f"covered by step {plan.optimizer_step}",
                f"{_share(sum(self.covered), supervised)} of the supervised tokens, by up to "
                f"{plan.anchors_per_sample} blocks a row (seed {plan.seed})",
            ),
        ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _spread(values: Sequence[int]) -> str:
    if not values:
        return "–"
    low, middle, high = np.percentile(values, [5, 50, 95], method="inverted_cdf").tolist()
    return f"median {middle:,}, most between {low:,} and {high:,} (5 % and 95 %), at most {max(values):,}"


@dataclass(frozen=True)
class Histogram:
    """
    Counts of whole numbers in bins of one width.

    Args:
        starts (`list[int]`): smallest value of each bin.
        counts (`list[int]`): values in each bin.
        width (`int`): values that a bin can tell apart.
    """

    starts: list[int]
    counts: list[int]
    width: int

    @classmethod
    def of(cls, values: Sequence[int], max_bins: int) -> Histogram:
        """
        Count values in bins whose width is 1, 2 or 5 times a power of ten.

        Args:
            values (`Sequence[int]`): at least 0.
            max_bins (`int`): most bins.

        Returns:
            [`Histogram`]; without bins if there is no value.

        Example:

        ```python
        >>> Histogram.of([3, 4, 9, 21], max_bins=5)
        Histogram(starts=[0, 5, 10, 15, 20], counts=[2, 1, 0, 0, 1], width=5)

        ```
        """
        if not values:
            return cls([], [], 1)
        low, high = min(values), max(values)
        width = next(
            step
            for power in range(20)
            for step in (10**power, 2 * 10**power, 5 * 10**power)
            if high // step - low // step < max_bins
        )
        starts = list(range(low // width * width, high + 1, width))
        counts = Counter(value // width * width for value in values)
        return cls(starts, [counts[start] for start in starts], width)

    def name(self, index: int) -> str:
        """The values of a bin."""
        start = self.starts[index]
        return f"{start:,}" if self.width == 1 else f"{start:,} – {start + self.width - 1:,}"
