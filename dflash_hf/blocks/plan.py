"""The batch plan: which blocks a batch trains on, decided from masks and ids before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral

import torch
from torch.nn import functional

MIX_MODULUS = 2147483647
MIX_FACTOR = 73244475
MAX_SAMPLE_ID = 2**53 - 1  # 17 ids + 31 steps + 43 seeds of this size stay below 2**62
MAX_BLOCKS = 2**24  # blocks of a row, and slots of a block


@dataclass(frozen=True)
class DFlashBatchPlan:
    """
    The `N = rows * anchors_per_sample` blocks of one batch, row-major, with `B` slots and `T = gamma + 1` tokens each.

    The tokens of a block are its anchor and the `gamma` tokens that it predicts. By default slot `k` predicts the
    token `k` places after the anchor and `B = T`. In blocks that sample from the anchor slot `k` predicts the token
    `k + 1` places after it, and `B = T - 1`. What concerns attention is counted in slots, and what concerns the loss
    in tokens.

    Args:
        sample_rows (`torch.LongTensor` of shape `[N]`): row that each block belongs to.
        anchor_ids (`torch.LongTensor` of shape `[N]`): the number from which each anchor is derived.
        anchor_positions (`torch.LongTensor` of shape `[N]`): column of the anchor; 0 where the block is invalid.
        trunk_lengths (`torch.LongTensor` of shape `[N]`): number of valid tokens strictly before the
            anchor, in its document.
        query_positions (`torch.LongTensor` of shape `[N, B]`): anchor + slot; 0 where the block is invalid.
        label_positions (`torch.LongTensor` of shape `[N, T]`): the column of each token of the block, 0 where the
            block is invalid. Those past the end of the row do not exist; clamp them before gathering.
        block_valid (`torch.BoolTensor` of shape `[N]`): the row has a window for this block.
        slot_valid (`torch.BoolTensor` of shape `[N, B]`): the slot attends and is attended to in its block. This is
            `block_valid` at every slot, also past the end of the text, since a served block always has all its slots.
        loss_mask (`torch.BoolTensor` of shape `[N, T]`): the prediction of the token carries loss. That of the anchor
            never does, nor does one past the end of the text.
    """

    sample_rows: torch.Tensor
    anchor_ids: torch.Tensor
    anchor_positions: torch.Tensor
    trunk_lengths: torch.Tensor
    query_positions: torch.Tensor
    label_positions: torch.Tensor
    block_valid: torch.Tensor
    slot_valid: torch.Tensor
    loss_mask: torch.Tensor

    @property
    def block_size(self) -> int:
        """`int`: slots of a block, the anchor included."""
        return self.query_positions.shape[1]

    @property
    def tokens_per_block(self) -> int:
        """`int`: tokens of a block, the anchor included."""
        return self.loss_mask.shape[1]


def mix(values: torch.Tensor) -> torch.Tensor:
    """
    Scramble non-negative integers below 2**62 with the same result on every device.

    Args:
        values (`torch.LongTensor`): any shape.

    Returns:
        `torch.LongTensor` of the same shape, in `0 … 2**31 - 1`.

    Example:

    ```python
    >>> mix(torch.tensor([0, 1, 17])).tolist()
    [0, 827029893, 84124513]

    ```
    """
    values = values % MIX_MODULUS
    for _ in range(2):
        values = ((values ^ (values >> 16)) * MIX_FACTOR) % MIX_MODULUS
    return values ^ (values >> 16)


def content_sample_ids(input_ids: torch.Tensor, token_valid_mask: torch.Tensor) -> torch.Tensor:
    """
    Return ids of rows that depend on their tokens alone, and neither on their order nor on padding.

    Args:
        input_ids (`torch.LongTensor` of shape `[R, S]`): token ids; any id at padding.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.

    Returns:
        `torch.LongTensor` of shape `[R]`, in `0 … 2**53 - 1`. Rows with the same tokens have the same id.

    Example:

    ```python
    >>> ids = torch.tensor([[5, 6, 7, 0], [0, 5, 6, 7], [6, 5, 7, 0]])
    >>> first, padded, swapped = content_sample_ids(ids, ids > 0).tolist()
    >>> first == padded, first == swapped
    (True, False)

    ```
    """
    values = mix(mix(input_ids) + position_ids_of(token_valid_mask))
    return values.masked_fill(~token_valid_mask, 0).sum(-1) % (MAX_SAMPLE_ID + 1)


def build_dflash_batch_plan(
    token_valid_mask: torch.Tensor,
    sample_ids: torch.Tensor,
    *,
    anchors_per_sample: int,
    gamma: int,
    optimizer_step: int,
    seed: int,
    supervised_mask: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    replacement: bool = True,
    partial_windows: bool = False,
    sample_from_anchor: bool = False,
) -> DFlashBatchPlan:
    """
    Choose the blocks of a batch from its masks, ids, step and seed alone.

    The anchors of a row do not depend on the other rows, their order, the rank or a resume. Rows with equal ids and
    masks get equal anchors, so every row needs an id of its own. The plan is built without device synchronisation.

    Args:
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`):
            True at real tokens. This mask decides what a block may attend to, not what carries loss.
        sample_ids (`torch.LongTensor` of shape `[R]`):
            One id for each row, in `0 … 2**53 - 1`.
        anchors_per_sample (`int`):
            Number of blocks for each row, in `1 … 2**24`.
        gamma (`int`):
            Number of tokens that a block predicts, in `1 … 2**24`.
        optimizer_step (`int`):
            Number of completed optimizer steps, in `0 … 2**53 - 1`.
        seed (`int`):
            Seed of the run, in `0 … 2**53 - 1`.
        supervised_mask (`torch.BoolTensor` of shape `[R, S]`, *optional*):
            True at labels that carry loss. An anchor then needs a supervised next token, and supervision in a block
            stops at the first unsupervised label. All labels carry loss if unset.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*):
            Document of each token in packed rows. A block and its context stay in one document.
        replacement (`bool`, defaults to `True`):
            Sample anchors independently, so that they may repeat. With `False` they are distinct and in ascending
            order; a row with fewer windows than anchors uses each window once, and its other blocks are invalid.
        partial_windows (`bool`, defaults to `False`):
            Allow blocks that run past the end of the text, of which only the anchor and the next token must exist.
            Slots past the end carry no loss. They attend like all others, as mask tokens at the next positions.
        sample_from_anchor (`bool`, defaults to `False`):
            Whether slot `k` predicts the token `k + 1` places after the anchor instead of the token `k` places after
            it, so that a block has `gamma` slots instead of `gamma + 1`.

    Returns:
        [`DFlashBatchPlan`] on the device of the inputs. All blocks of rows of length 0 are invalid.

    Raises:
        TypeError: a mask or an id tensor has the wrong dtype, or a number is no integer.
        ValueError: a shape, a device or a number breaks its rule.

    Source: the reference recipe of DFlash training; `supervised_mask`, `segment_ids`, `replacement=False` and
    `partial_windows` are extensions that leave its values unchanged by default.

    Example:

    ```python
    >>> plan = build_dflash_batch_plan(torch.ones(2, 17, dtype=torch.bool), torch.tensor([101, 102]),
    ...     anchors_per_sample=3, gamma=3, optimizer_step=7, seed=11)
    >>> plan.anchor_positions.tolist()
    [7, 4, 6, 7, 1, 7]

    ```
    """
    _check_arguments(token_valid_mask, sample_ids, supervised_mask, segment_ids)
    for name, number, limits in (
        ("anchors_per_sample", anchors_per_sample, (1, MAX_BLOCKS)),
        ("gamma", gamma, (1, MAX_BLOCKS)),
        ("optimizer_step", optimizer_step, (0, MAX_SAMPLE_ID)),
        ("seed", seed, (0, MAX_SAMPLE_ID)),
    ):
        _check_number(name, number, *limits)
    if not token_valid_mask.shape[1]:  # a column of padding, so that every index of an invalid block exists
        token_valid_mask = functional.pad(token_valid_mask, (0, 1))
        supervised_mask, segment_ids = (
            None if mask is None else functional.pad(mask, (0, 1)) for mask in (supervised_mask, segment_ids)
        )

    device, (rows, length) = token_valid_mask.device, token_valid_mask.shape
    num_tokens = gamma + 1
    in_window = _tokens_in_one_document(token_valid_mask, segment_ids, num_tokens)  # [R, S, T]
    windows = in_window[..., :2].all(-1) if partial_windows else in_window.all(-1)
    if supervised_mask is not None:
        windows &= functional.pad(supervised_mask[:, 1:], (0, 1))
    window_count = windows.sum(-1)

    anchor_slots = torch.arange(anchors_per_sample, device=device)
    anchor_ids = 17 * sample_ids[:, None] + 31 * optimizer_step + 43 * seed + 59 * anchor_slots
    if replacement:
        ordinals = mix(anchor_ids) % window_count.clamp(min=1)[:, None]
        anchors = torch.searchsorted(windows.cumsum(-1), ordinals + 1)
        block_valid = (window_count > 0)[:, None].expand_as(anchors)
    else:
        anchors, block_valid = _distinct_anchors(windows, anchor_ids[:, :1], anchors_per_sample)
    anchors = anchors.masked_fill(~block_valid, 0)

    places = torch.arange(num_tokens, device=device)
    row_index = torch.arange(rows, device=device)[:, None]
    label_positions = (anchors[..., None] + places).masked_fill(~block_valid[..., None], 0)
    num_slots = num_tokens - 1 if sample_from_anchor else num_tokens
    slot_valid = block_valid[..., None].repeat(1, 1, num_slots)
    loss_mask = in_window[row_index, anchors] & block_valid[..., None] & (places > 0)
    if supervised_mask is not None:
        carries_loss = supervised_mask[row_index[..., None], label_positions.clamp(max=length - 1)]
        carries_loss = (carries_loss | (places == 0)).int().cumprod(-1).bool()
        loss_mask = loss_mask & carries_loss
    return DFlashBatchPlan(
        sample_rows=row_index.expand_as(anchors).flatten(),
        anchor_ids=anchor_ids.flatten(),
        anchor_positions=anchors.flatten(),
        trunk_lengths=position_ids_of(token_valid_mask, segment_ids).gather(1, anchors).flatten(),
        query_positions=label_positions[..., :num_slots].flatten(0, 1),
        label_positions=label_positions.flatten(0, 1),
        block_valid=block_valid.flatten(),
        slot_valid=slot_valid.flatten(0, 1),
        loss_mask=loss_mask.flatten(0, 1),
    )


def _tokens_in_one_document(
    token_valid_mask: torch.Tensor, segment_ids: torch.Tensor | None, num_tokens: int
) -> torch.Tensor:
    """Return, as `[R, S, T]`, whether the tokens from a column up to each place are all valid and of one document."""
    padding = (0, num_tokens - 1)
    usable = functional.pad(token_valid_mask, padding, value=False).unfold(-1, num_tokens, 1)
    if segment_ids is not None:
        usable = usable & (functional.pad(segment_ids, padding).unfold(-1, num_tokens, 1) == segment_ids[..., None])
    return usable.int().cumprod(-1).bool()


def _distinct_anchors(
    windows: torch.Tensor, first_anchor_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` windows of each row with the smallest scrambled ordinals, ascending, and their validity."""
    ordinals = windows.cumsum(-1) - 1
    scores = mix(first_anchor_ids + 101 * (ordinals + 1)).masked_fill(~windows, 2**31)
    chosen = scores.argsort(dim=-1, stable=True)[:, :count]  # stable, so that ties go to the lowest ordinal
    chosen = functional.pad(chosen, (0, count - chosen.shape[1]))
    valid = torch.arange(count, device=windows.device) < windows.sum(-1, keepdim=True)
    columns = chosen.masked_fill(~valid, windows.shape[1]).sort(-1).values
    return columns, valid


def position_ids_of(token_valid_mask: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Count the valid tokens strictly before each column; at a real token this count is its position.

    Positions are those of `generate`: the first real token of a sequence, or of a document in packed rows, is at
    position 0, whatever padding comes before it.

    Args:
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): document of each token in packed rows.

    Returns:
        `torch.LongTensor` of shape `[R, S]`; padding has the position that a token there would have.

    Example:

    ```python
    >>> position_ids_of(torch.tensor([[False, False, True, True]])).tolist()
    [[0, 0, 0, 1]]

    ```
    """
    before = token_valid_mask.cumsum(-1) - token_valid_mask.long()
    if segment_ids is None:
        return before
    is_start = functional.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return before - before.masked_fill(~is_start, 0).cummax(-1).values


