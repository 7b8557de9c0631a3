from __future__ import annotations

import random

import pytest

from dflash_hf.decoding.draft_length import AdaptiveDraftLength, LatencyModel


def simulate(
    seconds,
    acceptance,
    num_tokens,
    *,
    times: LatencyModel | None = None,
    tree_gain: float = 0.0,
    use_trees: bool = False,
    num_sequences: int = 1,
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Return the time and the choices on a simulated machine and text, with `seconds(tokens)` for each pass."""
    now, chance, choices, lengths = 0.0, random.Random(seed), [], [0] * num_sequences
    adaptive = AdaptiveDraftLength(times or LatencyModel(6), use_trees, clock=lambda: now)
    while min(lengths) < num_tokens:
        adaptive.start_pass()
        tokens = adaptive.choose(num_sequences)
        counts = []
        for _ in range(num_sequences):
            count = 1
            while count < min(tokens, 6) and chance.random() < acceptance:
                count += 1
            counts.append(min(6, count + (chance.random() < tree_gain if tokens > 6 else 0)))
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        now += seconds(tokens)
        adaptive.end_pass(num_sequences, tokens, counts)
        choices.append(tokens)
    return now, choices


def drafting_costs_a_third(tokens: int) -> float:
    return 1.0 if tokens == 1 else 1.3 + 0.01 * tokens


def on_a_unsteady_machine(seconds, seed: int):
    """Every pass takes up to a fifth longer, and every few dozen passes the machine becomes faster or slower."""
    chance, slowness = random.Random(seed), [1.0]

    def unsteady(tokens: int) -> float:
        if chance.random() < 0.03:
            slowness[0] = chance.uniform(1.0, 1.6)
        return seconds(tokens) * slowness[0] * chance.uniform(1.0, 1.2)

    return unsteady


@pytest.mark.parametrize("use_trees", [False, True])
def test_changes_of_the_machines_speed_do_not_keep_a_useless_draft_in_use_nor_a_good_one_out(use_trees):
    shares = {0.0: [], 0.6: []}
    for acceptance in shares:
        for seed in range(10):
            machine, times = on_a_unsteady_machine(drafting_costs_a_third, seed), LatencyModel(6)
            simulate(machine, acceptance, 100, times=times, use_trees=use_trees, tree_gain=0.3 * acceptance)
            _, choices = simulate(
                machine, acceptance, 300, times=times, use_trees=use_trees, tree_gain=0.3 * acceptance, seed=seed
            )
            shares[acceptance].append(sum(tokens == 1 for tokens in choices) / len(choices))
    assert min(shares[0.0]) > 0.7
    assert sorted(shares[0.0])[5] > 0.85
    assert max(shares[0.6]) < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_text_that_is_never_guessed_costs_at_most_five_percent_over_plain_decoding(seed):
    times = LatencyModel(6)
    simulate(drafting_costs_a_third, 0.5, 50, times=times)  # an earlier call of the same pair
    seconds, _ = simulate(drafting_costs_a_third, 0.0, 256, times=times, seed=seed)
    assert 256 / seconds >= 0.95


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.95])
def test_text_that_is_guessed_well_is_drafted_in_nearly_every_pass(acceptance):
    _, choices = simulate(drafting_costs_a_third, acceptance, 400)
    assert sum(tokens > 1 for tokens in choices) / len(choices) > 0.9


def test_slots_that_cost_more_than_they_bring_are_left_out():
    """Each slot costs half a plain pass, so two or three slots are best at an acceptance of 0.6."""
    _, choices = simulate(lambda tokens: 1.0 if tokens == 1 else 0.7 + 0.5 * (tokens - 1), 0.6, 600)
    later = choices[60:]
    assert sum(tokens in (1, 2, 3) for tokens in later) / len(later) > 0.85


def test_a_text_that_becomes_easy_is_drafted_again():
    times = LatencyModel(6)
    simulate(drafting_costs_a_third, 0.5, 50, times=times)
    now, choices = 0.0, []
    adaptive = AdaptiveDraftLength(times, use_trees=False, clock=lambda: now)
    for index in range(300):
        adaptive.start_pass()
        tokens = adaptive.choose(1)
        count = min(tokens, 6) if index >= 150 else 1
        now += drafting_costs_a_third(tokens)
        adaptive.end_pass(1, tokens, [count])
        choices.append(tokens)
    assert sum(tokens == 1 for tokens in choices[60:150]) > 80
    assert sum(tokens > 1 for tokens in choices[220:]) > 70


@pytest.mark.parametrize(("cost", "is_used"), [(0.001, True), (0.05, False)])
def test_a_tree_is_verified_where_more_tokens_cost_little(cost, is_used):
    def seconds(tokens: int) -> float:
        return 1.0 if tokens == 1 else 1.3 + cost * tokens

    _, choices = simulate(seconds, 0.5, 600, use_trees=True, tree_gain=0.6)
    later = choices[60:]
    assert (sum(tokens > 6 for tokens in later) / len(later) > 0.7) == is_used


def test_trees_are_not_tried_with_many_sequences():
    _, choices = simulate(drafting_costs_a_third, 0.5, 100, use_trees=True, tree_gain=0.6, num_sequences=8)
    assert max(choices) == 6


def test_lengths_that_were_not_tried_lie_between_their_neighbours():
    times = LatencyModel(6)
    for tokens, seconds in ((1, 7.0), (1, 1.0), (3, 2.0), (3, 3.0), (6, 9.0), (6, 5.0)):
        times.add(4, tokens, seconds)
    assert times.missing(4, []) == []
    assert times.estimate(4) == pytest.approx({1: 1.0, 2: 2.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: 5.0})
    assert times.estimate(3) == times.estimate(4)


def test_a_first_plain_pass_that_was_slow_does_not_keep_the_draft_in_use():
    """The first pass of a shape may compile something. The draft is never right here, and costs a third of a pass."""
    slow = {1, 3, 6, 12, 24}

    def seconds(tokens: int) -> float:
        if tokens in slow:
            slow.remove(tokens)
            return 5.0
        return drafting_costs_a_third(tokens)

    _, choices = simulate(seconds, 0.0, 300, use_trees=True)
    assert sum(tokens == 1 for tokens in choices[60:]) / len(choices[60:]) > 0.9
