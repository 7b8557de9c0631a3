"""What an evaluation keeps of each answer pair: one turn of a batch, answered without and with the draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """
    How prompts are decoded.

    Args:
        temperature (`float`): 0 decodes greedily.
        thinking (`bool`, *optional*): `enable_thinking` of the chat template; `None` if it has no such switch.
        batch_size (`int`): conversations decoded together.
    """

    temperature: float
    thinking: bool | None = None
    batch_size: int = 1

    @property
    def label(self) -> str:
        """
        The setting in words.

        Example:

        ```python
        >>> Setting(0.0).label, Setting(0.7, thinking=True, batch_size=4).label
        ('greedy, batch 1', 'T = 0.7, thinking, batch 4')

        ```
        """
        thinking = {None: "", True: ", thinking", False: ", no thinking"}[self.thinking]
        decoding = "greedy" if self.temperature == 0 else f"T = {self.temperature:g}"
        return f"{decoding}{thinking}, batch {self.batch_size}"


@dataclass(frozen=True)
class AnswerPair:
    """
    One turn of a batch of conversations, answered without and with the draft.

    Args:
        set_name (`str`): of the prompt set.
        temperature (`float`), thinking (`bool`, *optional*), batch_size (`int`): the [`Setting`].
        batch (`int`), turn (`int`): which, counted from 0.
        prompts (`list[int]`): numbers of the conversations in their set.
        first (`str`): `"plain"` or `"drafted"`: what was decoded first.
        num_prompt_tokens (`list[int]`): of each row.
        plain_token_ids, drafted_token_ids (`list[list[int]]`): new tokens of each row, the end token included.
        plain_s, drafted_s (`float`): seconds of the whole call, prefill included.
        is_cut (`list[bool]`): whether the drafted answer ended at its greatest length and not at an end token.
        committed, verified, starts (`list[list[int]]`): of each row and pass, as [`DecodingStatistics`] has them.
    """

    set_name: str
    temperature: float
    thinking: bool | None
    batch_size: int
    batch: int
    turn: int
    prompts: list[int]
    first: str
    num_prompt_tokens: list[int]
    plain_token_ids: list[list[int]]
    plain_s: float
    drafted_token_ids: list[list[int]]
    drafted_s: float
    is_cut: list[bool]
    committed: list[list[int]]
    verified: list[list[int]]
    starts: list[list[int]]

    @property
    def setting(self) -> Setting:
        """[`Setting`] of the pair."""
        return Setting(self.temperature, self.thinking, self.batch_size)

    @property
    def key(self) -> tuple[str, Setting, int, int]:
        """What tells it from all others of an evaluation."""
        return self.set_name, self.setting, self.batch, self.turn

    @property
    def plain_tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second."""
        return sum(map(len, self.plain_token_ids)) / self.plain_s

    @property
    def drafted_tokens_per_s(self) -> float:
        """`float`: new tokens of all rows a second."""
        return sum(map(len, self.drafted_token_ids)) / self.drafted_s

    @property
    def speed_up(self) -> float:
        """`float`: tokens a second with the draft, divided by those without."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s

    @property
    def num_identical(self) -> int:
        """`int`: rows whose two answers have the same tokens."""
        return sum(ours == plain for ours, plain in zip(self.drafted_token_ids, self.plain_token_ids, strict=True))
