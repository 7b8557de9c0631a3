"""Answer pairs, and what is computed from them: acceptance, speed-up and their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Setting:
    """
    How prompts are decoded.

    Args:
        temperature (`float`): 0 decodes greedily.
        thinking (`bool`, *optional*): `enable_thinking` of the chat template; `None` if it has no such switch.
        batch_size (`int`): conversations decoded together.
    """

    temperature: float
    thinking: bool | None = None
    batch_size: int = 1

    @property
    def label(self) -> str:
        """
        The setting in words.

        Example:

        ```python
        >>> Setting(0.0).label, Setting(0.7, thinking=True, batch_size=4).label
        ('greedy, batch 1', 'T = 0.7, thinking, batch 4')

        ```
        """
        thinking = {None: "", True: ", thinking", False: ", no thinking"}[self.thinking]
        decoding = "greedy" if self.temperature == 0 else f"T = {self.temperature:g}"
        return f"{decoding}{thinking}, batch {self.batch_size}"


@dataclass(frozen=True)
class AnswerPair:
    """
    One turn of a batch of conversations, answered without and with the draft.

    Args:
        set_name (`str`): of the prompt set.
        temperature (`float`), thinking (`bool`, *optional*), batch_size (`int`): the [`Setting`].
        batch (`int`), turn (`int`): which, counted from 0.
        prompts (`list[int]`): numbers of the conversations in their set.
        first (`str`): `"plain"` or `"drafted"`: what was decoded first.
        num_prompt_tokens (`list[int]`): of each row.
        plain_token_ids, drafted_token_ids (`list[list[int]]`): new tokens of each row, the end token included.
        plain_s, drafted_s (`float`): seconds of the whole call, prefill included.
        is_cut (`list[bool]`): whether the drafted answer ended at its greatest length and not at an end token.
        committed, verified, starts (`list[list[int]]`): of each row and pass, as [`DecodingStatistics`] has them.
    """

    set_name: str
    temperature: float
    thinking: bool | None
    batch_size: int
    batch: int
    turn: int
    prompts: list[int]
    first: str
    num_prompt_tokens: list[int]
    plain_token_ids: list[list[int]]
    plain_s: float
    drafted_token_ids: list[list[int]]
    drafted_s: float
    is_cut: list[bool]
    committed: list[list[int]]
    verified: list[list[int]]
    starts: list[list[int]]

    @property
    def setting(self) -> Setting:
        """[`Setting`] of the pair."""
        return Setting(self.temperature, self.thinking, self.batch_size)

    @property
    def key(self) -> tuple[str, Setting, int, int]:
        """What tells it from all others of an evaluation."""
        return self.set_name, self.setting, self.batch, self.turn

    @property
    def plain_tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second."""
        return sum(map(len, self.plain_token_ids)) / self.plain_s

    @property
    def drafted_tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second."""
        return sum(map(len, self.drafted_token_ids)) / self.drafted_s

    @property
    def speed_up(self) -> float:
        """`float`: tokens a second with the draft, divided by those without."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s

    @property
    def num_identical(self) -> int:
        """`int`: rows whose two answers have the same tokens."""
        return sum(ours == plain for ours, plain in zip(self.drafted_token_ids, self.plain_token_ids, strict=True))


NUM_RESAMPLES = 1000
NUM_POSITION_BINS = 8


@dataclass(frozen=True)
class PositionBin:
    """
    Acceptance in a part of the answers.

    Args:
        start, end (`int`): passes that began after `start` to `end - 1` tokens of the answer.
        num_passes (`int`): how many these are.
        accept_len (`float`, *optional*): mean tokens they committed.
    """

    start: int
    end: int
    num_passes: int
    accept_len: float | None


