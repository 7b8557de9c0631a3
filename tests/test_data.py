from __future__ import annotations

import datasets
import pytest
import torch

from dflash_hf.data import DFlashCollator, prepare_dataset, tokenize_row

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


def test_a_template_that_strips_thinking_of_earlier_turns_supervises_the_last_one(tokenizer):
    """Case 11: never silently everything or nothing."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>hm</think>4"}
    assert supervised_text(tokenizer, {"messages": [USER, thought, USER, thought]}) == "<think>hm</think>4<|end|>"


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


def test_rows_without_supervision_are_dropped_with_counts(tokenizer, caplog):
    """Case 12."""
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data").propagate = True
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": "x" * 80}, ANSWER]},
    ]
    prepared = prepare_dataset(datasets.Dataset.from_list(rows), tokenizer, max_length=40)
    assert prepared["sample_id"][:] == [0]
    assert "2 of 3 rows dropped" in caplog.text
    assert "1 nothing supervised" in caplog.text
    assert "1 longer than max_length" in caplog.text


@pytest.mark.parametrize("rows", [[], [{"messages": [USER]}]])
def test_a_set_without_a_usable_row_is_an_error(tokenizer, rows):
    with pytest.raises(ValueError, match="has no usable row"):
        prepare_dataset(rows, tokenizer, max_length=40)


def test_rows_keep_their_own_sample_ids():
    """Case 22."""
    rows = [{"input_ids": [1, 2, 3], "sample_id": 77}, {"input_ids": [1, 2], "sample_id": 5}]
    assert prepare_dataset(rows, None, max_length=9)["sample_id"][:] == [77, 5]


def test_a_row_with_the_mask_token_is_refused():
    with pytest.raises(ValueError, match="Row 1 of the train set contains the mask token 9"):
        prepare_dataset([{"input_ids": [1, 2]}, {"input_ids": [9, 2]}], None, max_length=9, forbidden_token_id=9)


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
