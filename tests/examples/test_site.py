"""What has no page is said; `make docs`, which builds the pages, is a part of `make check`."""

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


def test_the_tables_of_an_index_are_its_lists_of_pages(pages: ModuleType) -> None:
    text = "# Title\n\n## Guides\n\n| page | for |\n|---|---|\n| [Data](data.md) | a |\n| [Read](../README.md) | b |\n"
    source = [text]
    pages.add_lists_of_pages(None, "docs/index", source)
    toctree = "\n```{toctree}\n:hidden:\n:caption: Guides\n\nData <data>\nRead <../README>\n```\n"
    assert source == [text + toctree]
