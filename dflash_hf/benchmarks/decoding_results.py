"""What a decoding benchmark ran, call by call, and what the calls of a method add up to."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

PHASES = ("prefill", "draft", "verify", "rest")


@dataclass(frozen=True)
class Method:
    """
    A way to decode.

    Args:
        name (`str`): `"plain"` (`generate` without a draft), `"native"` (the loop of transformers), `"reference"` (the
            package `dflash`) or `"ours"` ([`speculative_generate`]).
        block_size (`int` or `"auto"`, *optional*): slots that ours verifies.
        proposal (`str`, *optional*): how ours proposes tokens when sampling.
        tree_size (`int`, *optional*): tokens that ours verifies in a tree, instead of `block_size`.
    """

    name: str
    block_size: int | str | None = None
    proposal: str | None = None
    tree_size: int | None = None

    @property
    def label(self) -> str:
        """`str`: the method in a table."""
        names = {"plain": "plain generate", "native": "transformers' loop", "reference": "dflash package"}
        if self.name != "ours":
            return names[self.name]
        if self.tree_size is not None:
            return f"ours, tree of {self.tree_size}"
        return f"ours, {self.block_size}" + (", sampled" if self.proposal == "sample" else "")


@dataclass
class DecodingRun:
    """
    One batch, decoded once.

    Args:
        temperature (`float`), batch_size (`int`), method ([`Method`]): what was run.
        repeat (`int`), prompts (`list[int]`): which time, and on which prompts.
        token_ids (`list[list[int]]`): new tokens of each row up to and including its first end token.
        phase_s (`dict[str, float]`): seconds in the target's pass over the prompts (`prefill`), in the draft's forward
            passes and the head on their results (`draft`), in the target's other passes (`verify`) and outside all of
            these (`rest`).
        num_passes (`int`): passes of the target after the prefill; one serves all rows.
        committed (`list[int]`): tokens that each pass with a draft committed to a row, cut where the answer ends.
        expected_sum (`float`, *optional*): what these were in expectation, added up; ours only.
    """

    temperature: float
    batch_size: int
    method: Method
    repeat: int
    prompts: list[int]
    token_ids: list[list[int]]
    phase_s: dict[str, float]
    num_passes: int
    committed: list[int]
    expected_sum: float | None = None

    @property
    def num_tokens(self) -> int:
        """`int`: new tokens of all rows, without padding."""
        return sum(len(tokens) for tokens in self.token_ids)

    @property
    def seconds(self) -> float:
        """`float`: wall time of the call."""
        return sum(self.phase_s.values())

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def batch_key(self) -> tuple[float, int, int, int]:
        """What runs of different methods on the same batch have in common."""
        return self.temperature, self.batch_size, self.repeat, self.prompts[0]


@dataclass
class DecodingSummary:
    """
    All runs of a method at one temperature and batch size.

    Args:
        temperature, batch_size, method, block_size, proposal, label: what was run.
        num_batches, num_answers, num_tokens (`int`): calls, rows and new tokens.
        seconds, tokens_per_s (`float`): wall time of the calls, and all new tokens over it.
        speed_up (`float`, *optional*): median over batches of tokens a second, divided by plain's on the same batch.
        speed_up_total (`float`, *optional*): the same for all tokens and seconds of these batches.
        num_drafted_passes (`int`): passes with a draft, counted once for each row.
        accept_len, accept_len_error (`float`, *optional*): mean tokens such a pass committed, the bonus token
            included, and its standard error.
        expected_accept_len (`float`, *optional*): the same in expectation, given the target's probabilities.
        committed_histogram (`list[int]`): passes that committed 1, 2, … tokens.
        num_compared, num_identical (`int`): greedy answers that were compared with plain's of the same batch, and
            those with the same tokens. Plain's own are compared with its first answers to the same prompts, which come
            from the first batch size: what differs there comes from the arithmetic alone.
        first_differences (`list[dict[str, Any]]`): `prompt` and `token` of each first difference, and `top_two_gap`,
            by how much the target's best logit there is above its second (`None` until all is measured): a near-tie
            can fall either way.
        num_passes (`int`): passes of the target after the prefill; one serves all rows.
        phase_s (`dict[str, float]`): seconds by phase.
        phase_share (`dict[str, float]`): shares of `draft`, `verify` and `rest` in their sum.
        batches (`list[dict[str, Any]]`): numbers of each call.
    """

    temperature: float
    batch_size: int
    method: str
    block_size: int | str | None
    proposal: str | None
    label: str
    num_batches: int
    num_answers: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    speed_up: float | None
    speed_up_total: float | None
    num_drafted_passes: int
    accept_len: float | None
    accept_len_error: float | None
    expected_accept_len: float | None
    committed_histogram: list[int]
    num_compared: int
    num_identical: int
    num_passes: int
    phase_s: dict[str, float]
    phase_share: dict[str, float]
    first_differences: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


def summarize_runs(
    runs: Sequence[DecodingRun], top_two_gap: Callable[[int, list[int]], float] | None = None
) -> list[DecodingSummary]:
    """
    Add up the runs of each temperature, batch size and method.

    Args:
        runs (`Sequence[DecodingRun]`): in the order of measuring; some may be missing.
        top_two_gap (`Callable`, *optional*): [`DecodingBenchmark.top_two_gap`], to look at where answers differ.

    Returns:
        `list[DecodingSummary]`: temperatures, batch sizes and methods in the order of measuring.
    """
    plain = {run.batch_key: run for run in runs if run.method.name == "plain"}
    first_answers: dict[tuple[float, int], tuple[DecodingRun, list[int]]] = {}
    groups: dict[tuple[float, int], dict[Method, list[DecodingRun]]] = {}
    for run in runs:
        groups.setdefault((run.temperature, run.batch_size), {}).setdefault(run.method, []).append(run)
        if run.method.name == "plain":
            for prompt, answer in zip(run.prompts, run.token_ids, strict=True):
                first_answers.setdefault((run.temperature, prompt), (run, answer))

    def baselines(run: DecodingRun) -> list[tuple[DecodingRun, list[int]] | None]:
        if run.method.name == "plain":
            return [first_answers[run.temperature, prompt] for prompt in run.prompts]
        same = plain.get(run.batch_key)
        return [None] * run.batch_size if same is None else [(same, answer) for answer in same.token_ids]

    return [
        _summarize(of_method, plain, baselines, top_two_gap)
        for group in groups.values()
        for of_method in group.values()
    ]


def _summarize(
    runs: list[DecodingRun],
    plain: dict[tuple[float, int, int, int], DecodingRun],
    baselines: Callable[[DecodingRun], list[tuple[DecodingRun, list[int]] | None]],
    top_two_gap: Callable[[int, list[int]], float] | None,
) -> DecodingSummary:
    """One method's runs, beside the runs of plain generation on the same batches."""
    first = runs[0]
    num_tokens, seconds = sum(run.num_tokens for run in runs), sum(run.seconds for run in runs)
    pairs = [(run, plain[run.batch_key]) for run in runs if run.batch_key in plain]
    ratios = {run.batch_key: run.tokens_per_s / other.tokens_per_s for run, other in pairs}
    committed = [count for run in runs for count in run.committed]
    histogram = Counter(committed)
    expected = [run.expected_sum for run in runs if run.expected_sum is not None]
    summary = DecodingSummary(
        temperature=first.temperature,
        batch_size=first.batch_size,
        method=first.method.name,
        block_size=first.method.block_size,
        proposal=first.method.proposal,
        label=first.method.label,
        num_batches=len(runs),
        num_answers=sum(run.batch_size for run in runs),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        speed_up=statistics.median(ratios.values()) if ratios else None,
        speed_up_total=_rate([run for run, _ in pairs]) / _rate([other for _, other in pairs]) if pairs else None,
        num_drafted_passes=len(committed),
        accept_len=statistics.fmean(committed) if committed else None,
        accept_len_error=statistics.stdev(committed) / len(committed) ** 0.5 if len(committed) > 1 else None,
        expected_accept_len=sum(expected) / len(committed) if expected and committed else None,
        committed_histogram=[histogram[count] for count in range(1, max(committed, default=0) + 1)],
        num_compared=0,
        num_identical=0,
        num_passes=sum(run.num_passes for run in runs),
        phase_s={phase: sum(run.phase_s[phase] for run in runs) for phase in PHASES},
        phase_share={},
    )
    in_steps = sum(summary.phase_s.values()) - summary.phase_s["prefill"]
    summary.phase_share = {phase: summary.phase_s[phase] / in_steps for phase in PHASES if phase != "prefill"}
    for run in runs:
        if run.temperature == 0:
            for prompt, answer, baseline in zip(run.prompts, run.token_ids, baselines(run), strict=True):
                if baseline is not None and baseline[0] is not run:
                    summary.num_compared += 1
                    if answer == baseline[1]:
                        summary.num_identical += 1
                    else:
                        token = _first_difference(answer, baseline[1])
                        gap = None if top_two_gap is None else top_two_gap(prompt, answer[:token])
                        summary.first_differences.append({"prompt": prompt, "token": token, "top_two_gap": gap})
        summary.batches.append(
            {
                "repeat": run.repeat,
                "prompts": run.prompts,
                "num_tokens": run.num_tokens,
                "num_passes": run.num_passes,
                "seconds": run.seconds,
                "tokens_per_s": run.tokens_per_s,
                "speed_up": ratios.get(run.batch_key),
                "phase_s": run.phase_s,
            }
        )
    return summary


def _rate(runs: list[DecodingRun]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def _first_difference(left: list[int], right: list[int]) -> int:
    """Index of the first token that differs, or that only one of the two has."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in same)
