"""What the site needs beyond Markdown: names in docstrings as links, files beside docs/, help texts of arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
BESIDE = ("notebooks", "model_cards")  # folders that pages link to as ../folder/file
TABLE_OF_ARGUMENTS = "<!-- arguments -->"


def on_files(files: Files, *, config: Any) -> Files:
    """Put the folders beside docs/ on the site."""
    for path in sorted(path for folder in BESIDE for path in (ROOT / folder).rglob("*") if path.is_file()):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead `../notebooks/x.ipynb` to the copy on the site, and write the table of arguments."""
    markdown = re.sub(rf"\]\(\.\./({'|'.join(BESIDE)})/", r"](\1/", markdown)
    return markdown.replace(TABLE_OF_ARGUMENTS, _table_of_arguments()) if TABLE_OF_ARGUMENTS in markdown else markdown


def _table_of_arguments() -> str:
    """Names, defaults and help texts of the training arguments, read without importing anything."""
    tree = ast.parse((ROOT / "dflash_hf" / "training" / "arguments.py").read_text(encoding="utf-8"))
    lines = ["| Argument | Default | |", "|---|---|---|"]
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            values = {keyword.arg: keyword.value for keyword in node.value.keywords}
            text = ast.literal_eval(values["metadata"])["help"].replace("|", "\\|")
            lines.append(f"| `{ast.unparse(node.target)}` | `{ast.unparse(values['default'])}` | {text} |")
    return "\n".join(lines)


def on_env(env: Any, *, config: Any, files: Files) -> None:
    """Turn [`Name`] of a docstring into a link where the name has an entry, and into code where it has none."""
    pages = [file.page for file in files.documentation_pages() if file.page and file.page.content]
    entries: dict[str, str] = {}
    for page in pages:
        for name in re.findall(r'id="(dflash_hf\.[\w.]+)"', page.content):
            owner, last = name.split(".")[-2:]
            entries.setdefault(f"{owner}.{last}" if owner[0].isupper() else last, f"{page.url}#{name}")
    for page in pages:
        page.content = _link_names(page.content, page.url, entries)


def _link_names(content: str, url: str, entries: dict[str, str]) -> str:
    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("~")
        code = f"<code>{name if name == match[1] else name.rsplit('.', 1)[-1]}</code>"
        return f'<a href="{get_relative_url(entries[name], url)}">{code}</a>' if name in entries else code

    return re.sub(r"\[<code>(~?[\w.]+)</code>\]", link, content)
