"""Configuration of a DFlash draft model. Travels with a checkpoint: needs transformers only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, ClassVar, get_args, get_origin

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Translates a config.json: (the file's values, the fields that the caller gave) -> the fields of a `DFlashConfig`.
FormatReader = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Beyond any model; a damaged or hostile file must not ask for more memory than there is.
MAX_SIZE, MAX_LAYERS = 2**26, 2**10


def default_target_layer_ids(target_num_hidden_layers: int, num_target_layers: int) -> list[int]:
    """
    Spread the tapped layers over the depth of the target.

    Layer id `i` means the output of decoder layer `i`, counted from 0. The last layer is never chosen: its state is
    seen after the final norm in transformers and before it in serving engines.

    Args:
        target_num_hidden_layers (`int`):
            Decoder layers of the target.
        num_target_layers (`int`):
            Layers to tap.

    Returns:
        `list[int]`: ascending distinct layer ids.

    Raises:
        ValueError: the target has fewer layers before its last one than taps are asked for.

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
            f"num_target_layers={count} taps do not fit a target of {depth} layers: the last layer is never tapped, "
            f"so choose 1 to {depth - 1}."
        )
    if count == 1:
        return [min(depth // 2, depth - 2)]
    first, last = (1, depth - 3) if depth >= 8 and count <= depth - 3 else (0, depth - 2)
    return [round(first + j * (last - first) / (count - 1)) for j in range(count)]


def check_target_layer_ids(target_layer_ids: list[int], target_num_hidden_layers: int) -> None:
    """
    Refuse tapped layers that the target does not have, and its last one.

    Args:
        target_layer_ids (`list[int]`): tapped layers, counted from 0.
        target_num_hidden_layers (`int`): decoder layers of the target.

    Raises:
        ValueError: one is out of range, or the last layer.
    """
    ids, depth = target_layer_ids, target_num_hidden_layers
    if max(ids) >= depth:
        raise ValueError(
            f"target_layer_ids={ids} must be integers from 0 to {depth - 1} (target_num_hidden_layers={depth})."
        )
    if depth - 1 in ids:
        raise ValueError(
            f"target_layer_ids={ids} taps the last layer, {depth - 1}: transformers returns its state after the "
            "final norm, serving engines before it, so acceptance would be lost. Tap an earlier layer."
        )


def choose_mask_token_id(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, excluded_token_ids: set[int] | None = None
) -> tuple[int, str]:
    """
    Choose the token whose embedding stands for "not yet known" in a block.

    Order: the tokenizer's mask token; an embedding row that no token uses; the first special token that is none of
    pad, eos, bos.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        num_embeddings (`int`):
            Rows of the target's embedding, padding rows included.
        excluded_token_ids (`set[int]`, *optional*):
            Further ids that must not be chosen (the eos list of a generation config, for example).

    Returns:
        `tuple[int, str]`: the id and one phrase that says why it was chosen.

    Raises:
        ValueError: nothing fits; the message says to pass `mask_token_id`.
    """
    excluded = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, *(excluded_token_ids or ())}
    mask_token_id = getattr(tokenizer, "mask_token_id", None)
    if mask_token_id is not None and mask_token_id not in excluded and mask_token_id < num_embeddings:
        return mask_token_id, "the tokenizer's mask token"
    first_unused_row = max(tokenizer.get_vocab().values()) + 1
    if first_unused_row < num_embeddings:
        return first_unused_row, "the first embedding row that no token uses"
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and token_id not in excluded:
            return token_id, f"the special token {token.content!r}"
    raise ValueError(
        f"No mask token found in {tokenizer.name_or_path!r}: it has no mask token, its vocabulary fills all "
        f"{num_embeddings} embedding rows and every special token is pad, eos or bos. "
        "Pass mask_token_id= with the id of a token that never occurs in text."
    )


class DFlashConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashDraftModel`]. The defaults are those of the reference draft for Qwen3-8B.

    `hidden_size`, `target_hidden_size` and `vocab_size` are the target's: embedding and language model head are shared
    with it. `num_target_layers` counts the tapped layers, not the depth of the target.

    Args:
        vocab_size (`int`, defaults to 151936): Rows of the target's embedding, padding rows included.
        hidden_size (`int`, defaults to 4096): Width of the draft, equal to the target's.
        intermediate_size (`int`, defaults to 12288): Width of the MLP.
        num_hidden_layers (`int`, defaults to 5): Decoder layers of the draft.
        num_attention_heads (`int`, defaults to 32): Query heads.
        num_key_value_heads (`int`, defaults to 8): Key and value heads.
        head_dim (`int`, defaults to 128): Width of a head, even.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP.
        max_position_embeddings (`int`, defaults to 40960): Longest sequence in tokens.
        initializer_range (`float`, defaults to 0.02): Standard deviation of new linear weights.
        rms_norm_eps (`float`, defaults to 1e-6): Added to the variance in every norm.
        attention_bias (`bool`, defaults to `False`): Biases in the attention projections.
        attention_dropout (`float`, defaults to 0.0): Dropout on attention weights in training.
        rope_theta (`float`, *optional*): Base of the rotary angles, 1,000,000 if it stands in neither place. Stored
            inside `rope_parameters`; the property `config.rope_theta` reads it there.
        rope_parameters (`dict`, *optional*): `rope_type` (`default`, `linear`, `llama3`, `yarn`) and its values.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` a layer; all full if unset.
        sliding_window (`int`, *optional*): Window in tokens of the sliding layers, at least `block_size`.
        is_causal (`bool`, *optional*): Whether a slot sees only the slots before it. Unset: sliding layers are causal
            inside the block, full layers are not.
        block_size (`int`, defaults to 16): Slots a block, the anchor included.
        mask_token_id (`int`, defaults to 151669): Token whose embedding fills the slots to be drafted.
        num_target_layers (`int`, *optional*): Number of tapped target layers; follows from `target_layer_ids`.
        target_hidden_size (`int`, *optional*): Width of the target, equal to `hidden_size`.
        target_num_hidden_layers (`int`, *optional*, defaults to 36): Decoder layers of the target; `None` if the
            checkpoint of another producer does not say, until the draft is tied.
        target_layer_ids (`list[int]`, *optional*): Tapped layers, counted from 0; evenly spread if unset.
        target_name_or_path (`str`, *optional*): The target's Hub name or folder.
        target_revision (`str`, *optional*): The target's revision.
        chat_template_kwargs (`dict`, *optional*): Chat-template arguments used in training.
        input_embedding_scale (`float`, *optional*): Factor inside the target's embedding module (Gemma), compared when
            the draft is tied. Servers that look rows up themselves need it.
        target_tensor_checksums (`dict`, *optional*): Tensors of the target that the draft's file carried, with
            checksums that are compared when the draft is tied.

    Raises:
        ValueError: a value breaks its rule; the message gives field, value and rule.

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
    mask_token_id: int = 151669
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    target_num_hidden_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    input_embedding_scale: float | int | None = None
    target_tensor_checksums: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_types()
        self.rope_parameters = self._merge_rope(self.rope_parameters, kwargs)
        if self.target_layer_ids is None:
            if self.target_num_hidden_layers is None:
                raise ValueError("Without target_num_hidden_layers the draft needs target_layer_ids.")
            count = 5 if self.num_target_layers is None else self.num_target_layers
            self.target_layer_ids = default_target_layer_ids(self.target_num_hidden_layers, count)
        if self.num_target_layers is None:
            self.num_target_layers = len(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self._check_values()
        super().__post_init__(**kwargs)

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
        """`set[str]`: fields of a draft's configuration that a caller may set."""
        return {*cls.__dataclass_fields__, "rope_theta"} - PreTrainedConfig.__dataclass_fields__.keys()

    @property
    def rope_theta(self) -> float:
        """`float`: base of the rotary angles, as it stands in `rope_parameters`."""
        return (self.rope_parameters or {}).get("rope_theta", self.default_theta)

    def in_block_causal(self, layer_index: int) -> bool:
        """Whether a slot of this layer sees only the slots up to itself."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_window(layer_index) is not None

    def layer_window(self, layer_index: int) -> int | None:
        """Sliding window of this layer in tokens, or `None` for full attention."""
        layer_types = self.layer_types or []
        return self.sliding_window if layer_types[layer_index] == "sliding_attention" else None

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in `PreTrainedConfig`; the file of another producer is translated."""
        raw, kwargs = super().get_config_dict(*args, **kwargs)
        return cls._translated(raw, kwargs), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in `PreTrainedConfig`; the dictionary may be the config.json of another producer."""
        return super().from_dict(cls._translated(config_dict, kwargs), **kwargs)

    @classmethod
    def _translated(cls, raw: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The values of a configuration file; fields are taken out of `kwargs`, so that they are checked with them."""
        if cls._format_reader is None or not raw:
            return raw
        given = {name: kwargs.pop(name) for name in cls.field_names() & kwargs.keys()}
        return {**cls._format_reader(raw, given), "model_type": cls.model_type}

    @classmethod
    def from_target(
        cls,
        target: str | PreTrainedConfig | PreTrainedModel,
        *,
        num_hidden_layers: int = 5,
        num_target_layers: int = 5,
        block_size: int = 16,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        target_revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
        **overrides: Any,
    ) -> DFlashConfig:
        """
        Derive a configuration from a target and log what was chosen.

        Args:
            target (`str`, `PreTrainedConfig` or `PreTrainedModel`):
                Hub name or folder, or the live target. The text configuration inside a multimodal one is used.
            num_hidden_layers (`int`, defaults to 5):
                Draft layers.
            num_target_layers (`int`, defaults to 5):
                Layers to tap; fewer if the target is shallower. `target_layer_ids=` overrides it.
            block_size (`int`, defaults to 16):
                Slots a block, the anchor included.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                The target's tokenizer, for the choice of the mask token. Loaded from the target's name if unset.
            mask_token_id (`int`, *optional*):
                Overrides the choice of the mask token.
            target_revision, token, cache_dir, local_files_only:
                How the target is looked up.
            **overrides:
                Any field of the configuration.

        Returns:
            `DFlashConfig`

        Raises:
            ValueError: the target has no text decoder, or no mask token can be chosen.
        """
        hub = {"revision": target_revision, "token": token, "cache_dir": cache_dir}
        hub["local_files_only"] = local_files_only
        model = None if isinstance(target, (str, PreTrainedConfig)) else target
        if isinstance(target, str):
            target_config = AutoConfig.from_pretrained(target, **hub)
        else:
            target_config = target if isinstance(target, PreTrainedConfig) else target.config
        text = target_config.get_text_config(decoder=True)
        for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if getattr(text, field, None) is None:
                raise ValueError(
                    f"The target {describe_target(target)} has no `{field}` in its text configuration "
                    f"({type(text).__name__}): DFlash needs a decoder-only language model."
                )
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"The target {describe_target(target)} is an encoder-decoder model: DFlash needs a decoder-only one."
            )

        depth, heads = text.num_hidden_layers, text.num_attention_heads
        embedding: Any = None if model is None else model.get_input_embeddings()
        num_embeddings = text.vocab_size if embedding is None else embedding.weight.shape[0]
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        values: dict[str, Any] = {
            "vocab_size": num_embeddings,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 3 * text.hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "max_position_embeddings": getattr(text, "max_position_embeddings", cls.max_position_embeddings),
            "rope_theta": _rope_theta_of(text, cls.default_theta),
            "block_size": block_size,
            "target_hidden_size": text.hidden_size,
            "target_num_hidden_layers": depth,
            "target_name_or_path": target if isinstance(target, str) else (target_config.name_or_path or None),
            "target_revision": target_revision,
            "bos_token_id": getattr(text, "bos_token_id", None),
            "eos_token_id": getattr(text, "eos_token_id", None),
            "pad_token_id": getattr(text, "pad_token_id", None),
        }
        if "rope_parameters" in overrides:
            del values["rope_theta"]
        if "target_layer_ids" not in overrides:
            values["target_layer_ids"] = default_target_layer_ids(depth, min(num_target_layers, max(depth - 1, 1)))

        reason = "given"
        if mask_token_id is None:
            if tokenizer is None:
                if not values["target_name_or_path"]:
                    raise ValueError(
                        "The mask token cannot be chosen: the target was built in memory and names no tokenizer. "
                        "Pass tokenizer= or mask_token_id=."
                    )
                tokenizer = AutoTokenizer.from_pretrained(values["target_name_or_path"], **hub)
            excluded = set(_token_ids(text))
            if model is not None and model.generation_config is not None:
                excluded |= set(_token_ids(model.generation_config))
            mask_token_id, reason = choose_mask_token_id(tokenizer, num_embeddings, excluded)
        config = cls(**{**values, "mask_token_id": mask_token_id, **overrides})
        logger.warning_advice(
            f"DFlashConfig for {describe_target(target)}: {config.num_hidden_layers} draft layers, block "
            f"{config.block_size}, target layers {config.target_layer_ids} of {depth}, "
            f"mask token {config.mask_token_id} ({reason})."
        )
        return config

    def _check_types(self) -> None:
        """Every value of a wrong type is a `ValueError` here; transformers would raise a class of its own, later."""
        for name, hint in inspect.get_annotations(DFlashConfig, eval_str=True).items():
            if get_origin(hint) is ClassVar:
                continue
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
                setattr(self, name, value)
            kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
            if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
                raise ValueError(f"{name}={value!r} must be {names}.")
            if int in kinds and float not in kinds and not isinstance(value, bool):
                minimum = 0 if name.endswith("_token_id") else 1
                maximum = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
                if isinstance(value, int) and not minimum <= value <= maximum:
                    rule = f"at least {minimum}" if value < minimum else f"at most {maximum}"
                    raise ValueError(f"{name}={value!r} must be {rule}.")

    def _merge_rope(self, rope_parameters: dict[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Make `rope_theta` and `rope_parameters` one value; two that differ are an error."""
        rope = dict(rope_parameters or kwargs.pop("rope_scaling", None) or {})
        kwargs.pop("rope_scaling", None)
        theta = kwargs.pop("rope_theta", None)
        if theta is not None and rope.setdefault("rope_theta", theta) != theta:
            raise ValueError(
                f"rope_theta={theta} and rope_parameters['rope_theta']={rope['rope_theta']} disagree: give one."
            )
        factor = kwargs.pop("partial_rotary_factor", None) or rope.get("partial_rotary_factor")
        if factor not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor={factor} is not supported: the draft rotates whole heads. Drop it."
            )
        rope.pop("partial_rotary_factor", None)
        rope.setdefault("rope_theta", self.default_theta)
        rope.setdefault("rope_type", rope.pop("type", "default"))
        if rope["rope_type"] not in ROPE_TYPES:
            raise ValueError(f"rope_parameters['rope_type']={rope['rope_type']!r} must be one of {ROPE_TYPES}.")
        for name, value in rope.items():
            numbers = value if isinstance(value, list) and name != "rope_theta" else [value]
            if name != "rope_type" and not all(isinstance(number, int | float | None) for number in numbers):
                raise ValueError(f"rope_parameters[{name!r}]={value!r} must be a number or a list of numbers.")
        if not (rope["rope_theta"] or 0) > 0:
            raise ValueError(f"rope_theta={rope['rope_theta']} must be positive.")
        return rope

    def _check_values(self) -> None:
        ids, depth = self.target_layer_ids or [], self.target_num_hidden_layers
        layer_types = self.layer_types or []
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: the anchor and one slot to draft.")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} must be below vocab_size={self.vocab_size}, the rows of the "
                "target's embedding."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary angles come in pairs.")
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ValueError(f"target_layer_ids={ids} must be integers: layers of the target, counted from 0.")
        if depth is not None:
            check_target_layer_ids(ids, depth)
        if len(set(ids)) != len(ids):
            raise ValueError(f"target_layer_ids={ids} must be distinct.")
        if self.num_target_layers != len(ids):
            raise ValueError(
                f"num_target_layers={self.num_target_layers} must equal the number of target_layer_ids={ids}."
            )
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size} must equal hidden_size={self.hidden_size}: the draft "
                "uses the target's embedding and head."
            )
        if len(layer_types) != self.num_hidden_layers or any(kind not in LAYER_TYPES for kind in layer_types):
            raise ValueError(
                f"layer_types={layer_types} must hold one of {LAYER_TYPES} for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers."
            )
        for name, checksum in (self.target_tensor_checksums or {}).items():
            if not isinstance(checksum, str) or not re.fullmatch(r"b?float\d+ \d+x\d+ [0-9a-f]{64}", checksum):
                raise ValueError(
                    f"target_tensor_checksums[{name!r}]={checksum!r} must be dtype, shape and SHA-256, as in "
                    "'bfloat16 49152x576 <64 hex digits>'."
                )
        if "sliding_attention" in layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"sliding_window={self.sliding_window} must be at least block_size={self.block_size} when a layer is "
                "'sliding_attention'."
            )


def describe_target(target: str | PreTrainedConfig | PreTrainedModel | None) -> str:
    """Name a target in messages: its Hub name or folder, else its class."""
    if target is None or isinstance(target, str):
        return repr(target)
    config = target.config if isinstance(target, PreTrainedModel) else target
    return repr(config.name_or_path) if config.name_or_path else type(target).__name__


def _rope_theta_of(text_config: PreTrainedConfig, default: float) -> float:
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}
    return rope.get("rope_theta", getattr(text_config, "rope_theta", None)) or default


def _token_ids(config: Any) -> list[int]:
    """The pad, eos and bos ids of a model or generation configuration."""
    values = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")]
    return [
        token_id
        for value in values
        if value is not None
        for token_id in (value if isinstance(value, list) else [value])
    ]


__all__ = ["DFlashConfig"]
