"""Decoding with a draft ends where plain generation ends, and streamers receive the same tokens."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from conftest import make_draft
from decoding_pairs import make_family, make_guessing_draft, make_target, ragged_prompts
from stopping_pairs import GREEDY, Recorder, letters_pair
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

from dflash_hf.decoding.generate import dflash_decoding, speculative_generate

ALWAYS, SOMETIMES, NEVER = 0.0, 0.3, 1.1  # share of wrong guesses
UNUSED = 1  # a token that no text here has


def taught_pair(inputs, wrong_share: float, name: str = "llama", **settings):
    """Return a pair whose draft knows the greedy text of a batch, and that text."""
    target = make_family(name)
    draft = make_guessing_draft(target)
    texts = target.generate(**inputs, **GREEDY, **{"max_new_tokens": 24, **settings})
    draft.teach(target, texts, wrong_share)
    return target, draft, texts


@pytest.mark.parametrize("wrong_share", [ALWAYS, NEVER])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_every_max_new_tokens_gives_as_many_tokens_as_plain(wrong_share, num_sequences):
    """From 1 to 2B + 1 tokens, with everything accepted and everything rejected."""
    inputs = ragged_prompts(num_sequences, seed=1)
    target, draft, texts = taught_pair(inputs, wrong_share)
    for count in range(1, 10):
        drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=count)
        assert torch.equal(drafted.sequences, texts[:, : 9 + count])
        statistics = drafted.statistics
        assert statistics.num_tokens == num_sequences * count
        committed = [sum(sequence) for sequence in statistics.committed]
        assert len(committed) == num_sequences
        assert all(total <= count - 1 for total in committed)
        if wrong_share == ALWAYS and num_sequences == 1:
            # the prefill gives one token, and the last one alone needs no draft
            assert statistics.committed == [[4] * ((count - 1) // 4) + [(count - 1) % 4] * ((count - 1) % 4 > 1)]
    by_length = speculative_generate(target, draft, **inputs, **GREEDY, max_length=14)
    assert torch.equal(by_length.sequences, texts[:, :14])


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_end_token_in_every_slot_ends_the_text_there(name):
    """The streamer and the passes see no token after the end."""
    inputs = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    target, draft, texts = taught_pair(inputs, ALWAYS, name)
    answer, last_counts = texts[0, 3:].tolist(), set()
    for position in range(1, 9):
        if answer[position] in answer[:position]:
            continue
        for ends in (answer[position], [96, answer[position]]):
            plain = target.generate(**inputs, **GREEDY, max_new_tokens=24, eos_token_id=ends)
            streamer, passes = Recorder(), []
            drafted = speculative_generate(
                target, draft, **inputs, **GREEDY, max_new_tokens=24, eos_token_id=ends, streamer=streamer,
                on_pass=passes.append,
            )  # fmt: skip
            assert torch.equal(drafted.sequences, plain)
            assert streamer.tokens == plain[0].tolist()
            assert streamer.has_ended
            assert [token for verify_pass in passes for token in verify_pass.token_ids[0]] == plain[0, 3:].tolist()
            assert drafted.statistics.num_tokens == plain.shape[1] - 3
            last_counts.add(len(passes[-1].token_ids[0]))
    assert last_counts >= {1, 2, 3, 4}


@pytest.mark.parametrize("wrong_share", [ALWAYS, SOMETIMES])
def test_sequences_end_each_at_its_own_token_and_cost_nothing_after(wrong_share):
    inputs = ragged_prompts(6, seed=5)
    target, draft, texts = taught_pair(inputs, wrong_share)
    ends = [int(texts[sequence, 9 + 3 * sequence + 1]) for sequence in range(5)]
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=24, eos_token_id=ends)
    sequences_of_passes, passes = [], []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sequences_of_passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, max_new_tokens=24, eos_token_id=ends, on_pass=passes.append
    )
    handle.remove()
    assert torch.equal(drafted.sequences, plain)
    lengths = [int((plain[sequence, 9:] != 0).sum()) for sequence in range(6)]
    assert len(set(lengths)) >= 4
    assert sequences_of_passes == [len(verify_pass.batch_indices) for verify_pass in passes]
    assert sequences_of_passes[0] == 6
    assert sequences_of_passes[-1] < 6
    assert sequences_of_passes == sorted(sequences_of_passes, reverse=True)
    written = {sequence: [] for sequence in range(6)}
    for verify_pass in passes:
        for sequence, tokens in zip(verify_pass.batch_indices, verify_pass.token_ids, strict=True):
            assert tokens
            written[sequence] += tokens
    assert [len(written[sequence]) for sequence in range(6)] == lengths
    assert all(written[sequence] == plain[sequence, 9 : 9 + lengths[sequence]].tolist() for sequence in range(6))
    assert drafted.statistics.num_tokens == sum(lengths)


def test_a_pass_says_which_tokens_the_draft_proposed():
    inputs = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    target, draft, texts = taught_pair(inputs, SOMETIMES)
    passes = []
    speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=20, on_pass=passes.append)
    assert (passes[0].token_ids, passes[0].num_drafted, passes[0].batch_indices) == (
        [texts[0, 3:4].tolist()],
        [0],
        [0],
    )
    position, is_wrong = 4, draft.wrong[0]
    for verify_pass in passes[1:]:
        assert verify_pass.batch_indices == [0]
        right = 0
        while right < 3 and position + right < 23 and not is_wrong[position + right]:
            right += 1
        count = len(verify_pass.token_ids[0])
        assert verify_pass.num_drafted[0] == min(right, 22 - position if position + 1 < 23 else 0, count)
        position += count
    assert position == 23
    assert len({verify_pass.num_drafted[0] for verify_pass in passes[1:]}) >= 3


class EndsAtSum(StoppingCriteria):
    """End a sequence whose new tokens add up to a multiple of seven, which depends on the whole text."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns = num_columns

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, self.num_columns :].sum(1) % 7 == 0


