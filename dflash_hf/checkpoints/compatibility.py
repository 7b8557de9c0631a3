"""
Finds out which software can load a draft, and why other software cannot.

The rules of each reader are applied to config.json and to the names of the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.configuration_dflash import DFlashConfig
from ..model.modeling_dflash import DRAFT_LOOK_UP, DFlashDraftModel
from .io import checkpoint_folder, read_json, tensor_shapes
from .read_layouts import MODULE_NAMES, TARGET_TENSORS, layout_of, native_tensor_name
from .vllm_plugin import NativeDraftConfig
from .write_layouts import is_dflash2, is_dspark

READERS = {
    "dflash_hf": "this package",
    "transformers": "transformers alone",
    "vllm": "vLLM 0.32",
    "sglang": "SGLang",
    "dflash": "dflash 0.1.0",
    "speculators": "speculators 0.9",
}


# The classes of vLLM for drafts with layers of Qwen3.
VLLM_CLASSES = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel")


@dataclass(frozen=True)
class Verdict:
    """
    Whether one reader can load a draft.

    Args:
        reader (`str`): A key of `READERS`.
        can_load (`bool`): Whether it loads the draft and computes the same as the draft's producer.
        reasons (`tuple[str, ...]`): Why it cannot, or under which conditions it can.
    """

    reader: str
    can_load: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointReport:
    """
    The layout of a draft and the verdict on each reader.

    Args:
        layout (`str` or `None`): The layout as in [`layout_of`], or `None` if the folder is no DFlash draft.
        config (`DFlashConfig` or `None`): The draft's configuration, if it can be read.
        num_parameters (`int`): The number of values in the tensors of the draft.
        verdicts (`tuple[Verdict, ...]`): One verdict for each reader, in the order of `READERS`.
    """

    layout: str | None
    config: DFlashConfig | None
    num_parameters: int
    verdicts: tuple[Verdict, ...]


def check_checkpoint(
    name_or_path: str | os.PathLike[str], *, target: str | PreTrainedModel | None = None, **kwargs: Any
) -> CheckpointReport:
    """
    Find out which software can load a draft.

    The draft is loaded with this package. The other readers are not run: their rules are applied to the files.

    Args:
        name_or_path (`str`): Folder or Hub name.
        target (`str` or `PreTrainedModel`, *optional*): The target, to which the draft is then tied and compared.
        **kwargs: Fields of the configuration that override the file, and arguments that find the draft on the Hub.

    Returns:
        [`CheckpointReport`]

    Raises:
        OSError: There is no such folder or repository, or the target cannot be read.
    """
    folder = checkpoint_folder(name_or_path, **{name: kwargs[name] for name in DRAFT_LOOK_UP if name in kwargs})
    draft, error = None, None
    try:
        draft = DFlashDraftModel.from_pretrained(name_or_path, target=target or False, **kwargs)
        if isinstance(target, str):
            draft.get_output_embeddings()  # This ties the draft.
    except (OSError, ValueError, NotImplementedError) as reason:
        error = " ".join(str(reason).split())
    ours = Verdict("dflash_hf", error is None, (error,) if error else tuple(_notes(draft)))
    try:
        raw, shapes = read_json(folder / "config.json"), tensor_shapes(folder)
        layout = layout_of(raw)
    except (OSError, ValueError):
        others = tuple(Verdict(reader, False, ("not judged",)) for reader in READERS if reader != "dflash_hf")
        return CheckpointReport(None, None, 0, (ours, *others))
    files = _Files(folder, str(name_or_path), layout, raw, frozenset(shapes), draft.config if draft else None)
    rules: dict[str, Callable[[_Files], Iterator[str]]] = {
        "transformers": _transformers_refuses,
        "vllm": _vllm_refuses,
        "sglang": _sglang_refuses,
        "dflash": _reference_refuses,
        "speculators": _speculators_refuses,
    }
    verdicts = [ours]
    for reader, rule in rules.items():
        refusals: tuple[str, ...] = ("not judged",)  # The rules rely on a configuration that this package can read.
        if files.config is not None:
            refusals = tuple(rule(files)) or tuple(_weights_refuse(files, reader))
        verdicts.append(Verdict(reader, not refusals, refusals or tuple(_conditions(files, reader))))
    size = sum(torch.Size(shape).numel() for _, shape in shapes.values())
    return CheckpointReport(layout, files.config, size, tuple(verdicts))


@dataclass(frozen=True)
class _Files:
    """The parts of a folder to which the rules of readers apply."""

    folder: Path
    name: str
    layout: str
    raw: Mapping[str, Any]
    tensors: frozenset[str]
    config: DFlashConfig | None

    @property
    def nested(self) -> Mapping[str, Any]:
        """`Mapping`: the keys in `dflash_config`."""
        return self.raw.get("dflash_config") or {}

    @property
    def sizes(self) -> Mapping[str, Any]:
        """`Mapping`: the object that contains the keys of Qwen3."""
        return self.raw.get("transformer_layer_config") or self.raw

    @property
    def causal_by_type(self) -> dict[str, bool]:
        """`dict[str, bool]`: for each layer type whether a slot sees only itself and the slots before it."""
        if self.config is None:
            return {}
        return {kind: self.config.in_block_causal(index) for index, kind in enumerate(self.config.layer_types or [])}


def _notes(draft: DFlashDraftModel | None) -> Iterator[str]:
    """Yield what a user of this package should know about the draft."""
    if draft is None:
        return
    if draft.dtype == torch.float16:
        yield "float16 overflows in a draft, so load it with dtype=torch.bfloat16"
    if draft.config.target_tensor_checksums:
        yield "contains tensors of the target, which are compared when the draft is tied (--target)"
    if draft.config.target_num_hidden_layers is None:
        yield "lacks the depth of its target, which is filled in when the draft is tied (--target)"
    if Path(draft.config.target_name_or_path or "").is_absolute():
        yield (
            f"names its target by a local path, {draft.config.target_name_or_path}, which others will not find, so "
            "convert it with --set target_name_or_path=org/model"
        )


def _weights_refuse(files: _Files, reader: str) -> Iterator[str]:
    """Yield why a reader refuses the tensor names. Some readers know more names than the reference implementation."""
    known = {"encoder.fc", "encoder.output_norm_enc"} if reader in ("transformers", "vllm", "sglang") else set()
    foreign = sorted(
        name
        for name in files.tensors
        if name.rpartition(".")[0] in MODULE_NAMES.keys() - known and native_tensor_name(name) != name
    )
    unwanted = {"vllm": {"logit_head.weight"}, "transformers": set(TARGET_TENSORS)}.get(reader, set())
    foreign += sorted(unwanted & files.tensors)
    if foreign:
        yield f"does not know the tensor names {', '.join(foreign)}"


def _converts(files: _Files, layout: str) -> str:
    """Return the command that converts the draft into a layout."""
    return f"dflash-hf convert {files.name} NEW-FOLDER --layout {layout}"


def _transformers_refuses(files: _Files) -> Iterator[str]:
    """Yield why transformers without this package refuses the draft."""
    if files.layout == "muse":
        if files.sizes.get("attention_bias"):
            yield "its assistant class has no attention biases"
        return
    code = files.raw.get("auto_map") or {}
    sources = ("configuration_dflash.py", "modeling_dflash.py")
    if code.get("AutoModel") != "modeling_dflash.DFlashDraftModel":
        yield f"has no class for this layout, but {_converts(files, 'native')} adds one to the weights"
    elif not all((files.folder / name).is_file() for name in sources):
        yield f"does not find {' and '.join(sources)}, which config.json names"


def _servers_refuse(files: _Files) -> Iterator[str]:
    """Yield why both vLLM and SGLang refuse the draft."""
    config = files.config
    if files.sizes.get("hidden_act", "silu") != "silu":
        yield f"supports only SiLU, not hidden_act={files.sizes['hidden_act']}"
    is_sliding = config is not None and "sliding_attention" in (config.layer_types or [])
    if files.layout == "serving" and is_sliding and not files.raw.get("use_sliding_window"):
        yield "ignores sliding_window unless use_sliding_window is true"


def _vllm_refuses(files: _Files) -> Iterator[str]:
    """Yield why vLLM refuses the draft."""
    yield from _servers_refuse(files)
    if files.layout == "native":
        try:
            NativeDraftConfig.from_dict(dict(files.raw))
        except ValueError as error:
            yield f"cannot translate config.json ({error}), so run {_converts(files, 'serving')}"
    name = next(iter(files.raw.get("architectures") or [""]))
    if files.layout == "serving" and name not in VLLM_CLASSES:
        yield f"knows {', '.join(VLLM_CLASSES)} and not architectures={[name]}, so run {_converts(files, 'serving')}"
    yield from _vllm_refuses_parts(files)
    if files.layout == "serving" and not files.nested.get("target_layer_ids"):
        yield "reads target_layer_ids only from dflash_config, and chooses other layers if they are missing"
    scale = None if files.config is None else files.config.input_embedding_scale
    if scale not in (None, 1.0) and name != "DFlash2DraftModel":
        yield (f"embeds the slots without the target's factor, {scale:g}, so that few tokens would be accepted")
    if files.layout == "speculators" and len(set(files.causal_by_type.values())) > 1:
        yield f"reads one causality for all layers from this layout, so run {_converts(files, 'serving')}"
    if files.layout == "speculators" and files.config is not None:
        inner, causal = files.sizes, not files.raw.get("sliding_window_non_causal", True)
        served = inner.get("is_causal", causal)
        if {served} != set(files.causal_by_type.values()) and len(set(files.causal_by_type.values())) == 1:
            yield (
                f"would run every layer with causal={served} because of sliding_window_non_causal, but "
                f"{_converts(files, 'speculators')} adds is_causal"
            )


def _vllm_refuses_parts(files: _Files) -> Iterator[str]:
    """Yield which parts of the draft vLLM does not run, or does not find in this layout."""
    config = files.config
    if config is None:
        return
    if config.markov_head_type not in (None, "vanilla"):
        yield f"runs the vanilla Markov head alone, not markov_head_type={config.markov_head_type!r}"
    if is_dflash2(config) and is_dspark(config):
        yield "has no class for a draft with parts of DFlash 2 and of DSpark"
    if files.layout == "speculators" and config.sample_from_anchor and not is_dspark(config):
        yield f"refuses sample_from_anchor in this class, so run {_converts(files, 'serving')}"
    if files.layout == "native":
        unread = {
            "selector_factored": config.selector_factored,
            "conv_kernel_size without selector_rank": is_dflash2(config) and config.selector_rank is None,
            "selector_rank without conv_kernel_size": is_dflash2(config) and config.conv_kernel_size is None,
            "draft_vocab_size": config.draft_vocab_size is not None,
            "learned_mask_embedding": config.learned_mask_embedding,
            "sample_from_anchor without a Markov head": config.sample_from_anchor and config.markov_rank is None,
        }
        if parts := [name for name, is_set in unread.items() if is_set]:
            yield f"does not find the tensors of {', '.join(parts)}, so run {_converts(files, 'serving')}"


def _sglang_refuses(files: _Files) -> Iterator[str]:
    """Yield why SGLang refuses the draft."""
    yield from _servers_refuse(files)
    if files.layout == "native":
        yield f"has no model type 'dflash', so run {_converts(files, 'serving')}"
    if files.layout == "speculators":
        yield f"does not read this layout, so run {_converts(files, 'serving')}"
        return
    name = next(iter(files.raw.get("architectures") or [""]))
    if name not in ("DFlashDraftModel", "MuseGlimmerAssistantModel") and files.layout != "native":
        yield f"knows only DFlashDraftModel, not architectures={[name]}"
    if files.config is not None and (files.config.sample_from_anchor or files.config.draft_vocab_size is not None):
        yield "runs neither slots that start at the anchor nor reduced vocabularies in this class"
    if files.config is not None and (files.config.learned_mask_embedding or files.config.attention_sinks):
        yield "reads neither mask vectors nor attention sinks"
    depth = files.nested.get("num_target_layers", files.raw.get("num_target_layers"))
    ids = (files.config.target_layer_ids if files.config else None) or [0]
    if depth is not None and max(ids) >= depth and files.layout != "native":
        yield f"takes num_target_layers={depth} for the target's depth, which layer {max(ids)} exceeds"


def _reference_refuses(files: _Files) -> Iterator[str]:
    """Yield why the reference implementation refuses the draft."""
    if files.layout in ("speculators", "muse"):
        yield f"does not read this layout, so run {_converts(files, 'serving')}"
        return
    config = files.config
    if config is not None and (is_dspark(config) or config.sample_from_anchor):
        yield "has no DSpark"
    if config is not None and (config.draft_vocab_size is not None or config.learned_mask_embedding):
        yield "reads neither reduced vocabularies nor mask vectors"
    if config is not None and config.attention_sinks:
        yield "has no attention sinks"
    if config is not None and config.selector_factored:
        yield f"reads a selector as tables, so run {_converts(files, 'serving')}"
    if files.raw.get("num_target_layers") is None:
        yield "needs num_target_layers"
    if "dflash_config" in files.raw and files.raw["dflash_config"] is None:
        yield "fails on dflash_config: null"
    scale = None if config is None else config.input_embedding_scale
    if scale is not None and scale != files.nested.get("input_embedding_scale", 1.0):
        yield f"needs dflash_config.input_embedding_scale={scale:g}, so run {_converts(files, 'serving')}"
    if files.causal_by_type:
        by_name = files.raw.get("is_causal")
        served = {kind: kind == "sliding_attention" if by_name is None else by_name for kind in files.causal_by_type}
        if served != files.causal_by_type:
            yield f"does not read dflash_config.causal, but {_converts(files, 'serving')} adds is_causal"
    is_sliding = config is not None and "sliding_attention" in (config.layer_types or [])
    if is_sliding and not files.raw.get("use_sliding_window"):
        yield "ignores sliding_window without a warning unless use_sliding_window is true"


def _speculators_refuses(files: _Files) -> Iterator[str]:
    """Yield why speculators refuses the draft."""
    if files.layout != "speculators":
        yield f"does not read this layout, so run {_converts(files, 'speculators')}"
    elif files.causal_by_type.get("full_attention"):
        yield "runs full layers without causality inside the block"
    elif files.config is not None and files.config.attention_sinks:
        yield "has no attention sinks"


def _conditions(files: _Files, reader: str) -> Iterator[str]:
    """Yield the conditions under which a reader can load the draft."""
    config = files.config
    if config is None:
        return
    if reader == "transformers" and files.layout == "native":
        yield "needs trust_remote_code=True"
    is_mixed = len(set(config.layer_types or [])) > 1
    if reader == "transformers" and (config.selector_rank is not None or config.markov_rank is not None):
        yield "proposes without the selector or Markov head in its own loop, so that it accepts less than this package"
    if reader == "vllm":
        if is_dflash2(config) or is_dspark(config):
            yield "needs its second model runner (on a GPU) for DFlash 2 and DSpark"
        if is_dspark(config):
            yield 'needs "method": "dspark" in --speculative-config'
        if files.layout == "native":
            yield (
                "needs this package in its environment (pip install --no-deps), because it has no model type 'dflash' "
                f"of its own, or else {_converts(files, 'serving')}"
            )
        if "dflash" not in files.name.lower() and not is_dspark(config):
            yield 'needs "method": "dflash" in --speculative-config, because the path does not contain "dflash"'
        if is_mixed:
            yield "needs its second model runner (on a GPU) for layers of both types"
        if files.layout == "muse" and not files.nested.get("target_layer_ids"):
            yield "reads the layer ids of this layout only in its second model runner (on a GPU)"
        yield f"needs num_speculative_tokens of at most {config.tokens_per_block - 1}"
        if config.num_hidden_layers > 1:
            yield "accepts fewer tokens on a CPU, where it normalises the context keys of all layers as in the first"
    if reader == "sglang":
        yield "needs a GPU"
        if config.dtype == torch.float32:
            yield "runs float32 files in float16, in which drafts overflow, so pass --dtype bfloat16"
    if reader == "dflash" and config.dtype == torch.float32:
        yield "does not cast, so load it with dtype= of the target"
    if reader == "speculators" and "sliding_attention" in (config.layer_types or []):
        yield "measures windows from the anchor, so that they are longer by up to a block"
    if reader == "transformers" and files.layout == "muse" and "sliding_attention" in (config.layer_types or []):
        yield "needs its own decoding loop"
