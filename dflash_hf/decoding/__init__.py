"""Speculative decoding: the loop, draft trees, acceptance, key-value cache and logits processing."""

from typing import TYPE_CHECKING

from .. import lazy_exports

PROPOSALS = ("argmax", "sample")  # how a draft proposes tokens when decoding samples

__all__ = ["PROPOSALS", "DFlashGenerateOutput", "dflash_decoding", "speculative_generate"]

if TYPE_CHECKING:
    from .generate import DFlashGenerateOutput, dflash_decoding, speculative_generate
else:
    __getattr__ = lazy_exports(
        __name__, {".generate": ["DFlashGenerateOutput", "dflash_decoding", "speculative_generate"]}
    )
