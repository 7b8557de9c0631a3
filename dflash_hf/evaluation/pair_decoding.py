"""Batches of prompts for a pair: padded rows, the target's own sampling set aside, answers without their padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class PairDecoding:
    """
    What measurements of decoding have in common, whatever the method.

    Args:
        target (`PreTrainedModel`): the target; its generation config names the tokens that end an answer.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer; names the padding token.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.target = target
        given: Any = target.generation_config
        end_token_ids = [] if given is None or given.eos_token_id is None else given.eos_token_id
        self.end_token_ids: list[int] = end_token_ids if isinstance(end_token_ids, list) else [end_token_ids]
        padding = [tokenizer.pad_token_id, *self.end_token_ids, 0]
        self.pad_token_id: int = next(token_id for token_id in padding if token_id is not None)

    @contextmanager
    def own_settings_aside(self) -> Iterator[None]:
        """Set the target's settings for generation aside, apart from its special tokens."""
        own_settings = self.target.generation_config
        self.target.generation_config = GenerationConfig(
            eos_token_id=self.end_token_ids or None, pad_token_id=self.pad_token_id
        )
        try:
            yield
        finally:
            self.target.generation_config = own_settings

    def arguments(self, rows: Sequence[torch.Tensor], temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """
        Arguments of `generate` for a batch.

        Args:
            rows (`Sequence[torch.LongTensor]`): prompts, each of shape `[columns]`.
            temperature (`float`): 0 decodes greedily; above, the target's distribution is not cut.
            max_new_tokens (`int`): longest answer.

        Returns:
            `dict`: `input_ids` and `attention_mask`, padded on the left, and the settings.
        """

        def padded(values: list[torch.Tensor], padding: int) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding, padding_side="left")

        arguments: dict[str, Any] = {
            "input_ids": padded(list(rows), self.pad_token_id),
            "attention_mask": padded([torch.ones_like(row) for row in rows], 0),
            "max_new_tokens": max_new_tokens,
            "do_sample": temperature > 0,
        }
        if temperature > 0:
            arguments.update(temperature=temperature, top_k=0, top_p=1.0)
        return arguments

    def answer(self, tokens: list[int]) -> list[int]:
        """Tokens up to and including the first that ends the answer; behind it there is padding."""
        ends = [index for index, token in enumerate(tokens) if token in self.end_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens
