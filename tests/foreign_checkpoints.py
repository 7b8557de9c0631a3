"""Small checkpoints in the formats of other producers, made from literals and without the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 97,
}
Z_LAB = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},  # a file that is not there
    "model_type": "qwen3",
    "num_target_layers": 4,
    "rope_theta": 20000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 4,
    "draft_vocab_size": 97,
    "dtype": "float32",
    "has_no_defaults_at_init": False,
    "mask_token_id": 96,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "transformer_layer_config": {
        **QWEN3,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
    },
}

# name: config.json, other names of modules, whether the target's tensors are in the file
PRODUCERS: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
    "z-lab, block size at the top": (
        {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}},
        {},
        [],
    ),
    "z-lab, all nested": (
        {
            **{name: value for name, value in Z_LAB.items() if name not in ("rope_theta", "torch_dtype")},
            "dtype": "float32",
            "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
            "dflash_config": {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2]},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "use_sliding_window": True,
        },
        {},
        [],
    ),
    "SpecForge, with its old head": (
        {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}},
        {},
        ["logit_head"],
    ),
    "NeMo Automodel": (
        {
            **Z_LAB,
            "architectures": ["Qwen3DFlashDraftModel"],
            "block_size": 4,
            "dflash_config": {"causal": False, "mask_token_id": 96, "target_layer_ids": [0, 2]},
            "layer_types": ["sliding_attention", "sliding_attention"],
            "sliding_window": 6,
        },
        {},
        [],
    ),
    "TorchSpec": (
        {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 32,
            "intermediate_size": 64,
            "mask_token_id": 96,
            "max_position_embeddings": 512,
            "model_type": "dflash",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_target_layers": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 20000.0,
            "target_hidden_size": 32,
            "target_layer_ids": [0, 2],
            "target_num_hidden_layers": 4,
            "torch_dtype": "float32",
            "vocab_size": 97,
        },
        {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"},
        ["embed_tokens"],
    ),
    "speculators": (SPECULATORS, {}, []),
    "speculators, older": (SPECULATORS, {}, ["embed_tokens", "lm_head"]),
    "muse": (
        {
            "architectures": ["MuseGlimmerAssistantModel"],
            "attention_dropout": 0.0,
            "block_size": 4,
            "bos_token_id": 1,
            "dtype": "float32",
            "eos_token_id": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "mask_token_id": 96,
            "max_position_embeddings": 512,
            "model_type": "muse_glimmer_assistant",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
            "sliding_window": 5,
            "target_layer_ids": [0, 2],
            "transformers_version": "5.24.0",
        },
        {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"},
        [],
    ),
}
# what a file does not say and the caller must
ARGUMENTS = {"TorchSpec": {"block_size": 4}, "muse": {"vocab_size": 97}}
# window and causality of the two layers, by the producer's own rule
LAYERS = {
    "z-lab, all nested": ([6, None], [True, False]),
    "NeMo Automodel": ([6, 6], [False, False]),
    "muse": ([6, None], [False, False]),
}


def network(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make random tensors of a two-layer draft under the names of the reference implementation."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc": (32, 64), "hidden_norm": (32,), "norm": (32,)}
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.input_layernorm": (32,),
            f"layers.{layer}.post_attention_layernorm": (32,),
            f"layers.{layer}.self_attn.q_proj": (32, 32),
            f"layers.{layer}.self_attn.k_proj": (16, 32),
            f"layers.{layer}.self_attn.v_proj": (16, 32),
            f"layers.{layer}.self_attn.o_proj": (32, 32),
            f"layers.{layer}.self_attn.q_norm": (8,),
            f"layers.{layer}.self_attn.k_norm": (8,),
            f"layers.{layer}.mlp.gate_proj": (64, 32),
            f"layers.{layer}.mlp.up_proj": (64, 32),
            f"layers.{layer}.mlp.down_proj": (32, 64),
        }
    return {
        f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder: Path, config: Any, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def write_producer(folder: Path, producer: str, target: Any = None, **changes: Any) -> Path:
    """Write a checkpoint of `producer` with the tensors of `network()` and the embedding and head of `target`."""
    config, renamed, target_tensors = PRODUCERS[producer]
    tensors = {}
    for name, value in network().items():
        module = name.removesuffix(".weight")
        tensors[f"{renamed.get(module, module)}.weight"] = value
    for module in target_tensors:
        source = target.get_input_embeddings() if module == "embed_tokens" else target.get_output_embeddings()
        tensors[f"{module}.weight"] = source.weight.detach().clone()
    return write_checkpoint(folder, {**config, **changes}, tensors)


def dflash2_parts(seed: int = 1) -> dict[str, torch.Tensor]:
    """Make random tensors of the convolutions and the selector, as the reference implementation names them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "candidate_selector.predecessor_codebook": (97, 3),
        "candidate_selector.successor_codebook": (97, 3),
        "candidate_selector.hidden_projection.weight": (3, 32),
    }
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{part}.base_kernel"] = (2, 2, 32)
            shapes[f"layers.{layer}.{part}.kernel_projection.weight"] = (16, 32)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def dspark_parts(
    kind: str = "vanilla", *, with_confidence: bool = True, draft_vocab_size: int = 97, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Make random tensors of a Markov head of rank 3 and a confidence head that reads it."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (97, 3),
        "markov_head.markov_w2.weight": (draft_vocab_size, 3),
    }
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (3, 35), "markov_head.gate_proj.bias": (3,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (9, 38), "markov_head.joint_proj.bias": (9,)}
    if with_confidence:
        shapes |= {"confidence_head.proj.weight": (1, 35), "confidence_head.proj.bias": (1,)}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


