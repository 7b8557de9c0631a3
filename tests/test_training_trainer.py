from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import datasets
import numpy as np
import pytest
import reference
import torch
from conftest import TINY, greedy, make_draft, make_target
from tiers import thinned
from training_runs import RecordElapsed, StopAt, gradients_of, make_trainer, rows_of, weights
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    EarlyStoppingCallback,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    TrainerCallback,
)
from transformers.trainer_utils import EvalPrediction

import dflash_hf.training.trainer
from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, build_dflash_batch_plan
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.data.dataset import prepare_dataset
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.training.optimizer import MuonWithAdamW

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.mark.trains
@pytest.mark.parametrize("muon", [False, True])
def test_an_overfitted_draft_is_accepted_whole_by_native_generation(target, tmp_path, muon):
    """Labels, anchors and slots mean the same in training and serving."""
    rows = rows_of(target, count=2)
    trainer = make_trainer(
        target, tmp_path, rows=rows, max_steps=200, anchors_per_sample=32, use_muon=muon, slot_weights="dpace"
    )
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_acceptance_length"] > 3.8
    trainer.draft.eval()
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["loss_mask"].index(1)]])
        generation = generate_timed(
            target,
            {"input_ids": prompt},
            trainer.draft,
            loop="transformers",
            max_new_tokens=29,
            do_sample=False,
            suppress_tokens=[96],
            pad_token_id=0,
        )
        assert generation.token_ids == row["input_ids"][prompt.shape[1] :][:29]
        assert generation.committed == [4] * 7  # B - 1 drafted tokens and the bonus token in every pass


@pytest.mark.parametrize("slot_weights", ["decay", "dpace", "uniform"])
def test_one_batch_equals_any_split_of_it_into_accumulation_steps(target, tmp_path, slot_weights):
    """Cases 9 and 21: uneven supervision, rows of different lengths, one row without any block."""
    rows = rows_of(target)
    rows[1]["loss_mask"] = [0] * 25 + rows[1]["loss_mask"][25:]
    rows[2]["input_ids"], rows[2]["loss_mask"] = rows[2]["input_ids"][:9], [0] * 8 + [1]
    trainer = make_trainer(target, tmp_path, rows=rows, slot_weights=slot_weights)
    whole = gradients_of(trainer, [[0, 1, 2, 3]])
    for split in ([[0], [1], [2], [3]], [[0, 1, 2], [3]]):
        for name, gradient in gradients_of(trainer, split).items():
            torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5)


