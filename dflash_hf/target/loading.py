"""Load a target (weights, tokenizer, configuration), alone or with a draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..model.modeling_dflash import DFlashDraftModel, target_auto_class
from .learned_positions import learned_positions


@dataclass(frozen=True)
class TargetText:
    """
    The parts of a target that the preparation of rows needs, which do not include its weights.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer with its chat template.
        eos_token_ids (`tuple[int, ...]`): end-of-sequence ids of its generation configuration.
        num_embeddings (`int`): number of rows of its embedding.
        num_positions (`int`, *optional*): length of its table of positions, see [`learned_positions`].
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    num_embeddings: int
    num_positions: int | None = None


def read_target(name: str) -> TargetText:
    """
    Read the tokenizer and the configuration of a target.

    Args:
        name (`str`): Hub name or folder.

    Returns:
        [`TargetText`]

    Raises:
        OSError: they cannot be read.
        ValueError: the configuration is not that of a decoder-only language model.
    """
    config = load_target_config(name)
    _language_model_class(name, config)
    with _one_line_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
        try:
            eos = GenerationConfig.from_pretrained(name).eos_token_id
        except OSError:  # older targets have no such file, and generation derives it from config.json
            eos = GenerationConfig.from_model_config(config).eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    text_config = config.get_text_config(decoder=True)
    decoder = _decoder_without_weights(text_config)
    if decoder is not None:
        refuse_encoder(repr(name), decoder)
    positions = None if decoder is None else learned_positions(decoder)
    return TargetText(tokenizer, tuple(ends), text_config.vocab_size, positions)


def _decoder_without_weights(text_config: PreTrainedConfig) -> PreTrainedModel | None:
    """Build the text decoder of a target on the meta device; return `None` if transformers has no class for it."""
    auto_class = next(
        (each for each in (AutoModelForCausalLM, AutoModel) if type(text_config) in each._model_mapping), None
    )
    if auto_class is None:
        return None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            decoder: PreTrainedModel = auto_class.from_config(text_config)
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ImportError):  # loading it says more
        return None
    finally:
        logging.set_verbosity(verbosity)
    return decoder


DTYPES = ("auto", "bfloat16", "float16", "float32")
LONGEST_REASON = 300  # characters of a message of transformers, some of which list all model types


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn every error of transformers about the files of a target into an `OSError` of one line that names it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]}..."
        raise OSError(f"The target {name!r} cannot be loaded: {reason}") from error


def _language_model_class(name: str, config: PreTrainedConfig) -> Any:
    """Return the class that opens a target with its head, and refuse what is no decoder-only language model."""
    auto_class = target_auto_class(config)
    advice = "Give a causal language model, or a multimodal one that writes text."
    if auto_class is None:
        raise ValueError(
            f"The target {name!r} is no language model that transformers can open ({type(config).__name__}). {advice}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"The target {name!r} is an encoder-decoder model ({type(config).__name__}). {advice}")
    return auto_class


def refuse_encoder(name: str, target: PreTrainedModel) -> None:
    """
    Refuse an encoder that transformers opens as a causal language model, whose tokens see the later ones.

    Args:
        name (`str`): the name of the target in messages.
        target (`PreTrainedModel`): the target, or its decoder.

    Raises:
        ValueError: its layers and its configuration say that it is no decoder.
    """
    decoder: Any = target.get_decoder()
    flags = {
        module.is_decoder for module in decoder.modules() if isinstance(getattr(module, "is_decoder", None), bool)
    }
    if flags == {False} and getattr(decoder.config, "is_decoder", None) is False:
        raise ValueError(
            f"The target {name} is an encoder, whose tokens see the later ones ({type(decoder.config).__name__} "
            "with is_decoder=False). Give a causal language model."
        )


def open_target(name: str, dtype: str | torch.dtype = "auto", revision: str | None = None) -> PreTrainedModel:
    """
    Load a target with the class that has its language model head, multimodal targets included.

    Args:
        name (`str`), dtype (`str` or `torch.dtype`), revision (`str`, *optional*): as for [`load_target`].

    Returns:
        `PreTrainedModel`: in evaluation mode.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no decoder-only language model that transformers can open.
    """
    auto_class = _language_model_class(name, load_target_config(name, revision))
    with _one_line_errors(name):
        target: PreTrainedModel = auto_class.from_pretrained(name, dtype=dtype, revision=revision or "main")
    refuse_encoder(repr(name), target)
    return target.eval()


def load_target(
    name: str, dtype: str | torch.dtype, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load a target and its tokenizer.

    Args:
        name (`str`): Hub name or folder.
        dtype (`str` or `torch.dtype`): dtype of the weights; `"auto"` keeps that of the checkpoint.
        revision (`str`, *optional*): its revision on the Hub.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the target in evaluation mode, and its tokenizer.

    Raises:
        ValueError: the dtype is unknown, or the target is no decoder-only language model.
        OSError: the weights or the tokenizer cannot be read.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}. Choose one of them.")
    target = open_target(name, dtype, revision)
    with _one_line_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        nn.Module.to(target, device)
    return target, tokenizer


def has_weights(target: PreTrainedModel) -> bool:
    """
    Return whether every weight of a target exists, in memory or where accelerate loads it from.

    Args:
        target (`PreTrainedModel`): the target.

    Returns:
        `bool`: `False` if a weight was left on the meta device.
    """
    is_offloaded = any(hasattr(module, "_hf_hook") for module in target.modules())
    return is_offloaded or not any(tensor.is_meta for tensor in target.parameters())


def load_target_config(name: str, revision: str | None = None) -> PreTrainedConfig:
    """
    Load the configuration of a target, without its weights.

    Args:
        name (`str`), revision (`str`, *optional*): as for [`load_target`].

    Returns:
        `PreTrainedConfig`

    Raises:
        OSError: it cannot be read.
    """
    with _one_line_errors(name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, revision=revision or "main")
    return config


def load_pair(
    draft: str, target: str | None, dtype: str
) -> tuple[PreTrainedModel, DFlashDraftModel, PreTrainedTokenizerBase]:
    """
    Load a draft and its target, in one dtype and on one device.

    Args:
        draft (`str`): Hub name or folder.
        target (`str`, *optional*): Hub name or folder; by default the target that the draft names.
        dtype (`str`): as for [`load_target`].

    Returns:
        `tuple`: the target, the draft tied to it, and the target's tokenizer.

    Raises:
        ValueError: no target is known, the dtype is unknown, or the two do not fit together.
        OSError: one of them cannot be read.
    """
    pair = DFlashDraftModel.from_pretrained(draft, target=target or False)
    model, tokenizer = load_target_of(pair, target, dtype)
    return model, pair, tokenizer


def load_target_of(
    draft: DFlashDraftModel, target: str | None, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the target of a draft, tie the draft to it, and move the draft to its device and dtype.

    Args:
        draft ([`DFlashDraftModel`]): loaded without a target.
        target (`str`, *optional*), dtype (`str`): as for [`load_pair`].

    Returns:
        `tuple`: the target and its tokenizer.

    Raises:
        ValueError, OSError: as [`load_pair`].
    """
    name = target or draft.config.target_name_or_path
    if name is None:
        raise ValueError(f"The draft {draft.name_or_path!r} names no target, and none was given. Pass --target.")
    model, tokenizer = load_target(name, dtype)
    draft.tie_target(model)
    nn.Module.to(draft, model.device, model.dtype)
    return model, tokenizer
