"""Diagnosis of a pair of target and draft."""

from typing import TYPE_CHECKING

from .. import lazy_exports

__all__ = ["Diagnosis", "Examination", "verdict"]

if TYPE_CHECKING:
    from .diagnosis import Diagnosis, Examination, verdict
else:
    __getattr__ = lazy_exports(__name__, {".diagnosis": ["Diagnosis", "Examination", "verdict"]})
