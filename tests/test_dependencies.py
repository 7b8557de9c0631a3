"""The dependencies that `pyproject.toml` declares are those that the package imports."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USER_EXTRAS = ("demo", "server")  # the others are for development

# Imported on request only, and installed by hand, because it pins other versions of what this package needs
NOT_DECLARED = {"dflash"}
# Declared for another library: transformers reads the GGUF file of the demo target with gguf
NOT_IMPORTED = {"gguf"}


def distributions(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


REQUIRED = distributions(PROJECT["dependencies"])
OPTIONAL = {name for extra in USER_EXTRAS for name in distributions(PROJECT["optional-dependencies"][extra])}


def imports_of(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """Top-level names of the third-party modules that a file imports; at import time, those outside functions."""
    for node in ast.iter_child_nodes(tree):
        if at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        yield from (name.split(".")[0] for name in names)
        yield from imports_of(node, at_import_time=at_import_time)


def imported_distributions(*, at_import_time: bool) -> dict[str, set[str]]:
    """The distributions that provide the imported modules, and the files that import them."""
    providers = packages_distributions()
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "dflash_hf").rglob("*.py")):
        for module in imports_of(ast.parse(file.read_text()), at_import_time=at_import_time):
            if module in sys.stdlib_module_names or module == "dflash_hf":
                continue
            distribution = canonicalize_name(providers.get(module, [module])[0])
            found.setdefault(distribution, set()).add(file.relative_to(ROOT).as_posix())
    return found


def test_every_module_imported_with_the_package_is_a_required_dependency():
    imported = imported_distributions(at_import_time=True)
    assert "torch" in imported
    assert {name: files for name, files in imported.items() if name not in REQUIRED} == {}


def test_every_module_imported_inside_a_function_is_declared():
    imported = imported_distributions(at_import_time=False)
    declared = REQUIRED | OPTIONAL | NOT_DECLARED
    assert {name: files for name, files in imported.items() if name not in declared} == {}


def test_every_declared_dependency_is_imported():
    imported = set(imported_distributions(at_import_time=False))
    assert (REQUIRED | OPTIONAL) - imported == NOT_IMPORTED
