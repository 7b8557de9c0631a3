"""Facts of a training run for its model card, from its arguments and its log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..hub.model_card import DraftCard, Evaluation
from ..model.modeling_dflash import DFlashDraftModel
from ..provenance import environment, hub_id_or_folder
from .arguments import DEFAULT_LEARNING_RATES, DFlashTrainingArguments
from .checks import RowCounts
from .metric_names import logged_metric

# Arguments that do not affect the draft, or that hold a path on this machine.
OMITTED_ARGUMENTS = {
    "output_dir",
    "run_name",
    "disable_tqdm",
    "report_to",
    "project",
    "use_cpu",
    "state_cache_dir",
    "resume_from_checkpoint",
    "local_rank",
    "ddp_find_unused_parameters",
    "include_num_input_tokens_seen",
    "dataset_description",
    "answers_by_target",
    "draft_license",
    "seed",
}
OMITTED_PREFIXES = (
    *("logging", "log_", "debug", "save", "eval", "per_device_eval", "hub", "push", "trackio", "do_", "dataloader"),
    "accelerator",
)


def changed_arguments(args: DFlashTrainingArguments) -> dict[str, Any]:
    """
    Return the training arguments that differ from their defaults and affect the draft.

    Folders, reports and schedules of logging and saving are left out.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of a run.

    Returns:
        `dict` of plain values.
    """
    # No default arguments are constructed for the comparison, since that resets the state of the accelerator
    # (accelerate 1.15).
    resolved = {
        "use_muon": args.optim == type(args).__dataclass_fields__["optim"].default,
        "learning_rate": DEFAULT_LEARNING_RATES[bool(args.use_muon)],
    }
    changed: dict[str, Any] = {}
    for item in fields(args):
        name, value = item.name, getattr(args, item.name, None)
        default = item.default_factory() if callable(item.default_factory) else resolved.get(name, item.default)
        if name in OMITTED_ARGUMENTS or name.startswith(OMITTED_PREFIXES) or value == default:
            continue
        if default is None and value is False:
            continue  # an unset argument means the same
        if name == "max_steps" and args.max_train_minutes is not None:
            continue  # the clock ended the run
        value = getattr(value, "value", value)  # the value of an enumeration member
        if name == "deepspeed" and isinstance(value, str):
            value = Path(value).name
        if value is None or isinstance(value, str | int | float | list | dict):
            changed[name] = value
    return changed


def training_facts(args: DFlashTrainingArguments, state: Any) -> dict[str, Any]:
    """
    Return the facts about the current draft of a run that its arguments and its state hold.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        state (`TrainerState`): step and log of the run.

    Returns:
        `dict` of fields of a [`DraftCard`]; before the first step only its evaluations.
    """
    history = state.log_history
    end = next((index for index, entry in enumerate(history) if "train_runtime" in entry), len(history))
    step, last_step = state.global_step, state.global_step
    # Trainer loads the best weights right after the entry that ends the run.
    if args.load_best_model_at_end and state.best_model_checkpoint is not None and end < len(history):
        step = state.best_global_step
    evaluations = evaluations_in([entry for entry in history[:end] if entry.get("step", 0) <= step])
    evaluations += [(step, *found[1:]) for found in evaluations_in(history[end:])]
    facts: dict[str, Any] = {"evaluations": last_and_best([evaluation(*found) for found in evaluations])}
    if last_step == 0:
        return facts
    logged = [
        entry
        for entry in history[:end]
        if logged_metric(entry, "acceptance_length") is not None and entry.get("step", 0) <= step
    ]
    last = logged[-1] if logged else {}
    return {
        **facts,
        "steps": step,
        "last_step": last_step,
        "epochs": state.epoch,
        "tokens_seen": int(state.num_input_tokens_seen) or None,
        "train_loss": last.get("loss"),
        "train_acceptance_length": logged_metric(last, "acceptance_length"),
        "training_arguments": changed_arguments(args),
        "seed": args.seed,
    }


def card_of_run(
    args: DFlashTrainingArguments,
    state: Any,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    counts: RowCounts | None = None,
    *,
    is_text: bool = False,
    native_repo: str | None = None,
    resumptions: Sequence[str] = (),
) -> DraftCard:
    """
    Make the model card of the current draft of a run.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        state (`TrainerState`): step and log of the run.
        draft ([`DFlashDraftModel`]): the draft that is trained.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer, which gives the text of the mask
            token and tells whether there is a chat template.
        counts ([`RowCounts`], *optional*): counts of the training set.
        is_text (`bool`, defaults to `False`): whether the rows were texts or messages, which were rendered with the
            chat-template arguments of the configuration.
        native_repo (`str`, *optional*): Hub name to which the draft is pushed.
        resumptions (`Sequence[str]`): step and changes of every resumption with other values.

    Returns:
        [`DraftCard`]
    """
    facts: dict[str, Any] = {
        "num_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "license": args.draft_license,
        "training_data": args.dataset_description,
        "answers_by_target": args.answers_by_target,
        "native_repo": native_repo,
        "resumptions": tuple(resumptions),
        **training_facts(args, state),
    }
    if tokenizer is not None:
        facts["has_chat_template"] = bool(tokenizer.chat_template)
        facts["mask_token"] = mask_token_in_words(tokenizer, draft.config.mask_token_id)
    if is_text:
        facts["chat_template_kwargs"] = draft.config.chat_template_kwargs or {}
    if counts is not None:
        facts["num_rows"], facts["num_tokens"] = counts.rows, counts.tokens
    if state.global_step > 0:
        hub_id, folder = hub_id_or_folder(draft.name_or_path)
        facts["initialized_from"] = hub_id or (f"a draft in a local folder, {folder}" if folder else "random weights")
        facts.update(environment())
        if args.world_size > 1:
            facts["hardware"] = f"{args.world_size} processes, each with {facts['hardware']}"
    title = (native_repo or Path(str(args.output_dir)).resolve().name).rsplit("/", 1)[-1]
    return DraftCard.from_config(draft.config, title, **facts)


def mask_token_in_words(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Text of a token, or that it has none."""
    token = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    return str(token) if token is not None else "an embedding row that no token uses"


