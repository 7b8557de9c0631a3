from __future__ import annotations

import itertools
import random

import pytest
import reference
import torch
from conftest import make_draft, make_target
from tiers import thinned
from training_runs import make_trainer, rows_of

from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.evaluation.simulate import accepted_tokens_at_every_anchor, simulate_decoding, simulate_passes
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.target.batch_states import TargetStates
from dflash_hf.target.hidden_states import target_hidden_states


def test_simulated_passes_commit_what_a_loop_over_written_tokens_commits():
    """Random answers, several a row, of every length from 1, with and without an end token."""
    draw = random.Random(0)
    for _ in range(300):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(2, 40))]
        supervised = [draw.random() < 0.8 for _ in tokens]
        proposals = [[draw.randrange(3) for _ in range(3)] for _ in tokens]
        ends = {2} if draw.random() < 0.5 else set()
        accepted, expected = [], []
        for anchor in range(len(tokens)):
            following = tokens[anchor + 1 : anchor + 4]
            right = [a == b for a, b in zip(proposals[anchor], following, strict=False)]
            accepted.append((*right, False).index(False))
        start = None
        for position, is_answer in enumerate([*supervised, False]):
            if is_answer and start is None:
                start = max(position, 1)
            elif not is_answer and start is not None:
                expected += reference.serve(tokens, start, position - 1, proposals, ends) if start < position else []
                start = None
        assert simulate_passes(accepted, tokens, supervised, end_token_ids=ends) == expected


def test_documents_of_a_packed_row_are_simulated_like_rows_of_their_own():
    draw = random.Random(1)
    rows = []
    for length in (5, 1, 9):
        ids = [draw.randrange(3) for _ in range(length)]
        rows.append(([draw.randrange(3) for _ in ids], ids, [index % 4 > 0 or length == 5 for index in range(length)]))
    packed = [list(itertools.chain(*columns)) for columns in zip(*rows, strict=True)]
    documents = [0] * 5 + [1] + [2] * 9
    separate = list(itertools.chain(*(simulate_passes(*row, end_token_ids={2}) for row in rows)))
    assert simulate_passes(*packed, end_token_ids={2}, segment_ids=documents) == separate


def batch_of(target, draft, rows, side: str = "right") -> TokenBatch:
    prepared = [
        {"input_ids": row["input_ids"], "supervised_mask": [bool(value) for value in row["loss_mask"]], "sample_id": 0}
        for row in rows
    ]
    batch = TokenBatch.from_inputs(DFlashCollator(padding_side=side)(prepared))
    return TargetStates(target, draft.config.target_layer_ids).attach_to(batch)


def accepted_of(draft, batch, **kwargs) -> torch.Tensor:
    return accepted_tokens_at_every_anchor(draft, draft, batch, **kwargs)


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory):
    """A target, answers it wrote, and a draft that gets some of their tokens right."""
    target = make_target()
    rows = rows_of(target, count=4)
    trainer = make_trainer(
        target, tmp_path_factory.mktemp("simulation"), rows=rows, max_steps=45, use_muon=True, anchors_per_sample=16
    )
    trainer.train()
    return target, trainer.draft.eval(), rows


@torch.no_grad()
def test_every_anchor_is_drafted_as_a_serving_call_drafts_it(half_trained):
    target, draft, rows = half_trained
    rows = [*rows[:2], {"input_ids": [5, 9], "loss_mask": [0, 1]}]
    batch = batch_of(target, draft, rows)
    accepted = accepted_of(draft, batch, blocks_per_pass=64)
    expected = torch.zeros_like(accepted)
    for index, row in enumerate(rows):
        ids, mask = torch.tensor([row["input_ids"]]), row["loss_mask"]
        states = target_hidden_states(target, ids, ids >= 0, draft.config.target_layer_ids)
        for anchor in range(len(mask) - 1):
            if mask[anchor + 1]:
                block = draft(
                    noise_embeds=draft.embed_blocks(ids[:, [anchor]]), context_hidden_states=states[:, :anchor]
                )
                guesses = draft.compute_logits(block.last_hidden_state)[0].argmax(-1).tolist()
                right = [
                    guess == label for guess, label in zip(guesses[1:], row["input_ids"][anchor + 1 :], strict=False)
                ]
                expected[index, anchor] = (*right, False).index(False)
    assert torch.equal(accepted, expected)
    assert set(accepted.unique().tolist()) == {0, 1, 2, 3}


def test_passes_padding_and_chunks_do_not_change_the_simulation(half_trained):
    target, draft, rows = half_trained
    expected = accepted_of(draft, batch_of(target, draft, rows), blocks_per_pass=64)
    for blocks, chunk in ((1, 256), (7, 2)):
        batch = batch_of(target, draft, rows)
        assert torch.equal(accepted_of(draft, batch, blocks_per_pass=blocks, head_chunk_size=chunk), expected)
    calls = []

    def counted(**kwargs):
        calls.append(kwargs["noise_embeds"].shape)
        return draft(**kwargs)

    batch, left = batch_of(target, draft, rows), batch_of(target, draft, rows, "left")
    accepted = accepted_tokens_at_every_anchor(
        counted, draft, left, blocks_per_pass=16, agree_on=lambda count: count + 3
    )
    assert len(calls) == 2 + 3  # thirty answers' tokens in two passes, and three more that another rank needed
    assert torch.equal(accepted[left.valid], expected[batch.valid])


