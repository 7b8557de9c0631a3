"""Drafts that were loaded as remote code before the package was imported, and foreign classes of their type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target
from tiers import thinned
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dflash_hf import (
    DFlashConfig,
    DFlashDraftModel,
    DFlashTrainer,
    DFlashTrainingArguments,
    dflash_decoding,
    speculative_generate,
)
from dflash_hf.checkpoints.io import save_in_layout
from dflash_hf.doctor.diagnosis import Diagnosis
from dflash_hf.evaluation.compare import compare_on_prompts, generated_acceptance_length
from dflash_hf.evaluation.timed_generation import LOOPS, generate_timed
from dflash_hf.model.modeling_dflash import UntiedDraftError
from dflash_hf.model.remote_code import local_draft

PROMPT = torch.tensor([[4, 8, 15]])
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}


KINDS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash 2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6},
    "DSpark": {"sample_from_anchor": True, "markov_rank": 4, "draft_vocab_size": 40, "enable_confidence_head": True},
}


@pytest.fixture(params=thinned(KINDS, "DSpark"))
def remote(request, tmp_path: Path):
    """A draft whose class comes from the source files beside its weights, and the same draft of this package."""
    target = make_target()
    own = make_draft(target, **KINDS[request.param])
    own.save_pretrained(tmp_path / "draft")
    names = set(sys.modules)
    kind = get_class_from_dynamic_module("modeling_dflash.DFlashDraftModel", str(tmp_path / "draft"))
    yield kind.from_pretrained(tmp_path / "draft", target=False).eval(), own, target
    for name in set(sys.modules) - names:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_a_draft_loaded_as_remote_code_decodes(remote):
    draft, own, target = remote
    assert not isinstance(draft, DFlashDraftModel)
    expected = speculative_generate(target, own, PROMPT, **GREEDY)
    drafted = speculative_generate(target, draft, PROMPT, **GREEDY)
    assert torch.equal(drafted.sequences, expected.sequences)
    assert drafted.statistics.committed == expected.statistics.committed
    assert torch.equal(
        target.generate(PROMPT, **GREEDY, custom_generate=dflash_decoding, draft=draft), expected.sequences
    )
    longer = torch.cat([drafted.sequences, PROMPT], dim=1)
    again = speculative_generate(target, draft, longer, **GREEDY, cache=drafted.cache)
    assert again.statistics.prefill_s is not None
    assert torch.equal(again.sequences, target.generate(longer, **GREEDY))


def test_a_draft_loaded_as_remote_code_is_one_object_that_shares_its_weights(remote):
    draft, own, _ = remote
    local = local_draft(draft)
    assert local is local_draft(draft)
    assert local_draft(own) is own
    assert {name: tensor.data_ptr() for name, tensor in local.state_dict().items()} == {
        name: tensor.data_ptr() for name, tensor in draft.state_dict().items()
    }
    assert {**local.config.to_dict(), "_name_or_path": ""} == own.config.to_dict()


def test_a_draft_loaded_as_remote_code_is_saved_and_trained(remote, tmp_path):
    draft, own, target = remote
    if own.config.kind != "DFlash":  # tables and rows of the head are made from the target
        local_draft(draft).tie_target(target)
    save_in_layout(draft, tmp_path / "serving", "serving", dtype=torch.float32)
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "serving", target=False).state_dict()
    shared = {name: tensor for name, tensor in own.state_dict().items() if "selector" not in name}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in shared.items())
    rows = [{"input_ids": torch.randint(1, 95, (20,)).tolist()} for _ in range(4)]
    args = DFlashTrainingArguments(tmp_path / "run", max_steps=1, report_to="none", per_device_train_batch_size=2)
    trainer = DFlashTrainer(model=draft, target=target, args=args, train_dataset=rows)
    trainer.train()
    assert trainer.model is local_draft(draft)


def test_a_draft_loaded_as_remote_code_follows_later_moves_and_modes(remote):
    draft, _, _ = remote
    draft.norm.weight.requires_grad_(False)
    local = local_draft(draft)
    assert not local.norm.weight.requires_grad
    assert not draft.norm.weight.requires_grad
    draft.to(torch.bfloat16).train()
    assert local_draft(draft) is local
    assert {tensor.dtype for tensor in local.parameters()} == {torch.bfloat16}
    assert local.training


def test_a_draft_loaded_as_remote_code_keeps_its_target(remote):
    draft, own, target = remote
    states = torch.randn(2, 32)
    assert not local_draft(draft).is_tied
    draft.tie_target(target)  # also after the local draft was made
    local = local_draft(draft)
    assert local.get_output_embeddings() is target.get_output_embeddings()
    assert torch.equal(local.compute_logits(states), own.compute_logits(states))
    other = make_target(seed=5)
    local.tie_target(other)  # as a trainer does, and later calls leave it
    assert local_draft(draft).get_output_embeddings() is other.get_output_embeddings()
    draft.tie_target(other)
    draft.tie_target(target)
    assert local_draft(draft).get_output_embeddings() is target.get_output_embeddings()


def test_a_draft_loaded_as_remote_code_remembers_where_its_target_is(remote, tmp_path):
    draft, own, target = remote
    target.save_pretrained(tmp_path / "target")
    loaded = type(draft).from_pretrained(tmp_path / "draft", target=str(tmp_path / "target"))
    states = torch.randn(2, 32)
    assert torch.equal(local_draft(loaded).compute_logits(states), own.compute_logits(states))
    unsought = type(draft).from_pretrained(tmp_path / "draft", target=False)
    with pytest.raises(UntiedDraftError, match="is not tied to a target"):
        local_draft(unsought).compute_logits(states)


def test_a_configuration_of_remote_code_is_taken_as_that_of_the_package(remote, tmp_path):
    draft, own, target = remote
    config = type(draft.config).from_pretrained(tmp_path / "draft")
    assert not isinstance(config, DFlashConfig)
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft", config=config, target=False)
    assert type(loaded.config) is DFlashConfig
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in own.state_dict().items())
    new = DFlashDraftModel.from_target(target, config=config)
    expected = DFlashDraftModel.from_target(target, config=own.config)
    assert new.config.to_dict() == expected.config.to_dict()
    assert type(DFlashDraftModel(config).config) is DFlashConfig
    back = type(draft).from_pretrained(tmp_path / "draft", config=own.config, target=False)
    assert torch.equal(back.norm.weight, own.norm.weight)


@pytest.mark.parametrize("call", ["from_pretrained", "from_target", "constructor"])
def test_the_configuration_of_another_model_is_refused_in_one_line(call, remote, tmp_path):
    _, _, target = remote
    calls = {
        "from_pretrained": lambda: DFlashDraftModel.from_pretrained(tmp_path / "draft", config=target.config),
        "from_target": lambda: DFlashDraftModel.from_target(target, config=target.config),
        "constructor": lambda: DFlashDraftModel(target.config),
    }
    with pytest.raises(TypeError, match="config is a LlamaConfig, and must be the configuration of a draft") as raised:
        calls[call]()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("loop", LOOPS)
def test_measurements_of_a_draft_loaded_as_remote_code_count_its_passes(loop, remote):
    draft, own, target = remote
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    expected = generate_timed(target, inputs, own, loop=loop, **GREEDY)
    assert expected.committed
    assert generate_timed(target, inputs, draft, loop=loop, **GREEDY).committed == expected.committed
    rows = [{"input_ids": [4, 8, 15, 16], "supervised_mask": [False, False, False, True]}]
    lengths = [generated_acceptance_length(target, each, rows, max_new_tokens=9) for each in (draft, own)]
    assert lengths[0] == lengths[1] is not None


def test_a_draft_loaded_as_remote_code_is_diagnosed_and_compared(remote, tokenizer, tmp_path):
    target = make_target(vocab_size=272)
    own = make_draft(target, mask_token_id=271)
    own.save_pretrained(tmp_path / "pair")
    draft = type(remote[0]).from_pretrained(tmp_path / "pair", target=False).eval()
    draft.tie_target(target)
    findings, expected = (
        list(Diagnosis(target, each, tokenizer, ["ab", "ba"], max_new_tokens=8).run()) for each in (draft, own)
    )
    assert [item.as_dict() for item in findings] == [item.as_dict() for item in expected]
    compared, plain = (
        list(compare_on_prompts(target, each, tokenizer, ["ab"], loop="transformers", max_new_tokens=8))
        for each in (draft, own)
    )
    assert compared[0].drafted.committed == plain[0].drafted.committed != []


@pytest.mark.parametrize("wrap", [nn.Sequential, nn.DataParallel, torch.compile])
def test_a_wrapped_draft_is_named_and_not_taken_for_another_packages(wrap):
    with pytest.raises(TypeError, match=r"must be a DFlashDraftModel\. Load the draft"):
        local_draft(wrap(make_draft(make_target())))


def test_a_foreign_class_of_the_model_type_is_named():
    class OtherConfig(PreTrainedConfig):
        model_type = "dflash"

    class OtherDraft(PreTrainedModel):
        config_class = OtherConfig

    target = make_target()
    with pytest.raises(TypeError, match=r"OtherDraft and must be a DFlashDraftModel. Another package has registered"):
        speculative_generate(target, OtherDraft(OtherConfig()), PROMPT, **GREEDY)
    for wrong in (target, "draft", 3):
        with pytest.raises(TypeError, match=r"draft has the type .* and must be a DFlashDraftModel. Load the draft"):
            speculative_generate(target, wrong, PROMPT, **GREEDY)
