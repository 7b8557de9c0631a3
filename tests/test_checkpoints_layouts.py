from __future__ import annotations

import json
import logging

import pytest
import reference
import torch
from conftest import make_draft, make_target
from foreign_checkpoints import (
    ARGUMENTS,
    LAYERS,
    PRODUCERS,
    SPECULATORS,
    Z_LAB,
    network,
    write_checkpoint,
    write_producer,
)
from safetensors.torch import load_file
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoConfig, AutoModel, Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_hf import DFlashConfig, DFlashDraftModel, UntiedDraftError, convert_checkpoint, save_in_layout
from dflash_hf.checkpoints import LAYOUTS
from dflash_hf.checkpoints.read_layouts import layout_of, native_values
from dflash_hf.checkpoints.write_layouts import layout_config
from dflash_hf.model.modeling_dflash import embedding_scale, rotary_angles
from dflash_hf.target.loading import load_pair

OTHER_LAYOUTS = LAYOUTS[1:]
VARIANTS = {
    "full": {},
    "full, said": {"is_causal": False},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 9},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "mixed, not causal": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "is_causal": False,
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "all facts": {
        "chat_template_kwargs": {"enable_thinking": False},
        "target_name_or_path": "org/target",
        "target_revision": "abc",
        "eos_token_id": [1, 2],
        "unknown_key": {"kept": [1, 2]},
    },
}


def values_of(config: DFlashConfig) -> dict:
    """Return the values of a configuration without those that only describe a file."""
    skipped = {"architectures", "auto_map", "transformers_version", "dtype", "_name_or_path"}
    return {name: value for name, value in config.to_dict().items() if name not in skipped}


def run_block(draft: DFlashDraftModel, inputs: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return draft(noise_embeds=inputs[None], context_hidden_states=context[None]).last_hidden_state[0]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_producers_checkpoint_loads_and_computes_what_its_producer_computes(producer, target, tmp_path):
    """Compare the configuration, every bit of the tensors, and hidden states with a loop over its values."""
    folder = write_producer(tmp_path / "draft", producer, target)
    draft = DFlashDraftModel.from_pretrained(folder, target=target, **ARGUMENTS.get(producer, {}))
    weights = network()
    assert dict(draft.state_dict()).keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in draft.state_dict().items())

    config = draft.config
    windows, causal = LAYERS.get(producer, ([None, None], [False, False]))
    assert [config.layer_window(0), config.layer_window(1)] == windows
    assert [config.in_block_causal(0), config.in_block_causal(1)] == causal
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ([0, 2], 4, 96)
    assert (config.target_num_hidden_layers, config.num_target_layers, config.vocab_size) == (4, 2, 97)
    assert (config.head_dim, config.rms_norm_eps, config.rope_theta) == (8, 1e-5, 20000.0)
    assert config.target_tensor_checksums is None

    torch.manual_seed(3)
    inputs, context = torch.randn(4, 32), torch.randn(11, 64)
    expected = reference.draft_block(
        weights,
        inputs,
        context,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eps=1e-5,
        theta=20000.0,
        windows=windows,
        causal=causal,
    )
    torch.testing.assert_close(run_block(draft, inputs, context), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_producers_draft_is_saved_as_ours_and_loads_without_arguments(producer, target, tmp_path):
    folder = write_producer(tmp_path / "draft", producer, target)
    draft = DFlashDraftModel.from_pretrained(folder, target=target, **ARGUMENTS.get(producer, {}))
    draft.save_pretrained(tmp_path / "ours")
    loaded = AutoModel.from_pretrained(tmp_path / "ours")
    assert type(loaded) is DFlashDraftModel
    assert values_of(loaded.config) == values_of(draft.config)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_there_and_back_nothing_changes(layout, variant, tmp_path):
    draft = make_draft(make_target(), **VARIANTS[variant])
    draft.save_pretrained(tmp_path / "native")
    if (layout, variant) in {("speculators", "causal"), ("muse", "causal"), ("muse", "sliding"), ("muse", "mixed")}:
        with pytest.raises(ValueError, match=r"cannot be expressed.*serving layout"):
            convert_checkpoint(tmp_path / "native", tmp_path / "there", layout)
        assert not (tmp_path / "there").exists()
        return
    convert_checkpoint(tmp_path / "native", tmp_path / "there", layout, dtype=torch.float32)
    assert layout_of(json.loads((tmp_path / "there" / "config.json").read_text())) == layout
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "native")
    back = DFlashDraftModel.from_pretrained(tmp_path / "back")
    assert values_of(back.config) == values_of(draft.config)
    assert dict(back.named_parameters()).keys() == dict(draft.named_parameters()).keys()
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in draft.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_configuration_of_ours_goes_through_a_dictionary_unchanged(variant):
    config = make_draft(make_target(), **VARIANTS[variant]).config
    config.name_or_path = "org/draft"
    assert DFlashConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_the_serving_layout_is_what_servers_read(tmp_path):
    draft = make_draft(make_target(rope_parameters={"rope_type": "default", "rope_theta": 30000.0}))
    save_in_layout(draft, tmp_path / "tiny-DFlash", "serving")
    assert sorted(path.name for path in (tmp_path / "tiny-DFlash").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "tiny-DFlash" / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 4,
        "dflash_config": {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2]},
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 30000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 30000.0},
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected
    assert "is_causal" not in config
    assert not [name for name in config if name.startswith("speculators")]
    tensors = load_file(tmp_path / "tiny-DFlash" / "model.safetensors")
    assert tensors.keys() == network().keys()
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    # the configuration class of servers and of the reference sees the same network
    parsed = Qwen3Config(**config)
    assert (parsed.rope_parameters["rope_theta"], parsed.head_dim, parsed.sliding_window) == (30000.0, 8, None)
    assert parsed.dflash_config == expected["dflash_config"]


