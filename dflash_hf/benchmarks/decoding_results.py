"""Runs of a decoding benchmark, and the summary of the runs of each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..blocks.metrics import AcceptanceRecord
from ..evaluation.near_ties import index_of_first_difference
from .decoding_settings import Method
from .phases import PHASES

Baseline = tuple["DecodingRun", list[int]]  # a run of plain generation, and its response to one prompt


@dataclass
class DecodingRun:
    """
    One batch that was decoded once.

    Args:
        temperature (`float`), batch_size (`int`), method ([`Method`]): how it was decoded.
        repeat (`int`): index of the repetition.
        prompts (`list[int]`): indices of the prompts.
        token_ids (`list[list[int]]`): new tokens of each sequence up to and including its first end token.
        phase_s (`dict[str, float]`): seconds of each phase, see [`PhaseRecorder`].
        num_passes (`int`): passes of the target after the prefill. One pass serves all sequences.
        committed (`list[int]`): tokens that each pass with a draft committed to a sequence, without those past the end
            of the response.
        expected_sum (`float`, *optional*): sum of the expected values of these numbers; of `"ours"` only.
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
        """`int`: new tokens of all sequences, without padding."""
        return sum(len(tokens) for tokens in self.token_ids)

    @property
    def seconds(self) -> float:
        """`float`: wall time of the call."""
        return sum(self.phase_s.values())

    @property
    def tokens_per_s(self) -> float:
        """`float`: new tokens of all sequences per second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def batch_key(self) -> tuple[float, int, int, int]:
        """`tuple`: temperature, batch size, repetition and first prompt, which identify the batch for every method."""
        return self.temperature, self.batch_size, self.repeat, self.prompts[0]


@dataclass
class DecodingSummary:
    """
    Summary of all runs of a method at one temperature and batch size.

    Args:
        temperature, batch_size, method, block_size, proposal, label: how the batches were decoded, see [`Method`].
        num_batches, num_responses, num_tokens (`int`): calls, sequences and new tokens.
        seconds, tokens_per_s (`float`): wall time of the calls, and all new tokens divided by it.
        speed_up (`float`, *optional*): median over the batches of tokens per second, divided by those of plain
            generation on the same batch.
        speed_up_total (`float`, *optional*): the same ratio for all tokens and seconds of these batches together.
        num_drafted_passes (`int`): passes with a draft, counted once for each sequence.
        acceptance_length, acceptance_length_error (`float`, *optional*): mean number of tokens that such a pass
            committed, the bonus token included, and its standard error.
        expected_acceptance_length (`float`, *optional*): expected value of the same, given the target's probabilities.
        committed_histogram (`list[int]`): passes that committed 1, 2, … tokens.
        num_compared, num_identical (`int`): greedy responses that were compared with those of plain generation on the
            same batch, and those of them with the same tokens. Plain generation is compared with its own first
            responses to the same prompts, which come from the first batch size, so that a difference there is caused
            by arithmetic alone.
        first_differences (`list[dict[str, Any]]`): `prompt` and `token` index of each first difference, and
            `logit_gap`, see [`~dflash_hf.evaluation.near_ties.logit_gap`] (`None` until everything is measured).
        num_passes (`int`): passes of the target after the prefill. One pass serves all sequences.
        phase_s (`dict[str, float]`): seconds of each phase.
        phase_share (`dict[str, float]`): shares of `draft`, `verify` and `overhead` in their sum.
        batches (`list[dict[str, Any]]`): results of each call.
    """

    temperature: float
    batch_size: int
    method: str
    block_size: int | str | None
    proposal: str | None
    label: str
    num_batches: int
    num_responses: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    speed_up: float | None
    speed_up_total: float | None
    num_drafted_passes: int
    acceptance_length: float | None
    acceptance_length_error: float | None
    expected_acceptance_length: float | None
    committed_histogram: list[int]
    num_compared: int
    num_identical: int
    num_passes: int
    phase_s: dict[str, float]
    phase_share: dict[str, float]
    first_differences: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


def summarize_runs(
    runs: Sequence[DecodingRun], logit_gap: Callable[[int, list[int], list[int]], float] | None = None
) -> list[DecodingSummary]:
    """
    Summarize the runs of each temperature, batch size and method.

    Args:
        runs (`Sequence[DecodingRun]`): runs in the order in which they were measured. Some may be missing.
        logit_gap (`Callable`, *optional*): [`DecodingBenchmark.logit_gap`], to examine where responses differ.

    Returns:
        `list[DecodingSummary]`: temperatures, batch sizes and methods in the order in which they were measured.
    """
    plain = {run.batch_key: run for run in runs if run.method.name == "plain"}
    first_responses: dict[tuple[float, int], Baseline] = {}
    groups: dict[tuple[float, int], dict[Method, list[DecodingRun]]] = {}
    for run in runs:
        groups.setdefault((run.temperature, run.batch_size), {}).setdefault(run.method, []).append(run)
        if run.method.name == "plain":
            for prompt, response in zip(run.prompts, run.token_ids, strict=True):
                first_responses.setdefault((run.temperature, prompt), (run, response))

    def baselines(run: DecodingRun) -> list[Baseline | None]:
        if run.method.name == "plain":
            return [first_responses[run.temperature, prompt] for prompt in run.prompts]
        same = plain.get(run.batch_key)
        return [None] * run.batch_size if same is None else [(same, response) for response in same.token_ids]

    return [
        _summarize(of_method, plain, baselines, logit_gap) for group in groups.values() for of_method in group.values()
    ]


def _summarize(
    runs: list[DecodingRun],
    plain: dict[tuple[float, int, int, int], DecodingRun],
    baselines: Callable[[DecodingRun], list[Baseline | None]],
    logit_gap: Callable[[int, list[int], list[int]], float] | None,
) -> DecodingSummary:
    """Summarize the runs of one method, and compare them with plain generation on the same batches."""
    first = runs[0]
    num_tokens, seconds = sum(run.num_tokens for run in runs), sum(run.seconds for run in runs)
    pairs = [(run, plain[run.batch_key]) for run in runs if run.batch_key in plain]
    ratios = {run.batch_key: run.tokens_per_s / other.tokens_per_s for run, other in pairs}
    committed = [count for run in runs for count in run.committed]
    acceptance = AcceptanceRecord.of(committed, block_size=1)  # the histogram ends at the largest count
    expected = [run.expected_sum for run in runs if run.expected_sum is not None]
    summary = DecodingSummary(
        temperature=first.temperature,
        batch_size=first.batch_size,
        method=first.method.name,
        block_size=first.method.block_size,
        proposal=first.method.proposal,
        label=first.method.label,
        num_batches=len(runs),
        num_responses=sum(run.batch_size for run in runs),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        speed_up=statistics.median(ratios.values()) if ratios else None,
        speed_up_total=_rate([run for run, _ in pairs]) / _rate([other for _, other in pairs]) if pairs else None,
        num_drafted_passes=acceptance.num_passes,
        acceptance_length=acceptance.acceptance_length,
        acceptance_length_error=statistics.stdev(committed) / len(committed) ** 0.5 if len(committed) > 1 else None,
        expected_acceptance_length=sum(expected) / len(committed) if expected and committed else None,
        committed_histogram=list(acceptance.histogram) if committed else [],
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
            for prompt, response, baseline in zip(run.prompts, run.token_ids, baselines(run), strict=True):
                if baseline is not None and baseline[0] is not run:
                    summary.num_compared += 1
                    if response == baseline[1]:
                        summary.num_identical += 1
                    else:
                        token = index_of_first_difference(response, baseline[1])
                        gap = None if logit_gap is None else logit_gap(prompt, response, baseline[1])
                        summary.first_differences.append({"prompt": prompt, "token": token, "logit_gap": gap})
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
    """Return the tokens per second of several runs."""
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
