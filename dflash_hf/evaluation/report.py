"""Tables and pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ..markdown import inline_code, table_cell
from .results import MacroMean, SetResult, Setting

MISSING = "–"
MEAN_LABEL = "mean of sets"
CONTENTION = (
    "Several processes measured at the same time: where they share a machine, speeds and speed-ups are not to be "
    "trusted (acceptance and exactness are). Measure speed with one process on a quiet machine."
)
DEFINITIONS = {
    "answers": "turns of the prompts: a conversation of two turns has two answers.",
    "new tokens": "of the answers with the draft.",
    "acceptance length": "tokens committed per verify pass of the target, the target's own bonus token counted: 1 is "
    "useless, the block size is perfect. Mean over all passes with a draft of a set, with the 95 % interval of a "
    "bootstrap over conversations (1,000 resamples). The first token of an answer comes from the prompt's pass and "
    "is not counted; a pass in which an answer ends counts what the answer took.",
    "slots 1 … k": "share of the passes that verified slots 1 … k in which all of them were accepted.",
    "tokens/s": "all new tokens over all seconds of generation, the prompt's pass (prefill) included.",
    "speed-up": "median over the prompts (over the batches, if there are several rows) of tokens/s with the draft "
    "divided by tokens/s without it, one right after the other; which comes first alternates.",
    "identical": "greedy answers whose token ids are the same without and with the draft, in the dtype of the run. "
    "Below fp32 two ways to compute the same logits round differently, and near-ties can fall either way. Not defined "
    "for sampling (–): two draws differ, while their distribution is the same.",
    "cut": "answers with the draft that ended at the longest length instead of an end token.",
    MEAN_LABEL: "unweighted: every set counts alike (macro mean).",
}


def terminal_table(results: Sequence[SetResult], mean: MacroMean) -> Table:
    """
    The numbers of one setting.

    Args:
        results (`Sequence[SetResult]`): of the setting.
        mean ([`MacroMean`]): over them.

    Returns:
        `rich.table.Table`
    """
    table = Table(
        title=mean.setting.label,
        caption="acceptance length: tokens a verify pass commits, bonus token counted; speed-up: median",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(_COLUMNS):
        table.add_column(name.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    if len(results) > 1:
        table.add_section()
        table.add_row(*_mean_cells(mean))
    return table


def markdown_report(record: Mapping[str, Any], results: Sequence[SetResult], means: Sequence[MacroMean]) -> str:
    """
    A Markdown file that can be read alone.

    Args:
        record (`Mapping`): of a [`SuiteOutput`]: what was measured, where and how.
        results (`Sequence[SetResult]`), means (`Sequence[MacroMean]`): the numbers.

    Returns:
        `str`
    """
    parts = [f"# {inline_code(record['draft'])} on prompts for {inline_code(record['target'])}"]
    if not record["is_complete"]:
        parts.append(
            f"**Not complete**: {record['num_pairs']} of {record['num_pairs_wanted']} answer pairs are there."
        )
    if record["is_contended"]:
        parts.append(f"**{CONTENTION}**")
    for mean in means:
        same = [result for result in results if result.setting == mean.setting]
        parts += [f"## {_heading(mean.setting)}", _main_table(same, mean), *_details(same, mean)]
    parts += ["## What the numbers mean", _definitions(), "## How it was measured", _record_table(record)]
    parts.append(f"```bash\n{record['command']}\n```")
    if record["pictures"]:
        parts += ["## Pictures", *(f"![{words}]({name})" for name, words in record["pictures"].items())]
    return "\n\n".join(parts) + "\n"


_COLUMNS = (
    *("set", "prompts", "acceptance length", "95\u00a0% interval", "plain tokens/s", "drafted tokens/s", "speed-up"),
    *("identical", "cut"),
)


def _cells(result: SetResult) -> list[str]:
    interval = result.accept_len_interval
    same = MISSING if result.num_identical is None else f"{result.num_identical}/{result.num_answers}"
    return [
        result.title,
        str(result.num_prompts),
        _form(result.accept_len),
        f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else MISSING,
        f"{result.plain_tokens_per_s:.1f}",
        f"{result.drafted_tokens_per_s:.1f}",
        f"{result.speed_up:.2f}×",
        same,
        f"{result.num_cut}/{result.num_answers}",
    ]


def _mean_cells(mean: MacroMean) -> list[str]:
    return [
        MEAN_LABEL,
        str(mean.num_prompts),
        _form(mean.accept_len),
        MISSING,
        _form(mean.plain_tokens_per_s, "{:.1f}"),
        _form(mean.drafted_tokens_per_s, "{:.1f}"),
        _form(mean.speed_up, "{:.2f}×"),
        _form(mean.identical_share, "{:.0%}"),
        f"{mean.num_cut}/{mean.num_answers}",
    ]


def _with_counts(cells: Sequence[str], numbers: SetResult | MacroMean) -> list[str]:
    return [*cells[:2], str(numbers.num_answers), f"{numbers.num_drafted_tokens:,}", *cells[2:]]


def _form(value: float | None, form: str = "{:.2f}") -> str:
    return MISSING if value is None else form.format(value)


def _heading(setting: Setting) -> str:
    return setting.label[0].upper() + setting.label[1:]


def _main_table(results: Sequence[SetResult], mean: MacroMean) -> str:
    head = [*_COLUMNS[:2], "answers", "new tokens", *_COLUMNS[2:]]
    rows = [_with_counts(_cells(result), result) for result in results]
    if len(results) > 1:
        rows.append([f"**{cell}**" for cell in _with_counts(_mean_cells(mean), mean)])
    return markdown_table(head, rows)


def _details(results: Sequence[SetResult], mean: MacroMean) -> list[str]:
    """Tables of slots, of committed tokens and of positions."""
    slots = [f"{slot}" for slot in range(1, len(mean.slot_acceptance) + 1)]
    by_slot = [[result.title, *(_form(share, "{:.0%}") for share in result.slot_acceptance)] for result in results]
    counts = [f"{count}" for count in range(1, max(len(result.committed_histogram) for result in results) + 1)]
    histogram = [
        [
            result.title,
            *(_share(count, result.num_passes) for count in result.committed_histogram),
            *[MISSING] * (len(counts) - len(result.committed_histogram)),
        ]
        for result in results
    ]
    longest = max((result.by_position for result in results), key=len)
    positions = [f"{each.start}–{each.end - 1}" for each in longest]
    along = [
        [
            result.title,
            *(f"{_form(each.accept_len)} ({each.num_passes})" for each in result.by_position),
            *[MISSING] * (len(positions) - len(result.by_position)),
        ]
        for result in results
    ]
    return [
        "Passes that accepted all of slots 1 … k:",
        markdown_table(["k", *slots], by_slot),
        "Passes by the tokens they committed:",
        markdown_table(["tokens", *counts], histogram),
        "Acceptance length of the passes that began after so many tokens of the answer (number of passes):",
        markdown_table(["tokens before", *positions], along),
    ]


def _share(count: int, total: int) -> str:
    return f"{count / total:.0%}" if total else MISSING


def _definitions() -> str:
    return markdown_table(("name", "meaning"), [[name, words] for name, words in DEFINITIONS.items()])


def _record_table(record: Mapping[str, Any]) -> str:
    rows = [
        ["draft", f"{record['draft']}, {record['block_size']} slots a block (the anchor included)"],
        ["slots verified", record["verified_slots"]],
        ["target", record["target"]],
        ["target revision", record["target_revision"] or "not recorded"],
        ["dtype", record["dtype"]],
        ["longest answer", f"{record['max_new_tokens']} tokens"],
        ["seed", str(record["seed"])],
        *([f"prompts of {each['title']}", _set_words(each)] for each in record["sets"]),
        ["decoding", "this package's loop (`speculative_generate`) against plain `generate`, alternating"],
    ]
    for number, run in enumerate(record["runs"], start=1):
        name = "machine" if len(record["runs"]) == 1 else f"machine of run {number}"
        rows.append([name, f"{run['hardware']}; {run['software']}; processes: {run['num_processes']}"])
    return markdown_table(("", ""), rows)


def _set_words(prompt_set: Mapping[str, Any]) -> str:
    words = f"{prompt_set['num_prompts']} of {prompt_set['num_available']}, {prompt_set['source']}"
    return words if prompt_set["wording"] == "{}" else f"{words}; asked as: {prompt_set['wording']}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    A table in Markdown, whatever is in its cells.

    Args:
        head (`Sequence[str]`): of the columns.
        rows (`Sequence[Sequence[str]]`): cells.

    Returns:
        `str`

    Example:

    ```python
    >>> print(markdown_table(("k", "share"), [("1", "a|b")]))
    | k | share |
    |---|---|
    | 1 | a\\|b |

    ```
    """
    lines = [head, ["---"] * len(head), *([table_cell(cell) for cell in row] for row in rows)]
    return "\n".join("|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


SLOTS, SPEED, ALONG = "eval_slots.png", "eval_speed.png", "eval_along.png"
PICTURES = {
    SLOTS: "Share of passes that accepted all of slots 1 … k",
    SPEED: "Speed-up over plain decoding",
    ALONG: "Acceptance length along the answers, and passes by the tokens they committed",
}


def draw_pictures(results: Sequence[SetResult], title: str, folder: str | Path) -> dict[str, str]:
    """
    Draw all pictures.

    Args:
        results (`Sequence[SetResult]`): at least one.
        title (`str`): names draft and target.
        folder (`str` or `Path`): where the PNG files go.

    Returns:
        `dict[str, str]`: file names, and what they show.

    Raises:
        ImportError: matplotlib is not installed.
    """
    settings = list(dict.fromkeys(result.setting for result in results))
    for name, draw in ((SLOTS, _draw_slots), (SPEED, _draw_speed), (ALONG, _draw_along)):
        figure = draw(results, settings)
        figure.suptitle(f"{PICTURES[name]}\n{title}".replace("$", r"\$"), fontsize=10)
        figure.savefig(Path(folder) / name, dpi=150)
    return dict(PICTURES)


def _figure(num_rows: int, num_columns: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # an extra; the rest of the package works without it

    figure = Figure(figsize=(6.5 * num_columns, 0.7 + height * num_rows), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def _of(results: Sequence[SetResult], setting: Setting) -> list[SetResult]:
    return [result for result in results if result.setting == setting]


def _finish(axes: Any, setting: Setting, *, has_legend: bool = True) -> None:
    axes.set_title(setting.label, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axes.legend(fontsize=8, frameon=False)


def _draw_slots(results: Sequence[SetResult], settings: Sequence[Setting]) -> Any:
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


def _draw_along(results: Sequence[SetResult], settings: Sequence[Setting]) -> Any:
    figure, grid = _figure(len(settings), 2, 3.2)
    for (along, committed), setting in zip(grid, settings, strict=True):
        for result in _of(results, setting):
            bins = [each for each in result.by_position if each.accept_len is not None]
            middles = [(each.start + each.end) / 2 for each in bins]
            along.plot(middles, [each.accept_len for each in bins], marker="o", label=result.title)
            counts = result.committed_histogram
            shares = [100 * count / max(result.num_passes, 1) for count in counts]
            committed.plot(range(1, len(counts) + 1), shares, marker="o", label=result.title)
        along.set(xlabel="position in the answer, tokens", ylabel="acceptance length, tokens a pass")
        along.set_ylim(bottom=1)
        committed.set(xlabel="tokens committed by a pass (bonus token counted)", ylabel="% of passes")
        committed.set_ylim(bottom=0)
        committed.set_xticks(range(1, 1 + max(len(result.committed_histogram) for result in _of(results, setting))))
        _finish(along, setting, has_legend=False)  # lines are all over it; its neighbour has the legend
        _finish(committed, setting)
    return figure
