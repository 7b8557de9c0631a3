"""The finding of a check: its status, what was measured, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MAX_NEW_TOKENS = 64  # default length of the responses of a diagnosis
OK, WARNING, FAULT, SKIPPED = "ok", "warning", "fault", "skipped"
# Exceptions that a check of unknown files and models may raise. PyTorch reports a lack of memory and wrong shapes as
# RuntimeError.
CHECK_ERRORS = (ValueError, TypeError, RuntimeError, OSError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Finding:
    """
    The result of one check.

    Args:
        name (`str`): The name of the check. `docs/troubleshooting.md` has an entry of the same name.
        status (`str`): `"ok"`, `"warning"` (the pair works, and the finding deserves attention), `"fault"` or
            `"skipped"`.
        measured (`str`): What was measured, with numbers.
        advice (`str`): What to do; empty if nothing needs to be done.
    """

    name: str
    status: str
    measured: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """
    Run a check and turn its failure into a finding, so that the other checks still run.

    Args:
        name (`str`): The name of the check.
        check (`Callable`): The check, which returns a finding.

    Returns:
        [`Finding`]: The finding of the check, or a fault that says how the check failed.

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
            "Follow the message. If memory is short, use fewer prompts or shorter responses.",
        )
