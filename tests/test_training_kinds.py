"""Training of drafts of every kind: losses against loops, gradients, plans, simulated decoding, runs and resumes."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from conftest import make_draft, make_target
from test_decoding_kinds import make_kind
from test_model_heads import FAST_KINDS, KINDS
from tiers import thinned
from torch.nn import functional
from training_runs import make_trainer, rows_of

from dflash_hf import DFlashDraftModel, DFlashTrainingArguments, build_dflash_batch_plan, speculative_generate
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.forward import block_losses, loss_mask_of
from dflash_hf.blocks.losses import LossTerms, l1_distance, selector_loss
from dflash_hf.evaluation.simulate import accepted_tokens_at_every_anchor, simulate_passes
from dflash_hf.target.hidden_states import target_hidden_states, target_logits_function
from dflash_hf.training.draft_vocabulary import count_supervised_tokens, most_frequent_tokens

TERMS = {
    "cross-entropy": LossTerms(confidence_weight=0.0),
    "DSpark": LossTerms(ce_weight=0.1, l1_weight=0.9),
    "soft labels and KL": LossTerms(soft_labels=True, kl_weight=0.4, selector_weight=0.5, confidence_weight=2.0),
}


def batch_with_states(target, draft, rows=3, length=12, seed=0):
    torch.manual_seed(seed)
    ids = torch.randint(0, 96, (rows, length))
    valid = torch.arange(length) < torch.tensor([[length], [length - 3], [length - 5]])[:rows]
    supervised = valid & (torch.arange(length) >= 3)
    states = target_hidden_states(target, ids, valid, draft.config.target_layer_ids, include_final_state=True)
    width = target.config.hidden_size
    return TokenBatch(ids, valid, supervised).with_hidden_states(states[..., :-width], states[..., -width:])


def plan_of(draft, batch, **values):
    config = draft.config
    return build_dflash_batch_plan(
        batch.valid, torch.arange(batch.num_rows), supervised_mask=batch.supervised, gamma=config.tokens_per_block - 1,
        sample_from_anchor=config.sample_from_anchor,
        **{"anchors_per_sample": 4, "optimizer_step": 0, "seed": 0, "replacement": False, "partial_windows": True,
           **values},
    )  # fmt: skip


def losses_by_hand(target, draft, plan, batch, terms):
    """Serve every block by itself, with all logits at once and plain autograd, and add up the terms of each token."""
    config, head = draft.config, target.get_output_embeddings().weight.detach()
    embedding = target.get_input_embeddings().weight.detach()
    kept = torch.arange(97) if draft.d2t is None else draft.draft_vocabulary()
    losses = torch.zeros(plan.loss_mask.shape)
    correct = torch.zeros(plan.loss_mask.shape, dtype=torch.bool)
    for block in range(len(plan.block_valid)):
        if not plan.block_valid[block]:
            continue
        row, anchor = int(plan.sample_rows[block]), int(plan.anchor_positions[block])
        ids = batch.input_ids[row]
        noise = draft.embed_blocks(ids[None, anchor : anchor + 1])
        states = draft(noise, batch.hidden_states[row, None, :anchor]).last_hidden_state[0]
        memory = None
        for place in range(1, config.tokens_per_block):
            position = anchor + place
            if position >= len(ids):
                break
            hidden, before, label = states[place], ids[position - 1], ids[position]
            unary = (hidden @ head.t())[kept]
            scores, extra = unary, 0.0
            if draft.markov_head is not None:
                features, memory = draft.markov_head.features(before[None], hidden[None], memory)
                scores = unary + draft.markov_head.markov_w2(features)[0]
            if not plan.loss_mask[block, place] or label not in kept:
                continue
            index = int((kept == label).nonzero())
            choice = int(scores.argmax())
            if draft.candidate_selector is not None:
                selector = draft.candidate_selector
                best = sorted(range(97), key=lambda token: (-unary[token].item(), token))[: config.selector_top_k]
                scale = config.selector_embedding_scale
                previous = embedding[before] * scale if selector.is_factored else before
                successors = embedding[best] * scale if selector.is_factored else torch.tensor(best)
                features = selector.features(previous[None], hidden[None])[0]
                pair = unary[best] + selector.scores(features[None], successors[None])[0]
                choice = best[int(pair.argmax())]
                if int(label) in best:
                    extra = -terms.selector_weight * pair.log_softmax(-1)[best.index(int(label))]
            full = target.lm_head(batch.final_hidden_states[row, position - 1]).detach()
            q, p = scores.softmax(-1), full.softmax(-1)
            of_draft = torch.zeros(97).index_put((kept,), q)
            distance = sum(abs(of_draft[token] - p[token]) for token in range(97))
            if terms.soft_labels:
                inside = full[kept].softmax(-1)
                loss = -terms.ce_weight * (inside * scores.log_softmax(-1)).sum()
            else:
                loss = -terms.ce_weight * scores.log_softmax(-1)[index]
            loss = loss + terms.l1_weight * distance
            if terms.kl_weight:
                best_values, best_ids = full[kept].topk(min(10, len(kept)))
                log_p = best_values.log_softmax(-1)
                divergence = (log_p.exp() * (log_p - scores.log_softmax(-1)[best_ids])).sum()
                loss = terms.kl_weight * divergence + (1 - terms.kl_weight) * loss
            if draft.confidence_head is not None and terms.confidence_weight:
                inputs = [hidden]
                if config.confidence_head_with_markov:
                    inputs.append(draft.markov_head.markov_w1.weight[before])
                logit = draft.confidence_head.proj(torch.cat(inputs))[0]
                accepted = (1 - distance / 2).detach()
                chance = torch.sigmoid(logit)
                extra = extra - terms.confidence_weight * (
                    accepted * torch.log(chance) + (1 - accepted) * torch.log(1 - chance)
                )
            losses[block, place] = loss + extra
            correct[block, place] = choice == index
    return losses, correct


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("kind", thinned(KINDS, *FAST_KINDS))
def test_losses_and_gradients_equal_blocks_served_one_by_one(kind, terms):
    target = make_target()
    draft = make_kind(target, kind, strength=0.5)
    batch = batch_with_states(target, draft)
    plan = plan_of(draft, batch)
    terms = TERMS[terms]
    compute_target_logits = target_logits_function(target, draft.compute_logits)
    results = []
    for by_hand in (True, False):
        draft.zero_grad()
        if by_hand:
            losses, correct = losses_by_hand(target, draft, plan, batch, terms)
            weights = torch.exp(-(torch.arange(losses.shape[1]) - 1).clamp(min=0) / 4)
            (losses * weights).sum().backward()
        else:
            found = block_losses(
                draft, draft, plan, batch, slot_weights="decay", loss_decay=4.0, terms=terms,
                compute_target_logits=compute_target_logits, head_chunk_size=5,
            )  # fmt: skip
            losses, correct = found.loss, found.is_correct
            (found.weights * found.loss).sum().backward()
        gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
        results.append((losses.detach(), correct, {n: g.clone() for n, g in gradients.items() if g is not None}))
    (wanted, right, wanted_gradients), (losses, correct, gradients) = results
    assert (wanted > 0).sum() > 10
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(correct, right)
    for name, gradient in wanted_gradients.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(gradients[name] / scale, gradient / scale, rtol=1e-3, atol=2e-4, msg=name)
    for name in gradients.keys() - wanted_gradients.keys():
        assert not gradients[name].any(), name


def test_the_terms_have_the_values_of_the_literals():
    p, q = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([[0.5, 0.3, 0.2]]).log()
    distance = l1_distance(q, p)
    torch.testing.assert_close(distance, torch.tensor([0.4]))
    torch.testing.assert_close(1 - distance / 2, torch.tensor([0.8]))
    weights = [math.exp(-k / 4) for k in range(3)]
    assert weights == pytest.approx([1, 0.7788, 0.6065], abs=1e-4)
    scores, candidates = torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([[4, 7], [4, 7]])
    wanted = [math.log(1 + math.exp(-1)), 0.0]
    torch.testing.assert_close(selector_loss(scores, candidates, torch.tensor([4, 5])), torch.tensor(wanted))
    # With a reduced vocabulary the target's probability of other tokens counts as distance.
    kept = torch.tensor([0, 2])
    torch.testing.assert_close(l1_distance(torch.tensor([[0.5, 0.5]]).log(), p, kept), torch.tensor([0.2 + 0.4 + 0.2]))


def test_labels_positions_and_teachers_of_slots_are_those_of_the_table():
    """Anchor 4 and three proposals: inputs, labels, the target's states and the tokens before, of both slot rules."""
    valid = torch.ones(1, 9, dtype=torch.bool)
    supervised = torch.zeros(1, 9, dtype=torch.bool)
    supervised[0, 5:8] = True
    plans = {
        anchored: build_dflash_batch_plan(
            valid, torch.tensor([3]), supervised_mask=supervised, anchors_per_sample=9, gamma=3, optimizer_step=0,
            seed=0, replacement=False, partial_windows=True, sample_from_anchor=anchored,
        )
        for anchored in (True, False)
    }  # fmt: skip
    for anchored, plan in plans.items():
        block = int((plan.anchor_positions == 4).nonzero()[0])
        assert plan.label_positions[block].tolist() == [4, 5, 6, 7]
        assert plan.query_positions[block].tolist() == ([4, 5, 6] if anchored else [4, 5, 6, 7])
        assert plan.loss_mask[block].tolist() == [False, True, True, True]
        assert (plan.block_size, plan.tokens_per_block) == ((3, 4) if anchored else (4, 4))
    for name in ("anchor_positions", "label_positions", "loss_mask", "block_valid", "trunk_lengths"):
        assert torch.equal(getattr(plans[True], name), getattr(plans[False], name))


