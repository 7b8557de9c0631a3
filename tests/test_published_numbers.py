"""Pages that quote measurements have the numbers of the records in model_cards/."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "model_cards" / "fill_numbers.py"
specification = importlib.util.spec_from_file_location("fill_numbers", SCRIPT)
assert specification is not None
assert specification.loader is not None
fill_numbers = importlib.util.module_from_spec(specification)
specification.loader.exec_module(fill_numbers)


@pytest.mark.parametrize(
    "page", fill_numbers.PAGES, ids=lambda page: page.relative_to(SCRIPT.parent.parent).as_posix()
)
def test_a_page_has_the_numbers_of_the_records(page):
    """After a new measurement: `python model_cards/fill_numbers.py`."""
    text = page.read_text()
    assert fill_numbers.fill(text) == text
    assert fill_numbers.MARKED.search(text)


def test_every_text_has_a_place():
    texts = [page.read_text() for page in fill_numbers.PAGES]
    names = [match[2] for text in texts for match in fill_numbers.MARKED.finditer(text)]
    assert sorted(names) == sorted(fill_numbers.numbers())
    assert sum(text.count("<!-- numbers:") for text in texts) == len(names)  # each mark is closed


def test_another_number_would_be_found():
    assert fill_numbers.fill("a <!-- numbers: demo-length -->2.04<!-- /numbers --> b").startswith(
        "a <!-- numbers: demo-length -->1.78 of 6<!-- /numbers --> b"
    )
