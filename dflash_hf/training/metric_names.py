"""Names of the logged metrics, the older names that logs of version 0.1 have, and metrics of the user's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import EarlyStoppingCallback
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize
from transformers.utils import logging

logger = logging.get_logger(__name__)

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


def evaluation_metric_names(args: Any, block_size: int) -> set[str]:
    """
    Return the names of the metrics that an evaluation logs, without their prefix.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        block_size (`int`): slots of a block, the anchor included.

    Returns:
        `set[str]`; metrics that are left out where there was no verify pass are among them.
    """
    names = {"loss", ACCEPTANCE_LENGTH, *(f"slot_accuracy_{slot}" for slot in range(1, block_size))}
    names |= {f"serving_{ACCEPTANCE_LENGTH}"} if args.eval_serving else set()
    names |= {f"generate_{ACCEPTANCE_LENGTH}"} if args.eval_generate_prompts > 0 else set()
    return names | {old_name(name) for name in names} | {"runtime", "samples_per_second", "steps_per_second"}


def check_early_stopping(args: Any, callbacks: Iterable[Any]) -> None:
    """
    Refuse early stopping by a metric that is not chosen or not computed.

    Trainer finds this out after the hidden states of the target are cached.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        callbacks (`Iterable`): callbacks or their classes.

    Raises:
        ValueError: nothing is evaluated, or no metric is named.
    """
    if not any(
        callback is EarlyStoppingCallback or isinstance(callback, EarlyStoppingCallback) for callback in callbacks
    ):
        return
    if getattr(args.eval_strategy, "value", args.eval_strategy) == "no":
        raise ValueError(
            "EarlyStoppingCallback needs evaluations, and eval_strategy is 'no'. Set eval_strategy='steps' or 'epoch'."
        )
    if args.metric_for_best_model is None:
        raise ValueError(
            "EarlyStoppingCallback needs a metric, and metric_for_best_model is unset. Set it, for example to "
            f"'eval_{ACCEPTANCE_LENGTH}'."
        )


def check_evaluation(args: Any, block_size: int, eval_dataset: Any, compute_metrics: Any) -> None:
    """
    Refuse evaluation sets and a `metric_for_best_model` that would end a run after its first evaluation.

    Args:
        args ([`DFlashTrainingArguments`]): arguments of the run.
        block_size (`int`): slots of a block, the anchor included.
        eval_dataset: evaluation rows, or a dictionary of several sets of them.
        compute_metrics (`Callable`, *optional*): function of the user, whose metrics have names of their own.

    Raises:
        TypeError: `compute_metrics` is no function, or a name of a set is no text.
        ValueError: a set is not one set of rows, or no evaluation logs `metric_for_best_model`.
    """
    if compute_metrics is not None and not callable(compute_metrics):
        raise TypeError(
            f"compute_metrics is a {type(compute_metrics).__name__} and must be a function of an EvalPrediction that "
            "returns a dictionary. Pass a function, or leave it unset."
        )
    prefixes = ["eval_"]
    if isinstance(eval_dataset, dict):
        _check_sets(eval_dataset)
        prefixes = [f"eval_{name}_" for name in eval_dataset]
    metric = args.metric_for_best_model
    if metric is None or getattr(args.eval_strategy, "value", args.eval_strategy) == "no":
        return
    wanted = metric if metric.startswith("eval_") else f"eval_{metric}"
    names = evaluation_metric_names(args, block_size)
    own = compute_metrics is not None
    if any(wanted.startswith(prefix) and (own or wanted.removeprefix(prefix) in names) for prefix in prefixes):
        return
    example = f"{prefixes[0]}{ACCEPTANCE_LENGTH}"
    raise ValueError(
        f"metric_for_best_model={metric!r} is no metric of an evaluation, which logs {', '.join(sorted(names))}, each "
        f"after {' or '.join(prefixes)}. Set metric_for_best_model, for example to {example!r}."
    )


def _check_sets(eval_dataset: Mapping[Any, Any]) -> None:
    """Refuse a dictionary of evaluation sets whose names or values are not usable."""
    if not eval_dataset:
        raise ValueError("eval_dataset is a dictionary without a set. Name at least one set, or leave it unset.")
    for name, rows in eval_dataset.items():
        if not isinstance(name, str):
            raise TypeError(
                f"eval_dataset has a set named {name!r}, a {type(name).__name__}, and names of sets are texts, which "
                "begin the names of their metrics. Name it with a str."
            )
        if rows is None or isinstance(rows, (dict, str)):
            raise TypeError(
                f"The evaluation set {name!r} is a {type(rows).__name__} and must be one set of rows. Load its rows, "
                "and give each set a name of its own."
            )


def own_metrics(
    compute_metrics: Callable[[EvalPrediction], Any], prediction: EvalPrediction, taken: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Compute the metrics of the user.

    Args:
        compute_metrics (`Callable`): function of the user.
        prediction (`EvalPrediction`): its argument.
        taken (`Mapping`): metrics that an evaluation logs anyway.

    Returns:
        `dict`: a metric that cannot be logged, or whose name is taken, is left out with a warning, since the run would
        otherwise end at its first evaluation.

    Raises:
        TypeError: the function returns no dictionary.
    """
    found = compute_metrics(prediction)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"compute_metrics returned a {type(found).__name__} and must return a dictionary of names and numbers."
        )
    usable: dict[str, Any] = {}
    for name, value in found.items():
        plain = denumpify_detensorize(value)
        if name in taken or old_name(str(name)) in taken:
            logger.warning_once(f"compute_metrics returns {name!r}, which every evaluation logs. It is left out.")
            continue
        try:
            json.dumps(plain)
        except (TypeError, ValueError):
            logger.warning_once(
                f"compute_metrics returns a {type(value).__name__} as {name!r}, and a log holds numbers and text. It "
                "is left out. Return a number."
            )
            continue
        usable[str(name)] = plain
    return usable
