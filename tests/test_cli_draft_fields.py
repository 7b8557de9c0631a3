"""Every field of a draft's configuration is an argument of `dflash-hf train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import error_line
from safetensors.torch import load_file

from dflash_hf import DFlashConfig
from dflash_hf.cli.draft_fields import draft_fields
from dflash_hf.cli.train import parse_arguments

SEED = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "target_hidden_size": 32,
    "target_num_hidden_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 270,
    "vocab_size": 272,
}
# A value of each field that is not its default.
VALUES: dict[str, Any] = {
    **SEED,
    "attention_bias": True,
    "attention_sinks": True,
    "confidence_head_with_markov": True,
    "conv_group_size": 8,
    "conv_kernel_size": 2,
    "draft_vocab_size": 200,
    "enable_confidence_head": True,
    "final_logit_softcapping": 30.0,
    "last_layer_after_norm": True,
    "learned_mask_embedding": True,
    "markov_head_type": "gated",
    "markov_rank": 4,
    "output_multiplier": 0.5,
    "sample_from_anchor": True,
    "selector_embedding_scale": 0.25,
    "selector_factored": True,
    "selector_rank": 4,
    "selector_top_k": 6,
    "attention_dropout": 0.25,
    "block_size": 6,
    "bos_token_id": 5,
    "chat_template_kwargs": {"enable_thinking": False},
    "eos_token_id": [257, 258],
    "head_dim": 16,
    "hidden_act": "gelu",
    "initializer_range": 0.125,
    "input_embedding_scale": 1.0,
    "intermediate_size": 48,
    "is_causal": True,
    "layer_types": ["sliding_attention"],
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 7,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
    "rope_theta": 5e4,
    "sliding_window": 64,
    "target_name_or_path": "org/target",
    "target_revision": "main",
    "target_tensor_checksums": {},
}


def write_rows(path: Path) -> Path:
    """Rows of one turn that the byte tokenizer reads."""
    turns = [
        [
            {"role": "user", "content": f"Say {index}."},
            {"role": "assistant", "content": f"It is {index}, said the clock."},
        ]
        for index in range(6)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def as_words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def test_the_table_above_has_every_field():
    assert VALUES.keys() == DFlashConfig.field_names() - {"_format_reader"}


@pytest.mark.parametrize("place", ["flags", "yaml", "json", "draft_config"])
def test_every_field_can_be_given(place, tmp_path):
    arguments = ["--output_dir", str(tmp_path)]
    if place == "flags":
        for name, value in VALUES.items():
            arguments += [f"--{name.replace('_', '-')}", *as_words(value)]
    elif place == "draft_config":
        (tmp_path / "draft.json").write_text(json.dumps(VALUES))
        arguments += ["--draft-config", str(tmp_path / "draft.json")]
    else:
        (tmp_path / f"run.{place}").write_text(json.dumps(VALUES))  # JSON is YAML
        arguments = [str(tmp_path / f"run.{place}"), *arguments]
    assert draft_fields(parse_arguments(arguments)[0]) == VALUES


def test_the_command_line_comes_before_the_run_file_and_both_before_the_draft_config(tmp_path):
    (tmp_path / "draft.json").write_text(json.dumps({**SEED, "head_dim": 4, "sliding_window": 99, "block_size": 5}))
    (tmp_path / "run.yaml").write_text(f"draft_config: {tmp_path / 'draft.json'}\nhead_dim: 8\nnum_hidden_layers: 2\n")
    base = [str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path)]
    given = draft_fields(parse_arguments(base)[0])
    assert (given["num_hidden_layers"], given["head_dim"], given["sliding_window"]) == (2, 8, 99)
    assert (given["block_size"], given["target_layer_ids"]) == (5, [0, 2])
    given = draft_fields(parse_arguments([*base, "--draft-layers", "3", "--head-dim", "16"])[0])
    assert (given["num_hidden_layers"], given["head_dim"]) == (3, 16)
    given = draft_fields(parse_arguments([*base, "--num-hidden-layers", "4"])[0])
    assert given["num_hidden_layers"] == 4


def test_two_values_for_the_two_names_of_one_argument_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("draft_layers: 2\nnum_hidden_layers: 3\n")
    with pytest.raises(ValueError, match="num_hidden_layers=3 and draft_layers=2"):
        parse_arguments([str(tmp_path / "run.yaml")])
    (tmp_path / "run.yaml").write_text("draft_layers: 2\nnum_hidden_layers: 2\n")
    assert parse_arguments([str(tmp_path / "run.yaml")])[0].draft_layers == 2


@pytest.fixture
def training(run, saved_target, tmp_path):
    """Run `train` for two steps with further arguments."""
    rows, target = write_rows(tmp_path / "rows.jsonl"), saved_target()

    def start(*arguments: object, out: str = "draft") -> tuple[int, str, Path]:
        steps = ["--max_steps", 2, "--anchors_per_sample", 4, "--bf16", "false", "--save_strategy", "no"]
        code, _, err = run(
            "train", "--target", target, "--dataset", rows, "--output_dir", tmp_path / out, *steps, *arguments
        )
        return code, err, tmp_path / out

    return start


def test_a_draft_configuration_file_is_trained_from_the_command_line(training, tmp_path):
    (tmp_path / "draft.json").write_text(json.dumps(SEED))
    code, err, out = training("--draft-config", tmp_path / "draft.json", "--head-dim", 4)
    assert code == 0, err
    config = DFlashConfig.from_pretrained(out)
    assert {name: getattr(config, name) for name in SEED} == SEED
    assert (config.block_size, config.head_dim, config.intermediate_size) == (16, 4, 64)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--conv-kernel-size", 2, "--conv-group-size", 8, "--selector-rank", 4], {"selector_factored": True}),
        (
            ["--sample-from-anchor", "true", "--markov-rank", 4, "--enable-confidence-head", "true",
             "--recipe", "dspark"],
            {"markov_head_type": "vanilla", "enable_confidence_head": True},
        ),
        (["--draft-vocab-size", 60], {"draft_vocab_size": 60}),
    ],
)  # fmt: skip
def test_other_kinds_of_drafts_are_trained_from_the_command_line(training, arguments, fields):
    code, err, out = training("--draft-layers", 1, "--block-size", 4, *arguments)
    assert code == 0, err
    config = DFlashConfig.from_pretrained(out)
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_part_is_added_to_a_draft_that_training_continues_from(training):
    code, err, out = training("--draft-layers", 1, "--block-size", 4)
    assert code == 0, err
    code, err, new = training("--draft", out, "--selector-rank", 4, "--trained-part", "heads", out="new")
    assert code == 0, err
    assert DFlashConfig.from_pretrained(new).selector_rank == 4
    before, after = (load_file(folder / "model.safetensors") for folder in (out, new))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(name.startswith("candidate_selector") for name in after)
    code, err, _ = training("--draft", new, "--selector-rank", 8, out="other")
    assert code != 0
    assert "of another shape" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab-size", 300], "vocab_size=300 contradicts the target"),
        (["--num-target-layers", 3], "num_target_layers=3 must equal the number of target_layer_ids"),
        (["--rope-parameters", "{"], "--rope-parameters '{' is not valid JSON"),
        (["--draft-config", "missing.json"], "'missing.json' cannot be read"),
        (["--hidden-act", "nope"], "hidden_act='nope' is no activation"),
    ],
)
def test_a_wrong_field_is_one_line(training, tmp_path, arguments, words):
    (tmp_path / "draft.json").write_text(json.dumps(SEED))
    code, err, _ = training("--draft-config", tmp_path / "draft.json", *arguments)
    assert code != 0
    assert words in error_line(err)


def test_fields_of_a_new_draft_are_refused_beside_a_draft_that_is_continued(training, tmp_path):
    (tmp_path / "draft.json").write_text(json.dumps({**SEED, "block_size": 4}))
    code, err, draft = training("--draft-config", tmp_path / "draft.json")
    assert code == 0, err
    code, err, _ = training("--draft", draft, "--block-size", 8, out="second")
    assert code != 0
    assert "block_size=8 is a field of a new draft" in error_line(err)
    code, err, _ = training("--draft", draft, "--draft-config", tmp_path / "draft.json", out="second")
    assert code == 0, err


def test_template_arguments_that_differ_from_those_of_prepared_rows_are_refused(training, run, saved_target, tmp_path):
    rows, prepared = write_rows(tmp_path / "rows.jsonl"), tmp_path / "prepared"
    code, _, err = run("prepare", "--dataset", rows, "--target", saved_target(), "--out", prepared)
    assert code == 0, err
    code, err, _ = training("--dataset", prepared, "--chat-template-kwargs", '{"enable_thinking": false}')
    assert code != 0
    assert "chat_template_kwargs" in error_line(err)