@pytest.mark.parametrize("kind", thinned(KINDS, *FAST_KINDS))
def test_simulated_decoding_equals_generate_pass_by_pass(kind):
    target = make_target()
    draft = make_kind(target, kind)
    passes = []
    for index, prompt in enumerate(([4, 8, 1], [9, 3], [17, 5, 6, 7])):
        decoded = speculative_generate(
            target, draft, torch.tensor([prompt]), do_sample=False, pad_token_id=0, max_new_tokens=12 + index,
            suppress_tokens=[96],
        )  # fmt: skip
        ids = decoded.sequences
        valid = torch.ones_like(ids, dtype=torch.bool)
        supervised = torch.arange(ids.shape[1])[None] >= len(prompt)
        states = target_hidden_states(target, ids, valid, draft.config.target_layer_ids)
        batch = TokenBatch(ids, valid, supervised).with_hidden_states(states)
        accepted = accepted_tokens_at_every_anchor(draft, draft, batch, blocks_per_pass=5, head_chunk_size=3)
        simulated = simulate_passes(accepted[0].tolist(), ids[0].tolist(), supervised[0].tolist())
        assert simulated == decoded.statistics.committed[0]
        passes += simulated
    assert len(passes) > 10


def test_a_label_outside_the_vocabulary_leaves_the_loss_and_ends_the_accepted_tokens():
    target = make_target()
    draft = make_draft(target, draft_vocab_size=40)
    batch = batch_with_states(target, draft)
    draft.set_draft_vocabulary(torch.arange(40))
    plan = plan_of(draft, batch)
    labels = batch.input_ids[plan.sample_rows[:, None], plan.label_positions.clamp(max=batch.length - 1)]
    mask = loss_mask_of(draft, plan, batch.input_ids)
    assert torch.equal(mask, plan.loss_mask & (labels < 40))
    assert 0 < mask.sum() < plan.loss_mask.sum()
    for slot_weights in ("decay", "dpace", "uniform"):
        losses = block_losses(draft, draft, plan, batch, slot_weights=slot_weights)
        assert not losses.loss[~mask].any()
        assert not losses.weights[~mask].any()
        assert not losses.is_correct[~mask].any()
        assert losses.weights[mask].all()


