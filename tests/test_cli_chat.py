"""`dflash-hf chat`: what is said, which tokens are shown as the draft's, what is measured, and how it looks."""

from __future__ import annotations

import importlib
import io
import itertools
import os
import pty
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import greedy, make_draft, make_target
from decoding_pairs import make_guessing_draft
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dflash_hf.blocks.metrics import AcceptanceRecord
from dflash_hf.cli import chat_session, main
from dflash_hf.cli.chat import ResponseDisplay, coloured
from dflash_hf.cli.chat_session import ChatSession, Response, Span, Speed, TokenText
from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.evaluation.timed_generation import generate_timed

BYTES = {"vocab_size": 272, "pad_token_id": 256, "eos_token_id": 257}


@pytest.fixture
def pair():
    target = make_target(**BYTES)
    return target, make_draft(target, mask_token_id=270)


@pytest.fixture
def make_session(pair, tokenizer) -> Callable[..., ChatSession]:
    def make(**kwargs) -> ChatSession:
        return ChatSession(*pair, tokenizer, **{"max_new_tokens": 8, "do_sample": False, **kwargs})

    return make


def ignore(answer: Response, spans: list[Span]) -> None:
    """Show nothing."""


# ---- text of tokens ----


def split_in_passes(token_ids: list[int], seed: int) -> list[tuple[list[int], int]]:
    """Passes of one to five tokens, of which some, from the first on, were drafted."""
    generator, passes = random.Random(seed), []
    while token_ids:
        size = generator.randint(1, 5)
        passes.append((token_ids[:size], generator.randint(0, min(size, len(token_ids)))))
        token_ids = token_ids[size:]
    return passes


def test_a_character_is_the_drafts_if_all_its_bytes_were_and_comes_when_it_is_whole(tokenizer):
    text = "aé€😀\u200d中\n\n à "
    token_ids = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text.encode())  # a token a byte, in the order of the bytes
    for seed in range(30):
        streamed, num_bytes, shown, drafted = TokenText(tokenizer), 0, [], []
        for ids, num_drafted in split_in_passes(token_ids, seed):
            spans = streamed.put(ids, num_drafted)
            assert all(one.is_drafted != other.is_drafted for one, other in itertools.pairwise(spans))
            shown += [(character, span.is_drafted) for span in spans for character in span.text]
            drafted += [index < num_drafted for index in range(len(ids))]
            num_bytes += len(ids)
            whole = text.encode()[:num_bytes].decode(errors="ignore")
            assert streamed.text == whole
        expected, first = [], 0
        for character in text:
            last = first + len(character.encode())
            expected.append((character, all(drafted[first:last])))
            first = last
        assert shown == expected
        assert streamed.end() == []


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As of sentencepiece: a piece carries the space before it, and rare characters are spelt in bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁c", "中"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def check_pieces(tokenizer: PreTrainedTokenizerFast, units: list[list[int]]) -> None:
    """Random sequences of units, in random passes, give the text that the tokenizer makes of all at once."""
    for seed in range(60):
        token_ids = list(itertools.chain(*random.Random(seed).choices(units, k=1 + seed % 12)))
        streamed, given = TokenText(tokenizer), ""
        for ids, num_drafted in split_in_passes(token_ids, seed):
            given += "".join(span.text for span in streamed.put(ids, num_drafted))
        given += "".join(span.text for span in streamed.end())
        assert given == streamed.text == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_pieces_make_the_text_of_the_whole_with_broken_characters_and_special_tokens(tokenizer):
    characters = [tokenizer(character)["input_ids"] for character in ("😀", "é", "€", "x", "\ufffd")]
    check_pieces(tokenizer, [*characters, *(ids[:-1] for ids in characters if len(ids) > 1), [256], [257]])


def test_pieces_make_the_text_of_the_whole_when_a_token_carries_the_space_before_it():
    bytes_of = [[2 + byte for byte in character.encode()] for character in ("😀", "é", "€", "x")]
    check_pieces(byte_fallback_tokenizer(), [*bytes_of, [1], [258], [259], [260], [261], [262]])


