from __future__ import annotations

import copy

import pytest
import reference
import torch
from conftest import make_draft, make_target
from tiers import thinned
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.cache_utils import DFlashCache

from dflash_hf import DFlashConfig, DFlashDraftModel, build_dflash_batch_plan
from dflash_hf.blocks.attention import training_masks
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.model.modeling_dflash import DFlashRMSNorm, embed_tokens

VARIANTS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "sliding, not causal": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
        "is_causal": False,
    },
}


def run_training(draft, context, block_inputs, plan, valid, kind="auto", **kwargs):
    """Return the outputs of all blocks of a plan, computed in one pass, as `[N, B, H]`."""
    rows, length = valid.shape
    positions = torch.arange(length).repeat(rows, 1)
    return draft(
        noise_embeds=block_inputs,
        context_hidden_states=context,
        attention_mask=training_masks(draft.config, plan, TokenBatch(valid.long(), valid), kind),
        position_ids=torch.cat([positions, plan.query_positions.view(rows, -1)], dim=1),
        **kwargs,
    ).last_hidden_state.view(plan.loss_mask.shape[0], draft.config.block_size, -1)


def make_plan(valid, **kwargs):
    settings = {"anchors_per_sample": 6, "gamma": 3, "optimizer_step": 0, "seed": 0, "replacement": False}
    return build_dflash_batch_plan(valid, torch.arange(1, 1 + valid.shape[0]), **{**settings, **kwargs})


def invalid_inputs():
    """Rows with fewer windows than blocks, and with none. The inputs of slots that do not exist are not numbers."""
    valid = torch.ones(3, 6, dtype=torch.bool)
    valid[1] = False
    plan = make_plan(valid, partial_windows=True)
    context = torch.randn(3, 6, 64, requires_grad=True)
    inputs = torch.full((3, 24, 32), float("nan"))
    inputs.view(18, 4, 32)[plan.slot_valid] = 1.0
    assert plan.block_valid.sum() == 10
    return valid, plan, context, inputs.requires_grad_()


@pytest.mark.parametrize("variant", thinned(VARIANTS, "sliding, not causal"))
def test_packed_blocks_equal_the_loop_written_network_in_value_and_gradient(variant):
    draft = make_draft(make_target(), **VARIANTS[variant]).double()
    config = draft.config
    valid = torch.ones(1, 11, dtype=torch.bool)
    plan = make_plan(valid)
    context = torch.randn(1, 11, 64, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(1, 24, 32, dtype=torch.float64, requires_grad=True)
    hidden = run_training(draft, context, inputs, plan, valid)
    probe = torch.randn_like(hidden)
    names, parameters = zip(*draft.named_parameters(), strict=True)
    gradients = torch.autograd.grad((hidden * probe).sum(), [*parameters, context, inputs])

    weights = dict(zip(names, parameters, strict=True))
    expected = torch.stack(
        [
            reference.draft_block(
                weights,
                inputs[0, 4 * block : 4 * block + 4],
                context[0, : plan.anchor_positions[block]],
                num_layers=2,
                num_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                eps=config.rms_norm_eps,
                theta=config.rope_theta,
                windows=[config.layer_window(0), config.layer_window(1)],
                causal=[config.in_block_causal(0), config.in_block_causal(1)],
            )
            for block in range(6)
        ]
    )
    assert plan.anchor_positions.tolist() != [0] * 6
    # fp64 weights; norms and angles are fp32 by design, which bounds the agreement
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)
    expected_gradients = torch.autograd.grad((expected * probe).sum(), [*parameters, context, inputs])
    for name, ours, theirs in zip([*names, "context", "inputs"], gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_block_cannot_see_context_at_or_after_its_anchor(draft):
    """The blocks overlap with anchors 1 apart. Outputs do not change in any bit, and the gradient is exactly zero."""
    valid = torch.ones(1, 12, dtype=torch.bool)
    plan = make_plan(valid, anchors_per_sample=9)
    assert plan.anchor_positions.tolist() == list(range(9))
    context = torch.randn(1, 12, 64, requires_grad=True)
    inputs = torch.randn(1, 36, 32, requires_grad=True)
    hidden = run_training(draft, context, inputs, plan, valid)
    for block in range(9):
        context_gradient, input_gradient = torch.autograd.grad(
            hidden[block].pow(2).sum(), [context, inputs], retain_graph=True
        )
        assert context_gradient[0, block:].eq(0).all()
        assert block == 0 or context_gradient[0, :block].ne(0).any()
        own = torch.zeros(36, dtype=torch.bool)
        own[4 * block : 4 * block + 4] = True
        assert input_gradient[0, ~own].eq(0).all()
        changed = context.detach().clone()
        changed[0, block:] += 100
        assert torch.equal(run_training(draft, changed, inputs, plan, valid)[block], hidden[block])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["structured", "dense"])
