"""Who may import MPI, HDF5 and PyTorch, and who may start threads; `make check` holds the order of the packages."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hpcdp"
ONLY_IMPORTERS = {
    "mpi4py": {"comm"},
    "h5py": {"core", "data", "checkpoint"},
    "torch": {"torch", "horovod", "torch_backend.py"},
}
THREADS = r"(.*\.)?(Thread|ThreadPool|ThreadPoolExecutor|start_new_thread)|threading\.Timer"
THREAD_STARTERS = {
    "engine/engine.py",
    "comm/thread_comm.py",
    "comm/watchdog.py",
    "launch/hosts.py",
    "torch/c10d_store.py",
    "core/environment.py",  # a timer, which explains a silence
}
FILES = sorted(ROOT.rglob("*.py"))


def dotted(called: ast.expr) -> str:
    """Return the called expression as it is written: ``a.b.c``, or ``.b.c`` of what is no name."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def faults(root: Path, path: Path) -> list[str]:
    name = path.relative_to(root).as_posix()
    package = name.partition("/")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"hpcdp/{name}:{getattr(node, 'lineno', 0)}:"
        starts_thread = isinstance(node, ast.Call) and re.fullmatch(THREADS, dotted(node.func))
        if starts_thread and name not in THREAD_STARTERS:
            found.append(f"{where} starts a thread; only {', '.join(sorted(THREAD_STARTERS))} may")
        for top in (module.partition(".")[0] for module in imported(node)):
            if package not in ONLY_IMPORTERS.get(top, {package}):
                found.append(f"{where} imports {top}; only {' and '.join(sorted(ONLY_IMPORTERS[top]))} may")
    return found


def test_only_some_packages_import_mpi_hdf5_and_pytorch_and_start_threads() -> None:
    found = [fault for path in FILES for fault in faults(ROOT, path)]
    assert len(FILES) > 100 and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import h5py", "planted.py:1: imports h5py; only checkpoint and core and data may"),
        ("from torch import nn", "imports torch; only horovod and torch and torch_backend.py may"),
        ("from threading import Thread\nThread(target=print)", "planted.py:2: starts a thread"),
        ("import threading\nthreading.Timer(1, print)", "planted.py:2: starts a thread"),
    ],
)
def test_a_planted_fault_is_found(line: str, says: str, tmp_path: Path) -> None:
    planted = tmp_path / "comm" / "planted.py"
    planted.parent.mkdir()
    planted.write_text(line + "\n")
    assert any(says in fault for fault in faults(tmp_path, planted)), faults(tmp_path, planted)


def test_no_symbolic_link_and_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert [path for path in ROOT.rglob("*") if path.is_symlink()] == []


def test_git_ignores_no_module() -> None:
    """Without this test a new file of an ignored folder would be in no commit."""
    names = "\n".join(os.path.relpath(path, ROOT.parent) for path in FILES)
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT.parent, input=names, capture_output=True, text=True
    )
    if done.returncode > 1:
        pytest.skip("not a clone")
    assert done.stdout == ""


def test_files_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages, and so two modules of one name cannot be imported in one run."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_no_import_starts_mpi_or_loads_hdf5() -> None:
    """mpi4py starts MPI when its extension module is imported, before `hpcdp.init` has made its settings."""
    modules = "hpcdp.comm, hpcdp.train, hpcdp.kvstore, hpcdp.nn, hpcdp.parallel, hpcdp.train.run, hpcdp.cli.launch"
    program = f"import sys, {modules}; print({{'mpi4py.MPI', 'h5py'}} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )
