from __future__ import annotations

import copy
import json
import logging
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import TextProcessor, make_draft, make_target
from safetensors.torch import load_file, save_file
from tiers import thinned
from tokenizers import Tokenizer
from tokenizers.models import BPE
from training_runs import RecordElapsed, StopAt, make_trainer, rows_of, weights
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    SequenceFeatureExtractor,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from dflash_hf import (
    DFlashConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    build_dflash_batch_plan,
    speculative_generate,
)
from dflash_hf.data.chat_template import chat_inputs
from dflash_hf.data.dataset import prepare_row
from dflash_hf.data.labels import tokenize_row
from dflash_hf.doctor.diagnosis import Diagnosis
from dflash_hf.evaluation.timed_generation import generate_timed
from dflash_hf.training.callbacks import AcceptanceWatch
from dflash_hf.training.checkpoint_files import damage, last_complete_checkpoint
from dflash_hf.training.checks import count_rows
from dflash_hf.training.resume import check_checkpoint, target_fingerprint

pytestmark = pytest.mark.usefixtures("blank_pictures")


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
    make_trainer(make_target(), run_copy.parent, **SAVED).train(resume_from_checkpoint=str(run_copy / "checkpoint-1"))
    assert not any("resumed" in message for message in warnings())
    make_trainer(make_target(), run_copy.parent, **{**SAVED, "max_steps": 3}).train(resume_from_checkpoint=True)
    (message,) = [message for message in warnings() if "resumed" in message]
    assert message.endswith("differs from an uninterrupted one: max_steps was 2 and is now 3.")
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
    message = [message for message in warnings() if "differs from an uninterrupted one" in message][-1]
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


@pytest.mark.parametrize("use_muon", thinned([False, True], False))
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 3e-3}, "learning_rate was 0.01 and is now 0.003"),
        ({"weight_decay": 0.2}, "weight_decay was 0.0 and is now 0.2"),
        (
            {"adam_beta1": 0.5, "adam_beta2": 0.6},
            "adam_beta1 was 0.9 and is now 0.5; adam_beta2 was 0.999 and is now 0.6",
        ),
        ({"adam_epsilon": 1e-3}, "adam_epsilon was 1e-08 and is now 0.001"),
    ],
)
def test_the_optimizer_goes_on_with_the_values_of_the_resumed_run(tmp_path, warnings, use_muon, changes, words):
    def run(resume, **values):
        values = {"lr_scheduler_type": "constant", "warmup_steps": 0, "use_muon": use_muon, **values}
        trainer = make_trainer(make_target(), tmp_path, **{**SAVED, **values})
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run(None, max_steps=2)
    trainer = run(str(tmp_path / "out" / "checkpoint-1"), **changes)
    groups = [{**group, "learning_rate": group["lr"]} for group in trainer.optimizer.param_groups]
    for name, value in changes.items():
        if name.startswith("adam_beta"):
            assert groups[-1]["betas"][int(name[-1]) - 1] == value
        else:
            assert value in {group[{"adam_epsilon": "eps"}.get(name, name)] for group in groups}
    assert any(f"The optimizer resumed from checkpoint-1 has other values: {words}." in text for text in warnings())
    arguments = trainer.draft_card().training_arguments
    assert {name: arguments[name] for name in changes} == changes
    (resumption,) = trainer.draft_card().resumptions
    assert resumption == f"at step 1: {words}"
    again = run(True, max_steps=3, **changes)
    assert again.draft_card().resumptions == (resumption, "at step 2: max_steps was 2 and is now 3")


def test_the_first_rate_after_a_resume_is_that_of_the_new_schedule(tmp_path):
    """The state of the optimizer holds the rate of the next step by the earlier schedule, which is 0 at its end."""

    def run(resume, **values):
        trainer = make_trainer(
            make_target(), tmp_path, **{**SAVED, "lr_scheduler_type": "linear", "warmup_steps": 0, **values}
        )
        trainer.train(resume_from_checkpoint=resume)
        return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]

    assert run(None) == pytest.approx([0.01, 0.005])
    assert run(True, max_steps=4) == pytest.approx([0.01, 0.005, 0.005, 0.0025])
    assert run(str(tmp_path / "out" / "checkpoint-2"), max_steps=4, lr_scheduler_type="constant")[2:] == [0.01, 0.01]


