"""Numbers of `dflash-hf eval` against loops, and what they are where nothing was counted."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from reference import suite_numbers

from dflash_hf.evaluation.response_pairs import ResponsePair, Setting
from dflash_hf.evaluation.results import (
    bootstrap_interval,
    macro_means,
    position_bins,
    summarize_all,
    summarize_pairs,
)


def make_pair(**values: Any) -> ResponsePair:
    """One answer of four tokens: the first, then passes of 2 and 1."""
    defaults: dict[str, Any] = {
        "set_name": "gsm8k", "temperature": 0.0, "thinking": None, "batch_size": 1, "batch": 0, "turn": 0,
        "prompts": [0], "first": "plain", "num_prompt_tokens": [3],
        "plain_token_ids": [[5, 6, 7, 8]], "plain_s": 4.0, "drafted_token_ids": [[5, 6, 7, 8]], "drafted_s": 2.0,
        "is_truncated": [True], "committed": [[2, 1]], "verified": [[3, 3]], "starts": [[1, 3]],
    }  # fmt: skip
    return ResponsePair(**{**defaults, **values})


def random_answer(generator: random.Random, num_slots: int, length: int) -> dict[str, Any]:
    passes, start = [], 1
    while start < length:
        verified = min(num_slots, length - start) - 1
        count = generator.randint(1, verified + 1)
        if verified:
            passes.append((start, verified, count))
        start += count
    plain = [generator.randint(0, 3) for _ in range(length)]
    drafted = plain if generator.random() < 0.5 else [*plain[:-1], 9]
    return {
        "passes": passes, "plain": plain, "drafted": drafted,
        "plain_s": generator.uniform(1, 2), "drafted_s": generator.uniform(1, 2),
    }  # fmt: skip


@pytest.mark.parametrize("num_answers", [1, 4, 17])
def test_numbers_of_a_set_are_those_of_a_loop_over_its_passes(num_answers):
    generator = random.Random(num_answers)
    answers = [random_answer(generator, num_slots=6, length=generator.randint(3, 40)) for _ in range(num_answers)]
    pairs = [
        make_pair(
            batch=number,
            prompts=[number],
            plain_token_ids=[answer["plain"]],
            drafted_token_ids=[answer["drafted"]],
            plain_s=answer["plain_s"],
            drafted_s=answer["drafted_s"],
            starts=[[start for start, _, _ in answer["passes"]]],
            verified=[[verified for _, verified, _ in answer["passes"]]],
            committed=[[count for _, _, count in answer["passes"]]],
        )
        for number, answer in enumerate(answers)
    ]
    result = summarize_pairs(pairs, "GSM8K", block_size=6, max_new_tokens=40)
    wanted = suite_numbers(answers, num_slots=6, bin_width=5)
    assert result.acceptance_length == pytest.approx(wanted["accept_len"])
    assert result.slot_acceptance == pytest.approx(wanted["slots"])
    assert {count: number for count, number in enumerate(result.committed_histogram, 1) if number} == wanted["counts"]
    bins = {each.start // 5: each.acceptance_length for each in result.by_position if each.num_passes}
    assert bins == pytest.approx(wanted["bins"])
    assert result.num_identical == wanted["num_same"]
    assert result.speed_up == pytest.approx(wanted["median_ratio"])
    assert result.plain_tokens_per_s == pytest.approx(wanted["plain_rate"])
    assert (result.num_prompts, result.num_responses, result.num_truncated) == (num_answers, num_answers, num_answers)


def test_both_turns_of_a_conversation_and_all_rows_of_a_batch_count():
    rows = {"prompts": [0, 1], "batch_size": 2, "num_prompt_tokens": [3, 3], "is_truncated": [True, False],
            "plain_token_ids": [[1, 2], [3]], "drafted_token_ids": [[1, 2], [4]],
            "committed": [[2], []], "verified": [[3], []], "starts": [[1], []]}  # fmt: skip
    result = summarize_pairs([make_pair(**rows), make_pair(**rows, turn=1)], "MT-Bench", 4, 8)
    assert (result.num_prompts, result.num_responses) == (2, 4)
    assert (result.num_plain_tokens, result.num_drafted_tokens, result.num_passes) == (6, 6, 2)
    assert (result.num_identical, result.identical_share, result.num_truncated) == (2, 0.5, 2)
    assert result.plain_tokens_per_s == 6 / 8
    assert result.committed_histogram == [0, 2, 0, 0]


def test_sampling_has_no_exactness_and_an_answer_of_one_token_no_acceptance():
    nothing = {
        "committed": [[]],
        "verified": [[]],
        "starts": [[]],
        "drafted_token_ids": [[5]],
        "is_truncated": [False],
    }
    result = summarize_pairs([make_pair(temperature=1.0, **nothing)], "GSM8K", 4, 8)
    assert (
        result.num_identical
        is result.identical_share
        is result.acceptance_length
        is result.acceptance_length_interval
        is None
    )
    assert result.slot_acceptance == [None, None, None]
    assert result.by_position == []
    assert result.num_truncated == 0


def test_results_are_ordered_by_setting_and_set_and_the_mean_counts_every_set_alike():
    pairs = [
        make_pair(set_name="mbpp", committed=[[4, 4]], drafted_s=1.0),
        make_pair(set_name="gsm8k", temperature=1.0),
        make_pair(set_name="gsm8k", prompts=[1], batch=1),
        make_pair(set_name="gsm8k"),
    ]
    results = summarize_all(pairs, {"gsm8k": "GSM8K", "mbpp": "MBPP"}, 4, 8)
    assert [(result.title, result.setting) for result in results] == [
        ("GSM8K", Setting(0.0)), ("MBPP", Setting(0.0)), ("GSM8K", Setting(1.0)),
    ]  # fmt: skip
    greedy, sampled = macro_means(results)
    assert (greedy.num_sets, greedy.num_prompts, greedy.acceptance_length, greedy.speed_up) == (
        2,
        3,
        (1.5 + 4) / 2,
        3.0,
    )
    assert greedy.slot_acceptance == [(0.5 + 1) / 2, 0.5, 0.5]
    assert (greedy.identical_share, sampled.identical_share) == (1.0, None)


def test_positions_reach_to_the_last_pass_and_empty_bins_have_no_acceptance():
    bins = position_bins([(1, 3), (63, 2)], max_new_tokens=160)
    assert [(each.start, each.end, each.num_passes, each.acceptance_length) for each in bins] == [
        (0, 20, 1, 3.0), (20, 40, 0, None), (40, 60, 0, None), (60, 80, 1, 2.0),
    ]  # fmt: skip
    assert position_bins([], 160) == []


def test_the_interval_is_the_same_each_time_holds_the_mean_and_shrinks_with_prompts():
    few = [[1, 2, 3], [2, 2], [4, 1, 1], [3]]
    low, high = bootstrap_interval(few)
    assert bootstrap_interval(few) == (low, high) != bootstrap_interval(few, seed=1)
    assert 1 <= low < 19 / 9 < high <= 4
    narrow = bootstrap_interval(few * 16)
    assert narrow[1] - narrow[0] < (high - low) / 2
    assert bootstrap_interval([[1, 2]]) is bootstrap_interval([[1], []]) is None


def test_a_line_of_a_journal_of_version_0_1_0_is_read():
    line = dataclasses.asdict(make_pair())
    line["is_cut"] = line.pop("is_truncated")
    assert ResponsePair.from_dict(line) == make_pair()
    with pytest.raises(TypeError, match="is_half"):
        ResponsePair.from_dict({**line, "is_half": True})
