"""
Lets vLLM open drafts in the native layout.

vLLM calls [`register_native_drafts`] in each of its processes, through the entry point of the group
`vllm.general_plugins` in pyproject.toml. Its versions pin an older transformers than this package requires (vLLM 0.32:
below 5.20), so that this module may use only what both versions have.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Qwen3Config

from ..model.configuration_dflash import DFlashConfig
from .read_layouts import native_values
from .write_layouts import layout_config


class NativeDraftConfig(Qwen3Config):
    """Reads the config.json of a native draft as that of its serving layout, which has the same tensor names."""

    model_type = DFlashConfig.model_type

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """
        Translate a native config.json.

        Args:
            config_dict (`dict[str, Any]`): The values of the file.
            **kwargs: As in `PreTrainedConfig.from_dict`.

        Returns:
            `Qwen3Config`: equal to the configuration of the folder that `dflash-hf convert` writes, and, with
            `return_unused_kwargs=True`, the arguments that are no fields of it.

        Raises:
            ValueError: The file does not describe a DFlash draft, or lacks a value.
        """
        draft = DFlashConfig(**native_values(config_dict))
        dtype = str(draft.dtype or "float32").removeprefix("torch.")
        return Qwen3Config.from_dict(layout_config(draft, "serving", dtype), **kwargs)


def register_native_drafts() -> None:
    """Make `AutoConfig`, by which vLLM reads config.json, translate the model type `"dflash"`, in this process."""
    AutoConfig.register(DFlashConfig.model_type, NativeDraftConfig, exist_ok=True)
