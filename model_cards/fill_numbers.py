"""
Write the numbers of the records in this folder into the pages that quote them.

`python model_cards/fill_numbers.py` replaces the text between `<!-- numbers: NAME -->` and `<!-- /numbers -->` in the
README and in the overview of this folder. A test compares these pages with the records.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_hf.cli.demo import results_table
from dflash_hf.evaluation import Summary

CARDS = Path(__file__).parent
PAGES = (CARDS.parent / "README.md", CARDS / "README.md")
MARKED = re.compile(r"(<!-- numbers: ([\w-]+) -->)(.*?)(<!-- /numbers -->)", flags=re.DOTALL)
CURVE_STEPS = (400, 800, 1200, 1600, 2000, 2400, 2800, 3102)


def read_record(name: str) -> Any:
    return json.loads((CARDS / name).read_text(encoding="utf-8"))


def acceptance_length(record: dict[str, Any], prefix: str = "") -> float:
    """The acceptance length of a record, which version 0.1.0 wrote under a shorter name."""
    return record.get(f"{prefix}acceptance_length", record.get(f"{prefix}accept_len"))


def speeds(result: dict[str, Any]) -> str:
    return f"{result['plain_tokens_per_s']:.1f} → {result['drafted_tokens_per_s']:.1f} tokens/s"


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table whose first row is its head, with an empty line before and after it."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n\n" + "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


def suite_table(results: list[dict[str, Any]], names: list[str], head: str) -> str:
    rows = [(head, "acceptance length, 95 % interval", "speed-up over plain `generate`")]
    for name, result in zip(names, results, strict=True):
        low, high = result.get("acceptance_length_interval", result.get("accept_len_interval"))
        length = f"{acceptance_length(result):.2f} ({low:.2f} – {high:.2f})"
        rows.append((name, length, f"{result['speed_up']:.2f}× ({speeds(result)})"))
    return table(*rows)


def demo_table(summary: dict[str, Any]) -> str:
    """What `dflash-hf demo` prints."""
    console = Console(width=80, file=io.StringIO())
    console.print(results_table(Summary.from_dict(summary)))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n```\n" + "\n".join(lines) + "\n```\n"


def numbers() -> dict[str, str]:
    """The texts between the marks, by name."""
    demo = read_record("SmolLM2-135M-Instruct-DFlash-demo/results.json")["summary"]
    (bare,) = read_record("SmolLM2-135M-Instruct-DFlash/gsm8k-test-bare.json")["results"]
    (tree,) = read_record("SmolLM2-135M-Instruct-DFlash/gsm8k-test-bare-tree.json")["results"]
    gemma = read_record("gemma-3-270m-DFlash/results.json")["results"]
    gemma += read_record("gemma-3-270m-DFlash/gsm8k-test-bare.json")["results"]
    curves = {curve["name"]: curve for curve in read_record("curves.json")}
    long_curve = {point["step"]: point for point in curves["SmolLM2-135M-Instruct-DFlash"]["points"]}
    points = [long_curve[step] for step in CURVE_STEPS]
    short = [curves[name] for name in ("rows-250", "rows-1000", "rows-4683")]
    return {
        "demo": demo_table(demo),
        "demo-length": f"{acceptance_length(demo):.2f} of 6",
        "demo-speed": f"{demo['speed_up']:.2f}×",
        "long-length": f"{acceptance_length(bare):.2f} of 8",
        "long-speed": f"{bare['speed_up']:.2f}×",
        "tree-length": f"{acceptance_length(tree):.2f}",
        "tree-speed": f"{tree['speed_up']:.2f}×",
        "smollm2": suite_table(
            [bare, tree],
            ["blocks of 8", "trees of 16 tokens"],
            "16 bare GSM8K test questions, greedy, bf16, 160 tokens",
        ),
        "minutes": table(
            ("minutes of training", *(f"{point['minutes']:.0f}" for point in points)),
            ("optimizer steps", *(f"{point['step']:,}" for point in points)),
            ("acceptance length when serving", *(f"{acceptance_length(point, 'serving_'):.2f}" for point in points)),
        ),
        "rows": table(
            (f"rows learned from, for {short[0]['points'][-1]['step']} steps", *(f"{c['num_rows']:,}" for c in short)),
            (
                "acceptance length when serving",
                *(f"{acceptance_length(curve['points'][-1], 'serving_'):.2f}" for curve in short),
            ),
        ),
        "gemma": suite_table(
            gemma,
            [result["title"] for result in gemma[:-1]] + ["bare GSM8K test questions"],
            "greedy, bf16, 160 tokens",
        ),
    }


def fill(text: str) -> str:
    """Replace what stands between the marks of a page."""
    found = numbers()
    return MARKED.sub(lambda match: f"{match[1]}{found[match[2]]}{match[4]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
