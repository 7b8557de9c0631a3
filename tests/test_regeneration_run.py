from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path

import datasets
import pytest

from dflash_hf.data.labels import tokenize_row
from dflash_hf.files import JOURNAL
from dflash_hf.regeneration.requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from dflash_hf.regeneration.run import RegenerationSettings, are_completions_of, regenerate_rows
from dflash_hf.regeneration.shards import RowShards

SETTINGS = RegenerationSettings("me/mine", "abc123", SamplingParameters(max_new_tokens=9))
ASSISTANT, END = 300, 301


def ids_of(messages: list[dict[str, str]]) -> list[int]:
    """A chat template in numbers: role, letters, end."""
    roles = {"user": 299, "system": 298, "assistant": ASSISTANT}
    return [token for m in messages for token in (roles[m["role"]], *m["content"].encode(), END)]


class Echo:
    """Repeats the prompt in capitals, newest request first. It can fail, truncate, and strip `~` from history."""

    def __init__(self, num_completions: int | None = None, with_ids: bool = True) -> None:
        self.requests: list[TurnRequest] = []
        self.num_completions, self.with_ids = num_completions, with_ids
        self.is_closed = False

    def completions(self, queue: RequestQueue) -> Generator[tuple[TurnRequest, Completion | Failure]]:
        try:
            waiting: list[TurnRequest] = []
            while True:
                while len(waiting) < 3 and (request := queue.take()) is not None:
                    waiting.append(request)
                if not waiting:
                    return
                if self.num_completions is not None and len(self.requests) >= self.num_completions:
                    raise KeyboardInterrupt
                request = waiting.pop()
                self.requests.append(request)
                yield request, self.complete(request)
        finally:
            self.is_closed = True

    def complete(self, request: TurnRequest) -> Completion | Failure:
        words = request.messages[-1]["content"]
        if words == "fail":
            return Failure("too long")
        text = words.upper()
        history = [{**m, "content": m["content"].replace("~", "")} for m in request.messages]
        prompt_ids = [*ids_of(history), ASSISTANT]
        message = {"role": "assistant", "content": text}
        if not self.with_ids:
            return Completion(message, "stop", num_tokens=len(text) + 1)
        is_truncated = words == "cut"
        return Completion(
            message,
            "length" if is_truncated else "stop",
            prompt_ids,
            [*text.encode(), *([] if is_truncated else [END])],
        )


def run(folder: Path, prompts: list[dict], backend: Echo, settings: RegenerationSettings = SETTINGS, **arguments):
    with RowShards(folder, asdict(settings)) as shards:
        *_, progress = regenerate_rows(prompts, backend, shards, settings, **arguments)
    return progress


def rows_of(folder: Path) -> dict[str, dict]:
    rows = datasets.load_dataset(str(folder), split="train")
    return {row["messages"][0]["content"]: row for row in rows}


