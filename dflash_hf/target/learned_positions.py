"""Targets that have a table of positions, and cannot read a text that is longer."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Names of the table in the models of transformers 5.24; in GPT-J, CodeGen and CTRL it is a buffer of angles.
TABLES = (
    *("wpe", "embed_positions", "position_embedding", "position_embeddings", "positions_embed", "pos_emb"),
    "pos_encoding",
)

_learned_positions: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def learned_positions(target: PreTrainedModel) -> int | None:
    """
    Return the number of positions of a target with a table of them.

    Args:
        target (`PreTrainedModel`): the target.

    Returns:
        `int`: the length of the longest text that it can read; `None` if no table limits it, as with rotary positions.
    """
    if target not in _learned_positions:
        _learned_positions[target] = _find_table(target)
    return _learned_positions[target]


def _find_table(target: PreTrainedModel) -> int | None:
    """Return the length of the table of positions of a target, or `None` without one."""
    config = target.config.get_text_config(decoder=True)
    if config.model_type == "mpt":
        return config.max_seq_len  # the biases of distances are computed up to there (transformers 5.24)
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    for name, module in target.named_modules():
        # Some tables have a few more rows, for padding.
        if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding):
            return length if length <= module.num_embeddings <= length + 2 else None
    for name, buffer in target.named_buffers():
        if name.rpartition(".")[2] in TABLES and buffer.dim() == 2 and len(buffer) == length:
            return length
    return None


def context_length(target: PreTrainedModel) -> int | None:
    """
    Return the number of tokens that a target was made for.

    Args:
        target (`PreTrainedModel`): the target.

    Returns:
        `int`: the length of its table of positions, or else `max_position_embeddings` of its configuration; `None` if
        it names no length.
    """
    length = learned_positions(target)
    if length is None:
        length = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length


def room_for_new_tokens(target: PreTrainedModel, prompt_length: int, block_size: int = 1) -> int | None:
    """
    Return the number of tokens that may follow a prompt.

    Args:
        target (`PreTrainedModel`): the target.
        prompt_length (`int`): tokens of the prompt.
        block_size (`int`, defaults to 1): tokens that every pass reads, also past the greatest length of the text.

    Returns:
        `int`, which counts a last token that the target writes and does not read; `None` if no table limits it.
    """
    positions = learned_positions(target)
    return None if positions is None else positions + 2 - block_size - prompt_length


def row_length(max_length: int, positions: int | None) -> int:
    """
    Return the greatest length of a row, and warn if the table of positions of the target ends before `max_length`.

    Args:
        max_length (`int`): the length that was asked for, in tokens.
        positions (`int`, *optional*): the length of the table, see [`learned_positions`].

    Returns:
        `int`
    """
    if positions is None or max_length <= positions:
        return max_length
    logger.warning(
        f"Rows are limited to {positions} tokens, the number of positions that the target has learned, and not to "
        f"max_length={max_length}."
    )
    return positions


def check_length(target: PreTrainedModel, token_valid_mask: torch.Tensor) -> None:
    """
    Refuse texts that are longer than the table of positions of a target.

    Args:
        target (`PreTrainedModel`): the target.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.

    Raises:
        ValueError: a text is longer.
    """
    limit = learned_positions(target)
    longest = int(token_valid_mask.sum(1).max()) if token_valid_mask.numel() else 0
    if limit is not None and longest > limit:
        raise ValueError(
            f"A text has {longest} tokens, and {type(target).__name__} has learned {limit} positions. Truncate the "
            f"text to {limit} tokens."
        )
