"""`dflash-hf bench train` on tiny shapes: both implementations run, and train the same loss."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

from dflash_hf.benchmarks.shapes import PHASES, StepShapes
from dflash_hf.benchmarks.training_step import measure_steps
from dflash_hf.cli import app

TINY = {
    "rows": 2,
    "length": 24,
    "anchors": 3,
    "block_size": 4,
    "layers": 2,
    "num_target_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "target_layers": 4,
}


@pytest.mark.spawns
def test_both_implementations_have_the_same_losses_and_every_phase_is_timed():
    shapes = StepShapes(**{**TINY, "documents": 2})
    started = time.perf_counter()
    measured = measure_steps(shapes, steps=2, against_reference=True, threads=1)
    elapsed_s = time.perf_counter() - started
    assert list(measured) == ["ours", "reference"]
    assert measured["ours"].losses == pytest.approx(measured["reference"].losses, rel=2e-3)  # bf16 logits
    assert len(set(measured["ours"].losses)) == 3
    for measurement in measured.values():
        assert list(measurement.phase_s) == list(PHASES)
        assert min(measurement.phase_s.values()) > 0
        assert sum(measurement.phase_s.values()) < elapsed_s
        assert measurement.peak_bytes >= 0


@pytest.mark.spawns
def test_the_command_prints_a_table_and_writes_the_numbers(tmp_path):
    flags = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["bench", "train", *flags, "--target-layers", "0", "--steps", "1", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(app, [*arguments, "--peak-tflops", "1", "--json", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    assert "forward + loss + backward" in result.output
    assert "of the peak" in result.output
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["shapes"] == {**TINY, "target_layers": 0, "documents": 1}
    assert record["ours"]["phase_s"]["target"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "huge"], "is not known. Pass one of smollm2-135m"),
        (["--against", "others"], "must be 'reference'"),
        (["--rows", "0"], "--rows 0 must be at least 1"),
    ],
)
def test_bad_flags_are_named(arguments, words):
    result = CliRunner().invoke(app, ["bench", "train", *arguments])
    assert result.exit_code != 0
    assert words in str(result.exception)


def test_matrix_work_is_counted_for_forward_and_backward():
    shapes = StepShapes(
        rows=1, length=8, anchors=1, block_size=2, layers=1, num_target_layers=1, hidden_size=2,
        intermediate_size=3, heads=1, kv_heads=1, head_dim=2, vocab_size=5, target_layers=0,
    )  # fmt: skip
    projections = 2 * (2 * (2 + 2 + 2 + 2) + 3 * 2 * 3) + 8 * 2 * (2 + 2)
    attention = 2 * 2 * (4 + 2) * 2
    assert shapes.matrix_flops == 2 * (3 * (projections + attention + 8 * 1 * 4) + 2 * 1 * 5 * 2)
