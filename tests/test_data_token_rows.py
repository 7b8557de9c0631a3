"""Rows of tokens with the columns that other training software writes beside them."""

from __future__ import annotations

import datasets
import numpy
import pytest
import torch

from dflash_hf.data.labels import tokenize_row
from dflash_hf.data.packing import pack_dataset
from dflash_hf.data.prepared_rows import are_trainable
from dflash_hf.data.token_rows import read_token_row

LIMITS = {"max_length": 9, "forbidden_token_id": 96, "num_embeddings": 97}


def read(**columns) -> tuple[list[int], list[bool]]:
    tokenized = read_token_row(columns)
    return tokenized.input_ids, tokenized.supervised_mask


def test_attention_mask_column_ends_the_text():
    padded = {"input_ids": [5, 6, 7, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0]}
    assert read(**padded) == ([5, 6, 7], [True] * 3)
    assert read(**padded, loss_mask=[0, 1, 1, 1, 1, 1]) == ([5, 6, 7], [False, True, True])
    assert read(input_ids=[0, 0, 5, 6], attention_mask=[False, False, True, True], labels=[-100, -100, -100, 6]) == (
        [5, 6],
        [False, True],
    )
    assert read(input_ids=[0, 0], attention_mask=[0, 0]) == ([], [])


def test_labels_column_marks_what_is_learned():
    """TRL, axolotl and transformers write -100 where a token carries no loss; all tokens were learned."""
    assert read(input_ids=[5, 6, 7, 8], labels=[-100, -100, 7, 8]) == ([5, 6, 7, 8], [False, False, True, True])


@pytest.mark.parametrize(
    "name", ["loss_mask", "supervised_mask", "completion_mask", "assistant_masks", "assistant_mask"]
)
@pytest.mark.parametrize(
    "mask",
    [
        [0, 0, 1, 1],
        [False, False, True, True],
        [0.0, 0.0, 1.0, 1.0],
        numpy.array([0, 0, 1, 1]),
        list(numpy.array([0, 0, 1, 1])),
        torch.tensor([0, 0, 1, 1]),
        list(torch.tensor([0, 0, 1, 1])),
        "[0, 0, 1, 1]",
    ],
    ids=lambda mask: f"{type(mask).__name__} of {type(mask[0]).__name__}",
)
def test_every_mask_column_marks_what_is_learned(name, mask):
    assert read(input_ids=[5, 6, 7, 8], **{name: mask}) == ([5, 6, 7, 8], [False, False, True, True])


def test_a_token_is_learned_if_all_masks_say_so():
    """TRL applies both of its masks to the labels."""
    columns = {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 1, 0], "labels": [5, -100, 7, 8]}
    assert read(input_ids=[5, 6, 7, 8], **columns)[1] == [False, False, True, False]


@pytest.mark.parametrize(
    "ids", [[5, 6], numpy.array([5, 6]), list(numpy.array([5, 6])), torch.tensor([5, 6]), (5, 6), "[5, 6]"]
)
def test_tokens_in_any_list_of_integers_are_read(ids):
    read_ids, _ = read(input_ids=ids)
    assert read_ids == [5, 6]
    assert {type(token) for token in read_ids} == {int}


def test_columns_that_change_nothing_are_accepted():
    columns = {"position_ids": [0, 1], "seq_lengths": [2], "length": 2, "seq_len": 2, "cu_seqlens": [0, 2],
               "lengths": torch.tensor(2), "document_ids": [3, 3], "token_type_ids": [0, 0]}  # fmt: skip
    assert read(input_ids=[5, 6], **columns) == ([5, 6], [True, True])
    padded = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}
    assert read(**padded) == ([5, 6], [True, True])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"labels": [6, 7, 8, -100]}, r"labels have 6 at position 0, where input_ids has 5\. .*not shifted"),
        ({"labels": [5, 6, 7, -1]}, "labels have -1 at position 3"),
        ({"labels": 3}, "labels must be a flat list"),
        ({"labels": [5, 6, 7]}, "labels has 3 entries for 4 input_ids"),
        ({"labels": [5.0, 6.0, 7.0, 8.0]}, r"labels contain 5\.0"),
        ({"loss_mask": [0, 0.5, 1, 1]}, r"loss_mask contains 0\.5, and a mask must contain 0 and 1"),
        ({"loss_mask": [0, None, 1, 1]}, "loss_mask contains None"),
        ({"loss_mask": [0, float("nan"), 1, 1]}, "loss_mask contains nan"),
        ({"loss_mask": ["0", "0", "1", "1"]}, "loss_mask contains '0'"),
        ({"loss_mask": [[0, 0, 1, 1]]}, "loss_mask has 1 entries for 4"),
        ({"loss_mask": torch.tensor(1)}, "loss_mask must be a flat list"),
        ({"loss_mask": "0011"}, "loss_mask must be a flat list"),
        ({"completion_mask": [-100, 0, 1, 1]}, "completion_mask contains -100"),
        ({"assistant_masks": [0, 1]}, "assistant_masks has 2 entries"),
        ({"attention_mask": [1, 1, 0, 1]}, "attention_mask has 0 between tokens"),
        ({"attention_mask": [1, 1, 2, 2]}, "attention_mask numbers several documents, so the row is packed"),
        ({"attention_mask": [[1, 0], [1, 1]]}, "attention_mask has 2 entries"),
        ({"position_ids": [0, 1, 0, 1]}, "position_ids does not count up from 0 by one, so the row is packed"),
        ({"position_ids": [1, 2, 3, 4]}, "position_ids does not count up from 0"),
        ({"document_ids": [0, 0, 1, 1]}, "document_ids numbers several documents"),
        ({"seq_idx": [0, 0, 1, 1]}, "seq_idx numbers several documents"),
        ({"seq_lengths": [2, 2]}, "seq_lengths has several documents"),
        ({"lengths": numpy.array([2, 2])}, "lengths has several documents"),
        ({"cu_seqlens": [0, 2, 4]}, "cu_seqlens has several documents"),
        ({"segment_ids": [0, 0, 1, 1]}, "The row is packed"),
    ],
)
def test_a_column_that_is_not_understood_is_refused_by_its_name(columns, words):
    """Such rows were learned as if the column were not there."""
    with pytest.raises(ValueError, match=words):
        tokenize_row({"input_ids": [5, 6, 7, 8], **columns}, None, max_length=9)