def test_a_token_after_one_outside_the_vocabulary_has_the_weight_of_one_that_is_hardly_reached():
    target = make_target()
    draft = make_draft(target, draft_vocab_size=40)
    batch = batch_with_states(target, draft)
    draft.set_draft_vocabulary(torch.arange(40))
    plan = plan_of(draft, batch)
    losses = block_losses(draft, draft, plan, batch, slot_weights="dpace", dpace_alpha=0.0)
    mask = loss_mask_of(draft, plan, batch.input_ids)
    is_after = ((~mask & plan.loss_mask).long().cumsum(-1) > 0) & mask
    assert is_after.any()
    assert not losses.weights[is_after].any()  # nothing behind it can be accepted


def test_the_most_frequent_supervised_tokens_are_chosen():
    import datasets

    rows = datasets.Dataset.from_list(
        [
            {"input_ids": [1, 5, 5, 2], "supervised_mask": [False, True, True, True]},
            {"input_ids": [1, 1, 7, 2], "supervised_mask": [False, False, True, True]},
        ]
    )
    counts = count_supervised_tokens(rows, 10)
    assert counts.tolist() == [0, 0, 2, 0, 0, 2, 0, 1, 0, 0]
    assert most_frequent_tokens(counts, 4).tolist() == [0, 2, 5, 7]
    assert most_frequent_tokens(counts, 1).tolist() == [2]


