"""Preparation of a data set: tokenisation, labels, truncation, removal of repeats, and the held-out split."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..files import digest_number
from ..target.loading import TargetText
from .conversations import CONVERSATION_COLUMNS, UnreadableRowError, parse_template_kwargs
from .dataset import TOO_LONG, UNSUPERVISED, check_sample_id, content_id, read_or_drop
from .labels import assistant_turns, messages_of, split_turns, unsupervised_turns
from .prompt_check import PromptMismatch, check_prompt
from .settings import PreparationSettings
from .token_rows import TokenizedRow

# Reasons to drop a row. They complete the sentence "3 rows were …".
OVER_LENGTH = "longer than max_length"
NO_WHOLE_BLOCK = "without room for a whole block"
MISMATCHED = "with a prompt that differs from the chat template's"
REPEATED = "with the prompt of an earlier row"
IDENTICAL = "identical to an earlier row"

HASH_BITS = 60

_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int64")),
        "supervised_mask": datasets.List(datasets.Value("bool")),
        "sample_id": datasets.Value("int64"),
        "length": datasets.Value("int64"),
        "row": datasets.Value("int64"),
        "given_id": datasets.Value("int64"),
        "split_hash": datasets.Value("int64"),
        "repeat_hash": datasets.Value("int64"),
        "drop_reason": datasets.Value("string"),
        "is_truncated": datasets.Value("bool"),
        "num_unsupervised_turns": datasets.Value("int64"),
        "ignored_keys": datasets.List(datasets.Value("string")),
        "mismatch": datasets.Value("string"),
    }
)
_OUTPUT_COLUMNS = ("input_ids", "supervised_mask", "sample_id", "length")


@dataclass(frozen=True)
class PreparedRows:
    """
    Prepared rows, and counts of what happened to the others.

    Args:
        train (`datasets.Dataset`):
            Training rows with `input_ids`, `supervised_mask`, `sample_id` and `length`.
        evaluation (`datasets.Dataset`, *optional*):
            Held-out rows with the same columns.
        num_rows (`int`):
            The number of rows that were read.
        num_after_split (`int`):
            The number of rows after assistant turns were split off, which `split_turns` raises above `num_rows`.
        dropped (`dict[str, int]`):
            The number of dropped rows by reason.
        num_truncated (`int`):
            The number of kept rows that were truncated at `max_length`.
        num_unsupervised_turns (`int`):
            The number of earlier assistant turns that carry no loss, since the template renders them differently in
            the whole conversation.
        chat_template_kwargs (`dict`):
            The template arguments that all rows share. Arguments with different values are left out.
        mismatches (`list[dict]`):
            The rows that cannot be read or embedded, that the template refuses or whose prompt differs from the
            template's, with the reason.
        ignored_keys (`dict[str, int]`):
            The keys of messages that the chat template does not render, and in how many of the kept rows.
    """

    train: datasets.Dataset
    evaluation: datasets.Dataset | None
    num_rows: int
    num_after_split: int
    dropped: dict[str, int]
    num_truncated: int
    num_unsupervised_turns: int
    chat_template_kwargs: dict[str, Any]
    mismatches: list[dict[str, Any]]
    ignored_keys: dict[str, int]


def prepare_for_training(
    rows: datasets.Dataset, target: TargetText, settings: PreparationSettings, *, num_proc: int | None = None
) -> PreparedRows:
    """
    Tokenise rows, drop unusable and repeated rows, and hold out prompts for evaluation.

    A fraction holds out the prompts whose hash is below a limit, and a number holds out the prompts with the smallest
    hashes. Neither depends on the order of the rows or on the number of processes. Of several rows with one prompt the
    first usable one is kept.

    Args:
        rows (`datasets.Dataset`):
            Rows in any form that [`tokenize_row`] accepts.
        target ([`TargetText`]):
            The tokenizer and the token ids of the target, as [`read_target`] returns them.
        settings ([`PreparationSettings`]):
            The settings of the preparation.
        num_proc (`int`, *optional*):
            The number of processes that tokenise.

    Returns:
        [`PreparedRows`]

    Raises:
        ValueError: The columns are unknown, the tokenizer has no chat template, a row breaks a rule of
            [`prepare_row`], no row is left, or a prompt differs and `on_mismatch` is `"error"`.
    """
    _check_columns(rows, target.tokenizer)
    with _interrupts_of_workers():
        converted = rows.with_format(None).map(
            partial(_convert_batch, target=target, settings=settings),
            batched=True,
            batch_size=100,
            with_indices=True,
            remove_columns=rows.column_names,
            features=_FEATURES,
            num_proc=num_proc,
            load_from_cache_file=False,  # a cached result would survive a change of this code
            desc="Tokenising",
        )
    facts = converted.select_columns([name for name in _FEATURES if name not in ("input_ids", "supervised_mask")])[:]
    mismatches = [json.loads(line) for line in facts["mismatch"] if line]
    _check_mismatches(mismatches, len(converted), settings)
    reasons = _reasons_with_repeats(facts, keep_repeats=settings.keep_repeats)
    kept = [index for index, reason in enumerate(reasons) if not reason]
    dropped = dict(Counter(reason for reason in reasons if reason).most_common())
    if not kept:
        counts = ", ".join(f"{count} were {reason}" for reason, count in dropped.items())
        refused = next((line for line in mismatches if line["is_refused"]), None)
        first = f" The first refusal is of row {refused['row']}: {refused['reason']}" if refused else ""
        raise ValueError(
            f"No usable row is left: {len(rows)} rows were read, and {counts}.{first} Pass rows with completions, or "
            "raise max_length."
        )
    train, evaluation = _split(converted, facts, kept, settings)
    return PreparedRows(
        train=train,
        evaluation=evaluation,
        num_rows=len(rows),
        num_after_split=len(converted),
        dropped=dropped,
        num_truncated=sum(facts["is_truncated"][index] for index in kept),
        num_unsupervised_turns=sum(facts["num_unsupervised_turns"][index] for index in kept),
        chat_template_kwargs=common_template_kwargs(rows, settings.chat_template_kwargs),
        mismatches=mismatches,
        ignored_keys=dict(Counter(name for index in kept for name in facts["ignored_keys"][index]).most_common()),
    )


def common_template_kwargs(rows: datasets.Dataset, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the template arguments that all rows share.

    Args:
        rows (`datasets.Dataset`): Rows whose own arguments are in the column `chat_template_kwargs`, if there is one.
        defaults (`Mapping`): Arguments of every row. Those of a row take precedence.

    Returns:
        `dict`
    """
    own = rows["chat_template_kwargs"][:] if "chat_template_kwargs" in rows.column_names else [None]
    all_kwargs = [{**defaults, **_kwargs_or_none(kwargs)} for kwargs in own]
    return {
        name: value for name, value in all_kwargs[0].items() if all(kwargs.get(name) == value for kwargs in all_kwargs)
    }


