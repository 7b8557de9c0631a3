"""The cache of sequences of different lengths, compared with lists of what each sequence wrote."""

from __future__ import annotations

import pytest
import reference
import torch
from decoding_pairs import each_family, make_family
from transformers import LlamaConfig

from dflash_hf.decoding.kv_cache import GROWTH_COLUMNS, RaggedCache

WINDOW = 7


def config(**overrides) -> LlamaConfig:
    values = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
    return LlamaConfig(**{**values, **overrides})


def keys_of(columns: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make random keys of shape `[sequences, 2 heads, written, 3]`."""
    return torch.randn(len(columns), 2, columns.shape[1], 3, generator=generator)


def test_every_visible_column_holds_what_was_written_there_last():
    """Blocks are accepted in part, sequences leave, and the text outgrows the first buffers."""
    generator = torch.Generator().manual_seed(0)
    cache, num_sequences = RaggedCache(config()), 4
    written = reference.SequenceLists(num_sequences)
    lengths = [0] * num_sequences
    for step in range(180):
        count = 9 if step == 0 else int(torch.randint(1, 5, (), generator=generator))
        columns = torch.tensor(lengths)[:, None] + torch.arange(count)
        start, end = min(lengths), max(lengths) + count
        cache.place(start, end, columns if num_sequences > 1 and step else None)
        keys = keys_of(columns, generator)
        values = -keys
        written.write(columns.tolist(), keys)
        for layer, window in ((0, None), (1, WINDOW)):
            got_keys, got_values = cache.update(keys, values, layer)
            first = cache.first_column(window)
            assert first == (0 if window is None else max(0, start - WINDOW + 1))
            assert got_keys.shape == (num_sequences, 2, end - first, 3)
            assert cache.layers[layer].get_mask_sizes(count) == (end - first, first)
            for sequence, length in enumerate(lengths):
                for column in range(first, length + count):
                    assert torch.equal(got_keys[sequence, :, column - first], written.sequences[sequence][column])
                    assert torch.equal(got_values[sequence, :, column - first], -written.sequences[sequence][column])
            assert got_keys.isfinite().all()
        accepted = torch.randint(1, count + 1, (num_sequences,), generator=generator).tolist()
        lengths = [length + (9 if step == 0 else kept) for length, kept in zip(lengths, accepted, strict=True)]
        if step in (40, 80, 120):
            keep = [sequence for sequence in range(num_sequences) if sequence != 1]
            cache.batch_select_indices(torch.tensor(keep))
            written.keep(keep)
            lengths, num_sequences = [lengths[sequence] for sequence in keep], num_sequences - 1
    assert max(lengths) > GROWTH_COLUMNS + 20
    assert cache.layers[1].keys.shape[2] < 1.3 * GROWTH_COLUMNS + 40  # a sliding layer drops hidden columns


def test_keys_for_nobody_are_written_where_nobody_looks():
    cache = RaggedCache(config())
    cache.place(0, 3, torch.tensor([[0, 1, 2], [0, 3, 3]]))
    keys = torch.arange(18.0).view(2, 1, 3, 3) + 1
    got, _ = cache.update(keys, keys, 0)
    assert got.shape == (2, 1, 3, 3)
    assert torch.equal(got[0], keys[0])
    assert torch.equal(got[1, :, :1], keys[1, :, :1])
    assert got[1, :, 1:].eq(0).all()


@pytest.mark.parametrize("name", each_family("qwen3_5", "lfm2", "falcon_h1"))
def test_recurrent_states_go_back_sequence_by_sequence(name):
    """The cache saves copies, because models change their states in place."""
    target = make_family(name)
    cache = RaggedCache(target.config)
    generator = torch.Generator().manual_seed(0)

    def read(count: int, start: int) -> None:
        cache.place(start, start + count)
        tokens = torch.randint(1, 96, (3, count), generator=generator)
        with torch.no_grad():
            target(input_ids=tokens, cache=cache, use_cache=True)

    def states() -> list[torch.Tensor]:
        return [
            state.clone()
            for layer in cache.layers
            for name in ("conv_states", "recurrent_states")
            for state in getattr(layer, name, {}).values()
            if state is not None
        ]

    read(6, 0)
    before = states()
    assert len(before) >= 2
    cache.save_states()
    read(3, 6)
    after = states()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    cache.restore_states()
    assert all(torch.equal(a, b) for a, b in zip(before, states(), strict=True))
    read(3, 6)  # the saved states survive a second pass
    cache.save_states()  # … and are not replaced
    after = states()
    cache.accept_states(torch.tensor([True, False, True]))
    for old, new, now in zip(before, after, states(), strict=True):
        assert torch.equal(now[[0, 2]], new[[0, 2]])
        assert torch.equal(now[1], old[1])
    now = states()
    assert len(now) == len(before)
    cache.save_states()
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert all(torch.equal(a[[2, 0]], b) for a, b in zip(now, states(), strict=True))
    read_after = states()
    cache.restore_states()
    assert all(torch.equal(a, b) for a, b in zip(read_after, states(), strict=True))
