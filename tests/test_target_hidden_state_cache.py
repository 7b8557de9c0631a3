"""The caches of target states: the same states as fresh ones, whatever happened while they were written."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file, save_file

from dflash_hf.target import hidden_state_cache
from dflash_hf.target.hidden_state_cache import (
    DiskHiddenStateCache,
    MemoryHiddenStateCache,
    cached_hidden_states,
    fill_hidden_state_cache,
    hidden_state_fingerprint,
    row_key,
    weights_checksum,
)
from dflash_hf.target.hidden_states import target_hidden_states

LAYERS = [0, 2]
ROW_BYTES = 10 * 64 * 4  # of ten tokens in fp32


def make_rows(count: int = 6, length: int = 10) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 97, (count, length), generator=generator).tolist()


def open_cache(target, folder, layer_ids=LAYERS, final=False, shard_bytes=2 * ROW_BYTES) -> DiskHiddenStateCache:
    fingerprint = hidden_state_fingerprint(target, layer_ids, include_final_state=final)
    return DiskHiddenStateCache(folder, fingerprint, shard_bytes)


def fill(cache, target, rows, **kwargs) -> int:
    """Number of rows that the target ran for it, one of ten tokens a pass; comparing the short pass takes eight."""
    seen = []
    counter = target.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    try:
        fill_hidden_state_cache(cache, target, rows, LAYERS, batch_tokens=10, show_progress=False, **kwargs)
    finally:
        counter.remove()
    return seen.count(10)


def shards(folder) -> list:
    return sorted(folder.glob("states-*.safetensors"))


def assert_states_are_fresh(cache, target, rows) -> None:
    for ids in rows:
        fresh = target_hidden_states(target, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), LAYERS)
        torch.testing.assert_close(cache.get(row_key(ids)), fresh[0], atol=1e-5, rtol=1e-5)


# Rounding differs between the shapes of the two passes, by an amount that depends on the CPU.
SHARE_OF_ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 0.02}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("kind", ["memory", "disk", "disk again"])
def test_a_batch_out_of_the_cache_equals_the_same_batch_of_the_target(tmp_path, kind, final, dtype):
    """The rows have other lengths and another order than they were computed in, and padding on either side."""
    target = make_target().to(dtype)
    rows = [row[:length] for row, length in zip(make_rows(), (10, 3, 1, 7, 9, 3), strict=True)]
    cache = MemoryHiddenStateCache() if kind == "memory" else open_cache(target, tmp_path, final=final)
    fill_hidden_state_cache(
        cache, target, rows, LAYERS, include_final_state=final, batch_tokens=12, show_progress=False
    )
    if kind == "disk again":
        cache = open_cache(target, tmp_path, final=final)
    assert len(cache) == 6
    input_ids, valid = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    input_ids[0, :9], valid[0, :9] = torch.tensor(rows[4]), True
    input_ids[1, 9:], valid[1, 9:] = torch.tensor(rows[1]), True
    states = cached_hidden_states(cache, input_ids, valid)
    fresh = target_hidden_states(target, input_ids, valid, LAYERS, include_final_state=final)
    assert states.dtype == fresh.dtype == dtype
    tolerance = SHARE_OF_ROUNDING[dtype] * fresh.abs().max().item()
    torch.testing.assert_close(states, fresh, atol=tolerance, rtol=0)
    assert states[~valid].eq(0).all()
    input_ids[1, -1] = (input_ids[1, -1] + 1) % 97
    assert cached_hidden_states(cache, input_ids, valid) is None


def test_a_row_is_computed_once_for_all_data_sets_and_runs(target, tmp_path):
    rows = make_rows()
    assert fill(open_cache(target, tmp_path), target, rows[:3] + rows[:2]) == 3
    assert fill(open_cache(target, tmp_path), target, rows) == 3
    assert fill(open_cache(target, tmp_path), target, rows) == 0
    assert_states_are_fresh(open_cache(target, tmp_path), target, rows)


def test_shards_have_the_size_that_was_asked_for(target, tmp_path):
    fill(open_cache(target, tmp_path, shard_bytes=4 * ROW_BYTES), target, make_rows(count=10))
    assert sorted(len(load_file(path)) for path in shards(tmp_path)) == [2, 4, 4]


def test_an_interrupt_loses_only_the_pass_in_progress(target, tmp_path):
    rows, passes = make_rows(), []

    def interrupt_in_the_fourth_pass(*_):
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt

    fill(MemoryHiddenStateCache(), target, rows[:1])
    handle = target.model.layers[1].register_forward_hook(interrupt_in_the_fourth_pass)
    with pytest.raises(KeyboardInterrupt):
        fill(open_cache(target, tmp_path), target, rows)
    handle.remove()
    assert len(target.model.layers) == 4
    assert len(open_cache(target, tmp_path)) == 3
    assert fill(open_cache(target, tmp_path), target, rows) == 3
    assert_states_are_fresh(open_cache(target, tmp_path), target, rows)


@pytest.mark.parametrize("moment", ["in a pass", "before a shard has its name", "while a shard is written"])
def test_a_killed_run_leaves_complete_shards_and_the_next_one_goes_on(target, tmp_path, monkeypatch, moment):
    rows, calls = make_rows(), []

    def kill_in_the_second_shard(*args, **kwargs):
        calls.append(1)
        if len(calls) == (4 if moment == "in a pass" else 2):
            if moment == "while a shard is written":
                (tmp_path / ".states-half.safetensors.1").write_bytes(b"\x10\0\0\0\0\0\0\0half")
            os.kill(os.getpid(), signal.SIGKILL)

    cache = open_cache(target, tmp_path)
    fill(MemoryHiddenStateCache(), target, rows[:1])
    child = os.fork()
    if child == 0:
        if moment == "in a pass":
            target.model.layers[1].register_forward_hook(lambda *_: kill_in_the_second_shard())
        else:
            name = "replace_file" if moment.startswith("before") else "save_file"
            original = getattr(hidden_state_cache, name)
            monkeypatch.setattr(
                hidden_state_cache, name, lambda *a, **k: (kill_in_the_second_shard(), original(*a, **k))
            )
        try:
            fill(cache, target, rows)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(shards(tmp_path)) == 1
    assert fill(open_cache(target, tmp_path), target, rows) == 4
    assert_states_are_fresh(open_cache(target, tmp_path), target, rows)
    for leftover in tmp_path.glob(".states-*"):
        os.utime(leftover, (time.time() - 7200, time.time() - 7200))
    assert len(open_cache(target, tmp_path)) == 6
    assert not list(tmp_path.glob(".states-*"))


def test_a_shard_that_another_process_is_writing_is_left_alone(target, tmp_path):
    (tmp_path / ".states-1.safetensors.77").write_bytes(b"half")
    assert len(open_cache(target, tmp_path)) == 0
    assert (tmp_path / ".states-1.safetensors.77").exists()


def other_weights(target):
    target.model.layers[3].mlp.up_proj.weight.data[5, 7] *= 1.001


def other_theta(target):
    target.config.rope_parameters = {**target.config.rope_parameters, "rope_theta": 5.0}


@pytest.mark.parametrize(
    ("change", "kwargs", "words"),
    [
        (None, {"layer_ids": [1, 2]}, r"target_layer_ids was \[0, 2\] and is now \[1, 2\]"),
        (None, {"final": True}, "include_final_state was False and is now True"),
        (lambda target: target.bfloat16(), {}, "dtype was 'float32' and is now 'bfloat16'"),
        (other_weights, {}, "target_weights was '[0-9a-f]{32}' and is now"),
        (other_theta, {}, "target_config.rope_parameters.rope_theta was 10000.0 and is now 5.0"),
    ],
)
def test_a_stale_cache_is_refused_with_the_names_of_what_differs(target, tmp_path, change, kwargs, words):
    fill(open_cache(target, tmp_path), target, make_rows(2))
    if change is not None:
        change(target)
    with pytest.raises(ValueError, match=words) as caught:
        open_cache(target, tmp_path, **kwargs)
    assert "Delete the folder, or pass another state_cache_dir" in str(caught.value)
    if change is other_theta:
        assert "target_weights" not in str(caught.value)
    assert len(shards(tmp_path)) == 1


def test_a_moved_target_and_other_special_tokens_do_not_make_a_cache_stale(target, tmp_path):
    fill(open_cache(target, tmp_path), target, make_rows(2))
    target.config.name_or_path, target.config.pad_token_id = "elsewhere", 5
    assert len(open_cache(target, tmp_path)) == 2


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def garble(path):
    path.write_bytes(b"no safetensors file at all")


def narrow(path):
    rows = {key: row[:, :-1].contiguous() for key, row in load_file(path).items()}
    save_file(rows, path, metadata={"fingerprint": DIGESTS.pop()})


def foreign(path):
    save_file(load_file(path), path, metadata={"fingerprint": "0" * 32})


DIGESTS: list[str] = []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "cannot be used: "),
        (garble, "cannot be used: "),
        (narrow, r"the shape \[10, 63\], not \[tokens, 64\]"),
        (foreign, "made for another target"),
    ],
)
def test_a_damaged_shard_is_named_and_its_rows_are_computed_again_without_it(target, tmp_path, damage, words):
    cache = open_cache(target, tmp_path)
    fill(cache, target, make_rows())
    DIGESTS[:] = [cache._digest]
    victim = shards(tmp_path)[1]
    damage(victim)
    with pytest.raises(OSError, match=words) as caught:
        open_cache(target, tmp_path)
    assert victim.name in str(caught.value)
    victim.unlink()
    assert fill(open_cache(target, tmp_path), target, make_rows()) == 2
    assert_states_are_fresh(open_cache(target, tmp_path), target, make_rows())


def test_a_damaged_fingerprint_is_named(target, tmp_path):
    open_cache(target, tmp_path)
    (tmp_path / "fingerprint.json").write_text("{")
    with pytest.raises(OSError, match=r"fingerprint.json' is damaged"):
        open_cache(target, tmp_path)


def test_too_small_a_disk_is_known_before_the_first_pass_and_only_missing_rows_count(target, tmp_path, monkeypatch):
    fill(open_cache(target, tmp_path), target, make_rows(2))
    passes = []
    target.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * ROW_BYTES - 1))
    with pytest.raises(OSError, match=r"need 0.00 GiB, and the disk of .* Pass a state_cache_dir on a larger disk"):
        fill(open_cache(target, tmp_path), target, make_rows(6))
    assert not passes
    assert fill(open_cache(target, tmp_path), target, make_rows(5)) == 3


def test_a_full_disk_while_writing_leaves_complete_shards_only(target, tmp_path):
    rows = make_rows()
    cache = open_cache(target, tmp_path)
    fill(cache, target, rows[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"safetensors could not be written: .*Free some space"):
            fill(cache, target, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(shards(tmp_path)) == 1
    assert not list(tmp_path.glob(".states-*"))
    assert fill(open_cache(target, tmp_path), target, rows) == 4


def process(index: int, count: int, wait) -> SimpleNamespace:
    return SimpleNamespace(
        process_index=index, num_processes=count, is_main_process=index == 0, wait_for_everyone=wait
    )


def test_processes_compute_a_share_each_and_see_all_rows_afterwards(tmp_path):
    """One of them starts when another has finished its share."""
    rows, barrier, computed, caches = make_rows(count=20), threading.Barrier(3, timeout=20), {}, {}
    targets = [make_target() for _ in range(3)]
    first_is_done = threading.Event()

    def wait() -> None:
        first_is_done.set()
        barrier.wait()

    def run(index: int) -> None:
        if index == 2:
            first_is_done.wait(timeout=20)
        caches[index] = open_cache(targets[index], tmp_path)
        computed[index] = fill(caches[index], targets[index], rows, accelerator=process(index, 3, wait))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(computed.values()) == 20
    assert min(computed.values()) > 0
    for cache in caches.values():
        assert len(cache) == 20
        assert_states_are_fresh(cache, make_target(), rows)


def test_processes_that_do_not_share_the_folder_are_told(target, tmp_path):
    others = sum(int.from_bytes(row_key(ids)) % 2 == 0 for ids in make_rows())
    assert 0 < others < 6
    with pytest.raises(OSError, match=f"{others} of 6 rows were computed by other processes"):
        fill(open_cache(target, tmp_path), target, make_rows(), accelerator=process(1, 2, lambda: None))


def test_every_process_keeps_all_rows_in_its_own_memory(target):
    cache = MemoryHiddenStateCache()
    fill(cache, target, make_rows(), accelerator=process(1, 2, None))
    assert len(cache) == 6


def test_the_checksum_sees_one_bit_a_swap_a_name_and_a_dtype(target):
    checksum = weights_checksum(target)
    assert weights_checksum(copy.deepcopy(target)) == checksum
    seen = {checksum}
    for change in (
        lambda weight: weight.view(torch.int32)[3, 4].bitwise_xor_(1),
        lambda weight: weight.copy_(weight.flip(0)),
        lambda weight: weight.neg_(),
    ):
        changed = copy.deepcopy(target)
        change(changed.model.layers[2].mlp.down_proj.weight.data)
        seen.add(weights_checksum(changed))
    swapped = copy.deepcopy(target)
    layers = swapped.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    seen |= {weights_checksum(swapped), weights_checksum(copy.deepcopy(target).bfloat16())}
    assert len(seen) == 6


def test_the_fingerprint_is_written_for_readers(target, tmp_path):
    target.config.name_or_path = "some/target"
    open_cache(target, tmp_path)
    written = json.loads((tmp_path / "fingerprint.json").read_text())
    assert (written["target"], written["target_layer_ids"], written["width"]) == ("some/target", [0, 2], 64)
    assert "hidden_size" in written["target_config"]
