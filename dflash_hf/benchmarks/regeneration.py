"""Tokens a second of the local engine beside plain padded batches, on the same prompts, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..regeneration.local import LocalEngine
from ..regeneration.requests import Answer, AnswerEngine, RequestFeed, Sampling, TurnRequest


@dataclass
class AnsweringMeasurement:
    """
    What one engine did.

    Args:
        answers (`dict[str, list[int]]`): tokens of each answer, its end included, by conversation.
        seconds (`float`): that the engine ran.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers.values()))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


def measure_answers(
    engines: Mapping[str, AnswerEngine],
    requests: Sequence[TurnRequest],
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, AnsweringMeasurement]:
    """
    Let engines answer the same requests in turns.

    The engine that has given the fewest answers goes on until its next one, so that whatever else the machine does
    slows all of them alike. Each engine's clock runs only while it works.

    Args:
        engines (`Mapping[str, AnswerEngine]`): by name.
        requests (`Sequence[TurnRequest]`): with conversation ids of their own.
        on_answer (`Callable`): called after every answer.

    Returns:
        `dict[str, AnsweringMeasurement]`: by name.
    """
    measured = {name: AnsweringMeasurement() for name in engines}
    running = {name: engine.answers(RequestFeed(requests)) for name, engine in engines.items()}
    counts = dict.fromkeys(engines, 0)
    while running:
        name = min(running, key=lambda name: counts[name])
        start = time.perf_counter()
        found = next(running[name], None)
        measured[name].seconds += time.perf_counter() - start
        if found is None:
            del running[name]
            continue
        counts[name] += 1
        request, answer = found
        if isinstance(answer, Answer):
            measured[name].answers[request.conversation_id] = answer.token_ids or []
        on_answer()
    return measured


def share_of_same(first: AnsweringMeasurement, second: AnsweringMeasurement) -> float:
    """Share of the answers of `first` that are the same, token for token, in `second`."""
    same = sum(second.answers.get(name) == tokens for name, tokens in first.answers.items())
    return same / max(1, len(first.answers))


def warm_up(engines: Mapping[str, LocalEngine], requests: Sequence[TurnRequest]) -> None:
    """Answer a batch in a few tokens: the first passes of a process take longer than all later ones."""
    for engine in engines.values():
        short = LocalEngine(
            engine.target, engine.tokenizer, Sampling(2), batch_size=engine.batch_size, refill=engine.refill
        )
        for _ in short.answers(RequestFeed(requests[: engine.batch_size])):
            pass
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
