"""Load a target for a command: weights and tokenizer, on the accelerator if there is one."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_target(name: str, dtype: str | torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load a target and its tokenizer.

    Args:
        name (`str`): Hub name or folder.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"` keeps the checkpoint's.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the target in evaluation mode, and its tokenizer.

    Raises:
        ValueError: the dtype is unknown.
        OSError: weights or tokenizer cannot be read.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
    try:
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise OSError(f"The target {name!r} cannot be loaded: {error}") from error
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        nn.Module.to(target, device)
    return target, tokenizer
