"""Reads config.json and tensor names of the known DFlash checkpoint formats. It needs only dictionaries, not torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import logging

from ..model.configuration_dflash import (
    LAYER_TYPES,
    MAX_LAYERS,
    MAX_SIZE,
    DFlashConfig,
    brief,
    describes_new_draft,
)

logger = logging.get_logger(__name__)

# Fields that other layouts name as Qwen3 does.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Values without a default, which must be in the file or given by the caller.
REQUIRED = ("target_layer_ids", "block_size", "mask_token_id", "vocab_size", "rope_theta")
# Keys that describe the file or the producer's class. Each layout writes its own.
BOOKKEEPING = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "model_type",
        "num_target_layers",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_sliding_window",
        "max_window_layers",
        "dspark_bonus_anchor",
    }
)
# Keys that the reference implementation nests in `dflash_config`. Any other key in there is kept unchanged.
NESTED_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "sample_from_anchor",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "output_multiplier",
    "final_logit_softcapping",
    "last_layer_after_norm",
)
NESTED_LAYER_KEYS = ("causal", "causal_head", "use_swa", "swa_window_size")
# Keys of other producers that matter in training alone, or that repeat what the other keys say.
NESTED_BOOKKEEPING = ("projector_type", "use_confidence_head", "attention_sink_bias")
# The methods that are implemented, as `projector_type` names them.
PROJECTOR_TYPES = (None, "dflash", "dflash2", "dspark")
# Objects in which producers nest the keys of the method.
NESTED_OBJECTS = ("dflash_config", "dflash_architecture_config")
SPECULATORS_KINDS = ("dflash", "dflash2", "dspark")
# Bodies that differ from the one implemented here, by a part of an architecture or a model type.
OTHER_BODIES = ("Gemma4DSpark", "deepseek", "kimi_k3", "K3DSpark", "k3_dspark")

# Module names of other producers, and those of the same modules in our network.
MODULE_NAMES = {
    "context_proj": "fc",
    "context_norm": "hidden_norm",
    "final_norm": "norm",
    "encoder.fc": "fc",
    "encoder.output_norm_enc": "hidden_norm",
}
# Names of a mask vector among the tensors.
MASK_VECTORS = ("mask_embedding", "mask_hidden", "mask_embedding.weight")
# Tensors that follow from other ones or are used by the producer in training alone.
REDUNDANT_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Tensors of the target that some producers store in the draft's file.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight", "logit_head.weight")
# Parts of tensor names that belong to other methods, and what those parts are.
UNSUPPORTED_PARTS = {
    "prefix_gru": "the recurrent prefix head of Domino",
    "embed_proj": "the projection of Domino",
    "refiner_head": "the refiner of XPress",
    "lilicorr": "the correction head of LiLiCorr",
    "layer_fusion_weights": "the fused layers of DFlare",
    "ar_approximation": "the correction of TreeFlash",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "kv_b_proj": "multi-head latent attention",
    "weight_packed": "a packed, quantised weight",
    "weight_scale": "a quantised weight",
    "qweight": "a packed, quantised weight",
}


def layout_of(raw: Mapping[str, Any]) -> str:
    """
    Determine the layout of a config.json.

    Args:
        raw (`Mapping`): The unchanged values of the file.

    Returns:
        `str`: `"native"` (ours, and flat configurations of `model_type: dflash`), `"serving"` (that of the reference
        implementation, which servers read), `"speculators"` or `"muse"` (transformers' own assistant class).

    Raises:
        ValueError: The file does not describe a DFlash draft, or describes one of a kind that is not implemented.
    """
    _check_kinds(raw)
    _refuse_other_kinds(raw)
    architectures = [str(name) for name in raw.get("architectures") or []]
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind not in SPECULATORS_KINDS:
            raise ValueError(
                f"speculators_model_type={brief(kind)} is no draft of this family, which has one of "
                f"{SPECULATORS_KINDS} there. Use such a draft."
            )
        return "speculators"
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "muse"
    if raw.get("model_type") == DFlashConfig.model_type or describes_new_draft(raw):
        return "native"
    if _nested(raw) or any("DFlash" in name or "DSpark" in name for name in architectures):
        return "serving"
    raise ValueError(
        f"This is no DFlash draft: model_type={brief(raw.get('model_type'))}, architectures={brief(architectures)}, "
        "and no dflash_config. Give the folder or Hub name of a draft, not of its target."
    )


def _nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the method, which most producers nest in an object."""
    return {name: value for key in NESTED_OBJECTS for name, value in (raw.get(key) or {}).items()}


def _refuse_other_kinds(raw: Mapping[str, Any]) -> None:
    """Refuse methods and bodies that are not implemented, by their names."""
    architectures = [str(name) for name in raw.get("architectures") or []]
    projector = _nested(raw).get("projector_type")
    if projector not in PROJECTOR_TYPES:
        raise ValueError(
            f"projector_type={brief(projector)} in config.json is a method that is not implemented. Use a draft of "
            f"one of {PROJECTOR_TYPES[1:]}."
        )
    inner = raw.get("transformer_layer_config") or {}
    for name in (*architectures, raw.get("model_type"), inner.get("model_type")):
        if any(part.lower() in str(name).lower() for part in OTHER_BODIES):
            raise ValueError(
                f"{brief(name)} in config.json is a draft whose layers differ from those of Qwen3, which are the ones "
                "implemented here. Use a draft with layers of Qwen3."
            )
    factor = _nested(raw).get("attention_value_scale")
    if factor not in (None, 1, 1.0):
        raise ValueError(
            f"dflash_config['attention_value_scale']={brief(factor)} in config.json scales the values of the "
            "attention, which is not implemented. Use a draft without it."
        )
    for values in (raw, inner):
        if values.get("kv_lora_rank") is not None:
            raise ValueError(
                f"kv_lora_rank={brief(values['kv_lora_rank'])} in config.json says that the draft has multi-head "
                "latent attention, which is not implemented. Use a draft with layers of Qwen3."
            )


def _is_dspark(raw: Mapping[str, Any]) -> bool:
    """Return whether slot `k` of the draft predicts the token `k + 1` places after the anchor unless a key says so."""
    architectures = [str(name) for name in raw.get("architectures") or []]
    kinds = {raw.get("speculators_model_type"), _nested(raw).get("projector_type")}
    return "dspark" in kinds or any("DSpark" in name for name in architectures)


def _check_kinds(raw: Mapping[str, Any]) -> None:
    """Refuse values whose JSON type is not the one that the functions below rely on."""
    objects = (*NESTED_OBJECTS, "rope_parameters", "rope_scaling", "transformer_layer_config", "speculators_config")
    for name in (*objects, "verifier", "auto_map"):
        if not isinstance(raw.get(name, None), Mapping | None):
            raise ValueError(f"{name}={brief(raw[name])} in config.json must be an object. Correct the file.")
    lists = {"architectures": str, "layer_types": str, "target_layer_ids": int, "aux_hidden_state_layer_ids": int}
    for name, kind in lists.items():
        value = raw.get(name)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise ValueError(
                f"{name}={brief(value)} in config.json must be a list of {kind.__name__}. Correct the file."
            )
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_window_layers", "sliding_window"):
        value, maximum = raw.get(name), MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if value is not None and (type(value) is not int or not 1 <= value <= maximum):
            raise ValueError(
                f"{name}={brief(value)} in config.json must be an int from 1 to {maximum}. Correct the file."
            )
    for name in ("model_type", "dtype", "torch_dtype"):
        if not isinstance(raw.get(name), str | None):
            raise ValueError(f"{name}={brief(raw[name])} in config.json must be a string. Correct the file.")
    for name in ("dtype", "torch_dtype"):
        if raw.get(name) not in (None, *DTYPES):
            raise ValueError(
                f"{name}={brief(raw[name])} in config.json must be one of {', '.join(DTYPES)}. Correct the file."
            )
    for inner in (raw.get(name) for name in (*NESTED_OBJECTS, "transformer_layer_config", "speculators_config")):
        if inner:
            _check_kinds(inner)


def native_values(
    raw: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    target_facts: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """
    Translate a config.json of any producer into the values of a [`DFlashConfig`].

    A value that appears in two places must be equal in both. No value that a draft needs is guessed, and unknown keys
    are kept.

    Args:
        raw (`Mapping`): The unchanged values of the file.
        given (`Mapping`, *optional*): Fields of the configuration that override the file.
        target_facts (`Callable`, *optional*): Returns `vocab_size` and `target_num_hidden_layers` of the target. It is
            called only if the file lacks one of them.

    Returns:
        `dict`: keyword arguments of [`DFlashConfig`].

    Raises:
        ValueError: The file does not describe a DFlash draft, a value differs between two places, or a value is
            missing. The message names the value.
    """
    given = given or {}
    layout = layout_of(raw)
    readers = {"native": _from_flat, "serving": _from_serving, "speculators": _from_speculators, "muse": _from_muse}
    values = readers[layout](raw)
    if layout != "native" and "mask_token_id" not in given:
        _check_mask_token(values)
    rope = {"rope_theta", "rope_parameters"}
    if rope & given.keys():
        values = {name: value for name, value in values.items() if name not in rope}
    values = {**values, **given}
    missing = {name for name in ("vocab_size", "target_num_hidden_layers") if values.get(name) is None}
    if missing and target_facts is not None:
        values.update({name: value for name, value in target_facts().items() if name in missing})
    found = {**(values.get("rope_parameters") or {}), **{k: v for k, v in values.items() if v is not None}}
    for name in REQUIRED:
        if found.get(name) is None:
            raise ValueError(
                f"{name} is missing in the draft's config.json ({layout} layout), and it has no default. "
                f"Pass {name}= with the value that the draft was trained with."
            )
    return {name: value for name, value in values.items() if name != "rope_theta" or value is not None}


def _one_value(name: str, places: Mapping[str, Any]) -> Any:
    """Return the value that appears in one or more places of a file, or `None` if it appears nowhere."""
    present = {place: value for place, value in places.items() if value is not None}
    if not present:
        return None
    first = next(iter(present.values()))
    if (nan := next((value for value in present.values() if value != value), None)) is not None:
        return nan  # The configuration refuses it by name.
    if any(value != first for value in present.values()):
        listed = " and ".join(f"{place}={brief(value)}" for place, value in present.items())
        raise ValueError(f"{name} differs between two places of config.json: {listed}. Make them equal.")
    return first


def _flat_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_parameters` of a file without nesting and without parts that only targets use."""
    rope = _one_value("rope_parameters", {name: raw.get(name) for name in ("rope_parameters", "rope_scaling")}) or {}
    if {*LAYER_TYPES} & rope.keys():  # The values are given separately for each layer type.
        rope = _one_value("rope_parameters", {f"rope_parameters[{kind!r}]": rope[kind] for kind in rope})
        if not isinstance(rope, Mapping):
            raise ValueError(
                f"rope_parameters={brief(rope)} of a layer type in config.json must be an object. Correct the file."
            )
    foreign = sorted(
        name
        for name, value in {**raw, **rope}.items()
        if name.startswith("mrope_") or (name == "partial_rotary_factor" and value not in (None, 1, 1.0))
    )
    if foreign:
        logger.warning(
            f"{', '.join(foreign)} in the draft's config.json is dropped: it applies to the target only, because the "
            "draft rotates whole heads."
        )
    rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    rope.pop("partial_rotary_factor", None)
    theta = _one_value(
        "rope_theta", {"rope_theta": raw.get("rope_theta"), "rope_parameters['rope_theta']": rope.get("rope_theta")}
    )
    return {"rope_parameters": rope or None, "rope_theta": theta}


def _geometry(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared fields. A missing one has the default of the file's model type, as for its producer."""
    model_type = raw.get("model_type") or "qwen3"
    reference: Any = CONFIG_MAPPING["qwen3"]()
    defaults = CONFIG_MAPPING[model_type]() if model_type in CONFIG_MAPPING else reference
    values: dict[str, Any] = {name: raw.get(name) for name in SHARED_FIELDS}
    for name, value in values.items():
        if value is None and name != "vocab_size" and not name.endswith("_token_id"):
            values[name] = getattr(defaults, name, getattr(reference, name))
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def _rest(raw: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Return the keys that are kept unchanged: fields of our own configuration and unknown keys."""
    skipped = {*BOOKKEEPING, *read, "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"}
    kept = {name: value for name, value in raw.items() if name not in skipped and not name.startswith("mrope_")}
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    return kept if dtype is None else {**kept, "dtype": dtype}


def _drafting(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's depth and the keys that may be at the top level or nested."""
    nested = _nested(raw)
    values = {
        name: _one_value(name, {name: raw.get(name), f"dflash_config[{name!r}]": nested.get(name)})
        for name in NESTED_FIELDS
    }
    if values["enable_confidence_head"] is None:
        values["enable_confidence_head"] = nested.get("use_confidence_head")
    if values["sample_from_anchor"] is None:
        values["sample_from_anchor"] = _is_dspark(raw) or None
    values = {name: value for name, value in values.items() if value is not None or name in NESTED_FIELDS[:4]}
    values["target_num_hidden_layers"] = depth = _depth_of(raw, values["target_layer_ids"])
    if _is_dspark(raw) and depth is not None and depth - 1 in (values["target_layer_ids"] or []):
        values["last_layer_after_norm"] = True  # DeepSpec reads the states that transformers returns
    read = (*NESTED_FIELDS, *NESTED_LAYER_KEYS, *NESTED_BOOKKEEPING)
    kept = {name: value for name, value in nested.items() if name not in read}
    return {**values, "dflash_config": kept} if kept else values


def _depth_of(raw: Mapping[str, Any], ids: list[int] | None) -> int | None:
    """Return the target's depth. In some files `num_target_layers` holds it, in others the number of layers read."""
    depth, count = raw.get("target_num_hidden_layers"), raw.get("num_target_layers")
    if count is None or count == len(ids or []):
        return depth
    if depth is not None and depth != count:
        raise ValueError(
            f"num_target_layers={brief(count)} is neither the number of target_layer_ids={brief(ids)} nor equal to "
            f"target_num_hidden_layers={brief(depth)}, as it must be. Correct config.json."
        )
    return count


def _layers(raw: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Derive `layer_types`, `sliding_window` and `is_causal` from the keys of the reference implementation."""
    window, kinds, is_causal = raw.get("sliding_window"), raw.get("layer_types"), raw.get("is_causal")
    if kinds is None:
        first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") and window else num_layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    if is_causal is None:
        is_causal = _one_value("is_causal", {name: nested.get(name) for name in ("causal", "causal_head")})
    if nested.get("use_swa") and "sliding_attention" not in kinds:  # The layers get windows and stay bidirectional.
        kinds, is_causal = ["sliding_attention"] * num_layers, bool(is_causal)
    if "sliding_attention" in kinds:
        window = nested.get("swa_window_size", window)
        if window is None:
            raise ValueError(
                "layer_types has 'sliding_attention', which needs a window in sliding_window or in "
                "dflash_config['swa_window_size']. Add it to config.json."
            )
    return {"layer_types": list(kinds), "sliding_window": window, "is_causal": is_causal}


def _from_flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read our own layout, whose keys TorchSpec and AngelSpec also write, though not all of them."""
    bookkeeping = ("_name_or_path", "architectures", "auto_map", "transformers_version")
    own = {name: raw[name] for name in bookkeeping if name in raw}
    values = {**own, **_rest(raw, *NESTED_OBJECTS), **_flat_rope(raw), **_drafting(raw)}
    if raw.get("head_dim") is None and raw.get("hidden_size") and raw.get("num_attention_heads"):
        values["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    return values


def _from_serving(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the layout of the reference implementation."""
    geometry = _geometry(raw)
    return {
        **_rest(raw, *NESTED_OBJECTS, *NESTED_FIELDS),
        **geometry,
        **_flat_rope(raw),
        **_drafting(raw),
        **_layers(raw, _nested(raw), geometry["num_hidden_layers"]),
    }


def _from_speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the layout of speculators."""
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"transformer_layer_config={brief(inner)} must be an object in a speculators config.json, because it "
            "holds the draft's sizes. Correct the file."
        )
    geometry = _geometry(inner)
    layers = _layers(inner, {}, geometry["num_hidden_layers"])
    by_type = {kind == "sliding_attention" for kind in layers["layer_types"]}
    if by_type == {layers["is_causal"]}:  # The file states for servers what the layer types imply.
        layers["is_causal"] = None
    if layers["is_causal"] is None and True in by_type and raw.get("sliding_window_non_causal"):
        layers["is_causal"] = False
    if raw.get("is_causal") is not None:
        layers["is_causal"] = raw["is_causal"]
    # What its configuration classes take for granted where a file does not say it.
    defaults: dict[str, Any] = {}
    if raw["speculators_model_type"] == "dspark":
        defaults = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
    elif raw["speculators_model_type"] == "dflash2":
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    drafting = _drafting({**defaults, **raw})
    aux_ids = raw.get("aux_hidden_state_layer_ids")
    drafting["target_layer_ids"] = ids = _one_value(
        "target_layer_ids",
        {
            "aux_hidden_state_layer_ids - 1": None if aux_ids is None else [index - 1 for index in aux_ids],
            "target_layer_ids": drafting["target_layer_ids"],
        },
    )
    drafting["target_num_hidden_layers"] = _depth_of(raw, ids)
    verifier = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    read = (
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
        "sliding_window_non_causal",
        *NESTED_OBJECTS,
        *NESTED_FIELDS,
    )
    return {
        **_rest(inner),
        **_rest(raw, *read),
        **geometry,
        **_flat_rope(inner),
        **drafting,
        **layers,
        "target_name_or_path": _one_value(
            "the name of the target",
            {
                "target_name_or_path": raw.get("target_name_or_path"),
                "speculators_config.verifier.name_or_path": verifier,
            },
        ),
    }


def _from_muse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the layout of transformers' own assistant class."""
    geometry = _geometry(raw)
    kinds = raw.get("layer_types") or ["sliding_attention"] * geometry["num_hidden_layers"]
    is_sliding = "sliding_attention" in kinds
    return {
        **_rest(raw, *NESTED_OBJECTS),
        **geometry,
        **_flat_rope(raw),
        **_drafting(raw),
        "layer_types": list(kinds),
        # In transformers 5.24 its windows reach one token further than ours, and forward as well as backward.
        "sliding_window": (raw.get("sliding_window") or muse_window()) + 1 if is_sliding else None,
        "is_causal": False if is_sliding else raw.get("is_causal"),
    }


def muse_window() -> int:
    """Return the default window of transformers' own assistant class in tokens."""
    return CONFIG_MAPPING["muse_glimmer_assistant"]().sliding_window


def _check_mask_token(values: Mapping[str, Any]) -> None:
    """Refuse a mask token that occurs in text."""
    mask = values.get("mask_token_id")
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        token_ids = values.get(name)
        if mask is not None and mask in (token_ids if isinstance(token_ids, list) else [token_ids]):
            raise ValueError(
                f"mask_token_id={brief(mask)} in the draft's config.json is also its {name}, but a mask token must "
                "not occur in text. Pass mask_token_id= to use it nevertheless, or correct the file."
            )


def native_tensor_name(name: str) -> str:
    """
    Translate a tensor name of any producer into that of our network.

    Example:

    ```python
    >>> native_tensor_name("encoder.output_norm_enc.weight"), native_tensor_name("layers.0.mlp.up_proj.weight")
    ('hidden_norm.weight', 'layers.0.mlp.up_proj.weight')

    ```
    """
    if name in MASK_VECTORS:
        return "mask_embedding"
    module, _, leaf = name.rpartition(".")
    return f"{MODULE_NAMES[module]}.{leaf}" if module in MODULE_NAMES else name
