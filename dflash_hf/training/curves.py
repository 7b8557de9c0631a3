"""Learning curves: acceptance on held-out rows over training time and over the number of training rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..hub.model_card import FACTS_NAME
from .card import evaluations_in
from .checkpoint_files import last_complete_checkpoint
from .metric_names import logged_metric

STATE_NAME = "trainer_state.json"


@dataclass(frozen=True)
class CurvePoint:
    """
    One evaluation of a run.

    Args:
        step (`int`): number of optimizer steps before it.
        minutes (`float`): time of those steps, without evaluation, saving and preparation of data.
        acceptance_length (`float`): acceptance length over sampled anchors of the held-out rows.
        serving_acceptance_length (`float`, *optional*): acceptance length of decoding, simulated on all held-out
            responses.
    """

    step: int
    minutes: float
    acceptance_length: float
    serving_acceptance_length: float | None = None


@dataclass(frozen=True)
class LearningCurve:
    """
    The evaluations of one run.

    Args:
        name (`str`): name of the run's folder.
        num_rows (`int`, *optional*): number of training rows.
        points (`tuple[CurvePoint, ...]`): the evaluations in their order.
    """

    name: str
    num_rows: int | None
    points: tuple[CurvePoint, ...]

    @property
    def last(self) -> CurvePoint:
        """[`CurvePoint`]: the last evaluation."""
        return self.points[-1]


def points_in(history: Sequence[dict[str, Any]]) -> tuple[CurvePoint, ...]:
    """
    Read the evaluations from the log of a trainer, one for each step.

    Args:
        history (`Sequence[dict]`): `log_history` of the trainer's state, also of version 0.1.

    Returns:
        `tuple[CurvePoint, ...]`

    Example:

    ```python
    >>> evaluated = {"step": 10, "eval_runtime": 1.0, "eval_acceptance_length": 1.5, "train_minutes": 2.0}
    >>> points_in([{"step": 10, "loss": 3.0}, evaluated])
    (CurvePoint(step=10, minutes=2.0, acceptance_length=1.5, serving_acceptance_length=None),)

    ```
    """
    points = {}
    for step, prefix, entry in evaluations_in(history):
        length, minutes = logged_metric(entry, "eval_acceptance_length"), entry.get("train_minutes")
        if prefix == "eval" and step is not None and length is not None and minutes is not None:
            points[step] = CurvePoint(step, minutes, length, logged_metric(entry, "eval_serving_acceptance_length"))
    return tuple(points[step] for step in sorted(points))


def read_curve(folder: str | Path) -> LearningCurve:
    """
    Read the learning curve of a finished or unfinished run from its output folder.

    Args:
        folder (`str` or `Path`): `output_dir` of the run.

    Returns:
        [`LearningCurve`]

    Raises:
        FileNotFoundError: the folder holds no state of a run.
        ValueError: the run was never evaluated.
    """
    folder = Path(folder)
    states = [folder / STATE_NAME]
    checkpoint = last_complete_checkpoint(folder, only_log=True)
    if checkpoint is not None:
        states.append(Path(checkpoint) / STATE_NAME)
    written = [path for path in states if path.is_file()]
    if not written:
        raise FileNotFoundError(
            f"{folder} holds no {STATE_NAME}, neither itself nor in a checkpoint. Pass the output_dir of a run."
        )
    histories = [json.loads(path.read_text(encoding="utf-8"))["log_history"] for path in written]
    points = points_in(max(histories, key=len))
    if not points:
        raise ValueError(
            f"The run in {folder} has no evaluation with an acceptance length. Train with an evaluation set and "
            "eval_strategy='steps'."
        )
    facts = written[-1].parent / FACTS_NAME
    num_rows = json.loads(facts.read_text(encoding="utf-8")).get("num_rows") if facts.is_file() else None
    return LearningCurve(folder.resolve().name, num_rows, points)


def write_curves(curves: Sequence[LearningCurve], path: str | Path) -> None:
    """
    Write the numbers of learning curves as JSON.

    Args:
        curves (`Sequence[LearningCurve]`): one for each run.
        path (`str` or `Path`): the file to write.
    """
    Path(path).write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n", encoding="utf-8")


def draw_curves(curves: Sequence[LearningCurve], path: str | Path) -> None:
    """
    Draw the acceptance length over the minutes of every run and, of two or more runs, over their rows.

    The acceptance length of simulated decoding is drawn, or that of sampled anchors where a run has no other. In the
    plot over rows, a line joins only runs of equally many steps, since other runs differ in more than their rows.

    Args:
        curves (`Sequence[LearningCurve]`): one for each run.
        path (`str` or `Path`): the PNG file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # an optional dependency

    panels = 2 if sum(curve.num_rows is not None for curve in curves) > 1 else 1
    figure = Figure(figsize=(5.2 * panels, 3.6), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for index, curve in enumerate(curves):
        label = curve.name if curve.num_rows is None else f"{curve.name}: {curve.num_rows:,} rows"
        minutes, heights = zip(*((point.minutes, _height(point)) for point in curve.points), strict=True)
        axes[0].plot(minutes, heights, ".-", color=f"C{index}", label=label)
    axes[0].set(xlabel="minutes of optimizer steps", ylabel="acceptance length on held-out rows")
    axes[0].legend(fontsize=8)
    if panels == 2:
        _draw_over_rows(axes[1], curves)
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_over_rows(panel: Any, curves: Sequence[LearningCurve]) -> None:
    """Draw the last evaluation of each run over its number of rows."""
    by_steps: dict[int, list[tuple[int, float]]] = {}
    for index, curve in enumerate(curves):
        if curve.num_rows is not None:
            by_steps.setdefault(curve.last.step, []).append((curve.num_rows, _height(curve.last)))
            panel.plot(
                curve.num_rows, _height(curve.last), "o", color=f"C{index}"
            )  # the colour of the run in the other panel
    for steps, points in by_steps.items():
        rows, heights = zip(*sorted(points), strict=True)
        panel.plot(rows, heights, color="0.6", zorder=0)
        end = (rows[-1], heights[-1])
        panel.annotate(f"{steps:,} steps", end, (-5, 5), textcoords="offset points", ha="right", fontsize=8)
    row_counts = sorted({rows for points in by_steps.values() for rows, _ in points})
    panel.set(xlabel="rows learned from", xscale="log")
    panel.set_xticks(row_counts, [f"{rows:,}" for rows in row_counts])
    panel.minorticks_off()


def _height(point: CurvePoint) -> float:
    """Return the acceptance length that is drawn for an evaluation."""
    return point.acceptance_length if point.serving_acceptance_length is None else point.serving_acceptance_length
