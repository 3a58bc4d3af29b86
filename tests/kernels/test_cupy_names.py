"""Every name of CuPy that hpcdp uses is there and takes what it is given, and stand-ins have none that CuPy has not.

CuPy is imported without a GPU or its driver, so this needs the package alone. What is used is found in hpcdp's source:
variables that hold CuPy, a module of it or an array's namespace, what is asked of those, and how it is called.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_on_host
import pytest
from gpu_on_host import graphs

import hpcdp

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]'")

FOLDER = Path(hpcdp.__file__).parent
HOLDS = {
    "xp": "cupy", "self._xp": "cupy", "cupy": "cupy", "self._cupy": "cupy", "cuda": "cupy.cuda",
    "self._cuda": "cupy.cuda", "runtime": "cupy.cuda.runtime", "self._runtime": "cupy.cuda.runtime",
    "nccl": "cupy.cuda.nccl", "self._nccl": "cupy.cuda.nccl",
}  # fmt: skip
"""What variables of these names hold, in all files that do not define the name as something else."""
OF_THE_DRIVER = "comm/world.py"
"""Whose ``_cuda`` is CUDA's driver, by ctypes."""


def used() -> Iterator[tuple[str, str, ast.Call | None]]:
    """Where a name is used, the name as ``cupy.cuda.Stream``, and the call if it is called."""
    files = (Path(at) / name for at, _, names in os.walk(FOLDER, followlinks=True) for name in names)
    for path in sorted(each for each in files if each.suffix == ".py"):
        file, tree = path.relative_to(FOLDER).as_posix(), ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        others = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        others |= {each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
        for node in nodes:
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            root = next((each for each in HOLDS if text.startswith(f"{each}.")), "")
            if re.fullmatch(r"[\w.]+", text) and root and root not in others and file != OF_THE_DRIVER:
                yield f"{file}:{node.lineno}", HOLDS[root] + text.removeprefix(root), calls.get(id(node))


USED = list(used())


def resolved(name: str) -> Any:
    found: Any = cupy
    for each in name.split(".")[1:]:
        found = importlib.import_module("cupy.cuda.nccl") if each == "nccl" else getattr(found, each)
    return found


def signature(function: Any) -> inspect.Signature | None:
    """What Cython notes in the first line of a docstring, where Python itself cannot tell."""
    try:
        found = inspect.signature(function)
        if function is not cupy.ndarray:
            return found
    except (TypeError, ValueError):
        pass
    made = re.search(r"\w\((.*?)\)(?: ->.*)?$", (function.__doc__ or "").partition("\n")[0])
    if made is None:
        return None
    text = re.sub(r"(?:^|(?<=, ))[\w ]*?(\w+)(=[^,]*)?(?=,|$)", r"\1\2", made[1])
    text = re.sub(r"=[^,]*", "=None", text.replace("\\", "")).removeprefix("self, ").replace("self", "")
    return eval(f"inspect.signature(lambda {text}: None)")  # the text of a signature of CuPy's, of names alone


@pytest.mark.parametrize("name", sorted({name for _, name, _ in USED}))
def test_what_is_used_is_there(name: str) -> None:
    resolved(name)


def test_what_is_called_takes_the_arguments() -> None:
    bound = 0
    for where, name, call in USED:
        takes = None if call is None else signature(resolved(name))
        if takes is None or call is None or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        keywords = {each.arg: None for each in call.keywords if each.arg is not None}
        try:
            takes.bind(*call.args, **keywords)
        except TypeError as error:
            raise AssertionError(f"{where}: {name}{takes} {error}") from None
        bound += 1
    assert bound > 100  # of 150


def test_signatures_are_read() -> None:
    taken = signature(resolved("cupy.cuda.runtime.memcpyAsync"))
    assert taken is not None and list(taken.parameters) == ["dst", "src", "size", "kind", "stream"]


def public(x: Any) -> set[str]:
    return {name for name in dir(x) if not name.startswith("_")} - {"annotations"}


def missing(standin: Any, real: Any, own: set[str]) -> set[str]:
    return {name for name in public(standin) if not hasattr(real, name)} - own


def test_streams_events_and_copies_of_the_stand_in_are_those_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    real, runtime, nccl = cupy.cuda, cupy.cuda.runtime, importlib.import_module("cupy.cuda.nccl")
    own = {"gpus", "cliques", "made", "enqueue", "failed", "aborted", "destroyed", "running"}
    with gpu_on_host.installed(monkeypatch):
        cuda = importlib.import_module("cupy").cuda
        assert not missing(cuda, real, set())
        assert not missing(cuda.runtime, runtime, set())
        assert not missing(cuda.nccl, nccl, set())
        assert not missing(cuda.nccl.NcclCommunicator, nccl.NcclCommunicator, own)
        for name in public(cuda.nccl.NcclCommunicator) - own:
            takes = signature(getattr(nccl.NcclCommunicator, name))
            has = list(inspect.signature(getattr(cuda.nccl.NcclCommunicator, name)).parameters)
            assert takes is not None and ["self", *takes.parameters] == has, name
        assert not missing(gpu_on_host.Stream, real.Stream, set())
        assert not missing(gpu_on_host.Event, real.Event, set())
        for name in public(cuda.runtime):
            standin = getattr(cuda.runtime, name)
            takes = signature(getattr(runtime, name)) if getattr(standin, "__name__", "") == name else None
            if takes is not None and inspect.isfunction(standin):
                assert list(inspect.signature(standin).parameters) == list(takes.parameters), name


def test_arrays_and_functions_of_the_stand_in_are_those_of_cupy() -> None:
    real = cupy
    with graphs.installed():
        standin = importlib.import_module("cupy")
        assert not missing(standin, real, {"Array", "Any", "np", "sys"})
        assert not missing(standin.Array, real.ndarray, {"to_host"})
        assert not missing(standin.cuda, real.cuda, set())
        assert not missing(standin.cuda.runtime, real.cuda.runtime, set())
        for name in ("Stream", "Graph", "MemoryPool", "Device"):
            there = real.cuda.graph.Graph if name == "Graph" else getattr(real.cuda, name)
            assert not missing(getattr(graphs, name), there, {"non_blocking"}), name
