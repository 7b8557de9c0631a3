"""Who can load a draft's folder, and why not: the rules of each reader, applied to config.json and the tensors."""

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

READERS = {
    "dflash_hf": "this package",
    "transformers": "transformers alone",
    "vllm": "vLLM 0.32",
    "sglang": "SGLang",
    "dflash": "dflash 0.1.0",
    "speculators": "speculators 0.9",
}


@dataclass(frozen=True)
class Verdict:
    """
    What one reader makes of a folder.

    Args:
        reader (`str`): a key of `READERS`.
        can_load (`bool`): whether it loads the draft and computes what the draft's producer meant.
        reasons (`tuple[str, ...]`): why not, or under which condition.
    """

    reader: str
    can_load: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointReport:
    """
    What was found in a folder.

    Args:
        layout (`str` or `None`): as [`layout_of`] says, `None` if the folder is no DFlash draft.
        config (`DFlashConfig` or `None`): the draft's configuration, if it can be read.
        num_parameters (`int`): values in the tensors of the draft.
        verdicts (`tuple[Verdict, ...]`): one a reader, in the order of `READERS`.
    """

    layout: str | None
    config: DFlashConfig | None
    num_parameters: int
    verdicts: tuple[Verdict, ...]


def check_checkpoint(
    name_or_path: str | os.PathLike[str], *, target: str | PreTrainedModel | None = None, **kwargs: Any
) -> CheckpointReport:
    """
    Find out who can load a draft. Loads its weights here; the rules of the other readers are known, not run.

    Args:
        name_or_path (`str`): folder or Hub name.
        target (`str` or `PreTrainedModel`, *optional*): also tie the draft to it, which compares the pair.
        **kwargs: fields of the configuration that the caller insists on, and what finds the draft on the Hub.

    Returns:
        [`CheckpointReport`]

    Raises:
        OSError: there is no such folder or repository, or the target cannot be read.
    """
    folder = checkpoint_folder(name_or_path, **{name: kwargs[name] for name in DRAFT_LOOK_UP if name in kwargs})
    draft, error = None, None
    try:
        draft = DFlashDraftModel.from_pretrained(name_or_path, target=target or False, **kwargs)
        if isinstance(target, str):
            draft.get_output_embeddings()  # ties
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
        refusals = tuple(rule(files)) or tuple(_weights_refuse(files, reader))
        verdicts.append(Verdict(reader, not refusals, refusals or tuple(_conditions(files, reader))))
    size = sum(torch.Size(shape).numel() for _, shape in shapes.values())
    return CheckpointReport(layout, files.config, size, tuple(verdicts))


@dataclass(frozen=True)
class _Files:
    """A folder as readers see it."""

    folder: Path
    name: str
    layout: str
    raw: Mapping[str, Any]
    tensors: frozenset[str]
    config: DFlashConfig | None

    @property
    def nested(self) -> Mapping[str, Any]:
        return self.raw.get("dflash_config") or {}

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Where the Qwen3 keys stand."""
        return self.raw.get("transformer_layer_config") or self.raw

    @property
    def causal_by_type(self) -> dict[str, bool]:
        """Layer type to whether its slots see only the slots before them."""
        if self.config is None:
            return {}
        return {kind: self.config.in_block_causal(index) for index, kind in enumerate(self.config.layer_types or [])}


def _notes(draft: DFlashDraftModel | None) -> Iterator[str]:
    if draft is None:
        return
    if draft.dtype == torch.float16:
        yield "float16 overflows in a draft: load it with dtype=torch.bfloat16"
    if draft.config.target_tensor_checksums:
        yield "carries tensors of the target, compared when it is tied (--target)"
    if draft.config.target_num_hidden_layers is None:
        yield "does not say how deep its target is, which is learnt when it is tied (--target)"
    if Path(draft.config.target_name_or_path or "").is_absolute():
        yield (
            f"names its target by a local path, {draft.config.target_name_or_path}: others will not find it; convert "
            "it with --set target_name_or_path=org/model"
        )


def _weights_refuse(files: _Files, reader: str) -> Iterator[str]:
    """Tensor names: some readers know more than the reference's."""
    if files.config is None:
        yield "not judged"
        return
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
    return f"dflash-hf convert {files.name} NEW-FOLDER --layout {layout}"


def _transformers_refuses(files: _Files) -> Iterator[str]:
    if files.layout == "muse":
        if files.sizes.get("attention_bias"):
            yield "its assistant class has no attention biases"
        return
    code = files.raw.get("auto_map") or {}
    sources = ("configuration_dflash.py", "modeling_dflash.py")
    if code.get("AutoModel") != "modeling_dflash.DFlashDraftModel":
        yield f"has no class for it; {_converts(files, 'native')} writes one that travels with the weights"
    elif not all((files.folder / name).is_file() for name in sources):
        yield f"config.json names {' and '.join(sources)}, which are not both in the folder"


def _servers_refuse(files: _Files) -> Iterator[str]:
    """What vLLM and SGLang have in common."""
    config = files.config
    if files.sizes.get("hidden_act", "silu") != "silu":
        yield f"runs SiLU alone, not hidden_act={files.sizes['hidden_act']}"
    if files.layout == "native":
        yield f"has no model type 'dflash': {_converts(files, 'serving')}"
    is_sliding = config is not None and "sliding_attention" in (config.layer_types or [])
    if files.layout == "serving" and is_sliding and not files.raw.get("use_sliding_window"):
        yield "drops sliding_window where use_sliding_window is not true"


