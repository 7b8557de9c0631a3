"""Settings, results and files of an evaluation: results.json, results.md and figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import write_text
from ..provenance import target_label
from .card_section import MeasuredSuite, SuiteRow
from .figures import draw_pictures
from .journal import SuiteJournal
from .prompt_sets import PromptSet
from .report import CONTENTION, DEFINITIONS, MEAN_LABEL, markdown_report
from .response_pairs import ResponsePair
from .results import MacroMean, SetResult, macro_means, summarize_all
from .settings import SuiteSettings
from .suite import SuiteEvaluation

RESULTS, REPORT = "results.json", "results.md"
TOKEN_FIELDS = ("plain_token_ids", "drafted_token_ids")  # results.json has lengths instead; the journal has both
SAMPLED_VALUES = 1024


def suite_settings(evaluation: SuiteEvaluation, target: str, draft: str) -> dict[str, Any]:
    """
    Return the settings that all pairs of a folder share.

    Args:
        evaluation ([`SuiteEvaluation`]): the evaluation.
        target (`str`), draft (`str`): names as the user gave them.

    Returns:
        `dict`: plain values without paths.
    """
    settings, stop_strings = evaluation.settings, evaluation.protocol.stop_strings
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
        **({"stop strings": stop_strings} if stop_strings else {}),  # folders of targets without them stay as they are
        "prompts": {
            name: f"{len(each.conversations)} of {each.num_available}, digest {each.digest}"
            for name, each in evaluation.sets.items()
        },
    }


def model_digest(model: nn.Module) -> str:
    """
    Compute a digest of a model's weights, which distinguishes models of the same name.

    Args:
        model (`nn.Module`): the model, on any device.

    Returns:
        `str`: hexadecimal digest of names, shapes and the first values of all parameters.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        values = parameter.detach().flatten()[:SAMPLED_VALUES].to("cpu", torch.float32)
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class SuiteOutput:
    """
    Results of a complete or interrupted evaluation.

    Args:
        record (`dict`): what was measured, where and how.
        results (`list[SetResult]`), means (`list[MacroMean]`): results of each set and setting, and means over the
            sets.
        pairs (`list[ResponsePair]`): the pairs from which they were computed.
    """

    record: dict[str, Any]
    results: list[SetResult]
    means: list[MacroMean]
    pairs: list[ResponsePair]

    def for_card(self) -> MeasuredSuite:
        """Return the facts for a model card."""
        record = self.record
        rows: list[SuiteRow] = []
        for mean in self.means:
            same = [result for result in self.results if result.setting == mean.setting]
            rows += [_card_row(result.title, result, result.acceptance_length_interval) for result in same]
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
        Write results.json, results.md and the figures.

        Args:
            folder (`str` or `Path`): folder of the evaluation.

        Returns:
            `str` or `None`: the reason if there are no figures.
        """
        folder, reason = Path(folder), None
        if self.results:
            try:
                title = f"{self.record['draft']} for {self.record['target']}, {self.record['dtype']}"
                self.record["pictures"] = draw_pictures(self.results, title, folder)
            except ImportError:
                reason = (
                    "There are no figures, since matplotlib is not installed. Run pip install 'dflash-hf[demo]', and "
                    "the same command again."
                )
        values = {
            **self.record,
            "results": [result.as_dict() for result in self.results],
            "means": [mean.as_dict() for mean in self.means],
            "pairs": [_short(pair) for pair in self.pairs],
        }
        write_text(folder / RESULTS, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(folder / REPORT, markdown_report(self.record, self.results, self.means))
        return reason


def collect(evaluation: SuiteEvaluation, journal: SuiteJournal, command: str) -> SuiteOutput:
    """
    Compute the results from the pairs of a journal.

    Args:
        evaluation ([`SuiteEvaluation`]): the evaluation.
        journal ([`SuiteJournal`]): its journal, into which all pairs were read.
        command (`str`): command that repeats the evaluation.

    Returns:
        [`SuiteOutput`]
    """
    block_size, settings = evaluation.draft.config.tokens_per_block, evaluation.settings
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
        "notes": [*([CONTENTION] if is_contended else []), *evaluation.notes],
        "definitions": DEFINITIONS,
        "target": journal.settings["target"],
        "target_revision": getattr(evaluation.target.config, "_commit_hash", None),
        "draft": journal.settings["draft"],
        "block_size": block_size,
        "verified_slots": _describe_verified(settings, block_size),
        "dtype": journal.settings["dtype"],
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "settings": journal.settings,
        "sets": [_set_record(each) for each in evaluation.sets.values()],
        "runs": journal.runs,
        "pictures": {},
    }
    return SuiteOutput(record, results, macro_means(results), _in_order(evaluation, journal.pairs))


def _describe_verified(settings: SuiteSettings, trained: int) -> str:
    """Describe how many tokens were verified."""
    if settings.tree_size is not None:
        return f"trees of {settings.tree_size}"
    return "auto" if settings.block_size == "auto" else str(settings.block_size or trained)


def _card_row(title: str, numbers: SetResult | MacroMean, interval: tuple[float, float] | None) -> SuiteRow:
    """Make a row for the model card."""
    return SuiteRow(
        title=title,
        setting=numbers.setting.label,
        num_prompts=numbers.num_prompts,
        num_responses=numbers.num_responses,
        acceptance_length=numbers.acceptance_length,
        acceptance_length_interval=interval,
        speed_up=numbers.speed_up,
        identical_share=numbers.identical_share,
    )


def _set_record(prompt_set: PromptSet) -> dict[str, Any]:
    """Describe a prompt set in the record."""
    return {
        "name": prompt_set.name,
        "title": prompt_set.title,
        "source": prompt_set.source,
        "wording": prompt_set.wording,
        "num_prompts": len(prompt_set.conversations),
        "num_turns": prompt_set.num_turns,
        "num_available": prompt_set.num_available,
    }


def _in_order(evaluation: SuiteEvaluation, pairs: Mapping[Any, ResponsePair]) -> list[ResponsePair]:
    """Sort pairs in the order of the evaluation."""
    keys: Sequence[Any] = [batch.key(turn) for batch in evaluation.batches for turn in range(batch.num_turns)]
    return [pairs[key] for key in keys if key in pairs]


def _short(pair: ResponsePair) -> dict[str, Any]:
    """Return a pair with the lengths of its responses instead of their tokens."""
    values = {each.name: getattr(pair, each.name) for each in fields(pair) if each.name not in TOKEN_FIELDS}
    lengths = {
        "num_plain_tokens": [len(tokens) for tokens in pair.plain_token_ids],
        "num_drafted_tokens": [len(tokens) for tokens in pair.drafted_token_ids],
    }
    return {**values, **lengths, "speed_up": pair.speed_up, "num_identical": pair.num_identical}
