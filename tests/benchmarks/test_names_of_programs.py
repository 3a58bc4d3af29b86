"""The files of benchmarks/ shadow nothing: their folder is on the path of each program that is started there."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from bench_harness import programs

MODULES = sorted(
    path.name.removesuffix(".py")
    for path in programs.PROGRAMS.iterdir()
    if path.suffix == ".py" or any(path.glob("*.py"))  # a folder without Python never hides a package behind it
)
ALL = sorted(path.stem for path in programs.PROGRAMS.glob("bench_*.py"))
ON_PYPI = {
    "bench",
    "benchmark",
    "benchmarks",
    "cluster",
    "compression",
    "engine",
    "harness",
    "kernels",
    "slurm",
    "split",
}
"""Names of packages that others may have installed."""


def test_every_name_is_one_of_ours_alone() -> None:
    assert len(ALL) > 20 and "bench_harness" in MODULES
    assert [name for name in MODULES if not name.startswith("bench_")] == []
    assert ON_PYPI.isdisjoint(MODULES)
    others = [path for path in sys.path if Path(path or ".").resolve() != programs.PROGRAMS]
    assert [name for name in MODULES if PathFinder.find_spec(name, others)] == []


def test_a_clone_on_the_path_has_no_package_of_programs() -> None:
    assert not (programs.PROGRAMS / "__init__.py").exists()
    assert PathFinder.find_spec("hpcdp.benchmarks", importlib.import_module("hpcdp").__path__) is None
    spec = PathFinder.find_spec("benchmarks", [str(programs.PROGRAMS.parent)])
    assert spec is None or spec.origin is None


@pytest.mark.thorough  # test_misuse_of_programs.py starts some of them
@pytest.mark.parametrize("name", ALL)
def test_each_one_starts_from_any_folder(name: str, tmp_path: Path) -> None:
    command = [sys.executable, programs.PROGRAMS / f"{name}.py", "--help"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"benchmarks/{name}.py" in done.stdout
