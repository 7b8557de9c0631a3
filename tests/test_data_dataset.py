from __future__ import annotations

import json

import datasets
import numpy
import pytest
import torch
from training_runs import make_trainer, rows_of, weights
from transformers import TrainingArguments

from dflash_hf.data import dataset as dataset_module
from dflash_hf.data import labels
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.data.dataset import PreparedStream, prepare_dataset, prepare_rows
from dflash_hf.data.labels import convert_row, tokenize_row
from dflash_hf.data.packing import pack_dataset

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}


def supervised_text(tokenizer, row, **kwargs) -> str:
    ids, mask = tokenize_row(row, tokenizer, max_length=500, **kwargs)
    return tokenizer.decode([token for token, keep in zip(ids, mask, strict=True) if keep])


def test_messages_supervise_the_answer_and_its_end_alone(tokenizer):
    assert supervised_text(tokenizer, {"messages": [USER, ANSWER]}) == "It is 4.<|end|>"


def test_the_prompt_part_equals_what_generation_gets(tokenizer):
    ids, mask = tokenize_row({"messages": [USER, ANSWER]}, tokenizer, max_length=500)
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


def test_every_assistant_turn_is_supervised(tokenizer):
    again = {"role": "assistant", "content": "Still 4."}
    row = {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, again]}
    assert supervised_text(tokenizer, row) == "It is 4.<|end|>Still 4.<|end|>"


def test_prompt_and_completion_supervise_the_completion(tokenizer):
    assert supervised_text(tokenizer, {"prompt": "2+2=", "completion": "4"}) == "4"
    assert supervised_text(tokenizer, {"prompt": [USER], "completion": [ANSWER]}) == "It is 4.<|end|>"
    row = {"prompt": [USER, ANSWER, USER], "completion": [{"role": "assistant", "content": "4!"}]}
    assert supervised_text(tokenizer, row) == "4!<|end|>"


def test_a_cut_off_answer_teaches_no_end_of_turn(tokenizer):
    assert supervised_text(tokenizer, {"messages": [USER, ANSWER], "finish_reason": "length"}) == "It is 4."


def test_nothing_after_the_end_token_is_supervised(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>\n")
    again = {"role": "assistant", "content": "Still 4."}
    assert supervised_text(tokenizer, {"messages": [USER, ANSWER, USER, again]}) == "It is 4.<|end|>Still 4.<|end|>"
    dot = tokenizer("s")["input_ids"]
    assert supervised_text(tokenizer, {"messages": [USER, ANSWER]}, eos_token_ids=dot) == "It is"


def test_input_ids_with_and_without_a_loss_mask():
    assert tokenize_row({"input_ids": [5, 6, 7]}, None, max_length=2) == ([5, 6], [True, True])
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    assert tokenize_row(row, None, max_length=9) == ([5, 6, 7], [False, True, True])
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 3"):
        tokenize_row({"input_ids": [5, 6, 7], "loss_mask": [1]}, None, max_length=9)


def test_a_template_that_strips_thinking_of_earlier_turns_supervises_the_last_one_and_warns(tokenizer, caplog):
    """The mask is never silently all of a row or nothing of it."""
    labels.logger.warning_once.cache_clear()  # other tests may have had the warning
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    row = {"messages": [USER, thought, USER, thought]}
    assert [supervised_text(tokenizer, row) for _ in range(2)] == ["<think>hm</think>4<|end|>"] * 2
    assert [record.message for record in caplog.records] == [
        "The chat template renders earlier assistant turns differently once a conversation continues, for example "
        "without their thinking. Such turns are context and carry no loss. To train on them, pass each conversation "
        "up to such a turn as a row of its own, as dflash-hf prepare --split-turns does."
    ]


def test_a_template_whose_prompt_cannot_be_found_raises(tokenizer):
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        tokenize_row({"messages": [USER, ANSWER]}, tokenizer, max_length=99)


def test_chat_template_arguments_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ mode }}" + tokenizer.chat_template
    row = {"messages": [USER, ANSWER]}
    ids, _ = tokenize_row(row, tokenizer, max_length=99, chat_template_kwargs={"mode": "fast"})
    assert tokenizer.decode(ids).startswith("fast<|user|>")
    ids, _ = tokenize_row({**row, "chat_template_kwargs": {"mode": "slow"}}, tokenizer, max_length=99)
    assert tokenizer.decode(ids).startswith("slow<|user|>")


