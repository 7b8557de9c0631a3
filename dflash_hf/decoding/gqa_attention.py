"""Grouped-query SDPA for the few queries of a block, without a copy of the keys and values for every query head."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# transformers 5.24 takes every implementation with "flash" in its name for flash attention.
NAME = "grouped_query_sdpa"
# Attention functions that take a mask for each query. A call in another thread may have set our own for its target.
MASKED_ATTENTION = ("sdpa", "eager", NAME)


def grouped_query_sdpa(
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
    Compute scaled dot-product attention with grouped queries, without repeating keys and values.

    `sdpa_attention_forward` of transformers 5.24 repeats keys and values for every query head of a group when there is
    a mask and more than one query. This function instead places the queries of all heads of a group one after the
    other. It hands every other case to the function of transformers.

    Args:
        module (`nn.Module`):
            The attention layer.
        query (`torch.Tensor` of shape `[sequences, heads, queries, head_dim]`):
            Queries of the new tokens.
        key, value (`torch.Tensor` of shape `[sequences, kv_heads, keys, head_dim]`):
            Keys and values of all tokens.
        attention_mask (`torch.BoolTensor` of shape `[sequences, 1, queries or 1, keys]`, *optional*):
            True where a key is visible.
        dropout, scaling, **kwargs:
            The arguments of the function of transformers.

    Returns:
        `tuple`: the output of shape `[sequences, queries, heads, head_dim]`, and `None`.
    """
    num_sequences, num_heads, num_queries, head_dim = query.shape
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
    grouped = query.reshape(num_sequences, key.shape[1], groups * num_queries, head_dim)
    mask = attention_mask.repeat(1, 1, 1 if attention_mask.shape[2] == 1 else groups, 1)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(num_sequences, num_heads, num_queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_query_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)


@functools.cache
def _compares_names(module_name: str) -> bool:
    """Return whether the code of a module may compare the name of the attention implementation with those it knows."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (OSError, TypeError):
        return True
    return re.search(r"_attn_implementation\s*(==|!=|in\b|not in\b)", source) is not None


def _looks_attention_up(model: PreTrainedModel) -> bool:
    """
    Return whether a model looks its attention function up by name, and nothing else depends on the name.

    In transformers 5.24 Falcon, for example, takes a name that it does not know for eager, and Gemma 4 decides by the
    name whether its last layers may leave queries out.
    """
    names = {type(module).__module__ for module in model.modules()}
    lookups = [name for name in names if hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS")]
    return bool(lookups) and not any(map(_compares_names, lookups))


@contextmanager
def use_grouped_query_sdpa(*models: PreTrainedModel) -> Iterator[None]:
    """
    Let models that use SDPA use [`grouped_query_sdpa`] inside this context.

    Models with any other attention stay unchanged.

    Args:
        *models (`PreTrainedModel`): the models.
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
