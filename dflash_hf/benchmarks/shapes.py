"""Shapes of a benchmarked training step. This module does not import torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("target", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class StepShapes:
    """
    Shapes of a training step. The defaults are those of SmolLM2-135M with a draft of three layers.

    Args:
        rows (`int`, defaults to 4): rows per step.
        length (`int`, defaults to 384): tokens per row.
        anchors (`int`, defaults to 64): blocks per row.
        documents (`int`, defaults to 1): equally long documents that are packed into each row.
        block_size, layers, num_target_layers (`int`): slots per block, layers of the draft, and target layers that it
            reads.
        hidden_size, intermediate_size, heads, kv_heads, head_dim, vocab_size (`int`): sizes of target and draft.
        target_layers (`int`, defaults to 30): layers of the target. With 0, random hidden states replace it.
    """

    rows: int = 4
    length: int = 384
    anchors: int = 64
    documents: int = 1
    block_size: int = 16
    layers: int = 3
    num_target_layers: int = 5
    hidden_size: int = 576
    intermediate_size: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152
    target_layers: int = 30

    @property
    def matrix_flops(self) -> float:
        """`float`: floating-point operations of all matrix products of draft and head in a step, backward included."""
        context, slots = self.rows * self.length, self.rows * self.anchors * self.block_size
        head_width, key_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        slot_weights = self.hidden_size * (2 * head_width + 2 * key_width + 3 * self.intermediate_size)
        context_weights = self.hidden_size * 2 * key_width
        keys = self.length / self.documents / 2 + self.block_size
        multiplications = (
            self.layers * (slots * slot_weights + context * context_weights + 2 * slots * keys * head_width)
            + context * self.num_target_layers * self.hidden_size**2
        )
        supervised = slots * (self.block_size - 1) / self.block_size
        # a weight has one product in forward and two in backward; the frozen head has one in backward
        return 2 * (3 * multiplications + 2 * supervised * self.vocab_size * self.hidden_size)


SHAPES = {
    "smollm2-135m": StepShapes(),
    "qwen3-8b": StepShapes(
        rows=4,
        length=3072,
        anchors=512,
        layers=5,
        hidden_size=4096,
        intermediate_size=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        target_layers=0,
    ),
}
