"""The structured path against the dense oracle: values, gradients, and work that grows with the blocks only."""

from __future__ import annotations

import pytest
import torch
from conftest import make_draft, make_target
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dflash_hf import build_dflash_batch_plan
from dflash_hf.blocks import attention
from dflash_hf.blocks.attention import BlockAttention, dense_block_mask, training_masks
from dflash_hf.blocks.batch import TokenBatch

HEADS, KV_HEADS, HEAD_DIM, LENGTH, BLOCKS, GAMMA = 6, 2, 8, 19, 7, 3


def rows_with_padding() -> tuple[torch.Tensor, torch.Tensor]:
    valid = torch.ones(5, LENGTH, dtype=torch.bool)
    valid[1, 13:] = False
    valid[2, :6] = False
    valid[3] = False
    valid[4, 8:10] = False  # a hole
    segments = (torch.arange(LENGTH) // 7).repeat(5, 1)
    return valid, segments


@pytest.fixture(autouse=True, params=[1, 4, 64])
def two_blocks_a_group(request, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES_PER_GROUP", 2 * (GAMMA + 1))
    monkeypatch.setattr(attention, "COLUMNS_STEP", request.param)


@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_structured_attention_equals_dense_attention_in_value_and_gradient(window, causal, packed, replacement):
    valid, segments = rows_with_padding()
    segment_ids = segments if packed else None
    batch = TokenBatch(valid.long(), valid, segment_ids=segment_ids)
    plan = build_dflash_batch_plan(
        valid,
        torch.arange(5),
        anchors_per_sample=BLOCKS,
        gamma=GAMMA,
        optimizer_step=1,
        seed=2,
        segment_ids=segment_ids,
        replacement=replacement,
        partial_windows=True,
    )
    torch.manual_seed(0)
    slots = BLOCKS * (GAMMA + 1)
    tensors = [
        torch.randn(5, heads, length, HEAD_DIM)
        for heads, length in ((HEADS, slots), (KV_HEADS, LENGTH + slots), (KV_HEADS, LENGTH + slots))
    ]
    upstream = torch.randn(5, slots, HEADS, HEAD_DIM) * plan.slot_valid.view(5, slots, 1, 1)

    def dense(query, key, value):
        mask = dense_block_mask(plan, batch, window=window, causal=causal)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2)

    def structured(query, key, value):
        attend = BlockAttention(plan, batch, window=window, causal=causal)
        return attend(query, key, value, scaling=0.3)

    results = []
    for path in (dense, structured):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        output = path(*inputs)
        output.backward(upstream)
        results.append((output * (upstream != 0), *(tensor.grad for tensor in inputs)))
    assert results[0][0].abs().max() > 0.1
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_draft_gives_the_same_hidden_states_and_gradients_through_both_paths():
    target = make_target()
    draft = make_draft(target, layer_types=["sliding_attention", "full_attention"], sliding_window=5)
    valid, _ = rows_with_padding()
    plan = build_dflash_batch_plan(
        valid, torch.arange(5), anchors_per_sample=BLOCKS, gamma=GAMMA, optimizer_step=3, seed=0, replacement=False
    )
    context, noise = torch.randn(5, LENGTH, 64), torch.randn(5, BLOCKS * 4, 32)
    upstream = torch.randn(5, BLOCKS * 4, 32)
    results = []
    for kind in ("dense", "structured"):
        draft.zero_grad()
        output = draft(
            noise_embeds=noise,
            context_hidden_states=context,
            attention_mask=training_masks(draft.config, plan, TokenBatch(valid.long(), valid), kind=kind),
            position_ids=torch.cat([torch.arange(LENGTH).repeat(5, 1), plan.query_positions.view(5, -1)], dim=1),
        ).last_hidden_state
        output.backward(upstream)
        results.append([output, *(parameter.grad.clone() for parameter in draft.parameters())])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_rows_without_any_context_attend_to_their_block_alone():
    valid = torch.ones(1, 4, dtype=torch.bool)
    plan = build_dflash_batch_plan(valid, torch.zeros(1, dtype=torch.long), anchors_per_sample=1, gamma=3,
                                   optimizer_step=0, seed=0)  # fmt: skip
    query, key, value = (torch.randn(1, heads, length, 8) for heads, length in ((2, 4), (1, 8), (1, 8)))
    output = BlockAttention(plan, TokenBatch(valid.long(), valid))(query, key, value, scaling=1.0)
    expected = functional.scaled_dot_product_attention(query, key[:, :, 4:], value[:, :, 4:], scale=1.0)
    torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize("kind", ["structured", "dense"])
def test_only_the_structured_path_does_work_linear_in_the_number_of_blocks(kind):
    """Counted multiplications, forward and backward: doubling the blocks at most doubles them."""
    target = make_target()
    draft = make_draft(target)
    draft.set_attn_implementation("eager")  # whose products the counter sees
    valid = torch.ones(1, 64, dtype=torch.bool)
    flops = []
    for blocks in (24, 48):
        plan = build_dflash_batch_plan(valid, torch.zeros(1, dtype=torch.long), anchors_per_sample=blocks, gamma=3,
                                       optimizer_step=0, seed=0, replacement=False)  # fmt: skip
        masks = training_masks(draft.config, plan, TokenBatch(valid.long(), valid), kind=kind)
        with FlopCounterMode(display=False) as counter:
            positions = torch.cat([torch.arange(64)[None], plan.query_positions.view(1, -1)], dim=1)
            draft(
                torch.randn(1, blocks * 4, 32), torch.randn(1, 64, 64), masks, positions
            ).last_hidden_state.sum().backward()
        flops.append(counter.get_total_flops())
    assert (flops[1] <= 2 * flops[0]) == (kind == "structured")
