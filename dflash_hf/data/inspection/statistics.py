"""Statistics of the rows of a data set: lengths, supervised tokens, eligible anchors and the coverage of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from ..collator import DFlashCollator
from .rows import StepPlan

ROWS_PER_BATCH = 8  # bounds the memory: a plan with every possible block exists for this many rows at a time


@dataclass
class RowStatistics:
    """
    Statistics of rows. Each list has one entry for every row that training keeps.

    Args:
        lengths (`list[int]`): Tokens of the row.
        supervised (`list[int]`): Tokens that carry loss.
        eligible (`list[int]`): Positions at which an anchor may stand.
        has_whole_block (`list[bool]`): Whether at least one block of the row has a token in each of its slots.
        covered (`list[int]`): Tokens that carry loss in a block of the step.
        dropped (`Counter`): Rows that training drops, by reason.
        num_truncated (`int`): Kept rows that were longer than `max_length`.
    """

    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    eligible: list[int] = field(default_factory=list)
    has_whole_block: list[bool] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    num_truncated: int = 0

    @property
    def num_rows(self) -> int:
        """`int`: rows that were read, the dropped ones included."""
        return len(self.lengths) + self.dropped.total()

    @property
    def num_without_block(self) -> int:
        """`int`: kept rows in which no anchor can stand."""
        return self.eligible.count(0)

    def add(self, rows: Iterable[Mapping[str, Any]], plan: StepPlan) -> None:
        """
        Add rows to the statistics.

        Args:
            rows (`Iterable[Mapping]`): Rows as [`TrainingRows`] returns them. They are read in small batches.
            plan ([`StepPlan`]): The plan of the step.
        """
        rows = iter(rows)
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            self.dropped.update(row["drop_reason"] for row in batch if row["drop_reason"])
            self._add_kept([row for row in batch if not row["drop_reason"]], plan)

    def _add_kept(self, rows: list[Mapping[str, Any]], plan: StepPlan) -> None:
        """Add rows that training keeps."""
        lengths = [len(row["input_ids"]) for row in rows]
        self.num_truncated += sum(row["is_truncated"] for row in rows)
        self.lengths += lengths
        self.supervised += [sum(row["supervised_mask"]) for row in rows]
        if not any(lengths):
            for values in (self.eligible, self.has_whole_block, self.covered):
                values += [0] * len(rows)
            return
        batch = DFlashCollator()(rows)
        shape = batch["supervised_mask"].shape
        all_blocks = plan.build(batch, anchors_per_sample=shape[1])
        self.eligible += all_blocks.block_valid.view(shape).sum(1).tolist()
        self.has_whole_block += plan.build(batch, 1, partial_windows=False).block_valid.tolist()
        step = plan.build(batch)
        is_covered = torch.zeros(shape, dtype=torch.bool)
        sample_rows = step.sample_rows[:, None].expand_as(step.label_positions)
        is_covered[sample_rows[step.loss_mask], step.label_positions[step.loss_mask]] = True
        self.covered += is_covered.sum(1).tolist()

    def summary(self, plan: StepPlan, num_rows: int) -> list[tuple[str, str]]:
        """
        Return the statistics as text.

        Args:
            plan ([`StepPlan`]): The plan of the step.
            num_rows (`int`): The number of rows of the whole data set.

        Returns:
            `list[tuple[str, str]]`: Names and values.
        """
        kept, tokens, supervised = len(self.lengths), sum(self.lengths), sum(self.supervised)
        rows = f"{num_rows:,}"
        if self.num_rows < num_rows:
            rows += f"; the statistics below are of a random sample of {self.num_rows:,}"
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())
        return [
            ("rows", rows),
            ("rows dropped", f"{self.dropped.total():,}" + (f" ({reasons})" if reasons else "")),
            ("rows truncated", f"{self.num_truncated:,}"),
            ("tokens", f"{tokens:,}, of which {supervised:,} are supervised ({_share(supervised, tokens)})"),
            ("tokens per row", _spread(self.lengths)),
            ("supervised tokens per row", _spread(self.supervised)),
            ("eligible anchors per row", _spread(self.eligible)),
            ("rows without a block", f"{self.num_without_block:,} ({_share(self.num_without_block, kept)})"),
            (
                f"rows without a whole block of {plan.block_size}",
                f"{self.has_whole_block.count(False):,} ({_share(self.has_whole_block.count(False), kept)})",
            ),
            (
                f"covered by step {plan.optimizer_step}",
                f"{_share(sum(self.covered), supervised)} of the supervised tokens, by up to "
                f"{plan.anchors_per_sample} blocks per row (seed {plan.seed})",
            ),
        ]


@dataclass(frozen=True)
class Histogram:
    """
    Counts of integers in bins of equal width.

    Args:
        starts (`list[int]`): The smallest value of each bin.
        counts (`list[int]`): The number of values in each bin.
        width (`int`): The number of distinct values that a bin covers.
    """

    starts: list[int]
    counts: list[int]
    width: int

    @classmethod
    def of(cls, values: Sequence[int], max_bins: int) -> Histogram:
        """
        Count values in bins whose width is 1, 2 or 5 times a power of ten.

        Args:
            values (`Sequence[int]`): Integers that are not negative.
            max_bins (`int`): The largest number of bins.

        Returns:
            [`Histogram`]: It has no bins if there are no values.

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
        """Return the range of values of a bin as text."""
        start = self.starts[index]
        return f"{start:,}" if self.width == 1 else f"{start:,} – {start + self.width - 1:,}"


def _share(part: int, whole: int) -> str:
    """Return a share in percent, or a dash if the whole is 0."""
    return f"{part / whole:.1%}" if whole else "–"


def _spread(values: Sequence[int]) -> str:
    """Return the median, the 5 % and 95 % quantiles and the maximum of values as text."""
    if not values:
        return "–"
    low, middle, high = np.percentile(values, [5, 50, 95], method="inverted_cdf").tolist()
    return f"median {middle:,}, 5 % to 95 % quantile {low:,} to {high:,}, maximum {max(values):,}"
