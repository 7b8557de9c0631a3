"""The tokens of a reduced draft vocabulary, chosen from the rows that the draft is trained on."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from transformers.utils import logging

from ..model.modeling_dflash import DFlashDraftModel
from ..target.batch_states import documents_of

logger = logging.get_logger(__name__)
ROWS_AT_A_TIME = 1000


def most_frequent_tokens(counts: torch.Tensor, size: int) -> torch.Tensor:
    """
    Choose the most frequent tokens. Ties go to the lower id, and tokens that never occur are taken in ascending order.

    Args:
        counts (`torch.LongTensor` of shape `[vocab_size]`): How often each token occurs.
        size (`int`): The number of tokens to choose.

    Returns:
        `torch.LongTensor` of shape `[size]`: token ids in ascending order.

    Example:

    ```python
    >>> counts = torch.zeros(10, dtype=torch.long)
    >>> counts[[5, 2, 7]] = torch.tensor([9, 9, 1])
    >>> most_frequent_tokens(counts, 4).tolist()
    [0, 2, 5, 7]

    ```
    """
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def count_supervised_tokens(rows: datasets.Dataset, vocab_size: int) -> torch.Tensor:
    """
    Count the tokens that carry loss.

    Args:
        rows (`datasets.Dataset`): Prepared rows.
        vocab_size (`int`): The number of tokens.

    Returns:
        `torch.LongTensor` of shape `[vocab_size]`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        part: Any = rows[start : start + ROWS_AT_A_TIME]
        supervised = [
            torch.as_tensor(ids)[torch.as_tensor(mask, dtype=torch.bool)]
            for ids, mask in zip(part["input_ids"], part["supervised_mask"], strict=True)
        ]
        counts += torch.cat(supervised).bincount(minlength=vocab_size)
    return counts


def choose_draft_vocabulary(draft: DFlashDraftModel, rows: Any) -> None:
    """
    Set the vocabulary of a draft that has a reduced one which is not chosen yet.

    The tokens are those that occur most often in the responses, since tokens of prompts are never drafted.

    Args:
        draft ([`DFlashDraftModel`]): The draft.
        rows (`datasets.Dataset`): The prepared training rows.

    Raises:
        ValueError: The rows are a stream, which cannot be counted before training.
    """
    if draft.d2t is None or draft.d2t.any():
        return
    if not isinstance(rows, datasets.Dataset):
        raise ValueError(
            "The tokens of the draft's reduced vocabulary are not chosen, and the training rows are a stream, which "
            "cannot be counted before training. Call draft.set_draft_vocabulary(token_ids) first."
        )
    counts = count_supervised_tokens(documents_of(rows), draft.config.vocab_size)
    tokens = most_frequent_tokens(counts, len(draft.d2t))
    draft.set_draft_vocabulary(tokens.to(draft.d2t.device))
    share = counts[tokens].sum().item() / max(counts.sum().item(), 1)
    logger.warning_advice(
        f"The draft proposes {len(tokens):,} of {draft.config.vocab_size:,} tokens, which are {share:.1%} of the "
        "tokens in the training responses."
    )
