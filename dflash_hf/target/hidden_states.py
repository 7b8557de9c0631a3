"""Hidden states of a frozen target, computed with no more of its forward pass than they need."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..model.configuration_dflash import describe_target
from .learned_positions import check_length, learned_positions
from .rotary import exclusive_angles, length_dependent_angles

logger = logging.get_logger(__name__)

PROBE_TOKENS = 8
# For each decoder: whether a pass of (number of layers, with final state) equals one of the whole target.
_short_pass_is_exact: WeakKeyDictionary[nn.Module, dict[tuple[int, bool], bool]] = WeakKeyDictionary()


def unwrap_peft(target: Any) -> PreTrainedModel:
    """
    Return the model inside a `peft` wrapper, with its adapters in place, and any other model unchanged.

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`): its active adapters stay active.

    Returns:
        `PreTrainedModel`: shares every weight with `target`.

    Raises:
        ValueError: the wrapper adds virtual tokens to the prompt.
    """
    if not hasattr(target, "get_base_model"):
        return target
    if target.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"The target {describe_target(target.get_base_model())} is wrapped in prompt learning "
            f"({target.active_peft_config.peft_type}). Its virtual tokens have hidden states, but the text has no "
            "tokens for them. Use adapters that change the weights, such as LoRA."
        )
    return target.get_base_model()


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

    The head is not run, and without `include_final_state` the layers after the last chosen one are not run either. On
    the first tokens this shorter pass is compared bit by bit with a pass of the whole target, which is used if they
    differ. It is also used for targets that are spread over devices or processes, compiled, or of another structure.

    Where rotary angles depend on the length of the text ([`length_dependent_angles`]), rows of a batch that is longer
    are run one by one. A row beyond that length has the angles of a prompt of its length in all places.

    Each sequence is run without padding before it. Padding therefore has no influence, however the target handles
    masks (recurrent layers, absolute positions).

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`): in evaluation mode; not changed.
        input_ids (`torch.LongTensor` of shape `[R, S]`): token ids on any device.
        token_valid_mask (`torch.BoolTensor` of shape `[R, S]`): True at real tokens.
        target_layer_ids (`list[int]`): decoder layers, counted from 0.
        include_final_state (`bool`, defaults to `False`): add the state after the final norm, from which the head of
            the target computes logits, as the last `hidden_size` columns.

    Returns:
        `torch.FloatTensor` of shape `[R, S, len(target_layer_ids) * hidden_size]`, or `hidden_size` wider with the
        final state, in the dtype of the target and on the device of `input_ids`; 0 at padding.

    Raises:
        ValueError: the target has no such layer, its final state cannot be computed, or a row is longer than its
            learned positions.
    """
    target = unwrap_peft(target)
    first_real = None
    if not (token_valid_mask[:, 1:] <= token_valid_mask[:, :-1]).all():
        # A causal model never attends to later padding. With the real tokens first, no mask is needed.
        first_real = (~token_valid_mask).int().sort(dim=1, stable=True).indices
        input_ids = input_ids.gather(1, first_real)
    angles, positions = length_dependent_angles(target.config), learned_positions(target)
    if positions is not None:
        check_length(target, token_valid_mask)
    limits = [limit for limit in (angles and angles[1], positions) if limit is not None]
    if input_ids.shape[1] <= min(limits, default=input_ids.shape[1]):
        context = _context(target, input_ids, target_layer_ids, include_final_state)
    else:  # one long row would change the angles of all rows, and padding has no positions
        context = torch.nn.utils.rnn.pad_sequence(
            [
                _context(target, row[None, : max(length, 1)], target_layer_ids, include_final_state)[0]
                for row, length in zip(input_ids, token_valid_mask.sum(1).tolist(), strict=True)
            ],
            batch_first=True,
        )
        context = nn.functional.pad(context, (0, 0, 0, input_ids.shape[1] - context.shape[1]))
    if first_real is not None:
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        context = context[rows, first_real.argsort(dim=1)]
    return context.masked_fill(~token_valid_mask[..., None], 0)


@torch.no_grad()
def target_logits_function(
    target: PreTrainedModel, head: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Return the function that computes the logits of a target from its final hidden state.

    It applies the raw head, then the scale and the cap of the configuration. Its result is compared once with the
    logits of the target itself.

    Args:
        target (`PreTrainedModel` or `peft.PeftModel`): in evaluation mode.
        head (`Callable`): applies the raw head of the target, such as `draft.compute_logits`.

    Returns:
        `Callable` from final states of shape `[..., hidden_size]` to logits of shape `[..., vocab_size]`.

    Raises:
        ValueError: the target computes its logits in another way.
    """
    target = unwrap_peft(target)
    config = target.config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def compute_target_logits(final_states: torch.Tensor) -> torch.Tensor:
        logits = head(final_states) * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    input_ids = torch.arange(1, 1 + PROBE_TOKENS, device=target.device)[None] % config.vocab_size
    expected = target(**{**text_inputs(target, input_ids, []), "logits_to_keep": 0}).logits.float()
    (final_state,) = _states_of_text(target, input_ids, [], include_final_state=True)
    difference = (compute_target_logits(final_state).float() - expected).abs().max().item()
    allowed = (1e-4 if target.dtype == torch.float32 else 0.02) * expected.abs().max().item()
    if not difference <= allowed:
        raise ValueError(
            f"The logits of the target {describe_target(target)} differ by up to {difference:.3g} from its head on "
            "its final state with the scale and cap of its configuration, so a loss cannot compare with them slot "
            "by slot. Leave l1_weight, kl_weight and soft_labels at their defaults."
        )
    return compute_target_logits


