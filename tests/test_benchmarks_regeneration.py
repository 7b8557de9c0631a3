"""The throughput comparison of regeneration, on scripted backends and on a tiny target."""

from __future__ import annotations

import json
import time

from typer.testing import CliRunner

from dflash_hf.benchmarks.regeneration import measure_throughput, share_of_identical
from dflash_hf.cli import app
from dflash_hf.regeneration.requests import Completion, RequestQueue, TurnRequest

SECONDS_OF_A = 0.01  # for each request


class Scripted:
    """Completes requests in their order; the completion of request n has n tokens, or one more."""

    def __init__(self, name, log, extra=0, pause_s=0.0):
        self.name, self.log, self.extra, self.pause_s = name, log, extra, pause_s

    def completions(self, feed: RequestQueue):
        while (request := feed.take()) is not None:
            self.log.append(self.name)
            time.sleep(self.pause_s)
            number = int(request.conversation_id)
            yield request, Completion({}, "stop", [], [7] * (number + (self.extra if number > 2 else 0)))


def test_backends_take_turns_on_the_same_requests_and_tokens_are_counted():
    log: list[str] = []
    requests = [TurnRequest(str(number), []) for number in range(1, 5)]
    backends = {"a": Scripted("a", log, pause_s=SECONDS_OF_A), "b": Scripted("b", log, extra=1)}
    started = time.perf_counter()
    measured = measure_throughput(backends, requests)
    elapsed_s = time.perf_counter() - started
    assert log == ["a", "b"] * 4
    assert measured["a"].num_tokens == 10
    assert measured["b"].num_tokens == 12
    assert share_of_identical(measured["a"], measured["b"]) == 0.5
    assert 4 * SECONDS_OF_A < measured["a"].seconds < elapsed_s - measured["b"].seconds


def test_the_command_measures_both_and_their_fp32_completions_are_the_same(saved_target, tmp_path):
    folder, prompts, out = saved_target(), tmp_path / "prompts.jsonl", tmp_path / "numbers.json"
    prompts.write_text("".join(json.dumps({"prompt": "why " * (n + 1)}) + "\n" for n in range(9)))
    command = ["bench", "regenerate", "--target", folder, "--prompts", str(prompts), "--limit", "7"]
    command += ["--batch-size", "3", "--max-new-tokens", "8", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    record = json.loads(out.read_text())
    assert record["prompts"] == 7
    assert record["identical_share"] == 1.0
    assert record["continuous batching"]["tokens"] == record["static batches"]["tokens"] <= 7 * 8
    assert record["ratio"] == record["continuous batching"]["tokens_per_s"] / record["static batches"]["tokens_per_s"]
