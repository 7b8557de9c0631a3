"""
The configuration of a DFlash draft model.

The file travels with every checkpoint, so that it needs transformers but not this package.
"""

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
# Larger than in any model. The limits keep a damaged or hostile file from allocating all memory.
MAX_SIZE, MAX_LAYERS = 2**26, 2**10


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


def check_target_layer_ids(target_layer_ids: list[int], target_num_hidden_layers: int) -> None:
    """
    Refuse layers that the target does not have, and its last layer.

    Args:
        target_layer_ids (`list[int]`): The layers that the draft reads, counted from 0.
        target_num_hidden_layers (`int`): The number of decoder layers of the target.

    Raises:
        ValueError: An id is out of range or is that of the last layer.
    """
    ids, depth = target_layer_ids, target_num_hidden_layers
    if max(ids) >= depth:
        raise ValueError(
            f"target_layer_ids={ids} must be integers from 0 to {depth - 1}, because the target has "
            f"target_num_hidden_layers={depth}. Choose other layers."
        )
    if depth - 1 in ids:
        raise ValueError(
            f"target_layer_ids={ids} contains the last layer, {depth - 1}. transformers returns its state after the "
            "final norm and serving engines return it before, so that a draft trained with one would be rarely "
            "accepted with the other. Choose an earlier layer."
        )


