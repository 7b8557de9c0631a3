"""A healthy tiny pair, and what the doctor says once it is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_target, make_tokenizer
from decoding_pairs import make_family
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import dflash_hf.doctor.checks
from dflash_hf import DFlashDraftModel, build_dflash_batch_plan
from dflash_hf.blocks.forward import block_hidden_states
from dflash_hf.doctor.checks import check_mask_token, check_target_states, check_template, check_weights
from dflash_hf.doctor.examination import Examination, verdict
from dflash_hf.doctor.finding import Finding, guarded
from dflash_hf.doctor.forced_decoding import AnsweredPrompts, answer_prompts
from dflash_hf.doctor.perturbations import with_fields

PROMPTS = ["How far is it?", "Name a river.", "Two and two?", "Sing.", "Tell me of the sea."]
NEW_TOKENS = 32


def chat_target(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return make_target(seed, **{"vocab_size": 272, "num_hidden_layers": 8, **ids, **overrides})


def losses(draft: DFlashDraftModel, answered: AnsweredPrompts, step: int, label_shift: int = 0) -> torch.Tensor:
    """Mean cross-entropy of the slots of one step's blocks, against the tokens `label_shift` places later."""
    ids = answered.input_ids
    plan = build_dflash_batch_plan(
        answered.token_valid_mask,
        torch.arange(len(ids)),
        anchors_per_sample=16,
        gamma=draft.config.block_size - 1,
        optimizer_step=step,
        seed=0,
        supervised_mask=answered.supervised_mask,
    )
    hidden = block_hidden_states(draft, draft, plan, answered.batch(draft.config.target_layer_ids))
    positions = plan.label_positions + label_shift
    counts = plan.loss_mask & (positions < ids.shape[1])
    labels = ids[plan.sample_rows[:, None], positions.clamp(max=ids.shape[1] - 1)]
    return functional.cross_entropy(draft.compute_logits(hidden[counts]), labels[counts])


def train(
    draft: DFlashDraftModel, answered: AnsweredPrompts, num_steps: int, loss: Callable[..., torch.Tensor] = losses
) -> DFlashDraftModel:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss(draft, answered, step).backward()
        optimizer.step()
    return draft.eval()


def new_draft(target: LlamaForCausalLM, **overrides: Any) -> DFlashDraftModel:
    torch.manual_seed(1)
    values = {"num_hidden_layers": 2, "target_layer_ids": [0, 2, 4], "num_target_layers": 3, "block_size": 4}
    return DFlashDraftModel.from_target(target, **{**values, "mask_token_id": 261, **overrides})


