"""Limits of a call that are no limits of the text: lengths, threads, wrappers, dtypes of ids."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from conftest import make_draft, make_tokenizer
from decoding_pairs import make_family, make_guessing_draft, make_target, ragged_prompts
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiers import thinned
from transformers import StoppingCriteria, StoppingCriteriaList

from dflash_hf.decoding.generate import dflash_decoding, speculative_generate
from dflash_hf.doctor.diagnosis import Diagnosis
from dflash_hf.evaluation.compare import compare_on_prompts
from dflash_hf.evaluation.settings import SuiteSettings
from dflash_hf.evaluation.suite import SuiteEvaluation
from dflash_hf.regeneration.local import LocalBackend
from dflash_hf.regeneration.requests import SamplingParameters
from dflash_hf.target.hidden_states import target_hidden_states

GREEDY = {"do_sample": False, "pad_token_id": 0}


def pair_with_end(num_sequences: int, max_new_tokens: int = 40, name: str = "llama") -> tuple:
    """Return a pair, prompts and end tokens at which every sequence ends by itself."""
    target = make_family(name)
    inputs = ragged_prompts(num_sequences, seed=2)
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=max_new_tokens)
    ends = sorted({int(text[30 + index]) for index, text in enumerate(texts)})
    draft = make_guessing_draft(target).teach(target, texts, 0.3)
    return target, draft, inputs, ends


@pytest.mark.parametrize("limit", [{"max_new_tokens": 10**12}, {"max_length": 10**12}, {"max_new_tokens": 10**15}])
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("how", [{}, {"tree_size": 9}], ids=["chain", "tree"])
def test_a_huge_max_new_tokens_takes_no_more_memory_than_the_text(num_sequences, limit, how):
    target, draft, inputs, ends = pair_with_end(num_sequences)
    plain = target.generate(**inputs, **GREEDY, **limit, eos_token_id=ends)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, **limit, eos_token_id=ends, **how)
    assert torch.equal(drafted.sequences, plain)


def test_a_text_outgrows_the_first_buffer_many_times():
    target = make_family("llama")
    inputs = ragged_prompts(3, seed=2)
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=150)
    draft = make_guessing_draft(target).teach(target, texts, 0.3)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=150)
    assert torch.equal(drafted.sequences, texts)


def in_second_thread(function) -> Any:
    """Return what a function returns in a thread of its own."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


@pytest.mark.parametrize("where", thinned(["callback", "thread", "criterion"], "thread"))
@pytest.mark.parametrize("how", [{}, {"tree_size": 9}], ids=["chain", "tree"])
def test_a_batch_decoded_inside_another_call_equals_one_alone(where, how):
    target, draft, _, _ = pair_with_end(1)
    inputs, others = ragged_prompts(2, seed=4), ragged_prompts(3, seed=5)
    settings = {**GREEDY, "max_new_tokens": 12}
    outer = target.generate(**inputs, **settings)
    draft.teach(target, torch.cat([outer, target.generate(**others, **settings)]), 0.3)
    inner = speculative_generate(target, draft, **others, **settings, **how).sequences
    seen: list[torch.Tensor] = []

    def decode_others(*_: Any) -> None:
        def decode() -> torch.Tensor:
            return speculative_generate(target, draft, **others, **settings, **how).sequences

        seen.append(in_second_thread(decode) if where == "thread" else decode())

    class Decoding(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            decode_others()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    if where == "criterion":
        given: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([Decoding()])}
    else:
        given = {"on_pass": decode_others}
    drafted = speculative_generate(target, draft, **inputs, **settings, **given, **how)
    assert torch.equal(drafted.sequences, outer)
    assert len(seen) > 3
    assert all(torch.equal(text, inner) for text in seen)
    assert target.config._attn_implementation == "sdpa"


