"""Training in several processes: the layouts that are refused, and a target that sharding leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import ParallelismConfig
from transformers import PreTrainedModel

from ..model.modeling_dflash import DFlashDraftModel
from .arguments import DFlashTrainingArguments


def check_processes(args: DFlashTrainingArguments, draft: DFlashDraftModel, target: PreTrainedModel) -> None:
    """
    Refuse ways to spread training that would be wrong or that the draft cannot do, before anything is built.

    Args:
        args ([`DFlashTrainingArguments`]): of the run; told to use one GPU if the others are the target's.
        draft ([`DFlashDraftModel`]), target (`PreTrainedModel`): the pair.

    Raises:
        ValueError: the layout is not supported; the message names it and what to use instead.
    """
    if args.n_gpu > 1:
        if len(set((getattr(target, "hf_device_map", None) or {}).values())) > 1:
            args._n_gpu = 1  # the other devices are the target's
        else:
            raise ValueError(
                f"This one process sees {args.n_gpu} GPUs, which Trainer would use through nn.DataParallel; the loss "
                "of a step is exact with one process for each GPU only. Start training with `accelerate launch` or "
                "`torchrun --nproc-per-node`, or show it one GPU with CUDA_VISIBLE_DEVICES=0."
            )
    if getattr(args.deepspeed_plugin, "zero_stage", None) == 3:
        raise ValueError(
            "DeepSpeed has zero_stage=3, which splits the weights of the target, too, as it is loaded; a draft reads "
            "its embedding and head whole. Use stage 2, or FSDP2."
        )
    sizes = args.parallelism_config or ParallelismConfig()  # unset: what `accelerate launch` put in the environment
    for name, size in (("cp_size", sizes.cp_size), ("sp_size", sizes.sp_size)):
        if size is not None and size > 1:
            raise ValueError(
                f"parallelism_config has {name}={size}: a row's blocks and its context cannot be split over ranks. "
                f"Leave {name} at 1 and use more data-parallel ranks or tensor parallelism."
            )
    if sizes.tp_size is not None and sizes.tp_size > 1 and draft.tp_size in (None, 1):
        raise ValueError(
            f"parallelism_config has tp_size={sizes.tp_size}, but the draft was not loaded for tensor parallelism. "
            f"Load it with from_pretrained(..., distributed_config=DistributedConfig(tp_size={sizes.tp_size}))."
        )
    if (getattr(target, "tp_size", None) or 1) not in (1, draft.tp_size or 1):
        raise ValueError(
            f"The target has tp_size={target.tp_size} and the draft tp_size={draft.tp_size or 1}: the ranks of a "
            "tensor-parallel target must see the same rows. Load both with the same distributed_config, or shard the "
            "target with FSDP2 (fully_shard)."
        )


@contextmanager
def target_out_of_sight(draft: DFlashDraftModel) -> Iterator[None]:
    """
    Hide embedding and head inside the context: accelerate shards what `get_input_embeddings` names together with the
    draft, and that is the target's.

    Args:
        draft ([`DFlashDraftModel`]): tied.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(draft, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(draft, name)
