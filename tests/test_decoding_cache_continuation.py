"""The check that a target with recurrent layers can continue from a cache with several tokens."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import make_draft
from decoding_pairs import NOT_CONTINUING, STATE_SPACE, each_family, make_family, ragged_prompts
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig

from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.kv_cache import check_cache_continuation

PROMPT = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
GREEDY = {"do_sample": False, "pad_token_id": 0}


def count_passes(target) -> list[int]:
    """Return a list that receives the number of tokens of every later forward pass."""
    passes: list[int] = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return passes


@pytest.mark.parametrize("name", [name for name in NOT_CONTINUING if name != "llama4"])
def test_a_target_that_starts_anew_is_refused_before_the_prefill(name):
    """The text of such a target would be wrong without an error."""
    target = make_family(name)
    target.config.name_or_path = "some/target"
    draft = make_draft(target)
    passes = count_passes(target)
    fault = "has layers of type linear_attention that do not continue from a cache"
    if name == "rwkv":
        fault = "takes no cache"
    pattern = re.escape("some/target") + f".* {fault}.* Use plain generate"
    for _ in range(2):
        with pytest.raises(ValueError, match=pattern):
            speculative_generate(target, draft, **PROMPT, **GREEDY, max_new_tokens=4)
        assert 3 not in passes  # the prompt was not read
    num_probes = len(passes)
    with pytest.raises(ValueError, match=pattern):
        check_cache_continuation(target)
    assert len(passes) == num_probes  # the check runs once


def test_a_state_outside_the_cache_is_found_even_if_it_is_carried_on():
    """RecurrentGemma continues correctly, but its state cannot be restored after a rejection."""
    target = AutoModelForCausalLM.from_config(
        RecurrentGemmaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            lru_width=32,
            initializer_range=0.3,
            pad_token_id=0,
        )
    ).eval()
    plain = target.generate(**PROMPT, **GREEDY, max_new_tokens=12)
    logits = target(plain, use_cache=False).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == plain[0, 3:].tolist()
    with pytest.raises(ValueError, match="do not continue from a cache"):
        check_cache_continuation(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", each_family(*STATE_SPACE, "qwen3_next", "qwen3_5", "lfm2"))
def test_targets_that_go_on_exactly_are_taken_and_looked_at_once(name, dtype):
    target = make_family(name).to(dtype)
    passes = count_passes(target)
    check_cache_continuation(target)
    num_probes = len(passes)
    assert num_probes > 2
    check_cache_continuation(target)
    assert len(passes) == num_probes


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_target_with_attention_alone_is_not_run_for_it(name):
    target = make_family(name)
    passes = count_passes(target)
    check_cache_continuation(target)
    assert passes == []


def test_a_check_leaves_no_trace_in_the_text():
    target = make_family("qwen3_5")
    inputs = ragged_prompts(2)
    before = target.generate(**inputs, **GREEDY, max_new_tokens=8)
    check_cache_continuation(target)
    assert torch.equal(target.generate(**inputs, **GREEDY, max_new_tokens=8), before)


def test_layers_of_unknown_type_are_named_before_the_prefill():
    """It is unknown how such a cache continues, so the text could be wrong without an error."""
    target = make_family("llama4")
    draft = make_draft(target)
    passes = count_passes(target)
    with pytest.raises(
        ValueError,
        match=r"layers of type chunked_attention, and .* needs layers whose cache can be reset when drafted",
    ):
        speculative_generate(target, draft, **PROMPT, **GREEDY, max_new_tokens=4)
    assert passes == []
