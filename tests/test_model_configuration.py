from __future__ import annotations

import json

import pytest
from conftest import make_target
from transformers import AutoConfig, Gemma3Config, LlamaConfig, Qwen3Config, T5Config
from transformers.utils import logging

from dflash_hf import DFlashConfig
from dflash_hf.model.configuration_dflash import choose_mask_token_id, default_target_layer_ids


def test_defaults_are_the_reference_draft():
    config = DFlashConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 5, 151936)
    assert (config.num_target_layers, config.target_num_hidden_layers, config.target_hidden_size) == (5, 36, 4096)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert (config.mask_token_id, config.block_size, config.rope_theta) == (151669, 16, 1_000_000)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.layer_types == ["full_attention"] * 5


@pytest.mark.parametrize(
    ("depth", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
        (24, 5, [1, 6, 11, 16, 21]),
        (36, 1, [18]),
        (4, 3, [0, 1, 2]),
        (2, 1, [0]),
        (8, 7, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_default_layers(depth, count, ids):
    assert default_target_layer_ids(depth, count) == ids


def test_default_layers_are_distinct_and_never_the_last():
    for depth in range(2, 40):
        for count in range(1, depth):
            ids = default_target_layer_ids(depth, count)
            assert len(set(ids)) == count
            assert ids == sorted(ids)
            assert ids[0] >= 0
            assert ids[-1] < depth - 1
    with pytest.raises(ValueError, match="num_target_layers=4"):
        default_target_layer_ids(4, 4)


def test_round_trip_through_json_keeps_every_value(tmp_path):
    config = DFlashConfig(
        rope_theta=5e5,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=64,
        is_causal=False,
        chat_template_kwargs={"enable_thinking": False},
        target_name_or_path="org/name",
        target_revision="abc",
        eos_token_id=[1, 2],
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, DFlashConfig)
    ours, theirs = config.to_dict(), loaded.to_dict()
    assert {**ours, "_name_or_path": str(tmp_path)} == theirs
    assert loaded.rope_theta == 5e5
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dflash"


def test_both_spellings_of_rope_are_one_value():
    """A base read from the wrong place would be the default one, and the text would collapse after a few tokens."""
    assert DFlashConfig(rope_theta=5e5).rope_theta == 5e5
    assert DFlashConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
    assert DFlashConfig(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}).rope_theta == 5e5
    with pytest.raises(ValueError, match=r"rope_theta=10000\.0 and rope_parameters"):
        DFlashConfig(rope_theta=1e4, rope_parameters={"rope_theta": 1e6})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"block_size": "16"}, "block_size='16'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"mask_token_id": 151936}, "mask_token_id=151936 must be below vocab_size=151936"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"num_key_value_heads": 5}, "num_attention_heads=32 must be a multiple"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"target_layer_ids": [1, 36]}, "from 0 to 35"),
        ({"target_layer_ids": [1, 1]}, "must be distinct"),
        ({"target_layer_ids": []}, "must be a list of integers"),
        ({"target_layer_ids": "1"}, "target_layer_ids='1'"),
        ({"target_layer_ids": [1, 35]}, "after the final norm"),
        ({"target_layer_ids": [1, 2], "num_target_layers": 3}, "num_target_layers=3 must equal"),
        ({"target_hidden_size": 2048}, "must equal hidden_size=4096"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers=5"),
        ({"layer_types": ["linear_attention"] * 5}, "must hold one of"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_window=None"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 15}, "at least block_size=16"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' must be one of"),
        ({"rope_theta": -1.0}, "must be positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"is_causal": 1}, "is_causal=1"),
    ],
)
def test_invalid_values_raise_value_error_with_field_value_and_rule(values, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        DFlashConfig(**values)


def test_from_target_derives_everything_and_says_what_it_chose(caplog, tokenizer):
    logger = logging.get_logger("dflash_hf.model.configuration_dflash")
    logger.propagate = True
    target = make_target(
        vocab_size=272, num_hidden_layers=9, rope_parameters={"rope_type": "default", "rope_theta": 7e4}
    )
    config = DFlashConfig.from_target(
        target, tokenizer=tokenizer, num_hidden_layers=3, num_target_layers=4, block_size=8
    )
    assert (config.hidden_size, config.vocab_size, config.head_dim, config.intermediate_size) == (32, 272, 8, 64)
    assert (config.num_hidden_layers, config.block_size, config.rope_theta) == (3, 8, 7e4)
    assert config.target_layer_ids == [1, 3, 4, 6]
    assert config.target_num_hidden_layers == 9
    assert config.mask_token_id == 261
    assert "mask token 261 (the first embedding row that no token uses)" in caplog.text


def test_from_target_reads_the_text_part_of_a_multimodal_configuration():
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    target = Gemma3Config(text_config={**text, "vocab_size": 300, "intermediate_size": 96})
    config = DFlashConfig.from_target(target, mask_token_id=299)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (64, 16, 300)
    assert config.rope_theta == 1_000_000  # of Gemma's full-attention layers, not of its sliding ones
    assert len(config.target_layer_ids) == 5


def test_from_target_follows_published_shapes():
    qwen = Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8
    )
    config = DFlashConfig.from_target(qwen, mask_token_id=151669)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (128, 9728, 151936)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]


def test_a_shallow_target_gets_fewer_taps():
    config = DFlashConfig.from_target(LlamaConfig(num_hidden_layers=3), mask_token_id=5)
    assert config.target_layer_ids == [0, 1]


def test_mask_token_order(tokenizer):
    assert choose_mask_token_id(tokenizer, 272)[0] == 261
    full = len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(choose_mask_token_id(tokenizer, full)[0]) == "<|user|>"
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert choose_mask_token_id(tokenizer, full, {user})[0] == user + 1
    with pytest.raises(ValueError, match="Pass mask_token_id="):
        choose_mask_token_id(tokenizer, full, set(range(full)))
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert choose_mask_token_id(tokenizer, 272) == (tokenizer.mask_token_id, "the tokenizer's mask token")


def test_unfit_targets_are_refused():
    with pytest.raises(ValueError, match="Pass tokenizer= or mask_token_id="):
        DFlashConfig.from_target(make_target())
    with pytest.raises(ValueError, match="encoder-decoder"):
        DFlashConfig.from_target(T5Config(), mask_token_id=3)
