"""Targets whose rotary angles depend on the length of the text."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from conftest import TINY, make_tokenizer
from decoding_pairs import count_near_ties, make_guessing_draft, make_target, ragged_prompts
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM

from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.target.hidden_states import target_hidden_states
from dflash_hf.target.rotary import length_dependent_angles

GREEDY = {"do_sample": False, "pad_token_id": 0}
LENGTH = 24


def make_phi3(**overrides: Any) -> Phi3ForCausalLM:
    """A random Phi-3 whose angles change once beyond 24 tokens."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 9.0, 17.0],
        "original_max_position_embeddings": LENGTH,
    }  # fmt: skip
    values = {
        **TINY, "max_position_embeddings": 256, "original_max_position_embeddings": LENGTH, "rope_parameters": rope
    }  # fmt: skip
    return Phi3ForCausalLM(Phi3Config(**{**values, **overrides})).eval()


def make_dynamic() -> Any:
    """A random Llama whose angles change with every token beyond 24."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return make_target(rope_parameters=rope, max_position_embeddings=LENGTH)


TARGETS = {"longrope": make_phi3, "dynamic": make_dynamic}


def test_the_length_is_found_where_families_keep_it():
    assert length_dependent_angles(make_phi3().config) == ("longrope", LENGTH)
    assert length_dependent_angles(make_dynamic().config) == ("dynamic", LENGTH)
    assert length_dependent_angles(make_target().config) is None
    by_type = LlamaConfig(**TINY)
    by_type.rope_parameters = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 99},
        "sliding_attention": {"rope_type": "default"},
    }
    assert length_dependent_angles(by_type) == ("dynamic", 99)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("how", [{}, {"tree_size": 9}], ids=["chain", "tree"])
def test_texts_up_to_the_length_are_those_of_plain_generation(name, num_sequences, how):
    target = TARGETS[name]()
    inputs = ragged_prompts(num_sequences, seed=1)
    settings = {**GREEDY, "max_length": LENGTH + int((1 - inputs["attention_mask"]).sum(1).min())}
    target(torch.randint(1, 96, (1, 60)))  # an earlier, longer text leaves no trace
    plain = target.generate(**inputs, **settings)
    draft = make_guessing_draft(target).teach(target, plain, 0.3)
    drafted = speculative_generate(target, draft, **inputs, **settings, **how)
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_a_call_that_may_cross_the_length_is_refused_before_the_prefill(name, num_sequences):
    target = TARGETS[name]()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=1)
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    for limit in ({"max_length": LENGTH + 9}, {"max_new_tokens": 10**12}):
        with pytest.raises(ValueError, match=rf"'{name}'\) in texts of more than 24 tokens, .* Pass max_length=24"):
            speculative_generate(target, draft, **inputs, **GREEDY, **limit)
    long = {"input_ids": torch.randint(1, 96, (1, LENGTH + 3))}
    if name == "dynamic":
        with pytest.raises(ValueError, match="Tokens that are verified together would get other angles"):
            speculative_generate(target, draft, **long, **GREEDY, max_new_tokens=4)
    assert not passes


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_prompts_beyond_the_length_of_longrope_go_on_as_in_plain_generation(num_sequences):
    target = make_phi3()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 96, (num_sequences, LENGTH + 9), generator=generator)
    mask = torch.ones_like(ids)
    if num_sequences == 2:
        ids[1, :4] = mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=16)
    draft = make_guessing_draft(target).teach(target, plain, 0.3)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=16)
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0


def test_a_chat_that_has_crossed_the_length_is_read_again():
    target = make_phi3()
    short = torch.randint(1, 96, (1, 9), generator=torch.Generator().manual_seed(3))
    draft = make_guessing_draft(target)
    draft.teach(target, target.generate(short, **GREEDY, max_length=LENGTH), 0.0)
    answer = speculative_generate(target, draft, short, **GREEDY, max_length=LENGTH)
    longer = torch.cat([answer.sequences, torch.randint(1, 96, (1, 6))], dim=1)
    plain = target.generate(longer, **GREEDY, max_new_tokens=12)
    drafted = speculative_generate(target, draft, longer, **GREEDY, max_new_tokens=12, cache=answer.cache)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0


@pytest.mark.parametrize("shared", [4, 9])
def test_a_short_text_does_not_continue_from_the_cache_of_a_text_beyond_the_length(shared):
    target = make_phi3()
    generator = torch.Generator().manual_seed(3)
    long = torch.randint(1, 96, (1, LENGTH + 6), generator=generator)
    draft = make_guessing_draft(target).teach(target, target.generate(long, **GREEDY, max_new_tokens=8), 0.2)
    answer = speculative_generate(target, draft, long, **GREEDY, max_new_tokens=8)
    short = torch.cat([long[:, :shared], torch.randint(1, 96, (1, 3), generator=generator)], dim=1)
    plain = target.generate(short, **GREEDY, max_length=LENGTH)
    drafted = speculative_generate(target, draft, short, **GREEDY, max_length=LENGTH, cache=answer.cache)
    assert torch.equal(drafted.sequences, plain)


def test_texts_on_both_sides_of_the_length_are_decoded_in_two_threads_as_alone():
    target = make_phi3()
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 96, (1, length), generator=generator) for length in (LENGTH + 3, 5)]
    settings: list[dict[str, Any]] = [{**GREEDY, "max_new_tokens": 30}, {**GREEDY, "max_length": LENGTH}]
    plain = [target.generate(ids, **how) for ids, how in zip(prompts, settings, strict=True)]
    drafts = [make_guessing_draft(target).teach(target, text, 0.5) for text in plain]
    texts: list[list[torch.Tensor]] = [[], []]

    def decode(index: int) -> None:
        for _ in range((8, 12)[index]):
            drafted = speculative_generate(target, drafts[index], prompts[index], **settings[index])
            texts[index].append(drafted.sequences)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert [len(each) for each in texts] == [8, 12]
    for index in range(2):
        assert all(torch.equal(text, plain[index]) for text in texts[index])


@pytest.mark.parametrize("name", TARGETS)
def test_hidden_states_of_a_row_do_not_depend_on_the_length_of_its_neighbours(name):
    target = TARGETS[name]()
    ids = torch.randint(1, 96, (4, 50), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([10, 24, 31, 50])
    valid = torch.arange(50) < lengths[:, None]
    together = target_hidden_states(target, ids, valid, [0, 2])
    for row, length in enumerate(lengths.tolist()):
        alone = target_hidden_states(target, ids[row : row + 1, :length], valid[row : row + 1, :length], [0, 2])
        torch.testing.assert_close(together[row : row + 1, :length], alone, atol=1e-5, rtol=1e-5)
    left = target_hidden_states(target, ids.flip(1), valid.flip(1), [0, 2])
    again = target_hidden_states(target, ids[:1, :10].flip(1), valid[:1, :10], [0, 2])
    torch.testing.assert_close(left[:1, 40:], again, atol=1e-5, rtol=1e-5)


def test_regeneration_keeps_conversations_within_the_length():
    from dflash_hf.regeneration.local import LocalBackend
    from dflash_hf.regeneration.requests import SamplingParameters

    tokenizer = make_tokenizer()
    backend = LocalBackend(make_phi3(vocab_size=272), tokenizer, SamplingParameters(max_new_tokens=500))
    assert backend.max_length == LENGTH