def test_left_and_right_padding_give_the_same_gradient(target, tmp_path):
    trainer = make_trainer(target, tmp_path)
    gradients = []
    for side in ("right", "left"):
        batch = DFlashCollator(padding_side=side)([trainer.train_dataset[index] for index in range(4)])
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, batch, None)
        gradients.append({name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_a_batch_without_supervised_slots_gives_a_finite_zero_loss_in_the_graph(target, tmp_path):
    trainer = make_trainer(target, tmp_path)
    batch = DFlashCollator()([{**trainer.train_dataset[0], "supervised_mask": [False] * 35}])
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


def test_the_target_is_bit_identical_after_training_and_gets_no_gradient(tmp_path):
    """It is in evaluation mode, and no optimizer has its parameters."""
    target = make_target(tie_word_embeddings=True).train()
    before = weights(target)
    trainer = make_trainer(target, tmp_path)
    trainer.train()
    assert not target.training
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in target.parameters())
    optimised = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimised == {id(parameter) for parameter in trainer.draft.parameters()}


@pytest.mark.parametrize("muon", [False, True])
def test_norm_weights_move(target, tmp_path, muon):
    """In bf16 alone they would stay at exactly 1: fp32 weights under bf16 autocast, 20 steps at 1e-4."""
    draft = DFlashDraftModel.from_target(
        target, num_hidden_layers=1, num_target_layers=2, block_size=4, mask_token_id=96
    )
    trainer = make_trainer(
        target,
        tmp_path,
        draft=draft,
        max_steps=20,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=True,
        use_muon=muon,
    )
    before = weights(draft)
    trainer.train()
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            assert parameter.dtype == torch.float32
            assert parameter.ne(before[name]).float().mean() > 0.9, name


@pytest.mark.parametrize("muon", [False, True])
def test_resuming_equals_an_uninterrupted_run(tmp_path, muon):
    """Ten steps, and five plus five, end in the same parameters."""
    finals = []
    for name, stops in (("whole", [10]), ("parts", [5, 10])):
        for stop in stops:
            target = make_target()
            trainer = make_trainer(
                target, tmp_path / name, max_steps=10, save_strategy="steps", save_steps=5, use_muon=muon, seed=3
            )
            if stop == 5:
                trainer.add_callback(StopAt(5))
            trainer.train(
                resume_from_checkpoint=str(tmp_path / name / "out" / "checkpoint-5")
                if stop > 5 and len(stops) > 1
                else None
            )
        finals.append(weights(trainer.draft))
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key


def test_inner_learning_rates_of_muon_follow_the_schedule(target, tmp_path):
    trainer = make_trainer(target, tmp_path, use_muon=True, max_steps=8, lr_scheduler_type="linear", warmup_steps=0)
    seen = []
    trainer.add_callback(RecordRates(seen))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MuonWithAdamW)
    expected = [1e-2 * (1 - step / 8) for step in range(1, 9)]
    for inner in ("_muon", "_adamw"):
        assert [rates[inner] for rates in seen] == pytest.approx(expected)
    two_dimensional = {id(p) for p in trainer.draft.parameters() if p.ndim == 2}
    assert {id(p) for group in optimizer._muon.param_groups for p in group["params"]} == two_dimensional
    assert len(optimizer.state) == len(list(trainer.draft.parameters()))


class RecordRates(TrainerCallback):
    """Notes the learning rates inside the optimizer after every step."""

    def __init__(self, seen):
        self.seen = seen

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        inner = optimizer.optimizer
        self.seen.append({name: getattr(inner, name).param_groups[0]["lr"] for name in ("_muon", "_adamw")})


def test_muon_state_survives_saving_and_loading():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    twin = copy.deepcopy(model)
    first, second = MuonWithAdamW(model, lr=0.1), MuonWithAdamW(twin, lr=0.1)
    inputs = torch.randn(3, 4)
    for step in range(4):
        for network, optimizer in ((model, first), (twin, second)):
            optimizer.zero_grad()
            network(inputs).pow(2).sum().backward()
            optimizer.step()
        if step == 1:
            second = MuonWithAdamW(twin, lr=0.5)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_cached_target_states_train_like_fresh_ones(tmp_path):
    """In memory, on disk, and on disk from an earlier run, in which case no row is computed; evaluation rows too."""
    finals, losses, passes = [], [], []
    for cache in (None, "memory", "disk", "disk"):
        target = make_target()
        rows = rows_of(target, count=6)
        trainer = make_trainer(target, tmp_path, rows=rows[:4], eval_rows=rows[2:], cache_target_states=cache)
        counter = target.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
        trainer.train()
        counter.remove()
        assert len(trainer.target_states.cache) == (6 if cache else 0)
        finals.append(weights(trainer.draft))
        losses.append(trainer.evaluate()["eval_loss"])
        passes.append(0)
    for key, value in finals[0].items():
        for other in finals[1:]:
            torch.testing.assert_close(value, other[key], atol=1e-5, rtol=1e-4)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    assert passes[-2:] == [0, 0]
    assert {path.name.split("-")[0] for path in (tmp_path / "out" / "_target_states").iterdir()} == {
        "fingerprint.json",
        "states",
    }


