"""Streams, whose rows are tokenised as they are read."""

from __future__ import annotations

from itertools import islice

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from conftest import make_target
from torch.utils.data import DataLoader
from training_runs import StopAt, make_trainer, rows_of, weights

from dflash_hf import DFlashTrainingArguments
from dflash_hf.data.collator import DFlashCollator
from dflash_hf.data.dataset import PreparedStream, prepare_dataset
from dflash_hf.data.packing import pack_dataset


def numbered_rows(count: int) -> list[dict]:
    return [{"input_ids": [1 + index // 50, 1 + index % 50, *range(1, 3 + index % 5)]} for index in range(count)]


def stream_of(rows: list[dict], num_shards: int = 1) -> datasets.IterableDataset:
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=num_shards)


def once(source: datasets.IterableDataset, **kwargs) -> PreparedStream:
    return PreparedStream(source, None, **{"max_length": 50, "is_repeated": False, **kwargs})


def test_a_stream_gives_the_rows_of_the_set():
    rows = [{**row, "sample_id": 3 * index} for index, row in enumerate(numbered_rows(9))]
    assert list(once(stream_of(rows))) == list(prepare_dataset(rows, None, max_length=50))
    formatted = stream_of(rows).with_format("torch")
    assert list(once(formatted)) == list(once(stream_of(rows)))


@pytest.mark.spawns
def test_ids_of_streamed_rows_are_distinct_and_the_same_in_any_order_shard_and_worker():
    rows = numbered_rows(40)
    expected = {tuple(row["input_ids"]): row["sample_id"] for row in once(stream_of(rows))}
    assert len(set(expected.values())) == 40
    assert all(0 <= value < 2**53 for value in expected.values())
    shuffled = once(stream_of(rows, num_shards=4).shuffle(seed=1, buffer_size=10))
    loader = DataLoader(shuffled, batch_size=None, num_workers=2)
    for source in (shuffled, loader):
        seen = list(source)
        assert {tuple(row["input_ids"]): row["sample_id"] for row in seen} == expected
        assert len(seen) == 40


def test_a_row_with_another_mask_has_another_id():
    rows = [{"input_ids": [1, 2, 3], "loss_mask": mask} for mask in ([0, 1, 1], [0, 0, 1], [0, 0, 1])]
    first, second, third = (row["sample_id"] for row in once(stream_of(rows)))
    assert first != second
    assert second == third


def test_a_training_stream_starts_again_and_is_shuffled_anew():
    rows = numbered_rows(12)
    stream = PreparedStream(stream_of(rows).shuffle(seed=0, buffer_size=12), None, max_length=50)
    ids = [row["input_ids"] for row in islice(stream, 36)]
    passes = [ids[:12], ids[12:24], ids[24:]]
    assert all(sorted(part) == sorted(row["input_ids"] for row in rows) for part in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [row["input_ids"] for row in islice(stream, 36)] == ids


def test_dropped_and_truncated_rows_of_a_stream_are_logged_early_and_at_its_end(caplog):
    """A row whose supervised tokens were all truncated would give a loss of 0 or NaN."""
    from transformers.utils import logging

    logging.get_logger("dflash_hf.data.dataset").propagate = True
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, index % 2]} for index in range(24)]
    rows[23]["input_ids"] += [4] * 4
    rows[23]["loss_mask"] += [1] * 4
    stream = PreparedStream(stream_of(rows), None, max_length=5)
    assert len(list(islice(stream, 24))) == 24
    lines = [record.message for record in caplog.records]
    assert lines == [
        "The train set: 1 of 1 rows were dropped (1 without supervised tokens), and 0 of the others were "
        "truncated at max_length=5.",
        "The train set: 10 of 19 rows were dropped (10 without supervised tokens), and 0 of the others were "
        "truncated at max_length=5.",
        "The train set: 12 of 24 rows were dropped (12 without supervised tokens), and 1 of the others were "
        "truncated at max_length=5. The stream has been read once.",
    ]
    caplog.clear()
    list(islice(PreparedStream(stream_of(rows), None, max_length=5, is_quiet=True), 24))
    assert not caplog.records


def test_a_stream_without_a_usable_row_is_an_error_and_no_endless_loop():
    stream = PreparedStream(stream_of([{"input_ids": [1, 2], "loss_mask": [1, 0]}]), None, max_length=5)
    with pytest.raises(ValueError, match="no usable row: 1 rows were read, and 1 were without supervised tokens"):
        next(iter(stream))
    empty = datasets.IterableDataset.from_generator(lambda: iter(()))
    with pytest.raises(ValueError, match="the set is empty"):
        next(iter(PreparedStream(empty, None, max_length=5)))


@pytest.mark.spawns
def test_a_worker_without_a_shard_ends():
    loader = DataLoader(
        PreparedStream(stream_of(numbered_rows(6)), None, max_length=50), batch_size=None, num_workers=2
    )
    assert len(list(islice(loader, 20))) == 20