def test_unknown_columns_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"columns \['question'\]"):
        tokenize_row({"question": "2+2?"}, tokenizer, max_length=9)


def test_rows_without_supervised_tokens_are_dropped_with_counts(tokenizer, caplog):
    """A row whose supervised tokens were all truncated would give a loss of 0 or NaN."""
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": "x" * 80}, ANSWER]},
    ]
    prepared = prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, max_length=40)
    assert prepared["sample_id"][:] == [0]
    assert [record.message for record in caplog.records] == [
        "The train set: 2 of 3 rows were dropped (1 without supervised tokens, 1 without supervised tokens within "
        "max_length), and 0 of the others were truncated at max_length=40."
    ]


def test_counts_of_dropped_and_truncated_rows_are_said_again_when_they_come_out_of_the_cache(
    tokenizer, caplog, tmp_path, monkeypatch
):
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    path = tmp_path / "rows.jsonl"
    contents = ["It is 4.", "It is 4, as everybody knows."]
    rows = [{"messages": [USER, {"role": "assistant", "content": content}]} for content in contents]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"messages": [USER]}]))
    results, lines = [], []
    for expected_calls in (3, 0):
        calls = []
        monkeypatch.setattr(dataset_module, "convert_row", counted(convert_row, calls))
        caplog.clear()
        dataset = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
        results.append(list(prepare_dataset(dataset, tokenizer, max_length=24)))
        lines.append([record.message for record in caplog.records])
        assert len(calls) == expected_calls
    assert results[0] == results[1]
    assert lines[0] == lines[1]
    assert lines[0] == [
        "The train set: 1 of 3 rows were dropped (1 without supervised tokens), and 1 of the others were truncated at "
        "max_length=24."
    ]


def counted(function, calls):
    def call(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return call


def test_only_the_first_process_logs_what_happened_to_the_rows(caplog, target, tmp_path, monkeypatch):
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    rows = [{"input_ids": [1, 2, 3], "sample_id": 1}, {"input_ids": [1, 2], "sample_id": 1}, {"input_ids": [1]}]
    prepare_dataset(rows, None, max_length=2)
    assert len(caplog.records) == 2
    caplog.clear()
    prepare_dataset(rows, None, max_length=2, is_quiet=True)
    assert not caplog.records
    monkeypatch.setattr(TrainingArguments, "should_log", property(lambda self: False))
    for source in (rows, datasets.Dataset.from_list(rows).to_iterable_dataset()):
        make_trainer(target, tmp_path, rows=source, max_length=2, packing=True, max_steps=2).train()
    assert not [record for record in caplog.records if record.name == "dflash_hf.data.dataset"]


@pytest.mark.parametrize("rows", [[], [{"messages": [USER]}]])
def test_a_set_without_a_usable_row_is_an_error(tokenizer, rows):
    with pytest.raises(ValueError, match="has no usable row"):
        prepare_dataset(rows, tokenizer, max_length=40)


def test_rows_keep_their_own_sample_ids():
    rows = [{"input_ids": [1, 2, 3], "sample_id": 77}, {"input_ids": [1, 2], "sample_id": 5}]
    assert prepare_dataset(rows, None, max_length=9)["sample_id"][:] == [77, 5]


def test_a_row_with_the_mask_token_is_refused():
    with pytest.raises(ValueError, match=r"Row 1 \(sample_id 1\) of the train set contains the mask token 9"):
        prepare_dataset([{"input_ids": [1, 2]}, {"input_ids": [9, 2]}], None, max_length=9, forbidden_token_id=9)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"input_ids": [5, -1]},
            r"Row 1 \(sample_id 1\) of the train set: The row contains token -1, and .* target are 0 … 96\.",
        ),
        (
            {"input_ids": [5, 97], "sample_id": 8},
            r"Row 1 \(sample_id 8\).*contains token 97, and the token ids of the target are 0 … 96\.",
        ),
        (
            {"input_ids": [5, 6], "sample_id": -8},
            r"Row 1 \(sample_id -8\).*must be an integer in 0 … 9007199254740991",
        ),
        ({"input_ids": [5, 6], "sample_id": 2**53}, "must be an integer in 0"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, r"Row 1 \(sample_id 1\).*loss_mask has 1 entries for 2"),
        ({"messages": [{"content": "Hi"}]}, r"Row 1 \(sample_id 1\).*must be a mapping with `role` and `content`"),
    ],
)
def test_a_row_that_would_fail_later_is_named_before_training(tokenizer, row, words):
    """An id outside the embedding is an IndexError, or a device assert, in the middle of training."""
    with pytest.raises(ValueError, match=words):
        prepare_dataset([{"input_ids": [1, 96]}, row], tokenizer, max_length=9, num_embeddings=97)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"input_ids": [1, 2], "sample_id": "gsm8k-7"}], "sample_id 'gsm8k-7'.*Rename or remove the column"),
        ([{"input_ids": [1, 2], "sample_id": 1.5}], "sample_id 1.5.*must be an integer"),
        ([{"input_ids": [1, 2], "sample_id": True}], "sample_id True.*must be an integer"),
        ([{"input_ids": [1.5, 2.0]}], "input_ids contain 1.5, and they must be a flat list of integers"),
        ([{"input_ids": [[1, 2]]}], r"input_ids contain \[1, 2\], and they must be a flat list"),
        ([{"messages": ["Hi"]}], "A message of the row is 'Hi', and a message must be a mapping"),
    ],
)
def test_values_of_a_wrong_type_are_named(tokenizer, rows, words):
    with pytest.raises(
        ValueError, match=r"Row 0 \(" + ("sample_id 0.*" if "sample_id" not in rows[0] else "") + words
    ):
        prepare_dataset(rows, tokenizer, max_length=9)


