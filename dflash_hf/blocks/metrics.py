"""Metrics of a draft: the acceptance record, and sums and counts that add up over rows, batches and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch


@dataclass(frozen=True)
class AcceptanceRecord:
    """
    Counts of verify passes, from which every acceptance length of this package is computed.

    The acceptance length is the mean number of tokens that a verify pass with a draft commits to one sequence. The
    bonus token of the target counts, and tokens past the end of the answer do not. Passes of the target without a
    draft do not count: neither the prefill nor a pass for a last token for which nothing was drafted.

    Args:
        histogram (`tuple[int, ...]`): `histogram[k - 1]` is the number of passes that committed `k` tokens.
        num_verified (`tuple[int, ...]`): `num_verified[k - 1]` is the number of passes that verified slots 1 … k.

    Example:

    ```python
    >>> record = AcceptanceRecord.of([3, 1, 4, 2], block_size=4)
    >>> record.num_passes, record.num_tokens, record.acceptance_length
    (4, 10, 2.5)
    >>> record.slot_acceptance
    [0.75, 0.5, 0.25]
    >>> AcceptanceRecord.of([], block_size=4).acceptance_length is None
    True

    ```
    """

    histogram: tuple[int, ...] = ()
    num_verified: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, committed: Iterable[int], verified: Iterable[int] | None = None, *, block_size: int
    ) -> AcceptanceRecord:
        """
        Count verify passes.

        Args:
            committed (`Iterable[int]`): tokens that each pass committed, at least 1.
            verified (`Iterable[int]`, *optional*): drafted tokens that each pass verified along one path; every pass
                verified `block_size - 1` of them if unset.
            block_size (`int`): slots of a block, the anchor included.

        Returns:
            [`AcceptanceRecord`]

        Raises:
            ValueError: a pass committed no token, or the two counts are not of the same passes.
        """
        committed = list(committed)
        verified = [block_size - 1] * len(committed) if verified is None else list(verified)
        if len(verified) != len(committed):
            raise ValueError(
                f"committed has {len(committed)} passes and verified has {len(verified)}. Pass one count of each "
                "for every verify pass."
            )
        if min(committed, default=1) < 1:
            raise ValueError(f"A verify pass commits at least 1 token, and committed has {min(committed)}.")
        counts = Counter(committed)
        return cls(
            tuple(counts[count] for count in range(1, max([block_size, *committed]) + 1)),
            tuple(sum(count >= slot for count in verified) for slot in range(1, max([block_size - 1, *verified]) + 1)),
        )

    def __add__(self, other: AcceptanceRecord) -> AcceptanceRecord:
        """The record of the passes of both."""
        return AcceptanceRecord(
            tuple(map(sum, zip_longest(self.histogram, other.histogram, fillvalue=0))),
            tuple(map(sum, zip_longest(self.num_verified, other.num_verified, fillvalue=0))),
        )

    @property
    def num_passes(self) -> int:
        """`int`: verify passes with a draft."""
        return sum(self.histogram)

    @property
    def num_tokens(self) -> int:
        """`int`: tokens that these passes committed."""
        return sum(count * passes for count, passes in enumerate(self.histogram, start=1))

    @property
    def acceptance_length(self) -> float | None:
        """`float` or `None`: mean number of tokens a pass committed; `None` if there was no pass."""
        return self.num_tokens / self.num_passes if self.num_passes else None

    @property
    def slot_acceptance(self) -> list[float | None]:
        """`list[float | None]`: of the passes that verified slots 1 … k, the share that accepted all of them."""
        return [
            sum(self.histogram[slot:]) / passes if passes else None
            for slot, passes in enumerate(self.num_verified, start=1)
        ]


def accepted_slots(is_correct: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """
    Count the leading correct slots of each block, which a target would accept.

    Args:
        is_correct (`torch.BoolTensor` of shape `[N, B]`): True where the prediction is the label.
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): True at slots that carry loss; never at slot 0.

    Returns:
        `torch.LongTensor` of shape `[N]`: the count ends at the first slot that is wrong or carries no loss.

    Example:

    ```python
    >>> correct = torch.tensor([[False, True, True, False, True]])
    >>> accepted_slots(correct, torch.tensor([[False, True, True, True, True]])).tolist()
    [2]

    ```
    """
    return (is_correct & loss_mask)[:, 1:].long().cumprod(-1).sum(-1)


def row_statistics(
    loss: torch.Tensor, weights: torch.Tensor, is_correct: torch.Tensor, loss_mask: torch.Tensor, rows: int
) -> torch.Tensor:
    """
    Compute sums and counts of each row, from which [`summarize`] makes metrics that do not depend on the batch size.

    Args:
        loss, weights (`torch.FloatTensor` of shape `[N, B]`): of each slot; 0 where it carries no loss.
        is_correct, loss_mask (`torch.BoolTensor` of shape `[N, B]`): of each slot.
        rows (`int`): number of rows; `N` is a multiple of it, row-major.

    Returns:
        `torch.DoubleTensor` of shape `[rows, 3 * B]`: the weighted loss; the sum of the weights; the number of blocks
        of which 1 … B tokens would be committed (an entry of [`AcceptanceRecord.histogram`] each); the correct slots
        for each of slots 1 … B - 1; and the slots with loss for each of slots 1 … B - 1.
    """
    block_size = loss_mask.shape[1]
    committed = 1 + accepted_slots(is_correct, loss_mask)
    sizes = torch.arange(1, block_size + 1, device=committed.device)
    columns = torch.cat(
        [
            (loss * weights).sum(-1, keepdim=True),
            weights.sum(-1, keepdim=True),
            (committed[:, None] == sizes) & loss_mask.any(-1, keepdim=True),
            (is_correct & loss_mask)[:, 1:],
            loss_mask[:, 1:],
        ],
        dim=-1,
    )
    # MPS has no fp64 (torch 2.13); the sums over the blocks of a row are small enough for fp32 there.
    dtype = torch.float32 if columns.device.type == "mps" else torch.float64
    return columns.to(dtype).view(rows, -1, columns.shape[-1]).sum(1)


def summarize(statistics: torch.Tensor, loss_denominator: float | None = None) -> dict[str, float]:
    """
    Compute the metrics of any number of rows.

    Args:
        statistics (`torch.Tensor` of shape `[rows, 3 * B]`): from [`row_statistics`].
        loss_denominator (`float`, *optional*): replaces the sum of the weights (D-PACE divides by the number of slots
            with loss).

    Returns:
        `dict`: `loss`, NaN if no slot carried loss; `acceptance_length`, that of an [`AcceptanceRecord`] in which
        every block with loss is a verify pass; and `slot_accuracy_k` of each slot. A metric without any block or slot
        to average over is left out.
    """
    block_size = statistics.shape[-1] // 3
    totals = statistics.double().sum(0) if statistics.device.type != "mps" else statistics.sum(0)
    loss_sum, weight_sum = totals[:2].tolist()
    histogram, correct, supervised = totals[2:].split([block_size, block_size - 1, block_size - 1])
    denominator = weight_sum if loss_denominator is None else loss_denominator
    metrics = {"loss": loss_sum / denominator if denominator else float("nan")}
    length = record_of_counts(histogram).acceptance_length
    if length is not None:
        metrics["acceptance_length"] = length
    for slot, (right, count) in enumerate(zip(correct.tolist(), supervised.tolist(), strict=True), start=1):
        if count:
            metrics[f"slot_accuracy_{slot}"] = right / count
    return metrics


def record_of_counts(histogram: torch.Tensor) -> AcceptanceRecord:
    """
    Make a record of verify passes from counts, without the number of slots that each pass verified.

    Args:
        histogram (`torch.Tensor` of shape `[B]` or `[rows, B]`): number of passes that committed 1 … B tokens; rows
            are added up.

    Returns:
        [`AcceptanceRecord`]

    Example:

    ```python
    >>> record_of_counts(torch.tensor([[1, 0, 2], [0, 1, 0]])).acceptance_length
    2.25

    ```
    """
    counts = histogram.reshape(-1, histogram.shape[-1]).sum(0)
    return AcceptanceRecord(tuple(int(count) for count in counts.tolist()))
