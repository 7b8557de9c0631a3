"""Near-ties: where two greedy responses differ first, and how close the target's logits are there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..target.hidden_states import text_inputs

# Two ways to compute the same logits round differently. Logits of language models are mostly below 32, where one step
# of bfloat16 is 0.125 and one of float16 is 0.0156; the gaps allow two steps. In float32 the sums inside the network
# contribute more than the last step.
NEAR_TIE_GAPS = {torch.bfloat16: 0.25, torch.float16: 0.03125, torch.float32: 1e-4}


@dataclass(frozen=True)
class FirstDifference:
    """
    The first token at which two greedy responses to the same prompt differ.

    Args:
        index (`int`): index of the token in the responses.
        logit_gap (`float`): logit of the target's best token there, minus the lower logit of the two that were chosen.
        near_tie_gap (`float`): greatest gap that counts as a near-tie, from [`near_tie_gap`].
        is_near_tie (`bool`): both responses have a token there, and the gap is that of a near-tie, so that rounding
            decides between the two.
    """

    index: int
    logit_gap: float
    near_tie_gap: float
    is_near_tie: bool


def near_tie_gap(dtype: torch.dtype) -> float:
    """
    Return the greatest logit gap of a near-tie.

    Args:
        dtype (`torch.dtype`): dtype of the target.

    Returns:
        `float`: 0.25 for bfloat16, 0.03125 for float16 and 1e-4 for float32.
    """
    return NEAR_TIE_GAPS.get(dtype, NEAR_TIE_GAPS[torch.float32])


def index_of_first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """
    Find the first token at which two responses differ.

    Args:
        one (`Sequence[int]`), other (`Sequence[int]`): token ids.

    Returns:
        `int`: index of the first token that differs, or that only one of the two has.

    Example:

    ```python
    >>> index_of_first_difference([5, 6, 7], [5, 6, 9]), index_of_first_difference([5, 6], [5, 6, 7])
    (2, 2)

    ```
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


@torch.no_grad()
def logit_gap(target: PreTrainedModel, prompt_ids: torch.Tensor, one: Sequence[int], other: Sequence[int]) -> float:
    """
    Compare the target's logits where two greedy responses differ first.

    The target reads prompt and common tokens in one plain forward pass.

    Args:
        target (`PreTrainedModel`): the target.
        prompt_ids (`torch.LongTensor` of shape `[length]`): the prompt.
        one (`Sequence[int]`), other (`Sequence[int]`): token ids of the two responses, which are not equal.

    Returns:
        `float`: logit of the best token, minus the lower logit of the two tokens that differ.
    """
    index = index_of_first_difference(one, other)
    text = torch.cat([prompt_ids, prompt_ids.new_tensor(one[:index])])
    logits = target(**text_inputs(target, text[None], [])).logits[0, -1].float()
    chosen = [response[index] for response in (one, other) if index < len(response)]
    return (logits.max() - logits[chosen].min()).item()


def first_difference(
    target: PreTrainedModel, prompt_ids: torch.Tensor, one: Sequence[int], other: Sequence[int]
) -> FirstDifference | None:
    """
    Find where two greedy responses differ first, and whether the target is undecided there.

    Args:
        target, prompt_ids, one, other: see [`logit_gap`].

    Returns:
        [`FirstDifference`], or `None` if the responses are equal.
    """
    if list(one) == list(other):
        return None
    index, gap = index_of_first_difference(one, other), logit_gap(target, prompt_ids, one, other)
    greatest = near_tie_gap(target.dtype)
    return FirstDifference(index, gap, greatest, index < min(len(one), len(other)) and gap <= greatest)
