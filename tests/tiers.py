"""Which values of a parametrised test plain `pytest` tries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the parameters of a test, of which plain `pytest` tries the kept ones and `-m families` the others."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.families) for value in values]
