"""Checks that a checkpoint fits the draft, the target and the arguments of the run that resumes it."""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ..checkpoints.io import read_json
from ..files import differences
from ..model.configuration_dflash import DFlashConfig
from .checkpoint_files import OPTIMIZER, SCHEDULER, STATE, check_files
from .checkpoint_files import last_complete_checkpoint as last_complete_checkpoint

logger = logging.get_logger(__name__)

# With other values of these entries, the same tensors compute another function or do not fit.
DRAFT_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "rms_norm_eps",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "is_causal",
)
# Other fields that matter: with other values, the run goes on in another way than the run before.
OTHER_DRAFT_FIELDS = ("attention_dropout", "chat_template_kwargs", "input_embedding_scale")
# Arguments that do not change what is trained: what is logged, saved or pushed, and how fast the run is.
ARGUMENTS_WITHOUT_EFFECT = {
    *("output_dir", "run_name", "disable_tqdm", "report_to", "project", "use_cpu", "resume_from_checkpoint"),
    *("local_rank", "include_num_input_tokens_seen", "dataset_description", "answers_by_target", "draft_license"),
    *("state_cache_dir", "cache_target_states", "head_chunk_size", "block_attention", "padding_side"),
    *("pad_to_multiple_of", "remove_unused_columns", "label_names", "skip_memory_metrics", "torch_empty_cache_steps"),
    *("restore_callback_states_from_checkpoint", "use_cache", "enable_jit_checkpoint", "prediction_loss_only"),
    *(
        "include_for_metrics",
        "batch_eval_metrics",
        "auto_find_batch_size",
        "load_best_model_at_end",
        "length_column_name",
    ),
}
PREFIXES_WITHOUT_EFFECT = (
    *("logging", "log_", "debug", "save", "eval", "per_device_eval", "hub", "push", "trackio", "do_"),
    *("dataloader_num", "dataloader_p", "dataloader_m", "dataloader_in", "ddp_", "activation_checkpointing"),
    *("gradient_checkpointing", "torch_compile", "liger", "use_liger"),
)
# Arguments that reach the optimizer. Its own groups tell their earlier values, in checkpoints of any version.
OPTIMIZER_ARGUMENTS = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}
# The loss of an optimizer step depends only on the product of these values.
ROWS_OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "processes")
SAME_OPTIMIZERS = {"adamw_torch", "adamw_torch_fused"}  # two implementations with the same state


class RunRecord(TrainerCallback, ExportableState):
    """
    Record the arguments of a run in `trainer_state.json` of its checkpoints.

    Args:
        **values: JSON values from [`run_values`], which [`check_checkpoint`] compares.

    Attributes:
        changes (`list[str]`): what this run does in another way than that of the checkpoint it is resumed from.
        resumptions (`list[str]`): step and changes of every resumption with changes, from the first run on.
    """

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.changes: list[str] = []
        self.resumptions: list[str] = []

    def state(self) -> dict[str, Any]:
        return {"args": self.values, "attributes": {"resumptions": self.resumptions}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed run finds the record of its checkpoint here, a new run its own state.
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        self.resumptions = [*(saved or {}).get("attributes", {}).get("resumptions", [])]
        if self.changes:
            self.resumptions.append(f"at step {state.global_step}: {'; '.join(self.changes)}")
        if any(change.startswith(("metric_for_best_model ", "greater_is_better ")) for change in self.changes):
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        # A checkpoint without this record has no entry, and Trainer (transformers 5.24) updates only existing ones.
        state.stateful_callbacks[type(self).__name__] = self.state()


@torch.no_grad()
def target_fingerprint(target: nn.Module) -> str | None:
    """
    Return a digest of the first weights of every floating-point tensor, which does not depend on folder or dtype.

    A run may be resumed with the same target in another dtype. Cached hidden states may not be used then, so that
    their [`weights_checksum`] covers every bit.

    Args:
        target (`nn.Module`): the target, on any devices.

    Returns:
        `str` of 16 hexadecimal digits, or `None` if a tensor is sharded or not in memory.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in target.named_parameters():
        if parameter.is_meta or type(parameter.data) is not torch.Tensor:
            return None
        if parameter.is_floating_point():
            digest.update(f"{name} {list(parameter.shape)}".encode())
            first = parameter.data.reshape(-1)[:8].to(
                torch.bfloat16
            )  # so that fp32 weights equal those of a bf16 copy
            digest.update(first.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_checkpoint(folder: str | Path, config: DFlashConfig, values: dict[str, Any]) -> list[str]:
    """
    Refuse a checkpoint of another draft, target or optimizer before it is loaded, and warn of other changes.

    Args:
        folder (`str`): the checkpoint.
        config ([`DFlashConfig`]): configuration of the draft that resumes from it.
        values (`dict`): from [`run_values`]. Another `target`, `use_muon` or `optim` is refused. Any other change is a
            warning, since the resumed run differs from an uninterrupted one.

    Returns:
        `list[str]`: the other changes, each in a clause.

    Raises:
        ValueError: the checkpoint is incomplete, or belongs to another draft, target or optimizer.
    """
    check_files(folder)
    name = Path(folder).name
    state = read_json(Path(folder) / STATE)
    problems, draft_changes = _changed_draft(Path(folder), config)
    record = (state.get("stateful_callbacks") or {}).get(RunRecord.__name__) or {}
    recorded = {**record.get("args", {})}
    known = {key: recorded[key] for key in values if key in recorded}
    changed = {change.name: change for change in differences(known, {key: values[key] for key in known})}
    optimizers = changed.get("optim")
    if optimizers is not None and {*optimizers[1:]} <= SAME_OPTIMIZERS:
        del changed["optim"]
    if "rows per optimizer step" not in changed:
        changed = {key: change for key, change in changed.items() if key not in ROWS_OF_A_STEP}
    problems += [str(changed.pop(key)) for key in ("use_muon", "optim") if key in changed]
    weights = changed.pop("target_fingerprint", None)
    if weights is not None and None not in weights[1:]:
        other_name = changed.pop("target", None)
        if other_name is not None or values["target"] is None:
            before, now = (target or "without a name" for target in (other_name or (None, None, None))[1:])
            problems.append(f"the target was {before} and is now {now} with other weights")
        else:
            logger.warning(
                f"{name} was trained with other weights of the target {values['target']}, perhaps of another revision "
                "or quantisation. The draft continues on hidden states on which it was not trained."
            )
    elif weights is None and values["target_fingerprint"] is not None:
        changed.pop("target", None)  # the same weights in another folder
    if problems:
        raise ValueError(
            f"{name} cannot be resumed, because the draft, target or optimizer changed: {'; '.join(problems)}. "
            "Continue with the draft, target and optimizer it was trained with, or train without "
            "resume_from_checkpoint and in another output_dir."
        )
    rows = changed.pop("rows_digest", None)
    found = [*map(str, changed.values()), *draft_changes]
    if rows is not None and "rows" not in changed:
        found.append("the training rows are others")
    if found:
        logger.warning(f"The run resumed from {name} differs from an uninterrupted one: {'; '.join(found)}.")
    return found


def _changed_draft(folder: Path, config: DFlashConfig) -> tuple[list[str], list[str]]:
    """Return the changes of the draft's configuration with which the checkpoint does not fit, and all others."""
    if not (folder / "config.json").is_file():
        return [], []
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in (None, config.model_type):
        raise ValueError(
            f"{str(folder)!r} is a checkpoint of a model of type {kind!r}, and this trainer trains a draft of type "
            f"{config.model_type!r}. Resume from a checkpoint of a draft."
        )
    saved = DFlashConfig.from_pretrained(folder)
    refused, warned = (
        [str(change) for change in differences(*({name: getattr(each, name) for name in names} for each in pair))]
        for names, pair in ((DRAFT_FIELDS, (saved, config)), (OTHER_DRAFT_FIELDS, (saved, config)))
    )
    return refused, warned


def run_values(args: Any, target: PreTrainedModel, train_dataset: Any, **others: Any) -> dict[str, Any]:
    """
    Return the values that [`RunRecord`] records and [`check_checkpoint`] compares.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        target (`PreTrainedModel`): target of the run.
        train_dataset (`datasets.Dataset` or a stream): prepared rows.
        **others: further values. They replace arguments of the same name.

    Returns:
        `dict` of JSON values.
    """
    values = {
        "target": target.config.name_or_path or None,
        "target_fingerprint": target_fingerprint(target),
        "target_dtype": str(target.dtype).removeprefix("torch."),
        **_arguments(args),
        "rows per optimizer step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "processes": args.world_size,
        "rows": len(train_dataset) if hasattr(train_dataset, "__len__") else None,
        "rows_digest": rows_digest(train_dataset),
        **others,
    }
    return dict(json.loads(json.dumps(values)))


def _arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that change what is trained, as far as JSON can hold them."""
    found: dict[str, Any] = {}
    for name in (item.name for item in fields(args)):
        if name in ARGUMENTS_WITHOUT_EFFECT | OPTIMIZER_ARGUMENTS or name.startswith(PREFIXES_WITHOUT_EFFECT):
            continue
        value: Any = getattr(args, name, None)
        value = getattr(value, "value", value)  # the value of an enumeration member
        value = value.to_dict() if hasattr(value, "to_dict") else value
        try:
            found[name] = json.loads(json.dumps(value))
        except TypeError:
            continue  # an object, for example of parallelism, which the number of rows of a step reflects
    if args.max_train_minutes is not None:
        del found["max_steps"]  # the clock ends the run
    return found


def rows_digest(dataset: Any, num_rows: int = 64) -> str | None:
    """
    Return a digest of some rows of a data set, in their order.

    Args:
        dataset (`datasets.Dataset`): prepared rows.
        num_rows (`int`, defaults to 64): the largest number of rows that are read, evenly spaced.

    Returns:
        `str` of 16 hexadecimal digits, or `None` for a stream.
    """
    if not isinstance(dataset, datasets.Dataset) or not len(dataset):
        return None
    columns = [name for name in ("input_ids", "supervised_mask") if name in dataset.column_names]
    chosen = sorted({round(index * (len(dataset) - 1) / max(num_rows - 1, 1)) for index in range(num_rows)})
    rows = dataset.with_format(None).select_columns(columns)[chosen]
    text = json.dumps({name: [[int(item) for item in row] for row in rows[name]] for name in columns})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class OptimizerValues:
    """
    The values of an optimizer's groups, which loading a state replaces by those of the checkpoint.

    Only arguments of the optimizer's class are meant. Counters that some optimizers keep in their groups are states.

    Args:
        optimizer (`torch.optim.Optimizer`): as the run made it, before a state is loaded.
    """

    def __init__(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        self.kind = type(inner).__name__
        self.names = {*inspect.signature(type(inner).__init__).parameters, "initial_lr"} - {"self", "params", "lr"}
        self.optimizer = optimizer
        self.groups = [self._values(group) for group in optimizer.param_groups]
        self.sizes = [len(group["params"]) for group in optimizer.param_groups]

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a group without its parameters and its current learning rate."""
        return {name: value for name, value in group.items() if name in self.names}

    def check(self, folder: str | Path) -> None:
        """
        Refuse the state of an optimizer of another kind.

        Args:
            folder (`str` or `Path`): the checkpoint. Nothing is checked if its optimizer is saved in another form.

        Raises:
            ValueError: the file holds no such state, or its groups have other numbers of parameters or lack a value.
        """
        path = Path(folder) / OPTIMIZER
        if not path.is_file():
            return
        advice = "Resume with the optimizer of the checkpoint, or train without resume_from_checkpoint."
        try:
            groups = _saved_state(path)["param_groups"]
            sizes = [len(group["params"]) for group in groups]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is not the state of an optimizer ({error}). {advice}") from error
        if sizes != self.sizes:
            raise ValueError(
                f"{str(path)!r} is the state of another optimizer: its groups have {sizes} parameters, and those of "
                f"{self.kind} have {self.sizes}. {advice}"
            )
        for group, values in zip(groups, self.groups, strict=True):
            lacking = [
                name
                for name, value in values.items()
                if name not in group and not isinstance(value, bool | None) and name != "initial_lr"
            ]
            if lacking:
                raise ValueError(
                    f"{str(path)!r} is the state of another optimizer: it has no {', '.join(lacking)}, which "
                    f"{self.kind} needs. {advice}"
                )

    def restore(self, scheduler: Any, follows_steps: bool) -> list[str]:
        """
        Set the values of this run again after a state was loaded.

        Args:
            scheduler (`LRScheduler`): the scheduler, with its state loaded.
            follows_steps (`bool`): whether its learning rate is that of the step, and not of the clock.

        Returns:
            `list[str]`: the values that changed, each in a clause.
        """
        changes: dict[str, str] = {}
        cycled = {"betas", "momentum"} if getattr(scheduler, "cycle_momentum", False) else set()
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            before = {name: group.get(name) for name in values if name not in cycled}
            now = {name: values[name] for name in before}
            for change in differences(_in_names_of_arguments(before), _in_names_of_arguments(now)):
                changes.setdefault(change.name, str(change))
            if before.get("initial_lr") and now.get("initial_lr"):
                group["lr"] *= now["initial_lr"] / before["initial_lr"]
            group.update(now)
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups]
        if follows_steps and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            # The state holds the rate of the next step by the schedule of the earlier run.
            rates = [
                base * shape(scheduler.last_epoch)
                for base, shape in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates
        return list(changes.values())


class SchedulerValues:
    """
    The arguments of a scheduler, which loading a state replaces by those of the checkpoint.

    Args:
        scheduler (`LRScheduler`): as the run made it, before a state is loaded.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        # Some arguments are kept under a name in the plural. reset_start of GreedyLR (transformers 5.24) counts down.
        arguments = {*inspect.signature(type(scheduler).__init__).parameters} - {
            "optimizer",
            "last_epoch",
            "reset_start",
        }
        names = arguments | {f"{name}s" for name in arguments}
        self.values = {name: value for name, value in vars(scheduler).items() if name in names}

    def check(self, folder: str | Path) -> None:
        """
        Refuse the state of a scheduler of another kind, with which the learning rate would stay where it is.

        Args:
            folder (`str` or `Path`): the checkpoint. Nothing is checked if it holds no state of a scheduler.

        Raises:
            ValueError: the file holds no such state, or one that lacks an argument of the scheduler.
        """
        path = Path(folder) / SCHEDULER
        if not path.is_file():
            return
        lacking = sorted(self.values.keys() - _saved_state(path).keys())
        if lacking:
            raise ValueError(
                f"{str(path)!r} is the state of another scheduler: it has no {', '.join(lacking)}, which "
                f"{type(self.scheduler).__name__} needs. Resume with the lr_scheduler_type of the checkpoint, or "
                "train without resume_from_checkpoint."
            )

    def restore(self) -> None:
        """Set the arguments of this run again after a state was loaded."""
        vars(self.scheduler).update(self.values)


def _saved_state(path: Path) -> dict[str, Any]:
    """Return the state in a file that torch.save wrote, of which nothing but tensors and plain values is read."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        reason = "it holds objects of other classes"
    except (RuntimeError, EOFError) as error:
        reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
    else:
        if isinstance(state, dict):
            return state
        reason = f"it holds a {type(state).__name__}"
    raise ValueError(
        f"{str(path)!r} cannot be read as a state of tensors and plain values ({reason}). Resume from another "
        "checkpoint, or train without resume_from_checkpoint."
    )


def _in_names_of_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group under the names that they have among the training arguments."""
    values = dict(values)
    if "betas" in values:
        values["adam_beta1"], values["adam_beta2"] = values.pop("betas") or (None, None)
    names = {"initial_lr": "learning_rate", "eps": "adam_epsilon"}
    return {names.get(name, name): value for name, value in values.items()}
