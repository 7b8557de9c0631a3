"""Acceptance, speed-up and their intervals, computed from the response pairs of an evaluation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..blocks.metrics import AcceptanceRecord
from .response_pairs import ResponsePair, Setting

NUM_RESAMPLES = 1000
NUM_POSITION_BINS = 8


@dataclass(frozen=True)
class PositionBin:
    """
    Acceptance in a range of positions of the responses.

    Args:
        start, end (`int`): the bin holds the passes that began after `start` to `end - 1` tokens of the response.
        num_passes (`int`): number of these passes.
        acceptance_length (`float`, *optional*): their acceptance length; `None` if there are none.
    """

    start: int
    end: int
    num_passes: int
    acceptance_length: float | None


@dataclass(frozen=True)
class SetResult:
    """
    Results of a prompt set in one setting. A quantity that no pass was counted for is `None`.

    Args:
        set_name, title (`str`): name and title of the set.
        setting ([`Setting`]): how it was decoded.
        num_prompts, num_responses (`int`): conversations, and their turns.
        num_plain_tokens, num_drafted_tokens (`int`): new tokens without and with the draft.
        num_passes (`int`): verify passes with a draft, counted once for each sequence.
        acceptance_length (`float`, *optional*): mean number of tokens that such a pass committed, the target's bonus
            token included.
        acceptance_length_interval (`tuple[float, float]`, *optional*): 95 % bootstrap interval over conversations.
        slot_acceptance (`list[float | None]`): of the passes that verified slots 1 … k, the share that accepted all of
            them.
        committed_histogram (`list[int]`): passes that committed 1, 2, … tokens.
        by_position (`list[PositionBin]`): acceptance along the responses.
        plain_tokens_per_s, drafted_tokens_per_s (`float`): all new tokens divided by all seconds, prefill included.
        speed_up (`float`): median over the batches of the ratio of these two.
        num_identical (`int`, *optional*): responses with the same tokens without and with the draft; `None` if tokens
            were sampled.
        num_truncated (`int`): responses with the draft that ended at `max_new_tokens`.
    """

    set_name: str
    title: str
    setting: Setting
    num_prompts: int
    num_responses: int
    num_plain_tokens: int
    num_drafted_tokens: int
    num_passes: int
    acceptance_length: float | None
    acceptance_length_interval: tuple[float, float] | None
    slot_acceptance: list[float | None]
    committed_histogram: list[int]
    by_position: list[PositionBin]
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speed_up: float
    num_identical: int | None
    num_truncated: int

    @property
    def identical_share(self) -> float | None:
        """`float` or `None`: share of responses with the same tokens; `None` if tokens were sampled."""
        return None if self.num_identical is None else self.num_identical / self.num_responses

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "identical_share": self.identical_share}


@dataclass(frozen=True)
class MacroMean:
    """
    Unweighted mean over the sets of a setting, in which every set has the same weight whatever its number of tokens.

    Args:
        setting ([`Setting`]): how the sets were decoded.
        num_sets, num_prompts, num_responses, num_drafted_tokens (`int`): sums over the sets.
        acceptance_length, speed_up, plain_tokens_per_s, drafted_tokens_per_s, identical_share (`float`, *optional*):
            means over the sets that have the quantity; `None` if no set has it.
        slot_acceptance (`list[float | None]`): mean of each slot.
        num_truncated (`int`): sum over the sets.
    """

    setting: Setting
    num_sets: int
    num_prompts: int
    num_responses: int
    num_drafted_tokens: int
    acceptance_length: float | None
    speed_up: float | None
    plain_tokens_per_s: float | None
    drafted_tokens_per_s: float | None
    identical_share: float | None
    slot_acceptance: list[float | None]
    num_truncated: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def summarize_all(
    pairs: Iterable[ResponsePair], titles: dict[str, str], block_size: int, max_new_tokens: int
) -> list[SetResult]:
    """
    Summarize the pairs of an evaluation.

    Args:
        pairs (`Iterable[ResponsePair]`): pairs in any order.
        titles (`dict[str, str]`): title of each set by its name; the results have the order of this mapping.
        block_size, max_new_tokens (`int`): see [`summarize_pairs`].

    Returns:
        `list[SetResult]`: ordered by setting (temperature, thinking, batch size), then by set.
    """
    groups: dict[tuple[Setting, str], list[ResponsePair]] = {}
    for pair in pairs:
        groups.setdefault((pair.setting, pair.set_name), []).append(pair)
    names = list(titles)

    def place(group: tuple[Setting, str]) -> tuple[float, bool, int, int]:
        setting, name = group
        return setting.temperature, bool(setting.thinking), setting.batch_size, names.index(name)

    return [
        summarize_pairs(
            sorted(groups[group], key=lambda pair: (pair.batch, pair.turn)),
            titles[group[1]],
            block_size,
            max_new_tokens,
        )
        for group in sorted(groups, key=place)
    ]


def summarize_pairs(
    pairs: Sequence[ResponsePair], title: str, block_size: int, max_new_tokens: int, seed: int = 0
) -> SetResult:
    """
    Summarize the pairs of one set and setting.

    Args:
        pairs (`Sequence[ResponsePair]`): at least one.
        title (`str`): title of the set.
        block_size (`int`): slots of a trained block, the anchor included.
        max_new_tokens (`int`): greatest length of a response, which the position bins divide.
        seed (`int`, defaults to 0): seed of the bootstrap.

    Returns:
        [`SetResult`]
    """
    first = pairs[0]
    passes = [
        each
        for pair in pairs
        for sequence in zip(pair.committed, pair.verified, pair.starts, strict=True)
        for each in zip(*sequence, strict=True)
    ]
    by_prompt: dict[int, list[int]] = {}
    for pair in pairs:
        for prompt, counts in zip(pair.prompts, pair.committed, strict=True):
            by_prompt.setdefault(prompt, []).extend(counts)
    acceptance = AcceptanceRecord.of(
        [committed for committed, _, _ in passes], [verified for _, verified, _ in passes], block_size=block_size
    )
    num_drafted_tokens = sum(len(tokens) for pair in pairs for tokens in pair.drafted_token_ids)
    num_plain_tokens = sum(len(tokens) for pair in pairs for tokens in pair.plain_token_ids)
    return SetResult(
        set_name=first.set_name,
        title=title,
        setting=first.setting,
        num_prompts=len(by_prompt),
        num_responses=sum(len(pair.prompts) for pair in pairs),
        num_plain_tokens=num_plain_tokens,
        num_drafted_tokens=num_drafted_tokens,
        num_passes=acceptance.num_passes,
        acceptance_length=acceptance.acceptance_length,
        acceptance_length_interval=bootstrap_interval(list(by_prompt.values()), seed),
        slot_acceptance=acceptance.slot_acceptance[: block_size - 1],
        committed_histogram=list(acceptance.histogram),
        by_position=position_bins([(start, committed) for committed, _, start in passes], max_new_tokens),
        plain_tokens_per_s=num_plain_tokens / sum(pair.plain_s for pair in pairs),
        drafted_tokens_per_s=num_drafted_tokens / sum(pair.drafted_s for pair in pairs),
        speed_up=statistics.median(pair.speed_up for pair in pairs),
        num_identical=sum(pair.num_identical for pair in pairs) if first.temperature == 0 else None,
        num_truncated=sum(sum(pair.is_truncated) for pair in pairs),
    )


def position_bins(passes: Sequence[tuple[int, int]], max_new_tokens: int) -> list[PositionBin]:
    """
    Compute the acceptance length along the responses.

    Args:
        passes (`Sequence[tuple[int, int]]`): for each pass, the tokens of the response before it, and the tokens that
            it committed.
        max_new_tokens (`int`): greatest length of a response, which eight bins divide.

    Returns:
        `list[PositionBin]`: bins up to the last one with a pass.

    Example:

    ```python
    >>> bins = position_bins([(1, 3), (4, 2), (17, 1)], max_new_tokens=64)
    >>> [(each.start, each.end, each.acceptance_length) for each in bins]
    [(0, 8, 2.5), (8, 16, None), (16, 24, 1.0)]

    ```
    """
    width = -(-max_new_tokens // NUM_POSITION_BINS)
    committed: dict[int, list[int]] = {}
    for start, count in passes:
        committed.setdefault(start // width, []).append(count)
    bins = []
    for index in range(max(committed, default=-1) + 1):
        acceptance = AcceptanceRecord.of(committed.get(index, []), block_size=1)
        bins.append(
            PositionBin(index * width, (index + 1) * width, acceptance.num_passes, acceptance.acceptance_length)
        )
    return bins


def bootstrap_interval(committed: Sequence[Sequence[int]], seed: int = 0) -> tuple[float, float] | None:
    """
    Compute the 95 % interval of an acceptance length from 1,000 bootstrap resamples of the conversations.

    Args:
        committed (`Sequence[Sequence[int]]`): for each conversation, the tokens that its passes committed.
        seed (`int`, defaults to 0): seed of the resampling.

    Returns:
        `tuple[float, float]`, or `None` with fewer than two conversations that had a pass.

    Example:

    ```python
    >>> bootstrap_interval([[2, 2], [2, 2, 2]])
    (2.0, 2.0)

    ```
    """
    counted = [counts for counts in committed if counts]
    if len(counted) < 2:
        return None
    sums = torch.tensor([[sum(counts), len(counts)] for counts in counted], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(counted), (NUM_RESAMPLES, len(counted)), generator=generator)
    resampled = sums[chosen].sum(1)
    low, high = (
        (resampled[:, 0] / resampled[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    )
    return low, high


def macro_means(results: Sequence[SetResult]) -> list[MacroMean]:
    """
    Compute the mean over the sets of each setting.

    Args:
        results (`Sequence[SetResult]`): results of an evaluation.

    Returns:
        `list[MacroMean]`: means in the order of the settings.
    """
    means = []
    for setting in dict.fromkeys(result.setting for result in results):
        same = [result for result in results if result.setting == setting]
        num_slots = max(len(result.slot_acceptance) for result in same)
        means.append(
            MacroMean(
                setting=setting,
                num_sets=len(same),
                num_prompts=sum(result.num_prompts for result in same),
                num_responses=sum(result.num_responses for result in same),
                num_drafted_tokens=sum(result.num_drafted_tokens for result in same),
                acceptance_length=_mean(result.acceptance_length for result in same),
                speed_up=_mean(result.speed_up for result in same),
                plain_tokens_per_s=_mean(result.plain_tokens_per_s for result in same),
                drafted_tokens_per_s=_mean(result.drafted_tokens_per_s for result in same),
                identical_share=_mean(result.identical_share for result in same),
                slot_acceptance=[_mean(result.slot_acceptance[slot] for result in same) for slot in range(num_slots)],
                num_truncated=sum(result.num_truncated for result in same),
            )
        )
    return means


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not `None`, or `None` if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
