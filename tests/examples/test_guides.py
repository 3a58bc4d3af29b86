"""The Python programs of README.md and docs/, its reference included, run, all of them in one job of two ranks.

A program is the ``python`` blocks of a page, in order, and of its ``diff`` blocks the lines that are not removed. Each
runs in a folder of its own, in the same processes, because starting Python and PyTorch takes longer than they do.
Fragments that cannot run are ``py`` blocks.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_ELSEWHERE = {
    "checkpoint-format": "tests/checkpoint/test_format.py",
    "cluster-testing": "tests/cluster/test_cluster_docs.py",
    "engine": "tests/engine/test_engine.py",
    "hybrid": "tests/examples/test_docs.py",
    "tracing": "tests/train/test_tracing.py",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
NOTES = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "RESULTS.md",
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
]
STEP = "            trainer.step(len(labels))\n"
STOP = f"{STEP}            if trainer.step_count == 13:\n                raise SystemExit(manager.wait())\n"
RUN_ALL = """
import os, runpy, sys
from pathlib import Path
import hpcdp
world = hpcdp.init()
for path in map(Path, sys.argv[1:]):
    folder = path.with_name(path.stem.removesuffix("-stopped"))
    if world.rank == 0:
        print(f"== {path.stem}", flush=True)
        print(f"== {path.stem}", file=sys.stderr, flush=True)
        folder.mkdir(exist_ok=True)
    world.barrier()
    os.chdir(folder)
    try:
        runpy.run_path(str(path))
    except SystemExit as end:
        assert not end.code, end.code
"""


def program(page: Path) -> str:
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```", page.read_text(), re.M | re.S)
    run = [code if kind == "python" else changed(code) for kind, code in blocks]
    return "\n".join(code for code in run if not code.startswith("# hpcdp/"))


def changed(diff: str) -> str:
    """The new side of a diff."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def programs() -> dict[str, str]:
    found = {page.stem: program(page) for page in PAGES if page.stem not in RUN_ELSEWHERE}
    assert STEP in found["checkpoints"]
    found = {"checkpoints-stopped": found["checkpoints"].replace(STEP, STOP)} | found
    found |= {f"reference-{page.stem}": program(page) for page in REFERENCE}
    has_torch = importlib.util.find_spec("torch") is not None
    return {name: code for name, code in found.items() if code and (has_torch or "import torch" not in code)}


def job(ranks: int, folder: Path) -> str:
    """Run all programs in a folder and return what they print."""
    (folder / "run_all.py").write_text(RUN_ALL)
    paths = [folder / f"{name}.py" for name in programs()]
    for path, code in zip(paths, programs().values(), strict=True):
        path.write_text(code)
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable, "run_all.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    done = subprocess.run(
        [*launch, *map(str, paths)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def run_on_two_ranks(made_once: Callable[[str, Callable[[Path], None]], Path]) -> tuple[Path, str]:
    """The folder of the programs, and what they print; they are run once for all workers."""
    folder = made_once("guides", lambda folder: (folder / "printed").write_text(job(2, folder)))
    return folder, (folder / "printed").read_text()


def test_programs_run_on_two_ranks(run_on_two_ranks: tuple[Path, str]) -> None:
    assert len(re.findall("^== reference-", run_on_two_ranks[1], re.M)) > 10


@pytest.mark.thorough
def test_programs_run_on_one_rank(tmp_path: Path) -> None:
    assert len(re.findall("^== reference-", job(1, tmp_path), re.M)) > 10


def test_the_script_of_the_readme_prints_what_it_says(run_on_two_ranks: tuple[Path, str]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    printed = re.findall(r"^epoch 5  loss (0\.\d{3})$", run_on_two_ranks[1], re.M)
    said = re.search(r"`epoch 5  loss (0\.\d{3})`", (ROOT / "README.md").read_text())
    assert said is not None and len(printed) == 1 and abs(float(printed[0]) - float(said[1])) < 0.02


def test_a_run_goes_on_from_its_checkpoint(run_on_two_ranks: tuple[Path, str]) -> None:
    """Stopped after step 13, it goes on after step 10, which it had saved."""
    folder, _ = run_on_two_ranks
    names = [path.name for path in sorted((folder / "checkpoints" / "checkpoints").glob("step-*"))]
    assert names == ["step-0000000010", "step-0000000020"]
    saved = [path.name for path in sorted((folder / "training" / "stopped").glob("step-*"))]
    assert saved[-1] == "step-0000000024"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_fit_80_columns(page: Path) -> None:
    blocks = re.findall(r"^```(?:python|py|diff)\n(?!# hpcdp/)(.*?)^```", page.read_text(), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("page", [*PAGES, *REFERENCE, *NOTES], ids=lambda page: page.name)
def test_prose_fits_80_columns(page: Path) -> None:
    """Tables, pictures and lines without a place to break are longer."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    lines = [line for line in prose.splitlines() if len(line) > 80 and not line.startswith(("|", "!["))]
    assert [line for line in lines if " " in line.strip()] == []


def test_pages_that_run_elsewhere_do() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert f"{page}.md" in (ROOT / test).read_text() or page in (ROOT / test).read_text()
