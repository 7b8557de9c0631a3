"""How the time of a run is divided between answers, hidden states, training and evaluation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

EPOCHS = 4.0  # the passes over the rows of a run whose number of rows is chosen here
MAX_EPOCHS = 8.0  # more passes over the same rows bring next to nothing
MIN_ROWS = 64
FREE_DISK_SHARE = 0.8  # the share of the free disk that a run may fill
PAIR_COST = 1.7  # plain and drafted generation of a response, in plain ones, at a speed-up of about 1.4


@dataclass(frozen=True)
class Speeds:
    """
    What a machine does in a second with a target and a draft, and how long the texts of the target are.

    Args:
        prompt_tokens (`float`):
            Mean number of tokens of a prompt.
        answer_tokens (`float`):
            Mean number of tokens of an answer.
        attempts_per_prompt (`float`):
            Texts that the target writes for each prompt that passes the filters; 0 if it writes none.
        row_tokens (`float`):
            Mean number of tokens of a training row: prompt, answer and what the chat template adds.
        generated_tokens_per_s (`float`):
            Tokens a second that the target writes in batches.
        state_tokens_per_s (`float`):
            Tokens a second whose hidden states the target computes.
        step_s (`float`):
            Seconds of an optimizer step whose hidden states are known.
        plain_tokens_per_s (`float`):
            Tokens a second that plain generation writes with one sequence.
        free_disk_bytes (`int`):
            Bytes that are free where the run writes.
    """

    prompt_tokens: float
    answer_tokens: float
    attempts_per_prompt: float
    row_tokens: float
    generated_tokens_per_s: float
    state_tokens_per_s: float
    step_s: float
    plain_tokens_per_s: float
    free_disk_bytes: int


@dataclass(frozen=True)
class Budget:
    """
    What a run may take.

    Args:
        hours (`float`):
            Hours of the whole run.
        num_evaluation_responses (`int`):
            Responses of the evaluation; each is written twice, with and without the draft.
        rows_per_step (`int`):
            Rows of an optimizer step.
        bytes_per_token (`int`):
            Bytes of the hidden states of a token.
        setup_s (`float`):
            Seconds that pass before the first stage.
        max_rows (`int`, *optional*):
            Training rows at most.
        max_disk_bytes (`int`, *optional*):
            Bytes of hidden states at most; by default most of what is free.

    Raises:
        ValueError: a value is out of its range.
    """

    hours: float
    num_evaluation_responses: int
    rows_per_step: int
    bytes_per_token: int
    setup_s: float = 0.0
    max_rows: int | None = None
    max_disk_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.hours < math.inf:
            raise ValueError(f"hours={self.hours} must be a positive number. Pass the hours that the run may take.")
        if self.max_rows is not None and self.max_rows < MIN_ROWS:
            raise ValueError(f"rows={self.max_rows} must be at least {MIN_ROWS}. Pass more, or leave it out.")
        if self.max_disk_bytes is not None and self.max_disk_bytes < 0:
            raise ValueError("disk must be at least 0 bytes. Pass 0 to keep no hidden states on the disk.")


@dataclass(frozen=True)
class Plan:
    """
    What a run will do, and how long each part should take.

    Args:
        num_rows (`int`): training rows, which is the number of prompts that are answered.
        epochs (`float`): passes over the rows.
        num_steps (`int`): optimizer steps.
        is_cached (`bool`): whether the hidden states are computed once and kept on the disk.
        cache_bytes (`int`): bytes of the hidden states on the disk.
        setup_s, prompts_s, answers_s, states_s, training_s, evaluation_s (`float`): seconds of each part. Without a
            cache the hidden states are computed while training, and `states_s` is 0.
    """

    num_rows: int
    epochs: float
    num_steps: int
    is_cached: bool
    cache_bytes: int
    setup_s: float
    prompts_s: float
    answers_s: float
    states_s: float
    training_s: float
    evaluation_s: float

    @property
    def total_s(self) -> float:
        """`float`: seconds of the whole run."""
        parts = (self.setup_s, self.prompts_s, self.answers_s, self.states_s, self.training_s, self.evaluation_s)
        return sum(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON and YAML can hold."""
        return asdict(self)


