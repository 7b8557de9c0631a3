"""The folder of an evaluation: its journal while it runs, tables, numbers and pictures at the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from ..files import (
    SETTINGS,
    Journal,
    lock_folder,
    read_journal,
    read_settings,
    refuse_foreign_files,
    refuse_other_settings,
    remove_partial_files,
    write_text,
)
from ..provenance import target_label
from .card_section import MeasuredSuite, SuiteRow
from .report import CONTENTION, DEFINITIONS, MEAN_LABEL, draw_pictures, markdown_report
from .results import AnswerPair, MacroMean, SetResult, macro_means, summarize_all
from .settings import SuiteSettings
from .suite import SuiteEvaluation

JOURNALS = "answers-*.jsonl"  # one a process
SAMPLED_VALUES = 1024


class SuiteJournal:
    """
    What an evaluation has answered, kept so that a kill at any moment loses no pair that was finished.

    Every process writes a file of its own, one line a pair. A later run reads all of them, whatever its number of
    processes, and drops the half line that a kill can leave.

    Args:
        folder (`str` or `Path`): made if it is not there.
        settings (`Mapping`): what all answers of the folder have in common (JSON values); other settings are refused.
        process_index (`int`, defaults to 0): of this process; the first one locks the folder.

    Raises (when entered):
        ValueError: the folder has other settings, other files or a damaged journal.
        RuntimeError: another run is writing there.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], process_index: int = 0) -> None:
        self.folder, self.settings = Path(folder), json.loads(json.dumps(settings))
        self.process_index = process_index
        self.pairs: dict[Any, AnswerPair] = {}
        self.runs: list[dict[str, Any]] = []
        self._journal: Journal | None = None  # opened by `begin`
        self._lock: FileLock | None = None  # of the first process

    def __enter__(self) -> SuiteJournal:
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file. Results are several files: name a folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        if self.process_index == 0:
            self._lock = lock_folder(self.folder)
            remove_partial_files(self.folder)
            text = json.dumps(self.settings, indent=1, ensure_ascii=False) + "\n"
            write_text(self.folder / SETTINGS, text)
        self.read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            self._lock.release()

    def begin(self, run: Mapping[str, Any]) -> None:
        """
        Open the file of this process, and say in it where the pairs after it are made.

        Args:
            run (`Mapping`): hardware, software and whatever else may differ between runs.
        """
        self._journal = Journal(self.folder / JOURNALS.replace("*", f"{self.process_index:05d}"))
        self._journal.append({"run": dict(run)})

    def add(self, pair: AnswerPair) -> None:
        """Keep a pair: it is safe from a kill when this returns."""
        if self._journal is None:
            raise RuntimeError("A pair was added before the run began. Call SuiteJournal.begin first.")
        self._journal.append(asdict(pair))
        self.pairs[pair.key] = pair

    def read(self) -> None:
        """Read the files of all processes anew, whole lines only."""
        self.pairs, self.runs = {}, []
        for path in sorted(self.folder.glob(JOURNALS)):
            for entry in read_journal(path, _run_or_pair):
                if isinstance(entry, AnswerPair):
                    self.pairs.setdefault(entry.key, entry)
                elif entry not in self.runs:
                    self.runs.append(entry)

    def _check_settings(self) -> None:
        earlier = read_settings(self.folder)
        if earlier is not None:
            refuse_other_settings(self.folder, earlier, self.settings)
        elif self.process_index == 0:
            refuse_foreign_files(self.folder)


def _run_or_pair(entry: dict[str, Any]) -> dict[str, Any] | AnswerPair:
    return entry["run"] if "run" in entry else AnswerPair(**entry)


