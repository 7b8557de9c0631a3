"""The plan of a run: what it costs is what it may take, and rows and training grow together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_hf.pipeline.plan import EPOCHS, MAX_EPOCHS, MIN_ROWS, Budget, Speeds, make_plan

SPEEDS = Speeds(
    prompt_tokens=40,
    answer_tokens=160,
    attempts_per_prompt=1.5,
    row_tokens=230,
    generated_tokens_per_s=100,
    state_tokens_per_s=2000,
    step_s=2.0,
    plain_tokens_per_s=20,
    free_disk_bytes=10**11,
)
BUDGET = Budget(1.0, 32, rows_per_step=8, bytes_per_token=5760, setup_s=60)


@pytest.mark.parametrize("hours", [1.0, 2.0, 17.3])
@pytest.mark.parametrize("values", [{}, {"attempts_per_prompt": 0.0}, {"free_disk_bytes": 0}, {"step_s": 0.1}])
def test_a_plan_takes_the_hours_of_its_budget(hours, values):
    plan = make_plan(replace(SPEEDS, **values), replace(BUDGET, hours=hours))
    assert plan.total_s == pytest.approx(hours * 3600, rel=1e-6)
    assert EPOCHS <= plan.epochs < EPOCHS * 1.05  # a row is whole
    assert plan.is_cached == ("free_disk_bytes" not in values)
    assert (plan.cache_bytes, plan.states_s) == (0, 0) or plan.is_cached


def test_each_part_is_its_rows_times_its_cost():
    plan = make_plan(SPEEDS, BUDGET)
    rows = plan.num_rows
    assert plan.prompts_s == pytest.approx(rows * 1.5 * 40 / 100)
    assert plan.answers_s == pytest.approx(rows * 160 / 100)
    assert plan.states_s == pytest.approx(rows * 230 / 2000)
    assert plan.training_s == pytest.approx(plan.epochs * rows / 8 * 2.0)
    assert plan.num_steps == int(plan.epochs * rows / 8)
    assert plan.cache_bytes == round(rows * 230 * 5760)
    assert plan.setup_s == 60


def test_twice_the_hours_give_more_than_twice_the_rows():
    once, twice = (make_plan(SPEEDS, replace(BUDGET, hours=hours)) for hours in (1.0, 2.0))
    assert twice.num_rows > 2 * once.num_rows  # the evaluation takes the same time


def test_time_that_missing_rows_leave_goes_to_the_optimizer_up_to_a_limit():
    free = make_plan(SPEEDS, BUDGET)
    fewer = make_plan(SPEEDS, replace(BUDGET, max_rows=free.num_rows // 2))
    few = make_plan(SPEEDS, replace(BUDGET, max_rows=MIN_ROWS))
    assert fewer.num_rows == free.num_rows // 2
    assert EPOCHS < fewer.epochs <= MAX_EPOCHS
    assert few.epochs == MAX_EPOCHS
    assert few.total_s < 3600


def test_a_small_disk_computes_states_in_every_step_and_costs_rows():
    cached = make_plan(SPEEDS, BUDGET)
    for values in ({"max_disk_bytes": cached.cache_bytes - 1}, {"max_disk_bytes": 0}):
        online = make_plan(SPEEDS, replace(BUDGET, **values))
        assert not online.is_cached
        assert online.num_rows < cached.num_rows
        visit_s = 2.0 / 8 + 230 / 2000
        assert online.training_s == pytest.approx(online.epochs * online.num_rows * visit_s)
    assert make_plan(SPEEDS, replace(BUDGET, max_disk_bytes=cached.cache_bytes)).is_cached


def test_too_few_hours_are_refused_with_hours_that_are_enough():
    with pytest.raises(ValueError, match=r"hours=0.1 leave time for \d+ rows.*at least (\S+), or fewer") as error:
        make_plan(SPEEDS, replace(BUDGET, hours=0.1))
    enough = float(str(error.value).split("Pass hours of at least ")[1].split(",")[0])
    assert make_plan(SPEEDS, replace(BUDGET, hours=enough * 1.05)).num_rows >= MIN_ROWS


@pytest.mark.parametrize(
    "values",
    [{"hours": 0.0}, {"hours": float("nan")}, {"hours": float("inf")}, {"max_rows": 3}, {"max_disk_bytes": -1}],
)
def test_a_budget_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values)).removeprefix("max_").removesuffix("_bytes")):
        replace(BUDGET, **values)