def said(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_every_prompt_is_answered_once_turn_by_turn(tmp_path):
    backend = Echo()
    progress = run(tmp_path, [{"prompt": "a"}, {"turns": ["b", "c", "d"]}, {"prompt": "e"}, {"text": "a"}], backend)
    rows = rows_of(tmp_path)
    assert {name: said(row) for name, row in rows.items()} == {
        "a": ["a", "A"],
        "b": ["b", "B", "c", "C", "d", "D"],
        "e": ["e", "E"],
    }
    assert (progress.num_completed, progress.num_duplicates, progress.num_failed, progress.num_tokens) == (3, 1, 0, 10)
    assert sorted((request.turn, request.messages[-1]["content"]) for request in backend.requests) == [
        (0, "a"), (0, "b"), (0, "e"), (1, "c"), (2, "d"),
    ]  # fmt: skip
    assert len({request.seed(0) for request in backend.requests}) == 5


def test_a_row_tells_what_was_asked_of_whom_and_how(tmp_path):
    settings = RegenerationSettings(
        "me/mine", "abc123", SamplingParameters(9, 0.7, seed=3), "Be brief.", {"style": "x"}
    )
    run(tmp_path, [{"prompt": "a"}], Echo(), settings)
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    assert said(row) == ["Be brief.", "a", "A"]
    assert (row["target"], row["target_revision"], row["finish_reason"]) == ("me/mine", "abc123", "stop")
    assert row["sampling"] == {"max_new_tokens": 9, "temperature": 0.7, "top_p": None, "top_k": None, "seed": 3}
    assert row["chat_template_kwargs"] == {"style": "x"}


def test_a_row_holds_the_ids_that_the_target_read_and_wrote(tmp_path):
    run(tmp_path, [{"turns": ["a", "bc"]}], Echo())
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    user, end = 299, END
    letters = {name: ord(name) for name in "aAbBcC"}
    assert row["input_ids"] == [
        user, letters["a"], end, ASSISTANT, letters["A"], end,
        user, letters["b"], letters["c"], end, ASSISTANT, letters["B"], letters["C"], end,
    ]  # fmt: skip
    assert row["loss_mask"] == [False] * 4 + [True] * 2 + [False] * 5 + [True] * 3
    assert tokenize_row(row, None, max_length=99) == (row["input_ids"], row["loss_mask"])


def test_an_earlier_answer_that_the_template_shows_otherwise_later_carries_no_loss(tmp_path):
    run(tmp_path, [{"turns": ["a~", "b", "c"]}], Echo())
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    # The prompt of the first answer had no ~ (it is history there, too), its answer had: A~ is read as A later on,
    # and what was written after that stands after other tokens.
    written = [token for token, keep in zip(row["input_ids"], row["loss_mask"], strict=True) if keep]
    assert written == [ord("B"), END, ord("C"), END]


def test_a_server_that_tells_no_ids_gives_rows_of_messages(tmp_path, tokenizer):
    progress = run(tmp_path, [{"prompt": "ab"}], Echo(with_ids=False))
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    assert row["input_ids"] is None
    assert row["loss_mask"] is None
    assert progress.num_tokens == 3
    ids, mask = tokenize_row(row, tokenizer, max_length=99)
    assert tokenizer.decode([token for token, keep in zip(ids, mask, strict=True) if keep]) == "AB<|end|>"


def test_a_conversation_ends_at_an_answer_that_was_cut(tmp_path):
    run(tmp_path, [{"turns": ["cut", "b"]}], Echo())
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    assert said(row) == ["cut", "CUT"]
    assert row["finish_reason"] == "length"


def test_what_fails_is_told_and_tried_again_by_the_next_run(tmp_path):
    prompts = [{"prompt": "fail"}, {"turns": ["a", "fail"]}, {"prompt": None}, {"prompt": "b"}]
    progress = run(tmp_path, prompts, Echo())
    assert (progress.num_completed, progress.num_failed, progress.num_seen) == (1, 3, 4)
    failures = [json.loads(line) for line in (tmp_path / "failed.jsonl").read_text().splitlines()]
    assert sorted((line.get("turn"), line["reason"].split(":")[0]) for line in failures if "turn" in line) == [
        (0, "too long"), (1, "too long"),
    ]  # fmt: skip
    assert [(line["prompt_index"], line["reason"].split(":")[0]) for line in failures if "prompt_index" in line] == [
        (2, "The prompt cannot be read"),
    ]  # fmt: skip
    backend = Echo()
    progress = run(tmp_path, prompts[:2], backend)
    assert [request.messages[-1]["content"] for request in backend.requests].count("fail") == 2
    assert list(rows_of(tmp_path)) == ["b"]
    assert progress.num_failed == 2


@pytest.mark.parametrize(
    ("message", "stored"),
    [
        ({"content": "a\ud83d"}, {"content": "a\ufffd"}),
        ({"content": "\ud83d\ude00"}, {"content": "\U0001f600"}),
        ({"content": "a\0\r\u2028\x85b"}, {"content": "a\0\r\u2028\x85b"}),
        ({"content": "a", "reasoning_content": "\udc00"}, {"reasoning_content": "\ufffd"}),
        (
            {"content": "", "tool_calls": [{"function": {"name": "\ud83d", "arguments": {"\udc00": [float("nan")]}}}]},
            {"tool_calls": [{"function": {"name": "\ufffd", "arguments": {"\ufffd": [None]}}}]},
        ),
    ],
)
@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_half_a_surrogate_pair_in_a_completion_does_not_stop_the_run(tmp_path, message, stored, file_format):
    class Broken(Echo):
        def complete(self, request: TurnRequest) -> Completion | Failure:
            if request.messages[-1]["content"] != "broken":
                return super().complete(request)
            return Completion({"role": "assistant", **message}, "stop", [1], [2])

    backend = Broken()
    for _ in range(2):  # the second run goes on in the folder
        with RowShards(tmp_path, asdict(SETTINGS), file_format=file_format) as shards:
            prompts = [{"prompt": "a"}, {"turns": ["broken", "and then"]}, {"prompt": "b"}]
            *_, progress = regenerate_rows(prompts, backend, shards, SETTINGS)
    assert (progress.num_existing, progress.num_failed) == (3, 0)
    assert all(_is_encodable(request.messages) for request in backend.requests)  # the next turn was asked mended
    row = rows_of(tmp_path)["broken"]
    assert {name: row["messages"][1][name] for name in stored} == stored


def _is_encodable(messages: list[dict]) -> bool:
    return bool(json.dumps(messages, ensure_ascii=False).encode())


def _nested(depth: int) -> list:
    return [_nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Failure("it said \ud83d"), "it said \ufffd"),
        (Completion({"role": "assistant", "content": "x", "tool_calls": _nested(900)}, "stop"), "nested too deeply"),
        (Completion({"role": "assistant", "content": "x"}, "stop", [2**70], [1]), "does not fit the columns"),
        (Completion({"role": "assistant", "content": "x", "tool_calls": {1: {2}}}, "stop"), "not JSON serializable"),
    ],
)
def test_a_completion_that_cannot_be_stored_fails_alone(tmp_path, outcome, reason):
    class Broken(Echo):
        def complete(self, request: TurnRequest) -> Completion | Failure:
            return outcome if request.messages[-1]["content"] == "broken" else super().complete(request)

    for _ in range(2):
        progress = run(tmp_path, [{"prompt": "a"}, {"prompt": "broken"}, {"prompt": "b"}], Broken())
    assert (progress.num_existing, progress.num_failed) == (2, 1)
    assert set(rows_of(tmp_path)) == {"a", "b"}
    (line,) = map(json.loads, (tmp_path / "failed.jsonl").read_text().splitlines())
    assert line["messages"] == [{"role": "user", "content": "broken"}]
    assert reason in line["reason"]


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": ""},
        {"prompt": None},
        {"messages": _nested(900)},
        {"turns": "[" * 10**5},
        {"prompt": "a", "tools": "[" * 10**5},
        {"messages": [{"role": "user", "content": float("nan")}]},
    ],
)
def test_a_prompt_that_cannot_be_read_fails_alone(tmp_path, prompt):
    progress = run(tmp_path, [prompt, {"prompt": "ok"}], Echo())
    assert (progress.num_completed, progress.num_failed) == (1, 1)
    assert "The prompt cannot be read" in (tmp_path / "failed.jsonl").read_text()