def test_an_empty_conversation_is_dropped_and_counted(tokenizer):
    rows = [{"messages": []}, {"messages": [USER, ANSWER]}]
    assert prepare_dataset(rows, tokenizer, max_length=90)["sample_id"][:] == [1]
    assert tokenize_row({"prompt": [], "completion": []}, tokenizer, max_length=90) == ([], [])


def test_repeated_sample_ids_are_a_warning(caplog):
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    rows = [{"input_ids": [1, 2, index], "sample_id": index // 3} for index in range(6)]
    assert len(prepare_dataset(rows, None, max_length=9)) == 6
    assert "4 of 6 rows repeat the sample_id of another row" in caplog.text


def test_rows_may_be_arrays_and_tensors():
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}]
    expected = list(prepare_dataset(rows, None, max_length=9))
    dataset = datasets.Dataset.from_list(rows)
    for formatted in (dataset.with_format("torch"), dataset.with_format("numpy")):
        assert list(prepare_dataset(formatted, None, max_length=9)) == expected
    for make in (torch.tensor, numpy.array):
        row = {name: make(values) for name, values in rows[0].items()}
        assert tokenize_row(row, None, max_length=9) == tokenize_row(rows[0], None, max_length=9)


@pytest.mark.parametrize("side", ["right", "left"])
def test_collator_pads_on_either_side(side):
    rows = [
        {"input_ids": [1, 2, 3], "supervised_mask": [False, True, True], "sample_id": 4},
        {"input_ids": [5], "supervised_mask": [False], "sample_id": 6},
    ]
    batch = DFlashCollator(pad_token_id=9, padding_side=side)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9] if side == "right" else [9, 9, 5]]
    assert batch["token_valid_mask"].sum(-1).tolist() == [3, 1]
    assert batch["supervised_mask"].tolist() == [[False, True, True], [False] * 3]
    assert batch["sample_ids"].dtype == torch.int64
    assert batch["sample_ids"].tolist() == [4, 6]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_packed_rows_belongs_to_no_document(side):
    rows = [
        {"input_ids": [1, 2, 3], "supervised_mask": [True] * 3, "sample_id": 4, "segment_ids": [0, 0, 1]},
        {"input_ids": [5], "supervised_mask": [True], "sample_id": 6, "segment_ids": [0]},
    ]
    batch = DFlashCollator(padding_side=side)(rows)
    assert batch["segment_ids"].dtype == torch.int64
    assert batch["segment_ids"].tolist() == [[0, 0, 1], [0, -1, -1] if side == "right" else [-1, -1, 0]]
    assert "segment_ids" not in DFlashCollator()([{"input_ids": [1], "supervised_mask": [True], "sample_id": 4}])


