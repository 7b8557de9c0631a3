"""The local backend, compared with `generate` on one prompt at a time."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from conftest import TINY, greedy, make_target
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash_hf.regeneration import continuous_batching
from dflash_hf.regeneration.local import LocalBackend
from dflash_hf.regeneration.requests import Completion, Failure, RequestQueue, SamplingParameters, TurnRequest
from dflash_hf.regeneration.sampling import RandomNumbers, sample_tokens

END, PAD = 257, 256
WORDS = ["", "a", "Why?", "Tell me a long story, please", "x" * 40, "one two", "?", "b" * 23]


def make_chat_target(seed: int = 0, end: Any = END, **overrides: Any) -> LlamaForCausalLM:
    """A random target with the vocabulary of the byte tokenizer; most completions are truncated."""
    return make_target(seed, **{"vocab_size": 272, "eos_token_id": end, "pad_token_id": PAD, **overrides})


def make_requests(number: int) -> list[TurnRequest]:
    return [
        TurnRequest(f"row {index}", [{"role": "user", "content": WORDS[index % len(WORDS)] * (1 + index % 3)}])
        for index in range(number)
    ]


def completions_of(backend: LocalBackend, requested: Iterable[TurnRequest]) -> dict[str, Completion | Failure]:
    found = [
        (request.conversation_id, completion) for request, completion in backend.completions(RequestQueue(requested))
    ]
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def ids_of(completions: dict[str, Completion | Failure]) -> dict[str, list[int] | None]:
    return {
        name: completion.token_ids for name, completion in completions.items() if isinstance(completion, Completion)
    }


def alone(target: Any, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    return greedy(target, torch.tensor([prompt_ids]), max_new_tokens, pad_token_id=PAD)


def end_tokens(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, requested: list[TurnRequest]
) -> list[int]:
    """Tokens that the target often writes, so that completions of very different lengths end with them."""
    written = Counter()
    for request in requested:
        ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_dict=False)
        written.update(set(alone(target, ids, 16)[2:]))
    return [token for token, _ in written.most_common(3)]


def make_family(kind: str) -> Any:
    """A random chat target of a family."""
    sizes = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    sizes |= {"vocab_size": 272, "eos_token_id": END, "pad_token_id": PAD, "head_dim": 8}
    torch.manual_seed(3)
    if kind == "full":
        return make_chat_target()
    if kind == "windows":
        return MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=7)).eval()
    if kind == "some windows":
        types = ["sliding_attention", "full_attention"] * 2
        config = Qwen3Config(
            **sizes, num_key_value_heads=1, layer_types=types, use_sliding_window=True, sliding_window=7
        )
        return Qwen3ForCausalLM(config).eval()
    config = GPT2Config(
        vocab_size=272,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=300,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_huge_limit_takes_no_more_memory_than_the_completions(tokenizer, batch_size):
    target, requested = make_family("full"), make_requests(6)
    target.generation_config.eos_token_id = [END, *end_tokens(target, tokenizer, requested)]

    def ids(max_new_tokens: int) -> dict[str, list[int]]:
        backend = LocalBackend(target, tokenizer, SamplingParameters(max_new_tokens), batch_size=batch_size)
        return ids_of(completions_of(backend, requested))

    target.config.max_position_embeddings = 10**12
    expected = ids(60)
    assert max(map(len, expected.values())) < 60
    assert ids(10**11) == expected


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("full", "sdpa"), ("windows", "sdpa"), ("some windows", "eager"), ("learned positions", "sdpa")],
)
def test_greedy_completions_are_those_of_generate_on_each_prompt_alone(tokenizer, monkeypatch, kind, implementation):
    monkeypatch.setattr(continuous_batching, "GROWTH_COLUMNS", 8)  # buffers grow while completions are in progress
    target = make_family(kind)
    target.set_attn_implementation(implementation)
    requested = make_requests(19)
    ends = end_tokens(target, tokenizer, requested[:6])
    target.generation_config.eos_token_id = [END, *ends]
    expected = {}
    for request in requested:
        ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_dict=False)
        expected[request.conversation_id] = alone(target, ids, 16)
    assert len({len(completion) for completion in expected.values()}) > 4  # or all sequences would end at once
    for is_continuous, batch_size in ((True, 1), (True, 3), (True, 17), (False, 17)):
        backend = LocalBackend(
            target, tokenizer, SamplingParameters(16), batch_size=batch_size, continuous_batching=is_continuous
        )
        completions = completions_of(backend, requested)
        assert ids_of(completions) == expected
        for completion in completions.values():
            assert isinstance(completion, Completion)
            assert completion.token_ids
            has_end = completion.token_ids[-1] in (END, *ends)
            assert completion.finish_reason == ("stop" if has_end else "length")
            content = completion.token_ids[:-1] if has_end else completion.token_ids
            assert completion.message == {"role": "assistant", "content": tokenizer.decode(content)}


def test_prompts_of_one_token_and_completions_of_one_token(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    target = make_chat_target()
    requested = [TurnRequest(text, [{"role": "user", "content": text}]) for text in "abcdef"]
    for max_new_tokens in (1, 6):
        backend = LocalBackend(target, tokenizer, SamplingParameters(max_new_tokens), batch_size=4)
        completions = completions_of(backend, requested)
        for text, completion in completions.items():
            assert isinstance(completion, Completion)
            assert completion.prompt_ids == tokenizer.encode(text)
            assert completion.token_ids == alone(target, completion.prompt_ids, max_new_tokens)


def test_the_generation_config_applies_as_in_generate(tokenizer):
    target = make_chat_target()
    target.generation_config.update(repetition_penalty=1.7, min_new_tokens=5, no_repeat_ngram_size=2)
    common, *ends = end_tokens(target, tokenizer, make_requests(8))
    with torch.no_grad():  # token 0, which padding on the left may be made of, is written often
        target.lm_head.weight[0] = 3 * target.lm_head.weight[common]
    target.generation_config.eos_token_id = ends
    for is_continuous in (True, False):
        completions = completions_of(
            LocalBackend(target, tokenizer, SamplingParameters(16), batch_size=5, continuous_batching=is_continuous),
            make_requests(8),
        )
        for completion in completions.values():
            assert isinstance(completion, Completion)
            assert completion.prompt_ids
            assert completion.token_ids
            assert completion.token_ids == alone(target, completion.prompt_ids, 16)
            assert len(completion.token_ids) >= 5


@pytest.mark.parametrize("temperature", [None, 0.9])
def test_sampled_completions_depend_on_their_seed_alone(tokenizer, temperature):
    target = make_chat_target()
    target.generation_config.update(do_sample=True, temperature=1.3, top_k=30, repetition_penalty=1.2)
    sampling = SamplingParameters(12, temperature, top_p=0.9, seed=5)
    requested = make_requests(13)
    first = ids_of(completions_of(LocalBackend(target, tokenizer, sampling, batch_size=4), requested))
    for batch_size, order, is_continuous in ((13, requested[::-1], True), (1, requested, True), (3, requested, False)):
        backend = LocalBackend(target, tokenizer, sampling, batch_size=batch_size, continuous_batching=is_continuous)
        assert ids_of(completions_of(backend, order)) == first
    other_seed = SamplingParameters(12, temperature, top_p=0.9, seed=6)
    assert ids_of(completions_of(LocalBackend(target, tokenizer, other_seed, batch_size=4), requested)) != first
    same_text = [TurnRequest(str(index), [{"role": "user", "content": "Why?"}]) for index in range(4)]
    sampled = ids_of(completions_of(LocalBackend(target, tokenizer, sampling, batch_size=4), same_text))
    assert len({tuple(completion or ()) for completion in sampled.values()}) == 4


@pytest.mark.parametrize("is_continuous", [True, False])
def test_sampled_tokens_have_the_distribution_of_the_target(tokenizer, is_continuous):
    target = make_chat_target()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    sampling = SamplingParameters(1, temperature=1.5, top_k=6, top_p=0.95)
    number = 3000
    requested = [TurnRequest(str(index), [{"role": "user", "content": "Why"}]) for index in range(number)]
    backend = LocalBackend(target, tokenizer, sampling, batch_size=500, continuous_batching=is_continuous)
    counts = Counter((completion or [-1])[0] for completion in ids_of(completions_of(backend, requested)).values())
    with torch.no_grad():
        scores, tokens = (target(torch.tensor([tokenizer.encode("Why")])).logits[0, -1] / 1.5).topk(6)
    probabilities = scores.softmax(-1)
    kept = int((probabilities.cumsum(-1) < 0.95).sum()) + 1
    probabilities = probabilities[:kept] / probabilities[:kept].sum()
    assert kept > 2
    assert set(counts) <= set(tokens[:kept].tolist())
    statistic = sum(
        (counts[int(token)] - number * float(p)) ** 2 / (number * float(p))
        for token, p in zip(tokens, probabilities, strict=False)
    )
    freedom = kept - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_a_token_is_sampled_where_the_cumulative_probability_exceeds_the_number():
    scores = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]] * 5).log()
    assert sample_tokens(scores, [0.0, 0.4999, 0.5, 0.75, 1 - 2**-32]).tolist() == [1, 1, 3, 4, 4]
    numbers = [RandomNumbers(7).next() for _ in range(2)]
    assert numbers[0] == numbers[1]
    assert 0 <= numbers[0] < 1


def test_a_prompt_without_a_completion_fails_alone(tokenizer):
    target = make_chat_target(max_position_embeddings=40)
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no\nsuch role') }}{% endif %}" + template
    )
    texts = ["good", "bad", "x" * 60, "y" * 36, "z" * 37, "fine"]
    requested = [TurnRequest(text[0], [{"role": "user", "content": text}]) for text in texts]
    completions = completions_of(
        LocalBackend(target, tokenizer, SamplingParameters(8), batch_size=2), [*requested, TurnRequest("none", [])]
    )
    reasons = {name: completion.reason for name, completion in completions.items() if isinstance(completion, Failure)}
    assert set(reasons) == {"b", "x", "z", "none"}
    assert "no such role" in reasons["b"]
    assert "63 tokens" in reasons["x"]
    assert "40" in reasons["z"]
    y = completions["y"]  # 39 tokens: room for one
    assert isinstance(y, Completion)
    assert y.prompt_ids
    assert len(y.prompt_ids) == 39
    assert y.token_ids == alone(target, y.prompt_ids, 1)
    assert y.finish_reason == "length"


@pytest.mark.parametrize("is_continuous", [True, False])
def test_a_prompt_with_a_token_without_an_embedding_row_fails_alone(tokenizer, is_continuous):
    target = make_chat_target(vocab_size=len(tokenizer), pad_token_id=None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"], "pad_token": "<|unused|>"})  # 261, 262
    requested = [
        TurnRequest(text, [{"role": "user", "content": text}]) for text in ("a", "b<|new|>", "abc", "<|unused|>")
    ]
    backend = LocalBackend(
        target, tokenizer, SamplingParameters(8), batch_size=4, continuous_batching=is_continuous or None
    )
    backend.continuous_batching = is_continuous
    completions = completions_of(backend, requested)
    for text in ("a", "abc"):
        assert completions[text].token_ids == alone(target, completions[text].prompt_ids, 8)
    assert (
        "token 262 ('<|new|>'), and the embedding of the target has the rows 0 … 260" in completions["b<|new|>"].reason
    )
    assert "token 261 ('<|unused|>')" in completions["<|unused|>"].reason


def test_tools_and_template_arguments_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ tools | length }}{{ mood }}{{ messages[-1]['content'] }}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}] * 2
    requested = TurnRequest(
        "a", [{"role": "user", "content": "!"}], tools=tools, chat_template_kwargs={"mood": "glad"}
    )
    completion = completions_of(LocalBackend(make_chat_target(), tokenizer, SamplingParameters(2)), [requested])["a"]
    assert isinstance(completion, Completion)
    assert tokenizer.decode(completion.prompt_ids) == "2glad!"


def test_the_queue_is_read_as_far_as_needed_and_follow_ups_are_completed(tokenizer):
    target, read = make_chat_target(), []

    def endless():
        for index in range(10**6):
            read.append(index)
            yield TurnRequest(f"row {index}", [{"role": "user", "content": "Hi"}])

    found = LocalBackend(target, tokenizer, SamplingParameters(3), batch_size=2).completions(RequestQueue(endless()))
    for _ in range(3):
        next(found)
    found.close()
    assert len(read) <= 16

    queue = RequestQueue(make_requests(3))
    turns = []
    for request, completion in LocalBackend(target, tokenizer, SamplingParameters(3), batch_size=2).completions(queue):
        assert isinstance(completion, Completion)
        turns.append((request.conversation_id, request.turn))
        if request.turn < 2:
            messages = [*request.messages, completion.message, {"role": "user", "content": "And?"}]
            queue.put(TurnRequest(request.conversation_id, messages, request.turn + 1))
    assert sorted(turns) == [(f"row {index}", turn) for index in range(3) for turn in range(3)]


def test_a_failed_first_turn_may_be_followed_by_another_request(tokenizer):
    queue = RequestQueue([TurnRequest("bad", [])])
    backend = LocalBackend(make_chat_target(), tokenizer, SamplingParameters(2))
    names = []
    for request, _ in backend.completions(queue):
        names.append(request.conversation_id)
        if request.conversation_id == "bad":
            queue.put(make_requests(1)[0])
    assert names == ["bad", "row 0"]


@pytest.mark.parametrize("is_continuous", [True, False])
def test_out_of_memory_halves_the_batch_and_loses_nothing(tokenizer, monkeypatch, is_continuous):
    target = make_chat_target()
    expected = ids_of(
        completions_of(
            LocalBackend(target, tokenizer, SamplingParameters(8), continuous_batching=True, batch_size=1),
            make_requests(11),
        )
    )
    forward = target.forward

    def with_room_for_three(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 3:
            raise torch.OutOfMemoryError("no room")
        return forward(*args, **kwargs)

    # The backend reads the signature of forward; functions have the attribute only once it is set
    with_room_for_three.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(target, "forward", with_room_for_three)
    backend = LocalBackend(target, tokenizer, SamplingParameters(8), batch_size=8, continuous_batching=is_continuous)
    assert ids_of(completions_of(backend, make_requests(11))) == expected


def test_targets_that_have_other_caches_or_masks_are_answered_by_generate(tokenizer):
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
        eos_token_id=END,
        pad_token_id=PAD,
    )
    neo = GPTNeoConfig(
        vocab_size=272,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
    )
    for target, reason in (
        (Qwen3NextForCausalLM(config).eval(), "linear_attention"),
        (GPTNeoForCausalLM(neo).eval(), "masks of their own"),
    ):
        backend = LocalBackend(target, tokenizer, SamplingParameters(6), batch_size=3)
        assert not backend.continuous_batching
        for completion in completions_of(backend, make_requests(5)).values():
            assert isinstance(completion, Completion)
            assert completion.prompt_ids
            assert completion.token_ids == alone(target, completion.prompt_ids, 6)
        with pytest.raises(ValueError, match=reason):
            LocalBackend(target, tokenizer, SamplingParameters(6), continuous_batching=True)


def test_the_target_is_left_as_it_was(tokenizer):
    target = make_chat_target()
    before = (target.config.to_dict(), target.generation_config.to_dict(), target.training)
    found = LocalBackend(target, tokenizer, SamplingParameters(5, temperature=0.7), batch_size=2).completions(
        RequestQueue(make_requests(4))
    )
    next(found)
    assert torch.is_grad_enabled()
    assert (target.config.to_dict(), target.generation_config.to_dict(), target.training) == before
    found.close()
    assert (target.config.to_dict(), target.generation_config.to_dict(), target.training) == before


def test_what_cannot_be_done_is_refused_with_the_reason(tokenizer):
    target = make_chat_target()
    with pytest.raises(ValueError, match="batch_size=0"):
        LocalBackend(target, tokenizer, SamplingParameters(), batch_size=0)
    target.generation_config.num_beams = 3
    LocalBackend(target, tokenizer, SamplingParameters())
    with pytest.raises(ValueError, match="beam"):
        LocalBackend(target, tokenizer, SamplingParameters(temperature=None))
    target.generation_config.num_beams = 1
    target.generation_config.max_time = 3.0
    with pytest.raises(ValueError, match="MaxTimeCriteria"):
        LocalBackend(target, tokenizer, SamplingParameters())
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        LocalBackend(make_chat_target(), tokenizer, SamplingParameters())
