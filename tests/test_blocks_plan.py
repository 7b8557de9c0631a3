from __future__ import annotations

import itertools

import pytest
import reference
import torch

from dflash_hf import DFlashBatchPlan, build_dflash_batch_plan
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
        ({"supervised_mask": [[1, 1]]}, ValueError, "supervised_mask has shape"),
    ],
)
def test_bad_numbers_and_shapes_are_named(change, error, words):
    with pytest.raises(error, match=words):
        build([[1] * 9], [3], **change)


@pytest.mark.parametrize("sample_id", [-1, 2**53])
def test_a_sample_id_that_would_overflow_is_refused(sample_id):
    with pytest.raises(ValueError, match="sample_ids"):
        build([[1] * 9], [sample_id])


def test_wrong_dtypes_are_refused():
    mask = torch.ones(1, 9)
    with pytest.raises(TypeError, match="token_valid_mask has dtype"):
        build_dflash_batch_plan(mask, torch.tensor([1]), anchors_per_sample=1, gamma=1, optimizer_step=0, seed=0)
    with pytest.raises(TypeError, match="sample_ids has dtype"):
        build_dflash_batch_plan(
            mask.bool(), torch.tensor([1.0]), anchors_per_sample=1, gamma=1, optimizer_step=0, seed=0
        )