def test_half_a_surrogate_pair_in_a_prompt_is_mended_wherever_it_is(tmp_path):
    backend = Echo()
    settings = RegenerationSettings("me/\udcff", None, SamplingParameters(9), "Be \ud83d", {"style": "\ud83d"})
    progress = run(
        tmp_path, [{"prompt": "a\ud83d", "tools": [{"name": "\ud83d"}], "note": "\ud83d"}], backend, settings
    )
    assert (progress.num_completed, progress.num_failed) == (1, 0)
    (request,) = backend.requests
    assert request.messages == [{"role": "system", "content": "Be \ufffd"}, {"role": "user", "content": "a\ufffd"}]
    assert request.tools == [{"name": "\ufffd"}]
    (row,) = datasets.load_dataset(str(tmp_path), split="train")
    assert (said(row), row["chat_template_kwargs"]) == (["Be \ufffd", "a\ufffd", "A\ufffd"], {"style": "\ufffd"})


def test_a_journal_with_a_row_that_no_shard_can_hold_is_continued(tmp_path, caplog):
    with RowShards(tmp_path, asdict(SETTINGS)):
        pass
    bad = {"conversation_id": "x", "messages": [], "input_ids": [2**70], "loss_mask": [True]}
    (tmp_path / JOURNAL).write_text(json.dumps(bad) + "\n")
    progress = run(tmp_path, [{"prompt": "a"}], Echo())
    assert (progress.num_completed, set(rows_of(tmp_path))) == (1, {"a"})
    assert "is left out, and its prompt is asked again" in caplog.text


