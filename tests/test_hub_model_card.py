"""Model cards print every fact or say that it is missing, their snippets run, and a training run writes them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import make_draft
from huggingface_hub import ModelCard
from training_runs import make_trainer, rows_of
from transformers import AutoModelForCausalLM

from dflash_hf import DFlashConfig, DFlashTrainingArguments
from dflash_hf.checkpoints.io import save_in_layout
from dflash_hf.cli import main
from dflash_hf.cli.train import DraftAndDataArguments, describe_rows
from dflash_hf.evaluation.compare import Summary
from dflash_hf.hub.model_card import (
    FACTS_NAME,
    PICTURE_NAME,
    DraftCard,
    Evaluation,
    Protocol,
    is_own_card,
    write_model_card,
)
from dflash_hf.hub.trainer import ModelCardWriter
from dflash_hf.markdown import NOT_RECORDED, inline_code
from dflash_hf.provenance import hub_id_or_folder
from dflash_hf.training.card import (
    changed_arguments,
    last_and_best,
    mask_token_in_words,
    rows_are_text,
    training_facts,
)

ROOT = Path(__file__).parent.parent
SUMMARY = Summary(
    num_prompts=16,
    acceptance_length=1.8243243,
    slot_acceptance=[0.457, 0.205, 0.102],
    plain_tokens_per_s=18.5126,
    drafted_tokens_per_s=24.401,
    speed_up=1.3609,
    num_identical=4,
)
FULL = {
    "title": "my-draft",
    "target_id": "some-org/some-target",
    "has_chat_template": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "mask_token": "<|mask|>",
    "num_parameters": 1234567,
    "license": "mit",
    "training_data": "GSM8K train questions",
    "dataset_ids": ("openai/gsm8k",),
    "answers_by_target": True,
    "num_rows": 768,
    "num_tokens": 98765,
    "training_arguments": {"learning_rate": 0.004, "slot_weights": "decay"},
    "initialized_from": "random weights",
    "steps": 206,
    "last_step": 206,
    "epochs": 2.125,
    "tokens_seen": 54321,
    "train_loss": 3.14159,
    "train_acceptance_length": 1.75,
    "seed": 42,
    "hardware": "two cores",
    "software": "torch 2.13.0",
    "evaluations": (Evaluation(206, None, 2.5, 2.219, 1.91, 1.9, (0.5, 0.25, 0.125)),),
    "measured": SUMMARY,
    "protocol": Protocol("16 questions", 0.7, 160, "bfloat16", "batch 1", "as published", "one GPU", "torch 2.14", 7),
    "limits": "English only.",
    "native_repo": "me/my-draft",
    "serving_repo": "me/my-draft-DFlash",
}


@pytest.fixture
def config(draft) -> DFlashConfig:
    draft.config.target_revision = "0123abc"
    return draft.config


def rows_in(content: str, heading: str) -> dict[str, str]:
    """Return the first two cells of the table rows below a heading, split as a Markdown reader splits them."""
    part = content.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert len({len(row) for row in cells}) == 1  # no row has more cells than the head
    assert set(cells[1]) == {"---"}
    return {row[0].strip(): row[1].strip() for row in cells[2:]}


def reloaded(card: DraftCard, folder: Path) -> ModelCard:
    folder.mkdir(exist_ok=True)
    assert write_model_card(folder, card)
    return ModelCard.load(folder / "README.md")


def test_every_fact_is_printed_and_none_is_missing(config, tmp_path):
    card = reloaded(DraftCard(config=config, **FULL), tmp_path)
    assert NOT_RECORDED not in card.content
    measured = rows_in(card.content, "Measured: generation")
    assert measured == {
        "acceptance length": "1.82 of 4",
        "slots 1 … k all accepted": "1: 46%, 2: 20%, 3: 10%",
        "speed without → with the draft": "18.5 → 24.4 tokens/s",
        "speed-up (median over the prompts)": "1.36×",
        "responses identical token by token": "4 of 16",
        "prompts": "16 questions",
        "temperature": "0.7",
        "maximum response length": "160 tokens",
        "dtype": "bfloat16",
        "target's weights": "as published",
        "decoding": "batch 1",
        "hardware": "one GPU",
        "software": "torch 2.14",
        "seed": "7",
    }
    assert "| held-out rows | 206 | 2.500 | 2.22 | 1.91 | 1.90 | 1: 50%, 2: 25%, 3: 12% |" in card.content
    assert rows_in(card.content, "The draft") == {
        "target": "some-org/some-target",
        "target revision": "0123abc",
        "chat template": "yes",
        "chat-template arguments": "enable_thinking=False",
        "block size": "4",
        "target layers read": "[0, 2] of 4, counted from 0",
        "mask token": "96 (&lt;\\|mask\\|>)",
        "draft layers": "2 (full, full)",
        "hidden and intermediate size": "32, 64",
        "heads": "4 query, 2 key-value, 8 wide",
        "parameters": "1,234,567",
        "licence": "mit",
        "layout of this package": "me/my-draft",
        "layout of serving engines": "me/my-draft-DFlash",
    }
    assert rows_in(card.content, "Training") == {
        "data": "GSM8K train questions",
        "responses written by the target": "yes",
        "rows": "768",
        "tokens in the rows": "98,765",
        "initial weights": "random weights",
        "optimizer steps": "206",
        "epochs": "2.125",
        "input tokens, as Trainer counts them": "54,321",
        "loss, last logged": "3.142",
        "acceptance length of trained blocks, last logged": "1.75",
        "seed": "42",
        "hardware": "two cores",
        "software": "torch 2.13.0",
        "arguments that differ from their defaults": "below",
        "`learning_rate`": "0.004",
        "`slot_weights`": "decay",
    }
    assert "English only." in card.content.split("## Limits")[1]


def test_metadata_names_target_relation_revision_licence_tags_and_data(config, tmp_path):
    values = {**FULL, "languages": ("en",), "tags": ("dflash", "math")}
    assert reloaded(DraftCard(config=config, **values), tmp_path).data.to_dict() == {
        "base_model": "some-org/some-target",
        "base_model_relation": "adapter",
        "base_model_revision": "0123abc",
        "datasets": ["openai/gsm8k"],
        "language": ["en"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "draft-model", "math"],
    }


def test_a_card_without_facts_says_so_in_every_row_and_its_metadata_invents_nothing(draft, tmp_path):
    card = reloaded(DraftCard(config=draft.config, title="bare"), tmp_path)
    known = {"block size", "target layers read", "draft layers", "hidden and intermediate size", "heads"}
    for heading in ("Measured: generation", "The draft", "Training"):
        rows = rows_in(card.content, heading)
        assert len(rows) >= 13
        assert {name: value for name, value in rows.items() if name not in known | {"mask token"}} == dict.fromkeys(
            rows.keys() - known - {"mask token"}, NOT_RECORDED
        )
    assert rows_in(card.content, "The draft")["mask token"] == "96, text not recorded"
    assert "| not recorded |" + " not recorded |" * 6 in card.content
    assert "Per-slot picture: not recorded" in card.content
    assert "Further limits: not recorded." in card.content
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert not (tmp_path / PICTURE_NAME).exists()


OPTIONAL_FIELDS = [item.name for item in dataclasses.fields(DraftCard) if item.default is not dataclasses.MISSING]
SHOWN_IN_METADATA_ALONE = {"dataset_ids", "languages", "tags"}
STANDS_IN_FOR_ANOTHER = {"target_folder", "target_license", "last_step"}
HAS_A_PART_OF_ITS_OWN = {"suite"}
MOST_RUNS_HAVE_NONE = {"resumptions"}
UNSEEN_IF_MISSING = SHOWN_IN_METADATA_ALONE | STANDS_IN_FOR_ANOTHER | HAS_A_PART_OF_ITS_OWN | MOST_RUNS_HAVE_NONE


@pytest.mark.parametrize("name", sorted(set(OPTIONAL_FIELDS) - UNSEEN_IF_MISSING))
def test_each_missing_fact_by_itself_prints_not_recorded(name, config):
    empty = next(item.default for item in dataclasses.fields(DraftCard) if item.name == name)
    card = DraftCard(config=config, **{**FULL, name: empty})
    assert NOT_RECORDED in card.render("x.png").content


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Protocol)])
def test_each_missing_fact_of_the_protocol_prints_not_recorded(name, config):
    protocol = dataclasses.replace(FULL["protocol"], **{name: None})
    card = DraftCard(config=config, **{**FULL, "protocol": protocol})
    assert list(rows_in(card.render("x.png").content, "Measured: generation").values()).count(NOT_RECORDED) == 1


def test_no_arguments_are_another_thing_than_unknown_ones(config):
    card = DraftCard(config=config, **{**FULL, "chat_template_kwargs": {}, "training_arguments": {}})
    content = card.render("x.png").content
    assert rows_in(content, "The draft")["chat-template arguments"] == "none"
    assert rows_in(content, "Training")["arguments that differ from their defaults"] == "none"


def test_near_ties_explain_the_responses_that_differ(config):
    summary = dataclasses.replace(SUMMARY, num_near_ties=11, near_tie_gap=0.5)
    rows = rows_in(DraftCard(config=config, **{**FULL, "measured": summary}).render().content, "Measured: generation")
    assert rows["responses identical token by token"] == "4 of 16"
    assert rows["responses that differ first at a near-tie (logits at most 0.5 apart)"] == "11 of the other 12"


def test_what_is_no_number_is_not_printed_as_one(config, tmp_path):
    nan, nothing = float("nan"), {"acceptance_length": None, "slot_acceptance": [None, None, None]}
    summary = dataclasses.replace(SUMMARY, speed_up=float("inf"), **nothing)
    evaluation = Evaluation(1, None, nan, nan, None, None, (nan, 0.5))
    values = {**FULL, "measured": summary, "evaluations": (evaluation,), "train_loss": nan}
    content = reloaded(DraftCard(config=config, **values), tmp_path).content
    undefined = "undefined (nothing was counted)"
    rows = rows_in(content, "Measured: generation")
    assert rows["acceptance length"] == f"{undefined} of 4"
    assert rows["speed-up (median over the prompts)"] == "infinite×"
    assert rows["slots 1 … k all accepted"] == f"1: {undefined}, 2: {undefined}, 3: {undefined}"
    assert (
        f"| held-out rows | 1 | {undefined} | {undefined} | {NOT_RECORDED} | {NOT_RECORDED} | 1: {undefined}"
        in content
    )
    assert rows_in(content, "Training")["loss, last logged"] == undefined
    assert DraftCard.from_folder(tmp_path, config).measured.num_identical == 4  # NaN comes back, too


def test_hostile_names_break_neither_tables_nor_metadata_nor_snippets(config, tmp_path):
    hostile = "a | b\n---\n| c: 'd' \"e\" <script>`x` # {{ 7 * 7 }} \\| é"
    values = {
        **FULL,
        "title": hostile,
        "target_id": None,
        "target_folder": hostile,
        "training_data": hostile,
        "mask_token": hostile,
        "license": "yes: [no",
        "languages": ("no",),
        "tags": ("- x: y", "null"),
        "training_arguments": {"optim": hostile},
        "limits": hostile,
        "native_repo": None,
        "serving_repo": None,
    }
    card = reloaded(DraftCard(config=config, **values), tmp_path)
    assert card.data.license == "yes: [no"
    assert card.data.language == ["no"]
    assert card.data.tags[-2:] == ["- x: y", "null"]
    one_line = "a \\| b --- \\| c: 'd' \"e\" &lt;script>`x` # {{ 7 * 7 }} \\\\\\| é"
    assert rows_in(card.content, "Training")["data"] == one_line
    assert rows_in(card.content, "Training")["`optim`"] == one_line
    assert rows_in(card.content, "The draft")["mask token"] == f"96 ({one_line})"
    assert "<script>" not in re.sub(r"```.*?```|`` .*? ``", "", card.content, flags=re.DOTALL)
    blocks = re.findall(r"```(python|bash)\n(.*?)\n```", card.content.replace("\\\n", ""), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "python", "bash", "bash", "bash"]
    for _, block in blocks[:2]:
        names = re.findall(r"from_pretrained\((\".*?(?<!\\)\")[,)]", block)
        assert {json.loads(name) for name in names} == {hostile, f"path/to/{hostile}"}
        compile(block, "snippet", "exec")
    convert, vllm, sglang = (shlex.split(block) for _, block in blocks[2:])
    folder = convert[3]
    assert convert == ["dflash-hf", "convert", hostile, folder, "--layout", "serving"]
    assert vllm[2] == f"path/to/{hostile}"
    assert json.loads(vllm[4]) == {"method": "dflash", "model": folder, "num_speculative_tokens": 3}
    assert sglang[4:] == [f"path/to/{hostile}", *sglang[5:-1], folder]


def test_code_spans_hold_any_backticks():
    assert inline_code("a") == "`a`"
    assert inline_code("a`b\n``c") == "``` a`b ``c ```"


def test_serving_commands_name_the_serving_repository_and_need_no_conversion(config):
    content = DraftCard(config=config, **FULL).render().content
    blocks = re.findall(r"```bash\n(.*?)\n```", content.replace("\\\n", ""), flags=re.DOTALL)
    assert [shlex.split(block) for block in blocks] == [
        ["vllm", "serve", "some-org/some-target", "--speculative-config",
         '{"method": "dflash", "model": "me/my-draft-DFlash", "num_speculative_tokens": 3}'],
        ["python", "-m", "sglang.launch_server", "--model-path", "some-org/some-target",
         "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "me/my-draft-DFlash"],
    ]  # fmt: skip
    assert "`me/my-draft-DFlash`" in content


@pytest.mark.parametrize(
    ("native", "folder"),
    [("me/mine", "mine-DFlash"), ("me/mine-DFlash", "mine-DFlash-serving"), (None, "my-draft-DFlash")],
)
def test_without_a_serving_repository_the_card_says_how_to_make_its_layout(config, native, folder):
    content = DraftCard(config=config, **{**FULL, "native_repo": native, "serving_repo": None}).render().content
    assert f"\ndflash-hf convert {native or 'my-draft'} {folder} --layout serving\n" in content
    assert f'"model": "{folder}"' in content
    assert "dflash" in folder.lower()  # which is how vLLM knows the method


def test_a_local_target_gives_its_name_alone_and_is_no_base_model(target, tmp_path):
    home = tmp_path / "home" / "alice" / "models" / "mine"
    target.save_pretrained(home)
    (home / "README.md").write_text("---\nlicense: llama3.2\n---\n\n# Mine\n")
    draft = make_draft(AutoModelForCausalLM.from_pretrained(home))
    assert draft.config.target_name_or_path == str(home)
    card = reloaded(DraftCard.from_config(draft.config, "d"), tmp_path / "card")
    assert "alice" not in str(card) + (tmp_path / "card" / FACTS_NAME).read_text()
    assert 'from_pretrained("path/to/mine")' in card.content
    rows = rows_in(card.content, "The draft")
    assert rows["target"] == "local folder mine"
    assert rows["licence"] == "llama3.2, that of the target's card"
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags", "license"}
    assert card.data.license == "llama3.2"
    told = DraftCard.from_config(draft.config, "d", license="mit")
    assert told.metadata().license == "mit"


def test_a_target_card_without_metadata_gives_no_licence(target, tmp_path):
    target.save_pretrained(tmp_path / "mine")
    for content in ("# Mine\n", "---\n[1, 2\n---\n", "---\nlicense: [a, b]\n---\n"):
        (tmp_path / "mine" / "README.md").write_text(content)
        config = make_draft(AutoModelForCausalLM.from_pretrained(tmp_path / "mine")).config
        assert DraftCard.from_config(config, "d").target_license is None


def test_hub_names_are_told_from_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_id_or_folder("Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", None)
    assert hub_id_or_folder("org/model") == (None, "model")
    assert hub_id_or_folder("/a/b/c") == (None, "c")
    assert hub_id_or_folder("./b/c/") == (None, "c")
    assert hub_id_or_folder("mine") == (None, "mine")
    assert hub_id_or_folder(None) == hub_id_or_folder("") == (None, None)


def test_facts_written_beside_the_card_give_it_back_with_its_numbers(draft, config, tmp_path):
    card = DraftCard(config=config, **FULL)
    draft.save_pretrained(tmp_path)
    assert write_model_card(tmp_path, card)
    first = (tmp_path / "README.md").read_text()
    again = DraftCard.from_folder(tmp_path)
    assert again.measured == SUMMARY
    assert again.protocol == FULL["protocol"]
    assert write_model_card(tmp_path, again)
    assert (tmp_path / "README.md").read_text() == first
    pushed = dataclasses.replace(again, native_repo="else/where")
    assert write_model_card(tmp_path, pushed)
    content = ModelCard.load(tmp_path / "README.md").content
    assert rows_in(content, "Measured: generation")["acceptance length"] == "1.82 of 4"
    assert 'from_pretrained("else/where"' in content


def test_a_folder_without_facts_gives_configuration_and_parameters(draft, tmp_path):
    draft.save_pretrained(tmp_path / "some-draft", max_shard_size="20KB")
    assert len(list((tmp_path / "some-draft").glob("*.safetensors"))) > 1
    card = DraftCard.from_folder(tmp_path / "some-draft")
    assert card.title == "some-draft"
    assert card.num_parameters == sum(parameter.numel() for parameter in draft.parameters())
    assert card.config.target_layer_ids == [0, 2]
    assert card.steps is card.measured is card.training_data is None


def test_a_serving_folder_is_read_too(draft, tmp_path):
    draft.config.target_name_or_path = "some-org/some-target"
    folder = save_in_layout(draft, tmp_path / "x-DFlash", "serving")
    card = DraftCard.from_folder(folder)
    assert card.config.target_layer_ids == [0, 2]
    assert card.config.block_size == 4
    assert card.num_parameters == sum(parameter.numel() for parameter in draft.parameters())


def test_folders_and_facts_that_cannot_be_read_are_named(draft, tmp_path):
    with pytest.raises(OSError, match=r"holds no config\.json"):
        DraftCard.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="no DFlash draft"):
        DraftCard.from_folder(tmp_path)
    draft.save_pretrained(tmp_path)
    for content, kind, words in (
        ("{", OSError, "not valid JSON"),
        ("[]", OSError, "must hold a JSON object, but it holds a list"),
        ('{"title": "x", "fame": 1}', ValueError, "does not hold the facts.*fame"),
        ("{}", ValueError, "does not hold the facts.*title"),
        ('{"title": "x", "measured": {"accept_len": 1}}', ValueError, "does not hold the facts.*num_prompts"),
    ):
        (tmp_path / FACTS_NAME).write_text(content)
        with pytest.raises(kind, match=words):
            DraftCard.from_folder(tmp_path)


def test_half_written_facts_end_no_run(target, tmp_path, caplog):
    trainer = make_trainer(target, tmp_path, max_steps=1)
    (tmp_path / "out" / FACTS_NAME).write_text('{"title": "x')
    with caplog.at_level(logging.WARNING, logger="dflash_hf.hub.trainer"):
        trainer.create_model_card()
    assert "The facts of an earlier card cannot be read and are replaced" in caplog.text
    assert DraftCard.from_folder(tmp_path / "out", trainer.draft.config).title == "out"


def test_an_edited_or_foreign_readme_is_kept_and_its_own_is_replaced(config, tmp_path, caplog):
    path = tmp_path / "README.md"
    card = DraftCard(config=config, **{**FULL, "measured": None, "evaluations": ()})  # no picture to draw
    later = dataclasses.replace(card, steps=999)
    assert write_model_card(tmp_path, card)
    written = path.read_text()
    assert is_own_card(written)
    assert write_model_card(tmp_path, later)
    assert "| optimizer steps | 999" in path.read_text()
    for edited in (
        written.replace("# my-draft", "# My wonderful draft"),
        written + "\nMore.\n",
        written.replace("license: mit", "license: apache-2.0"),
        "# Written by hand\n",
        "",
    ):
        path.write_text(edited)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dflash_hf.hub.model_card"):
            assert not write_model_card(tmp_path, later)
        assert path.read_text() == edited
        assert "so it is kept. Remove or rename it" in caplog.text
        assert json.loads((tmp_path / FACTS_NAME).read_text())["steps"] == 999
    assert write_model_card(tmp_path, later, overwrite=True)
    assert is_own_card(path.read_text())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as git checks it out on Windows
    assert write_model_card(tmp_path, card)


def test_the_picture_shows_generation_or_else_held_out_rows_and_goes_when_there_is_none(config, tmp_path):
    card = DraftCard(config=config, **FULL)
    assert f"![For each drafted slot: slots 1 … k accepted]({PICTURE_NAME})" in reloaded(card, tmp_path).content
    generation = (tmp_path / PICTURE_NAME).read_bytes()
    content = reloaded(dataclasses.replace(card, measured=None), tmp_path).content
    assert f"![For each drafted slot: accuracy of slot k]({PICTURE_NAME})" in content
    assert (tmp_path / PICTURE_NAME).read_bytes() != generation
    bare = dataclasses.replace(card, measured=None, evaluations=())
    assert PICTURE_NAME not in reloaded(bare, tmp_path).content
    assert not (tmp_path / PICTURE_NAME).exists()


def test_without_matplotlib_the_card_says_so_in_words(config, tmp_path, monkeypatch):
    write_model_card(tmp_path, DraftCard(config=config, **FULL))
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    content = reloaded(DraftCard(config=config, **FULL), tmp_path).content
    assert "Per-slot picture: matplotlib was not installed when this card was written" in content
    assert not (tmp_path / PICTURE_NAME).exists()


CARDS = ROOT / "model_cards"
PUBLISHED = sorted(facts.parent for facts in CARDS.glob(f"*/{FACTS_NAME}"))
OF_THE_DEMO = CARDS / "SmolLM2-135M-Instruct-DFlash-demo"
OF_VERSION_0_1_0 = Path(__file__).parent / "data" / "card_0.1.0"
EVALUATED = [folder for folder in PUBLISHED if folder != OF_THE_DEMO]


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_cards_are_what_their_facts_render_to(folder):
    """After a change of the template, write each README.md again from `DraftCard.from_folder(folder).render(...)`."""
    card = DraftCard.from_folder(folder)
    pictures = [PICTURE_NAME, *(card.suite.pictures if card.suite else ())]
    assert (folder / "README.md").read_text() == str(card.render(pictures[0], None, pictures[1:]))
    assert all((folder / name).is_file() for name in pictures)


def test_facts_that_version_0_1_0_wrote_are_read_and_written_under_their_present_names(tmp_path):
    old = json.loads((OF_VERSION_0_1_0 / FACTS_NAME).read_text())
    card = DraftCard.from_folder(OF_VERSION_0_1_0)
    evaluation = card.evaluations[0]
    assert card.train_acceptance_length == old["train_accept_len"] == 2.6875
    assert evaluation.acceptance_length == old["evaluations"][0]["accept_len"] == 2.3251953125
    assert evaluation.serving_acceptance_length == old["evaluations"][0]["serving_accept_len"] == 2.0858447488584475
    assert write_model_card(tmp_path, card)
    new = json.loads((tmp_path / FACTS_NAME).read_text())
    assert new["train_acceptance_length"] == old["train_accept_len"]
    assert "accept_len" not in str(new["evaluations"])
    assert DraftCard.from_facts(new, card.config) == DraftCard.from_facts(old, card.config)


def test_the_card_of_the_demo_has_the_numbers_of_its_results():
    card, results = DraftCard.from_folder(OF_THE_DEMO), json.loads((OF_THE_DEMO / "results.json").read_text())
    assert card.measured == Summary.from_dict(results["summary"])
    environment = {"hardware": card.protocol.hardware, "software": card.protocol.software}
    assert environment == results["environment"]
    assert (card.steps, card.epochs) == (results["training"]["steps"], results["training"]["epochs"])


@pytest.mark.parametrize("folder", EVALUATED, ids=lambda folder: folder.name)
def test_the_card_of_an_evaluated_draft_has_the_numbers_of_its_results(folder):
    card, results = DraftCard.from_folder(folder), json.loads((folder / "results.json").read_text())
    names = ("accept_len", "speed_up", "identical_share")  # version 0.1.0 wrote them
    numbers = [tuple(each[name] for name in names) for each in (*results["results"], *results["means"])]
    assert [(row.acceptance_length, row.speed_up, row.identical_share) for row in card.suite.rows] == numbers
    assert results["is_complete"]
    bare = json.loads((folder / "gsm8k-test-bare.json").read_text())
    (result,) = bare["results"]
    measured = card.measured.as_dict()
    assert measured["acceptance_length"] == result["accept_len"]
    for name in ("num_prompts", "slot_acceptance", "speed_up"):
        assert measured[name] == result[name]
    assert measured["num_identical"] == sum(pair["num_identical"] for pair in bare["pairs"])
    assert card.protocol.hardware == bare["runs"][0]["hardware"]


# ---- snippets ----


def snippets(content: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", content, flags=re.DOTALL)


@pytest.mark.spawns
def test_the_transformers_snippets_run_against_the_saved_folder(saved_target, tmp_path, capsys):
    """The first snippet runs in this process, and the second in one that cannot import the package."""
    target = AutoModelForCausalLM.from_pretrained(saved_target(num_hidden_layers=8))
    draft = make_draft(target, mask_token_id=270, target_name_or_path="some-org/some-target")
    folder = tmp_path / "saved"
    draft.save_pretrained(folder)
    facts = {"native_repo": "me/my-draft", "chat_template_kwargs": {"enable_thinking": False}}
    card = reloaded(DraftCard.from_config(draft.config, "my-draft", **facts), folder)
    installed, alone = (
        block.replace("some-org/some-target", target.name_or_path).replace("me/my-draft", str(folder))
        for block in snippets(card.content)
    )
    names: dict = {}
    exec(compile(installed, "card", "exec"), names)
    assert torch.equal(names["output"], names["target"].generate(**names["inputs"], max_new_tokens=128))
    assert capsys.readouterr().out  # the answer
    script = "import sys\nsys.modules['dflash_hf'] = None\n" + alone
    script += "print()\nprint(output.tolist())\nprint(type(draft).__module__)"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    *_, tokens, module = result.stdout.splitlines()
    assert module.startswith("transformers_modules.")
    assert json.loads(tokens) == names["output"].tolist()


def test_a_target_without_a_chat_template_is_asked_in_plain_text(saved_target, tokenizer, tmp_path, capsys):
    target = AutoModelForCausalLM.from_pretrained(saved_target(num_hidden_layers=8))
    tokenizer.chat_template = None
    (Path(target.name_or_path) / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(target.name_or_path)
    draft = make_draft(target, mask_token_id=270)
    draft.save_pretrained(tmp_path / "saved")
    card = DraftCard.from_config(draft.config, str(tmp_path / "saved"), has_chat_template=False)
    content = card.render().content
    assert "apply_chat_template" not in content
    exec(compile(snippets(content)[0].replace("path/to/target", target.name_or_path), "card", "exec"), {})
    assert capsys.readouterr().out


# ---- training ----


def test_every_checkpoint_has_a_card_with_the_numbers_of_its_step(target, tmp_path):
    rows = rows_of(target)
    told = {"dataset_description": "rows of the target", "answers_by_target": True, "draft_license": "mit"}
    schedule = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(target, tmp_path, rows=rows, eval_rows=rows[:2], **told, **schedule)
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}
    trained = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    contents = {}
    for step in (2, 4):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        card = contents[step] = ModelCard.load(folder / "README.md").content
        metrics = logged[step]
        line = next(line for line in card.splitlines() if line.startswith(f"| held-out rows | {step} |"))
        assert line.startswith(
            f"| held-out rows | {step} | {metrics['eval_loss']:.3f} | {metrics['eval_accept_len']:.2f} | "
            f"{metrics['eval_serving_accept_len']:.2f} | not recorded | 1: {metrics['eval_slot_accuracy_1']:.0%}, "
        )
        rows = rows_in(card, "Training")
        assert rows["optimizer steps"] == str(step)
        assert rows["loss, last logged"] == f"{trained[step]['loss']:.3f}"
        assert rows["acceptance length of trained blocks, last logged"] == f"{trained[step]['accept_len']:.2f}"
        assert rows["data"] == "rows of the target"
        assert rows["responses written by the target"] == "yes"
        assert rows["rows"] == "4"
        assert rows["tokens in the rows"] == str(sum(len(row["input_ids"]) for row in trainer.train_dataset))
        assert rows["initial weights"] == "random weights"
        assert rows["seed"] == "42"
        assert "torch" in rows["software"]
        assert rows["`learning_rate`"] == "0.01"
        assert rows["`slot_weights`"] == "decay"
        assert rows["`use_muon`"] == "False"
        assert "`output_dir`" not in rows
        assert str(tmp_path) not in (folder / "README.md").read_text() + (folder / FACTS_NAME).read_text()
        assert (folder / PICTURE_NAME).stat().st_size > 5000
        assert DraftCard.from_folder(folder).steps == step
    assert contents[2] != contents[4]
    # after training: the numbers of the last step, and nothing of a folder that was not asked for
    assert not (tmp_path / "out" / "README.md").exists()
    trainer.save_model(str(tmp_path / "final"))
    final = ModelCard.load(tmp_path / "final" / "README.md")
    assert final.data.license == "mit"
    assert rows_in(final.content, "Training")["optimizer steps"] == "4"


def test_the_card_of_the_best_weights_names_their_step_and_a_resumed_run_has_the_same_card(target, tmp_path):
    rows = rows_of(target)
    schedule = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(target, tmp_path, rows=rows, eval_rows=rows[:2], **schedule, **best)
    trainer.train()
    assert trainer.state.best_global_step == 2  # the higher loss, so that the best is not the last
    whole = (tmp_path / "out" / "checkpoint-4" / "README.md").read_text()
    assert rows_in(whole, "Training")["optimizer steps"] == "4"
    trainer.save_model()
    found = DraftCard.from_folder(tmp_path / "out")
    assert (found.steps, found.last_step) == (2, 4)
    assert [evaluation.step for evaluation in found.evaluations] == [2]
    trainer.evaluate()
    assert trainer.draft_card().evaluations == found.evaluations  # the same weights, evaluated once more
    again = make_trainer(target, tmp_path, rows=rows, eval_rows=rows[:2], **schedule, **best)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert (tmp_path / "out" / "checkpoint-4" / "README.md").read_text() == whole


def test_the_card_after_the_command_names_data_arguments_and_evaluation(saved_target, tmp_path, monkeypatch):
    rows, out = tmp_path / "some_rows.jsonl", tmp_path / "draft"
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2, as ever."}]
    rows.write_text((json.dumps({"messages": messages}) + "\n") * 5)
    arguments = (
        f"--max_steps 2 --draft_layers 1 --num_target_layers 2 --block_size 4 --learning_rate 1e-3 --eval_rows 1 \
        --answers_by_target True --draft_license mit --target {saved_target()} --dataset {rows} --output_dir {out}"
    )
    monkeypatch.setattr(sys, "argv", ["dflash-hf", "train", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    written = (out / "README.md").read_text()
    assert is_own_card(written)
    assert str(tmp_path) not in written + (out / FACTS_NAME).read_text()
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "mit"
    assert card.data.get("base_model") is card.data.get("datasets") is None
    training = rows_in(card.content, "Training")
    assert training["data"] == "the file some_rows.jsonl"
    assert training["responses written by the target"] == "yes"
    assert training["rows"] == "4"
    assert {name: value for name, value in training.items() if name.startswith("`")} == {
        "`max_steps`": "2",
        "`learning_rate`": "0.001",
        "`bf16`": "True",
    }
    draft = rows_in(card.content, "The draft")
    assert draft["target"] == "local folder target"
    assert draft["chat template"] == "yes"
    assert draft["chat-template arguments"] == "none"
    assert draft["mask token"] == "261 (an embedding row that no token uses)"
    assert "| held-out rows | 2 | " in card.content  # evaluated after the draft was saved


def test_rows_are_named_without_their_path(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "rows.jsonl").write_text("")
    named = {
        str(tmp_path / "secret" / "rows.jsonl"): "the file rows.jsonl",
        str(tmp_path / "secret"): "secret, split train",
        "some-org/some-data": "some-org/some-data, main, split train",
    }
    for name, words in named.items():
        config = "main" if words.count(",") == 2 else None
        assert describe_rows(DraftAndDataArguments(dataset=name, dataset_config=config)) == words


def test_the_mask_token_is_named_by_its_text_or_as_an_unused_row(tokenizer):
    assert mask_token_in_words(tokenizer, tokenizer.pad_token_id) == "<|pad|>"
    assert mask_token_in_words(tokenizer, 270) == "an embedding row that no token uses"


def test_several_processes_are_told(target, tmp_path, monkeypatch):
    trainer = make_trainer(target, tmp_path)
    trainer.state.global_step = 1
    one = trainer.draft_card().hardware
    monkeypatch.setattr(DFlashTrainingArguments, "world_size", 2)
    assert trainer.draft_card().hardware == f"2 processes, each with {one}"


def test_create_model_card_takes_what_trainer_takes(target, tmp_path, caplog):
    trainer = make_trainer(target, tmp_path, rows=rows_of(target, count=2))
    trainer.create_model_card(
        language="en",
        license="mit",
        tags="mine",
        model_name="A name",
        finetuned_from="some-org/some-target",
        dataset_tags=["some-org/data"],
        dataset="Some data",
        dataset_args="split train",
        serving_repo="me/x-DFlash",
        tasks="text-generation",
    )
    assert "tasks='text-generation' is not used" in caplog.text
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "base_model": "some-org/some-target",
        "base_model_relation": "adapter",
        "datasets": ["some-org/data"],
        "language": ["en"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding", "draft-model", "mine"],
    }
    assert "# A name\n" in card.content
    rows = rows_in(card.content, "Training")
    assert rows["data"] == "Some data, split train"
    assert rows["optimizer steps"] == rows["seed"] == rows["initial weights"] == NOT_RECORDED  # nothing was trained
    assert "`me/x-DFlash`" in card.content


@pytest.mark.parametrize("logging_steps", [1, 500])
def test_measurements_and_words_outlive_the_next_save_of_the_same_weights_alone(target, tmp_path, logging_steps):
    trainer = make_trainer(target, tmp_path, max_steps=2, logging_steps=logging_steps)
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "out"
    added = {"measured": SUMMARY, "protocol": FULL["protocol"], "limits": "Tiny.", "serving_repo": "me/x-DFlash"}
    write_model_card(folder, dataclasses.replace(DraftCard.from_folder(folder), **added))
    trainer.create_model_card(license="mit")
    again = DraftCard.from_folder(folder)
    assert {name: getattr(again, name) for name in added} == added
    trainer.save_model()
    again = DraftCard.from_folder(folder)
    assert {name: getattr(again, name) for name in added} == added
    assert again.license == "mit"
    other = make_trainer(target, tmp_path, max_steps=2, logging_steps=logging_steps, learning_rate=5e-3)
    other.train()
    other.save_model()
    card = DraftCard.from_folder(folder)
    assert card.measured is card.limits is card.license is None
    assert card.protocol == Protocol()


def test_only_the_main_process_writes_and_an_edited_card_of_a_run_is_kept(target, tmp_path, monkeypatch):
    trainer = make_trainer(target, tmp_path, max_steps=1)
    out = tmp_path / "out"
    trainer.train()
    trainer.save_model()
    (out / "README.md").write_text("# Mine\n")
    trainer.create_model_card()
    trainer.save_model()
    assert (out / "README.md").read_text() == "# Mine\n"
    (out / "README.md").unlink()
    (out / FACTS_NAME).unlink()
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    trainer.create_model_card()
    trainer.save_model()
    writer = ModelCardWriter(trainer.draft_card)
    (out / "checkpoint-1").mkdir(exist_ok=True)
    trainer.state.is_world_process_zero = False
    writer.on_train_begin(trainer.args, trainer.state, trainer.control)
    writer.on_save(trainer.args, trainer.state, trainer.control)
    writer.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert not list(out.rglob("README.md")) + list(out.rglob(FACTS_NAME))


def test_a_checkpoint_that_is_pushed_while_training_has_its_card_in_time(target, tmp_path):
    """In transformers 5.24 Trainer uploads a checkpoint before it calls `on_save`."""
    trainer = make_trainer(target, tmp_path, max_steps=1)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    trainer.state.global_step = 1
    writer = ModelCardWriter(trainer.draft_card)
    writer.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert not list(tmp_path.rglob("README.md"))  # not training: create_model_card follows
    writer.on_train_begin(trainer.args, trainer.state, trainer.control)
    writer.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert is_own_card((checkpoint / "README.md").read_text())


def state_of(history: list[dict], **overrides) -> SimpleNamespace:
    values = {
        "log_history": history,
        "global_step": max((entry["step"] for entry in history), default=0),
        "epoch": 1.5,
        "num_input_tokens_seen": 0,
        "best_model_checkpoint": None,
        "best_global_step": None,
    }
    return SimpleNamespace(**{**values, **overrides})


def evaluated(step: int, length: float, prefix: str = "eval") -> dict:
    return {f"{prefix}_accept_len": length, f"{prefix}_loss": 9 - length, f"{prefix}_runtime": 1.0, "step": step}


def test_facts_of_a_run_are_those_of_the_weights_it_has(tmp_path):
    history = [
        {"loss": 5.0, "accept_len": 1.1, "step": 10},
        evaluated(10, 1.3),
        {"loss": 4.0, "accept_len": 1.4, "step": 20},
        evaluated(20, 1.2),
        {"train_runtime": 1.0, "train_loss": 4.5, "step": 20},
        evaluated(20, 1.31),
    ]
    plain = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    facts = training_facts(plain, state_of(history))
    assert (facts["steps"], facts["last_step"], facts["train_loss"], facts["tokens_seen"]) == (20, 20, 4.0, None)
    assert [(found.step, found.acceptance_length) for found in facts["evaluations"]] == [(20, 1.31)]
    best = DFlashTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, load_best_model_at_end=True, eval_strategy="steps", eval_steps=500
    )
    kept = {"best_model_checkpoint": "checkpoint-10", "best_global_step": 10}
    facts = training_facts(best, state_of(history, **kept))
    assert (facts["steps"], facts["last_step"], facts["train_loss"]) == (10, 20, 5.0)
    assert [(found.step, found.acceptance_length) for found in facts["evaluations"]] == [
        (10, 1.31)
    ]  # of the best weights
    facts = training_facts(best, state_of(history[:4], **kept))  # the run goes on
    assert (facts["steps"], facts["train_loss"]) == (20, 4.0)
    assert [found.step for found in facts["evaluations"]] == [20, 10]
    assert training_facts(plain, state_of([evaluated(0, 1.5)])) == {
        "evaluations": (Evaluation(0, None, 7.5, 1.5, None, None, []),)
    }


def test_the_best_step_of_a_run_is_told_beside_its_length(config):
    card = DraftCard(config=config, **{**FULL, "steps": 10, "last_step": 20})
    assert rows_in(card.render("x").content, "Training")["optimizer steps"] == "10 (the best; the run had 20)"


def test_each_named_evaluation_set_has_its_last_and_its_best_row(tmp_path):
    history = [
        evaluated(1, 1.5, "eval_serving"),
        evaluated(1, 2.5, "eval_b"),
        evaluated(2, 1.4, "eval_serving"),
        evaluated(2, 2.6, "eval_b"),
    ]
    args = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    found = training_facts(args, state_of(history))["evaluations"]
    assert [(one.name, one.step, one.acceptance_length) for one in found] == [
        ("serving", 2, 1.4),
        ("serving", 1, 1.5),
        ("b", 2, 2.6),
    ]


def test_the_best_evaluation_is_judged_when_serving_and_never_by_nan():
    nan = float("nan")
    first = Evaluation(1, acceptance_length=3.0, serving_acceptance_length=1.2)
    second = Evaluation(2, acceptance_length=2.0, serving_acceptance_length=1.3)
    third = Evaluation(3, acceptance_length=nan, serving_acceptance_length=nan)
    assert last_and_best([first, second, third]) == (third, second)
    assert last_and_best([third]) == (third,)
    assert last_and_best([]) == ()


def test_arguments_that_differ_are_told_and_folders_and_reports_are_not(tmp_path):
    args = DFlashTrainingArguments(
        output_dir=str(tmp_path / "secret"),
        use_cpu=True,
        bf16=True,
        lr_scheduler_type="linear",
        lr_scheduler_kwargs={"x": 1},
        max_train_minutes=5,
        cache_target_states="disk",
        eval_steps=7,
        save_steps=3,
        hub_token="hf_secret",
        hub_model_id="me/secret",
        run_name="secret",
        report_to=[],
        seed=3,
        dataset_description="secret",
        max_grad_norm=None,
    )
    assert changed_arguments(args) == {
        "bf16": True,
        "lr_scheduler_type": "linear",
        "lr_scheduler_kwargs": {"x": 1},
        "max_train_minutes": 5,
        "cache_target_states": "disk",
        "max_grad_norm": None,
    }
    assert changed_arguments(DFlashTrainingArguments(output_dir="x")) == {}
    adamw = DFlashTrainingArguments(output_dir="x", use_muon=False, use_cpu=True)
    assert changed_arguments(adamw) == {"use_muon": False}


def test_chat_template_arguments_are_known_where_the_trainer_renders_the_rows(target):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert rows_are_text(rows)
    assert rows_are_text(datasets.Dataset.from_list(rows))
    assert not rows_are_text(rows_of(target, count=1))
    assert rows_are_text([{"input_ids": [1], "messages": [], "chat_template_kwargs": {}}])
    assert not rows_are_text(None)
    assert not rows_are_text([])
    assert not rows_are_text(datasets.IterableDataset.from_generator(lambda: iter([])))


def test_arguments_for_the_card_have_help():
    for name in ("dataset_description", "answers_by_target", "draft_license"):
        assert "model card" in DFlashTrainingArguments.__dataclass_fields__[name].metadata["help"]