def test_states_of_other_layers_on_disk_stop_the_training(target, tmp_path):
    folder = {"cache_target_states": "disk", "state_cache_dir": str(tmp_path / "states")}
    make_trainer(target, tmp_path, max_steps=1, **folder).train()
    draft = make_draft(target, target_layer_ids=[1, 2])
    with pytest.raises(ValueError, match=r"target_layer_ids was \[0, 2\] and is now \[1, 2\]"):
        make_trainer(target, tmp_path, draft=draft, **folder).train()
    make_trainer(target, tmp_path, draft=draft, max_steps=1, cache_target_states="disk").train()


@pytest.mark.parametrize("slot_weights", thinned(["decay", "dpace"], "decay"))
def test_evaluation_is_the_same_for_any_batch_size_and_every_time(target, tmp_path, slot_weights):
    """Cases 15 and 23."""
    rows = rows_of(target, count=5)
    results = []
    for batch_size, workers in ((1, 0), (2, 0), (5, 0), (2, 1)):
        trainer = make_trainer(
            target,
            tmp_path,
            eval_rows=rows,
            per_device_eval_batch_size=batch_size,
            slot_weights=slot_weights,
            dataloader_num_workers=workers,
        )
        for _ in range(2):
            metrics = trainer.evaluate()
            results.append({name: value for name, value in metrics.items() if "loss" in name or "acc" in name})
    assert set(results[0]) == {
        "eval_loss",
        "eval_acceptance_length",
        "eval_accept_len",
        "eval_serving_acceptance_length",
        "eval_serving_accept_len",
        *(f"eval_slot_accuracy_{slot}" for slot in (1, 2, 3)),
    }
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)


LONG_ROWS = [
    {"input_ids": torch.randint(1, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()}
    for length in (90, 130, 20, 101, 75)
]


@pytest.mark.parametrize("slot_weights", thinned(["decay", "dpace"], "decay"))
def test_an_evaluation_depends_on_the_rows_alone(target, tmp_path, slot_weights):
    """The rows have more anchors than an evaluation uses, so that another choice of them would show."""
    common = {"slot_weights": slot_weights, "per_device_eval_batch_size": 2}
    draft = make_draft(target)

    def evaluate(rows=LONG_ROWS, train_rows=None, step=0, **changes):
        trainer = make_trainer(target, tmp_path, draft, train_rows, rows, **{**common, **changes})
        trainer.state.global_step = step
        metrics = trainer.evaluate()
        return {name: value for name, value in metrics.items() if "loss" in name or "acc" in name}

    expected = evaluate()
    assert len(expected) == 5 + 3
    for changes in (
        {"seed": 7, "data_seed": 7, "step": 30, "anchors_per_sample": 200},
        {"anchors_per_sample": 20, "anchor_replacement": True, "partial_windows": False},
        {"packing": True, "max_length": 150, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1},
        {"per_device_eval_batch_size": 4, "dataloader_drop_last": True, "dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length", "padding_side": "left", "pad_to_multiple_of": 7},
        {"cache_target_states": "memory", "train_rows": LONG_ROWS[:2], "dataloader_drop_last": True},
        {"head_chunk_size": 3, "block_attention": "dense"},
        {"rows": LONG_ROWS[::-1]},  # the same rows in another order, with other sample ids, and from a stream
        {"rows": [{**row, "sample_id": 100 + index} for index, row in enumerate(LONG_ROWS)]},
        {"rows": datasets.Dataset.from_list(LONG_ROWS).to_iterable_dataset()},
    ):
        assert evaluate(**changes) == pytest.approx(expected, rel=1e-5), changes


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_training_before_the_weights_change(target, tmp_path, value, accumulation):
    """Trainer would log 0 for it, and go on with weights that are no numbers."""
    trainer = make_trainer(target, tmp_path, gradient_accumulation_steps=accumulation)
    trainer.train()
    before = weights(trainer.draft)
    trainer = make_trainer(target, tmp_path, draft=trainer.draft, gradient_accumulation_steps=accumulation)
    with torch.no_grad():
        target.lm_head.weight[3, 0] = value
    with pytest.raises(RuntimeError, match=r"The loss is (nan|inf) after 0 optimizer steps"):
        trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer.draft).items())
    assert not any(entry.get("loss") == 0 for entry in trainer.state.log_history)


