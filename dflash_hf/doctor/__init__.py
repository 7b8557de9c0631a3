"""Diagnosis of a pair of target and draft."""

from typing import TYPE_CHECKING

from .. import lazy_exports

__all__ = ["Examination", "verdict"]

if TYPE_CHECKING:
    from .examination import Examination, verdict
else:
    __getattr__ = lazy_exports(__name__, {".examination": ["Examination", "verdict"]})
