from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import greedy, make_draft, make_target
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, build_dflash_batch_plan
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.blocks.forward import block_losses
from dflash_hf.evaluation.compare import Comparison, Summary, summarize_comparisons
from dflash_hf.evaluation.timed_generation import Generation, generate_timed
from dflash_hf.target.hidden_states import target_hidden_states

DFLASH = {"speculation_type": "dflash"}


def prompts(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 96, (1, 1 + index % 9), generator=generator) for index in range(count)]


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.families)])
def test_fp32_greedy_text_equals_plain_generation_on_every_prompt(target, draft, count):
    for prompt in prompts(count):
        assert greedy(target, prompt, 24, assistant_model=draft, **DFLASH) == greedy(target, prompt, 24)


class ScriptedDraft(DFlashDraftModel):
    """A draft that proposes the tokens it is told: with `hidden_size == vocab_size` and an identity head."""

    def script(self, tokens: list[int], accept: str) -> ScriptedDraft:
        self.tokens, self.accept, self.calls = tokens, accept, 0
        return self

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, cache=None, **kwargs):
        size = noise_embeds.shape[-1]
        start = int(position_ids[0, -self.config.block_size])
        hidden = torch.zeros(1, self.config.block_size, size)
        for slot in range(self.config.block_size):
            token = self.tokens[start + slot] if start + slot < len(self.tokens) else 0
            hidden[0, slot, token if self.accept == "all" else (token + 1) % size] = 10
        self.calls += 1
        length = context_hidden_states.shape[1] + self.config.block_size
        for layer in range(self.config.num_hidden_layers):
            cache.update(torch.zeros(1, 2, length, 8), torch.zeros(1, 2, length, 8), layer)
        return SimpleNamespace(last_hidden_state=hidden)


def scripted_pair(**overrides) -> tuple[LlamaForCausalLM, ScriptedDraft]:
    """The target's own head cannot be the identity, so the one generation uses for drafting is swapped."""

    class TargetWithIdentityDraftHead(LlamaForCausalLM):
        def get_output_embeddings(self):
            head = nn.Linear(97, 97, bias=False)
            head.weight.data.copy_(torch.eye(97))
            return head

    base = make_target(hidden_size=97, num_attention_heads=1, num_key_value_heads=1, head_dim=8, **overrides)
    target = TargetWithIdentityDraftHead(base.config).eval()
    target.load_state_dict(base.state_dict())
    draft = make_draft(base, head_dim=8, num_attention_heads=2, num_key_value_heads=2)
    scripted = ScriptedDraft(draft.config).eval()
    return target, scripted


@pytest.mark.parametrize("accept", ["all", "none"])
def test_every_max_new_tokens_gives_as_many_tokens_as_plain(accept):
    """From 1 to 2B + 1 tokens, with everything accepted and everything rejected."""
    target, draft = scripted_pair()
    prompt = torch.tensor([[4, 8, 15]])
    full = greedy(target, prompt, 40)
    for count in range(1, 2 * draft.config.block_size + 2):
        scripted = draft.script([4, 8, 15, *full], accept)
        assert greedy(target, prompt, count, assistant_model=scripted, **DFLASH) == full[:count]
    scripted = draft.script([4, 8, 15, *full], accept)
    generation = generate_timed(
        target,
        {"input_ids": prompt},
        scripted,
        loop="transformers",
        max_new_tokens=25,
        do_sample=False,
        pad_token_id=0,
    )
    assert generation.committed == ([4] * 6 if accept == "all" else [1] * 23)


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        pass