def test_the_plain_recipe_can_be_selected_by_name(target, tmp_path):
    """Whole windows, anchors that may repeat, and decay weights."""
    rows = [*rows_of(target, count=3), {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]
    trainer = make_trainer(
        target,
        tmp_path,
        rows=rows,
        partial_windows=False,
        anchor_replacement=True,
        slot_weights="decay",
        per_device_train_batch_size=4,
    )
    counts = trainer.summary().counts
    assert (counts.rows, counts.rows_without_anchor, counts.blocks_per_row) == (4, 1, 8 * 3 / 4)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    _, losses = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    expected = build_dflash_batch_plan(
        batch["token_valid_mask"],
        batch["sample_ids"],
        supervised_mask=batch["supervised_mask"],
        anchors_per_sample=8,
        gamma=3,
        optimizer_step=0,
        seed=42,
    )
    for item in dataclasses.fields(expected):
        assert torch.equal(getattr(losses.plan, item.name), getattr(expected, item.name))
    anchors = losses.plan.anchor_positions[losses.plan.block_valid]
    assert len(anchors) == 24
    assert len(set(anchors[:8].tolist())) < 8
    first = losses.weights[losses.plan.block_valid][0]
    torch.testing.assert_close(first, torch.tensor([0.0, 1.0, math.exp(-1 / 4), math.exp(-2 / 4)]))


def test_raw_rows_and_several_named_sets_are_evaluated(target, tmp_path):
    rows = rows_of(target)
    trainer = make_trainer(target, tmp_path, rows=rows, eval_rows={"a": rows[:2], "b": rows[2:]}, max_steps=1)
    metrics = trainer.evaluate()
    assert trainer.evaluate(rows[:2])["eval_loss"] == pytest.approx(metrics["eval_a_loss"])
    assert metrics["eval_b_acceptance_length"] >= 1


def test_the_best_checkpoint_is_loaded_by_eval_loss(target, tmp_path):
    rows = rows_of(target)
    trainer = make_trainer(
        target,
        tmp_path,
        rows=rows,
        eval_rows=rows,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("metric", ["acceptance_length", "eval_serving_accept_len"])
def test_the_best_checkpoint_can_be_chosen_by_either_name_of_an_acceptance_length(target, tmp_path, metric):
    rows = rows_of(target)
    trainer = make_trainer(
        target,
        tmp_path,
        rows=rows,
        eval_rows=rows,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model=metric,
        greater_is_better=True,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    for name in ("acceptance_length", "serving_acceptance_length"):
        old = name.replace("acceptance_length", "accept_len")
        assert [entry[f"eval_{old}"] for entry in logged] == [entry[f"eval_{name}"] for entry in logged]
    assert trainer.state.best_metric == max(entry[f"eval_{metric.removeprefix('eval_')}"] for entry in logged)


def test_metrics_without_any_pass_are_left_out(target, tmp_path):
    trainer = make_trainer(target, tmp_path, slot_weights="dpace")
    metrics = trainer._evaluation_metrics(EvalPrediction(torch.zeros(3, 3 * 4 + 4).numpy(), torch.arange(3).numpy()))
    assert list(metrics) == ["loss"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_plan_of_a_micro_batch_is_built_once(target, tmp_path, monkeypatch, workers):
    built, micro_batches = [], []

    def build(*args, **kwargs):
        plan = build_dflash_batch_plan(*args, **kwargs)
        built.append((kwargs["optimizer_step"], plan))
        return plan

    monkeypatch.setattr(dflash_hf.training.trainer, "build_dflash_batch_plan", build)
    trainer = make_trainer(
        target,
        tmp_path,
        eval_rows=rows_of(target, count=3),
        max_steps=3,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
        dataloader_num_workers=workers,
    )
    compute_loss = trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        loss, losses = compute_loss(model, inputs, *args, **{**kwargs, "return_outputs": True})
        micro_batches.append((trainer.state.global_step, losses.plan))
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    assert [step for step, _ in built] == [0, 0, 1, 1, 2, 2]
    assert [step for step, _ in micro_batches] == [0, 0, 1, 1, 2, 2]
    for (_, expected), (_, used) in zip(built, micro_batches, strict=True):
        for item in dataclasses.fields(expected):
            assert torch.equal(getattr(used, item.name), getattr(expected, item.name))

    built.clear()
    trainer.evaluate()
    assert [step for step, _ in built] == [0, 0]  # two batches, each at the step of every evaluation

    built.clear()  # a batch that Trainer's loop did not prepare gets its plan in compute_loss
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    loss = compute_loss(trainer.model, inputs)
    assert [step for step, _ in built] == [3]
    (planned,), total = trainer.get_batch_samples(iter([inputs]), 1, torch.device("cpu"))
    assert set(planned) - set(inputs) == {"dflash_plan"}
    torch.testing.assert_close(compute_loss(trainer.model, planned, num_items_in_batch=total), loss)
    assert len(built) == 2


def test_the_loss_and_the_acceptance_length_are_logged(target, tmp_path):
    trainer = make_trainer(target, tmp_path)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 4
    assert all(1 <= entry["acceptance_length"] <= 4 for entry in logs)
    assert all(entry["accept_len"] == entry["acceptance_length"] for entry in logs)
    assert logs[0]["loss"] == pytest.approx(math.log(97), rel=0.8)


def test_the_saved_folder_holds_the_draft_alone(target, tmp_path):
    trainer = make_trainer(target, tmp_path)
    trainer.train()
    trainer.save_model()
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "out", target=target)
    assert loaded.state_dict().keys() == weights(trainer.draft).keys()
    assert all(torch.equal(value, weights(trainer.draft)[name]) for name, value in loaded.state_dict().items())
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2 * sum(
        p.numel() for p in loaded.parameters()
    ) * 4


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_pair_trains_and_evaluates(tmp_path, draft_dtype, target_dtype):
    """A bf16 target and an fp32 draft do not meet in one matrix product."""
    target = make_target()
    rows = rows_of(target)
    target.to(target_dtype)
    trainer = make_trainer(target, tmp_path, draft=make_draft(target).to(draft_dtype), rows=rows, eval_rows=rows)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_a_draft_trained_in_bf16_generates_at_once_with_its_live_target(tmp_path):
    target = make_target()
    rows = rows_of(target)
    trainer = make_trainer(target.bfloat16(), tmp_path, rows=rows, eval_rows=rows, bf16=True)
    for use in (trainer.train, trainer.evaluate):
        use()
        assert (
            len(greedy(target, torch.tensor([[3, 4]]), 9, assistant_model=trainer.draft, speculation_type="dflash"))
            == 9
        )


def test_the_time_budget_ends_training_and_shapes_the_rate(target, tmp_path):
    trainer = make_trainer(target, tmp_path, max_steps=-1, max_train_minutes=0.01, warmup_steps=0.1)
    trainer.train()
    assert trainer.clock.progress == 1
    assert 1 < trainer.state.global_step < 1000
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert max(rates) <= 1e-2
    assert rates[-1] < 0.3 * max(rates)


def test_a_resumed_run_has_only_the_rest_of_its_time_budget(target, tmp_path):
    budget = {"max_steps": -1, "max_train_minutes": 0.02, "save_strategy": "steps", "save_steps": 5}
    trainer = make_trainer(target, tmp_path, **budget)
    trainer.add_callback(StopAt(5))
    trainer.train()
    used = trainer.clock.elapsed_s
    assert used > 0
    resumed = make_trainer(target, tmp_path, **budget)
    seen = []
    resumed.add_callback(RecordElapsed(resumed.clock, seen))
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert seen[0] == pytest.approx(used, abs=0.1)
    assert resumed.clock.progress == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"slot_weights": "flat"}, "slot_weights='flat'"),
        ({"cache_target_states": "gpu"}, "cache_target_states='gpu'"),
        ({"state_cache_dir": "here"}, "state_cache_dir='here'"),
        ({"padding_side": "both"}, "padding_side='both'"),
        ({"anchors_per_sample": 0}, "anchors_per_sample=0"),
        ({"eval_generate_prompts": -1}, "eval_generate_prompts=-1"),
        ({"eval_generate_max_new_tokens": 0}, "eval_generate_max_new_tokens=0"),
        ({"block_attention": "fast"}, "block_attention='fast'"),
        ({"loss_decay": 0.0}, "loss_decay=0.0"),
        ({"dpace_alpha": 1.5}, "dpace_alpha=1.5"),
        ({"kl_weight": 2.0}, "kl_weight=2.0"),
        ({"kl_top_k": 0}, "kl_top_k=0"),
        ({"l1_weight": -1.0}, "l1_weight=-1.0"),
        ({"ce_weight": 0.0}, "nothing would be learned"),
        ({"max_train_minutes": -1}, "max_train_minutes=-1"),
        ({"max_train_minutes": 1, "warmup_steps": 10}, "warmup_steps=10"),
        ({"max_train_minutes": 1, "lr_scheduler_type": "polynomial"}, "cannot follow the clock"),
    ],
)
def test_invalid_arguments_are_named(values, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)