def _vllm_refuses(files: _Files) -> Iterator[str]:
    yield from _servers_refuse(files)
    name = next(iter(files.raw.get("architectures") or [""]))
    if files.layout == "serving" and name != "DFlashDraftModel":
        yield f"knows DFlashDraftModel, not architectures={[name]}"
    if files.layout == "serving" and not files.nested.get("target_layer_ids"):
        yield "reads target_layer_ids from dflash_config alone, and taps layers of its own choice without"
    if files.config is not None and files.config.input_embedding_scale not in (None, 1.0):
        yield (
            f"embeds the slots without the target's factor, {files.config.input_embedding_scale:g}, so that little "
            "would be accepted"
        )
    if files.layout == "speculators" and len(set(files.causal_by_type.values())) > 1:
        yield f"takes one causality for all layers from this layout: {_converts(files, 'serving')}"
    if files.layout == "speculators" and files.config is not None:
        inner, causal = files.sizes, not files.raw.get("sliding_window_non_causal", True)
        served = inner.get("is_causal", causal)
        if {served} != set(files.causal_by_type.values()) and len(set(files.causal_by_type.values())) == 1:
            yield (
                f"would serve every layer with causal={served}, from sliding_window_non_causal: "
                f"{_converts(files, 'speculators')} says it in is_causal, too"
            )


def _sglang_refuses(files: _Files) -> Iterator[str]:
    yield from _servers_refuse(files)
    if files.layout == "speculators":
        yield f"does not read this layout: {_converts(files, 'serving')}"
        return
    name = next(iter(files.raw.get("architectures") or [""]))
    if name not in ("DFlashDraftModel", "MuseGlimmerAssistantModel") and files.layout != "native":
        yield f"knows DFlashDraftModel, not architectures={[name]}"
    depth = files.nested.get("num_target_layers", files.raw.get("num_target_layers"))
    ids = (files.config.target_layer_ids if files.config else None) or [0]
    if depth is not None and max(ids) >= depth and files.layout != "native":
        yield f"takes num_target_layers={depth} as the target's depth, and layer {max(ids)} is beyond it"


def _reference_refuses(files: _Files) -> Iterator[str]:
    if files.layout in ("speculators", "muse"):
        yield f"does not read this layout: {_converts(files, 'serving')}"
        return
    if files.raw.get("num_target_layers") is None:
        yield "needs num_target_layers"
    if "dflash_config" in files.raw and files.raw["dflash_config"] is None:
        yield "fails on dflash_config: null"
    config = files.config
    scale = None if config is None else config.input_embedding_scale
    if scale is not None and scale != files.nested.get("input_embedding_scale", 1.0):
        yield f"needs dflash_config.input_embedding_scale={scale:g}: {_converts(files, 'serving')}"
    if files.causal_by_type:
        by_name = files.raw.get("is_causal")
        served = {kind: kind == "sliding_attention" if by_name is None else by_name for kind in files.causal_by_type}
        if served != files.causal_by_type:
            yield f"does not read dflash_config.causal: {_converts(files, 'serving')} writes is_causal"
    is_sliding = config is not None and "sliding_attention" in (config.layer_types or [])
    if is_sliding and not files.raw.get("use_sliding_window"):
        yield "drops sliding_window in silence where use_sliding_window is not true"


def _speculators_refuses(files: _Files) -> Iterator[str]:
    if files.layout != "speculators":
        yield f"does not read this layout: {_converts(files, 'speculators')}"
    elif files.causal_by_type.get("full_attention"):
        yield "runs full layers without causality"


def _conditions(files: _Files, reader: str) -> Iterator[str]:
    """What to know about a reader that can load the folder."""
    config = files.config
    if config is None:
        return
    if reader == "transformers" and files.layout == "native":
        yield "with trust_remote_code=True"
    is_mixed = len(set(config.layer_types or [])) > 1
    if reader == "vllm":
        if "dflash" not in files.name.lower():
            yield 'the path does not contain "dflash": give "method": "dflash" in --speculative-config'
        if is_mixed:
            yield "layers of both types need its second model runner (on a GPU)"
        if files.layout == "muse" and not files.nested.get("target_layer_ids"):
            yield "reads the layer ids of this layout in its second model runner alone (on a GPU)"
        yield f"num_speculative_tokens must be at most {config.block_size - 1}"
        if config.num_hidden_layers > 1:
            yield "on a CPU it norms the context's keys of all layers with the first one's weight: fewer are accepted"
    if reader == "sglang":
        yield "on a GPU"
        if config.dtype == torch.float32:
            yield "runs float32 files in float16, in which drafts overflow: give --dtype bfloat16"
    if reader == "dflash" and config.dtype == torch.float32:
        yield "does not cast: load it with dtype= of the target"
    if reader == "speculators" and "sliding_attention" in (config.layer_types or []):
        yield "measures windows from the anchor, up to a block longer"
    if reader == "transformers" and files.layout == "muse" and "sliding_attention" in (config.layer_types or []):
        yield "in its own loop"