def test_a_bad_row_of_a_stream_is_named_when_it_is_read():
    rows = PreparedStream(stream_of([{"input_ids": [1, 2]}, {"input_ids": [7, -3]}]), None, max_length=50)
    assert next(iter(rows))["input_ids"] == [1, 2]
    with pytest.raises(ValueError, match=r"Row 1 \(sample_id 1\) of the train set: The row contains token -3"):
        list(rows)


def test_a_packed_stream_gives_the_rows_of_a_packed_set():
    rows = [{**row, "sample_id": index} for index, row in enumerate(numbered_rows(30))]
    packed = pack_dataset(prepare_dataset(rows, None, max_length=16), 16)
    assert list(once(stream_of(rows), max_length=16, is_packed=True)) == list(packed)


@pytest.mark.spawns
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_processes_share_a_stream_and_read_each_row_once(tmp_path, num_shards, num_workers):
    """accelerate gives every process the same number of batches, whose lengths may differ."""
    rows = numbered_rows(24)
    dispatch = DFlashTrainingArguments(output_dir=str(tmp_path), use_cpu=True).accelerator_config.dispatch_batches
    seen = []
    for process in range(2):
        loader = DataLoader(
            PreparedStream(stream_of(rows, num_shards), None, max_length=50),
            batch_size=3,
            collate_fn=DFlashCollator(),
            num_workers=num_workers,
        )
        shard = prepare_data_loader(
            loader,
            torch.device("cpu"),
            num_processes=2,
            process_index=process,
            put_on_device=True,
            dispatch_batches=dispatch,
        )
        seen.append([sample for batch in islice(shard, 4) for sample in batch["sample_ids"].tolist()])
    assert len(seen[0]) == len(seen[1]) == 12
    assert sorted(seen[0] + seen[1]) == sorted(row["sample_id"] for row in once(stream_of(rows)))


@pytest.mark.trains
def test_training_on_a_stream_equals_training_on_the_set_in_its_order(tmp_path):
    finals = []
    for is_stream in (False, True):
        target = make_target()
        rows = [{**row, "sample_id": index} for index, row in enumerate(rows_of(target))]
        trainer = make_trainer(
            target,
            tmp_path,
            rows=stream_of(rows) if is_stream else rows,
            train_sampling_strategy="sequential",
            max_steps=6,
        )
        trainer.train()
        finals.append(weights(trainer.draft))
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key


@pytest.mark.trains
@pytest.mark.parametrize(
    ("shuffled", "overrides"),
    [
        (False, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}),
        (True, {}),
        (True, {"dataloader_num_workers": 2}),
        (True, {"packing": True, "max_length": 80, "per_device_train_batch_size": 1}),
    ],
    ids=["accumulated", "shuffled", "workers", "packed"],
)
def test_resuming_on_a_stream_equals_an_uninterrupted_run(tmp_path, shuffled, overrides):
    """Ten steps over several epochs of the stream equal five steps and five more after a resume."""
    finals = []
    for name, stops in (("whole", [10]), ("parts", [5, 10])):
        for stop in stops:
            target = make_target()
            rows = stream_of(rows_of(target, count=7, new_tokens=20), num_shards=2)
            trainer = make_trainer(
                target,
                tmp_path / name,
                rows=rows.shuffle(seed=5, buffer_size=3) if shuffled else rows,
                max_steps=10,
                save_strategy="steps",
                save_steps=5,
                **overrides,
            )
            if stop == 5:
                trainer.add_callback(StopAt(5))
            checkpoint = tmp_path / name / "out" / "checkpoint-5"
            trainer.train(resume_from_checkpoint=str(checkpoint) if name == "parts" and stop == 10 else None)
        assert trainer.state.global_step == 10
        finals.append(weights(trainer.draft))
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key


def test_evaluation_on_a_stream_equals_that_on_the_set(target, tmp_path):
    rows = [{**row, "sample_id": index} for index, row in enumerate(rows_of(target, count=5))]
    trainer = make_trainer(target, tmp_path, rows=stream_of(rows), eval_rows=stream_of(rows))
    results = [trainer.evaluate(), trainer.evaluate(), trainer.evaluate(rows), trainer.evaluate(trainer.train_dataset)]
    for metrics in results:
        values = {name: value for name, value in metrics.items() if "loss" in name or "acc" in name}
        assert values == pytest.approx({name: results[0][name] for name in values}, rel=1e-6)
        assert "eval_loss" in values


def test_what_a_stream_does_not_support_is_an_error_before_training(target, tmp_path):
    stream = stream_of(rows_of(target))
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        make_trainer(target, tmp_path, rows=stream, max_steps=-1)
    with pytest.raises(ValueError, match="cache_target_states='memory' and the train set is a stream"):
        make_trainer(target, tmp_path, rows=stream, cache_target_states="memory")
    with pytest.raises(TypeError, match="The train set is a DatasetDict"):
        make_trainer(target, tmp_path, rows=datasets.DatasetDict({"train": datasets.Dataset.from_list([])}))

    class OtherStream(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise AssertionError("was read")

    with pytest.raises(TypeError, match="The train set is a OtherStream"):
        make_trainer(target, tmp_path, rows=OtherStream())
