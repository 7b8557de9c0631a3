from __future__ import annotations

import itertools

import numpy
import pytest
import reference
import torch

from dflash_hf import DFlashBatchPlan, build_dflash_batch_plan
from dflash_hf.blocks.attention import dense_block_mask
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.plan import mix

HOLES = [[0, 0] + [1] * 10 + [0] + [1] * 7]


def build(valid: list[list[int]], ids: list[int], **kwargs) -> DFlashBatchPlan:
    kwargs = {"anchors_per_sample": 6, "gamma": 3, "optimizer_step": 2, "seed": 1, **kwargs}
    for name in ("supervised_mask", "segment_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = torch.tensor(kwargs[name], dtype=torch.bool if name == "supervised_mask" else torch.int64)
    return build_dflash_batch_plan(torch.tensor(valid, dtype=torch.bool), torch.tensor(ids), **kwargs)


def test_golden_values_of_two_full_rows():
    plan = build([[1] * 17] * 2, [101, 102], anchors_per_sample=3, optimizer_step=7, seed=11)
    assert plan.anchor_ids.tolist() == [2407, 2466, 2525, 2424, 2483, 2542]
    assert plan.anchor_positions.tolist() == [7, 4, 6, 7, 1, 7]
    assert plan.sample_rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert plan.query_positions[0].tolist() == [7, 8, 9, 10]
    assert torch.equal(plan.label_positions, plan.query_positions)
    assert plan.loss_mask.tolist() == [[False, True, True, True]] * 6


def test_golden_values_with_rows_too_short():
    valid = [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0] * 6]
    plan = build(valid, [1, 2, 3], anchors_per_sample=2, optimizer_step=0, seed=0)
    assert plan.anchor_positions.tolist() == [1, 0, 0, 0, 0, 0]
    assert plan.block_valid.tolist() == [True, True, False, False, False, False]
    assert plan.trunk_lengths.tolist() == [1, 0, 0, 0, 0, 0]
    assert not plan.loss_mask[2:].any()
    assert plan.query_positions[2:].eq(0).all()


@pytest.mark.parametrize(
    ("replacement", "full", "holes"),
    [
        (True, [47, 7, 17, 48, 8, 56, 18, 49], [5, 3, 6, 15, 8, 2]),
        (False, [17, 28, 32, 35, 39, 44, 45, 55], [2, 3, 4, 6, 8, 14]),
    ],
)
def test_golden_values_of_drawing_with_and_without_replacement(replacement, full, holes):
    plan = build([[1] * 64], [5], anchors_per_sample=8, gamma=7, optimizer_step=100, seed=3, replacement=replacement)
    assert plan.anchor_positions.tolist() == full
    plan = build(HOLES, [9], replacement=replacement)
    assert plan.anchor_ids.tolist() == [258, 317, 376, 435, 494, 553]
    assert plan.anchor_positions.tolist() == holes


def test_golden_values_of_mix():
    assert mix(torch.tensor([0, 1, 17, 59, 2407])).tolist() == [0, 827029893, 84124513, 1127332999, 2019917879]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("with_supervision", [True, False])
@pytest.mark.parametrize("with_segments", [True, False])
def test_plan_equals_the_loop_written_oracle(replacement, partial, with_supervision, with_segments):
    generator = torch.Generator().manual_seed(3)
    for length, gamma, anchors in itertools.product([1, 2, 3, 17, 30], [1, 3, 7], [1, 5]):
        valid = (torch.rand(4, length, generator=generator) > 0.1).int()
        valid[1] = 1
        valid[2] = 0
        supervised = (torch.rand(4, length, generator=generator) > 0.3).int().tolist() if with_supervision else None
        segments = (torch.arange(length) // 6).repeat(4, 1).tolist() if with_segments else None
        settings = {"replacement": replacement, "anchors_per_sample": anchors, "gamma": gamma}
        plan = build(
            valid.tolist(),
            [7, 8, 9, 2**53 - 1],
            partial_windows=partial,
            supervised_mask=supervised,
            segment_ids=segments,
            **settings,
        )
        expected = reference.plan(
            valid.tolist(), [7, 8, 9, 2**53 - 1], anchors, gamma, 2, 1, supervised, segments, replacement, partial
        )
        for index, block in enumerate(expected):
            is_valid = block["anchor"] is not None
            assert plan.block_valid[index].item() == is_valid
            assert plan.anchor_positions[index].item() == (block["anchor"] or 0)
            if is_valid:
                assert plan.trunk_lengths[index].item() == block["trunk"]
            assert plan.slot_valid[index].nonzero().flatten().tolist() == block["slots"]
            assert plan.loss_mask[index].nonzero().flatten().tolist() == block["loss"]


def test_anchors_do_not_depend_on_batch_order_or_size():
    valid = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) > 0.1
    ids = [11, 12, 13, 14, 15]
    together = build(valid.int().tolist(), ids).anchor_positions.view(5, 6)
    reversed_batch = build(valid.flip(0).int().tolist(), ids[::-1]).anchor_positions.view(5, 6).flip(0)
    assert torch.equal(together, reversed_batch)
    for row in range(5):
        assert torch.equal(
            build(valid[row : row + 1].int().tolist(), ids[row : row + 1]).anchor_positions, together[row]
        )


def test_left_padding_does_not_change_the_choice():
    right = build([[1] * 12 + [0] * 5], [4], replacement=False)
    left = build([[0] * 5 + [1] * 12], [4], replacement=False)
    assert (right.anchor_positions + 5).tolist() == left.anchor_positions.tolist()
    assert right.trunk_lengths.tolist() == left.trunk_lengths.tolist()