def model_digest(model: nn.Module) -> str:
    """
    Tell models of the same name apart: a digest of names, shapes and the first values of all parameters.

    Args:
        model (`nn.Module`): on any device.

    Returns:
        `str`
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:SAMPLED_VALUES].to("cpu", torch.float32)
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


RESULTS, REPORT = "results.json", "results.md"
_LONG_FIELDS = ("plain_token_ids", "drafted_token_ids")  # in the journal alone


@dataclass(frozen=True)
class SuiteOutput:
    """
    What an evaluation has found so far.

    Args:
        record (`dict`): what was measured, where and how.
        results (`list[SetResult]`), means (`list[MacroMean]`): the numbers.
        pairs (`list[AnswerPair]`): what they are made of.
    """

    record: dict[str, Any]
    results: list[SetResult]
    means: list[MacroMean]
    pairs: list[AnswerPair]

    def for_card(self) -> MeasuredSuite:
        """What a model card says of it."""
        record = self.record
        rows: list[SuiteRow] = []
        for mean in self.means:
            same = [result for result in self.results if result.setting == mean.setting]
            rows += [_card_row(result.title, result, result.accept_len_interval) for result in same]
            if len(same) > 1:
                rows.append(_card_row(MEAN_LABEL, mean, None))
        return MeasuredSuite(
            rows=tuple(rows),
            command=record["command"],
            block_size=record["block_size"],
            verified_slots=record["verified_slots"],
            max_new_tokens=record["max_new_tokens"],
            dtype=record["dtype"],
            seed=record["seed"],
            machines=tuple(dict.fromkeys(f"{run['hardware']}; {run['software']}" for run in record["runs"])),
            note=CONTENTION if record["is_contended"] else None,
            pictures=record["pictures"],
        )

    def write(self, folder: str | Path) -> str | None:
        """
        Write the files.

        Args:
            folder (`str` or `Path`): of the evaluation.

        Returns:
            `str`, *optional*: why there are no pictures.
        """
        folder, reason = Path(folder), None
        if self.results:
            try:
                title = f"{self.record['draft']} for {self.record['target']}, {self.record['dtype']}"
                self.record["pictures"] = draw_pictures(self.results, title, folder)
            except ImportError:
                reason = "There are no pictures, since matplotlib is not installed: pip install 'dflash-hf[demo]'."
        values = {
            **self.record,
            "results": [result.as_dict() for result in self.results],
            "means": [mean.as_dict() for mean in self.means],
            "pairs": [_short(pair) for pair in self.pairs],
        }
        write_text(folder / RESULTS, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(folder / REPORT, markdown_report(self.record, self.results, self.means))
        return reason


def suite_settings(evaluation: SuiteEvaluation, target: str, draft: str) -> dict[str, Any]:
    """
    What all answers of a folder have in common.

    Args:
        evaluation ([`SuiteEvaluation`]): of the run.
        target (`str`), draft (`str`): names as they were given.

    Returns:
        `dict` of plain values, without a path.
    """
    settings = evaluation.settings
    return {
        "target": target_label(target),
        "target weights": model_digest(evaluation.target),
        "draft": target_label(draft),
        "draft weights": model_digest(evaluation.draft),
        "dtype": str(evaluation.target.dtype).removeprefix("torch."),
        "device": evaluation.target.device.type,
        "block_size": settings.block_size or "trained",
        "tree_size": settings.tree_size,
        "max_new_tokens": settings.max_new_tokens,
        "temperatures": list(settings.temperatures),
        "thinking": list(evaluation.thinking),
        "batch_sizes": list(settings.batch_sizes),
        "seed": settings.seed,
        "prompts": {
            name: f"{len(each.conversations)} of {each.num_available}, digest {each.digest}"
            for name, each in evaluation.sets.items()
        },
    }


def _verified_in_words(settings: SuiteSettings, trained: int) -> str:
    if settings.tree_size is not None:
        return f"trees of {settings.tree_size}"
    return "auto" if settings.block_size == "auto" else str(settings.block_size or trained)


def collect(evaluation: SuiteEvaluation, journal: SuiteJournal, command: str) -> SuiteOutput:
    """
    Add up what a folder holds.

    Args:
        evaluation ([`SuiteEvaluation`]): of the run.
        journal ([`SuiteJournal`]): with all pairs read.
        command (`str`): that makes the same again.

    Returns:
        [`SuiteOutput`]
    """
    block_size, settings = evaluation.draft.config.block_size, evaluation.settings
    titles = {name: each.title for name, each in evaluation.sets.items()}
    results = summarize_all(journal.pairs.values(), titles, block_size, settings.max_new_tokens)
    is_contended = any(run["num_processes"] > 1 for run in journal.runs)
    record: dict[str, Any] = {
        "made_by": "dflash-hf eval",
        "command": command,
        "is_complete": len(journal.pairs) == evaluation.num_pairs,
        "num_pairs": len(journal.pairs),
        "num_pairs_wanted": evaluation.num_pairs,
        "is_contended": is_contended,
        "notes": [CONTENTION] if is_contended else [],
        "definitions": DEFINITIONS,
        "target": journal.settings["target"],
        "target_revision": getattr(evaluation.target.config, "_commit_hash", None),
        "draft": journal.settings["draft"],
        "block_size": block_size,
        "verified_slots": _verified_in_words(settings, block_size),
        "dtype": journal.settings["dtype"],
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "settings": journal.settings,
        "sets": [_set_record(each) for each in evaluation.sets.values()],
        "runs": journal.runs,
        "pictures": {},
    }
    return SuiteOutput(record, results, macro_means(results), _in_order(evaluation, journal.pairs))


def _card_row(title: str, numbers: SetResult | MacroMean, interval: tuple[float, float] | None) -> SuiteRow:
    return SuiteRow(
        title=title,
        setting=numbers.setting.label,
        num_prompts=numbers.num_prompts,
        num_answers=numbers.num_answers,
        accept_len=numbers.accept_len,
        accept_len_interval=interval,
        speed_up=numbers.speed_up,
        identical_share=numbers.identical_share,
    )


def _set_record(prompt_set: Any) -> dict[str, Any]:
    return {
        "name": prompt_set.name,
        "title": prompt_set.title,
        "source": prompt_set.source,
        "wording": prompt_set.wording,
        "num_prompts": len(prompt_set.conversations),
        "num_turns": prompt_set.num_turns,
        "num_available": prompt_set.num_available,
    }


def _in_order(evaluation: SuiteEvaluation, pairs: Mapping[Any, AnswerPair]) -> list[AnswerPair]:
    keys: Sequence[Any] = [batch.key(turn) for batch in evaluation.batches for turn in range(batch.num_turns)]
    return [pairs[key] for key in keys if key in pairs]


def _short(pair: AnswerPair) -> dict[str, Any]:
    """A pair without its text."""
    values = {each.name: getattr(pair, each.name) for each in fields(pair) if each.name not in _LONG_FIELDS}
    lengths = {
        "num_plain_tokens": [len(row) for row in pair.plain_token_ids],
        "num_drafted_tokens": [len(row) for row in pair.drafted_token_ids],
    }
    return {**values, **lengths, "speed_up": pair.speed_up, "num_identical": pair.num_identical}
