"""Pairs that write letters, for stop strings, and a streamer that records its calls."""

from __future__ import annotations

import torch
from conftest import make_target
from decoding_pairs import make_guessing_draft
from transformers.generation.streamers import BaseStreamer

GREEDY = {"do_sample": False, "pad_token_id": 0}


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.has_ended = False

    @property
    def tokens(self) -> list[int]:
        return [token for put in self.puts for token in put]

    def put(self, value: torch.Tensor) -> None:
        assert not self.has_ended
        assert value.device.type == "cpu"
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        assert not self.has_ended
        self.has_ended = True


def letters_pair(tokenizer, wrong_share: float, num_sequences: int = 1):
    """A pair over bytes that writes small letters and line ends."""
    target = make_target(vocab_size=272)
    draft = make_guessing_draft(target, mask_token_id=271)
    allowed = tokenizer("abcdefgh \n", add_special_tokens=False)["input_ids"]
    settings = {
        **GREEDY,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,  # never written: with some end token, ended sequences are padded
        "max_new_tokens": 24,
        "suppress_tokens": [token for token in range(272) if token not in allowed],
    }
    tokenizer.padding_side = "left"
    inputs = dict(tokenizer(["hello", "a", "stop me"][:num_sequences], return_tensors="pt", padding=True))
    inputs.pop("token_type_ids", None)
    texts = target.generate(**inputs, **settings)
    draft.teach(target, texts, wrong_share)
    return target, draft, inputs, settings, texts
