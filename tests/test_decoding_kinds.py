"""Decoding with drafts of every kind: their walks, trees, samples, confidence and batches, in both loops."""

from __future__ import annotations

import logging

import pytest
import reference
import torch
from conftest import make_draft, make_target
from decoding_pairs import make_family, ragged_prompts
from test_model_heads import FAST_KINDS, KINDS
from tiers import thinned
from torch import nn
from transformers.utils import logging as transformers_logging

from dflash_hf import DFlashConfig, speculative_generate
from dflash_hf.decoding.reference import reference_generate
from dflash_hf.model.modeling_dflash import DraftHead

GREEDY = {"do_sample": False, "pad_token_id": 0}
LEAST_P_VALUE = 1e-4


def make_kind(target, kind: str, seed: int = 1, strength: float = 1.0, **values):
    """Make a random draft of a kind, whose heads change many of its choices."""
    draft = make_draft(target, seed, **{**KINDS[kind], **values})
    torch.manual_seed(seed)
    for name, parameter in draft.named_parameters():
        if name.startswith(("candidate_selector", "markov_head")):
            parameter.data = strength * torch.randn_like(parameter)
    if draft.d2t is not None:
        draft.set_draft_vocabulary(torch.arange(0, 97, 2)[:40])
    return draft


def walk(draft, target, hidden_states: torch.Tensor, anchor: int) -> list[int]:
    """Choose the tokens after an anchor with loops over the weights, from the states of one block `[T - 1, H]`."""
    config, state = draft.config, {name: value.tolist() for name, value in draft.state_dict().items()}
    head = target.get_output_embeddings().weight.detach()
    kept = list(range(97)) if draft.d2t is None else draft.draft_vocabulary().tolist()
    logits = (hidden_states.detach() @ head.t())[:, kept]
    scale = config.selector_embedding_scale
    embedding = target.get_input_embeddings().weight.detach()
    tokens: list[int] = []
    for slot in range(len(hidden_states)):
        before = tokens[-1] if tokens else anchor
        scores = {index: logits[slot, index].item() for index in range(len(kept))}
        if draft.markov_head is not None:
            weights = {n.removeprefix("markov_head."): v for n, v in state.items() if n.startswith("markov_head.")}
            added = reference.markov_scores(
                config.markov_head_type, weights, [anchor, *tokens], hidden_states[: slot + 1].detach()
            )[-1]
            scores = {index: value + added[index] for index, value in scores.items()}
        if draft.candidate_selector is not None:
            best = sorted(scores, key=lambda index: (-scores[index], index))[: config.selector_top_k]
            selector = draft.candidate_selector
            if selector.is_factored:
                rows = [
                    scale * embedding @ getattr(selector, f"{name}_projection").weight.detach().t()
                    for name in ("predecessor", "successor")
                ]
            else:
                rows = [selector.predecessor_codebook.detach(), selector.successor_codebook.detach()]
            projected = selector.hidden_projection.weight.detach() @ hidden_states[slot].detach()
            scores = {
                index: scores[index] + sum(
                    float(a * w * b) for a, w, b in zip(rows[0][before], projected, rows[1][index], strict=True)
                )
                for index in best
            }  # fmt: skip
        tokens.append(kept[max(scores, key=lambda index: scores[index])])
    return tokens


