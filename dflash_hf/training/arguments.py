"""Arguments of draft training, which affect training and not the configuration of the draft."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from ..blocks.losses import LossTerms
from .block_arguments import BlockTrainingArguments

DEFAULT_LEARNING_RATES = {True: 2e-3, False: 6e-4}  # by use_muon


@dataclass
class DFlashTrainingArguments(BlockTrainingArguments, TrainingArguments):  # type: ignore[misc]  # `learning_rate` may be unset
    """
    [`~transformers.TrainingArguments`] with the arguments of block training.

    Some defaults differ from those of Trainer: optimizer, learning rate and the cosine schedule with warm-up, and data
    columns are not removed. The help text of each field is in its metadata.

    Raises:
        ValueError: a value breaks its rule; the message names the field, its value and the rule.
    """

    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Remove the data columns that the collator does not read."}
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("slot_weights", ("decay", "dpace", "uniform")),
            ("cache_target_states", (None, "memory", "disk")),
            ("padding_side", ("left", "right")),
            ("block_attention", ("auto", "flex", "structured", "dense")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}.")
        for name, minimum in (
            ("anchors_per_sample", 1),
            ("max_length", 2),
            ("head_chunk_size", 1),
            ("kl_top_k", 1),
            ("pad_to_multiple_of", 1),
            ("eval_generate_prompts", 0),
            ("eval_generate_max_new_tokens", 1),
        ):
            if getattr(self, name) is not None and getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {minimum}.")
        for name in ("loss_decay", "max_train_minutes", "kl_temperature"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive, or unset.")
        if self.state_cache_dir is not None and self.cache_target_states != "disk":
            raise ValueError(
                f"state_cache_dir={self.state_cache_dir!r} is only used with cache_target_states='disk', and "
                f"cache_target_states is {self.cache_target_states!r}. Set it to 'disk', or leave state_cache_dir "
                "unset."
            )
        for name in ("dpace_alpha", "kl_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in 0 … 1.")
        for name in ("ce_weight", "l1_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if self.ce_weight == self.l1_weight == self.kl_weight == 0:
            raise ValueError(
                "ce_weight, l1_weight and kl_weight are all 0, so that nothing would be learned. Raise one of them."
            )
        if self.max_train_minutes is not None:
            if self.lr_scheduler_type not in ("linear", "cosine", "constant"):
                raise ValueError(
                    f"lr_scheduler_type={self.lr_scheduler_type!r} cannot follow the clock of max_train_minutes. "
                    "Choose 'linear', 'cosine' or 'constant'."
                )
            if self.warmup_steps >= 1:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps} cannot follow the clock of max_train_minutes. Set a share of "
                    "the run, below 1."
                )
            if self.max_steps <= 0:
                self.max_steps = 1_000_000  # the clock ends the run
        if self.use_muon is None:
            self.use_muon = self.optim == TrainingArguments.__dataclass_fields__["optim"].default
        if self.learning_rate is None:
            self.learning_rate = DEFAULT_LEARNING_RATES[self.use_muon]
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every weight is used in every pass, even if no block is valid
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # Trainer (transformers 5.24) allows bf16 without an accelerator only then
        super().__post_init__()
        if self.cache_target_states == "disk" and self.state_cache_dir is None:
            self.state_cache_dir = os.path.join(str(self.output_dir), "_target_states")
        loading: Any = self.accelerator_config  # an AcceleratorConfig after super().__post_init__
        if loading.dispatch_batches is None:
            # By default accelerate (1.15) joins the batches of several processes for streams. They would have to be of
            # equal length.
            loading.dispatch_batches = False

    @property
    def loss_terms(self) -> LossTerms:
        """[`LossTerms`]: the terms of the loss of a slot."""
        return LossTerms(
            ce_weight=self.ce_weight,
            l1_weight=self.l1_weight,
            kl_weight=self.kl_weight,
            kl_top_k=self.kl_top_k,
            kl_temperature=self.kl_temperature,
            soft_labels=self.soft_labels,
        )