def _context(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: list[int], include_final_state: bool
) -> torch.Tensor:
    """Return the states of the layers, concatenated, on the device of the ids."""
    with exclusive_angles(target.config):
        states = _states_of_text(target, input_ids.to(target.device), layer_ids, include_final_state)
    return torch.cat([state.to(input_ids.device) for state in states], dim=-1)


def _states_of_text(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: list[int], include_final_state: bool
) -> list[torch.Tensor]:
    """Return the states of each layer, computed without head and later layers where that is exact."""
    stack = _find_stack(target)
    num_layers = max(layer_ids, default=-1) + 1
    if stack is not None and num_layers <= len(stack.layers):
        verdicts = _short_pass_is_exact.setdefault(stack.decoder, {})
        key = (num_layers, include_final_state)
        if key not in verdicts:
            verdicts[key] = not _is_managed(target) and _is_exact(
                stack, target, input_ids[:1, :PROBE_TOKENS], layer_ids, include_final_state
            )
            logger.info(
                f"Hidden states of layers {layer_ids} of {describe_target(target)}: "
                f"{'the head and unused layers are not run.' if verdicts[key] else 'the whole target is run.'}"
            )
        if verdicts[key]:
            return _short_pass(stack, input_ids, layer_ids, include_final_state)
    return _full_pass(target, input_ids, layer_ids, include_final_state)


