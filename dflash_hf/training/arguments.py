"""Arguments of draft training: what changes training and not the draft."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from ..blocks.losses import LossTerms
from ..data.settings import MAX_LENGTH

DEFAULT_LEARNING_RATES = {True: 2e-3, False: 6e-4}  # by use_muon


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the arguments of block training.

    The defaults of Trainer that do not suit a new draft are changed: optimizer and learning rate, cosine schedule with
    warm-up, and data columns are kept. The full help text of each field is in its metadata.

    Raises:
        ValueError: a value breaks its rule; the message gives field, value and rule.
    """

    learning_rate: float | None = field(  # type: ignore[assignment]  # a float after __post_init__, by optimizer
        default=None, metadata={"help": "Peak learning rate; by default 2e-3 with Muon and 6e-4 without."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning-rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up: optimizer steps, or a share of the run if below 1."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep data columns that the draft's forward does not name."}
    )
    anchors_per_sample: int = field(
        default=64,
        metadata={
            "help": "Blocks trained in each row and step. Rows with fewer windows use all of them. With `packing`, of "
            "each packed row: multiply by the documents it holds."
        },
    )
    anchor_replacement: bool = field(
        default=False,
        metadata={
            "help": "Draw anchors independently, so that a row may train a block twice, instead of distinct ones."
        },
    )
    max_length: int = field(default=MAX_LENGTH, metadata={"help": "Longest row in tokens; longer rows are cut."})
    packing: bool = field(
        default=False,
        metadata={
            "help": "Pack several whole documents into each training row of at most `max_length` tokens. Blocks, "
            "context and positions stay in one document, so the same anchors give the same loss as in unpacked rows; "
            "only the padding goes. `anchors_per_sample` and the batch size then count packed rows. Evaluation sets "
            "are not packed."
        },
    )
    padding_side: str = field(default="right", metadata={"help": "'right' or 'left'; the result is the same."})
    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={
            "help": "Batches are padded to a multiple of this length, with the same result: every new shape costs a "
            "compiled kernel. By default 512 where FlexAttention runs and 32 elsewhere."
        },
    )
    slot_weights: str = field(
        default="dpace",
        metadata={"help": "Weights of the slots: 'dpace' (by confidence), 'decay' (by position) or 'uniform'."},
    )
    loss_decay: float | None = field(
        default=None, metadata={"help": "Decay constant in slots; by default 4 (blocks of 8) to 7 (blocks of 16)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Floor of a slot's confidence in D-PACE weights, 0-1."})
    ce_weight: float = field(default=1.0, metadata={"help": "Weight of the cross-entropy."})
    soft_labels: bool = field(
        default=False,
        metadata={"help": "Cross-entropy against the target's distribution instead of the token of the text."},
    )
    l1_weight: float = field(
        default=0.0, metadata={"help": "Weight of the L1 distance between the draft's and the target's distributions."}
    )
    kl_weight: float = field(
        default=0.0,
        metadata={"help": "Share, 0-1, of the KL divergence from the target's most likely tokens; the rest is above."},
    )
    kl_top_k: int = field(default=10, metadata={"help": "Most likely tokens of the target in the KL divergence."})
    kl_temperature: float = field(default=1.0, metadata={"help": "Softens both sides of the KL divergence."})
    use_muon: bool | None = field(
        default=None,
        metadata={
            "help": "Muon for 2-D weights and AdamW for the rest. By default on, unless `optim` names an optimizer."
        },
    )
    cache_target_states: str | None = field(
        default=None,
        metadata={
            "help": "'memory' or 'disk': compute the target's hidden states of every row once, before training, and "
            "keep them in RAM or in files, which later runs use again: faster from the second epoch on. By default "
            "they are computed in every step."
        },
    )
    state_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of cache_target_states='disk', which several runs may share; by default _target_states in "
            "output_dir, which is never pushed to the Hub. Safe to delete between runs."
        },
    )
    head_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Slots whose rows of logits exist at one time where whole rows are needed (terms with the logits "
            "of the target, heads that are not one plain matrix); by default 64 on a CPU and 1,024 elsewhere."
        },
    )
    block_attention: str = field(
        default="auto",
        metadata={
            "help": "Attention of training blocks: 'flex' (FlexAttention), 'structured' (matrix products without "
            "wasted work, on any device), 'dense' (a mask for the draft's own attention implementation; slow); "
            "'auto' is 'flex' on CUDA, else 'structured'."
        },
    )
    eval_serving: bool = field(
        default=True,
        metadata={
            "help": "Evaluation also walks every answer as generate would: eval_serving_accept_len. It costs a block "
            "at each token of the answers, next to the anchors_per_sample blocks a row of the other metrics."
        },
    )
    eval_generate_prompts: int = field(
        default=0,
        metadata={
            "help": "Evaluation also lets the target answer the prompts of so many rows, greedily and with the draft: "
            "eval_generate_accept_len."
        },
    )
    eval_generate_max_new_tokens: int = field(
        default=128, metadata={"help": "Longest answer of eval_generate_prompts, in tokens."}
    )
    max_train_minutes: float | None = field(
        default=None,
        metadata={"help": "Stop after this many minutes of optimizer steps; the schedule then follows the clock."},
    )
    dataset_description: str | None = field(
        default=None, metadata={"help": "For the model card: what the training rows are, in words."}
    )
    answers_by_target: bool | None = field(
        default=None, metadata={"help": "For the model card: whether this target wrote the answers of the rows."}
    )
    draft_license: str | None = field(
        default=None,
        metadata={
            "help": "For the model card: licence of the draft as the Hub spells it ('apache-2.0'). By default the one "
            "in the card of a target in a local folder, if it has one."
        },
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
                f"state_cache_dir={self.state_cache_dir!r} is used with cache_target_states='disk' alone, and that is "
                f"{self.cache_target_states!r}. Set it to 'disk', or leave state_cache_dir unset."
            )
        for name in ("dpace_alpha", "kl_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in 0 … 1.")
        for name in ("ce_weight", "l1_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if self.ce_weight == self.l1_weight == self.kl_weight == 0:
            raise ValueError("ce_weight, l1_weight and kl_weight are all 0: nothing would be learned. Raise one.")
        if self.max_train_minutes is not None:
            if self.lr_scheduler_type not in ("linear", "cosine", "constant"):
                raise ValueError(
                    f"lr_scheduler_type={self.lr_scheduler_type!r} cannot follow the clock: with max_train_minutes "
                    "choose 'linear', 'cosine' or 'constant'."
                )
            if self.warmup_steps >= 1:
                raise ValueError(
                    f"warmup_steps={self.warmup_steps} cannot follow the clock: with max_train_minutes give a share "
                    "of the run, below 1."
                )
            if self.max_steps <= 0:
                self.max_steps = 1_000_000  # the clock ends the run
        if self.use_muon is None:
            self.use_muon = self.optim == TrainingArguments.__dataclass_fields__["optim"].default
        if self.learning_rate is None:
            self.learning_rate = DEFAULT_LEARNING_RATES[self.use_muon]
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False  # every weight is used in every pass, even without any block
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # bf16 autocast works on a CPU, and Trainer wants to be told
        super().__post_init__()
        if self.cache_target_states == "disk" and self.state_cache_dir is None:
            self.state_cache_dir = os.path.join(str(self.output_dir), "_target_states")
        loading: Any = self.accelerator_config  # an AcceleratorConfig by now
        if loading.dispatch_batches is None:
            # accelerate's own choice for streams joins the batches of several processes, which must be equally long
            loading.dispatch_batches = False

    @property
    def loss_terms(self) -> LossTerms:
        """[`LossTerms`]: what the loss of a slot is made of."""
        return LossTerms(
            ce_weight=self.ce_weight,
            l1_weight=self.l1_weight,
            kl_weight=self.kl_weight,
            kl_top_k=self.kl_top_k,
            kl_temperature=self.kl_temperature,
            soft_labels=self.soft_labels,
        )
