"""What a decoding call did: tokens committed by each pass, and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class DecodingStatistics:
    """
    Counts and times of one decoding call.

    Args:
        block_size (`int`): slots of a trained block, the anchor included.
        committed (`list[list[int]]`): for each row, the tokens that each verify pass with a draft committed, the bonus
            token included; cut where the answer ends.
        verified (`list[list[int]]`): for each row, the drafted tokens that the same passes verified.
        starts (`list[list[int]]`): for each row, the answer's tokens that were there before each of the same passes.
        num_verify_passes (`int`): passes of the target with a draft; one serves all rows.
        num_plain_passes (`int`): passes of the target without a draft, after the prefill.
        num_tokens (`int`): new tokens of all rows.
        expected_sum (`float`): sum over rows and passes with a draft of the tokens that pass commits in expectation,
            given the target's probabilities and the drafted tokens; not cut where an answer ends.
        prefill_s, draft_s, verify_s, rest_s (`float`): seconds in the target's pass over the prompt, in drafting (head
            included), in the target's other passes, and in everything else.
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
    rest_s: float = 0.0

    @property
    def accept_len(self) -> float:
        """`float`: mean tokens that a verify pass with a draft committed to a row; NaN if there was none."""
        counts = [count for row in self.committed for count in row]
        return sum(counts) / len(counts) if counts else float("nan")

    @property
    def expected_accept_len(self) -> float:
        """`float`: the same in expectation, given the target's probabilities; NaN if there was no draft."""
        num_passes = sum(len(row) for row in self.committed)
        return self.expected_sum / num_passes if num_passes else float("nan")

    @property
    def histogram(self) -> list[int]:
        """`list[int]`: passes that committed 1, 2, … `block_size` tokens to a row."""
        counts = Counter(count for row in self.committed for count in row)
        return [counts[committed] for committed in range(1, self.block_size + 1)]

    @property
    def slot_acceptance(self) -> list[float]:
        """`list[float]`: of the passes that verified slots 1 … k, the share that accepted all of them; NaN if none."""
        pairs = [pair for rows in zip(self.committed, self.verified, strict=True) for pair in zip(*rows, strict=True)]
        shares = []
        for slot in range(1, self.block_size):
            accepted = [committed > slot for committed, verified in pairs if verified >= slot]
            shares.append(sum(accepted) / len(accepted) if accepted else float("nan"))
        return shares

    @property
    def seconds(self) -> float:
        """`float`: all of the call."""
        return self.prefill_s + self.draft_s + self.verify_s + self.rest_s

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second, prefill included."""
        return self.num_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Fields and what follows from them, as plain values for JSON."""
        names = ("accept_len", "expected_accept_len", "histogram", "slot_acceptance", "seconds", "tokens_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


class Stopwatch:
    """
    Seconds between calls, by name.

    On an accelerator the times come from events in its queue, so that measuring waits for nothing.

    Args:
        device (`torch.device`): where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._laps: list[tuple[str, Any]] = []
        self._last = self._now()
        self._start = self._last

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def lap(self, name: str) -> None:
        """Book the time since the last lap under a name."""
        self._laps.append((name, self._now()))

    def totals(self) -> dict[str, float]:
        """Seconds of each name; waits for the device."""
        totals: dict[str, float] = {}
        last = self._start
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        for name, mark in self._laps:
            seconds = mark - last if self.device.type == "cpu" else last.elapsed_time(mark) / 1e3
            totals[name] = totals.get(name, 0.0) + seconds
            last = mark
        return totals
