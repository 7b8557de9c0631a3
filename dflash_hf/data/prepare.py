"""From conversations to tokenised training rows: labels, truncation, repeats, and the held-out split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..blocks.plan import MAX_SAMPLE_ID
from ..files import digest_number
from ..target.loading import TargetText
from .chat_template import TemplateError, without_nulls
from .dataset import TOO_LONG, UNSUPERVISED, content_id
from .labels import SupervisedRow, answers_without_loss, conversation_of, read_row, split_turns
from .prompt_check import PrefixMismatch, check_prefix
from .settings import PreparationSettings

HASH_BITS = 60


def prompt_hash(row: Mapping[str, Any], read: SupervisedRow, seed: int) -> int:
    """
    A number made of what the user says before the first answer, in any spacing.

    Args:
        row (`Mapping`): as [`tokenize_row`] takes it.
        read ([`SupervisedRow`]): the same row as ids; what precedes the first answer counts where there is no text.
        seed (`int`): gives other numbers.

    Returns:
        `int`: 0 … 2^60 - 1, spread evenly.
    """
    messages = _messages_or_none(row)
    if messages is None:
        words = _text_or_ids(row, read)
    else:
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        words = [_words(message) for message in messages[:first] if message["role"] == "user"]
        words = words or [_words(message) for message in messages[:first]]
    return _hash([seed, words])


def question_hash(row: Mapping[str, Any], read: SupervisedRow) -> int:
    """
    A number made of all that the target is asked with, in any spacing: every turn, the tools, the template arguments.

    Args:
        row, read: as in [`prompt_hash`].

    Returns:
        `int`: 0 … 2^60 - 1.
    """
    messages = _messages_or_none(row)
    if messages is None:
        return _hash(_text_or_ids(row, read))
    asked = [[message["role"], _words(message)] for message in messages if message["role"] != "assistant"]
    return _hash([asked, row.get("tools"), row.get("chat_template_kwargs")])


def _messages_or_none(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if row.get("messages") is None and not isinstance(row.get("completion"), (list, tuple)):
        return None
    return conversation_of(row)[0]


def _text_or_ids(row: Mapping[str, Any], read: SupervisedRow) -> Any:
    if isinstance(row.get("prompt"), str):
        return " ".join(row["prompt"].split())
    first = read.mask.index(True) if any(read.mask) else 0
    return read.ids[:first] or read.ids


def _words(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)
    return " ".join(text.split())


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return digest_number(text, size=8) >> (64 - HASH_BITS)


OVER_LENGTH = "longer than max_length"
NO_WINDOW = "without room for a block"
REFUSED = "refused by the chat template"
MISMATCHED = "with another prompt than the chat template's"
REPEATED = "with the prompt of an earlier row"
IDENTICAL = "equal to an earlier row"


_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int64")),
        "supervised_mask": datasets.List(datasets.Value("bool")),
        "sample_id": datasets.Value("int64"),
        "length": datasets.Value("int64"),
        "row": datasets.Value("int64"),
        "given_id": datasets.Value("int64"),
        "prompt_hash": datasets.Value("int64"),
        "question_hash": datasets.Value("int64"),
        "drop_reason": datasets.Value("string"),
        "is_cut": datasets.Value("bool"),
        "num_lost": datasets.Value("int64"),
        "mismatch": datasets.Value("string"),
    }
)
_OUTPUT_COLUMNS = ("input_ids", "supervised_mask", "sample_id", "length")


@dataclass(frozen=True)
class PreparedRows:
    """
    Prepared rows and what became of the others.

    Args:
        train (`datasets.Dataset`), evaluation (`datasets.Dataset`, *optional*):
            `input_ids`, `supervised_mask`, `sample_id`, `length`.
        num_rows (`int`): rows that came in.
        num_answers (`int`): rows that they became; more than came in with `split_turns`.
        dropped (`dict[str, int]`): of these, by reason.
        num_cut (`int`): kept rows that were cut at `max_length`.
        num_lost_answers (`int`): earlier answers that carry no loss, since the template renders them otherwise now.
        chat_template_kwargs (`dict`): what the template gets for every row; values that differ between rows are left
            out.
        mismatches (`list[dict]`): rows with another prompt than the template's, and refused rows, with the reason.
    """

    train: datasets.Dataset
    evaluation: datasets.Dataset | None
    num_rows: int
    num_answers: int
    dropped: dict[str, int]
    num_cut: int
    num_lost_answers: int
    chat_template_kwargs: dict[str, Any]
    mismatches: list[dict[str, Any]]


def prepare_for_training(
    rows: datasets.Dataset, target: TargetText, settings: PreparationSettings, *, num_proc: int | None = None
) -> PreparedRows:
    """
    Tokenise rows, drop what cannot be trained on, repeats too, and hold out prompts.

    Which side a prompt lands on depends on its words alone if a share is held out, and on the smallest hashes if a
    number is; never on the order of rows or on processes. Of rows with one prompt the first that can be used is kept.

    Args:
        rows (`datasets.Dataset`):
            As [`tokenize_row`] takes them.
        target ([`TargetText`]):
            As [`read_target`] gives it.
        settings ([`PreparationSettings`]):
            What to do with them.
        num_proc (`int`, *optional*):
            Processes that tokenise.

    Returns:
        [`PreparedRows`]

    Raises:
        ValueError: the columns are unknown, the tokenizer has no chat template, a row breaks a rule of `prepare_row`,
            no row is left, or a prompt differs and `on_mismatch` is `"error"`.
    """
    _check_columns(rows, target.tokenizer)
    converted = rows.with_format(None).map(
        partial(_convert_batch, target=target, settings=settings),
        batched=True,
        batch_size=100,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_FEATURES,
        num_proc=num_proc,
        load_from_cache_file=False,  # a cached result would outlive the code that made it
        desc="Tokenising",
    )
    facts = converted.select_columns([name for name in _FEATURES if name not in ("input_ids", "supervised_mask")])[:]
    mismatches = [json.loads(line) for line in facts["mismatch"] if line]
    _check_mismatches(mismatches, len(converted), settings)
    reasons = _with_repeats(facts, keep_repeats=settings.keep_repeats)
    kept = [index for index, reason in enumerate(reasons) if not reason]
    dropped = dict(Counter(reason for reason in reasons if reason).most_common())
    if not kept:
        words = ", ".join(f"{count} were {reason}" for reason, count in dropped.items())
        raise ValueError(
            f"No usable row is left: {len(rows)} rows came in, {words}. Give rows with answers, or raise max_length."
        )
    train, evaluation = _parts(converted, facts, kept, settings)
    return PreparedRows(
        train=train,
        evaluation=evaluation,
        num_rows=len(rows),
        num_answers=len(converted),
        dropped=dropped,
        num_cut=sum(facts["is_cut"][index] for index in kept),
        num_lost_answers=sum(facts["num_lost"][index] for index in kept),
        chat_template_kwargs=common_template_kwargs(rows, settings.chat_template_kwargs),
        mismatches=mismatches,
    )


def _check_mismatches(mismatches: Sequence[Mapping[str, Any]], num_rows: int, settings: PreparationSettings) -> None:
    differing = [line for line in mismatches if not line["is_refused"]]
    if differing and settings.on_mismatch == "error":
        raise ValueError(
            f"{len(differing)} of {num_rows} rows have another prompt than the chat template gives; the first is row "
            f"{differing[0]['row']}: {differing[0]['reason']}. Pass on_mismatch='keep' or 'drop', or give the "
            "chat_template_kwargs that the rows were made with."
        )


def _parts(
    converted: datasets.Dataset, facts: Mapping[str, list[Any]], kept: Sequence[int], settings: PreparationSettings
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Training rows and held-out rows, with their sample ids."""
    held_out = _held_out_prompts([facts["prompt_hash"][index] for index in kept], settings)
    given_ids, content_ids = ([facts[name][index] for index in kept] for name in ("given_id", "sample_id"))
    sample_ids = dict(zip(kept, _sample_ids(given_ids, content_ids), strict=True))

    def part(indices: list[int]) -> datasets.Dataset:
        rows = converted.select(indices).remove_columns("sample_id")
        rows = rows.add_column("sample_id", [sample_ids[index] for index in indices])
        return rows.select_columns(list(_OUTPUT_COLUMNS))

    train, evaluation = (
        [index for index in kept if (facts["prompt_hash"][index] in held_out) == is_held_out]
        for is_held_out in (False, True)
    )
    if not train:
        raise ValueError(
            f"eval_rows={settings.eval_rows} would hold out all of the {len(kept)} usable rows. Hold out fewer."
        )
    return part(train), part(evaluation) if evaluation else None


