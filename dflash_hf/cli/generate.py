"""`dflash-hf generate`: answer one prompt with a draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ..evaluation.compare import Comparison


def generate(
    prompt: Annotated[str, typer.Argument(help="The user message.")],
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Greatest length of the response in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, above 0 samples.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(help="Dtype of target and draft: auto, bfloat16, float16 or float32.")
    ] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Answer without the draft, too.")] = False,
) -> None:
    """Answer a prompt with a draft, and print acceptance length and tokens per second."""
    from ..data.chat_template import chat_inputs
    from ..evaluation.compare import compare_on_prompts
    from ..evaluation.timed_generation import generate_timed
    from ..target.loading import load_pair

    console = Console()
    model, pair, tokenizer = load_pair(draft, target, dtype)
    kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        kwargs["temperature"] = temperature
    if compare:
        (comparison,) = compare_on_prompts(model, pair, tokenizer, [prompt], **kwargs)
        drafted = comparison.drafted
    else:
        inputs = chat_inputs(tokenizer, prompt, model.device, pair.config.chat_template_kwargs)
        drafted = generate_timed(
            model, inputs, pair, tokenizer=tokenizer, pad_token_id=tokenizer.pad_token_id, **kwargs
        )
    console.print(tokenizer.decode(drafted.token_ids, skip_special_tokens=True), markup=False, highlight=False)
    console.rule()
    length = "–" if drafted.acceptance_length is None else f"{drafted.acceptance_length:.2f}"
    console.print(f"{len(drafted.token_ids)} tokens, acceptance length {length}, {drafted.tokens_per_s:.1f} tokens/s")
    if compare:
        console.print(
            f"plain: {comparison.plain.tokens_per_s:.1f} tokens/s, {_describe_difference(comparison)}; "
            f"{comparison.speed_up:.2f}×"
        )


def _describe_difference(comparison: Comparison) -> str:
    """Say whether the two responses have the same tokens, and if not, why."""
    if comparison.is_identical:
        return "the same tokens"
    if comparison.difference is None:
        return "other tokens, since they were sampled"
    gap = f"logit gap {comparison.difference.logit_gap:.2g}"
    kind = "a near-tie of the target" if comparison.difference.is_near_tie else "no near-tie"
    return f"other tokens from token {comparison.difference.index + 1} on, which is {kind} ({gap})"
