"""`dflash-hf generate`: one prompt, answered with a draft."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from ..evaluation import chat_inputs, compare_on_prompts, generate_timed
from ..modeling_dflash import DFlashDraftModel
from .loading import load_target


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
    console = Console()
    pair = DFlashDraftModel.from_pretrained(draft, target=False)
    name = target or pair.config.target_name_or_path
    if name is None:
        raise ValueError(f"The draft {draft!r} names no target. Pass --target.")
    model, tokenizer = load_target(name, dtype)
    pair.tie_target(model)
    nn.Module.to(pair, model.device, model.dtype)
    kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
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
