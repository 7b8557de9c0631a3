"""The statistics of a decoding call: the tokens that each pass committed, and where the time went."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch

from ..blocks.metrics import AcceptanceRecord


@dataclass
class DecodingStatistics:
    """
    Counts and times of one decoding call.

    Args:
        block_size (`int`):
            Number of slots of a trained block, the anchor included.
        committed (`list[list[int]]`):
            For each sequence, the number of tokens that each verify pass with a draft committed. The bonus token of
            the target counts, and tokens after the end of the sequence do not.
        verified (`list[list[int]]`):
            For each sequence, the number of drafted tokens that the same passes verified along one path.
        starts (`list[list[int]]`):
            For each sequence, the number of new tokens that it had before each of the same passes.
        num_verify_passes (`int`):
            Number of passes of the target with a draft. One pass serves all sequences of the batch.
        num_plain_passes (`int`):
            Number of passes of the target without a draft after the prefill.
        num_tokens (`int`):
            Number of new tokens of all sequences.
        expected_sum (`float`):
            Sum, over sequences and passes with a draft, of the number of tokens that the pass commits in expectation,
            given the drafted tokens and the target's probabilities. It includes tokens after the end of a sequence.
        prefill_s, draft_s, verify_s, overhead_s (`float`):
            Seconds in the target's pass over the prompt, in drafting (draft model and head), in the target's other
            passes, and outside both models.
    """

    block_size: int
    committed: list[list[int]] = field(default_factory=list)
    verified: list[list[int]] = field(default_factory=list)
    starts: list[list[int]] = field(default_factory=list)
    num_verify_passes: int = 0
    num_plain_passes: int = 0
    num_tokens: int = 0
    expected_sum: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def acceptance(self) -> AcceptanceRecord:
        """[`AcceptanceRecord`]: the record of all passes with a draft, one for each sequence and pass."""
        return AcceptanceRecord.of(
            chain.from_iterable(self.committed), chain.from_iterable(self.verified), block_size=self.block_size
        )

    @property
    def acceptance_length(self) -> float | None:
        """`float` or `None`: mean number of tokens that a pass with a draft committed to a sequence."""
        return self.acceptance.acceptance_length

    @property
    def expected_acceptance_length(self) -> float | None:
        """`float` or `None`: the same in expectation, given the drafted tokens and the target's probabilities."""
        num_passes = self.acceptance.num_passes
        return self.expected_sum / num_passes if num_passes else None

    @property
    def histogram(self) -> list[int]:
        """`list[int]`: number of passes that committed 1, 2, … `block_size` tokens to a sequence."""
        return list(self.acceptance.histogram)

    @property
    def slot_acceptance(self) -> list[float | None]:
        """`list[float | None]`: of the passes that verified slots 1 … k, the share that accepted all of them."""
        return self.acceptance.slot_acceptance

    @property
    def accept_len(self) -> float | None:
        """`float` or `None`: earlier name of `acceptance_length`, kept for one release."""
        return self.acceptance_length

    @property
    def expected_accept_len(self) -> float | None:
        """`float` or `None`: earlier name of `expected_acceptance_length`, kept for one release."""
        return self.expected_acceptance_length

    @property
    def rest_s(self) -> float:
        """`float`: earlier name of `overhead_s`, kept for one release."""
        return self.overhead_s

    @property
    def seconds(self) -> float:
        """`float`: seconds of the whole call."""
        return self.prefill_s + self.draft_s + self.verify_s + self.overhead_s

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens of all sequences per second of the whole call."""
        return self.num_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the values derived from them as plain values for JSON."""
        names = (
            "acceptance_length",
            "expected_acceptance_length",
            "histogram",
            "slot_acceptance",
            "seconds",
            "tokens_per_s",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


class Stopwatch:
    """
    Measure the seconds between calls and add them up by name.

    On an accelerator the times come from events in its queue, so that the host does not wait for the device.

    Args:
        device (`torch.device`): the device that runs the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start()

    def start(self) -> None:
        """Forget everything that was measured and start now."""
        self._laps: list[tuple[str, Any]] = []
        self._start = self._now()

    def _now(self) -> Any:
        """Return the time in seconds, or an event in the queue of the accelerator."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def lap(self, name: str) -> None:
        """Add the time since the last lap to a name."""
        self._laps.append((name, self._now()))

    def totals(self) -> dict[str, float]:
        """Return the seconds of each name, after waiting for the device."""
        totals: dict[str, float] = {}
        last = self._start
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        for name, mark in self._laps:
            seconds = mark - last if self.device.type == "cpu" else last.elapsed_time(mark) / 1e3
            totals[name] = totals.get(name, 0.0) + seconds
            last = mark
        return totals
