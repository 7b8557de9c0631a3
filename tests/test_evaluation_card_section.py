"""The section of a model card with the results of `dflash-hf eval`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dflash_hf import DraftCard, write_model_card
from dflash_hf.evaluation.card_section import MeasuredSuite, SuiteRow
from dflash_hf.hub.push import draft_files

SUITE = MeasuredSuite(
    rows=(
        SuiteRow("GSM8K", "greedy, batch 1", 16, 16, 2.345, (2.1, 2.6), 1.512, 0.3125),
        SuiteRow("MT-Bench", "T = 1, batch 1", 16, 32, None, None, 0.9, None),
    ),
    command="dflash-hf eval --draft my-draft",
    block_size=4,
    verified_slots="4",
    max_new_tokens=160,
    dtype="bfloat16",
    seed=0,
    machines=("one GPU; torch 2.14",),
    note="Several processes.",
    pictures={"eval_slots.png": "Slots", "eval_speed.png": "Speed"},
)


def section(content: str) -> str:
    return content.split("\n## Measured: suite\n")[1].split("\n## ")[0]


def test_the_table_has_a_row_for_each_set_and_setting_and_says_what_the_numbers_are(draft):
    content = DraftCard(config=draft.config, title="my-draft", suite=SUITE).render().content
    part = section(content)
    assert "| GSM8K | greedy, batch 1 | 2.35 | 2.10 – 2.60 | 1.51× | 31% | 16 |" in part
    assert "| MT-Bench | T = 1, batch 1 | – | – | 0.90× | – | 16 (32 turns) |" in part
    for words in ("bonus token counts", "4 is perfect", "160 new tokens", "bfloat16", "one GPU; torch 2.14",
                  "**Several processes.**", "`dflash-hf eval --draft my-draft`"):  # fmt: skip
        assert words in part
    assert "![" not in part
    assert content.index("## Measured: generation") < content.index("## Measured: suite") < content.index("held-out")


def test_only_pictures_that_are_there_are_shown_and_they_are_shared_with_the_card(draft, tmp_path):
    draft.save_pretrained(tmp_path)
    (tmp_path / "eval_slots.png").write_bytes(b"png")
    assert write_model_card(tmp_path, DraftCard(config=draft.config, title="my-draft", suite=SUITE))
    part = section((tmp_path / "README.md").read_text())
    assert "![Slots](eval_slots.png)" in part
    assert "eval_speed.png" not in part
    assert "eval_slots.png" in draft_files(tmp_path)


def test_the_facts_come_back_and_a_card_without_a_suite_has_no_such_part(draft, tmp_path):
    card = DraftCard(config=draft.config, title="my-draft", suite=SUITE)
    facts = json.loads(json.dumps(card.as_facts()))
    again = DraftCard.from_facts(facts, draft.config)
    assert again.render().content == card.render().content
    assert again.suite.rows[1] == SUITE.rows[1]
    for missing in (dataclasses.replace(card, suite=None), DraftCard.from_facts({"title": "x"}, draft.config)):
        assert "Measured: suite" not in missing.render().content


def test_facts_of_a_suite_that_are_not_ours_are_refused(draft):
    for suite in ({"rows": [{"name": "GSM8K"}]}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="does not hold the facts of a draft's card"):
            DraftCard.from_facts({"title": "x", "suite": suite}, draft.config)


def test_facts_of_version_0_1_0_make_the_same_card(draft):
    facts = json.loads(json.dumps(DraftCard(config=draft.config, title="my-draft", suite=SUITE).as_facts()))
    new_names = {"accept_len": "acceptance_length", "accept_len_interval": "acceptance_length_interval",
                 "num_answers": "num_responses"}  # fmt: skip
    for row in facts["suite"]["rows"]:
        for old, new in new_names.items():
            row[old] = row.pop(new)
    card = DraftCard.from_facts(facts, draft.config)
    assert card.render().content == DraftCard(config=draft.config, title="my-draft", suite=SUITE).render().content
