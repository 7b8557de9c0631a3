from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    Gemma3Config,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from dflash_hf import DFlashConfig, DFlashDraftModel
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
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True"),
        ({"initializer_range": float("inf")}, "initializer_range=inf must be a number above 0 and at most 10"),
        ({"attention_dropout": 2.0}, "attention_dropout=2.0 must be a number at least 0 and below 1"),
        ({"input_embedding_scale": -3}, "input_embedding_scale=-3 must be"),
        ({"hidden_act": "nope"}, "hidden_act='nope' is no activation of transformers"),
        ({"block_size": 10**9}, "block_size=1000000000 must be at most 1024"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id=.1, '2'. must be"),
        ({"rope_theta": 10**400}, "rope_theta=1000.* must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be positive"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters has no 'factor', which rope_type='yarn' needs"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'factor'.=0 must be from 1e-06"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "'rope_type'.=.'yarn'. must be one of"),
        ({"rope_parameters": {"rope_type": "linear", "factor": [8.0]}}, r"'factor'.=\[8.0\] must be a number"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": [1.0],
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            r"'low_freq_factor'.=\[1.0\] must be a number",
        ),
        ({"rope_scaling": 3}, "rope_scaling=3 must be dict"),
        ({"target_layer_ids": list(range(10**5))}, "shortened.*from 0 to 35"),
        ({"num_attention_heads": 2**20, "head_dim": 2**20}, "num_attention_heads=1048576 times head_dim"),
        ({"target_num_hidden_layers": 10**6}, "target_num_hidden_layers=1000000 must be at most 1024"),
        ({"dtype": "nope"}, "dtype='nope' must be a dtype of torch"),
        ({"architectures": [3]}, "architectures=.3. must be a list of str"),
        ({"to_dict": 3}, "'to_dict' is a value of the configuration"),
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
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as error:
        DFlashConfig(**values)
    assert len(str(error.value)) < 400


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


def hetero(kind: str, **values: object) -> PreTrainedConfig:
    """A target of eight layers in which a size is one number, a list over the layers or a value of each layer type."""
    types = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
    common = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 8, "layer_types": types, **values}
    by_layer = {"full_attention": {}, "sliding_attention": {}}
    sizes = {"num_attention_heads": (8, 4), "num_key_value_heads": (2, 4), "head_dim": (16, 8)}
    for name, (full, sliding) in sizes.items():
        by_layer["full_attention"][name], by_layer["sliding_attention"][name] = full, sliding
        if kind == "list":
            common[name] = [by_layer[of_type][name] for of_type in types]
        elif kind == "by type":
            common[name] = {of_type: by_layer[of_type][name] for of_type in by_layer}
        else:
            common[name] = sliding
    if kind == "by layer":
        common["per_layer_config"] = {index: by_layer[of_type] for index, of_type in enumerate(types)}
    theta = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    config = PreTrainedConfig(**common)
    config.rope_parameters = theta
    return config


@pytest.mark.parametrize("kind", ["list", "by type", "by layer"])
def test_a_size_that_differs_by_layer_is_that_of_the_layers_that_the_draft_resembles(kind):
    config = DFlashConfig.from_target(hetero(kind), mask_token_id=96)
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rope_theta)
    assert sizes == (8, 2, 16, 5e5)
    sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64}
    config = DFlashConfig.from_target(hetero(kind), mask_token_id=96, **sliding)
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rope_theta)
    assert sizes == (4, 4, 8, 2e4)
    config = DFlashConfig.from_target(hetero(kind), mask_token_id=96, head_dim=64, num_key_value_heads=1)
    assert (config.head_dim, config.num_key_value_heads) == (64, 1)


def test_default_gemma_4_gets_a_head_size_of_its_full_layers_or_the_one_that_is_asked_for():
    target = Gemma4TextConfig()
    config = DFlashConfig.from_target(target, mask_token_id=3)
    assert (config.head_dim, config.num_attention_heads, config.rope_theta) == (512, 8, 1_000_000)
    assert DFlashConfig.from_target(target, mask_token_id=3, head_dim=128).head_dim == 128