def choose_mask_token_id(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, excluded_token_ids: set[int] | None = None
) -> tuple[int, str]:
    """
    Choose the token whose embedding fills the slots to be drafted.

    The first choice is the tokenizer's mask token, the second an embedding row that no token uses, and the third the
    first special token other than pad, eos and bos.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        num_embeddings (`int`):
            The number of rows of the target's embedding matrix, padding included.
        excluded_token_ids (`set[int]`, *optional*):
            Further ids that must not be chosen, for example the eos ids of a generation configuration.

    Returns:
        `tuple[int, str]`: the id, and a phrase that says why it was chosen.

    Raises:
        ValueError: No token is suitable. The message says to pass `mask_token_id`.
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
        f"The tokenizer {tokenizer.name_or_path!r} offers no mask token: it defines none, its vocabulary fills all "
        f"{num_embeddings} embedding rows, and every special token is pad, eos or bos. "
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
        mask_token_id (`int`, defaults to 151669): Token whose embedding fills the slots to be drafted.
        num_target_layers (`int`, *optional*): Number of target layers that the draft reads. It follows from
            `target_layer_ids`.
        target_hidden_size (`int`, *optional*): Width of the target, equal to `hidden_size`.
        target_num_hidden_layers (`int`, *optional*, defaults to 36): Number of decoder layers of the target. It is
            `None` until the draft is tied if another producer's checkpoint does not contain it.
        target_layer_ids (`list[int]`, *optional*): The target layers that the draft reads, counted from 0. By default
            they are evenly spread.
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
        """Return the fields of a draft's configuration that a caller may set."""
        return {*cls.__dataclass_fields__, "rope_theta"} - PreTrainedConfig.__dataclass_fields__.keys()

    @property
    def rope_theta(self) -> float:
        """`float`: base of the rotary angles in `rope_parameters`."""
        return (self.rope_parameters or {}).get("rope_theta", self.default_theta)

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
    def _translated(cls, raw: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Translate the values of a file. Fields move from `kwargs` to the reader, which checks the two together."""
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
        Derive a configuration from a target and log the choices.

        Args:
            target (`str`, `PreTrainedConfig` or `PreTrainedModel`):
                Hub name or folder, the live target or its configuration. Of a multimodal target the text
                configuration is used.
            num_hidden_layers (`int`, defaults to 5):
                The number of draft layers.
            num_target_layers (`int`, defaults to 5):
                The number of target layers to read, fewer if the target is shallower. `target_layer_ids=` overrides
                it.
            block_size (`int`, defaults to 16):
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
            ValueError: The target has no text decoder, or no mask token can be chosen.
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
                    f"({type(text).__name__}). DFlash needs a decoder-only language model. Use one as the target."
                )
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"The target {describe_target(target)} is an encoder-decoder model. DFlash needs a decoder-only "
                "language model. Use one as the target."
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
                        "The target was built in memory and names no tokenizer, from which the mask token is chosen. "
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
        """Raise a `ValueError` for a value of a wrong type, before transformers raises a class of its own."""
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
                raise ValueError(f"{name}={value!r} must be {names}. Change the value.")
            if int in kinds and float not in kinds and not isinstance(value, bool):
                minimum = 0 if name.endswith("_token_id") else 1
                maximum = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
                if isinstance(value, int) and not minimum <= value <= maximum:
                    rule = f"at least {minimum}" if value < minimum else f"at most {maximum}"
                    raise ValueError(f"{name}={value!r} must be {rule}. Change the value.")

    def _merge_rope(self, rope_parameters: dict[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Put `rope_theta` into `rope_parameters`, and refuse two values that differ."""
        rope = dict(rope_parameters or kwargs.pop("rope_scaling", None) or {})
        kwargs.pop("rope_scaling", None)
        theta = kwargs.pop("rope_theta", None)
        if theta is not None and rope.setdefault("rope_theta", theta) != theta:
            raise ValueError(
                f"rope_theta={theta} and rope_parameters['rope_theta']={rope['rope_theta']} differ, but both are the "
                "base of the rotary angles. Pass one of them."
            )
        factor = kwargs.pop("partial_rotary_factor", None) or rope.get("partial_rotary_factor")
        if factor not in (None, 1, 1.0):
            raise ValueError(
                f"partial_rotary_factor={factor} is not supported, because the draft rotates whole heads. Remove it."
            )
        rope.pop("partial_rotary_factor", None)
        rope.setdefault("rope_theta", self.default_theta)
        rope.setdefault("rope_type", rope.pop("type", "default"))
        if rope["rope_type"] not in ROPE_TYPES:
            raise ValueError(
                f"rope_parameters['rope_type']={rope['rope_type']!r} must be one of {ROPE_TYPES}. Choose one of them."
            )
        for name, value in rope.items():
            numbers = value if isinstance(value, list) and name != "rope_theta" else [value]
            if name != "rope_type" and not all(isinstance(number, int | float | None) for number in numbers):
                raise ValueError(
                    f"rope_parameters[{name!r}]={value!r} must be a number or a list of numbers. Change the value."
                )
        if not (rope["rope_theta"] or 0) > 0:
            raise ValueError(f"rope_theta={rope['rope_theta']} must be positive. Change the value.")
        return rope

    def _check_values(self) -> None:
        """Raise a `ValueError` for values that are out of range or contradict each other."""
        ids, depth = self.target_layer_ids or [], self.target_num_hidden_layers
        layer_types = self.layer_types or []
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size} must be at least 2, for the anchor and one slot to draft. Increase it."
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
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ValueError(
                f"target_layer_ids={ids} must be a list of integers, the layers of the target counted from 0. Change "
                "the value."
            )
        if depth is not None:
            check_target_layer_ids(ids, depth)
        if len(set(ids)) != len(ids):
            raise ValueError(f"target_layer_ids={ids} must be distinct. Remove the repeated ids.")
        if self.num_target_layers != len(ids):
            raise ValueError(
                f"num_target_layers={self.num_target_layers} must equal the number of target_layer_ids={ids}. Leave "
                "num_target_layers out."
            )
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"target_hidden_size={self.target_hidden_size} must equal hidden_size={self.hidden_size}, because the "
                "draft uses the target's embedding and head. Set both to the width of the target."
            )
        if len(layer_types) != self.num_hidden_layers or any(kind not in LAYER_TYPES for kind in layer_types):
            raise ValueError(
                f"layer_types={layer_types} must hold one of {LAYER_TYPES} for each of the "
                f"num_hidden_layers={self.num_hidden_layers} layers. Change one of them."
            )
        for name, checksum in (self.target_tensor_checksums or {}).items():
            if not isinstance(checksum, str) or not re.fullmatch(r"b?float\d+ \d+x\d+ [0-9a-f]{64}", checksum):
                raise ValueError(
                    f"target_tensor_checksums[{name!r}]={checksum!r} must be dtype, shape and SHA-256, as in "
                    "'bfloat16 49152x576 <64 hex digits>'. Use the configuration as it was saved."
                )
        if "sliding_attention" in layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"sliding_window={self.sliding_window} must be at least block_size={self.block_size} when a layer is "
                "'sliding_attention'. Increase it."
            )


def describe_target(target: str | PreTrainedConfig | PreTrainedModel | None) -> str:
    """Return the name of a target for messages: its Hub name or folder, or else its class."""
    if target is None or isinstance(target, str):
        return repr(target)
    config = target.config if isinstance(target, PreTrainedModel) else target
    return repr(config.name_or_path) if config.name_or_path else type(target).__name__


def _rope_theta_of(text_config: PreTrainedConfig, default: float) -> float:
    """Find the base of the rotary angles of a target's full-attention layers."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}
    return rope.get("rope_theta", getattr(text_config, "rope_theta", None)) or default


def _token_ids(config: Any) -> list[int]:
    """Return the pad, eos and bos ids of a model or generation configuration."""
    values = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id", "bos_token_id")]
    return [
        token_id
        for value in values
        if value is not None
        for token_id in (value if isinstance(value, list) else [value])
    ]


__all__ = ["DFlashConfig"]
