"""Pairs over bytes for chat prompts, whose draft knows the target's greedy answers except for some tokens."""

from __future__ import annotations

import torch
from conftest import make_target
from decoding_pairs import make_guessing_draft

from dflash_hf.data.chat_template import chat_inputs

PROMPTS = ["1+1?", "What?", "Say a word.", "2+2"]
VOCABULARY = {"vocab_size": 272, "pad_token_id": 256}


def plain_sequences(target, tokenizer, max_new_tokens: int, prompts=PROMPTS) -> list[torch.Tensor]:
    return [
        target.generate(
            **chat_inputs(tokenizer, prompt, target.device), max_new_tokens=max_new_tokens, do_sample=False
        )[0]
        for prompt in prompts
    ]


def prompt_lengths(target, tokenizer) -> list[int]:
    return [chat_inputs(tokenizer, prompt, target.device)["input_ids"].shape[1] for prompt in PROMPTS]


def make_pair(tokenizer, max_new_tokens: int = 13, wrong_share: float = 0.3, **overrides):
    """A target, and a draft that knows its greedy answers except for some tokens."""
    target = make_target(**VOCABULARY, **overrides)
    draft = make_guessing_draft(target, mask_token_id=271)
    sequences = plain_sequences(target, tokenizer, max_new_tokens)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side="left")
    return target, draft.teach(target, padded, wrong_share), sequences


def committed_by_hand(is_wrong: torch.Tensor, first: int, end: int, block_size: int) -> list[int]:
    """Walk over an answer: each pass takes the right guesses after its anchor and one token of the target."""
    counts, anchor = [], first
    while anchor + 1 < end - 1:  # a last single token needs no draft
        count = 1
        while count < block_size and anchor + count < end - 1 and not is_wrong[anchor + count]:
            count += 1
        counts.append(count)
        anchor += count
    return counts