def test_a_wrong_target_and_rows_with_the_mask_token_are_refused_before_training(target, draft, tmp_path):
    with pytest.raises(ValueError, match="width 32 against 48"):
        make_trainer(make_target(hidden_size=48), tmp_path, draft=draft, rows=[])
    with pytest.raises(ValueError, match="mask token 96"):
        make_trainer(target, tmp_path, draft=draft, rows=[{"input_ids": [1, 96, 3]}])


def scaled_targets() -> dict[str, Any]:
    return {
        "llama": LlamaConfig(**TINY),
        "capped": Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0),
        "divided": GraniteConfig(**TINY, logits_scaling=3.0),
        "multiplied": CohereConfig(**TINY, logit_scale=0.25),
    }


@pytest.mark.parametrize("kind", ["llama", "capped", "divided", "multiplied"])
@pytest.mark.parametrize("cache", [None, "memory"])
def test_terms_compare_with_the_targets_own_logits_one_position_before_the_slot(kind, cache, tmp_path):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(scaled_targets()[kind]).eval()
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(1, 96, (length,), generator=generator).tolist()} for length in (12, 9)]
    trainer = make_trainer(
        target,
        tmp_path,
        rows=rows,
        soft_labels=True,
        l1_weight=0.5,
        kl_weight=0.3,
        kl_temperature=1.5,
        slot_weights="uniform",
        padding_side="left",
    )
    if cache:
        trainer.cache_states(trainer.train_dataset)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(2)])
    plan = trainer._plan(batch, 0)
    with_states = trainer.target_states.attach_to(TokenBatch.from_inputs(batch))
    losses = trainer._block_losses(trainer.model, with_states, plan)
    hidden = []

    def keep_hidden_states(**kwargs):
        output = trainer.draft(**kwargs)
        hidden.append(output.last_hidden_state)
        return output

    trainer._block_losses(keep_hidden_states, with_states, plan)
    draft_logits = target.get_output_embeddings()(hidden[0]).view(*losses.loss.shape, -1)
    first_columns = batch["token_valid_mask"].int().argmax(-1).tolist()
    for block, slot in losses.plan.loss_mask.nonzero().tolist():
        row = losses.plan.sample_rows[block].item()
        text = torch.tensor([rows[row]["input_ids"]])
        position = losses.plan.label_positions[block, slot].item() - first_columns[row]
        target_logits = target(text).logits[0, position - 1]
        terms = reference.target_terms(draft_logits[block, slot], target_logits, text[0, position].item(), 10, 1.5)
        expected = 0.3 * terms["kl"] + 0.7 * (terms["soft"] + 0.5 * terms["l1"])
        torch.testing.assert_close(losses.loss[block, slot], expected, atol=1e-4, rtol=1e-4)
    assert losses.plan.loss_mask.sum() > 20


