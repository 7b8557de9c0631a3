"""Settings of an evaluation on prompt sets. No torch, so that the command shows its help at once."""

from __future__ import annotations

from dataclasses import dataclass

THINKING = ("both", "on", "off")


@dataclass(frozen=True)
class SuiteSettings:
    """
    What to measure.

    Args:
        max_new_tokens (`int`): longest answer in tokens.
        temperatures (`tuple[float, ...]`): 0 decodes greedily.
        thinking (`str`): `"both"`, `"on"` or `"off"`; without effect where the chat template has no such switch.
        batch_sizes (`tuple[int, ...]`): conversations decoded together.
        block_size (`int` or `"auto"`, *optional*): slots to verify; the trained number if left out.
        tree_size (`int`, *optional*): tokens to verify in trees of first and later choices, in place of `block_size`.
        seed (`int`): of the draws.

    Raises:
        ValueError: a value breaks its rule.
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
                f"max_new_tokens={self.max_new_tokens} must be at least 2: a draft adds to a first token."
            )
        if self.thinking not in THINKING:
            raise ValueError(f"thinking={self.thinking!r} must be one of {', '.join(THINKING)}.")
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number.")
        for batch_size in self.batch_sizes:
            if batch_size < 1:
                raise ValueError(f"batch_size={batch_size} must be at least 1.")