def test_a_step_decodes_a_few_tokens_however_long_the_text_is(tokenizer, monkeypatch):
    decoded = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: decoded.append(len(ids)) or "".join(map(chr, ids)))
    streamed = TokenText(tokenizer)
    streamed.put([65] * 400)
    assert streamed.text == "A" * 400
    assert max(decoded) == 2


# ---- conversation ----


def prompt_of(tokenizer, messages: list[tuple[str, str]]) -> torch.Tensor:
    text = "".join(f"<|{role}|>{content}<|end|>" for role, content in messages) + "<|assistant|>"
    return torch.tensor([tokenizer(text)["input_ids"]])


@pytest.mark.parametrize("is_plain", [False, True])
def test_each_turn_answers_the_whole_conversation_as_plain_generation_would(make_session, tokenizer, is_plain):
    session = make_session(system="Be brief.", is_plain=is_plain)
    said = [("system", "Be brief.")]
    for question in ("1+1?", "and é?", "😀"):
        said.append(("user", question))
        shown: list[Span] = []
        answer = session.answer(question, lambda _, spans, shown=shown: shown.extend(spans))
        assert answer.token_ids == greedy(session.target, prompt_of(tokenizer, said), 8)
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert "".join(span.text for span in shown) == text
        said.append(("assistant", text))
        assert [(message["role"], message["content"]) for message in session.messages] == said
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_the_drafts_template_arguments_reach_every_turn(make_session, tokenizer):
    session = make_session()
    tokenizer.chat_template = "{{ tone }}" + tokenizer.chat_template
    session.draft.config.chat_template_kwargs = {"tone": "calm:"}
    session.answer("1+1?", ignore)
    text = (
        f"calm:<|user|>1+1?<|end|><|assistant|>{session.messages[1]['content']}<|end|><|user|>2?<|end|><|assistant|>"
    )
    expected = greedy(session.target, torch.tensor([tokenizer(text)["input_ids"]]), 8)
    assert session.answer("2?", ignore).token_ids == expected


def test_without_a_template_answers_continue_their_lines(make_session, tokenizer):
    tokenizer.chat_template = None
    session = make_session(system="A tale.")
    session.answer("Once", ignore)
    text = f"A tale.\nOnce{session.messages[2]['content']}\nThen"
    expected = greedy(session.target, torch.tensor([tokenizer(text)["input_ids"]]), 8)
    assert session.answer("Then", ignore).token_ids == expected
    assert (
        chat_inputs(tokenizer, "Once", torch.device("cpu"))["input_ids"][0].tolist() == tokenizer("Once")["input_ids"]
    )


def test_a_template_that_refuses_the_roles_is_an_error_of_one_line_and_nothing_is_kept(make_session, tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role.') }}{% endif %}"
    )
    session = make_session(system="Be brief.")
    with pytest.raises(
        ValueError, match=r"roles system, user: No system role\. Use .* many templates support no system"
    ):
        session.answer("1+1?", ignore)
    assert len(session.messages) == 1


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_stopped_answer_stays_as_far_as_it_came(make_session, tokenizer, is_plain):
    session = make_session(is_plain=is_plain, max_new_tokens=30)
    passes: list[int] = []
    answer = session.answer("1+1?", lambda *_: passes.append(1), is_stopped=lambda: len(passes) >= 2)
    assert answer.is_stopped
    assert 2 <= len(answer.token_ids) < 10
    whole = greedy(session.target, prompt_of(tokenizer, [("user", "1+1?")]), 30)
    assert answer.token_ids == whole[: len(answer.token_ids)]
    partial = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    said = [("user", "1+1?"), ("assistant", partial), ("user", "more")]
    following = session.answer("more", ignore)
    assert following.token_ids == greedy(session.target, prompt_of(tokenizer, said), 30)
    assert not following.is_stopped


@pytest.mark.parametrize("num_passes", [0, 3])
def test_an_interrupted_answer_stays_as_far_as_it_came(make_session, num_passes):
    session = make_session()
    shown: list[str] = []

    def show(answer: Response, spans: list[Span]) -> None:
        shown.extend(span.text for span in spans)
        if len(answer.committed) == num_passes:
            raise KeyboardInterrupt

    if num_passes == 0:
        session.draft.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        session.target.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.answer("1+1?", show)
    if num_passes == 0:
        assert session.messages == []
    else:
        assert session.messages[1] == {"role": "assistant", "content": "".join(shown)}


