"""The list of other libraries' private names in CONTRIBUTING.md is the one that the code uses."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import dflash_hf

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash_hf"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Private names that the package defines: functions, classes, variables and attributes that it assigns."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node, ast.Name) or getattr(node.value, "id", "") in ("self", "cls", "draft")
                names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
                names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


def written_in(trees: dict[str, ast.Module], kind: type) -> set[str]:
    """Names that the source of a class defines in its body."""
    module = kind.__module__.removeprefix("dflash_hf").replace(".", "/").strip("/")
    tree = trees.get(module) or trees[f"{module}/__init__".strip("/")]
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    functions = {part.name for body in bodies for part in body if isinstance(part, ast.FunctionDef)}
    assigned = [part.targets[0] for body in bodies for part in body if isinstance(part, ast.Assign)]
    assigned += [part.target for body in bodies for part in body if isinstance(part, ast.AnnAssign)]
    return functions | {target.id for target in assigned if isinstance(target, ast.Name)}


def borrowed_names() -> dict[str, set[str]]:
    """For each private name of another library, the modules that use or override it."""
    trees = {
        str(path.relative_to(PACKAGE).with_suffix("")): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
    }
    own = own_names(trees)
    used: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | {"_replace"}
            ):  # public API of NamedTuple
                used[node.attr].add(module)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for name in filter(is_private, (alias.name for alias in node.names)):
                    used[name].add(module)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                constants = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
                for name in constants:
                    if is_private(name) and name not in own:
                        used[name].add(module)
    for found in pkgutil.walk_packages(dflash_hf.__path__, "dflash_hf."):
        if found.name == "dflash_hf.__main__":
            continue
        for _, kind in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
            if kind.__module__ != found.name:
                continue
            others = [base for base in kind.__mro__ if not base.__module__.startswith("dflash_hf")]
            for name in filter(is_private, written_in(trees, kind)):
                if any(name in vars(base) for base in others):
                    used[name].add(found.name.removeprefix("dflash_hf.").replace(".", "/"))
    return dict(used)


def test_private_names_of_other_libraries_are_listed_with_the_modules_that_use_them():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("<!-- private names -->")[1]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]
    listed = {row[0].strip("`"): set(re.findall(r"`([^`]+)`", row[3])) for row in rows}
    assert listed == borrowed_names()
    assert {row[1] for row in rows} <= {"transformers", "accelerate", "torch", "datasets", "huggingface_hub", "typer"}
    assert all(row[2] for row in rows)
    assert len(rows) > 10
