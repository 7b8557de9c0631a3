"""Entries of a target's generation config that a command replaces or refuses before it begins."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..model.configuration_dflash import describe_target

# Generation of transformers 5.24 with another draft than ours. Its text is that of plain generation.
OTHER_DRAFTS: dict[str, Any] = {"prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": None}
# What a command passes that wants the tokens of one response without beams, whatever the generation config asks for.
ONE_RESPONSE: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_hidden_states": False,
    "output_attentions": False,
    **OTHER_DRAFTS,
}
# Assisted generation is greedy decoding or sampling with another draft.
SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


def check_token_healing(*values: bool | None) -> None:
    """
    Refuse a generation config that replaces the last token of a prompt.

    Args:
        *values (`bool`, *optional*): `token_healing` of a call and of generation configs. The first that is set
            counts.

    Raises:
        ValueError: It is true.
    """
    if next((value for value in values if value is not None), False):
        raise ValueError(
            "The generation config has token_healing=True, which writes the prompt anew from its text without special "
            "tokens, and this package keeps the tokens of a prompt. Set token_healing=False in it."
        )


def check_generation_config(target: PreTrainedModel, **replaced: Any) -> None:
    """
    Refuse a target whose generation config asks for more than greedy decoding or sampling.

    Args:
        target (`PreTrainedModel`): The target.
        **replaced: Entries that the calls of `generate` will replace.

    Raises:
        ValueError: The configuration asks for another kind of generation, or for `token_healing`.
    """
    if target.generation_config is None:
        return
    config = copy.copy(target.generation_config)
    for name, value in replaced.items():
        setattr(config, name, value)
    check_token_healing(config.token_healing)
    mode = config.get_generation_mode()
    if mode not in SUPPORTED_MODES:
        raise ValueError(
            f"The generation config of the target {describe_target(target)} asks for {mode.value.replace('_', ' ')}, "
            "and a draft supports greedy decoding and sampling. Unset what asks for it in target.generation_config or "
            "in generation_config.json."
        )