def _kwargs_or_none(value: Any) -> dict[str, Any]:
    """Return the template arguments of a row, or none if they cannot be read, since such a row is dropped."""
    try:
        return parse_template_kwargs(value or {})
    except UnreadableRowError:
        return {}


def split_hash(row: Mapping[str, Any], tokenized: TokenizedRow, seed: int) -> int:
    """
    Hash the user messages before the first response, which decide whether a row is held out.

    White space is normalised. A row without text is hashed by the tokens before its first supervised token.

    Args:
        row (`Mapping`): A row in any form that [`tokenize_row`] accepts.
        tokenized ([`TokenizedRow`]): The same row, tokenised.
        seed (`int`): The seed of the hash.

    Returns:
        `int`: An evenly distributed number in 0 … 2^60 - 1.
    """
    messages = messages_of(row)
    if messages is None:
        prompt = _prompt_text_or_ids(row, tokenized)
    else:
        first_turn = next(iter(assistant_turns(messages)), len(messages))
        before = messages[:first_turn]
        prompt = [_normalized_content(message) for message in before if message["role"] == "user"]
        prompt = prompt or [_normalized_content(message) for message in before]
    return _hash([seed, prompt])


def repeat_hash(row: Mapping[str, Any], tokenized: TokenizedRow) -> int:
    """
    Hash everything that the target reads in a row: all messages but the responses, the tools, the template arguments.

    White space is normalised. Two rows with the same hash repeat each other's prompt.

    Args:
        row, tokenized: The arguments of [`split_hash`].

    Returns:
        `int`: A number in 0 … 2^60 - 1.
    """
    messages = messages_of(row)
    if messages is None:
        return _hash(_prompt_text_or_ids(row, tokenized))
    asked = [[message["role"], _normalized_content(message)] for message in messages if message["role"] != "assistant"]
    return _hash([asked, row.get("tools"), row.get("chat_template_kwargs")])


