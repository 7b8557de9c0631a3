"""Near-ties, and the comparison of responses that explains differences with them."""

from __future__ import annotations

import pytest
import torch
from conftest import make_target
from decoding_pairs import make_guessing_draft

from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.evaluation import compare
from dflash_hf.evaluation.compare import Comparison, compare_on_prompts, summarize_comparisons
from dflash_hf.evaluation.near_ties import FirstDifference, first_difference, logit_gap, near_tie_gap
from dflash_hf.evaluation.timed_generation import Generation, generate_timed

VOCABULARY = {"vocab_size": 272, "pad_token_id": 256}
PROMPT = torch.tensor([3, 14, 15, 9])
PROMPTS = ["1+1?", "What?", "Say a word."]


def sorted_logits(target, text: list[int]) -> tuple[list[float], list[int]]:
    """Logits after a text, by a loop over the vocabulary, and their tokens, the best one first."""
    logits = target(torch.tensor([text])).logits[0, -1].tolist()
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    return [logits[token] for token in order], order


def test_the_gap_is_between_the_best_token_and_the_lower_one_of_the_two(target):
    common = [7, 8]
    logits, tokens = sorted_logits(target, [*PROMPT.tolist(), *common])
    for one, other, lower in ((0, 1, 1), (2, 0, 2), (1, 3, 3)):
        gap = logit_gap(target, PROMPT, [*common, tokens[one], 1], [*common, tokens[other], 2, 3])
        assert gap == pytest.approx(logits[0] - logits[lower], abs=1e-5)


@pytest.mark.parametrize("common", [[], [7, 8, 9]])
def test_a_difference_is_a_near_tie_only_below_the_gap_of_the_dtype(target, common, monkeypatch):
    logits, tokens = sorted_logits(target, [*PROMPT.tolist(), *common])
    one, other = [*common, tokens[0]], [*common, tokens[1]]
    gap = logits[0] - logits[1]
    for factor, is_near_tie in ((0.99, False), (1.01, True)):
        monkeypatch.setitem(compare.first_difference.__globals__["NEAR_TIE_GAPS"], torch.float32, factor * gap)
        found = first_difference(target, PROMPT, one, other)
        assert (found.index, found.is_near_tie) == (len(common), is_near_tie)
        assert found.logit_gap == pytest.approx(gap, abs=1e-5)
        assert found.near_tie_gap == factor * gap
    assert first_difference(target, PROMPT, one, list(one)) is None


def test_a_response_that_ends_where_the_other_continues_is_no_near_tie(target):
    _, tokens = sorted_logits(target, [*PROMPT.tolist(), 7])
    found = first_difference(target, PROMPT, [7], [7, tokens[0]])
    assert (found.index, found.logit_gap, found.is_near_tie) == (1, 0.0, False)


def test_the_gap_of_a_near_tie_grows_with_the_rounding_of_the_dtype():
    gaps = [near_tie_gap(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert gaps == [1e-4, 0.03125, 0.25]


def make_pair(tokenizer):
    """A target, and a draft that knows most of its greedy responses."""
    target = make_target(**VOCABULARY)
    draft = make_guessing_draft(target, mask_token_id=271)
    kwargs = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 256}
    sequences = [target.generate(**chat_inputs(tokenizer, prompt, target.device), **kwargs)[0] for prompt in PROMPTS]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side="left")
    return target, draft.teach(target, padded, wrong_share=0.3)


def test_both_loops_give_the_same_comparison_and_ours_is_the_default(tokenizer, monkeypatch):
    target, draft = make_pair(tokenizer)
    loops: list[str] = []

    def counted(*args, loop: str, **kwargs) -> Generation:
        loops.append(loop)
        return generate_timed(*args, loop=loop, **kwargs)

    monkeypatch.setattr(compare, "generate_timed", counted)
    results = {}
    for name, kwargs in (("dflash_hf", {}), ("transformers", {"loop": "transformers"})):
        loops.clear()
        results[name] = list(compare_on_prompts(target, draft, tokenizer, PROMPTS, max_new_tokens=30, **kwargs))
        assert loops == [name] * (2 + 2 * len(PROMPTS))
    for ours, theirs in zip(*results.values(), strict=True):
        assert ours.is_identical
        assert theirs.is_identical
        assert ours.difference is None
        assert ours.drafted.committed == theirs.drafted.committed
        assert max(ours.drafted.verified) == 3
    summary = summarize_comparisons(results["dflash_hf"], block_size=4)
    assert summary.acceptance_length > 1.5
    assert (summary.num_identical, summary.num_near_ties, summary.near_tie_gap) == (3, 0, None)
    with pytest.raises(ValueError, match=r"loop='vllm' must be one of dflash_hf, transformers"):
        next(compare_on_prompts(target, draft, tokenizer, PROMPTS, loop="vllm", max_new_tokens=4))


def test_sampled_responses_are_not_examined(tokenizer):
    target, draft = make_pair(tokenizer)
    torch.manual_seed(0)
    comparisons = list(compare_on_prompts(target, draft, tokenizer, PROMPTS, max_new_tokens=12, do_sample=True))
    assert not any(comparison.is_identical for comparison in comparisons)
    assert {comparison.difference for comparison in comparisons} == {None}
    assert summarize_comparisons(comparisons, block_size=4).num_near_ties is None


def test_a_summary_counts_the_near_ties_among_the_responses_that_differ():
    def comparison(tokens: list[int], difference: FirstDifference | None) -> Comparison:
        return Comparison("a", Generation([1, 2], 1.0, []), Generation(tokens, 1.0, [2]), difference)

    comparisons = [
        comparison([1, 2], None),
        comparison([1, 3], FirstDifference(1, 0.125, 0.5, True)),
        comparison([4, 2], FirstDifference(0, 3.0, 0.5, False)),
    ]
    summary = summarize_comparisons(comparisons, block_size=4)
    assert (summary.num_identical, summary.num_different) == (1, 2)
    assert (summary.num_near_ties, summary.near_tie_gap) == (1, 0.5)
    assert comparisons[1].as_dict()["difference"] == {
        "index": 1, "logit_gap": 0.125, "near_tie_gap": 0.5, "is_near_tie": True,
    }  # fmt: skip