@pytest.mark.parametrize("kind", thinned(KINDS, *FAST_KINDS))
def test_greedy_text_is_that_of_plain_generation_and_passes_are_those_of_the_reference(kind):
    target = make_target()
    draft = make_kind(target, kind)
    for num_sequences in (1, 3):
        inputs = ragged_prompts(num_sequences, seed=num_sequences)
        plain = target.generate(**inputs, **GREEDY, max_new_tokens=15)
        drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=15)
        assert torch.equal(drafted.sequences, plain)
        for row in range(num_sequences):
            prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
            _, passes = reference_generate(target, draft, prompt, max_new_tokens=15)
            committed = drafted.statistics.committed[row]
            lengths = [len(tokens) for tokens in passes[1:]]
            # For a single remaining token nothing is drafted, so that its pass does not count.
            assert lengths in (committed, [*committed, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_drafted_as_loops_over_the_weights_choose_it(kind, monkeypatch):
    target = make_target()
    draft = make_kind(target, kind)
    proposals, blocks = [], []
    from dflash_hf.decoding import drafter

    propose = drafter.Drafter.propose

    def recorded(self, tree):
        proposal = propose(self, tree)
        if tree.num_slots > 1:
            proposals.append((self.sequences.anchor_tokens().clone(), proposal.token_ids.clone()))
        return proposal

    monkeypatch.setattr(drafter.Drafter, "propose", recorded)
    draft.norm.register_forward_hook(lambda *args: blocks.append(args[-1].clone()))
    inputs = ragged_prompts(2, seed=5)
    speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=12)
    changed = 0
    for (anchors, tokens), states in zip(proposals, blocks, strict=True):
        first = 0 if draft.config.sample_from_anchor else 1
        for row in range(len(anchors)):
            used = states[row, first : first + tokens.shape[1]]
            assert tokens[row].tolist() == walk(draft, target, used, int(anchors[row])), kind
            changed += tokens[row].tolist() != (used @ target.get_output_embeddings().weight.t()).argmax(-1).tolist()
    assert len(proposals) > 2
    if draft.candidate_selector is not None or draft.markov_head is not None:
        assert changed  # the head had something to correct


@pytest.mark.parametrize("kind", ["DFlash 2", "selector with tables", "vanilla", "gated", "rnn", "anchor", "sinks"])
@pytest.mark.parametrize("num_sequences", thinned([1, 3], 3))
def test_trees_follow_the_scores_after_each_node(kind, num_sequences, monkeypatch):
    target = make_target()
    draft = make_kind(target, kind, **({"selector_top_k": 16} if "elector" in kind or "2" in kind else {}))
    from dflash_hf.decoding import drafter

    seen = []
    propose = drafter.Drafter.propose

    def recorded(self, tree):
        proposal = propose(self, tree)
        if not tree.is_chain:
            seen.append((tree, proposal.token_ids.clone(), self.sequences.anchor_tokens().clone()))
        return proposal

    monkeypatch.setattr(drafter.Drafter, "propose", recorded)
    states = []
    draft.norm.register_forward_hook(lambda *args: states.append(args[-1].clone()))
    inputs = ragged_prompts(num_sequences, seed=7)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=14)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=14, tree_size=13)
    assert torch.equal(drafted.sequences, plain)
    assert seen
    first = 0 if draft.config.sample_from_anchor else 1
    head = DraftHead(draft, target.get_input_embeddings(), target.get_output_embeddings())
    for (tree, tokens, anchors), block in zip(seen, states, strict=False):
        for row in range(len(tokens)):
            node_tokens = [int(anchors[row]), *tokens[row].tolist()]
            assert node_tokens[1 : tree.chain_length] == walk(
                draft, target, block[row, first : first + tree.num_slots - 1], int(anchors[row])
            )
            path_states = {0: None}
            for node in range(1, tree.num_nodes):
                parent, slot = int(tree.parents[node]), int(tree.depths[node]) - 1
                hidden = block[row, first + slot][None]
                features, state = head.features(torch.tensor([node_tokens[parent]]), hidden, path_states[parent])
                scores, candidates = head.correct(head.logits(hidden), features)
                order = scores[0].sort(descending=True, stable=True).indices
                order = order if candidates is None else candidates[0][order]
                assert node_tokens[node] == int(order[int(tree.ranks[node])])
                path_states[node] = state


