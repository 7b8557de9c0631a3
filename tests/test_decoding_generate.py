"""Calls of decoding with a draft: those that work, those that are refused, and how often the host waits."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from conftest import make_draft
from decoding_pairs import make_family, make_target, ragged_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    DynamicCache,
    FalconConfig,
    GPTNeoConfig,
    StaticCache,
    T5Config,
    pipeline,
)
from transformers.utils import logging as transformers_logging

from dflash_hf.decoding.generate import dflash_decoding, speculative_generate

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 10}
PROMPT = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, r"ask for beam search \(num_beams=2\).*Set num_beams=1"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "ask for contrastive search"),
        ({"dola_layers": "low"}, "ask for dola generation"),
        ({"output_hidden_states": True}, "output_hidden_states=True is set, .* does not collect it. Leave it out"),
        ({"output_attentions": True}, "output_attentions=True is set, .* does not collect it. Leave it out"),
        ({"block_size": 0}, "block_size=0 must be 'auto' or a number from 1 to 4"),
        ({"block_size": 5}, "block_size=5 must be 'auto' or a number from 1 to 4"),
        ({"block_size": "many"}, "block_size='many' must be 'auto' or a number from 1 to 4"),
        ({"block_size": True}, "block_size=True must be 'auto' or a number from 1 to 4"),
        ({"proposal": "best"}, "proposal='best' must be one of argmax, sample"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0]])},
            "zeros after real tokens, .* padded on the left. Set tokenizer.padding_side='left'",
        ),
        (
            {"attention_mask": torch.tensor([[1, 0, 1]])},
            "zeros after real tokens, .* padded on the left. Set tokenizer.padding_side='left'",
        ),
        ({"attention_mask": torch.ones(1, 7)}, "attention_mask covers 7 tokens and input_ids has 3.*Pass all of it"),
        ({"inputs_embeds": torch.ones(1, 3, 32)}, "inputs_embeds were given.*Pass input_ids alone"),
        ({"inputs_embeds": torch.ones(1, 3, 32), "input_ids": None}, "inputs_embeds were given.*Pass input_ids alone"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_prefill(arguments, message):
    """The loop does not ignore beams and other settings that it does not support."""
    target = make_target()
    draft = make_draft(target)
    passes = []
    target.register_forward_pre_hook(lambda module, args: passes.append(1))
    with pytest.raises(ValueError, match=message):
        speculative_generate(target, draft, **{**PROMPT, **GREEDY, **arguments})
    assert passes == []


@pytest.mark.parametrize("token", [97, 10**6, -1])
@pytest.mark.parametrize("place", [0, 2])
def test_a_token_without_an_embedding_row_is_refused_before_the_prefill(token, place):
    target = make_target()
    draft = make_draft(target)
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    input_ids = PROMPT["input_ids"].clone()
    input_ids[0, place] = token
    for call in (
        lambda: speculative_generate(target, draft, **{**PROMPT, "input_ids": input_ids}, **GREEDY),
        lambda: target.generate(input_ids, custom_generate=dflash_decoding, draft=draft, **GREEDY),
    ):
        with pytest.raises(ValueError, match=rf"token {token}, and the embedding of the target has the rows 0 … 96"):
            call()
    assert not passes


def test_several_answers_of_greedy_decoding_are_refused_and_several_samples_are_drawn():
    target = make_target()
    draft = make_draft(target)
    with pytest.raises(ValueError, match="do not support `num_return_sequences`"):
        speculative_generate(target, draft, **PROMPT, **GREEDY, num_return_sequences=2)
    torch.manual_seed(0)
    samples = speculative_generate(
        target, draft, **ragged_prompts(2), **{**GREEDY, "do_sample": True}, num_return_sequences=3
    )
    assert samples.sequences.shape == (6, 19)
    assert torch.equal(samples.sequences[:, :9], ragged_prompts(2)["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(sequence) for sequence in samples.sequences.tolist()}) == 6


def test_what_is_no_draft_and_what_is_another_targets_draft_is_refused():
    """A wrong object or pair fails before the prefill, with a message that shows the right call."""
    target = make_target()
    draft = make_draft(target)
    for wrong in (target, "some/draft"):
        with pytest.raises(TypeError, match=rf"the type .*{type(wrong).__name__} and must be a DFlashDraftModel"):
            speculative_generate(target, wrong, **PROMPT, **GREEDY)
    how = re.escape(
        "and must be a DFlashDraftModel. Call target.generate(**inputs, custom_generate=dflash_decoding, draft=draft)."
    )
    with pytest.raises(TypeError, match=f"draft has the type NoneType {how}"):  # the name that classic generation uses
        target.generate(**PROMPT, **GREEDY, custom_generate=dflash_decoding, assistant_model=draft)
    with pytest.raises(ValueError, match=r"width 32 against 64.*Use the draft with its own target"):
        speculative_generate(make_target(hidden_size=64, num_attention_heads=8), draft, **PROMPT, **GREEDY)


def test_an_encoder_decoder_is_refused():
    config = T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    with pytest.raises(ValueError, match="has an encoder, and a draft needs a decoder-only model"):
        speculative_generate(AutoModelForSeq2SeqLM.from_config(config), make_draft(make_target()), **PROMPT, **GREEDY)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=97, hidden_size=32, n_layer=4, n_head=4, bos_token_id=None, eos_token_id=None),
        FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=True),
        GPTNeoConfig(
            vocab_size=97,
            hidden_size=32,
            num_layers=4,
            num_heads=4,
            attention_types=[[["global", "local"], 2]],
            window_size=5,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_position_biases_that_need_sequences_of_equal_length_take_one_sequence(config):
    target = AutoModelForCausalLM.from_config(config).eval()
    draft = make_draft(target, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    settings = {**GREEDY, "eos_token_id": None}
    plain = target.generate(**PROMPT, **settings)
    assert torch.equal(speculative_generate(target, draft, **PROMPT, **settings).sequences, plain)
    unpadded = {name: value.repeat(2, 1) for name, value in PROMPT.items()}
    for sequences in (ragged_prompts(2), unpadded):
        with pytest.raises(ValueError, match=r"(position bias .ALiBi|its windows).*Decode one sequence at a time"):
            speculative_generate(target, draft, **sequences, **settings)


@pytest.mark.parametrize("padded", [True, False])
def test_attention_without_a_mask_of_our_own_takes_one_sequence(padded):
    target = make_target()
    draft = make_draft(target)
    target.config._attn_implementation = "flash_attention_2"
    sequences = ragged_prompts(2) if padded else {name: value.repeat(2, 1) for name, value in PROMPT.items()}
    with pytest.raises(ValueError, match=r"takes no mask for sequences of different lengths.*one sequence at a time"):
        speculative_generate(target, draft, **sequences, **GREEDY)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("implementation", ["dynamic", "static", "offloaded", "offloaded_static"])
def test_other_kinds_of_cache_do_not_change_the_text(name, implementation, caplog):
    target = make_family(name)
    draft = make_draft(target)
    transformers_logging.warning_once.cache_clear()
    plain = target.generate(**PROMPT, **GREEDY)
    for _ in range(2):
        drafted = speculative_generate(target, draft, **PROMPT, **GREEDY, cache_implementation=implementation)
        assert torch.equal(drafted.sequences, plain)
    warnings = [
        record.message for record in caplog.records if "is not used, because decoding with a draft" in record.message
    ]
    assert len(warnings) == implementation.startswith("offloaded")
    static = StaticCache(config=target.config, max_cache_len=32)
    for more in ({"cache": static}, {"use_cache": False}):
        assert torch.equal(speculative_generate(target, draft, **PROMPT, **GREEDY, **more).sequences, plain)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_5"])
def test_a_cache_of_plain_generation_gives_the_text_of_a_fresh_run(name, caplog):
    target = make_family(name)
    draft = make_draft(target)
    cache = DynamicCache(config=target.config)
    text = target.generate(**PROMPT, **GREEDY, cache=cache)
    longer = torch.cat([text, torch.tensor([[16, 23, 42]])], dim=1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    fresh = target.generate(**inputs, **GREEDY)
    transformers_logging.warning_once.cache_clear()
    for mask in ({}, {"attention_mask": inputs["attention_mask"]}):
        with pytest.raises(ValueError, match=r"continues from a cache with the new tokens alone.*Pass all of it"):
            speculative_generate(target, draft, longer[:, -3:], **GREEDY, cache=cache, **mask)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, cache=cache)
    assert torch.equal(drafted.sequences, fresh)
    assert "so the whole text is read and the cache stays unchanged" in caplog.text


@pytest.mark.parametrize("by_config", [False, True])
def test_sampling_defaults_of_the_target_count(by_config):
    target = make_target()
    draft = make_draft(target)
    settings = {"do_sample": True, "temperature": 1.7, "top_k": 3}
    if by_config:
        for name, value in settings.items():
            setattr(target.generation_config, name, value)
        settings = {}
    texts = []
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        output = speculative_generate(
            target, draft, **PROMPT, **settings, max_new_tokens=10, output_scores=True, pad_token_id=0
        )
        assert len(output.scores) == 10
        assert all(int(step.isfinite().sum()) == 3 for step in output.scores)
        texts.append(output.sequences.tolist())
    assert texts[0] != texts[1] == texts[2]
    greedy = target.generate(**PROMPT, **GREEDY)
    assert texts[0] != greedy.tolist()
    assert torch.equal(speculative_generate(target, draft, **PROMPT, **GREEDY).sequences, greedy)


def test_a_pipeline_decodes_with_a_draft(tokenizer):
    target = make_target(vocab_size=272, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    draft = make_draft(target, mask_token_id=271)
    settings = {"max_new_tokens": 8, "do_sample": False}
    passes = []
    draft.register_forward_pre_hook(lambda module, args: passes.append(1))
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer)
    calls: list[tuple[Any, dict]] = [
        ("hello", {}),
        (["hello", "a"], {"batch_size": 2}),
        ([{"role": "user", "content": "hi"}], {}),
    ]
    for prompt, more in calls:
        plain = generator(prompt, **settings, **more)
        for with_draft in (
            {"custom_generate": dflash_decoding, "draft": draft},
            {"custom_generate": functools.partial(dflash_decoding, draft=draft)},
        ):
            passes.clear()
            assert generator(prompt, **settings, **more, **with_draft) == plain
            assert passes
    plain = generator("hello", **settings)
    decode = functools.partial(dflash_decoding, draft=draft)
    fixed = pipeline("text-generation", model=target, tokenizer=tokenizer, custom_generate=decode)
    assert fixed("hello", **settings) == plain
    # as `assistant_model` the draft runs in the loop of transformers, which each call has to ask for
    native = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    with pytest.raises(AttributeError, match="speculation_type='dflash'"):
        native("hello", **settings)
    assert native("hello", **settings, speculation_type="dflash") == plain
    assert native("hello", **settings, custom_generate=dflash_decoding, draft=draft) == plain


class Waits(TorchDispatchMode):
    """Record the operations at which the host has to wait for the values of a tensor."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith(self.NAMES):
            self.seen.append(name)
        if name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.seen.append("index by bool")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "top_k": 5}, {"repetition_penalty": 1.3}, {"tree_size": 9}]
)
@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_host_waits_once_a_pass(name, num_sequences, settings, monkeypatch):
    target = make_family(name)
    draft = make_draft(target)
    inputs = (
        ragged_prompts(num_sequences) if num_sequences > 1 else PROMPT
    )  # transformers makes the mask of a single padded sequence
    passes, lists = [], []
    own_tolist = torch.Tensor.tolist
    with Waits() as waits:

        def tolist(tensor):
            lists.append(len(waits.seen))
            return own_tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

        def on_pass(verify_pass) -> None:
            passes.append((len(lists), len(waits.seen)))

        output = speculative_generate(
            target,
            draft,
            **inputs,
            max_new_tokens=15,
            pad_token_id=0,
            **{"do_sample": False, **settings},
            on_pass=on_pass,
        )
    monkeypatch.undo()
    per_pass = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in itertools.pairwise(passes[1:])]
    assert len(per_pass) > 3
    # the host reads the committed tokens at once, and nothing else
    assert {lists for lists, _ in per_pass} == {1}
    assert {scalars for _, scalars in per_pass} == {0}
    assert output.statistics.num_verify_passes > 3


def test_a_cache_of_an_earlier_call_gives_wrong_text_in_the_loop_of_transformers(target, draft):
    """README.md names it as a limit of transformers 5.24. When this test fails, the limit is gone."""
    settings = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    native = {"assistant_model": draft, "speculation_type": "dflash"}
    first = target.generate(torch.tensor([[5, 9, 11, 3]]), **settings, **native)
    longer = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
    plain = target.generate(longer, **settings).sequences
    assert torch.equal(target.generate(longer, **settings, **native).sequences, plain)
    assert not torch.equal(target.generate(longer, **settings, **native, cache=first.cache).sequences, plain)
