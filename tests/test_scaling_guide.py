"""The numbers of docs/scaling.md, from configurations of the public targets and the formulas of that page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from dflash_hf import DFlashBody, DFlashConfig, DFlashTrainingArguments
from dflash_hf.benchmarks.shapes import SHAPES
from dflash_hf.blocks.head_losses import DEFAULT_HEAD_TILE, default_chunk_size

GUIDE = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()
# as their config.json on the Hub says
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
TARGETS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336, **LLAMA
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288, **QWEN
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600, **QWEN
    ),
    "Llama-3.1-70B": LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672, **LLAMA
    ),
}
ROWS, TOKENS, ANCHORS = 8, 2048, 64


def draft_config(target: PreTrainedConfig) -> DFlashConfig:
    return DFlashConfig.from_target(target, mask_token_id=target.vocab_size - 1)


def num_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layer_bytes(config: DFlashConfig, slots: int, context: int) -> int:
    """What a layer keeps for the backward pass, as the guide has it."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return slots * (12 * hidden + 8 * query + 8 * inner) + (slots + context) * 8 * key


def cells(target: PreTrainedConfig) -> dict[str, str]:
    """One column of the table."""
    config = draft_config(target)
    taps, hidden, vocab = len(config.target_layer_ids or []), config.hidden_size, config.vocab_size
    with torch.device("meta"):
        of_target, of_draft = num_weights(AutoModelForCausalLM.from_config(target)), num_weights(DFlashBody(config))
    slots, context, supervised = ROWS * ANCHORS * config.block_size, ROWS * TOKENS, ROWS * ANCHORS * 15
    tile_slots, tile_columns = DEFAULT_HEAD_TILE
    one_layer, ends = layer_bytes(config, slots, context), 6 * context * hidden + 4 * slots * hidden
    numbers = {
        "target in bf16": 2 * of_target,
        "its forward pass": 6 * context * target.intermediate_size,
        "hidden-state cache of 10 million tokens": 10**7 * 2 * taps * hidden,
        "hidden states of a step": context * 2 * taps * hidden,
        "draft, gradient, AdamW": 16 * of_draft,
        "draft, gradient, Muon": 12 * of_draft,
        "bf16 copies": 2 * of_draft,
        "DDP's buckets": 4 * of_draft,
        "all logits of a step (not computed)": 8 * supervised * vocab,
        "the chunked loss": tile_slots * tile_columns * 6 + tile_slots * hidden * 4 + 8 * supervised * hidden,
        "activations": config.num_hidden_layers * one_layer + ends,
        "activations with `gradient_checkpointing`": one_layer + 4 * config.num_hidden_layers * slots * hidden + ends,
    }
    needed = (
        "target in bf16",
        "hidden states of a step",
        "draft, gradient, Muon",
        "bf16 copies",
        "the chunked loss",
        "activations with `gradient_checkpointing`",
    )
    numbers["**one process, Muon, checkpointing**"] = sum(numbers[name] for name in needed)
    return {
        "weights of the target": f"{of_target / 1e9:.1f} billion",
        "weights of the draft": f"{of_draft / 1e9:.2f} billion",
        "hidden states of a token": f"{2 * taps * hidden / 1000:.1f} kB",
        **{
            name: f"{count / 1e9:.1f} GB" if count < 1e11 else f"{count / 1e9:.0f} GB"
            for name, count in numbers.items()
        },
    }


def table() -> dict[str, list[str]]:
    """Lines of the guide's last table of numbers, by their first cell."""
    lines = GUIDE.split("| | " + " | ".join(TARGETS) + " |\n")[1].split("\n\n")[0].splitlines()[1:]
    return {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}


@pytest.mark.parametrize("name", TARGETS)
def test_the_numbers_of_a_target_follow_from_its_configuration(name):
    column = list(TARGETS).index(name)
    assert {what: line[column] for what, line in table().items()} == cells(TARGETS[name])


def test_the_readme_has_the_arithmetic_of_an_8b_target():
    text = " ".join((Path(__file__).parent.parent / "README.md").read_text().split())
    numbers = cells(TARGETS["Qwen3-8B"])
    with torch.device("meta"):
        of_target = num_weights(AutoModelForCausalLM.from_config(TARGETS["Qwen3-8B"]))
    shapes = replace(SHAPES["qwen3-8b"], rows=ROWS, length=TOKENS, anchors=ANCHORS, target_layers=0)
    target_flops = 2 * of_target * ROWS * TOKENS
    step_flops = target_flops + shapes.matrix_flops
    hours = step_flops * 3 * 20_000 / ROWS / 400e12 / 3600
    assert f"has {numbers['weights of the draft']} weights" in text
    assert f"takes {numbers['**one process, Muon, checkpointing**']} on" in text
    assert f"and {round(step_flops / 1e12, -1):.0f} TFLOP a step" in text
    assert f"forward pass is {round(target_flops / 1e12, -1):.0f}." in text
    assert "about two hours" in text
    assert round(hours) == 2


def test_the_defaults_of_the_guide_are_those_of_the_package():
    fields = DFlashTrainingArguments.__dataclass_fields__
    assert fields["per_device_train_batch_size"].default == ROWS
    assert fields["max_length"].default == TOKENS
    assert fields["anchors_per_sample"].default == ANCHORS
    assert DEFAULT_HEAD_TILE == (4096, 8192)
    assert default_chunk_size(torch.device("cuda")) == 1024
    for target in TARGETS.values():
        config = draft_config(target)
        assert (config.block_size, config.num_hidden_layers, len(config.target_layer_ids or [])) == (16, 5, 5)


class KeepsItsInputs(torch.autograd.Function):
    """Attention as far as memory goes: FlexAttention keeps queries, keys, values and its output."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.zeros_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(torch.zeros_like(kept) for kept in ctx.saved_tensors[:3])


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_autograd_keeps_what_the_formulas_count(is_checkpointed):
    config = DFlashConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        mask_token_id=99,
    )
    body = DFlashBody(config).train()
    if is_checkpointed:
        body.gradient_checkpointing_enable()
    rows, length, anchors = 4, 200, 6
    slots, context = rows * anchors * 16, rows * length
    parameters = {parameter.untyped_storage().data_ptr() for parameter in body.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    states = torch.randn(rows, length, 5 * 128, dtype=torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        body(
            noise_embeds=torch.randn(rows, anchors * 16, 128, dtype=torch.bfloat16),
            context_hidden_states=states,
            attention_mask=lambda query, key, value, **_: KeepsItsInputs.apply(query, key, value).transpose(1, 2),
        )
    copies = 2 * sum(parameter.numel() for parameter in body.parameters() if parameter.ndim == 2)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - states.nbytes
    ends = 6 * context * 128 + 4 * slots * 128
    if is_checkpointed:  # the layer that is recomputed and the copies of its weights come in the backward pass
        assert measured == pytest.approx(4 * 5 * slots * 128 + ends, rel=0.02)
    else:
        assert measured - copies == pytest.approx(5 * layer_bytes(config, slots, context) + ends, rel=0.02)
