"""The decoding loop writes the text of plain generation: families, batches, layers, dtypes, chunks."""

from __future__ import annotations

import pytest
import torch
from conftest import make_draft
from decoding_pairs import (
    FAMILIES,
    STATE_SPACE,
    count_near_ties,
    each_family,
    make_family,
    make_guessing_draft,
    make_multimodal,
    make_target,
    ragged_prompts,
)
from transformers.utils import logging as transformers_logging

from dflash_hf import build_dflash_batch_plan
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.forward import block_losses
from dflash_hf.decoding.generate import dflash_decoding, speculative_generate
from dflash_hf.target.hidden_states import target_hidden_states

GREEDY = {"do_sample": False, "pad_token_id": 0}
ALWAYS, SOMETIMES, NEVER = 0.0, 0.3, 1.1  # share of wrong guesses


def end_tokens(texts: torch.Tensor, num_columns: int) -> list[int]:
    """Return tokens at which about half of the sequences end, each at another place."""
    return [int(sequence[num_columns + 3 + 4 * index]) for index, sequence in enumerate(texts[: len(texts) // 2])]


@pytest.mark.parametrize("name", each_family(*FAMILIES, *STATE_SPACE))
def test_greedy_text_of_every_family_equals_plain_generation(name):
    """Single and ragged batches, drafts that are always, sometimes and never right, and ends at several places."""
    target = make_family(name)
    draft = make_guessing_draft(target)
    num_near_ties, lengths, acceptance_lengths = 0, set(), {}
    for num_sequences in (1, 5):
        inputs = ragged_prompts(num_sequences, seed=num_sequences)
        plain = texts = target.generate(**inputs, **GREEDY, max_new_tokens=17)
        ends = end_tokens(texts, 9) or None
        if ends is not None:
            plain = target.generate(**inputs, **GREEDY, max_new_tokens=17, eos_token_id=ends)
        lengths |= {int((sequence[9:] != 0).sum()) for sequence in plain}
        for wrong_share in (ALWAYS, SOMETIMES, NEVER):
            draft.teach(target, texts, wrong_share)
            drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=17, eos_token_id=ends)
            num_near_ties += count_near_ties(target, inputs, plain, drafted.sequences)
            acceptance_lengths[num_sequences, wrong_share] = drafted.statistics.acceptance_length
    assert num_near_ties <= 1
    assert len(lengths) > 1
    for num_sequences in (1, 5):
        right, sometimes, never = (acceptance_lengths[num_sequences, share] for share in (ALWAYS, SOMETIMES, NEVER))
        assert right > 1.1 * sometimes > 1.4 * never
        assert never < 1.1  # not exactly 1 where two sequences have the same token at the same place


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_text_of_a_multimodal_target_equals_plain_generation(num_sequences):
    target = make_multimodal()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(num_sequences, seed=6)
    inputs["input_ids"].clamp_(max=91)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=12, suppress_tokens=[92, 93, 94, 95])
    assert len(set(plain[0, 9:].tolist())) > 5
    draft.teach(target, plain, SOMETIMES)
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, max_new_tokens=12, suppress_tokens=[92, 93, 94, 95]
    )
    assert torch.equal(drafted.sequences, plain)
    assert drafted.statistics.acceptance_length > 1.3


def test_a_difference_from_plain_text_is_excused_at_a_near_tie_alone():
    target, inputs = make_target(), ragged_prompts(2)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=6)
    assert count_near_ties(target, inputs, plain, plain.clone()) == 0
    other = plain.clone()
    other[1, 12] = (other[1, 12] + 1) % 97
    with pytest.raises(AssertionError, match=r"column 12: .* and the gap is"):
        count_near_ties(target, inputs, plain, other)
    with pytest.raises(AssertionError, match="texts of 15 and 14 tokens"):
        count_near_ties(target, inputs, plain, plain[:, :-1])