class EndsForAll(StoppingCriteria):
    """End all sequences at a length, with one bool for the batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 16


@pytest.mark.parametrize("wrong_share", [ALWAYS, SOMETIMES])
@pytest.mark.parametrize("num_sequences", [1, 5])
@pytest.mark.parametrize(
    "criterion", [EndsAtSum(9), EndsForAll(), MaxLengthCriteria(13)], ids=lambda criterion: type(criterion).__name__
)
def test_criteria_of_the_user_see_every_token(criterion, num_sequences, wrong_share):
    inputs = ragged_prompts(num_sequences, seed=7)
    target, draft, _ = taught_pair(inputs, wrong_share)
    settings = {**GREEDY, "max_new_tokens": 24, "stopping_criteria": StoppingCriteriaList([criterion])}
    # without an end token, plain generation continues a finished sequence until all have finished
    plain = target.generate(**inputs, **settings, eos_token_id=UNUSED)
    assert not plain[:, 9:].eq(UNUSED).any()
    assert plain.shape[1] < 33 or num_sequences > 1
    assert torch.equal(speculative_generate(target, draft, **inputs, **settings, eos_token_id=UNUSED).sequences, plain)
    assert torch.equal(speculative_generate(target, draft, **inputs, **settings).sequences, plain)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_time_that_is_up_ends_after_the_next_token(num_sequences):
    inputs = ragged_prompts(num_sequences)
    target, draft, texts = taught_pair(inputs, ALWAYS)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=24, max_time=1e-9)
    assert torch.equal(drafted.sequences, texts[:, :10])


@pytest.mark.parametrize("wrong_share", [ALWAYS, SOMETIMES])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_stop_strings_end_a_text_inside_a_block(tokenizer, num_sequences, wrong_share):
    """Stop strings come as an argument and as a criterion, and each sequence ends at its own one."""
    target, draft, inputs, settings, texts = letters_pair(tokenizer, wrong_share, num_sequences)
    start = inputs["input_ids"].shape[1]
    lengths = set()
    for first in range(2, 9):
        stop_strings = [tokenizer.decode(sequence[start + first + i :][:2]) for i, sequence in enumerate(texts)]
        plain = target.generate(**inputs, **settings, stop_strings=stop_strings, tokenizer=tokenizer)
        drafted = speculative_generate(
            target, draft, **inputs, **settings, stop_strings=stop_strings, tokenizer=tokenizer
        )
        assert torch.equal(drafted.sequences, plain)
        lengths.add(plain.shape[1])
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
        by_criterion = target.generate(
            **inputs, **settings, stopping_criteria=criteria, custom_generate=dflash_decoding, draft=draft
        )
        assert torch.equal(by_criterion, plain)
        assert any(text in tokenizer.decode(plain[0, start:]) for text in stop_strings)
    assert len(lengths) > 3
    own = StoppingCriteriaList([MaxLengthCriteria(start + 2)])
    both = speculative_generate(
        target, draft, **inputs, **settings, stop_strings=["zz"], tokenizer=tokenizer, stopping_criteria=own
    )
    assert torch.equal(both.sequences, texts[:, : start + 2])
    assert len(own) == 1  # the caller's list is not changed


@pytest.mark.parametrize("source", ["target", "argument"])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_stop_strings_of_a_generation_config_end_a_text(tokenizer, num_sequences, source):
    target, draft, inputs, settings, texts = letters_pair(tokenizer, SOMETIMES, num_sequences)
    start = inputs["input_ids"].shape[1]
    stop_strings = [tokenizer.decode(texts[0, start + 4 :][:2])]
    if source == "target":
        target.generation_config.stop_strings = stop_strings
        given = settings
    else:
        given = {"generation_config": GenerationConfig(**settings, stop_strings=stop_strings)}
    plain = target.generate(**inputs, **given, tokenizer=tokenizer)
    assert not torch.equal(plain, texts)
    drafted = speculative_generate(target, draft, **inputs, **given, tokenizer=tokenizer)
    assert torch.equal(drafted.sequences, plain)
    with pytest.raises(ValueError, match=r"of the generation config came without a tokenizer, .* Pass tokenizer="):
        speculative_generate(target, draft, **inputs, **given)


def test_stop_strings_without_a_tokenizer_say_what_is_missing():
    target = make_target()
    with pytest.raises(ValueError, match=r"stop_strings='.' came without a tokenizer, .* Pass tokenizer="):
        speculative_generate(target, make_draft(target), torch.tensor([[3]]), stop_strings=".", max_new_tokens=3)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamers_print_what_plain_generation_prints(tokenizer, skip_prompt, capsys):
    target, draft, inputs, settings, texts = letters_pair(tokenizer, SOMETIMES)
    assert "\n" in tokenizer.decode(texts[0])
    target.generate(**inputs, **settings, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
    plain = capsys.readouterr().out
    speculative_generate(
        target, draft, **inputs, **settings, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt)
    )
    assert capsys.readouterr().out == plain
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=20)
    decode = functools.partial(dflash_decoding, draft=draft, streamer=streamer)
    thread = threading.Thread(target=target.generate, kwargs={**inputs, **settings, "custom_generate": decode})
    thread.start()
    assert "".join(streamer) == plain.removesuffix("\n")
    thread.join()


def test_a_streamer_gets_the_same_calls_as_in_plain_generation():
    inputs = {"input_ids": torch.tensor([[4, 8, 15]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    target, draft, _ = taught_pair(inputs, ALWAYS)
    recorders = [Recorder(), Recorder()]
    target.generate(**inputs, **GREEDY, max_new_tokens=12, streamer=recorders[0])
    speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=12, streamer=recorders[1])
    assert recorders[1].puts == recorders[0].puts


def test_a_streamer_for_several_sequences_is_refused():
    target = make_target()
    draft, recorder = make_draft(target), Recorder()
    with pytest.raises(ValueError, match=r"A streamer takes the tokens of one sequence, and the batch has 3.*on_pass"):
        speculative_generate(target, draft, **ragged_prompts(3), max_new_tokens=3, streamer=recorder)
    with pytest.raises(ValueError, match="A streamer takes the tokens of one sequence, and the batch has 2"):
        speculative_generate(
            target, draft, torch.tensor([[3]]), max_new_tokens=3, do_sample=True, num_return_sequences=2,
            streamer=recorder,
        )  # fmt: skip
    assert recorder.puts == []
