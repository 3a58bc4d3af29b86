"""The pages of the reference: what has no page is found.

`make docs`, which `make check` runs, builds the pages; `test_guides` runs their examples.
"""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from hpcdp import optim

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    monkeypatch.syspath_prepend(DOCS)
    module = importlib.import_module("reference_pages")
    monkeypatch.setattr(module, "PACKAGES", ("hpcdp.optim",))
    return module


def test_a_public_name_without_an_entry_is_found(pages: ModuleType) -> None:
    documented = {"hpcdp.optim", *(f"hpcdp.optim.{name}" for name in optim.__all__)}
    assert pages.missing_names(documented) == []
    assert pages.missing_names(documented - {"hpcdp.optim.Adam"}) == ["hpcdp.optim.Adam"]


def test_a_command_without_an_entry_is_found(pages: ModuleType) -> None:
    documented = set(pages.missing_commands(set()))
    assert {"hpcdp train", "hpcdp launch", "hpcdp report"} <= documented
    assert pages.missing_commands(documented - {"hpcdp tune"}) == ["hpcdp tune"]


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "reference" / "index.md").read_text()
    names = [page.name for page in (DOCS / "reference").glob("*.md") if page.name != "index.md"]
    assert [name for name in names if f"({name})" not in index] == []


def test_the_table_of_an_index_is_its_list_of_pages(pages: ModuleType) -> None:
    text = "# Title\n\n| page | for |\n|---|---|\n| [A](a.md), [B](../b.md) | see [C](c.md) |\n"
    source = [text]
    pages.add_list_of_pages(None, "docs/index", source)
    assert source == [text + "\n```{toctree}\n:hidden:\n\nA <a>\nB <../b>\n```\n"]