def make_plan(speeds: Speeds, budget: Budget) -> Plan:
    """
    Divide the hours of a run.

    The evaluation is paid first. The rest is spent on rows: each costs a prompt, an answer, its hidden states and
    [`EPOCHS`] visits of the optimizer, so that rows and training grow together. With `max_rows`, the time that the
    missing rows would have taken goes to the optimizer, up to [`MAX_EPOCHS`] visits.

    Args:
        speeds ([`Speeds`]):
            What the machine does.
        budget ([`Budget`]):
            What the run may take.

    Returns:
        [`Plan`]

    Raises:
        ValueError: the hours are too few for [`MIN_ROWS`] rows.

    Example:
        >>> speeds = Speeds(40, 160, 1.5, 230, 100, 2000, 2.0, 20, 10**11)
        >>> plan = make_plan(speeds, Budget(1.0, 32, 8, 5760, setup_s=60))
        >>> plan.num_rows, round(plan.epochs, 1), round(plan.training_s / 60)
        (936, 4.0, 16)
    """
    evaluation_s = budget.num_evaluation_responses * speeds.answer_tokens * PAIR_COST / speeds.plain_tokens_per_s
    prompt_s = speeds.attempts_per_prompt * speeds.prompt_tokens / speeds.generated_tokens_per_s
    answer_s = speeds.answer_tokens / speeds.generated_tokens_per_s
    state_s = speeds.row_tokens / speeds.state_tokens_per_s
    visit_s = speeds.step_s / budget.rows_per_step
    rest_s = budget.hours * 3600 - budget.setup_s - evaluation_s
    disk_bytes = FREE_DISK_SHARE * speeds.free_disk_bytes
    if budget.max_disk_bytes is not None:
        disk_bytes = min(disk_bytes, budget.max_disk_bytes)

    def rows_for(is_cached: bool) -> int:
        visits_s = EPOCHS * (visit_s + (0 if is_cached else state_s))
        num_rows = int(rest_s / (prompt_s + answer_s + visits_s + (state_s if is_cached else 0)))
        return num_rows if budget.max_rows is None else min(num_rows, budget.max_rows)

    num_rows = rows_for(True)
    cache_bytes = round(num_rows * speeds.row_tokens * budget.bytes_per_token)
    is_cached = cache_bytes <= disk_bytes
    if not is_cached:
        num_rows, cache_bytes = rows_for(False), 0
    if num_rows < MIN_ROWS:
        missing_s = MIN_ROWS * (prompt_s + answer_s + state_s + EPOCHS * visit_s) - rest_s
        raise ValueError(
            f"hours={budget.hours:g} leave time for {max(num_rows, 0)} rows, and a draft needs at least {MIN_ROWS}: "
            f"the evaluation alone takes {evaluation_s / 60:.0f} minutes. Pass hours of at least "
            f"{budget.hours + missing_s / 3600:.2g}, or fewer responses for the evaluation."
        )
    before_s = num_rows * (prompt_s + answer_s + (state_s if is_cached else 0))
    epoch_s = num_rows * (visit_s + (0 if is_cached else state_s))
    epochs = min(MAX_EPOCHS, (rest_s - before_s) / epoch_s)
    return Plan(
        num_rows=num_rows,
        epochs=epochs,
        num_steps=int(epochs * num_rows / budget.rows_per_step),
        is_cached=is_cached,
        cache_bytes=cache_bytes,
        setup_s=budget.setup_s,
        prompts_s=num_rows * prompt_s,
        answers_s=num_rows * answer_s,
        states_s=num_rows * state_s if is_cached else 0.0,
        training_s=epochs * epoch_s,
        evaluation_s=evaluation_s,
    )