def test_the_trainer_chooses_the_vocabulary_once_and_a_saved_draft_keeps_it(tmp_path, caplog):
    target = make_target()
    rows = rows_of(target)
    draft = DFlashDraftModel.from_target(
        target, num_hidden_layers=2, num_target_layers=2, block_size=4, mask_token_id=96, draft_vocab_size=20
    )
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows)
    assert "proposes 20 of 97 tokens" in caplog.text
    counts = torch.zeros(97, dtype=torch.long)
    for row in rows:
        for token, is_supervised in zip(row["input_ids"], row["loss_mask"], strict=True):
            counts[token] += is_supervised
    assert draft.draft_vocabulary().tolist() == most_frequent_tokens(counts, 20).tolist()
    trainer.train()
    metrics = trainer.evaluate()
    assert 1 <= metrics["eval_serving_acceptance_length"] <= 4
    trainer.save_model()
    loaded = DFlashDraftModel.from_pretrained(trainer.args.output_dir, target=target)
    assert torch.equal(loaded.d2t, draft.d2t)
    chosen = loaded.d2t.clone()
    make_trainer(target, tmp_path, draft=loaded, rows=rows[:1])
    assert torch.equal(loaded.d2t, chosen)


def test_a_stream_cannot_be_counted_and_a_vocabulary_given_before_is_used(tmp_path):
    import datasets

    target = make_target()
    stream = datasets.Dataset.from_list(rows_of(target)).to_iterable_dataset()
    draft = make_draft(target, draft_vocab_size=20)
    with pytest.raises(ValueError, match="a stream, which cannot be counted"):
        make_trainer(target, tmp_path, draft=draft, rows=stream)
    draft.set_draft_vocabulary(torch.arange(30, 50))
    make_trainer(target, tmp_path, draft=draft, rows=stream).train()
    assert draft.draft_vocabulary().tolist() == list(range(30, 50))


