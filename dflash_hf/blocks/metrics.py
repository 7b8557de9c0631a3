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
    Leading slots of each block whose prediction is right: what a target would accept.

    Args:
        is_correct (`torch.BoolTensor` of shape `[N, B]`): prediction equals label.
        loss_mask (`torch.BoolTensor` of shape `[N, B]`): slots that carry loss; slot 0 never does.

    Returns:
        `torch.LongTensor` of shape `[N]`: the count stops at the first wrong or unsupervised slot.

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
    Sums and counts of each row, from which [`summarize`] makes metrics that do not depend on the batch size.

    Args:
        loss, weights (`torch.FloatTensor` of shape `[N, B]`): per slot, 0 where nothing is supervised.
        is_correct, loss_mask (`torch.BoolTensor` of shape `[N, B]`): per slot.
        rows (`int`): `N` is a multiple of it, row-major.

    Returns:
        `torch.DoubleTensor` of shape `[rows, 4 + 2 * (B - 1)]`: weighted loss, weights, accepted slots,
        blocks with a supervised slot, then correct slots and supervised slots for each of slots 1 … B - 1.
    """
    has_loss = loss_mask.any(-1)
    columns = torch.cat(
        [
            (loss * weights).sum(-1, keepdim=True),
            weights.sum(-1, keepdim=True),
            accepted_slots(is_correct, loss_mask)[:, None],
            has_loss[:, None],
            (is_correct & loss_mask)[:, 1:],
            loss_mask[:, 1:],
        ],
        dim=-1,
    )
    # MPS has no fp64; block sums of a row are small enough for fp32 there
    dtype = torch.float32 if columns.device.type == "mps" else torch.float64
    return columns.to(dtype).view(rows, -1, columns.shape[-1]).sum(1)


def summarize(statistics: torch.Tensor, loss_denominator: float | None = None) -> dict[str, float]:
    """
    Metrics of any number of rows.

    Args:
        statistics (`torch.Tensor` of shape `[rows, 4 + 2 * (B - 1)]`): from [`row_statistics`].
        loss_denominator (`float`, *optional*): replaces the sum of weights (D-PACE divides by supervised slots).

    Returns:
        `dict`: `loss`; `accept_len` (1 + mean leading correct slots a block, so the bonus token counts; 1.0 is
        useless and `B` is perfect); `slot_accuracy_k` for each slot. NaN where nothing was supervised.
    """
    totals = statistics.double().sum(0) if statistics.device.type != "mps" else statistics.sum(0)
    loss_sum, weight_sum, accepted, blocks = totals[:4].tolist()
    correct, supervised = totals[4:].chunk(2)
    denominator = weight_sum if loss_denominator is None else loss_denominator
    metrics = {
        "loss": loss_sum / denominator if denominator else float("nan"),
        "accept_len": 1 + accepted / blocks if blocks else float("nan"),
    }
    for slot, (right, count) in enumerate(zip(correct.tolist(), supervised.tolist(), strict=True), start=1):
        metrics[f"slot_accuracy_{slot}"] = right / count if count else float("nan")
    return metrics
