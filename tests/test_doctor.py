"""The diagnosis of a healthy tiny pair, and of the same pair after one part of it was broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target, make_tokenizer
from decoding_pairs import make_family
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import dflash_hf.blocks.forward
import dflash_hf.doctor
import dflash_hf.doctor.checks
from dflash_hf import DFlashDraftModel, build_dflash_batch_plan
from dflash_hf.blocks.forward import block_hidden_states
from dflash_hf.doctor.checks import (
    check_mask_token,
    check_paths,
    check_target_states,
    check_template,
    check_weights,
)
from dflash_hf.doctor.diagnosis import Diagnosis, verdict
from dflash_hf.doctor.finding import Finding, guarded
from dflash_hf.doctor.forced_decoding import TargetResponses, generate_responses
from dflash_hf.doctor.perturbations import with_fields
from dflash_hf.evaluation.timed_generation import Generation

PROMPTS = ["How far is it?", "Name a river.", "Two and two?", "Sing.", "Tell me of the sea."]
NEW_TOKENS = 32


def chat_target(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return make_target(seed, **{"vocab_size": 272, "num_hidden_layers": 8, **ids, **overrides})


def losses(draft: DFlashDraftModel, responses: TargetResponses, step: int, label_shift: int = 0) -> torch.Tensor:
    """Return the mean cross-entropy of one step's blocks against the tokens `label_shift` positions later."""
    ids = responses.input_ids
    plan = build_dflash_batch_plan(
        responses.token_valid_mask,
        torch.arange(len(ids)),
        anchors_per_sample=16,
        gamma=draft.config.block_size - 1,
        optimizer_step=step,
        seed=0,
        supervised_mask=responses.supervised_mask,
    )
    hidden = block_hidden_states(draft, draft, plan, responses.batch(draft.config.target_layer_ids))
    positions = plan.label_positions + label_shift
    counts = plan.loss_mask & (positions < ids.shape[1])
    labels = ids[plan.sample_rows[:, None], positions.clamp(max=ids.shape[1] - 1)]
    return functional.cross_entropy(draft.compute_logits(hidden[counts]), labels[counts])


def train(
    draft: DFlashDraftModel, responses: TargetResponses, num_steps: int, loss: Callable[..., torch.Tensor] = losses
) -> DFlashDraftModel:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss(draft, responses, step).backward()
        optimizer.step()
    return draft.eval()


def new_draft(target: LlamaForCausalLM, **overrides: Any) -> DFlashDraftModel:
    torch.manual_seed(1)
    values = {"num_hidden_layers": 2, "target_layer_ids": [0, 2, 4], "num_target_layers": 3, "block_size": 4}
    return DFlashDraftModel.from_target(target, **{**values, "mask_token_id": 261, **overrides})


