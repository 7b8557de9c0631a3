"""The target's hidden states: the shortened pass, padding on either side, and every kind of target."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from accelerate import dispatch_model
from conftest import TINY, greedy, make_draft, make_target
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from training_runs import make_trainer

from dflash_hf.target.hidden_state_cache import weights_checksum
from dflash_hf.target.hidden_states import target_hidden_states, unwrap_peft

SMALL = {**TINY, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
WINDOWS = {"sliding_window": 4, "head_dim": 8}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": WINDOWS,
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "GPTNeoX": {},
    "GPT2": GPT,
    "GPTJ": {**GPT, "rotary_dim": 4},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Gemma2": {**WINDOWS, "query_pre_attn_scalar": 8},
    "Gemma3": {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "GptOss": {**WINDOWS, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Qwen3Next": {**EXPERTS, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 16, "head_dim": 8},
    "Lfm2": {},
    "RecurrentGemma": {"lru_width": 32},
    "Bloom": {"n_layer": 4, "n_head": 4},
    "Mamba": {"state_size": 8},
}
RUNS_WHOLE = {"Bloom", "Mamba"}  # build their list of hidden states themselves, the final norm in the last


def make_family(name: str, **overrides):
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM", getattr(transformers, f"{name}LMHeadModel", None))(
        config_class(**{**SMALL, **FAMILIES[name], **overrides})
    ).eval()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 11 tokens: whole, with padding after it, with padding before it."""
    input_ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(5))
    token_valid_mask = torch.ones_like(input_ids, dtype=torch.bool)
    token_valid_mask[1, 7:] = False
    token_valid_mask[2, :4] = False
    return input_ids, token_valid_mask


def decoder_layers(target) -> nn.ModuleList:
    return next(module for module in target.get_decoder().modules() if isinstance(module, nn.ModuleList))


def whole_pass(target, input_ids: torch.Tensor, layer_ids: list[int]) -> torch.Tensor:
    """All states of a text without padding, out of the whole target with its head."""
    with torch.no_grad():
        states = target(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[index] for index in layer_ids], dim=-1)


def snapshot(target) -> tuple:
    return (
        copy.deepcopy(target.config.to_dict()),
        "tie_last_hidden_states" in vars(target.config.get_text_config()),
        [(name, id(module), len(module._forward_hooks)) for name, module in target.named_modules()],
        {name: value.clone() for name, value in target.state_dict().items()},
    )


def assert_unchanged(target, before: tuple) -> None:
    after = snapshot(target)
    assert after[:3] == before[:3]
    assert after[3].keys() == before[3].keys()
    assert all(torch.equal(value, before[3][name]) for name, value in after[3].items())


