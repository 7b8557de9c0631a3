"""The section of a model card with the results of `dflash-hf eval`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..markdown import format_fact, inline_code, one_line, table_cell

MISSING = "–"
OLD_NAMES = {  # in card_facts.json of version 0.1.0
    "num_answers": "num_responses",
    "accept_len": "acceptance_length",
    "accept_len_interval": "acceptance_length_interval",
}


@dataclass(frozen=True)
class SuiteRow:
    """
    Results of one set in one setting, or the mean over the sets.

    Args:
        title (`str`): title of the set.
        setting (`str`): description of the setting.
        num_prompts, num_responses (`int`): conversations, and their turns.
        acceptance_length (`float`, *optional*): mean number of tokens that a verify pass with a draft committed, the
            bonus token included.
        acceptance_length_interval (`Sequence[float]`, *optional*): its 95 % interval.
        speed_up (`float`, *optional*): speed-up over plain decoding.
        identical_share (`float`, *optional*): share of greedy responses with the tokens of plain decoding.
    """

    title: str
    setting: str
    num_prompts: int
    num_responses: int
    acceptance_length: float | None
    acceptance_length_interval: Sequence[float] | None
    speed_up: float | None
    identical_share: float | None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SuiteRow:
        """
        Read a row of the facts of a card that this version or version 0.1.0 wrote.

        Args:
            values (`Mapping`): plain values.

        Returns:
            [`SuiteRow`]

        Raises:
            TypeError: a value is missing or unknown.
        """
        return cls(**{OLD_NAMES.get(name, name): value for name, value in values.items()})

    def cells(self) -> list[str]:
        """Return the cells of the row in a Markdown table."""
        interval = self.acceptance_length_interval
        turns = "" if self.num_prompts == self.num_responses else f" ({self.num_responses} turns)"
        cells = [
            self.title,
            self.setting,
            MISSING if self.acceptance_length is None else f"{self.acceptance_length:.2f}",
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
        rows (`Sequence[SuiteRow]`): sets and means, in the order of the table.
        command (`str`): command that repeats the evaluation, without paths.
        block_size (`int`): slots of a block.
        verified_slots (`str`): how many tokens were verified.
        max_new_tokens (`int`): greatest length of a response in tokens.
        dtype (`str`): dtype of target and draft.
        seed (`int`): seed of sampling.
        machines (`Sequence[str]`): descriptions of hardware and software.
        note (`str`, *optional*): a warning to the reader.
        pictures (`Mapping[str, str]`): file names of figures beside the card, and their captions.
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
        """Read what [`~MeasuredSuite.as_facts`] returned."""
        return cls(**{**facts, "rows": tuple(SuiteRow.from_dict(row) for row in facts["rows"])})

    def as_facts(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def markdown(self, pictures: Collection[str] = ()) -> str:
        """
        Write the section of the card below its heading.

        Args:
            pictures (`Collection[str]`): names of the figures that exist.

        Returns:
            `str`
        """
        head = ["set", "setting", "acceptance length", "95 % interval", "speed-up", "identical", "prompts"]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row.cells())} |" for row in self.rows]
        parts = [
            "\n".join(lines),
            "The acceptance length is the mean number of tokens that a verify pass with a draft commits. The target's "
            f"bonus token counts, so 1 is useless and {self.block_size} is perfect. The mean is over all such passes "
            "of a set, and its interval is a bootstrap over prompts. The speed-up is the median over the prompts of "
            "tokens/s with the draft divided by tokens/s without it, prefill included. Identical are greedy responses "
            "with the same token ids without and with the draft, in the dtype of the run; for sampling this is not "
            f"defined. At most {self.max_new_tokens} new tokens, {one_line(self.dtype)}, "
            f"{one_line(self.verified_slots)} slots verified, seed {format_fact(self.seed)}; "
            f"{one_line('; '.join(self.machines) or format_fact(None))}.",
            *([f"**{one_line(self.note)}**"] if self.note else []),
            f"Made with {inline_code(self.command)}.",
            *(f"![{one_line(shown)}]({name})" for name, shown in self.pictures.items() if name in pictures),
        ]
        return "\n\n".join(parts)
