from __future__ import annotations

import pytest
import reference
import torch
from conftest import make_draft, make_target
from torch.nn.attention.flex_attention import BlockMask

from dflash_hf import build_dflash_batch_plan
from dflash_hf.blocks.attention import dense_block_mask, flex_block_mask
from dflash_hf.blocks.batch import TokenBatch

SETTINGS = {"anchors_per_sample": 5, "gamma": 3, "optimizer_step": 1, "seed": 2}


def random_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    valid = torch.ones(4, 17, dtype=torch.bool)
    valid[1, 11:] = False  # right padding
    valid[2, :6] = False  # left padding
    valid[3] = False  # an empty row
    segments = (torch.arange(17) // 7).repeat(4, 1)
    return valid, torch.tensor([3, 4, 5, 6]), segments


@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_dense_mask_equals_the_loop_written_oracle(window, causal, packed, partial):
    valid, ids, segments = random_rows()
    segments_if_packed = segments if packed else None
    plan = build_dflash_batch_plan(
        valid, ids, segment_ids=segments_if_packed, replacement=False, partial_windows=partial, **SETTINGS
    )
    batch = TokenBatch(valid.long(), valid, segment_ids=segments_if_packed)
    mask = dense_block_mask(plan, batch, window=window, causal=causal)
    packed_list = segments.tolist() if packed else None
    blocks = reference.plan(
        valid.int().tolist(), ids.tolist(), 5, 3, 1, 2, None, packed_list, replacement=False, partial=partial
    )
    expected = reference.visible(blocks, valid.int().tolist(), 3, window, causal, packed_list)
    assert mask.shape == (4, 1, 20, 37)
    assert mask[:, 0].tolist() == expected


@pytest.mark.spawns
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_mask_gives_the_outputs_of_the_dense_mask(window, causal):
    """FlexAttention's forward runs on a CPU: the same draft through both masks."""
    # A second compilation with other shapes has dynamic ones, for which torch 2.13 writes wrong code on a CPU.
    torch.compiler.reset()
    target = make_target()
    kwargs = {"is_causal": causal}
    if window is not None:
        kwargs |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    draft = make_draft(target, **kwargs)
    valid, ids, _ = random_rows()
    plan = build_dflash_batch_plan(valid, ids, replacement=False, partial_windows=True, **SETTINGS)
    batch = TokenBatch(valid.long(), valid)
    inputs = {
        "noise_embeds": torch.randn(4, 20, 32),
        "context_hidden_states": torch.randn(4, 17, 64),
        "position_ids": torch.cat([torch.arange(17).repeat(4, 1), plan.query_positions.view(4, -1)], dim=1),
    }
    outputs = {}
    with torch.no_grad():
        for implementation, build in (
            ("sdpa", dense_block_mask),
            ("eager", dense_block_mask),
            ("flex_attention", flex_block_mask),
        ):
            draft.set_attn_implementation(implementation)
            masks = {
                "full_attention": build(plan, batch, causal=causal),
                "sliding_attention": build(plan, batch, window=window, causal=causal),
            }
            assert isinstance(masks["full_attention"], BlockMask) == (implementation == "flex_attention")
            outputs[implementation] = draft(attention_mask=masks, **inputs).last_hidden_state
    assert outputs["sdpa"].abs().max() > 0.1
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(outputs["flex_attention"], outputs["sdpa"], atol=2e-5, rtol=1e-4)
