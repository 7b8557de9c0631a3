"""Checks of a call of `generate` with a draft, before anything is read."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from ..model.configuration_dflash import describe_target
from ..model.modeling_dflash import DFlashDraftModel
from ..model.remote_code import local_draft
from ..target.learned_positions import learned_positions
from ..target.rotary import length_dependent_angles
from ..target.token_ids import check_prompt_ids
from .generation_settings import SUPPORTED_MODES
from .gqa_attention import MASKED_ATTENTION
from .kv_cache import RECURRENT_TYPES, RaggedCache


def usable_draft(draft: Any) -> DFlashDraftModel:
    """
    Return the draft of a call as an object of this package.

    Args:
        draft ([`DFlashDraftModel`]): the argument, also of the draft's own source files.

    Returns:
        [`DFlashDraftModel`]

    Raises:
        TypeError: there is no draft, or it is of another class.
        ValueError: it has no weights.
    """
    if draft is None:
        raise TypeError(
            "draft has the type NoneType and must be a DFlashDraftModel. Call "
            "target.generate(**inputs, custom_generate=dflash_decoding, draft=draft)."
        )
    draft = local_draft(draft)
    if any(tensor.is_meta for tensor in draft.parameters()):
        raise ValueError(
            "The draft is on the meta device, so it has no weights, or accelerate has offloaded them. Load it with "
            "DFlashDraftModel.from_pretrained and no device_map, or move it with draft.to_empty(device=...) and load "
            "its weights."
        )
    return draft


def check_call(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> list[int]:
    """
    Refuse calls that the decoding loop does not support.

    Args:
        model, input_ids, generation_config, model_kwargs: what `generate` hands over.

    Returns:
        `list[int]`: number of padding columns of each sequence.

    Raises:
        ValueError: a setting, the target or the prompts are not supported; the message says what to do.
        TypeError: `input_ids` are no integers.
    """
    _check_settings(model, generation_config)
    if len(input_ids) == 0:
        raise ValueError("input_ids holds no sequence, and a call needs at least one. Pass a prompt.")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"input_ids has the dtype {input_ids.dtype}, and must have int64 or int32. Pass .long() of it."
        )
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "The prompt is empty, or inputs_embeds were given, and decoding with a draft needs the tokens of the "
            "prompt. Pass input_ids alone."
        )
    check_prompt_ids(model, input_ids)
    _check_shapes(input_ids, generation_config, model_kwargs)
    if len(input_ids) > 1:
        _check_batch(model)
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        return [0] * len(input_ids)
    is_real = attention_mask.bool()
    if not (is_real[:, 1:] >= is_real[:, :-1]).all() or not is_real[:, -1].all():
        raise ValueError(
            "attention_mask has zeros after real tokens, and prompts must be padded on the left. Set "
            "tokenizer.padding_side='left'."
        )
    return (~is_real).sum(1).tolist()


def _check_settings(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Refuse kinds of generation, outputs and kinds of targets that a draft does not support."""
    mode = generation_config.get_generation_mode()
    if mode not in SUPPORTED_MODES:
        change = "Set num_beams=1" if "beam" in mode.value else "Unset what asks for it in the generation config"
        raise ValueError(
            f"The generation settings ask for {mode.value.replace('_', ' ')} "
            f"(num_beams={generation_config.num_beams}), and a draft supports greedy decoding and sampling. {change}. "
            "For several completions of a prompt, pass do_sample=True and num_return_sequences."
        )
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise ValueError(
                f"{name}=True is set, and decoding with a draft does not collect it. Leave it out or unset it."
            )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The target {describe_target(model)} has an encoder, and a draft needs a decoder-only model. Use plain "
            "generate for this target."
        )
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        raise ValueError(
            f"The target {describe_target(model)} is wrapped in prompt learning (peft), whose virtual tokens are in "
            "no text that the draft could read. Use plain generate, or adapters that change the weights, such as LoRA."
        )