@pytest.mark.parametrize("kind", ["DFlash 2", "vanilla", "rnn", "anchor", "reduced vocabulary"])
@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_sampled_text_has_the_distribution_of_plain_sampling(kind, proposal):
    torch.manual_seed(0)
    target = make_target(initializer_range=0.15)
    draft = make_kind(target, kind, strength=0.3)
    inputs = {"input_ids": torch.tensor([[4, 8]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    settings = {"do_sample": True, "top_k": 4, "temperature": 1.5, "pad_token_id": 0}
    drafted = speculative_generate(
        target, draft, **inputs, **settings, max_new_tokens=3, num_return_sequences=900, proposal=proposal
    )
    exact: dict[tuple[int, ...], float] = {}
    for first, chance in following(target, [4, 8]).items():
        for second, share in following(target, [4, 8, first]).items():
            exact[first, second] = chance * share
    counts = dict.fromkeys(exact, 0)
    for pair in drafted.sequences[:, 2:4].tolist():
        counts[tuple(pair)] += 1
    assert reference.chi_square_p_value(list(counts.values()), list(exact.values())) > LEAST_P_VALUE


@torch.no_grad()
def following(target, tokens: list[int]) -> dict[int, float]:
    """Return the distribution of the token after a text with the settings above."""
    best = (target(torch.tensor([tokens]), use_cache=False).logits[0, -1] / 1.5).topk(4)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


def test_sampled_proposals_of_a_selector_come_from_its_candidates_at_the_temperature():
    """Every proposal is one of the K candidates, as often as the softmax of the corrected scores says."""
    torch.manual_seed(0)
    target = make_target()
    draft = make_kind(target, "selector", strength=0.5)
    from dflash_hf.decoding import drafter

    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    walked = drafter.Drafter._walk
    patch = pytest.MonkeyPatch()
    patch.setattr(drafter.Drafter, "_walk", lambda self, *args: found.append(walked(self, *args)) or found[-1])
    inputs = {"input_ids": torch.tensor([[4, 8, 1]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    speculative_generate(
        target, draft, **inputs, do_sample=True, temperature=0.7, top_k=0, pad_token_id=0, max_new_tokens=6,
        num_return_sequences=400, proposal="sample",
    )  # fmt: skip
    patch.undo()
    tokens, scores = found[0]
    assert torch.equal((scores > -torch.inf).sum(-1), torch.full(scores.shape[:2], 5))
    assert (scores.gather(-1, tokens[..., None]) > -torch.inf).all()


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_blocks_end_before_the_first_token_with_too_little_confidence(threshold, num_sequences):
    target = make_target()
    draft = make_kind(target, "DSpark")
    nn.init.normal_(draft.confidence_head.proj.weight, std=0.5)
    draft.confidence_head.proj.bias.data.fill_(1.0)
    inputs = ragged_prompts(num_sequences, seed=3)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=14)
    drafted = speculative_generate(
        target, draft, **inputs, **GREEDY, max_new_tokens=14, confidence_threshold=threshold
    )
    assert torch.equal(drafted.sequences, plain)
    verified = [count for row in drafted.statistics.verified for count in row]
    if threshold == 0.0:
        assert max(verified) == 4
    elif threshold == 1.0:
        assert not verified  # every pass is a plain one
    else:
        assert len(set(verified)) > 1


@pytest.mark.parametrize("num_candidates", [1, 2, 5])
def test_trees_with_more_choices_than_candidates_go_on_with_the_next_best_logits(num_candidates):
    target = make_target()
    draft = make_kind(target, "selector", selector_top_k=num_candidates)
    inputs = ragged_prompts(2, seed=7)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=14)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=14, tree_size=20)
    assert torch.equal(drafted.sequences, plain)
    head = DraftHead(draft, target.get_input_embeddings(), target.get_output_embeddings())
    hidden_states, before = torch.randn(3, 32), torch.tensor([3, 4, 5])
    logits, features = head.logits(hidden_states), head.features(before, hidden_states)[0]
    scores, candidates = head.correct(logits, features, num_choices=8)
    order = candidates.gather(-1, scores.sort(-1, descending=True).indices)
    best = logits.topk(8).indices
    assert order.shape == (3, 8)
    assert torch.equal(order[:, num_candidates:], best[:, num_candidates:])
    few, first = head.correct(logits, features)
    wanted = first.gather(-1, few.sort(-1, descending=True).indices)
    assert torch.equal(order[:, :num_candidates], wanted)


def test_confidences_of_the_literal_keep_two_tokens():
    confidence = torch.tensor([0.9, 0.8, 0.45, 0.95])
    assert int((confidence >= 0.5).long().cumprod(0).sum()) == 2
    torch.testing.assert_close(confidence.cumprod(0), torch.tensor([0.9, 0.72, 0.324, 0.3078]))


def test_a_markov_head_over_the_best_logits_alone_drops_all_others():
    target = make_target()
    draft = make_kind(target, "vanilla", strength=3.0)
    inputs = ragged_prompts(2, seed=3)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=14)
    for markov_top_k in (1, 5, 97, 1000):
        drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=14, markov_top_k=markov_top_k)
        assert torch.equal(drafted.sequences, plain)
    hidden_states, before = torch.randn(4, 32), torch.tensor([3, 4, 5, 6])
    head = DraftHead(draft, target.get_input_embeddings(), target.get_output_embeddings())
    logits, features = head.logits(hidden_states), head.features(before, hidden_states)[0]
    every, _ = head.correct(logits, features)
    some, candidates = head.correct(logits, features, top_k=5)
    torch.testing.assert_close(some, every.gather(-1, candidates))
    assert torch.equal(candidates[:, 0], logits.argmax(-1))
    assert torch.equal(head.correct(logits, features, top_k=1)[1][:, 0], logits.argmax(-1))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("vanilla", {"confidence_threshold": 0.5}, "needs a draft with a confidence head"),
        ("DSpark", {"confidence_threshold": 1.5}, "must be from 0 to 1"),
        ("DSpark", {"confidence_threshold": 0.5, "tree_size": 9}, "truncates a chain"),
        ("selector", {"markov_top_k": 4}, "needs a draft with a Markov head"),
        ("vanilla", {"markov_top_k": 0}, "must be an integer of at least 1"),
        ("anchor", {"block_size": 6}, "must be 'auto' or a number from 1 to 5"),
    ],
)
def test_arguments_of_heads_that_a_draft_lacks_are_refused(kind, arguments, message):
    target = make_target()
    with pytest.raises(ValueError, match=message):
        speculative_generate(
            target, make_kind(target, kind), torch.tensor([[5, 6]]), **GREEDY, max_new_tokens=4, **arguments
        )


