"""Reads the checkpoints of all known DFlash producers, and writes the layouts that other software reads."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..files import replace_folder
from ..model.configuration_dflash import DFlashConfig, describe_target, num_embedding_rows
from ..model.modeling_dflash import (
    TARGET_LOOK_UP,
    DFlashBody,
    DFlashDraftModel,
    plain_weight,
    tensor_checksum,
    weights_error,
)
from ..model.remote_code import local_draft
from . import LAYOUTS
from .read_layouts import (
    REDUNDANT_TENSORS,
    TARGET_TENSORS,
    UNSUPPORTED_PARTS,
    native_tensor_name,
    native_values,
)
from .write_layouts import is_dflash2, is_served_as_dspark, layout_config, layout_tensor_name

logger = logging.get_logger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = "dflash_draft_model.safetensors"  # the name that one producer gives to the only file
MASK_FILE = "mask_embedding.pt"
# Only these files of a repository are downloaded.
NEEDED_FILES = ("config.json", "*.safetensors", INDEX, MASK_FILE)
# The fields that add a part to a draft, and the names of that part's tensors.
PARTS = {
    "conv_kernel_size": ("attention_conv", "mlp_conv"),
    "selector_rank": ("candidate_selector",),
    "markov_rank": ("markov_head",),
    "enable_confidence_head": ("confidence_head",),
    "learned_mask_embedding": ("mask_embedding",),
    "attention_sinks": ("attention_sink_bias",),
    "draft_vocab_size": ("d2t",),
}


def checkpoint_folder(name_or_path: str | os.PathLike[str], **hub_kwargs: Any) -> Path:
    """
    Return the folder of a checkpoint, which is downloaded from the Hub if it is not local.

    Args:
        name_or_path (`str`): Folder or Hub name.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Returns:
        `Path`

    Raises:
        OSError: There is no such folder and no such repository, or the Hub cannot be reached.
    """
    subfolder = hub_kwargs.pop("subfolder", None) or ""
    folder = Path(name_or_path)
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise OSError(f"{str(folder)!r} is not a folder. Give the folder that contains config.json and {WEIGHTS}.")
        patterns = [os.path.join(subfolder, name) for name in NEEDED_FILES]
        deeper = os.path.join(subfolder, "*/*")  # a pattern's asterisk also stands for slashes
        try:
            folder = Path(
                snapshot_download(str(name_or_path), allow_patterns=patterns, ignore_patterns=deeper, **hub_kwargs)
            )
        except (OSError, HFValidationError) as error:
            raise OSError(
                f"There is no folder {str(name_or_path)!r}, and the Hub gives no draft of this name: {error} Give the "
                "folder or the Hub name of a draft."
            ) from error
    return folder / subfolder


def read_json(path: Path) -> dict[str, Any]:
    """
    Read a JSON object.

    Args:
        path (`Path`): The file.

    Returns:
        `dict`

    Raises:
        OSError: The file is missing, cannot be read or is not a JSON object. The message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OSError(f"{str(path.parent)!r} holds no {path.name}. Give the folder or Hub name of a draft.") from error
    except OSError as error:
        raise OSError(f"{str(path)!r} cannot be read: {error.strerror}. Give a readable file.") from error
    except (ValueError, RecursionError) as error:
        raise OSError(f"{str(path)!r} is not valid JSON ({error}). Replace the file.") from error
    if not isinstance(value, dict):
        raise OSError(
            f"{str(path)!r} must hold a JSON object, but it holds a {type(value).__name__}. Replace the file."
        )
    return value


