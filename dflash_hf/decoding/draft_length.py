"""How many tokens a pass verifies: a fixed number, or the one that has paid best lately."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

NEEDED_TIMES = 2  # the first pass of a new shape may compile something
MACHINE_SHARE, OWN_SHARE, LARGEST_SURPRISE = 0.4, 0.1, 1.5
DECAY = 0.95  # of the weight of a row's pass, with every later pass
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 4.0
PRIOR_TREE_GAIN, PRIOR_TREE_TOKENS = 1.1, 32.0  # tokens that a tree commits, divided by those of the whole chain
REMEASURE_AFTER, REMEASURE_FROM = 8, 0.8  # passes; rate of what is tried again, relative to the best
PROBE_AFTER = (4, 32)  # plain passes before a draft is tried again: first, and at most
LARGEST_TREE_PASS = 64  # tokens of all rows


class BlockLength:
    """
    A fixed number of tokens, the anchor included: a chain up to the slots of a block, a tree beyond.

    Args:
        num_tokens (`int`): tokens to verify for each row.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def choose(self, num_rows: int) -> int:
        """Tokens of the next pass for each of so many rows."""
        return self.num_tokens

    def start_pass(self) -> None:
        """Nothing is measured."""

    def end_pass(self, num_rows: int, num_tokens: int, counts: list[int]) -> None:
        """Nothing is learned."""


