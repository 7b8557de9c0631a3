"""Speculative decoding: the loop, draft trees, acceptance, key-value cache and logits processing."""

from .generate import PROPOSALS, DFlashGenerateOutput, dflash_decoding, speculative_generate

__all__ = ["PROPOSALS", "DFlashGenerateOutput", "dflash_decoding", "speculative_generate"]
