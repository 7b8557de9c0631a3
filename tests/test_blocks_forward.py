"""Blocks of training against served blocks: every anchor of a row, the last ones too."""

from __future__ import annotations

import pytest
import torch
from conftest import make_draft, make_target
from tiers import thinned
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashDraftModel
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.forward import block_hidden_states, block_losses
from dflash_hf.blocks.losses import LossTerms
from dflash_hf.target.hidden_states import target_hidden_states, target_logits_function

LAYERS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "sliding, not causal": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "is_causal": False,
    },
}
BLOCK_SIZE, LENGTH = 5, 14


def served_block(draft: DFlashDraftModel, token: torch.Tensor, context: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Hidden states of a block whose context went through the cache in parts that end at `ends`."""
    size = draft.config.block_size
    cache, start = DFlashCache(config=draft.config), 0
    cache.activate_past_recording()
    for index, end in enumerate(ends):
        if index:
            cache.crop(-size)
        cache.set_previous_accepted_tokens(end - start)
        output = draft(
            noise_embeds=draft.embed_blocks(token.view(1, 1)),
            context_hidden_states=context[None, start:end],
            position_ids=torch.arange(start, end + size)[None],
            attention_mask=torch.ones(1, end + size, dtype=torch.long),
            cache=cache,
        ).last_hidden_state
        start = end
    return output[0]


def batch_of_rows(kind: str) -> TokenBatch:
    """Rows of several lengths, down to two tokens, padded on a side or packed."""
    torch.manual_seed(3)
    valid = torch.ones(4, LENGTH, dtype=torch.bool)
    segment_ids = None
    if kind == "packed":
        valid[1, 12:] = False
        segment_ids = torch.tensor([0] * 6 + [1] * 3 + [2] * 5).repeat(4, 1)
        segment_ids[2] = torch.tensor([0] * 2 + [1] * 2 + [2] * 10)
    else:
        for row, length in enumerate((14, 9, 3, 2)):
            padding = slice(length, None) if kind == "right" else slice(0, LENGTH - length)
            valid[row, padding] = False
    ids = torch.randint(0, 96, valid.shape).masked_fill(~valid, 0)
    states = torch.randn(*valid.shape, 64) * valid[..., None]
    return TokenBatch(ids, valid, segment_ids=segment_ids, hidden_states=states)


@torch.no_grad()
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", ["right", "left", "packed"])
@pytest.mark.parametrize(
    "block_attention", ["structured", *thinned(["dense"]), pytest.param("flex", marks=pytest.mark.spawns)]
)
def test_blocks_at_every_anchor_equal_served_blocks(layers, kind, block_attention):
    """Blocks that run past the end of a row, of a document and of the whole batch are among them."""
    # A second compilation with other shapes has dynamic ones, for which torch 2.13 writes wrong code on a CPU.
    torch.compiler.reset()
    draft = make_draft(make_target(), block_size=BLOCK_SIZE, **LAYERS[layers])
    batch = batch_of_rows(kind)
    plan = batch.plan_every_anchor(BLOCK_SIZE)
    trained = block_hidden_states(draft, draft, plan, batch, block_attention=block_attention)
    num_past_the_end = 0
    for block in plan.block_valid.nonzero()[:, 0].tolist():
        row, anchor = plan.sample_rows[block].item(), plan.anchor_positions[block].item()
        own = batch.valid[row] & (torch.arange(LENGTH) < anchor)
        if batch.segment_ids is not None:
            own &= batch.segment_ids[row] == batch.segment_ids[row, anchor]
        context = batch.hidden_states[row, own]
        for ends in ([len(context)], [len(context) // 2, len(context)], [0, 1, len(context)]):
            if ends == sorted(ends):
                served = served_block(draft, batch.input_ids[row, anchor], context, ends)
                torch.testing.assert_close(trained[block], served, atol=1e-5, rtol=1e-5)
        num_past_the_end += bool(plan.loss_mask[block].sum() < BLOCK_SIZE - 1)
    assert num_past_the_end >= 9


@pytest.mark.parametrize("block_attention", ["structured", "dense"])
def test_a_block_past_the_end_of_a_packed_document_sees_nothing_of_the_next_one(block_attention):
    """Its outputs do not change in any bit, and the gradient of the next document's states is exactly zero."""
    draft = make_draft(make_target(), block_size=BLOCK_SIZE)
    batch = batch_of_rows("packed")
    plan = batch.plan_every_anchor(BLOCK_SIZE)
    of_first = (plan.sample_rows == 0) & plan.block_valid & (plan.anchor_positions < 6)
    assert (plan.loss_mask[of_first].sum(-1) < BLOCK_SIZE - 1).any()
    states = batch.hidden_states.clone().requires_grad_()
    hidden = block_hidden_states(draft, draft, plan, batch.with_hidden_states(states), block_attention=block_attention)
    hidden[of_first].pow(2).sum().backward()
    assert states.grad[0, 6:].eq(0).all()
    assert states.grad[0, :5].ne(0).any()
    other_ids, other_states = batch.input_ids.clone(), batch.hidden_states.clone()
    other_ids[0, 6:], other_states[0, 6:] = 7, 100.0
    other = TokenBatch(other_ids, batch.valid, segment_ids=batch.segment_ids, hidden_states=other_states)
    changed = block_hidden_states(draft, draft, plan, other, block_attention=block_attention)
    assert torch.equal(changed[of_first], hidden[of_first])


@pytest.mark.parametrize("values", [{}, {"kl_weight": 0.5}, {"l1_weight": 0.5}, {"soft_labels": True}])
def test_ids_of_32_bits_give_the_losses_of_64(values):
    target = make_target()
    draft = make_draft(target)
    draft.tie_target(target)
    ids = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(ids, dtype=torch.bool)
    losses = []
    for given in (ids, ids.int()):
        states = target_hidden_states(
            target, given, valid, draft.config.target_layer_ids or [], include_final_state=True
        )
        context, final = states.split([states.shape[-1] - 32, 32], dim=-1)
        batch = TokenBatch(given, valid, hidden_states=context, final_hidden_states=final)
        terms, logits = LossTerms(**values), target_logits_function(target, draft.compute_logits)
        plan = batch.plan_every_anchor(4)
        losses.append(block_losses(draft, draft, plan, batch, terms=terms, compute_target_logits=logits).loss)
    assert losses[0].sum() > 0
    assert torch.equal(*losses)
