"""The acceptance record: one definition, counted by hand."""

from __future__ import annotations

import pytest

from dflash_hf.blocks.metrics import AcceptanceRecord


def test_the_acceptance_length_is_tokens_over_passes_and_slots_are_counted_where_they_were_verified():
    record = AcceptanceRecord.of([3, 1, 4, 2], [3, 3, 3, 1], block_size=4)
    assert record.histogram == (1, 1, 1, 1)
    assert record.num_verified == (4, 3, 3)
    assert (record.num_passes, record.num_tokens, record.acceptance_length) == (4, 10, 2.5)
    assert record.slot_acceptance == [3 / 4, 2 / 3, 1 / 3]


def test_an_empty_record_has_no_length_and_no_rates():
    record = AcceptanceRecord.of([], block_size=3)
    assert (record.num_passes, record.acceptance_length, record.slot_acceptance) == (0, None, [None, None])


def test_records_add_up_over_runs_and_block_sizes():
    both = AcceptanceRecord.of([1, 2], block_size=2) + AcceptanceRecord.of([4], block_size=4)
    assert both == AcceptanceRecord.of([1, 2, 4], [1, 1, 3], block_size=4)


@pytest.mark.parametrize(("committed", "verified"), [([0], None), ([1, 2], [1])])
def test_counts_that_cannot_be_are_refused(committed, verified):
    with pytest.raises(ValueError, match="pass"):
        AcceptanceRecord.of(committed, verified, block_size=4)
