"""What only a CUDA GPU can show: FlexAttention trains like the dense oracle, and compiles once; text is plain's."""

from __future__ import annotations

import pytest
import torch
from conftest import make_draft, make_target
from decoding_pairs import ragged_prompts
from training_runs import make_trainer

from dflash_hf import build_dflash_batch_plan, speculative_generate
from dflash_hf.blocks.attention import training_masks
from dflash_hf.blocks.batch import TokenBatch
from dflash_hf.data.collator import DFlashCollator

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["flex", "structured"])
def test_every_kind_of_attention_equals_the_dense_one_in_value_and_gradient(kind, packed, window):
    target = make_target(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window} if window else {}
    draft = make_draft(target, **layers).cuda()
    length, blocks = 200, 24
    valid = torch.ones(3, length, dtype=torch.bool, device="cuda")
    valid[1, 150:] = False
    valid[2, :30] = False
    segments = (torch.arange(length, device="cuda") // 70).repeat(3, 1) if packed else None
    plan = build_dflash_batch_plan(
        valid,
        torch.arange(3, device="cuda"),
        anchors_per_sample=blocks,
        gamma=3,
        optimizer_step=0,
        seed=0,
        segment_ids=segments,
        replacement=False,
        partial_windows=True,
    )
    batch = TokenBatch(valid.long(), valid, segment_ids=segments)
    torch.manual_seed(0)
    noise, context = torch.randn(3, blocks * 4, 64, device="cuda"), torch.randn(3, length, 128, device="cuda")
    upstream = torch.randn(3, blocks * 4, 64, device="cuda")
    results = []
    for way in ("dense", kind):
        draft.zero_grad()
        output = draft(
            noise_embeds=noise,
            context_hidden_states=context,
            attention_mask=training_masks(draft.config, plan, batch, way),
            position_ids=torch.cat(
                [torch.arange(length, device="cuda").repeat(3, 1), plan.query_positions.view(3, -1)], dim=1
            ),
        ).last_hidden_state
        output.backward(upstream)
        results.append([output, *(parameter.grad.clone() for parameter in draft.parameters())])
    for ours, expected in zip(results[1], results[0], strict=True):
        # TF32 and other orders of summation inside the kernels
        torch.testing.assert_close(ours, expected, atol=2e-3 * expected.abs().max().item(), rtol=2e-3)


def test_five_lengths_compile_nothing_new_after_the_first(tmp_path):
    target = make_target(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(1, 96, (length,), generator=generator).tolist()} for length in range(60, 260, 40)
    ]
    trainer = make_trainer(target.cuda(), tmp_path, rows=rows, use_cpu=False, bf16=True)
    assert trainer.data_collator == DFlashCollator(pad_to_multiple_of=512)
    graphs = []
    for index in range(5):
        batch = trainer.data_collator([trainer.train_dataset[index]])
        trainer.training_step(trainer.model, batch, None)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 5


@pytest.mark.parametrize("settings", [{}, {"tree_size": 9}, {"block_size": "auto"}])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_greedy_text_is_plain_generations_and_passes_are_timed(num_rows, settings):
    target = make_target().cuda()
    draft = make_draft(target).cuda()
    inputs = {name: value.cuda() for name, value in ragged_prompts(num_rows).items()}
    kwargs = {**inputs, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    output = speculative_generate(target, draft, **settings, **kwargs)
    assert torch.equal(output.sequences, target.generate(**kwargs))
    assert output.statistics.draft_s > 0
    assert output.statistics.verify_s > 0
