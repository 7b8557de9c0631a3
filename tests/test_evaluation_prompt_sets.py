"""Prompt sets of `dflash-hf eval`: names, files, wording, the draw, and what is refused."""

from __future__ import annotations

import datasets
import pytest
from prompt_files import NAMES, write_prompts

from dflash_hf.evaluation import prompt_sets
from dflash_hf.evaluation.prompt_sets import HUB_PROMPTS, load_prompt_sets


def said(prompt_set) -> list[list[str]]:
    return [[turn[-1]["content"] for turn in conversation.turns] for conversation in prompt_set.conversations]


def test_the_standard_suite_is_five_sets_and_mt_bench_has_two_turns(tmp_path):
    sets = load_prompt_sets(["standard"], folder=write_prompts(tmp_path), limit=3)
    assert [each.name for each in sets] == NAMES
    assert [each.title for each in sets] == ["GSM8K", "MATH-500", "HumanEval", "MBPP", "MT-Bench"]
    assert [len(each.conversations) for each in sets] == [3] * 5
    assert [each.num_turns for each in sets] == [3, 3, 3, 3, 6]
    assert [each.num_available for each in sets] == [5] * 5
    assert {each.source for each in sets} == {f"file {name}.jsonl" for name in NAMES}


def test_a_larger_limit_has_the_same_prompts_and_more_and_a_seed_draws_others(tmp_path):
    folder = write_prompts(tmp_path, ["gsm8k"], count=50)

    def draw(limit: int, seed: int) -> list[list[str]]:
        return said(load_prompt_sets(["gsm8k"], folder=folder, limit=limit, seed=seed)[0])

    assert draw(4, 0) == draw(9, 0)[:4] != draw(4, 1)
    assert len(draw(500, 0)) == 50


def test_single_sets_suites_and_files_of_ones_own_are_joined_and_each_set_is_there_once(tmp_path):
    folder = write_prompts(tmp_path)
    own = tmp_path / "my-questions.jsonl"
    own.write_text('{"prompt": "Why?"}\n{"messages": [{"role": "user", "content": "How?"}]}\n')
    sets = load_prompt_sets(["mbpp", "standard"], [own], folder=folder)
    assert [each.name for each in sets] == ["mbpp", "gsm8k", "math500", "humaneval", "mt-bench", "my-questions"]
    assert sorted(said(sets[-1])) == [["How?"], ["Why?"]]


def test_equal_prompts_have_equal_digests_wherever_they_come_from(tmp_path):
    first, second = (write_prompts(tmp_path / name, ["gsm8k"]) for name in ("a", "b"))
    digests = {load_prompt_sets(["gsm8k"], folder=folder)[0].digest for folder in (first, second)}
    assert len(digests) == 1
    assert load_prompt_sets(["gsm8k"], folder=first, limit=2)[0].digest not in digests


def test_prompts_of_the_hub_are_worded_and_turns_are_left_as_they_are(monkeypatch):
    columns = {
        "openai/gsm8k": {"question": ["1+1?"], "answer": ["2"]},
        "HuggingFaceH4/MATH-500": {"problem": ["Find {x}."]},
        "openai/openai_humaneval": {"prompt": ["\ndef f():\n"], "test": ["assert f()"]},
        "google-research-datasets/mbpp": {"prompt": ["Write it."]},
        "HuggingFaceH4/mt_bench_prompts": {"prompt": [["Tell.", "Again."]]},
    }
    asked = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_dict(columns[name])

    monkeypatch.setattr(prompt_sets, "load_rows", load)
    sets = {each.name: said(each)[0] for each in load_prompt_sets(["standard"])}
    boxed = "\n\nReason step by step, and put the final answer in \\boxed{}."
    assert sets == {
        "gsm8k": ["1+1?" + boxed],
        "math500": ["Find {x}." + boxed],
        "humaneval": [
            "Complete this Python function, and answer with the whole function:\n\n```python\ndef f():\n```"
        ],
        "mbpp": ["Write it."],
        "mt-bench": ["Tell.", "Again."],
    }
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("openai/openai_humaneval", None, "test"),
        ("google-research-datasets/mbpp", "sanitized", "test"),
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    ]
    assert HUB_PROMPTS["gsm8k"].source == "openai/gsm8k, main, test"


def test_an_unknown_suite_is_refused_with_those_that_are_known(tmp_path):
    message = r"--suite 'gsm9k' is not known\. Pass standard, which consists of gsm8k, .* --prompts FILE"
    with pytest.raises(ValueError, match=message):
        load_prompt_sets(["gsm9k"], folder=tmp_path)


def test_a_missing_file_of_the_folder_is_named(tmp_path):
    folder = write_prompts(tmp_path, NAMES[:3])
    with pytest.raises(FileNotFoundError, match=r"no mbpp\.jsonl for the set 'mbpp'"):
        load_prompt_sets(["standard"], folder=folder)


def test_a_set_that_the_hub_does_not_give_says_which_file_would_do(monkeypatch):
    def load(*names: str | None) -> datasets.Dataset:
        raise ConnectionError("no route")

    monkeypatch.setattr(prompt_sets, "load_rows", load)
    with pytest.raises(OSError, match=r"'gsm8k' cannot be read from the Hub \(openai/gsm8k.*no route.*gsm8k\.jsonl"):
        load_prompt_sets(["gsm8k"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["One?"]}\n{"turns": ["  "]}\n', r"'own' \(file own\.jsonl\), row 2: .*must be a text"),
        ('{"turns": ["One?"]}\n{"turns": []}\n', r"row 2: there is no prompt"),
        ('{"answer": "4"}\n', r"row 1: there is no prompt"),
        ("", r"is empty"),
        ("nonsense\n", r"cannot be read as json"),
    ],
)
def test_empty_and_unreadable_prompts_are_refused_with_file_and_row(tmp_path, content, message):
    file = tmp_path / "own.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_prompt_sets([], [file])


def test_a_file_with_the_name_of_a_set_and_nothing_at_all_are_refused(tmp_path):
    folder = write_prompts(tmp_path, ["gsm8k"])
    with pytest.raises(ValueError, match="has the name of another set, 'gsm8k'"):
        load_prompt_sets(["gsm8k"], [folder / "gsm8k.jsonl"], folder=folder)
    with pytest.raises(ValueError, match="nothing to measure"):
        load_prompt_sets([])
