"""
The `dflash-hf` command.

The module of a command imports torch, transformers and most of the package inside its functions, so that help texts
appear at once.
"""

from __future__ import annotations

import io
import os
import sys

import typer
from rich.console import Console
from rich.text import Text

from .bench import bench
from .chat import chat
from .check import check
from .command import Command
from .convert import convert
from .curves import curves
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .inspect import inspect
from .make import make
from .prepare import prepare
from .prompts import prompts
from .push import push
from .regenerate import regenerate
from .train import TrainCommand, train

app = typer.Typer(
    name="dflash-hf",
    help="DFlash draft models for Hugging Face transformers: train one for your model, and see it get faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(demo)
app.command(cls=Command)(make)
app.command(cls=TrainCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.command(cls=Command)(generate)
app.command(cls=Command)(chat)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(prompts)
app.command(cls=Command)(regenerate)
app.command(cls=Command)(prepare)
app.command(cls=Command)(inspect)
app.command(cls=Command)(curves)
app.command(cls=Command)(convert)
app.command(cls=Command)(check)
app.command(cls=Command)(doctor)
app.command(cls=Command)(push)
app.add_typer(bench, name="bench")


def main() -> None:
    """
    Run the command.

    Bad input ends in one line and exit code 1. With `DFLASH_HF_TRACEBACK=1` in the environment, it ends in the
    traceback. A character that the standard output cannot encode is written as an escape.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a caller may have replaced it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("DFLASH_HF_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        Console(stderr=True).print(Text("Error: ", style="bold red") + Text(message), soft_wrap=True)
        sys.exit(1)