@contextmanager
def _interrupts_of_workers() -> Iterator[None]:
    """
    Raise the `KeyboardInterrupt` that `Dataset.map` with worker processes replaces by an error of its own.

    datasets 5.2 waits for the workers while the interrupt is raised, and that wait ends in a `TimeoutError` of
    multiprocess 0.70, which has the interrupt as its context.
    """
    try:
        yield
    finally:
        error = sys.exception()
        if error is not None and isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def _check_columns(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise an error if the rows have no columns to prepare, or need a chat template that the tokenizer lacks."""
    columns = set(rows.column_names)
    if not len(rows):
        raise ValueError("The data set is empty, and preparing needs at least one row. Pass rows of `messages`.")
    if "segment_ids" in columns:
        raise ValueError("The rows are packed rows, which cannot be prepared again. Pass the documents in them.")
    conversations = columns & set(CONVERSATION_COLUMNS)
    if not conversations and "input_ids" not in columns and not columns >= {"prompt", "completion"}:
        raise ValueError(
            f"The rows have the columns {sorted(columns)}, and they need `messages`, or `prompt` and `completion`, or "
            "`input_ids`. Rename the columns. To generate responses to prompts, run dflash-hf regenerate."
        )
    is_text = not conversations and isinstance(rows[0].get("completion"), str)
    if not tokenizer.chat_template and not is_text and (conversations or "prompt" in columns):
        raise ValueError(
            "The target's tokenizer has no chat template, and messages cannot be rendered without one. Pass `prompt` "
            "and `completion` texts, or `input_ids`, or a target with a chat template."
        )


def _convert_batch(
    batch: Mapping[str, list[Any]], indices: list[int], *, target: TargetText, settings: PreparationSettings
) -> dict[str, list[Any]]:
    """Tokenise a batch in the form that `datasets` uses with `batched=True`."""
    converted = []
    for position, index in enumerate(indices):
        row = {name: values[position] for name, values in batch.items()}
        try:
            converted += _convert_row(row, index, target, settings)
        except ValueError as error:
            raise ValueError(f"Row {index}: {error}") from error
    return {name: [row[name] for row in converted] for name in _FEATURES}


def _convert_row(
    row: Mapping[str, Any], index: int, target: TargetText, settings: PreparationSettings
) -> list[dict[str, Any]]:
    """Tokenise a row, and with `split_turns` make another row for each assistant turn that carries no loss in it."""
    kwargs = settings.chat_template_kwargs
    converted, tokenized, reason, refusal = read_or_drop(
        row,
        target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        chat_template_kwargs=kwargs,
        num_embeddings=target.num_embeddings,
    )
    given_id = row.get("sample_id")
    if given_id is not None:
        check_sample_id(given_id)
    turns = tokenized.unsupervised_turns
    if not refusal and row.get("input_ids") is not None and messages_of(converted) is not None:
        turns = unsupervised_turns(converted, tokenized, target.tokenizer, kwargs)
    mismatch = None if refusal else check_prompt(converted, tokenized, target.tokenizer, kwargs)
    ids, mask = tokenized.input_ids[: settings.max_length], tokenized.supervised_mask[: settings.max_length]
    drop_reason = reason or _drop_reason(tokenized, mismatch, settings)
    prepared = {
        "input_ids": ids,
        "supervised_mask": mask,
        "sample_id": content_id(ids, mask),
        "length": len(ids),
        "row": index,
        "given_id": given_id,
        "split_hash": 0 if refusal else split_hash(converted, tokenized, settings.seed),
        "repeat_hash": 0 if refusal else repeat_hash(converted, tokenized),
        "drop_reason": drop_reason,
        "is_truncated": len(ids) < len(tokenized.input_ids) and not drop_reason,
        "num_unsupervised_turns": len(turns),
        "ignored_keys": list(tokenized.ignored_keys),
        "mismatch": _mismatch_line(index, refusal, mismatch),
    }
    if not settings.split_turns or not turns:
        return [prepared]
    split: list[dict[str, Any]] = []
    for turn in split_turns(converted, turns):
        split += _convert_row(turn, index, target, settings)
    return [{**prepared, "num_unsupervised_turns": 0}, *split]


def _drop_reason(tokenized: TokenizedRow, mismatch: PromptMismatch | None, settings: PreparationSettings) -> str:
    """Return why a row that was read is dropped, or an empty text if it is kept."""
    full_mask, mask = tokenized.supervised_mask, tokenized.supervised_mask[: settings.max_length]
    if not any(full_mask[1:]):
        return UNSUPERVISED
    if len(full_mask) > settings.max_length and settings.truncation == "drop":
        return OVER_LENGTH
    if not any(mask[1:]):
        return TOO_LONG
    if settings.block_size is not None and not any(mask[1 : len(mask) - settings.block_size + 2]):
        return NO_WHOLE_BLOCK
    return MISMATCHED if mismatch is not None and settings.on_mismatch == "drop" else ""


def _mismatch_line(index: int, refusal: str, mismatch: PromptMismatch | None) -> str:
    """Return the line of JSON about a row that the template refuses or whose prompt differs, or an empty text."""
    if refusal:
        line: dict[str, Any] = {"row": index, "is_refused": True, "reason": refusal}
    elif mismatch is not None:
        line = {"row": index, "is_refused": False, **mismatch.as_dict()}
    else:
        return ""
    return json.dumps(line, ensure_ascii=False)


def _check_mismatches(mismatches: Sequence[Mapping[str, Any]], num_rows: int, settings: PreparationSettings) -> None:
    """Raise an error if a prompt differs and `on_mismatch` is `"error"`."""
    differing = [line for line in mismatches if not line["is_refused"]]
    if differing and settings.on_mismatch == "error":
        raise ValueError(
            f"{len(differing)} of {num_rows} rows have a prompt that differs from the chat template's. The first is "
            f"row {differing[0]['row']}: {differing[0]['reason']}. Pass on_mismatch='keep' or 'drop', or the "
            "chat_template_kwargs with which the rows were made."
        )


def _reasons_with_repeats(facts: Mapping[str, list[Any]], *, keep_repeats: bool) -> list[str]:
    """Return the reasons to drop each row, the repetition of an earlier usable row included."""
    reasons = list(facts["drop_reason"])
    first_rows: dict[int, int] = {}
    seen: set[int] = set()
    columns = zip(facts["row"], facts["repeat_hash"], facts["sample_id"], strict=True)
    for index, (row, prompt, content) in enumerate(columns):
        if reasons[index]:
            continue
        if content in seen:
            reasons[index] = IDENTICAL
        elif not keep_repeats and first_rows.setdefault(prompt, row) != row:
            reasons[index] = REPEATED
        else:
            seen.add(content)
    return reasons


def _split(
    converted: datasets.Dataset, facts: Mapping[str, list[Any]], kept: Sequence[int], settings: PreparationSettings
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the training rows and the held-out rows, with their sample ids."""
    held_out = _held_out_prompts([facts["split_hash"][index] for index in kept], settings)
    given_ids, content_ids = ([facts[name][index] for index in kept] for name in ("given_id", "sample_id"))
    sample_ids = dict(zip(kept, _sample_ids(given_ids, content_ids), strict=True))

    def part(indices: list[int]) -> datasets.Dataset:
        rows = converted.select(indices).remove_columns("sample_id")
        rows = rows.add_column("sample_id", [sample_ids[index] for index in indices])
        return rows.select_columns(list(_OUTPUT_COLUMNS))

    train, evaluation = (
        [index for index in kept if (facts["split_hash"][index] in held_out) == is_held_out]
        for is_held_out in (False, True)
    )
    if not train:
        raise ValueError(
            f"eval_rows={settings.eval_rows} would hold out all of the {len(kept)} usable rows, and training needs at "
            "least one. Hold out fewer."
        )
    return part(train), part(evaluation) if evaluation else None


def _held_out_prompts(split_hashes: Sequence[int], settings: PreparationSettings) -> set[int]:
    """Return the hashes of the held-out prompts."""
    if settings.eval_rows < 1:
        limit = settings.eval_rows * 2**HASH_BITS
        return {prompt for prompt in split_hashes if prompt < limit}
    counts = sorted(Counter(split_hashes).items())
    before = [0, *accumulate(count for _, count in counts)]
    return {prompt for (prompt, _), taken in zip(counts, before, strict=False) if taken < settings.eval_rows}


def _sample_ids(given_ids: Sequence[int | None], content_ids: Sequence[int]) -> list[int]:
    """Return the given ids if they are distinct, and ids computed from the content for all other rows."""
    given = [identity for identity in given_ids if identity is not None]
    if len(set(given)) < len(given):
        return list(content_ids)
    pairs = zip(given_ids, content_ids, strict=True)
    return [content if identity is None else identity for identity, content in pairs]


def _prompt_text_or_ids(row: Mapping[str, Any], tokenized: TokenizedRow) -> Any:
    """Return the normalised prompt of a row without messages, or its tokens if it has no text."""
    if isinstance(row.get("prompt"), str):
        return " ".join(row["prompt"].split())
    mask = tokenized.supervised_mask
    first = mask.index(True) if any(mask) else 0
    return tokenized.input_ids[:first] or tokenized.input_ids


def _normalized_content(message: Mapping[str, Any]) -> str:
    """Return the content of a message with single spaces for all white space."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    return " ".join(text.split())


def _hash(value: Any) -> int:
    """Hash a JSON value to `HASH_BITS` bits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return digest_number(text, size=8) >> (64 - HASH_BITS)
