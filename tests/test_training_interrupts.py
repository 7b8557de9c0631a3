from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target
from training_runs import make_trainer, rows_of, weights
from transformers import TrainerCallback

from dflash_hf import DFlashTrainer

pytestmark = pytest.mark.usefixtures("blank_pictures")


class SignalAt(TrainerCallback):
    """Raises a signal once, in a hook of a step."""

    def __init__(self, hook: str, step: int, number: int):
        self.step, self.number, self.is_done = step, number, False
        setattr(self, hook, self.fire)

    def fire(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.is_done:
            self.is_done = True
            signal.raise_signal(self.number)


def make(folder: Path, dropout: float = 0.1, **overrides) -> DFlashTrainer:
    """Eight rows, one a micro-batch, four a step: two steps an epoch."""
    target = make_target()
    draft = make_draft(target, attention_dropout=dropout)
    values = {"max_steps": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, **overrides}
    return make_trainer(target, folder, draft=draft, rows=rows_of(target, count=8, new_tokens=12), **values)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, torch.Tensor]:
    trainer = make(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return weights(trainer.draft)


def assert_resumes_to(folder: Path, expected: dict[str, torch.Tensor], step: int, **overrides) -> None:
    trainer = make(folder, **overrides)
    trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{step}"))
    assert trainer.state.global_step == 6
    assert not trainer.was_interrupted
    for name, value in weights(trainer.draft).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("hook", "at_step", "number", "kept_step"),
    [
        ("on_substep_end", 3, signal.SIGINT, 3),  # in the open window of a step
        ("on_step_begin", 1, signal.SIGTERM, 1),
        ("on_step_end", 3, signal.SIGTERM, 3),
        ("on_epoch_end", 4, signal.SIGINT, 4),  # between two epochs, whose start draws random numbers
        ("on_log", 4, signal.SIGTERM, 4),
    ],
)
def test_training_stops_between_micro_batches_and_resumes_to_the_same_parameters(
    tmp_path, uninterrupted, hook, at_step, number, kept_step
):
    """With attention dropout, so that a lost micro-batch must not have moved the random state either."""
    trainer = make(tmp_path)
    trainer.add_callback(SignalAt(hook, at_step, number))
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(expected, match=r"interrupted at step|143"):
        trainer.train()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert trainer.was_interrupted
    assert not trainer.is_in_train
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"checkpoint-{kept_step}"]
    assert_resumes_to(tmp_path, uninterrupted, kept_step)


def test_an_evaluation_is_left_and_the_best_checkpoint_rule_does_not_delete_what_was_kept(tmp_path):
    """No dropout: the evaluation that is not repeated would have drawn random numbers."""
    values = {
        "dropout": 0.0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "learning_rate": 1e-5,
        "per_device_eval_batch_size": 1,
        "eval_serving": False,
    }
    rows = rows_of(make_target(), count=3, new_tokens=12)
    whole = make(tmp_path / "whole", eval_rows=rows, **values)
    whole.train()
    trainer = make(tmp_path, eval_rows=rows, **values)
    trainer.add_callback(SignalAt("on_prediction_step", 3, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="checkpoint-3 is kept"):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2]
    assert_resumes_to(tmp_path, weights(whole.draft), 3, eval_rows=rows, **values)


