"""Tables of an evaluation for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ..markdown import inline_code, one_line, table_cell
from .response_pairs import Setting
from .results import MacroMean, SetResult

MISSING = "–"
MEAN_LABEL = "mean of sets"
CONTENTION = (
    "Several processes measured at the same time. If they shared a machine, speeds and speed-ups are not reliable, "
    "while acceptance and identical responses are. Measure speed with one process on an idle machine."
)
DEFINITIONS = {
    "responses": "Turns of the prompts. A conversation of two turns has two responses.",
    "new tokens": "Tokens of the responses with the draft.",
    "acceptance length": "Mean number of tokens that a verify pass with a draft commits to one sequence. The bonus "
    "token of the target counts, so 1 is useless and the block size is perfect. The mean is over all such passes of a "
    "set; the 95 % interval is a bootstrap over conversations (1,000 resamples). Passes without a draft do not count, "
    "the prefill among them, and neither do tokens past the end of a response.",
    "slots 1 … k": "Share of the passes that verified slots 1 … k in which all of them were accepted.",
    "tokens/s": "All new tokens divided by all seconds of generation, the prefill included.",
    "speed-up": "Median over the prompts (over the batches, if batches have several sequences) of tokens/s with the "
    "draft divided by tokens/s without it. Both are measured in direct succession, and the one that comes first "
    "alternates.",
    "identical": "Greedy responses with the same token ids without and with the draft, in the dtype of the run. Below "
    "fp32 two ways to compute the same logits round differently, and a near-tie can be decided either way. Not "
    "defined for sampling (–), where two samples differ although they have the same distribution.",
    "truncated": "Responses with the draft that ended at the greatest length instead of an end token.",
    MEAN_LABEL: "Unweighted: every set has the same weight (macro mean).",
}
_COLUMNS = (
    *("set", "prompts", "acceptance length", "95\u00a0% interval", "plain tokens/s", "drafted tokens/s", "speed-up"),
    *("identical", "truncated"),
)


def terminal_table(results: Sequence[SetResult], mean: MacroMean) -> Table:
    """
    Make the table of one setting for the terminal.

    Args:
        results (`Sequence[SetResult]`): results of the setting.
        mean ([`MacroMean`]): mean over them.

    Returns:
        `rich.table.Table`
    """
    table = Table(
        title=mean.setting.label,
        caption="acceptance length: tokens per verify pass with a draft, bonus token included; speed-up: median",
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
    Write the report of an evaluation, with tables, definitions and a record of the run.

    Args:
        record (`Mapping`): record of a [`SuiteOutput`], which says what was measured, where and how.
        results (`Sequence[SetResult]`), means (`Sequence[MacroMean]`): results of the evaluation.

    Returns:
        `str`
    """
    parts = [f"# {inline_code(record['draft'])} on prompts for {inline_code(record['target'])}"]
    if not record["is_complete"]:
        parts.append(f"**Not complete**: {record['num_pairs']} of {record['num_pairs_wanted']} response pairs exist.")
    parts += [f"**{one_line(note)}**" for note in record["notes"]]
    for mean in means:
        same = [result for result in results if result.setting == mean.setting]
        parts += [f"## {_heading(mean.setting)}", _main_table(same, mean), *_details(same, mean)]
    parts += ["## Definitions", _definitions(), "## Protocol", _record_table(record)]
    parts.append(f"```bash\n{record['command']}\n```")
    if record["pictures"]:
        parts += ["## Figures", *(f"![{caption}]({name})" for name, caption in record["pictures"].items())]
    return "\n\n".join(parts) + "\n"


def _cells(result: SetResult) -> list[str]:
    """Format a row of the main table."""
    interval = result.acceptance_length_interval
    same = MISSING if result.num_identical is None else f"{result.num_identical}/{result.num_responses}"
    return [
        result.title,
        str(result.num_prompts),
        _form(result.acceptance_length),
        f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else MISSING,
        f"{result.plain_tokens_per_s:.1f}",
        f"{result.drafted_tokens_per_s:.1f}",
        f"{result.speed_up:.2f}×",
        same,
        f"{result.num_truncated}/{result.num_responses}",
    ]