def test_a_conversation_beyond_the_targets_context_is_refused_and_an_answer_ends_there(tokenizer):
    target = make_target(**BYTES, max_position_embeddings=24)
    session = ChatSession(target, make_draft(target, mask_token_id=270), tokenizer, do_sample=False)
    answer = session.answer("0123456789", ignore)  # 13 tokens with the template's
    assert len(answer.token_ids) == 11
    said = list(session.messages)
    with pytest.raises(ValueError, match=r"has 38 tokens with this message, .* fewer than 24\. .* /reset"):
        session.answer("0", ignore)
    assert session.messages == said
    session.reset()
    assert session.answer("0", ignore).token_ids


def test_the_cache_of_an_answer_goes_to_the_next_one_unless_something_came_between(make_session, monkeypatch):
    session, given = make_session(), []

    def generate(target, draft, **kwargs):
        given.append(kwargs.get("cache"))
        output = speculative_generate(target, draft, **{k: v for k, v in kwargs.items() if k != "cache"})
        output.cache = f"cache {len(given)}"
        return output

    def interrupt(answer: Response, spans: list[Span]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_session, "speculative_generate", generate)
    session.warm_up()
    session.answer("1", ignore)
    session.answer("2", ignore)
    with pytest.raises(KeyboardInterrupt):
        session.answer("3", interrupt)
    session.answer("4", ignore)
    session.reset()
    session.answer("5", ignore)
    assert given == [None, None, "cache 2", "cache 3", None, None]


def test_a_later_turn_reads_only_what_is_new(make_session, tokenizer):
    session, read = make_session(), []
    session.answer("1+1? " + "x" * 40, ignore)
    session.target.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    session.answer("2?", ignore)
    assert read[0] < prompt_of(tokenizer, [("user", "1+1? " + "x" * 40)]).shape[1] / 2


# ---- numbers ----


def test_acceptance_length_and_drafted_characters_are_those_of_the_decoding(tokenizer):
    target = make_target(vocab_size=272, pad_token_id=256)
    prompt = prompt_of(tokenizer, [("user", "1+1?")])
    whole = target.generate(prompt, max_new_tokens=60, do_sample=False, pad_token_id=256)
    draft = make_guessing_draft(target, mask_token_id=270).teach(target, whole, wrong_share=0.3)
    session = ChatSession(target, draft, tokenizer, max_new_tokens=41, do_sample=False)
    answer = session.answer("1+1?", ignore)
    assert answer.token_ids == whole[0, prompt.shape[1] :][:41].tolist()
    statistics = speculative_generate(target, draft, prompt, max_new_tokens=41, do_sample=False).statistics
    assert statistics.num_plain_passes == 0
    assert answer.committed == [1, *statistics.committed[0]]
    assert Speed.of(answer).acceptance_length == statistics.acceptance_length > 1.5
    assert f"acceptance length {statistics.acceptance_length:.2f} of 4" in session.describe_response(answer)


def test_speed_leaves_the_prompt_out(monkeypatch):
    clock = iter([10.0, 15.0, 15.5, 17.0])
    monkeypatch.setattr(chat_session.time, "perf_counter", lambda: next(clock))
    answer = Response(is_plain=False, start=10.0)
    next(clock)
    assert Speed.of(answer) == Speed()
    for token_ids, num_verified in (([1], 0), ([2, 3, 4], 3), ([5], 0)):
        answer.record(token_ids, num_verified)
    speed = Speed.of(answer)
    assert (speed.num_tokens, speed.seconds, speed.tokens_per_s) == (4, 2.0, 2.0)
    assert speed.acceptance == AcceptanceRecord((0, 0, 1), (1, 1, 1))
    assert speed.acceptance_length == 3.0  # the pass for the last token had no draft
    both = speed + Speed(6, 1.0, AcceptanceRecord.of([1], [1], block_size=2))
    assert (both.num_tokens, both.seconds, both.acceptance_length) == (10, 3.0, 2.0)
    assert Speed(6, 1.0).acceptance_length is None


