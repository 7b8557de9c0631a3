"""Plans and masks of random rows and settings equal loops, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_hf import build_dflash_batch_plan
from dflash_hf.blocks.attention import BlockAttention, dense_block_mask, flex_block_mask
from dflash_hf.blocks.batch import TokenBatch

pytestmark = pytest.mark.properties

LARGEST = 2**53 - 1


@st.composite
def batches(draw: Callable) -> dict:
    """Masks with holes and padding on either side, documents of any length, and supervised tokens anywhere."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(0, 12))

    def row_of(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=length, max_size=length))

    def padded() -> list[int]:
        start, end = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        return [int(start <= position < end) for position in range(length)]

    def documents() -> list[int]:
        number, numbers = draw(st.integers(-2, 2)), []
        for step in row_of(st.sampled_from([0, 0, 0, 1, 5])):
            number += step
            numbers.append(number)
        return numbers

    mostly = st.sampled_from([0, 1, 1, 1, 1])
    return {
        "valid": [draw(st.sampled_from([padded, lambda: row_of(mostly)]))() for _ in range(rows)],
        "segments": draw(st.sampled_from([None, [documents() for _ in range(rows)]])),
        "supervised": draw(st.sampled_from([None, [row_of(mostly) for _ in range(rows)]])),
        "sample_ids": draw(st.lists(st.integers(0, LARGEST), min_size=rows, max_size=rows)),
    }


SETTINGS = st.fixed_dictionaries(
    {
        "anchors_per_sample": st.integers(1, 6),
        "gamma": st.integers(1, 6),
        "optimizer_step": st.one_of(st.integers(0, 50), st.integers(0, LARGEST)),
        "seed": st.one_of(st.integers(0, 50), st.integers(0, LARGEST)),
        "replacement": st.booleans(),
        "partial_windows": st.booleans(),
    }
)


def plan_of(batch: dict, settings: dict):
    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        return None if batch[name] is None else torch.tensor(batch[name], dtype=dtype)

    valid, segments = tensor("valid", torch.bool), tensor("segments", torch.int64)
    plan = build_dflash_batch_plan(
        valid,
        torch.tensor(batch["sample_ids"]),
        supervised_mask=tensor("supervised", torch.bool),
        segment_ids=segments,
        **settings,
    )
    return plan, TokenBatch(valid.long(), valid, segment_ids=segments)


def loops_of(batch: dict, settings: dict) -> list[dict]:
    return reference.plan(
        batch["valid"],
        batch["sample_ids"],
        settings["anchors_per_sample"],
        settings["gamma"],
        settings["optimizer_step"],
        settings["seed"],
        batch["supervised"],
        batch["segments"],
        settings["replacement"],
        settings["partial_windows"],
    )


@given(batches(), SETTINGS)
def test_a_plan_equals_its_loops(batch, settings):
    plan, _ = plan_of(batch, settings)
    blocks = loops_of(batch, settings)
    assert len(plan.anchor_positions) == len(blocks)
    slots = range(settings["gamma"] + 1)
    for index, block in enumerate(blocks):
        is_valid, anchor = block["anchor"] is not None, block["anchor"] or 0
        assert plan.sample_rows[index] == block["row"]
        assert plan.block_valid[index].item() is is_valid
        assert plan.anchor_positions[index] == anchor
        assert not is_valid or plan.trunk_lengths[index] == block["trunk"]
        positions = [anchor + slot for slot in slots] if is_valid else [0] * len(slots)
        assert plan.query_positions[index].tolist() == plan.label_positions[index].tolist() == positions
        assert plan.slot_valid[index].tolist() == [slot in block["slots"] for slot in slots]
        assert plan.loss_mask[index].tolist() == [slot in block["loss"] for slot in slots]


@given(batches(), SETTINGS, st.one_of(st.none(), st.integers(1, 14)), st.booleans())
def test_every_form_of_the_mask_equals_its_loops(batch, settings, window, causal):
    plan, tokens = plan_of(batch, settings)
    kwargs = {"window": window, "causal": causal}
    if not tokens.length:
        for make in (dense_block_mask, flex_block_mask, BlockAttention):
            with pytest.raises(ValueError, match="The batch has the shape"):
                make(plan, tokens, **kwargs)
        return
    expected = torch.tensor(
        reference.visible(
            loops_of(batch, settings), batch["valid"], settings["gamma"], window, causal, batch["segments"]
        )
    )
    rows, queries, keys = expected.shape
    assert torch.equal(dense_block_mask(plan, tokens, **kwargs)[:, 0], expected)

    visible = flex_block_mask(plan, tokens, **kwargs).mask_mod
    grid = torch.meshgrid(torch.arange(rows), torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(visible(grid[0], torch.tensor(0), grid[1], grid[2]), expected)

    # With equal scores the weights are equal over what is visible, and these values make the output the weights.
    scores, values = torch.zeros(rows, 1, keys, keys), torch.eye(keys).expand(rows, 1, keys, keys)
    weights = BlockAttention(plan, tokens, **kwargs)(scores[:, :, :queries], scores, values, scaling=1.0)[:, :, 0]
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
    st.sampled_from([2**24, 2**53 - 1, 2**53, 2**57, 2**60, 2**63]),
)


@given(st.dictionaries(st.sampled_from(["anchors_per_sample", "gamma", "optimizer_step", "seed"]), NUMBERS))
@example({"seed": 2**57})
@example({"optimizer_step": 2**60})
@example({"gamma": True})
def test_numbers_give_the_plan_of_the_loops_or_are_refused_by_name(numbers):
    batch = {"valid": [[1] * 9], "segments": None, "supervised": None, "sample_ids": [LARGEST]}
    settings = {"anchors_per_sample": 3, "gamma": 2, "optimizer_step": 1, "seed": 1, **numbers}
    settings |= {"replacement": True, "partial_windows": True}
    limits = {"anchors_per_sample": (1, 2**24), "gamma": (1, 2**24)}
    refused = [
        name
        for name, number in numbers.items()
        if type(number) is not int
        or not limits.get(name, (0, LARGEST))[0] <= number <= limits.get(name, (0, LARGEST))[1]
    ]
    if refused:
        with pytest.raises((TypeError, ValueError)) as caught:
            plan_of(batch, settings)
        assert any(f"{name}=" in str(caught.value) for name in refused)
    elif max(settings["anchors_per_sample"], settings["gamma"]) < 100:
        plan, _ = plan_of(batch, settings)
        expected = [block["anchor"] for block in loops_of(batch, settings)]
        assert plan.anchor_positions.tolist() == expected
