"""The arguments that DFlash adds to those of Trainer. No torch, so that the command shows its help at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..data.settings import MAX_LENGTH


@dataclass
class BlockTrainingArguments:
    """
    Arguments of block training, and those of Trainer whose defaults differ.

    [`DFlashTrainingArguments`] adds the arguments of [`~transformers.TrainingArguments`] and checks all of them.
    """

    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate; by default 2e-3 with Muon and 6e-4 without."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the learning-rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up: optimizer steps, or a share of the run if below 1."}
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
