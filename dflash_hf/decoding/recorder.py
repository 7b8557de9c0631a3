"""The record of a decoding call: its statistics, and the scores of its tokens where they were asked for."""

from __future__ import annotations

import torch

from .sequences import SequenceState
from .statistics import DecodingStatistics, Stopwatch


class PassRecorder:
    """
    Collect what the passes of a decoding call committed.

    Args:
        sequences ([`SequenceState`]): the text.
        block_size (`int`): number of slots of a trained block, the anchor included.
        keep_scores, keep_logits (`bool`): whether the processed and the raw scores of every new token are kept.
    """

    def __init__(self, sequences: SequenceState, block_size: int, *, keep_scores: bool, keep_logits: bool) -> None:
        num_sequences = len(sequences)
        self.sequences = sequences
        self.statistics = DecodingStatistics(block_size)
        self.statistics.committed = [[] for _ in range(num_sequences)]
        self.statistics.verified = [[] for _ in range(num_sequences)]
        self.statistics.starts = [[] for _ in range(num_sequences)]
        self.expected_sum = torch.zeros((), device=sequences.device)
        self.scores: list[list[torch.Tensor]] | None = [[] for _ in range(num_sequences)] if keep_scores else None
        self.logits: list[list[torch.Tensor]] | None = [[] for _ in range(num_sequences)] if keep_logits else None

    def record(
        self,
        num_slots: int,
        counts: list[int],
        scores: torch.Tensor | list[torch.Tensor],
        logits: torch.Tensor,
        *,
        is_prefill: bool,
    ) -> None:
        """
        Record one pass of the target, before the lengths of the sequences grow.

        Args:
            num_slots (`int`): number of slots that were verified along one path, the anchor included.
            counts (`list[int]`): number of tokens that each sequence received.
            scores, logits (`torch.FloatTensor` of shape `[sequences, slots, vocabulary]`): the processed and the raw
                scores after the anchor and each accepted token.
            is_prefill (`bool`): whether the pass read the prompt.
        """
        statistics, batch_indices = self.statistics, self.sequences.batch_indices
        statistics.num_tokens += sum(counts)
        if num_slots > 1:
            statistics.num_verify_passes += 1
            for place, length, count in zip(batch_indices, self.sequences.lengths, counts, strict=True):
                statistics.committed[place].append(count)
                statistics.verified[place].append(num_slots - 1)
                statistics.starts[place].append(length - self.sequences.num_prompt_columns)
        elif not is_prefill:
            statistics.num_plain_passes += 1
        for kept, values in ((self.scores, scores), (self.logits, logits)):
            if kept is not None:
                for index, (place, count) in enumerate(zip(batch_indices, counts, strict=True)):
                    kept[place] += values[index][:count].float().unbind(0)

    def close(self, watch: Stopwatch) -> None:
        """
        Add the times and the expected acceptance to the statistics.

        Args:
            watch ([`Stopwatch`]): the one that the passes of the call were measured with.
        """
        for name, seconds in watch.totals().items():
            setattr(self.statistics, f"{name}_s", seconds)
        self.statistics.expected_sum = float(self.expected_sum)
