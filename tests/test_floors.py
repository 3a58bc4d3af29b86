"""A room imports only what its opening docstring declares, and only from floors that are not above its own."""

import ast
import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hpcdp"
ONLY_IMPORTERS = {"mpi4py": {"comm"}, "h5py": {"data", "checkpoint"}, "torch": {"torch"}}
THREADS = r"(.*\.)?(Thread|ThreadPool|ThreadPoolExecutor|start_new_thread)|threading\.Timer"
THREAD_STARTERS = {
    "engine/engine.py", "comm/thread_comm.py", "comm/watchdog.py", "launch/hosts.py",
}  # fmt: skip
FILES = [Path(d, f) for d, _, files in os.walk(ROOT, followlinks=True) for f in sorted(files) if f.endswith(".py")]


def declaration(room: str) -> tuple[int, set[str]]:
    """The floor of a room and the rooms that it may import, from its opening docstring."""
    return declared(ROOT / room / "__init__.py" if (ROOT / room).is_dir() else ROOT / f"{room}.py")


@functools.cache
def declared(source: Path) -> tuple[int, set[str]]:
    text = ast.get_docstring(ast.parse(source.read_text())) if source.exists() else None
    heading = re.match(r"Floor (\d+): .*?Imports: (.*?)\.(\s|$)", text or "", re.DOTALL)
    assert heading, f"{source}: the opening docstring does not begin 'Floor N: name. Imports: a, b.'"
    return int(heading[1]), set(re.findall(r"\w+", heading[2]))


def imported(node: ast.AST, package: list[str]) -> list[str]:
    """The absolute names that an import statement of a module in ``package`` names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = ".".join([*(package[: len(package) + 1 - node.level] if node.level else []), *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def dotted(called: ast.expr) -> str:
    """What is called, as it is written: ``a.b.c``, or ``.b.c`` of what is no name."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def faults(path: Path) -> list[str]:
    parts = path.relative_to(ROOT).parts
    room = parts[0].removesuffix(".py")
    floor, allowed = declaration(room)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"hpcdp/{'/'.join(parts)}:{getattr(node, 'lineno', 0)}: {room} (floor {floor})"
        starts_thread = isinstance(node, ast.Call) and re.fullmatch(THREADS, dotted(node.func))
        if starts_thread and "/".join(parts) not in THREAD_STARTERS:
            found.append(f"{where} starts a thread; only {', '.join(sorted(THREAD_STARTERS))} may")
        for name in imported(node, ["hpcdp", *parts[:-1]]):
            top, other = [*name.split("."), ""][:2]
            if room not in ONLY_IMPORTERS.get(top, {room}):
                found.append(f"{where} imports {top}; only {' and '.join(sorted(ONLY_IMPORTERS[top]))} may")
            if top != "hpcdp" or other in ("", "__version__", room) or room == "__init__":
                continue
            if declaration(other)[0] > floor:
                found.append(f"{where} imports {other}, of the higher floor {declaration(other)[0]}")
            elif other not in allowed:
                found.append(f"{where} imports {other} (floor {declaration(other)[0]}), which it does not declare")
    return found


def test_every_file_keeps_to_its_floor() -> None:
    found = [fault for path in FILES for fault in faults(path)]
    assert len(FILES) > 300 and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from hpcdp import train", "imports train, of the higher floor 6"),
        (
            "def f():\n    from ..launch import local",
            "planted.py:2: comm (floor 2) imports launch, of the higher floor 7",
        ),
        ("import hpcdp.engine", "imports engine (floor 1), which it does not declare"),
        ("import h5py", "imports h5py; only checkpoint and data may"),
        ("from threading import Thread\nThread(target=print)", "planted.py:2: comm (floor 2) starts a thread"),
        ("import threading\nthreading.Timer(1, print)", "planted.py:2: comm (floor 2) starts a thread"),
    ],
)
def test_a_planted_fault_is_found(line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room, heading in {"comm": "2: comm", "engine": "1: engine", "launch": "7: launch", "train": "6: train"}.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f'"""Floor {heading}. Imports: nothing."""\n')
    planted = tmp_path / "comm" / "planted.py"
    planted.write_text(line + "\n")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert any(says in fault for fault in faults(planted)), faults(planted)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {each.parent for each in FILES} - {ROOT / "data" / "sets"}  # data, and the script that wrote it
    assert [str(each) for each in sorted(folders) if not (each / "__init__.py").exists()] == []


def test_git_ignores_no_module() -> None:
    """A new file of an ignored folder is in no commit, and nobody is told."""
    names = "\n".join(os.path.relpath(os.path.realpath(each), ROOT.parent) for each in FILES)
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
