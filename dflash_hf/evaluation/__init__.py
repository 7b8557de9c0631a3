"""Measurements of a draft beside plain decoding: comparisons, prompt suites, simulated decoding."""

from .compare import (
    Comparison,
    Generation,
    Summary,
    chat_inputs,
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