def tensor_shapes(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """
    Read the name, file and shape of every tensor of a checkpoint from the headers of its files.

    Args:
        folder (`Path`): The folder with `model.safetensors`, or with shards and their index.

    Returns:
        `dict`: file and shape under the name of each tensor.

    Raises:
        OSError: There are no weights, a file is damaged, or the index names a file outside the folder.
    """
    files = [folder / WEIGHTS]
    if not os.path.lexists(files[0]) and os.path.lexists(folder / OTHER_WEIGHTS):
        files = [folder / OTHER_WEIGHTS]
    if not os.path.lexists(files[0]):
        if not os.path.lexists(folder / INDEX):
            raise OSError(
                f"{str(folder)!r} holds no {WEIGHTS}, and no other format of weights is read. Convert them first."
            )
        weight_map = read_json(folder / INDEX).get("weight_map")
        names = sorted(map(str, set(weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names or any(name != Path(name).name or not name.endswith(".safetensors") for name in names):
            raise OSError(
                f"weight_map in {str(folder / INDEX)!r} must name .safetensors files of the same folder. Nothing was "
                "read; use a checkpoint from a source you trust."
            )
        files = [folder / name for name in names]
    shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (no dict)
        except SafetensorError as error:
            raise OSError(f"The weights {str(file)!r} are damaged ({error}). Download or copy them again.") from error
        except OSError as error:
            raise OSError(f"The weights {str(file)!r} cannot be read: {error}. Give readable files.") from error
        for name, shape in found.items():
            if name in shapes:
                raise OSError(
                    f"The tensor {name!r} is in {shapes[name][0].name!r} and in {file.name!r}, but it must be in one "
                    "file. Remove one of them."
                )
            shapes[name] = (file, shape)
    return shapes


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    """Read one tensor of a safetensors file."""
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def target_facts(target: str | bool | PreTrainedModel | None, **hub_kwargs: Any) -> dict[str, Any]:
    """
    Read from a target what the file of a draft may omit.

    Args:
        target (`str`, `PreTrainedModel`, `bool` or `None`): Hub name, folder or live target, if there is one.
        **hub_kwargs: `token`, `cache_dir`, `local_files_only`.

    Returns:
        `dict`: `vocab_size` (of a live target the number of its embeddings) and `target_num_hidden_layers`. It is
        empty without a target.

    Raises:
        OSError: The target's configuration cannot be read.
    """
    if target is None or isinstance(target, bool):
        return {}
    config = AutoConfig.from_pretrained(target, **hub_kwargs) if isinstance(target, str) else target.config
    text = config.get_text_config(decoder=True)
    facts = {"vocab_size": text.vocab_size, "target_num_hidden_layers": text.num_hidden_layers}
    if not isinstance(target, str):
        facts["vocab_size"] = num_embedding_rows(target.get_input_embeddings()) or text.vocab_size
    return facts


def read_checkpoint(
    name_or_path: str | os.PathLike[str],
    *,
    config: DFlashConfig | None = None,
    given: Mapping[str, Any] | None = None,
    target: str | bool | PreTrainedModel | None = None,
    **hub_kwargs: Any,
) -> tuple[DFlashConfig, dict[str, torch.Tensor] | None]:
    """
    Read the configuration of a draft of any producer, and check names and shapes of its tensors.

    Copies of the target's embedding and head are not read. Their checksums become part of the configuration and are
    compared when the draft is tied.

    Args:
        name_or_path (`str`): Folder or Hub name.
        config ([`DFlashConfig`], *optional*): The configuration, which replaces config.json.
        given (`Mapping`, *optional*): Fields of the configuration that override the file.
        target (`str`, `PreTrainedModel` or `False`, *optional*): The target, which supplies what config.json omits.
        **hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Returns:
        `tuple`: the configuration, and the tensors under the names of our network. The tensors are `None` if the files
        contain exactly those of our network, so that they can be loaded directly.

    Raises:
        OSError: Files are missing or damaged, or the index names a file outside the folder.
        ValueError: The checkpoint is no DFlash draft, values are missing or in conflict, or the tensors are not those
            of the network.
    """
    folder, given = checkpoint_folder(name_or_path, **hub_kwargs), dict(given or {})
    shapes = tensor_shapes(folder)
    _refuse_other_methods(str(name_or_path), shapes)
    new_parts = _new_parts(given, shapes)
    if "selector_rank" in new_parts:
        given.setdefault("selector_factored", True)
    if config is None:
        raw = read_json(folder / "config.json")
        of_target = {name: hub_kwargs[name] for name in TARGET_LOOK_UP if name in hub_kwargs}
        values = native_values(raw, given, lambda: target_facts(target, **of_target))
        config = DFlashConfig(**{**_facts_of_tensors(folder, shapes), **values})

    ours: dict[str, str] = {}
    checksums = dict(config.target_tensor_checksums or {})
    for name in shapes:
        if name in TARGET_TENSORS:
            checksums[name] = tensor_checksum(_read_tensor(shapes[name][0], name))
        elif name in REDUNDANT_TENSORS:
            continue
        elif (native := native_tensor_name(name)) in ours:
            raise ValueError(
                f"{name!r} and {ours[native]!r} in {str(name_or_path)!r} are the same tensor of a draft, which must "
                "be in the files once. Remove one of them."
            )
        else:
            ours[native] = name
    config.target_tensor_checksums = checksums or None
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in DFlashBody(config).state_dict().items()}
    found = {native: shapes[name][1] for native, name in ours.items()}
    added = {}
    if (folder / MASK_FILE).exists() and config.learned_mask_embedding and "mask_embedding" not in found:
        added["mask_embedding"] = read_mask_file(folder / MASK_FILE, config)
    elif found.get("mask_embedding") == (1, config.hidden_size):
        found["mask_embedding"] = (config.hidden_size,)
    fresh = {name for name in wanted.keys() - found.keys() - added.keys() if _part_of(name) in new_parts}
    problems = {
        "missing": wanted.keys() - found.keys() - added.keys() - fresh,
        "unknown": {ours[name] for name in found.keys() - wanted.keys()},
        "of another shape": {
            f"{name} {list(found[name])} instead of {list(wanted[name])}"
            for name in found.keys() & wanted.keys()
            if found[name] != wanted[name]
        },
    }
    if any(problems.values()):
        raise weights_error(name_or_path, problems)
    needs_translation = ours.keys() != shapes.keys() or added or fresh or not (folder / WEIGHTS).exists()
    if "d2t" in found:
        _check_vocabulary(str(name_or_path), config, _read_tensor(shapes["d2t"][0], "d2t"), shapes)
    if not needs_translation or (ours.keys() == shapes.keys() and (folder / INDEX).exists() and not (added or fresh)):
        return config, None
    tensors = {native: _read_tensor(shapes[name][0], name) for native, name in ours.items()}
    if "mask_embedding" in tensors:
        tensors["mask_embedding"] = tensors["mask_embedding"].flatten()
    return config, {**tensors, **added, **_initial_tensors(config, fresh)}


def _part_of(name: str) -> str | None:
    """Return the field that adds the part of a draft to which a tensor belongs."""
    return next((field for field, names in PARTS.items() if any(part in names for part in name.split("."))), None)


def _new_parts(given: Mapping[str, Any], names: Mapping[str, Any]) -> set[str]:
    """Return the fields given by the caller that add a part which the files do not hold."""
    held = {_part_of(native_tensor_name(name)) for name in names}
    return {field for field in PARTS if given.get(field) and field not in held}


def _facts_of_tensors(folder: Path, shapes: Mapping[str, tuple[Path, tuple[int, ...]]]) -> dict[str, Any]:
    """Return the fields that follow from the tensors of a checkpoint where its configuration does not say them."""
    parts = {_part_of(native_tensor_name(name)) for name in shapes}
    facts: dict[str, Any] = {}
    if "attention_sinks" in parts:
        facts["attention_sinks"] = True
    if "learned_mask_embedding" in parts or (folder / MASK_FILE).exists():
        facts["learned_mask_embedding"] = True
    if "d2t" in shapes:
        facts["draft_vocab_size"] = shapes["d2t"][1][0]
    return facts


def read_mask_file(path: Path, config: DFlashConfig) -> torch.Tensor:
    """
    Read the mask vector of a draft from a file of tensors and plain values.

    Args:
        path (`Path`): `mask_embedding.pt`, which holds `{"mask_token_id": int, "embedding": [H]}` or the vector alone.
        config ([`DFlashConfig`]): The configuration of the draft.

    Returns:
        `torch.FloatTensor` of shape `[hidden_size]`.

    Raises:
        OSError: The file is damaged, or holds something else than tensors and plain values.
        ValueError: It holds no such vector, or one for another mask token.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise OSError(
            f"{str(path)!r} cannot be read as tensors ({(str(error) or type(error).__name__).splitlines()[0]}). "
            "Download it again."
        ) from error
    token_id = (
        content.get("mask_token_id", config.mask_token_id) if isinstance(content, dict) else config.mask_token_id
    )
    vector = content.get("embedding") if isinstance(content, dict) else content
    if token_id != config.mask_token_id:
        raise ValueError(
            f"{str(path)!r} is for mask_token_id={token_id}, and the draft has mask_token_id={config.mask_token_id}. "
            "Use the files of one draft."
        )
    size = config.hidden_size
    if not isinstance(vector, torch.Tensor) or tuple(vector.shape) not in ((size,), (1, size)):
        shape = list(vector.shape) if isinstance(vector, torch.Tensor) else type(vector).__name__
        raise ValueError(
            f"{str(path)!r} holds {shape} as its embedding, and must hold a vector of hidden_size={size}. Use the "
            "file of this draft."
        )
    return vector.flatten().clone()


def _check_vocabulary(
    where: str, config: DFlashConfig, offsets: torch.Tensor, shapes: Mapping[str, tuple[Path, tuple[int, ...]]]
) -> None:
    """Refuse a `d2t` that does not hold ascending offsets into the vocabulary, or contradicts `t2d`."""
    tokens = offsets.long() + torch.arange(len(offsets))
    if not bool((tokens[1:] > tokens[:-1]).all()) or int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab_size:
        raise ValueError(
            f"d2t in {where!r} must hold offsets: the token of draft index i is i + d2t[i], ascending and below "
            f"vocab_size={config.vocab_size}. Use the files of the producer."
        )
    if "t2d" in shapes:
        kept = _read_tensor(shapes["t2d"][0], "t2d").nonzero().flatten()
        if not torch.equal(kept, tokens):
            raise ValueError(f"t2d and d2t in {where!r} name different tokens. Use the files of the producer.")


def _initial_tensors(config: DFlashConfig, names: set[str]) -> dict[str, torch.Tensor]:
    """Initialise the tensors of new parts of a draft, as a new draft has them."""
    with torch.device("meta"):
        body = DFlashBody(config)
    for owner in sorted({name.rpartition(".")[0] for name in names} - {""}):
        module = body.get_submodule(owner)
        if owner.endswith("self_attn"):
            continue
        module.to_empty(device="cpu")
        for child in module.children():
            body._init_weights(child)
        body._init_weights(module)
    values = body.state_dict()
    return {
        name: torch.zeros(values[name].shape, dtype=values[name].dtype) if values[name].is_meta else values[name]
        for name in names
    }


def _refuse_other_methods(where: str, names: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with tensors of a method that is not implemented."""
    for name in names:
        for part in name.split("."):
            if part in UNSUPPORTED_PARTS:
                raise ValueError(
                    f"{where!r} contains {name!r}: {UNSUPPORTED_PARTS[part]} is not implemented, and the draft would "
                    "compute something else without it. Use a DFlash draft without it."
                )


def save_in_layout(
    draft: DFlashDraftModel, folder: str | os.PathLike[str], layout: str, *, dtype: torch.dtype | None = None
) -> Path:
    """
    Save a draft in the layout of another reader. The folder is written completely or not at all.

    Args:
        draft ([`DFlashDraftModel`]):
            The draft. If its file contained copies of the target's tensors, it must have been tied once.
        folder (`str`):
            A new or empty folder. For vLLM its name must contain "dflash", in upper or lower case.
        layout (`str`):
            `"native"` for this package, `"serving"` for vLLM, SGLang and the reference implementation,
            `"speculators"`, or `"muse"` for transformers' own assistant class.
        dtype (`torch.dtype`, *optional*):
            The dtype of the tensors. By default it is the draft's own, and bf16 in the serving layout: servers run in
            bf16, and the reference implementation does not cast.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: The layout is unknown, or has no key for something that this draft computes.
        OSError: The folder contains files already, or cannot be written.
    """
    draft, folder = local_draft(draft), Path(folder)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}. Choose one of them.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OSError(
            f"{str(folder)!r} exists and is not an empty folder, so nothing was written. Choose a new folder."
        )
    if layout != "native" and draft.config.target_tensor_checksums:
        raise ValueError(
            f"The file of the draft {describe_target(draft.config)} contained "
            f"{', '.join(draft.config.target_tensor_checksums)}, which must equal the target's tensors and were not "
            "compared yet. Tie the draft first, with target= or draft.tie_target(...)."
        )
    if dtype is None:
        dtype = torch.bfloat16 if layout == "serving" else draft.dtype
    config = {} if layout == "native" else layout_config(draft.config, layout, str(dtype).removeprefix("torch."))
    with replace_folder(folder) as partial:
        state = draft.state_dict() if layout == "native" else exported_tensors(draft, layout)
        tensors = {
            name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
            for name, value in state.items()
        }
        if layout == "native":
            draft.save_pretrained(partial, state_dict=tensors)
            native = read_json(partial / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
            (partial / "config.json").write_text(json.dumps(native, indent=2, sort_keys=True) + "\n")
        else:
            if layout == "serving" and "mask_embedding" in tensors:  # servers read it from a file of its own
                vector = tensors.pop("mask_embedding")
                torch.save({"mask_token_id": draft.config.mask_token_id, "embedding": vector}, partial / MASK_FILE)
            renamed = {layout_tensor_name(name, layout): value.contiguous() for name, value in tensors.items()}
            save_file(renamed, partial / WEIGHTS, {"format": "pt"})
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


@torch.no_grad()
def exported_tensors(draft: DFlashDraftModel, layout: str) -> dict[str, torch.Tensor]:
    """
    Return the tensors of a draft as servers read them.

    A factored selector becomes two tables. A part of DFlash 2 that the draft lacks is added without effect. A reduced
    vocabulary comes with the rows of the head and the mask of its tokens.

    Args:
        draft ([`DFlashDraftModel`]): The draft, which must be tied for tables and rows of the head.
        layout (`str`): The layout, for messages.

    Returns:
        `dict[str, torch.Tensor]`

    Raises:
        ValueError: The layout has no place for a part of the draft.
        UntiedDraftError: The target is needed and cannot be read.
    """
    config, tensors = draft.config, dict(draft.state_dict())
    if config.learned_mask_embedding and layout == "speculators":
        raise ValueError(
            "learned_mask_embedding=True cannot be expressed in the speculators layout. Write the serving layout."
        )
    selector = draft.candidate_selector
    if selector is not None and selector.is_factored:
        rows = draft.draft_head().embedded(torch.arange(config.vocab_size, device=draft.device))
        for name in ("predecessor", "successor"):
            projection = tensors.pop(f"candidate_selector.{name}_projection.weight")
            tensors[f"candidate_selector.{name}_codebook"] = rows.to(projection.dtype) @ projection.t()
    elif selector is None and is_dflash2(config):
        table = torch.zeros(config.vocab_size, 1)
        tensors["candidate_selector.predecessor_codebook"] = table
        tensors["candidate_selector.successor_codebook"] = table.clone()
        tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(1, config.hidden_size)
    if is_dflash2(config) and config.conv_kernel_size is None:
        for index in range(config.num_hidden_layers):
            for part in ("attention_conv", "mlp_conv"):
                tensors[f"layers.{index}.{part}.base_kernel"] = torch.ones(2, 1, config.hidden_size)
                tensors[f"layers.{index}.{part}.kernel_projection.weight"] = torch.zeros(2, config.hidden_size)
    if layout == "serving" and is_served_as_dspark(config) and config.markov_rank is None:
        tensors["markov_head.markov_w1.weight"] = torch.zeros(config.vocab_size, 1)
        tensors["markov_head.markov_w2.weight"] = torch.zeros(config.draft_vocab_size or config.vocab_size, 1)
    if draft.d2t is not None:
        vocabulary = draft.draft_vocabulary()
        weight = plain_weight(draft.draft_head().head)
        if weight is None:
            raise ValueError(
                "The rows of the target's head cannot be read, because it is quantised or wrapped, and a draft with a "
                "reduced vocabulary is served with them. Tie it to the target in bfloat16."
            )
        tensors["lm_head.weight"] = weight
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=vocabulary.device).index_fill(
            0, vocabulary, True
        )
    return tensors


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: str,
    *,
    dtype: torch.dtype | None = None,
    target: str | PreTrainedModel | None = None,
    **kwargs: Any,
) -> Path:
    """
    Convert a checkpoint of any producer into another layout.

    Args:
        source (`str`): Folder or Hub name.
        destination (`str`): A new or empty folder.
        layout (`str`), dtype (`torch.dtype`, *optional*): As in [`save_in_layout`].
        target (`str` or `PreTrainedModel`, *optional*): The target. It is needed if the source contains tensors of the
            target, or lacks the depth or the vocabulary size of the target.
        **kwargs: Fields of the configuration, and arguments that find the source on the Hub.

    Returns:
        `Path`: the destination.

    Raises:
        ValueError, OSError: As in [`DFlashDraftModel.from_pretrained`] and [`save_in_layout`]. Nothing is written.
    """
    draft = DFlashDraftModel.from_pretrained(source, target=target or False, **kwargs)
    if target is not None:
        draft.get_output_embeddings()  # This ties the draft, which compares it with the target.
    return save_in_layout(draft, destination, layout, dtype=dtype)