class PassTimes:
    """
    Seconds of a pass, by rows and tokens a row.

    Machines change their speed for all kinds of passes at once, so a pass that took longer than expected is put down
    to the machine first, and to its own number of tokens only a little once that was measured a few times.

    Args:
        trained (`int`): slots of a trained block.
    """

    def __init__(self, trained: int) -> None:
        self.trained = trained
        self.slowness = 1.0  # of the machine, now
        self._seconds: dict[int, dict[int, float]] = defaultdict(dict)  # where slowness is 1
        self._counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from one pass."""
        table, counts = self._seconds[num_rows], self._counts[num_rows]
        counts[num_tokens] += 1
        if counts[num_tokens] <= NEEDED_TIMES:
            table[num_tokens] = min(table.get(num_tokens, seconds / self.slowness), seconds / self.slowness)
            return
        surprise = seconds / (table[num_tokens] * self.slowness)
        surprise = min(max(surprise, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.slowness *= surprise**MACHINE_SHARE
        table[num_tokens] *= surprise ** max(OWN_SHARE, 1 / counts[num_tokens])

    def missing(self, num_rows: int, tree_sizes: list[int]) -> list[int]:
        """Numbers of tokens to try so that the others can be told from them, if no number of rows has all of these."""
        wanted = list(dict.fromkeys([self.trained, max(2, self.trained // 2), 1, *tree_sizes]))

        def lacking(counts: dict[int, int]) -> list[int]:
            return [tokens for tokens in wanted if counts.get(tokens, 0) < NEEDED_TIMES]

        if any(not lacking(counts) for counts in self._counts.values()):
            return []
        return lacking(self._counts[num_rows])

    def estimate(self, num_rows: int) -> dict[int, float]:
        """
        Seconds of a pass for every number of tokens up to the trained one, and for the trees that were tried.

        Lengths of the chain that were not tried lie on a line between their neighbours. A number of rows for which too
        little was tried takes the times of the nearest one: what counts is how times compare.

        Args:
            num_rows (`int`): rows of the pass.

        Returns:
            `dict[int, float]`: from 1 (no draft) on.
        """
        complete = [rows for rows, table in self._seconds.items() if {1, self.trained} <= set(table)]
        nearest = min(complete, key=lambda rows: abs(rows - num_rows))
        seconds = {tokens: least * self.slowness for tokens, least in self._seconds[nearest].items()}
        tried = sorted(tokens for tokens in seconds if 1 < tokens <= self.trained)
        for tokens in range(2, self.trained):
            if tokens not in seconds:
                above = next(other for other in tried if other > tokens)
                below = max((other for other in tried if other < tokens), default=above)
                share = max((tokens - below) / max(above - below, 1), 0.0)
                seconds[tokens] = seconds[below] + share * (seconds[above] - seconds[below])
        return seconds


_times_of_pair: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, PassTimes]] = WeakKeyDictionary()


def times_of_pair(target: nn.Module, draft: nn.Module, trained: int) -> PassTimes:
    """What was measured for a pair so far in this process."""
    of_target = _times_of_pair.setdefault(target, WeakKeyDictionary())
    return of_target.setdefault(draft, PassTimes(trained))


class AdaptiveBlockLength(BlockLength):
    """
    The number of tokens with the most committed ones a second, by what was accepted lately and what passes cost.

    With 1 there is no draft. From time to time another number is tried, since the text and the machine change.

    Args:
        times ([`PassTimes`]): of the pair; it outlives the call.
        use_trees (`bool`): whether trees may be verified.
        clock (`Callable`): seconds.
    """

    def __init__(self, times: PassTimes, use_trees: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(times.trained)
        self.times, self.clock = times, clock
        self.tree_sizes = [2 * times.trained, 4 * times.trained] if use_trees else []
        self.accepted = [PRIOR_RATE * PRIOR_WEIGHT] * times.trained  # by slot; slot 0 is not used
        self.reached = [PRIOR_WEIGHT] * times.trained
        self.by_tree = dict.fromkeys(self.tree_sizes, 0.0)
        self.by_chain = dict.fromkeys(self.tree_sizes, 0.0)  # what the chain was expected to commit there
        self.last_pass = dict.fromkeys([*range(1, times.trained + 1), *self.tree_sizes], 0)
        self.num_passes, self.num_drafted_passes = 0, 0
        self.passes_since_trial, self.probe_after = 0, PROBE_AFTER[0]
        self.started = 0.0

    def committed(self) -> dict[int, float]:
        """Tokens that a pass is expected to commit to a row, by the number of tokens it verifies."""
        expected, survival = {1: 1.0}, 1.0
        for slot in range(1, self.times.trained):
            survival *= self.accepted[slot] / self.reached[slot]
            expected[slot + 1] = expected[slot] + survival
        for size in self.tree_sizes:
            gain = self.by_tree[size] + PRIOR_TREE_GAIN * PRIOR_TREE_TOKENS
            expected[size] = expected[self.times.trained] * gain / (self.by_chain[size] + PRIOR_TREE_TOKENS)
        return expected

    def choose(self, num_rows: int) -> int:
        """Tokens of the next pass for each of so many rows."""
        if self.num_drafted_passes == 0:
            return self.times.trained
        tree_sizes = [size for size in self.tree_sizes if size * num_rows <= LARGEST_TREE_PASS]
        if missing := self.times.missing(num_rows, tree_sizes):
            return missing[0]
        seconds, expected = self.times.estimate(num_rows), self.committed()
        options = [*range(1, self.times.trained + 1), *(size for size in tree_sizes if size in seconds)]
        rates = {tokens: expected[tokens] / seconds[tokens] for tokens in options}
        best, *others = sorted(options, key=lambda tokens: -rates[tokens])
        self.passes_since_trial += 1
        if best == 1 and self.passes_since_trial > self.probe_after:
            self.passes_since_trial = 0
            self.probe_after = min(2 * self.probe_after, PROBE_AFTER[1])
            return others[0]
        if best > 1:
            self.probe_after = PROBE_AFTER[0]
            if self.passes_since_trial > REMEASURE_AFTER:
                self.passes_since_trial = 0
                near = [tokens for tokens in others if tokens == 1 or rates[tokens] > REMEASURE_FROM * rates[best]]
                return min(near, key=lambda tokens: self.last_pass[tokens], default=best)
        return best

    def start_pass(self) -> None:
        """Start the clock."""
        self.started = self.clock()

    def end_pass(self, num_rows: int, num_tokens: int, counts: list[int]) -> None:
        """Learn from a pass: how long it took, and how many tokens it committed to each row."""
        self.num_passes += 1
        self.last_pass[num_tokens] = self.num_passes
        if num_tokens in self.by_tree:
            self._learn_from_tree(num_tokens, counts)
        elif num_tokens > 1:
            self._learn_from_chain(num_tokens, counts)
        self.num_drafted_passes += num_tokens > 1
        if num_tokens == 1 or self.num_drafted_passes > 1:  # the first one also reads the prompt
            self.times.add(num_rows, num_tokens, self.clock() - self.started)

    def _learn_from_chain(self, num_tokens: int, counts: list[int]) -> None:
        prior = PRIOR_RATE * PRIOR_WEIGHT
        for slot in range(1, num_tokens):
            self.reached[slot] = PRIOR_WEIGHT + DECAY * (self.reached[slot] - PRIOR_WEIGHT)
            self.accepted[slot] = prior + DECAY * (self.accepted[slot] - prior)
            self.reached[slot] += sum(count >= slot for count in counts)
            self.accepted[slot] += sum(count > slot for count in counts)

    def _learn_from_tree(self, size: int, counts: list[int]) -> None:
        expected = self.committed()[self.times.trained]
        self.by_tree[size] = DECAY * self.by_tree[size] + sum(counts)
        self.by_chain[size] = DECAY * self.by_chain[size] + expected * len(counts)
