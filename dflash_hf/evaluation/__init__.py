"""Measurements of a draft beside plain decoding: comparisons, prompt suites, simulated decoding."""

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
