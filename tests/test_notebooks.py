from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from notebook_runs import NOTEBOOKS, executed

CELL_TIMEOUT_S = 300  # a whole notebook takes less than a minute; machines that run tests are shared
MAX_FILE_BYTES = 400_000
MAX_CELL_LINES = 25
MAX_COLUMNS = 119
VARIES = "varies"  # tag of cells whose numbers depend on the machine: times, and what was trained

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def printed(cell: NotebookNode) -> list[str]:
    """What a cell shows as text; pictures by their kind."""
    shown = []
    for output in cell.outputs:
        if output.output_type == "stream":
            shown.append(output.text)
        elif "image/png" in output.data:
            shown.append("a picture")
        else:
            shown.append(output.data["text/plain"])
    return shown


def words_of(lines: list[str]) -> list[str]:
    return re.findall(r"[^\W\d_]{2,}", "\n".join(lines))


def test_there_are_five_notebooks_and_the_readme_beside_them_links_each():
    links = re.findall(r"\]\((.+?\.ipynb)\)", (NOTEBOOKS[0].parent / "README.md").read_text())
    assert links == [path.name for path in NOTEBOOKS]
    assert len(links) == 5


@pytest.mark.spawns
@every_notebook
def test_a_fresh_run_shows_what_the_notebook_keeps(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny models lose more to threads than they gain
    fresh = [cell for cell in executed(path, tmp_path, CELL_TIMEOUT_S).cells if cell.cell_type == "code"]
    for kept, new in zip(code_cells(path), fresh, strict=True):
        if VARIES in kept.metadata.get("tags", []):
            assert words_of(printed(new)) == words_of(printed(kept)), kept.source
        else:
            assert printed(new) == printed(kept), kept.source


@every_notebook
def test_a_notebook_keeps_the_outputs_of_one_run_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        last_statement = ast.unparse(ast.parse(cell.source).body[-1])
        is_definition = last_statement.startswith(("def ", "@"))
        shows = last_statement.splitlines()[-1].strip().startswith(("print(", "plt.show("))
        assert cell.outputs or is_definition or not shows, cell.source


@every_notebook
def test_outputs_hold_no_errors_no_warnings_and_no_paths_of_a_machine(path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    shown = "\n".join(line for cell in code_cells(path) for line in printed(cell))
    assert not re.search(r"/(tmp|root|home|Users|usr|opt|var)/", shown)


@every_notebook
def test_the_first_code_cell_has_the_switch_to_models_of_the_hub(path):
    assert re.match(r"HUB_[A-Z]+ = None  # or ", code_cells(path)[0].source)


@every_notebook
def test_a_notebook_is_small_in_short_cells_and_tells_nothing_of_its_run(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MAX_FILE_BYTES
    assert max(len(cell.source.splitlines()) for cell in notebook.cells) <= MAX_CELL_LINES
    assert max(len(line) for cell in code_cells(path) for line in cell.source.splitlines()) <= MAX_COLUMNS
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [cell.id for cell in notebook.cells] == [f"cell-{index:02}" for index in range(len(notebook.cells))]
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)


@every_notebook
def test_a_notebook_uses_the_public_names_of_the_package(path):
    imports = re.findall(
        r"^from dflash_hf(?:\.\w+)? import (.+)$", "\n".join(c.source for c in code_cells(path)), re.M
    )
    assert imports
    assert not [name for line in imports for name in line.split(", ") if name.startswith("_")]
