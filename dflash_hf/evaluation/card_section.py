"""The part of a model card that says what `dflash-hf eval` measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..markdown import format_fact, inline_code, one_line, table_cell

MISSING = "–"


@dataclass(frozen=True)
class SuiteRow:
    """
    One set in one setting, or the mean over the sets.

    Args:
        title (`str`), setting (`str`): what, in words.
        num_prompts, num_answers (`int`): conversations, and their turns.
        accept_len (`float`, *optional*): tokens committed per verify pass, the bonus token included.
        accept_len_interval (`Sequence[float]`, *optional*): its 95 % interval.
        speed_up (`float`, *optional*): over plain decoding.
        identical_share (`float`, *optional*): share of answers with plain decoding's tokens; greedy only.
    """

    title: str
    setting: str
    num_prompts: int
    num_answers: int
    accept_len: float | None
    accept_len_interval: Sequence[float] | None
    speed_up: float | None
    identical_share: float | None

    def cells(self) -> list[str]:
        """Cells of a Markdown table."""
        interval = self.accept_len_interval
        turns = "" if self.num_prompts == self.num_answers else f" ({self.num_answers} turns)"
        cells = [
            self.title,
            self.setting,
            MISSING if self.accept_len is None else f"{self.accept_len:.2f}",
            MISSING if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}",
            MISSING if self.speed_up is None else f"{self.speed_up:.2f}×",
            MISSING if self.identical_share is None else f"{self.identical_share:.0%}",
            f"{self.num_prompts}{turns}",
        ]
        return [table_cell(cell) for cell in cells]


@dataclass(frozen=True)
class MeasuredSuite:
    """
    Facts of an evaluation for a model card.

    Args:
        rows (`Sequence[SuiteRow]`): sets and means, in their order.
        command (`str`): that measured them, without paths.
        block_size (`int`): slots of a block.
        verified_slots (`str`): how many of them were verified, in words.
        max_new_tokens (`int`): longest answer in tokens.
        dtype (`str`): of target and draft.
        seed (`int`): of the draws.
        machines (`Sequence[str]`): hardware and software, in words.
        note (`str`, *optional*): what a reader has to know beyond that.
        pictures (`Mapping[str, str]`): file names beside the card, and what they show.
    """

    rows: Sequence[SuiteRow]
    command: str
    block_size: int
    verified_slots: str
    max_new_tokens: int
    dtype: str
    seed: int
    machines: Sequence[str] = ()
    note: str | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> MeasuredSuite:
        """The inverse of [`~MeasuredSuite.as_facts`]."""
        return cls(**{**facts, "rows": tuple(SuiteRow(**row) for row in facts["rows"])})

    def as_facts(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def markdown(self, pictures: Collection[str] = ()) -> str:
        """
        The section of the card below its heading.

        Args:
            pictures (`Collection[str]`): names of those pictures that are there.

        Returns:
            `str`
        """
        head = ["set", "setting", "acceptance length", "95 % interval", "speed-up", "identical", "prompts"]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row.cells())} |" for row in self.rows]
        parts = [
            "\n".join(lines),
            f"Acceptance length: tokens committed per verify pass, the target's bonus token counted (1 is useless, "
            f"{self.block_size} is perfect), over all passes of a set; its interval is a bootstrap over prompts. "
            "Speed-up: median over the prompts of tokens/s with the draft over tokens/s without, prefill included. "
            "Identical: greedy answers with the same token ids without and with the draft, in the dtype of the run "
            f"(not defined for sampling). At most {self.max_new_tokens} new tokens, {one_line(self.dtype)}, "
            f"{one_line(self.verified_slots)} slots verified, seed {format_fact(self.seed)}; "
            f"{one_line('; '.join(self.machines) or format_fact(None))}.",
            *([f"**{one_line(self.note)}**"] if self.note else []),
            f"Made with {inline_code(self.command)}.",
            *(f"![{one_line(shown)}]({name})" for name, shown in self.pictures.items() if name in pictures),
        ]
        return "\n\n".join(parts)
