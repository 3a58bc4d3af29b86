"""The pages of the reference: their examples run, and what has no page is found.

`make docs`, which `make check` runs, builds the pages.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcdp import optim

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN_ALL = """
import runpy, sys
for name in sys.argv[1:]:
    runpy.run_path(name)
"""
"""Run pages one after the other in one process, because imports take most of the time."""


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    monkeypatch.syspath_prepend(DOCS)
    module = importlib.import_module("reference_pages")
    monkeypatch.setattr(module, "PACKAGES", ("hpcdp.optim",))
    return module


def programs() -> dict[str, str]:
    """Return the ``python`` blocks of each page that has some, as one program."""
    texts = {page.stem: page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))}
    found = {name: "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)) for name, text in texts.items()}
    has_torch = importlib.util.find_spec("torch") is not None
    return {name: code for name, code in found.items() if code and (has_torch or "import torch" not in code)}


def test_examples_run_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "run_all.py").write_text(RUN_ALL)
    for name, code in programs().items():
        (tmp_path / f"{name}_page.py").write_text(code)
    names = [path.name for path in sorted(tmp_path.glob("*_page.py"))]
    assert len(names) > 10
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "run_all.py", *names]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


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
