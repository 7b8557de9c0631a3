"""What one check of a pair found: how bad it is, what was measured, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MAX_NEW_TOKENS = 64  # longest answer of a diagnosis
OK, WARNING, FAULT, SKIPPED = "ok", "warning", "fault", "skipped"
# What a check of unknown files and models may raise; PyTorch reports lack of memory and wrong shapes as RuntimeError.
CHECK_ERRORS = (ValueError, TypeError, RuntimeError, OSError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Finding:
    """
    The result of one check.

    Args:
        name (`str`): what was looked at; docs/troubleshooting.md has a paragraph of the same name.
        status (`str`): `"ok"`, `"warning"` (works, but look at it), `"fault"` or `"skipped"`.
        measured (`str`): what was seen, with numbers.
        advice (`str`): what to do; empty where there is nothing to do.
    """

    name: str
    status: str
    measured: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Its values, for JSON."""
        return asdict(self)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """
    Run a check so that its own failure is a finding and does not hide the others.

    Args:
        name (`str`): of the check.
        check (`Callable`): makes the finding.

    Returns:
        [`Finding`]: the check's, or a fault that says how it failed.

    Example:

    ```python
    >>> guarded("rows", lambda: Finding("rows", "ok", f"{1 // 0} rows")).measured
    'the check failed: ZeroDivisionError: integer division or modulo by zero'

    ```
    """
    try:
        return check()
    except CHECK_ERRORS as error:
        message = " ".join(str(error).split())
        return Finding(
            name,
            FAULT,
            f"the check failed: {type(error).__name__}: {message}",
            "Do what the message says; if it is about memory, use fewer prompts or shorter answers.",
        )