@pytest.mark.parametrize("eos_as_list", [False, True])
def test_generation_ends_at_an_end_token_in_every_slot(eos_as_list):
    """No token of an accepted block follows it, and the streamer sees the same tokens."""
    target, draft = scripted_pair()
    ended_in_slots = set()
    for prompt in prompts(20):
        full = greedy(target, prompt, 12)
        position = max(index for index, token in enumerate(full) if token not in full[:index])
        eos = [full[position], 96] if eos_as_list else full[position]
        plain = greedy(target, prompt, 12, eos_token_id=eos)
        assert plain == full[: position + 1]
        streamer, scripted = Recorder(), draft.script([*prompt[0].tolist(), *full], "all")
        drafted = greedy(target, prompt, 12, assistant_model=scripted, eos_token_id=eos, streamer=streamer, **DFLASH)
        assert drafted == plain
        assert streamer.tokens == [*prompt[0].tolist(), *plain]
        ended_in_slots.add((position - 1) % 4)
    assert ended_in_slots == {0, 1, 2, 3}


def test_sampling_is_accepted_and_finishes(target, draft):
    torch.manual_seed(0)
    tokens = greedy(
        target, torch.tensor([[3, 4]]), 20, assistant_model=draft, do_sample=True, temperature=0.8, **DFLASH
    )
    assert len(tokens) == 20


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_every_dtype_pair_generates(target, draft, draft_dtype, target_dtype):
    """A bf16 target and an fp32 draft do not meet in one matrix product."""
    target.to(target_dtype)
    tokens = greedy(target, torch.tensor([[3, 4]]), 9, assistant_model=draft.to(draft_dtype), **DFLASH)
    assert len(tokens) == 9


def test_a_forgotten_speculation_type_says_what_to_pass(target, draft):
    """Classic assisted decoding would start and fail with an unrelated message."""
    with pytest.raises(AttributeError, match="speculation_type='dflash'"):
        greedy(target, torch.tensor([[3, 4]]), 9, assistant_model=draft)
    assert not hasattr(draft, "generation_config")


def test_a_wrong_target_is_refused_by_native_generation(draft):
    with pytest.raises(ValueError, match="Use the draft with its own target"):
        greedy(
            make_target(hidden_size=64, num_attention_heads=8),
            torch.tensor([[3, 4]]),
            9,
            assistant_model=draft,
            **DFLASH,
        )


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False},
    ],
)
@pytest.mark.parametrize("anchor", [1, 9, 17])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_training_logits_of_a_block_equal_the_first_draft_step_of_native_generation(variant, anchor, in_chunks):
    """The context comes from one prefill and from several accepted chunks."""
    target = make_target()
    draft = make_draft(target, **variant)
    prompt = torch.randint(1, 96, (1, 1 if in_chunks else anchor), generator=torch.Generator().manual_seed(anchor))
    served = {}  # position of the anchor -> hidden states of the block
    handle = draft.register_forward_hook(
        lambda module, args, kwargs, output: served.update(
            {kwargs["position_ids"][0, -4].item(): output.last_hidden_state[0]}
        ),
        with_kwargs=True,
    )
    text = torch.cat([prompt, torch.tensor([greedy(target, prompt, 24, assistant_model=draft, **DFLASH)])], dim=1)
    handle.remove()
    position = max(position for position in served if position <= anchor)
    assert in_chunks or position == anchor == min(served)

    valid = torch.ones_like(text, dtype=torch.bool)
    plan = build_dflash_batch_plan(
        valid,
        torch.tensor([1]),
        anchors_per_sample=20,
        gamma=3,
        optimizer_step=0,
        seed=0,
        replacement=False,
        supervised_mask=torch.arange(text.shape[1])[None] == position + 1,
    )
    assert plan.anchor_positions[plan.block_valid].tolist() == [position]
    context = target_hidden_states(target, text, valid, draft.config.target_layer_ids)
    captured = []
    handle = draft.register_forward_hook(lambda module, args, output: captured.append(output.last_hidden_state))
    block_losses(draft, draft, plan, TokenBatch(text, valid, hidden_states=context))
    handle.remove()
    trained = captured[0].view(20, 4, -1)[0]
    torch.testing.assert_close(trained, served[position], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft.compute_logits(trained), target.lm_head(served[position]), atol=1e-4, rtol=1e-4)


