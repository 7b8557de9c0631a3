"""
Run the notebooks from top to bottom in an empty folder; as a script, keep what they print.

`python tests/notebook_runs.py [notebook …]` writes fresh outputs into the notebooks named, or into all of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def executed(path: Path, folder: Path, cell_timeout_s: int | None = None) -> nbformat.NotebookNode:
    """A notebook with the outputs of a run in `folder`, and nothing that tells when or where it ran."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        startup_timeout=300,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
