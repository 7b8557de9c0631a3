"""The arguments that DFlash adds to those of Trainer. Without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..data.settings import MAX_LENGTH


@dataclass
class BlockTrainingArguments:
    """
    Arguments of block training, and arguments of Trainer with other defaults.

    [`DFlashTrainingArguments`] adds the arguments of [`~transformers.TrainingArguments`] and checks all of them.
    """

    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate. By default 2e-3 with Muon and 6e-4 without it."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning-rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up in optimizer steps, or as a share of the run if below 1."}
    )
    anchors_per_sample: int = field(
        default=64,
        metadata={
            "help": "Number of blocks trained in each row in each step. A row with fewer possible anchors uses all of "
            "them. With `packing` it is the number of blocks in each packed row, so multiply it by the number of "
            "documents in a row."
        },
    )
    anchor_replacement: bool = field(
        default=False,
        metadata={
            "help": "Sample anchors with replacement, so that a row may train a block twice. By default they are "
            "distinct."
        },
    )
    partial_windows: bool = field(
        default=True,
        metadata={
            "help": "Also train blocks that run past the end of a row; slots past the end carry no loss. Without it "
            "(--no-partial-windows) only whole blocks are trained, so that answers shorter than a block are left "
            "out. The plain recipe of DFlash is --no-partial-windows --anchor-replacement --slot-weights decay."
        },
    )
    max_length: int = field(default=MAX_LENGTH, metadata={"help": "Longest row in tokens. Longer rows are truncated."})
    packing: bool = field(
        default=False,
        metadata={
            "help": "Pack several whole documents into each training row of at most `max_length` tokens. Blocks, "
            "context and positions stay within one document, so that the same anchors give the same loss as in "
            "unpacked rows, with less padding. `anchors_per_sample` and the batch size then count packed rows. "
            "Evaluation sets are not packed."
        },
    )
    padding_side: str = field(
        default="right", metadata={"help": "Padding side, 'right' or 'left'. The result is the same."}
    )
    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={
            "help": "Pad batches to a multiple of this length. The result is the same, but kernels are compiled for "
            "fewer shapes. By default 512 with FlexAttention and 32 without it."
        },
    )
    slot_weights: str = field(
        default="dpace",
        metadata={
            "help": "Weights of the slots: 'dpace' (by the draft's confidence), 'decay' (by position) or 'uniform'."
        },
    )
    loss_decay: float | None = field(
        default=None,
        metadata={
            "help": "Decay constant of 'decay' weights in slots, at least 0.02. By default 4 (blocks of 8) to 7 "
            "(blocks of 16)."
        },
    )
    dpace_alpha: float = field(
        default=0.5, metadata={"help": "Smallest confidence of a slot in D-PACE weights, 0 to 1."}
    )
    recipe: str | None = field(
        default=None,
        metadata={
            "help": "Loss of a published method: 'dspark' sets --ce-weight 0.1 --l1-weight 0.9 --slot-weights decay "
            "--loss-decay 4."
        },
    )
    trained_part: str = field(
        default="all",
        metadata={
            "help": "Trained weights: 'all', or 'heads' for the selector, the Markov head and the confidence head "
            "alone, with the rest of the draft frozen."
        },
    )
    ce_weight: float = field(default=1.0, metadata={"help": "Weight of the cross-entropy."})
    selector_weight: float = field(
        default=1.0, metadata={"help": "Weight of the cross-entropy of a candidate selector, if the draft has one."}
    )
    confidence_weight: float = field(
        default=1.0, metadata={"help": "Weight of the loss of a confidence head, if the draft has one."}
    )
    soft_labels: bool = field(
        default=False,
        metadata={
            "help": "Compute the cross-entropy against the target's distribution instead of the token of the text."
        },
    )
    l1_weight: float = field(
        default=0.0, metadata={"help": "Weight of the L1 distance between the distributions of draft and target."}
    )
    kl_weight: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the KL divergence over the target's most likely tokens, 0 to 1. The other terms get "
            "the rest."
        },
    )
    kl_top_k: int = field(
        default=10, metadata={"help": "Number of most likely tokens of the target in the KL divergence."}
    )
    kl_temperature: float = field(
        default=1.0, metadata={"help": "Temperature of both distributions in the KL divergence."}
    )
    use_muon: bool | None = field(
        default=None,
        metadata={
            "help": "Use Muon for 2-D weights and AdamW for the others. On by default, unless `optim` names an "
            "optimizer."
        },
    )
    cache_target_states: str | None = field(
        default=None,
        metadata={
            "help": "Compute the target's hidden states of every row once before training, and keep them in 'memory' "
            "or on 'disk', where later runs find them. This is faster from the second epoch on. By default they are "
            "computed in every step."
        },
    )
    state_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the hidden-state cache with cache_target_states='disk'. Several runs may share it, and "
            "it can be deleted between runs. By default `_target_states` in output_dir, which is never pushed."
        },
    )
    head_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of slots whose logits exist at one time where whole rows of logits are needed (loss terms "
            "with the target's logits, heads that are not one plain matrix). By default 64 on a CPU and 1,024 "
            "elsewhere."
        },
    )
    block_attention: str = field(
        default="auto",
        metadata={
            "help": "Attention of training blocks: 'flex' (FlexAttention), 'structured' (matrix products of each "
            "block with its own context, on any device) or 'dense' (a dense mask for the draft's attention "
            "implementation, which is slow). 'auto' is 'flex' on CUDA and 'structured' elsewhere."
        },
    )
    eval_serving: bool = field(
        default=True,
        metadata={
            "help": "Simulate decoding of the held-out responses in each evaluation and log "
            "eval_serving_acceptance_length. This needs one block at each token of the responses, in addition to the "
            "64 blocks of each row for the other metrics."
        },
    )
    eval_generate_prompts: int = field(
        default=0,
        metadata={
            "help": "Generate greedily with the draft from the prompts of this many rows in each evaluation and log "
            "eval_generate_acceptance_length."
        },
    )
    eval_generate_max_new_tokens: int = field(
        default=128, metadata={"help": "Longest response to eval_generate_prompts, in tokens."}
    )
    max_train_minutes: float | None = field(
        default=None,
        metadata={
            "help": "Stop after this many minutes of optimizer steps. The learning-rate schedule then follows the "
            "clock."
        },
    )
    dataset_description: str | None = field(
        default=None, metadata={"help": "Description of the training rows for the model card."}
    )
    answers_by_target: bool | None = field(
        default=None, metadata={"help": "Whether this target wrote the responses of the rows, for the model card."}
    )
    draft_license: str | None = field(
        default=None,
        metadata={
            "help": "Licence of the draft for the model card, as the Hub spells it ('apache-2.0'). By default that of "
            "the model card of a target in a local folder, if it has one."
        },
    )
