"""
The configuration of a DFlash draft model.

The file travels with every checkpoint, so that it needs transformers but not this package.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Translates a config.json: (the file's values, the fields that the caller gave) -> the fields of a `DFlashConfig`.
FormatReader = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]

LAYER_TYPES = ("full_attention", "sliding_attention")
# The types of rotary angles, and the values that each of them needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
# Beginnings of the names of lists, which the types above ignore.
LISTS_OF_OTHER_ROPE_TYPES = ("long_", "short_", "mrope_")
# Larger than in any model. The limits keep a damaged or hostile file from allocating all memory.
MAX_SIZE, MAX_LAYERS, MAX_BLOCK_SIZE, MAX_ROPE_THETA = 2**26, 2**10, 2**10, 1e15
# The smallest and the largest value of an integer field. Token ids begin at 0 and all other fields at 1.
INTEGER_LIMITS = {
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_target_layers": (1, MAX_LAYERS),
    "target_num_hidden_layers": (1, MAX_LAYERS),
    "block_size": (2, MAX_BLOCK_SIZE),
    "conv_kernel_size": (1, MAX_BLOCK_SIZE),
}
# The rule of every field that holds a real number. No rule holds for NaN.
NUMBER_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "initializer_range": (lambda value: 0 < value <= 10, "above 0 and at most 10"),
    "rms_norm_eps": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "attention_dropout": (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    **dict.fromkeys(
        ("input_embedding_scale", "selector_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        (lambda value: 0 < value <= MAX_SIZE, f"above 0 and at most {MAX_SIZE}"),
    ),
}
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
# Fields of the parts that a draft may have beyond the first DFlash. Those that are unset are not saved.
PART_FIELDS = (
    "sample_from_anchor",
    "conv_kernel_size",
    "conv_group_size",
    "attention_sinks",
    "selector_rank",
    "selector_top_k",
    "selector_factored",
    "selector_embedding_scale",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "output_multiplier",
    "final_logit_softcapping",
    "learned_mask_embedding",
    "last_layer_after_norm",
)
# Names of the number of residual streams in the configurations of targets.
STREAM_COUNTS = ("altup_num_inputs", "hc_mult", "hc_count")
# The values that describe a draft and no other model, by one of which a file without a model type is recognised.
DRAFT_ONLY = {
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "target_hidden_size",
    "target_layer_ids",
    "target_num_hidden_layers",
}
# The values of a saved draft that hold for its own target alone, even if another target has the same sizes.
FIELDS_OF_ONE_TARGET = ("target_name_or_path", "target_revision", "target_tensor_checksums")
# Values that transformers keeps beside the fields of a configuration.
BASE_FIELDS: dict[str, tuple[type, ...]] = {
    "architectures": (list, NoneType),
    "attn_implementation": (str, dict, NoneType),
    "auto_map": (dict, NoneType),
    "chunk_size_feed_forward": (int,),
    "dtype": (str, torch.dtype, NoneType),
    "id2label": (dict, NoneType),
    "is_encoder_decoder": (bool,),
    "label2id": (dict, NoneType),
    "output_hidden_states": (bool, NoneType),
    "problem_type": (str, NoneType),
    "quantization_config": (dict, NoneType),
    "return_dict": (bool, NoneType),
    "torch_dtype": (str, torch.dtype, NoneType),
}
# Values of other models that transformers interprets when a configuration is made.
REFUSED_NAMES = ("attribute_map", "num_labels", "per_layer_config")


def brief(value: Any) -> str:
    """
    Return the `repr` of a value for a message, truncated to some 100 characters.

    Example:

    ```python
    >>> brief([1, 9, 17])
    '[1, 9, 17]'
    >>> len(brief(list(range(100_000)))) <= 100
    True

    ```
    """
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:85]} … (shortened)"


def default_target_layer_ids(target_num_hidden_layers: int, num_target_layers: int) -> list[int]:
    """
    Spread the target layers that the draft reads over the depth of the target.

    Layer id `i` means the output of decoder layer `i`, counted from 0. The last layer is never chosen, because
    transformers returns its state after the final norm and serving engines return it before.

    Args:
        target_num_hidden_layers (`int`):
            The number of decoder layers of the target.
        num_target_layers (`int`):
            The number of layers to read.

    Returns:
        `list[int]`: distinct layer ids in ascending order.

    Raises:
        ValueError: The target has fewer than `num_target_layers` layers before its last one.

    Example:

    ```python
    >>> default_target_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    >>> default_target_layer_ids(30, 5)
    [1, 8, 14, 20, 27]
    >>> default_target_layer_ids(4, 2)
    [0, 2]

    ```
    """
    depth, count = target_num_hidden_layers, num_target_layers
    if not 1 <= count <= depth - 1:
        raise ValueError(
            f"num_target_layers={count} does not fit a target of {depth} layers: the last layer is never read, so "
            f"choose 1 to {depth - 1}."
        )
    if count == 1:
        return [min(depth // 2, depth - 2)]
    first, last = (1, depth - 3) if depth >= 8 and count <= depth - 3 else (0, depth - 2)
    return [round(first + j * (last - first) / (count - 1)) for j in range(count)]


def check_target_layer_ids(
    target_layer_ids: list[int], target_num_hidden_layers: int, *, last_layer_after_norm: bool = False
) -> None:
    """
    Refuse layers that the target does not have, and its last layer where its state has two meanings.

    Args:
        target_layer_ids (`list[int]`): The layers that the draft reads, counted from 0; -1 is the embedding.
        target_num_hidden_layers (`int`): The number of decoder layers of the target.
        last_layer_after_norm (`bool`, defaults to `False`): Whether the last layer means its state after the final
            norm, so that it may be read.

    Raises:
        ValueError: An id is out of range or is that of the last layer.
    """
    ids, depth = target_layer_ids, target_num_hidden_layers
    if max(ids) >= depth:
        raise ValueError(
            f"target_layer_ids={brief(ids)} must be integers from 0 to {depth - 1}, or -1 for the embedding, because "
            f"the target has target_num_hidden_layers={depth}. Choose other layers."
        )
    if depth - 1 in ids and not last_layer_after_norm:
        raise ValueError(
            f"target_layer_ids={brief(ids)} contains the last layer, {depth - 1}. transformers returns its state "
            "after the final norm and serving engines return it before, so that a draft trained with one would be "
            "rarely accepted with the other. Choose an earlier layer, or pass last_layer_after_norm=True for a draft "
            "that was trained with the state after the norm."
        )


def text_tokenizer(tokenizer: Any, argument: str = "tokenizer") -> Any:
    """
    Return the tokenizer that an argument gives: a tokenizer itself, or that of a processor.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or `ProcessorMixin`, *optional*):
            The argument. The chat template of a processor takes precedence over that of its tokenizer.
        argument (`str`, defaults to `"tokenizer"`):
            The name of the argument in messages.

    Returns:
        `PreTrainedTokenizerBase` or `None`.

    Raises:
        TypeError: it is neither a tokenizer of transformers nor a processor with one.
    """
    if tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    found = getattr(tokenizer, "tokenizer", None)
    if not isinstance(found, PreTrainedTokenizerBase):
        given = f"the text {brief(tokenizer)}" if isinstance(tokenizer, str) else f"a {type(tokenizer).__name__}"
        raise TypeError(
            f"{argument} is {given}, and must be the tokenizer of the target, or a processor that has one. Load it "
            "with AutoTokenizer.from_pretrained(target)."
        )
    template = getattr(tokenizer, "chat_template", None)
    if template is not None and template != found.chat_template:
        found = copy.copy(found)
        found.chat_template = template
    return found


def choose_mask_token_id(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, excluded_token_ids: set[int] | None = None
) -> tuple[int, str]:
    """
    Choose the token whose embedding fills the slots to be drafted.

    The first choice is the tokenizer's mask token, the second an embedding row that no token uses, and the third the
    first special token other than pad, eos and bos. The unknown token is among these only if no text contains it, as
    in byte-level vocabularies.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        num_embeddings (`int`):
            The number of rows of the target's embedding matrix, padding included.
        excluded_token_ids (`set[int]`, *optional*):
            Further ids that must not be chosen, for example the eos ids of a generation configuration or the image
            token of a multimodal target.

    Returns:
        `tuple[int, str]`: the id, and a phrase that says why it was chosen.

    Raises:
        ValueError: No token is suitable. The message says to pass `mask_token_id`.
    """
    names = ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    excluded = {*(getattr(tokenizer, name, None) for name in names), *(excluded_token_ids or ())}

    def is_free(token_id: int) -> bool:
        return token_id not in excluded and token_id < num_embeddings

    mask_token_id = getattr(tokenizer, "mask_token_id", None)
    if mask_token_id is not None and is_free(mask_token_id):
        return mask_token_id, "the tokenizer's mask token"
    unused_rows = range(max(tokenizer.get_vocab().values()) + 1, num_embeddings)
    if (unused_row := next(filter(is_free, unused_rows), None)) is not None:
        return unused_row, "the first embedding row that no token uses"
    unknown = getattr(tokenizer, "unk_token_id", None)
    with_a_use = {*(getattr(tokenizer, name, None) for name in names[:3]), *(excluded_token_ids or ())}
    if unknown not in with_a_use and unknown not in tokenizer.encode("\ue000", add_special_tokens=False):
        excluded.discard(unknown)
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and is_free(token_id):
            return token_id, f"the special token {token.content!r}"
    raise ValueError(
        f"The tokenizer {tokenizer.name_or_path!r} offers no mask token: it defines none, each of the "
        f"{num_embeddings} embedding rows belongs to a token, and every special token has another use. "
        "Pass mask_token_id= with the id of a token that never occurs in text."
    )


class DFlashConfig(PreTrainedConfig):
    r"""
    The configuration of a [`DFlashDraftModel`]. The defaults are those of the reference draft for Qwen3-8B.

    The draft shares embedding and language model head with its target, so that `hidden_size`, `target_hidden_size` and
    `vocab_size` are those of the target. `num_target_layers` counts the target layers that the draft reads, not all
    layers of the target.

    Args:
        vocab_size (`int`, defaults to 151936): Number of rows of the target's embedding matrix, padding included.
        hidden_size (`int`, defaults to 4096): Width of the draft, equal to the target's.
        intermediate_size (`int`, defaults to 12288): Width of the MLP.
        num_hidden_layers (`int`, defaults to 5): Number of decoder layers of the draft.
        num_attention_heads (`int`, defaults to 32): Number of query heads.
        num_key_value_heads (`int`, defaults to 8): Number of key and value heads.
        head_dim (`int`, defaults to 128): Width of a head, which must be even.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP.
        max_position_embeddings (`int`, defaults to 40960): Maximum length of a sequence in tokens.
        initializer_range (`float`, defaults to 0.02): Standard deviation of new linear weights.
        rms_norm_eps (`float`, defaults to 1e-6): Constant that every norm adds to the variance.
        attention_bias (`bool`, defaults to `False`): Whether the attention projections have biases.
        attention_dropout (`float`, defaults to 0.0): Dropout on attention weights in training.
        rope_theta (`float`, *optional*): Base of the rotary angles, by default the one in `rope_parameters`, else
            1,000,000. It is stored in `rope_parameters`, where the property `config.rope_theta` reads it.
        rope_parameters (`dict`, *optional*): `rope_type` (`default`, `linear`, `llama3`, `yarn`) and its values.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer. By default
            all layers have full attention.
        sliding_window (`int`, *optional*): Window of the sliding layers in tokens, at least `block_size`.
        is_causal (`bool`, *optional*): Whether a slot sees only itself and the slots before it. By default sliding
            layers are causal inside the block and full layers are not.
        block_size (`int`, defaults to 16): Number of slots in a block, the anchor included.
        sample_from_anchor (`bool`, defaults to `False`): Whether slot `k` predicts the token `k + 1` places after the
            anchor, as in DSpark, so that a block proposes `block_size` tokens. By default slot `k` predicts the token
            `k` places after the anchor, and a block proposes one token less.
        mask_token_id (`int`, defaults to 151669): Token whose embedding fills the slots to be drafted.
        learned_mask_embedding (`bool`, defaults to `False`): Whether a vector of the draft's own fills these slots.
        conv_kernel_size (`int`, *optional*): Number of taps of the convolutions around attention and MLP (DFlash 2).
            There are none by default.
        conv_group_size (`int`, *optional*, defaults to 16): Number of channels that share the part of a kernel that
            depends on the token. It divides `hidden_size`.
        attention_sinks (`bool`, defaults to `False`): Whether every head has a trained logit that belongs to no token.
        selector_rank (`int`, *optional*): Rank of the candidate selector of DFlash 2. There is none by default.
        selector_top_k (`int`, *optional*, defaults to 16): Number of candidates of a slot.
        selector_factored (`bool`, defaults to `False`): Whether the selector computes its tables from the target's
            embedding, with far fewer weights, instead of holding them.
        selector_embedding_scale (`float`, *optional*): Factor of that embedding, by default one over its mean norm,
            which is computed when the draft is tied.
        markov_rank (`int`, *optional*): Rank of the Markov head of DSpark. There is none by default or with 0.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`, defaults to `False`): Whether a head predicts whether each token is accepted.
        confidence_head_with_markov (`bool`, defaults to `False`): Whether it reads the Markov head's embedding of the
            token before as well.
        draft_vocab_size (`int`, *optional*): Number of tokens that the draft can propose, by default all. The tensor
            `d2t` says which they are.
        output_multiplier (`float`, *optional*), final_logit_softcapping (`float`, *optional*): Factor and cap of the
            logits to which a selector or a Markov head adds its scores.
        num_target_layers (`int`, *optional*): Number of target layers that the draft reads. It follows from
            `target_layer_ids`.
        target_hidden_size (`int`, *optional*): Width of the target, equal to `hidden_size`.
        target_num_hidden_layers (`int`, *optional*, defaults to 36): Number of decoder layers of the target. It is
            `None` until the draft is tied if another producer's checkpoint does not contain it.
        target_layer_ids (`list[int]`, *optional*): The target layers that the draft reads, counted from 0; -1 is the
            embedding. By default they are evenly spread.
        last_layer_after_norm (`bool`, defaults to `False`): Whether the draft may read the last layer, whose state is
            then the one after the final norm, as transformers returns it.
        target_name_or_path (`str`, *optional*): Hub name or folder of the target.
        target_revision (`str`, *optional*): Revision of the target.
        chat_template_kwargs (`dict`, *optional*): Chat-template arguments used in training.
        input_embedding_scale (`float`, *optional*): Factor inside the target's embedding module (Gemma), which is
            compared when the draft is tied. Servers that look up embeddings themselves need it.
        target_tensor_checksums (`dict`, *optional*): Checksums of the target's tensors that the draft's file
            contained, which are compared when the draft is tied.

    Raises:
        ValueError: A value breaks its rule. The message gives field, value and rule.

    Example:

    ```python
    >>> from dflash_hf import DFlashConfig
    >>> DFlashConfig().target_layer_ids
    [1, 9, 17, 25, 33]

    ```
    """

    _format_reader: ClassVar[FormatReader | None] = None

    model_type = "dflash"
    default_theta = 1_000_000.0
    keys_to_ignore_at_inference = ("cache",)
    base_model_tp_plan = {  # noqa: RUF012  (a class attribute by transformers' contract)
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    block_size: int = 16
    sample_from_anchor: bool = False
    mask_token_id: int = 151669
    learned_mask_embedding: bool = False
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    attention_sinks: bool = False
    selector_rank: int | None = None
    selector_top_k: int | None = None
    selector_factored: bool = False
    selector_embedding_scale: float | int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    target_num_hidden_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    last_layer_after_norm: bool = False
    target_name_or_path: str | None = None
    target_revision: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_embedding_scale: float | int | None = None
    target_tensor_checksums: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.markov_rank == 0:  # other producers write 0 for a draft without a Markov head
            self.markov_rank = None
        self._check_types()
        self._check_others(kwargs)
        self.rope_parameters = self._merge_rope(self.rope_parameters, kwargs)
        if self.target_layer_ids is None:
            if self.target_num_hidden_layers is None:
                raise ValueError(
                    "target_num_hidden_layers and target_layer_ids are both missing, so that the layers of the target "
                    "that the draft reads cannot be chosen. Pass one of them."
                )
            count = 5 if self.num_target_layers is None else self.num_target_layers
            self.target_layer_ids = default_target_layer_ids(self.target_num_hidden_layers, count)
        if self.num_target_layers is None:
            self.num_target_layers = len(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.conv_kernel_size is not None and self.conv_group_size is None:
            self.conv_group_size = 16
        if self.selector_rank is not None and self.selector_top_k is None:
            self.selector_top_k = 16
        if self.markov_rank is not None and self.markov_head_type is None:
            self.markov_head_type = "vanilla"
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        self._check_values()
        self._check_kind()
        try:
            super().__post_init__(**kwargs)
        except (AttributeError, TypeError) as error:  # a value that transformers interprets, such as num_labels
            raise ValueError(
                f"One of {brief(sorted(kwargs))} in the configuration is of a wrong type ({brief(str(error))}). "
                "Remove it."
            ) from error

    @classmethod
    def register_format_reader(cls, reader: FormatReader) -> None:
        """
        Set the function that translates the config.json of other producers.

        The installed package registers one when it is imported. Without it, as in the two files that travel with a
        checkpoint, only this class's own format is read.

        Args:
            reader (`Callable`):
                Receives the values of the file and the fields that the caller gave, and returns the fields of a
                `DFlashConfig`.
        """
        cls._format_reader = staticmethod(reader)

    @classmethod
    def field_names(cls) -> set[str]:
        """Return the fields of a draft's configuration that a caller may set."""
        names = {field.name for field in dataclasses.fields(cls)} | {"rope_theta"}
        return names - PreTrainedConfig.__dataclass_fields__.keys()

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the values to save as `PreTrainedConfig` does, without the fields of parts that the draft lacks."""
        values = super().to_diff_dict().items()
        return {name: value for name, value in values if name not in PART_FIELDS or value not in (None, False)}

    @property
    def rope_theta(self) -> float:
        """`float`: base of the rotary angles in `rope_parameters`."""
        return (self.rope_parameters or {}).get("rope_theta", self.default_theta)

    @property
    def tokens_per_block(self) -> int:
        """`int`: number of tokens of a block, which are the anchor and the tokens that its slots predict."""
        return self.block_size + 1 if self.sample_from_anchor else self.block_size

    @property
    def kind(self) -> str:
        """`str`: the method and the parts of the draft, for summaries and cards."""
        parts = []
        if self.conv_kernel_size is not None:
            parts.append(f"convolutions of {self.conv_kernel_size} taps")
        if self.selector_rank is not None:
            parts.append(f"a selector of rank {self.selector_rank} over {self.selector_top_k} candidates")
        if self.markov_rank is not None:
            parts.append(f"a {self.markov_head_type} Markov head of rank {self.markov_rank}")
        if self.enable_confidence_head:
            parts.append("a confidence head")
        if self.sample_from_anchor:
            parts.append("slots that start at the anchor")
        if self.draft_vocab_size is not None:
            parts.append(f"{self.draft_vocab_size:,} of {self.vocab_size:,} tokens")
        if self.learned_mask_embedding:
            parts.append("a mask vector of its own")
        if self.attention_sinks:
            parts.append("attention sinks")
        return f"DFlash with {', '.join(parts)}" if parts else "DFlash"

    def in_block_causal(self, layer_index: int) -> bool:
        """Tell whether a slot of this layer sees only itself and the slots before it."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_window(layer_index) is not None

    def layer_window(self, layer_index: int) -> int | None:
        """Return the sliding window of this layer in tokens, or `None` for full attention."""
        layer_types = self.layer_types or []
        return self.sliding_window if layer_types[layer_index] == "sliding_attention" else None

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json as `PreTrainedConfig` does, and translate that of another producer."""
        raw, kwargs = super().get_config_dict(*args, **kwargs)
        return cls._translated(raw, kwargs), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration as `PreTrainedConfig` does. The values may be another producer's config.json."""
        return super().from_dict(cls._translated(config_dict, kwargs), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Any:
        """Make a configuration from a JSON file: that of a saved draft, or the fields of a new one."""
        return cls.from_dict(_read_json_object(json_file))

    @classmethod
    def _translated(cls, raw: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Translate the values of a file. Fields move from `kwargs` to the reader, which checks the two together."""
        is_new = describes_new_draft(raw)
        if not raw or (cls._format_reader is None and not is_new):
            return raw
        given = {name: kwargs.pop(name) for name in cls.field_names() & kwargs.keys()}
        if is_new:
            check_field_names(raw)
            return cls(**{**raw, **given}).to_dict()
        reader: Any = cls._format_reader
        return {**reader(raw, given), "model_type": cls.model_type}

    @classmethod
    def of_this_class(cls, config: PreTrainedConfig, argument: str = "config") -> Any:
        """
        Return the configuration of a draft as an object of this class.

        That of a draft which was loaded with `trust_remote_code=True` has the class of the source files beside it.

        Args:
            config (`PreTrainedConfig`): The configuration.
            argument (`str`, defaults to `"config"`): Its name in error messages.

        Returns:
            `DFlashConfig`: the object itself if it is of this class, or else a copy.

        Raises:
            TypeError: It is the configuration of another kind of model.
        """
        if isinstance(config, cls):
            return config
        if getattr(config, "model_type", None) != cls.model_type:
            raise TypeError(
                f"{argument} is a {type(config).__name__}, and must be the configuration of a draft. Pass a "
                "DFlashConfig, or the folder of a draft."
            )
        local = cls.from_dict(config.to_dict())
        local.name_or_path = config.name_or_path
        return local

    @classmethod
    def read_fields(
        cls, config: str | os.PathLike[str] | Mapping[str, Any] | DFlashConfig, **hub_kwargs: Any
    ) -> dict[str, Any]:
        """
        Return the fields that are set for a new draft, from which [`DFlashConfig.from_target`] derives the others.

        Args:
            config (`str`, `dict` or `DFlashConfig`):
                A JSON file, a folder or Hub name with a config.json, a dictionary, or another draft's configuration.
            **hub_kwargs: `token`, `cache_dir`, `local_files_only`.

        Returns:
            `dict`: the fields whose value is not `None`. Name and checksums of the target of a saved draft are left
            out, since a new draft may have another target.

        Raises:
            ValueError: A field is unknown, or the file does not hold the fields of a draft.
            OSError: The file cannot be read.
            TypeError: `config` is of another type, or the configuration of another kind of model.
        """
        if isinstance(config, (str, os.PathLike)):
            if os.path.isfile(config) or str(config).endswith(".json"):
                config = _read_json_object(config)
            else:
                config, _ = PreTrainedConfig.get_config_dict(config, **hub_kwargs)
        left_out: Collection[str] = ()
        if isinstance(config, PreTrainedConfig):
            config = cls.of_this_class(config).to_dict()
        if isinstance(config, Mapping) and config.get("model_type") is not None:
            left_out = FIELDS_OF_ONE_TARGET
        if isinstance(config, Mapping) and config.get("model_type") in (None, cls.model_type):
            check_field_names(config)
        elif isinstance(config, Mapping):
            config = cls._translated(dict(config), {})
        else:
            raise TypeError(
                f"config={brief(config)} must be a file, a folder, a Hub name, a dictionary or a DFlashConfig. Pass "
                "one of them."
            )
        names = (cls.field_names() & config.keys()) - {*left_out}
        return {name: config[name] for name in names if config[name] is not None}

    @classmethod
    def from_target(
        cls,
        target: str | PreTrainedConfig | PreTrainedModel,
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | DFlashConfig | None = None,
        num_hidden_layers: int | None = None,
        num_target_layers: int | None = None,
        block_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        target_revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> DFlashConfig:
        """
        Derive a configuration from a target and log the choices.

        Values that differ between the layers of the target are taken from its last layer with full attention, or with
        sliding attention if all layers of the draft are of that type. The MLP is at least as wide as the experts that
        a token activates.

        Args:
            target (`str`, `PreTrainedConfig` or `PreTrainedModel`):
                Hub name or folder, the live target or its configuration. Of a multimodal target the text
                configuration is used.
            config (`str`, `dict` or `DFlashConfig`, *optional*):
                Fields of the draft: a JSON file, a folder or Hub name with a config.json, a dictionary or another
                draft's configuration. Missing fields are derived, and the arguments below take precedence.
            num_hidden_layers (`int`, *optional*, defaults to 5):
                The number of draft layers.
            num_target_layers (`int`, *optional*, defaults to 5):
                The number of target layers to read, fewer if the target is shallower. `target_layer_ids=` overrides
                it.
            block_size (`int`, *optional*, defaults to 16):
                The number of slots in a block, the anchor included.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                The target's tokenizer, from which the mask token is chosen. By default the target's name gives it.
            mask_token_id (`int`, *optional*):
                The mask token, which is then not chosen.
            target_revision, token, cache_dir, local_files_only (*optional*):
                Arguments that find the target on the Hub.
            **overrides:
                Any field of the configuration.

        Returns:
            `DFlashConfig`

        Raises:
            ValueError: The target has no text decoder or several residual streams, a field contradicts the target or
                cannot be derived from it, or no mask token can be chosen.
        """
        hub = {"revision": target_revision, "token": token, "cache_dir": cache_dir}
        hub["local_files_only"] = local_files_only
        target_config = _config_of_target(target, hub)
        name, text = describe_target(target), target_config.get_text_config(decoder=True)
        _refuse_unsuitable_target(name, target_config, text)
        arguments = {
            "num_hidden_layers": num_hidden_layers,
            "num_target_layers": num_target_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_revision": target_revision,
            **overrides,
        }
        given = _merge_fields(
            {} if config is None else cls.read_fields(config, **{**hub, "revision": None}),
            {field: value for field, value in arguments.items() if value is not None},
        )
        model = None if isinstance(target, (str, PreTrainedConfig)) else target
        embedding: Any = None if model is None else model.get_input_embeddings()
        num_embeddings = (None if embedding is None else num_embedding_rows(embedding)) or text.vocab_size
        values: dict[str, Any] = {
            **_fixed_values(name, text, num_embeddings, given),
            **_plain_values(text),
            "target_name_or_path": target if isinstance(target, str) else (target_config.name_or_path or None),
        }
        if "target_layer_ids" not in given:
            values["target_layer_ids"] = _layer_ids_of_depth(given.pop("num_target_layers", 5), text.num_hidden_layers)
        values |= _TargetGeometry(name, text, given.get("layer_types")).values(given, cls.default_theta)
        values["selector_factored"] = given.get("selector_rank") is not None
        values |= given

        reason, tokenizer = "given", text_tokenizer(tokenizer)
        if "mask_token_id" not in values:
            name_or_path = values["target_name_or_path"]
            if tokenizer is None:
                if not name_or_path:
                    raise ValueError(
                        "The target was built in memory and names no tokenizer, from which the mask token is chosen. "
                        "Pass tokenizer= or mask_token_id=."
                    )
                tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub)
            excluded = {*_token_ids(target_config), *_token_ids(text)}
            excluded |= set(_token_ids(_generation_config(model, name_or_path, hub)))
            values["mask_token_id"], reason = choose_mask_token_id(tokenizer, num_embeddings, excluded)
        draft_config = cls(**values)
        logger.warning_advice(
            f"DFlashConfig for {name}: {draft_config.num_hidden_layers} draft layers, block "
            f"{draft_config.block_size}, target layers {draft_config.target_layer_ids} of {text.num_hidden_layers}, "
            f"mask token {draft_config.mask_token_id} ({reason})."
        )
        return draft_config

    def _check_types(self) -> None:
        """Raise a `ValueError` for a field of a wrong type or size, before transformers raises a class of its own."""
        for name, hint in inspect.get_annotations(DFlashConfig, eval_str=True).items():
            if get_origin(hint) is ClassVar:
                continue
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
                setattr(self, name, value)
            kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
            if name in NUMBER_RULES:
                holds, rule = NUMBER_RULES[name]
                if value is None and NoneType in kinds:
                    continue
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
                    raise ValueError(f"{name}={brief(value)} must be a number {rule}. Change the value.")
                continue
            if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise ValueError(f"{name}={brief(value)} must be {names}. Change the value.")
            if int in kinds:
                for number in value if isinstance(value, list) else [value]:
                    self._check_integer(name, value, number)

    def _check_others(self, others: Mapping[str, Any]) -> None:
        """Raise a `ValueError` for a value that is no field, and that transformers or a reader cannot work with."""
        for name, types in BASE_FIELDS.items():
            value = others.get(name, getattr(self, name, None))
            if not isinstance(value, types):
                names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in types)
                raise ValueError(f"{name}={brief(value)} must be {names}. Change the value.")
            is_dtype = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
            if name.endswith("dtype") and isinstance(value, str) and not is_dtype:
                raise ValueError(f"{name}={brief(value)} must be a dtype of torch, such as 'bfloat16'. Change it.")
        if not all(isinstance(name, str) for name in self.architectures or []):
            raise ValueError(f"architectures={brief(self.architectures)} must be a list of str. Change the value.")
        for name in sorted(others.keys() - {"rope_theta"}):  # They become attributes and must not hide a method.
            known = getattr(type(self), name, None)
            is_fixed = isinstance(known, property) and known.fset is None
            if callable(known) or is_fixed or (name in REFUSED_NAMES and others[name] is not None):
                raise ValueError(
                    f"{brief(name)} is a value of the configuration, but a draft's configuration cannot hold one of "
                    "this name. Remove it."
                )

    @staticmethod
    def _check_integer(name: str, value: Any, number: Any) -> None:
        """Raise a `ValueError` for an integer, alone or in a list of token ids, that is out of range."""
        if not isinstance(value, list) and type(number) is not int:
            return  # of another type that the field allows
        minimum, maximum = INTEGER_LIMITS.get(name, (0 if name.endswith("_token_id") else 1, MAX_SIZE))
        if type(number) is not int or not minimum <= number <= maximum:
            rule = f"from {minimum} to {maximum}" if type(number) is not int else f"at least {minimum}"
            if type(number) is int and number > maximum:
                rule = f"at most {maximum}"
            raise ValueError(f"{name}={brief(value)} must be {rule}. Change the value.")

    def _merge_rope(self, rope_parameters: dict[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Put `rope_theta` into `rope_parameters`, refuse two values that differ, and check all of them."""
        scaling = kwargs.pop("rope_scaling", None)
        if not isinstance(scaling, dict | None):
            raise ValueError(f"rope_scaling={brief(scaling)} must be dict or None. Change the value.")
        rope = dict(rope_parameters or scaling or {})
        theta = kwargs.pop("rope_theta", None)
        if theta is not None and rope.setdefault("rope_theta", theta) != theta and theta == theta:
            raise ValueError(
                f"rope_theta={brief(theta)} and rope_parameters['rope_theta']={brief(rope['rope_theta'])} differ, but "
                "both are the base of the rotary angles. Pass one of them."
            )
        factor = kwargs.pop("partial_rotary_factor", None) or rope.get("partial_rotary_factor")
        if factor not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor={brief(factor)} is not supported, because the draft rotates whole heads. "
                "Remove it."
            )
        rope.pop("partial_rotary_factor", None)
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = self.default_theta
        rope.setdefault("rope_type", rope.pop("type", "default"))
        _check_rope(rope)
        return rope

    def _check_values(self) -> None:
        """Raise a `ValueError` for values that are out of range or contradict each other."""
        ids, depth = self.target_layer_ids or [], self.target_num_hidden_layers
        layer_types = self.layer_types or []
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act={brief(self.hidden_act)} is no activation of transformers, such as 'silu' or 'gelu'. "
                "Change the value."
            )
        if self.num_attention_heads * self.head_dim > MAX_SIZE:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} times head_dim={self.head_dim} must be at most "
                f"{MAX_SIZE}. Reduce one of them."
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} must be below vocab_size={self.vocab_size}, the number of the "
                "target's embeddings. Choose a token that has an embedding."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}. Change one of them."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even, because rotary angles apply to pairs. Change the value."
            )
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < -1 for i in ids):
            raise ValueError(
                f"target_layer_ids={brief(ids)} must be a list of integers, the layers of the target counted from 0, "
                "or -1 for its embedding. Change the value."
            )
        if depth is not None:
            check_target_layer_ids(ids, depth, last_layer_after_norm=self.last_layer_after_norm)
        if len(set(ids)) != len(ids):
            raise ValueError(f"target_layer_ids={brief(ids)} must be distinct. Remove the repeated ids.")
        if self.num_target_layers != len(ids):
            raise ValueError(
                f"num_target_layers={self.num_target_layers} must equal the number of target_layer_ids={brief(ids)}. "
                "Leave num_target_layers out."
            )
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size} must equal hidden_size={self.hidden_size}, because the "
                "draft uses the target's embedding and head. Set both to the width of the target."
            )
        if len(layer_types) != self.num_hidden_layers or any(kind not in LAYER_TYPES for kind in layer_types):
            raise ValueError(
                f"layer_types={brief(layer_types)} must hold one of {LAYER_TYPES} for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers. Change one of them."
            )
        for name, checksum in (self.target_tensor_checksums or {}).items():
            if not isinstance(checksum, str) or not re.fullmatch(r"b?float\d+ \d+x\d+ [0-9a-f]{64}", checksum):
                raise ValueError(
                    f"target_tensor_checksums[{brief(name)}]={brief(checksum)} must be dtype, shape and SHA-256, as "
                    "in 'bfloat16 49152x576 <64 hex digits>'. Use the configuration as it was saved."
                )
        if "sliding_attention" in layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"sliding_window={self.sliding_window} must be at least block_size={self.block_size} when a layer is "
                "'sliding_attention'. Increase it."
            )

    def _check_kind(self) -> None:
        """Raise a `ValueError` for parts of a draft that do not fit together."""
        parts = {
            "conv_kernel_size": ("conv_group_size",),
            "selector_rank": ("selector_top_k", "selector_factored", "selector_embedding_scale"),
            "markov_rank": ("markov_head_type", "confidence_head_with_markov"),
        }
        for part, fields in parts.items():
            for field in fields:
                if getattr(self, part) is None and getattr(self, field) not in (None, False):
                    raise ValueError(
                        f"{field}={brief(getattr(self, field))} has no effect without {part}. Pass {part}, or leave "
                        f"{field} out."
                    )
        if self.conv_kernel_size is not None and self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size={self.conv_kernel_size} must be at most block_size={self.block_size}, because a "
                "convolution does not leave its block. Reduce it."
            )
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size={self.conv_group_size} must divide hidden_size={self.hidden_size}. Change it."
            )
        if self.selector_rank is not None and self.markov_rank is not None:
            raise ValueError(
                f"selector_rank={self.selector_rank} and markov_rank={self.markov_rank} are both set, but a draft has "
                "one head that corrects its logits. Pass one of them."
            )
        if self.selector_top_k is not None and self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k={self.selector_top_k} must be at most vocab_size={self.vocab_size}. Reduce it."
            )
        if self.selector_embedding_scale is not None and not self.selector_factored:
            raise ValueError(
                f"selector_embedding_scale={self.selector_embedding_scale} has no effect without "
                "selector_factored=True. Leave it out."
            )
        if self.markov_head_type not in (None, *MARKOV_HEAD_TYPES):
            raise ValueError(
                f"markov_head_type={brief(self.markov_head_type)} must be one of {MARKOV_HEAD_TYPES}. Choose one of "
                "them."
            )
        if self.markov_head_type == "rnn" and not self.sample_from_anchor:
            raise ValueError(
                "markov_head_type='rnn' needs sample_from_anchor=True: its state begins with the first proposed "
                "token, and producers disagree whether slot 0 of other blocks takes part. Pass one of the other types."
            )
        if self.confidence_head_with_markov and not self.enable_confidence_head:
            raise ValueError(
                "confidence_head_with_markov=True has no effect without enable_confidence_head=True. Pass both."
            )
        size = self.draft_vocab_size
        if size is not None and size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={size} must be at most vocab_size={self.vocab_size}. Reduce it, or leave it out."
            )
        if size is not None and self.selector_rank is not None:
            raise ValueError(
                f"draft_vocab_size={size} and selector_rank={self.selector_rank} are both set, but the tables of a "
                "selector are over the full vocabulary in every format. Pass one of them."
            )


def describe_target(target: str | PreTrainedConfig | PreTrainedModel | None) -> str:
    """Return the name of a target for messages: its Hub name or folder, or else its class."""
    if target is None or isinstance(target, str):
        return repr(target)
    config = target.config if isinstance(target, PreTrainedModel) else target
    return repr(config.name_or_path) if config.name_or_path else type(target).__name__


def _read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file with the fields of a draft."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise type(error)(
            f"The draft configuration {str(path)!r} cannot be read: {error.strerror}. Give a JSON file."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not valid JSON ({error}). Correct the file.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{str(path)!r} must hold a JSON object with the fields of a draft, not {brief(values)}. Correct the file."
        )
    return values


def describes_new_draft(raw: Mapping[str, Any]) -> bool:
    """
    Tell whether the values of a file are fields of a draft and not the config.json of a saved model.

    Such a file names no model type, no class and no other producer, but at least one value that only drafts have.

    Args:
        raw (`Mapping`): The unchanged values of the file.
    """
    of_a_model = {"architectures", "dflash_config", "model_type", "speculators_model_type"}
    return all(raw.get(name) is None for name in of_a_model) and not DRAFT_ONLY.isdisjoint(raw)


def check_field_names(values: Mapping[str, Any]) -> None:
    """
    Refuse values that are no fields of a draft's configuration.

    Args:
        values (`Mapping`): The fields that a file or a caller sets.

    Raises:
        ValueError: A field is unknown. The message names it.
    """
    others = {*PreTrainedConfig().to_dict(), "auto_map", "model_type", "rope_scaling", "torch_dtype", "use_cache"}
    unknown = sorted(map(str, values.keys() - DFlashConfig.field_names() - others))
    if unknown:
        raise ValueError(
            f"{brief(unknown)[1:-1]} is no field of a draft's configuration. Correct the name, or remove it. The "
            "fields are those of DFlashConfig."
        )


def num_embedding_rows(embedding: Any) -> int | None:
    """
    Return the number of rows of an embedding, padding included, or `None` where the module does not tell it.

    Args:
        embedding (`nn.Module`): The input embedding of a target, whose weight may be packed or in another module.
    """
    weight = getattr(embedding, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.shape[0]
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def residual_streams(text_config: PreTrainedConfig) -> str | None:
    """
    Describe the residual streams of a target with several of them; return `None` for any other target.

    Args:
        text_config (`PreTrainedConfig`): The target's text configuration.
    """
    for name in STREAM_COUNTS:
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count > 1:
            return f"{name}={count}"
    if text_config.model_type == "reformer":  # whose head takes both, twice as wide as a hidden state
        return "the two of its reversible layers"
    return None


def _config_of_target(target: Any, hub: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a target that is given by name, as a live model or as a configuration."""
    if isinstance(target, str):
        return AutoConfig.from_pretrained(target, **hub)
    config = getattr(target, "config", target)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"target={brief(target)} must be a Hub name, a folder as a str, a model of transformers or its "
            "configuration. Pass one of them."
        )
    return config


def _merge_fields(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file with the arguments, which also replace other fields of the same meaning."""
    if "target_layer_ids" in arguments:
        arguments = {field: value for field, value in arguments.items() if field != "num_target_layers"}
    replaced = {
        field
        for same in ({"rope_theta", "rope_parameters"}, {"num_target_layers", "target_layer_ids"})
        if same & arguments.keys()
        for field in same
    }
    return {field: value for field, value in given.items() if field not in replaced} | dict(arguments)


def _fixed_values(name: str, text: PreTrainedConfig, num_embeddings: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that only the target decides, and refuse other values of them."""
    facts = {
        "vocab_size": num_embeddings,
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "target_num_hidden_layers": text.num_hidden_layers,
    }
    for field, fact in facts.items():
        if given.get(field, fact) != fact:
            raise ValueError(
                f"{field}={brief(given[field])} contradicts the target {name}, where it is {fact}. Leave {field} "
                "out, or pass another target."
            )
    return facts


def _plain_values(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that a new draft takes over from the target where it defines them."""
    values: dict[str, Any] = {}
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:  # XLNet has -1 there.
        values["max_position_embeddings"] = min(positions, MAX_SIZE)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_id = getattr(text, field, None)
        values[field] = None if isinstance(token_id, int) and token_id < 0 else token_id  # -1 means none.
    return values


def _layer_ids_of_depth(count: Any, depth: int) -> list[int]:
    """Return evenly spread layers of a target: as many as wanted, or all but the last if there are fewer."""
    if type(count) is not int or count < 1:
        raise ValueError(f"num_target_layers={brief(count)} must be int and at least 1. Change the value.")
    return default_target_layer_ids(depth, min(count, max(depth - 1, 1)))


def _refuse_unsuitable_target(name: str, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Raise a `ValueError` for a target for which no draft can be made."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"The target {name} is an encoder-decoder model. DFlash needs a decoder-only language model. Use one as "
            "the target."
        )
    for field in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(text, field, None), int):
            raise ValueError(
                f"The target {name} has no `{field}` in its text configuration ({type(text).__name__}). DFlash needs "
                "a decoder-only language model. Use one as the target."
            )
    if streams := residual_streams(text):
        raise ValueError(
            f"The target {name} has several residual streams ({streams}), so that its layers have no single hidden "
            "state that a draft could read. Use a target with one stream."
        )


class _TargetGeometry:
    """
    The sizes of a draft that resemble those of a target, some of which differ between layers in some families.

    Args:
        name (`str`): The target's name in messages.
        text (`PreTrainedConfig`): The target's text configuration.
        draft_layer_types (`list[str]`, *optional*): The layer types of the draft.
    """

    def __init__(self, name: str, text: PreTrainedConfig, draft_layer_types: Any) -> None:
        self.name, self.text, self.depth = name, text, text.num_hidden_layers
        kinds = getattr(text, "layer_types", None)
        self.kinds = list(kinds) if isinstance(kinds, (list, tuple)) and len(kinds) == self.depth else []
        is_sliding = isinstance(draft_layer_types, list) and {*map(str, draft_layer_types)} == {"sliding_attention"}
        wanted = "sliding_attention" if is_sliding else "full_attention"
        alike = [index for index, kind in enumerate(self.kinds) if kind == wanted]
        others = [index for index, kind in enumerate(self.kinds) if not re.search("sliding|linear", str(kind))]
        self.reference = max(alike or others, default=max(self.depth - 1, 0))

    def values(self, given: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
        """Return the fields that are derived from the target and are not given."""
        hidden_size = self.text.hidden_size
        heads = given.get("num_attention_heads") or self._one("num_attention_heads")
        if heads is None:
            raise ValueError(
                f"The target {self.name} has no `num_attention_heads` in its text configuration "
                f"({type(self.text).__name__}). Pass num_attention_heads= for the draft."
            )
        values: dict[str, Any] = {"num_attention_heads": heads}
        if "num_key_value_heads" not in given:
            kv_heads = self._one("num_key_value_heads") or heads
            values["num_key_value_heads"] = kv_heads if isinstance(heads, int) and heads % kv_heads == 0 else heads
        if "head_dim" not in given and isinstance(heads, int) and heads > 0:
            head_dim = self._one("head_dim") or max(hidden_size // heads, 1)
            values["head_dim"] = head_dim + head_dim % 2  # Rotary angles apply to pairs.
        if "intermediate_size" not in given:
            values["intermediate_size"] = self._mlp_width()
        if not {"rope_theta", "rope_parameters"} & given.keys():
            values["rope_theta"] = self._rope_theta(default_theta)
        return values

    def _at(self, layer: int, name: str) -> Any:
        """Return a value of one layer, which may be in a configuration of its own, in a list or under its type."""
        is_heterogeneous = getattr(self.text, "is_heterogeneous", False)
        config = self.text.per_layer_config[layer] if is_heterogeneous else self.text
        value = getattr(config, name, None)
        if value is None and name not in ("head_dim", "num_attention_heads", "num_key_value_heads"):
            value = getattr(getattr(config, "ffn_config", None), name, None)  # DBRX
        if isinstance(value, Mapping) and self.kinds:
            value = value.get(self.kinds[layer], value)
        return value[layer] if isinstance(value, (list, tuple)) and len(value) == self.depth else value

    def _one(self, name: str) -> int | None:
        """Return the value of the layer that the draft resembles, or `None` if the target does not define one."""
        value = self._at(self.reference, name)
        if value in (None, 0):
            return None
        if type(value) is not int or value < 0:
            raise ValueError(
                f"The target {self.name} has {name}={brief(value)}, from which no value for the draft can be chosen. "
                f"Pass {name}= for the draft."
            )
        return value

    def _largest(self, *names: str) -> int:
        """Return the largest value of any layer under the first name that the target defines, or 0."""
        for name in names:
            found = {brief(value): value for value in (self._at(layer, name) for layer in range(self.depth))}
            numbers = [
                number
                for value in found.values()
                for number in (value if isinstance(value, (list, tuple)) else [value])
                if type(number) is int and number > 0
            ]
            if numbers:
                return max(numbers)
        return 0

    def _mlp_width(self) -> int:
        """Return the width of a dense layer or of all experts that a token activates, whichever is larger."""
        dense = self._largest("intermediate_size")
        width = dense
        is_mixture = getattr(self.text, "is_moe", True) and getattr(self.text, "enable_moe_block", True)
        count = self._largest("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
        if is_mixture and count:
            expert = self._largest("moe_intermediate_size", "ffn_hidden_size") or dense
            shared = self._largest(
                "shared_expert_intermediate_size",
                "moe_shared_expert_intermediate_size",
                "shared_experts_intermediate_size",
                "shared_intermediate_size",
            ) or expert * self._largest("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
            width = max(dense, count * expert + shared)
        width = width or 3 * self.text.hidden_size
        if width < self.text.hidden_size:
            logger.warning(
                f"The MLP of the target {self.name} is {width} wide, less than its hidden_size="
                f"{self.text.hidden_size}, which the draft uses as its intermediate_size. Pass intermediate_size= for "
                "another width."
            )
        return max(width, self.text.hidden_size)

    def _rope_theta(self, default: float) -> float:
        """Return the base of the rotary angles of the layer that the draft resembles."""
        rope: Any = getattr(self.text, "rope_parameters", None) or {}
        by_type = [values for values in rope.values() if isinstance(values, Mapping)]
        if by_type:
            kind = self.kinds[self.reference] if self.kinds else "full_attention"
            rope = rope.get(kind, rope.get("full_attention", by_type[0])) or {}  # Layers without positions have None.
        for theta in (rope.get("rope_theta"), self._at(self.reference, "rope_theta")):
            if isinstance(theta, (int, float)) and not isinstance(theta, bool) and 1 < theta <= MAX_ROPE_THETA:
                return theta
        return default


def _check_rope(rope: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for values of the rotary angles that are missing, of a wrong type or out of range."""
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ValueError(
            f"rope_parameters['rope_type']={brief(kind)} must be one of {tuple(ROPE_TYPES)}. Choose one of them."
        )
    theta = rope["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 1 < theta <= MAX_ROPE_THETA:
        raise ValueError(
            f"rope_theta={brief(theta)} must be positive, above 1 and at most {MAX_ROPE_THETA:g}. Change the value."
        )
    for name in ROPE_TYPES[kind]:
        if rope.get(name) is None:
            raise ValueError(f"rope_parameters has no {name!r}, which rope_type={kind!r} needs. Add it.")
    for name, value in rope.items():
        if name in ("rope_type", "rope_theta") or value is None or (name == "truncate" and isinstance(value, bool)):
            continue
        numbers = value if isinstance(value, list) and name.startswith(LISTS_OF_OTHER_ROPE_TYPES) else [value]
        if any(isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers):
            raise ValueError(f"rope_parameters[{brief(name)}]={brief(value)} must be a number. Change the value.")
        least = 0 if name.startswith("mscale") else 1e-6
        if not all(least <= number <= MAX_ROPE_THETA for number in numbers):
            raise ValueError(
                f"rope_parameters[{brief(name)}]={brief(value)} must be from {least:g} to {MAX_ROPE_THETA:g}. Change "
                "the value."
            )
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(
            f"rope_parameters['low_freq_factor']={brief(rope['low_freq_factor'])} must be below "
            f"'high_freq_factor'={brief(rope['high_freq_factor'])}. Change one of them."
        )


def _generation_config(model: Any, name_or_path: str | None, hub: Mapping[str, Any]) -> Any:
    """Return the generation configuration of a live target or of one given by name, or `None` without one."""
    if model is not None:
        return model.generation_config
    try:
        return GenerationConfig.from_pretrained(str(name_or_path), **hub) if name_or_path else None
    except OSError:  # Many targets have no such file.
        return None


def _token_ids(config: Any) -> Iterator[int]:
    """Yield the ids of tokens with a use of their own that a model or generation configuration names."""
    for name, value in vars(config).items() if config is not None else ():
        if re.search(r"_token_(id|ids|index)$", name) and name not in ("mask_token_id", "unk_token_id"):
            yield from (
                token_id
                for token_id in (value if isinstance(value, (list, tuple)) else [value])
                if type(token_id) is int
            )


__all__ = ["DFlashConfig"]