@pytest.mark.parametrize("is_causal", [True, False])
def test_causality_is_written_where_it_is_not_the_rule_of_the_layer_types(is_causal):
    config = make_draft(make_target(), is_causal=is_causal).config
    assert layout_config(config, "serving", "bfloat16")["is_causal"] is is_causal


def test_speculators_ids_are_one_higher_and_full_layers_are_served_as_not_causal():
    config = make_draft(make_target(), target_name_or_path="org/target").config
    written = layout_config(config, "speculators", "float32")
    assert written["aux_hidden_state_layer_ids"] == [1, 3]
    assert written["sliding_window_non_causal"] is True
    assert written["transformer_layer_config"]["is_causal"] is False
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert written["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]


def test_muse_windows_are_one_shorter_and_an_unused_one_is_an_int():
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": False}
    assert layout_config(make_draft(make_target(), **mixed).config, "muse", "float32")["sliding_window"] == 8
    assert type(layout_config(make_draft(make_target()).config, "muse", "float32")["sliding_window"]) is int


CONFLICTS = {
    "layer ids": ({"target_layer_ids": [1, 2]}, r"target_layer_ids=\[1, 2\].*dflash_config\['target_layer_ids'\]"),
    "block size": ({"block_size": 8}, r"block_size=8.*dflash_config\['block_size'\]=4"),
    "mask token": ({"mask_token_id": 95}, r"mask_token_id=95.*dflash_config\['mask_token_id'\]=96"),
    "rotary base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        r"rope_theta=20000.0.*rope_parameters\['rope_theta'\]=10000.0",
    ),
    "rotary base a layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
        "rope_parameters",
    ),
    "target depth": ({"target_num_hidden_layers": 9}, "num_target_layers=4 is neither"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_places_that_disagree_are_an_error_that_names_both(name):
    change, words = CONFLICTS[name]
    nested = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2]}
    with pytest.raises(ValueError, match=words):
        DFlashConfig.from_dict({**Z_LAB, "dflash_config": nested, **change})


