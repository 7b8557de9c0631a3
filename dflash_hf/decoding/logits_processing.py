"""Logits processors of transformers, applied to the scores of whole blocks of tokens."""

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
# These processors keep a state between calls, which rejected tokens would spoil, or run the model themselves.
STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
# These processors use the index of a sequence in the batch, which changes when other sequences finish.
BATCH_INDEXED = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
)


class BlockLogitsProcessor:
    """
    Apply logits processors to the scores of all slots of a block.

    Processors that depend on the scores alone, and the repetition penalty, process all slots of all sequences in one
    call. Any other processor is called once for each slot of each sequence, with the text that plain generation would
    show it.

    Args:
        processors (`LogitsProcessorList`): the processors that `generate` prepared.
        num_sequences (`int`): number of sequences in the batch.

    Raises:
        ValueError: A processor keeps a state, or it uses the index of a sequence in a batch of several.
    """

    def __init__(self, processors: LogitsProcessorList, num_sequences: int) -> None:
        self.processors = processors
        for processor in processors:
            name = type(processor).__name__
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"The logits processor {name} keeps a state from token to token, which rejected tokens would "
                    "spoil. Use plain generate with it."
                )
            if num_sequences > 1 and isinstance(processor, BATCH_INDEXED):
                raise ValueError(
                    f"The logits processor {name} uses the index of each of the {num_sequences} sequences in the "
                    "batch, which changes when sequences finish. Decode one sequence at a time."
                )

    def __len__(self) -> int:
        return len(self.processors)

    @property
    def is_prefix_free(self) -> bool:
        """`bool`: whether every processor depends on the scores alone."""
        return all(type(processor) in PREFIX_FREE for processor in self.processors)

    def __call__(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        batch_indices: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """
        Process the scores of a block.

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
            elif type(processor) is logits_process.RepetitionPenaltyLogitsProcessor:
                ignored = processor.prompt_ignore_length
                if isinstance(ignored, torch.Tensor) and batch_indices is not None:
                    ignored = ignored.to(tokens.device)[torch.tensor(batch_indices, device=tokens.device)]
                is_seen = _seen_tokens(tokens, lengths, num_slots, vocabulary, 0 if ignored is None else ignored)
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(is_seen, penalised, scores)
            else:
                scores = scores.clone()
                for index, length in enumerate(lengths):
                    for slot in range(num_slots):
                        prefix = tokens[index : index + 1, : length + slot]
                        scores[index : index + 1, slot] = processor(prefix, scores[index : index + 1, slot])
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
