"""Prompt sets that drafts are judged on, from a folder or the Hub, as conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..data.loading import load_rows
from ..data.prompts import Conversation, conversation_of_row, sample_rows
from ..files import digest

MATHS = "{}\n\nReason step by step, and put the final answer in \\boxed{{}}."
PYTHON_FUNCTION = "Complete this Python function, and answer with the whole function:\n\n```python\n{}\n```"


@dataclass(frozen=True)
class HubPrompts:
    """
    A public set of prompts on the Hub.

    Args:
        title (`str`): its name in words.
        dataset (`str`), config (`str`, *optional*), split (`str`): where it is.
        column (`str`): holds the prompt, a text or the texts of several turns.
        wording (`str`): what the user says, `{}` being the prompt.
    """

    title: str
    dataset: str
    config: str | None
    split: str
    column: str
    wording: str = "{}"

    @property
    def source(self) -> str:
        """`str`: where the prompts come from, in words."""
        return ", ".join(part for part in (self.dataset, self.config, self.split) if part)


HUB_PROMPTS = {
    "gsm8k": HubPrompts("GSM8K", "openai/gsm8k", "main", "test", "question", MATHS),
    "math500": HubPrompts("MATH-500", "HuggingFaceH4/MATH-500", None, "test", "problem", MATHS),
    "humaneval": HubPrompts("HumanEval", "openai/openai_humaneval", None, "test", "prompt", PYTHON_FUNCTION),
    "mbpp": HubPrompts("MBPP", "google-research-datasets/mbpp", "sanitized", "test", "prompt"),
    "mt-bench": HubPrompts("MT-Bench", "HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
}
SUITES = {"standard": tuple(HUB_PROMPTS)}


@dataclass(frozen=True)
class PromptSet:
    """
    Conversations that are measured together.

    Args:
        name (`str`): short name.
        title (`str`): in tables.
        source (`str`): where they come from, without a path.
        wording (`str`): what the user says, `{}` being the prompt of the source.
        num_available (`int`): prompts of the source, of which the conversations were drawn.
        conversations (`tuple[Conversation, ...]`): at least one.
    """

    name: str
    title: str
    source: str
    wording: str
    num_available: int
    conversations: tuple[Conversation, ...]

    @property
    def num_turns(self) -> int:
        """`int`: answers that all conversations ask for."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def digest(self) -> str:
        """`str`: of the conversations in their order."""
        ids = "".join(conversation.conversation_id for conversation in self.conversations)
        return digest(ids)


def load_prompt_sets(
    suites: Sequence[str],
    prompt_files: Sequence[str | Path] = (),
    *,
    folder: str | Path | None = None,
    limit: int | None = 128,
    seed: int = 0,
) -> list[PromptSet]:
    """
    Load the prompts of suites, of single sets and of files.

    Args:
        suites (`Sequence[str]`): names of suites or sets.
        prompt_files (`Sequence[str | Path]`): JSON-lines or Parquet files; each is a set, named by its stem.
        folder (`str` or `Path`, *optional*): holds `NAME.jsonl` for each set, with the turns as the user says them;
            without it the sets come from the Hub.
        limit (`int`, *optional*, defaults to 128): conversations a set, drawn at random; `None` takes all.
        seed (`int`, defaults to 0): of the draw.

    Returns:
        `list[PromptSet]`: in the order named.

    Raises:
        ValueError: a name is unknown or there twice, or a prompt is empty.
        FileNotFoundError: a file is missing.
        OSError: the Hub cannot be read.
    """
    names: dict[str, None] = {}
    for suite in suites:
        if suite not in SUITES and suite not in HUB_PROMPTS:
            raise ValueError(
                f"--suite {suite!r} is not known. Name {', '.join(SUITES)} ({', '.join(HUB_PROMPTS)} together) or one "
                "of its sets; prompts of your own go with --prompts FILE."
            )
        names.update(dict.fromkeys(SUITES.get(suite, (suite,))))
    sets = [_named_set(name, folder, limit, seed) for name in names]
    for file in map(Path, prompt_files):
        if file.stem in names:
            raise ValueError(f"--prompts {file} has the name of another set, {file.stem!r}. Rename the file.")
        names[file.stem] = None
        sets.append(_set_of_file(file.stem, file.stem, file, limit, seed))
    if not sets:
        raise ValueError("There is nothing to measure. Name a suite or a file of prompts.")
    return sets


def _named_set(name: str, folder: str | Path | None, limit: int | None, seed: int) -> PromptSet:
    hub = HUB_PROMPTS[name]
    if folder is not None:
        file = Path(folder) / f"{name}.jsonl"
        if not file.is_file():
            raise FileNotFoundError(
                f"The folder of prompts has no {file.name} for the set {name!r} ({file}). Add it, or leave "
                "--prompts-folder out to read the sets from the Hub."
            )
        return _set_of_file(name, hub.title, file, limit, seed)
    try:
        rows = load_rows(hub.dataset, hub.config, hub.split)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The set {name!r} cannot be read from the Hub ({hub.source}): {error}. Without the Hub, pass "
            f'--prompts-folder with a file {name}.jsonl of rows {{"turns": [...]}}.'
        ) from error
    return _prompt_set(name, hub.title, hub.source, rows, limit, seed, hub.column, hub.wording)


def _set_of_file(name: str, title: str, file: Path, limit: int | None, seed: int) -> PromptSet:
    return _prompt_set(name, title, f"file {file.name}", load_rows(str(file), None, "train"), limit, seed)


def _prompt_set(
    name: str,
    title: str,
    source: str,
    rows: datasets.Dataset,
    limit: int | None,
    seed: int,
    column: str | None = None,
    wording: str = "{}",
) -> PromptSet:
    if not len(rows):
        raise ValueError(f"The set {name!r} ({source}) has no prompt.")
    numbers = sample_rows(datasets.Dataset.from_dict({"number": range(len(rows))}), limit, seed)["number"]
    conversations = []
    for number in numbers:
        try:
            conversations.append(conversation_of_row(_worded(rows[number], column, wording), column=column))
        except ValueError as error:
            raise ValueError(f"The set {name!r} ({source}), row {number + 1}: {error}") from error
    return PromptSet(name, title, source, wording, len(rows), tuple(conversations))


def _worded(row: dict[str, Any], column: str | None, wording: str) -> dict[str, Any]:
    """The row with what the user says in place of a prompt of the Hub; several turns are left as they are."""
    if column is None or not isinstance(row.get(column), str) or not row[column].strip():
        return row
    return {**row, column: wording.format(row[column].strip("\n"))}
