"""Checks that a checkpoint fits the draft, the target and the arguments of the run that resumes it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from ..files import differences
from ..model.configuration_dflash import DFlashConfig

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


class RunRecord(TrainerCallback, ExportableState):
    """
    Record the arguments of a run in `trainer_state.json` of its checkpoints.

    Args:
        **values: JSON values from [`run_values`], which [`check_checkpoint`] compares.
    """

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state(self) -> dict[str, Any]:
        return {"args": self.values, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    Return the newest complete checkpoint.

    Args:
        output_dir (`str`): folder of the checkpoints; it need not exist.

    Returns:
        `str` or `None`: its folder. A newer checkpoint that a crash left incomplete is skipped with a warning.
    """
    if not Path(output_dir).is_dir():
        return None
    for folder in reversed(sort_checkpoints(str(output_dir))):
        if _trainer_state(folder) is not None:
            return folder
        logger.warning(
            f"{folder} is skipped, since it is incomplete: trainer_state.json, which is written last, is missing."
        )
    return None


def _trainer_state(folder: str | Path) -> dict[str, Any] | None:
    """Read the trainer state of a checkpoint; `None` if it is missing or unreadable."""
    try:
        state = json.loads((Path(folder) / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return state if isinstance(state, dict) else None


def check_checkpoint(folder: str | Path, config: DFlashConfig, values: dict[str, Any]) -> None:
    """
    Refuse a checkpoint of another draft, target or optimizer before it is loaded, and warn of other changes.

    Args:
        folder (`str`): the checkpoint.
        config ([`DFlashConfig`]): configuration of the draft that resumes from it.
        values (`dict`): from [`run_values`]. Another `target` or `use_muon` is refused. Any other change is a warning,
            since the resumed run differs from an uninterrupted one.

    Raises:
        ValueError: the checkpoint is incomplete, or belongs to another draft, target or optimizer.
    """
    name = Path(folder).name
    state = _trainer_state(folder)
    if state is None:
        raise ValueError(
            f"{str(folder)!r} is no complete checkpoint, since trainer_state.json, which is written last, is missing "
            "or unreadable. Pass another checkpoint, or resume_from_checkpoint=True for the last complete one in "
            "output_dir."
        )
    problems = []
    if (Path(folder) / "config.json").is_file():
        saved = DFlashConfig.from_pretrained(folder)
        changes = differences(*({field: getattr(each, field) for field in DRAFT_FIELDS} for each in (saved, config)))
        problems = [str(change) for change in changes]
    record = (state.get("stateful_callbacks") or {}).get(RunRecord.__name__) or {}
    recorded = {**record.get("args", {})}
    known = {key: recorded[key] for key in values if key in recorded}
    changed = {change.name: change for change in differences(known, {key: values[key] for key in known})}
    if "use_muon" in changed:
        problems.append(str(changed.pop("use_muon")))
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
    if changed:
        details = "; ".join(map(str, changed.values()))
        logger.warning(f"The run resumed from {name} differs from an uninterrupted one: {details}.")


def run_values(args: Any, target: PreTrainedModel, num_rows: int | None) -> dict[str, Any]:
    """
    Return the values that [`RunRecord`] records and [`check_checkpoint`] compares.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        target (`PreTrainedModel`): target of the run.
        num_rows (`int`, *optional*): number of training rows.

    Returns:
        `dict` of JSON values.
    """
    return {
        "target": target.config.name_or_path or None,
        "target_fingerprint": target_fingerprint(target),
        "use_muon": args.use_muon,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "anchors_per_sample": args.anchors_per_sample,
        "anchor_replacement": args.anchor_replacement,
        "partial_windows": args.partial_windows,
        "slot_weights": args.slot_weights,
        "loss_decay": args.loss_decay,
        "dpace_alpha": args.dpace_alpha,
        **asdict(args.loss_terms),
        "rows per optimizer step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "rows": num_rows,
    }
