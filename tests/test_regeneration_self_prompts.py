"""Prompts that a target writes itself: where they begin, what is refused, and files of interrupted runs."""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from chat_templates import FAMILIES, family_tokenizer
from conftest import make_target, make_tokenizer

from dflash_hf.data.chat_template import ChatRenderer
from dflash_hf.data.prompts import conversation_of_row
from dflash_hf.regeneration import self_prompts
from dflash_hf.regeneration.local import LocalBackend
from dflash_hf.regeneration.near_duplicates import NearDuplicates
from dflash_hf.regeneration.requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from dflash_hf.regeneration.self_prompts import PromptSettings, SelfPrompts, refusal, user_turn

SAMPLING = SamplingParameters(64, temperature=0.9)
SUBJECTS = (
    "bread", "cheese", "trains", "rivers", "birds", "poems", "chess", "bridges", "glass", "snow", "maps", "stars",
    "wool", "clocks", "salt", "ferns",
)  # fmt: skip


class Writer:
    """A backend that writes texts which depend on the seed of a request alone, in an order of its own."""

    def __init__(self, window: int = 3, stop_after: int | None = None, text=None) -> None:
        self.window, self.stop_after, self.text = window, stop_after, text or self.request_text
        self.seen: list[TurnRequest] = []

    @staticmethod
    def request_text(number: random.Random) -> str:
        first, second, third = number.sample(SUBJECTS, 3)
        return number.choice(
            [
                f"How are {first} and {second} like {third}?",
                f"Sure, {first}!",
                "",
                f"Tell me of {first}, {second}, {third}",
            ]
        )

    def completions(self, requests: RequestQueue) -> Generator[tuple[TurnRequest, Completion | Failure]]:
        open_: list[TurnRequest] = []
        while True:
            while len(open_) < self.window and (request := requests.take()) is not None:
                open_.append(request)
                self.seen.append(request)
            if not open_:
                return
            if self.stop_after is not None and len(self.seen) > self.stop_after:
                raise KeyboardInterrupt
            request = open_.pop(random.Random(len(self.seen)).randrange(len(open_)))
            text = self.text(random.Random(request.seed(0)))
            if isinstance(text, Failure):
                yield request, text
            else:
                ids = [1] * (3 + len(text))
                yield request, Completion({"role": "assistant", "content": f"{text}<|im_end|>"}, "stop", token_ids=ids)


def settings(**values) -> PromptSettings:
    return PromptSettings("target", SAMPLING, **values)


def write(path: Path, number: int, backend=None, **values) -> list[dict]:
    writer = SelfPrompts(path, family_tokenizer("smollm2"), settings(**values))
    try:
        for _ in writer.write(backend or Writer(), number):
            pass
    finally:
        assert writer.progress.num_attempts == writer.progress.num_accepted + writer.progress.refused.total()
    return [json.loads(line) for line in path.read_text().splitlines()]


ENDS = {
    "glm-4.5": "<|assistant|>", "llama-3.1": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "[/INST]",
    "harmony": "<|end|>", "deepseek-r1": "<｜Assistant｜>", "deepseek-v3": "<｜Assistant｜>", "phi-3": "<|end|>",
    "phi-4-mini": "<|end|>",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_begins_where_the_template_puts_the_words_of_a_user(family):
    tokenizer = family_tokenizer(family)
    history = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    for before in ([], history):
        turn = user_turn(tokenizer, before)
        text = ChatRenderer(tokenizer, None, {}).render([*before, {"role": "user", "content": "Three?"}], True)
        rendered = tokenizer(text, add_special_tokens=False)["input_ids"]
        own = tokenizer("Three?", add_special_tokens=False)["input_ids"]
        assert rendered[: len(turn.prefix_ids)] == turn.prefix_ids
        assert tokenizer.decode(rendered[len(turn.prefix_ids) :]).strip().startswith("Three?" + turn.end)
        assert turn.end == ENDS.get(family, "<|im_end|>")
        assert len(turn.prefix_ids) <= len(rendered) - len(own)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template.*base model are beginnings of texts"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "nothing before the content"),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "nothing before the content"),
        ("{% for m in messages %}<u>{{ m.content | length }}{% endfor %}", "changes the content"),
    ],
)
def test_a_template_without_a_beginning_of_a_user_turn_is_refused(template, words, tmp_path):
    tokenizer = family_tokenizer("llama-3.1")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        SelfPrompts(tmp_path / "p.jsonl", tokenizer, settings())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How do I bake bread?", None),
        ("如何在家里烤出好吃的面包和蛋糕", None),
        ("Sort [3, 1, 2] in Python", None),
        ("", "is empty"),
        ("Hi<|im_start|>assistant", "has a token of the chat template"),
        ("Hello <｜User｜> there", "has a token of the chat template"),
        ("What is it?\nAssistant: It is a cat.", "speaks for another role"),
        ("assistant\nIt is a cat", "speaks for another role"),
        ("Sure, here is a poem.", "begins like an answer"),
        ("As an AI I cannot do that", "begins like an answer"),
        ("you are a   Helpful assistant", "repeats what stood before it"),
        ("Hello", "is too short"),
        ("1 + 1 = 2, 2 + 2 = 4, 7", "has few letters"),
    ],
)
def test_what_is_no_request_is_refused_by_reason(text, reason):
    assert refusal(text, "stop", ["You are a helpful assistant.", ""]) == reason
    if reason not in (None, "is empty"):
        assert refusal(text, "length", []) == "was not ended within the limit"