def test_the_mask_of_a_plan_alone_gives_exact_zeros_and_no_gradient_at_invalid_slots(variant, kind):
    draft = make_draft(make_target(), **VARIANTS[variant])
    valid, plan, context, inputs = invalid_inputs()
    hidden = run_training(draft, context, inputs, plan, valid, kind)
    assert hidden[~plan.slot_valid].eq(0).all()
    assert hidden.isfinite().all()
    hidden.sum().backward()
    assert inputs.grad.view(18, 4, 32)[~plan.slot_valid].eq(0).all()
    assert context.grad[1].eq(0).all()
    assert context.grad[0, 0].ne(0).any()
    assert all(parameter.grad.isfinite().all() for parameter in draft.parameters())
    assert hidden[plan.slot_valid].ne(0).all()  # slot 0 of the block at position 0 among them, which sees no context
    nothing = run_training(
        draft, context, inputs, plan, valid, kind, query_valid_mask=torch.zeros(3, 24, dtype=torch.bool)
    )
    assert nothing.eq(0).all()


@pytest.mark.spawns
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_flex_mask_of_a_plan_alone_gives_exact_zeros_at_invalid_slots(variant):
    draft = make_draft(make_target(), **VARIANTS[variant])
    valid, plan, context, inputs = invalid_inputs()
    with torch.no_grad():  # FlexAttention has no backward pass on a CPU
        hidden = run_training(draft, context, inputs, plan, valid, "flex")
        expected = run_training(draft, context, inputs, plan, valid, "dense")
    assert hidden[~plan.slot_valid].eq(0).all()
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)


def test_a_batch_without_any_block_still_runs_and_stays_in_the_graph(draft):
    valid = torch.zeros(1, 3, dtype=torch.bool)
    plan = make_plan(valid)
    hidden = run_training(draft, torch.randn(1, 3, 64), torch.randn(1, 24, 32), plan, valid)
    hidden.sum().backward()
    assert hidden.eq(0).all()
    assert all(parameter.grad is not None for parameter in draft.parameters())


def test_gradient_checkpointing_changes_nothing(draft):
    """Checkpointing over inputs that need no gradient could leave parameters without one."""
    valid = torch.ones(1, 9, dtype=torch.bool)
    plan, context, inputs = make_plan(valid), torch.randn(1, 9, 64), torch.randn(1, 24, 32)
    gradients = []
    for enable in (False, True):
        draft.train()
        if enable:
            draft.gradient_checkpointing_enable()
        draft.zero_grad()
        run_training(draft, context, inputs, plan, valid).pow(2).sum().backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [[7], [0, 7], [2, 1, 4], [6, 1]])
def test_serving_in_chunks_through_the_cache_equals_one_pass(variant, chunks):
    draft = make_draft(make_target(), **VARIANTS[variant])
    context, inputs = torch.randn(1, 7, 64), torch.randn(1, 4, 32)
    with torch.no_grad():
        whole = draft(noise_embeds=inputs, context_hidden_states=context).last_hidden_state
        cache, start = DFlashCache(config=draft.config), 0
        cache.activate_past_recording()
        for chunk in chunks:
            if start or (chunks[0] == 0 and cache.get_seq_length()):
                cache.crop(-4)
            cache.set_previous_accepted_tokens(chunk)
            positions = torch.arange(start, start + chunk + 4)[None]
            output = draft(
                noise_embeds=inputs,
                context_hidden_states=context[:, start : start + chunk],
                position_ids=positions,
                attention_mask=torch.ones(1, start + chunk + 4, dtype=torch.long),
                cache=cache,
            ).last_hidden_state
            start += chunk
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)


def test_an_empty_context_works(draft):
    output = draft(noise_embeds=torch.randn(1, 4, 32), context_hidden_states=torch.randn(1, 0, 64))
    assert output.last_hidden_state.isfinite().all()


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_pair_computes_in_the_drafts_and_returns_the_targets(draft, draft_dtype, target_dtype):
    draft.to(draft_dtype)
    embeds, context = torch.randn(1, 4, 32, dtype=target_dtype), torch.randn(1, 5, 64, dtype=target_dtype)
    output = draft(noise_embeds=embeds, context_hidden_states=context).last_hidden_state
    assert output.dtype == target_dtype