def test_taps_are_the_outputs_of_the_named_layers():
    """Layer i adds 10^i, so a layer id that is off by one shows."""
    target = make_target(hidden_size=32)

    class AddPower(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.index = layer, layer.self_attn.layer_idx

        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + 10.0**self.index

    for layer in target.model.layers:
        layer.forward = AddPower(layer).forward
    target.get_input_embeddings().weight.data.zero_()
    ids = torch.tensor([[1, 2, 3]])
    states = target_hidden_states(target, ids, torch.ones_like(ids, dtype=torch.bool), [0, 2])
    assert states.shape == (1, 3, 64)
    assert states[..., :32].eq(1).all()
    assert states[..., 32:].eq(111).all()


def test_a_layer_the_target_lacks_is_named(target):
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"no hidden states for layers \[7\]"):
        target_hidden_states(target, ids, torch.ones_like(ids, dtype=torch.bool), [1, 7])


@pytest.mark.parametrize("rows", [[[5, 6, 7, 0, 0], [0, 0, 5, 6, 7]], [[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]]])
def test_padding_on_either_side_does_not_change_the_target_states(target, rows):
    alone = torch.tensor([[5, 6, 7]])
    expected = target_hidden_states(target, alone, alone > 0, [0, 2])[0]
    ids = torch.tensor(rows)
    states = target_hidden_states(target, ids, ids > 0, [0, 2])
    torch.testing.assert_close(states[0, :3], expected, atol=1e-5, rtol=1e-4)
    assert states[0, 3:].eq(0).all()
    if rows[1][0] == 0:
        torch.testing.assert_close(states[1, 2:], expected, atol=1e-5, rtol=1e-4)


def test_generation_uses_the_checkpoint_of_the_pair(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_draft(target).save_pretrained(tmp_path / "draft")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    draft = DFlashDraftModel.from_pretrained(tmp_path / "draft")
    prompt = torch.tensor([[3, 4, 5]])
    assert greedy(target, prompt, 12, assistant_model=draft, **DFLASH) == greedy(target, prompt, 12)
    assert not draft.is_tied  # native generation needs no tie


def test_an_answer_without_a_drafted_pass_has_no_acceptance_length():
    generation = Generation([1], 1.0, [])
    assert generation.acceptance_length is None
    summary = summarize_comparisons([Comparison("a", generation, generation)], block_size=4)
    assert (summary.acceptance_length, summary.slot_acceptance) == (None, [None, None, None])


def test_summary_counts_what_was_committed():
    plain = Generation(list(range(10)), 2.0, [])
    comparisons = [
        Comparison("a", plain, Generation(list(range(10)), 1.0, [4, 4, 1])),
        Comparison("b", plain, Generation([0, 1, 2, 9], 0.8, [2, 1])),
    ]
    summary = summarize_comparisons(comparisons, block_size=4)
    assert summary.acceptance_length == pytest.approx(12 / 5)
    assert summary.slot_acceptance == pytest.approx([3 / 5, 2 / 5, 2 / 5])
    assert (summary.plain_tokens_per_s, summary.num_identical) == (5.0, 1)
    assert summary.drafted_tokens_per_s == pytest.approx(14 / 1.8)
    assert summary.speed_up == pytest.approx((2.0 + 1.0) / 2)
    assert (summary.num_near_ties, summary.near_tie_gap) == (None, None)  # nobody has looked at the second prompt


def test_slots_count_where_they_were_verified():
    comparison = Comparison("a", Generation([1], 1.0, []), Generation([1], 1.0, [3, 1, 2], [3, 3, 1]))
    assert summarize_comparisons([comparison], block_size=4).slot_acceptance == [2 / 3, 1 / 2, 0.0]


def test_a_summary_of_version_0_1_0_is_read():
    summary = Summary(2, 1.5, [0.5, None], 10.0, 12.0, 1.2, 1)
    old = {name: value for name, value in summary.as_dict().items() if "near_tie" not in name}
    old["accept_len"] = old.pop("acceptance_length")
    assert Summary.from_dict(old) == Summary.from_dict(summary.as_dict()) == summary
    with pytest.raises(TypeError, match="speed"):
        Summary.from_dict({**old, "speed": 1.0})