def test_a_target_whose_logits_cannot_be_made_from_its_final_state_is_refused(target, tmp_path):
    target.config.final_logit_softcapping = 1.0  # which a Llama does not apply
    with pytest.raises(ValueError, match="differ by up to"):
        make_trainer(target, tmp_path, soft_labels=True)
    make_trainer(target, tmp_path)


@pytest.mark.trains
@pytest.mark.parametrize("values", [{"soft_labels": True}, {"l1_weight": 1.0}, {"kl_weight": 0.5}], ids=str)
def test_every_term_learns(values, target, tmp_path):
    rows = rows_of(target)
    trainer = make_trainer(target, tmp_path, rows=rows, eval_rows=rows, max_steps=30, **values)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.9 * before["eval_loss"]
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"]


@pytest.mark.parametrize(
    ("values", "use_muon", "learning_rate"),
    [
        ({}, True, 2e-3),
        ({"optim": "sgd"}, False, 6e-4),
        ({"use_muon": False}, False, 6e-4),
        ({"optim": "sgd", "use_muon": True, "learning_rate": 0.1}, True, 0.1),
    ],
)
def test_muon_is_the_default_unless_another_optimizer_is_named(values, use_muon, learning_rate, tmp_path):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)
    assert (args.use_muon, args.learning_rate) == (use_muon, learning_rate)


