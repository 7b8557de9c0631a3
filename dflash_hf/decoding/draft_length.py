"""Schedulers of the draft length, which choose how many tokens a pass verifies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

# Measurements that a number of tokens needs, because the first pass of a new shape may compile something.
NUM_NEEDED_TIMES = 2
# A pass that takes longer than estimated is attributed to the speed of the machine and to its own number of tokens
# with these exponents; the ratio to the estimate is limited to the last value.
MACHINE_SHARE, OWN_SHARE, LARGEST_SURPRISE = 0.4, 0.1, 1.5
DECAY = 0.95  # factor on the weight of a measured pass with every later pass
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 2.0  # acceptance of a slot before any measurement, and how many passes it counts as
# Tokens that a tree commits relative to the whole chain before any measurement, and how many tokens that counts as.
PRIOR_TREE_GAIN, PRIOR_TREE_TOKENS = 1.1, 32.0
# Passes after which another number is measured again, at first and at most, and the least rate, relative to the best,
# that qualifies.
REMEASURE_AFTER, REMEASURE_FROM = (8, 64), 0.8
PROBE_AFTER = (4, 32)  # plain passes after which a draft is tried again: at first, and at most
LARGEST_TREE_PASS = 64  # tokens of all sequences together


class DraftLengthScheduler(ABC):
    """
    Choose how many tokens the next pass verifies for each sequence, the anchor included.

    1 is plain decoding without a draft. A number up to the slots of a block is a chain, a larger one is a tree.
    """

    @abstractmethod
    def choose(self, num_sequences: int) -> int:
        """Return the number of tokens of the next pass for each of `num_sequences` sequences."""

    @abstractmethod
    def start_pass(self) -> None:
        """Note that a pass starts."""

    @abstractmethod
    def end_pass(self, num_sequences: int, num_tokens: int, counts: list[int]) -> None:
        """
        Note that a pass has ended.

        Args:
            num_sequences (`int`): number of sequences in the pass.
            num_tokens (`int`): number of tokens that were chosen for it.
            counts (`list[int]`): number of tokens that each sequence received.
        """


class FixedDraftLength(DraftLengthScheduler):
    """
    Verify the same number of tokens in every pass.

    Args:
        num_tokens (`int`): number of tokens for each sequence, the anchor included.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def choose(self, num_sequences: int) -> int:
        """Return the fixed number."""
        return self.num_tokens

    def start_pass(self) -> None:
        """Do nothing, because nothing is measured."""

    def end_pass(self, num_sequences: int, num_tokens: int, counts: list[int]) -> None:
        """Do nothing, because nothing is measured."""