class HealthyPair:
    """A target, its responses, and a draft that has memorised them, as objects and as folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, make_tokenizer()
        self.target_folder, self.draft_folder = folder / "target", folder / "draft"
        chat_target(self.tokenizer).save_pretrained(self.target_folder)
        self.tokenizer.save_pretrained(self.target_folder)
        self.target = AutoModelForCausalLM.from_pretrained(self.target_folder)
        self.responses = generate_responses(self.target, self.tokenizer, PROMPTS, max_new_tokens=NEW_TOKENS)
        self.draft = train(new_draft(self.target), self.responses, num_steps=140)
        self.draft.save_pretrained(self.draft_folder)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return HealthyPair(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def doctor(run, healthy, tmp_path):
    """Return a function that runs the command on folders and returns the exit code, the record and the output."""

    def examine(draft: Path, target: Path = healthy.target_folder, *options: str) -> tuple[int, dict[str, Any], str]:
        record = tmp_path / "findings.json"
        names = ("--draft", draft, "--target", target, "--prompts", healthy.folder / "prompts.jsonl", "--json", record)
        code, out, err = run("doctor", *names, "--max-new-tokens", NEW_TOKENS, *options)
        assert record.is_file(), err
        return code, json.loads(record.read_text()), out

    return examine


def statuses(record: dict[str, Any], status: str) -> list[str]:
    return [finding["name"] for finding in record["findings"] if finding["status"] == status]


def test_every_part_of_an_untrained_pair_is_checked(run, saved_target, tmp_path):
    target = saved_target(num_hidden_layers=8)
    new_draft(AutoModelForCausalLM.from_pretrained(target)).save_pretrained(tmp_path / "draft")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    record = tmp_path / "findings.json"
    names = ("--draft", tmp_path / "draft", "--target", target, "--prompts", tmp_path / "prompts.jsonl")
    code, out, err = run("doctor", *names, "--json", record, "--max-new-tokens", 8)
    assert code == 1, err
    found = json.loads(record.read_text())
    assert len(found["findings"]) >= 8
    assert statuses(found, "fault") == ["weights"]
    assert found["verdict"].startswith("1 fault:\n1. weights: ")
    assert "FAULT   weights: " in out


@pytest.mark.trains
def test_a_healthy_pair_gets_no_fault_and_no_warning(doctor, healthy):
    code, record, out = doctor(healthy.draft_folder)
    assert (code, statuses(record, "fault"), statuses(record, "warning")) == (0, [], [])
    assert record["verdict"].startswith("healthy: acceptance length 3.")
    assert record["verdict"].endswith("of 4 on 5 prompts")
    assert out.endswith(record["verdict"] + "\n")


def in_config(**values: Any) -> Callable[..., None]:
    def change(folder: Path, healthy: HealthyPair) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **values}
        if "target_layer_ids" in values:
            config["num_target_layers"] = len(values["target_layer_ids"])
        path.write_text(json.dumps(config))

    return change


def in_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    def write(folder: Path, healthy: HealthyPair) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def never_trained(folder: Path, healthy: HealthyPair) -> None:
    new_draft(healthy.target).save_pretrained(folder)


def trained_on_next_slots(folder: Path, healthy: HealthyPair) -> None:
    train(
        new_draft(healthy.target), healthy.responses, 140, lambda *arguments: losses(*arguments, label_shift=1)
    ).save_pretrained(folder)


def needing_to_see_the_whole_block(folder: Path, healthy: HealthyPair) -> None:
    """Train the draft to be right only with bidirectional attention in a block, and then make it causal."""

    def loss(draft: DFlashDraftModel, responses: TargetResponses, step: int) -> torch.Tensor:
        blind = losses(with_fields(draft, {"is_causal": True}), responses, step)
        return losses(draft, responses, step) + functional.relu(6 - blind)

    draft = DFlashDraftModel.from_pretrained(healthy.draft_folder, target=healthy.target)
    train(draft, healthy.responses, 40, loss).save_pretrained(folder)
    in_config(is_causal=True)(folder, healthy)


def truncated(folder: Path, healthy: HealthyPair) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_target(folder: Path, healthy: HealthyPair, **overrides: Any) -> Path:
    path = folder.parent / "target"  # the same name, so that only the hidden states differ
    chat_target(healthy.tokenizer, **{"seed": 5, **overrides}).save_pretrained(path)
    healthy.tokenizer.save_pretrained(path)
    return path


def other_tokenizer(folder: Path, healthy: HealthyPair) -> Path:
    path = other_target(folder, healthy, seed=0)
    bigger = healthy.tokenizer.__class__.from_pretrained(healthy.target_folder)
    bigger.add_tokens([f"w{index}" for index in range(20)])
    bigger.save_pretrained(path)
    return path


def other_template(folder: Path, healthy: HealthyPair) -> Path:
    path = folder.parent / "target"
    shutil.copytree(healthy.target_folder, path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content | upper }};{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return path


BREAKS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "target layers off by one": (in_config(target_layer_ids=[1, 3, 5]), "target layers", "layer_ids to [0, 2, 4]"),
    "target layers in another order": (
        in_config(target_layer_ids=[4, 0, 2]), "layer order", "Set target_layer_ids to [0, 2, 4]"
    ),
    "the last layer of the target": (in_config(target_layer_ids=[0, 2, 7]), "draft files", "dflash-hf convert --set"),
    "slots trained one ahead": (trained_on_next_slots, "slot layout", "Correct sample_from_anchor in"),
    "another mask token": (in_config(mask_token_id=65), "mask token id", "Set mask_token_id to 261"),
    "a mask token outside the embedding": (in_config(mask_token_id=999), "draft files", "dflash-hf convert --set"),
    "another rotary embedding": (
        in_config(rope_parameters={"rope_type": "default", "rope_theta": 3.0}),
        "rotary embedding",
        '"rope_theta": 10000.0',
    ),
    "another causality": (needing_to_see_the_whole_block, "causality", "Set is_causal to false"),
    "a small sliding window": (
        in_config(layer_types=["sliding_attention"] * 2, sliding_window=4, is_causal=False),
        "sliding window",
        'layer_types to ["full_attention", "full_attention"]',
    ),
    # This fault cannot be distinguished from too little training, and the advice names both
    "another target of the same shape": (other_target, "acceptance", "undertrained, or it was trained on another"),
    "a target of another width": (
        lambda folder, pair: other_target(folder, pair, hidden_size=64), "pair", "target for which it was trained"
    ),
    "a target of another vocabulary": (
        lambda folder, pair: other_target(folder, pair, vocab_size=280), "pair", "target for which it was trained"
    ),
    "a tokenizer with more tokens than the target has": (other_tokenizer, "pair", "the tokenizer that belongs to"),
    "a template whose prompt does not begin its rows": (other_template, "chat template", "chat_template_kwargs"),
    "a weight that is not a number": (
        in_tensors(lambda tensors: tensors["fc.weight"][0, 0].fill_(float("nan"))), "draft files", "diverged"
    ),
    "a missing tensor": (
        in_tensors(lambda tensors: tensors.pop("hidden_norm.weight")), "draft files", "Copy the whole folder again"
    ),
    "half a file": (truncated, "draft files", "Copy the whole folder again"),
    "weights that were never trained": (never_trained, "weights", "never trained"),
}  # fmt: skip


@pytest.mark.trains
@pytest.mark.parametrize("name", BREAKS)
def test_the_first_fault_names_what_is_broken_and_what_to_do(doctor, healthy, tmp_path, name):
    break_it, finding, advice = BREAKS[name]
    folder = tmp_path / "draft"
    shutil.copytree(healthy.draft_folder, folder)
    code, record, out = doctor(folder, break_it(folder, healthy) or healthy.target_folder)
    assert code == 1
    first = next(item for item in record["findings"] if item["status"] == "fault")
    assert first["name"] == finding, record["verdict"]
    assert advice in first["advice"]
    assert f"1. {finding}: " in out
    assert "Traceback" not in out


@pytest.mark.trains
def test_what_the_doctor_advises_makes_the_pair_healthy_again(doctor, healthy, tmp_path, run):
    folder, mended = tmp_path / "draft", tmp_path / "mended"
    shutil.copytree(healthy.draft_folder, folder)
    in_config(target_layer_ids=[1, 3, 5])(folder, healthy)
    _, record, _ = doctor(folder)
    (fault,) = (item for item in record["findings"] if item["status"] == "fault")
    setting = fault["advice"].split("--set '")[1].split("'")[0]
    assert run("convert", folder, mended, "--layout", "native", "--set", setting)[0] == 0
    code, record, _ = doctor(mended)
    assert (code, record["verdict"][:26]) == (0, "healthy: acceptance length")


@pytest.mark.trains
def test_float16_that_overflows_is_named_with_the_place(doctor, healthy, tmp_path):
    """In float32 the norm after `fc` removes the scale."""
    folder = tmp_path / "draft"
    shutil.copytree(healthy.draft_folder, folder)
    in_tensors(lambda tensors: tensors["fc.weight"].mul_(3e4))(folder, healthy)
    assert doctor(folder)[0] == 0
    code, record, _ = doctor(folder, healthy.target_folder, "--dtype", "float16")
    assert (code, statuses(record, "fault")[0]) == (1, "activations")
    assert "not finite in float16 from fc on" in record["verdict"]


@pytest.mark.trains
def test_an_unreadable_target_is_a_finding_and_bad_options_are_errors(doctor, healthy, tmp_path, run):
    code, record, _ = doctor(healthy.draft_folder, tmp_path / "nothing")
    assert (code, statuses(record, "fault")) == (1, ["target files"])
    code, _, err = run("doctor", "--draft", healthy.draft_folder, "--num-prompts", 65)
    assert code == 1
    assert "--num-prompts 65 must be in 1 … 64" in err
    code, _, err = run("doctor", "--draft", healthy.draft_folder, "--max-new-tokens", 1)
    assert "--max-new-tokens 1 must be at least 2" in err


@pytest.mark.trains
def test_states_of_the_layer_before_are_found_and_the_layer_is_named(healthy, monkeypatch):
    real = dflash_hf.doctor.checks.target_hidden_states
    monkeypatch.setattr(
        dflash_hf.doctor.checks,
        "target_hidden_states",
        lambda target, ids, mask, layer_ids: real(target, ids, mask, [layer_id + 1 for layer_id in layer_ids]),
    )
    finding = check_target_states(healthy.target, healthy.draft, healthy.responses)
    assert finding.status == "fault"
    assert "reads as layer 0" in finding.measured
    assert "nearest is hidden_states[2]" in finding.measured


@pytest.mark.parametrize("num_tokens", [2, 3, 20])
def test_the_last_anchors_of_a_text_are_compared_between_training_and_generation(num_tokens, monkeypatch):
    """A training mask that hides the slots past the end of the text is found, whatever the length of the text."""
    tokenizer = make_tokenizer()
    target = chat_target(tokenizer)
    draft = new_draft(target, block_size=8)
    responses = generate_responses(target, tokenizer, PROMPTS[:1], max_new_tokens=num_tokens)
    finding = check_paths(draft, responses)
    assert finding.status == "ok"
    last = int(responses.token_valid_mask[0].sum()) - 2
    assert f"{last}] differ" in finding.measured

    real = dflash_hf.blocks.forward.training_masks

    def hidden_past_the_end(config, plan, batch, kind="auto"):
        in_text = plan.query_positions < batch.length
        return real(config, replace(plan, slot_valid=plan.slot_valid & in_text), batch, kind)

    monkeypatch.setattr(dflash_hf.blocks.forward, "training_masks", hidden_past_the_end)
    assert check_paths(draft, responses).status == "fault"


@pytest.mark.trains
def test_decoding_that_accepts_less_than_simulated_decoding_is_a_fault(healthy):
    diagnosis = Diagnosis(healthy.target, healthy.draft, healthy.tokenizer, PROMPTS, NEW_TOKENS)
    diagnosis.responses = healthy.responses
    for generation in diagnosis.generations:
        generation.committed, generation.verified = [1] * len(generation.token_ids), None
    finding = diagnosis._generation()
    assert finding.status == "fault"
    assert finding.measured.startswith("acceptance length 1.00 in decoding, 3.")


@pytest.mark.parametrize(
    ("mask_token_id", "words"),
    [
        (256, "also the pad token"),
        (257, "also the eos token"),
        (65, "an ordinary token that occurs in text"),
        (262, "its embedding is zero"),
        (263, "its embedding equals that of the pad or the eos token"),
    ],
)
def test_a_mask_token_with_a_meaning_or_without_an_embedding_is_a_warning(mask_token_id, words):
    tokenizer = make_tokenizer()
    target = chat_target(tokenizer)
    rows = target.get_input_embeddings().weight.data
    rows[262] = 0
    rows[263] = rows[257]  # the pad row is zero in Llama
    finding = check_mask_token(new_draft(target, mask_token_id=mask_token_id), target, tokenizer)
    assert finding.status == "warning"
    assert words in finding.measured


def test_a_scaled_embedding_is_also_measured_without_its_factor():
    target, tokenizer = make_family("gemma2", vocab_size=272), make_tokenizer()
    draft = make_draft(target, mask_token_id=261)
    findings = {finding.name: finding for finding in Diagnosis(target, draft, tokenizer, ["Sing."], 8).run()}
    assert "without the target's factor 5.65685" in findings["embedding scale"].measured


def test_norms_that_did_not_change_while_other_weights_did_are_a_warning(target):
    draft = DFlashDraftModel.from_target(target, num_hidden_layers=1, num_target_layers=2, mask_token_id=96)
    for name, value in draft.named_parameters():
        if not name.endswith("norm.weight"):
            value.data *= 1.5
    assert check_weights(draft).status == "warning"
    draft.hidden_norm.weight.data[0] += 0.01
    assert check_weights(draft).status == "ok"


@pytest.mark.trains
def test_a_tokenizer_without_a_template_and_unknown_arguments_are_warnings(healthy):
    tokenizer = make_tokenizer()
    config = with_fields(healthy.draft, {"chat_template_kwargs": {"enable_thinking": False}}).config
    finding = check_template(tokenizer, config, "Sing.", "La.")
    assert (finding.status, "does not use enable_thinking" in finding.measured) == ("warning", True)
    tokenizer.chat_template = None
    assert check_template(tokenizer, config, "Sing.", "La.").status == "warning"


def test_a_check_that_fails_is_a_finding_and_the_verdict_counts_it():
    def check() -> Finding:
        raise RuntimeError("out of\nmemory")

    finding = guarded("slot layout", check)
    assert finding.measured == "the check failed: RuntimeError: out of memory"
    assert verdict([finding, finding]).startswith("2 faults:\n1. slot layout: the check failed")


def test_the_diagnosis_still_has_its_name_of_version_0_1_0():
    assert dflash_hf.doctor.Examination is dflash_hf.doctor.Diagnosis


@pytest.mark.trains
def test_responses_of_one_token_have_no_acceptance_length(healthy):
    diagnosis = Diagnosis(healthy.target, healthy.draft, healthy.tokenizer, PROMPTS, NEW_TOKENS)
    diagnosis.generations = [Generation([5], 1.0, [])]
    assert diagnosis.acceptance_length is None
    finding = diagnosis._acceptance()
    assert (finding.status, finding.measured) == ("skipped", "the responses have one token each")
    diagnosis.generations = [Generation([5, 6, 7, 8], 1.0, [2, 1]), Generation([5, 6, 7, 8], 1.0, [3])]
    assert diagnosis.acceptance_length == 2.0


@pytest.mark.trains
def test_every_finding_has_a_paragraph_in_the_guide(healthy, doctor):
    _, record, _ = doctor(healthy.draft_folder)
    guide = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
    for name in [item["name"] for item in record["findings"]] + ["target generation", "target files"]:
        assert f"**{name}**" in guide
