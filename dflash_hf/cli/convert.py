"""`dflash-hf convert`: one layout of a draft into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoints import LAYOUTS

DTYPES = ("auto", "bfloat16", "float32")

Fields = Annotated[
    list[str] | None,
    typer.Option("--set", help="A value that config.json leaves out, as name=value; repeat it for more."),
]


def parse_fields(settings: list[str] | None) -> dict[str, Any]:
    """
    Read `name=value` settings of a draft's configuration; values are JSON, or text.

    Args:
        settings (`list[str]`, *optional*): as `["block_size=16", "target_layer_ids=[1,9]"]`.

    Returns:
        `dict`

    Raises:
        ValueError: a setting has no `=`, or names no field.
    """
    from ..model.configuration_dflash import DFlashConfig

    values: dict[str, Any] = {}
    for setting in settings or []:
        name, is_given, text = setting.partition("=")
        if not is_given or name not in DFlashConfig.field_names():
            raise ValueError(f"--set {setting}: give name=value with a field of DFlashConfig, as in block_size=16.")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub name of a draft, in any layout.")],
    destination: Annotated[Path, typer.Argument(help='New folder; name it with "DFlash" for vLLM.')],
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "serving",
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16 or float32; auto is bfloat16 for serving, else as it is.")
    ] = "auto",
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the target, where the draft alone does not say enough.")
    ] = None,
    fields: Fields = None,
) -> None:
    """Write a draft in the layout that another reader wants: vLLM, SGLang, speculators, transformers' own class."""
    import torch

    from ..checkpoints.io import convert_checkpoint

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}.")
    folder = convert_checkpoint(
        source,
        destination,
        layout,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        target=target,
        **parse_fields(fields),
    )
    console = Console()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    console.print(f"{folder}: {layout} layout, {size:.1f} MB. dflash-hf check {folder} says who can load it.")
    if layout == "serving" and "dflash" not in str(folder.resolve()).lower():
        console.print('vLLM knows a draft by "dflash" in its path: rename the folder, or give "method": "dflash".')