@pytest.mark.parametrize("ids", [[1.0, 2.0], [True, False], [None, 1], [[1, 2]], numpy.eye(2), "x", {"a": 1}, [1.5]])
def test_other_tokens_are_refused(ids):
    with pytest.raises(ValueError, match=r"The row's input_ids .*flat list"):
        read(input_ids=ids)


@pytest.mark.parametrize("name", ["images", "pixel_values", "image_grid_thw", "audio"])
def test_rows_with_images_or_sounds_are_refused_by_the_column(name):
    with pytest.raises(ValueError, match=f"The row has {name}, and drafts read text alone"):
        tokenize_row({"input_ids": [5, 6], name: [[0.5]]}, None, max_length=9)
    assert tokenize_row({"input_ids": [5, 6], name: []}, None, max_length=9)[0] == [5, 6]


@pytest.mark.parametrize("name", ["loss_mask", "labels", "attention_mask"])
def test_a_mask_without_tokens_is_refused(tokenizer, name):
    with pytest.raises(ValueError, match=f"The row has {name} and no input_ids"):
        tokenize_row({"prompt": "a", "completion": "b", name: [1, 1]}, tokenizer, max_length=9)


RIGHT = {"input_ids": [1, 2, 3], "supervised_mask": [False, True, True], "sample_id": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"sample_id": -1}, False),
        ({"sample_id": 2**53}, False),
        ({"sample_id": None}, False),
        ({"input_ids": [1, 2, 97]}, False),
        ({"input_ids": [1, 2, -1]}, False),
        ({"input_ids": [1, 2, 96]}, False),
        ({"input_ids": [1, 2, None]}, False),
        ({"input_ids": [1, 2]}, False),
        ({"input_ids": None}, False),
        ({"supervised_mask": [True, False, False]}, False),
        ({"supervised_mask": [False] * 3}, False),
        ({"supervised_mask": [False, True, None]}, False),
        ({"input_ids": [1] * 10, "supervised_mask": [True] * 10}, False),
        ({"input_ids": [], "supervised_mask": []}, False),
    ],
)
def test_one_wrong_row_among_many_is_found_on_whole_columns(changes, expected):
    rows = [dict(RIGHT) for _ in range(1500)]
    rows[1200] = {**RIGHT, **changes}
    assert are_trainable(datasets.Dataset.from_list(rows), **LIMITS) is expected
    selected = datasets.Dataset.from_list(rows).select([1300, 1200, 3])
    assert are_trainable(selected, **LIMITS) is expected


def test_columns_of_other_types_are_not_used_as_they_are():
    for changes in ({"supervised_mask": [0, 1, 1]}, {"input_ids": [1.0, 2.0, 3.0]}, {"sample_id": "4"}):
        assert not are_trainable(datasets.Dataset.from_list([{**RIGHT, **changes}]), **LIMITS)
    assert not are_trainable(datasets.Dataset.from_list([RIGHT]).remove_columns("sample_id"), **LIMITS)
    int32 = datasets.Features({"input_ids": datasets.List(datasets.Value("int32")),
                               "supervised_mask": datasets.List(datasets.Value("bool")),
                               "sample_id": datasets.Value("int32")})  # fmt: skip
    assert are_trainable(datasets.Dataset.from_list([RIGHT], features=int32), **LIMITS)
    assert pack_dataset(datasets.Dataset.from_list([RIGHT]), 9).num_rows == 1
