from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import make_draft, make_target
from training_runs import RecordElapsed, StopAt, make_trainer, rows_of, weights
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from dflash_hf import DFlashDraftModel, DFlashTrainer, DFlashTrainingArguments, build_dflash_batch_plan
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.training.callbacks import AcceptanceWatch
from dflash_hf.training.checks import count_rows
from dflash_hf.training.resume import check_checkpoint, last_complete_checkpoint, target_fingerprint


@pytest.fixture
def warnings(caplog):
    """What the package warned of, as one list of messages."""
    transformers_logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records if record.name.startswith("dflash_hf")]
    transformers_logging.disable_propagation()


SAVED = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory) -> Path:
    """The output folder of a run with a checkpoint of step 1 and of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(make_target(), folder, **SAVED).train()
    return folder / "out"


@pytest.fixture
def run_copy(saved_run, tmp_path) -> Path:
    return Path(shutil.copytree(saved_run, tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 6}, "checkpoint-2 .* block_size was 4 and is now 6"),
        ({"mask_token_id": 95}, "mask_token_id was 96 and is now 95"),
        ({"target_layer_ids": [1, 2]}, r"target_layer_ids was \[0, 2\] and is now \[1, 2\]"),
        ({"num_hidden_layers": 1}, "num_hidden_layers was 2 and is now 1"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_window was None and is now 8"),
        (
            {"rope_theta": 5000.0, "head_dim": 16},
            r"head_dim was 8 and is now 16; rope_parameters\.rope_theta was .* now 5000\.0",
        ),
    ],
)
def test_a_checkpoint_of_another_draft_is_refused_by_name_before_anything_is_loaded(run_copy, changes, words):
    target = make_target()
    draft = make_draft(target, **changes)
    before = weights(draft)
    trainer = make_trainer(target, run_copy.parent, draft=draft, rows=rows_of(target, count=2), **SAVED)
    with pytest.raises(ValueError, match=words):
        trainer.train(resume_from_checkpoint=str(run_copy / "checkpoint-2"))
    assert weights(draft).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in weights(draft).items())
    assert trainer.state.global_step == 0


def test_a_checkpoint_of_another_target_is_refused_and_a_moved_target_is_not(tmp_path, warnings):
    def run(name: str, seed: int, resume: bool, **overrides):
        target = make_target(seed)
        target.config.name_or_path = name
        trainer = make_trainer(target, tmp_path, rows=[{"input_ids": [1] * 9}], **{**SAVED, **overrides})
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    run("org/first", 0, resume=False)
    for name, seed in (("org/second", 1), ("", 1)):
        with pytest.raises(ValueError, match=f"the target was org/first and is now {name or 'without a name'}"):
            run(name, seed, resume=True)
    assert run("/moved/first", 0, resume=True, max_steps=3) == 3
    assert not any("was trained with" in message for message in warnings())
    assert run("/moved/first", 1, resume=True, max_steps=4) == 4
    assert any("checkpoint-3 was trained with other weights of the target /moved/first" in m for m in warnings())


def test_a_target_without_a_name_is_known_by_its_weights(run_copy):
    target = make_target(seed=5)
    trainer = make_trainer(target, run_copy.parent, rows=rows_of(target, count=2), **SAVED)
    with pytest.raises(ValueError, match="target was without a name and is now without a name with other weights"):
        trainer.train(resume_from_checkpoint=True)


def test_the_fingerprint_of_a_target_survives_another_dtype_and_not_other_weights():
    target = make_target().bfloat16()
    digest = target_fingerprint(target)
    assert target_fingerprint(copy.deepcopy(target).float()) == digest
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert target_fingerprint(target) not in (digest, None)
    assert target_fingerprint(target.to("meta")) is None


def test_another_name_of_a_target_whose_weights_are_out_of_reach_is_a_warning(run_copy, warnings):
    config = DFlashDraftModel.from_pretrained(run_copy / "checkpoint-2", target=False).config
    values = json.loads((run_copy / "checkpoint-2" / "trainer_state.json").read_text())
    values = {**values["stateful_callbacks"]["RunRecord"]["args"], "target": "org/other", "target_fingerprint": None}
    check_checkpoint(run_copy / "checkpoint-2", config, values)
    assert any("target was None and is now 'org/other'" in message for message in warnings())


def test_another_optimizer_is_refused(run_copy):
    trainer = make_trainer(make_target(), run_copy.parent, use_muon=True, **SAVED)
    with pytest.raises(ValueError, match="use_muon was False and is now True"):
        trainer.train(resume_from_checkpoint=True)


def test_arguments_that_make_it_another_run_are_warned_of_by_name_and_the_same_arguments_are_not(run_copy, warnings):
    make_trainer(make_target(), run_copy.parent, **{**SAVED, "max_steps": 3}).train(resume_from_checkpoint=True)
    assert not any("differs from an uninterrupted one" in message for message in warnings())
    target = make_target()
    trainer = make_trainer(
        target,
        run_copy.parent,
        rows=rows_of(target, count=3),
        seed=7,
        anchors_per_sample=5,
        gradient_accumulation_steps=2,
        slot_weights="dpace",
        **{**SAVED, "max_steps": 4},
    )
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    (message,) = [message for message in warnings() if "differs from an uninterrupted one" in message]
    for part in (
        "checkpoint-3",
        "seed was 42 and is now 7",
        "anchors_per_sample was 8 and is now 5",
        "slot_weights was 'decay' and is now 'dpace'",
        "rows per optimizer step was 2 and is now 4",
        "rows was 4 and is now 3",
    ):
        assert part in message


def test_a_half_written_checkpoint_is_passed_over_and_refused_by_name(run_copy, warnings):
    broken = run_copy / "checkpoint-10"
    shutil.copytree(run_copy / "checkpoint-2", broken)
    (broken / "trainer_state.json").write_text("{")
    assert last_complete_checkpoint(run_copy) == str(run_copy / "checkpoint-2")
    assert any("checkpoint-10 is skipped, since it is incomplete" in message for message in warnings())
    assert last_complete_checkpoint(run_copy / "nowhere") is None
    trainer = make_trainer(make_target(), run_copy.parent, **{**SAVED, "max_steps": 3})
    with pytest.raises(ValueError, match="checkpoint-10' is no complete checkpoint"):
        trainer.train(resume_from_checkpoint=str(broken))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    empty = make_trainer(make_target(), run_copy.parent / "new")
    with pytest.raises(ValueError, match="needs a complete checkpoint"):
        empty.train(resume_from_checkpoint=True)


def test_checkpoints_of_a_run_without_record_or_clock_are_resumed_and_then_have_both(run_copy):
    """Trainer itself would end in a KeyError at the first save."""
    state_file = run_copy / "checkpoint-2" / "trainer_state.json"
    state = json.loads(state_file.read_text())
    del state["stateful_callbacks"]["RunRecord"], state["stateful_callbacks"]["TrainingClock"]
    state_file.write_text(json.dumps(state))
    values = {**SAVED, "max_steps": -1, "max_train_minutes": 0.01}
    trainer = make_trainer(make_target(), run_copy.parent, **values)
    trainer.add_callback(StopAt(4))
    seen: list[float] = []
    trainer.add_callback(RecordElapsed(trainer.clock, seen))
    trainer.train(resume_from_checkpoint=True)
    assert seen[0] == 0
    state = json.loads((run_copy / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RunRecord"]["args"]["anchors_per_sample"] == 8
    assert state["stateful_callbacks"]["TrainingClock"]["attributes"]["elapsed_s"] > 0


def feed(watch: AcceptanceWatch, lengths: list[float], warmup: int = 0, every: int = 10) -> list[int]:
    """Steps at which a warning came."""
    args = SimpleNamespace(get_warmup_steps=lambda steps: warmup, warmup_steps=0.25)
    warned = []
    for index, length in enumerate(lengths, start=1):
        before = watch._is_done
        state = SimpleNamespace(global_step=index * every, max_steps=1000, is_world_process_zero=True)
        watch.on_log(args, state, None, logs={"loss": 1.0, "acceptance_length": length})
        watch.on_log(args, state, None, logs={"eval_loss": 1.0})
        if watch._is_done and not before and length < 1.02:
            warned.append(state.global_step)
    return warned


def test_a_draft_that_stays_at_one_is_warned_of_once_after_twice_the_warmup(warnings):
    assert feed(AcceptanceWatch(), [1.0] * 20) == [50]
    assert feed(AcceptanceWatch(), [1.01] * 20, warmup=40) == [80]
    assert len([message for message in warnings() if "acceptance length is still 1.0" in message]) == 2


def test_a_draft_that_was_accepted_once_is_not_warned_of(warnings):
    assert feed(AcceptanceWatch(), [1.0, 1.03, *[1.0] * 30]) == []
    assert feed(AcceptanceWatch(), [1.0] * 4) == []
    assert warnings() == []


def test_with_a_time_budget_the_warmup_is_a_share_of_it(warnings):
    budget = SimpleNamespace(minutes=1.0, progress=0.4)
    watch = AcceptanceWatch(budget)
    assert feed(watch, [1.0] * 10) == []
    budget.progress = 0.6
    assert feed(watch, [1.0] * 10) == [50]


@pytest.mark.trains
def test_training_on_noise_ends_in_the_warning(tmp_path, warnings):
    """Rate 0: what is proposed stays random."""
    target = make_target()
    trainer = make_trainer(target, tmp_path, learning_rate=0.0, max_steps=50, logging_steps=50, anchors_per_sample=4)
    trainer.train()
    assert [m for m in warnings() if "After 50 steps" in m and "target_layer_ids" in m]


def prepared(rows: list[tuple[list[int], list[int] | None]]) -> datasets.Dataset:
    columns = {
        "input_ids": [[1] * len(mask) for mask, _ in rows],
        "supervised_mask": [[bool(value) for value in mask] for mask, _ in rows],
        "sample_id": list(range(len(rows))),
    }
    if rows[0][1] is not None:
        columns["segment_ids"] = [documents for _, documents in rows]
    return datasets.Dataset.from_dict(columns)


def test_rows_are_counted_like_the_plan_finds_their_anchors():
    rows = [([0, 0, 1, 1, 1], None), ([1, 0, 0], None), ([1, 1], None), ([0, 0], None), ([1] * 9, None)]
    counts = count_rows(prepared(rows), anchors_per_sample=4)
    assert (counts.rows, counts.tokens, counts.supervised) == (5, 21, 15)
    anchors = [
        int(
            build_dflash_batch_plan(
                torch.ones(1, len(mask), dtype=torch.bool),
                torch.tensor([0]),
                anchors_per_sample=4,
                gamma=3,
                optimizer_step=0,
                seed=0,
                supervised_mask=torch.tensor([mask]).bool(),
                replacement=False,
                partial_windows=True,
            ).block_valid.sum()
        )
        for mask, _ in rows
    ]
    assert anchors == [3, 0, 1, 0, 4]
    assert counts.rows_without_anchor == 2
    assert counts.blocks_per_row == sum(anchors) / 5
    chosen = prepared(rows).select([0, 4]).select([1, 0])  # an index over the table, as after a filter
    assert count_rows(chosen, anchors_per_sample=4).tokens == 14


def test_packed_rows_have_no_anchor_in_the_document_before():
    counts = count_rows(prepared([([1, 1, 1, 1], [0, 0, 1, 2]), ([1, 1], [0, 1])]), anchors_per_sample=8)
    assert (counts.rows_without_anchor, counts.blocks_per_row) == (1, 0.5)


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_windows_are_counted_like_the_plan_finds_them(block_size, packed):
    generator = torch.Generator().manual_seed(block_size)
    rows = []
    for length in [1, 2, 3, 6, 7, 12, 20, 5]:
        mask = (torch.rand(length, generator=generator) > 0.3).int().tolist()
        documents = (torch.rand(length, generator=generator) > 0.7).cumsum(0).tolist()
        rows.append((mask, documents if packed else None))
    counts = count_rows(prepared(rows), anchors_per_sample=3, window=block_size)
    blocks = [
        int(
            build_dflash_batch_plan(
                torch.ones(1, len(mask), dtype=torch.bool),
                torch.tensor([0]),
                anchors_per_sample=3,
                gamma=block_size - 1,
                optimizer_step=0,
                seed=0,
                supervised_mask=torch.tensor([mask]).bool(),
                segment_ids=torch.tensor([documents]) if packed else None,
                replacement=False,
            ).block_valid.sum()
        )
        for mask, documents in rows
    ]
    assert counts.rows_without_anchor == blocks.count(0)
    assert counts.blocks_per_row == sum(blocks) / len(rows)


@pytest.mark.parametrize(
    "values",
    [
        {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 3},
        {"num_train_epochs": 2.4, "max_steps": -1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
        {"num_train_epochs": 3, "max_steps": -1, "dataloader_drop_last": True, "per_device_train_batch_size": 3},
        {"max_steps": 3},
    ],
)
def test_the_summary_knows_the_steps_that_are_trained(target, tmp_path, values):
    trainer = make_trainer(target, tmp_path, **values)
    steps = trainer.summary().steps
    trainer.train()
    assert trainer.state.global_step == steps


def test_the_summary_is_shown_once_and_says_what_is_trained(tmp_path, tokenizer, warnings):
    target = make_target(vocab_size=272)
    target.config.name_or_path = "org/target"
    draft = make_draft(target, mask_token_id=260)
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(3)
    ]
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        anchors_per_sample=1,
        cache_target_states="memory",
        slot_weights="dpace",
        use_muon=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    (shown,) = [message for message in warnings() if message.startswith("DFlash training")]
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    for part in (
        "'org/target', 0.1 M parameters in float32, on cpu",
        "0.0 M parameters in float32, 2 layers",
        "4 slots, target layers [0, 2] of 4, mask token 260 (<|system|>)",
        f"3 rows, {tokens} tokens, {6 / tokens:.0%} supervised",
        "1 steps, 2 rows and 2 blocks a step",
        "Muon with AdamW, peak rate 0.002, cosine, slot weights dpace",
        "hidden states of the target in memory: 0.00 GiB",
    ):
        assert part in shown


def test_half_precision_that_gives_poor_drafts_is_warned_of(tmp_path, warnings):
    """Cases 10 and 42."""
    target = make_target()
    rows = rows_of(target, count=2)
    make_trainer(target, tmp_path, rows=rows, max_steps=1).train()
    assert not any("float16" in message for message in warnings() if "DFlash training" not in message)
    make_trainer(target, tmp_path, draft=make_draft(target).bfloat16(), rows=rows, max_steps=1).train()
    assert any("weights are in bfloat16" in m and "dtype=torch.float32" in m for m in warnings())
    make_trainer(target.half(), tmp_path, draft=make_draft(target), rows=rows, max_steps=1).train()
    assert any(message.startswith("float16 is used (the target)") for message in warnings())


def test_target_states_that_are_not_finite_end_training_at_the_first_batch(tmp_path):
    target = make_target()
    rows = rows_of(target, count=2)
    with torch.no_grad():
        target.model.layers[2].mlp.down_proj.weight.fill_(1e6)
    trainer = make_trainer(target.half(), tmp_path, draft=make_draft(target), rows=rows)
    with pytest.raises(ValueError, match=r"\(float16\) are not finite in layers \[2\].*bfloat16"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_published_draft_trains_on_in_training_mode_and_its_norms_move(tmp_path):
    target = make_target()
    make_draft(target).bfloat16().save_pretrained(tmp_path / "published")
    draft = DFlashDraftModel.from_pretrained(tmp_path / "published", dtype=torch.float32, target=target)
    assert not draft.training
    modes = []

    class NoteMode(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            modes.append(model.training)

    trainer = make_trainer(target, tmp_path, draft=draft, max_steps=2, warmup_steps=0, learning_rate=1e-4)
    trainer.add_callback(NoteMode())
    before = weights(draft)
    trainer.train()
    assert modes == [True, True]
    assert draft.dtype == torch.float32
    assert all(not torch.equal(value, before[name]) for name, value in weights(draft).items())


def test_rows_of_another_evaluation_folder_are_checked_against_that_folder_and_named_by_it(
    run, saved_target, tmp_path
):
    target = saved_target()
    folders = {}
    for name, words in (("train", "1"), ("held-out", "1 2 3 4 5 6 7 8 9")):
        rows = [
            {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": words}]}
            for n in range(3)
        ]
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders[name] = tmp_path / name
        code, _, err = run("prepare", "--target", target, "--dataset", source, "--out", folders[name])
        assert code == 0, err
    arguments = ["train", "--target", target, "--dataset", folders["train"], "--eval_dataset", folders["held-out"],
                 "--output_dir", tmp_path / "out", "--max_steps", "1"]  # fmt: skip
    code, _, err = run(*arguments, "--max_length", "20")
    assert code == 1
    assert f"{folders['held-out']} has rows of up to" in err

    report = json.loads((folders["held-out"] / "report.json").read_text())
    report["settings"] |= {"vocabulary_hash": "of another tokenizer", "target": "another"}
    (folders["held-out"] / "report.json").write_text(json.dumps(report))
    code, _, err = run(*arguments)
    assert code == 1
    assert f"{folders['held-out']} was prepared for the tokenizer of 'another'" in err


def test_evaluation_generates_from_the_first_prompts_and_training_goes_on(tmp_path):
    """A bf16 target and autocast: the forward that training replaces would not fit the target's head."""
    target = make_target().bfloat16()
    rows = rows_of(target, count=3, new_tokens=9)
    values = {"bf16": True, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(
        target, tmp_path, rows=rows, eval_rows=rows, eval_generate_prompts=2, eval_generate_max_new_tokens=9, **values
    )
    trainer.train()
    logged = [entry["eval_generate_acceptance_length"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    committed = []
    for row in rows[:2]:
        prompt = torch.tensor([row["input_ids"][: row["loss_mask"].index(1)]])
        committed += generate_timed(
            target, {"input_ids": prompt}, trainer.draft, loop="transformers", max_new_tokens=9, do_sample=False
        ).committed
    metrics = trainer.evaluate()
    assert metrics["eval_generate_acceptance_length"] == logged[1] == sum(committed) / len(committed)
    assert metrics["eval_generate_accept_len"] == logged[1]
    metrics = make_trainer(target, tmp_path, rows=rows, eval_rows=rows).evaluate()
    assert not [name for name in metrics if "generate" in name]


def test_tensorboard_receives_every_metric(target, tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    rows = rows_of(target, count=2)
    trainer = make_trainer(
        target,
        tmp_path,
        rows=rows,
        eval_rows=rows,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_generate_prompts=1,
        eval_generate_max_new_tokens=8,
        report_to="tensorboard",
    )
    trainer.train()
    board = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    names = {
        "train/loss": ("loss", 2),
        "train/acceptance_length": ("acceptance_length", 2),
        "train/accept_len": ("accept_len", 2),
        "eval/loss": ("eval_loss", 1),
        "eval/acceptance_length": ("eval_acceptance_length", 1),
        "eval/accept_len": ("eval_accept_len", 1),
        "eval/serving_acceptance_length": ("eval_serving_acceptance_length", 1),
        "eval/generate_acceptance_length": ("eval_generate_acceptance_length", 1),
        "eval/slot_accuracy_3": ("eval_slot_accuracy_3", 1),
    }
    for tag, (name, count) in names.items():
        expected = [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]
        shown = [(event.step, event.value) for event in board.Scalars(tag)]
        assert len(shown) == count
        assert [step for step, _ in shown] == [step for step, _ in expected]
        assert [value for _, value in shown] == pytest.approx([value for _, value in expected], rel=1e-6)