class LatencyModel:
    """
    Estimate the seconds of a pass from its number of sequences and its number of tokens for each.

    The speed of a machine changes for all kinds of passes at once. So a pass that takes longer than estimated changes
    the estimate of the machine's speed first, and that of its own number of tokens only a little once this number was
    measured a few times.

    Args:
        block_size (`int`): number of slots of a trained block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slowness = 1.0  # current seconds of a pass relative to those in the table
        self._seconds: dict[int, dict[int, float]] = defaultdict(dict)
        self._counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Update the model with one measured pass."""
        table, counts = self._seconds[num_sequences], self._counts[num_sequences]
        counts[num_tokens] += 1
        if counts[num_tokens] <= NUM_NEEDED_TIMES:
            table[num_tokens] = min(table.get(num_tokens, seconds / self.slowness), seconds / self.slowness)
            return
        surprise = seconds / (table[num_tokens] * self.slowness)
        surprise = min(max(surprise, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.slowness *= surprise**MACHINE_SHARE
        table[num_tokens] *= surprise ** max(OWN_SHARE, 1 / counts[num_tokens])

    def missing(self, num_sequences: int, tree_sizes: list[int]) -> list[int]:
        """
        Return the numbers of tokens that have to be measured before passes can be compared.

        Args:
            num_sequences (`int`): number of sequences in the next pass.
            tree_sizes (`list[int]`): sizes of the trees that may be verified.

        Returns:
            `list[int]`: empty if all of them were measured for any one number of sequences.
        """
        wanted = list(dict.fromkeys([self.block_size, max(2, self.block_size // 2), 1, *tree_sizes]))

        def lacking(counts: dict[int, int]) -> list[int]:
            return [tokens for tokens in wanted if counts.get(tokens, 0) < NUM_NEEDED_TIMES]

        if any(not lacking(counts) for counts in self._counts.values()):
            return []
        return lacking(self._counts[num_sequences])

    def estimate(self, num_sequences: int) -> dict[int, float]:
        """
        Estimate the seconds of a pass for every length of the chain and for the trees that were measured.

        Lengths that were not measured are interpolated between their neighbours. A number of sequences with too few
        measurements takes the estimates of the nearest one, because only the ratios of the times matter.

        Args:
            num_sequences (`int`): number of sequences in the pass.

        Returns:
            `dict[int, float]`: seconds by number of tokens, from 1 (no draft) on.
        """
        complete = [number for number, table in self._seconds.items() if {1, self.block_size} <= set(table)]
        nearest = min(complete, key=lambda number: abs(number - num_sequences))
        seconds = {tokens: least * self.slowness for tokens, least in self._seconds[nearest].items()}
        measured = sorted(tokens for tokens in seconds if 1 < tokens <= self.block_size)
        for tokens in range(2, self.block_size):
            if tokens not in seconds:
                above = next(other for other in measured if other > tokens)
                below = max((other for other in measured if other < tokens), default=above)
                share = max((tokens - below) / max(above - below, 1), 0.0)
                seconds[tokens] = seconds[below] + share * (seconds[above] - seconds[below])
        return seconds


_latency_models: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, LatencyModel]] = WeakKeyDictionary()


def latency_model_of(target: nn.Module, draft: nn.Module, block_size: int) -> LatencyModel:
    """
    Return the latency model of a pair, which all calls of this process share.

    Args:
        target, draft (`nn.Module`): the pair.
        block_size (`int`): number of slots of a trained block.

    Returns:
        [`LatencyModel`]
    """
    of_target = _latency_models.setdefault(target, WeakKeyDictionary())
    return of_target.setdefault(draft, LatencyModel(block_size))


class AcceptanceModel:
    """
    Estimate how many tokens a pass commits from what recent passes committed.

    Args:
        block_size (`int`): number of slots of a trained block.
        tree_sizes (`list[int]`): sizes of the trees that may be verified.
    """

    def __init__(self, block_size: int, tree_sizes: list[int]) -> None:
        self.block_size, self.tree_sizes = block_size, tree_sizes
        self.accepted = [PRIOR_RATE * PRIOR_WEIGHT] * block_size  # weight of passes that accepted slot k, by k
        self.reached = [PRIOR_WEIGHT] * block_size  # weight of passes that accepted all slots before slot k, by k
        self.by_tree = dict.fromkeys(tree_sizes, 0.0)  # tokens that trees of each size committed
        self.by_chain = dict.fromkeys(tree_sizes, 0.0)  # tokens that the chain was expected to commit in their place

    def expected_tokens(self) -> dict[int, float]:
        """Return the number of tokens that a pass is expected to commit, by the number of tokens it verifies."""
        expected, survival = {1: 1.0}, 1.0
        for slot in range(1, self.block_size):
            survival *= self.accepted[slot] / self.reached[slot]
            expected[slot + 1] = expected[slot] + survival
        for size in self.tree_sizes:
            gain = self.by_tree[size] + PRIOR_TREE_GAIN * PRIOR_TREE_TOKENS
            expected[size] = expected[self.block_size] * gain / (self.by_chain[size] + PRIOR_TREE_TOKENS)
        return expected

    def add(self, num_tokens: int, counts: list[int]) -> None:
        """
        Update the model with one pass.

        Args:
            num_tokens (`int`): number of tokens that the pass verified for each sequence.
            counts (`list[int]`): number of tokens that it committed to each sequence.
        """
        if num_tokens in self.by_tree:
            expected = self.expected_tokens()[self.block_size]
            self.by_tree[num_tokens] = DECAY * self.by_tree[num_tokens] + sum(counts)
            self.by_chain[num_tokens] = DECAY * self.by_chain[num_tokens] + expected * len(counts)
            return
        prior = PRIOR_RATE * PRIOR_WEIGHT
        for slot in range(1, num_tokens):
            self.reached[slot] = PRIOR_WEIGHT + DECAY * (self.reached[slot] - PRIOR_WEIGHT)
            self.accepted[slot] = prior + DECAY * (self.accepted[slot] - prior)
            self.reached[slot] += sum(count >= slot for count in counts)
            self.accepted[slot] += sum(count > slot for count in counts)


class AdaptiveDraftLength(DraftLengthScheduler):
    """
    Verify the number of tokens that commits the most tokens per second, by recent acceptance and measured latency.

    Now and then another number is tried, because the text and the speed of the machine change.

    Args:
        latency ([`LatencyModel`]): latency model of the pair, which outlives the call.
        use_trees (`bool`): whether trees may be verified.
        clock (`Callable`): function that returns the time in seconds.
    """

    def __init__(self, latency: LatencyModel, use_trees: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        block_size = latency.block_size
        self.latency, self.clock, self.block_size = latency, clock, block_size
        self.tree_sizes = [2 * block_size, 4 * block_size] if use_trees else []
        self.acceptance = AcceptanceModel(block_size, self.tree_sizes)
        self.last_pass = dict.fromkeys([*range(1, block_size + 1), *self.tree_sizes], 0)
        self.num_passes, self.num_drafted_passes = 0, 0
        self.passes_since_trial, self.probe_after, self.remeasure_after = 0, PROBE_AFTER[0], REMEASURE_AFTER[0]
        self.best = block_size
        self.started = 0.0

    def choose(self, num_sequences: int) -> int:
        """Return the number of tokens of the next pass for each of `num_sequences` sequences."""
        if self.num_drafted_passes == 0:
            return self.block_size
        tree_sizes = [size for size in self.tree_sizes if size * num_sequences <= LARGEST_TREE_PASS]
        if missing := self.latency.missing(num_sequences, tree_sizes):
            return missing[0]
        seconds, expected = self.latency.estimate(num_sequences), self.acceptance.expected_tokens()
        options = [*range(1, self.block_size + 1), *(size for size in tree_sizes if size in seconds)]
        rates = {tokens: expected[tokens] / seconds[tokens] for tokens in options}
        best, *others = sorted(options, key=lambda tokens: -rates[tokens])
        self.passes_since_trial += 1
        if best != self.best:
            self.best, self.remeasure_after = best, REMEASURE_AFTER[0]
        if best == 1 and self.passes_since_trial > self.probe_after:
            self.passes_since_trial = 0
            self.probe_after = min(2 * self.probe_after, PROBE_AFTER[1])
            return others[0]
        if best > 1:
            self.probe_after = PROBE_AFTER[0]
            if self.passes_since_trial > self.remeasure_after:
                self.passes_since_trial = 0
                self.remeasure_after = min(2 * self.remeasure_after, REMEASURE_AFTER[1])
                near = [tokens for tokens in others if tokens == 1 or rates[tokens] > REMEASURE_FROM * rates[best]]
                return min(near, key=lambda tokens: self.last_pass[tokens], default=best)
        return best

    def start_pass(self) -> None:
        """Start the clock."""
        self.started = self.clock()

    def end_pass(self, num_sequences: int, num_tokens: int, counts: list[int]) -> None:
        """Update the latency model and the acceptance model with a pass; the arguments are those of the base class."""
        self.num_passes += 1
        self.last_pass[num_tokens] = self.num_passes
        if num_tokens > 1:
            self.acceptance.add(num_tokens, counts)
        self.num_drafted_passes += num_tokens > 1
        if num_tokens == 1 or self.num_drafted_passes > 1:  # in the first one the draft also reads the prompt
            self.latency.add(num_sequences, num_tokens, self.clock() - self.started)