@torch.no_grad()
def test_a_packed_row_is_accepted_where_its_documents_are(half_trained):
    """Their states stand side by side, as computed for each document alone."""
    target, draft, rows = half_trained
    batches = [batch_of(target, draft, [row]) for row in rows[:3]]
    names = ("input_ids", "valid", "supervised", "hidden_states")
    packed = TokenBatch(
        **{name: torch.cat([getattr(batch, name) for batch in batches], dim=1) for name in names},
        segment_ids=torch.cat([torch.full_like(b.input_ids, index) for index, b in enumerate(batches)], dim=1),
    )
    accepted = accepted_of(draft, packed, blocks_per_pass=32)
    separate = [accepted_of(draft, batch, blocks_per_pass=32) for batch in batches]
    assert torch.equal(accepted, torch.cat(separate, dim=1))
    totals = [simulate_decoding(part, batch, block_size=4) for part, batch in zip(separate, batches, strict=True)]
    assert torch.equal(simulate_decoding(accepted, packed, block_size=4), sum(totals))


def test_simulated_decoding_equals_native_generation_pass_by_pass(half_trained):
    """Answers that the length limit cut, of several lengths, and answers that an end token ended."""
    target, draft, rows = half_trained
    seen = set()
    for row in rows:
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        for new_tokens, ends in ((30, []), (23, []), (22, []), (2, []), (1, []), (30, row["input_ids"][-9:-7])):
            kwargs = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
            if ends:
                kwargs["eos_token_id"] = ends
            inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt)).long()}
            generation = generate_timed(target, inputs, draft, loop="transformers", **kwargs)
            ids = prompt + generation.token_ids
            assert bool(ends) == (ids[-1] in ends)
            answer = {"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * len(generation.token_ids)}
            batch = batch_of(target, draft, [answer])
            accepted = accepted_of(draft, batch, blocks_per_pass=8)
            passes = simulate_passes(accepted[0].tolist(), ids, batch.supervised[0].tolist(), end_token_ids=ends)
            assert passes == generation.committed
            totals = simulate_decoding(accepted, batch, block_size=4, end_token_ids=ends)
            assert totals.tolist() == [[passes.count(size) for size in (1, 2, 3, 4)]]
            seen.update(passes)
    assert seen == {1, 2, 3, 4}


def test_evaluation_reports_the_acceptance_length_that_generate_reaches(half_trained, tmp_path):
    target, draft, rows = half_trained
    trainer = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows, per_device_eval_batch_size=3)
    committed = []
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["loss_mask"].index(1)]])
        generation = generate_timed(
            target,
            {"input_ids": prompt},
            draft,
            loop="transformers",
            max_new_tokens=30,
            do_sample=False,
            suppress_tokens=[96],
            pad_token_id=0,
        )
        assert generation.token_ids == row["input_ids"][prompt.shape[1] :]
        committed += generation.committed
    metrics = trainer.evaluate()
    assert metrics["eval_serving_acceptance_length"] == pytest.approx(sum(committed) / len(committed), rel=1e-12)
    assert metrics["eval_serving_acceptance_length"] != metrics["eval_acceptance_length"]
    quick = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows, eval_serving=False)
    assert "eval_serving_acceptance_length" not in quick.evaluate()


END = 3  # an end token of the targets below, whose vocabulary has seven tokens, so that a random draft is often right


def short_answers(target, draft) -> tuple[list[dict], list[list[int]]]:
    """Answers of three to eight tokens that end by length or with an end token, and the passes that wrote them."""
    rows, committed = [], []
    generator = torch.Generator().manual_seed(2)
    for index in range(18):
        prompt = torch.randint(0, 6, (1, 2 + index % 5), generator=generator)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        kwargs = {"max_new_tokens": 3 + index % 6, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [6]}
        plain = generate_timed(target, inputs, eos_token_id=END, **kwargs)
        is_end_at_full_length = plain.token_ids[-1] == END and len(plain.token_ids) == kwargs["max_new_tokens"]
        if len(plain.token_ids) < 3 or is_end_at_full_length:  # the text does not tell which of the two ended it
            continue
        drafted = generate_timed(target, inputs, draft, eos_token_id=END, **kwargs)
        assert drafted.token_ids == plain.token_ids
        rows.append(
            {
                "input_ids": prompt[0].tolist() + drafted.token_ids,
                "loss_mask": [0] * prompt.shape[1] + [1] * len(drafted.token_ids),
            }
        )
        committed.append(drafted.committed)
    return rows, committed


@pytest.mark.parametrize("block_size", thinned([8, 16], 8))
@pytest.mark.parametrize(
    "layers", [{}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "is_causal": False}]
)
def test_short_answers_are_simulated_pass_by_pass_as_generate_writes_them(tmp_path, block_size, layers):
    """Most blocks run past the end of these answers, and a served block does not know where the answer will end."""
    ended, lengths, passes = set(), set(), []
    for seed in range(2):
        target = make_target(seed, vocab_size=7, eos_token_id=END)
        draft = make_draft(target, seed, mask_token_id=6, block_size=block_size, **layers)
        rows, expected = short_answers(target, draft)
        batch = batch_of(target, draft, rows)
        accepted = accepted_of(draft, batch, blocks_per_pass=5)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            simulated = simulate_passes(
                accepted[index, :length].tolist(), row["input_ids"], row["loss_mask"], end_token_ids={END}
            )
            assert simulated == expected[index]
            ended.add(row["input_ids"][-1] == END)
            lengths.add(sum(row["loss_mask"]))
        trainer = make_trainer(target, tmp_path, draft=draft, rows=rows, eval_rows=rows)
        own = list(itertools.chain(*expected))
        length = trainer.evaluate()["eval_serving_acceptance_length"]
        assert length == pytest.approx(sum(own) / len(own), rel=1e-12)
        passes += own
    assert ended == {True, False}
    assert lengths == {3, 4, 5, 6, 7, 8}
    assert len(set(passes)) >= 3
