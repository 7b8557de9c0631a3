"""Rates that a machine is planned by."""

from __future__ import annotations

import torch
from conftest import make_target, make_tokenizer

from dflash_hf.pipeline.calibration import full_batch_rate, measure_answers, measure_plain, measure_states
from dflash_hf.regeneration.local import LocalBackend
from dflash_hf.regeneration.requests import SamplingParameters, TurnRequest


def test_the_rate_of_a_full_batch_leaves_out_its_end():
    assert full_batch_rate([(2.0, 10)]) == 5.0
    # four sequences; two have ended after 4 s, and the others have 20 tokens by then, too
    assert full_batch_rate([(30.0, 90), (4.0, 20), (2.0, 10), (9.0, 40)]) == (10 + 20 + 20 + 20) / 4


def test_answers_become_rows_and_are_counted():
    target = make_target(0, vocab_size=272, eos_token_id=257, pad_token_id=256)
    requests = [TurnRequest(str(index), [{"role": "user", "content": f"{index}?"}]) for index in range(5)]
    backend = LocalBackend(target, make_tokenizer(), SamplingParameters(6), batch_size=5)
    rows, tokens, rate = measure_answers(backend, requests)
    assert [row["messages"][-1]["role"] for row in rows] == ["assistant"] * 5
    assert 1 <= tokens <= 6
    assert rate > 0


def test_states_and_plain_generation_have_rates():
    target = make_target()
    rows = [torch.randint(1, 95, (length,)).tolist() for length in (5, 9)]
    assert measure_states(target, rows, [0, 2]) > 0
    assert measure_plain(target, [1, 2, 3]) > 0
