"""Checkpoints of DFlash 2, DSpark, reduced vocabularies and mask vectors: loading and export, tensor by tensor."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_draft
from foreign_checkpoints import (
    DSPARK_KEYS,
    KEPT_TOKENS,
    KINDS,
    PRODUCERS,
    dspark_parts,
    network,
    write_checkpoint,
    write_kind,
    write_producer,
)
from safetensors.torch import load_file, save_file
from tiers import thinned
from torch import nn

from dflash_hf import DFlashConfig, DFlashDraftModel, save_in_layout
from dflash_hf.checkpoints.io import MASK_FILE

REDUNDANT = {"t2d", "lm_head.weight", "embed_tokens.weight"}
EXPORTED = {
    "DFlash 2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_factored": False},
    "DSpark": {**DSPARK_KEYS, "sample_from_anchor": True},
    "DSpark, gated": {**DSPARK_KEYS, "markov_head_type": "gated", "sample_from_anchor": True},
    "a Markov head on DFlash slots": {"markov_rank": 3},
    "slots that start at the anchor": {"sample_from_anchor": True},
    "reduced vocabulary": {"draft_vocab_size": 65},
    "DSpark, reduced vocabulary": {**DSPARK_KEYS, "sample_from_anchor": True, "draft_vocab_size": 65},
    "sinks": {"attention_sinks": True},
    "the last layer after the final norm": {"last_layer_after_norm": True},
}


def randomised(target, **values):
    draft = make_draft(target, **values)
    if draft.d2t is not None:
        draft.set_draft_vocabulary(torch.tensor(KEPT_TOKENS))
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_every_producer_is_loaded_tensor_by_tensor(kind, target, tmp_path):
    folder = write_kind(tmp_path / "draft", kind, target)
    arguments = {"block_size": 4} if "TorchSpec" in kind else {}
    draft = DFlashDraftModel.from_pretrained(folder, target=target, **arguments)
    _, parts, _, fields = KINDS[kind]
    own = {name: value for name, value in parts().items() if name not in REDUNDANT}
    wanted = {**network(), **own}
    if "mask_hidden" in wanted:
        wanted["mask_embedding"] = wanted.pop("mask_hidden")[0]
    state = draft.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name
    for name, value in fields.items():
        assert getattr(draft.config, name) == value, name
    assert draft.config.target_tensor_checksums is None
    again = DFlashDraftModel.from_pretrained(folder, target=False, **arguments)
    assert again.state_dict().keys() == wanted.keys()


@pytest.mark.parametrize("kind", [name for name in KINDS if "last layer" not in name])
def test_every_kind_is_saved_as_ours_and_loads_without_arguments(kind, target, tmp_path):
    arguments = {"block_size": 4} if "TorchSpec" in kind else {}
    draft = DFlashDraftModel.from_pretrained(write_kind(tmp_path / "draft", kind, target), target=target, **arguments)
    draft.save_pretrained(tmp_path / "ours")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "ours", target=target)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())
    skipped = {"architectures", "auto_map", "transformers_version", "dtype", "_name_or_path"}
    ours, theirs = loaded.config.to_dict(), draft.config.to_dict()
    assert {n: v for n, v in ours.items() if n not in skipped} == {n: v for n, v in theirs.items() if n not in skipped}


@pytest.mark.parametrize("layout", ["serving", "speculators"])
@pytest.mark.parametrize("kind", EXPORTED)
def test_export_and_import_of_a_kind_keep_every_bit(kind, layout, target, tmp_path):
    draft = randomised(target, **EXPORTED[kind])
    folder = save_in_layout(draft, tmp_path / "DFlash-export", layout, dtype=torch.float32)
    loaded = DFlashDraftModel.from_pretrained(folder, target=target)
    added = loaded.state_dict().keys() - draft.state_dict().keys()
    if kind == "slots that start at the anchor" and layout == "serving":  # served by the class for DSpark
        assert added == {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        assert not any(loaded.state_dict()[name].any() for name in added)
    else:
        assert not added
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    for name in ("sample_from_anchor", *EXPORTED[kind]):
        assert getattr(loaded.config, name) == getattr(draft.config, name), name
    embeds, context = draft.embed_blocks(torch.tensor([[3]])), torch.randn(1, 6, 64)
    ours, theirs = (model(embeds, context).last_hidden_state for model in (draft, loaded))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "architecture", "keys"),
    [
        ("DFlash 2", "DFlash2DraftModel", {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}),
        ("DSpark", "Qwen3DSparkModel", {"markov_rank", "markov_head_type", "enable_confidence_head"}),
        ("slots that start at the anchor", "Qwen3DSparkModel", {"sample_from_anchor"}),
        ("reduced vocabulary", "DFlashDraftModel", set()),
    ],
)
def test_the_serving_layout_has_the_class_and_the_keys_that_vllm_reads(kind, architecture, keys, target, tmp_path):
    draft = randomised(target, **EXPORTED[kind])
    folder = save_in_layout(draft, tmp_path / "DFlash-export", "serving")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert keys <= config["dflash_config"].keys()
    if architecture == "Qwen3DSparkModel":
        assert keys | {"block_size", "mask_token_id", "target_layer_ids", "dspark_bonus_anchor"} <= config.keys()
        assert config["dspark_bonus_anchor"] is False
    tensors = load_file(folder / "model.safetensors")
    if draft.d2t is not None:
        assert config["draft_vocab_size"] == 65
        assert torch.equal(tensors["lm_head.weight"], target.get_output_embeddings().weight[KEPT_TOKENS].bfloat16())
        assert tensors["t2d"].nonzero().flatten().tolist() == KEPT_TOKENS
        assert tensors["d2t"].dtype == torch.int64
    assert not any("projection" in name and "codebook" in name for name in tensors)


@pytest.mark.parametrize(
    "part",
    [
        {"selector_rank": 3, "selector_top_k": 5},
        {"conv_kernel_size": 2, "conv_group_size": 8},
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 5},
    ],
)
@pytest.mark.parametrize("layout", ["serving", "speculators"])
def test_one_part_of_dflash2_is_exported_with_the_other_one_without_effect(part, layout, target, tmp_path):
    draft = randomised(target, **part)
    folder = save_in_layout(draft, tmp_path / "DFlash-export", layout, dtype=torch.float32)
    loaded = DFlashDraftModel.from_pretrained(folder, target=target)
    assert loaded.candidate_selector is not None
    assert not loaded.candidate_selector.is_factored
    assert loaded.layers[0].attention_conv is not None
    embeds, context = draft.embed_blocks(torch.tensor([[3]])), torch.randn(1, 6, 64)
    ours, theirs = (model(embeds, context).last_hidden_state for model in (draft, loaded))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    before = torch.tensor([[5, 8, 1, 90]])
    results = []
    for model in (draft, loaded):
        head = model.draft_head()
        logits = head.logits(ours)
        scores, candidates = head.correct(logits, head.features(before, ours)[0])
        best = scores.argmax(-1, keepdim=True)
        results.append(best if candidates is None else candidates.gather(-1, best))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("values", "layout", "message"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 8, "markov_rank": 2}, "serving", "none for both"),
        ({"selector_rank": 2, "output_multiplier": 2.0}, "speculators", "output_multiplier=2.0"),
        ({"learned_mask_embedding": True}, "speculators", "learned_mask_embedding=True cannot be expressed"),
        ({"sample_from_anchor": True}, "muse", "sample_from_anchor cannot be expressed in the muse layout"),
        ({"draft_vocab_size": 65}, "muse", "draft_vocab_size cannot be expressed"),
        ({"attention_sinks": True}, "muse", "attention_sinks cannot be expressed"),
    ],
)
def test_what_a_layout_cannot_express_is_refused_by_name(values, layout, message, target, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_in_layout(randomised(target, **values), tmp_path / "DFlash-export", layout)
    assert not (tmp_path / "DFlash-export").exists()


@pytest.mark.parametrize("form", ["dictionary", "vector", "row"])
def test_a_mask_vector_in_a_file_of_its_own_is_read(form, target, tmp_path):
    vector = torch.randn(32)
    content = {"dictionary": {"mask_token_id": 96, "embedding": vector}, "vector": vector, "row": vector[None]}[form]
    folder = write_producer(tmp_path / "draft", "z-lab, block size at the top", target)
    torch.save(content, folder / MASK_FILE)
    draft = DFlashDraftModel.from_pretrained(folder, target=target)
    assert draft.config.learned_mask_embedding
    assert torch.equal(draft.mask_embedding, vector)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mask_token_id": 95, "embedding": torch.zeros(32)}, "is for mask_token_id=95"),
        ({"mask_token_id": 96}, "holds NoneType as its embedding"),
        ({"mask_token_id": 96, "embedding": torch.zeros(31)}, r"holds \[31\] as its embedding"),
        (torch.zeros(2, 32), r"holds \[2, 32\]"),
        ("text", "holds str"),
    ],
)
def test_a_mask_file_that_does_not_fit_is_refused(content, message, target, tmp_path):
    folder = write_producer(tmp_path / "draft", "z-lab, block size at the top", target)
    torch.save(content, folder / MASK_FILE)
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(folder, target=target)


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", None])
def test_a_damaged_mask_file_and_one_with_code_are_refused(content, target, tmp_path):
    folder = write_producer(tmp_path / "draft", "z-lab, block size at the top", target)
    if content is None:
        torch.save(nn.Linear(2, 2), folder / MASK_FILE)
    else:
        (folder / MASK_FILE).write_bytes(content)
    with pytest.raises(OSError, match=r"mask_embedding.pt' cannot be read as tensors"):
        DFlashDraftModel.from_pretrained(folder, target=target)


def test_a_mask_vector_is_exported_in_the_file_that_servers_read(target, tmp_path):
    draft = randomised(target, learned_mask_embedding=True)
    folder = save_in_layout(draft, tmp_path / "DFlash-export", "serving", dtype=torch.float32)
    content = torch.load(folder / MASK_FILE, weights_only=True)
    assert content["mask_token_id"] == 96
    assert torch.equal(content["embedding"], draft.mask_embedding)
    assert torch.equal(DFlashDraftModel.from_pretrained(folder, target=target).mask_embedding, draft.mask_embedding)


def test_weights_under_the_name_of_another_producer_are_found(target, tmp_path):
    folder = write_producer(tmp_path / "draft", "z-lab, block size at the top", target)
    (folder / "model.safetensors").rename(folder / "dflash_draft_model.safetensors")
    draft = DFlashDraftModel.from_pretrained(folder, target=target)
    assert all(torch.equal(value, network()[name]) for name, value in draft.state_dict().items())


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor(KEPT_TOKENS), "must hold offsets"),  # absolute ids
        (torch.zeros(65, dtype=torch.int64) - 1, "must hold offsets"),
        (torch.arange(65).flip(0), "must hold offsets"),
        (torch.zeros(65, dtype=torch.int64), "t2d and d2t in .* name different tokens"),
    ],
)
def test_tables_of_a_vocabulary_that_contradict_their_meaning_are_refused(offsets, message, target, tmp_path):
    folder = write_kind(tmp_path / "draft", "speculators, reduced vocabulary", target)
    save_file({**load_file(folder / "model.safetensors"), "d2t": offsets}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(folder, target=target)


def test_a_head_that_is_not_the_targets_rows_is_refused(target, tmp_path):
    folder = write_kind(tmp_path / "draft", "speculators, reduced vocabulary", target)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight of the draft's file is not the target's"):
        DFlashDraftModel.from_pretrained(folder, target=target)


@pytest.mark.parametrize(
    "producer", thinned([name for name in PRODUCERS if name not in ("muse", "TorchSpec")], "z-lab, all nested")
)
@pytest.mark.parametrize(
    "part",
    [
        {"conv_kernel_size": 2, "conv_group_size": 8},
        {"selector_rank": 3},
        {"selector_rank": 3, "selector_factored": False},
        {"markov_rank": 3, "markov_head_type": "gated"},
        {"enable_confidence_head": True},
        {"learned_mask_embedding": True},
        {"draft_vocab_size": 40},
    ],
)
def test_a_draft_of_any_producer_gets_a_part_by_one_argument_and_stays_as_it_was(producer, part, target, tmp_path):
    folder = write_producer(tmp_path / "draft", producer, target)
    plain = DFlashDraftModel.from_pretrained(folder, target=target)
    draft = DFlashDraftModel.from_pretrained(folder, target=target, **part)
    new = draft.state_dict().keys() - plain.state_dict().keys()
    assert new
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in plain.state_dict().items())
    embeds, context = plain.embed_blocks(torch.tensor([[3]])), torch.randn(1, 6, 64)
    ours, theirs = (model(embeds, context).last_hidden_state for model in (plain, draft))
    assert torch.equal(ours, theirs)
    if "selector_rank" in part:
        assert draft.config.selector_factored == part.get("selector_factored", True)
    draft.save_pretrained(tmp_path / "ours")
    assert DFlashDraftModel.from_pretrained(tmp_path / "ours", target=target).state_dict().keys() == {
        *draft.state_dict()
    }


def test_tensors_of_a_part_that_the_file_claims_to_have_are_not_invented(target, tmp_path):
    config = {**KINDS["DeepSpec"][0]}
    folder = write_checkpoint(tmp_path / "draft", config, network())
    with pytest.raises(ValueError, match=r"missing: confidence_head\.proj\.bias"):
        DFlashDraftModel.from_pretrained(folder, target=target)
    parts = dspark_parts()
    del parts["markov_head.markov_w2.weight"]
    folder = write_checkpoint(tmp_path / "other", config, {**network(), **parts})
    with pytest.raises(ValueError, match=r"missing: markov_head\.markov_w2\.weight"):
        DFlashDraftModel.from_pretrained(folder, target=target, markov_rank=3)


def test_a_kind_is_read_from_its_configuration_alone():
    config = DFlashConfig.from_dict(KINDS["z-lab DFlash 2"][0])
    assert (config.conv_kernel_size, config.selector_rank, config.tokens_per_block) == (2, 3, 4)
    assert DFlashConfig.from_dict(KINDS["DeepSpec"][0]).tokens_per_block == 5