KEPT_TOKENS = [token for token in range(97) if token % 3 != 1]  # 65 of 97 tokens
DFLASH2_KEYS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
DFLASH2_FIELDS = {**DFLASH2_KEYS, "selector_factored": False}
DSPARK_KEYS = {
    "markov_rank": 3,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK_FIELDS = {**DSPARK_KEYS, "sample_from_anchor": True}
DRAFTING = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2]}

# name: config.json, tensors beside those of `network()`, tensors of the target in the file, the fields they mean
KINDS: dict[str, tuple[dict[str, Any], Any, list[str], dict[str, Any]]] = {
    "z-lab DFlash 2": (
        {
            **Z_LAB,
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "dflash_config": {**DRAFTING, **DFLASH2_KEYS, "output_multiplier": 0.5, "final_logit_softcapping": 20.0},
        },
        dflash2_parts,
        [],
        {**DFLASH2_FIELDS, "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "is_causal": False},
    ),
    "SpecForge DFlash 2": (
        {
            **Z_LAB,
            "architectures": ["DFlash2DraftModel"],
            "block_size": 4,
            "dflash_config": {**DRAFTING, **DFLASH2_KEYS, "projector_type": "dflash2"},
        },
        dflash2_parts,
        [],
        DFLASH2_FIELDS,
    ),
    "speculators dflash2": (
        {
            **SPECULATORS,
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": "dflash2",
            "sliding_window_non_causal": True,
            **DFLASH2_KEYS,
        },
        dflash2_parts,
        [],
        DFLASH2_FIELDS,
    ),
    "DeepSpec": (
        {
            **{name: value for name, value in Z_LAB.items() if name != "auto_map"},
            "architectures": ["Qwen3DSparkModel"],
            **DRAFTING,
            **DSPARK_KEYS,
            "layer_types": ["full_attention", "full_attention"],
            "num_anchors": 512,
        },
        dspark_parts,
        ["embed_tokens", "lm_head"],
        DSPARK_FIELDS,
    ),
    "DeepSpec's DFlash": (
        {
            **Z_LAB, "architectures": ["Qwen3DSparkModel"], **DRAFTING, "markov_rank": 0,
            "enable_confidence_head": False,
        },
        dict,
        ["embed_tokens", "lm_head"],
        {"sample_from_anchor": True, "markov_rank": None},
    ),
    "DeepSpec, the embedding and the last layer": (
        {
            **Z_LAB, "architectures": ["Qwen3DSparkModel"], **DRAFTING, "target_layer_ids": [-1, 3], "markov_rank": 0,
        },
        dict,
        [],
        {"sample_from_anchor": True, "target_layer_ids": [-1, 3], "last_layer_after_norm": True},
    ),
    "SpecForge DSpark": (
        {
            **Z_LAB,
            "architectures": ["DSparkDraftModel"],
            "block_size": 4,
            "dflash_config": {
                **{name: value for name, value in DRAFTING.items() if name != "block_size"},
                **DSPARK_KEYS,
                "markov_head_type": "gated",
                "projector_type": "dspark",
                "attention_mode": "full",
                "confidence_head_alpha": 1.0,
            },
        },
        lambda: dspark_parts("gated"),
        [],
        {**DSPARK_FIELDS, "markov_head_type": "gated"},
    ),
    "ModelOpt DSpark": (
        {
            **Z_LAB,
            "block_size": 4,
            "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]},
            "dflash_architecture_config": {
                "projector_type": "dspark",
                "markov_rank": 3,
                "use_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        },
        dspark_parts,
        [],
        DSPARK_FIELDS,
    ),
    "speculators dspark": (
        {
            **{name: value for name, value in SPECULATORS.items() if name != "sample_from_anchor"},
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "markov_rank": 3,
            "markov_head_type": "rnn",
        },
        lambda: dspark_parts("rnn"),
        [],
        {**DSPARK_FIELDS, "markov_head_type": "rnn"},
    ),
    "speculators dspark on DFlash slots": (
        {
            **SPECULATORS,
            "speculators_model_type": "dspark",
            "markov_rank": 3,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        },
        lambda: dspark_parts(with_confidence=False),
        [],
        {"sample_from_anchor": False, "markov_rank": 3, "enable_confidence_head": False},
    ),
    "speculators, slots that start at the anchor": (
        {**SPECULATORS, "sample_from_anchor": True},
        dict,
        [],
        {"sample_from_anchor": True},
    ),
    "speculators, reduced vocabulary": (
        {**SPECULATORS, "draft_vocab_size": 65},
        lambda: reduced_vocabulary(),
        ["reduced lm_head"],
        {"draft_vocab_size": 65},
    ),
    "speculators dspark, reduced vocabulary": (
        {**SPECULATORS, "speculators_model_type": "dspark", "draft_vocab_size": 65, **DSPARK_KEYS,
         "sample_from_anchor": True},
        lambda: {**reduced_vocabulary(), **dspark_parts(draft_vocab_size=65)},
        ["reduced lm_head"],
        {**DSPARK_FIELDS, "draft_vocab_size": 65},
    ),
    "TorchSpec DFlash 2": (
        {
            **PRODUCERS["TorchSpec"][0],
            "architectures": ["DFlash2DraftModel"],
            "block_size": 4,
            **DFLASH2_KEYS,
        },
        dflash2_parts,
        [],
        DFLASH2_FIELDS,
    ),
    "JetSpec": (
        {**Z_LAB, "dflash_config": {**DRAFTING, "causal_head": True}},
        dict,
        [],
        {"is_causal": True},
    ),
    "MiMo, sinks": (
        {**Z_LAB, "dflash_config": DRAFTING},
        lambda: {
            f"layers.{layer}.self_attn.attention_sink_bias": torch.tensor([0.5, -1.0, 2.0, 0.1 + layer])
            for layer in range(2)
        },
        [],
        {"attention_sinks": True},
    ),
    "a mask vector among the tensors": (
        {**Z_LAB, "dflash_config": DRAFTING},
        lambda: {"mask_hidden": torch.arange(32.0)[None] / 32},
        [],
        {"learned_mask_embedding": True},
    ),
}  # fmt: skip


def reduced_vocabulary() -> dict[str, torch.Tensor]:
    """Make the two tables of a reduced vocabulary, as speculators writes them."""
    kept = torch.tensor(KEPT_TOKENS)
    return {"d2t": kept - torch.arange(65), "t2d": torch.zeros(97, dtype=torch.bool).index_fill(0, kept, True)}


def write_kind(folder: Path, kind: str, target: Any) -> Path:
    """Write a checkpoint of a kind with the tensors of `network()`, its own and those of the target."""
    config, parts, target_tensors, _ = KINDS[kind]
    tensors = {**network(), **parts()}
    for module in target_tensors:
        source = target.get_input_embeddings() if module == "embed_tokens" else target.get_output_embeddings()
        weight = source.weight.detach().clone()
        tensors[f"{module.split()[-1]}.weight"] = weight[KEPT_TOKENS] if module.startswith("reduced") else weight
    return write_checkpoint(folder, config, tensors)