BEST = {
    "max_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}


def make_with_metrics(target, tmp_path, compute_metrics, eval_rows=None, **overrides) -> DFlashTrainer:
    eval_rows = rows_of(target, count=2) if eval_rows is None else eval_rows
    return make_trainer(
        target, tmp_path, eval_rows=eval_rows, compute_metrics=compute_metrics, **{**BEST, **overrides}
    )


@pytest.mark.parametrize("metric", [None, "rows", "eval_rows", "accept_len", "eval_acceptance_length"])
def test_own_metrics_stand_beside_those_of_an_evaluation(target, tmp_path, metric):
    def compute_metrics(prediction):
        return {"rows": np.int64(len(prediction.predictions)), "half": torch.tensor(0.5), "none": math.nan}

    trainer = make_with_metrics(target, tmp_path, compute_metrics, metric_for_best_model=metric)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_acceptance_length", "eval_serving_acceptance_length"} <= set(metrics)
    assert (metrics["eval_rows"], metrics["eval_half"]) == (2, 0.5)
    assert trainer.state.best_model_checkpoint is not None
    assert make_with_metrics(target, tmp_path, None).evaluate()["eval_loss"] > 0


def test_own_metrics_that_cannot_be_logged_are_left_out_and_do_not_end_the_run(target, tmp_path, caplog):
    def compute_metrics(prediction):
        return {"vector": prediction.predictions[0] + 1j, "loss": 0.0, "acceptance_length": 9.0}

    trainer = make_with_metrics(target, tmp_path, compute_metrics)
    trainer.train()
    metrics = trainer.evaluate()
    assert "eval_vector" not in metrics
    assert metrics["eval_loss"] > 0
    assert metrics["eval_acceptance_length"] < 9
    with pytest.raises(TypeError, match="compute_metrics returned a NoneType and must return a dictionary"):
        make_with_metrics(target, tmp_path, lambda prediction: None).evaluate()


@pytest.mark.parametrize(
    ("sets", "compute_metrics", "metric", "error", "words"),
    [
        (
            1,
            None,
            "bleu",
            ValueError,
            "metric_for_best_model='bleu' is no metric of an evaluation",
        ),
        (1, None, "eval_generate_acceptance_length", ValueError, "is no metric of an evaluation"),
        (2, None, None, ValueError, r"'loss' is no metric .* each after eval_a_ or eval_b_\. .* 'eval_a_acceptance"),
        (2, lambda prediction: {}, "acceptance_length", ValueError, "each after eval_a_ or eval_b_"),
        (1, {"a": 1}, None, TypeError, "compute_metrics is a dict and must be a function"),
    ],
)
def test_a_metric_that_no_evaluation_logs_is_refused_when_the_trainer_is_made(
    target, tmp_path, sets, compute_metrics, metric, error, words
):
    rows = rows_of(target, count=2)
    with pytest.raises(error, match=words):
        make_with_metrics(
            target,
            tmp_path,
            compute_metrics,
            rows if sets == 1 else {"a": rows, "b": rows},
            metric_for_best_model=metric,
        )


@pytest.mark.parametrize("metric", ["eval_a_loss", "b_accept_len", "a_own"])
def test_the_best_checkpoint_is_chosen_by_a_metric_of_one_of_several_sets(target, tmp_path, metric):
    rows = rows_of(target, count=3)
    compute_metrics = (lambda prediction: {"own": 1.0}) if metric == "a_own" else None
    sets = {"a": rows[:1], "b": prepare_dataset(rows, None, max_length=64)}
    trainer = make_with_metrics(
        target, tmp_path, compute_metrics, sets, metric_for_best_model=metric, eval_on_start=True
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=3))
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.evaluate("a", metric_key_prefix="held_out")["held_out_loss"] > 0
    for name in ("c", ""):
        with pytest.raises(ValueError, match=r"names no evaluation set of this trainer; they are \['a', 'b'\]"):
            trainer.evaluate(name)
    output = trainer.predict(rows)
    assert len(output.predictions) == 3
    assert output.metrics["test_acceptance_length"] == output.metrics["test_accept_len"] >= 1