@pytest.mark.parametrize("block_size", [1, 2, 5, "auto"])
def test_blocks_that_sample_from_the_anchor_verify_one_token_more(block_size):
    target = make_target()
    draft = make_kind(target, "anchor")
    inputs = ragged_prompts(1, seed=2)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=14)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=14, block_size=block_size)
    assert torch.equal(drafted.sequences, plain)
    assert drafted.statistics.block_size == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_of_transformers_writes_the_text_of_plain_generation(kind, caplog):
    target = make_target()
    draft = make_kind(target, kind)
    inputs = ragged_prompts(1, seed=4)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=13)
    transformers_logging.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        drafted = target.generate(
            **inputs, **GREEDY, max_new_tokens=13, assistant_model=draft, speculation_type="dflash"
        )
    assert torch.equal(drafted, plain)
    has_head = draft.candidate_selector is not None or draft.markov_head is not None
    assert ("without its selector or Markov head" in caplog.text) == has_head


def test_slots_that_start_at_the_anchor_are_not_one_off_in_the_loop_of_transformers(monkeypatch):
    """Its candidates are those of our own loop, as many as the block has slots."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    target = make_target()
    draft = make_kind(target, "anchor")
    candidates = []
    get = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        result = get(self, input_ids, *args, **kwargs)
        if result[0].shape[1] > input_ids.shape[1]:
            candidates.append((input_ids.clone(), result[0][:, input_ids.shape[1] :].clone()))
        return result

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    inputs = {"input_ids": torch.tensor([[4, 8, 1, 9]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    target.generate(**inputs, **GREEDY, max_new_tokens=12, assistant_model=draft, speculation_type="dflash")
    assert candidates
    for text, proposed in candidates:
        hidden = target(text[:, :-1], output_hidden_states=True).hidden_states
        context = torch.cat([hidden[i + 1] for i in draft.config.target_layer_ids], dim=-1)
        states = draft(draft.embed_blocks(text[:, -1:]), context).last_hidden_state[0]
        assert proposed.shape[1] == 4
        assert proposed[0].tolist() == walk(draft, target, states[1:], int(text[0, -1]))


def test_positions_are_rotated_as_the_draft_says_and_not_as_the_target_does():
    context, states = torch.randn(1, 6, 64), []
    for theta in (300.0, 10000.0):
        target = make_target(rope_parameters={"rope_type": "default", "rope_theta": theta})
        draft = make_kind(target, "DFlash 2", rope_theta=20000.0)
        states.append(draft(draft.embed_blocks(torch.tensor([[3]])), context).last_hidden_state)
        assert DFlashConfig.from_target(target, mask_token_id=96).rope_theta == theta
    assert torch.equal(*states)


def test_draft_and_target_sample_with_independent_random_numbers(monkeypatch):
    """After a rejection the next token must not repeat the random number with which the draft sampled."""
    torch.manual_seed(0)
    target = make_target(initializer_range=0.15)
    draft = make_kind(target, "DFlash 2", strength=0.3)
    inputs = {"input_ids": torch.tensor([[4, 8]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    drawn = []
    multinomial = torch.multinomial

    def recorded(*args, **kwargs):
        state = torch.get_rng_state()
        drawn.append(bytes(state.numpy()))
        return multinomial(*args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", recorded)
    speculative_generate(target, draft, **inputs, do_sample=True, pad_token_id=0, max_new_tokens=20, proposal="sample")
    assert len(drawn) == len(set(drawn)) > 10


@pytest.mark.parametrize("kind", ["DFlash 2", "DSpark", "anchor"])
def test_hybrid_targets_decode_with_every_kind(kind):
    target = make_family("qwen3_5")
    draft = make_kind(target, kind)
    inputs = ragged_prompts(2, seed=4)
    plain = target.generate(**inputs, **GREEDY, max_new_tokens=12)
    drafted = speculative_generate(target, draft, **inputs, **GREEDY, max_new_tokens=12)
    assert torch.equal(drafted.sequences, plain)


@pytest.mark.parametrize("kind", ["DFlash 2", "DSpark", "reduced vocabulary"])
def test_a_chat_goes_on_from_the_cache_with_every_kind(kind):
    target = make_target()
    draft = make_kind(target, kind)
    first = speculative_generate(target, draft, torch.tensor([[4, 8, 1]]), **GREEDY, max_new_tokens=7)
    text = torch.cat([first.sequences, torch.tensor([[9, 9, 3]])], dim=1)
    second = speculative_generate(target, draft, text, **GREEDY, max_new_tokens=9, cache=first.cache)
    assert torch.equal(second.sequences, target.generate(text, **GREEDY, max_new_tokens=9))


@pytest.mark.parametrize("kind", ["DFlash 2", "rnn", "reduced vocabulary"])
def test_processors_that_read_the_text_get_plain_text(kind):
    target = make_target()
    draft = make_kind(target, kind)
    inputs = ragged_prompts(2, seed=8)
    settings = {**GREEDY, "max_new_tokens": 14, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3}
    for how in ({}, {"tree_size": 9}):
        drafted = speculative_generate(target, draft, **inputs, **settings, **how)
        assert torch.equal(drafted.sequences, target.generate(**inputs, **settings))
