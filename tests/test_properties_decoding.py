"""Random generation settings, processors and criteria on random pairs give the text of plain generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_pairs import count_near_ties, make_family, make_guessing_draft, ragged_prompts
from hypothesis import assume, given
from hypothesis import strategies as st
from test_decoding_ordered_decision import Automaton, Counter, MovingAverage
from transformers import (
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from dflash_hf.decoding.generate import speculative_generate

pytestmark = pytest.mark.properties


class EndsAtSum(StoppingCriteria):
    """End each sequence whose new tokens add up to a multiple of a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, 9:].sum(1) % self.divisor == 0


class EndsByCalls(StoppingCriteria):
    """End all sequences after a number of calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, input_ids, scores, **kwargs):
        self.num_calls -= 1
        return self.num_calls <= 0


TOKENS = st.integers(1, 95)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.7, 1.2, 2.5]),
    "encoder_repetition_penalty": st.sampled_from([0.6, 1.5]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=20),
    "sequence_bias": st.dictionaries(
        st.lists(TOKENS, min_size=1, max_size=3).map(tuple), st.floats(-9, 9), min_size=1, max_size=6
    ),
    "min_length": st.integers(0, 25),
    "min_new_tokens": st.integers(1, 20),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": TOKENS,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 8), st.sampled_from([1.1, 1.6])),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=50, unique=True),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=50, unique=True),
    "guidance_scale": st.sampled_from([1.5, 3.0]),
    "watermarking_config": st.sampled_from(
        [
            WatermarkingConfig(bias=3.0),
            WatermarkingConfig(bias=3.0, seeding_scheme="selfhash"),
            SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 31, 77]),
        ]
    ),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    "prefill_chunk_size": st.integers(1, 9),
    "max_new_tokens": st.integers(1, 18),
}
PROCESSORS = {"counter": Counter, "automaton": Automaton, "average": MovingAverage}
PAIRS: dict[tuple, tuple] = {}


def pair(family: str, block_size: int) -> tuple:
    """Return a pair that is made once."""
    if (family, block_size) not in PAIRS:
        target = make_family(family)
        PAIRS[family, block_size] = target, make_guessing_draft(target, block_size=block_size)
    return PAIRS[family, block_size]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy of a call: the pair, the prompts, the settings, and how it drafts."""
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4, unique=True))
    settings = {name: draw(SETTINGS[name]) for name in names}
    ends = draw(st.lists(TOKENS, max_size=30, unique=True))
    if {"min_length", "min_new_tokens", "exponential_decay_length_penalty", "forced_eos_token_id"} & settings.keys():
        ends = ends or [7]
    return {
        "family": draw(st.sampled_from(["llama", "llama", "mistral", "gemma3", "qwen3_5"])),
        "block_size": draw(st.integers(2, 6)),
        "num_sequences": draw(st.sampled_from([1, 1, 3])),
        "prompt_seed": draw(st.integers(0, 99)),
        # with some end token, plain generation pads sequences that have ended
        "settings": {"max_new_tokens": 12, **settings, "eos_token_id": ends or 96},
        "processors": draw(st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=2, unique=True)),
        "ends_at_sum": draw(st.sampled_from([None, None, 5, 13])),
        "ends_by_calls": draw(st.sampled_from([None, None, 1, 6])),
        "wrong_share": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "tree": draw(st.booleans()),
        # one possible token: sampling is then deterministic, and its proposals need not be
        "sampling": draw(st.sampled_from([None, None, "argmax", "sample"])),
        "wants_scores": draw(st.booleans()),
    }


@given(calls())
def test_the_text_is_that_of_plain_generation(call: dict[str, Any]) -> None:
    target, draft = pair(call["family"], call["block_size"])
    inputs = ragged_prompts(call["num_sequences"], seed=call["prompt_seed"])
    how: dict[str, Any] = {}
    if call["sampling"]:
        how["proposal"] = call["sampling"]
    if call["tree"] and call["family"] != "qwen3_5" and call["sampling"] != "sample":
        how["tree_size"] = call["block_size"] + 6

    def settings() -> dict[str, Any]:
        criteria = [
            kind(call[name])
            for name, kind in (("ends_at_sum", EndsAtSum), ("ends_by_calls", EndsByCalls))
            if call[name] is not None
        ]
        own = [PROCESSORS[name]() for name in call["processors"]]
        return {
            "do_sample": call["sampling"] is not None,
            **({"top_k": 1} if call["sampling"] else {}),
            "pad_token_id": 0,
            **call["settings"],
            **({"logits_processor": LogitsProcessorList(own)} if own else {}),
            **({"stopping_criteria": StoppingCriteriaList(criteria)} if criteria else {}),
            **({"return_dict_in_generate": True, "output_scores": True} if call["wants_scores"] else {}),
        }

    if call["sampling"]:  # a tie is decided by chance, and no token may be left
        try:
            steps = target.generate(**inputs, **{**settings(), "return_dict_in_generate": True, "output_scores": True})
        except (RuntimeError, ValueError):
            assume(False)
        best = torch.stack(steps.scores).topk(2).values
        assume(bool((best[..., 0] - best[..., 1] > 1e-4).all()))

    def sequences(output: Any) -> torch.Tensor:
        return output if isinstance(output, torch.Tensor) else output.sequences

    num_passes = []
    handle = target.register_forward_pre_hook(lambda *_: num_passes.append(1))
    try:
        try:
            plain: Any = target.generate(**inputs, **settings())
        except ValueError:  # settings that contradict each other
            with pytest.raises(ValueError):  # noqa: PT011 - the message is that of transformers
                speculative_generate(target, draft, **inputs, **settings(), **how)
            return
        try:
            draft.teach(target, sequences(plain), call["wrong_share"], second_share=0.5)
        except ValueError:  # no hidden state has some token as its second choice
            draft.teach(target, sequences(plain), call["wrong_share"])
        num_passes.clear()
        try:
            drafted = speculative_generate(target, draft, **inputs, **settings(), **how)
        except ValueError:
            assert not num_passes, "a refusal comes before the prefill"
            raise
    finally:
        handle.remove()
    assert count_near_ties(target, inputs, sequences(plain), drafted.sequences) == 0
    if call["wants_scores"]:
        assert len(drafted.scores) == len(plain.scores)