@pytest.mark.parametrize("packing", [False, True])
def test_nothing_needed_is_dropped_when_unused_columns_are(target, tmp_path, packing):
    """Also with the argument set by the user; a column the training does not need goes."""
    rows = [{**row, "topic": "numbers"} for row in rows_of(target)]
    streams = [rows, datasets.Dataset.from_list(rows).to_iterable_dataset()]
    finals = []
    for source in streams:
        for remove in (False, True):
            trainer = make_trainer(
                target,
                tmp_path,
                rows=source,
                packing=packing,
                max_length=90,
                remove_unused_columns=remove,
                max_steps=2,
            )
            trainer.train()
            finals.append(weights(trainer.draft))
    for before, after in (finals[:2], finals[2:]):
        assert after.keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_a_prepared_set_with_further_columns_trains_when_unused_columns_are_removed(target, tmp_path):
    prepared = prepare_dataset(rows_of(target), None, max_length=90).add_column("topic", ["numbers"] * 4)
    trainer = make_trainer(target, tmp_path, rows=prepared, remove_unused_columns=True, max_steps=1)
    assert set(next(iter(trainer.get_train_dataloader()))) == {
        "input_ids",
        "token_valid_mask",
        "supervised_mask",
        "sample_ids",
    }
    trainer.train()


def test_rows_can_be_grouped_by_length(target, tmp_path):
    rows = [{"input_ids": [1 + index] * (3 + (29 * index) % 64)} for index in range(64)]
    padding = {}
    for strategy in ("random", "group_by_length"):
        trainer = make_trainer(target, tmp_path, rows=rows, train_sampling_strategy=strategy, pad_to_multiple_of=1)
        batches = list(trainer.get_train_dataloader())
        assert sorted(sample for batch in batches for sample in batch["sample_ids"].tolist()) == list(range(64))
        padding[strategy] = sum(int((~batch["token_valid_mask"]).sum()) for batch in batches)
    assert padding["group_by_length"] < 0.5 * padding["random"]
    trainer.train()
    assert trainer.state.global_step == 4


def test_prepared_rows_can_be_prepared_again_and_streamed():
    prepared = prepare_dataset([{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1], "sample_id": 7}], None, max_length=9)
    assert list(prepare_dataset(list(prepared), None, max_length=9)) == list(prepared)
    stream = PreparedStream(prepared.to_iterable_dataset(), None, max_length=9, is_repeated=False)
    assert list(stream) == list(prepared)
    packed = pack_dataset(prepared, 9)
    with pytest.raises(ValueError, match=r"Row 0 \(sample_id 7\).*The row is packed.*Pass the documents"):
        prepare_dataset(list(packed), None, max_length=9)


