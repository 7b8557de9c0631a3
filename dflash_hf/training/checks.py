"""Pre-flight checks of a training run: processes, summary table, target hidden states, dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from accelerate import ParallelismConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..decoding.generation_settings import ONE_RESPONSE, check_generation_config
from ..model.configuration_dflash import DFlashConfig, describe_target
from ..model.modeling_dflash import DFlashDraftModel
from ..target.loading import has_weights
from .arguments import DFlashTrainingArguments

logger = logging.get_logger(__name__)


def check_processes(args: DFlashTrainingArguments, draft: DFlashDraftModel, target: PreTrainedModel) -> None:
    """
    Refuse models without weights, and distributed layouts that would give wrong results or that are not supported.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run; changed to one GPU if the others hold the target.
        draft ([`DFlashDraftModel`]), target (`PreTrainedModel`): the pair.

    Raises:
        ValueError: weights are missing, or the layout is not supported; the message names it and the alternative.
    """
    if args.world_size == 1:  # FSDP loads the weights in one of its processes and leaves those of the others
        for name, model in (("draft", draft), ("target", target)):
            if not has_weights(model):
                raise ValueError(
                    f"The {name} has weights on the meta device, which hold no values. Load it with from_pretrained, "
                    "or a new draft with from_target outside of torch.device('meta')."
                )
    if args.n_gpu > 1:
        if len(set((getattr(target, "hf_device_map", None) or {}).values())) > 1:
            args._n_gpu = 1  # the other devices hold the target
        else:
            raise ValueError(
                f"This process sees {args.n_gpu} GPUs, which Trainer would use through nn.DataParallel. The loss of a "
                "step is exact only with one process for each GPU. Start training with `accelerate launch` or "
                "`torchrun --nproc-per-node`, or restrict it to one GPU with CUDA_VISIBLE_DEVICES=0."
            )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            f"average_tokens_across_devices=False has no effect with {args.world_size} processes: the loss of a step "
            "is always divided by the sum over all of them. Leave it at True."
        )
    if getattr(args.deepspeed_plugin, "zero_stage", None) == 3:
        raise ValueError(
            "DeepSpeed has zero_stage=3, which also shards the weights of the target while it is loaded. A draft "
            "reads the unsharded embedding and head. Use stage 2, or FSDP2."
        )
    sizes = (
        args.parallelism_config or ParallelismConfig()
    )  # if unset, `accelerate launch` configures it in the environment
    for name, size in (("cp_size", sizes.cp_size), ("sp_size", sizes.sp_size)):
        if size is not None and size > 1:
            raise ValueError(
                f"parallelism_config has {name}={size}, and the blocks and the context of a row cannot be split over "
                f"ranks. Set {name} to 1 and use more data-parallel ranks or tensor parallelism."
            )
    if sizes.tp_size is not None and sizes.tp_size > 1 and draft.tp_size in (None, 1):
        raise ValueError(
            f"parallelism_config has tp_size={sizes.tp_size}, but the draft was not loaded for tensor parallelism. "
            f"Load it with from_pretrained(..., distributed_config=DistributedConfig(tp_size={sizes.tp_size}))."
        )
    if (getattr(target, "tp_size", None) or 1) not in (1, draft.tp_size or 1):
        raise ValueError(
            f"The target has tp_size={target.tp_size} and the draft has tp_size={draft.tp_size or 1}. The ranks of a "
            "tensor-parallel target must see the same rows. Load both with the same distributed_config, or shard the "
            "target with FSDP2 (fully_shard)."
        )


def check_generated_evaluation(
    args: DFlashTrainingArguments, target: PreTrainedModel, processing_class: PreTrainedTokenizerBase | None
) -> None:
    """
    Refuse a target from which an evaluation with `eval_generate_prompts` could not generate.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        target (`PreTrainedModel`): its target.
        processing_class (`PreTrainedTokenizerBase`, *optional*): the target's tokenizer.

    Raises:
        ValueError: the target's generation config asks for more than greedy decoding, or has stop strings and there is
            no tokenizer.
    """
    if args.eval_generate_prompts == 0:
        return
    check_generation_config(target, **ONE_RESPONSE, do_sample=False)
    stop_strings = None if target.generation_config is None else target.generation_config.stop_strings
    if stop_strings is not None and processing_class is None:
        raise ValueError(
            f"The generation config of the target has stop_strings={stop_strings!r}, and eval_generate_prompts needs "
            "the texts of tokens to find them. Pass processing_class=, the tokenizer of the target."
        )


@contextmanager
def hide_target(draft: DFlashDraftModel) -> Iterator[None]:
    """
    Hide the embedding and the head of the target inside the context.

    accelerate (1.15) shards the module that `get_input_embeddings` returns together with the draft, and that module
    belongs to the target.

    Args:
        draft ([`DFlashDraftModel`]): the draft, tied to its target.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(draft, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(draft, name)


@dataclass
class RowCounts:
    """
    Counts of a prepared data set.

    Args:
        rows (`int`): number of rows.
        tokens (`int`): number of tokens in all rows.
        supervised (`int`): number of tokens that carry loss.
        rows_without_anchor (`int`): number of rows in which no block can be trained.
        blocks_per_row (`float`): mean number of blocks that a step trains in a row.
    """

    rows: int
    tokens: int
    supervised: int
    rows_without_anchor: int
    blocks_per_row: float


def count_rows(dataset: datasets.Dataset, anchors_per_sample: int, window: int = 2) -> RowCounts:
    """
    Count the tokens and the possible anchors of a data set, on whole columns instead of single rows.

    Args:
        dataset (`datasets.Dataset`): prepared rows with `supervised_mask` and, if packed, `segment_ids`.
        anchors_per_sample (`int`): largest number of blocks of a row in a step.
        window (`int`, defaults to 2): tokens of its document that a block needs, the anchor included: 2 for blocks
            that may run past the end, and the block size for whole blocks.

    Returns:
        [`RowCounts`]
    """
    packed = ["segment_ids"] if "segment_ids" in dataset.column_names else []
    columns = dataset.select_columns(["supervised_mask", *packed]).with_format("arrow")
    tokens = supervised = without = blocks = 0
    for table in columns.iter(batch_size=1000):
        masks = table["supervised_mask"].combine_chunks()
        ends = pyarrow.compute.list_value_length(masks).to_numpy().cumsum()
        starts = np.concatenate([[0], ends[:-1]])
        is_supervised = masks.flatten().to_numpy(zero_copy_only=False).astype(bool)
        starts_document = np.zeros(len(is_supervised) + 1, dtype=bool)
        starts_document[starts] = starts_document[ends] = True
        if packed:
            documents = table["segment_ids"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            starts_document[1:-1] |= documents[1:] != documents[:-1]
        # An anchor precedes a supervised token of its document, and its whole window fits into the document.
        can_follow = is_supervised & ~starts_document[:-1]
        places = np.arange(len(is_supervised))
        document_ends = np.flatnonzero(starts_document)[starts_document.cumsum()[:-1]] if len(places) else places
        can_follow &= places - 1 + window <= document_ends
        total = np.concatenate([[0], can_follow.cumsum()])
        anchors = total[ends] - total[starts]
        tokens += len(is_supervised)
        supervised += int(is_supervised.sum())
        without += int((anchors == 0).sum())
        blocks += int(np.minimum(anchors, anchors_per_sample).sum())
    return RowCounts(len(dataset), tokens, supervised, without, blocks / max(len(dataset), 1))


@dataclass
class TrainingSummary:
    """
    Summary of a training run before its first step.

    Args:
        target (`str`): name, parameters, dtype and device.
        draft (`str`): parameters, dtype, layers.
        block (`str`): block size, tapped layers, mask token.
        data (`str`): rows, tokens, share of supervised tokens, and rows without an anchor.
        run (`str`): number of steps, and rows and blocks of a step.
        optimizer (`str`): optimizer, learning rate, schedule, slot weights.
        cache (`str`, *optional*): size of the hidden-state cache.
        counts ([`RowCounts`], *optional*): the counts in `data`; `None` for a stream.
        steps (`int`, *optional*): number of optimizer steps; `None` if the clock or the length of a stream decides.
    """

    target: str
    draft: str
    block: str
    data: str
    run: str
    optimizer: str
    cache: str | None
    counts: RowCounts | None
    steps: int | None

    def __str__(self) -> str:
        names = ("target", "draft", "block", "data", "run", "optimizer", "cache")
        lines = [f"  {name:<10}{getattr(self, name)}" for name in names if getattr(self, name) is not None]
        return "\n".join(["DFlash training", *lines])


def summarize_training(
    args: Any,
    draft: DFlashDraftModel,
    target: PreTrainedModel,
    train_dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TrainingSummary:
    """
    Describe a training run before it starts.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        draft ([`DFlashDraftModel`]), target (`PreTrainedModel`): the pair.
        train_dataset (`datasets.Dataset` or a stream): prepared rows; a stream is not counted.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): gives the text of the mask token.

    Returns:
        [`TrainingSummary`]; `str()` renders it.
    """
    config = draft.config
    counts = (
        count_rows(train_dataset, args.anchors_per_sample, 2 if args.partial_windows else config.tokens_per_block)
        if isinstance(train_dataset, datasets.Dataset) and "supervised_mask" in train_dataset.column_names
        else None
    )
    rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = _optimizer_steps(args, counts.rows if counts is not None else None)
    data = "a stream"
    run = f"{rows_per_step} rows a step, up to {args.anchors_per_sample} blocks a row"
    if counts is not None:
        share = counts.supervised / max(counts.tokens, 1)
        data = f"{counts.rows:,} rows, {counts.tokens:,} tokens, {share:.0%} supervised"
        if counts.rows_without_anchor:
            data += f", {counts.rows_without_anchor:,} rows without an anchor"
        run = f"{rows_per_step} rows and {rows_per_step * counts.blocks_per_row:,.0f} blocks a step"
    if args.max_train_minutes is not None:
        run = f"{args.max_train_minutes:g} minutes, {run}"
    elif steps is not None:
        run = f"{steps:,} steps, {run}"
    cache = None
    if args.cache_target_states is not None and counts is not None:
        size = counts.tokens * draft.fc.in_features * target.dtype.itemsize / 2**30
        place = "on disk" if args.cache_target_states == "disk" else "in memory"
        cache = f"hidden states of the target {place}: {size:.2f} GiB"
    weights = args.slot_weights if args.loss_decay is None else f"{args.slot_weights} ({args.loss_decay:g})"
    return TrainingSummary(
        target=f"{describe_target(target)}, {_describe_weights(target)}, on {target.device}",
        draft=f"{config.kind}, {_describe_weights(draft)}, {config.num_hidden_layers} layers",
        block=f"{config.block_size} slots, target layers {config.target_layer_ids} of "
        f"{config.target_num_hidden_layers}, mask token {_describe_token(config, tokenizer)}",
        data=data,
        run=run,
        optimizer=f"{'Muon with AdamW' if args.use_muon else getattr(args.optim, 'value', args.optim)}, "
        f"peak rate {args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}, "
        f"slot weights {weights}",
        cache=cache,
        counts=counts,
        steps=steps,
    )


def _optimizer_steps(args: Any, rows: int | None) -> int | None:
    """Return the number of optimizer steps as Trainer computes it, or `None` if it is not known."""
    if args.max_train_minutes is not None:
        return None
    if args.max_steps > 0:
        return args.max_steps
    if rows is None:
        return None
    share = rows / (args.train_batch_size * args.world_size)
    batches = math.floor(share) if args.dataloader_drop_last else math.ceil(share)
    return math.ceil(args.num_train_epochs * max(math.ceil(batches / args.gradient_accumulation_steps), 1))


def _describe_weights(model: PreTrainedModel) -> str:
    """Describe the number of parameters and the dtype of a model."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters in {str(model.dtype)[6:]}"


def _describe_token(config: DFlashConfig, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describe the mask token by its id and, if known, its text."""
    known = tokenizer is not None and config.mask_token_id < len(tokenizer)
    name = tokenizer.convert_ids_to_tokens(config.mask_token_id) if tokenizer is not None and known else None
    return f"{config.mask_token_id}" if name is None else f"{config.mask_token_id} ({name})"


def warn_of_dtypes(args: Any, draft: DFlashDraftModel, target: PreTrainedModel) -> None:
    """
    Warn of dtypes in which training runs but gives a poor draft.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        draft ([`DFlashDraftModel`]), target (`PreTrainedModel`): the pair.
    """
    if draft.dtype in (torch.bfloat16, torch.float16):
        logger.warning(
            f"The draft's weights are in {str(draft.dtype)[6:]}, in which small updates round to zero, so that its "
            "norm weights do not change. Load it with dtype=torch.float32 and pass bf16=True for speed."
        )
    places = [("the target", target.dtype == torch.float16), ("the draft", draft.dtype == torch.float16)]
    places += [(f"{name}=True", getattr(args, name)) for name in ("fp16", "fp16_full_eval")]
    found = [place for place, is_half in places if is_half]
    if found:
        logger.warning(
            f"float16 is used ({', '.join(found)}). The hidden states of many targets exceed its range, and then no "
            "drafted token is accepted. Use bfloat16 or float32."
        )
