"""Every module of the package can be imported, and the examples of its docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "dflash_hf").rglob("*.py"))
    if path.name != "__main__.py"
}
WITH_EXAMPLES = [name for name, path in FILES.items() if ">>> " in path.read_text()]


def test_every_module_can_be_imported():
    assert len(FILES) > 50
    for name, path in FILES.items():
        assert importlib.import_module(name).__file__ == str(path)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_docstrings_print_what_they_say(name):
    module = importlib.import_module(name)
    failures, attempts = doctest.testmod(module, extraglobs=vars(module), optionflags=doctest.ELLIPSIS)
    assert attempts > 0
    assert failures == 0


def test_at_least_twenty_modules_have_examples():
    assert len(WITH_EXAMPLES) >= 20
