"""The command `dflash-hf push`, which pushes a saved draft to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of the saved draft.")],
    repo: Annotated[str, typer.Argument(help="Repository for transformers, for example me/my-draft.")],
    serving_repo: Annotated[
        str | None, typer.Option(help="Repository for the layout of vLLM and SGLang, with DFlash in its name.")
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="Hub name of the target, needed if the draft names it by a folder.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create new repositories as private.")] = False,
) -> None:
    """Push a saved draft and its model card to the Hub, as the user who is logged in (hf auth login)."""
    from ..hub.push import publish_draft

    console = Console()
    console.print(f"Pushing the draft in {folder} ...", soft_wrap=True)
    commits = publish_draft(folder, repo, serving_repo=serving_repo, target_name=target_name, private=private or None)
    for layout, commit in zip(("native", "serving"), commits.values(), strict=False):
        console.print(f"Pushed the {layout} layout to {commit.repo_url}", soft_wrap=True)
