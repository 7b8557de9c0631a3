"""Stopping criteria of transformers, applied to several new tokens at once."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation import stopping_criteria


class BlockStoppingCriteria:
    """
    Find the token at which a sequence ends, although its tokens arrive in blocks.

    Every criterion sees the texts that plain generation would show it.

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
        self.others: list[stopping_criteria.StoppingCriteria] = []
        for criterion in criteria:
            if type(criterion) is stopping_criteria.EosTokenCriteria:
                self.end_token_ids += criterion.eos_token_id.flatten().tolist()
            elif type(criterion) is not stopping_criteria.MaxLengthCriteria:
                self.others.append(criterion)

    def truncate(self, text: torch.Tensor, length: int, new_token_ids: list[int]) -> tuple[int, bool]:
        """
        Count the new tokens up to the first one at which the sequence ends.

        Args:
            text (`torch.LongTensor` of shape `[1, columns]`): the sequence with its new tokens.
            length (`int`): number of columns before the first new token.
            new_token_ids (`list[int]`): the new tokens.

        Returns:
            `tuple[int, bool]`: the number of new tokens that stay, and whether the sequence ends with the last of
            them.
        """
        count = min(len(new_token_ids), self.max_length - length)
        is_finished = length + len(new_token_ids) >= self.max_length
        for index, token in enumerate(new_token_ids[:count]):
            if token in self.end_token_ids:
                count, is_finished = index + 1, True
                break
        for kept in range(1, count + 1) if self.others else ():
            prefix = text[:, : length + kept]
            if any(bool(torch.as_tensor(criterion(prefix, None)).any()) for criterion in self.others):
                return kept, True
        return count, is_finished
