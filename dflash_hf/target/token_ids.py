"""Tokens of a prompt that have no row in the embedding of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..model.configuration_dflash import describe_target, num_embedding_rows


def check_prompt_ids(
    target: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """
    Refuse a prompt with a token that the target cannot read.

    A tokenizer may have special tokens for which the embedding was never resized. Without this check a CPU raises an
    `IndexError`, and a GPU cannot be used any more by the process.

    Args:
        target (`PreTrainedModel`): the target. If its embedding does not tell the number of its rows, only negative
            ids are refused.
        input_ids (`torch.LongTensor` of any shape, or `Sequence[int]`): token ids of prompts, padding included.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): gives the text of the token for the message.

    Raises:
        ValueError: a token id is negative, or has no row.
    """
    ids = torch.as_tensor(input_ids)
    if not ids.numel():
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    num_rows = num_embedding_rows(target.get_input_embeddings())
    if low >= 0 and (num_rows is None or high < num_rows):
        return
    token = low if low < 0 else high
    text = tokenizer.convert_ids_to_tokens(token) if tokenizer is not None and token >= 0 else None
    shown = f"{token} ({text!r})" if text is not None else str(token)
    rule = (
        "ids are not negative" if num_rows is None else f"the embedding of the target has the rows 0 … {num_rows - 1}"
    )
    raise ValueError(
        f"The prompt contains token {shown}, and {rule} ({describe_target(target)}). Remove the token from the "
        "prompt, or use the tokenizer that belongs to the target."
    )


def padding_token_id(target: PreTrainedModel, candidates: Sequence[int | None]) -> int:
    """
    Choose the token that fills the places of a batch that hold no text.

    The target reads these places, too, so that the token needs a row in its embedding.

    Args:
        target (`PreTrainedModel`): the target.
        candidates (`Sequence[int | None]`): token ids, the best one first.

    Returns:
        `int`: the first candidate that has a row, or 0.
    """
    num_rows = num_embedding_rows(target.get_input_embeddings())
    usable = (each for each in candidates if each is not None and 0 <= each < (num_rows or each + 1))
    return next(usable, 0)