@pytest.mark.parametrize("name", ["target_layer_ids", "block_size", "mask_token_id", "rope_theta"])
def test_what_a_draft_needs_is_never_guessed(name):
    nested = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2]}
    raw = {**Z_LAB, "dflash_config": nested}
    value = raw.pop(name, None) or nested.pop(name)
    with pytest.raises(ValueError, match=rf"{name} is missing.*Pass {name}="):
        DFlashConfig.from_dict(raw)
    assert getattr(DFlashConfig.from_dict(raw, **{name: value}), name) == value


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "bos_token_id"])
def test_a_mask_token_that_occurs_in_text_is_refused_unless_insisted_on(name):
    raw = {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}, name: 7}
    with pytest.raises(ValueError, match=f"mask_token_id=7.*{name}"):
        DFlashConfig.from_dict(raw)
    assert DFlashConfig.from_dict(raw, mask_token_id=7).mask_token_id == 7


def test_a_mask_token_outside_the_embedding_rows_is_refused():
    raw = {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]}}
    with pytest.raises(ValueError, match="mask_token_id=97 must be below vocab_size=97"):
        DFlashConfig.from_dict(raw)


def test_num_target_layers_counts_taps_or_the_depth():
    base = {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}
    assert DFlashConfig.from_dict({**base, "num_target_layers": 36}).target_num_hidden_layers == 36
    counted = DFlashConfig.from_dict({**base, "num_target_layers": 2, "target_num_hidden_layers": 36})
    assert (counted.num_target_layers, counted.target_num_hidden_layers) == (2, 36)
    unknown = DFlashConfig.from_dict({**base, "num_target_layers": 2})
    assert (unknown.num_target_layers, unknown.target_num_hidden_layers) == (2, None)


def test_an_unknown_depth_is_learnt_from_the_target_and_needed_for_serving(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "speculators")
    draft = DFlashDraftModel.from_pretrained(folder)
    assert draft.config.target_num_hidden_layers is None
    with pytest.raises(ValueError, match=r"depth.*target="):
        save_in_layout(draft, tmp_path / "served", "serving")
    draft.tie_target(target)
    assert draft.config.target_num_hidden_layers == 4
    save_in_layout(draft, tmp_path / "served", "serving")


def test_a_tap_of_the_last_layer_is_found_when_the_depth_becomes_known(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "speculators", aux_hidden_state_layer_ids=[1, 4])
    draft = DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="contains the last layer, 3"):
        draft.tie_target(target)
    assert not draft.is_tied


