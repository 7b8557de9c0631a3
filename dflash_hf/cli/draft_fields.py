"""The fields of a new draft as arguments of `dflash-hf train`. Without torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .options import json_object

if TYPE_CHECKING:
    from ..model.configuration_dflash import DFlashConfig

# Fields of the configuration whose argument has another name.
ARGUMENT_NAMES = {"num_hidden_layers": "draft_layers"}


# Fields that add a part to a draft, which may also be one that training continues from.
FIELDS_OF_PARTS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "selector_factored",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "learned_mask_embedding",
)


@dataclass
class DraftFieldArguments:
    """Arguments that set fields of the configuration of a new draft. Those that are unset are derived."""

    draft_layers: int = field(
        default=5,
        metadata={
            "help": "Number of layers of a new draft. The name of the field, num_hidden_layers, is accepted too.",
            "aliases": ["--num_hidden_layers", "--num-hidden-layers"],
        },
    )
    num_target_layers: int | None = field(
        default=None, metadata={"help": "Number of target layers that a new draft reads. By default 5."}
    )
    target_layer_ids: list[int] | None = field(
        default=None,
        metadata={
            "help": "The target layers that a new draft reads, counted from 0. By default they are evenly spread."
        },
    )
    block_size: int = field(default=16, metadata={"help": "Slots of a block of a new draft, the anchor included."})
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Mask token of a new draft. By default it is chosen automatically."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the MLP. By default that of the target."}
    )
    num_attention_heads: int | None = field(
        default=None, metadata={"help": "Number of query heads. By default that of the target."}
    )
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "Number of key and value heads. By default that of the target."}
    )
    head_dim: int | None = field(
        default=None, metadata={"help": "Width of a head, an even number. By default that of the target."}
    )
    hidden_act: str | None = field(default=None, metadata={"help": "Activation of the MLP. By default silu."})
    attention_bias: bool | None = field(
        default=None, metadata={"help": "Whether the attention projections have biases, true or false."}
    )
    attention_dropout: float | None = field(
        default=None, metadata={"help": "Dropout on attention weights in training. By default 0."}
    )
    initializer_range: float | None = field(
        default=None, metadata={"help": "Standard deviation of new linear weights. By default 0.02."}
    )
    rms_norm_eps: float | None = field(
        default=None, metadata={"help": "Constant that every norm adds to the variance. By default 1e-6."}
    )
    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "Maximum length of a sequence. By default that of the target."}
    )
    rope_theta: float | None = field(
        default=None, metadata={"help": "Base of the rotary angles. By default that of the target."}
    )
    rope_parameters: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Type and values of the rotary angles, as a JSON object. By default the type is 'default'."},
    )
    layer_types: list[str] | None = field(
        default=None,
        metadata={
            "help": "'full_attention' or 'sliding_attention' for each layer. By default all have full attention."
        },
    )
    sliding_window: int | None = field(default=None, metadata={"help": "Window of the sliding layers in tokens."})
    is_causal: bool | None = field(
        default=None,
        metadata={
            "help": "Whether a slot sees only itself and earlier slots, true or false. By default in sliding layers."
        },
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Chat-template arguments of the rows, as a JSON object. By default those of the rows."},
    )
    sample_from_anchor: bool | None = field(
        default=None,
        metadata={
            "help": "Whether slot k predicts the token k + 1 places after the anchor, as in DSpark, true or false. By "
            "default it predicts the token k places after it."
        },
    )
    conv_kernel_size: int | None = field(
        default=None,
        metadata={"help": "Taps of the convolutions of DFlash 2, usually 2. By default there are none."},
    )
    conv_group_size: int | None = field(
        default=None, metadata={"help": "Channels that share a part of a kernel. By default 16."}
    )
    attention_sinks: bool | None = field(
        default=None, metadata={"help": "Whether every head has a logit that belongs to no token, true or false."}
    )
    selector_rank: int | None = field(
        default=None, metadata={"help": "Rank of the selector of DFlash 2, such as 64. By default there is none."}
    )
    selector_top_k: int | None = field(
        default=None, metadata={"help": "Candidates of a slot for the selector. By default 16."}
    )
    selector_factored: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the selector computes its tables from the target's embedding, true or false. By default "
            "true for a new selector."
        },
    )
    selector_embedding_scale: float | None = field(
        default=None, metadata={"help": "Factor of that embedding. By default one over its mean norm."}
    )
    markov_rank: int | None = field(
        default=None, metadata={"help": "Rank of the Markov head of DSpark, such as 256. By default there is none."}
    )
    markov_head_type: str | None = field(
        default=None, metadata={"help": "Type of the Markov head: vanilla, gated or rnn. By default vanilla."}
    )
    enable_confidence_head: bool | None = field(
        default=None, metadata={"help": "Whether a head predicts whether each token is accepted, true or false."}
    )
    confidence_head_with_markov: bool | None = field(
        default=None, metadata={"help": "Whether that head reads the Markov head's embedding, too, true or false."}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of tokens that the draft can propose. By default all. They are the most frequent ones in "
            "the training responses."
        },
    )
    learned_mask_embedding: bool | None = field(
        default=None, metadata={"help": "Whether a vector of the draft's own fills the masked slots, true or false."}
    )
    output_multiplier: float | None = field(
        default=None, metadata={"help": "Factor of the logits before a selector or a Markov head. By default 1."}
    )
    final_logit_softcapping: float | None = field(
        default=None, metadata={"help": "Cap of the logits before a selector or a Markov head. By default none."}
    )
    last_layer_after_norm: bool | None = field(
        default=None,
        metadata={"help": "Whether the last layer may be read, by its state after the final norm, true or false."},
    )
    hidden_size: int | None = field(
        default=None, metadata={"help": "Width of the draft, which must be that of the target."}
    )
    vocab_size: int | None = field(
        default=None, metadata={"help": "Number of embedding rows, which must be that of the target."}
    )
    target_hidden_size: int | None = field(
        default=None, metadata={"help": "Width of the target, which is compared with the target."}
    )
    target_num_hidden_layers: int | None = field(
        default=None, metadata={"help": "Number of layers of the target, which is compared with it."}
    )
    target_name_or_path: str | None = field(
        default=None, metadata={"help": "Name of the target in the configuration. By default `target`."}
    )
    target_revision: str | None = field(default=None, metadata={"help": "Revision of the target on the Hub."})
    target_tensor_checksums: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Checksums of tensors of the target, as a JSON object, which are compared with the target."},
    )
    input_embedding_scale: float | None = field(
        default=None, metadata={"help": "Factor inside the target's embedding, which is compared with the target."}
    )
    bos_token_id: int | None = field(
        default=None, metadata={"help": "First token of a sequence. By default that of the target."}
    )
    eos_token_id: list[int] | None = field(
        default=None, metadata={"help": "Tokens that end a sequence. By default those of the target."}
    )
    pad_token_id: int | None = field(
        default=None, metadata={"help": "Token of padding. By default that of the target."}
    )


def as_arguments(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """
    Return the values of a file under the names of the arguments.

    Args:
        values (`Mapping`): values under the names of arguments or of fields of the configuration.
        source (`str`): the file, for messages.

    Returns:
        `dict`

    Raises:
        ValueError: the file has two values under the two names of one argument.
    """
    renamed = {ARGUMENT_NAMES.get(name, name): value for name, value in values.items()}
    for name, argument in ARGUMENT_NAMES.items():
        if values.get(name, values.get(argument)) != values.get(argument, values.get(name)):
            raise ValueError(
                f"{source} has {name}={values[name]} and {argument}={values[argument]}, which are the same. Remove "
                "one of them."
            )
    return renamed


def draft_fields(arguments: DraftFieldArguments) -> dict[str, Any]:
    """
    Return the fields of the configuration that arguments set.

    Args:
        arguments ([`DraftFieldArguments`]): the arguments.

    Returns:
        `dict`: values under the names of the fields.

    Raises:
        ValueError: a JSON value is not valid.
    """
    names = {argument: name for name, argument in ARGUMENT_NAMES.items()}
    values: dict[str, Any] = {}
    for item in fields(DraftFieldArguments):
        value = getattr(arguments, item.name)
        if isinstance(value, str) and "JSON" in item.metadata["help"]:
            value = json_object(f"--{item.name.replace('_', '-')}", value)
        if value is not None:
            values[names.get(item.name, item.name)] = value
    return values


def check_fields_of_draft(given: Mapping[str, Any], config: DFlashConfig, draft: str) -> None:
    """
    Refuse fields that differ from those of a draft that training continues from.

    Args:
        given (`Mapping`): the fields that arguments set, defaults included.
        config ([`DFlashConfig`]): the configuration of the draft.
        draft (`str`): the draft as the user named it.

    Raises:
        ValueError: a field that is not at its default differs.
    """
    defaults = draft_fields(DraftFieldArguments())
    for name, value in given.items():
        if value != defaults.get(name) and value != getattr(config, name):
            raise ValueError(
                f"{name}={value} is a field of a new draft, but draft={draft} is continued, which has "
                f"{getattr(config, name)}. Leave {name} out, or start a new draft."
            )