def test_a_speed_up_is_shown_only_against_a_measured_speed(make_session):
    session = make_session()
    measured = Speed(30, 1.0, AcceptanceRecord.of([2] * 15, block_size=4))
    assert session.describe_speed(measured, is_plain=False) == (
        "30.0 tokens/s · acceptance length 2.00 of 4 · speed-up — (plain decoding was not measured)"
    )
    session.warm_up_speed = Speed(20, 1.0)
    assert session.describe_speed(measured, is_plain=False).endswith(
        "· 1.50× plain (20.0 tokens/s over 20 warm-up tokens)"
    )
    session.plain_speed = Speed(19, 1.9)  # too short to replace the warm-up
    assert session.plain_tokens_per_s() == (20.0, "20 warm-up tokens")
    session.plain_speed += Speed(5, 0.5)
    assert session.describe_speed(measured, is_plain=False).endswith(
        "· 3.00× plain (10.0 tokens/s over 24 tokens of plain responses)"
    )
    assert session.describe_speed(measured, is_plain=True) == "30.0 tokens/s · plain decoding"
    assert session.describe_speed(Speed(), is_plain=False).startswith(
        "— tokens/s · acceptance length — of 4 · —× plain"
    )


def test_a_disturbed_step_of_the_warm_up_does_not_count(make_session, monkeypatch):
    session = make_session()
    ticks = itertools.accumulate(50.0 if index % 10 == 0 else 0.1 for index in itertools.count())
    monkeypatch.setattr(chat_session.time, "perf_counter", lambda: next(ticks))
    session.warm_up()
    assert session.warm_up_speed.tokens_per_s == pytest.approx(10.0)


def test_the_warm_up_measures_plain_decoding_and_says_nothing(make_session):
    session = make_session(max_new_tokens=1)
    session.warm_up()
    assert session.warm_up_speed.num_tokens == chat_session.WARM_UP_TOKENS - 1
    assert session.warm_up_speed.acceptance_length is None
    assert session.messages == []
    assert session.drafted_speed == session.plain_speed == Speed()
    session.max_new_tokens = 5
    for is_plain in (True, False, False):
        session.is_plain = is_plain
        session.answer("1+1?", ignore)
    assert (session.plain_speed.num_tokens, session.drafted_speed.num_tokens) == (4, 8)


# ---- display ----


