from __future__ import annotations

import logging
import math
from dataclasses import fields

import pytest
import torch
from conftest import make_target
from training_runs import make_trainer
from transformers.utils import logging as transformers_logging

from dflash_hf import DFlashTrainingArguments
from dflash_hf.blocks.losses import MIN_LOSS_DECAY, decay_weights, loss_denominator, position_weights
from dflash_hf.training.argument_checks import WITHOUT_EFFECT


def arguments(tmp_path, **values) -> DFlashTrainingArguments:
    return DFlashTrainingArguments(**{"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, **values})


SET = {
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "use_cache": True,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "all",
    "prediction_loss_only": True,
    "eval_do_concat_batches": False,
    "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"],
    "label_names": ["labels"],
}


@pytest.mark.parametrize("name", SET)
def test_an_argument_of_trainer_without_effect_is_refused_by_name(tmp_path, name):
    with pytest.raises(
        ValueError, match=f"These arguments have no effect in DFlashTrainer: {name}=.*Leave them unset"
    ):
        arguments(tmp_path, **{name: SET[name]})


def test_every_argument_without_effect_is_tried_and_several_are_named_in_one_line(tmp_path):
    assert set(SET) == set(WITHOUT_EFFECT) <= {item.name for item in fields(DFlashTrainingArguments)}
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1 .*; neftune_noise_alpha=5\.0") as caught:
        arguments(tmp_path, label_smoothing_factor=0.1, neftune_noise_alpha=5.0)
    assert "\n" not in str(caught.value)


def test_arguments_that_are_written_out_with_their_defaults_are_accepted(tmp_path):
    """As in a file that holds every argument, and when arguments are copied."""
    args = arguments(
        tmp_path, label_smoothing_factor=0.0, neftune_noise_alpha=None, include_num_input_tokens_seen=False
    )
    copied = {item.name: getattr(args, item.name) for item in fields(args) if item.init}
    again = DFlashTrainingArguments(**copied)
    assert again.learning_rate == args.learning_rate
    assert again.use_muon is True


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_decay": 4.0}, "loss_decay=4.0 has no effect with slot_weights='dpace'"),
        ({"slot_weights": "uniform", "dpace_alpha": 0.3}, "dpace_alpha=0.3 has no effect with slot_weights='uniform'"),
        ({"kl_top_k": 5}, "kl_top_k=5 has no effect with kl_weight=0.0"),
        ({"optim_args": "beta=1"}, "optim_args='beta=1' has no effect with use_muon=True"),
        ({"optim_target_modules": "all-linear"}, "has no effect with use_muon=True"),
        (
            {"max_train_minutes": 1.0, "lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs={'num_cycles': 2} has no effect with max_train_minutes=1.0",
        ),
        ({"eval_generate_max_new_tokens": 9}, "has no effect with eval_generate_prompts=0"),
        ({"slot_weights": "decay", "loss_decay": 4.0}, None),
        ({"kl_top_k": 5, "kl_temperature": 2.0, "kl_weight": 0.5}, None),
    ],
)
def test_an_argument_that_another_one_switches_off_is_warned_of(tmp_path, caplog, values, words):
    transformers_logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    arguments(tmp_path, **values)
    transformers_logging.disable_propagation()
    found = [record.getMessage() for record in caplog.records if record.name.startswith("dflash_hf")]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize("name", ["compute_loss_func", "preprocess_logits_for_metrics", "model_init"])
def test_a_function_that_this_trainer_would_not_call_is_refused(tmp_path, name):
    from dflash_hf import DFlashTrainer

    with pytest.raises(ValueError, match=f"{name} has no effect in DFlashTrainer"):
        DFlashTrainer(None, make_target(), arguments(tmp_path), **{name: lambda *values: values})


@pytest.mark.parametrize("decay", [0.0, 1e-3, 5e-3, 0.0199, 1e-45, -1.0, math.nan, math.inf])
def test_a_decay_whose_weights_are_not_finite_is_refused_with_the_smallest_allowed_value(tmp_path, decay):
    """exp(1 / 0.005) is infinite in fp32, and infinity times the zero of a slot without loss is not a number."""
    with pytest.raises(ValueError, match=f"loss_decay={decay} must be at least {MIN_LOSS_DECAY}"):
        arguments(tmp_path, slot_weights="decay", loss_decay=decay)
    mask = torch.tensor([[False, True, True]])
    if not decay > 1:
        for compute in (
            lambda: decay_weights(mask, decay),
            lambda: position_weights(mask, "decay", decay),
            lambda: loss_denominator(mask, "decay", decay),
        ):
            with pytest.raises(ValueError, match=f"loss_decay={decay} must be at least {MIN_LOSS_DECAY}"):
                compute()


@pytest.mark.parametrize("decay", [MIN_LOSS_DECAY, 0.1])
def test_the_smallest_decay_gives_finite_weights_and_a_loss_above_zero(target, tmp_path, decay):
    slots = torch.tensor([[False, *[True] * 15]])
    assert decay_weights(slots, decay).isfinite().all()
    assert decay_weights(slots, decay)[0, :2].tolist() == [0.0, 1.0]
    trainer = make_trainer(target, tmp_path, slot_weights="decay", loss_decay=decay, max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < math.inf for loss in losses)
    assert all(parameter.isfinite().all() for parameter in trainer.draft.parameters())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *((name, math.nan, ValueError) for name in ("kl_temperature", "dpace_alpha", "ce_weight", "l1_weight")),
        *((name, math.nan, ValueError) for name in ("kl_weight", "max_train_minutes")),
        *((name, math.inf, ValueError) for name in ("kl_temperature", "ce_weight", "l1_weight", "max_train_minutes")),
        ("kl_temperature", 1e-30, ValueError),
        ("kl_temperature", 1e25, ValueError),
        ("ce_weight", -1.0, ValueError),
        ("max_train_minutes", 0, ValueError),
        ("anchors_per_sample", 0, ValueError),
        ("anchors_per_sample", True, TypeError),
        ("anchors_per_sample", 2.0, TypeError),
        ("max_length", "2048", TypeError),
        ("head_chunk_size", 1.5, TypeError),
        ("loss_decay", "4", TypeError),
        ("dpace_alpha", True, TypeError),
    ],
)
def test_a_number_of_another_type_or_out_of_range_is_refused_by_name(tmp_path, name, value, error):
    with pytest.raises(error, match=f"{name}=.* must be"):
        arguments(tmp_path, **{name: value})


def test_the_plain_recipe_has_flags_and_names_in_a_file(tmp_path):
    from dflash_hf.cli.train import parse_arguments

    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: {tmp_path}\npartial_windows: false\nanchor_replacement: true\nslot_weights: decay\n")
    for given in (
        [str(path)],
        ["--output-dir", str(tmp_path), "--no-partial-windows", "--anchor-replacement", "--slot-weights", "decay"],
    ):
        _, args = parse_arguments(given)
        assert (args.partial_windows, args.anchor_replacement, args.slot_weights) == (False, True, "decay")
    _, args = parse_arguments(["--output-dir", str(tmp_path)])
    assert (args.partial_windows, args.anchor_replacement) == (True, False)