def test_the_dspark_recipe_is_its_four_arguments(tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), recipe="dspark", use_cpu=True)
    assert (args.ce_weight, args.l1_weight, args.slot_weights, args.loss_decay) == (0.1, 0.9, "decay", 4.0)
    assert args.loss_terms.confidence_weight == 1.0
    with pytest.raises(ValueError, match=r"l1_weight=0\.5 contradicts recipe='dspark'"):
        DFlashTrainingArguments(output_dir=str(tmp_path), recipe="dspark", l1_weight=0.5, use_cpu=True)
    with pytest.raises(ValueError, match="recipe='eagle' must be one of dspark"):
        DFlashTrainingArguments(output_dir=str(tmp_path), recipe="eagle", use_cpu=True)


TRAINED = {
    "DFlash 2": {},
    "selector with tables": {"use_muon": True},
    "DSpark": {"recipe": "dspark", "max_steps": 300},
    "rnn": {"use_muon": True},
    "anchor": {"slot_weights": "dpace", "max_steps": 200},
    "reduced vocabulary with a Markov head": {"slot_weights": "dpace"},
    "mask vector": {},
    "sinks": {},
    "causal": {},
}


@pytest.mark.trains
@pytest.mark.parametrize("kind", TRAINED)
def test_a_draft_of_each_kind_learns_its_rows_by_heart_and_is_then_accepted_whole(kind, tmp_path):
    target = make_target()
    rows = rows_of(target)
    draft = DFlashDraftModel.from_target(
        target, num_hidden_layers=2, num_target_layers=2, block_size=4, mask_token_id=96,
        **{**KINDS[kind], **({"draft_vocab_size": 80} if "vocabulary" in kind else {})},
    )  # fmt: skip
    values = {"use_muon": True, "learning_rate": 1e-2, "max_steps": 150, **TRAINED[kind]}
    trainer = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows, **values)
    trainer.train()
    metrics = trainer.evaluate()
    whole = draft.config.tokens_per_block
    assert metrics["eval_serving_acceptance_length"] > 0.85 * whole, metrics
    prompt = torch.tensor([rows[0]["input_ids"][:5]])
    draft.eval()
    decoded = speculative_generate(
        target, draft, prompt, do_sample=False, pad_token_id=0, max_new_tokens=25, suppress_tokens=[96]
    )
    assert decoded.statistics.acceptance_length > 0.75 * whole
    if draft.confidence_head is not None:  # it learned that its tokens are accepted
        cut = speculative_generate(
            target, draft, prompt, do_sample=False, pad_token_id=0, max_new_tokens=25, suppress_tokens=[96],
            confidence_threshold=0.3,
        )  # fmt: skip
        assert cut.statistics.acceptance_length > 0.7 * whole


@pytest.mark.parametrize("kind", ["DFlash 2", "DSpark", "reduced vocabulary with a Markov head", "mask vector"])
def test_a_resumed_run_of_each_kind_goes_on_bit_for_bit(kind, tmp_path):
    target = make_target()
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "use_muon": True}
    if kind == "DSpark":
        values["recipe"] = "dspark"
        values["slot_weights"] = "decay"
    whole = make_draft(target, **KINDS[kind])
    trainer = make_trainer(target, tmp_path, draft=whole, **values)
    trainer.train()
    part = make_draft(target, **KINDS[kind])
    resumed = make_trainer(target, tmp_path, draft=part, **values)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name, value in whole.state_dict().items():
        assert torch.equal(part.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["selector", "DFlash 2", "DSpark", "selector with tables"])
def test_heads_alone_are_trained_and_the_rest_of_the_draft_stays_bit_for_bit(kind, tmp_path):
    target = make_target()
    draft = make_draft(target, **KINDS[kind])
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    make_trainer(target, tmp_path, draft=draft, trained_part="heads", use_muon=True).train()
    heads = ("candidate_selector", "markov_head", "confidence_head")
    moved = {name for name, value in draft.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith(heads) for name in moved)
    assert {name for name in before if name.startswith(heads)} == moved