class Screen:
    """What a terminal of unlimited height shows."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, output: str) -> list[str]:
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]", output):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A"):
                self.row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                self.lines[self.row] = ""
            elif len(part) == 1:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1
            else:
                assert part[-1] in "mhl", part
        return [line.rstrip() for line in "\n".join(self.lines).rstrip().split("\n")]


@pytest.mark.parametrize("refresh_s", [0.0, 60.0])
def test_the_screen_shows_the_answer_once_however_its_pieces_come(make_session, monkeypatch, refresh_s):
    monkeypatch.setattr(importlib.import_module("dflash_hf.cli.chat"), "REFRESH_S", refresh_s)
    words = "one two\n\n  three\tfour " + "x" * 45 + " five\nsix"
    expected = Console(width=20, file=io.StringIO())
    expected.print(coloured([Span(words, True)], with_colour=True), soft_wrap=False)
    for seed in range(8):
        generator, rest = random.Random(seed), words
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=20, color_system="standard", no_color=False)
        answer = Response(is_plain=False)
        session = make_session()
        monkeypatch.setattr(session, "describe_response", lambda _: "numbers")
        with ResponseDisplay(console, session) as display:
            while rest:
                size = generator.randint(1, 7)
                answer.record([1])
                display.show(answer, [Span(rest[:size], generator.random() < 0.5)])
                rest = rest[size:]
        lines = [line.rstrip() for line in expected.file.getvalue().splitlines()]
        assert Screen().write(stream.getvalue()) == [*lines, "numbers"]


def test_a_terminal_that_cannot_move_its_cursor_gets_the_text_as_it_comes(make_session, monkeypatch):
    session, stream = make_session(), io.StringIO()
    monkeypatch.setattr(session, "describe_response", lambda _: "numbers")
    console = Console(file=stream, force_terminal=True, width=20, _environ={"TERM": "dumb"})
    with ResponseDisplay(console, session) as display:
        display.show(Response(is_plain=False), [Span("one ", False), Span("two", True)])
        assert stream.getvalue() == "one ‹two›"
        display.show(Response(is_plain=False), [Span(" and a line longer than twenty", False)])
    assert stream.getvalue() == "one ‹two› and a line longer than twenty\nnumbers\n"


def test_colours_or_marks_tell_the_drafts_tokens_and_control_characters_are_not_obeyed():
    spans = [Span("The", False), Span(" sky is", True), Span(" \x1b[2Jblue\r\n", False), Span("\n ", True)]
    text = coloured(spans, with_colour=True)
    assert text.plain == "The sky is �[2Jblue\n\n "
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("The", "magenta"), (" sky is", "green"), (" �[2Jblue\n", "magenta"), ("\n ", "green"),
    ]  # fmt: skip
    assert coloured(spans, with_colour=False).plain == "The ‹sky is› �[2Jblue\n\n "


# ---- the command ----


@pytest.fixture
def saved_pair(saved_target, tmp_path) -> list[str]:
    folder = saved_target()
    make_draft(AutoModelForCausalLM.from_pretrained(folder), mask_token_id=270).save_pretrained(tmp_path / "draft")
    return ["--target", folder, "--draft", str(tmp_path / "draft"), "--max-new-tokens", "12"]


def run_chat(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dflash-hf", "chat", *arguments])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_lines_from_a_pipe_are_answered_without_control_sequences(saved_pair, tokenizer, monkeypatch, capfd):
    lines = "1+1?\n\n/plain on\n/stats\n/nonsense\n 2?\n/reset\n1+1?\n/quit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run_chat(monkeypatch, *saved_pair) == 0
    captured = capfd.readouterr()
    target = AutoModelForCausalLM.from_pretrained(saved_pair[1]).eval()

    def answer_to(messages: list[tuple[str, str]]) -> str:
        return tokenizer.decode(greedy(target, prompt_of(tokenizer, messages), 12), skip_special_tokens=True)

    first = answer_to([("user", "1+1?")])
    second = answer_to([("user", "1+1?"), ("assistant", first), ("user", " 2?")])
    assert captured.out == f"{first}\n{second}\n{first}\n"
    assert captured.err.count("acceptance length") == 2  # of the first answer, and in /stats
    assert captured.err.count("plain decoding\n") == 4
    assert "'/nonsense' is not a valid command" in captured.err
    assert "never" not in captured.err
    assert "\x1b" not in captured.err.split("12 tokens", 1)[1]


class Terminal:
    """A pseudo-terminal in place of this process's standard streams."""

    def __init__(self) -> None:
        self.controller, self.terminal = pty.openpty()
        self.stdin, self.stdout = (os.fdopen(os.dup(self.terminal), mode, encoding="utf-8") for mode in "rw")
        self.chunks: list[bytes] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while chunk := os.read(self.controller, 65536):
            self.chunks.append(chunk)
            if chunk.endswith(b"\x00"):
                return

    def run_chat(self, monkeypatch, keys: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "stdin", self.stdin)
        monkeypatch.setattr(sys, "stdout", self.stdout)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        os.write(self.controller, keys.encode())
        return run_chat(monkeypatch, *arguments)

    def output(self) -> str:
        """Everything written so far; ends the reading."""
        self.stdout.write("\0")
        self.stdout.flush()
        self.reader.join(timeout=10)
        return b"".join(self.chunks).decode().replace("\r\n", "\n")


@pytest.fixture
def terminal(monkeypatch) -> Iterator[Terminal]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    opened = Terminal()
    yield opened
    opened.stdin.close()
    opened.stdout.close()
    os.close(opened.controller)
    os.close(opened.terminal)


