"""Processors and criteria see the texts of plain generation, each once and in its order, and no other text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xgrammar
from decoding_pairs import count_near_ties, make_family, make_guessing_draft, make_target, ragged_prompts
from tiers import thinned
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria
from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

from dflash_hf.decoding.generate import speculative_generate

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 16}
HOW = [{}, {"tree_size": 10}]


class Counter(LogitsProcessor):
    """Forbid another third of the vocabulary at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == self.calls % 3, -torch.inf)


class Automaton(LogitsProcessor):
    """Advance by the last token of each sequence, and allow only tokens of the other parity than the state."""

    def __init__(self) -> None:
        self.states: list[int] | None = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = [0] * len(input_ids)
        else:
            for index, token in enumerate(input_ids[:, -1].tolist()):
                if token:  # 0 follows the end of a sequence
                    assert token % 2 == self.states[index] % 2, "this token was forbidden"
                    self.states[index] += 1 + token // 2
        for index, state in enumerate(self.states):
            scores[index, 1 - state % 2 :: 2] = -torch.inf
        scores[:, 0] = -torch.inf
        return scores


class MovingAverage(LogitsProcessor):
    """Keep the scores and the texts of earlier calls, and change the scores in place."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []
        self.texts: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        for earlier, text in zip(self.texts, self.texts[1:], strict=False):
            assert torch.equal(text[:, : earlier.shape[1]], earlier)
        self.texts.append(input_ids)
        self.scores.append(scores.clamp(min=-50))
        for index, earlier in enumerate(self.scores[-4:-1]):
            scores -= 0.3 * (index + 1) * earlier
        return scores


def trie_processor(batch_texts: list[list[list[int]]], length: int) -> Callable[[int, torch.Tensor], list[int]]:
    """Make a `prefix_allowed_tokens_fn` that knows the prefixes of the texts of each sequence and fails at others."""

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        new = text[length:].tolist()
        if 0 in new:
            return [0]  # the sequence has ended
        following = {known[len(new)] for known in batch_texts[batch_id] if known[: len(new)] == new}
        if not following:
            raise KeyError(f"{new} is no prefix of sequence {batch_id}")
        return sorted(following)

    return allowed


def trie_texts(texts: torch.Tensor, length: int) -> list[list[list[int]]]:
    """Return for each sequence its greedy text and texts that part from it, at every place."""
    generator = torch.Generator().manual_seed(5)
    known = []
    for text in texts[:, length:].tolist():
        others = [
            text[:place] + torch.randint(1, 96, (len(text) - place,), generator=generator).tolist()
            for place in range(len(text))
        ]
        known.append([text, *others])
    return known


@pytest.mark.parametrize("how", HOW, ids=["chain", "tree"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
@pytest.mark.parametrize("kind", [Counter, Automaton, MovingAverage, "trie", "together"])
def test_processors_with_a_state_see_the_texts_of_plain_generation(kind, num_sequences, how):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=num_sequences)
    length = inputs["input_ids"].shape[1]
    greedy_texts = target.generate(**inputs, **GREEDY)

    def settings() -> dict[str, Any]:
        if kind == "trie":
            return {**GREEDY, "prefix_allowed_tokens_fn": trie_processor(trie_texts(greedy_texts, length), length)}
        kinds = [Counter, MovingAverage] if kind == "together" else [kind]
        further = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3} if kind == "together" else {}
        return {**GREEDY, **further, "logits_processor": LogitsProcessorList([make() for make in kinds])}

    free = target.generate(**inputs, **settings())
    ends = [int(free[0, 12])] if num_sequences > 1 else []  # sequences end at different places
    ended = {"eos_token_id": ends or None}
    plain = target.generate(**inputs, **settings(), **ended)
    for wrong_share in (0.0, 0.4, 1.1):
        draft.teach(target, plain, wrong_share, second_share=0.5)
        drafted = speculative_generate(target, draft, **inputs, **settings(), **ended, **how)
        assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
        if wrong_share == 0.0 and num_sequences == 1:
            assert drafted.statistics.acceptance_length > 2


@pytest.mark.parametrize("how", HOW, ids=["chain", "tree"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_the_calls_of_processors_and_criteria_are_those_of_plain_generation(num_sequences, how):
    events: list[tuple] = []

    class Watching(LogitsProcessor):
        def __call__(self, input_ids, scores):
            events.append(("processor", input_ids.tolist()))
            return scores

    class Ending(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            events.append(("criterion", input_ids.tolist(), None if scores is None else len(scores)))
            return input_ids[:, 9:].sum(1) % 11 == 0

    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=3)
    for further in ({}, {"return_dict_in_generate": True, "output_scores": True}):
        settings = {**GREEDY, "eos_token_id": 1, **further}
        calls = {"logits_processor": LogitsProcessorList([Watching()])}
        for with_processor in (False, True):
            given = {**settings, **(calls if with_processor else {})}

            def ending() -> StoppingCriteriaList:
                return StoppingCriteriaList([Ending()])

            events.clear()
            plain = target.generate(**inputs, **given, stopping_criteria=ending())
            texts = plain if isinstance(plain, torch.Tensor) else plain.sequences
            expected = list(events)
            draft.teach(target, target.generate(**inputs, **GREEDY), 0.3, second_share=0.5)
            events.clear()
            drafted = speculative_generate(target, draft, **inputs, **given, **how, stopping_criteria=ending())
            assert torch.equal(drafted.sequences, texts)
            assert events == expected
    assert any(event[0] == "processor" for event in events)


@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_a_criterion_that_reads_scores_gets_those_of_plain_generation(num_sequences):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=4)
    draft.teach(target, target.generate(**inputs, **GREEDY), 0.2)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 1}
    seen: list[list[torch.Tensor]] = []

    class Keeping(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen[-1].append(scores[-1].clone())
            assert len(scores) == input_ids.shape[1] - 9
            return torch.zeros(len(input_ids), dtype=torch.bool)

    lengths = set()
    for threshold in (0.0, 0.5, 0.9, 0.99):
        for criteria in ([ConfidenceCriteria(threshold)], [Keeping(), ConfidenceCriteria(threshold)]):
            given = {**GREEDY, **wanted, "stopping_criteria": StoppingCriteriaList(criteria)}
            seen.append([])
            plain = target.generate(**inputs, **given)
            seen.append([])
            drafted = speculative_generate(target, draft, **inputs, **given)
            assert torch.equal(drafted.sequences, plain.sequences)
            lengths.add(plain.sequences.shape[1])
            for ours, theirs in zip(seen[-1], seen[-2], strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert len(lengths) > 1


def test_a_criterion_without_scores_gets_none_as_in_plain_generation():
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(1)
    draft.teach(target, target.generate(**inputs, **GREEDY), 0.0)
    with pytest.raises(TypeError, match="NoneType"):  # plain generation raises it, too
        target.generate(**inputs, **GREEDY, stopping_criteria=StoppingCriteriaList([ConfidenceCriteria(0.5)]))
    with pytest.raises(TypeError, match="NoneType"):
        speculative_generate(
            target, draft, **inputs, **GREEDY, stopping_criteria=StoppingCriteriaList([ConfidenceCriteria(0.5)])
        )


@pytest.mark.parametrize("how", HOW, ids=["chain", "tree"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
@pytest.mark.parametrize(
    "settings",
    [
        {"guidance_scale": 1.7},
        {"watermarking_config": WatermarkingConfig(bias=4.0)},
        {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 31, 77])},
        {"encoder_repetition_penalty": 1.8},
        {"encoder_no_repeat_ngram_size": 1},
        {"forced_bos_token_id": 7},
        {"renormalize_logits": True, "remove_invalid_values": True, "min_length": 14, "eos_token_id": 12},
    ],
    ids=["guidance", "lefthash", "selfhash", "synthid", "encoder_penalty", "encoder_ngrams", "bos", "min_length"],
)
def test_processors_of_the_generation_config_give_the_text_of_plain_generation(settings, num_sequences, how):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=8)
    plain = target.generate(**inputs, **GREEDY, **settings)
    draft.teach(target, plain, 0.3)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, **settings, **how)
    assert torch.equal(drafted.sequences, plain)


@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_recurrent_targets_take_processors_with_a_state(num_sequences):
    target = make_family("qwen3_5")
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=2)
    plain = target.generate(**inputs, **GREEDY, logits_processor=LogitsProcessorList([Automaton()]))
    draft.teach(target, plain, 0.3)
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, logits_processor=LogitsProcessorList([Automaton()])
    )
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0


@pytest.mark.parametrize("proposal", ["argmax", "sample"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_sampling_shows_a_processor_with_a_state_only_texts_that_it_allowed(num_sequences, proposal):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=6)
    draft.teach(target, target.generate(**inputs, **GREEDY), 0.3)
    for seed in range(5):
        torch.manual_seed(seed)
        drafted = speculative_generate(
            target, draft, **inputs, do_sample=True, temperature=2.0, pad_token_id=0, max_new_tokens=14,
            proposal=proposal, logits_processor=LogitsProcessorList([Automaton()]),
        )  # fmt: skip
        for text in drafted.sequences[:, 9:].tolist():
            state = 0
            for token in text:
                assert token % 2 == state % 2
                state += 1 + token // 2


JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"enum": [1, 22, 333]}, "is_here": {"type": "boolean"}},
    "required": ["name", "age", "is_here"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges, trained on JSON texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        json.dumps({"name": name, "age": age, "is_here": age > 9}) for name in ("Ada", "Grace") for age in range(30)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


@pytest.mark.parametrize("how", HOW, ids=["chain", "tree"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_the_processor_of_xgrammar_gives_the_text_of_plain_generation(bpe_tokenizer, num_sequences, how):
    vocabulary = len(bpe_tokenizer)
    target = make_target(vocab_size=vocabulary + 5)
    draft = make_guessing_draft(target, mask_token_id=vocabulary + 4)
    info = xgrammar.TokenizerInfo.from_huggingface(bpe_tokenizer, vocab_size=vocabulary + 5)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(JSON_SCHEMA), any_whitespace=False)
    bpe_tokenizer.padding_side = "left"
    prompts = ["Who is here?", "A", "The age of Grace"][:num_sequences]
    inputs = dict(bpe_tokenizer(prompts, return_tensors="pt", padding=True))
    inputs.pop("token_type_ids", None)

    def settings() -> dict[str, Any]:
        return {
            "do_sample": False, "max_new_tokens": 60, "pad_token_id": bpe_tokenizer.pad_token_id,
            "eos_token_id": bpe_tokenizer.eos_token_id,
            "logits_processor": LogitsProcessorList([GrammarProcessor(grammar)]),
        }  # fmt: skip

    plain = target.generate(**inputs, **settings())
    for text in bpe_tokenizer.batch_decode(plain[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
        assert set(json.loads(text)) == {"name", "age", "is_here"}
    for wrong_share in (0.0, 0.4):
        draft.teach(target, plain, wrong_share)
        drafted = speculative_generate(target, draft, **inputs, **settings(), **how)
        assert torch.equal(drafted.sequences, plain)
        if wrong_share == 0.0 and num_sequences == 1:
            assert drafted.statistics.acceptance_length > 3