@pytest.mark.parametrize("value", [[4, 2, 1], {"other": 3}, "four", -4, 2.5, [None, "x"]])
def test_a_size_from_which_no_value_can_be_chosen_is_asked_for(value):
    target = hetero("list", num_key_value_heads=2)
    target.num_key_value_heads = value
    with pytest.raises(ValueError, match=r"has num_key_value_heads=.*Pass num_key_value_heads="):
        DFlashConfig.from_target(target, mask_token_id=96)
    assert DFlashConfig.from_target(target, mask_token_id=96, num_key_value_heads=4).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({"num_experts_per_tok": 8, "moe_intermediate_size": 8}, 64),
        ({"num_experts_per_tok": 2, "intermediate_size": 24}, 48),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 12, "n_shared_experts": 2}, 72),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 30}, 78),
        ({"num_experts_per_tok": 4, "moe_intermediate_size": 8, "intermediate_size": 200}, 200),
        ({"moe_topk": [1, 2, 3, 4, 1, 1, 1, 1], "intermediate_size": 16}, 64),
        ({"intermediate_size": [40, 48, 64, 40, 40, 40, 40, 40]}, 64),
        ({"intermediate_size": 48, "num_experts_per_tok": 64, "is_moe": False}, 48),
        ({"intermediate_size": None}, 96),
    ],
)
def test_the_mlp_of_a_draft_is_as_wide_as_the_experts_that_a_token_activates(values, width):
    target = PreTrainedConfig(**{"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, **values})
    target.num_hidden_layers = 8
    config = DFlashConfig.from_target(target, mask_token_id=96)
    assert config.intermediate_size == width


def test_an_mlp_narrower_than_the_hidden_states_is_widened_with_a_line_that_says_what_to_pass(caplog):
    logger = logging.get_logger("dflash_hf.model.configuration_dflash")
    logger.addHandler(caplog.handler)
    target = LlamaConfig(hidden_size=32, intermediate_size=8, num_attention_heads=4, vocab_size=97)
    try:
        assert DFlashConfig.from_target(target, mask_token_id=96, intermediate_size=8).intermediate_size == 8
        assert "intermediate_size=" not in caplog.text
        assert DFlashConfig.from_target(target, mask_token_id=96).intermediate_size == 32
    finally:
        logger.removeHandler(caplog.handler)
    assert "is 8 wide, less than its hidden_size=32" in caplog.text
    assert "Pass intermediate_size=" in caplog.text


@pytest.mark.parametrize("name", ["gemma3n_text", "deepseek_v4", "qwen4_exp_text", "reformer"])
def test_a_target_of_several_residual_streams_is_refused_by_name(name):
    streams = "(altup_num_inputs=4|hc_mult=4|hc_count=4|the two of its reversible layers)"
    with pytest.raises(ValueError, match=rf"several residual streams \({streams}\)"):
        DFlashConfig.from_target(CONFIG_MAPPING[name](), mask_token_id=3)


# Families whose configuration does not tell what a draft needs. Everything else that is no encoder-decoder must work.
UNSUITED = {
    "blt": "has no `hidden_size`",
    "pi0": "has no `hidden_size`",
    **dict.fromkeys(["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"], "Pass num_attention_heads="),
    **dict.fromkeys(["deepseek_v4", "gemma3n", "gemma3n_text", "glm5_next", "reformer"], "several residual streams"),
    **dict.fromkeys(["hy_v4", "hy_v4_vl", "qwen4_exp", "qwen4_exp_text"], "several residual streams"),
}
FAMILIES = sorted(
    {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
)
NO_DEFAULTS = {"gemma4_assistant"}  # transformers 5.24 cannot make its default configuration.


@pytest.mark.families
@pytest.mark.parametrize("name", [family for family in FAMILIES if family not in NO_DEFAULTS])
def test_every_family_gets_a_draft_that_fits_it_or_one_clear_line(name):
    target = CONFIG_MAPPING[name]()
    expected = "encoder-decoder" if getattr(target, "is_encoder_decoder", False) else UNSUITED.get(name)
    if expected is not None:
        with pytest.raises(ValueError, match=expected) as error:
            DFlashConfig.from_target(target, mask_token_id=3)
        assert len(str(error.value)) < 400
        return
    config = DFlashConfig.from_target(target, mask_token_id=3)
    text = target.get_text_config(decoder=True)
    assert config.hidden_size == text.hidden_size
    assert config.intermediate_size >= config.hidden_size
    assert config.head_dim >= 8
    assert config.num_attention_heads * config.head_dim >= config.hidden_size // 4
    assert max(config.target_layer_ids) < text.num_hidden_layers - 1


@pytest.mark.parametrize("source", ["tokenizer", "unk", "config", "generation", "generation list", "image", "saved"])
def test_a_row_without_a_token_that_is_a_pad_or_an_end_is_not_the_mask_token(source, tokenizer, tmp_path):
    """97 words and 128 rows: `pad_token_id=97` is the first row that no token of the tokenizer uses."""
    first = len(tokenizer)
    overrides = {"config": {"pad_token_id": first}, "image": {"image_token_id": first}}.get(source, {})
    target = make_target(vocab_size=272, **overrides)
    if source == "tokenizer":
        tokenizer.pad_token = None
        type(tokenizer).pad_token_id = property(lambda self: first)
    if source == "unk":
        type(tokenizer).unk_token_id = property(lambda self: first)
    if source.startswith("generation") or source == "saved":
        target.generation_config.eos_token_id = first if source == "generation" else [first, first + 1]
    next_row = first + 2 if source in ("generation list", "saved") else first + 1
    chosen: object = target
    if source == "saved":
        target.save_pretrained(tmp_path)
        chosen = str(tmp_path)
    try:
        config = DFlashConfig.from_target(chosen, tokenizer=tokenizer)
    finally:
        for name in ("pad_token_id", "unk_token_id"):
            if name in vars(type(tokenizer)):
                delattr(type(tokenizer), name)
    assert config.mask_token_id == next_row


@pytest.mark.parametrize("is_written", [False, True])
def test_an_unknown_token_that_no_text_contains_may_be_the_mask_token(is_written):
    """SmolLM2 uses all rows, and its first special token is an unknown token that byte-level merges never write."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if is_written:
        backend = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    else:
        backend = Tokenizer(models.BPE({"<unk>": 0, **{symbol: 1 + i for i, symbol in enumerate(alphabet)}}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<unk>", "<end>", "<repo>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    chosen, _ = choose_mask_token_id(tokenizer, len(tokenizer))
    assert tokenizer.convert_ids_to_tokens(chosen) == ("<repo>" if is_written else "<unk>")
    assert choose_mask_token_id(tokenizer, len(tokenizer), {0})[0] == tokenizer.convert_tokens_to_ids("<repo>")


def test_a_special_token_without_an_embedding_row_is_not_the_mask_token(tokenizer):
    rows = tokenizer.convert_tokens_to_ids("<|user|>")
    with pytest.raises(ValueError, match="Pass mask_token_id="):
        choose_mask_token_id(tokenizer, rows)


def test_negative_token_ids_of_a_target_mean_none():
    config = DFlashConfig.from_target(LlamaConfig(pad_token_id=-1), mask_token_id=5)
    assert config.pad_token_id is None


SEED = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "target_hidden_size": 32,
    "target_num_hidden_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 96,
    "vocab_size": 97,
}


def written(folder: Path, values: object, name: str = "draft.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder / name


READERS = {
    "from_json_file": lambda folder: DFlashConfig.from_json_file(written(folder, SEED)),
    "from_pretrained of a file": lambda folder: DFlashConfig.from_pretrained(written(folder, SEED)),
    "from_pretrained of a folder": lambda folder: DFlashConfig.from_pretrained(
        written(folder, SEED, "config.json").parent
    ),
    "from_dict": lambda folder: DFlashConfig.from_dict(SEED),
    "from_target of a file": lambda folder: DFlashConfig.from_target(make_target(), config=written(folder, SEED)),
    "from_target of a path as text": lambda folder: DFlashConfig.from_target(
        make_target(), config=str(written(folder, SEED))
    ),
    "from_target of a folder": lambda folder: DFlashConfig.from_target(
        make_target(), config=written(folder, SEED, "config.json").parent
    ),
    "from_target of a dictionary": lambda folder: DFlashConfig.from_target(make_target(), config=SEED),
    "a draft": lambda folder: DFlashDraftModel.from_target(make_target(), config=written(folder, SEED)).config,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_fields_without_block_size_or_model_type_makes_a_new_draft_with_blocks_of_sixteen(reader, tmp_path):
    config = READERS[reader](tmp_path)
    assert isinstance(config, DFlashConfig)
    assert {name: getattr(config, name) for name in SEED} == SEED
    assert config.block_size == 16
    if "from_target" in reader or reader == "a draft":  # what the file does not set is the target's
        assert (config.intermediate_size, config.num_attention_heads, config.head_dim) == (64, 4, 8)


def test_arguments_take_precedence_over_a_file_of_fields(tmp_path):
    file = written(tmp_path, {**SEED, "rope_theta": 5e5, "block_size": 8})
    config = DFlashConfig.from_target(make_target(), config=file, num_hidden_layers=2, target_layer_ids=[1])
    assert (config.num_hidden_layers, config.target_layer_ids, config.num_target_layers) == (2, [1], 1)
    assert (config.rope_theta, config.block_size) == (5e5, 8)
    config = DFlashConfig.from_target(make_target(), config=file, num_target_layers=1, block_size=4)
    assert (config.target_layer_ids, config.block_size) == ([2], 4)
    config = DFlashConfig.from_target(make_target(), config=file, rope_parameters={"rope_theta": 7e4})
    assert config.rope_theta == 7e4
    assert DFlashConfig.from_pretrained(file, block_size=4).block_size == 4


def test_the_configuration_of_a_saved_draft_makes_a_new_draft_of_its_shape(draft, target, tmp_path):
    draft.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json", draft.config, draft.config.to_dict()):
        config = DFlashConfig.from_target(target, config=source)
        assert (config.num_hidden_layers, config.block_size, config.mask_token_id) == (2, 4, 96)


def test_a_new_draft_does_not_bear_the_name_of_the_target_of_the_draft_whose_shape_it_has(draft, tmp_path):
    """Two targets of one size have drafts of one shape, but each draft is tied to its own target by name."""
    draft.config.target_name_or_path, draft.config.target_revision = "org/other", "v1"
    draft.config.target_tensor_checksums = {"lm_head.weight": "float32 97x32 " + "0" * 64}
    draft.save_pretrained(tmp_path)
    target = make_target()
    target.config.name_or_path = "org/this"
    for source in (tmp_path, tmp_path / "config.json", draft.config, draft.config.to_dict()):
        config = DFlashConfig.from_target(target, config=source)
        assert (config.target_name_or_path, config.target_revision) == ("org/this", None)
        assert config.target_tensor_checksums is None
    named = DFlashConfig.from_target(target, config={**SEED, "target_name_or_path": "org/that"})
    assert named.target_name_or_path == "org/that"


@pytest.mark.parametrize("count", [0, -1, "2", True, 2.0])
def test_a_number_of_target_layers_that_is_none_is_refused_and_not_replaced_by_five(count):
    for arguments in ({"num_target_layers": count}, {"config": {"num_target_layers": count}}):
        with pytest.raises(ValueError, match=f"num_target_layers={count!r} must be int and at least 1"):
            DFlashConfig.from_target(make_target(), mask_token_id=96, **arguments)


@pytest.mark.parametrize("target", [None, 5, Path("folder"), {"hidden_size": 32}])
def test_what_is_no_target_is_refused_by_name(target):
    with pytest.raises(TypeError, match=r"target=.* must be a Hub name, a folder as a str"):
        DFlashConfig.from_target(target, mask_token_id=96)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, "hidden_size=64 contradicts the target LlamaForCausalLM, where it is 32"),
        ({"target_hidden_size": 64}, "target_hidden_size=64 contradicts"),
        ({"vocab_size": 98}, "vocab_size=98 contradicts"),
        ({"target_num_hidden_layers": 36}, "target_num_hidden_layers=36 contradicts"),
        ({"num_target_layers": 3}, "num_target_layers=3 must equal the number of target_layer_ids"),
        ({"target_layer_ids": [0, 3]}, "contains the last layer"),
        ({"target_layer_ids": [0, 9]}, "from 0 to 3"),
        ({"mask_token_id": 97}, "mask_token_id=97 must be below vocab_size=97"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be int"),
        ({"blok_size": 8}, "'blok_size' is no field of a draft's configuration"),
        ({"block_size": float("nan")}, "block_size=nan must be int"),
    ],
)
def test_a_wrong_or_contradicting_field_of_a_file_is_one_line(change, words, tmp_path):
    with pytest.raises(ValueError, match=words) as error:
        DFlashDraftModel.from_target(make_target(), config=written(tmp_path, {**SEED, **change}))
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ("missing.json", FileNotFoundError, r"missing\.json' cannot be read"),
        (3, TypeError, "config=3 must be a file"),
        ([1], TypeError, r"config=\[1\] must be a file"),
        ({"model_type": "llama"}, ValueError, "no DFlash draft"),
    ],
)
def test_what_is_no_file_of_fields_is_refused(config, kind, words):
    with pytest.raises(kind, match=words):
        DFlashConfig.from_target(make_target(), config=config)


@pytest.mark.parametrize("text", ["[1]", "{", "3", "[" * 10**5])
def test_a_file_that_holds_no_object_is_one_line(text, tmp_path):
    (tmp_path / "draft.json").write_text(text)
    for read in (DFlashConfig.from_json_file, DFlashConfig.read_fields):
        with pytest.raises(ValueError, match=r"draft\.json'.*Correct the file") as error:
            read(tmp_path / "draft.json")
        assert len(str(error.value).replace(str(tmp_path), "")) < 400


def test_weights_beside_a_file_of_fields_are_not_read_with_guessed_values(draft, tmp_path):
    """A new draft may have the default block size. That of a trained draft must be told."""
    draft.save_pretrained(tmp_path)
    written(tmp_path, {**SEED, "num_hidden_layers": 2, "rope_theta": 1e4}, "config.json")
    with pytest.raises(ValueError, match=r"block_size is missing.*Pass block_size="):
        DFlashDraftModel.from_pretrained(tmp_path)
