"""Methods and settings of a decoding benchmark. This module does not import torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass

from ..decoding import PROPOSALS


@dataclass(frozen=True)
class Method:
    """
    A method of decoding.

    Args:
        name (`str`): `"plain"` (`generate` without a draft), `"native"` (the loop of transformers), `"reference"` (the
            package `dflash`) or `"ours"` ([`speculative_generate`]).
        block_size (`int` or `"auto"`, *optional*): slots that `"ours"` verifies.
        proposal (`str`, *optional*): how `"ours"` proposes tokens when it samples.
        tree_size (`int`, *optional*): tokens that `"ours"` verifies in a tree, instead of `block_size`.
    """

    name: str
    block_size: int | str | None = None
    proposal: str | None = None
    tree_size: int | None = None

    @property
    def label(self) -> str:
        """`str`: name of the method in tables."""
        names = {"plain": "plain generate", "native": "transformers' loop", "reference": "dflash package"}
        if self.name != "ours":
            return names[self.name]
        if self.tree_size is not None:
            return f"ours, tree of {self.tree_size}"
        return f"ours, {self.block_size}" + (", sampled" if self.proposal == "sample" else "")


@dataclass(frozen=True)
class BenchmarkSettings:
    """
    Settings of a benchmark.

    Args:
        max_new_tokens (`int`, defaults to 128): greatest length of a response in tokens.
        batch_sizes (`tuple[int, ...]`, defaults to `(1, 2, 4, 8)`): numbers of sequences to decode together. The
            number of prompts is a multiple of each.
        temperatures (`tuple[float, ...]`, defaults to `(0.0, 1.0)`): temperatures to measure; 0 decodes greedily.
        block_sizes (`tuple[int | str, ...]`, defaults to `("auto",)`): slots that the loop of this package verifies,
            1 to the trained number, or `"auto"`.
        tree_sizes (`tuple[int, ...]`): tokens that the loop of this package verifies in trees.
        proposals (`tuple[str, ...]`, defaults to `("argmax",)`): `"argmax"` or `"sample"`, how the loop of this
            package proposes tokens when it samples.
        repeats (`int`, defaults to 1): how often every method decodes every batch.
        against_reference (`bool`, defaults to `False`): run the decoder of the package `dflash`, too.
        seed (`int`, defaults to 0): seed of sampling.
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
            num_prompts (`int`): number of prompts.
            trained_block_size (`int`): slots of the draft's blocks.

        Raises:
            ValueError: a value is outside its range.
        """
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} must be at least 2, since the first token comes from the "
                "prefill and needs no draft. Pass a larger number."
            )
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1. Pass a positive number.")
        for name in ("batch_sizes", "temperatures", "block_sizes", "proposals"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty and must have at least one value. Pass one.")
        for batch_size in self.batch_sizes:
            if batch_size < 1 or num_prompts < 1 or num_prompts % batch_size:
                raise ValueError(
                    f"{num_prompts} prompts do not fill whole batches of {batch_size}, and the speed of a smaller "
                    "batch would be counted as that of a full one. Pass a number of prompts that is a multiple of "
                    "every batch size."
                )
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number. Pass one.")
        for block_size in self.block_sizes:
            if block_size != "auto" and not (isinstance(block_size, int) and 1 <= block_size <= trained_block_size):
                raise ValueError(
                    f"block_size={block_size!r} must be 1 to {trained_block_size}, the slots that the draft was "
                    "trained for, or 'auto'. Pass one of these."
                )
        for tree_size in self.tree_sizes:
            if tree_size <= trained_block_size:
                raise ValueError(
                    f"tree_size={tree_size} must be more than the {trained_block_size} slots of a block. Pass a "
                    "larger tree."
                )
        for proposal in self.proposals:
            if proposal not in PROPOSALS:
                raise ValueError(f"proposal={proposal!r} is not known. Pass one of {', '.join(PROPOSALS)}.")

    def methods(self, temperature: float, batch_size: int) -> list[Method]:
        """Return the methods that can decode such a batch. The loops of other packages take one sequence."""
        methods = [Method("plain")]
        if batch_size == 1:
            methods += [Method("native"), *([Method("reference")] if self.against_reference else [])]
        proposals = self.proposals if temperature > 0 else (None,)
        methods += [Method("ours", size, proposal) for size in self.block_sizes for proposal in proposals]
        return methods + [Method("ours", tree_size=size) for size in self.tree_sizes]
