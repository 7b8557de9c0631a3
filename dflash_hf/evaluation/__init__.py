"""Measurements of a draft beside plain decoding: comparisons, prompt suites, simulated decoding."""

from typing import TYPE_CHECKING

from .. import lazy_exports

__all__ = [
    "Comparison",
    "Generation",
    "Summary",
    "chat_inputs",
    "committed_by_pass",
    "compare_on_prompts",
    "generate_timed",
    "generated_accept_len",
    "plain_forward",
    "summarize_comparisons",
    "timed",
]

if TYPE_CHECKING:
    from ..data.chat_template import chat_inputs
    from .compare import (
        Comparison,
        Generation,
        Summary,
        committed_by_pass,
        compare_on_prompts,
        generate_timed,
        generated_accept_len,
        plain_forward,
        summarize_comparisons,
        timed,
    )
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            ".compare": [
                "Comparison",
                "Generation",
                "Summary",
                "committed_by_pass",
                "compare_on_prompts",
                "generate_timed",
                "generated_accept_len",
                "plain_forward",
                "summarize_comparisons",
                "timed",
            ],
            "..data.chat_template": ["chat_inputs"],
        },
    )