@dataclass(frozen=True)
class SetResult:
    """
    A prompt set in one setting. What nothing was counted for is `None`.

    Args:
        set_name, title (`str`): of the set.
        setting ([`Setting`]): how it was decoded.
        num_prompts, num_answers (`int`): conversations, and their turns.
        num_plain_tokens, num_drafted_tokens (`int`): new tokens without and with the draft.
        num_passes (`int`): verify passes with a draft, counted once for each row.
        accept_len (`float`, *optional*): mean tokens that such a pass committed, the target's bonus token included.
        accept_len_interval (`tuple[float, float]`, *optional*): 95 % bootstrap interval over conversations.
        slot_acceptance (`list[float | None]`): of the passes that verified slots 1 … k, the share that took them all.
        committed_histogram (`list[int]`): passes that committed 1, 2, … tokens.
        by_position (`list[PositionBin]`): acceptance along the answers.
        plain_tokens_per_s, drafted_tokens_per_s (`float`): all new tokens over all seconds, prefill included.
        speed_up (`float`): median over the batches of the ratio of these two.
        num_identical (`int`, *optional*): answers with the same tokens without and with the draft; greedy only.
        num_cut (`int`): answers with the draft that ended at `max_new_tokens`.
    """

    set_name: str
    title: str
    setting: Setting
    num_prompts: int
    num_answers: int
    num_plain_tokens: int
    num_drafted_tokens: int
    num_passes: int
    accept_len: float | None
    accept_len_interval: tuple[float, float] | None
    slot_acceptance: list[float | None]
    committed_histogram: list[int]
    by_position: list[PositionBin]
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speed_up: float
    num_identical: int | None
    num_cut: int

    @property
    def identical_share(self) -> float | None:
        """`float`, *optional*: share of answers with the same tokens; greedy only."""
        return None if self.num_identical is None else self.num_identical / self.num_answers

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "identical_share": self.identical_share}


@dataclass(frozen=True)
class MacroMean:
    """
    The unweighted mean over the sets of a setting: every set counts alike, however many tokens it has.

    Args:
        setting ([`Setting`]): how they were decoded.
        num_sets, num_prompts, num_answers, num_drafted_tokens (`int`): what is in the mean.
        accept_len, speed_up, plain_tokens_per_s, drafted_tokens_per_s, identical_share (`float`, *optional*): means.
        slot_acceptance (`list[float | None]`): means, slot by slot.
        num_cut (`int`): sum.
    """

    setting: Setting
    num_sets: int
    num_prompts: int
    num_answers: int
    num_drafted_tokens: int
    accept_len: float | None
    speed_up: float | None
    plain_tokens_per_s: float | None
    drafted_tokens_per_s: float | None
    identical_share: float | None
    slot_acceptance: list[float | None]
    num_cut: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def summarize_pairs(
    pairs: Sequence[AnswerPair], title: str, block_size: int, max_new_tokens: int, seed: int = 0
) -> SetResult:
    """
    Add up the pairs of one set and setting.

    Args:
        pairs (`Sequence[AnswerPair]`): at least one.
        title (`str`): of the set.
        block_size (`int`): slots of a trained block, the anchor included.
        max_new_tokens (`int`): longest answer, which the bins of positions divide.
        seed (`int`, defaults to 0): of the bootstrap.

    Returns:
        [`SetResult`]
    """
    first = pairs[0]
    passes = [
        each
        for pair in pairs
        for row in zip(pair.committed, pair.verified, pair.starts, strict=True)
        for each in zip(*row, strict=True)
    ]
    committed = [count for count, _, _ in passes]
    by_prompt: dict[int, list[int]] = {}
    for pair in pairs:
        for prompt, counts in zip(pair.prompts, pair.committed, strict=True):
            by_prompt.setdefault(prompt, []).extend(counts)
    histogram = [committed.count(count) for count in range(1, max([block_size, *committed]) + 1)]
    num_drafted_tokens = sum(len(row) for pair in pairs for row in pair.drafted_token_ids)
    num_plain_tokens = sum(len(row) for pair in pairs for row in pair.plain_token_ids)
    return SetResult(
        set_name=first.set_name,
        title=title,
        setting=first.setting,
        num_prompts=len(by_prompt),
        num_answers=sum(len(pair.prompts) for pair in pairs),
        num_plain_tokens=num_plain_tokens,
        num_drafted_tokens=num_drafted_tokens,
        num_passes=len(passes),
        accept_len=statistics.fmean(committed) if committed else None,
        accept_len_interval=bootstrap_interval(list(by_prompt.values()), seed),
        slot_acceptance=[
            _mean(count > slot for count, verified, _ in passes if verified >= slot) for slot in range(1, block_size)
        ],
        committed_histogram=histogram,
        by_position=position_bins([(start, count) for count, _, start in passes], max_new_tokens),
        plain_tokens_per_s=num_plain_tokens / sum(pair.plain_s for pair in pairs),
        drafted_tokens_per_s=num_drafted_tokens / sum(pair.drafted_s for pair in pairs),
        speed_up=statistics.median(pair.speed_up for pair in pairs),
        num_identical=sum(pair.num_identical for pair in pairs) if first.temperature == 0 else None,
        num_cut=sum(sum(pair.is_cut) for pair in pairs),
    )


def summarize_all(
    pairs: Iterable[AnswerPair], titles: dict[str, str], block_size: int, max_new_tokens: int
) -> list[SetResult]:
    """
    Add up an evaluation.

    Args:
        pairs (`Iterable[AnswerPair]`): in any order.
        titles (`dict[str, str]`): of the sets by name, in the order they are to have.
        block_size, max_new_tokens (`int`): see [`summarize_pairs`].

    Returns:
        `list[SetResult]`: by setting (temperature, thinking, batch size), then by set.
    """
    groups: dict[tuple[Setting, str], list[AnswerPair]] = {}
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


def macro_means(results: Sequence[SetResult]) -> list[MacroMean]:
    """
    The mean over the sets of each setting.

    Args:
        results (`Sequence[SetResult]`): of an evaluation.

    Returns:
        `list[MacroMean]`: in the order of the settings.
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
                num_answers=sum(result.num_answers for result in same),
                num_drafted_tokens=sum(result.num_drafted_tokens for result in same),
                accept_len=_mean(result.accept_len for result in same),
                speed_up=_mean(result.speed_up for result in same),
                plain_tokens_per_s=_mean(result.plain_tokens_per_s for result in same),
                drafted_tokens_per_s=_mean(result.drafted_tokens_per_s for result in same),
                identical_share=_mean(result.identical_share for result in same),
                slot_acceptance=[_mean(result.slot_acceptance[slot] for result in same) for slot in range(num_slots)],
                num_cut=sum(result.num_cut for result in same),
            )
        )
    return means


def position_bins(passes: Sequence[tuple[int, int]], max_new_tokens: int) -> list[PositionBin]:
    """
    Acceptance along the answers.

    Args:
        passes (`Sequence[tuple[int, int]]`): tokens of the answer before each pass, and what it committed.
        max_new_tokens (`int`): longest answer; eight bins divide it.

    Returns:
        `list[PositionBin]`: up to the last one with a pass.

    Example:

    ```python
    >>> [(b.start, b.end, b.accept_len) for b in position_bins([(1, 3), (4, 2), (17, 1)], max_new_tokens=64)]
    [(0, 8, 2.5), (8, 16, None), (16, 24, 1.0)]

    ```
    """
    width = -(-max_new_tokens // NUM_POSITION_BINS)
    bins: dict[int, list[int]] = {}
    for start, count in passes:
        bins.setdefault(start // width, []).append(count)
    return [
        PositionBin(index * width, (index + 1) * width, len(bins.get(index, [])), _mean(bins.get(index, [])))
        for index in range(max(bins, default=-1) + 1)
    ]


def bootstrap_interval(committed: Sequence[Sequence[int]], seed: int = 0) -> tuple[float, float] | None:
    """
    The 95 % interval of an acceptance length: conversations are drawn anew with replacement, 1,000 times.

    Args:
        committed (`Sequence[Sequence[int]]`): for each conversation, the tokens that its passes committed.
        seed (`int`, defaults to 0): of the draws.

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
    drawn = torch.randint(len(counted), (NUM_RESAMPLES, len(counted)), generator=generator)
    resampled = sums[drawn].sum(1)
    low, high = (
        (resampled[:, 0] / resampled[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    )
    return low, high


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that there are."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
