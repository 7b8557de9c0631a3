"""SDPA for the few queries of a block: the query heads of a group share one copy of its keys and values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "dflash_packed_sdpa"


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    What transformers' SDPA computes, without a copy of the keys for every query head.

    With a mask and several queries transformers repeats keys and values for each query head of a group. Here the heads
    of a group stand in one line of queries instead. Everything else goes to transformers' own function.

    Args:
        module (`nn.Module`): the attention layer.
        query (`torch.Tensor` of shape `[rows, heads, queries, head_dim]`): of the new tokens.
        key, value (`torch.Tensor` of shape `[rows, kv_heads, keys, head_dim]`): of all tokens.
        attention_mask (`torch.BoolTensor` of shape `[rows, 1, queries or 1, keys]`, *optional*): True = visible.
        dropout, scaling, **kwargs: as for transformers' function.

    Returns:
        `tuple`: output of shape `[rows, queries, heads, head_dim]`, and `None`.
    """
    rows, num_heads, num_queries, head_dim = query.shape
    groups = num_heads // key.shape[1]
    has_own_scores = bool(dropout) or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if (
        attention_mask is None
        or attention_mask.dtype != torch.bool
        or attention_mask.shape[1] != 1
        or 1 in (groups, num_queries)
        or has_own_scores
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    packed = query.reshape(rows, key.shape[1], groups * num_queries, head_dim)
    packed_mask = attention_mask.repeat(1, 1, 1 if attention_mask.shape[2] == 1 else groups, 1)
    output = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=packed_mask, scale=scaling)
    return output.reshape(rows, num_heads, num_queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _looks_attention_up(model: PreTrainedModel) -> bool:
    """Whether attention is found by its name. A model that compares names takes an unknown one for eager."""
    names = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in names)


@contextmanager
def packed_attention(*models: PreTrainedModel) -> Iterator[None]:
    """
    These models use [`packed_sdpa`] inside the context, if they use SDPA outside.

    Args:
        *models (`PreTrainedModel`): live ones.
    """
    text_configs = [model.config.get_text_config(decoder=True) for model in models if _looks_attention_up(model)]
    changed = [config for config in text_configs if config._attn_implementation == "sdpa"]
    for config in changed:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config in changed:
            config._attn_implementation = "sdpa"
