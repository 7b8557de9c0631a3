"""Convolutions, selector, Markov head, confidence head, reduced vocabulary and mask vector, against literals."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from conftest import make_draft, make_target
from torch import nn

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.model.modeling_dflash import (
    DFlashConfidenceHead,
    DFlashConvolution,
    DFlashMarkovHead,
    DFlashSelector,
    DraftHead,
    reduced_head,
    selector_embedding_scale,
    top_candidates,
)

KINDS = {
    "convolution": {"conv_kernel_size": 2, "conv_group_size": 8},
    "selector": {"selector_rank": 4, "selector_top_k": 5},
    "selector with tables": {"selector_rank": 4, "selector_top_k": 5, "selector_factored": False},
    "DFlash 2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
    "anchor": {"sample_from_anchor": True},
    "vanilla": {"sample_from_anchor": True, "markov_rank": 4},
    "gated": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "gated"},
    "rnn": {"sample_from_anchor": True, "markov_rank": 4, "markov_head_type": "rnn"},
    "Markov head on DFlash slots": {"markov_rank": 4, "markov_head_type": "gated"},
    "DSpark": {
        "sample_from_anchor": True, "markov_rank": 4, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "reduced vocabulary": {"draft_vocab_size": 40},
    "reduced vocabulary with a Markov head": {"draft_vocab_size": 40, "markov_rank": 4, "sample_from_anchor": True},
    "mask vector": {"learned_mask_embedding": True},
    "sinks": {"attention_sinks": True},
    "causal": {"is_causal": True, "conv_kernel_size": 3, "conv_group_size": 4},
}  # fmt: skip
FAST_KINDS = ("DFlash 2", "DSpark", "rnn", "reduced vocabulary with a Markov head")  # have each part once


def tiny_config(**values):
    return DFlashConfig(
        **{
            "vocab_size": 5, "hidden_size": 4, "target_hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "block_size": 3, "mask_token_id": 4,
            "target_num_hidden_layers": 4, "target_layer_ids": [1], **values,
        }
    )  # fmt: skip


@torch.no_grad()
def test_convolution_has_the_values_of_the_literal():
    convolution = DFlashConvolution(tiny_config(conv_kernel_size=2, conv_group_size=2))
    convolution.base_kernel.copy_(torch.tensor([[[1, 1, 1, 1], [0.5, 0, 0, -0.5]], [[1, 1, 1, 1], [0, 0, 0, 0.0]]]))
    convolution.kernel_projection.weight.zero_()
    convolution.kernel_projection.weight[0] = torch.tensor([0.1, 0, 0, 0])
    convolution.kernel_projection.weight[3] = torch.tensor([0, 0, 0, 0.25])
    convolution.kernel_projection.weight[6] = torch.tensor([0, 0.5, 0, 0])
    normed = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]])
    before, after = convolution.kernels(normed)
    wanted = torch.tensor([[1.1, 2.2, 3, 4], [8, 9, 13, 14], [19.6, 19, 32, 32]])
    torch.testing.assert_close(convolution.convolve(normed, before)[0], wanted)
    output = torch.tensor([[[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]])
    wanted = torch.tensor([[1.0, 0, 0, 0], [3, 1, 0, 0], [0, 5, 1, 0]])
    torch.testing.assert_close(convolution.convolve(output, after)[0], wanted)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolution_equals_loops_in_several_blocks(taps):
    torch.manual_seed(taps)
    convolution = DFlashConvolution(tiny_config(conv_kernel_size=taps, conv_group_size=2))
    nn.init.normal_(convolution.base_kernel)
    nn.init.normal_(convolution.kernel_projection.weight)
    normed, output = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    before, after = convolution.kernels(normed)
    weight = convolution.kernel_projection.weight.tolist()
    for states, kernels, side in ((normed, before, 0), (output, after, 1)):
        result = convolution.convolve(states, kernels)
        for row in range(2):
            for block in (slice(0, 3), slice(3, 6)):
                wanted = reference.convolve(
                    normed[row, block].tolist(), states[row, block].tolist(), convolution.base_kernel[side].tolist(),
                    weight, side=side, taps=taps, group_size=2,
                )  # fmt: skip
                torch.testing.assert_close(result[row, block], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_convolution_of_a_shorter_block_has_the_same_values():
    torch.manual_seed(0)
    convolution = DFlashConvolution(tiny_config(conv_kernel_size=2, conv_group_size=2))
    nn.init.normal_(convolution.base_kernel)
    nn.init.normal_(convolution.kernel_projection.weight)
    normed = torch.randn(1, 3, 4)
    whole = convolution.convolve(normed, convolution.kernels(normed)[0])
    part = convolution.convolve(normed[:, :2], convolution.kernels(normed[:, :2])[0])
    torch.testing.assert_close(part, whole[:, :2])


def selector_of_the_literal():
    selector = DFlashSelector(
        tiny_config(hidden_size=2, target_hidden_size=2, head_dim=2, selector_rank=2, selector_top_k=2)
    )
    with torch.no_grad():
        selector.hidden_projection.weight.copy_(torch.eye(2))
        selector.predecessor_codebook.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0], [2, 0]]))
        selector.successor_codebook.copy_(torch.tensor([[0.0, 1], [1, 0], [0, 0], [1, 1], [0, 2]]))
    return selector


@pytest.mark.parametrize(
    ("anchor", "first_scores", "path"),
    [
        (0, [2, 2.5], [1, 2]),
        (1, [3, 1.5], [0, 3]),
        (2, [3, 2.5], [0, 3]),
        (3, [2, 1.5], [0, 3]),
        (4, [2, 3.5], [1, 2]),
    ],
)
def test_selector_walks_the_path_of_the_literal(anchor, first_scores, path):
    selector = selector_of_the_literal()
    hidden_states = torch.tensor([[1.0, 1], [1, -1]])
    logits = torch.tensor([[2, 1.5, 0, -1, 0.5], [0.3, 0.2, 1, 0.9, -2]])
    before, walked = anchor, []
    for slot in range(2):
        values, candidates = top_candidates(logits[slot], 2)
        features = selector.features(torch.tensor(before), hidden_states[slot])
        scores = values + selector.scores(features, candidates)
        if slot == 0:
            assert candidates.tolist() == [0, 1]
            torch.testing.assert_close(scores, torch.tensor(first_scores, dtype=torch.float32))
            if anchor == 2:
                torch.testing.assert_close(scores.softmax(-1), torch.tensor([0.6225, 0.3775]), rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    (scores / 0.5).softmax(-1), torch.tensor([0.7311, 0.2689]), rtol=0, atol=1e-4
                )
        before = int(candidates[scores.argmax()])
        walked.append(before)
    assert walked == path


def test_a_factored_selector_equals_the_tables_that_it_computes():
    target = make_target()
    draft = make_draft(target, selector_rank=4, selector_top_k=5)
    for parameter in draft.candidate_selector.parameters():
        nn.init.normal_(parameter)
    tables = make_draft(target, selector_rank=4, selector_top_k=5, selector_factored=False)
    scale = selector_embedding_scale(target.get_input_embeddings(), 97)
    embedding = target.get_input_embeddings().weight.detach()
    assert (embedding * scale).norm(dim=-1).mean().item() == pytest.approx(1, rel=1e-4)
    selector, wanted = draft.candidate_selector, tables.candidate_selector
    with torch.no_grad():
        wanted.hidden_projection.weight.copy_(selector.hidden_projection.weight)
        wanted.predecessor_codebook.copy_(embedding * scale @ selector.predecessor_projection.weight.t())
        wanted.successor_codebook.copy_(embedding * scale @ selector.successor_projection.weight.t())
    hidden_states, before = torch.randn(3, 2, 32), torch.randint(0, 97, (3, 2))
    ours, theirs = draft.draft_head(), tables.draft_head()
    logits = ours.logits(hidden_states)
    torch.testing.assert_close(logits, theirs.logits(hidden_states))
    scores, candidates = ours.correct(logits, ours.features(before, hidden_states)[0])
    others, same = theirs.correct(logits, theirs.features(before, hidden_states)[0])
    assert torch.equal(candidates, same)
    torch.testing.assert_close(scores, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_head_equals_loops(kind):
    torch.manual_seed(0)
    config = tiny_config(markov_rank=3, markov_head_type=kind, sample_from_anchor=True)
    head = DFlashMarkovHead(config)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    tokens, hidden_states = [4, 0, 2], torch.randn(3, 4)
    wanted = reference.markov_scores(
        kind, {k: v.tolist() for k, v in head.state_dict().items()}, tokens, hidden_states
    )
    state = None
    for slot, token in enumerate(tokens):
        features, state = head.features(torch.tensor([token]), hidden_states[slot][None], state)
        torch.testing.assert_close(head.scores(features)[0], torch.tensor(wanted[slot]), rtol=1e-5, atol=1e-5)
        some = torch.tensor([[3, 1]])
        torch.testing.assert_close(head.scores(features, some)[0], torch.tensor(wanted[slot])[some[0]])


def test_confidence_head_reads_the_state_and_the_embedding_of_the_token_before():
    config = tiny_config(markov_rank=2, enable_confidence_head=True, confidence_head_with_markov=True)
    head = DFlashConfidenceHead(config)
    with torch.no_grad():
        head.proj.weight.copy_(torch.tensor([[1.0, 0, 0, -1, 2, 3]]))
        head.proj.bias.fill_(0.5)
    logit = head(torch.tensor([[1.0, 9, 9, 2]]), torch.tensor([[0.25, 1.0]]))
    assert logit.tolist() == [1 - 2 + 0.5 + 3 + 0.5]
    assert DFlashConfidenceHead(tiny_config(enable_confidence_head=True)).proj.weight.shape == (1, 4)


def test_reduced_vocabulary_has_the_tokens_of_the_literal():
    draft = make_draft(make_target(), draft_vocab_size=4)
    draft.set_draft_vocabulary(torch.tensor([7, 0, 5, 2]))
    assert draft.d2t.tolist() == [0, 1, 3, 4]
    assert draft.draft_vocabulary().tolist() == [0, 2, 5, 7]
    head = draft.draft_head()
    assert head.token_ids(torch.tensor(2)).item() == 5
    assert head.draft_indices(torch.tensor([0, 1, 2, 5, 7, 96])).tolist() == [0, -1, 1, 2, 3, -1]
    hidden_states = torch.randn(3, 32)
    torch.testing.assert_close(head.logits(hidden_states), draft.compute_logits(hidden_states)[:, [0, 2, 5, 7]])


@pytest.mark.parametrize("tokens", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 97], [-1, 0, 1, 2]])
def test_a_vocabulary_that_does_not_fit_is_refused(tokens):
    with pytest.raises(ValueError, match="must be draft_vocab_size=4 distinct tokens from 0 to 96"):
        make_draft(make_target(), draft_vocab_size=4).set_draft_vocabulary(torch.tensor(tokens))


def test_reduced_head_of_a_head_that_cannot_be_read_selects_its_logits():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, hidden_states):
            return self.inner(hidden_states)

    head, hidden_states = Wrapped(), torch.randn(2, 4)
    tokens = torch.tensor([1, 4])
    torch.testing.assert_close(reduced_head(head, tokens)(hidden_states), head(hidden_states)[:, [1, 4]])
    torch.testing.assert_close(reduced_head(head.inner, tokens)(hidden_states), head(hidden_states)[:, [1, 4]])


def test_reduced_head_follows_changes_of_the_head_and_of_the_vocabulary():
    head, hidden_states = nn.Linear(4, 6, bias=False), torch.randn(2, 4)
    first = reduced_head(head, torch.tensor([1, 4]))
    assert reduced_head(head, torch.tensor([1, 4])) is first
    assert reduced_head(head, torch.tensor([0, 4])) is not first
    with torch.no_grad():
        head.weight.mul_(2)
    torch.testing.assert_close(reduced_head(head, torch.tensor([0, 4]))(hidden_states), head(hidden_states)[:, [0, 4]])


def test_candidates_with_equal_logits_come_in_the_order_of_their_ids():
    logits = torch.tensor([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    values, indices = top_candidates(logits, 4)
    assert indices[0].tolist() == [1, 2, 4, 3]
    assert indices[1].tolist() == sorted(indices[1].tolist())
    assert values[0].tolist() == [3, 3, 3, 2]


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("anchor", "causal")])
def test_new_parts_leave_the_draft_as_it_was_bit_for_bit(kind):
    target = make_target()
    plain = make_draft(target, sample_from_anchor=KINDS[kind].get("sample_from_anchor", False))
    shape = {"num_hidden_layers": 2, "num_target_layers": 2, "block_size": 4, "mask_token_id": 96}
    changed = DFlashDraftModel.from_target(target, **shape, **KINDS[kind])
    changed.load_state_dict(plain.state_dict(), strict=False)
    embeds, context = plain.embed_blocks(torch.tensor([[3, 5]])), torch.randn(1, 6, 64)
    positions = torch.cat([torch.arange(6), torch.arange(2, 6), torch.arange(4, 8)])[None]
    before = plain(embeds, context, position_ids=positions).last_hidden_state
    after = changed(embeds, context, position_ids=positions).last_hidden_state
    if kind == "sinks":  # a sink of 0 takes a share of every softmax
        assert not torch.equal(after, before)
        return
    assert torch.equal(after, before)
    head = changed.draft_head()
    if head.is_corrected and head.vocabulary is None:
        logits = head.logits(before)
        scores, candidates = head.correct(logits, head.features(torch.full(before.shape[:2], 7), before)[0])
        best = scores.argmax(-1, keepdim=True)
        best = best if candidates is None else candidates.gather(-1, best)
        assert torch.equal(best[..., 0], logits.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_saved_and_loaded_with_all_of_its_parts(kind, tmp_path):
    target = make_target()
    draft = make_draft(target, **KINDS[kind])
    torch.manual_seed(3)
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.3)
    if draft.d2t is not None:
        draft.set_draft_vocabulary(torch.randperm(97)[:40])
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path, target=target)
    wanted = draft.config.to_dict() | {name: loaded.config.to_dict()[name] for name in ("dtype", "_name_or_path")}
    assert loaded.config.to_dict() == wanted
    assert {*loaded.state_dict()} == {*draft.state_dict()}
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_attention_with_sinks_equals_a_softmax_with_one_more_logit():
    draft = make_draft(make_target(), attention_sinks=True, num_hidden_layers=1)
    attention = draft.layers[0].self_attn
    nn.init.normal_(attention.attention_sink_bias)
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)
    mask = torch.rand(1, 1, 3, 5) > 0.3
    mask[..., 0] = True
    longer, values, scores = attention._with_sink(query, key, value, mask)
    output = nn.functional.scaled_dot_product_attention(query, longer, values, scores, scale=attention.scaling)
    for head in range(4):
        for slot in range(3):
            logits = [
                float(query[0, head, slot] @ key[0, head, column]) * attention.scaling
                for column in range(5) if mask[0, 0, slot, column]
            ]  # fmt: skip
            total = sum(math.exp(logit) for logit in logits) + math.exp(float(attention.attention_sink_bias[head]))
            visible = [value[0, head, column] for column in range(5) if mask[0, 0, slot, column]]
            wanted = sum(math.exp(logit) / total * vector for logit, vector in zip(logits, visible, strict=True))
            torch.testing.assert_close(output[0, head, slot], wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_vector_fills_every_slot_but_the_first():
    target = make_target()
    shape = {"num_hidden_layers": 2, "num_target_layers": 2, "block_size": 4, "mask_token_id": 96}
    draft = DFlashDraftModel.from_target(target, learned_mask_embedding=True, **shape)
    row = target.get_input_embeddings().weight[draft.config.mask_token_id]
    assert torch.equal(draft.mask_embedding, row)
    with torch.no_grad():
        draft.mask_embedding.normal_()
    embeds, context = draft.embed_blocks(torch.tensor([[3, 5]])), torch.randn(1, 2, 64)
    by_hand = embeds.clone().unflatten(1, (2, 4))
    by_hand[:, :, 1:] = draft.mask_embedding
    plain = make_draft(target)
    plain.load_state_dict(draft.state_dict(), strict=False)
    positions = torch.cat([torch.arange(2), torch.arange(1, 5), torch.arange(2, 6)])[None]
    wanted = plain(by_hand.flatten(1, 2), context, position_ids=positions).last_hidden_state
    torch.testing.assert_close(draft(embeds, context, position_ids=positions).last_hidden_state, wanted)


def test_blocks_that_sample_from_the_anchor_return_one_state_more():
    target = make_target()
    draft, plain = make_draft(target, sample_from_anchor=True), make_draft(target)
    draft.load_state_dict(plain.state_dict())
    embeds, context = draft.embed_blocks(torch.tensor([[3, 5]])), torch.randn(1, 2, 64)
    positions = torch.cat([torch.arange(2), torch.arange(1, 5), torch.arange(2, 6)])[None]
    states = draft(embeds, context, position_ids=positions).last_hidden_state.view(2, 5, 32)
    wanted = plain(embeds, context, position_ids=positions).last_hidden_state.view(2, 4, 32)
    assert torch.equal(states[:, 1:], wanted)
    assert not states[:, 0].any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"conv_group_size": 2}, "conv_group_size=2 has no effect without conv_kernel_size"),
        ({"selector_top_k": 2}, "no effect without selector_rank"),
        ({"markov_head_type": "rnn"}, "no effect without markov_rank"),
        ({"confidence_head_with_markov": True, "enable_confidence_head": True}, "no effect without markov_rank"),
        ({"conv_kernel_size": 4, "conv_group_size": 2}, "at most block_size=3"),
        ({"conv_kernel_size": 2, "conv_group_size": 3}, "must divide hidden_size=4"),
        ({"conv_kernel_size": 0}, "conv_kernel_size=0 must be at least 1"),
        ({"selector_rank": 2, "selector_top_k": 6}, "at most vocab_size=5"),
        ({"selector_rank": 2, "selector_top_k": 2, "markov_rank": 2}, "one head that corrects its logits"),
        ({"selector_rank": 2, "selector_top_k": 2, "draft_vocab_size": 3}, "over the full vocabulary"),
        ({"markov_rank": 2, "markov_head_type": "lstm"}, "must be one of"),
        ({"markov_rank": 2, "markov_head_type": "rnn"}, "needs sample_from_anchor=True"),
        ({"markov_rank": 2, "confidence_head_with_markov": True}, "without enable_confidence_head"),
        ({"draft_vocab_size": 6}, "at most vocab_size=5"),
        ({"output_multiplier": 0}, "output_multiplier=0 must be a number above 0"),
        ({"target_layer_ids": [-2, 1]}, "-1 for its embedding"),
        ({"target_layer_ids": [-1, 3]}, "contains the last layer"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_reason(values, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**values)


def test_a_draft_may_read_the_embedding_and_the_last_layer_after_the_norm():
    config = tiny_config(target_layer_ids=[-1, 3], last_layer_after_norm=True)
    assert config.target_layer_ids == [-1, 3]
    assert tiny_config(markov_rank=0).markov_rank is None
    assert tiny_config(draft_vocab_size=5).draft_vocab_size is None


def test_multiplier_and_cap_apply_where_scores_are_added():
    target = make_target()
    corrected = make_draft(
        target, selector_rank=2, selector_top_k=3, output_multiplier=2.0, final_logit_softcapping=3.0
    )
    hidden_states = torch.randn(2, 32)
    logits = 2 * corrected.compute_logits(hidden_states)
    torch.testing.assert_close(corrected.draft_head().logits(hidden_states), torch.tanh(logits / 3) * 3)
    plain = make_draft(target, output_multiplier=2.0, final_logit_softcapping=3.0)
    head = DraftHead(plain, target.get_input_embeddings(), target.get_output_embeddings())
    torch.testing.assert_close(head.logits(hidden_states), plain.compute_logits(hidden_states))
