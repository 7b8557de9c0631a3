"""
Speculative decoding with a draft.

Read `reference.py` first: it is the whole method in one short loop, without a cache. `loop.py` is the loop that
`generate` runs. It connects the text (`sequences.py`), the draft (`drafter.py`) and the target (`target_runner.py`).
"""

from typing import TYPE_CHECKING

from .. import lazy_exports

PROPOSALS = ("argmax", "sample")  # how the draft chooses its tokens when the target samples

__all__ = ["PROPOSALS", "DFlashGenerateOutput", "dflash_decoding", "speculative_generate"]

if TYPE_CHECKING:
    from .generate import DFlashGenerateOutput, dflash_decoding, speculative_generate
else:
    __getattr__ = lazy_exports(
        __name__, {".generate": ["DFlashGenerateOutput", "dflash_decoding", "speculative_generate"]}
    )
