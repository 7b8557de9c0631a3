from __future__ import annotations

import json

import datasets
import pytest

from dflash_hf.data.prompts import Conversation, check_columns, conversation_of_row, read_prompts, sample_rows

HELLO, HI, BYE = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "Hello"}, [[HELLO]]),
        ({"text": "Hello"}, [[HELLO]]),
        ({"turns": ["Hello", "Bye"]}, [[HELLO], [BYE]]),
        ({"messages": [SYSTEM, HELLO, HI, BYE]}, [[SYSTEM, HELLO], [BYE]]),
        ({"messages": [HELLO, BYE]}, [[HELLO], [BYE]]),
        ({"prompt": [SYSTEM, HELLO]}, [[SYSTEM, HELLO]]),
        ({"messages": None, "turns": None, "prompt": "Hello"}, [[HELLO]]),
        ({"messages": [HELLO], "prompt": "Bye"}, [[HELLO]]),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "x"}]}, [[HELLO]]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, HELLO]}, [[SYSTEM, HELLO]]),
    ],
)
def test_prompts_are_found_in_the_columns_people_have_and_answers_of_others_are_left_out(row, turns):
    assert conversation_of_row(row) == Conversation(turns)


def test_a_named_column_is_taken_instead():
    assert conversation_of_row({"prompt": "Bye", "question": "Hello"}, column="question").turns == [[HELLO]]
    assert conversation_of_row({"ask": ["Hello", "Bye"]}, column="ask").turns == [[HELLO], [BYE]]


def test_a_system_prompt_replaces_that_of_the_row():
    other = {"role": "system", "content": "Rhyme."}
    expected = [[{"role": "system", "content": "Be brief."}, HELLO], [BYE]]
    assert conversation_of_row({"messages": [other, HELLO, HI, BYE]}, system_prompt="Be brief.").turns == expected
    assert conversation_of_row({"turns": ["Hello", "Bye"]}, system_prompt="Be brief.").turns == expected


def test_a_conversation_ends_before_the_first_tool_call():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "3"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": [HELLO, call, result, HI, BYE], "tools": tools}
    assert conversation_of_row(row) == Conversation([[HELLO]], tools)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "Hello"}, "there is no prompt. The row needs `messages`"),
        ({"turns": []}, "there is no prompt"),
        ({"prompt": " "}, "must be a text"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a text"),
        ({"messages": [{"content": "x"}]}, "must be a text, or have `role`"),
        ({"turns": [3]}, "a message is 3"),
        ({"messages": [SYSTEM, HI]}, "no message of a user"),
    ],
)
def test_a_row_without_a_prompt_says_what_is_wrong(row, words):
    with pytest.raises(ValueError, match=words):
        conversation_of_row(row)


def test_ids_depend_on_the_content_alone():
    one, two = Conversation([[HELLO]]), Conversation([[dict(reversed(HELLO.items()))]])
    assert one.conversation_id == two.conversation_id
    others = [Conversation([[BYE]]), Conversation([[SYSTEM, HELLO]]), Conversation([[HELLO]], [{"type": "function"}])]
    assert len({one.conversation_id, *(other.conversation_id for other in others)}) == 4


def test_a_larger_limit_draws_the_same_rows_and_more():
    rows = datasets.Dataset.from_dict({"prompt": [str(number) for number in range(50)]})
    few, many = sample_rows(rows, 5, 3)["prompt"][:], sample_rows(rows, 9, 3)["prompt"][:]
    assert many[:5] == few
    assert len(set(many)) == 9
    assert sample_rows(rows, 5, 4)["prompt"][:] != few
    assert sample_rows(rows, None, 3) is rows
    assert len(sample_rows(rows, 99, 3)) == 50
    with pytest.raises(ValueError, match="limit=0"):
        sample_rows(rows, 0, 3)


def test_columns_that_hold_no_prompt_are_refused_before_any_row_is_asked():
    rows = datasets.Dataset.from_dict({"question": ["a"]})
    check_columns(rows, "question")
    with pytest.raises(ValueError, match=r"question, of which none is messages.*Name the column"):
        check_columns(rows, None)
    with pytest.raises(ValueError, match=r"no column 'ask'\. Name one of"):
        check_columns(rows, "ask")
    with pytest.raises(ValueError, match="empty"):
        check_columns(datasets.Dataset.from_dict({"prompt": []}), None)


def test_bad_prompt_files_name_the_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_prompts(path)
    path.write_text('{"question": "a"}\n')
    with pytest.raises(ValueError, match="line 1: there is no prompt"):
        read_prompts(path)
    path.write_text("3\n")
    with pytest.raises(ValueError, match="line 1: 3 is not a JSON object"):
        read_prompts(path)


def test_a_prompt_file_gives_the_first_words_of_each_line(tmp_path):
    lines = [{"turns": ["Hello", "Bye"]}, {"prompt": "a\u2028b"}, {"messages": [SYSTEM, BYE]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    assert read_prompts(path) == ["Hello", "a\u2028b", "Bye"]
