"""Names of the logged acceptance metrics, and the older names that logs of version 0.1 have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ACCEPTANCE_LENGTH = "acceptance_length"
OLD_ACCEPTANCE_LENGTH = "accept_len"


def old_name(name: str) -> str:
    """
    Return the name that version 0.1 gave to a metric; names that did not change are returned as they are.

    Example:

    ```python
    >>> old_name("eval_serving_acceptance_length"), old_name("eval_loss")
    ('eval_serving_accept_len', 'eval_loss')

    ```
    """
    if name.endswith(ACCEPTANCE_LENGTH):
        return name.removesuffix(ACCEPTANCE_LENGTH) + OLD_ACCEPTANCE_LENGTH
    return name


def add_old_names(metrics: dict[str, Any]) -> None:
    """
    Add every acceptance length a second time under its older name, in place.

    Arguments such as `metric_for_best_model` and scripts that read the older names keep working for one release.

    Args:
        metrics (`dict`): metrics of an evaluation, or a log entry.
    """
    metrics |= {old_name(name): value for name, value in metrics.items() if name.endswith(ACCEPTANCE_LENGTH)}


def logged_metric(entry: Mapping[str, Any], name: str) -> float | None:
    """
    Read a metric from a log entry of this version or of version 0.1.

    Args:
        entry (`Mapping`): an entry of `log_history`, or the metrics of an evaluation.
        name (`str`): current name of the metric, such as `eval_acceptance_length`.

    Returns:
        `float` or `None`: `None` if the entry lacks the metric; version 0.1 logged NaN where there was no verify pass.

    Example:

    ```python
    >>> logged_metric({"eval_accept_len": 2.5}, "eval_acceptance_length")
    2.5

    ```
    """
    value = entry.get(name, entry.get(old_name(name)))
    return None if value is None or math.isnan(value) else value