def test_a_wrong_target_is_refused_in_forward_with_both_sides_in_the_message(draft):
    """Native generation never ties the draft, so the forward pass checks the widths again."""
    with pytest.raises(ValueError, match=r"width 32 and 64 context values.*gave 48 and 96"):
        draft(noise_embeds=torch.randn(1, 4, 48), context_hidden_states=torch.randn(1, 5, 96))
    with pytest.raises(ValueError, match="attention_mask has 3 columns"):
        draft(
            noise_embeds=torch.randn(1, 4, 32),
            context_hidden_states=torch.randn(1, 5, 64),
            attention_mask=torch.ones(1, 3),
        )


def test_rotary_angles_survive_loading_and_casting(draft, target, tmp_path):
    """from_pretrained must leave no buffer uninitialised and .to() must cast none, as position 500 would show."""
    draft.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert not list(loaded.buffers())
    inputs = {
        "noise_embeds": torch.randn(1, 4, 32),
        "context_hidden_states": torch.randn(1, 500, 64),
    }
    with torch.no_grad():
        expected = draft(**inputs).last_hidden_state
        assert torch.equal(loaded(**inputs).last_hidden_state, expected)
        half = copy.deepcopy(draft).to(torch.bfloat16)
        there_and_back = copy.deepcopy(half).float()
        rounded = copy.deepcopy(draft)
        rounded.load_state_dict({name: value.bfloat16().float() for name, value in draft.state_dict().items()})
        assert torch.equal(there_and_back(**inputs).last_hidden_state, rounded(**inputs).last_hidden_state)


def test_rope_theta_and_scaling_change_what_runs():
    target = make_target()
    inputs = {"noise_embeds": torch.randn(1, 4, 32), "context_hidden_states": torch.randn(1, 40, 64)}
    outputs = []
    for rope in (
        {"rope_theta": 1e4},
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ):
        if "rope_parameters" in rope:
            rope = {"rope_theta": None, **rope}
        with torch.no_grad():
            outputs.append(make_draft(target, **rope)(**inputs).last_hidden_state)
    for first in range(4):
        for second in range(first):
            assert not torch.allclose(outputs[first], outputs[second], atol=1e-4)


def test_the_body_owns_no_embedding_and_no_head(draft):
    names = set(draft.state_dict())
    assert names >= {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"}
    assert not any("embed" in name or "head" in name for name in names)
    assert sum(parameter.numel() for parameter in draft.parameters()) == sum(
        v.numel() for v in draft.state_dict().values()
    )


def test_registered_with_the_auto_classes():
    config = AutoConfig.for_model("dflash", num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=8)
    assert isinstance(config, DFlashConfig)
    small = DFlashConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        mask_token_id=96,
        initializer_range=0.02,
    )
    model = AutoModel.from_config(small)
    assert isinstance(model, DFlashDraftModel)
    assert 0.015 < model.fc.weight.std() < 0.025
    assert model.norm.weight.eq(1).all()


def test_a_new_draft_starts_with_even_logits_and_a_target_by_name_equals_the_live_one(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path)
    settings = {"num_hidden_layers": 1, "num_target_layers": 2, "block_size": 4, "mask_token_id": 96}
    drafts = []
    for source in (target, str(tmp_path)):
        torch.manual_seed(0)
        drafts.append(DFlashDraftModel.from_target(source, **settings))
    live, named = drafts
    assert torch.equal(live.norm.weight, named.norm.weight)
    hidden = live(noise_embeds=torch.randn(8, 4, 32), context_hidden_states=torch.randn(8, 5, 64)).last_hidden_state
    assert 0.7 < live.compute_logits(hidden).std() < 1.3


def test_tensor_parallel_plan_names_existing_modules(draft):
    modules = {name.replace(f"layers.{index}", "layers.*") for index in range(2) for name, _ in draft.named_modules()}
    assert set(DFlashConfig.base_model_tp_plan) <= modules


def test_embedding_scale_is_kept_and_only_embed_norm_is_bypassed():
    class ScaledEmbedding(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3

    class NormedEmbedding(nn.Embedding):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.embed_norm = nn.LayerNorm(4)

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    ids = torch.tensor([[1, 2]])
    scaled, normed = ScaledEmbedding(5, 4), NormedEmbedding(5, 4)
    assert torch.equal(embed_tokens(scaled, ids), scaled.weight[ids] * 3)
    assert torch.equal(embed_tokens(normed, ids), normed.weight[ids])
    assert isinstance(normed.embed_norm, nn.LayerNorm)


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 8), (0, 4)])
def test_the_lean_norm_equals_the_written_out_one_in_value_and_gradient(shape):
    torch.manual_seed(0)
    norm = DFlashRMSNorm(shape[-1], eps=1e-3)
    norm.weight.data.uniform_(0.5, 2)
    x, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    output = norm(x)
    gradients = torch.autograd.grad(output, (x, norm.weight), upstream)
    expected = norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (x, norm.weight), upstream), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)
