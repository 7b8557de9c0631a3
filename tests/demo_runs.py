"""Runs `dflash-hf demo` in a process of its own, with the small model of the wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

QUESTIONS = Path(__file__).parent.parent / "dflash_hf" / "demo_data" / "gsm8k_test_questions.jsonl"


def run_demo(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dflash_hf", "demo", "--output-dir", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout
