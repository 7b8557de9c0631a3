"""Settings of an evaluation on prompt sets. This module does not import torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass

THINKING = ("both", "on", "off")


@dataclass(frozen=True)
class SuiteSettings:
    """
    Settings of an evaluation.

    Args:
        max_new_tokens (`int`, defaults to 256): greatest length of a response in tokens.
        temperatures (`tuple[float, ...]`, defaults to `(0.0, 1.0)`): temperatures to measure; 0 decodes greedily.
        thinking (`str`, defaults to `"both"`): `"both"`, `"on"` or `"off"`. It has no effect if the chat template does
            not use `enable_thinking`.
        batch_sizes (`tuple[int, ...]`, defaults to `(1,)`): numbers of conversations to decode together.
        block_size (`int` or `"auto"`, *optional*): slots to verify, by default as many as the draft was trained for.
        tree_size (`int`, *optional*): tokens to verify in trees, instead of a block. A tree joins later choices of the
            draft to its first ones.
        seed (`int`, defaults to 0): seed of sampling.

    Raises:
        ValueError: a value is outside its range.
    """

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    thinking: str = THINKING[0]
    batch_sizes: tuple[int, ...] = (1,)
    block_size: int | str | None = None
    tree_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} must be at least 2, since the first token comes from the "
                "prefill and needs no draft. Pass a larger number."
            )
        if self.thinking not in THINKING:
            raise ValueError(f"thinking={self.thinking!r} is not known. Pass one of {', '.join(THINKING)}.")
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ValueError(
                    f"temperature={temperature} must be 0 (greedy) or a positive number. Pass one of these."
                )
        for batch_size in self.batch_sizes:
            if batch_size < 1:
                raise ValueError(f"batch_size={batch_size} must be at least 1. Pass a positive number.")
