"""Figures of an evaluation: acceptance by slot, speed-up, and acceptance along the responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .response_pairs import Setting
from .results import SetResult

SLOTS, SPEED, POSITIONS = "eval_slots.png", "eval_speed.png", "eval_along.png"
PICTURES = {
    SLOTS: "Share of passes that accepted all of slots 1 … k",
    SPEED: "Speed-up over plain decoding",
    POSITIONS: "Acceptance length along the responses, and passes by the tokens they committed",
}


def draw_pictures(results: Sequence[SetResult], title: str, folder: str | Path) -> dict[str, str]:
    """
    Draw all figures of an evaluation as PNG files.

    Args:
        results (`Sequence[SetResult]`): at least one.
        title (`str`): names of draft and target.
        folder (`str` or `Path`): folder of the PNG files.

    Returns:
        `dict[str, str]`: file names, and captions.

    Raises:
        ImportError: matplotlib is not installed.
    """
    settings = list(dict.fromkeys(result.setting for result in results))
    for name, draw in ((SLOTS, _draw_slots), (SPEED, _draw_speed), (POSITIONS, _draw_positions)):
        figure = draw(results, settings)
        figure.suptitle(f"{PICTURES[name]}\n{title}".replace("$", r"\$"), fontsize=10)
        figure.savefig(Path(folder) / name, dpi=150)
    return dict(PICTURES)


def _figure(num_rows: int, num_columns: int, height: float) -> tuple[Any, Any]:
    """Make a figure with a grid of axes."""
    from matplotlib.figure import Figure  # matplotlib is an optional dependency

    figure = Figure(figsize=(6.5 * num_columns, 0.7 + height * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def _of(results: Sequence[SetResult], setting: Setting) -> list[SetResult]:
    """Select the results of one setting."""
    return [result for result in results if result.setting == setting]


def _finish(axes: Any, setting: Setting, *, has_legend: bool = True) -> None:
    """Add title and legend to axes, and remove two of their spines."""
    axes.set_title(setting.label, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axes.legend(fontsize=8, frameon=False)


def _draw_slots(results: Sequence[SetResult], settings: Sequence[Setting]) -> Any:
    """Draw the share of passes that accepted slots 1 … k."""
    figure, grid = _figure(len(settings), 1, 3.2)
    for axes, setting in zip(grid[:, 0], settings, strict=True):
        for result in _of(results, setting):
            shares = [float("nan") if share is None else 100 * share for share in result.slot_acceptance]
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=result.title)
        slots = range(1, 1 + max(len(result.slot_acceptance) for result in _of(results, setting)))
        axes.set(xlabel="drafted slot k", ylabel="slots 1 … k accepted, % of passes", ylim=(0, 103), xticks=slots)
        _finish(axes, setting)
    return figure


def _draw_speed(results: Sequence[SetResult], settings: Sequence[Setting]) -> Any:
    """Draw the speed-up of each set and setting."""
    figure, grid = _figure(1, 1, 3.6)
    axes = grid[0, 0]
    titles = list(dict.fromkeys(result.title for result in results))
    width = 0.8 / len(settings)
    for index, setting in enumerate(settings):
        same = _of(results, setting)
        places = [titles.index(result.title) + (index - (len(settings) - 1) / 2) * width for result in same]
        bars = axes.bar(places, [result.speed_up for result in same], width=0.92 * width, label=setting.label)
        axes.bar_label(bars, [f"{result.speed_up:.2f}×" for result in same], padding=2, fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(titles)), titles)
    axes.set(ylabel="tokens/s with the draft ÷ without (median)")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    return figure


def _draw_positions(results: Sequence[SetResult], settings: Sequence[Setting]) -> Any:
    """Draw the acceptance length along the responses, and the distribution of committed tokens."""
    figure, grid = _figure(len(settings), 2, 3.2)
    for (positions, committed), setting in zip(grid, settings, strict=True):
        for result in _of(results, setting):
            bins = [each for each in result.by_position if each.acceptance_length is not None]
            middles = [(each.start + each.end) / 2 for each in bins]
            positions.plot(middles, [each.acceptance_length for each in bins], marker="o", label=result.title)
            counts = result.committed_histogram
            shares = [100 * count / max(result.num_passes, 1) for count in counts]
            committed.plot(range(1, len(counts) + 1), shares, marker="o", label=result.title)
        positions.set(xlabel="position in the response, tokens", ylabel="acceptance length, tokens per pass")
        positions.set_ylim(bottom=1)
        committed.set(xlabel="tokens committed by a pass (bonus token included)", ylabel="% of passes")
        committed.set_ylim(bottom=0)
        committed.set_xticks(range(1, 1 + max(len(result.committed_histogram) for result in _of(results, setting))))
        _finish(positions, setting, has_legend=False)  # its lines leave no room; the axes beside it have the legend
        _finish(committed, setting)
    return figure