def rows_are_text(dataset: Any) -> bool:
    """
    Return whether the arguments of the chat template are known, because the trainer or `prepare` applied it.

    Args:
        dataset: a data set as the trainer takes it, before it is prepared.

    Returns:
        `bool`: False for rows of `input_ids` without `chat_template_kwargs`, and if the columns are not known.
    """
    columns = getattr(dataset, "column_names", None) or []
    if isinstance(dataset, Sequence) and len(dataset):
        columns = list(dataset[0])
    return len(columns) > 0 and ("input_ids" not in columns or "chat_template_kwargs" in columns)


def evaluations_in(history: Sequence[Mapping[str, Any]]) -> list[tuple[int | None, str, Mapping[str, Any]]]:
    """
    Return the entries of a log that an evaluation has written.

    Args:
        history (`Sequence[Mapping]`): entries of the log in their order.

    Returns:
        `list[tuple]`: step, prefix of the metrics' names (`eval`, or `eval_NAME` of a named set), and entry.
    """
    ending = "_runtime"  # every evaluation logs its runtime after its prefix
    return [
        (entry.get("step"), name.removesuffix(ending), entry)
        for entry in history
        for name in entry
        if name.startswith("eval_") and name.endswith(ending)
    ]


def evaluation(step: int | None, prefix: str, entry: Mapping[str, Any]) -> Evaluation:
    """Make an [`Evaluation`] of a log entry; `prefix` is that of its metrics' names."""
    slots: list[float] = []
    while f"{prefix}_slot_accuracy_{len(slots) + 1}" in entry:
        slots.append(entry[f"{prefix}_slot_accuracy_{len(slots) + 1}"])
    return Evaluation(
        step=step,
        name=prefix.removeprefix("eval").removeprefix("_") or None,
        loss=entry.get(f"{prefix}_loss"),
        acceptance_length=logged_metric(entry, f"{prefix}_acceptance_length"),
        serving_acceptance_length=logged_metric(entry, f"{prefix}_serving_acceptance_length"),
        generate_acceptance_length=logged_metric(entry, f"{prefix}_generate_acceptance_length"),
        slot_accuracy=slots,
    )


def last_and_best(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """
    Return the last evaluation of each evaluation set, followed by the best one if that is another.

    The best evaluation has the highest acceptance length; ties go to the later evaluation.

    Args:
        evaluations (`Sequence[Evaluation]`): evaluations in their order.

    Returns:
        `tuple[Evaluation, ...]`
    """

    def score(candidate: Evaluation) -> float:
        length = candidate.serving_acceptance_length
        length = candidate.acceptance_length if length is None else length
        return -math.inf if length is None or math.isnan(length) else length

    chosen: list[Evaluation] = []
    for name in dict.fromkeys(candidate.name for candidate in evaluations):
        named = [candidate for candidate in evaluations if candidate.name == name]
        best = max(reversed(named), key=score)  # ties go to the last one
        chosen += [named[-1]] if best is named[-1] or score(best) == -math.inf else [named[-1], best]
    return tuple(chosen)