def _check_shapes(input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse masks and positions that are not those of the whole text of every sequence."""
    attention_mask = model_kwargs.get("attention_mask")
    text_length = getattr(generation_config, "_mask_length", None)
    for name in ("attention_mask", "position_ids"):  # a mask of ones alone arrives as positions
        rows = len(input_ids) if model_kwargs.get(name) is None else model_kwargs[name].shape[-2]
        if rows != len(input_ids) and (rows, name) != (1, "position_ids"):
            raise ValueError(
                f"attention_mask or position_ids has {rows} rows and input_ids has {len(input_ids)}, and each "
                "sequence needs one. Pass what belongs to these ids."
            )
    if attention_mask is not None:
        text_length = attention_mask.shape[1]
    if text_length is not None and text_length != input_ids.shape[1]:
        raise ValueError(
            f"attention_mask covers {text_length} tokens and input_ids has {input_ids.shape[1]}, as in a call that "
            "continues from a cache with the new tokens alone. The draft needs the whole text. Pass all of it as "
            "input_ids."
        )


def _check_batch(model: PreTrainedModel) -> None:
    """Refuse a target whose sequences cannot advance by different numbers of tokens."""
    text_config = model.config.get_text_config(decoder=True)
    obstacle = None
    if text_config.model_type == "bloom" or getattr(text_config, "alibi", False):
        obstacle = "computes its position bias (ALiBi) from a mask in which all sequences have the same length"
    elif text_config.model_type == "gpt_neo":
        obstacle = "computes its windows from a mask in which all sequences have the same length"
    elif _counts_positions_itself(model):
        obstacle = "takes no position_ids and counts the positions of a batch itself"
    if obstacle is not None:
        raise ValueError(
            f"The target {describe_target(model)} {obstacle}, and the sequences of this batch advance by different "
            "numbers of tokens. Decode one sequence at a time."
        )
    implementation = text_config._attn_implementation
    if implementation not in MASKED_ATTENTION:
        raise ValueError(
            f"The attention of the target is {implementation!r}, which takes no mask for sequences of different "
            "lengths. Load the target with attn_implementation='sdpa', or decode one sequence at a time."
        )


def check_length_of_text(
    model: PreTrainedModel, input_ids: torch.Tensor, num_padding: list[int], max_length: int
) -> None:
    """
    Refuse a prompt beyond learned positions, and a text in which verified tokens would get other rotary angles.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.LongTensor` of shape `[sequences, columns]`): the prompts, padded on the left.
        num_padding (`list[int]`): number of padding columns of each sequence.
        max_length (`int`): number of columns at which every sequence ends.

    Raises:
        ValueError: a prompt is too long, or a text may become so.
    """
    positions, longest_prompt = learned_positions(model), input_ids.shape[1] - min(num_padding)
    if positions is not None and longest_prompt > positions:
        raise ValueError(
            f"A prompt has {longest_prompt} tokens, and the target {describe_target(model)} has learned {positions} "
            f"positions. Truncate the prompt to {positions} tokens."
        )
    angles = length_dependent_angles(model.config)
    if angles is None:
        return
    kind, length = angles
    longest = max_length - min(num_padding)
    shortest_prompt = input_ids.shape[1] - max(num_padding)
    # "longrope" has two sets of angles, and a prompt beyond the length uses the second one from the start.
    if longest <= length or (kind == "longrope" and shortest_prompt > length):
        return
    raise ValueError(
        f"The target {describe_target(model)} changes its rotary angles (rope_type={kind!r}) in texts of more than "
        f"{length} tokens, and this call may bring a text from {shortest_prompt} to {longest} tokens. Tokens that are "
        f"verified together would get other angles than in plain generation. Pass max_length={length} or less, or use "
        "plain generate."
    )


def check_cache_holds_less(cache: Cache, input_ids: torch.Tensor) -> None:
    """
    Refuse a call with the new tokens alone, whose earlier text is only in the cache of plain generation.

    Args:
        cache (`Cache`): the cache that was passed.
        input_ids (`torch.LongTensor` of shape `[sequences, columns]`): the prompts.

    Raises:
        ValueError: the cache holds as many tokens as the prompts, or more.
    """
    if not isinstance(cache, RaggedCache) and cache.get_seq_length() >= input_ids.shape[1]:
        raise ValueError(
            f"The cache ({type(cache).__name__}) holds {cache.get_seq_length()} tokens and input_ids has "
            f"{input_ids.shape[1]}, as in a call that continues from a cache with the new tokens alone. The draft "
            "needs the whole text. Pass all of it as input_ids."
        )


def tree_obstacle(model: PreTrainedModel, sample_proposals: bool) -> str | None:
    """
    Return why the loop cannot verify a tree, which has several tokens at one position.

    Args:
        model (`PreTrainedModel`): the target.
        sample_proposals (`bool`): whether the draft's tokens are sampled.

    Returns:
        `str` or `None`: a clause, or `None` if it can.
    """
    text_config = model.config.get_text_config(decoder=True)
    implementation = text_config._attn_implementation
    recurrent_types = RaggedCache(model.config).recurrent_layer_types
    if recurrent_types:
        return f"the target has layers of type {', '.join(recurrent_types)}"
    if implementation not in MASKED_ATTENTION:
        return f"the attention of the target is {implementation!r}, which takes no mask for each query"
    has_own_positions = getattr(text_config, "alibi", False) or text_config.model_type == "gpt_neo"
    if has_own_positions or _counts_positions_itself(model):
        return "the target computes the positions of its tokens itself, one after the other"
    return "the proposals are sampled" if sample_proposals else None


def _counts_positions_itself(model: PreTrainedModel) -> bool:
    """Return whether a target with attention takes no positions."""
    text_config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    has_attention = not layer_types <= set(RECURRENT_TYPES)
    return has_attention and "position_ids" not in inspect.signature(model.forward).parameters


def check_head_arguments(
    draft: DFlashDraftModel, confidence_threshold: float | None, markov_top_k: int | None, tree_size: int | None
) -> None:
    """
    Refuse arguments of heads that the draft does not have.

    Args:
        draft ([`DFlashDraftModel`]), confidence_threshold, markov_top_k, tree_size: As in [`dflash_decoding`].

    Raises:
        ValueError: The draft has no such head, a number is out of range, or two arguments contradict each other.
    """
    if confidence_threshold is not None:
        if draft.confidence_head is None:
            raise ValueError(
                f"confidence_threshold={confidence_threshold} needs a draft with a confidence head, and this one has "
                "none. Leave it out."
            )
        if not 0 <= confidence_threshold <= 1:
            raise ValueError(f"confidence_threshold={confidence_threshold} must be from 0 to 1. Change it.")
        if tree_size is not None:
            raise ValueError(
                f"confidence_threshold={confidence_threshold} truncates a chain, and tree_size={tree_size} asks for a "
                "tree. Pass one of them."
            )
    if markov_top_k is not None:
        if draft.markov_head is None:
            raise ValueError(
                f"markov_top_k={markov_top_k} needs a draft with a Markov head, and this one has none. Leave it out."
            )
        if type(markov_top_k) is not int or markov_top_k < 1:
            raise ValueError(f"markov_top_k={markov_top_k!r} must be an integer of at least 1. Change it.")