@pytest.mark.parametrize(
    ("sets", "error", "words"),
    [
        ({}, ValueError, "eval_dataset is a dictionary without a set"),
        ({1: [{"input_ids": [1] * 9}]}, TypeError, "eval_dataset has a set named 1, a int"),
        ({"a": {"b": []}}, TypeError, "The evaluation set 'a' is a dict and must be one set of rows"),
        ({"a": "folder"}, TypeError, "The evaluation set 'a' is a str"),
    ],
)
def test_evaluation_sets_that_are_no_rows_are_refused_by_name(target, tmp_path, sets, error, words):
    with pytest.raises(error, match=words):
        make_with_metrics(target, tmp_path, None, sets)


def test_an_evaluation_without_the_metric_of_the_choice_does_not_end_the_run(target, tmp_path):
    """The acceptance length is left out where there was no verify pass, and own metrics may be left out as well."""
    rows = [{"input_ids": [1] * 9, "loss_mask": [0] * 8 + [1]}]
    for metric, compute_metrics in (("own", lambda prediction: {}), ("serving_acceptance_length", None)):
        trainer = make_with_metrics(target, tmp_path, compute_metrics, rows, metric_for_best_model=metric)
        trainer.train()
        assert trainer.state.global_step == 2


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_rate_that_follows_a_metric_stays_after_an_evaluation_without_it(target, tmp_path, caplog, kind):
    values = {"lr_scheduler_type": kind, "metric_for_best_model": "own", "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(
        target, tmp_path, eval_rows=rows_of(target), compute_metrics=lambda prediction: {}, max_steps=2, **values
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert "The evaluation at step 1 has no eval_own to set the rate by" in caplog.text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "needs evaluations, and eval_strategy is 'no'"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "needs a metric, and metric_for_best_model is unset"),
    ],
)
@pytest.mark.parametrize("callback", [EarlyStoppingCallback, EarlyStoppingCallback(2)])
def test_early_stopping_that_can_never_stop_is_refused_when_the_trainer_is_made(
    target, tmp_path, values, words, callback
):
    args = DFlashTrainingArguments(tmp_path, max_steps=1, report_to="none", **values)
    rows = rows_of(target)
    with pytest.raises(ValueError, match=words):
        DFlashTrainer(make_draft(target), target, args, rows, rows, callbacks=[callback])
