"""
The DFlash draft network, the embedding and head that it shares with its target, and how a draft is loaded.

The file travels with every checkpoint, so that it needs torch, transformers and safetensors but not this package. Its
order: the network (`DFlashBody`) with its heads, the modules of the target, the draft model (`DFlashDraftModel`), and
the checks and errors of loading.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DFlashCache
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .configuration_dflash import (
    DFlashConfig,
    check_target_layer_ids,
    describe_target,
    num_embedding_rows,
    residual_streams,
)

logger = logging.get_logger(__name__)

# A mask, or a function that computes the attention itself:
# (query, key, value, scaling=, dropout=) -> [batch, queries, heads, head_dim].
AttentionMask = torch.Tensor | BlockMask | Callable[..., torch.Tensor] | None

# Reads a draft: (folder or Hub name, config=, given=, target=, **hub_kwargs) -> configuration and tensors.
CheckpointReader = Callable[..., tuple[DFlashConfig, dict[str, torch.Tensor] | None]]

# Arguments of `from_pretrained` that find files on the Hub. Those of the first line also find the target.
TARGET_LOOK_UP = ("token", "cache_dir", "local_files_only")
DRAFT_LOOK_UP = (*TARGET_LOOK_UP, "revision", "subfolder")


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which matrix products with `x` run, which is that of autocast where autocast is enabled."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _LeanRMSNorm(torch.autograd.Function):
    """
    Normalise by the root mean square and save only the input for the backward pass.

    Without a fused kernel, as on a CPU in torch 2.13, `functional.rms_norm` saves two more tensors of that size.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        products = gradients[0] * normed
        weight_gradient = products.flatten(0, -2).sum(0)
        along_x = (products @ weight)[..., None] / x.shape[-1]
        x_gradient = (gradients[0] * weight).sub_(normed.mul_(along_x)).mul_(scale)
        return x_gradient, weight_gradient, None


class _SumGradient(torch.autograd.Function):
    """Return the tensor itself, and sum its gradient over the ranks of a process group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class DFlashRMSNorm(nn.Module):
    """
    Divide by the root mean square over the last axis, computed in fp32, and multiply by a trained weight.

    The result has the dtype of the matrix products that follow, so that autocast makes no further copy.

    Under tensor parallelism each rank normalises its own heads with one shared weight, and `group` sums the gradient
    of that weight over the ranks. The plan entry `replicated_with_grad_allreduce` of transformers 5.24 sums the
    accumulated `.grad` instead, which counts the earlier micro-batches of an accumulation window more than once.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, group: Any = None) -> torch.Tensor:
        weight = self.weight if group is None else _SumGradient.apply(self.weight, group)
        if x.device.type == "cpu" and torch.is_grad_enabled():
            normed = _LeanRMSNorm.apply(x.float(), weight.float(), self.eps)
        else:
            normed = nn.functional.rms_norm(x.float(), weight.shape, weight.float(), self.eps)
        return normed.to(product_dtype(x))


