"""The frozen target: the hidden states of its chosen layers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from .batch_plan import tokens_before


def position_ids_of(token_valid_mask: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Positions as `generate` counts them: the first real token of a row is 0, whatever padding comes before it.

    Args:
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        segment_ids (`torch.LongTensor` of shape `[R, S]`, *optional*): in packed rows every document starts at 0.

    Returns:
        `torch.LongTensor` of shape `[R, S]`; padding has the position of the token that would come there.

    Example:

    ```python
    >>> position_ids_of(torch.tensor([[False, False, True, True]])).tolist()
    [[0, 0, 0, 1]]

    ```
    """
    return tokens_before(token_valid_mask, segment_ids)


@torch.no_grad()
def target_hidden_states(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    token_valid_mask: torch.Tensor,
    target_layer_ids: list[int],
    *,
    include_final_state: bool = False,
) -> torch.Tensor:
    """
    Run the target once and keep the outputs of the chosen decoder layers.

    Layer id `i` is the output of decoder layer `i`, that is `hidden_states[i + 1]` of transformers.

    Args:
        target (`PreTrainedModel`): in evaluation mode.
        input_ids (`torch.LongTensor` of shape `[R, S]`): on any device; moved to the target's.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        target_layer_ids (`list[int]`): layers counted from 0.
        include_final_state (`bool`, defaults to `False`): add the state after the final norm, from which the target's
            head makes its logits, as the last `hidden_size` columns.

    Returns:
        `torch.FloatTensor` of shape `[R, S, len(target_layer_ids) * hidden_size]`, or `hidden_size` wider with the
        final state, in the target's dtype, on the device of `input_ids`; zero at padding.

    Raises:
        ValueError: the target returned no state for a layer, for example because it has fewer layers.
    """
    device = target.device
    inputs: dict[str, Any] = {"input_ids": input_ids.to(device)}
    is_right_padded = bool((token_valid_mask[:, 1:] <= token_valid_mask[:, :-1]).all())
    if is_right_padded and token_valid_mask[:, :1].all():
        # A causal model never looks at later padding; without a mask its attention takes the fast path.
        inputs["position_ids"] = torch.arange(input_ids.shape[1], device=device)[None]
    else:
        inputs["attention_mask"] = token_valid_mask.to(device=device, dtype=torch.long)
        inputs["position_ids"] = position_ids_of(token_valid_mask).to(device)
    if "logits_to_keep" in inspect.signature(target.forward).parameters:
        inputs["logits_to_keep"] = 1  # no logits are needed here
    wanted = [layer_id + 1 for layer_id in target_layer_ids]
    if include_final_state:
        wanted.append(target.config.get_text_config(decoder=True).num_hidden_layers)
    states = target(**inputs, output_hidden_states=wanted, use_cache=False).hidden_states
    chosen = [states[index] if index < len(states) else None for index in wanted]
    missing = [layer_id for layer_id, state in zip(target_layer_ids, chosen, strict=False) if state is None]
    if missing:
        raise ValueError(
            f"The target {target.config.name_or_path!r} returned no hidden states for layers {missing}: it has "
            f"{len(states) - 1} layers, counted from 0. Use target_layer_ids inside that range."
        )
    context = torch.cat([state.to(input_ids.device) for state in chosen if state is not None], dim=-1)
    return context.masked_fill(~token_valid_mask[..., None], 0)