def test_the_targets_name_stands_in_for_what_the_file_leaves_out(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    folder = write_producer(tmp_path / "draft", "muse")
    with pytest.raises(ValueError, match="vocab_size is missing"):
        DFlashDraftModel.from_pretrained(folder)
    draft = DFlashDraftModel.from_pretrained(folder, target=str(tmp_path / "target"))
    assert (draft.config.vocab_size, draft.config.target_num_hidden_layers) == (97, 4)


def test_the_commands_run_a_draft_whose_file_leaves_its_target_to_them(saved_target, tmp_path):
    folder = write_producer(tmp_path / "draft", "muse")
    _, draft, _ = load_pair(str(folder), saved_target(vocab_size=272), "float32")
    assert (draft.config.vocab_size, draft.is_tied) == (272, True)


def test_a_target_that_is_not_there_does_not_keep_a_complete_draft_from_loading(tmp_path):
    folder = write_producer(tmp_path / "draft", "z-lab, all nested")
    draft = DFlashDraftModel.from_pretrained(folder, target=str(tmp_path / "gone"))
    with pytest.raises(UntiedDraftError, match="gone"):
        draft.get_input_embeddings()


def test_a_field_beside_a_whole_configuration_is_not_dropped_in_silence(tmp_path):
    folder = write_producer(tmp_path / "draft", "z-lab, all nested")
    with pytest.raises(TypeError, match="block_size"):
        DFlashDraftModel.from_pretrained(folder, config=DFlashConfig.from_pretrained(folder), block_size=5)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5000.0, "rope_scaling": YARN},
        {
            "rope_theta": 5000.0,
            "rope_scaling": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"},
        },
        {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 5000.0}},
        {"rope_theta": 5000.0, "rope_parameters": YARN},
        {"rope_theta": None, "rope_parameters": {"full_attention": {**YARN, "rope_theta": 5000.0}}},
        {"rope_theta": 5000.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
)
def test_every_spelling_of_the_rotary_base_gives_the_angles_of_qwen3(spelling):
    """Position 500 would reveal another base."""
    raw = {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}, **spelling}
    config = DFlashConfig.from_dict(raw)
    assert config.rope_theta == 5000.0
    flat = (spelling.get("rope_parameters") or {}).get("full_attention") or config.rope_parameters
    positions = torch.tensor([[0, 1, 63, 500]])
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**{**Z_LAB, "rope_theta": 5000.0, "rope_scaling": None}))
    if flat["rope_type"] == "yarn":
        rotary = Qwen3RotaryEmbedding(Qwen3Config(**{**Z_LAB, "rope_theta": None, "rope_parameters": dict(flat)}))
    for ours, theirs in zip(
        rotary_angles(config, positions, torch.float32), rotary(torch.ones(1), positions), strict=True
    ):
        torch.testing.assert_close(ours[:, 0], theirs)
    serving = layout_config(config, "serving", "bfloat16")
    assert serving["rope_theta"] == serving["rope_parameters"]["rope_theta"] == 5000.0


def test_rotary_keys_of_the_target_are_dropped_with_a_warning(caplog):
    """The saved configuration describes the rotation that runs."""
    rope = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2]}
    nested = {"mask_token_id": 96, "target_layer_ids": [0, 2], "block_size": 4}
    logger = logging.getLogger("dflash_hf.checkpoints.read_layouts")
    logger.addHandler(caplog.handler)
    try:
        config = DFlashConfig.from_dict({**Z_LAB, "rope_parameters": rope, "dflash_config": nested})
    finally:
        logger.removeHandler(caplog.handler)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}
    assert "mrope_section, partial_rotary_factor" in caplog.text


@pytest.mark.parametrize(
    ("nested", "layer_types", "expected"),
    [
        ({"use_swa": True, "swa_window_size": 7}, None, ([7, 7], [False, False])),
        ({"use_swa": True, "swa_window_size": 7}, ["full_attention"] * 2, ([7, 7], [False, False])),
        ({"use_swa": True, "causal": True, "swa_window_size": 7}, None, ([7, 7], [True, True])),
        ({"swa_window_size": 7}, ["sliding_attention", "full_attention"], ([7, None], [True, False])),
        ({"causal": False}, ["sliding_attention", "full_attention"], ([6, None], [False, False])),
        ({"causal": True}, None, ([None, None], [True, True])),
        ({}, None, ([None, None], [False, False])),
    ],
)
def test_windows_and_causality_follow_the_rules_of_servers(nested, layer_types, expected):
    raw = {**Z_LAB, "sliding_window": 6, "block_size": 4}
    nested = {"mask_token_id": 96, "target_layer_ids": [0, 2], **nested}
    config = DFlashConfig.from_dict({**raw, "dflash_config": nested, "layer_types": layer_types})
    assert [config.layer_window(0), config.layer_window(1)] == expected[0]
    assert [config.in_block_causal(0), config.in_block_causal(1)] == expected[1]


def test_layer_types_follow_from_max_window_layers_where_they_are_not_written():
    raw = {**Z_LAB, "block_size": 4, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}
    raw |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    assert DFlashConfig.from_dict(raw).layer_types == Qwen3Config(**raw).layer_types
    assert DFlashConfig.from_dict(raw).layer_types == ["full_attention", "sliding_attention"]


