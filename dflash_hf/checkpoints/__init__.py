"""Reads and writes the checkpoint formats of all known DFlash producers."""

from typing import TYPE_CHECKING

from .. import lazy_exports

LAYOUTS = ("native", "serving", "speculators", "muse")  # the layouts that can be written

__all__ = ["LAYOUTS", "convert_checkpoint", "read_checkpoint", "save_in_layout"]

if TYPE_CHECKING:
    from .io import convert_checkpoint, read_checkpoint, save_in_layout
else:
    __getattr__ = lazy_exports(__name__, {".io": ["convert_checkpoint", "read_checkpoint", "save_in_layout"]})
