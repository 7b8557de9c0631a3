"""Let the target answer prompts: training rows whose assistant tokens are the target's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def read_prompts(path: str | Path) -> list[str]:
    """
    Read user prompts from a JSON-lines file.

    Args:
        path (`str` or `Path`):
            One JSON object a line with `turns` (its first entry is taken), `prompt` (text) or `messages` (its first
            user message is taken).

    Returns:
        `list[str]`: the prompts in file order.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a line is no JSON object, or has none of the three columns; the message names the line.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error.msg}). Write one JSON object a line."
            ) from error
        prompt = None
        if isinstance(row, dict):
            user_messages = [
                message["content"] for message in row.get("messages", []) if message.get("role") == "user"
            ]
            prompt = next(iter([*row.get("turns", []), *user_messages]), row.get("prompt"))
        if not isinstance(prompt, str):
            raise ValueError(f"{path}, line {number}: no prompt. Each line needs `turns`, `prompt` or `messages`.")
        prompts.append(prompt)
    return prompts


@torch.inference_mode()
def generate_answers(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Yield one conversation a prompt, answered greedily by `target`.

    Prompts are sorted by length so that a batch carries little padding: rows come in another order than `prompts`.

    Args:
        target (`PreTrainedModel`):
            The causal language model, on its device, in eval mode.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, with a chat template.
        prompts (`list[str]`):
            User messages.
        max_new_tokens (`int`, defaults to 256):
            Longest answer in tokens.
        batch_size (`int`, defaults to 64):
            Prompts a batch.
        chat_template_kwargs (`dict`, *optional*):
            Passed to the chat template, for example `{"enable_thinking": False}`.

    Yields:
        `dict`: `messages` (user and assistant) and `finish_reason`, `"stop"` or `"length"`.
    """
    generate: Any = target.generate  # a mixin's method, which type checkers do not see
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **(chat_template_kwargs or {}))
        for chat in chats
    ]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    eos = target.generation_config.eos_token_id if target.generation_config is not None else tokenizer.eos_token_id
    eos_ids = torch.tensor(eos if isinstance(eos, list) else [eos], device=target.device)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        inputs = tokenizer(
            [texts[index] for index in indices],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(target.device)
        output = generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id
        )
        for index, answer in zip(indices, output[:, inputs["input_ids"].shape[1] :], strict=True):
            ended = torch.isin(answer, eos_ids)
            length = int(ended.int().argmax()) if bool(ended.any()) else answer.shape[0]
            text = tokenizer.decode(answer[:length], skip_special_tokens=True)
            yield {
                "messages": [*chats[index], {"role": "assistant", "content": text}],
                "finish_reason": "stop" if bool(ended.any()) else "length",
            }
