"""The class of all commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that registers the classes of the package with transformers before it runs."""

    def invoke(self, ctx: Any) -> Any:
        """Register, which imports torch, and run the function of the command."""
        from .. import register

        register()
        return super().invoke(ctx)