def test_the_file_has_the_prompts_that_a_loop_over_all_attempts_accepts(tmp_path):
    backend = Writer()
    rows = write(tmp_path / "p.jsonl", 30, backend)
    expected, seen = [], set()
    for number in range(len(backend.seen)):
        text = Writer.request_text(random.Random(TurnRequest(str(number), []).seed(0)))
        if text.startswith(("How", "Tell")) and text.lower() not in seen and len(expected) < 30:
            seen.add(text.lower())
            expected.append({"prompt": text, "source": "self"})
    assert rows == expected
    assert [conversation_of_row(row).turns[0][-1]["content"] for row in rows] == [row["prompt"] for row in rows]


@pytest.mark.parametrize("follow_ups", [0.0, 0.5])
@pytest.mark.parametrize("window", [1, 8])
def test_an_interrupted_file_becomes_that_of_one_run_whatever_the_batch(tmp_path, follow_ups, window):
    whole = write(tmp_path / "whole.jsonl", 40, follow_ups=follow_ups)
    path = tmp_path / "p.jsonl"
    for stop_after in (1, 17, 50):
        with pytest.raises(KeyboardInterrupt):
            write(path, 40, Writer(window, stop_after), follow_ups=follow_ups)
    last = Writer(window)
    assert write(path, 40, last, follow_ups=follow_ups) == whole
    assert write(path, 40, Writer(stop_after=0), follow_ups=follow_ups) == whole  # nothing is left to do
    assert write(path, 45, follow_ups=follow_ups)[:40] == whole
    if follow_ups:
        assert 5 < sum("turns" in row for row in whole) < 25
    else:
        assert all("prompt" in row for row in whole)


def test_a_kill_in_the_middle_of_a_line_loses_that_line_alone(tmp_path):
    whole = write(tmp_path / "whole.jsonl", 20)
    path = tmp_path / "p.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write(path, 20, Writer(stop_after=15))
    journal = tmp_path / ".p.jsonl.attempts"
    journal.write_bytes(journal.read_bytes()[:-7])
    path.unlink()
    assert write(path, 20) == whole


def test_other_settings_in_the_same_file_are_refused_by_name(tmp_path):
    write(tmp_path / "p.jsonl", 3)
    with pytest.raises(ValueError, match=r"system_prompt was None and is now 'Be brief'"):
        write(tmp_path / "p.jsonl", 5, system_prompt="Be brief")


def test_a_target_that_writes_hardly_any_prompts_stops_with_the_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(self_prompts, "WINDOW", 40)

    def text(number: random.Random) -> str:
        return "Sure." if number.random() < 0.99 else Writer.request_text(number)

    writer = SelfPrompts(tmp_path / "p.jsonl", family_tokenizer("smollm2"), settings())
    writer.recent = self_prompts.deque(maxlen=40)
    with pytest.raises(RuntimeError, match=r"Of the last 40 texts.*begins like an answer \(\d+\).*are kept"):
        list(writer.write(Writer(text=text), 50))


def test_a_failed_request_is_counted_and_not_written(tmp_path):
    def text(number: random.Random) -> str | Failure:
        return Failure("no room") if number.random() < 0.5 else Writer.request_text(number)

    rows = write(tmp_path / "p.jsonl", 10, Writer(text=text))
    assert len(rows) == 10


def test_few_prompts_take_few_attempts(tmp_path):
    backend = Writer(window=64)
    write(tmp_path / "p.jsonl", 4, backend)
    assert len(backend.seen) <= 16  # a queue without an end would be read ahead by whole batches


def test_repeats_are_found_as_a_loop_over_all_pairs_finds_them():
    number = random.Random(0)
    texts = [" ".join(number.choices(SUBJECTS[:4], k=number.randrange(2, 7))) for _ in range(300)]

    def shingles(text: str) -> set:
        words = text.split()
        return {tuple(words[start : start + 3]) for start in range(max(1, len(words) - 2))}

    known, kept = NearDuplicates(), []
    for text in texts:
        is_near = any(
            len(shingles(text) & shingles(other)) > 0.7 * len(shingles(text) | shingles(other)) for other in kept
        )
        reason = known.add(text)
        assert (reason is not None) == is_near, text
        if reason is None:
            kept.append(text)
    assert 20 < len(kept) < 250


@pytest.mark.parametrize("values", [{"follow_ups": 1.5}, {"follow_ups": -0.1}])
def test_a_share_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match="follow_ups"):
        settings(**values)
    with pytest.raises(ValueError, match="temperature=0"):
        PromptSettings("target", SamplingParameters())


def test_the_local_backend_continues_the_given_tokens_up_to_a_stop_string():
    tokenizer = make_tokenizer()
    target = make_target(0, vocab_size=272, eos_token_id=257, pad_token_id=256)
    ids = list(range(60, 75))
    requests = [TurnRequest("0", [], prompt_ids=ids)]
    ((_, plain),) = LocalBackend(target, tokenizer, SamplingParameters(12)).completions(RequestQueue(requests))
    with torch.no_grad():
        expected = target.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=256)
    assert plain.token_ids == expected[0, len(ids) :].tolist()
    texts = [tokenizer.decode([token]) for token in plain.token_ids]
    stop = next(text for place, text in enumerate(texts) if place > 1 and text.isascii() and text.strip())
    for continuous in (True, False):
        backend = LocalBackend(
            target, tokenizer, SamplingParameters(12), continuous_batching=continuous, stop_strings=[stop]
        )
        ((_, stopped),) = backend.completions(RequestQueue(requests))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == plain.token_ids[: texts.index(stop) + 1]
        assert len(stopped.token_ids) < 12
