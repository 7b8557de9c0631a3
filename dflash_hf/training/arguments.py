"""Arguments of draft training, which affect training and not the configuration of the draft."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from ..blocks.losses import LossTerms
from .argument_checks import apply_recipe, check_effects, check_values
from .block_arguments import BlockTrainingArguments

DEFAULT_LEARNING_RATES = {True: 2e-3, False: 6e-4}  # by use_muon


@dataclass
class DFlashTrainingArguments(BlockTrainingArguments, TrainingArguments):  # type: ignore[misc]  # `learning_rate` may be unset
    """
    [`~transformers.TrainingArguments`] with the arguments of block training.

    Some defaults differ from those of Trainer: optimizer, learning rate and the cosine schedule with warm-up, data
    columns are not removed, and losses that are not finite are not filtered out of the log. The help text of each
    field is in its metadata.

    Raises:
        TypeError: a number has another type.
        ValueError: a value breaks its rule, or an argument of Trainer would have no effect; the message names the
            field, its value and the rule.
    """

    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Remove the data columns that the collator does not read."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Has no effect: training ends at a loss that is not finite."}
    )

    def __post_init__(self) -> None:
        apply_recipe(self)
        check_values(self)
        if self.max_train_minutes is not None and self.max_steps <= 0:
            self.max_steps = 1_000_000  # the clock ends the run
        if self.use_muon is None:
            self.use_muon = self.optim == TrainingArguments.__dataclass_fields__["optim"].default
        if self.learning_rate is None:
            self.learning_rate = DEFAULT_LEARNING_RATES[self.use_muon]
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every weight is used in every pass, even if no block is valid
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # Trainer (transformers 5.24) allows bf16 without an accelerator only then
        check_effects(self)
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
            selector_weight=self.selector_weight,
            confidence_weight=self.confidence_weight,
        )