def test_columns_that_only_later_rows_have_are_kept():
    """Columns are not those of the first row alone."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1], "sample_id": 7}]
    prepared = prepare_dataset(rows, None, max_length=9)
    assert prepared["supervised_mask"][:] == [[True, True], [False, False, True]]
    assert prepared["sample_id"][:] == [0, 7]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_five_lengths_have_one_shape_if_padded_to_a_multiple(side):
    collate = DFlashCollator(padding_side=side, pad_to_multiple_of=16)
    for length in (17, 20, 25, 31, 32):
        row = {"input_ids": list(range(length)), "supervised_mask": [True] * length, "sample_id": 0}
        batch = collate([row])
        assert batch["input_ids"].shape == (1, 32)
        assert batch["input_ids"][batch["token_valid_mask"]].tolist() == row["input_ids"]


LIMITS = {"max_length": 9, "forbidden_token_id": 96, "num_embeddings": 97}
PREPARED = {"input_ids": [1, 2, 3], "supervised_mask": [False, True, True], "sample_id": 4}


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": [1, 2, 96]}, r"Row 1 \(sample_id 4\) of the train set contains the mask token 96"),
        ({"input_ids": [1, 2, 500]}, "contains token 500, and the token ids of the target are 0 … 96"),
        ({"input_ids": [1, 2, -1]}, "contains token -1"),
        ({"supervised_mask": [True, True]}, "supervised_mask has 2 entries for 3 input_ids"),
        ({"sample_id": -1}, "sample_id is -1"),
    ],
)
def test_rows_with_a_supervised_mask_are_checked_like_any_row(make, changes, words):
    """A row with a `supervised_mask` skipped every check, and failed or was learned wrongly in the middle of a run."""
    with pytest.raises(ValueError, match=words):
        prepare_rows(make([PREPARED, {**PREPARED, **changes}]), tokenizer=None, **LIMITS)


def test_rows_with_a_supervised_mask_are_truncated_and_dropped_like_any_row(caplog):
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    long = {"input_ids": [1] * 12, "supervised_mask": [True] * 12, "sample_id": 5}
    silent = {"input_ids": [1, 2], "supervised_mask": [False, False], "sample_id": 6}
    rows = prepare_rows(datasets.Dataset.from_list([PREPARED, long, silent]), tokenizer=None, **LIMITS)
    assert [len(ids) for ids in rows["input_ids"]] == [3, 9]
    assert "1 of 3 rows were dropped (1 without supervised tokens), and 1 of the others were truncated" in caplog.text
    with pytest.raises(ValueError, match="has no usable row: 1 rows were read, and 1 were without supervised tokens"):
        prepare_rows(datasets.Dataset.from_list([silent]), tokenizer=None, **LIMITS)


def test_right_prepared_rows_are_used_as_they_are():
    rows = datasets.Dataset.from_list([{**PREPARED, "length": 3}])
    assert prepare_rows(rows, tokenizer=None, **LIMITS) is rows
    without_ids = prepare_rows(rows.remove_columns("sample_id"), tokenizer=None, **LIMITS)
    assert list(without_ids) == [{**PREPARED, "sample_id": 0}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": [1, 2, 96]}, "of which one contains the mask token 96"),
        ({"input_ids": [1, 2, 500]}, "of which one contains token 500"),
        ({"supervised_mask": [True]}, "of which one has a supervised_mask of another length"),
        ({"segment_ids": [0]}, "of which one has a segment_ids of another length"),
        ({"sample_id": 2**60}, "of which one has a sample_id outside"),
        ({name: values * 4 for name, values in PREPARED.items() if name != "sample_id"} | {"segment_ids": [0] * 12},
         "of which one has 12 tokens, and max_length=9"),
        ({"supervised_mask": [False] * 3}, None),
        ({"supervised_mask": [0, 1, 1]}, "lists of bools in supervised_mask"),
    ],
)  # fmt: skip
def test_packed_rows_are_checked_too(changes, words):
    row = {**PREPARED, "segment_ids": [0, 0, 1]}
    rows = [{**row, **changes}] if words and "bools" in words else [row, {**row, **changes}]
    packed = datasets.Dataset.from_list(rows)
    if words is None:
        assert prepare_rows(packed, tokenizer=None, is_packed=True, **LIMITS) is packed
        with pytest.raises(ValueError, match="no packed row has a supervised token"):
            prepare_rows(packed.select([1]), tokenizer=None, is_packed=True, **LIMITS)
        return
    with pytest.raises(ValueError, match=words):
        prepare_rows(packed, tokenizer=None, is_packed=True, **LIMITS)


REFUSAL = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"


def test_a_trainer_drops_rows_that_the_template_refuses_and_counts_them(tokenizer, caplog):
    """A trainer refused the whole set at the first such row, and `prepare` dropped them."""
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    tokenizer.chat_template = REFUSAL + tokenizer.chat_template
    system = {"role": "system", "content": "Be brief."}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    alien = {"conversations": [{"from": "alien", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [system, USER, ANSWER]}, {"messages": [USER, call]}, alien]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    for source in (rows, stream):
        caplog.clear()
        prepared = prepare_rows(source, tokenizer=tokenizer, max_length=90, is_repeated=False)
        assert len(list(prepared)) == 1
        last = caplog.records[-1].message
        assert "3 of 4 rows were dropped" in last
        assert "2 refused by the chat template, 1 without readable messages" in last
        assert "The first refusal is of row 1: The chat template refuses the conversation: no system" in last
    with pytest.raises(ValueError, match=r"no usable row: 1 rows.*1 were without readable.*from 'alien'"):
        prepare_dataset([alien], tokenizer, max_length=90)


@pytest.mark.parametrize(("name", "value"), [("reasoning_content", "hm"), ("thinking", "hm"), ("name", "Bob")])
def test_keys_of_messages_that_the_template_ignores_are_counted(tokenizer, caplog, name, value):
    """The thinking of `reasoning_content` was dropped in silence where the template does not read it."""
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    rows = [{"messages": [USER, {**ANSWER, name: value}]}, {"messages": [{**USER, name: ""}, ANSWER]}]
    prepare_dataset(rows, tokenizer, max_length=90)
    assert caplog.records[-1].message.endswith(f"so nothing of them is learned: {name} (1 rows).")
    caplog.clear()
    tokenizer.chat_template = tokenizer.chat_template.replace("}}<|end|>", f"}}}}{{{{ message.{name} }}}}<|end|>")
    prepare_dataset(rows, tokenizer, max_length=90)
    assert not caplog.records


def test_rows_that_no_column_can_hold_together_are_prepared_from_a_list(tokenizer):
    """Arrow refuses a column with texts and lists, and makes a null of a key that another row lacks."""
    parts = {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [parts, ANSWER]}, {"input_ids": [1, 2, 3]}]
    first, second, _ = prepare_dataset(rows, tokenizer, max_length=90)["input_ids"]
    assert first == second


def test_half_a_surrogate_pair_is_learned_as_a_replacement_character(tokenizer):
    broken, mended = (
        {"messages": [USER, {"role": "assistant", "content": f"It is {x}."}]} for x in ("\ud83d", "\ufffd")
    )
    first, second = prepare_dataset([broken, mended], tokenizer, max_length=90)["input_ids"]
    assert first == second


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "needs at least one row"),
        ([{"input_ids": [1, 2]}], "it lacks supervised_mask, sample_id. Prepare"),
        ([PREPARED, {**PREPARED, "supervised_mask": [True]}], "1 entries in supervised_mask for 3 input_ids"),
        ([{**PREPARED, "segment_ids": [0, 0, 1]}, PREPARED], "it lacks segment_ids"),
        ([{**PREPARED, "segment_ids": [0]}], "1 entries in segment_ids for 3"),
    ],
)
def test_the_collator_refuses_rows_that_are_not_prepared(rows, words):
    with pytest.raises(ValueError, match=words):
        DFlashCollator()(rows)


@pytest.mark.parametrize("arguments", [{"padding_side": "centre"}, {"pad_to_multiple_of": 0}])
def test_arguments_of_the_collator_are_checked(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.* must be"):
        DFlashCollator(**arguments)


UNEMBEDDED_ROWS = {
    "an answer": {"messages": [USER, {"role": "assistant", "content": "It is <|new|>."}]},
    "a question": {"messages": [{"role": "user", "content": "<|new|>"}, ANSWER]},
    "a text": {"prompt": "2+2=", "completion": "<|new|>"},
    "messages as JSON text": {"conversations": json.dumps([USER, {"role": "assistant", "content": "<|new|>"}])},
}


@pytest.mark.parametrize("row", UNEMBEDDED_ROWS.values(), ids=UNEMBEDDED_ROWS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["data set", "stream"])
def test_text_of_a_token_without_an_embedding_row_leaves_out_its_row_alone(tokenizer, row, is_stream, caplog):
    """One such row in a file ended the preparation of all rows."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    settings = {"max_length": 99, "num_embeddings": len(tokenizer) - 1}
    good = {"messages": [USER, ANSWER]}
    if is_stream:
        source = datasets.IterableDataset.from_generator(lambda: iter([row, good]))
        prepared = list(PreparedStream(source, tokenizer, is_repeated=False, **settings))
    else:
        prepared = list(prepare_dataset([row, good], tokenizer, **settings))
    assert len(prepared) == 1
    assert max(prepared[0]["input_ids"]) < settings["num_embeddings"]
    assert "1 with text of a token that the target's embedding has no row for" in caplog.text


def test_a_data_set_of_nothing_but_unembedded_text_names_the_token(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    with pytest.raises(ValueError, match=f"row 0: The row contains token {len(tokenizer) - 1}"):
        prepare_dataset([UNEMBEDDED_ROWS["an answer"]], tokenizer, max_length=99, num_embeddings=len(tokenizer) - 1)
