"""Settings of an evaluation, and the pairs of responses that it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OLD_NAMES = {"is_cut": "is_truncated"}  # in journals of version 0.1.0


@dataclass(frozen=True)
class Setting:
    """
    How prompts are decoded.

    Args:
        temperature (`float`): 0 decodes greedily.
        thinking (`bool`, *optional*): `enable_thinking` of the chat template; `None` if the template does not use it.
        batch_size (`int`, defaults to 1): conversations decoded together.
    """

    temperature: float
    thinking: bool | None = None
    batch_size: int = 1

    @property
    def label(self) -> str:
        """
        `str`: a short description of the setting.

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
class ResponsePair:
    """
    One turn of a batch of conversations, answered without and with the draft.

    Args:
        set_name (`str`): name of the prompt set.
        temperature (`float`), thinking (`bool`, *optional*), batch_size (`int`): the [`Setting`].
        batch (`int`), turn (`int`): index of the batch in its set, and of the turn in the conversations.
        prompts (`list[int]`): indices of the conversations in their set.
        first (`str`): `"plain"` or `"drafted"`, whichever was decoded first.
        num_prompt_tokens (`list[int]`): prompt length of each sequence.
        plain_token_ids, drafted_token_ids (`list[list[int]]`): new tokens of each sequence, the end token included.
        plain_s, drafted_s (`float`): seconds of the whole call, prefill included.
        is_truncated (`list[bool]`): for each sequence, whether the response with the draft ended at `max_new_tokens`
            and not at an end token.
        committed, verified, starts (`list[list[int]]`): for each sequence and pass, as in [`DecodingStatistics`].
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
    is_truncated: list[bool]
    committed: list[list[int]]
    verified: list[list[int]]
    starts: list[list[int]]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResponsePair:
        """
        Read a line of a journal of this version or of version 0.1.0.

        Args:
            values (`Mapping`): plain values.

        Returns:
            [`ResponsePair`]

        Raises:
            TypeError: a value is missing or unknown.
        """
        return cls(**{OLD_NAMES.get(name, name): value for name, value in values.items()})

    @property
    def setting(self) -> Setting:
        """[`Setting`]: how the pair was decoded."""
        return Setting(self.temperature, self.thinking, self.batch_size)

    @property
    def key(self) -> tuple[str, Setting, int, int]:
        """`tuple`: set, setting, batch and turn, which identify the pair in its evaluation."""
        return self.set_name, self.setting, self.batch, self.turn

    @property
    def plain_tokens_per_s(self) -> float:
        """`float`: new tokens of all sequences per second, without the draft."""
        return sum(map(len, self.plain_token_ids)) / self.plain_s

    @property
    def drafted_tokens_per_s(self) -> float:
        """`float`: new tokens of all sequences per second, with the draft."""
        return sum(map(len, self.drafted_token_ids)) / self.drafted_s

    @property
    def speed_up(self) -> float:
        """`float`: tokens per second with the draft, divided by those without."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s

    @property
    def num_identical(self) -> int:
        """`int`: sequences whose two responses have the same tokens."""
        return sum(ours == plain for ours, plain in zip(self.drafted_token_ids, self.plain_token_ids, strict=True))