NESTED = {"mask_token_id": 96, "target_layer_ids": [0, 2], "block_size": 4}
REFUSED = {
    "'domino' in config.json is a method": {**Z_LAB, "dflash_config": {**NESTED, "projector_type": "domino"}},
    "'lilicorr' in config.json is a method": {**Z_LAB, "dflash_config": {**NESTED, "projector_type": "lilicorr"}},
    "'Gemma4DSparkModel' in config.json is a draft": {**Z_LAB, "architectures": ["Gemma4DSparkModel"]},
    "'K3DSparkModel' in config.json is a draft": {**Z_LAB, "architectures": ["K3DSparkModel"]},
    "'deepseek_v4' in config.json is a draft": {**Z_LAB, "model_type": "deepseek_v4"},
    "kv_lora_rank=512": {**Z_LAB, "kv_lora_rank": 512, "dflash_config": NESTED},
    "speculators_model_type='eagle3' is no draft of this family": {**SPECULATORS, "speculators_model_type": "eagle3"},
    "speculators_model_type='xpress' is no draft of this family": {**SPECULATORS, "speculators_model_type": "xpress"},
    "is no DFlash draft": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32},
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_methods_are_refused_by_name(words, tmp_path):
    folder = write_checkpoint(tmp_path / "draft", REFUSED[words], network())
    for load in (DFlashDraftModel.from_pretrained, DFlashConfig.from_pretrained):
        with pytest.raises(ValueError, match=words):
            load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prefix_gru.weight_ih_l0", "the recurrent prefix head of Domino is not implemented"),
        ("refiner_head.weight", "the refiner of XPress is not implemented"),
        ("layers.0.mlp.up_proj.weight_packed", "a packed, quantised weight is not implemented"),
        ("layers.0.self_attn.kv_b_proj.weight", "multi-head latent attention is not implemented"),
        ("markov_head.weight", "unknown: markov_head.weight"),
        ("confidence_head.proj.weight", "unknown: confidence_head.proj.weight"),
        ("layers.0.attention_conv.base_kernel", "unknown: layers.0.attention_conv.base_kernel"),
        ("candidate_selector.predecessor_codebook", "unknown: candidate_selector.predecessor_codebook"),
        ("layers.0.self_attn.sinks", "unknown: layers.0.self_attn.sinks"),
        ("context_proj.weight", "the same tensor"),
    ],
)
def test_tensors_of_other_parts_are_refused_by_name(name, words, tmp_path):
    config = PRODUCERS["z-lab, block size at the top"][0]
    folder = write_checkpoint(tmp_path / "draft", config, {**network(), name: torch.ones(3)})
    with pytest.raises(ValueError, match=words):
        DFlashDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("producer", ["TorchSpec", "speculators, older", "SpecForge, with its old head"])
def test_copies_of_the_targets_tensors_are_compared_when_tying(producer, target, tmp_path):
    """They are dropped only if they are equal, and their checksums survive saving in our layout."""
    folder = write_producer(tmp_path / "draft", producer, target)
    draft = DFlashDraftModel.from_pretrained(folder, target=False, **ARGUMENTS.get(producer, {}))
    assert draft.config.target_tensor_checksums
    with pytest.raises(ValueError, match="not compared yet"):
        save_in_layout(draft, tmp_path / "served", "serving")
    draft.save_pretrained(tmp_path / "ours")
    again = DFlashDraftModel.from_pretrained(tmp_path / "ours", target=False)
    for other in (make_target(seed=5), make_target(seed=6)):
        with pytest.raises(ValueError, match="of the draft's file is not the target's"):
            again.tie_target(other)
    assert again.config.target_tensor_checksums == draft.config.target_tensor_checksums
    again.tie_target(target)
    assert again.config.target_tensor_checksums is None


def test_copies_of_the_targets_tensors_cannot_be_compared_with_quantised_ones(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "speculators, older", target)
    draft = DFlashDraftModel.from_pretrained(folder, target=False)
    quantize_(target, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "lm_head")
    with pytest.raises(ValueError, match=r"lm_head\.weight of the draft's file cannot be compared"):
        draft.tie_target(target)


