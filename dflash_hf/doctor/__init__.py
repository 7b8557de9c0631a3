"""Diagnosis of a pair of target and draft."""

from .examination import Examination, verdict

__all__ = ["Examination", "verdict"]
