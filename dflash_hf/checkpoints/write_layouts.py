"""Writes config.json and tensor names for the readers of other layouts. It needs only dictionaries, not torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..model.configuration_dflash import PART_FIELDS, DFlashConfig
from .read_layouts import BOOKKEEPING, SHARED_FIELDS, muse_window


def layout_config(config: DFlashConfig, layout: str, dtype: str) -> dict[str, Any]:
    """
    Make the config.json of another layout.

    Args:
        config ([`DFlashConfig`]): The draft's configuration.
        layout (`str`): `"serving"`, `"speculators"` or `"muse"`.
        dtype (`str`): The dtype of the tensors beside it, for example `"bfloat16"`.

    Returns:
        `dict`: plain values for JSON.

    Raises:
        ValueError: The layout has no key for something that this draft computes. The message names it.
    """
    writers: dict[str, Callable[[DFlashConfig], dict[str, Any]]] = {
        "serving": _to_serving,
        "speculators": _to_speculators,
        "muse": _to_muse,
    }
    if layout not in writers:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(writers)}. Choose one of them.")
    return {**writers[layout](config), "dtype": dtype}


def _rope_spellings(config: DFlashConfig) -> dict[str, Any]:
    """Return both spellings of the rotary base, because older and newer readers know one each."""
    return {"rope_theta": config.rope_theta, "rope_parameters": dict(config.rope_parameters or {})}


def _kept(config: DFlashConfig, *expressed: str) -> dict[str, Any]:
    """Return what a layout has no key for: fields of ours that are set, and unknown keys of the draft's origin."""
    bookkeeping = {
        *BOOKKEEPING,
        *SHARED_FIELDS,
        *PART_FIELDS,
        *expressed,
        "dtype",
        "rope_parameters",
        "target_hidden_size",
        "layer_types",
        "sliding_window",
        "is_causal",
        "target_layer_ids",
        "block_size",
        "mask_token_id",
    }
    values = config.to_diff_dict().items()
    return {name: value for name, value in values if name not in bookkeeping and value is not None}


def _method(config: DFlashConfig) -> dict[str, Any]:
    """Return the fields of the draft's parts that are set, as published files name them."""
    values = {name: getattr(config, name) or None for name in PART_FIELDS}
    if is_dflash2(config):  # The readers' class has both parts. What this draft lacks is written without effect.
        values["conv_kernel_size"], values["conv_group_size"] = (
            (config.conv_kernel_size, config.conv_group_size) if config.conv_kernel_size else (1, config.hidden_size)
        )
        values["selector_rank"] = config.selector_rank or 1
        values["selector_top_k"] = config.selector_top_k or min(16, config.vocab_size)
    unwritten = ("selector_factored", "selector_embedding_scale", "learned_mask_embedding", "attention_sinks")
    return {name: value for name, value in values.items() if value is not None and name not in unwritten}


def is_dflash2(config: DFlashConfig) -> bool:
    """Tell whether a draft has a part of DFlash 2."""
    return config.conv_kernel_size is not None or config.selector_rank is not None


def is_dspark(config: DFlashConfig) -> bool:
    """Tell whether a draft has a head of DSpark."""
    return config.markov_rank is not None or config.enable_confidence_head


def is_served_as_dspark(config: DFlashConfig) -> bool:
    """Tell whether servers run a draft in their class for DSpark, the only one whose slots start at the anchor."""
    return is_dspark(config) or (config.sample_from_anchor and not is_dflash2(config))


def _refuse_mixed(config: DFlashConfig, layout: str) -> None:
    """Refuse a draft that is both DFlash 2 and DSpark, for which readers have no class."""
    if is_dflash2(config) and is_dspark(config):
        raise ValueError(
            f"The draft has parts of DFlash 2 and of DSpark, and the {layout} layout has a class for each of them but "
            "none for both. Write the native layout."
        )


def _shared(config: DFlashConfig) -> dict[str, Any]:
    """Return the fields that all layouts name as Qwen3 does."""
    return {name: getattr(config, name) for name in SHARED_FIELDS}


