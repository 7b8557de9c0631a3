"""Logits processors and stopping criteria of transformers, applied to whole blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

# Their result depends on the scores alone, so that all slots of all rows go through one call.
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
# They carry a state from call to call, which the scores of rejected tokens would spoil, or run the model themselves.
STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
# They look at the number of the row, which changes as rows finish.
ROW_NUMBERED = (
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
)


class BlockScores:
    """
    Apply logits processors to the scores of all slots of a block.

    Processors that look at the scores alone take one call for all slots and rows, and so does the repetition penalty.
    Any other processor is called with exactly the text that plain generation would show it, once a slot (and row).

    Args:
        processors (`LogitsProcessorList`): as `generate` prepared them.
        num_rows (`int`): rows of the batch.

    Raises:
        ValueError: a processor keeps a state, or tells rows of a batch apart by their number.
    """

    def __init__(self, processors: LogitsProcessorList, num_rows: int) -> None:
        self.processors = processors
        for processor in processors:
            name = type(processor).__name__
            if isinstance(processor, STATEFUL):
                raise ValueError(
                    f"The logits processor {name} keeps a state from token to token, which drafted tokens that are "
                    "rejected would spoil. Use plain generate for it."
                )
            if num_rows > 1 and isinstance(processor, ROW_NUMBERED):
                raise ValueError(
                    f"The logits processor {name} tells the {num_rows} rows of a batch apart by their number, and "
                    "rows leave the batch as they finish. Decode one row at a time."
                )

    def __len__(self) -> int:
        return len(self.processors)

    @property
    def is_prefix_free(self) -> bool:
        """Whether all processors look at the scores alone."""
        return all(type(processor) in PREFIX_FREE for processor in self.processors)

    def __call__(
        self, tokens: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """
        Process the scores of a block.

        Args:
            tokens (`torch.LongTensor` of shape `[rows, columns]`): text and drafted tokens, padding on the left.
            lengths (`Sequence[int]`): columns of each row before its first drafted token.
            scores (`torch.FloatTensor` of shape `[rows, slots, vocabulary]`): fp32; slot `j` of row `r` follows
                `tokens[r, : lengths[r] + j]`.
            rows (`Sequence[int]`, *optional*): numbers that the rows have in the batch of `generate`; all by default.

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
                if isinstance(ignored, torch.Tensor) and rows is not None:
                    ignored = ignored.to(tokens.device)[torch.tensor(rows, device=tokens.device)]
                is_seen = _seen_tokens(tokens, lengths, num_slots, vocabulary, 0 if ignored is None else ignored)
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(is_seen, penalised, scores)
            else:
                scores = scores.clone()
                for row, length in enumerate(lengths):
                    for slot in range(num_slots):
                        prefix = tokens[row : row + 1, : length + slot]
                        scores[row : row + 1, slot] = processor(prefix, scores[row : row + 1, slot])
        return scores

    def prefix_free(self, scores: torch.Tensor) -> torch.Tensor:
        """
        Apply the processors that look at the scores alone, and no other.

        Args:
            scores (`torch.FloatTensor` of shape `[rows, slots, vocabulary]`): fp32.

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
    """Which tokens the text before each slot has, without its first `ignored` columns: `[rows, slots, vocabulary]`."""
    columns = torch.arange(max(lengths) + num_slots - 1, device=tokens.device)
    ends = torch.tensor(lengths, device=tokens.device)[:, None] + torch.arange(num_slots, device=tokens.device)
    starts = torch.as_tensor(ignored, device=tokens.device).view(-1, 1, 1)
    is_text = (columns >= starts) & (columns < ends[..., None])
    seen_ids = torch.where(is_text, tokens[:, None, : len(columns)], vocabulary)
    is_seen = torch.zeros(*ends.shape, vocabulary + 1, dtype=torch.bool, device=tokens.device)
    return is_seen.scatter_(2, seen_ids, True)[..., :vocabulary]


class StoppingRules:
    """
    Stopping criteria that see every token, as in plain generation, although tokens come by the block.

    Args:
        criteria (`StoppingCriteriaList`): as `generate` prepared them.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        lengths = [c.max_length for c in criteria if type(c) is stopping_criteria.MaxLengthCriteria]
        if not lengths:
            raise ValueError("No length ends the generation. Pass max_new_tokens or max_length.")
        self.max_length = min(lengths)
        self.end_token_ids: list[int] = []
        self.others: list[stopping_criteria.StoppingCriteria] = []
        for criterion in criteria:
            if type(criterion) is stopping_criteria.EosTokenCriteria:
                self.end_token_ids += criterion.eos_token_id.flatten().tolist()
            elif type(criterion) is not stopping_criteria.MaxLengthCriteria:
                self.others.append(criterion)

    def count_until_other_stop(self, tokens: torch.Tensor, length: int, count: int) -> int | None:
        """
        Ask the criteria that are neither an end token nor a length, token by token.

        Args:
            tokens (`torch.LongTensor` of shape `[1, columns]`): the row, new tokens included.
            length (`int`): columns before the first new token.
            count (`int`): new tokens.

        Returns:
            `int` or `None`: new tokens up to the one at which a criterion holds, if there is one.
        """
        for kept in range(1, count + 1) if self.others else ():
            text = tokens[:, : length + kept]
            if any(bool(torch.as_tensor(criterion(text, None)).any()) for criterion in self.others):
                return kept
        return None