def test_a_terminal_shows_colours_numbers_and_legend_and_ctrl_c_stops_the_answer_alone(
    saved_pair, terminal, monkeypatch
):
    before = signal.getsignal(signal.SIGINT)
    presses = iter([False, True] + [False] * 1000)  # in the second pass of the first answer
    original = ChatSession.answer

    def answer(self, question, show, is_stopped):
        def press_and_show(*arguments):
            if next(presses):
                signal.raise_signal(signal.SIGINT)
            show(*arguments)

        return original(self, question, press_and_show, is_stopped)

    monkeypatch.setattr(ChatSession, "answer", answer)
    keys = "1+1?\n2?\n/stats\n\n\x04"  # the last is Ctrl-D
    assert terminal.run_chat(monkeypatch, keys, *saved_pair) == 0
    output = terminal.output()
    assert "\x1b[32mdrafted and accepted\x1b[0m" in output
    assert "\x1b[35mthe target's own token\x1b[0m" in output
    lines = Screen().write(output)
    numbers = [line for line in lines if re.fullmatch(r"\d+ tokens · .*warm-up tokens\)( · stopped)?", line)]
    assert len(numbers) == 2
    assert numbers[0].endswith("stopped")
    assert int(numbers[0].split()[0]) < 12
    assert numbers[1].startswith("12 tokens · ")
    assert any("draft: " in line and "plain" in line for line in lines)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_color_gives_marks(saved_pair, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.run_chat(monkeypatch, "/quit\n", *saved_pair) == 0
    output = terminal.output()
    assert "‹drafted and accepted› the target's own token" in output
    assert "\x1b[32m" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "nowhere"], "The draft 'nowhere' cannot be loaded"),
        (["--target", "nowhere"], "The target 'nowhere' cannot be loaded"),
        (["--block-size", "five"], "--block-size 'five' must be a number of slots, or auto"),
        (["--block-size", "9"], "block_size=9 must be"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0"),
        (["--top-p", "0.5", "--top-k", "3"], "--top-p and --top-k need sampling"),
        (["--temperature", "1", "--top-p", "7"], "--top-p 7.0 must be above 0"),
        (["--temperature", "1", "--top-k", "0"], "--top-k 0 must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--dtype", "half"], "dtype='half' must be one of"),
    ],
)
def test_bad_arguments_end_in_one_line(saved_pair, monkeypatch, capfd, arguments, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1?\n"))
    assert run_chat(monkeypatch, *saved_pair, *arguments) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error:")]
    assert words in line


def test_sampled_answers_repeat_with_their_seed(saved_pair, monkeypatch, capfd):
    answers = []
    for seed in ("3", "3", "4"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("1+1?\n"))
        assert run_chat(monkeypatch, *saved_pair, "--temperature", "1.5", "--top-k", "50", "--seed", seed) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


# ---- one prompt ----


def test_both_loops_give_the_same_tokens_and_count_the_same_passes():
    target = make_target()
    prompt = torch.tensor([[4, 8, 15]])
    whole = target.generate(prompt, max_new_tokens=60, do_sample=False)
    draft = make_guessing_draft(target).teach(target, whole, wrong_share=0.4)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    for count in (1, 2, 5, 30):
        started = time.perf_counter()
        own, native = (
            generate_timed(target, inputs, draft, loop=loop, max_new_tokens=count, do_sample=False)
            for loop in ("dflash_hf", "transformers")
        )
        assert own.token_ids == native.token_ids == whole[0, 3 : 3 + count].tolist()
        assert 0 < own.seconds + native.seconds < time.perf_counter() - started
        assert own.committed == native.committed
    assert own.acceptance_length > 1.5


def test_stop_strings_of_the_target_end_an_answer(make_session, tokenizer):
    session = make_session(max_new_tokens=12)
    free = session.answer("1+1?", ignore).token_ids
    session.reset()
    stop = tokenizer.decode(free[3:5])
    session.target.generation_config.stop_strings = [stop]
    try:
        for is_plain in (False, True):
            session.is_plain = is_plain
            assert session.answer("1+1?", ignore).token_ids == free[:5]
            session.reset()
    finally:
        session.target.generation_config.stop_strings = None