def test_greedy_text_equals_plain_generation_on_fifty_prompts():
    """The prompts are decoded one by one, and seven at a time."""
    target = make_target()
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(50)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=12)
    num_near_ties = 0
    for size in (1, 7):
        for start in range(0, 50, size):
            sequences = slice(start, start + size)
            draft.teach(target, plain[sequences], SOMETIMES)
            part = {name: values[sequences] for name, values in inputs.items()}
            if size == 1:
                part = {name: values[inputs["attention_mask"][sequences] == 1][None] for name, values in part.items()}
            drafted = target.generate(
                **part, **GREEDY, max_new_tokens=12, custom_generate=dflash_decoding, draft=draft
            )
            answers = plain[sequences, -part["input_ids"].shape[1] - 12 :]
            num_near_ties += count_near_ties(target, part, answers, drafted)
    assert num_near_ties == 0


@pytest.mark.parametrize("name", each_family("gemma2", "mistral"))
def test_a_text_beyond_window_and_first_buffer_equals_plain_generation(name, monkeypatch):
    """Buffers grow, and a sliding layer drops columns that it no longer sees."""
    monkeypatch.setattr("dflash_hf.decoding.kv_cache.GROWTH_COLUMNS", 16)
    target = make_family(name)
    draft = make_guessing_draft(target, layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    inputs = ragged_prompts(2, length=6)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=75)
    draft.teach(target, plain, 0.1)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=75)
    assert count_near_ties(target, inputs, plain, drafted.sequences) <= 1
    assert drafted.statistics.acceptance_length > 2


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False},
    ],
)
@pytest.mark.parametrize("tree_size", [None, 12])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_draft_states_while_decoding_equal_those_of_the_training_call(variant, num_sequences, tree_size):
    """Full, causal and sliding layers agree, with sequences at different places after any pattern of acceptance."""
    target = make_target()
    draft = make_guessing_draft(target, **variant)
    inputs = ragged_prompts(num_sequences, seed=2)
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=24)
    draft.teach(target, texts, 0.6 if tree_size else SOMETIMES, second_share=0.8)
    decoded = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=24, tree_size=tree_size)
    assert torch.equal(decoded.sequences, texts)
    trained = make_draft(target, **variant)
    num_compared = 0
    for index, answer in enumerate(draft.answers):
        others = [other for other in draft.answers if other is not answer]
        served = {
            place: states
            for sequence, place, states in draft.own_hidden
            # the guessing draft confuses sequences that have the same token at the same place
            if sequence == index
            and place + 4 <= len(answer)
            and all(answer[place] not in o[place : place + 1] for o in others)
        }
        text, valid = answer[None], torch.ones(1, len(answer), dtype=torch.bool)
        is_label = torch.zeros_like(valid)
        is_label[0, [place + 1 for place in served]] = True
        plan = build_dflash_batch_plan(
            valid,
            torch.tensor([1]),
            anchors_per_sample=len(served),
            gamma=3,
            optimizer_step=0,
            seed=0,
            replacement=False,
            supervised_mask=is_label,
        )
        assert plan.anchor_positions.tolist() == sorted(served)
        captured = []
        handle = trained.register_forward_hook(
            lambda module, args, output, captured=captured: captured.append(output.last_hidden_state)
        )
        context = target_hidden_states(target, text, valid, trained.config.target_layer_ids)
        block_losses(trained, trained, plan, TokenBatch(text, valid, hidden_states=context))
        handle.remove()
        blocks = captured[0].view(len(served), 4, -1)
        for place, block in zip(sorted(served), blocks, strict=True):
            torch.testing.assert_close(served[place], block, atol=1e-5, rtol=1e-5)
            num_compared += 1
    assert num_compared >= 5 * num_sequences


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_draft_projects_the_state_of_every_token_once(name):
    target = make_family(name)
    draft = make_guessing_draft(target)
    inputs = {"input_ids": torch.tensor([[4, 8, 15, 16, 23]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    texts = target.generate(**inputs, **GREEDY, max_new_tokens=23)
    draft.teach(target, texts, SOMETIMES)
    projected = []
    handle = draft.fc.register_forward_pre_hook(lambda module, args: projected.append(args[0].shape[:2]))
    decoded = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=23)
    handle.remove()
    last_anchor = draft.own_hidden[-1][1]
    assert sum(count * columns for count, columns in projected) == last_anchor  # columns 0 … last_anchor - 1
    # each drafting pass projects once: first the prompt, then what the previous pass committed
    committed = decoded.statistics.committed[0]
    assert [columns for _, columns in projected] == [5, *committed[:-1]]


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "proposal": "sample"}])
def test_every_dtype_pair_decodes(target_dtype, draft_dtype, settings):
    """A bf16 target and an fp32 draft do not meet in one matrix product."""
    torch.manual_seed(0)
    target = make_target().to(target_dtype)
    draft = make_draft(target).to(draft_dtype)
    inputs = ragged_prompts(3)
    drafted = speculative_generate(target, draft, **inputs, max_new_tokens=12, **{**GREEDY, **settings}).sequences
    assert drafted.shape == (3, 21)
    if settings:
        return
    if target_dtype == torch.float32:
        assert torch.equal(drafted, target.generate(**inputs, **GREEDY, max_new_tokens=12))
    for sequence, mask in zip(drafted, inputs["attention_mask"], strict=True):
        text = sequence[int((mask == 0).sum()) :][None]
        logits = target(text, use_cache=False).logits[0, -13:-1].float()
        missed = logits.max(-1).values - logits.gather(1, text[0, -12:, None])[:, 0]
        assert missed.max() < 0.15  # logits of about 10 have steps of 0.06 in bf16


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 1, "proposal": "sample"}])
def test_a_draft_whose_states_overflow_is_named_and_the_text_stays(settings, caplog):
    """In fp16 such a draft has an acceptance of exactly zero, without any error."""
    target = make_target().to(torch.float16)
    draft = make_draft(target).to(torch.float16)
    draft.fc.weight.data *= 1e4
    inputs = ragged_prompts(2)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=9)
    transformers_logging.warning_once.cache_clear()
    for _ in range(2):
        drafted = speculative_generate(target, draft, **inputs, max_new_tokens=9, **{**GREEDY, **settings})
        assert torch.equal(drafted.sequences, plain)
        assert drafted.statistics.acceptance_length < 1.5
    assert [record.message for record in caplog.records].count(
        "The hidden states of the draft are not finite, so the target accepts none of its tokens. The target is in "
        "torch.float16 and the draft in torch.float16, and float16 overflows in the first projection of the draft. "
        "Load both models in bfloat16 or float32."
    ) == 1


@pytest.mark.parametrize("name", each_family("llama", "mistral", "qwen3_5", "lfm2"))
@pytest.mark.parametrize("prefill_chunk_size", [1, 4])
def test_a_prompt_read_in_chunks_gives_the_same_text(name, prefill_chunk_size):
    target = make_family(name)
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(3, seed=3)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=10)
    draft.teach(target, plain, SOMETIMES)
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, max_new_tokens=10, prefill_chunk_size=prefill_chunk_size
    )
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_fewer_verified_slots_give_the_same_text(name, block_size):
    target = make_family(name)
    draft = make_guessing_draft(target)
    inputs = ragged_prompts(3, seed=4)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=13)
    draft.teach(target, plain, ALWAYS)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=13, block_size=block_size)
    assert count_near_ties(target, inputs, plain, drafted.sequences) == 0
    statistics = drafted.statistics
    if block_size == 1:
        assert (statistics.num_plain_passes, statistics.num_verify_passes) == (12, 0)
        assert draft.own_hidden == []
    else:
        assert statistics.acceptance_length > 0.9 * block_size
        assert max(count for sequence in statistics.committed for count in sequence) == block_size