def _check_number(name: str, number: int, minimum: int, maximum: int) -> None:
    """Refuse a number that is no integer or out of range, beyond which products overflow or nothing fits in memory."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"{name}={number!r} is a {type(number).__name__} and must be an integer. Pass an int.")
    if number < minimum:
        raise ValueError(f"{name}={number} must be at least {minimum}. Pass a larger number.")
    if number > maximum:
        raise ValueError(f"{name}={number} must be at most {maximum}. Pass a smaller number.")


def _check_arguments(
    token_valid_mask: torch.Tensor,
    sample_ids: torch.Tensor,
    supervised_mask: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
) -> None:
    """Refuse tensors of a wrong dtype, shape or device, and sample ids out of range."""
    for name, tensor, dtype in (
        ("token_valid_mask", token_valid_mask, torch.bool),
        ("supervised_mask", supervised_mask, torch.bool),
        ("segment_ids", segment_ids, torch.int64),
    ):
        if tensor is None and name != "token_valid_mask":
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__} and must be a tensor of {dtype}.")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and must be {dtype}.")
        if tensor.dim() != 2 or tensor.shape != token_valid_mask.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and must be [rows, length]"
                f"{'' if name == 'token_valid_mask' else f' = {list(token_valid_mask.shape)}'}."
            )
        if tensor.device != token_valid_mask.device:
            raise ValueError(f"{name} is on {tensor.device} and must be on {token_valid_mask.device}.")
    if not isinstance(sample_ids, torch.Tensor):
        raise TypeError(f"sample_ids is a {type(sample_ids).__name__} and must be a tensor of torch.int64.")
    if sample_ids.dtype != torch.int64:
        raise TypeError(f"sample_ids has dtype {sample_ids.dtype} and must be torch.int64.")
    if sample_ids.shape != token_valid_mask.shape[:1]:
        raise ValueError(
            f"sample_ids has shape {list(sample_ids.shape)} and must be [rows] = [{token_valid_mask.shape[0]}]."
        )
    if sample_ids.device != token_valid_mask.device:
        raise ValueError(f"sample_ids is on {sample_ids.device} and must be on {token_valid_mask.device}.")
    in_range = ((sample_ids >= 0) & (sample_ids <= MAX_SAMPLE_ID)).all()
    if sample_ids.device.type != "cpu":
        torch._assert_async(in_range, f"sample_ids must be in 0 … {MAX_SAMPLE_ID}")  # does not synchronise
    elif not in_range:
        raise ValueError(
            f"sample_ids={sample_ids.tolist()} must be in 0 … {MAX_SAMPLE_ID}, since products of larger ids overflow."
        )


def blocks_of_each_row(plan: DFlashBatchPlan, rows: int, chosen: slice | Sequence[int]) -> DFlashBatchPlan:
    """
    Return the plan of some blocks of every row.

    Args:
        plan ([`DFlashBatchPlan`]): the plan of all blocks, equally many for each row.
        rows (`int`): number of rows of the batch.
        chosen (`slice` or `Sequence[int]`): the blocks of each row to keep.

    Returns:
        [`DFlashBatchPlan`]
    """
    tensors = {item.name: getattr(plan, item.name) for item in fields(plan)}
    each_row = (rows, len(plan.anchor_positions) // max(rows, 1))
    return DFlashBatchPlan(
        **{name: tensor.unflatten(0, each_row)[:, chosen].flatten(0, 1) for name, tensor in tensors.items()}
    )
