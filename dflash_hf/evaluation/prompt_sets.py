"""Prompt sets of an evaluation, which are read from the Hub or from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from ..data.loading import data_suffix, load_rows
from ..data.prompts import Conversation, conversation_of_row, sample_rows
from ..files import digest, without_lone_surrogates

MATHS = "{}\n\nReason step by step, and put the final answer in \\boxed{{}}."
PYTHON_FUNCTION = "Complete this Python function, and answer with the whole function:\n\n```python\n{}\n```"


@dataclass(frozen=True)
class HubPrompts:
    """
    A public set of prompts on the Hub.

    Args:
        title (`str`): title of the set in tables.
        dataset (`str`), config (`str`, *optional*), split (`str`): where the Hub has it.
        column (`str`): column of the prompt, which is a text or a list with the text of each turn.
        wording (`str`, defaults to `"{}"`): the user message, in which `{}` stands for the prompt.
    """

    title: str
    dataset: str
    config: str | None
    split: str
    column: str
    wording: str = "{}"

    @property
    def source(self) -> str:
        """`str`: description of where the prompts come from."""
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
        name (`str`): short name of the set.
        title (`str`): title of the set in tables.
        source (`str`): description of where the prompts come from, without a path.
        wording (`str`): the user message, in which `{}` stands for the prompt of the source.
        num_available (`int`): number of prompts of the source, from which the conversations were chosen.
        conversations (`tuple[Conversation, ...]`): the conversations, at least one.
    """

    name: str
    title: str
    source: str
    wording: str
    num_available: int
    conversations: tuple[Conversation, ...]

    @property
    def num_turns(self) -> int:
        """`int`: number of turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def digest(self) -> str:
        """`str`: digest of the conversations in their order."""
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
        prompt_files (`Sequence[str | Path]`): files that [`load_rows`] reads. Each is a set with the name of the file,
            without its suffixes.
        folder (`str` or `Path`, *optional*): folder with a file `NAME.jsonl` for each set, whose turns are complete
            user messages. Without it the sets are read from the Hub.
        limit (`int`, *optional*, defaults to 128): number of conversations per set, chosen at random; `None` takes
        all. seed (`int`, defaults to 0): seed of the choice.

    Returns:
        `list[PromptSet]`: sets in the order of the arguments.

    Raises:
        ValueError: a name is unknown or used twice, or a prompt is empty.
        FileNotFoundError: a file is missing.
        OSError: the Hub cannot be read.
    """
    names: dict[str, None] = {}
    for suite in suites:
        if suite not in SUITES and suite not in HUB_PROMPTS:
            raise ValueError(
                f"--suite {suite!r} is not known. Pass {', '.join(SUITES)}, which consists of "
                f"{', '.join(HUB_PROMPTS)}, or one of these sets. Pass prompts of your own with --prompts FILE."
            )
        names.update(dict.fromkeys(SUITES.get(suite, (suite,))))
    sets = [_named_set(name, folder, limit, seed) for name in names]
    for file in map(Path, prompt_files):
        name = without_lone_surrogates(file.name.removesuffix(data_suffix(file)) or file.name)
        if name in names:
            raise ValueError(
                f"--prompts {file} has the name of another set, {name!r}, and names must differ. Rename the file."
            )
        names[name] = None
        sets.append(_set_of_file(name, name, file, limit, seed))
    if not sets:
        raise ValueError(
            "There is nothing to measure, since neither a suite nor a file of prompts was passed. Pass one of them."
        )
    return sets


def _named_set(name: str, folder: str | Path | None, limit: int | None, seed: int) -> PromptSet:
    """Load a set of a suite from a folder or from the Hub."""
    hub = HUB_PROMPTS[name]
    if folder is not None:
        file = Path(folder) / f"{name}.jsonl"
        if not file.is_file():
            raise FileNotFoundError(
                f"The folder of prompts has no {file.name} for the set {name!r} ({file}). Add the file, or leave "
                "--prompts-folder out to read the sets from the Hub."
            )
        return _set_of_file(name, hub.title, file, limit, seed)
    try:
        rows = load_rows(hub.dataset, hub.config, hub.split)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The set {name!r} cannot be read from the Hub ({hub.source}): {error}. To measure without the Hub, pass "
            f'--prompts-folder with a file {name}.jsonl of rows {{"turns": [...]}}.'
        ) from error
    return _prompt_set(name, hub.title, hub.source, rows, limit, seed, hub.column, hub.wording)


def _set_of_file(name: str, title: str, file: Path, limit: int | None, seed: int) -> PromptSet:
    """Load a set from a file."""
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
    """Make a prompt set from rows."""
    if not len(rows):
        raise ValueError(f"The set {name!r} ({source}) has no prompt, and at least one is needed. Add rows to it.")
    numbers = sample_rows(datasets.Dataset.from_dict({"number": range(len(rows))}), limit, seed)["number"]
    conversations = []
    for number in numbers:
        try:
            conversations.append(conversation_of_row(_worded(rows[number], column, wording), column=column))
        except ValueError as error:
            raise ValueError(f"The set {name!r} ({source}), row {number + 1}: {error}") from error
    return PromptSet(name, title, source, wording, len(rows), tuple(conversations))


def _worded(row: dict[str, Any], column: str | None, wording: str) -> dict[str, Any]:
    """Return the row with the user message in place of the prompt. Rows with several turns are not changed."""
    if column is None or not isinstance(row.get(column), str) or not row[column].strip():
        return row
    return {**row, column: wording.format(row[column].strip("\n"))}
