from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from datetime import date
from pathlib import Path

import datasets
import pytest
from chat_templates import FAMILIES, end_ids, family_tokenizer
from conftest import make_target
from datasets import Json, List, Value

from dflash_hf import DFlashDraftModel
from dflash_hf.data import prepared_folder
from dflash_hf.data.chat_template import ChatTemplateError
from dflash_hf.data.labels import read_row
from dflash_hf.data.prepare import prepare_for_training
from dflash_hf.data.prompt_check import check_prompt
from dflash_hf.data.settings import PreparationSettings
from dflash_hf.data.token_rows import TokenizedRow
from dflash_hf.target.loading import TargetText

THOUGHT = "<think>\nhm\n</think>\n\nIt is 4."
TINY = ["--max_steps", "2", "--anchors_per_sample", "4", "--per_device_train_batch_size", "2", "--draft_layers", "1",
        "--num_target_layers", "2", "--block_size", "4"]  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Disable progress bars, and restore `os.environ`, which datasets 5.2 replaces in a map with several processes."""
    monkeypatch.setattr(os, "environ", os.environ)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def chat(question: str, answer: str = "It is 4.", *more: str, **columns) -> dict:
    texts = [question, answer, *more]
    roles = ["user", "assistant"] * len(texts)
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)],
        **columns,
    }


def target_text(name: str = "qwen3-instruct") -> TargetText:
    tokenizer = family_tokenizer(name)
    return TargetText(tokenizer, tuple(end_ids(tokenizer, name)), 300)


def as_dataset(rows: list[dict]) -> datasets.Dataset:
    columns = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_list([{name: row.get(name) for name in columns} for row in rows])


def prepare(rows: list[dict], family: str = "qwen3-instruct", num_proc: int | None = None, **settings):
    return prepare_for_training(
        as_dataset(rows), target_text(family), PreparationSettings(**settings), num_proc=num_proc
    )


def texts(part: datasets.Dataset | None, family: str = "qwen3-instruct") -> list[str]:
    tokenizer = family_tokenizer(family)
    written = [] if part is None else zip(part["input_ids"], part["supervised_mask"], strict=True)
    return [tokenizer.decode([token for token, keep in zip(*row, strict=True) if keep]) for row in written]


def test_rows_become_ids_masks_ids_and_lengths():
    prepared = prepare([chat("2+2?"), chat("3+3?", "It is 6.")])
    assert texts(prepared.train) == ["It is 4.<|im_end|>", "It is 6.<|im_end|>"]
    assert prepared.train["length"][:] == [len(ids) for ids in prepared.train["input_ids"]]
    assert prepared.train.column_names == ["input_ids", "supervised_mask", "sample_id", "length"]
    assert prepared.evaluation is None
    assert (prepared.num_rows, prepared.dropped, prepared.mismatches) == (2, {}, [])


def test_every_drop_has_its_reason_counted():
    short, long = chat("2+2?"), chat("Say much", "word " * 40)
    rows = [
        short,
        {"messages": chat("Only asked")["messages"][:1]},
        chat("x" * 200),
        long,
        chat(" 2+2?\n", "It is four."),
        dict(short),
    ]
    prepared = prepare(rows, max_length=100)
    assert prepared.dropped == {
        "without supervised tokens": 1,
        "without supervised tokens within max_length": 1,
        "with the prompt of an earlier row": 1,
        "identical to an earlier row": 1,
    }
    assert (prepared.num_truncated, len(prepared.train), prepared.train["length"][1]) == (1, 2, 100)
    prepared = prepare(rows, max_length=100, truncation="drop")
    assert prepared.dropped["longer than max_length"] == 2
    assert (prepared.num_truncated, len(prepared.train)) == (0, 1)


def test_a_row_without_room_for_a_whole_block_is_dropped_only_if_a_block_size_is_given():
    """The anchor is the token before a supervised one, and the block ends inside the row."""
    mask = [False, False, False, True, True]
    rows = [{"input_ids": [1, 2, 3, 4, 5], "loss_mask": mask}]
    assert len(prepare(rows).train) == 1
    assert len(prepare(rows, block_size=3).train) == 1
    with pytest.raises(ValueError, match="1 rows were read, and 1 were without room for a whole block"):
        prepare(rows, block_size=4)


def test_a_refused_row_is_dropped_with_the_reason_of_the_template():
    rows = [chat("2+2?"), {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}]
    rows[1]["messages"].append({"role": "assistant", "content": "c"})
    prepared = prepare(rows, "gemma")
    counts = prepared_folder.make_report(prepared, {})["rows"]
    assert counts["refused"] == {"The chat template refuses the conversation: roles must alternate": 1}
    assert counts["prompt_mismatches"] == {}
    assert prepared.dropped == {"refused by the chat template": 1}
    assert prepared.mismatches == [
        {
            "row": 1,
            "is_refused": True,
            "reason": "The chat template refuses the conversation: roles must alternate",
        }
    ]


def test_sample_ids_are_given_or_made_of_the_content_alone():
    rows = [chat(f"{n}?", sample_id=n + 7) for n in range(4)]
    assert prepare(rows).train["sample_id"][:] == [7, 8, 9, 10]
    own = prepare([chat(f"{n}?") for n in range(4)]).train["sample_id"][:]
    assert len(set(own)) == 4
    assert max(own) < 2**53
    assert prepare([chat(f"{n}?") for n in (3, 1)]).train["sample_id"][:] == [own[3], own[1]]
    rows[3]["sample_id"] = 7
    assert prepare(rows).train["sample_id"][:] == own
    rows[3]["sample_id"] = None
    assert prepare(rows).train["sample_id"][:] == [7, 8, 9, own[3]]


def test_repeats_are_recognised_by_everything_that_the_target_reads():
    rows = [
        chat("a  b", "one"),
        chat("a b ", "two"),
        chat("A b", "three"),
        chat("a b", "four", "c", "five"),
        chat("a b", "four", "d", "five"),
        chat("a b", "six", chat_template_kwargs={"mode": "x"}),
        {"messages": [{"role": "system", "content": "s"}, *chat("a b", "seven")["messages"]]},
    ]
    written = texts(prepare(rows).train)
    assert "two<|im_end|>" not in written
    assert len(written) == 6
    assert len(prepare(rows, keep_repeats=True).train) == 7
    assert len(prepare([rows[0], rows[0]], keep_repeats=True).train) == 1


def test_a_row_that_cannot_be_used_does_not_shadow_a_repeat_of_its_prompt():
    prepared = prepare([{"messages": chat("2+2?")["messages"][:1]}, chat("2+2?", "4")])
    assert prepared.dropped == {"without supervised tokens": 1}
    assert texts(prepared.train) == ["4<|im_end|>"]


def test_a_share_is_held_out_by_prompt_whatever_the_order_and_the_other_rows():
    rows = [chat(f"Question {n}?", f"{n}") for n in range(200)]
    whole = prepare(rows, eval_rows=0.2)
    held_out = set(texts(whole.evaluation))
    assert 20 <= len(held_out) <= 60
    shuffled = random.Random(0).sample(rows, 200)
    assert set(texts(prepare(shuffled, eval_rows=0.2).evaluation)) == held_out
    half = prepare(rows[:100], eval_rows=0.2)
    assert set(texts(half.evaluation)) == {text for text in held_out if int(text.split("<")[0]) < 100}
    assert set(texts(prepare(rows, eval_rows=0.2, num_proc=2).evaluation)) == held_out
    assert set(texts(prepare(rows, eval_rows=0.2, seed=1).evaluation)) != held_out
    assert held_out < set(texts(prepare(rows, eval_rows=0.3).evaluation))


def test_a_number_of_held_out_rows_takes_whole_prompts():
    rows = [chat(f"Question {n // 2}?", f"{n}") for n in range(60)]
    prepared = prepare(rows, eval_rows=7, keep_repeats=True)
    held_out = {int(text.split("<")[0]) // 2 for text in texts(prepared.evaluation)}
    trained = {int(text.split("<")[0]) // 2 for text in texts(prepared.train)}
    assert len(prepared.evaluation) == 8
    assert not held_out & trained
    assert len(held_out | trained) == 30
    with pytest.raises(ValueError, match="would hold out all of the 30 usable rows"):
        prepare(rows, eval_rows=30)


def test_one_prompt_with_other_later_turns_stays_on_one_side():
    rows = [chat(f"Question {n // 4}?", "Yes.", f"And {n}?", f"{n}") for n in range(80)]
    prepared = prepare(rows, eval_rows=0.3)
    numbers = [{int(re.search(r"(\d+)<\|im_end\|>$", text)[1]) // 4 for text in texts(part)}
               for part in (prepared.train, prepared.evaluation)]  # fmt: skip
    assert all(numbers)
    assert not numbers[0] & numbers[1]


def test_a_question_with_other_system_prompts_stays_on_one_side():
    rows = [chat(f"Question {n // 2}?", f"{n}") for n in range(60)]
    for number, row in enumerate(rows):
        row["messages"].insert(0, {"role": "system", "content": f"Be {number}."})
    prepared = prepare(rows, eval_rows=0.4)
    sides = [{int(text.split("<")[0]) // 2 for text in texts(part)} for part in (prepared.train, prepared.evaluation)]
    assert len(prepared.train) + len(prepared.evaluation) == 60
    assert not sides[0] & sides[1]


def test_turns_that_the_template_changes_later_are_counted_or_get_rows_of_their_own():
    rows = [chat("2+2?", THOUGHT, "Sure?", THOUGHT), chat("3+3?", THOUGHT)]
    prepared = prepare(rows, "qwen3")
    assert (prepared.num_unsupervised_turns, len(prepared.train)) == (1, 2)
    split = prepare(rows, "qwen3", split_turns=True)
    assert (split.num_unsupervised_turns, split.num_rows, split.num_after_split) == (0, 2, 3)
    tokenizer = family_tokenizer("qwen3")
    starts = [tokenizer.decode(ids[: mask.index(True)]) for ids, mask in zip(
        split.train["input_ids"], split.train["supervised_mask"], strict=True)]  # fmt: skip
    question = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    assert starts == [
        question("2+2?") + "It is 4.<|im_end|>\n" + question("Sure?"),
        question("2+2?"),
        question("3+3?"),
    ]
    assert texts(split.train, "qwen3") == [THOUGHT + "<|im_end|>"] * 3


def test_turns_of_a_conversation_stay_on_one_side_when_they_are_split():
    rows = [
        chat(f"{n}?", f"<think>\n{n}\n</think>\n\nYes.", "Sure?", f"<think>\n{n}\n</think>\n\nYes.") for n in range(30)
    ]
    prepared = prepare(rows, "qwen3", split_turns=True, eval_rows=0.4)
    sides = [[re.search(r"\d+", text)[0] for text in texts(part, "qwen3")]
             for part in (prepared.train, prepared.evaluation)]  # fmt: skip
    assert all(sides)
    assert not set(sides[0]) & set(sides[1])
    assert all(side.count(number) == 2 for side in sides for number in side)
    assert sum(map(len, sides)) == 60


def test_a_recorded_conversation_gets_rows_for_the_turns_that_its_mask_leaves_out():
    tokenizer = family_tokenizer("qwen3")
    row = chat("2+2?", THOUGHT, "Sure?", THOUGHT)
    read = read_row(row, tokenizer, eos_token_ids=end_ids(tokenizer, "qwen3"))
    recorded = {**row, "input_ids": read.input_ids, "loss_mask": read.supervised_mask}
    assert (
        prepare([recorded], "qwen3", split_turns=True).train[:] == prepare([row], "qwen3", split_turns=True).train[:]
    )
    plain = chat("2+2?", "4", "Sure?", "Yes.")
    read = read_row(plain, family_tokenizer("qwen3-instruct"))
    recorded = {**plain, "input_ids": read.input_ids, "loss_mask": read.supervised_mask}
    assert len(prepare([recorded], split_turns=True).train) == 1
    tokenizer = family_tokenizer("llama-3.1")
    dated = {**plain, "chat_template_kwargs": {"date_string": "26 Jul 2024"}}
    read = read_row(dated, tokenizer, eos_token_ids=end_ids(tokenizer, "llama-3.1"))
    recorded = {**plain, "input_ids": read.input_ids, "loss_mask": read.supervised_mask}
    of_an_earlier_day = prepare([recorded], "llama-3.1", split_turns=True)
    assert len(of_an_earlier_day.train) == 1
    assert [line["reason"] for line in of_an_earlier_day.mismatches] == [
        "only the date differs: the template writes the current date"
    ]


@pytest.fixture
def recorded_prompt():
    """Return the reason that the check gives for a recorded row with a given prompt."""

    def check(family: str, prompt: str, row: dict) -> str:
        tokenizer = family_tokenizer(family)
        ids, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, "It is 4."))
        read = TokenizedRow(ids + answer, [False] * len(ids) + [True] * len(answer))
        mismatch = check_prompt({**row, "input_ids": read.input_ids}, read, tokenizer)
        return "" if mismatch is None else mismatch.reason

    return check


def rendered(family: str, messages, **kwargs) -> str:
    tokenizer = family_tokenizer(family)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)


def test_a_recorded_prompt_that_the_template_gives_now_is_no_mismatch(recorded_prompt):
    for family in FAMILIES:
        row = chat("2+2?", "Yes.", "Sure?", "It is 4.")
        assert recorded_prompt(family, rendered(family, row["messages"][:-1]), row) == ""


def test_the_reason_of_a_mismatch_is_named(recorded_prompt):
    row, turns = chat("2+2?"), chat("2+2?", THOUGHT, "Sure?", "It is 4.")
    asked = row["messages"][:1]
    system = [{"role": "system", "content": "Be brief."}, *asked]
    today = str(date.today())
    assert recorded_prompt("llama-3.1", rendered("llama-3.1", asked, date_string="26 Jul 2024"), row) == (
        "only the date differs: the template writes the current date"
    )
    assert recorded_prompt("harmony", rendered("harmony", asked).replace(today, "2025-08-05"), row) == (
        "only the date differs: the template writes the current date"
    )
    assert recorded_prompt("qwen3", rendered("qwen3", asked, enable_thinking=False), row) == (
        "the row has an empty thinking block that the template does not write; the template gives the row's prompt "
        'with chat_template_kwargs {"enable_thinking": false}'
    )
    not_thinking = {**row, "chat_template_kwargs": {"enable_thinking": False}}
    assert recorded_prompt("qwen3", rendered("qwen3", asked), not_thinking).startswith(
        "the template writes an empty thinking block that the row does not have; the template gives the row's "
    )
    kept = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        + THOUGHT
        + ("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    )
    assert recorded_prompt("qwen3", kept, turns) == "the template strips the thinking of earlier turns"
    assert recorded_prompt("deepseek-r1", rendered("deepseek-v3", asked), row) == (
        "the template's prompt opens a thinking block and the row's does not"
    )
    bare = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert recorded_prompt("smollm2", bare, row) == "the row lacks the system prompt that the template adds"
    with_system = {"messages": [*system, row["messages"][1]]}
    assert recorded_prompt("qwen3-instruct", bare, with_system) == "the row lacks the system prompt of its messages"
    assert "the row has a system prompt" in recorded_prompt("qwen3-instruct", rendered("qwen3", system), row)
    assert "the template gives the row's prompt with chat_template_kwargs" in recorded_prompt(
        "harmony", rendered("harmony", asked, reasoning_effort="high"), row
    )
    assert recorded_prompt("qwen3-instruct", bare.replace("2+2?", "3+3?"), row) == "the text differs"


def test_tokens_that_were_merged_across_a_boundary_are_distinguished_from_another_text():
    tokenizer = family_tokenizer("phi-3", merges=(("i", "s"),))
    row = chat("this", "It is 4.")
    ids, expected = [], rendered("phi-3", row["messages"][:1])
    for character in re.split(r"(<\|\w+\|>|.)", expected, flags=re.DOTALL):
        ids += tokenizer(character, add_special_tokens=False)["input_ids"] if character else []
    read = TokenizedRow([*ids, 9], [False] * len(ids) + [True])
    mismatch = check_prompt({**row, "input_ids": read.input_ids}, read, tokenizer)
    assert mismatch.reason == "the text is the same and the tokens differ: tokens were merged across a boundary"
    assert mismatch.position == len(["<|user|>", "\n", "t", "h"])


def test_rows_whose_prompt_differs_are_kept_dropped_or_an_error():
    rows = [chat("2+2?", THOUGHT), chat("3+3?", "It is 6.")]
    kept = prepare(rows, "qwen3")
    assert len(kept.train) == 2
    (line,) = kept.mismatches
    assert line == {
        "row": 1,
        "is_refused": False,
        "is_recorded": False,
        "position": line["position"],
        "row_text": line["row_text"],
        "template_text": line["template_text"],
        "reason": "the template inserts an empty thinking block before a response without thinking; the template "
        'gives the row\'s prompt with chat_template_kwargs {"enable_thinking": false}',
    }
    assert line["row_text"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert line["template_text"].endswith("<|im_start|>assistant\n")
    dropped = prepare(rows, "qwen3", on_mismatch="drop")
    assert (len(dropped.train), dropped.dropped) == (1, {"with a prompt that differs from the chat template's": 1})
    with pytest.raises(
        ValueError, match=r"1 of 2 rows have a prompt that differs.*The first is row 1: the template inserts"
    ):
        prepare(rows, "qwen3", on_mismatch="error")
    mended = prepare(rows[1:], "qwen3", on_mismatch="error", chat_template_kwargs={"enable_thinking": False})
    assert mended.mismatches == []
    assert mended.chat_template_kwargs == {"enable_thinking": False}


def test_template_arguments_that_all_rows_share_are_reported():
    rows = [chat(f"{n}?", chat_template_kwargs={"enable_thinking": False, "mode": str(n)}) for n in range(3)]
    assert prepare(rows).chat_template_kwargs == {"enable_thinking": False}


def test_rows_of_regenerate_are_read_with_their_recorded_ids():
    tokenizer = family_tokenizer("qwen3-instruct")
    row = chat("2+2?", chat_template_kwargs={}, tools=None, finish_reason="stop")
    read = read_row(row, tokenizer)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    row |= {"input_ids": read.input_ids, "loss_mask": read.supervised_mask}
    unrecorded = {**row, "input_ids": None, "loss_mask": None, "messages": [{"role": "user", "content": "f!"}, call]}
    features = datasets.Features(
        {
            "messages": List({"role": Value("string"), "content": Value("string"), "tool_calls": Json()}),
            "chat_template_kwargs": Json(),
            "tools": Json(),
            "finish_reason": Value("string"),
            "input_ids": List(Value("int64")),
            "loss_mask": List(Value("bool")),
        }
    )
    rows = datasets.Dataset.from_list([row, unrecorded], features=features)
    prepared = prepare_for_training(rows, target_text(), PreparationSettings())
    assert prepared.train["input_ids"][0] == read.input_ids
    assert texts(prepared.train)[1] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert prepared.mismatches == []


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"question": "2+2?"}], {}, r"columns \['question'\].*Rename the columns"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            {},
            "1 rows were read, and 1 were without supervised tokens",
        ),
        ([{"messages": [{"content": "a"}]}], {}, "Row 0: A message of the row is"),
        (
            [{"input_ids": [1, 999]}],
            {},
            "Row 0: The row contains token 999, and the token ids of the target are 0 … 299",
        ),
        ([{"input_ids": [1, 2], "segment_ids": [0, 1]}], {}, "packed rows"),
        ([chat("a", sample_id="x")], {}, "Row 0: The sample_id is 'x'"),
        ([chat("a")], {"max_length": 1}, "max_length=1 must be at least 2"),
        ([chat("a")], {"truncation": "wrap"}, "truncation='wrap' must be one of cut, drop"),
        ([chat("a")], {"on_mismatch": "x"}, "on_mismatch='x' must be one of keep, drop, error"),
        ([chat("a")], {"eval_rows": 1.5}, "eval_rows=1.5 must be a fraction below 1"),
        ([chat("a")], {"block_size": 9, "max_length": 8}, "block_size=9 must be at most max_length=8"),
    ],
)
def test_bad_rows_and_settings_are_named(rows, settings, words):
    with pytest.raises(ValueError, match=words):
        prepare(rows, **settings)


def test_a_target_without_chat_template_or_a_data_set_without_rows_is_refused():
    text = target_text()
    with pytest.raises(ValueError, match="The data set is empty"):
        prepare_for_training(as_dataset([chat("a")]).select([]), text, PreparationSettings())
    text.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        prepare_for_training(as_dataset([chat("a")]), text, PreparationSettings())
    rows = as_dataset([{"prompt": "2+2=", "completion": "4"}])
    assert texts(prepare_for_training(rows, text, PreparationSettings()).train) == ["4"]
    assert issubclass(ChatTemplateError, ValueError)


# From the shell


@pytest.fixture
def prepared_target(tmp_path) -> Path:
    tokenizer = family_tokenizer("qwen3")
    folder = tmp_path / "target"
    tokenizer.save_pretrained(folder)
    make_target(
        vocab_size=300, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, max_position_embeddings=512
    ).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.trains
def test_prepare_then_train_from_the_shell(run, prepared_target, tmp_path, monkeypatch):
    rows = [chat(f"{n}+1?", THOUGHT) for n in range(20)] + [chat("0+1?", "again"), chat("9?", "No thought.")]
    path, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "deep" / "prepared"
    arguments = ["prepare", "--target", prepared_target, "--dataset", path, "--out", out, "--eval-rows", 3]
    code, stdout, err = run(*arguments)
    assert code == 0, err
    assert re.search(r"rows read +22\b", stdout)
    assert re.search(r"dropped: with the prompt of an earlier row +1\b", stdout)
    assert "Row 20: the template inserts an empty thinking block before a response without thinking" in stdout
    assert sorted(item.name for item in out.iterdir()) == ["data", "mismatches.jsonl", "report.json"]
    assert sorted(out.parent.iterdir()) == [out]
    assert len((out / "mismatches.jsonl").read_text().splitlines()) == 2
    report = json.loads((out / "report.json").read_text())
    assert (report["rows"]["read"], report["rows"]["train"], report["rows"]["validation"]) == (22, 18, 3)
    both = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {name: len(part) for name, part in both.items()} == {"train": 18, "validation": 3}
    assert report["tokens"]["train"]["supervised"] == sum(map(sum, both["train"]["supervised_mask"]))

    before = (out / "report.json").stat()
    code, stdout, _ = run(*arguments)
    assert (code, (out / "report.json").stat()) == (0, before)
    assert "already" in stdout
    code, _, err = run(*arguments, "--max-length", 64)
    assert code == 1
    assert "and is now 64. Choose another folder, or pass --overwrite" in err
    code, _, err = run(*arguments, "--max-length", 64, "--overwrite", "--num-proc", 2)
    assert code == 0, err
    assert json.loads((out / "report.json").read_text())["settings"]["max_length"] == 64

    def no_tokenising(*args, **kwargs):
        raise AssertionError("a prepared row was tokenised again")

    monkeypatch.setattr("dflash_hf.data.dataset.read_converted_row", no_tokenising)
    draft = tmp_path / "draft"
    code, stdout, err = run("train", "--target", prepared_target, "--dataset", out, "--output_dir", draft, *TINY)
    assert code == 0, err
    assert "Held-out rows: acceptance length" in stdout
    assert DFlashDraftModel.from_pretrained(draft).config.num_hidden_layers == 1
    code, _, err = run(
        "train", "--target", prepared_target, "--dataset", out, "--output_dir", draft, *TINY, "--max_length", 20
    )
    assert code == 1
    assert re.search(r"has rows of up to \d+ tokens, and max_length=20", err)


def test_rows_of_regenerate_keep_the_tokens_that_the_target_read_and_wrote(run, saved_target, tmp_path):
    target, answers, out = saved_target(), tmp_path / "answers", tmp_path / "prepared"
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"turns": [f"{n}+1?", "Sure?"]} for n in range(6)])
    code, _, err = run("regenerate", "--target", target, "--prompts", prompts, "--out", answers, "--max-new-tokens", 6)
    assert code == 0, err
    code, _, err = run("prepare", "--target", target, "--dataset", answers, "--out", out, "--on-mismatch", "error")
    assert code == 0, err
    recorded = datasets.load_dataset(str(answers), split="train", cache_dir=str(tmp_path / "cache"))
    prepared = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(prepared) == 6
    assert prepared["input_ids"][:] == recorded["input_ids"][:]
    assert prepared["supervised_mask"][:] == recorded["loss_mask"][:]


def test_a_draft_trained_on_prepared_rows_serves_in_their_mode(run, prepared_target, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(f"{n}+1?") for n in range(6)])
    out, draft = tmp_path / "prepared", tmp_path / "draft"
    code, _, err = run(
        "prepare", "--target", prepared_target, "--dataset", rows, "--out", out, "--on-mismatch", "error",
        "--chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    assert code == 0, err
    code, _, err = run("train", "--target", prepared_target, "--dataset", out, "--output_dir", draft, *TINY)
    assert code == 0, err
    assert DFlashDraftModel.from_pretrained(draft).config.chat_template_kwargs == {"enable_thinking": False}


def test_bad_input_ends_in_one_line_and_leaves_nothing(run, prepared_target, tmp_path):
    rows, empty = write_rows(tmp_path / "rows.jsonl", [chat("1?")]), tmp_path / "empty.jsonl"
    empty.touch()
    questions = write_rows(tmp_path / "questions.jsonl", [{"question": "1?"}])
    taken, out = tmp_path / "taken", tmp_path / "out"
    taken.mkdir()
    (taken / "precious.txt").write_text("mine")
    base = {"--target": prepared_target, "--dataset": rows, "--out": out}
    for changed, words in (
        ({"--dataset": empty}, "is empty"),
        ({"--dataset": tmp_path / "none.jsonl"}, "does not exist"),
        ({"--dataset": questions}, "columns ['question']"),
        ({"--target": tmp_path / "nowhere"}, "nowhere"),
        ({"--out": taken, "--eval-rows": "0"}, "exists and contains no prepared rows"),
        ({"--out": rows}, "exists and contains no prepared rows"),
        ({"--eval-rows": "many"}, "--eval-rows 'many' is not a number. Pass a number of rows, or a fraction"),
        ({"--chat-template-kwargs": "[1]"}, "must be a JSON object"),
        ({"--chat-template-kwargs": "{"}, "is not valid JSON"),
        ({"--num-proc": "0"}, "--num-proc 0 must be at least 1"),
        (
            {"--max-length": "10"},
            "No usable row is left: 1 rows were read, and 1 were without supervised tokens within max_length",
        ),
    ):
        code, _, err = run("prepare", *(word for pair in {**base, **changed}.items() for word in pair))
        lines = [line for line in err.splitlines() if line.startswith("Error:")]
        assert (code, len(lines)) == (1, 1), err
        assert words in lines[0]
        assert not out.exists()
    code, _, err = run("prepare", "--target", prepared_target, "--dataset", rows, "--out", taken, "--overwrite")
    assert code == 1
    assert (taken / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("num_proc", [None, 1])
def test_ctrl_c_writes_nothing(run, prepared_target, tmp_path, monkeypatch, num_proc):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(f"{n}?") for n in range(5)])
    parent = os.getpid()

    def read_and_press(*args, **kwargs):
        os.kill(parent, signal.SIGINT)
        time.sleep(0.2)
        return read_row(*args, **kwargs)

    monkeypatch.setattr("dflash_hf.data.prepare.read_or_drop", read_and_press)
    processes = [] if num_proc is None else ["--num-proc", num_proc]
    code, stdout, _ = run(
        "prepare", "--target", prepared_target, "--dataset", rows, "--out", tmp_path / "out", *processes
    )
    assert code == 130
    assert "out was not written" in stdout
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_report_of_version_0_1_0_is_read_with_the_present_names(tmp_path):
    old = {"read": 3, "answers": 4, "dropped": {}, "cut": 1, "earlier_answers_without_loss": 2, "refused": {}}
    report = {"settings": {"max_length": 9}, "rows": {**old, "other_prompt": {"a date": 1}, "train": 3}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    read = prepared_folder.read_report(tmp_path)
    assert read["settings"] == {"max_length": 9}
    assert read["rows"] == {
        "read": 3, "after_split": 4, "dropped": {}, "truncated": 1, "unsupervised_turns": 2, "refused": {},
        "prompt_mismatches": {"a date": 1}, "train": 3,
    }  # fmt: skip
    new = prepared_folder.make_report(prepare([chat("1?")]), {})
    assert set(new["rows"]) == {*read["rows"], "validation", "ignored_message_keys"}


def test_a_folder_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    """A failure while the folder is written, or when it is moved into place, leaves the old rows unchanged."""
    folder = tmp_path / "prepared"
    prepared = prepare([chat("1?")])
    prepared_folder.write_folder(folder, prepared, {"settings": {}, "rows": {}})
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())

    def full_disk(*args):
        raise OSError("No space left on device")

    def cannot_place_the_new_folder(source, target, rename=os.rename):
        return full_disk() if Path(source).name == "new" else rename(source, target)

    for holder, name, fault in (
        (prepared_folder, "_write_split", full_disk),
        (os, "rename", cannot_place_the_new_folder),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, fault)
            with pytest.raises(OSError, match="No space left"):
                prepared_folder.write_folder(folder, prepared, {"settings": {"new": True}, "rows": {}})
        after = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())
        assert after == before
        assert list(tmp_path.iterdir()) == [folder]


def test_large_sets_become_several_shards(tmp_path, monkeypatch):
    prepared = prepare([chat(f"{n}?", "word " * 50) for n in range(20)])
    monkeypatch.setattr(prepared_folder, "SHARD_BYTES", prepared.train.data.nbytes // 3 + 1)
    prepared_folder.write_folder(tmp_path / "prepared", prepared, {"settings": {}, "rows": {}})
    assert len(list((tmp_path / "prepared" / "data").iterdir())) == 3
    loaded = datasets.load_dataset(str(tmp_path / "prepared"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[:] == prepared.train[:]


def test_prepared_rows_of_another_tokenizer_or_with_the_mask_token_are_refused(tmp_path):
    prepared = prepare([chat("1?")])
    text = target_text()
    settings = prepared_folder.folder_settings("t", {}, text, PreparationSettings())
    prepared_folder.write_folder(tmp_path / "p", prepared, prepared_folder.make_report(prepared, settings))
    check = prepared_folder.check_prepared
    check(prepared.train, str(tmp_path / "p"), text.tokenizer, max_length=90, mask_token_id=299)
    with pytest.raises(ValueError, match="was prepared for the tokenizer of 't'"):
        check(prepared.train, str(tmp_path / "p"), family_tokenizer("phi-3"), max_length=90, mask_token_id=299)
    with pytest.raises(ValueError, match=f"contains the mask token {text.eos_token_ids[0]}"):
        check(prepared.train, str(tmp_path / "p"), text.tokenizer, max_length=90, mask_token_id=text.eos_token_ids[0])


def test_conversations_in_the_form_of_sharegpt_are_prepared_with_their_tools(run, saved_target, tmp_path):
    """The column was refused, and text parts, JSON text and other names of speakers were learned as they are."""
    expected = prepare([chat("Hi", "It is 4.", tools=[{"type": "function", "function": {"name": "add"}}])])
    row = {
        "conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "chatgpt", "value": "It is 4."}]),
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        "chat_template_kwargs": "",
    }
    prepared = prepare([row])
    assert prepared.train["input_ids"][:] == expected.train["input_ids"][:]
    assert (prepared.dropped, prepared.mismatches) == ({}, [])


def test_keys_of_messages_that_the_template_ignores_are_in_the_report(run, saved_target, tmp_path):
    rows = [chat("2+2?"), chat("3+3?"), chat("4+4?")]
    for row in rows[:2]:
        row["messages"][1]["reasoning_content"] = "hm"
    rows[0]["messages"][0]["name"] = "Bob"
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("prepare", "--target", saved_target(), "--dataset", path, "--out", tmp_path / "out")
    assert code == 0
    assert " ".join(out.split()).count("not rendered by the chat template, so not learned: the key of messages") == 2
    report = prepared_folder.read_report(tmp_path / "out")
    assert report["rows"]["ignored_message_keys"] == {"reasoning_content": 2, "name": 1}


def test_an_error_of_which_every_row_was_refused_has_the_first_reason():
    rows = [{"conversations": [{"from": "alien", "value": "Hi"}]}]
    with pytest.raises(ValueError, match=r"No usable row is left: 1 rows.*first refusal is of row 0: .*'alien'"):
        prepare(rows)


def test_turns_of_a_prompt_and_a_completion_are_split(monkeypatch):
    """Rows without a column `messages` ended in a KeyError."""
    messages = chat("2+2?", THOUGHT, "3+3?", THOUGHT)["messages"]
    for row in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        prepared = prepare([row], "qwen3", split_turns=True)
        assert (prepared.num_after_split, len(prepared.train)) == (2, 2)


def test_text_of_a_token_without_an_embedding_row_is_dropped_with_a_count():
    """One such row in a file ended the command, and no row was written."""
    text = target_text()
    text.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    text = TargetText(text.tokenizer, text.eos_token_ids, len(text.tokenizer) - 1)
    rows = as_dataset([chat("a", "A <|new|>."), chat("b"), chat("<|new|>")])
    prepared = prepare_for_training(rows, text, PreparationSettings())
    assert texts(prepared.train) == ["It is 4.<|im_end|>"]
    assert prepared.dropped == {"with text of a token that the target's embedding has no row for": 2}
    assert [line["row"] for line in prepared.mismatches] == [0, 2]
    assert all(f"contains token {text.num_embeddings}" in line["reason"] for line in prepared.mismatches)
