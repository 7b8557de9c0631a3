"""Grouped-query SDPA gives the numbers of transformers' SDPA and restores the configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, make_draft
from decoding_pairs import make_family, make_multimodal, make_target
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, FalconConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from dflash_hf.decoding import gqa_attention as module_under_test
from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.gqa_attention import NAME, grouped_query_sdpa, use_grouped_query_sdpa

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 9}
PROMPT = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}


def layer_inputs(groups: int, num_queries: int = 5, num_sequences: int = 2):
    """Make a layer and its inputs; keys and values are views into longer buffers, as a cache returns them."""
    torch.manual_seed(groups)
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    query = torch.randn(num_sequences, num_queries, 2 * groups, 8).transpose(1, 2)
    key, value = torch.randn(num_sequences, 2, 40, 8)[:, :, 3:20], torch.randn(num_sequences, 2, 40, 6)[:, :, 3:20]
    return layer, query, key, value


def random_mask(num_sequences: int, num_queries: int, num_keys: int = 17) -> torch.Tensor:
    mask = torch.rand(num_sequences, 1, num_queries, num_keys) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("mask_queries", [5, 1])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_packed_attention_is_that_of_transformers(groups, mask_queries, scaling, monkeypatch):
    layer, query, key, value = layer_inputs(groups)
    mask = random_mask(2, mask_queries)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=scaling)
    calls = []
    monkeypatch.setattr(
        module_under_test, "sdpa_attention_forward", lambda *a, **k: calls.append(1) or sdpa_attention_forward(*a, **k)
    )
    output, weights = grouped_query_sdpa(layer, query, key, value, mask, scaling=scaling)
    assert weights is None
    assert output.shape == (2, 5, 2 * groups, 6)
    assert output.is_contiguous()
    assert len(calls) == (groups == 1)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)


def test_a_mask_that_all_sequences_share_is_enough():
    layer, query, key, value = layer_inputs(3)
    mask = random_mask(1, 5)
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask)
    torch.testing.assert_close(grouped_query_sdpa(layer, query, key, value, mask)[0], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "case", ["no mask", "added mask", "mask by head", "one query", "no group", "dropout", "position bias", "softcap"]
)
def test_what_is_not_packed_goes_to_transformers_as_it_came(case, monkeypatch):
    layer, query, key, value = layer_inputs(
        1 if case == "no group" else 2, num_queries=1 if case == "one query" else 5
    )
    mask, more = random_mask(2, query.shape[2]), {}
    if case == "no mask":
        mask = None
    elif case == "added mask":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    elif case == "mask by head":
        mask = mask.repeat(1, 4, 1, 1)
        mask[:, 1, :, 5:] = False
    elif case == "dropout":
        more = {"dropout": 0.5}
    elif case == "position bias":
        more = {"position_bias": torch.randn(1, 4, 5, 17)}
    elif case == "softcap":
        more = {"softcap": 30.0}
    calls = []

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return "what transformers returned"

    monkeypatch.setattr(module_under_test, "sdpa_attention_forward", spy)
    assert grouped_query_sdpa(layer, query, key, value, mask, scaling=0.3, **more) == "what transformers returned"
    args, kwargs = calls[0]
    assert all(got is given for got, given in zip(args, (layer, query, key, value, mask), strict=True))
    assert kwargs == {"dropout": 0.0, "scaling": 0.3, **more}


def test_the_configuration_is_back_after_the_context_and_after_an_exception():
    target = make_target()
    draft = make_draft(target)
    configs = [target.config, draft.config]
    with use_grouped_query_sdpa(target, draft):
        assert [config._attn_implementation for config in configs] == [NAME, NAME]
    assert [config._attn_implementation for config in configs] == ["sdpa", "sdpa"]
    with pytest.raises(KeyError), use_grouped_query_sdpa(target, draft, target):
        raise KeyError
    assert [config._attn_implementation for config in configs] == ["sdpa", "sdpa"]


def test_the_text_model_of_a_multimodal_target_is_packed_alone():
    target = make_multimodal()
    config = target.config
    with use_grouped_query_sdpa(target):
        assert config.text_config._attn_implementation == NAME
        assert config.vision_config._attn_implementation == "sdpa"
        assert target.model.language_model.config._attn_implementation == NAME
    assert config.text_config._attn_implementation == config._attn_implementation == "sdpa"


def test_other_attention_is_left_alone():
    eager = make_family("gemma2")
    assert eager.config._attn_implementation == "eager"
    falcon = AutoModelForCausalLM.from_config(FalconConfig(vocab_size=97, hidden_size=32, num_attention_heads=4))
    assert falcon.config._attn_implementation == "sdpa"
    with use_grouped_query_sdpa(eager, falcon):
        assert eager.config._attn_implementation == "eager"
        assert falcon.config._attn_implementation == "sdpa"


def test_a_model_that_compares_the_name_of_its_attention_keeps_the_name():
    config = CONFIG_MAPPING["gemma4_text"](
        **TINY, head_dim=8, global_head_dim=8, vocab_size_per_layer_input=97, hidden_size_per_layer_input=0
    )
    gemma4 = AutoModelForCausalLM.from_config(config)
    with use_grouped_query_sdpa(gemma4):
        assert gemma4.config._attn_implementation == "sdpa"


def test_transformers_does_not_take_grouped_queries_for_flash_attention():
    assert not is_flash_attention_requested(requested_attention_implementation=NAME)
    torch.manual_seed(0)
    config = CONFIG_MAPPING["hrm_text"](**TINY, head_dim=8)
    target = AutoModelForCausalLM.from_config(config).eval()  # refuses flash attention
    prompt = torch.tensor([[4, 8, 15]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=9)
    drafted = speculative_generate(target, make_draft(target), prompt, do_sample=False, max_new_tokens=9)
    assert torch.equal(drafted.sequences, plain)


def test_passes_of_a_call_are_packed_and_its_prefill_is_not():
    target = make_target()
    draft = make_draft(target)
    names = []
    target.register_forward_pre_hook(lambda module, args: names.append(module.config._attn_implementation))
    draft.register_forward_pre_hook(lambda module, args: names.append(module.config._attn_implementation))
    plain = target.generate(**PROMPT, **GREEDY)
    names.clear()
    assert torch.equal(speculative_generate(target, draft, **PROMPT, **GREEDY).sequences, plain)
    assert names[0] == "sdpa"
    assert len(names) > 3
    assert set(names[1:]) == {NAME}

    def interrupt(verify_pass) -> None:
        if verify_pass.num_drafted != [0] or len(names) > 2:
            raise KeyboardInterrupt

    names.clear()
    with pytest.raises(KeyboardInterrupt):
        speculative_generate(target, draft, **PROMPT, **GREEDY, on_pass=interrupt)
    assert names[-1] == NAME
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_a_target_that_does_not_look_its_attention_up_by_name_writes_the_text_of_plain_generation():
    """Falcon compares the name of its attention function itself."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    draft = make_draft(target, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    settings = {**GREEDY, "eos_token_id": None, "max_new_tokens": 14}
    plain = target.generate(**PROMPT, **settings)
    assert torch.equal(speculative_generate(target, draft, **PROMPT, **settings).sequences, plain)
