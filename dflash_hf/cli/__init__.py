"""The `dflash-hf` command."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.text import Text

from .bench import bench
from .chat import chat
from .check import check
from .convert import convert
from .curves import curves
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .inspect import inspect
from .prepare import prepare
from .push import push
from .regenerate import regenerate
from .train import train

app = typer.Typer(
    name="dflash-hf",
    help="DFlash draft models for Hugging Face transformers: train one for your model, and see it get faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(train)
app.command()(generate)
app.command()(chat)
app.command("eval")(evaluate)
app.command()(regenerate)
app.command()(prepare)
app.command()(inspect)
app.command()(curves)
app.command()(convert)
app.command()(check)
app.command()(doctor)
app.command()(push)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command; bad input ends in one line and exit code 1 (DFLASH_HF_TRACEBACK=1 shows where)."""
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("DFLASH_HF_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        Console(stderr=True).print(Text("Error: ", style="bold red") + Text(message), soft_wrap=True)
        sys.exit(1)