def test_a_signal_before_the_first_step_keeps_nothing_and_one_after_the_last_step_keeps_it(tmp_path):
    trainer = make(tmp_path)
    trainer.add_callback(SignalAt("on_substep_end", 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"interrupted at step 0\.$"):
        trainer.train()
    assert not list((tmp_path / "out").iterdir())
    trainer = make(tmp_path, eval_rows=rows_of(make_target(), count=2), eval_on_start=True, eval_strategy="epoch")
    trainer.add_callback(SignalAt("on_prediction_step", 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"interrupted at step 0\.$"):
        trainer.train()
    trainer = make(tmp_path)
    trainer.add_callback(SignalAt("on_train_end", 6, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="checkpoint-6 is kept"):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-6" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("first", "second", "stops_at_once"),
    [
        (signal.SIGINT, signal.SIGINT, True),
        (signal.SIGTERM, signal.SIGINT, True),
        (signal.SIGTERM, signal.SIGTERM, False),  # a scheduler tells every process, and their launcher tells again
    ],
)
def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_changes_nothing(tmp_path, first, second, stops_at_once):
    trainer = make(tmp_path)

    class SignalTwice(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(first)
                signal.raise_signal(second)

    trainer.callback_handler.callbacks.insert(0, SignalTwice())
    with pytest.raises(
        KeyboardInterrupt if stops_at_once else SystemExit, match="at once" if stops_at_once else "143"
    ):
        trainer.train()
    assert len(list((tmp_path / "out").glob("checkpoint-2"))) == (0 if stops_at_once else 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupted_run_that_was_resumed_keeps_the_checkpoint_it_came_from(tmp_path):
    trainer = make(tmp_path)
    trainer.add_callback(SignalAt("on_substep_end", 2, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    file = tmp_path / "out" / "checkpoint-2" / "model.safetensors"
    written = file.stat().st_mtime_ns
    trainer = make(tmp_path)
    trainer.add_callback(SignalAt("on_substep_end", 2, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="checkpoint-2 is kept"):
        trainer.train(resume_from_checkpoint=True)
    assert file.stat().st_mtime_ns == written


def test_a_handler_of_the_user_stays_in_charge(tmp_path):
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        trainer = make(tmp_path)
        trainer.add_callback(SignalAt("on_substep_end", 2, signal.SIGTERM))
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [signal.SIGTERM]
    assert trainer.state.global_step == 6


def test_the_checkpoint_on_sigterm_of_transformers_itself_keeps_its_handler(tmp_path):
    trainer = make(tmp_path, enable_jit_checkpoint=True, max_steps=1)
    theirs = signal.getsignal(signal.SIGTERM)
    seen = []

    class NoteHandlers(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))

    trainer.add_callback(NoteHandlers())
    trainer.train()
    assert callable(theirs)
    assert seen[0] == theirs
    assert seen[1] != signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_training_works_in_another_thread_without_handlers(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1
    assert not trainer.was_interrupted


def make_to_evaluate(folder: Path) -> DFlashTrainer:
    """Five rows of very different lengths for two ranks, which need different numbers of passes."""
    rows = rows_of(make_target(), count=5, new_tokens=30)
    rows[0] = {name: values[:9] for name, values in rows[0].items()}
    return make(
        folder,
        eval_rows=rows,
        anchors_per_sample=4,
        per_device_eval_batch_size=1,
        eval_generate_prompts=2,
        eval_generate_max_new_tokens=6,
    )


def quality(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "loss" in name or "acc" in name}


def child(folder: str) -> None:
    """A training script: waits for its signal in the open window after step 2, and would go on after training."""

    class WaitForSignal(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and os.environ.get("LOCAL_RANK", "1") == "1":
                Path(folder, "is_waiting").touch()
                end = time.monotonic() + 300
                while not trainer.was_interrupted and time.monotonic() < end:
                    time.sleep(0.01)

    has_ranks = "RANK" in os.environ
    trainer = make_to_evaluate(Path(folder)) if has_ranks else make(Path(folder))
    trainer.callback_handler.callbacks.insert(0, WaitForSignal())
    metrics = quality(trainer.evaluate()) if has_ranks else {}
    try:
        trainer.train()
    finally:
        report = {"step": trainer.state.global_step, "interrupted": trainer.was_interrupted, "metrics": metrics}
        Path(folder, f"report-{trainer.args.process_index}.json").write_text(json.dumps(report))
    Path(folder, "trained to the end").touch()


def start_child(folder: Path, **environment: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-c",
        f"import test_training_interrupts; test_training_interrupts.child({str(folder)!r})",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.spawns
def test_signals_from_outside_end_real_processes_at_one_step_with_a_checkpoint(tmp_path, uninterrupted):
    """
    SIGINT and SIGTERM to a script each; SIGTERM to one of two ranks, which both stop before the same step.

    The two ranks evaluate first: the metrics are those of one process.
    """
    alone = quality(make_to_evaluate(tmp_path / "alone").evaluate())
    assert {"eval_loss", "eval_serving_acceptance_length", "eval_generate_acceptance_length"} <= set(alone)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        for rank in range(2)
    ]
    processes = {
        "int": start_child(tmp_path / "int"),
        "term": start_child(tmp_path / "term"),
        "rank 0": start_child(tmp_path / "ranks", **ranks[0]),
        "rank 1": start_child(tmp_path / "ranks", **ranks[1]),
    }
    numbers = {"int": signal.SIGINT, "term": signal.SIGTERM, "rank 1": signal.SIGTERM}
    errors = {}
    try:
        for name, number in numbers.items():
            folder = tmp_path / ("ranks" if "rank" in name else name)
            while not (folder / "is_waiting").exists():
                assert processes[name].poll() is None, processes[name].communicate()[1]
                time.sleep(0.05)
            processes[name].send_signal(number)
            if number == signal.SIGTERM:
                processes[name].send_signal(number)
        for name, process in processes.items():
            errors[name] = process.communicate(timeout=300)[1]
    finally:
        for process in processes.values():
            process.kill()
    codes = {name: process.returncode for name, process in processes.items()}
    assert codes == {"int": -signal.SIGINT, "term": 143, "rank 0": 143, "rank 1": 143}, errors
    for name, step in (("int", 2), ("term", 2), ("ranks", 3)):
        folder = tmp_path / name
        assert not (folder / "trained to the end").exists()
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]
        metrics = pytest.approx(alone, rel=1e-6) if name == "ranks" else {}
        expected = {"step": step, "interrupted": True, "metrics": metrics}
        assert reports == [expected] * (2 if name == "ranks" else 1)
        assert (folder / "out" / f"checkpoint-{step}" / "trainer_state.json").is_file()
        assert f"checkpoint-{step} is kept" in errors["rank 0" if name == "ranks" else name]
    for name in ("int", "term"):
        assert_resumes_to(tmp_path / name, uninterrupted, 2)
