"""`dflash-hf generate`: one prompt, answered with a draft."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console


def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    draft: Annotated[str, typer.Option(help="Folder or Hub name of the draft.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub name; default: the one the draft names.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, above 0 samples.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of target and draft: auto, bfloat16, float32.")] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Also answer without the draft.")] = False,
) -> None:
    """Answer a prompt with a draft; print acceptance length and tokens a second."""
    from ..data.chat_template import chat_inputs
    from ..evaluation.compare import compare_on_prompts, generate_timed
    from ..target.loading import load_pair

    console = Console()
    model, pair, tokenizer = load_pair(draft, target, dtype)
    kwargs: dict[str, Any] = {"own_loop": True, "max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        kwargs["temperature"] = temperature
    if compare:
        (comparison,) = compare_on_prompts(model, pair, tokenizer, [prompt], **kwargs)
        drafted = comparison.drafted
    else:
        inputs = chat_inputs(tokenizer, prompt, model.device, pair.config.chat_template_kwargs)
        drafted = generate_timed(model, inputs, pair, pad_token_id=tokenizer.pad_token_id, **kwargs)
    console.print(tokenizer.decode(drafted.token_ids, skip_special_tokens=True), markup=False, highlight=False)
    console.rule()
    console.print(
        f"{len(drafted.token_ids)} tokens, acceptance length {drafted.accept_len:.2f}, "
        f"{drafted.tokens_per_s:.1f} tokens/s"
    )
    if compare:
        same = "the same tokens" if comparison.is_identical else "other tokens (near-ties, or sampling)"
        console.print(f"plain: {comparison.plain.tokens_per_s:.1f} tokens/s, {same}; {comparison.speed_up:.2f}×")
