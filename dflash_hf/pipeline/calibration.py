"""Measure in about a minute what a machine does with a target and a draft."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from ..regeneration.requests import Completion, GenerationBackend, RequestQueue, TurnRequest
from ..target.hidden_state_cache import MemoryHiddenStateCache, fill_hidden_state_cache
from ..training.trainer import DFlashTrainer

NUM_STEPS = 4  # after one that is not counted
NUM_PLAIN_TOKENS = 24


def measure_answers(
    backend: GenerationBackend, requests: Sequence[TurnRequest]
) -> tuple[list[dict[str, Any]], float, float]:
    """
    Let a backend answer a batch of requests, and measure its rate while the batch is full.

    Towards the end of a batch fewer and fewer sequences are left, which does not happen with thousands of requests.
    So the rate is that until half of the answers are complete; the sequences that go on have as many tokens by then as
    the longest complete one.

    Args:
        backend ([`GenerationBackend`]): generates the answers.
        requests (`Sequence[TurnRequest]`): a batch.

    Returns:
        `tuple[list[dict], float, float]`: a row with `messages` for each answer, the mean number of tokens of an
        answer, and the tokens a second.

    Raises:
        ValueError: no request has an answer; the message has the reason of the last one.
    """
    rows, ends, reason = [], [], "there are no prompts"
    start = time.perf_counter()
    with closing(backend.completions(RequestQueue(requests))) as outcomes:
        for request, outcome in outcomes:
            if not isinstance(outcome, Completion):
                reason = outcome.reason
                continue
            count = len(outcome.token_ids) if outcome.token_ids is not None else outcome.num_tokens or 0
            ends.append((time.perf_counter() - start, count))
            rows.append({"messages": [*request.messages, outcome.message]})
    if not rows:
        raise ValueError(f"The target answers none of the prompts: {reason}")
    return rows, statistics.fmean(count for _, count in ends), full_batch_rate(ends)


def full_batch_rate(ends: Sequence[tuple[float, int]]) -> float:
    """
    Estimate the tokens a second of a batch that stays full, from the ends of sequences that began together.

    Args:
        ends (`Sequence[tuple[float, int]]`): seconds from the start, and number of tokens, of each sequence.

    Returns:
        `float`: tokens a second.

    Example:
        >>> full_batch_rate([(10.0, 100), (5.0, 50), (20.0, 200)])  # 50 + 100 + 100 tokens in ten seconds
        25.0
    """
    ordered = sorted(ends)
    half = ordered[: math.ceil(len(ordered) / 2)]
    seconds, reached = half[-1][0], max(count for _, count in half)
    return sum(min(count, reached) for _, count in ordered) / seconds


def measure_states(target: PreTrainedModel, rows: Sequence[Sequence[int]], target_layer_ids: list[int]) -> float:
    """
    Measure how fast a target computes hidden states.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        rows (`Sequence[Sequence[int]]`): token ids of each row.
        target_layer_ids (`list[int]`): the layers whose states the draft reads.

    Returns:
        `float`: tokens a second.
    """
    fill_hidden_state_cache(MemoryHiddenStateCache(), target, rows[:1], target_layer_ids, show_progress=False)
    cache, start = MemoryHiddenStateCache(), time.perf_counter()
    fill_hidden_state_cache(cache, target, rows, target_layer_ids, show_progress=False)
    seconds = time.perf_counter() - start
    return sum(map(len, {tuple(ids) for ids in rows})) / seconds


class _StepClock(TrainerCallback):
    """Record the seconds of optimizer steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *arguments: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def measure_steps(trainer: DFlashTrainer) -> float:
    """
    Measure the optimizer steps of a trainer whose rows have cached states.

    Args:
        trainer ([`DFlashTrainer`]): of a few steps, see [`step_arguments`].

    Returns:
        `float`: the median of the seconds of a step, without the first.
    """
    clock = _StepClock()
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(clock.seconds[1:])


def step_arguments() -> list[str]:
    """Return the arguments of `dflash-hf train` that make a run one of [`measure_steps`]."""
    return [
        *("--max-steps", str(NUM_STEPS + 1), "--cache-target-states", "memory"),
        *("--save-strategy", "no", "--eval-strategy", "no", "--output-dir", tempfile.mkdtemp(prefix="dflash-hf-")),
    ]


def measure_plain(target: PreTrainedModel, prompt_ids: Sequence[int]) -> float:
    """
    Measure plain generation with one sequence.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        prompt_ids (`Sequence[int]`): token ids of a prompt.

    Returns:
        `float`: tokens a second, the prefill left out.
    """
    input_ids = torch.tensor([list(prompt_ids)], device=target.device)
    seconds = []
    generate: Any = target.generate  # type checkers do not see this method of a mixin
    for count in (1, NUM_PLAIN_TOKENS + 1):
        start = time.perf_counter()
        generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
        )
        seconds.append(time.perf_counter() - start)
    return NUM_PLAIN_TOKENS / max(seconds[1] - seconds[0], 1e-9)
