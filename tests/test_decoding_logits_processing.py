"""Logits processors see the same texts and scores in a block as in plain generation."""

from __future__ import annotations

import pytest
import torch
from decoding_pairs import count_near_ties, make_guessing_draft, make_target, ragged_prompts
from tiers import thinned
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.logits_processing import PREFIX_FREE, BlockLogitsProcessor

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 16}


class AvoidsWhatWasThreeBefore(LogitsProcessor):
    """Forbid the token three columns before, and tokens of the parity of the length."""

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids[:, -3:-2], -torch.inf)
        scores[:, input_ids.shape[1] % 2 :: 2] -= 1.5
        return scores


SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [17, 18], [60, 61, 62]] + [[token] for token in range(20, 40)]},
    "min_length": {"min_new_tokens": 9, "eos_token_id": list(range(1, 50))},
    "forced_eos": {"forced_eos_token_id": 11, "eos_token_id": 11},
    "suppress": {"suppress_tokens": list(range(0, 96, 2))},
    "begin_suppress": {"begin_suppress_tokens": list(range(50, 96))},
    "sequence_bias": {"sequence_bias": {(7,): 4.0, (3, 7): 3.0, (90,): -9.0}},
    "decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 12},
    "custom": {"logits_processor": [AvoidsWhatWasThreeBefore()]},
    "together": {
        "repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "suppress_tokens": [0, 9],
        "logits_processor": [AvoidsWhatWasThreeBefore()],
    },
}  # fmt: skip


@pytest.mark.parametrize("num_sequences", thinned([1, 4], 4))
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_text_with_processors_equals_plain_generation(name, num_sequences):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=num_sequences)

    ends = {}

    def settings() -> dict:
        given = {**GREEDY, **ends, **SETTINGS[name]}
        if "logits_processor" in given:
            given["logits_processor"] = LogitsProcessorList(given["logits_processor"])
        return given

    if num_sequences > 1:  # finished sequences shift the indices of the others
        texts = target.generate(**inputs, **settings())
        ends["eos_token_id"] = [int(texts[0, 13]), int(texts[1, 18])]
    plain = target.generate(**inputs, **settings())
    assert not torch.equal(plain, target.generate(**inputs, **GREEDY))
    for wrong_share in (0.0, 0.4):
        draft.teach(target, plain, wrong_share)
        drafted = speculative_generate(target, draft, **inputs, **settings())
        assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
    assert drafted.statistics.num_verify_passes >= 2


def test_processors_that_look_at_scores_alone_take_one_call_for_a_block():
    class Subclass(logits_process.TemperatureLogitsWarper):
        pass

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (3, 9), generator=generator)
    scores = torch.randn(3, 4, 11, generator=generator)
    penalty = logits_process.RepetitionPenaltyLogitsProcessor(1.5)
    assert not BlockLogitsProcessor(LogitsProcessorList([Subclass(0.5)])).takes_chains  # it may use the text
    for processor in (*(kind(0.5) for kind in PREFIX_FREE[:1]), logits_process.TopKLogitsWarper(3), penalty):
        processors = BlockLogitsProcessor(LogitsProcessorList([processor]))
        assert processors.takes_chains
        assert processors.is_prefix_free == (processor is not penalty)
        block = processors(tokens, [3, 5, 4], scores)
        for sequence, length in enumerate([3, 5, 4]):
            for slot in range(4):
                alone = processor(
                    tokens[sequence : sequence + 1, : length + slot], scores[sequence : sequence + 1, slot].clone()
                )
                torch.testing.assert_close(block[sequence, slot], alone[0], atol=0, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5, "suppress_tokens": [4, 5]}])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_scores_and_logits_equal_those_of_plain_generation(settings, num_sequences):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=3)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    texts = target.generate(**inputs, **GREEDY, **settings)
    ends = [int(sequence[12 + 2 * index]) for index, sequence in enumerate(texts[:-1])] or None
    plain = target.generate(**inputs, **GREEDY, **settings, **wanted, eos_token_id=ends)
    draft.teach(target, texts, 0.3)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, **settings, **wanted, eos_token_id=ends)
    assert torch.equal(drafted.sequences, plain.sequences)
    num_steps = plain.sequences.shape[1] - 9
    for name in ("scores", "logits"):
        ours, theirs = getattr(drafted, name), getattr(plain, name)
        assert len(ours) == len(theirs) == num_steps
        for step in range(num_steps):
            assert ours[step].shape == (num_sequences, 97)
            assert ours[step].dtype == torch.float32
            for sequence in range(num_sequences):
                if plain.sequences[sequence, 9 + step] != 0:
                    torch.testing.assert_close(ours[step][sequence], theirs[step][sequence], atol=2e-5, rtol=1e-5)
                else:  # the sequence had ended
                    assert ours[step][sequence].eq(0).all()
    transitions = [
        target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (plain, drafted)
    ]
    is_text = plain.sequences[:, 9:] != 0
    torch.testing.assert_close(transitions[1][is_text], transitions[0][is_text], atol=2e-5, rtol=1e-5)
    without = speculative_generate(target, draft, **inputs, **GREEDY, **settings)
    assert without.scores is None
    assert without.logits is None


@pytest.mark.parametrize("num_ignored", [4, 9, 12])
def test_the_repetition_penalty_leaves_the_first_columns_out_where_it_is_told_to(num_ignored):
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(3)
    processor = logits_process.RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=num_ignored)
    plain = target.generate(**inputs, **GREEDY, logits_processor=LogitsProcessorList([processor]))
    draft.teach(target, plain, 0.3)
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, logits_processor=LogitsProcessorList([processor])
    )
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
