"""The text of the sequences of a batch that are still being written."""

from __future__ import annotations

import torch


class SequenceState:
    """
    Hold the text of the unfinished sequences of a batch, and the text of the finished ones.

    A column is a position of the padded text, counted from the left edge of the prompt batch. The sequence at index
    `i` has `lengths[i]` columns of known text. The last of them is its anchor, which the target has not read yet.

    Args:
        input_ids (`torch.LongTensor` of shape `[sequences, columns]`):
            The prompts, padded on the left.
        num_padding (`list[int]`):
            Number of padding columns of each sequence.
        max_length (`int`):
            Number of columns at which every sequence ends.
        num_spare_columns (`int`):
            Number of columns after the text that a pass may use for tokens before they are verified.
    """

    def __init__(
        self, input_ids: torch.Tensor, num_padding: list[int], *, max_length: int, num_spare_columns: int
    ) -> None:
        num_sequences, num_columns = input_ids.shape
        self.tokens = torch.nn.functional.pad(input_ids.long(), (0, num_spare_columns))
        self.num_spare_columns = num_spare_columns
        self.batch_indices = list(range(num_sequences))  # the place of each sequence in the batch of the call
        self.num_prompt_columns = num_columns
        self.lengths = [num_columns] * num_sequences
        self.num_padding = num_padding
        self.max_length = max_length
        self.finished: dict[int, torch.Tensor] = {}  # by place in the batch of the call

    def __len__(self) -> int:
        return len(self.batch_indices)

    @property
    def device(self) -> torch.device:
        """`torch.device`: the device of the tokens."""
        return self.tokens.device

    @property
    def anchors(self) -> list[int]:
        """`list[int]`: the column of the anchor of each sequence."""
        return [length - 1 for length in self.lengths]

    @property
    def room(self) -> int:
        """`int`: number of tokens that the shortest sequence can still receive."""
        return self.max_length - min(self.lengths)

    def reserve(self) -> None:
        """Make the buffer large enough for the next pass; it grows with the text, not with `max_length`."""
        needed = max(self.lengths) + self.num_spare_columns
        if needed > self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, needed + needed // 4 - self.tokens.shape[1]))

    def anchor_tokens(self) -> torch.Tensor:
        """Return the anchor token of each sequence, of shape `[sequences, 1]`."""
        return self.tokens.gather(1, column_range(self.anchors, 1, self.device))

    def write_drafted(self, token_ids: torch.Tensor) -> None:
        """
        Write drafted tokens after the known text, where later tokens overwrite them unless they are accepted.

        Args:
            token_ids (`torch.LongTensor` of shape `[sequences, n]`): one chain of tokens for each sequence.
        """
        self.tokens.scatter_(1, column_range(self.lengths, token_ids.shape[1], self.device), token_ids)

    def finish(self, is_finished: list[bool]) -> list[int]:
        """
        Move finished sequences to `finished`.

        The state of the other sequences is reduced by [`select`][SequenceState.select], which the caller runs on all
        parts of the loop. If no sequence is left, everything else stays, because a later call may continue from it.

        Args:
            is_finished (`list[bool]`): one value for each sequence.

        Returns:
            `list[int]`: the indices of the sequences that are not finished.
        """
        for index, done in enumerate(is_finished):
            if done:
                self.finished[self.batch_indices[index]] = self.tokens[index, : self.lengths[index]].clone()
        kept = [index for index, done in enumerate(is_finished) if not done]
        self.batch_indices = [self.batch_indices[index] for index in kept]
        return kept

    def select(self, kept: list[int], indices: torch.Tensor) -> None:
        """
        Keep some of the sequences.

        Args:
            kept (`list[int]`): the indices of the sequences to keep.
            indices (`torch.LongTensor`): the same indices as a tensor.
        """
        self.lengths = [self.lengths[index] for index in kept]
        self.num_padding = [self.num_padding[index] for index in kept]
        self.tokens = self.tokens[indices]


def column_range(first: list[int], count: int, device: torch.device) -> torch.Tensor:
    """
    Return `count` consecutive columns for each sequence.

    Args:
        first (`list[int]`): the first column of each sequence.
        count (`int`): number of columns.
        device (`torch.device`): device of the result.

    Returns:
        `torch.LongTensor` of shape `[sequences, count]`.

    Example:

    ```python
    >>> column_range([4, 7], 3, torch.device("cpu")).tolist()
    [[4, 5, 6], [7, 8, 9]]

    ```
    """
    return torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)
