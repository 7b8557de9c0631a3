"""Describes where a number or a row comes from: hardware, software, and names of models without local paths."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


def hub_id_or_folder(name: str | None) -> tuple[str | None, str | None]:
    """
    Distinguish a Hub name from a folder, whose path is private except for its last part.

    Args:
        name (`str`, *optional*): A name or folder, as `from_pretrained` takes it.

    Returns:
        `tuple`: the Hub name or `None`, and the last part of the folder's path or `None`.

    Example:

    ```python
    >>> hub_id_or_folder("Qwen/Qwen3-8B"), hub_id_or_folder("/home/me/models/mine")
    (('Qwen/Qwen3-8B', None), (None, 'mine'))

    ```
    """
    if not name:
        return None, None
    try:
        validate_repo_id(name)
        is_hub_id = "/" in name and not Path(name).exists()
    except HFValidationError:
        is_hub_id = False
    return (name, None) if is_hub_id else (None, Path(name).name or None)


def environment() -> dict[str, str]:
    """Describe the hardware and the software of this process, under the keys `hardware` and `software`."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    cpu_info = Path("/proc/cpuinfo")  # Only this file names the processor on Linux.
    lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = next(iter(names), platform.processor() or platform.machine())
    hardware = torch.cuda.get_device_name() if accelerator is not None and accelerator.type == "cuda" else cpu
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "dflash-hf")]
    return {
        "hardware": f"{hardware}, {torch.get_num_threads()} CPU threads",
        "software": ", ".join(packages),
    }


def target_label(name: str | None) -> str:
    """Return a name of the target without a private path: its Hub name, or the last part of its folder."""
    return next((part for part in hub_id_or_folder(name) if part), "a language model")
