"""Logits processors of transformers, applied to the scores of whole blocks or of one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

# The result of these processors depends on the scores alone, so one call can process all slots of all sequences.
PREFIX_FREE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# The result of these processors for a sequence depends on its own text and scores alone, and they keep no state.
SEQUENCE_WISE = (
    *PREFIX_FREE,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
)


class BlockLogitsProcessor:
    """
    Apply logits processors to the scores of all slots of a block.

    Processors that depend on the scores alone, and the repetition penalty, process all slots of all sequences in one
    call. Other processors may keep a state, or reject a text that plain generation would not show them, so
    [`OrderedDecision`] calls them for one token after the other.

    Args:
        processors (`LogitsProcessorList`): the processors that `generate` prepared.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors

    def __len__(self) -> int:
        return len(self.processors)

    @property
    def is_prefix_free(self) -> bool:
        """`bool`: whether every processor depends on the scores alone."""
        return all(type(processor) in PREFIX_FREE for processor in self.processors)

    @property
    def takes_chains(self) -> bool:
        """`bool`: whether the scores of all slots of a chain can be processed in one call."""
        return all(
            type(processor) in (*PREFIX_FREE, logits_process.RepetitionPenaltyLogitsProcessor)
            for processor in self.processors
        )

    @property
    def is_sequence_wise(self) -> bool:
        """`bool`: whether the scores of a sequence are known not to depend on the other sequences of a batch."""
        return all(
            type(processor) in SEQUENCE_WISE
            # this attribute may have one value for each sequence
            and not isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
            for processor in self.processors
        )

    def __call__(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        batch_indices: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """
        Process the scores of a block, if [`takes_chains`][BlockLogitsProcessor.takes_chains].

        Args:
            tokens (`torch.LongTensor` of shape `[sequences, columns]`):
                The text and, after it, the drafted tokens.
            lengths (`Sequence[int]`):
                Number of columns of each sequence before its first drafted token.
            scores (`torch.FloatTensor` of shape `[sequences, slots, vocabulary]`):
                Scores in fp32. Slot `j` of sequence `i` follows `tokens[i, : lengths[i] + j]`.
            batch_indices (`Sequence[int]`, *optional*):
                Places of the sequences in the batch of `generate`; by default the batch is complete.

        Returns:
            `torch.FloatTensor` of the shape of `scores`.
        """
        num_slots, vocabulary = scores.shape[1:]
        for processor in self.processors:
            if type(processor) in PREFIX_FREE:
                flat = processor(tokens[:, :1].repeat_interleave(num_slots, 0), scores.reshape(-1, vocabulary))
                scores = flat.view_as(scores)
            else:
                ignored = processor.prompt_ignore_length
                if isinstance(ignored, torch.Tensor) and batch_indices is not None:
                    ignored = ignored.to(tokens.device)[torch.tensor(batch_indices, device=tokens.device)]
                is_seen = _seen_tokens(tokens, lengths, num_slots, vocabulary, 0 if ignored is None else ignored)
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(is_seen, penalised, scores)
        return scores

    def apply_prefix_free(self, scores: torch.Tensor) -> torch.Tensor:
        """
        Apply only the processors that depend on the scores alone.

        Args:
            scores (`torch.FloatTensor` of shape `[sequences, slots, vocabulary]`): scores in fp32.

        Returns:
            `torch.FloatTensor` of the same shape.
        """
        flat = scores.flatten(0, 1)
        no_text = torch.zeros(len(flat), 1, dtype=torch.long, device=flat.device)
        for processor in self.processors:
            if type(processor) in PREFIX_FREE:
                flat = processor(no_text, flat)
        return flat.view_as(scores)


def _seen_tokens(
    tokens: torch.Tensor, lengths: Sequence[int], num_slots: int, vocabulary: int, ignored: int | torch.Tensor
) -> torch.Tensor:
    """
    Return a mask of shape `[sequences, slots, vocabulary]` of the tokens that occur in the text before each slot.

    The first `ignored` columns of the text do not count.
    """
    columns = torch.arange(max(lengths) + num_slots - 1, device=tokens.device)
    ends = torch.tensor(lengths, device=tokens.device)[:, None] + torch.arange(num_slots, device=tokens.device)
    starts = torch.as_tensor(ignored, device=tokens.device).view(-1, 1, 1)
    is_text = (columns >= starts) & (columns < ends[..., None])
    seen_ids = torch.where(is_text, tokens[:, None, : len(columns)], vocabulary)
    is_seen = torch.zeros(*ends.shape, vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return is_seen.scatter_(2, seen_ids, True)[..., :vocabulary]