@pytest.mark.parametrize("num_completions", [0, 1, 4, 6])
def test_an_interrupted_run_goes_on_without_repeating_or_losing_a_row(tmp_path, num_completions):
    prompts = [{"turns": ["a", "b"]}, {"prompt": "c"}, {"turns": ["d", "e", "f"]}, {"prompt": "g"}]
    backend = Echo(num_completions)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, prompts, backend)
    assert backend.is_closed
    progress = run(tmp_path, prompts, Echo())
    assert progress.num_existing + progress.num_completed == 4
    rows = datasets.load_dataset(str(tmp_path), split="train")
    assert sorted("".join(said(row)) for row in rows) == ["aAbB", "cC", "dDeEfF", "gG"]


def test_closing_the_iterator_closes_the_backend_and_keeps_the_rows(tmp_path):
    backend = Echo()
    with RowShards(tmp_path, asdict(SETTINGS)) as shards:
        steps = regenerate_rows([{"prompt": name} for name in "abcdef"], backend, shards, SETTINGS)
        next(steps)
        steps.close()
    assert backend.is_closed
    assert len(rows_of(tmp_path)) == 1


def test_prompts_are_read_only_as_far_as_the_backend_asks(tmp_path):
    read = []

    def prompts():
        for number in range(1000):
            read.append(number)
            yield {"prompt": f"{number}"}

    with RowShards(tmp_path, asdict(SETTINGS)) as shards:
        steps = regenerate_rows(prompts(), Echo(), shards, SETTINGS)
        next(steps)
        steps.close()
    assert len(read) < 10


def test_thinking_is_asked_of_the_given_share_whatever_the_order():
    settings = RegenerationSettings("t", thinking_share=0.3)
    thinks = {str(name): settings.template_kwargs(str(name))["enable_thinking"] for name in range(2000)}
    assert 0.26 < sum(thinks.values()) / 2000 < 0.34
    more = RegenerationSettings("t", thinking_share=0.6)
    assert all(more.template_kwargs(name)["enable_thinking"] for name, does in thinks.items() if does)
    for share, expected in ((0.0, {False}), (1.0, {True})):
        settings = RegenerationSettings("t", thinking_share=share)
        assert {settings.template_kwargs(name)["enable_thinking"] for name in thinks} == expected
    assert RegenerationSettings("t", chat_template_kwargs={"a": 1}).template_kwargs("x") == {"a": 1}


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"thinking_share=1.5 must be at least 0 and at most 1"):
        RegenerationSettings("t", thinking_share=1.5)
    with pytest.raises(ValueError, match="sets enable_thinking, but so do chat_template_kwargs"):
        RegenerationSettings("t", thinking_share=0.5, chat_template_kwargs={"enable_thinking": True})
    for name, value in (("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_k", -1)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            SamplingParameters(**{name: value})


def test_rows_tell_whether_the_target_generated_them(tokenizer, caplog):
    text = "<|user|>a<|end|><|assistant|>Yes.<|end|>"
    row = {
        "conversation_id": "x",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes."}],
        "input_ids": tokenizer(text)["input_ids"],
        "loss_mask": [],
        "target": "me/mine",
        "target_revision": None,
    }
    without_ids = {**row, "input_ids": None}
    rows = datasets.Dataset.from_list([without_ids, row])
    assert are_completions_of(rows, "me/mine", tokenizer) is True
    of_folder = rows.remove_columns("target").add_column("target", ["mine", "mine"])
    assert are_completions_of(of_folder, "/home/me/mine", tokenizer) is True
    assert not caplog.records
    assert are_completions_of(rows, "me/other", tokenizer) is False
    assert "generated by me/mine, but the draft is for me/other" in caplog.text
    assert are_completions_of(rows.remove_columns("loss_mask"), "me/mine", tokenizer) is None
    shifted = datasets.Dataset.from_list([{**row, "input_ids": [token + 1 for token in row["input_ids"]]}])
    with pytest.raises(ValueError, match="are another text"):
        are_completions_of(shifted, "me/mine", tokenizer)