class CountCalls:
    """Which decoder layers ran, and whether the head did."""

    def __init__(self, target):
        self.calls: list[str] = []
        self.handles = [
            module.register_forward_hook(lambda *_, name=str(index): self.calls.append(name))
            for index, module in enumerate(decoder_layers(target))
        ]
        self.handles.append(target.get_output_embeddings().register_forward_hook(lambda *_: self.calls.append("head")))

    def remove(self) -> list[str]:
        for handle in self.handles:
            handle.remove()
        return self.calls


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shortened_pass_equals_the_whole_one_bit_for_bit_and_leaves_the_target_as_it_was(name):
    target = make_family(name)
    input_ids, _ = make_batch()
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    for layer_ids, final in (([0, 2], []), ([1], []), ([2, 0], [4])):
        expected = whole_pass(target, input_ids, [layer + 1 for layer in layer_ids] + final)
        target_hidden_states(target, input_ids[:, :1], everything[:, :1], layer_ids, include_final_state=bool(final))
        before = snapshot(target)
        counter = CountCalls(target)
        states = target_hidden_states(target, input_ids, everything, layer_ids, include_final_state=bool(final))
        calls = counter.remove()
        assert torch.equal(states, expected)
        assert_unchanged(target, before)
        if name in RUNS_WHOLE and not final:
            assert calls == ["0", "1", "2", "3", "head"]
        else:
            assert calls == [str(layer) for layer in range(4 if final else max(layer_ids) + 1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_before_or_after_a_text_leaves_its_states_alone(name):
    """Recurrent layers, absolute positions, and sliding windows that count padding included."""
    target = make_family(name)
    input_ids, token_valid_mask = make_batch()
    states = target_hidden_states(target, input_ids, token_valid_mask, [0, 2], include_final_state=True)
    for row, valid, ids in zip(states, token_valid_mask, input_ids, strict=True):
        expected = whole_pass(target, ids[valid][None], [1, 3, 4])[0]
        torch.testing.assert_close(row[valid], expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
        assert row[~valid].eq(0).all()


def test_left_padded_rows_equal_right_padded_ones_bit_for_bit(target):
    input_ids, _ = make_batch()
    right = torch.arange(11) < torch.tensor([[11], [7], [1]])
    left = right.flip(1)
    moved = torch.zeros_like(input_ids)
    moved[left] = input_ids[right]
    ours = target_hidden_states(target, moved, left, [0, 2])
    assert torch.equal(ours[left], target_hidden_states(target, input_ids, right, [0, 2])[right])


def test_a_target_seen_first_through_its_chosen_layers_still_gives_all_states_and_drafts(target):
    """transformers puts its capturing hooks on the layers that are there at the first use."""
    input_ids, _ = make_batch()
    target_hidden_states(target, input_ids, torch.ones_like(input_ids, dtype=torch.bool), [0])
    with torch.no_grad():
        assert len(target(input_ids, output_hidden_states=True).hidden_states) == 5
    prompt = input_ids[:1]
    assert greedy(target, prompt, 8) == greedy(
        target, prompt, 8, assistant_model=make_draft(target), speculation_type="dflash"
    )


@pytest.mark.parametrize("switch", [None, False, True])
def test_an_error_in_the_middle_leaves_the_target_as_it_was(target, switch):
    if switch is not None:
        target.config.tie_last_hidden_states = switch
    input_ids, _ = make_batch()
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    states = target_hidden_states(target, input_ids, valid, [0, 2])
    before = snapshot(target)

    def fail(*_):
        raise RuntimeError("in the middle")

    handle = target.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        target_hidden_states(target, input_ids, valid, [0, 2])
    handle.remove()
    assert_unchanged(target, before)
    assert torch.equal(target_hidden_states(target, input_ids, valid, [0, 2]), states)


def by_number(target):
    """Runs its layers by number, as a decoder from a repository may."""
    target.model.register_forward_pre_hook(lambda decoder, args: decoder.layers[3] and None)


def by_depth(target):
    """Scales its embeddings by the number of layers it has at the moment."""

    def embed(decoder, args, kwargs):
        embeds = decoder.embed_tokens(kwargs.pop("input_ids")) * len(decoder.layers)
        return args, {**kwargs, "inputs_embeds": embeds}

    target.model.register_forward_pre_hook(embed, with_kwargs=True)


@pytest.mark.parametrize("depend", [by_number, by_depth])
def test_a_decoder_that_needs_all_its_layers_runs_whole(target, depend):
    depend(target)
    input_ids, _ = make_batch()
    expected = whole_pass(target, input_ids, [1, 3])
    counter = CountCalls(target)
    for _ in range(2):
        states = target_hidden_states(target, input_ids, torch.ones_like(input_ids, dtype=torch.bool), [0, 2])
    assert counter.remove()[-5:] == ["0", "1", "2", "3", "head"]
    assert torch.equal(states, expected)
    assert len(target.model.layers) == 4


def test_a_forward_that_belongs_to_one_decoder_gives_its_states(target):
    forward = target.model.forward
    target.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # bound to the whole decoder
    input_ids, valid = make_batch()
    valid = torch.ones_like(valid)
    for _ in range(2):
        assert torch.equal(
            target_hidden_states(target, input_ids, valid, [0, 2]), whole_pass(target, input_ids, [1, 3])
        )


def spread(target):
    return dispatch_model(target, {"": "cpu"}, main_device="cpu", force_hooks=True)


def compiled(target):
    target.model.layers[3].compile(backend="eager")
    return target


def sharded(target):
    target.model.norm.weight.ds_id = 0  # as ZeRO-3 marks what it takes apart
    return target


@pytest.mark.parametrize("manage", [spread, compiled, sharded])
def test_a_spread_compiled_or_sharded_target_runs_whole(target, manage):
    input_ids, _ = make_batch()
    expected = whole_pass(target, input_ids, [1, 3, 4])
    target = manage(target)
    counter = CountCalls(target)
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    assert torch.equal(target_hidden_states(target, input_ids, valid, [0, 2], include_final_state=True), expected)
    assert counter.remove() == ["0", "1", "2", "3", "head"]


def test_the_final_state_makes_the_logits_of_the_target(target):
    input_ids, _ = make_batch()
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    states = target_hidden_states(target, input_ids, valid, [0, 2], include_final_state=True)
    assert states.shape == (3, 11, 96)
    with torch.no_grad():
        assert torch.equal(target.lm_head(states[..., 64:]), target(input_ids).logits)
    assert torch.equal(target_hidden_states(target, input_ids, valid, [], include_final_state=True), states[..., 64:])
    assert torch.equal(target_hidden_states(target, input_ids, valid, [0, 2]), states[..., :64])


def test_the_last_layer_is_taken_before_the_norm_only_if_the_target_says_so(target):
    """Other decoders read it after the norm, and accept less."""
    input_ids, _ = make_batch()
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    after = target_hidden_states(target, input_ids, valid, [3])
    target.config.tie_last_hidden_states = False
    before = target_hidden_states(target, input_ids, valid, [3])
    assert torch.equal(target.model.norm(before), after)
    with pytest.raises(ValueError, match="tie_last_hidden_states=False"):
        target_hidden_states(target, input_ids, valid, [0], include_final_state=True)


def test_a_target_that_loops_over_its_layers_runs_whole_and_gives_no_final_state():
    torch.manual_seed(0)
    target = transformers.DoryForCausalLM(transformers.DoryConfig(**SMALL)).eval()
    input_ids, _ = make_batch()
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    assert torch.equal(target_hidden_states(target, input_ids, valid, [0, 2]), whole_pass(target, input_ids, [1, 3]))
    with pytest.raises(ValueError, match="returned 9 hidden states for its 4 layers"):
        target_hidden_states(target, input_ids, valid, [0], include_final_state=True)


# ---- kinds of targets ----


def make_lora(target) -> PeftModel:
    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(target, config).eval()


def make_int8(target):
    target.bfloat16()
    quantize_(target, Int8WeightOnlyConfig())
    return target


def load_int8(target, folder):
    """As a user loads it: the head stays in bf16."""
    target.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig())
    ).eval()


def make_multimodal_gemma3():
    torch.manual_seed(0)
    text = {**SMALL, **FAMILIES["Gemma3"], "vocab_size": 100}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=99,
        boi_token_id=97,
        eoi_token_id=98,
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def make_multimodal_qwen2():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        text_config={**SMALL, "vocab_size": 100, "rope_parameters": rope},
        vision_config={"depth": 4, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=99,
        video_token_id=98,
        vision_start_token_id=97,
    )
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


KINDS = {
    "lora": lambda folder: make_lora(make_target()),
    "int8": lambda folder: make_int8(make_target()),
    "int8 loaded": lambda folder: load_int8(make_target(), folder),
    "gemma3 multimodal": lambda folder: make_multimodal_gemma3(),
    "qwen2 multimodal": lambda folder: make_multimodal_qwen2(),
    "gpt2": lambda folder: make_family("GPT2"),
    "sliding": lambda folder: make_family("Mistral"),
    "hybrid": lambda folder: make_family("Qwen3Next"),
}


def bits(model) -> str:
    return weights_checksum(unwrap_peft(model))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_trains_a_draft_and_stays_bit_identical(tmp_path, kind):
    """With padding before the text."""
    target = KINDS[kind](tmp_path / "target")
    draft = make_draft(target)
    rows = [{"input_ids": row[row > 0].tolist()} for row in make_batch()[0].masked_fill(~make_batch()[1], 0)]
    weights_before, draft_before = bits(target), copy.deepcopy(draft.state_dict())
    trainer = make_trainer(
        target,
        tmp_path,
        draft=draft,
        rows=rows,
        eval_rows=rows,
        max_steps=2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        padding_side="left",
    )
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert bits(target) == weights_before
    assert all(not torch.equal(value, draft_before[name]) for name, value in draft.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_states_of_every_kind_of_target_are_those_of_its_whole_pass(tmp_path, kind):
    target = KINDS[kind](tmp_path / "target")
    input_ids, token_valid_mask = make_batch()
    states = target_hidden_states(target, input_ids, token_valid_mask, [0, 2], include_final_state=True)
    for row, valid, ids in zip(states, token_valid_mask, input_ids, strict=True):
        expected = whole_pass(target, ids[valid][None], [1, 3, 4])[0]
        tolerance = 1e-5 if expected.dtype == torch.float32 else 0.02  # bf16: two steps of rounding
        torch.testing.assert_close(row[valid], expected, atol=tolerance * expected.abs().max().item(), rtol=1e-5)
        assert row[~valid].eq(0).all()
    everything = torch.ones_like(input_ids, dtype=torch.bool)
    assert torch.equal(
        target_hidden_states(target, input_ids, everything, [0, 2]), whole_pass(target, input_ids, [1, 3])
    )


def test_adapters_act_in_states_and_head_as_merged_weights_do():
    adapted = make_lora(make_target())
    merged = make_lora(make_target()).merge_and_unload()
    input_ids, valid = make_batch()
    states = target_hidden_states(adapted, input_ids, valid, [0, 2], include_final_state=True)
    expected = target_hidden_states(merged, input_ids, valid, [0, 2], include_final_state=True)
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(target_hidden_states(make_target(), input_ids, valid, [2]), states[..., 32:64], atol=0.1)
    ours, theirs = make_draft(adapted), make_draft(merged)
    hidden_states = torch.randn(2, 3, 32)
    torch.testing.assert_close(
        ours.compute_logits(hidden_states), theirs.compute_logits(hidden_states), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(ours.embed_blocks(input_ids), theirs.embed_blocks(input_ids))


def test_the_checksum_sees_the_strength_and_the_absence_of_adapters():
    adapted = make_lora(make_target())
    seen = [bits(adapted), bits(make_lora(make_target()))]
    with adapted.disable_adapter():
        seen.append(bits(adapted))
    seen.append(bits(adapted))
    for layer in adapted.modules():
        if hasattr(layer, "base_layer"):
            layer.set_scale("default", 2.0)
    seen.append(bits(adapted))
    assert seen[0] == seen[1] == seen[3]
    assert len(set(seen)) == 3


def test_the_end_of_text_of_an_adapted_target_reaches_the_data(tmp_path):
    target = make_target(eos_token_id=7)
    trainer = make_trainer(make_lora(target), tmp_path, rows=[{"input_ids": [1, 2, 3, 4, 5]}])
    assert trainer._data_kwargs["eos_token_ids"] == [7]
    assert trainer.target is target


def test_prompt_learning_is_refused(target):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="Its virtual tokens have hidden states, but the text has no tokens for them"):
        target_hidden_states(get_peft_model(target, config), *make_batch(), [0])
