"""Stopping criteria of transformers, applied to several new tokens at once."""

from __future__ import annotations

import time

import torch
from torch.nn import functional
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import stopping_criteria

NO_TOKEN = torch.iinfo(
    torch.long
).max  # StopStringCriteria (transformers 5.24) gives ids beyond the vocabulary no text


def stop_string_ends(criterion: StopStringCriteria, token_ids: torch.Tensor, start: int) -> list[bool]:
    """
    Find the tokens of a text that complete a stop string.

    Args:
        criterion (`StopStringCriteria`): The stop strings.
        token_ids (`torch.LongTensor` of shape `[columns]`): The text, the prompt included, because a stop string may
            begin there.
        start (`int`): The first column that is examined.

    Returns:
        `list[bool]`: One value for each column from `start` on, True where plain generation would stop.
    """
    size = criterion.maximum_token_len
    windows = functional.pad(token_ids, (size - 1, 0), value=NO_TOKEN).unfold(0, size, 1)[start:]
    ends: list[bool] = criterion(windows, None).tolist() if len(windows) else []
    return ends


class BlockStoppingCriteria:
    """
    Find the token at which a sequence ends, although its tokens arrive in blocks.

    Lengths, end tokens and times are checked for all new tokens of a pass at once. Other criteria read the text, so
    [`OrderedDecision`] calls them for one token after the other.

    Args:
        criteria (`StoppingCriteriaList`): the criteria that `generate` prepared.

    Raises:
        ValueError: No criterion limits the length.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
        if not lengths:
            raise ValueError(
                "stopping_criteria has no MaxLengthCriteria, and a call needs a limit of its length. Pass "
                "max_new_tokens or max_length."
            )
        self.max_length = min(lengths)
        self.end_token_ids: list[int] = []
        self.timers: list[stopping_criteria.MaxTimeCriteria] = []
        self.text_criteria = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is stopping_criteria.EosTokenCriteria:
                self.end_token_ids += criterion.eos_token_id.flatten().tolist()
            elif type(criterion) is stopping_criteria.MaxTimeCriteria:
                self.timers.append(criterion)
            elif type(criterion) is not stopping_criteria.MaxLengthCriteria:
                self.text_criteria.append(criterion)

    @property
    def is_sequence_wise(self) -> bool:
        """`bool`: whether the end of a sequence is known not to depend on the other sequences of a batch."""
        return all(type(criterion) is stopping_criteria.StopStringCriteria for criterion in self.text_criteria)

    def truncate(self, length: int, new_token_ids: list[int]) -> tuple[int, bool]:
        """
        Count the new tokens up to the first one at which the sequence ends, if no criterion reads the text.

        Args:
            length (`int`): number of columns before the first new token.
            new_token_ids (`list[int]`): the new tokens.

        Returns:
            `tuple[int, bool]`: the number of new tokens that stay, and whether the sequence ends with the last of
            them.
        """
        count = min(len(new_token_ids), self.max_length - length)
        for index, token in enumerate(new_token_ids[:count]):
            if token in self.end_token_ids:
                return index + 1, True
        return count, length + count >= self.max_length or self.is_time_up

    @property
    def is_time_up(self) -> bool:
        """`bool`: whether the time of a `max_time` is over."""
        return any(time.time() - timer.initial_timestamp > timer.max_time for timer in self.timers)