def test_training_the_heads_of_a_draft_without_any_is_refused(tmp_path):
    target = make_target()
    with pytest.raises(ValueError, match="trained_part='heads' trains a selector"):
        make_trainer(target, tmp_path, trained_part="heads")
    with pytest.raises(ValueError, match="the draft has none with a weight above 0"):
        make_trainer(
            target, tmp_path, draft=make_draft(target, selector_rank=2), trained_part="heads", selector_weight=0.0
        )


@pytest.mark.parametrize(
    ("kind", "argument"), [("DSpark", {"confidence_weight": 0.0}), ("selector", {"selector_weight": 0.0})]
)
def test_a_head_without_weight_in_the_loss_is_frozen(kind, argument, tmp_path):
    target = make_target()
    draft = make_draft(target, **KINDS[kind])
    name = "confidence_head" if kind == "DSpark" else "candidate_selector"
    before = {key: value.clone() for key, value in getattr(draft, name).state_dict().items()}
    make_trainer(target, tmp_path, draft=draft, **argument).train()
    assert all(torch.equal(value, before[key]) for key, value in getattr(draft, name).state_dict().items())


def test_the_first_step_with_a_new_convolution_is_that_of_dflash_bit_for_bit():
    target = make_target()
    plain = make_draft(target)
    changed = DFlashDraftModel.from_target(
        target, num_hidden_layers=2, num_target_layers=2, block_size=4, mask_token_id=96, **KINDS["convolution"]
    )
    changed.load_state_dict(plain.state_dict(), strict=False)
    batch = batch_with_states(target, plain)
    results = []
    for draft in (plain, changed):
        losses = block_losses(draft, draft, plan_of(draft, batch), batch, slot_weights="dpace")
        (losses.weights * losses.loss).sum().backward()
        results.append((losses.loss.detach(), {name: value.grad for name, value in draft.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-6)


def test_metrics_of_a_corrected_draft_count_its_corrected_choices(tmp_path):
    """A selector with large weights changes what is proposed, and the metrics follow it."""
    target = make_target()
    rows = rows_of(target)
    lengths = []
    for strength in (0.0, 3.0):
        draft = make_kind(target, "selector", strength=strength)
        trainer = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows)
        metrics = trainer.evaluate()
        lengths.append((metrics["eval_acceptance_length"], metrics["eval_serving_acceptance_length"]))
    assert lengths[0] != lengths[1]


def test_a_confidence_head_needs_states_of_the_target(tmp_path):
    target = make_target()
    draft = make_kind(target, "DSpark")
    batch = batch_with_states(target, draft)
    with pytest.raises(ValueError, match="the confidence head of the draft compares"):
        block_losses(draft, draft, plan_of(draft, batch), TokenBatch(
            batch.input_ids, batch.valid, batch.supervised, hidden_states=batch.hidden_states
        ))  # fmt: skip


def test_cross_entropy_of_a_reduced_head_is_that_over_its_tokens():
    target = make_target()
    draft = make_draft(target, draft_vocab_size=40)
    draft.set_draft_vocabulary(torch.arange(1, 80, 2))
    batch = batch_with_states(target, draft)
    plan = plan_of(draft, batch)
    losses = block_losses(draft, draft, plan, batch, slot_weights="uniform")
    assert losses.loss.requires_grad
    block, place = next(
        (b, t)
        for b, t in itertools.product(range(len(plan.loss_mask)), range(1, 4))
        if plan.loss_mask[b, t] and batch.input_ids[plan.sample_rows[b], plan.label_positions[b, t]] % 2
    )
    row, anchor = int(plan.sample_rows[block]), int(plan.anchor_positions[block])
    noise = draft.embed_blocks(batch.input_ids[row, anchor][None, None])
    states = draft(noise, batch.hidden_states[row, None, :anchor]).last_hidden_state[0]
    logits = draft.compute_logits(states[place])[1:80:2]
    label = int(batch.input_ids[row, anchor + place]) // 2
    wanted = functional.cross_entropy(logits, torch.tensor(label))
    torch.testing.assert_close(losses.loss[block, place], wanted)
