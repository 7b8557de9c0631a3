"""Arguments of draft training: what changes training and not the draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the arguments of block training.

    The defaults of Trainer that do not suit a new draft are changed: learning rate, cosine schedule with warm-up, and
    data columns are kept. The full help text of each field is in its metadata.

    Raises:
        ValueError: a value breaks its rule; the message gives field, value and rule.
    """

    learning_rate: float = field(
        default=6e-4, metadata={"help": "Peak learning rate. 6e-4 suits AdamW; Muon takes 2e-3 to 4e-3."}
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
    max_length: int = field(default=2048, metadata={"help": "Longest row in tokens; longer rows are cut."})
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
    slot_weights: str = field(
        default="decay",
        metadata={"help": "Weights of the slots: 'decay' (by position), 'dpace' (by confidence) or 'uniform'."},
    )
    loss_decay: float | None = field(
        default=None, metadata={"help": "Decay constant in slots; by default 4 (blocks of 8) to 7 (blocks of 16)."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Floor of a slot's confidence in D-PACE weights, 0-1."})
    use_muon: bool = field(
        default=False,
        metadata={"help": "Muon for 2-D weights and AdamW for the rest, instead of the optimizer named in `optim`."},
    )
    cache_target_states: str | None = field(
        default=None,
        metadata={
            "help": "'memory' computes the target's hidden states of every row once, before training, and keeps them "
            "in RAM: faster from the second epoch on. By default they are computed in every step."
        },
    )
    head_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Slots whose rows of logits exist at one time where whole rows are needed (terms with a teacher, "
            "heads that are not one plain matrix); by default 64 on a CPU and 1,024 elsewhere."
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
    max_train_minutes: float | None = field(
        default=None,
        metadata={"help": "Stop after this many minutes of optimizer steps; the schedule then follows the clock."},
    )

    def __post_init__(self) -> None:
        for name, choices in (
            ("slot_weights", ("decay", "dpace", "uniform")),
            ("cache_target_states", (None, "memory")),
            ("padding_side", ("left", "right")),
            ("block_attention", ("auto", "flex", "structured", "dense")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {choices}.")
        for name, minimum in (("anchors_per_sample", 1), ("max_length", 2), ("head_chunk_size", 1)):
            if getattr(self, name) is not None and getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {minimum}.")
        for name in ("loss_decay", "max_train_minutes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive, or unset.")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha={self.dpace_alpha} must be in 0 … 1.")
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
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # bf16 autocast works on a CPU, and Trainer wants to be told
        super().__post_init__()
        loading: Any = self.accelerator_config  # an AcceleratorConfig by now
        if loading.dispatch_batches is None:
            # accelerate's own choice for streams joins the batches of several processes, which must be equally long
            loading.dispatch_batches = False