def common_template_kwargs(rows: datasets.Dataset, for_all: Mapping[str, Any]) -> dict[str, Any]:
    """
    Template arguments that all rows have.

    Args:
        rows (`datasets.Dataset`): their own are in the column `chat_template_kwargs`, if it is there.
        for_all (`Mapping`): what a row has that does not say otherwise.

    Returns:
        `dict`
    """
    own = rows["chat_template_kwargs"][:] if "chat_template_kwargs" in rows.column_names else [None]
    all_kwargs = [{**for_all, **without_nulls(kwargs or {})} for kwargs in own]
    return {
        name: value for name, value in all_kwargs[0].items() if all(kwargs.get(name) == value for kwargs in all_kwargs)
    }


def _check_columns(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    columns = set(rows.column_names)
    if not len(rows):
        raise ValueError("The data set has no rows. Give it rows of `messages`, for instance.")
    if "segment_ids" in columns:
        raise ValueError("These are packed rows. Give the documents they were packed of.")
    if not columns & {"input_ids", "messages"} and not columns >= {"prompt", "completion"}:
        raise ValueError(
            f"The rows have the columns {sorted(columns)}; they need `messages`, or `prompt` and `completion`, or "
            "`input_ids`. Rename the columns; prompts without answers are answered by dflash-hf regenerate."
        )
    is_text = "messages" not in columns and isinstance(rows[0].get("completion"), str)
    if not tokenizer.chat_template and not is_text and columns & {"messages", "prompt"}:
        raise ValueError(
            "The target's tokenizer has no chat template, so that messages cannot be rendered. Give `prompt` and "
            "`completion` texts, or `input_ids`, or a target that was trained for chats."
        )


def _convert_batch(
    batch: Mapping[str, list[Any]], indices: list[int], *, target: TargetText, settings: PreparationSettings
) -> dict[str, list[Any]]:
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
    """A row, and with `split_turns` one more for each answer that carries no loss in it."""
    kwargs = settings.chat_template_kwargs
    refusal = ""
    try:
        read = read_row(row, target.tokenizer, eos_token_ids=target.eos_token_ids, chat_template_kwargs=kwargs)
    except TemplateError as error:
        read, refusal = SupervisedRow([], []), str(error)
    lost = read.lost_answers
    if row.get("input_ids") is not None and row.get("messages") is not None:
        lost = answers_without_loss(row, read, target.tokenizer, kwargs)
    mismatch = None if refusal else check_prefix(row, read, target.tokenizer, kwargs)
    whole = {
        "row": index,
        "given_id": _given_id(row),
        "prompt_hash": prompt_hash(row, read, settings.seed),
        "question_hash": question_hash(row, read),
        "num_lost": len(lost),
        **_checked(read, refusal, mismatch, index, target, settings),
    }
    if not settings.split_turns or not lost:
        return [whole]
    turns: list[dict[str, Any]] = []
    for turn in split_turns(row, lost):
        turns += _convert_row(turn, index, target, settings)
    return [{**whole, "num_lost": 0}, *turns]


def _checked(
    read: SupervisedRow,
    refusal: str,
    mismatch: PrefixMismatch | None,
    index: int,
    target: TargetText,
    settings: PreparationSettings,
) -> dict[str, Any]:
    """The row within `max_length`, and why it is dropped if it is."""
    if read.ids and (min(read.ids) < 0 or max(read.ids) >= target.num_embeddings):
        wrong = min(read.ids) if min(read.ids) < 0 else max(read.ids)
        raise ValueError(
            f"it contains token {wrong}, and the target has the {target.num_embeddings} tokens from 0 on. Tokenise "
            "with the target's own tokenizer."
        )
    ids, mask = read.ids[: settings.max_length], read.mask[: settings.max_length]
    is_over_length = len(read.ids) > settings.max_length
    if refusal:
        reason = REFUSED
    elif not any(read.mask[1:]):
        reason = UNSUPERVISED
    elif is_over_length and settings.truncation == "drop":
        reason = OVER_LENGTH
    elif not any(mask[1:]):
        reason = TOO_LONG
    elif settings.block_size is not None and not any(mask[1 : len(ids) - settings.block_size + 2]):
        reason = NO_WINDOW
    else:
        reason = MISMATCHED if mismatch is not None and settings.on_mismatch == "drop" else ""
    line = None
    if refusal:
        line = {"row": index, "is_refused": True, "reason": refusal}
    elif mismatch is not None:
        line = {"row": index, "is_refused": False, **mismatch.as_dict()}
    return {
        "input_ids": ids,
        "supervised_mask": mask,
        "sample_id": content_id(ids, mask),
        "length": len(ids),
        "drop_reason": reason,
        "is_cut": is_over_length and not reason,
        "mismatch": "" if line is None else json.dumps(line, ensure_ascii=False),
    }


def _given_id(row: Mapping[str, Any]) -> int | None:
    given = row.get("sample_id")
    if given is not None and (type(given) is not int or not 0 <= given <= MAX_SAMPLE_ID):
        raise ValueError(
            f"its sample_id is {given!r}, and must be an integer in 0 … {MAX_SAMPLE_ID}. Rename or remove the "
            "column; ids are made of the rows' content then."
        )
    return given


def _with_repeats(facts: Mapping[str, list[Any]], *, keep_repeats: bool) -> list[str]:
    """The reasons to drop each row, repeats of earlier usable rows among them."""
    reasons = list(facts["drop_reason"])
    first_rows: dict[int, int] = {}
    seen: set[int] = set()
    columns = zip(facts["row"], facts["question_hash"], facts["sample_id"], strict=True)
    for index, (row, question, content) in enumerate(columns):
        if reasons[index]:
            continue
        if content in seen:
            reasons[index] = IDENTICAL
        elif not keep_repeats and first_rows.setdefault(question, row) != row:
            reasons[index] = REPEATED
        else:
            seen.add(content)
    return reasons


def _held_out_prompts(prompt_hashes: Sequence[int], settings: PreparationSettings) -> set[int]:
    if settings.eval_rows < 1:
        limit = settings.eval_rows * 2**HASH_BITS
        return {prompt for prompt in prompt_hashes if prompt < limit}
    counts = sorted(Counter(prompt_hashes).items())
    before = [0, *accumulate(count for _, count in counts)]
    return {prompt for (prompt, _), taken in zip(counts, before, strict=False) if taken < settings.eval_rows}


def _sample_ids(given_ids: Sequence[int | None], content_ids: Sequence[int]) -> list[int]:
    """Given ids if no two rows share one; ids made of the content for the others."""
    given = [identity for identity in given_ids if identity is not None]
    if len(set(given)) < len(given):
        return list(content_ids)
    pairs = zip(given_ids, content_ids, strict=True)
    return [content if identity is None else identity for identity, content in pairs]
