"""What turns rows into tokens: of a target, its tokenizer and configuration, and nothing of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TargetText:
    """
    What preparation needs of a target: nothing of its weights.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with the chat template.
        eos_token_ids (`tuple[int, ...]`): the ids that end an answer, as its generation config has them.
        num_embeddings (`int`): rows of its embedding.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    num_embeddings: int


def read_target(name: str) -> TargetText:
    """
    Read tokenizer and configuration of a target.

    Args:
        name (`str`): Hub name or folder.

    Returns:
        [`TargetText`]

    Raises:
        OSError: they cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"The target {name!r} cannot be read: {error}") from error
    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # many older targets have no such file; generation makes one from the configuration then
        eos = GenerationConfig.from_model_config(config).eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return TargetText(tokenizer, tuple(ends), config.get_text_config().vocab_size)
