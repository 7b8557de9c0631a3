"""The DFlash draft network and its tie to a target. Travels with a checkpoint: needs torch and transformers only."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DFlashCache
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .configuration_dflash import DFlashConfig, check_target_layer_ids, describe_target

logger = logging.get_logger(__name__)

# Arguments of `from_pretrained` that find files on the Hub: the target's with the draft's, and the draft's own.
TARGET_LOOK_UP = ("token", "cache_dir", "local_files_only")
DRAFT_LOOK_UP = (*TARGET_LOOK_UP, "revision", "subfolder")

# a mask, or a function that attends: (query, key, value, scaling=, dropout=) -> [batch, queries, heads, head_dim]
AttentionMask = torch.Tensor | BlockMask | Callable[..., torch.Tensor] | None

# Reads a draft: (folder or Hub name, config=, given=, target=, **hub_kwargs) -> configuration and tensors.
CheckpointReader = Callable[..., tuple[DFlashConfig, dict[str, torch.Tensor] | None]]


class UntiedDraftError(NotImplementedError):
    """Embedding or head of the target were asked for, and the draft is not tied to a target."""


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which matrix products with `x` run: autocast's where it is on, else its own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _LeanRMSNorm(torch.autograd.Function):
    """
    RMS normalisation that keeps its input alone for the backward pass.

    Where no fused kernel exists, as on a CPU, `functional.rms_norm` keeps two more tensors of that size.
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
    """The tensor itself; its gradient is summed over the ranks of a process group."""

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
    Scale by the root mean square over the last axis, in fp32.

    The result comes in the dtype of the products that follow, so that autocast has nothing left to copy.

    Under tensor parallelism each rank norms its own heads with one shared weight: `group` sums the weight's gradient
    over the ranks. (The plan entry `replicated_with_grad_allreduce` of transformers sums what `.grad` holds by then,
    so that earlier micro-batches of an accumulation window count more than once.)
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
    Cosine and sine of the rotary angles, computed in fp32 from the configuration alone.

    No buffer holds the frequencies: a non-persistent buffer is left uninitialised by `from_pretrained` and is cast by
    `.to(bfloat16)`.

    Args:
        config (`DFlashConfig`): gives `rope_parameters` and `head_dim`.
        position_ids (`torch.LongTensor` of shape `[batch, length]`): absolute positions.
        dtype (`torch.dtype`): of the result.

    Returns:
        two tensors of shape `[batch, 1, length, head_dim]`.
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
    """Rotate `x` of shape `[batch, heads, length, head_dim]`; the two halves of a head are the pairs."""
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
    Visibility of one block after its context, from shapes alone: the last `num_queries` keys are the block.

    Args:
        num_queries (`int`): slots of the block.
        num_keys (`int`): context keys and block keys in the order of their positions.
        window (`int`, *optional*): a context key must be closer to the query than this.
        causal (`bool`): a slot sees no later slot of its block.
        key_valid_mask (`torch.BoolTensor` of shape `[batch, at least num_keys]`, *optional*): False at padding.
        device (`torch.device`): of the result.

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
    """Attention written out, with a bool mask (True = visible); returns the output and the weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = nn.functional.dropout(scores.softmax(-1).to(value.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class DFlashAttention(nn.Module):
    """Grouped-query attention of the block's slots over the context and the block, one projection for both."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False  # the mask says everything; no kernel may add a triangle of its own
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)

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

        # Project the two sources apart and join the small results: the wide inputs are never copied.
        key = torch.cat([heads(self.k_proj(context)), heads(self.k_proj(hidden_states))], dim=1)
        value = torch.cat([heads(self.v_proj(context)), heads(self.v_proj(hidden_states))], dim=1)
        mesh = getattr(self.k_proj.weight, "device_mesh", None)  # of a weight split by tensor parallelism
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
        if callable(attention_mask):
            output = attention_mask(query, key, value, scaling=self.scaling, dropout=dropout)
            return self.o_proj(output.reshape(batch, num_queries, -1))

        implementation = self.config._attn_implementation
        if isinstance(attention_mask, BlockMask):
            implementation = "flex_attention"
        elif implementation == "flex_attention" and attention_mask is not None:
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


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), context, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashBody(PreTrainedModel):
    """
    The trainable network: block inputs and target hidden states in, hidden states of the slots out.

    It owns no embedding and no head, and knows nothing of anchors or losses.
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
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: AttentionMask | dict[str, AttentionMask] = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        query_valid_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Run all blocks of a row over its context in one pass.

        Training gives `M` blocks a row and a mask that keeps them apart; serving gives one block after `n` new context
        positions, and a cache. Context and block have the positions of the text: the context key of a token and the
        block key of the same token differ only by their source.

        Args:
            noise_embeds (`torch.FloatTensor` of shape `[rows, M * block_size, hidden_size]`):
                The target's embedding of the anchor token in slot 0 and of the mask token in the others.
            context_hidden_states (`torch.FloatTensor` of shape `[rows, n, num_target_layers * hidden_size]`):
                Hidden states of the tapped target layers, joined on the last axis. `n` may be 0.
            attention_mask (*optional*):
                Training: a dict from layer type to a `torch.BoolTensor` (True = visible) of shape
                `[rows, 1, M * block_size, n + M * block_size]`, a FlexAttention `BlockMask`, or a function that
                attends. Serving: a mask `[rows, cached + n + block_size]`, nonzero at real tokens, or `None`.
            position_ids (`torch.LongTensor` of shape `[rows, n + M * block_size]`, *optional*):
                Positions of the new context, then of the slots. By default they continue the cache.
            cache (`Cache`, *optional*):
                Receives the keys and values of context and block; the caller crops the block.
            query_valid_mask (`torch.BoolTensor` of shape `[rows, M * block_size]`, *optional*):
                False at slots that do not exist: input, output and gradient are exactly zero there.
            use_cache (`bool`, *optional*):
                Make a cache if none is given.
            **kwargs:
                Passed to the attention function.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `[rows, M * block_size, hidden_size]` in the dtype
            of `noise_embeds`, and `cache`.

        Raises:
            ValueError: a width does not fit the configuration, which is what a wrong target looks like.
        """
        self._check_widths(noise_embeds, context_hidden_states)
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        hidden_states = noise_embeds.to(self.fc.weight.dtype)
        if query_valid_mask is not None:
            hidden_states = hidden_states.masked_fill(~query_valid_mask[..., None], 0)
        context = self.hidden_norm(self.fc(context_hidden_states.to(product_dtype(self.fc.weight))))

        num_new = context.shape[1] + hidden_states.shape[1]
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(start, start + num_new, device=hidden_states.device)[None]
        rotary = rotary_angles(self.config, position_ids, context.dtype)

        key_valid_mask, masks = None, {}
        if isinstance(attention_mask, dict):
            masks = attention_mask
        elif isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            if attention_mask.shape[1] < num_new:
                raise ValueError(
                    f"attention_mask has {attention_mask.shape[1]} columns, and needs one for each of the cached, "
                    f"context and block positions (at least {num_new})."
                )
            key_valid_mask = attention_mask.bool()
        elif attention_mask is not None:
            masks = dict.fromkeys(self.config.layer_types or [], attention_mask)

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
        return BaseModelOutputWithPast(last_hidden_state=hidden_states.to(noise_embeds.dtype), cache=cache)

    def _check_widths(self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor) -> None:
        config = self.config
        wanted = self.fc.in_features
        if noise_embeds.shape[-1] != config.hidden_size or context_hidden_states.shape[-1] != wanted:
            raise ValueError(
                f"The draft {describe_target(config)} was trained for the target {config.target_name_or_path!r}: it "
                f"takes embeddings of width {config.hidden_size} and {wanted} context values a token (layers "
                f"{config.target_layer_ids}); the target in use gave {noise_embeds.shape[-1]} and "
                f"{context_hidden_states.shape[-1]}. Use the draft with its own target."
            )