def _mean_cells(mean: MacroMean) -> list[str]:
    """Format the row of the mean."""
    return [
        MEAN_LABEL,
        str(mean.num_prompts),
        _form(mean.acceptance_length),
        MISSING,
        _form(mean.plain_tokens_per_s, "{:.1f}"),
        _form(mean.drafted_tokens_per_s, "{:.1f}"),
        _form(mean.speed_up, "{:.2f}×"),
        _form(mean.identical_share, "{:.0%}"),
        f"{mean.num_truncated}/{mean.num_responses}",
    ]


def _with_counts(cells: Sequence[str], numbers: SetResult | MacroMean) -> list[str]:
    """Insert the columns that only the Markdown table has."""
    return [*cells[:2], str(numbers.num_responses), f"{numbers.num_drafted_tokens:,}", *cells[2:]]


def _form(value: float | None, form: str = "{:.2f}") -> str:
    """Format a number, or a dash if there is none."""
    return MISSING if value is None else form.format(value)


def _heading(setting: Setting) -> str:
    """Write a setting with a capital letter."""
    return setting.label[0].upper() + setting.label[1:]


def _main_table(results: Sequence[SetResult], mean: MacroMean) -> str:
    """Write the table of one setting."""
    head = [*_COLUMNS[:2], "responses", "new tokens", *_COLUMNS[2:]]
    rows = [_with_counts(_cells(result), result) for result in results]
    if len(results) > 1:
        rows.append([f"**{cell}**" for cell in _with_counts(_mean_cells(mean), mean)])
    return markdown_table(head, rows)


def _details(results: Sequence[SetResult], mean: MacroMean) -> list[str]:
    """Write the tables by slot, by committed tokens and by position."""
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
            *(f"{_form(each.acceptance_length)} ({each.num_passes})" for each in result.by_position),
            *[MISSING] * (len(positions) - len(result.by_position)),
        ]
        for result in results
    ]
    return [
        "Share of the passes that accepted all of slots 1 … k:",
        markdown_table(["k", *slots], by_slot),
        "Share of the passes by the tokens that they committed:",
        markdown_table(["tokens", *counts], histogram),
        "Acceptance length by the position in the response at which a pass began (number of passes in brackets):",
        markdown_table(["position", *positions], along),
    ]


def _share(count: int, total: int) -> str:
    """Format a share in percent."""
    return f"{count / total:.0%}" if total else MISSING


def _definitions() -> str:
    """Write the table of definitions."""
    return markdown_table(("name", "meaning"), [[name, meaning] for name, meaning in DEFINITIONS.items()])


def _record_table(record: Mapping[str, Any]) -> str:
    """Write the table that says what was measured, where and how."""
    rows = [
        ["draft", f"{record['draft']}, {record['block_size']} slots per block (the anchor included)"],
        ["slots verified", record["verified_slots"]],
        ["target", record["target"]],
        ["target revision", record["target_revision"] or "not recorded"],
        ["dtype", record["dtype"]],
        ["greatest length of a response", f"{record['max_new_tokens']} tokens"],
        ["seed", str(record["seed"])],
        *([f"prompts of {each['title']}", _describe_set(each)] for each in record["sets"]),
        ["decoding", "`speculative_generate` of dflash-hf and plain `generate`, alternating"],
    ]
    for number, run in enumerate(record["runs"], start=1):
        name = "machine" if len(record["runs"]) == 1 else f"machine of run {number}"
        rows.append([name, f"{run['hardware']}; {run['software']}; processes: {run['num_processes']}"])
    return markdown_table(("", ""), rows)


def _describe_set(prompt_set: Mapping[str, Any]) -> str:
    """Describe where the prompts of a set come from."""
    description = f"{prompt_set['num_prompts']} of {prompt_set['num_available']}, {prompt_set['source']}"
    return description if prompt_set["wording"] == "{}" else f"{description}; prompt: {prompt_set['wording']}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    Write a table in Markdown, and escape characters that would break it.

    Args:
        head (`Sequence[str]`): headings of the columns.
        rows (`Sequence[Sequence[str]]`): cells of each row.

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