def test_a_finished_run_takes_no_further_step(run_copy, warnings):
    for max_steps in (2, 1):
        trainer = make_trainer(
            make_target(), run_copy.parent, rows=rows_of(make_target(), count=6), **{**SAVED, "max_steps": max_steps}
        )
        result = trainer.train(resume_from_checkpoint=True)
        assert result.global_step == 2
        saved = DFlashDraftModel.from_pretrained(run_copy / "checkpoint-2", target=False)
        for name, value in weights(saved).items():
            assert torch.equal(value, weights(trainer.draft)[name]), name
    assert not (run_copy / "checkpoint-3").exists()
    assert any("so that nothing is left to train" in message for message in warnings())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type was 'cosine' and is now 'linear'"),
        ({"lr_scheduler_kwargs": {"num_cycles": 1}}, "lr_scheduler_kwargs"),
        ({"warmup_steps": 2}, "warmup_steps was 0.04 and is now 2"),
        ({"max_steps": -1, "num_train_epochs": 2}, "num_train_epochs was 3.0 and is now 2"),
        ({"max_grad_norm": 0.5}, "max_grad_norm was 1.0 and is now 0.5"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1 and is now 2"),
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size was 2 and is now 1"),
        ({"data_seed": 5}, "data_seed was None and is now 5"),
        ({"bf16": True}, "bf16 was False and is now True"),
        ({"l1_weight": 0.5}, "l1_weight was 0.0 and is now 0.5"),
        ({"max_length": 64}, "max_length was "),
        ({"packing": True}, "packing was False and is now True"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last was False and is now True"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy was 'random' and is now 'sequential'"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model was None and is now 'loss'"),
        ({"ignore_data_skip": True}, "ignore_data_skip was False and is now True"),
    ],
)
def test_every_argument_that_changes_the_run_is_named_when_it_is_resumed(run_copy, warnings, changes, words):
    trainer = make_trainer(make_target(), run_copy.parent, **{**SAVED, **changes})
    trainer._checkpoint_to_resume(str(run_copy / "checkpoint-1"))
    assert any("differs from an uninterrupted one" in message and words in message for message in warnings())


@pytest.mark.parametrize(
    "changes",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        {"padding_side": "left", "logging_steps": 2, "head_chunk_size": 3, "block_attention": "dense"},
        {"optim": "adamw_torch"},
    ],
)
def test_arguments_that_do_not_change_the_run_are_not_named(run_copy, warnings, changes):
    trainer = make_trainer(make_target(), run_copy.parent, **{**SAVED, **changes})
    trainer._checkpoint_to_resume(str(run_copy / "checkpoint-1"))
    assert not any("resumed" in message for message in warnings())


def test_other_rows_dtypes_and_dropout_are_named_when_a_run_is_resumed(run_copy, warnings):
    target = make_target()
    rows = rows_of(target)
    rows[1]["input_ids"][0] += 1
    draft = make_draft(target, attention_dropout=0.1).bfloat16()
    trainer = make_trainer(target.bfloat16(), run_copy.parent, draft=draft, rows=rows, **SAVED)
    trainer._checkpoint_to_resume(True)
    (message,) = [message for message in warnings() if "differs from an uninterrupted one" in message]
    for words in (
        "the training rows are others",
        "target_dtype was 'float32' and is now 'bfloat16'",
        "draft_dtype was 'float32' and is now 'bfloat16'",
        "attention_dropout was 0.0 and is now 0.1",
    ):
        assert words in message


@pytest.mark.parametrize("record", [True, False])
def test_the_state_of_another_kind_of_optimizer_is_refused(run_copy, record):
    """Also without a record, as in checkpoints of earlier versions: the state lacks what the optimizer needs."""
    if not record:
        forget_record(run_copy / "checkpoint-2")
    words = (
        "optim was 'adamw_torch_fused' and is now 'sgd'"
        if record
        else "optimizer.pt' is the state of another optimizer: it has no momentum"
    )
    trainer = make_trainer(make_target(), run_copy.parent, optim="sgd", **{**SAVED, "max_steps": 3})
    with pytest.raises(ValueError, match=words):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 0 or not record


