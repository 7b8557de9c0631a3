"""How many slots of a block a pass verifies: a fixed number, or the one that has paid best lately."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

REMEMBERED_TIMES = 5
DECAY = 0.95  # of the weight of a row's pass, with every later pass
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 4.0
REMEASURE_AFTER = 16  # passes
PROBE_AFTER = (4, 32)  # plain passes before a draft is tried again: first, and at most


class BlockLength:
    """
    A fixed number of slots.

    Args:
        num_slots (`int`): slots to verify, the anchor included.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def choose(self, num_rows: int) -> int:
        """Slots of the next pass, for so many rows."""
        return self.num_slots

    def start_pass(self) -> None:
        """Nothing is measured."""

    def end_pass(self, num_rows: int, num_slots: int, counts: list[int]) -> None:
        """Nothing is learned."""


class PassTimes:
    """
    Seconds of a pass, by rows and slots: the least of the last few, since disturbances only ever add.

    Args:
        trained (`int`): slots of a trained block.
    """

    def __init__(self, trained: int) -> None:
        self.trained = trained
        self._times: dict[int, dict[int, deque[float]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=REMEMBERED_TIMES))
        )

    def add(self, num_rows: int, num_slots: int, seconds: float) -> None:
        """Remember one pass."""
        self._times[num_rows][num_slots].append(seconds)

    def missing(self, num_rows: int) -> list[int]:
        """Numbers of slots to try so that the others can be told from them, if no number of rows has all of these."""
        wanted = list(dict.fromkeys([self.trained, max(2, self.trained // 2), 1]))
        if any(all(slots in table for slots in wanted) for table in self._times.values()):
            return []
        return [slots for slots in wanted if slots not in self._times[num_rows]]

    def estimate(self, num_rows: int) -> dict[int, float]:
        """
        Seconds of a pass for every number of slots.

        Numbers of slots that were not tried lie on a line between their neighbours. A number of rows for which too
        little was tried takes the times of the nearest one: what counts is how times compare.

        Args:
            num_rows (`int`): rows of the pass.

        Returns:
            `dict[int, float]`: from 1 (no draft) to the trained number.
        """
        complete = [rows for rows, table in self._times.items() if {1, self.trained} <= set(table)]
        table = self._times[min(complete, key=lambda rows: abs(rows - num_rows))]
        least = {slots: min(times) for slots, times in table.items()}
        drafted = sorted(slots for slots in least if slots > 1)
        for slots in range(2, self.trained):
            if slots not in least:
                above = next(other for other in drafted if other > slots)
                below = max((other for other in drafted if other < slots), default=None)
                if below is None:
                    least[slots] = least[above]
                else:
                    share = (slots - below) / (above - below)
                    least[slots] = least[below] + share * (least[above] - least[below])
        return least


_times_of_pair: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, PassTimes]] = WeakKeyDictionary()


def times_of_pair(target: nn.Module, draft: nn.Module, trained: int) -> PassTimes:
    """What was measured for a pair so far in this process."""
    of_target = _times_of_pair.setdefault(target, WeakKeyDictionary())
    return of_target.setdefault(draft, PassTimes(trained))


class AdaptiveBlockLength(BlockLength):
    """
    The number of slots with the most committed tokens a second, by what was accepted lately and what passes cost.

    With 1 slot there is no draft. From time to time another number is tried, since the text and the machine change.

    Args:
        times ([`PassTimes`]): of the pair; it outlives the call.
        clock (`Callable`): seconds.
    """

    def __init__(self, times: PassTimes, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(times.trained)
        self.times, self.clock = times, clock
        self.accepted = [PRIOR_RATE * PRIOR_WEIGHT] * times.trained  # by slot; slot 0 is not used
        self.reached = [PRIOR_WEIGHT] * times.trained
        self.num_drafted_passes, self.passes_since_trial, self.probe_after = 0, 0, PROBE_AFTER[0]
        self.started = 0.0

    def committed(self) -> list[float]:
        """Tokens that a pass of 1, 2, … slots commits to a row, as far as is known."""
        expected, survival = [1.0], 1.0
        for slot in range(1, self.times.trained):
            survival *= self.accepted[slot] / self.reached[slot]
            expected.append(expected[-1] + survival)
        return expected

    def choose(self, num_rows: int) -> int:
        """Slots of the next pass, for so many rows."""
        if self.num_drafted_passes == 0:
            return self.times.trained
        if missing := self.times.missing(num_rows):
            return missing[0]
        seconds = self.times.estimate(num_rows)
        rates = {slots: committed / seconds[slots] for slots, committed in enumerate(self.committed(), start=1)}
        best = max(rates, key=lambda slots: rates[slots])
        self.passes_since_trial += 1
        if best == 1 and self.passes_since_trial > self.probe_after:
            self.passes_since_trial = 0
            self.probe_after = min(2 * self.probe_after, PROBE_AFTER[1])
            return max((slots for slots in rates if slots > 1), key=lambda slots: rates[slots])
        if best > 1:
            self.probe_after = PROBE_AFTER[0]
            if self.passes_since_trial > REMEASURE_AFTER:
                self.passes_since_trial = 0
                return max((slots for slots in rates if slots != best), key=lambda slots: rates[slots])
        return best

    def start_pass(self) -> None:
        """Start the clock."""
        self.started = self.clock()

    def end_pass(self, num_rows: int, num_slots: int, counts: list[int]) -> None:
        """Learn from a pass: how long it took, and how many tokens it committed to each row."""
        if num_slots > 1:
            self.num_drafted_passes += 1
            for slot in range(1, num_slots):
                self.reached[slot] = PRIOR_WEIGHT + DECAY * (self.reached[slot] - PRIOR_WEIGHT)
                prior = PRIOR_RATE * PRIOR_WEIGHT
                self.accepted[slot] = prior + DECAY * (self.accepted[slot] - prior)
                self.reached[slot] += sum(count >= slot for count in counts)
                self.accepted[slot] += sum(count > slot for count in counts)
        if num_slots == 1 or self.num_drafted_passes > 1:  # the first one also reads the prompt
            self.times.add(num_rows, num_slots, self.clock() - self.started)
