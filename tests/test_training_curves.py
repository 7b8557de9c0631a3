from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import error_line

from dflash_hf.training.curves import CurvePoint, LearningCurve, draw_curves, points_in, read_curve
from dflash_hf.training.metric_names import old_name

TRAINING = ["--anchors_per_sample", "4", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3",
            "--draft_layers", "1", "--block_size", "4", "--num_target_layers", "2", "--max_steps", "4",
            "--eval_strategy", "steps", "--eval_steps", "2", "--eval_rows", "2"]  # fmt: skip


def write_log(folder: Path, history: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def evaluated(step: int, minutes: float, length: float, **more: float) -> dict:
    return {"step": step, "eval_runtime": 1.0, "eval_acceptance_length": length, "train_minutes": minutes, **more}


def test_the_points_are_the_evaluations_and_the_later_of_two_at_one_step_counts():
    history = [
        {"step": 5, "loss": 4.0, "acceptance_length": 1.1},
        evaluated(10, 2.0, 1.5, eval_serving_acceptance_length=1.25),
        {"step": 10, "eval_code_runtime": 1.0, "eval_code_acceptance_length": 9.0, "train_minutes": 2.0},
        evaluated(20, 4.0, 1.75),
        evaluated(20, 4.0, 2.0),
    ]
    expected = (CurvePoint(10, 2.0, 1.5, 1.25), CurvePoint(20, 4.0, 2.0))
    assert points_in(history) == expected
    of_version_0_1 = [{old_name(name): value for name, value in entry.items()} for entry in history]
    assert of_version_0_1 != history
    assert points_in(of_version_0_1) == expected


def test_an_evaluation_without_any_pass_is_no_point():
    """Version 0.1 logged NaN there; this version leaves the metric out."""
    without = {"step": 10, "eval_runtime": 1.0, "train_minutes": 2.0}
    assert points_in([without, {**without, "eval_accept_len": float("nan")}]) == ()


@pytest.mark.trains
def test_a_run_of_the_command_has_a_curve_of_growing_minutes(run, saved_target, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": str(n + 1) * 8}]}
            for n in range(6)]  # fmt: skip
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["train", "--target", saved_target(), "--dataset", dataset, "--output_dir", tmp_path / "mine"]
    assert run(*arguments, *TRAINING)[0] == 0
    curve = read_curve(tmp_path / "mine")
    assert (curve.name, curve.num_rows, [point.step for point in curve.points]) == ("mine", 4, [2, 4])
    assert 0 < curve.points[0].minutes < curve.points[1].minutes
    assert all(point.serving_acceptance_length is not None for point in curve.points)

    code, out, _ = run("curves", tmp_path / "mine", "--out", tmp_path / "curves.png")
    assert code == 0
    assert "mine" in out
    numbers = json.loads((tmp_path / "curves.json").read_text())
    assert numbers[0]["points"][1]["acceptance_length"] == curve.last.acceptance_length
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_are_drawn_over_their_rows_too(tmp_path):
    curves = [
        LearningCurve(f"rows-{rows}", rows, (CurvePoint(1, 1.0, 1.5, 1.4), CurvePoint(2, 2.0, 1.7)))
        for rows in (500, 1000)
    ]
    draw_curves(curves[:1], tmp_path / "one.png")
    draw_curves(curves, tmp_path / "two.png")
    widths = [int.from_bytes((tmp_path / name).read_bytes()[16:20], "big") for name in ("one.png", "two.png")]
    assert widths[1] == 2 * widths[0]


@pytest.mark.parametrize(
    ("history", "words"),
    [(None, "no trainer_state.json"), ([{"step": 1, "loss": 1.0}], "has no evaluation with an acceptance length")],
)
def test_a_folder_without_a_curve_is_refused_by_name(run, tmp_path, history, words):
    folder = tmp_path / "run"
    if history is not None:
        write_log(folder, history)
    code, _, err = run("curves", folder, "--out", tmp_path / "curves.png")
    assert code == 1
    assert words in error_line(err)
    assert str(folder) in error_line(err)
    assert not (tmp_path / "curves.png").exists()


def test_the_longer_log_counts_when_a_run_went_on_after_its_last_save(tmp_path):
    folder = write_log(tmp_path / "run", [evaluated(10, 1.0, 1.5)])
    write_log(folder / "checkpoint-20", [evaluated(10, 1.0, 1.5), evaluated(20, 2.0, 1.6)])
    assert [point.step for point in read_curve(folder).points] == [10, 20]
