"""The reference loop, and the fast loop against it: the same tokens, committed in the same passes."""

from __future__ import annotations

import inspect

import pytest
import torch
from conftest import make_draft
from decoding_pairs import make_family, make_guessing_draft, make_target
from tiers import thinned

from dflash_hf.decoding import reference as module_under_test
from dflash_hf.decoding.generate import speculative_generate
from dflash_hf.decoding.reference import reference_generate

GREEDY = {"do_sample": False, "pad_token_id": 0}
PROMPTS = [[4], [4, 8], [4, 8, 15, 16, 23], [42, 23, 16, 15, 8, 4, 90, 31, 7, 7, 60]]


def fast_passes(target, draft, prompt: torch.Tensor, **settings) -> tuple[torch.Tensor, list[list[int]]]:
    """The text of `speculative_generate`, and what each of its passes committed."""
    passes: list[list[int]] = []
    output = speculative_generate(
        target,
        draft,
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{**GREEDY, **settings},
        on_pass=lambda verify_pass: passes.append(verify_pass.token_ids[0]),
    )
    return output.sequences, passes


def plain_text(target, prompt: torch.Tensor, **settings) -> torch.Tensor:
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), **{**GREEDY, **settings})


@pytest.mark.parametrize("block_size", thinned([None, 1, 2, 3, 4], None, 2))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_fast_loop_commits_the_tokens_of_the_reference_in_the_same_passes(prompt, block_size):
    """A draft that is sometimes wrong, so that passes accept nothing, a part, and everything."""
    target, prompt = make_target(), torch.tensor([prompt])
    draft = make_guessing_draft(target).teach(target, plain_text(target, prompt, max_new_tokens=25), 0.3)
    plain = plain_text(target, prompt, max_new_tokens=21)
    text, passes = reference_generate(target, draft, prompt, max_new_tokens=21, block_size=block_size)
    fast_text, fast = fast_passes(target, draft, prompt, max_new_tokens=21, block_size=block_size)
    assert torch.equal(text, plain)
    assert torch.equal(fast_text, plain)
    assert fast == passes
    assert [token for tokens in passes for token in tokens] == plain[0, prompt.shape[1] :].tolist()
    longest = block_size or 4
    assert {len(tokens) for tokens in passes[1:]} <= set(range(1, longest + 1))
    if longest > 2:
        assert len({len(tokens) for tokens in passes[1:]}) > 1


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral", "qwen3_5"])
def test_families_and_an_untaught_draft_commit_in_the_same_passes(name):
    """The draft's own network decides here: full, sliding and causal layers."""
    target, prompt = make_family(name), torch.tensor([PROMPTS[2]])
    for variant in ({}, {"is_causal": True}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}):
        draft = make_draft(target, **variant)
        text, passes = reference_generate(target, draft, prompt, max_new_tokens=14)
        fast_text, fast = fast_passes(target, draft, prompt, max_new_tokens=14)
        assert torch.equal(text, plain_text(target, prompt, max_new_tokens=14))
        assert torch.equal(fast_text, text)
        assert fast == passes


@pytest.mark.parametrize("place", range(8))
def test_an_end_token_ends_the_text_at_every_place_of_a_block(place):
    """All drafted tokens are right, so that the passes commit 1, 4, 4 … tokens, and the end falls in any slot."""
    target, prompt = make_target(), torch.tensor([[4, 8, 15]])
    texts = plain_text(target, prompt, max_new_tokens=24)
    new = texts[0, 3:].tolist()
    end = new[place]
    first = new.index(end)
    draft = make_guessing_draft(target).teach(target, texts, 0.0)
    plain = plain_text(target, prompt, max_new_tokens=24, eos_token_id=[end])
    text, passes = reference_generate(target, draft, prompt, max_new_tokens=24, eos_token_ids=[end, 1])
    fast_text, fast = fast_passes(target, draft, prompt, max_new_tokens=24, eos_token_id=[end, 1])
    assert torch.equal(text, plain)
    assert torch.equal(fast_text, plain)
    assert fast == passes
    assert [len(tokens) for tokens in passes] == [1, *[4] * (first // 4), *([first % 4] if first % 4 else [])]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 6])
def test_the_length_ends_the_text_inside_a_block(max_new_tokens):
    target, prompt = make_target(), torch.tensor([[7]])
    draft = make_guessing_draft(target).teach(target, plain_text(target, prompt, max_new_tokens=10), 0.0)
    text, passes = reference_generate(target, draft, prompt, max_new_tokens=max_new_tokens)
    fast_text, fast = fast_passes(target, draft, prompt, max_new_tokens=max_new_tokens)
    assert torch.equal(text, plain_text(target, prompt, max_new_tokens=max_new_tokens))
    assert torch.equal(fast_text, text)
    assert fast == passes
    assert sum(map(len, passes)) == max_new_tokens


def test_the_reference_is_short_and_uses_no_part_of_the_fast_loop():
    source = inspect.getsource(module_under_test)
    body = source.split('"""\n')[-1]
    assert len([line for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 40
    imported = [line for line in source.splitlines() if line.startswith(("from .", "import "))]
    assert imported == [
        "import torch",
        "from ..model.modeling_dflash import DFlashDraftModel, DraftHead, embed_tokens",
    ]
