"""Whatever a value of a draft's configuration is, the draft can be loaded, or one short line says what is wrong."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target
from foreign_checkpoints import ARGUMENTS, PRODUCERS
from hypothesis import given
from hypothesis import strategies as st

from dflash_hf import DFlashConfig, DFlashDraftModel
from dflash_hf.checkpoints.compatibility import check_checkpoint
from dflash_hf.model.modeling_dflash import DFlashBody, rotary_angles

pytestmark = pytest.mark.properties

LONGEST_MESSAGE = 400
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "mask_token_id": 96,
    "target_num_hidden_layers": 4,
    "target_layer_ids": [0, 2],
}
# Keys that transformers reads or that it keeps, beside the fields.
OTHERS = {"architectures", "auto_map", "chunk_size_feed_forward", "dory", "dtype", "id2label"}
OTHERS |= {"is_encoder_decoder", "label2id", "name_or_path", "num_labels", "output_attentions", "output_hidden_states"}
OTHERS |= {"partial_rotary_factor", "per_layer_config", "problem_type", "quantization_config", "return_dict"}
OTHERS |= {
    "rope_scaling",
    "torch_dtype",
    "use_return_dict",
    "model_type",
    "transformers_version",
}
FIELDS = sorted(DFlashConfig.field_names() | OTHERS)
NUMBERS = [0, -1, 1, 2, 3, 7, 16, 10**9, 10**40, -(10**40), 0.0, -0.5, 0.5, 1.0, 2.0, 1e-300, 1e300]
SPECIAL = [float("nan"), float("inf"), -float("inf"), True, False, None, "", "1", "nope", "silu", "x" * 10**5]
LISTS = [
    [],
    [0],
    [0, 0],
    [True],
    [None],
    ["full_attention"],
    [0.0, 2.0],
    [float("nan")],
    list(range(10**5)),
    ["a"] * 10**5,
]
ROPE_KEYS = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "mscale",
    "truncate",
]
ROPES = [
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "yarn", "factor": float("nan")},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "default", "rope_theta": 10**400},
    {"full_attention": {"rope_theta": 1e4}},
]
hostile: Any = st.one_of(
    st.sampled_from([*NUMBERS, *SPECIAL, *LISTS, *ROPES]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(-2, 5), st.none(), st.text(max_size=3)), max_size=6),
    st.dictionaries(
        st.sampled_from(ROPE_KEYS), st.one_of(st.sampled_from([*NUMBERS, *SPECIAL]), st.text()), max_size=5
    ),
)


def check_refusal(error: Exception) -> None:
    """One line, and short."""
    assert len(str(error)) < LONGEST_MESSAGE, str(error)[:1000]
    assert "\n" not in str(error).strip()


def check_loadable(config: DFlashConfig) -> None:
    """The network of this configuration can be built, its angles are finite, and it comes back from its JSON."""
    with torch.device("meta"):
        DFlashBody(config)
    if config.head_dim <= 4096:
        cos, sin = rotary_angles(config, torch.arange(3)[None], torch.float32)
        assert cos.isfinite().all()
        assert sin.isfinite().all()
    text = config.to_json_string()
    assert DFlashConfig.from_dict(json.loads(text)).to_json_string() == text


@given(st.dictionaries(st.sampled_from(FIELDS), hostile, min_size=1, max_size=2))
def test_any_values_of_the_fields_make_a_loadable_configuration_or_one_short_line(values):
    try:
        config = DFlashConfig(**{**TINY, **values})
    except ValueError as error:
        check_refusal(error)
    else:
        check_loadable(config)


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_with_each_hostile_value_is_loadable_or_one_short_line(field):
    for value in [*NUMBERS, *SPECIAL, *LISTS, *ROPES]:
        try:
            config = DFlashConfig(**{**TINY, field: copy.deepcopy(value)})
        except ValueError as error:
            check_refusal(error)
        else:
            check_loadable(config)


@given(st.sampled_from(sorted(PRODUCERS)), st.data())
def test_any_value_in_a_file_of_any_producer_is_loadable_or_one_short_line(producer, data):
    raw = copy.deepcopy(PRODUCERS[producer][0])
    inner = data.draw(st.sampled_from([raw, *(value for value in raw.values() if isinstance(value, dict))]))
    own = {"rope_theta", "rope_parameters", "num_target_layers", "dtype", "layer_types"} if inner is raw else set()
    names = sorted({*inner} | own)
    inner[data.draw(st.sampled_from(names))] = data.draw(hostile)
    try:
        config = DFlashConfig.from_dict(raw, **ARGUMENTS.get(producer, {}))
    except ValueError as error:
        check_refusal(error)
    else:
        check_loadable(config)


@given(
    st.dictionaries(st.sampled_from([*FIELDS, "rope_scaling", "num_target_layers"]), hostile, min_size=1, max_size=2)
)
def test_check_answers_for_any_config_json_in_short_lines(values):
    with tempfile.TemporaryDirectory() as folder:
        draft = make_draft(make_target())
        draft.save_pretrained(folder)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        report = check_checkpoint(folder)
        assert all(len(reason) < 2 * LONGEST_MESSAGE for verdict in report.verdicts for reason in verdict.reasons)
        if not report.verdicts[0].can_load:
            assert len(report.verdicts[0].reasons[0].replace(folder, "")) < LONGEST_MESSAGE
        else:
            assert isinstance(DFlashDraftModel.from_pretrained(folder), DFlashDraftModel)


def test_not_a_number_is_refused_by_its_field_and_not_as_two_values_that_differ():
    for theta in (math.nan, float("nan")):
        raw = {**TINY, "model_type": "dflash", "rope_theta": theta, "rope_parameters": {"rope_theta": float("nan")}}
        with pytest.raises(ValueError, match="rope_theta=nan must be"):
            DFlashConfig.from_dict(raw)
        with pytest.raises(ValueError, match="rope_theta=nan must be"):
            DFlashConfig(**raw)