def _to_serving(config: DFlashConfig) -> dict[str, Any]:
    """Write the layout of the reference implementation, which servers read."""
    if config.target_num_hidden_layers is None:
        raise ValueError(
            "target_num_hidden_layers is None, but the serving layout contains the depth of the target. Load the "
            "draft with target=, or pass target_num_hidden_layers=."
        )
    _refuse_mixed(config, "serving")
    layer_types, method = config.layer_types or [], _method(config)
    drafting = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids or []),
        **{name: value for name, value in method.items() if name != "draft_vocab_size"},
    }
    architecture = "DFlashDraftModel"
    top: dict[str, Any] = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    if is_dflash2(config):
        architecture = "DFlash2DraftModel"
    elif is_served_as_dspark(config):  # vLLM reads these keys at the top level
        architecture = "Qwen3DSparkModel"
        drafting["projector_type"] = "dspark"
        top |= {
            **method,
            "markov_rank": config.markov_rank or 1,
            "markov_head_type": config.markov_head_type or "vanilla",
            "sample_from_anchor": config.sample_from_anchor,
            "dspark_bonus_anchor": not config.sample_from_anchor,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids or []),
        }
    if config.attention_sinks:
        drafting["attention_sink_bias"] = True
    if config.input_embedding_scale is not None:
        drafting["input_embedding_scale"] = config.input_embedding_scale
    written = {
        "architectures": [architecture],
        "model_type": "qwen3",
        **top,
        "block_size": config.block_size,
        "num_target_layers": config.target_num_hidden_layers,
        "dflash_config": {**getattr(config, "dflash_config", {}), **drafting},
        **_shared(config),
        **_rope_spellings(config),
        "layer_types": list(layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in layer_types,
        "tie_word_embeddings": False,
        **_kept(config, "target_num_hidden_layers", "input_embedding_scale", "dflash_config"),
    }
    is_causal = config.is_causal
    if architecture == "DFlash2DraftModel" and is_causal is None and "sliding_attention" not in layer_types:
        is_causal = False
    return written if is_causal is None else {**written, "is_causal": is_causal}


def _to_speculators(config: DFlashConfig) -> dict[str, Any]:
    """Write the layout of speculators."""
    _refuse_mixed(config, "speculators")
    if config.output_multiplier is not None or config.final_logit_softcapping is not None:
        raise ValueError(
            f"output_multiplier={config.output_multiplier} or final_logit_softcapping="
            f"{config.final_logit_softcapping} cannot be expressed in the speculators layout. Write the serving "
            "layout."
        )
    layer_types = config.layer_types or []
    causal = {kind: config.in_block_causal(index) for index, kind in enumerate(layer_types)}
    if causal.get("full_attention"):
        raise ValueError(
            f"is_causal={config.is_causal} cannot be expressed for full attention in the speculators layout, whose "
            "full layers see the whole block. Write the serving layout."
        )
    inner = {
        "model_type": "qwen3",
        **_shared(config),
        **_rope_spellings(config),
        "layer_types": list(layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": "sliding_attention" in layer_types,
        "tie_word_embeddings": False,
    }
    if len(set(causal.values())) == 1:  # vLLM reads this key first and applies it to all layers.
        inner["is_causal"] = next(iter(causal.values()))
    kept = _kept(config, "target_name_or_path")
    if config.is_causal is not None:
        kept["is_causal"] = config.is_causal
    kind, architecture = "dflash", "DFlashDraftModel"
    method = _method(config)
    if is_dflash2(config):
        kind, architecture = "dflash2", "DFlash2DraftModel"
    elif is_dspark(config):
        kind, architecture = "dspark", "DSparkSpeculator"
        method |= {
            "markov_rank": config.markov_rank or 0,
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.tokens_per_block - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": []},
        },
        "transformer_layer_config": inner,
        **method,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids or []],
        "sliding_window_non_causal": not causal.get("sliding_attention", False),
        "sample_from_anchor": config.sample_from_anchor,
        **kept,
    }


def _to_muse(config: DFlashConfig) -> dict[str, Any]:
    """Write the layout of transformers' own assistant class."""
    parts = {**_method(config), "learned_mask_embedding": config.learned_mask_embedding}
    parts["attention_sinks"] = config.attention_sinks
    if set_parts := sorted(name for name, value in parts.items() if value):
        raise ValueError(
            f"{', '.join(set_parts)} cannot be expressed in the muse layout, which has the first DFlash alone. Write "
            "another layout."
        )
    layer_types = config.layer_types or []
    is_sliding = "sliding_attention" in layer_types
    if any(config.in_block_causal(index) for index in range(len(layer_types))):
        raise ValueError(
            "Layers that are causal inside the block cannot be expressed in the muse layout, whose layers all see the "
            "whole block. Write the serving layout."
        )
    if config.attention_bias:
        raise ValueError(
            "attention_bias=True cannot be expressed in the muse layout, whose projections have no bias. Write "
            "another layout."
        )
    if is_sliding and (config.sliding_window or 0) < 2:
        raise ValueError(
            f"sliding_window={config.sliding_window} must be at least 2 in the muse layout. Write another layout."
        )
    written = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **_shared(config),
        **_rope_spellings(config),
        "layer_types": list(layer_types),
        "sliding_window": (config.sliding_window or 0) - 1 if is_sliding else muse_window(),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids or []),
        **_kept(config, "dflash_config"),
        # One of the two model runners of vLLM reads these keys here.
        "dflash_config": {
            **getattr(config, "dflash_config", {}),
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids or []),
        },
    }
    return written if config.is_causal is None else {**written, "is_causal": config.is_causal}


def layout_tensor_name(name: str, layout: str) -> str:
    """Translate a tensor name of our network into that of another layout."""
    module, _, leaf = name.rpartition(".")
    muse_names = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
    return f"{muse_names[module]}.{leaf}" if layout == "muse" and module in muse_names else name
