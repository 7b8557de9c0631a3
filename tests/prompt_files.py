"""Files of the standard prompt sets with a few short prompts each."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ["gsm8k", "math500", "humaneval", "mbpp", "mt-bench"]


def write_prompts(folder: Path, names=NAMES, count: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        turns = 2 if name == "mt-bench" else 1
        rows = [{"turns": [f"{name} {number} {turn}?" for turn in range(turns)]} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