def test_a_convert_of_a_file_with_target_tensors_needs_the_target(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    folder = write_producer(tmp_path / "draft", "speculators, older", target)
    with pytest.raises(ValueError, match="not compared yet"):
        convert_checkpoint(folder, tmp_path / "served", "serving", target_num_hidden_layers=4)
    convert_checkpoint(folder, tmp_path / "served", "serving", target=str(tmp_path / "target"))
    assert load_file(tmp_path / "served" / "model.safetensors").keys() == network().keys()


def test_flat_configurations_load_through_auto_model(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "TorchSpec", target)
    assert isinstance(AutoConfig.from_pretrained(folder, block_size=4), DFlashConfig)
    draft = AutoModel.from_pretrained(folder, block_size=4)
    assert torch.equal(draft.fc.weight, network()["fc.weight"])


def test_unknown_keys_of_a_producer_are_kept(tmp_path):
    nested = {"mask_token_id": 96, "target_layer_ids": [0, 2], "output_multiplier": 0.5}
    raw = {**Z_LAB, "block_size": 4, "dflash_config": nested, "trained_by": "someone"}
    config = DFlashConfig.from_dict(raw)
    config.save_pretrained(tmp_path)
    written = layout_config(DFlashConfig.from_pretrained(tmp_path), "serving", "float32")
    assert written["trained_by"] == "someone"
    assert written["dflash_config"] == {**nested, "block_size": 4}


def test_the_scale_inside_a_targets_embedding_is_recorded_compared_and_exported():
    values = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": None}
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**values, **sizes, eos_token_id=None)).eval()
    draft = make_draft(gemma)
    assert draft.config.input_embedding_scale == pytest.approx(32**0.5)
    assert layout_config(draft.config, "serving", "float32")["dflash_config"][
        "input_embedding_scale"
    ] == pytest.approx(32**0.5)
    draft.config.input_embedding_scale = 1.0
    with pytest.raises(ValueError, match=r"input_embedding_scale 1 against 5\.65"):
        draft.tie_target(gemma)
    assert make_draft(make_target()).config.input_embedding_scale is None
    assert embedding_scale(make_target().get_input_embeddings()) == pytest.approx(1.0)


SHAPES = {
    "Qwen3-4B": ((2560, 9728, 5, 32, 8, 128, 151936), 36, [1, 9, 17, 25, 33], 16, 151669),
    "Qwen3-8B": ((4096, 12288, 5, 32, 8, 128, 151936), 36, [1, 9, 17, 25, 33], 16, 151669),
    "Qwen3-Coder-30B-A3B": ((2048, 6144, 8, 32, 4, 128, 151936), 48, [1, 12, 23, 34, 45], 16, 151669),
    "LLaMA-3.1-8B": ((4096, 14336, 5, 32, 8, 128, 128256), 32, [1, 8, 15, 22, 29], 10, 128255),
    "gpt-oss-20b": ((2880, 7680, 8, 64, 8, 64, 201088), 24, [1, 6, 11, 16, 21], 8, 200000),
    "Kimi-K2.5": ((7168, 18432, 6, 64, 8, 128, 163840), 61, [1, 12, 24, 35, 47, 58], 8, 163838),
}


@pytest.mark.parametrize("model", SHAPES)
def test_published_geometries_survive_the_round_trip(model):
    (hidden, inner, layers, heads, kv_heads, head_dim, vocab), depth, ids, block, mask = SHAPES[model]
    raw = {
        **Z_LAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_target_layers": depth,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
    }
    config = DFlashConfig.from_dict(raw)
    assert (config.target_num_hidden_layers, config.target_layer_ids, config.num_target_layers) == (
        depth,
        ids,
        len(ids),
    )
    written = layout_config(config, "serving", "float32")
    assert values_of(DFlashConfig(**native_values(written))) == values_of(config)
    assert {name: written[name] for name in ("hidden_size", "head_dim", "num_target_layers")} == {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_target_layers": depth,
    }
