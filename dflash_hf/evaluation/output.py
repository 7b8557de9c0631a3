"""The files of an evaluation: `results.json`, `results.md` and pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..files import replace_file
from ..hub.model_card import DraftCard, write_model_card
from ..regeneration.shards import target_label
from .answer_pairs import AnswerPair
from .card_section import MeasuredSuite, SuiteRow
from .journal import SuiteJournal, model_digest
from .pictures import draw_pictures
from .report import CONTENTION, DEFINITIONS, MEAN_LABEL, markdown_report
from .results import MacroMean, SetResult, macro_means, summarize_all
from .suite import SuiteEvaluation, SuiteSettings

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
        _write(folder / RESULTS, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        _write(folder / REPORT, markdown_report(self.record, self.results, self.means))
        return reason


def write_suite_card(draft_folder: str | Path, output: SuiteOutput, folder: str | Path) -> bool:
    """
    Write the results into the model card of a saved draft, and their pictures beside it.

    Args:
        draft_folder (`str` or `Path`): where the draft is saved.
        output ([`SuiteOutput`]): written.
        folder (`str` or `Path`): of the evaluation, which has the pictures.

    Returns:
        `bool`: as of [`write_model_card`].
    """
    for name in output.record["pictures"]:
        shutil.copyfile(Path(folder) / name, Path(draft_folder) / name)
    card = replace(DraftCard.from_folder(draft_folder), suite=output.for_card())
    return write_model_card(draft_folder, card)


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


def _write(path: Path, text: str) -> None:
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))
