"""Checkpoint formats of all DFlash producers, read and written."""

from .io import convert_checkpoint, read_checkpoint, save_in_layout

__all__ = ["convert_checkpoint", "read_checkpoint", "save_in_layout"]
