"""Reads the checkpoints of all known DFlash producers, and writes the layouts that other software reads."""

from __future__ import annotations

import json
import os
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
from ..model.modeling_dflash import TARGET_LOOK_UP, DFlashBody, DFlashDraftModel, tensor_checksum, weights_error
from ..model.remote_code import local_draft
from . import LAYOUTS
from .read_layouts import (
    TARGET_TENSORS,
    UNSUPPORTED_PARTS,
    native_tensor_name,
    native_values,
)
from .write_layouts import layout_config, layout_tensor_name

logger = logging.get_logger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Only these files of a repository are downloaded. A draft with `mask_embedding.pt` is refused without opening it.
NEEDED_FILES = ("config.json", "*.safetensors", INDEX, "mask_embedding.pt")


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
    folder = checkpoint_folder(name_or_path, **hub_kwargs)
    if config is None:
        raw = read_json(folder / "config.json")
        of_target = {name: hub_kwargs[name] for name in TARGET_LOOK_UP if name in hub_kwargs}
        config = DFlashConfig(**native_values(raw, given, lambda: target_facts(target, **of_target)))
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{str(name_or_path)!r} contains mask_embedding.pt, a mask vector of its own. This is not implemented, "
            "and without it few tokens would be accepted. Use a draft that masks with a token."
        )
    shapes = tensor_shapes(folder)
    _refuse_other_methods(str(name_or_path), shapes)

    ours: dict[str, str] = {}
    checksums = dict(config.target_tensor_checksums or {})
    for name in shapes:
        if name in TARGET_TENSORS:
            checksums[name] = tensor_checksum(_read_tensor(shapes[name][0], name))
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
    problems = {
        "missing": wanted.keys() - found.keys(),
        "unknown": {ours[name] for name in found.keys() - wanted.keys()},
        "of another shape": {
            f"{name} {list(found[name])} instead of {list(wanted[name])}"
            for name in found.keys() & wanted.keys()
            if found[name] != wanted[name]
        },
    }
    if any(problems.values()):
        raise weights_error(name_or_path, problems)
    if ours.keys() == shapes.keys():
        return config, None
    return config, {native: _read_tensor(shapes[name][0], name) for native, name in ours.items()}


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
        tensors = {name: value.detach().to("cpu", dtype) for name, value in draft.state_dict().items()}
        if layout == "native":
            draft.save_pretrained(partial, state_dict=tensors)
            native = read_json(partial / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
            (partial / "config.json").write_text(json.dumps(native, indent=2, sort_keys=True) + "\n")
        else:
            renamed = {layout_tensor_name(name, layout): value.contiguous() for name, value in tensors.items()}
            save_file(renamed, partial / WEIGHTS, {"format": "pt"})
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


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
