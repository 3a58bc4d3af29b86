"""What the documentation says is there is there, and the commands that it shows run.

Every line that begins with ``$`` in a ``console`` block of README.md and docs/ is run here, in a new folder with
examples/ in it; of ``make`` commands only the target is looked for, since they install the package. A ``python`` block
that begins with the name of a file is quoted from it; `test_guides` runs the others.
"""

import functools
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from started import start_code

import hpcdp

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES += sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
LONG = re.compile(
    "python examples/|--predict|hpcdp tune|--reproducible|--compression|--staleness|lenet .* --epochs|--resume auto"
    "|bench allreduce .* (-f|--csv)|bench bandwidth|launch -n 2 -- hpcdp bench|hpcdp train mlp .* --epochs 5"
    "|mpirun .* hpcdp train|--trace"
)
"""Commands of several seconds, whose parts other tests run."""


def commands() -> list:
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.M):
                line = re.sub(r" *\\\n *", " ", line)
                marks = pytest.mark.thorough if LONG.search(line) else ()
                found.setdefault(line, pytest.param(line, id=f"{page.name}: {line}", marks=marks))
    return list(found.values())


def run(command, folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # A command with mpirun in it is meant for any machine; on this one ranks may outnumber cores and be root's.
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "HPCDP_TUNING_DIR": str(folder),
    }
    if command.startswith("mpirun "):  # of a process without one Open MPI's sm leaves a file in /dev/shm
        environment["OMPI_MCA_btl"] = "self,sm,tcp"
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("command", commands())
def test_command_runs(command, tmp_path):
    if "torch" in command and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if command.startswith("hpcdp slurm cancel "):
        pytest.skip("asks Slurm for a job; tests/launch/slurm has one to cancel")
    if command.startswith("make "):
        command = f"make -n -C {shlex.quote(str(ROOT))} {command.removeprefix('make ')}"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(command, tmp_path)


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_examples_of_hybrid_programming_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcdp.data_parallel.bucket_trainer.init", lambda: hpcdp.init())  # the world of the thread
    start_code("\n".join(python_blocks(ROOT / "docs" / "hybrid.md")), "hybrid", 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["lenet.h5", "lenet.json", "lenet.svg"]


def test_quotations_are_what_the_files_say():
    blocks = [block for page in DOCS for block in re.findall(r"^```\n(# hpcdp/.*?)^```", page.read_text(), re.M | re.S)]
    quoted = [block.partition("\n") for block in blocks]
    assert quoted
    for name, _, code in quoted:
        source = (ROOT / name.removeprefix("# ")).read_text()
        assert code in source, name


def test_what_pages_quote_of_transcripts_is_there():
    quotation = re.compile(r"^<!-- from (transcripts/[^ ]+) -->\n```\n(.*?)^```", re.M | re.S)
    quoted = [each for page in PAGES for each in quotation.findall(page.read_text())]
    assert quoted
    assert [block for name, block in quoted if block not in (ROOT / "docs" / name).read_text()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_are_there(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def anchors(page):
    """As GitHub makes them of headings: words joined by hyphens, without what is no letter, digit or underscore."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_pages_hit_a_heading(page):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text())
    there = [(page.parent / path if path else page, anchor) for path, anchor in links if "://" not in path]
    assert [(to.name, anchor) for to, anchor in there if to.suffix == ".md" and anchor not in anchors(to)] == []


def is_there(name):
    """Whether a dotted name is a module, or leads to something in one; what needs what is not installed is let pass."""
    parts = name.split(".")
    count = next(i for i in range(len(parts), 0, -1) if is_module(".".join(parts[:i])))
    if count == len(parts):
        return True
    try:
        functools.reduce(getattr, parts[count:], importlib.import_module(".".join(parts[:count])))
    except AttributeError:
        return False
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("hpcdp")
    return True


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package, or needs what is not installed
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_modules_and_what_is_in_them_are_there(page):
    names = set(re.findall(r"(?<![\w./-])hpcdp(?:\.[A-Za-z_]\w*)+", page.read_text())) - {"hpcdp.def", "hpcdp.sif"}
    assert [name for name in sorted(names) if not is_there(name)] == []


def test_the_page_of_environment_variables_lists_those_of_the_source():
    folders = [ROOT / each for each in ("hpcdp", "benchmarks", "slurm")]
    sources = [each for folder in folders for each in folder.rglob("*") if each.suffix in (".py", ".sh", ".sbatch")]
    found = {name for source in sources for name in re.findall(r"HPCDP_[A-Z_]*[A-Z]", source.read_text())}
    in_source = {name for name in found if not name.startswith("HPCDP_TEST_")}  # the page names only their prefix
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    cells = re.findall(r"^\| (`HPCDP_.*?) \|", page, re.M)
    on_page = [name for cell in cells for name in re.findall(r"HPCDP_[A-Z_]*[A-Z]", cell)]
    assert sorted(on_page) == sorted(in_source)


def test_other_pages_name_only_variables_of_that_page():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    named = {name for each in PAGES for name in re.findall(r"HPCDP_[A-Z_]*[A-Z]", each.read_text())}
    assert {name for name in named if not name.startswith("HPCDP_TEST_") and f"`{name}`" not in page} == set()


FOLDERS = ("hpcdp", "tests", "benchmarks", "docs", "examples", "kernels", "slurm", "container")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_with_their_folder_are_there(page):
    found = re.findall(rf"(?<![\w./{{-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w(?![\w*/])", page.read_text())
    files = {each for each in found if Path(each).suffix in (".py", ".sh", ".toml", ".md", ".cu", ".def")}
    assert [each for each in sorted(files - {"hpcdp/kernels/cuda/X.py"}) if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_in_tables_are_in_the_folder_of_their_column(page):
    missing = []
    for heads, body in re.findall(r"^\|(.*)\|\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.M):
        folders = [re.search(r"(?:file|version) in `([\w/]+/)`", head) for head in heads.split("|")]
        for row in body.splitlines():
            for folder, cell in zip(folders, row.strip("|").split("|"), strict=False):
                names = re.findall(r"`([\w/.]+(?:\.\w+|/))`", cell) if folder else []
                missing += [name for name in names if folder and not (ROOT / folder[1] / name).exists()]
    assert missing == []


def test_each_row_of_parity_names_tests_that_exist():
    rows = re.findall(r"^\| (\d+b?) \|.*\| ([^|]+) \|$", (ROOT / "docs" / "parity.md").read_text(), re.M)
    assert [number for number, _ in rows] == [*map(str, range(1, 57)), "58b"]
    for number, shown in rows:
        tests = re.findall(r"`(tests/[^`]+)`", shown)
        assert tests and [test for test in tests if not (ROOT / test).is_file()] == [], f"row {number}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in DOCS[1:] if page.name != "index.md" and f"({page.name})" not in index] == []