def forget_record(folder: Path) -> None:
    state = json.loads((folder / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["RunRecord"]
    (folder / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "optimizer.pt",
            "optimizer.pt is missing (save_only_model=True writes none), so that the optimizer starts afresh",
        ),
        ("scheduler.pt", "scheduler.pt is missing"),
        ("rng_state.pth", "rng_state.pth is missing, so that dropout differs"),
    ],
)
def test_a_checkpoint_without_a_state_says_what_starts_afresh(run_copy, warnings, name, words):
    (run_copy / "checkpoint-2" / name).unlink()
    trainer = make_trainer(make_target(), run_copy.parent, **{**SAVED, "max_steps": 3})
    trainer.train(resume_from_checkpoint=True)
    assert any(f"checkpoint-2 is resumed in part: {words}" in message for message in warnings())
    assert any(name in change for change in trainer.draft_card().resumptions)


def test_another_metric_for_the_best_checkpoint_forgets_the_best_value_of_the_earlier_one(tmp_path):
    rows = rows_of(make_target(), count=2)
    values = {**SAVED, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    make_trainer(make_target(), tmp_path, eval_rows=rows, **values).train()
    values = {**values, "max_steps": 3, "metric_for_best_model": "acceptance_length", "greater_is_better": True}
    trainer = make_trainer(make_target(), tmp_path, eval_rows=rows, **values)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_metric == trainer.state.log_history[-2]["eval_acceptance_length"]


def test_restoring_callbacks_keeps_the_clock_and_the_record_of_the_run(run_copy):
    values = {**SAVED, "max_steps": 4, "restore_callback_states_from_checkpoint": True, "anchors_per_sample": 5}
    trainer = make_trainer(make_target(), run_copy.parent, **values)
    seen: list[float] = []
    trainer.add_callback(RecordElapsed(trainer.clock, seen))
    trainer.train(resume_from_checkpoint=True)
    assert 0 < seen[0] < seen[1]
    state = json.loads((run_copy / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["RunRecord"]["args"]["anchors_per_sample"] == 5


def test_a_callback_that_the_checkpoint_does_not_know_may_be_added(run_copy):
    rows = rows_of(make_target(), count=2)
    values = {**SAVED, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = make_trainer(make_target(), run_copy.parent, eval_rows=rows, **values)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=5))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero_content(path: Path) -> None:
    """As a crash of the machine leaves it: the right length, and zeros in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", Path.unlink),
        ("optimizer.pt", truncate),
        ("optimizer.pt", zero_content),
        ("scheduler.pt", truncate),
        ("rng_state.pth", truncate),
        ("trainer_state.json", truncate),
        ("trainer_state.json", lambda path: path.write_text("[]")),
        ("trainer_state.json", lambda path: path.write_text('{"global_step": "2"}')),
        ("trainer_state.json", lambda path: path.write_text('{"unknown": 1}')),
        ("config.json", truncate),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_named_and_the_last_whole_checkpoint_is_used(run_copy, warnings, name, harm):
    harm(run_copy / "checkpoint-2" / name)
    trainer = make_trainer(make_target(), run_copy.parent, **SAVED)
    before = weights(trainer.draft)
    with pytest.raises(
        ValueError, match=rf"checkpoint-2' is no complete checkpoint: {name}.*checkpoint-1, which is"
    ) as caught:
        trainer.train(resume_from_checkpoint=str(run_copy / "checkpoint-2"))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in weights(trainer.draft).items())
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    assert any(
        "checkpoint-2 is skipped, since it is incomplete" in message and name in message for message in warnings()
    )


def test_a_shard_of_the_weights_that_is_missing_is_named(run_copy):
    folder = run_copy / "checkpoint-2"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in str(damage(folder))


def test_an_index_that_names_files_of_its_own_is_read_by_these_names(run_copy):
    folder = run_copy / "checkpoint-2"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "x.safetensors"}}))
    assert "x.safetensors is missing" in str(damage(folder))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
@pytest.mark.parametrize(
    ("state", "words"), [([1], "it holds a list"), ({"state": torch.nn.ReLU()}, "of other classes")]
)
def test_a_file_without_a_state_of_plain_values_is_refused_by_name(run_copy, name, state, words):
    torch.save(state, run_copy / "checkpoint-2" / name)
    trainer = make_trainer(make_target(), run_copy.parent, **SAVED)
    with pytest.raises(ValueError, match=rf"{name}' cannot be read as a state of tensors.*{words}") as caught:
        trainer.train(resume_from_checkpoint=str(run_copy / "checkpoint-2"))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_its_type_and_other_tensors_by_name(run_copy, tmp_path):
    folder = run_copy / "checkpoint-2"
    tensors = load_file(folder / "model.safetensors")
    first = next(iter(tensors))
    trainer = make_trainer(make_target(), run_copy.parent, **SAVED)
    for changed, words in (
        ({name: value for name, value in tensors.items() if name != first}, f"it lacks {first}"),
        ({**tensors, "lm_head.weight": torch.zeros(2)}, "it has lm_head.weight, which the draft has not"),
        ({**tensors, first: torch.zeros(3)}, f"{first} have another shape"),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            trainer.train(resume_from_checkpoint=str(folder))
    make_target().config.save_pretrained(folder)
    with pytest.raises(ValueError, match="a checkpoint of a model of type 'llama'"):
        trainer.train(resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="nowhere' is no complete checkpoint: the folder does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("limit", [1_000, 70_000, 100_000])
def test_a_full_disk_names_the_checkpoint_that_is_incomplete_and_the_last_complete_one(run_copy, limit):
    trainer = make_trainer(make_target(), run_copy.parent, **{**SAVED, "max_steps": 3})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # longer files cannot be written, as on a full disk
    try:
        with pytest.raises(
            OSError, match=r"checkpoint-3' could not be written completely .*checkpoint-2, which"
        ) as caught:
            trainer.train(resume_from_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert last_complete_checkpoint(run_copy) == str(run_copy / "checkpoint-2")


def test_a_checkpoint_that_is_written_again_is_incomplete_until_its_last_file(run_copy, monkeypatch):
    trainer = make_trainer(make_target(), run_copy.parent, **SAVED)

    def fail(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_rng_state", fail)
    with pytest.raises(OSError, match=r"checkpoint-1' could not be .*No space left.*checkpoint-2, which is complete"):
        trainer.train()
    assert "trainer_state.json" in str(damage(run_copy / "checkpoint-1"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors is missing, truncated or damaged"),
        (shutil.rmtree, "the folder does not exist"),
    ],
)
def test_a_damaged_best_checkpoint_does_not_end_a_run_after_its_last_step(tmp_path, warnings, harm, words):
    class Harm(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                harm(Path(state.best_model_checkpoint))

    values = {**SAVED, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = make_trainer(make_target(), tmp_path, eval_rows=rows_of(make_target()), **values)
    trainer.add_callback(Harm())
    trainer.train()
    assert any("cannot be loaded" in message and words in message for message in warnings())
    assert trainer.draft_card().steps == 2


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("cosine", "reduce_lr_on_plateau", "it has no cooldown, eps, factor"),
        ("cosine", "greedy", "which GreedyLR needs"),
        ("reduce_lr_on_plateau", "linear", "it has no lr_lambdas, which LambdaLR needs"),
    ],
)
def test_the_state_of_another_kind_of_scheduler_is_refused(tmp_path, first, second, words):
    target = make_target()
    values = {**SAVED, "max_steps": 1, "eval_strategy": "steps", "eval_rows": rows_of(target)}
    make_trainer(target, tmp_path, lr_scheduler_type=first, **values).train()
    trainer = make_trainer(target, tmp_path, lr_scheduler_type=second, **{**values, "max_steps": 2})
    with pytest.raises(ValueError, match=f"scheduler.pt' is the state of another scheduler: .*{words}"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_the_scheduler_goes_on_with_the_arguments_of_the_resumed_run(tmp_path, warnings, kind):
    target = make_target()
    values = {
        **SAVED,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "lr_scheduler_type": kind,
        "eval_rows": rows_of(target),
    }
    make_trainer(target, tmp_path, lr_scheduler_kwargs={"factor": 0.5, "min_lr": 1e-6}, **values).train()
    changed = {**values, "max_steps": 3, "lr_scheduler_kwargs": {"factor": 0.9, "min_lr": 1e-5, "patience": 3}}
    trainer = make_trainer(target, tmp_path, **changed)
    trainer.train(resume_from_checkpoint=True)
    scheduler = trainer.lr_scheduler
    assert (scheduler.factor, scheduler.patience, scheduler.min_lrs[0]) == (0.9, 3, 1e-5)
    assert any("lr_scheduler_kwargs.factor was 0.5 and is now 0.9" in message for message in warnings())


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


OTHER_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("template", [None, OTHER_TEMPLATE])
def test_the_tokenizer_of_a_processor_is_used_everywhere_with_the_template_of_the_processor(
    tmp_path, tokenizer, template
):
    target = make_target(vocab_size=272, pad_token_id=tokenizer.pad_token_id)
    rows = [
        {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": f"Yes {n}."}]} for n in "ab"
    ]
    own, draft = tokenizer.chat_template, make_draft(target, mask_token_id=270)
    processor = TextProcessor(tokenizer, chat_template=template)
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to="none",
        use_cpu=True,
        eval_generate_prompts=1,
        disable_tqdm=True,
    )
    trainer = DFlashTrainer(draft, target, args, rows, rows, processing_class=processor)
    expected = tokenizer.apply_chat_template(rows[0]["messages"], chat_template=template or own)["input_ids"]
    assert trainer.train_dataset[0]["input_ids"][: len(expected)] == expected
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == (template or own)
    assert tokenizer.chat_template == own
    found = prepare_row(rows[0], 0, processor, max_length=64)["input_ids"]
    assert found == trainer.train_dataset[0]["input_ids"] == tokenize_row(rows[0], processor, max_length=None)[0]
    inputs = chat_inputs(processor, rows[0]["messages"][:1], torch.device("cpu"))
    text = speculative_generate(target, draft, **inputs, max_new_tokens=5, stop_strings=["zz"], tokenizer=processor)
    assert text.sequences.shape[1] <= inputs["input_ids"].shape[1] + 5
    assert DFlashConfig.from_target(target, tokenizer=processor).mask_token_id >= 261
    assert Diagnosis(target, draft, processor, ["Hi."]).tokenizer.chat_template == (template or own)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("org/target", "processing_class is the text 'org/target', and must be the tokenizer of the target"),
        (Tokenizer(BPE()), "processing_class is a Tokenizer, and must be the tokenizer of the target, or a processor"),
        (SequenceFeatureExtractor(1, 16000, 0.0), "processing_class is a SequenceFeatureExtractor"),
        (PreTrainedTokenizerFast, "processing_class is a type"),
    ],
)
def test_what_is_no_tokenizer_is_refused_when_the_trainer_is_made(target, tmp_path, given, words):
    args = DFlashTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(TypeError, match=words):
        DFlashTrainer(make_draft(target), target, args, rows_of(target, count=2), processing_class=given)
    with pytest.raises(TypeError, match=words.replace("processing_class", "tokenizer")):
        prepare_row({"prompt": "a", "completion": "b"}, 0, given, max_length=64)


@pytest.mark.parametrize("member", ["draft", "target"])
def test_weights_on_the_meta_device_are_refused_when_the_trainer_is_made(target, tmp_path, member):
    draft, rows, target = make_draft(target), rows_of(target, count=2), copy.deepcopy(target)
    {"draft": draft, "target": target.model}[member].layers[1].to("meta")
    args = DFlashTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match=f"The {member} has weights on the meta device, which hold no values"):
        DFlashTrainer(draft, target, args, rows)
