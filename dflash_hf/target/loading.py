"""Load a target (weights, tokenizer, configuration), alone or with a draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..model.modeling_dflash import DFlashDraftModel, target_auto_class


@dataclass(frozen=True)
class TargetText:
    """
    The parts of a target that the preparation of rows needs, which do not include its weights.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer with its chat template.
        eos_token_ids (`tuple[int, ...]`): end-of-sequence ids of its generation configuration.
        num_embeddings (`int`): number of rows of its embedding.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    num_embeddings: int


def read_target(name: str) -> TargetText:
    """
    Read the tokenizer and the configuration of a target.

    Args:
        name (`str`): Hub name or folder.

    Returns:
        [`TargetText`]

    Raises:
        OSError: they cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"The target {name!r} cannot be read: {error}") from error
    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # older targets have no such file, and generation derives it from config.json
        eos = GenerationConfig.from_model_config(config).eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return TargetText(tokenizer, tuple(ends), config.get_text_config().vocab_size)


DTYPES = ("auto", "bfloat16", "float16", "float32")


def open_target(name: str, dtype: str | torch.dtype = "auto", revision: str | None = None) -> PreTrainedModel:
    """
    Load a target with the class that has its language model head, multimodal targets included.

    Args:
        name (`str`), dtype (`str` or `torch.dtype`), revision (`str`, *optional*): as for [`load_target`].

    Returns:
        `PreTrainedModel`: in evaluation mode.

    Raises:
        OSError: it cannot be read.
        ValueError: transformers has no language model of this kind.
    """
    revision = revision or "main"
    auto_class = target_auto_class(AutoConfig.from_pretrained(name, revision=revision))
    try:
        target: PreTrainedModel = auto_class.from_pretrained(name, dtype=dtype, revision=revision)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        reason = str(error).split(" for this kind of AutoModel")[0].splitlines()[0]
        raise ValueError(
            f"The target {name!r} is no language model that transformers can open ({reason}). Give a causal language "
            "model, or one that reads images and text."
        ) from None
    return target.eval()


def load_target(
    name: str, dtype: str | torch.dtype, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load a target and its tokenizer.

    Args:
        name (`str`): Hub name or folder.
        dtype (`str` or `torch.dtype`): dtype of the weights; `"auto"` keeps that of the checkpoint.
        revision (`str`, *optional*): its revision on the Hub.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the target in evaluation mode, and its tokenizer.

    Raises:
        ValueError: the dtype is unknown.
        OSError: the weights or the tokenizer cannot be read.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
    try:
        target = open_target(name, dtype, revision)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    except OSError as error:
        raise OSError(f"The target {name!r} cannot be loaded: {error}") from error
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        nn.Module.to(target, device)
    return target, tokenizer


def has_weights(target: PreTrainedModel) -> bool:
    """
    Return whether every weight of a target exists, in memory or where accelerate loads it from.

    Args:
        target (`PreTrainedModel`): the target.

    Returns:
        `bool`: `False` if a weight was left on the meta device.
    """
    is_offloaded = any(hasattr(module, "_hf_hook") for module in target.modules())
    return is_offloaded or not any(tensor.is_meta for tensor in target.parameters())


def load_target_config(name: str) -> PreTrainedConfig:
    """
    Load the configuration of a target, without its weights.

    Args:
        name (`str`): Hub name or folder.

    Returns:
        `PreTrainedConfig`

    Raises:
        OSError: it cannot be read.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise OSError(f"The target {name!r} cannot be loaded: {error}") from error
    return config


def load_pair(
    draft: str, target: str | None, dtype: str
) -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """
    Load a draft and its target, in one dtype and on one device.

    Args:
        draft (`str`): Hub name or folder.
        target (`str`, *optional*): Hub name or folder; by default the target that the draft names.
        dtype (`str`): as for [`load_target`].

    Returns:
        `tuple`: the target, the draft tied to it, and the target's tokenizer.

    Raises:
        ValueError: no target is known, the dtype is unknown, or the two do not fit together.
        OSError: one of them cannot be read.
    """
    pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    model, tokenizer = load_target_of(pair, target, dtype)
    return model, pair, tokenizer


def load_target_of(
    draft: DFlashDraftModel, target: str | None, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the target of a draft, tie the draft to it, and move the draft to its device and dtype.

    Args:
        draft ([`DFlashDraftModel`]): loaded without a target.
        target (`str`, *optional*), dtype (`str`): as for [`load_pair`].

    Returns:
        `tuple`: the target and its tokenizer.

    Raises:
        ValueError, OSError: as [`load_pair`].
    """
    name = target or draft.config.target_name_or_path
    if name is None:
        raise ValueError(f"The draft {draft.name_or_path!r} names no target, and none was given. Pass --target.")
    model, tokenizer = load_target(name, dtype)
    draft.tie_target(model)
    nn.Module.to(draft, model.device, model.dtype)
    return model, tokenizer
