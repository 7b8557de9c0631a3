"""Every causal language model of transformers gives the text of plain generation, or is refused before the prefill."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from decoding_pairs import count_near_ties, make_guessing_draft, ragged_prompts
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

import dflash_hf
from dflash_hf.decoding.generate import speculative_generate

PACKAGE = Path(dflash_hf.__file__).parent

# Sizes of a tiny model under the names that the families use.
SIZES: dict[str, Any] = {
    **TINY, "head_dim": 8, "rotary_dim": 8, "is_decoder": True, "sliding_window": 16, "dropout": 0.0,
    **dict.fromkeys(("hidden_dim", "d_model", "n_embd", "n_embed", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("d_ff", "ffn_dim", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "num_experts_per_tok": 2, "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
LEFT_OUT = [(), ("head_dim",), ("sliding_window",), ("attention_types",), ("num_experts", "num_local_experts")]
# What some families need besides. The first of these with which plain generation works is tried.
MORE: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},  # latent attention
    {  # decoders of encoder-decoder families
        **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
        **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
        **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    },
    {"bos_token_id": 1, "eos_token_id": 2},
    {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "global_head_dim": 8,
        "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    },
    {"num_experts_per_tok": 1},
    {"unpadded_vocab_size": 97},
    {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},  # Mamba-2
    {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 3},  # Jamba
]  # fmt: skip
GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 14}
CONFIGS = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}


def sizes_of(config_class: type[PreTrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration class knows."""
    names = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    for parent in config_class.__mro__:
        names |= set(getattr(parent, "__annotations__", {}))
    return {name: value for name, value in sizes.items() if name in names}


def build(config_class: type[PreTrainedConfig], sizes: dict[str, Any]) -> Any:
    """Make a tiny random target of a family, and generate with it."""
    parts = {
        name: sizes_of(part, sizes)
        for name, part in config_class.sub_configs.items()
        if "text" in name and part.__name__ != "AutoConfig"
    }
    config = config_class(**(parts or sizes_of(config_class, sizes)))
    with torch.device("meta"):
        num_parameters = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > 2e7:
        raise ValueError(f"{num_parameters} parameters")
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    target.generation_config.eos_token_id = None
    target.generate(**ragged_prompts(1), **{**GREEDY, "max_new_tokens": 2})
    return target


def tiny_target(config_class: type[PreTrainedConfig]) -> Any:
    """Make a tiny random target of a family, or skip the test if no sizes make one that generates."""
    problem = None
    for more in MORE:
        for left_out in LEFT_OUT:
            sizes = {name: value for name, value in {**SIZES, **more}.items() if name not in left_out}
            try:
                return build(config_class, sizes)
            except Exception as error:
                problem = error
    pytest.skip(f"cannot be built with these sizes: {problem}")


@pytest.mark.families
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_family_gives_the_text_of_plain_generation_or_is_refused_in_one_line(family, num_sequences):
    target = tiny_target(CONFIGS[family])
    inputs = ragged_prompts(num_sequences, seed=2)
    plain = target.generate(**inputs, **GREEDY)
    for how in ({}, {"tree_size": 9}):
        try:
            draft = make_guessing_draft(target).teach(target, plain, 0.4)
            drafted = speculative_generate(target, draft, **inputs, **GREEDY, **how)
        except ValueError as error:
            message = str(error)
            assert "\n" not in message
            assert len(message) < 600
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            assert raised_in.startswith(str(PACKAGE)), f"an error of {raised_in}: {message}"
        else:
            assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