class DFlashMLP(nn.Module):
    """The gated feed-forward network of a decoder layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def rotary_angles(
    config: DFlashConfig, position_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute cosine and sine of the rotary angles in fp32, from the configuration alone.

    The frequencies are not kept in a buffer: in transformers 5.24 `from_pretrained` leaves a non-persistent buffer of
    a custom model uninitialised, and `.to(torch.bfloat16)` would round it.

    Args:
        config (`DFlashConfig`): Gives `rope_parameters` and `head_dim`.
        position_ids (`torch.LongTensor` of shape `[batch, length]`): Absolute positions.
        dtype (`torch.dtype`): The dtype of the result.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: cosine and sine, each of shape `[batch, 1, length, head_dim]`.
    """
    rope_type, scaling = (config.rope_parameters or {})["rope_type"], 1.0
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32)
        inverse_frequencies = config.rope_theta ** (-exponents / config.head_dim)
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, position_ids.device)
    with torch.autocast(device_type=position_ids.device.type, enabled=False):
        angles = position_ids[:, None, :, None].float() * inverse_frequencies.float()
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` of shape `[batch, heads, length, head_dim]`, whose two halves of a head form the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def serving_mask(
    num_queries: int,
    num_keys: int,
    *,
    window: int | None,
    causal: bool,
    key_valid_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """
    Build the mask of one block after its context. It follows from shapes: the last `num_queries` keys are the block.

    Args:
        num_queries (`int`): The number of slots in the block.
        num_keys (`int`): The number of context keys and block keys, which are in the order of their positions.
        window (`int`, *optional*): A context key is visible only at a distance below this from the query.
        causal (`bool`): Whether a slot is kept from seeing the later slots of its block.
        key_valid_mask (`torch.BoolTensor` of shape `[batch, at least num_keys]`, *optional*): False at padding.
        device (`torch.device`): The device of the result.

    Returns:
        `torch.BoolTensor` of shape `[batch or 1, 1, num_queries, num_keys]`, or `None` if everything is visible.
    """
    if window is None and not causal and key_valid_mask is None:
        return None
    key_slots = torch.arange(num_keys, device=device) - (num_keys - num_queries)
    query_slots = torch.arange(num_queries, device=device)[:, None]
    in_block = (key_slots >= 0) & (key_slots <= query_slots if causal else True)
    in_context = (key_slots < 0) & (query_slots - key_slots < window if window is not None else True)
    visible = (in_block | in_context)[None, None]
    if key_valid_mask is not None:
        visible = visible & key_valid_mask[:, None, None, -num_keys:]
    return visible


def valid_queries(attention_mask: AttentionMask, num_queries: int) -> torch.Tensor | None:
    """
    Return the slots that exist according to a training mask.

    A function that computes the attention, and the `mask_mod` of a `BlockMask`, may have an attribute
    `query_valid_mask`. In a dense mask a slot that does not exist sees nothing but its own key, so that no row of the
    softmax is empty, and no other slot sees that key.

    Args:
        attention_mask: The mask of a layer type, as [`DFlashBody.forward`] takes it.
        num_queries (`int`): The number of slots, whose keys are the last ones.

    Returns:
        `torch.BoolTensor` of shape `[batch or 1, num_queries]`, or `None` if the mask does not say it.
    """
    if isinstance(attention_mask, BlockMask):
        attention_mask = attention_mask.mask_mod
    if not isinstance(attention_mask, torch.Tensor):
        return getattr(attention_mask, "query_valid_mask", None)
    if attention_mask.dim() != 4 or attention_mask.dtype != torch.bool:
        return None
    first_slot = attention_mask.shape[-1] - num_queries
    is_own_key = torch.ones_like(attention_mask[0, 0]).tril(first_slot).triu(first_slot)
    sees_other_keys = attention_mask.any(1) & ~is_own_key
    return sees_other_keys.any(-1) | sees_other_keys[..., first_slot:].any(-2)


def eager_attention(
    module: DFlashAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention without a fused kernel. The mask is bool (True = visible). Returns output and weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = nn.functional.dropout(scores.softmax(-1).to(value.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class DFlashAttention(nn.Module):
    """Grouped-query attention of the slots over context and block, which share one key and one value projection."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False  # The mask is complete, so that no kernel may add a causal mask.
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.attention_sink_bias = (
            nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: AttentionMask,
        key_valid_mask: torch.Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch, num_queries, _ = hidden_states.shape
        num_new_keys = context.shape[1] + num_queries

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(*projected.shape[:2], projected.shape[2] // self.head_dim, self.head_dim)

        # The two sources are projected separately and then joined, because the projected tensors are the smaller ones.
        key = torch.cat([heads(self.k_proj(context)), heads(self.k_proj(hidden_states))], dim=1)
        value = torch.cat([heads(self.v_proj(context)), heads(self.v_proj(hidden_states))], dim=1)
        mesh = getattr(self.k_proj.weight, "device_mesh", None)  # Tensor parallelism turns weights into DTensors.
        group = None if mesh is None else mesh.get_group()
        query = self.q_norm(heads(self.q_proj(hidden_states)), group).transpose(1, 2)
        key, value = self.k_norm(key, group).transpose(1, 2), value.transpose(1, 2)

        cos, sin = rotary
        query = apply_rotary(query, cos[:, :, -num_queries:], sin[:, :, -num_queries:])
        key = apply_rotary(key, cos[:, :, -num_new_keys:], sin[:, :, -num_new_keys:])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if attention_mask is None:
            attention_mask = serving_mask(
                num_queries,
                key.shape[2],
                window=self.config.layer_window(self.layer_idx),
                causal=self.config.in_block_causal(self.layer_idx),
                key_valid_mask=key_valid_mask,
                device=key.device,
            )

        dropout = self.config.attention_dropout if self.training else 0.0
        if self.attention_sink_bias is not None:
            key, value, attention_mask = self._with_sink(query, key, value, attention_mask)
        if callable(attention_mask):
            output = attention_mask(query, key, value, scaling=self.scaling, dropout=dropout)
            return self.o_proj(output.reshape(batch, num_queries, -1))

        implementation = self.config._attn_implementation
        if isinstance(attention_mask, BlockMask):
            implementation = "flex_attention"
        elif implementation == "flex_attention" and attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
                ~attention_mask, torch.finfo(query.dtype).min
            )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            is_causal=False,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, num_queries, -1))

    def _with_sink(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: AttentionMask
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append a key whose score is the sink of each head and whose value is zero. The mask becomes additive."""
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
            raise ValueError(
                "The draft has attention sinks, which need a dense mask. Train it with block_attention='dense'."
            )
        if attention_mask is None:
            attention_mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        smallest = torch.finfo(query.dtype).min
        scores = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, smallest)
        sinks: Any = self.attention_sink_bias
        mesh = getattr(self.k_proj.weight, "device_mesh", None)
        if mesh is not None:  # Tensor parallelism gives each rank consecutive heads.
            sinks = _SumGradient.apply(sinks, mesh.get_group()).chunk(mesh.size())[mesh.get_local_rank()]
        shape = (scores.shape[0], query.shape[1], scores.shape[2])
        scores = torch.cat(
            [scores.expand(-1, query.shape[1], -1, -1), sinks.to(scores.dtype)[None, :, None, None].expand(*shape, 1)],
            dim=-1,
        )
        return nn.functional.pad(key, (0, 0, 0, 1)), nn.functional.pad(value, (0, 0, 0, 1)), scores


class ZeroLinear(nn.Linear):
    """A linear layer that begins at zero."""


class DFlashConvolution(nn.Module):
    """
    Two causal convolutions over the slots of a block, before and after a sublayer (DFlash 2).

    Tap `o` of slot `t` multiplies the state of slot `t - o`, which is zero before the block, by a kernel. A kernel is
    the sum of a trained one for each channel and of one for each group of consecutive channels, which a projection of
    the sublayer's normalised input gives. A new convolution is the identity.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.block_size, self.group_size = config.block_size, config.conv_group_size or 1
        num_taps, num_groups = config.conv_kernel_size or 1, config.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, config.hidden_size))
        self.kernel_projection = ZeroLinear(config.hidden_size, 2 * num_taps * num_groups, bias=False)

    def kernels(self, normed: torch.Tensor) -> torch.Tensor:
        """Compute the kernels of both sides, of shape `[2, taps, batch, length, hidden_size]`, from the input."""
        of_groups = self.kernel_projection(normed).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        of_tokens = of_groups.repeat_interleave(self.group_size, dim=-1).movedim((-3, -2), (0, 1))
        return self.base_kernel[:, :, None, None] + of_tokens

    def convolve(self, hidden_states: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Apply the kernels of one side to states of shape `[batch, length, hidden_size]`, block by block."""
        num_slots = min(self.block_size, hidden_states.shape[1])
        blocks = hidden_states.unflatten(1, (-1, num_slots))
        result = kernels[0] * hidden_states
        for tap in range(1, min(len(kernels), num_slots)):
            shifted = nn.functional.pad(blocks[:, :, :-tap], (0, 0, tap, 0))
            result = result + kernels[tap] * shifted.flatten(1, 2)
        return result


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward network, each behind its own norm and with a residual connection."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        has_convolutions = config.conv_kernel_size is not None
        self.attention_conv = DFlashConvolution(config) if has_convolutions else None
        self.mlp_conv = DFlashConvolution(config) if has_convolutions else None

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + _convolved(self.attention_conv, self.self_attn, normed, context, **kwargs)
        return hidden_states + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_states))


def _convolved(
    convolution: DFlashConvolution | None, sublayer: nn.Module, normed: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Run a sublayer between the two convolutions that belong to it, if there are any."""
    if convolution is None:
        return sublayer(normed, *args, **kwargs)
    before, after = convolution.kernels(normed)
    return convolution.convolve(sublayer(convolution.convolve(normed, before), *args, **kwargs), after)


class DFlashSelector(nn.Module):
    """
    The candidate selector of DFlash 2, which scores a candidate `b` after a token `a` in a slot with state `h`.

    The score `A[a] · (W h) · B[b]`, summed over the rank, is added to the logit of `b`. `A` and `B` are tables over
    the vocabulary, or projections of the target's embedding (`selector_factored`). `B` begins at zero, so that a new
    selector changes nothing.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, hidden_size = config.selector_rank or 1, config.hidden_size
        self.is_factored = config.selector_factored
        if self.is_factored:
            self.predecessor_projection = nn.Linear(hidden_size, rank, bias=False)
            self.successor_projection = ZeroLinear(hidden_size, rank, bias=False)
        else:
            self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
            self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def features(self, previous: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Combine the token before a slot with the state of the slot.

        Args:
            previous (`torch.Tensor`): Token ids of shape `[...]`, or their embeddings of shape `[..., hidden_size]`
                if the selector is factored.
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): States after the last norm.

        Returns:
            `torch.FloatTensor` of shape `[..., rank]`.
        """
        projected = self.hidden_projection(hidden_states.to(self.hidden_projection.weight.dtype))
        if self.is_factored:
            rows = self.predecessor_projection(previous.to(self.predecessor_projection.weight.dtype))
        else:
            rows = nn.functional.embedding(previous, self.predecessor_codebook)
        return rows * projected

    def scores(self, features: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """
        Score the candidates of slots.

        Args:
            features (`torch.FloatTensor` of shape `[..., rank]`): From [`features`].
            candidates (`torch.Tensor`): Token ids of shape `[..., K]`, or their embeddings of shape
                `[..., K, hidden_size]` if the selector is factored.

        Returns:
            `torch.FloatTensor` of shape `[..., K]`.
        """
        if self.is_factored:  # (B · features) is one vector a slot, which costs less than a projection a candidate
            wanted = features @ self.successor_projection.weight.to(features.dtype)
            return (candidates.to(wanted.dtype) @ wanted[..., None])[..., 0]
        rows = nn.functional.embedding(candidates, self.successor_codebook)
        return (rows.to(features.dtype) @ features[..., None])[..., 0]


class DFlashMarkovHead(nn.Module):
    """
    The Markov head of DSpark, which adds a score to every logit of a slot according to the token before it.

    It reads the embedding of the token before alone (`vanilla`), gates it by the state of the slot (`gated`), or
    carries a state from slot to slot (`rnn`). The second matrix begins at zero, so that a new head changes nothing.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, hidden_size = config.markov_rank or 1, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = ZeroLinear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def features(
        self, previous: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Combine the token before a slot with the state of the slot and, in an `rnn` head, with the slots before.

        Args:
            previous (`torch.LongTensor` of shape `[...]`): Token ids.
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): States after the last norm.
            state (`torch.FloatTensor` of shape `[..., rank]`, *optional*): From the slot before; `None` in the first.

        Returns:
            `tuple`: features of shape `[..., rank]`, and the state for the next slot or `None`.
        """
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, None
        hidden_states = hidden_states.to(embedded.dtype)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden_states, embedded], dim=-1)).sigmoid()
            return gate * embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        parts = self.joint_proj(torch.cat([state, embedded, hidden_states], dim=-1))
        gate, candidate, output = parts.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def scores(self, features: torch.Tensor, draft_ids: torch.Tensor | None = None) -> torch.Tensor:
        """
        Return the scores of all tokens of the draft's vocabulary, or of the candidates `[..., K]` of each slot.

        Args:
            features (`torch.FloatTensor` of shape `[..., rank]`): From [`features`].
            draft_ids (`torch.LongTensor` of shape `[..., K]`, *optional*): Indices in the draft's vocabulary.

        Returns:
            `torch.FloatTensor` of shape `[..., vocabulary or K]`.
        """
        if draft_ids is None:
            return self.markov_w2(features)
        rows = nn.functional.embedding(draft_ids, self.markov_w2.weight)
        return (rows.to(features.dtype) @ features[..., None])[..., 0]


class DFlashConfidenceHead(nn.Module):
    """The head of DSpark that predicts how likely the target accepts the token of a slot."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + ((config.markov_rank or 0) if with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """
        Return the logit of the probability.

        Args:
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): States after the last norm.
            embedded (`torch.FloatTensor` of shape `[..., rank]`, *optional*): The Markov head's embedding of the token
                before the slot, where the head reads it.

        Returns:
            `torch.FloatTensor` of shape `[...]`, fp32.
        """
        inputs = hidden_states if embedded is None else torch.cat([hidden_states, embedded.to(hidden_states)], dim=-1)
        return self.proj(inputs.to(self.proj.weight.dtype))[..., 0].float()


@dataclass
class DFlashOutput(BaseModelOutputWithPast):
    """
    The output of a draft.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `[batch, M * tokens_per_block, hidden_size]`):
            The states from which the head computes the logits of the proposals.
        head_output (*optional*): What the `head_function` of the call returned.
    """

    head_output: Any = None


class DFlashBody(PreTrainedModel):
    """
    The trainable network, which turns block inputs and target hidden states into hidden states of the slots.

    It has no embedding, no head and no loss.
    """

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012  (a class attribute by transformers' contract)
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        num_target_layers = len(config.target_layer_ids or [])
        self.fc = nn.Linear(num_target_layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.learned_mask_embedding else None
        self.candidate_selector = DFlashSelector(config) if config.selector_rank is not None else None
        self.markov_head = DFlashMarkovHead(config) if config.markov_rank is not None else None
        self.confidence_head = DFlashConfidenceHead(config) if config.enable_confidence_head else None
        self.d2t: torch.Tensor | None
        # The token of draft index `i` is `i + d2t[i]`.
        offsets = None if config.draft_vocab_size is None else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", offsets)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a new module. The parts that correct a draft begin as if they were not there."""
        super()._init_weights(module)
        if isinstance(module, ZeroLinear):
            module.weight.zero_()
        elif isinstance(module, DFlashConvolution):
            module.base_kernel.zero_()
            module.base_kernel[:, 0] = 1
        elif isinstance(module, DFlashSelector) and not module.is_factored:
            module.predecessor_codebook.normal_(std=self.config.initializer_range)
            module.successor_codebook.zero_()
        elif isinstance(module, DFlashAttention) and module.attention_sink_bias is not None:
            module.attention_sink_bias.zero_()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: AttentionMask | dict[str, AttentionMask] = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        query_valid_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        head_function: Callable[[torch.Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> DFlashOutput:
        """
        Run all blocks of a batch over their contexts in one pass.

        In training a sequence has `M` blocks, which the mask keeps apart. In decoding it has one block after `n` new
        context positions, and a cache. Context and block use the positions of the text, so that the context key and
        the block key of one token differ only in the hidden state that they are projected from.

        Args:
            noise_embeds (`torch.FloatTensor` of shape `[batch, M * block_size, hidden_size]`):
                The target's embedding of the anchor token in slot 0 and of the mask token in the other slots.
            context_hidden_states (`torch.FloatTensor` of shape `[batch, n, num_target_layers * hidden_size]`):
                Hidden states of the chosen target layers, concatenated on the last axis. `n` may be 0.
            attention_mask (*optional*):
                In training a dict from layer type to a `torch.BoolTensor` (True = visible) of shape
                `[batch, 1, M * block_size, n + M * block_size]`, to a FlexAttention `BlockMask`, or to a function that
                computes the attention. Input, output and gradient are exactly zero at slots that do not exist
                according to these masks ([`valid_queries`]). In decoding a mask of shape
                `[batch, cached + n + block_size]`, nonzero at real tokens, or `None`.
            position_ids (`torch.LongTensor` of shape `[batch, n + M * block_size]`, *optional*):
                Positions of the new context, then of the slots. By default they continue those of the cache.
            cache (`Cache`, *optional*):
                Receives the keys and values of context and block. The caller crops those of the block.
            query_valid_mask (`torch.BoolTensor` of shape `[batch, M * block_size]`, *optional*):
                False at slots that do not exist, in place of what the masks say. With a cache all slots exist.
            use_cache (`bool`, *optional*):
                Whether to create a cache if none is given.
            head_function (`Callable`, *optional*):
                Called with the hidden states before the pass ends, while wrappers for distributed training hold the
                weights of the heads. Its result is `head_output`.
            **kwargs:
                Passed to the attention function.

        Returns:
            [`DFlashOutput`]: `last_hidden_state` of shape `[batch, M * tokens_per_block, hidden_size]` in
            the dtype of `noise_embeds`. State `j` of a block predicts the token `j` places after its anchor. State 0
            is not used; with `sample_from_anchor` it is zero and comes before the states of the slots.

        Raises:
            ValueError: A width does not fit the configuration, as happens with a wrong target, the states have an axis
                of residual streams, or a mask is too short.
        """
        self._check_widths(noise_embeds, context_hidden_states)
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        hidden_states = noise_embeds.to(self.fc.weight.dtype)
        num_slots = min(self.config.block_size, hidden_states.shape[1])
        if self.mask_embedding is not None:
            blocks = hidden_states.unflatten(1, (-1, num_slots))
            masked = self.mask_embedding.to(blocks.dtype).expand_as(blocks[:, :, 1:])
            hidden_states = torch.cat([blocks[:, :, :1], masked], dim=2).flatten(1, 2)
        num_new = context_hidden_states.shape[1] + hidden_states.shape[1]
        masks, key_valid_mask = self._split_attention_mask(attention_mask, num_new)
        if query_valid_mask is None and cache is None:
            answers = (valid_queries(mask, hidden_states.shape[1]) for mask in masks.values())
            query_valid_mask = next((answer for answer in answers if answer is not None), None)
        if query_valid_mask is not None:
            hidden_states = hidden_states.masked_fill(~query_valid_mask[..., None], 0)
        context = self.hidden_norm(self.fc(context_hidden_states.to(product_dtype(self.fc.weight))))

        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(start, start + num_new, device=hidden_states.device)[None]
        rotary = rotary_angles(self.config, position_ids, context.dtype)

        for layer, layer_type in zip(self.layers, self.config.layer_types or [], strict=True):
            hidden_states = layer(
                hidden_states,
                context,
                rotary=rotary,
                attention_mask=masks.get(layer_type),
                key_valid_mask=key_valid_mask,
                cache=cache,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if query_valid_mask is not None:
            hidden_states = hidden_states.masked_fill(~query_valid_mask[..., None], 0)
        hidden_states = hidden_states.to(noise_embeds.dtype)
        if self.config.sample_from_anchor:
            blocks = hidden_states.unflatten(1, (-1, num_slots))
            hidden_states = nn.functional.pad(blocks, (0, 0, 1, 0)).flatten(1, 2)
        if isinstance(cache, DFlashCache) and (self.candidate_selector or self.markov_head) is not None:
            logger.warning_once(
                "The loop of transformers proposes the tokens of this draft without its selector or Markov head, so "
                "that fewer are accepted. The text is the same. dflash_hf.speculative_generate uses the head."
            )
        head_output = None if head_function is None else head_function(hidden_states)
        return DFlashOutput(last_hidden_state=hidden_states, cache=cache, head_output=head_output)

    def draft_vocabulary(self) -> torch.Tensor:
        """Return the token ids that the draft can propose, ascending, of shape `[draft_vocab_size]`."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """
        Choose the tokens that a draft with a reduced vocabulary can propose.

        Args:
            token_ids (`torch.LongTensor` of shape `[draft_vocab_size]`): Distinct token ids in any order.

        Raises:
            ValueError: They are not as many as the configuration says, not distinct or out of range, or the draft has
                the full vocabulary.
        """
        check_draft_vocabulary(self.config, token_ids)
        token_ids = token_ids.sort().values
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))  # type: ignore[union-attr]

    def _split_attention_mask(
        self, attention_mask: AttentionMask | dict[str, AttentionMask], num_new: int
    ) -> tuple[dict[str, AttentionMask], torch.Tensor | None]:
        """Return the masks by layer type, and the padding mask of the keys from which each layer builds its own."""
        if isinstance(attention_mask, dict):
            return attention_mask, None
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
            return dict.fromkeys(self.config.layer_types or [], attention_mask), None
        if attention_mask.shape[1] < num_new:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, but it needs one for each cached, context and "
                f"block position, which are at least {num_new}. Pass a mask over all of them."
            )
        return {}, attention_mask.bool()

    def _check_widths(self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor) -> None:
        """Refuse inputs whose widths are those of another target."""
        config = self.config
        context_width = self.fc.in_features
        if context_hidden_states.dim() != 3:
            raise ValueError(
                f"The hidden states of the target {config.target_name_or_path!r} have the shape "
                f"{list(context_hidden_states.shape)} instead of [batch, length, width]. A target with several "
                "residual streams has no single state of a layer. Use a target with one stream."
            )
        if noise_embeds.shape[-1] != config.hidden_size or context_hidden_states.shape[-1] != context_width:
            raise ValueError(
                f"The draft {describe_target(config)} was trained for the target {config.target_name_or_path!r}. It "
                f"takes embeddings of width {config.hidden_size} and {context_width} context values per token (layers "
                f"{config.target_layer_ids}), but the target in use gave {noise_embeds.shape[-1]} and "
                f"{context_hidden_states.shape[-1]}. Use the draft with its own target."
            )


def check_draft_vocabulary(config: DFlashConfig, token_ids: torch.Tensor) -> None:
    """
    Refuse tokens that cannot be the vocabulary of a draft.

    Args:
        config (`DFlashConfig`): The draft's configuration.
        token_ids (`torch.LongTensor`): The token ids.

    Raises:
        ValueError: They are not as many as the configuration says, not distinct or out of range.
    """
    size = config.draft_vocab_size
    if size is None:
        raise ValueError("The draft has the full vocabulary. Create it with draft_vocab_size=.")
    is_distinct = token_ids.unique().numel() == token_ids.numel()
    in_range = bool(((token_ids >= 0) & (token_ids < config.vocab_size)).all())
    if token_ids.shape != (size,) or not is_distinct or not in_range:
        raise ValueError(
            f"The vocabulary of the draft has {token_ids.numel()} tokens from {int(token_ids.min())} to "
            f"{int(token_ids.max())}, and must be draft_vocab_size={size} distinct tokens from 0 to "
            f"{config.vocab_size - 1}. Pass such tokens."
        )


class UntiedDraftError(NotImplementedError):
    """
    The target's embedding or head is needed, and the draft is not tied to a target.

    It is a `NotImplementedError` because transformers expects one from `get_input_embeddings`.
    """


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """
    Return the floating-point matrix of an embedding or head, and `None` where there is none that can be read.

    Quantised modules hold packed integers, under this name or others, and wrappers hold their weight in a submodule.

    Args:
        module (`nn.Module`): Embedding or head of a target.
    """
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def module_tensor(module: nn.Module) -> torch.Tensor | None:
    """
    Return the weight of a module, else its first floating-point tensor, which tells device and dtype of its inputs.

    Args:
        module (`nn.Module`): Embedding or head of a target.

    Returns:
        `torch.Tensor` or `None`: the weight may be packed into integers, and then the module converts its inputs.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    tensors = (*module.parameters(), *module.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)


def cast_for(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """
    Convert hidden states to the dtype of a head that does not convert its inputs by itself.

    Args:
        module (`nn.Module`): The head of a target.
        hidden_states (`torch.FloatTensor`): Its inputs.
    """
    tensor = module_tensor(module)
    return hidden_states if tensor is None or not tensor.is_floating_point() else hidden_states.to(tensor.dtype)


def embed_tokens(embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """
    Embed tokens as transformers does for a draft: with the target's module, but without its `embed_norm`.

    Args:
        embedding (`nn.Module`): The target's input embedding. Scaling inside it is applied.
        token_ids (`torch.LongTensor`): Token ids in any shape.

    Returns:
        `torch.FloatTensor`: the shape of `token_ids` plus the width, in the embedding's dtype.

    Source: `DFlashTokenCandidateGenerator` of transformers.
    """
    embed_norm = getattr(embedding, "embed_norm", None)
    if embed_norm is None:
        return embedding(token_ids)
    try:
        embedding.embed_norm = nn.Identity()
        return embedding(token_ids)
    finally:
        embedding.embed_norm = embed_norm


def embedding_scale(embedding: nn.Module) -> float | None:
    """
    Find the factor that an embedding module applies to its vectors, as Gemma's does.

    Args:
        embedding (`nn.Module`): The target's input embedding.

    Returns:
        `float` or `None`: 1.0 without scaling, and `None` where the weights are quantised, offloaded, sharded or zero.
    """
    weight = plain_weight(embedding)
    if weight is None or weight.is_meta:
        return None
    if hasattr(weight, "full_tensor"):  # a DTensor, sharded over ranks
        return None
    known = getattr(embedding, "scalar_embed_scale", None)
    if known is not None:
        return float(known)
    token_id = int(weight.detach()[:64].float().abs().sum(-1).argmax())
    with torch.no_grad():
        embedded = embed_tokens(embedding, torch.tensor([token_id], device=weight.device))[0].float()
    plain = weight.detach()[token_id].float()
    return float(embedded @ plain / (plain @ plain)) if plain.any() else None


def apply_head(head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """
    Apply a target's language model head in the head's own dtype. Its parameters get no gradient.

    Args:
        head (`nn.Module`): The target's output embedding.
        hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): Outputs of the body.

    Returns:
        `torch.FloatTensor` of shape `[..., vocab_size]`.
    """
    hidden_states = cast_for(head, hidden_states)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return head(hidden_states)
    # The graph of a forward pass holds the parameters that require a gradient in it, so that none is left later.
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        return head(hidden_states)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


# The reduced form of heads that were used last: (identity of the weight, tokens, reduced head).
_reduced_heads: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], torch.Tensor, nn.Module]] = WeakKeyDictionary()


def reduced_head(head: nn.Module, token_ids: torch.Tensor) -> nn.Module:
    """
    Return a head that computes the logits of some tokens alone.

    Args:
        head (`nn.Module`): The target's output embedding.
        token_ids (`torch.LongTensor` of shape `[draft_vocab_size]`): The tokens.

    Returns:
        `nn.Module`: a linear layer with copies of the rows, or, where the rows cannot be read, the whole head with a
        selection of its logits.
    """
    weight = plain_weight(head)
    if type(head) is not nn.Linear or weight is None or type(weight.data) is not torch.Tensor or weight.is_meta:
        return _SelectedLogits(head, token_ids)
    known, identity = _reduced_heads.get(head), (weight.data_ptr(), weight._version, weight.dtype, weight.device)
    if known is not None and known[0] == identity and torch.equal(known[1].to(token_ids), token_ids):
        return known[2]
    rows = token_ids.to(weight.device)
    reduced = nn.Linear(weight.shape[1], len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    _reduced_heads[head] = (identity, token_ids, reduced)
    return reduced


class _SelectedLogits(nn.Module):
    """A head that is not one readable matrix, followed by the selection of some logits."""

    def __init__(self, head: nn.Module, token_ids: torch.Tensor) -> None:
        super().__init__()
        self.head, self.token_ids = head, token_ids

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden_states)
        return logits.index_select(-1, self.token_ids.to(logits.device))


def top_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the highest logits and their indices in descending order. Ties go to the lowest index.

    Args:
        logits (`torch.FloatTensor` of shape `[..., vocabulary]`): Logits of any dtype.
        count (`int`): The number of candidates.

    Returns:
        `tuple`: values and indices, each of shape `[..., count]`.

    Example:

    ```python
    >>> top_candidates(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3)[1].tolist()
    [1, 2, 3]

    ```
    """
    values, indices = logits.topk(count)
    indices, order = indices.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)


class DraftHead:
    """
    Everything between the hidden states of a draft and its proposals: the target's head, and the draft's own parts.

    Without a selector or a Markov head the proposals of a slot depend on its hidden state alone. With one of them the
    logits of a slot are corrected according to the token before it.

    Args:
        draft (`DFlashBody`): The draft.
        embedding (`nn.Module`), head (`nn.Module`): Embedding and head of its target.
    """

    def __init__(self, draft: DFlashBody, embedding: nn.Module, head: nn.Module) -> None:
        self.draft, self.embedding = draft, embedding
        self.vocabulary = None if draft.d2t is None else draft.draft_vocabulary()
        self.head = head if self.vocabulary is None else reduced_head(head, self.vocabulary)

    @property
    def is_corrected(self) -> bool:
        """`bool`: whether the proposal of a slot depends on the token before it."""
        return self.draft.candidate_selector is not None or self.draft.markov_head is not None

    @property
    def has_weights(self) -> bool:
        """`bool`: whether the draft has trained weights behind its hidden states."""
        return self.is_corrected or self.draft.confidence_head is not None

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Compute the logits of slots before any correction.

        Args:
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): Outputs of the body.

        Returns:
            `torch.FloatTensor` of shape `[..., draft_vocab_size or vocab_size]`, in the head's dtype.
        """
        return self.shape_logits(apply_head(self.head, hidden_states))

    def shape_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply multiplier and cap, which matter only where scores are added to the logits."""
        config = self.draft.config
        if self.is_corrected and config.output_multiplier is not None:
            logits = logits * config.output_multiplier
        if self.is_corrected and config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        return logits

    def features(
        self, previous_token_ids: torch.Tensor, hidden_states: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Combine the token before a slot with the slot's state, as the selector or the Markov head does.

        Args:
            previous_token_ids (`torch.LongTensor` of shape `[...]`): Target ids of the tokens before the slots.
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): Outputs of the body.
            state (`torch.FloatTensor` of shape `[..., rank]`, *optional*): From the slot before, for an `rnn` head.

        Returns:
            `tuple`: features of shape `[..., rank]` or `None` without such a head, and the state for the next slot.
        """
        if self.draft.markov_head is not None:
            return self.draft.markov_head.features(previous_token_ids, hidden_states, state)
        if (selector := self.draft.candidate_selector) is None:
            return None, None
        previous = self.embedded(previous_token_ids) if selector.is_factored else previous_token_ids
        return selector.features(previous, hidden_states), None

    def correct(
        self, logits: torch.Tensor, features: torch.Tensor | None, *, top_k: int | None = None, num_choices: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Correct the logits of slots.

        Args:
            logits (`torch.FloatTensor` of shape `[..., vocabulary]`): From [`logits`].
            features (`torch.FloatTensor` of shape `[..., rank]`, *optional*): From [`features`].
            top_k (`int`, *optional*): Correct the best logits alone and drop all others. A selector always does, with
                its own number. A Markov head scores the whole vocabulary by default.
            num_choices (`int`, defaults to 1): The number of choices that are needed. If it exceeds the number of
                corrected candidates, the next best logits follow them.

        Returns:
            `tuple`: scores in fp32 of shape `[..., C]`, and the draft indices of these candidates in the order of
            their logits, or `None` if the scores are those of the whole vocabulary.
        """
        selector, markov_head = self.draft.candidate_selector, self.draft.markov_head
        if selector is not None and features is not None:
            top_k = self.draft.config.selector_top_k
        if top_k is None:
            scores = logits.float()
            if markov_head is not None and features is not None:
                scores = scores + markov_head.scores(features).float()
            return scores, None
        values, indices = top_candidates(logits, min(max(top_k, num_choices), logits.shape[-1]))
        scores = values.float()
        if selector is not None and features is not None:
            candidates = self.embedded(indices) if selector.is_factored else indices
            scores = scores + selector.scores(features, candidates).float()
        elif markov_head is not None and features is not None:
            scores = scores + markov_head.scores(features, indices).float()
        if top_k < indices.shape[-1]:
            places = torch.arange(indices.shape[-1], device=scores.device)
            scores = torch.where(places < top_k, scores, -1e30 * (1 + places))
        return scores, indices

    def confidence(self, previous_token_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """
        Predict the logit of the probability that the target accepts the token of each slot.

        Args:
            previous_token_ids (`torch.LongTensor` of shape `[...]`): Target ids of the tokens before the slots.
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): Outputs of the body.

        Returns:
            `torch.FloatTensor` of shape `[...]`, or `None` without a confidence head.
        """
        if self.draft.confidence_head is None:
            return None
        embedded = None
        if self.draft.config.confidence_head_with_markov and self.draft.markov_head is not None:
            embedded = self.draft.markov_head.markov_w1(previous_token_ids)
        return self.draft.confidence_head(hidden_states, embedded)

    def token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Translate indices of the draft's vocabulary into the target's token ids."""
        return indices if self.vocabulary is None else self.vocabulary.to(indices.device)[indices]

    def draft_indices(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Translate token ids into indices of the draft's vocabulary; -1 at tokens that are not in it."""
        if self.vocabulary is None:
            return token_ids
        vocabulary = self.vocabulary.to(token_ids.device)
        indices = torch.searchsorted(vocabulary, token_ids).clamp(max=len(vocabulary) - 1)
        return torch.where(vocabulary[indices] == token_ids, indices, -1)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """
        Return the target's embeddings of tokens, scaled to a mean norm of one, as a factored selector reads them.

        Args:
            token_ids (`torch.LongTensor` of shape `[...]`): Token ids.

        Returns:
            `torch.FloatTensor` of shape `[..., hidden_size]`.

        Raises:
            UntiedDraftError: The scale is not known, because the draft was never tied.
        """
        scale = self.draft.config.selector_embedding_scale
        if scale is None:
            raise UntiedDraftError(
                "selector_embedding_scale is not known, because the draft was never tied. Call draft.tie_target(...)."
            )
        with torch.no_grad():
            return embed_tokens(self.embedding, token_ids).to(token_ids.device) * scale


def selector_embedding_scale(embedding: nn.Module, num_embeddings: int) -> float:
    """
    Return one over the mean norm of a target's embedding vectors.

    Args:
        embedding (`nn.Module`): The target's input embedding.
        num_embeddings (`int`): The number of its rows.
    """
    tensor = module_tensor(embedding)
    device = None if tensor is None else tensor.device
    with torch.no_grad():
        parts = torch.arange(num_embeddings, device=device).split(8192)
        total = sum(embed_tokens(embedding, part).float().norm(dim=-1).double().sum().item() for part in parts)
    return num_embeddings / total if total > 0 else 1.0


def reshard(module: Any) -> None:
    """Free the gathered weights that a module under FSDP2 (torch 2.13) may still hold after a forward pass."""
    if hasattr(module, "reshard"):
        module.reshard()


def unshard(module: nn.Module) -> nn.Module:
    """
    Gather the weights of a module that FSDP2 or tensor parallelism has sharded over ranks.

    The weights are frozen, so that gathering them once is enough. Every rank must make this call at the same time.

    Args:
        module (`nn.Module`): Embedding or head of the target. It is not changed.

    Returns:
        `nn.Module`: the module itself if it is not sharded, else a copy with whole weights and without the hooks that
        gather or exchange shards.
    """
    reshard(module)
    parameters = dict(module.named_parameters(recurse=False))
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters.values()):
        return module
    # FSDP2 of torch 2.13 replaces the class of a module by a subclass that has `reshard`.
    module_class: Any = next(kind for kind in type(module).__mro__ if not hasattr(kind, "reshard"))
    whole = module_class.__new__(module_class)
    whole.__dict__.update(module.__dict__)
    whole.__dict__.pop("forward", None)  # Tensor parallelism of transformers 5.24 wraps `forward` on the instance.
    whole._forward_pre_hooks, whole._forward_hooks = OrderedDict(), OrderedDict()
    whole._modules = dict(module._modules)
    whole._parameters = {
        **module._parameters,
        **{
            name: nn.Parameter(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter, False)
            for name, parameter in parameters.items()
        },
    }
    return whole


def tensor_checksum(tensor: torch.Tensor) -> str:
    """
    Identify the values of a tensor by its dtype, its shape and the SHA-256 of its bytes.

    Args:
        tensor (`torch.Tensor`): Any tensor, on any device.

    Returns:
        `str`
    """
    data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {hashlib.sha256(data).hexdigest()}"


class TargetModules:
    """
    The target's embedding and head, which a draft uses but does not own.

    Copying a draft does not copy them.

    Args:
        embedding (`nn.Module`): The input embedding.
        head (`nn.Module`): The language model head.
        name (`str`): The target's name in messages.
        follow (`bool`): Whether they move to the device of the draft. Those of a live target stay where they are.
    """

    def __init__(self, embedding: nn.Module, head: nn.Module, name: str, *, follow: bool) -> None:
        self.embedding, self.head, self.name, self.follow = embedding, head, name, follow

    @property
    def num_embeddings(self) -> int | None:
        """`int` or `None`: number of the embedding vectors, where the module tells it."""
        return num_embedding_rows(self.embedding)

    @property
    def widths(self) -> tuple[int | None, int | None]:
        """`tuple`: width of the embedding vectors and of the states that the head takes, where the modules tell it."""
        weight = plain_weight(self.embedding)
        width = getattr(self.embedding, "embedding_dim", None) if weight is None else weight.shape[1]
        return width, getattr(self.head, "in_features", width)

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetModules:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # A pickled draft holds nothing of its target, to which it is tied again on first use.

    def to(self, device: torch.device) -> TargetModules:
        """Move the modules to a device if they follow the draft."""
        if self.follow:
            self.embedding.to(device)
            self.head.to(device)
        return self


def live_target_modules(target: PreTrainedModel) -> TargetModules:
    """
    Take embedding and head of a live target, without a copy.

    Args:
        target (`PreTrainedModel`): The target, with its language model head.

    Returns:
        [`TargetModules`]

    Raises:
        ValueError: The target has no head, or its embedding is offloaded.
    """
    if target.device.type == "meta":
        raise ValueError(
            f"The first weights of the target {describe_target(target)} are on the meta device: accelerate has "
            "offloaded its embedding, or the target was built without weights. The embedding must be in memory. Give "
            "it more memory in device_map."
        )
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"The target {describe_target(target)} has no language model head, which the draft shares. Load it with "
            "AutoModelForCausalLM (or its multimodal counterpart), not with AutoModel."
        )
    return TargetModules(target.get_input_embeddings(), head, describe_target(target), follow=False)


def target_auto_class(config: Any) -> Any:
    """
    Return the class of transformers that opens a target with its head.

    Args:
        config (`PreTrainedConfig`): The target's configuration.

    Returns:
        `type`: `AutoModelForCausalLM`, or for multimodal models that have no causal language model of their own
        `AutoModelForImageTextToText`, or `AutoModelForMultimodalLM` where only that one has them (speech and text).
        `None` for a model that transformers cannot open with a head.
    """
    auto_classes = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((each for each in auto_classes if type(config) in each._model_mapping), None)


def load_target_modules(name_or_path: str, **hub_kwargs: Any) -> tuple[TargetModules, Any]:
    """
    Load only the embedding and the head of a target checkpoint, frozen and in the checkpoint's dtype.

    The target is built with zero decoder layers, so that its own class decides where they are and how they are tied or
    scaled. From the Hub this downloads the weight files that hold them.

    Args:
        name_or_path (`str`): Hub name or folder of the target.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`.

    Returns:
        `tuple[TargetModules, PreTrainedConfig]`: the modules, and the target's full configuration.

    Raises:
        UntiedDraftError: The target cannot be read, or its files lack embedding or head. The message gives its name,
            the reason and the argument to change.
    """
    try:
        full_config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
        config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
        text_config = config.get_text_config(decoder=True)
        text_config.num_hidden_layers = 0
        with suppress(AttributeError):  # Some families derive the layer types from the number of layers.
            text_config.layer_types = []
        auto_class = target_auto_class(config) or AutoModelForCausalLM
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # Otherwise transformers lists every decoder layer of the file as unexpected.
        try:
            # Weights of other modules may be of another shape without layers (Gemma 4). They are not used.
            options: Any = {"dtype": "auto", "ignore_mismatched_sizes": True, "output_loading_info": True}
            loaded: Any = auto_class.from_pretrained(name_or_path, config=config, **options, **hub_kwargs)
        finally:
            logging.set_verbosity(verbosity)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UntiedDraftError(
            f"The target {name_or_path!r} cannot be read: {reason} The draft needs its embedding and head. Pass "
            "target=<folder, Hub name or model> to from_pretrained, or call draft.tie_target(...)."
        ) from error
    model, info = loaded
    model.requires_grad_(False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise UntiedDraftError(
            f"The target {name_or_path!r} has no language model head in the class that transformers opens it with, "
            "and the draft shares the head. Load the target yourself and pass it as target=<model>."
        )
    _check_target_weights(name_or_path, model, (embedding, head), info)
    return TargetModules(embedding, head, repr(name_or_path), follow=True), full_config


def _check_target_weights(
    name_or_path: str, model: PreTrainedModel, modules: tuple[nn.Module, ...], info: Mapping[str, Any]
) -> None:
    """Refuse a target whose file lacks the weights of its embedding or head, which would then be random."""
    absent = {*map(str, info["missing_keys"]), *(str(key[0]) for key in info["mismatched_keys"])}
    used = {id(parameter) for module in modules for parameter in module.parameters()}
    unread = sorted(name for name, parameter in model.named_parameters() if id(parameter) in used and name in absent)
    if unread:
        raise UntiedDraftError(
            f"The files of the target {name_or_path!r} do not hold {', '.join(unread)} in the shape of its "
            "configuration, so that its embedding or head would be random. Use the complete files of the target."
        )


def pair_problems(
    config: DFlashConfig, modules: TargetModules, target_config: Any, vocabulary: torch.Tensor | None = None
) -> Iterator[str]:
    """
    Compare a draft's configuration with a target.

    Args:
        config (`DFlashConfig`): The draft's configuration.
        modules ([`TargetModules`]): The target's embedding and head.
        target_config (`PreTrainedConfig`): The target's configuration.
        vocabulary (`torch.LongTensor` of shape `[draft_vocab_size]`, *optional*): The tokens of a reduced vocabulary,
            whose rows of the head the draft's file may contain.

    Yields:
        `str`: a description of each property in which the two differ.
    """
    target_depth = target_config.get_text_config(decoder=True).num_hidden_layers
    embedding_width, head_width = modules.widths
    num_embeddings = modules.num_embeddings or config.vocab_size  # A module that does not tell it is trusted.
    if any(width not in (None, config.hidden_size) for width in (embedding_width, head_width)):
        yield f"width {config.hidden_size} against {embedding_width} (head {head_width})"
    if streams := residual_streams(target_config.get_text_config(decoder=True)):
        yield f"the target has several residual streams ({streams}), which a draft cannot read"
    if num_embeddings != config.vocab_size:
        yield f"vocabulary {config.vocab_size} against {num_embeddings} embedding rows"
    if config.mask_token_id >= num_embeddings:
        yield f"mask token {config.mask_token_id} outside {num_embeddings} embedding rows"
    if config.target_num_hidden_layers not in (None, target_depth):
        yield f"depth {config.target_num_hidden_layers} against {target_depth}"
    if max(config.target_layer_ids or [0]) >= target_depth:
        yield f"layers {config.target_layer_ids} in a target of {target_depth}"
    if config.input_embedding_scale is not None:
        expected, scale = config.input_embedding_scale, embedding_scale(modules.embedding)
        if scale is not None and not math.isclose(scale, expected, rel_tol=0.01):
            yield f"input_embedding_scale {expected:g} against {scale:g} in the target's embedding"
    for name, checksum in (config.target_tensor_checksums or {}).items():
        module = modules.embedding if name.startswith("embed") else modules.head
        weight: Any = plain_weight(unshard(module))
        if weight is None or type(weight.data) is not torch.Tensor:
            yield f"{name} of the draft's file cannot be compared with the target's quantised one"
            continue
        if vocabulary is not None and checksum.split()[1] == f"{len(vocabulary)}x{weight.shape[1]}":
            weight = weight[vocabulary.to(weight.device)]
        if tensor_checksum(weight.to(getattr(torch, checksum.split()[0]))) != checksum:
            yield f"{name} of the draft's file is not the target's"


class DFlashDraftModel(DFlashBody):
    """
    A DFlash draft tied to its target: the body, with access to the target's frozen embedding and head.

    The target's modules are never saved, trained, moved or counted as parameters of the draft. Training and
    `compute_logits` need the tie. Native generation
    (`target.generate(..., assistant_model=draft, speculation_type="dflash")`) does not.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dflash_hf import DFlashDraftModel
    >>> target = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64,
    ...     num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2))
    >>> draft = DFlashDraftModel.from_target(target, num_hidden_layers=1, num_target_layers=2, block_size=4,
    ...     mask_token_id=96)
    >>> draft.config.target_layer_ids
    [0, 2]

    ```
    """

    _checkpoint_reader: ClassVar[CheckpointReader | None] = None
    _hub_writer: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(DFlashConfig.of_this_class(config))
        # `nn.Module.__setattr__` would make the target a submodule.
        object.__setattr__(self, "_target_modules", None)
        self._set_target_source(None, {})

    def __getattr__(self, name: str) -> Any:
        if name == "generation_config":  # In transformers 5.24 only classic assisted generation reads it.
            raise AttributeError(
                "A DFlash draft was passed to classic assisted generation, which it cannot run. Pass "
                "speculation_type='dflash': target.generate(**inputs, assistant_model=draft, "
                "speculation_type='dflash')."
            )
        return super().__getattr__(name)

    @property
    def is_tied(self) -> bool:
        """`bool`: whether the target's embedding and head have been taken or loaded."""
        return self._target_modules is not None

    def tie_target(self, target: str | PreTrainedModel, **hub_kwargs: Any) -> None:
        """
        Share the frozen embedding and head of a target.

        Args:
            target (`str` or `PreTrainedModel`):
                Hub name or folder, of which only embedding and head are read, or the live target. Nothing of a live
                target is copied unless it is sharded over ranks, in which case embedding and head are gathered.
            **hub_kwargs:
                `revision`, `token`, `cache_dir`, `local_files_only` of the target.

        Raises:
            ValueError: The pair does not fit (width, vocabulary, chosen layers, mask token, copies of the target's
                tensors in the draft's file), or the target's embedding is offloaded. The message names both models.
            UntiedDraftError: The target cannot be read.
        """
        if isinstance(target, str):
            modules, target_config = load_target_modules(target, **hub_kwargs)
        else:
            modules, target_config = live_target_modules(target), target.config
            reshard(target)
            modules.embedding, modules.head = unshard(modules.embedding), unshard(modules.head)
        self._check_pair(modules, target_config)
        object.__setattr__(self, "_target_modules", modules)
        if self.config.target_name_or_path is None and target_config.name_or_path:
            self.config.target_name_or_path = target_config.name_or_path

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Check that this draft fits a live target, without tying it.

        Args:
            target (`PreTrainedModel`): The target, with its language model head.

        Raises:
            ValueError: The pair does not fit (width, vocabulary, chosen layers, mask token). The message names both.
        """
        self._check_pair(live_target_modules(target), target.config)

    def _check_pair(self, modules: TargetModules, target_config: Any) -> None:
        """Refuse a target that does not fit, and complete the configuration with what only the target knows."""
        config = self.config
        vocabulary = None if self.d2t is None else self.draft_vocabulary()
        problems = list(pair_problems(config, modules, target_config, vocabulary))
        if problems:
            remedy = "Use the draft with its own target."
            if len(problems) == 1 and problems[0].startswith("vocabulary"):
                remedy = (
                    "If it is its own target with rows added or removed at the end, load the draft with "
                    f"vocab_size={modules.num_embeddings}. Otherwise use it with its own target."
                )
            raise ValueError(
                f"The draft {describe_target(config)}, made for {config.target_name_or_path!r}, does not fit the "
                f"target {modules.name}: {'; '.join(problems)}. {remedy}"
            )
        if config.target_num_hidden_layers is None:
            depth = target_config.get_text_config(decoder=True).num_hidden_layers
            check_target_layer_ids(
                config.target_layer_ids or [], depth, last_layer_after_norm=config.last_layer_after_norm
            )
            config.target_num_hidden_layers = depth
        if config.selector_factored and config.selector_embedding_scale is None:
            config.selector_embedding_scale = selector_embedding_scale(modules.embedding, config.vocab_size)
        if config.input_embedding_scale is None:
            scale = embedding_scale(modules.embedding)
            if scale is not None and not math.isclose(scale, 1, rel_tol=0.01):
                config.input_embedding_scale = scale
        config.target_tensor_checksums = None  # They have served their purpose.

    def _set_target_source(self, target: str | bool | None, hub_kwargs: dict[str, Any]) -> None:
        """Remember where the target is to be loaded from on the first use of embedding or head."""
        object.__setattr__(self, "_target_source", target)
        object.__setattr__(self, "_target_hub_kwargs", hub_kwargs)

    def _get_target_modules(self) -> TargetModules:
        """Return the target's modules, and tie the draft first if necessary."""
        if self._target_modules is None:
            source = self._target_source
            if source is None:
                source = self.config.target_name_or_path
            if not isinstance(source, str):
                raise UntiedDraftError(
                    f"The draft {describe_target(self.config)} is not tied to a target, so it has no embedding and no "
                    "head. Call draft.tie_target(<model, folder or Hub name>), or load it with target=."
                )
            revision = self.config.target_revision if source == self.config.target_name_or_path else None
            self.tie_target(source, revision=revision, **self._target_hub_kwargs)
        return self._target_modules.to(self.device)

    def get_input_embeddings(self) -> nn.Module:
        """Return the target's input embedding. An untied draft is tied first, or raises `UntiedDraftError`."""
        return self._get_target_modules().embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the target's language model head. An untied draft is tied first, or raises `UntiedDraftError`."""
        return self._get_target_modules().head

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        """Refuse, because the embedding belongs to the target."""
        raise ValueError(
            "draft.resize_token_embeddings would resize the embedding of the target, which the draft does not own. "
            "Resize the target, and load the draft with vocab_size= that number of rows."
        )

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse, because the embedding belongs to the target."""
        raise ValueError(
            "draft.set_input_embeddings was called, but the draft uses the embedding of its target and has none of "
            "its own. Change the target, and tie the draft to it with draft.tie_target(...)."
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Refuse, because the head belongs to the target."""
        raise ValueError(
            "draft.set_output_embeddings was called, but the draft uses the head of its target and has none of its "
            "own. Change the target, and tie the draft to it with draft.tie_target(...)."
        )

    def enable_input_require_grads(self) -> None:
        """
        Let gradients reach adapters of a frozen draft through reentrant checkpointing.

        `PreTrainedModel` would register a hook on the input embedding, which belongs to the target.
        """
        self.disable_input_require_grads()
        self._require_grads_hook = self.hidden_norm.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_(True)
        )
        self._require_grads_hooks = [self._require_grads_hook]

    @torch.no_grad()
    def embed_blocks(self, anchor_token_ids: torch.Tensor) -> torch.Tensor:
        """
        Make the inputs of blocks: the anchor's embedding in slot 0 and the mask token's in all other slots.

        Args:
            anchor_token_ids (`torch.LongTensor` of shape `[batch, blocks]`): The tokens at the anchors.

        Returns:
            `torch.FloatTensor` of shape `[batch, blocks * block_size, hidden_size]`, in the target's dtype.

        Raises:
            UntiedDraftError: The draft is not tied and cannot be.
        """
        block_ids = anchor_token_ids.new_full(
            (*anchor_token_ids.shape, self.config.block_size), self.config.mask_token_id
        )
        block_ids[..., 0] = anchor_token_ids
        return embed_tokens(self.get_input_embeddings(), block_ids.flatten(1)).to(anchor_token_ids.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Apply the target's head, without a soft-cap or a multiplier.

        Args:
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): Outputs of the body.

        Returns:
            `torch.FloatTensor` of shape `[..., vocab_size]`, in the head's dtype. They are the logits of the target's
            vocabulary, to which neither a selector nor a Markov head has added anything.

        Raises:
            UntiedDraftError: The draft is not tied and cannot be.
        """
        return apply_head(self.get_output_embeddings(), hidden_states)

    def draft_head(self) -> DraftHead:
        """
        Return what turns hidden states into proposals.

        Returns:
            [`DraftHead`]

        Raises:
            UntiedDraftError: The draft is not tied and cannot be.
        """
        modules = self._get_target_modules()
        return DraftHead(self, modules.embedding, modules.head)

    @classmethod
    def from_target(
        cls, target: str | PreTrainedModel, *, dtype: torch.dtype = torch.float32, **config_kwargs: Any
    ) -> DFlashDraftModel:
        """
        Create a draft with random weights for a target, and tie it.

        Only embedding and head are read of a target that is given by name.

        Args:
            target (`str` or `PreTrainedModel`):
                Hub name or folder of the target, or the live target, to whose device the draft is moved.
            dtype (`torch.dtype`, defaults to `torch.float32`):
                The dtype of the trainable weights. Train in fp32: in bf16 small updates of a norm weight near 1.0
                round to nothing.
            **config_kwargs:
                Passed to [`DFlashConfig.from_target`], for example `config=` with a JSON file of fields.

        Returns:
            `DFlashDraftModel` in training mode.

        Raises:
            ValueError: No draft fits the target, or a value breaks its rule.
            UntiedDraftError: The target cannot be read.
        """
        draft = cls(DFlashConfig.from_target(target, **config_kwargs))
        for parameter in draft.parameters():
            parameter.data = parameter.data.to(dtype)
        if isinstance(target, str):
            hub_kwargs = {name: config_kwargs[name] for name in TARGET_LOOK_UP if name in config_kwargs}
            draft.tie_target(target, revision=draft.config.target_revision, **hub_kwargs)
        else:  # a model, which may be wrapped by peft and then is no PreTrainedModel
            draft.tie_target(target)
            nn.Module.to(draft, target.device)
        draft._scale_initial_logits()
        if draft.mask_embedding is not None:
            draft._start_mask_embedding()
        return draft

    @torch.no_grad()
    def _start_mask_embedding(self) -> None:
        """Set a new mask vector to the embedding of the mask token."""
        embedding = self.get_input_embeddings()
        tensor = module_tensor(embedding)
        mask = torch.tensor([self.config.mask_token_id], device=None if tensor is None else tensor.device)
        self.mask_embedding.copy_(embed_tokens(embedding, mask)[0])  # type: ignore[union-attr]

    @torch.no_grad()
    def _scale_initial_logits(self) -> None:
        """
        Set the weight of the last norm so that the first logits have a standard deviation of about one.

        The weights of a trained head are large. Behind a norm of weight 1 a new draft would start with confident and
        wrong predictions, and a short training would spend much of its time on unlearning them.
        """
        head = self.get_output_embeddings()
        weight = plain_weight(head)
        if weight is None:  # a quantised or wrapped head
            return
        if weight.device.type == "meta":  # offloaded: a hook of accelerate loads the weight for a forward pass
            weight = head(torch.eye(weight.shape[1], dtype=weight.dtype)).t()
        if not hasattr(weight, "device_mesh"):  # A sharded weight is never quantised.
            weight = weight.dequantize()  # Quantised weights of torchao 0.18 report a floating-point dtype.
        self.norm.weight.fill_(1 / weight.float().norm(dim=-1).mean().item())

    @classmethod
    def from_pretrained(  # type: ignore[override]  # `target` is a parameter of its own here.
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        target: str | bool | PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Load a draft of any producer. It is tied to its target on the first use of embedding or head.

        Args:
            pretrained_model_name_or_path (`str`):
                Hub name or folder of the draft, in the format of this package, of serving engines and the reference
                implementation, of speculators, or of transformers' own assistant class.
            target (`str`, `PreTrainedModel` or `False`, *optional*):
                By default the target named in the configuration. A name or folder replaces it, a live target is tied
                at once, and `False` never looks for one. It also supplies what the draft's file may omit (depth and
                vocabulary size of the target).
            *model_args, **kwargs:
                As in `PreTrainedModel.from_pretrained`, and any field of the configuration. `token`, `cache_dir` and
                `local_files_only` also apply to the target, while `revision` is that of the draft only.

        Returns:
            `DFlashDraftModel` in evaluation mode, in the checkpoint's dtype unless `dtype` is given.

        Raises:
            OSError: The checkpoint does not exist, or its weights are damaged.
            ValueError: The checkpoint is no DFlash draft; tensors are missing, unknown, of another shape or not
                finite; the file lacks a value or contradicts itself; a live target does not fit; or the draft cannot
                be split as `distributed_config` requires.
        """
        # `target` is not part of `kwargs`, which transformers 5.24 deep-copies, including a live model.
        name = pretrained_model_name_or_path
        returns_info = kwargs.pop("output_loading_info", False)
        hub_kwargs = {key: kwargs[key] for key in DRAFT_LOOK_UP if key in kwargs}
        with _errors_that_name(name):
            source, kwargs = cls._resolve_checkpoint(name, target, hub_kwargs, kwargs)
            loaded: Any = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        draft, info = loaded
        _check_loaded_weights(name, draft, info)
        if source is None and name is not None:  # A draft loaded from tensors has no name yet.
            draft.config.name_or_path = draft.name_or_path = str(name)
        if draft.dtype == torch.float16:
            logger.warning(
                f"The draft {str(name)!r} is in float16, in which the activations of a draft overflow, so that no "
                "token is accepted. Load it with dtype=torch.bfloat16."
            )
        if target is not None and not isinstance(target, (str, bool)):
            draft.tie_target(target)
        else:
            draft._set_target_source(target, {key: hub_kwargs[key] for key in TARGET_LOOK_UP if key in hub_kwargs})
        if draft.mask_embedding is not None and not draft.mask_embedding.any():
            draft._start_mask_embedding()
        return (draft, info) if returns_info else draft

    @classmethod
    def _resolve_checkpoint(
        cls, name: Any, target: str | bool | PreTrainedModel | None, hub_kwargs: dict[str, Any], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """
        Check a checkpoint before it is loaded, and translate it if another producer wrote it.

        Returns the two arguments of `PreTrainedModel.from_pretrained`: the folder or Hub name, or `None` where
        `state_dict` holds the translated tensors, and the keyword arguments.
        """
        if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
            raise ValueError(
                "tp_plan= or tp_size= was passed, which are deprecated in transformers. Pass "
                "distributed_config=DistributedConfig(tp_size=...)."
            )
        kwargs = {**kwargs, "use_safetensors": True}
        kwargs["ignore_mismatched_sizes"] = True  # `_check_loaded_weights` reports them with their names.
        config, given = kwargs.get("config"), {}
        if isinstance(config, PreTrainedConfig):
            config = kwargs["config"] = DFlashConfig.of_this_class(config)
        if not isinstance(config, DFlashConfig):
            given = {key: kwargs.pop(key) for key in DFlashConfig.field_names() & kwargs.keys()}
        if distributed_config := kwargs.get("distributed_config"):
            if isinstance(distributed_config, dict):
                distributed_config = DistributedConfig.from_dict(distributed_config)
            if not isinstance(config, DFlashConfig):
                config = DFlashConfig.from_pretrained(config or name, **hub_kwargs, **given)
            check_distributed_config(config, distributed_config)
        if cls._checkpoint_reader is None or kwargs.get("state_dict") is not None:
            return name, {**kwargs, **given}
        if config is not None and not isinstance(config, DFlashConfig):
            config = DFlashConfig.from_pretrained(config, **hub_kwargs, **given)
        kwargs["config"], tensors = cls._checkpoint_reader(
            name, config=copy.deepcopy(config), given=given, target=target, **hub_kwargs
        )
        return (name, kwargs) if tensors is None else (None, {**kwargs, "state_dict": tensors})

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # untyped wrapper in transformers
        """Push the draft as `PreTrainedModel.push_to_hub` does. The installed package adds a model card."""
        if self._hub_writer is None:
            return super().push_to_hub(*args, **kwargs)
        return self._hub_writer(self, *args, **kwargs)

    @classmethod
    def register_checkpoint_reader(cls, reader: CheckpointReader) -> None:
        """
        Set the function that reads and checks the files of a checkpoint before `from_pretrained` loads them.

        The installed package registers one when it is imported, which also reads the formats of other producers.
        Without it, as in the two files that travel with a checkpoint, only this class's own format is loaded.

        Args:
            reader (`Callable`):
                Receives a folder or Hub name, `config=`, `given=` (the fields that the caller gave), `target=` and the
                arguments that find the files on the Hub. It returns the configuration, and the tensors under this
                class's names or `None` where the files can be loaded directly.
        """
        cls._checkpoint_reader = staticmethod(reader)

    @classmethod
    def register_hub_writer(cls, writer: Callable[..., Any]) -> None:
        """
        Set the function that `push_to_hub` calls.

        The installed package registers one when it is imported, which also writes the model card of a draft. Without
        it `push_to_hub` is that of `PreTrainedModel`.

        Args:
            writer (`Callable`): Receives the draft and the arguments of `push_to_hub`.
        """
        cls._hub_writer = staticmethod(writer)


def check_distributed_config(config: DFlashConfig, distributed_config: DistributedConfig) -> None:
    """
    Refuse a parallel layout into which the draft cannot be split, before anything is loaded.

    Args:
        config (`DFlashConfig`): The draft's configuration.
        distributed_config (`DistributedConfig`): The parallel layout.

    Raises:
        ValueError: The tensor-parallel size does not divide the heads and the MLP, or the layout uses a kind of
            parallelism other than tensor parallelism. The message gives field, value and rule.
    """
    for field, is_set in (
        ("enable_sequence_parallel=True", distributed_config.enable_sequence_parallel),
        (f"pp_size={distributed_config.pp_size}", distributed_config.pp_size not in (None, 1)),
    ):
        if is_set:
            raise ValueError(
                f"distributed_config has {field}, but a draft is split by tensor parallelism only (tp_size). Leave it "
                "out."
            )
    tp_size = distributed_config.tp_size
    sizes = {
        name: getattr(config, name) for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size")
    }
    uneven = ", ".join(f"{name}={size}" for name, size in sizes.items() if size % tp_size)
    if uneven:
        raise ValueError(
            f"distributed_config has tp_size={tp_size}, which does not divide the draft's {uneven}. Use a divisor of "
            f"{math.gcd(*sizes.values())}, the largest size that fits."
        )


def _check_loaded_weights(name_or_path: Any, draft: DFlashDraftModel, info: Mapping[str, Any]) -> None:
    """Refuse a draft whose file lacks tensors, has other ones, or holds values that are not finite."""
    problems = {kind.replace("_", " "): info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    problems["not finite"] = {
        name for name, value in draft.named_parameters() if not value.is_meta and not value.isfinite().all()
    }
    if any(problems.values()):
        raise weights_error(name_or_path, problems)


def weights_error(name_or_path: Any, problems: Mapping[str, Any]) -> ValueError:
    """
    Make the error of a checkpoint whose tensors are not those of the network.

    Args:
        name_or_path (`str`): Folder or Hub name of the draft.
        problems (`Mapping`): The tensor names under each kind of fault.

    Returns:
        `ValueError`: the error, which the caller raises.
    """

    def first(names: Any) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(sorted(map(str, names))[:3]) + more

    listed = "; ".join(f"{kind}: {first(names)}" for kind, names in problems.items() if names)
    return ValueError(
        f"The weights in {str(name_or_path)!r} are not those of a DFlash draft of its configuration ({listed}). Every "
        "tensor must be in the file and none is initialised at random. Use the right file."
    )


@contextmanager
def _errors_that_name(name_or_path: Any) -> Iterator[None]:
    """Turn every error of a file inside the context into an `OSError` that names the draft."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"The weights in {str(name_or_path)!r} are damaged ({error}). Download or copy them again."
        ) from error
    except OSError as error:
        raise OSError(
            f"The draft {str(name_or_path)!r} cannot be loaded: {' '.join(str(error).split())} Give the folder or the "
            "Hub name of a draft."
        ) from error


__all__ = ["DFlashBody", "DFlashDraftModel", "UntiedDraftError"]
