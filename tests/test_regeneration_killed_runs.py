"""The command against a real `transformers serve`, behind a proxy that spoils calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest
import torch
from conftest import make_target, make_tokenizer
from faulty_server import PASSING, FaultyServer, passing_faults
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dflash_hf.cli import main

NUM_PROMPTS, NUM_NEW = 500, 6


@contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen]:
    """A Python process, gone when the block ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("ab") as stream:
        started = subprocess.Popen([sys.executable, *arguments], stdout=stream, stderr=stream, env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def wait_for(is_so: Callable[[], bool], running: subprocess.Popen, log: Path, longest_s: float = 120) -> None:
    end_s = time.monotonic() + longest_s
    while not is_so():
        assert running.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.02)


def is_up(url: str) -> bool:
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with without_proxy.open(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory) -> str:
    """A target that ends its answers soon: any of half of its tokens is the end."""
    folder = tmp_path_factory.mktemp("served") / "target"
    tokenizer = make_tokenizer()
    model = make_target(vocab_size=272, num_hidden_layers=1)
    model.generation_config.eos_token_id = list(range(0, 272, 2))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory, chat_target: str) -> Iterator[str]:
    """Address of `transformers serve`."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    serve = "from transformers.cli.transformers import main; main()"
    arguments = ("serve", chat_target, "--host", "127.0.0.1", "--port", port, "--device", "cpu")
    with process("-c", serve, *arguments, log=log) as running:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_up(url), running, log)
        yield url


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Every fifth has two turns."""
    path = tmp_path / "prompts.jsonl"
    turns = [[f"{n} + {n}?", *(["And once more?"] if n % 5 == 0 else [])] for n in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    return path


def greedy_answer(model: LlamaForCausalLM, tokenizer, messages: list[dict[str, str]]) -> tuple[str, str]:
    """What the target says, and why it ended, by a plain call in this process."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_NEW)
    new = output[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), "length" if len(new) == NUM_NEW else "stop"


@pytest.mark.spawns
def test_a_run_killed_thrice_under_faults_ends_complete_and_without_duplicates(
    chat_target, served, prompts, tmp_path, monkeypatch, capsys
):
    out, log = tmp_path / "rows", tmp_path / "regenerate.log"
    with FaultyServer(passing_faults(0.05, seed=11), target=served, hang_s=0.5) as proxy:
        arguments = ["regenerate", "--server", proxy.url, "--target", chat_target, "--prompts", str(prompts)]
        arguments += ["--out", str(out), "--max-new-tokens", str(NUM_NEW), "--concurrency", "16"]
        arguments += ["--format", "jsonl", "--rows-per-shard", "40"]
        command = ["-c", "from dflash_hf.cli import main; main()", *arguments]

        def refused(*changes: str) -> str:
            monkeypatch.setattr(sys, "argv", ["dflash-hf", *arguments, *changes])
            with pytest.raises(SystemExit) as stopped:
                main()
            assert stopped.value.code == 1
            (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error:")]
            return line

        for number, (share, sign) in enumerate([(0.3, signal.SIGKILL), (0.6, signal.SIGKILL), (0.8, signal.SIGINT)]):
            with process(*command, log=log) as running:
                wait_for(lambda share=share: len(proxy.calls) > share * NUM_PROMPTS, running, log)
                if number == 0:
                    assert "Another run is writing into" in refused()
                running.send_signal(sign)
                assert running.wait(timeout=60) == (130 if sign == signal.SIGINT else -sign), log.read_text()
        with process(*command, log=log) as running:
            assert running.wait(timeout=120) == 0, log.read_text()

        assert "Retried requests: " in log.read_text()
        faults = [call.fault for call in proxy.calls if call.fault is not None]
        assert len(set(faults)) > len(PASSING) / 2
        num_turns, abandoned, without_ids = NUM_PROMPTS + NUM_PROMPTS // 5, 3 * 2 * 16, 4 * 16
        assert len(proxy.calls) <= num_turns + len(faults) + abandoned + without_ids

        wrong = refused("--target", "org/wrong", "--out", str(tmp_path / "wrong"))
        assert "'org/wrong'" in wrong
        assert f"that it lists, which are {chat_target}" in wrong

    assert sorted(path.name for path in out.iterdir()) == [".lock", "README.md", "data", "settings.json"]
    lines = [line for path in sorted((out / "data").iterdir()) for line in path.read_text().splitlines(keepends=True)]
    assert lines
    assert all(line.endswith("\n") for line in lines)
    rows = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert [json.loads(line)["conversation_id"] for line in lines] == rows["conversation_id"]
    said = {row["messages"][0]["content"]: row for row in rows}
    assert len(rows) == len(said) == NUM_PROMPTS
    assert set(said) == {f"{n} + {n}?" for n in range(NUM_PROMPTS)}
    assert {row["target"] for row in rows} == {"target"}

    target, tokenizer = AutoModelForCausalLM.from_pretrained(chat_target), AutoTokenizer.from_pretrained(chat_target)
    num_two_turns = 0
    for n in range(0, NUM_PROMPTS, 10):  # who was asked what: answers are not mixed up
        messages, expected = said[f"{n} + {n}?"]["messages"], []
        for turn in (f"{n} + {n}?", "And once more?"):
            expected.append({"role": "user", "content": turn})
            content, finish_reason = greedy_answer(target, tokenizer, expected)
            expected.append({"role": "assistant", "content": content})
            if finish_reason == "length":
                break
        num_two_turns += len(expected) == 4
        assert [{key: message[key] for key in ("role", "content")} for message in messages] == expected
        assert said[f"{n} + {n}?"]["finish_reason"] == finish_reason
    assert num_two_turns > 20
