"""Packed rows, in which several whole documents do not see each other."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import make_draft, make_target
from training_runs import StopAt, gradients_of, make_trainer, rows_of

from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.forward import block_losses
from dflash_hf.blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.data.dataset import prepare_dataset
from dflash_hf.data.packing import PACKING_WINDOW, pack_dataset, pack_lengths, pack_stream
from dflash_hf.target.batch_states import TargetStates, documents_of, split_documents


@pytest.mark.parametrize("seed", range(20))
def test_packing_is_best_fit_longest_first(seed):
    generator = random.Random(seed)
    capacity = generator.choice([1, 7, 16, 50])
    lengths = [generator.randint(1, capacity) for _ in range(generator.choice([0, 1, 2, 17, 60]))]
    assert pack_lengths(lengths, capacity) == reference.best_fit_rows(lengths, capacity)


def test_a_document_of_the_whole_length_has_a_row_and_a_longer_one_is_refused():
    assert pack_lengths([2, 9, 7, 9], 9) == [[0, 2], [1], [3]]
    with pytest.raises(
        ValueError, match="Document 1 has 10 tokens, but a packed row has at most 9 and documents are not split"
    ):
        pack_lengths([2, 10, 10], 9)


def random_rows(count: int, longest: int, seed: int = 0) -> list[dict]:
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        ids = [generator.randrange(1, 96) for _ in range(generator.randint(2, longest))]
        rows.append({"input_ids": ids, "loss_mask": [generator.random() < 0.7 for _ in ids], "sample_id": 7 * index})
    return rows


def test_every_document_is_whole_in_one_packed_row_and_row_ids_are_distinct():
    rows = [{**row, "loss_mask": [1] * len(row["input_ids"])} for row in random_rows(PACKING_WINDOW + 40, 12)]
    prepared = prepare_dataset(rows, None, max_length=20)
    packed = pack_dataset(prepared, 20)
    assert len(packed) < 0.5 * len(prepared)
    assert set(packed.column_names) == {"input_ids", "supervised_mask", "segment_ids", "sample_id"}
    assert len(set(packed["sample_id"])) == len(packed)
    seen = []
    for row in packed:
        assert len(row["input_ids"]) == len(row["segment_ids"]) == len(row["supervised_mask"]) <= 20
        assert row["segment_ids"] == sorted(row["segment_ids"])
        for segment in range(row["segment_ids"][-1] + 1):
            inside = [index for index, value in enumerate(row["segment_ids"]) if value == segment]
            seen.append(tuple(row["input_ids"][index] for index in inside))
    assert sorted(seen) == sorted(tuple(row["input_ids"]) for row in rows)
    assert sorted(tuple(row["input_ids"]) for row in documents_of(packed)) == sorted(seen)
    assert documents_of(prepared) is prepared
    assert list(pack_stream(prepared, 20)) == list(packed)


def test_packing_logs_how_full_the_rows_are(caplog):
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.packing").propagate = True
    rows = [{"input_ids": [1] * length} for length in (4, 6, 5)]
    prepared = prepare_dataset(rows, None, max_length=10)
    pack_dataset(prepared, 10)
    assert "3 rows were packed into 2 rows of at most 10 tokens, which are 75% full" in caplog.text
    caplog.clear()
    pack_dataset(prepared, 10, is_quiet=True)
    assert not caplog.text


def packed_batch(padding_side: str, count: int = 7) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """A batch of packed rows, and its documents in the order of the batch."""
    rows = [row for row in random_rows(count, 14, seed=3) if any(row["loss_mask"][1:])]
    prepared = prepare_dataset(rows, None, max_length=24)
    packed = pack_dataset(prepared, 24)
    batch = DFlashCollator(pad_token_id=5, padding_side=padding_side)(list(packed))
    documents = []
    for row in pack_lengths([len(ids) for ids in prepared["input_ids"]], 24):
        documents += [prepared[index] for index in row]
    assert len(documents) > len(packed) > 1
    return batch, documents


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_a_packed_batch_comes_apart_into_its_documents_and_together_again(padding_side):
    batch, documents = packed_batch(padding_side)
    parts = split_documents(TokenBatch.from_inputs(batch))
    assert len(parts.input_ids) == len(documents)
    for ids, valid, document in zip(parts.input_ids, parts.token_valid_mask, documents, strict=True):
        length = len(document["input_ids"])
        assert valid.tolist() == [True] * length + [False] * (len(valid) - length)
        assert ids.tolist() == document["input_ids"] + [0] * (len(valid) - length)
    sizes = []

    class TokenPositionAndLength(TargetStates):
        def of_sequences(self, input_ids: torch.Tensor, token_valid_mask: torch.Tensor) -> torch.Tensor:
            assert token_valid_mask[:, 0].all()
            sizes.append(token_valid_mask.numel())
            columns = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            lengths = token_valid_mask.sum(-1, keepdim=True).expand_as(input_ids)
            return torch.stack([input_ids, columns, lengths], dim=-1)

    target = make_target(hidden_size=3, num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    states = TokenPositionAndLength(target, [0]).attach_to(TokenBatch.from_inputs(batch)).hidden_states
    expected = [
        [token, position, len(document["input_ids"])]
        for document in documents
        for position, token in enumerate(document["input_ids"])
    ]
    assert states[batch["token_valid_mask"]].tolist() == expected
    assert states[~batch["token_valid_mask"]].eq(0).all()
    assert max(sizes) <= batch["input_ids"].numel()


def test_a_packed_batch_without_tokens_is_refused():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="2 packed rows has no token"):
        TargetStates(make_target(), [0]).attach_to(TokenBatch(nothing.long(), nothing, segment_ids=nothing.long()))


def plan_inside_document(
    plan: DFlashBatchPlan, first: int, after: int, row: int
) -> tuple[torch.Tensor, DFlashBatchPlan]:
    """The blocks of a packed row whose anchors are in the columns `first … after - 1`, as a plan of those alone."""
    chosen = plan.block_valid & (plan.sample_rows == row)
    chosen &= (plan.anchor_positions >= first) & (plan.anchor_positions < after)
    return chosen, DFlashBatchPlan(
        sample_rows=torch.zeros_like(plan.sample_rows[chosen]),
        anchor_ids=plan.anchor_ids[chosen],
        anchor_positions=plan.anchor_positions[chosen] - first,
        trunk_lengths=plan.trunk_lengths[chosen],
        query_positions=plan.query_positions[chosen] - first,
        label_positions=plan.label_positions[chosen] - first,
        block_valid=plan.block_valid[chosen],
        slot_valid=plan.slot_valid[chosen],
        loss_mask=plan.loss_mask[chosen],
    )


@pytest.mark.parametrize("block_attention", ["structured", "dense"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("layers", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}])
def test_blocks_of_a_packed_row_equal_those_of_its_documents(padding_side, layers, block_attention):
    """Hidden states and logits of each anchor, cross-entropy and gradient."""
    target = make_target()
    draft = make_draft(target, **layers)
    batch, documents = packed_batch(padding_side)
    ids, segments = batch["input_ids"], batch["segment_ids"]
    states = TargetStates(target, draft.config.target_layer_ids)
    plan = build_dflash_batch_plan(
        batch["token_valid_mask"],
        batch["sample_ids"],
        supervised_mask=batch["supervised_mask"],
        segment_ids=segments,
        anchors_per_sample=9,
        gamma=3,
        optimizer_step=2,
        seed=1,
        replacement=False,
        partial_windows=True,
    )
    outputs = []

    def model(**kwargs):
        outputs.append(draft(**kwargs).last_hidden_state)
        return SimpleNamespace(last_hidden_state=outputs[-1])

    packed = states.attach_to(TokenBatch.from_inputs(batch))
    losses = block_losses(model, draft, plan, packed, block_attention=block_attention)
    (losses.loss * losses.weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}
    hidden = outputs.pop().view(len(plan.anchor_ids), 4, -1)

    draft.zero_grad()
    compared = torch.zeros_like(plan.block_valid)
    document_number = 0
    for row in range(len(ids)):
        for segment in range(int(segments[row].max()) + 1):
            columns = (segments[row] == segment).nonzero()[:, 0].tolist()
            document = documents[document_number]
            document_number += 1
            assert ids[row, columns].tolist() == document["input_ids"]
            chosen, own_plan = plan_inside_document(plan, columns[0], columns[-1] + 1, row)
            if not chosen.any():
                continue
            own_ids = torch.tensor([document["input_ids"]])
            own_batch = states.attach_to(TokenBatch(own_ids, torch.ones_like(own_ids, dtype=torch.bool)))
            own = block_losses(model, draft, own_plan, own_batch, block_attention=block_attention)
            own_hidden = outputs.pop().view(-1, 4, hidden.shape[-1])
            slots = own_plan.slot_valid
            torch.testing.assert_close(hidden[chosen][slots], own_hidden[slots], atol=1e-5, rtol=1e-5)
            head = draft.get_output_embeddings()
            torch.testing.assert_close(head(hidden[chosen][slots]), head(own_hidden[slots]), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(losses.loss[chosen], own.loss, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(losses.weights[chosen], own.weights)
            (own.loss * own.weights).sum().backward()
            compared |= chosen
    assert document_number == len(documents)
    assert torch.equal(compared, plan.block_valid)
    assert compared.sum() > 10
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", [None, "memory"])
@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_a_packed_step_of_the_trainer_equals_the_unpacked_one(tmp_path, monkeypatch, padding_side, cache):
    """With an anchor at every window both steps train on the same blocks; packing changes only where they lie."""
    target = make_target()
    rows = rows_of(target, count=5, new_tokens=16)
    rows[1]["input_ids"], rows[1]["loss_mask"] = rows[1]["input_ids"][:8], [0] * 7 + [1]
    whole = {}
    for packing in (False, True):
        trainer = make_trainer(
            target,
            tmp_path,
            rows=rows,
            packing=packing,
            max_length=60,
            anchors_per_sample=60,
            padding_side=padding_side,
            cache_target_states=cache,
        )
        if cache and packing:
            trainer.train()  # fills the cache
            trainer.draft.load_state_dict(make_draft(target).state_dict())
            monkeypatch.setattr(target, "forward", None)  # cached documents need no target
        whole[packing] = gradients_of(trainer, [list(range(len(trainer.train_dataset)))])
    assert len(trainer.train_dataset) < len(rows)
    for name, gradient in whole[False].items():
        torch.testing.assert_close(whole[True][name], gradient, atol=1e-6, rtol=1e-5)


def test_padding_side_and_packing_change_a_bf16_step_by_rounding_alone(tmp_path):
    target = make_target()
    rows = rows_of(target, count=5, new_tokens=16)
    gradients = []
    for packing, side in ((False, "right"), (True, "right"), (True, "left")):
        trainer = make_trainer(
            target.bfloat16(),
            tmp_path,
            rows=rows,
            packing=packing,
            padding_side=side,
            max_length=60,
            anchors_per_sample=60,
            bf16=True,
        )
        gradients.append(gradients_of(trainer, [list(range(len(trainer.train_dataset)))]))
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            # bf16 keeps 8 bits: single products differ by 0.4 %, their sums by little more
            assert (other[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_packing_leaves_evaluation_as_it_is(target, tmp_path):
    rows = rows_of(target)
    results = []
    for packing in (False, True):
        trainer = make_trainer(target, tmp_path, rows=rows, eval_rows=rows, packing=packing, max_length=90)
        metrics = trainer.evaluate()
        results.append({name: value for name, value in metrics.items() if "loss" in name or "acc" in name})
    assert len(trainer.train_dataset) == 2
    assert results[0] == results[1]


def test_resuming_on_packed_rows_grouped_by_length_equals_an_uninterrupted_run(tmp_path):
    finals = []
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for stop in stops:
            target = make_target()
            trainer = make_trainer(
                target,
                tmp_path / name,
                rows=rows_of(target, count=9, new_tokens=14),
                packing=True,
                max_length=45,
                train_sampling_strategy="group_by_length",
                max_steps=6,
                save_strategy="steps",
                save_steps=3,
            )
            if stop == 3:
                trainer.add_callback(StopAt(3))
            checkpoint = tmp_path / name / "out" / "checkpoint-3"
            trainer.train(resume_from_checkpoint=str(checkpoint) if len(stops) > 1 and stop == 6 else None)
        finals.append({key: value.clone() for key, value in trainer.draft.state_dict().items()})
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key


@pytest.mark.trains
def test_packed_rows_train(target, tmp_path):
    trainer = make_trainer(target, tmp_path, packing=True, max_length=80, anchors_per_sample=30, max_steps=30)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