def test_hidden_states_of_two_threads_equal_those_of_one():
    target = make_target(num_hidden_layers=6)
    ids = [torch.randint(1, 96, (2, 40), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    layers = [[0, 1], [2, 4]]
    alone = [target_hidden_states(target, ids[k], ids[k] > 0, layers[k]) for k in range(2)]
    results: list[list[torch.Tensor]] = [[], []]

    def run(index: int) -> None:
        for _ in range(40):
            results[index].append(target_hidden_states(target, ids[index], ids[index] > 0, layers[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(results[index]) == 40
        assert all(torch.equal(states, alone[index]) for states in results[index])


PROMPT_LEARNING = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p_tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
}


@pytest.mark.parametrize("name", PROMPT_LEARNING)
def test_a_target_in_prompt_learning_is_refused_by_name_before_the_prefill(name):
    target = make_target()
    draft = make_draft(target)
    wrapped = get_peft_model(target, PROMPT_LEARNING[name])
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    prompt = torch.tensor([[4, 8, 15]])
    with pytest.raises(ValueError, match="is wrapped in prompt learning"):
        speculative_generate(wrapped, draft, prompt, **GREEDY, max_new_tokens=4)
    with pytest.raises(ValueError, match="is wrapped in prompt learning"):
        wrapped.generate(input_ids=prompt, **GREEDY, max_new_tokens=4, custom_generate=dflash_decoding, draft=draft)
    assert not passes


ADAPTERS = [
    LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
]


@pytest.mark.parametrize("config", ADAPTERS, ids=["lora", "ia3"])
def test_targets_with_adapters_that_change_the_weights_work(config):
    target = make_target()
    draft = make_guessing_draft(target)
    wrapped = get_peft_model(target, config)
    inputs = ragged_prompts(2)
    plain = wrapped.generate(**inputs, **GREEDY, max_new_tokens=9)
    draft.teach(target, plain, 0.3)
    assert torch.equal(speculative_generate(wrapped, draft, **inputs, **GREEDY, max_new_tokens=9).sequences, plain)
    by_generate = wrapped.generate(**inputs, **GREEDY, max_new_tokens=9, custom_generate=dflash_decoding, draft=draft)
    assert torch.equal(by_generate, plain)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask", [torch.bool, torch.int32, torch.float32])
def test_ids_and_masks_of_other_dtypes_give_the_text_of_plain_generation(ids, mask, num_sequences):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=9)
    draft.teach(target, plain, 0.3)
    given = {"input_ids": inputs["input_ids"].to(ids), "attention_mask": inputs["attention_mask"].to(mask)}
    for how in ({}, {"tree_size": 9}):
        drafted = speculative_generate(target, draft, **given, **GREEDY, max_new_tokens=9, **how)
        assert torch.equal(drafted.sequences, plain)


def test_a_draft_left_on_the_meta_device_is_refused_in_one_line():
    target = make_target()
    draft = make_draft(target).to("meta")
    with pytest.raises(ValueError, match=r"The draft is on the meta device, so it has no weights, .* Load it"):
        speculative_generate(target, draft, torch.tensor([[4, 8]]), **GREEDY, max_new_tokens=4)


def test_an_empty_batch_is_refused_in_one_line():
    target = make_target()
    with pytest.raises(ValueError, match="input_ids holds no sequence"):
        speculative_generate(
            target, make_draft(target), torch.zeros(0, 3, dtype=torch.long), **GREEDY, max_new_tokens=4
        )


def test_a_draft_in_training_mode_proposes_what_it_proposes_in_evaluation_mode():
    target = make_target()
    draft = make_draft(target, attention_dropout=0.5)
    prompt = torch.tensor([[4, 8, 15]])
    expected = speculative_generate(target, draft, prompt, **GREEDY, max_new_tokens=12)
    draft.train()
    drafted = speculative_generate(target, draft, prompt, **GREEDY, max_new_tokens=12)
    assert torch.equal(drafted.sequences, expected.sequences)
    assert drafted.statistics.committed == expected.statistics.committed
    assert draft.training


@pytest.mark.parametrize("ids", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_ids_that_no_embedding_takes_are_refused_in_one_line(ids):
    target = make_target()
    prompt: Any = torch.tensor([[4, 8, 15]]).to(ids)
    with pytest.raises(TypeError, match=rf"input_ids has the dtype {ids}, and must have int64 or int32"):
        speculative_generate(target, make_draft(target), prompt, **GREEDY, max_new_tokens=4)


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 1]], [[0, 1, 1], [1, 1, 1]]])
def test_a_mask_of_another_batch_is_refused_in_one_line(mask):
    target = make_target()
    with pytest.raises(ValueError, match="has 2 rows and input_ids has 1"):
        speculative_generate(
            target, make_draft(target), torch.tensor([[4, 8, 15]]), attention_mask=torch.tensor(mask), **GREEDY
        )


def test_a_target_with_weights_on_the_meta_device_is_refused_in_one_line():
    target = make_target()
    draft = make_draft(target)
    target.model.layers[2].to("meta")
    with pytest.raises(ValueError, match="target LlamaForCausalLM has weights on the meta device"):
        speculative_generate(target, draft, torch.tensor([[4, 8]]), **GREEDY, max_new_tokens=4)


def test_a_text_decoded_beside_hidden_states_of_the_first_layers_equals_one_alone():
    target = make_target(num_hidden_layers=6)
    inputs = ragged_prompts(1, seed=2)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=40)
    draft = make_guessing_draft(target).teach(target, plain, 0.5)
    ids = torch.randint(1, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    states = target_hidden_states(target, ids, ids > 0, [0, 1])
    is_done, wrong = threading.Event(), []

    def compute_states() -> None:
        while not is_done.is_set():
            wrong.append(not torch.equal(target_hidden_states(target, ids, ids > 0, [0, 1]), states))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=compute_states)
    thread.start()
    try:
        texts = [
            speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=40).sequences for _ in range(6)
        ]
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert all(torch.equal(text, plain) for text in texts)
    assert len(wrong) > 3
    assert not any(wrong)


@pytest.mark.parametrize("name", PROMPT_LEARNING)
@pytest.mark.parametrize(
    "start",
    [
        lambda target, draft, tokenizer: LocalBackend(target, tokenizer, SamplingParameters(max_new_tokens=4)),
        lambda target, draft, tokenizer: Diagnosis(target, draft, tokenizer, ["hi"]),
        lambda target, draft, tokenizer: SuiteEvaluation(target, draft, tokenizer, [], SuiteSettings()),
        lambda target, draft, tokenizer: next(compare_on_prompts(target, draft, tokenizer, ["hi"])),
    ],
    ids=["regenerate", "doctor", "eval", "compare"],
)
def test_prompt_learning_is_refused_before_a_command_runs_the_target(start, name):
    target = make_target(vocab_size=272)
    draft, tokenizer = make_draft(target), make_tokenizer()
    wrapped: Any = get_peft_model(target, PROMPT_LEARNING[name])
    passes: list[int] = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match="is wrapped in prompt learning"):
        start(wrapped, draft, tokenizer)
    assert not passes