def test_with_few_windows_every_window_appears_once_without_replacement():
    plan = build([[1] * 6], [3], replacement=False, anchors_per_sample=8)
    assert plan.anchor_positions[plan.block_valid].tolist() == [0, 1, 2]
    assert plan.block_valid.sum() == 3


def test_supervision_in_the_tail_alone_gives_a_block():
    """One valid anchor is enough: none is lost to a count that is too small by one."""
    plan = build([[1] * 9], [3], supervised_mask=[[0] * 8 + [1]], partial_windows=True, replacement=False)
    assert plan.anchor_positions[plan.block_valid].tolist() == [7]
    assert plan.loss_mask.sum() == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"anchors_per_sample": 0}, ValueError, "anchors_per_sample=0"),
        ({"gamma": 0}, ValueError, "gamma=0"),
        ({"optimizer_step": -1}, ValueError, "optimizer_step=-1"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"supervised_mask": [[1, 1]]}, ValueError, "supervised_mask has shape"),
    ],
)
def test_bad_numbers_and_shapes_are_named(change, error, words):
    with pytest.raises(error, match=words):
        build([[1] * 9], [3], **change)


@pytest.mark.parametrize("name", ["seed", "optimizer_step"])
@pytest.mark.parametrize("number", [2**53, 2**57, 2**58 + 3, 2**60, 2**63, 10**30])
def test_a_seed_or_a_step_that_would_overflow_is_refused(name, number):
    """Beyond 2**57 the anchors were those of another number, and beyond 2**60 the error was one of torch."""
    with pytest.raises(ValueError, match=f"{name}={number} must be at most {2**53 - 1}"):
        build([[1] * 9], [3], **{name: number})


@pytest.mark.parametrize("replacement", [True, False])
def test_the_largest_numbers_give_the_anchors_of_the_loop_written_oracle(replacement):
    largest = 2**53 - 1
    plan = build([[1] * 40], [largest], optimizer_step=largest, seed=largest, replacement=replacement)
    blocks = reference.plan([[1] * 40], [largest], 6, 3, largest, largest, replacement=replacement)
    assert plan.anchor_positions.tolist() == [block["anchor"] for block in blocks]


@pytest.mark.parametrize("name", ["seed", "optimizer_step", "gamma", "anchors_per_sample"])
@pytest.mark.parametrize("number", [True, 2.0, 2.5, float("nan"), "2", None, torch.tensor(2)])
def test_a_number_that_is_no_integer_is_refused(name, number):
    with pytest.raises(TypeError, match=f"{name}=.* must be an integer"):
        build([[1] * 9], [3], **{name: number})


@pytest.mark.parametrize("name", ["gamma", "anchors_per_sample"])
def test_a_number_of_blocks_or_slots_that_fits_no_memory_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=.* must be at most"):
        build([[1] * 9], [3], **{name: 2**53})


def test_integers_of_numpy_are_integers():
    numbers = {name: numpy.int64(2) for name in ("seed", "optimizer_step", "gamma", "anchors_per_sample")}
    plain = dict.fromkeys(numbers, 2)
    assert build([[1] * 9], [3], **numbers).anchor_ids.tolist() == build([[1] * 9], [3], **plain).anchor_ids.tolist()


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("rows", "length"), [(2, 0), (0, 5), (0, 0)])
def test_a_batch_without_tokens_gives_a_plan_without_a_valid_block(rows, length, partial, replacement):
    valid = torch.ones(rows, length, dtype=torch.bool)
    plan = build_dflash_batch_plan(
        valid,
        torch.arange(rows),
        anchors_per_sample=3,
        gamma=3,
        optimizer_step=0,
        seed=0,
        supervised_mask=valid,
        segment_ids=valid.long(),
        replacement=replacement,
        partial_windows=partial,
    )
    assert [plan.block_valid.tolist(), plan.anchor_positions.tolist()] == [[False] * 3 * rows, [0] * 3 * rows]
    assert plan.loss_mask.shape == plan.slot_valid.shape == plan.query_positions.shape == (3 * rows, 4)
    assert not plan.loss_mask.any()
    assert plan.query_positions.eq(0).all()
    batch = TokenBatch(valid.long(), valid)
    assert not batch.plan_every_anchor(4).block_valid.any()
    with pytest.raises(ValueError, match=r"The batch has the shape \["):
        dense_block_mask(plan, batch)


def test_a_plan_of_another_batch_is_refused():
    plan = build([[1] * 9], [3])
    valid = torch.ones(4, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="6 blocks, which is no multiple of the 4 rows"):
        dense_block_mask(plan, TokenBatch(valid.long(), valid))


@pytest.mark.parametrize("sample_id", [-1, 2**53])
def test_a_sample_id_that_would_overflow_is_refused(sample_id):
    with pytest.raises(ValueError, match="sample_ids"):
        build([[1] * 9], [sample_id])


def test_wrong_dtypes_are_refused():
    mask = torch.ones(1, 9)
    with pytest.raises(TypeError, match="token_valid_mask has dtype"):
        build_dflash_batch_plan(mask, torch.tensor([1]), anchors_per_sample=1, gamma=1, optimizer_step=0, seed=0)
    with pytest.raises(TypeError, match="token_valid_mask is a list and must be a tensor"):
        build_dflash_batch_plan([[True]], torch.tensor([1]), anchors_per_sample=1, gamma=1, optimizer_step=0, seed=0)
    with pytest.raises(TypeError, match="sample_ids has dtype"):
        build_dflash_batch_plan(
            mask.bool(), torch.tensor([1.0]), anchors_per_sample=1, gamma=1, optimizer_step=0, seed=0
        )
