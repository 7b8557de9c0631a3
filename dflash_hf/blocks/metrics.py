"""What a draft is judged by, as (sum, count) pairs that add up over rows, batches and ranks."""

from __future__ import annotations

import torch


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
