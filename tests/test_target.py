"""The target's hidden states: the shortened pass, padding on either side, and every kind of target."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from dflash_hf.target import target_hidden_states

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
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
        config_class(**{**TINY, **FAMILIES[name], **overrides})
    ).eval()


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 11 tokens: whole, with padding after it, with padding before it."""
    input_ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(5))
    token_valid_mask = torch.ones_like(input_ids, dtype=torch.bool)
    token_valid_mask[1, 7:] = False
    token_valid_mask[2, :4] = False
    return input_ids, token_valid_mask


def decoder_layers(target) -> nn.ModuleList:
    return next(
        module for module in target.modules() if isinstance(module, nn.ModuleList) and type(module[0]).__name__ != "x"
    )


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
    assert torch.equal(whole_pass(target, input_ids, [1, 2, 3, 4]).isfinite().all(), torch.tensor(True))


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
