"""Settings of a decoding benchmark. No torch, so that the command shows its help at once."""

from __future__ import annotations

from dataclasses import dataclass

from ..decoding import PROPOSALS
from .decoding_results import Method


@dataclass(frozen=True)
class BenchmarkSettings:
    """
    What to measure.

    Args:
        max_new_tokens (`int`): longest answer in tokens.
        batch_sizes (`tuple[int, ...]`): rows decoded together; the number of prompts is a multiple of each.
        temperatures (`tuple[float, ...]`): 0 decodes greedily.
        block_sizes (`tuple[int | str, ...]`): slots that ours verifies, 1 to the trained number, or `"auto"`.
        tree_sizes (`tuple[int, ...]`): tokens that ours verifies in trees.
        proposals (`tuple[str, ...]`): `"argmax"`, `"sample"`: how ours proposes when sampling.
        repeats (`int`): times that every batch is decoded by every method.
        against_reference (`bool`): also run the decoder of the package `dflash`.
        seed (`int`): of the draws.
    """

    max_new_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    block_sizes: tuple[int | str, ...] = ("auto",)
    tree_sizes: tuple[int, ...] = ()
    proposals: tuple[str, ...] = ("argmax",)
    repeats: int = 1
    against_reference: bool = False
    seed: int = 0

    def check(self, num_prompts: int, trained_block_size: int) -> None:
        """
        Refuse settings that cannot be measured.

        Args:
            num_prompts (`int`): prompts at hand.
            trained_block_size (`int`): slots of the draft's blocks.

        Raises:
            ValueError: a value breaks its rule.
        """
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} must be at least 2: a draft adds to a first token."
            )
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1.")
        for name in ("batch_sizes", "temperatures", "block_sizes", "proposals"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty. Give at least one value.")
        for batch_size in self.batch_sizes:
            if batch_size < 1 or num_prompts < 1 or num_prompts % batch_size:
                raise ValueError(
                    f"{num_prompts} prompts make no whole batches of {batch_size}: a part of a batch would count as a "
                    "full one. Choose a number of prompts that is a multiple of every batch size."
                )
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number.")
        for block_size in self.block_sizes:
            if block_size != "auto" and not (isinstance(block_size, int) and 1 <= block_size <= trained_block_size):
                raise ValueError(
                    f"block_size={block_size!r} must be 1 to {trained_block_size}, which the draft was trained for, "
                    "or 'auto'."
                )
        for tree_size in self.tree_sizes:
            if tree_size <= trained_block_size:
                raise ValueError(f"tree_size={tree_size} must be more than the {trained_block_size} slots of a block.")
        for proposal in self.proposals:
            if proposal not in PROPOSALS:
                raise ValueError(f"proposal={proposal!r} must be one of {', '.join(PROPOSALS)}.")

    def methods(self, temperature: float, batch_size: int) -> list[Method]:
        """Methods that can decode such a batch; the other loops take one row."""
        methods = [Method("plain")]
        if batch_size == 1:
            methods += [Method("native"), *([Method("reference")] if self.against_reference else [])]
        proposals = self.proposals if temperature > 0 else (None,)
        methods += [Method("ours", size, proposal) for size in self.block_sizes for proposal in proposals]
        return methods + [Method("ours", tree_size=size) for size in self.tree_sizes]
