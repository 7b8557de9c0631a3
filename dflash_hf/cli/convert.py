"""The command `dflash-hf convert`, which writes a draft in another layout."""

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
    typer.Option("--set", help="Value that config.json lacks, as name=value. Can be repeated."),
]


def parse_fields(settings: list[str] | None) -> dict[str, Any]:
    """
    Parse `name=value` settings of a draft's configuration. Values are JSON, or else text.

    Args:
        settings (`list[str]`, *optional*): The settings, for example `["block_size=16", "target_layer_ids=[1,9]"]`.

    Returns:
        `dict`: the values under the names of their fields.

    Raises:
        ValueError: A setting has no `=`, or does not name a field.
    """
    from ..model.configuration_dflash import DFlashConfig

    values: dict[str, Any] = {}
    for setting in settings or []:
        name, is_given, text = setting.partition("=")
        if not is_given or name not in DFlashConfig.field_names():
            raise ValueError(
                f"--set {setting} is not name=value with a field of DFlashConfig. Write it as in --set block_size=16."
            )
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def convert(
    source: Annotated[str, typer.Argument(help="Folder or Hub name of a draft, in any layout.")],
    destination: Annotated[Path, typer.Argument(help='New folder. For vLLM its name must contain "DFlash".')],
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "serving",
    dtype: Annotated[
        str,
        typer.Option(help="auto, bfloat16 or float32. auto is bfloat16 for the serving layout, else the draft's own."),
    ] = "auto",
    target: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the target, needed if the draft's files are incomplete.")
    ] = None,
    fields: Fields = None,
) -> None:
    """Write a draft in the layout of vLLM and SGLang, of speculators, or of transformers' own class."""
    import torch

    from ..checkpoints.io import convert_checkpoint

    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} must be one of {', '.join(DTYPES)}. Choose one of them.")
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
    console.print(
        f"Wrote {folder} in the {layout} layout ({size:.1f} MB). dflash-hf check {folder} lists its readers."
    )
    if layout == "serving" and "dflash" not in str(folder.resolve()).lower():
        console.print(
            'vLLM recognises a draft by "dflash" in its path, so rename the folder or pass "method": "dflash" to vLLM.'
        )