class Clinic:
    """A target, its answers, and a draft that has learnt them by heart; as objects and as folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, make_tokenizer()
        self.target_folder, self.draft_folder = folder / "target", folder / "draft"
        chat_target(self.tokenizer).save_pretrained(self.target_folder)
        self.tokenizer.save_pretrained(self.target_folder)
        self.target = AutoModelForCausalLM.from_pretrained(self.target_folder)
        self.answered = answer_prompts(self.target, self.tokenizer, PROMPTS, max_new_tokens=NEW_TOKENS)
        self.draft = train(new_draft(self.target), self.answered, num_steps=140)
        self.draft.save_pretrained(self.draft_folder)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    return Clinic(tmp_path_factory.mktemp("clinic"))


@pytest.fixture
def doctor(run, clinic, tmp_path):
    """Run the command on folders; returns exit code, record and printed text."""

    def examine(draft: Path, target: Path = clinic.target_folder, *options: str) -> tuple[int, dict[str, Any], str]:
        record = tmp_path / "findings.json"
        names = ("--draft", draft, "--target", target, "--prompts", clinic.folder / "prompts.jsonl", "--json", record)
        code, out, err = run("doctor", *names, "--max-new-tokens", NEW_TOKENS, *options)
        assert record.is_file(), err
        return code, json.loads(record.read_text()), out

    return examine


def statuses(record: dict[str, Any], status: str) -> list[str]:
    return [finding["name"] for finding in record["findings"] if finding["status"] == status]


def test_every_part_of_an_untrained_pair_is_examined(run, saved_target, tmp_path):
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


def test_a_healthy_pair_gets_no_fault_and_no_warning(doctor, clinic):
    code, record, out = doctor(clinic.draft_folder)
    assert (code, statuses(record, "fault"), statuses(record, "warning")) == (0, [], [])
    assert record["verdict"].startswith("healthy: acceptance length 3.")
    assert record["verdict"].endswith("of 4 on 5 prompts")
    assert out.endswith(record["verdict"] + "\n")


# ---- sixteen ways to break it: (folder of the draft to change, clinic) -> folder of the target, if it is another ----


def in_config(**values: Any) -> Callable[..., None]:
    def change(folder: Path, clinic: Clinic) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **values}
        if "target_layer_ids" in values:
            config["num_target_layers"] = len(values["target_layer_ids"])
        path.write_text(json.dumps(config))

    return change


def in_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    def write(folder: Path, clinic: Clinic) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def never_trained(folder: Path, clinic: Clinic) -> None:
    new_draft(clinic.target).save_pretrained(folder)


def trained_on_next_slots(folder: Path, clinic: Clinic) -> None:
    train(
        new_draft(clinic.target), clinic.answered, 140, lambda *arguments: losses(*arguments, label_shift=1)
    ).save_pretrained(folder)


def needing_to_see_the_whole_block(folder: Path, clinic: Clinic) -> None:
    """Trained to be right if a slot sees all of its block, and wrong if not; then told not to look."""

    def loss(draft: DFlashDraftModel, answered: AnsweredPrompts, step: int) -> torch.Tensor:
        blind = losses(with_fields(draft, {"is_causal": True}), answered, step)
        return losses(draft, answered, step) + functional.relu(6 - blind)

    draft = DFlashDraftModel.from_pretrained(clinic.draft_folder, target=clinic.target)
    train(draft, clinic.answered, 40, loss).save_pretrained(folder)
    in_config(is_causal=True)(folder, clinic)


def truncated(folder: Path, clinic: Clinic) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_target(folder: Path, clinic: Clinic, **overrides: Any) -> Path:
    path = folder.parent / "target"  # of the same name, so that nothing but its states tells
    chat_target(clinic.tokenizer, **{"seed": 5, **overrides}).save_pretrained(path)
    clinic.tokenizer.save_pretrained(path)
    return path


def other_tokenizer(folder: Path, clinic: Clinic) -> Path:
    path = other_target(folder, clinic, seed=0)
    bigger = clinic.tokenizer.__class__.from_pretrained(clinic.target_folder)
    bigger.add_tokens([f"w{index}" for index in range(20)])
    bigger.save_pretrained(path)
    return path


def other_template(folder: Path, clinic: Clinic) -> Path:
    path = folder.parent / "target"
    shutil.copytree(clinic.target_folder, path)
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
    "slots trained one ahead": (trained_on_next_slots, "slot layout", "Label slot k with input_ids[a + k]"),
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
    # what cannot be told from a draft that learnt too little is said to be one of the two
    "another target of the same shape": (other_target, "acceptance", "undertrained, or it was trained on another"),
    "a target of another width": (
        lambda folder, clinic: other_target(folder, clinic, hidden_size=64), "pair", "target for which it was trained"
    ),
    "a target of another vocabulary": (
        lambda folder, clinic: other_target(folder, clinic, vocab_size=280), "pair", "target for which it was trained"
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


@pytest.mark.parametrize("name", BREAKS)
def test_the_first_fault_names_what_is_broken_and_what_to_do(doctor, clinic, tmp_path, name):
    break_it, finding, advice = BREAKS[name]
    folder = tmp_path / "draft"
    shutil.copytree(clinic.draft_folder, folder)
    code, record, out = doctor(folder, break_it(folder, clinic) or clinic.target_folder)
    assert code == 1
    first = next(item for item in record["findings"] if item["status"] == "fault")
    assert first["name"] == finding, record["verdict"]
    assert advice in first["advice"]
    assert f"1. {finding}: " in out
    assert "Traceback" not in out


def test_what_the_doctor_advises_makes_the_pair_healthy_again(doctor, clinic, tmp_path, run):
    folder, mended = tmp_path / "draft", tmp_path / "mended"
    shutil.copytree(clinic.draft_folder, folder)
    in_config(target_layer_ids=[1, 3, 5])(folder, clinic)
    _, record, _ = doctor(folder)
    (fault,) = (item for item in record["findings"] if item["status"] == "fault")
    setting = fault["advice"].split("--set '")[1].split("'")[0]
    assert run("convert", folder, mended, "--layout", "native", "--set", setting)[0] == 0
    code, record, _ = doctor(mended)
    assert (code, record["verdict"][:26]) == (0, "healthy: acceptance length")


def test_float16_that_overflows_is_named_with_the_place(doctor, clinic, tmp_path):
    """The norm behind `fc` hides its scale in float32."""
    folder = tmp_path / "draft"
    shutil.copytree(clinic.draft_folder, folder)
    in_tensors(lambda tensors: tensors["fc.weight"].mul_(3e4))(folder, clinic)
    assert doctor(folder)[0] == 0
    code, record, _ = doctor(folder, clinic.target_folder, "--dtype", "float16")
    assert (code, statuses(record, "fault")[0]) == (1, "activations")
    assert "not finite in float16 from fc on" in record["verdict"]


def test_an_unreadable_target_and_bad_options_end_in_words(doctor, clinic, tmp_path, run):
    code, record, _ = doctor(clinic.draft_folder, tmp_path / "nothing")
    assert (code, statuses(record, "fault")) == (1, ["target files"])
    code, _, err = run("doctor", "--draft", clinic.draft_folder, "--num-prompts", 65)
    assert code == 1
    assert "--num-prompts 65 must be in 1 … 64" in err
    code, _, err = run("doctor", "--draft", clinic.draft_folder, "--max-new-tokens", 1)
    assert "--max-new-tokens 1 must be at least 2" in err


# ---- checks by themselves ----


def test_states_of_the_layer_before_are_found_and_the_layer_is_named(clinic, monkeypatch):
    real = dflash_hf.doctor.checks.target_hidden_states
    monkeypatch.setattr(
        dflash_hf.doctor.checks,
        "target_hidden_states",
        lambda target, ids, mask, layer_ids: real(target, ids, mask, [layer_id + 1 for layer_id in layer_ids]),
    )
    finding = check_target_states(clinic.target, clinic.draft, clinic.answered)
    assert finding.status == "fault"
    assert "reads as layer 0" in finding.measured
    assert "nearest is hidden_states[2]" in finding.measured


def test_decoding_that_accepts_less_than_the_finished_text_is_a_fault_of_its_own(clinic):
    examination = Examination(clinic.target, clinic.draft, clinic.tokenizer, PROMPTS, NEW_TOKENS)
    examination.answered = clinic.answered
    for generation in examination.drafted:
        generation.committed = [1] * len(generation.token_ids)
    finding = examination._generation()
    assert finding.status == "fault"
    assert finding.measured.startswith("1.00 tokens a pass when decoding, 3.")


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
    findings = {finding.name: finding for finding in Examination(target, draft, tokenizer, ["Sing."], 8).run()}
    assert "without the target's factor 5.65685" in findings["embedding scale"].measured


def test_norms_that_never_moved_while_the_rest_did_are_a_warning(target):
    draft = DFlashDraftModel.from_target(target, num_hidden_layers=1, num_target_layers=2, mask_token_id=96)
    for name, value in draft.named_parameters():
        if not name.endswith("norm.weight"):
            value.data *= 1.5
    assert check_weights(draft).status == "warning"
    draft.hidden_norm.weight.data[0] += 0.01
    assert check_weights(draft).status == "ok"


def test_a_tokenizer_without_a_template_and_unknown_arguments_are_warnings(clinic):
    tokenizer = make_tokenizer()
    config = with_fields(clinic.draft, {"chat_template_kwargs": {"enable_thinking": False}}).config
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


def test_every_finding_has_a_paragraph_in_the_guide(clinic, doctor):
    _, record, _ = doctor(clinic.draft_folder)
    guide = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
    for name in [item["name"] for item in record["findings"]] + ["target generation", "target files"]:
        assert f"**{name}**" in guide