def text_inputs(model: PreTrainedModel, input_ids: torch.Tensor, wanted: list[int]) -> dict[str, Any]:
    """
    Return the keyword arguments of a forward pass over texts without padding before them.

    Args:
        model (`PreTrainedModel`): the target, or its body.
        input_ids (`torch.LongTensor` of shape `[R, S]`): the texts.
        wanted (`list[int]`): indices of the hidden states to collect, where 0 is the embedding.

    Returns:
        `dict`: positions count from 0 as in `generate`. RoBERTa (transformers 5.24), for example, would begin after
        the position of the padding.
    """
    inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, "output_hidden_states": wanted}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:  # some models would reuse those of an earlier prompt
        inputs["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = 1
    return inputs


def _full_pass(
    target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: list[int], include_final_state: bool
) -> list[torch.Tensor]:
    """Return the states of each layer from a pass of the whole target."""
    config = target.config.get_text_config(decoder=True)
    wanted = [layer_id + 1 for layer_id in layer_ids]
    if include_final_state:
        if getattr(config, "tie_last_hidden_states", None) is False:
            raise ValueError(
                f"The target {describe_target(target)} has config.tie_last_hidden_states=False, so that its last "
                "hidden state is the one before the final norm, and its logits are computed from the one after it. "
                "Remove that entry of the configuration."
            )
        wanted.append(config.num_hidden_layers)
    states = target(**text_inputs(target, input_ids, wanted)).hidden_states
    chosen = [states[index] if index < len(states) else None for index in wanted]
    missing = [index - 1 for index, state in zip(wanted, chosen, strict=True) if state is None]
    if include_final_state and len(states) != config.num_hidden_layers + 1:
        raise ValueError(
            f"The target {describe_target(target)} returned {len(states)} hidden states for its "
            f"{config.num_hidden_layers} layers (it may run some of them several times), so that its final state "
            "cannot be identified. Use a loss that needs no logits of the target."
        )
    if missing:
        raise ValueError(
            f"The target {describe_target(target)} returned no hidden states for layers {missing}. It has "
            f"{len(states) - 1} layers, counted from 0. Use target_layer_ids inside that range."
        )
    return [state for state in chosen if state is not None]


@dataclass(frozen=True)
class _Stack:
    """
    The decoder layers of a target and the modules that hold them.

    Args:
        body (`PreTrainedModel`): the target without its head; in a multimodal target it contains the decoder.
        decoder (`PreTrainedModel`): the text decoder.
        name (`str`): attribute of `decoder` that holds the layers.
        layers (`nn.ModuleList`): the layers.
    """

    body: PreTrainedModel
    decoder: PreTrainedModel
    name: str
    layers: nn.ModuleList


def _find_stack(target: PreTrainedModel) -> _Stack | None:
    """Find the list of decoder layers of a target; return `None` unless there is exactly one candidate."""
    if not isinstance(target, PreTrainedModel):
        return None
    decoder = target.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or not isinstance(target.base_model, PreTrainedModel):
        return None
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [
        _Stack(target.base_model, owner, name, layers)
        for owner in (decoder, *decoder.children())  # a class with a wrong base_model_prefix is its own decoder
        if isinstance(owner, PreTrainedModel)
        for name, layers in owner.named_children()
        if isinstance(layers, nn.ModuleList) and len(layers) == depth
    ]
    return stacks[0] if len(stacks) == 1 else None


def _is_managed(target: PreTrainedModel) -> bool:
    """Return whether modules are offloaded (accelerate), sharded (FSDP, TP, ZeRO-3) or compiled."""
    return any(
        hasattr(module, "_hf_hook")
        or hasattr(module, "_fsdp_wrapped_module")
        or module._compiled_call_impl is not None
        for module in target.modules()
    ) or any(hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id") for parameter in target.parameters())


def _first_layers(stack: _Stack, num_layers: int) -> nn.Module:
    """
    Return a body whose decoder has the first layers only, and keeps the state of the last of them before the norm.

    It shares all layers and weights with the target, which does not change: another thread may be running it.
    """
    names = next(name for name, module in stack.body.named_modules() if module is stack.decoder).split(".")
    body = parent = decoder = _shell(stack.body)
    for name in filter(None, names):
        parent, decoder = decoder, _shell(getattr(decoder, name))
        parent._modules[name] = decoder
    decoder.config = copy.copy(stack.decoder.config)
    decoder.config.tie_last_hidden_states = False
    decoder._modules[stack.name] = stack.layers[:num_layers]
    return body


def _shell(module: Any) -> Any:
    """Return a module with the same attributes and submodules, whose own attributes can be replaced."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


def _short_pass(
    stack: _Stack, input_ids: torch.Tensor, layer_ids: list[int], include_final_state: bool
) -> list[torch.Tensor]:
    """Return the states of each layer from a pass without the head and, if possible, without later layers."""
    inputs = text_inputs(stack.body, input_ids, [layer_id + 1 for layer_id in layer_ids])
    num_layers = max(layer_ids, default=-1) + 1
    if include_final_state or num_layers == len(stack.layers):
        outputs = stack.body(**inputs)
    else:
        outputs = _first_layers(stack, num_layers)(**inputs)
    states = [outputs.hidden_states[layer_id + 1] for layer_id in layer_ids]
    return [*states, outputs.last_hidden_state] if include_final_state else states


def _is_exact(
    stack: _Stack, target: PreTrainedModel, input_ids: torch.Tensor, layer_ids: list[int], include_final_state: bool
) -> bool:
    """Return whether the shorter pass gives exactly the states of the whole target."""
    # The full pass comes first, since transformers (5.24) installs its capturing hooks on the layers it finds then.
    expected = _full_pass(target, input_ids, layer_ids, include_final_state)
    try:
        states = _short_pass(stack, input_ids, layer_ids, include_final_state)
    except (AttributeError, IndexError, KeyError, ValueError):  # a decoder that needs all of its layers
        return False
    return len(states) == len(expected) and all(
        ours is not None and torch.equal(ours, theirs) for ours, theirs in zip(states, expected, strict=True)
    )
