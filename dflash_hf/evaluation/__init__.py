"""Measurements of a draft: comparison with plain generation, prompt suites, simulated decoding."""

from typing import TYPE_CHECKING

from .. import lazy_exports

__all__ = [
    "Comparison",
    "FirstDifference",
    "Generation",
    "Summary",
    "chat_inputs",
    "committed_by_pass",
    "compare_on_prompts",
    "first_difference",
    "generate_timed",
    "generated_acceptance_length",
    "plain_forward",
    "summarize_comparisons",
    "timed",
]

if TYPE_CHECKING:
    from ..data.chat_template import chat_inputs
    from .compare import (
        Comparison,
        Summary,
        compare_on_prompts,
        generated_acceptance_length,
        plain_forward,
        summarize_comparisons,
    )
    from .near_ties import FirstDifference, first_difference
    from .timed_generation import Generation, committed_by_pass, generate_timed, timed
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            ".compare": [
                "Comparison",
                "Summary",
                "compare_on_prompts",
                "generated_acceptance_length",
                "plain_forward",
                "summarize_comparisons",
            ],
            ".near_ties": ["FirstDifference", "first_difference"],
            ".timed_generation": ["Generation", "committed_by_pass", "generate_timed", "timed"],
            "..data.chat_template": ["chat_inputs"],
        },
    )
