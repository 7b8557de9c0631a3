"""Targets whose rotary angles depend on the length of the text that a pass reads."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PreTrainedConfig

# In transformers 5.24 these types set the angles of a pass by its greatest position: "dynamic" at every token beyond
# the original length, "longrope" once.
LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")

# The modules of such a target keep the angles of the pass that runs, so its passes must not run at the same time.
_one_pass_at_a_time = threading.RLock()


def length_dependent_angles(config: PreTrainedConfig) -> tuple[str, int] | None:
    """
    Return the type of the rotary angles of a target and the length up to which they are constant.

    Args:
        config (`PreTrainedConfig`): the configuration of the target.

    Returns:
        `tuple[str, int]`: the type and the number of tokens; `None` if the angles do not depend on the length.
    """
    text_config = config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    found = []
    for values in by_layer_type:
        kind = values.get("rope_type", values.get("type"))
        length = values.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if kind in LENGTH_DEPENDENT_TYPES:
            found.append((kind, length or text_config.max_position_embeddings))
    return min(found, key=lambda item: (item[0], item[1])) if found else None


def exclusive_angles(config: PreTrainedConfig) -> AbstractContextManager[Any]:
    """
    Return a context for forward passes, in which no pass of another thread changes the rotary angles of a target.

    Args:
        config (`PreTrainedConfig`): the configuration of the target.

    Returns:
        `AbstractContextManager`: it can be entered again and again; where angles are constant it does nothing.
    """
    return nullcontext() if length_dependent_angles(config) is None else _one_pass_at_a_time
