"""Prompts from several sources, by weight and without repeats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_hf.data.prompt_sources import divide, parse_source, sampled_prompts
from dflash_hf.data.prompts import conversation_of_row


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_source_has_its_weight_after_the_last_colon(tmp_path):
    assert parse_source("self:0.25") == ("self", 0.25)
    assert parse_source("org/name") == ("org/name", 1.0)
    assert parse_source("C:\\rows.jsonl") == ("C:\\rows.jsonl", 1.0)
    assert parse_source("http://a:8000/x:2") == ("http://a:8000/x", 2.0)
    odd = write(tmp_path / "rows:2", [])
    assert parse_source(odd) == (odd, 1.0)


@pytest.mark.parametrize("text", ["rows:0", "rows:-1", "rows:nan", "rows:inf"])
def test_a_weight_that_is_not_positive_is_refused(text):
    with pytest.raises(ValueError, match="must be positive"):
        parse_source(text)


@pytest.mark.parametrize("number", [0, 1, 7, 100])
@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.1, 0.2, 0.7], [3, 1e-9]])
def test_parts_are_whole_and_add_up(number, weights):
    parts = divide(number, weights)
    assert sum(parts) == number
    assert all(abs(part - number * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))


def test_prompts_are_sampled_by_seed_without_repeats_across_sources(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"turns": [f"question {index}", "and then?"]} for index in range(9)])
    second = write(tmp_path / "b.jsonl", [{"turns": [f"question {index}", "and then?"]} for index in range(5, 14)])
    known: set[str] = set()
    rows = [*sampled_prompts(first, 6, 0, known), *sampled_prompts(second, 6, 0, known)]
    assert len({conversation_of_row(row).conversation_id for row in rows}) == len(rows) >= 10
    assert [len(conversation_of_row(row).turns) for row in rows] == [2] * len(rows)
    assert {row["source"] for row in rows} == {"a.jsonl", "b.jsonl"}
    assert sampled_prompts(first, 6, 0, set()) == rows[:6]
    assert sampled_prompts(first, 6, 1, set()) != rows[:6]


def test_a_source_with_too_few_prompts_gives_what_it_has_and_says_so(tmp_path, caplog):
    source = write(tmp_path / "a.jsonl", [{"prompt": "1+1?"}, {"prompt": ""}, {"prompt": "1+1?"}])
    assert len(sampled_prompts(source, 3, 0, set())) == 1
    assert "has 1 prompts, and 3 were wanted; 1 of its rows cannot be read" in caplog.text
    with pytest.raises(ValueError, match="no prompt that can be read"):
        sampled_prompts(write(tmp_path / "b.jsonl", [{"prompt": ""}]), 3, 0, set())
