"""DFlash for Hugging Face: block-parallel draft models for speculative decoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = version("dflash-hf")

__all__ = [
    "DFlashBatchPlan",
    "DFlashBody",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "DecodingStatistics",
    "DraftCard",
    "UntiedDraftError",
    "build_dflash_batch_plan",
    "convert_checkpoint",
    "dflash_decoding",
    "publish_draft",
    "save_in_layout",
    "speculative_generate",
    "write_model_card",
]


def lazy_exports(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """
    Make the module-level `__getattr__` (PEP 562) of a package that imports its public names on first use.

    Importing torch and transformers takes seconds, and `dflash-hf --help` needs neither.

    Args:
        package (`str`): `__name__` of the package.
        homes (`Mapping[str, Sequence[str]]`): for each module, relative to the package, the names that it defines.

    Returns:
        `Callable[[str], Any]`: raises `AttributeError` for any other name.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


if TYPE_CHECKING:
    from .blocks.plan import DFlashBatchPlan, build_dflash_batch_plan
    from .checkpoints.io import convert_checkpoint, save_in_layout
    from .decoding.generate import DFlashGenerateOutput, dflash_decoding, speculative_generate
    from .decoding.statistics import DecodingStatistics
    from .hub.model_card import DraftCard, write_model_card
    from .hub.push import publish_draft
    from .model.configuration_dflash import DFlashConfig
    from .model.modeling_dflash import DFlashBody, DFlashDraftModel, UntiedDraftError
    from .training.arguments import DFlashTrainingArguments
    from .training.trainer import DFlashTrainer
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            ".blocks.plan": ["DFlashBatchPlan", "build_dflash_batch_plan"],
            ".checkpoints.io": ["convert_checkpoint", "save_in_layout"],
            ".decoding.generate": ["DFlashGenerateOutput", "dflash_decoding", "speculative_generate"],
            ".decoding.statistics": ["DecodingStatistics"],
            ".hub.model_card": ["DraftCard", "write_model_card"],
            ".hub.push": ["publish_draft"],
            ".model.configuration_dflash": ["DFlashConfig"],
            ".model.modeling_dflash": ["DFlashBody", "DFlashDraftModel", "UntiedDraftError"],
            ".training.arguments": ["DFlashTrainingArguments"],
            ".training.trainer": ["DFlashTrainer"],
        },
    )


def _push_draft(*args: Any, **kwargs: Any) -> Any:
    """Push a draft with its model card. The import is deferred because the card needs all of `evaluation`."""
    from .hub.push import push_draft

    return push_draft(*args, **kwargs)


def register() -> None:
    """
    Make drafts known to transformers and give the two model files what only the installed package can do.

    Importing the package calls this function, except in `dflash-hf`, which calls it before it runs a command. A second
    call changes nothing.

    - `AutoConfig` and `AutoModel` load the model type `"dflash"`.
    - `DFlashConfig` and `DFlashDraftModel` read the checkpoints of other producers.
    - `draft.push_to_hub` writes the model card of a draft.
    - `save_pretrained` copies the two source files into the checkpoint, so that users of `trust_remote_code=True`
      need no installation.
    """
    from transformers import AutoConfig, AutoModel

    from .checkpoints.io import read_checkpoint
    from .checkpoints.read_layouts import native_values
    from .model.configuration_dflash import DFlashConfig
    from .model.modeling_dflash import DFlashDraftModel

    # exist_ok: the import must still work with a version of transformers that has a model type `dflash` of its own.
    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)
    DFlashConfig.register_format_reader(native_values)
    DFlashDraftModel.register_checkpoint_reader(read_checkpoint)
    DFlashDraftModel.register_hub_writer(_push_draft)
    DFlashConfig.register_for_auto_class()
    DFlashDraftModel.register_for_auto_class("AutoModel")


def _is_own_command() -> bool:
    """
    Tell whether this process is `dflash-hf` or `python -m dflash_hf`, which calls `register` only to run a command.

    While Python looks for the module of `python -m`, `sys.argv[0]` is "-m" and only `sys.orig_argv` names the module.
    """
    if sys.argv[:1] == ["-m"]:
        return ("-m", "dflash_hf") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return Path(*sys.argv[:1]).stem == "dflash-hf"


if not _is_own_command():  # so that the command prints its help without importing torch
    register()