def embed_tokens(embedding: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """
    Embed tokens as transformers does for a draft: the module as it is, without its `embed_norm` if it has one.

    Args:
        embedding (`nn.Module`): the target's input embedding (scaling inside it is kept).
        token_ids (`torch.LongTensor`): any shape.

    Returns:
        `torch.FloatTensor`: shape of `token_ids` plus the width, in the embedding's dtype.

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
    The factor that an embedding module applies to its rows, as Gemma's does.

    Args:
        embedding (`nn.Module`): the target's input embedding.

    Returns:
        `float`: 1.0 for a plain one; `None` where it cannot be told: rows that are quantised, offloaded, split over
        ranks or all zero.
    """
    weight = embedding.weight
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.is_meta:
        return None
    if hasattr(weight, "full_tensor"):  # split over ranks
        return None
    known = getattr(embedding, "scalar_embed_scale", None)
    if known is not None:
        return float(known)
    row = int(weight.detach()[:64].float().abs().sum(-1).argmax())
    with torch.no_grad():
        embedded = embed_tokens(embedding, torch.tensor([row], device=weight.device))[0].float()
    plain = weight.detach()[row].float()
    return float(embedded @ plain / (plain @ plain)) if plain.any() else None


def apply_head(head: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """
    Apply a target's raw head in its own dtype.

    Args:
        head (`nn.Module`): the target's output embedding.
        hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): outputs of the body.

    Returns:
        `torch.FloatTensor` of shape `[..., vocab_size]`.
    """
    if isinstance(head.weight, torch.Tensor) and head.weight.is_floating_point():  # not so in a quantised head
        hidden_states = hidden_states.to(head.weight.dtype)
    return head(hidden_states)


def _split_again(module: Any) -> None:
    """After a forward pass a module of FSDP2 may still hold gathered weights, which it will free some day."""
    if hasattr(module, "reshard"):
        module.reshard()


def with_whole_weights(module: nn.Module) -> nn.Module:
    """
    A module of the target as it would be in one process.

    The weights of a target that is split over ranks (FSDP2, tensor parallelism) are gathered, once, since they are
    frozen; every rank must make this call at the same time.

    Args:
        module (`nn.Module`): embedding or head; unchanged.

    Returns:
        `nn.Module`: the module itself if its weights are whole, else a copy with whole weights and without the hooks
        that gather or exchange parts of them.
    """
    _split_again(module)
    parameters = dict(module.named_parameters(recurse=False))
    if not any(hasattr(parameter, "full_tensor") for parameter in parameters.values()):
        return module
    # FSDP2 puts a class of its own in front of the module's
    module_class: Any = next(kind for kind in type(module).__mro__ if not hasattr(kind, "reshard"))
    whole = module_class.__new__(module_class)
    whole.__dict__.update(module.__dict__)
    whole.__dict__.pop("forward", None)  # tensor parallelism wraps it
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
    Name the values of a tensor: dtype, shape and SHA-256 of its bytes.

    Args:
        tensor (`torch.Tensor`): any, on any device.

    Returns:
        `str`
    """
    data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    shape = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {hashlib.sha256(data).hexdigest()}"


def weights_error(name_or_path: Any, problems: Mapping[str, Any]) -> ValueError:
    """
    The error of a file whose tensors are not the network's.

    Args:
        name_or_path (`str`): of the draft.
        problems (`Mapping`): kind of fault to tensor names.

    Returns:
        `ValueError`: to be raised.
    """
    listed = "; ".join(f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in problems.items() if names)
    return ValueError(
        f"The weights in {str(name_or_path)!r} are not those of a DFlash draft of its configuration ({listed}). "
        "No weight is made up; use the right file."
    )


@contextmanager
def _errors_that_name(name_or_path: Any) -> Iterator[None]:
    """Inside the context every error of a file is an `OSError` that names the draft."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"The weights in {str(name_or_path)!r} are damaged ({error}). Fetch them again.") from error
    except OSError as error:
        raise OSError(
            f"The draft {str(name_or_path)!r} cannot be loaded: {' '.join(str(error).split())} Give the folder or the "
            "Hub name of a draft."
        ) from error


class TargetModules:
    """
    The target's embedding and head, held by a draft without being part of it.

    Modules of a live target stay where they are; modules read for the draft alone (`follow=True`) move to the device
    of what they are applied to. Copying a draft does not copy its target.
    """

    def __init__(self, embedding: nn.Module, head: nn.Module, name: str, *, follow: bool) -> None:
        self.embedding, self.head, self.name, self.follow = embedding, head, name, follow

    @property
    def embedding_shape(self) -> tuple[int, int]:
        """Rows and width of the embedding."""
        rows, width = getattr(self.embedding.weight, "shape", (0, 0))
        return rows, width

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetModules:
        return self

    def to(self, device: torch.device) -> TargetModules:
        if self.follow:
            self.embedding.to(device)
            self.head.to(device)
        return self


def load_target_modules(name_or_path: str, **hub_kwargs: Any) -> tuple[TargetModules, Any]:
    """
    Load only the embedding and the head of a target checkpoint, frozen, in the checkpoint's dtype.

    The target is built with zero decoder layers, so its own class says where they are and how they are tied or scaled.
    From the Hub this downloads the weight files that hold them.

    Args:
        name_or_path (`str`): Hub name or folder of the target.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`.

    Returns:
        `tuple[TargetModules, PreTrainedConfig]`: the modules, and the target's full configuration.

    Raises:
        UntiedDraftError: the target cannot be read; the message names it, the reason and the argument to change.
    """
    try:
        full_config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
        config = AutoConfig.from_pretrained(name_or_path, **hub_kwargs)
        text_config = config.get_text_config(decoder=True)
        text_config.num_hidden_layers, text_config.layer_types = 0, []
        is_causal_lm = type(config) in AutoModelForCausalLM._model_mapping
        auto_class = AutoModelForCausalLM if is_causal_lm else AutoModelForImageTextToText
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # every decoder layer of the file is "unexpected" here, on purpose
        try:
            model = auto_class.from_pretrained(name_or_path, config=config, dtype="auto", **hub_kwargs)
        finally:
            logging.set_verbosity(verbosity)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UntiedDraftError(
            f"The target {name_or_path!r} cannot be read: {reason} The draft's own weights are fine; pass "
            "target=<folder, Hub name or model> to from_pretrained, or call draft.tie_target(...)."
        ) from error
    model.requires_grad_(False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return TargetModules(embedding, head, repr(name_or_path), follow=True), full_config


def _modules_of(target: PreTrainedModel) -> TargetModules:
    """Embedding and head of a live target, as they are."""
    if target.device.type == "meta":
        raise ValueError(
            f"The first weights of the target {describe_target(target)} are on the meta device: accelerate "
            "offloaded even its embedding, or it was built without weights. Give it more memory in device_map."
        )
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"The target {describe_target(target)} has no language model head. Load it with "
            "AutoModelForCausalLM (or its multimodal counterpart), not AutoModel."
        )
    return TargetModules(target.get_input_embeddings(), head, describe_target(target), follow=False)


def check_distributed_config(config: DFlashConfig, distributed_config: DistributedConfig) -> None:
    """
    Refuse a parallel layout that the draft cannot be split into, before anything is loaded.

    Args:
        config (`DFlashConfig`): of the draft.
        distributed_config (`DistributedConfig`): the layout asked for.

    Raises:
        ValueError: the tensor-parallel size does not divide the heads and the MLP, or the layout splits what a draft
            keeps whole; the message gives field, value and rule.
    """
    for field, is_asked in (
        ("enable_sequence_parallel=True", distributed_config.enable_sequence_parallel),
        (f"pp_size={distributed_config.pp_size}", distributed_config.pp_size not in (None, 1)),
    ):
        if is_asked:
            raise ValueError(
                f"distributed_config has {field}: a draft is split by tensor parallelism only (tp_size). Leave it out."
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


class DFlashDraftModel(DFlashBody):
    """
    A DFlash draft tied to its target: the body, with the target's frozen embedding and head at hand.

    The target's modules are never saved, trained, moved or counted as parameters of the draft. Native generation
    (`target.generate(..., assistant_model=draft, speculation_type="dflash")`) does not need the tie; training and
    `compute_logits` do.

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
        super().__init__(config)
        # `object.__setattr__`: the target must not become a submodule
        object.__setattr__(self, "_target_modules", None)
        object.__setattr__(self, "_target_source", None)
        object.__setattr__(self, "_target_hub_kwargs", {})

    def __getattr__(self, name: str) -> Any:
        if name == "generation_config":  # asked for by classic assisted generation only
            raise AttributeError(
                "A DFlash draft cannot run classic assisted generation. Pass speculation_type='dflash': "
                "target.generate(**inputs, assistant_model=draft, speculation_type='dflash')."
            )
        return super().__getattr__(name)

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

    @classmethod
    def from_target(
        cls, target: str | PreTrainedModel, *, dtype: torch.dtype = torch.float32, **config_kwargs: Any
    ) -> DFlashDraftModel:
        """
        Make a new draft with random weights for a target, and tie it.

        Of a target given by name only embedding and head are read.

        Args:
            target (`str` or `PreTrainedModel`):
                Hub name or folder of the target, or the live target; the draft goes to a live target's device.
            dtype (`torch.dtype`, defaults to `torch.float32`):
                Of the trainable weights. Keep fp32 for training: in bf16 a norm weight of 1.0 never moves.
            **config_kwargs:
                Passed to [`DFlashConfig.from_target`].

        Returns:
            `DFlashDraftModel` in training mode.

        Raises:
            ValueError: no draft fits the target, or a value breaks its rule.
            UntiedDraftError: the target cannot be read.
        """
        draft = cls(DFlashConfig.from_target(target, **config_kwargs))
        for parameter in draft.parameters():
            parameter.data = parameter.data.to(dtype)
        if not isinstance(target, str):  # a `peft` wrapper is no PreTrainedModel
            draft.tie_target(target)
            nn.Module.to(draft, target.device)
        else:
            hub_kwargs = {name: config_kwargs[name] for name in TARGET_LOOK_UP if name in config_kwargs}
            draft.tie_target(target, revision=draft.config.target_revision, **hub_kwargs)
        draft._start_with_even_logits()
        return draft

    @torch.no_grad()
    def _start_with_even_logits(self) -> None:
        """
        Scale the last norm so that the first logits have a standard deviation of about one.

        A trained head is large: behind a norm of weight 1 a new draft starts out confident and wrong, and spends a
        good part of a short training on forgetting that.
        """
        head = self.get_output_embeddings()
        weight = head.weight
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():  # not so in a quantised head
            if weight.device.type == "meta":  # offloaded; the hook of accelerate fetches it for a forward pass
                weight = head(torch.eye(weight.shape[1], dtype=weight.dtype)).t()
            if not hasattr(weight, "device_mesh"):  # a sharded weight is never quantised
                weight = weight.dequantize()  # torchao's weights look like floating ones
            self.norm.weight.fill_(1 / weight.float().norm(dim=-1).mean().item())

    @classmethod
    def from_pretrained(  # type: ignore[override]  # narrower on purpose: what differs is `target`
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        target: str | bool | PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Load a draft of any producer; the tie to its target happens on the first use of embedding or head.

        Args:
            pretrained_model_name_or_path (`str`):
                Hub name or folder of the draft, in any layout: this package's, that of servers and of the reference,
                speculators', or that of transformers' own assistant class.
            target (`str`, `PreTrainedModel` or `False`, *optional*):
                Default: the target named in the configuration. A name or folder replaces it; a live target is tied at
                once; `False` never looks for one. It also tells what the draft's file may leave out (depth and
                vocabulary of the target).
            *model_args, **kwargs:
                As in `PreTrainedModel.from_pretrained`, and any field of the configuration. `token`, `cache_dir` and
                `local_files_only` also reach the look-up of the target; `revision` is the draft's own.

        Returns:
            `DFlashDraftModel` in evaluation mode, in the checkpoint's dtype unless `dtype` is given.

        Raises:
            OSError: nothing is there, or the weights are damaged.
            ValueError: no DFlash draft; tensors are missing, unknown, of another shape or not finite; the file lacks a
                value or contradicts itself; a live target does not fit; or the draft cannot be split as
                `distributed_config` asks.
        """
        # `target` stays out of `kwargs`: transformers deep-copies what it is given, a live model as well.
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with names
        kwargs["use_safetensors"] = True
        name: Any = pretrained_model_name_or_path
        hub_kwargs = {key: kwargs[key] for key in DRAFT_LOOK_UP if key in kwargs}
        with _errors_that_name(pretrained_model_name_or_path):
            if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
                raise ValueError(
                    "tp_plan= and tp_size= are deprecated in transformers. Pass "
                    "distributed_config=DistributedConfig(tp_size=...)."
                )
            config, given = kwargs.get("config"), {}
            if not isinstance(config, DFlashConfig):
                given = {key: kwargs.pop(key) for key in DFlashConfig.field_names() & kwargs.keys()}
            if distributed_config := kwargs.get("distributed_config"):
                if isinstance(distributed_config, dict):
                    distributed_config = DistributedConfig.from_dict(distributed_config)
                if not isinstance(config, DFlashConfig):
                    config = DFlashConfig.from_pretrained(config or name, **hub_kwargs, **given)
                check_distributed_config(config, distributed_config)
            if cls._checkpoint_reader is not None and kwargs.get("state_dict") is None:
                if config is not None and not isinstance(config, DFlashConfig):
                    config = DFlashConfig.from_pretrained(config, **hub_kwargs, **given)
                kwargs["config"], tensors = cls._checkpoint_reader(
                    name, config=copy.deepcopy(config), given=given, target=target, **hub_kwargs
                )
                if tensors is not None:
                    name, kwargs["state_dict"] = None, tensors
            else:
                kwargs.update(given)
            loaded: Any = super().from_pretrained(name, *model_args, output_loading_info=True, **kwargs)
            draft, info = loaded
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        problems = {kind.replace("_", " "): info[kind] for kind in kinds}
        problems["not finite"] = {
            key for key, value in draft.named_parameters() if not value.is_meta and not value.isfinite().all()
        }
        if any(problems.values()):
            raise weights_error(pretrained_model_name_or_path, problems)
        if name is None and pretrained_model_name_or_path is not None:  # loaded from tensors, which have no name
            draft.config.name_or_path = draft.name_or_path = str(pretrained_model_name_or_path)
        if draft.dtype == torch.float16:
            logger.warning(
                f"The draft {str(pretrained_model_name_or_path)!r} is in float16, in which the activations of a draft "
                "overflow and nothing is accepted. Load it with dtype=torch.bfloat16."
            )
        if target is not None and not isinstance(target, (str, bool)):
            draft.tie_target(target)
        else:
            draft._set_target_source(target, {key: hub_kwargs[key] for key in TARGET_LOOK_UP if key in hub_kwargs})
        return (draft, info) if wants_info else draft

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # theirs is a wrapper without signature
        """As in `PreTrainedModel.push_to_hub`; with the package installed the card is that of a draft."""
        if self._hub_writer is None:
            return super().push_to_hub(*args, **kwargs)
        return self._hub_writer(self, *args, **kwargs)

    def _set_target_source(self, target: str | bool | None, hub_kwargs: dict[str, Any]) -> None:
        object.__setattr__(self, "_target_source", target)
        object.__setattr__(self, "_target_hub_kwargs", hub_kwargs)

    @property
    def is_tied(self) -> bool:
        """`bool`: whether the target's embedding and head are at hand already."""
        return self._target_modules is not None

    def tie_target(self, target: str | PreTrainedModel, **hub_kwargs: Any) -> None:
        """
        Share the frozen embedding and head of a target.

        Args:
            target (`str` or `PreTrainedModel`):
                Hub name or folder (only embedding and head are read), or the live target (nothing is copied, unless
                it is split over ranks: embedding and head are then gathered).
            **hub_kwargs:
                `revision`, `token`, `cache_dir`, `local_files_only` of the target.

        Raises:
            ValueError: the pair does not fit (width, vocabulary, tapped layers, mask token, copies of the target's
                tensors in the draft's file); both names are given. Or the target's embedding is offloaded.
            UntiedDraftError: the target cannot be read.
        """
        if isinstance(target, str):
            modules, target_config = load_target_modules(target, **hub_kwargs)
        else:
            modules = _modules_of(target)
            _split_again(target)
            modules.embedding, modules.head = with_whole_weights(modules.embedding), with_whole_weights(modules.head)
            target_config = target.config
        self._check_pair(modules, target_config)
        object.__setattr__(self, "_target_modules", modules)
        if self.config.target_name_or_path is None and target_config.name_or_path:
            self.config.target_name_or_path = target_config.name_or_path

    def check_target(self, target: PreTrainedModel) -> None:
        """
        Check that a live target is one that this draft fits, without tying to it.

        Args:
            target (`PreTrainedModel`): with its language model head.

        Raises:
            ValueError: the pair does not fit (width, vocabulary, tapped layers, mask token); both names are given.
        """
        self._check_pair(_modules_of(target), target.config)

    def _check_pair(self, modules: TargetModules, target_config: Any) -> None:
        config, text = self.config, target_config.get_text_config(decoder=True)
        num_embeddings, embedding_width = modules.embedding_shape
        head_width = getattr(modules.head, "in_features", embedding_width)
        problems = []
        if not embedding_width == head_width == config.hidden_size:
            problems.append(f"width {config.hidden_size} against {embedding_width} (head {head_width})")
        if num_embeddings != config.vocab_size:
            problems.append(f"vocabulary {config.vocab_size} against {num_embeddings} embedding rows")
        if config.mask_token_id >= num_embeddings:
            problems.append(f"mask token {config.mask_token_id} outside {num_embeddings} embedding rows")
        depth = config.target_num_hidden_layers
        if depth is not None and text.num_hidden_layers != depth:
            problems.append(f"depth {depth} against {text.num_hidden_layers}")
        if max(config.target_layer_ids or [0]) >= text.num_hidden_layers:
            problems.append(f"layers {config.target_layer_ids} in a target of {text.num_hidden_layers}")
        scale, expected = embedding_scale(modules.embedding), config.input_embedding_scale
        if scale is not None and expected is not None and not math.isclose(scale, expected, rel_tol=0.01):
            problems.append(f"input_embedding_scale {expected:g} against {scale:g} in the target's embedding")
        for name, checksum in (config.target_tensor_checksums or {}).items():
            module = modules.embedding if name.startswith("embed") else modules.head
            weight: Any = with_whole_weights(module).weight
            if type(weight.data) is not torch.Tensor or not weight.is_floating_point():
                problems.append(f"{name} of the draft's file cannot be compared with the target's quantised one")
            elif tensor_checksum(weight.to(getattr(torch, checksum.split()[0]))) != checksum:
                problems.append(f"{name} of the draft's file is not the target's")
        if problems:
            raise ValueError(
                f"The draft {describe_target(config)}, made for {config.target_name_or_path!r}, does not fit the "
                f"target {modules.name}: {'; '.join(problems)}. Use the draft with its own target."
            )
        if depth is None:
            check_target_layer_ids(config.target_layer_ids or [], text.num_hidden_layers)
            config.target_num_hidden_layers = text.num_hidden_layers
        if expected is None and scale is not None and not math.isclose(scale, 1, rel_tol=0.01):
            config.input_embedding_scale = scale
        config.target_tensor_checksums = None  # compared

    def _tied(self) -> TargetModules:
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
        """The target's input embedding module; ties if need be, raises `UntiedDraftError` if it cannot."""
        return self._tied().embedding

    def get_output_embeddings(self) -> nn.Module:
        """The target's language model head module; ties if need be, raises `UntiedDraftError` if it cannot."""
        return self._tied().head

    @torch.no_grad()
    def embed_blocks(self, anchor_token_ids: torch.Tensor) -> torch.Tensor:
        """
        Inputs of whole blocks: the anchor's embedding in slot 0, the mask token's in all others.

        Args:
            anchor_token_ids (`torch.LongTensor` of shape `[rows, blocks]`): the real tokens at the anchors.

        Returns:
            `torch.FloatTensor` of shape `[rows, blocks * block_size, hidden_size]`, in the target's dtype.

        Raises:
            UntiedDraftError: the draft is not tied and cannot be.
        """
        block_ids = anchor_token_ids.new_full(
            (*anchor_token_ids.shape, self.config.block_size), self.config.mask_token_id
        )
        block_ids[..., 0] = anchor_token_ids
        return embed_tokens(self.get_input_embeddings(), block_ids.flatten(1)).to(anchor_token_ids.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Apply the target's raw head: no soft-cap, no multiplier.

        Args:
            hidden_states (`torch.FloatTensor` of shape `[..., hidden_size]`): outputs of the body.

        Returns:
            `torch.FloatTensor` of shape `[..., vocab_size]`, in the head's dtype.

        Raises:
            UntiedDraftError: the draft is not tied and cannot be.
        """
        return apply_head(self.get_output_embeddings(), hidden_states)


__all__ = ["DFlashBody", "DFlashDraftModel", "UntiedDraftError"]
