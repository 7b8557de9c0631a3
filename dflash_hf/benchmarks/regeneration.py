"""Throughput of generation backends on the same requests, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..regeneration.local import LocalBackend
from ..regeneration.requests import Completion, GenerationBackend, RequestQueue, SamplingParameters, TurnRequest


@dataclass
class ThroughputMeasurement:
    """
    The completions of one backend and the time they took.

    Args:
        completions (`dict[str, list[int]]`): token ids by conversation, including the token that ends the turn.
        seconds (`float`): wall time in which the backend ran.
    """

    completions: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """`int`: tokens of all completions."""
        return sum(map(len, self.completions.values()))

    @property
    def tokens_per_s(self) -> float:
        """`float`: tokens of all completions over all seconds."""
        return self.num_tokens / self.seconds


def measure_throughput(
    backends: Mapping[str, GenerationBackend],
    requests: Sequence[TurnRequest],
    on_outcome: Callable[[], None] = lambda: None,
) -> dict[str, ThroughputMeasurement]:
    """
    Measure backends on the same requests in alternation.

    The backend with the fewest outcomes runs until its next one, so that other load of the machine slows all backends
    alike. The time of a backend is counted only while it runs.

    Args:
        backends (`Mapping[str, GenerationBackend]`): by name.
        requests (`Sequence[TurnRequest]`): each has another conversation id.
        on_outcome (`Callable`): called after every completion and failure.

    Returns:
        `dict[str, ThroughputMeasurement]`: by name.
    """
    measured = {name: ThroughputMeasurement() for name in backends}
    running = {name: backend.completions(RequestQueue(requests)) for name, backend in backends.items()}
    counts = dict.fromkeys(backends, 0)
    while running:
        name = min(running, key=lambda name: counts[name])
        start = time.perf_counter()
        found = next(running[name], None)
        measured[name].seconds += time.perf_counter() - start
        if found is None:
            del running[name]
            continue
        counts[name] += 1
        request, outcome = found
        if isinstance(outcome, Completion):
            measured[name].completions[request.conversation_id] = outcome.token_ids or []
        on_outcome()
    return measured


def share_of_identical(first: ThroughputMeasurement, second: ThroughputMeasurement) -> float:
    """
    Compare the completions of two backends.

    Args:
        first, second ([`ThroughputMeasurement`]): of the same requests.

    Returns:
        `float`: the share of the completions of `first` that `second` has with the same tokens.
    """
    identical = sum(second.completions.get(name) == token_ids for name, token_ids in first.completions.items())
    return identical / max(1, len(first.completions))


def warm_up(backends: Mapping[str, LocalBackend], requests: Sequence[TurnRequest]) -> None:
    """
    Generate a batch of short completions, because the first passes of a process are slower than all later ones.

    Args:
        backends (`Mapping[str, LocalBackend]`): by name; they are not used themselves.
        requests (`Sequence[TurnRequest]`): the first batch of them is used.
    """
    for backend in backends.values():
        short = LocalBackend(
            backend.target,
            backend.tokenizer,
            SamplingParameters(2),
            batch_size=backend.batch_size,
            continuous_batching=backend.continuous_batching,
        )
        for _ in short.completions(RequestQueue(requests[: backend.batch_size])):
            pass
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
