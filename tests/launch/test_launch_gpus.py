"""What `hpcdp info` and `hpcdp doctor` say of GPUs, with libraries and a CuPy that take the places of real ones."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_on_host import cuda_driver

from hpcdp.cli import doctor
from hpcdp.cli.doctor import Verdict
from hpcdp.launch import hosts
from hpcdp.launch.mpi_library import MpiLibrary

ONE = "0000:3B:00.0 NVIDIA H200"
CUPY = """
from numpy import arange
from . import cuda
__version__ = "14.2.0"
"""
CUDA = """
from types import SimpleNamespace
runtime = SimpleNamespace(getDeviceCount=lambda: 1, driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000)
Device = lambda: SimpleNamespace(synchronize=lambda: None)
"""
NCCL = "available, get_version = True, lambda: 22501"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc, which makes the library that takes the driver's place")
    monkeypatch.setattr(doctor, "LIBRARY", str(cuda_driver.build(tmp_path)))
    monkeypatch.setenv(cuda_driver.GPUS, ONE)


@pytest.fixture
def cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a CuPy on the host."""
    folder = tmp_path / "packages" / "cupy"
    (folder / "cuda").mkdir(parents=True)
    (folder / "__init__.py").write_text(CUPY)
    (folder / "cuda" / "__init__.py").write_text(CUDA)
    (folder / "cuda" / "nccl.py").write_text(NCCL)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a test may write a file again in the second of its time stamp
    monkeypatch.syspath_prepend(folder.parent)
    return folder


@pytest.fixture
def says_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI library that says of itself that it takes arrays in a GPU's memory."""
    path = tmp_path / "libmpi.so.40"
    code = "int MPIX_Query_cuda_support(void) { return 1; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=code, text=True, check=True)
    monkeypatch.setattr(doctor.mpi_library, "find_library", lambda: MpiLibrary("openmpi", path))


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARY", "libnone.so.1")
    why = "none: no libnone.so.1, the library of NVIDIA's driver"
    assert doctor.shown() == {"GPU": why}
    assert doctor.check_gpus() == doctor.ok(why)


def test_a_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARY", "libnone.so.1")
    monkeypatch.setattr(hosts, "gpus", lambda: ["NVIDIA H200"])
    assert doctor.shown()["GPU"].startswith("none: NVIDIA H200 cannot be used, no libnone.so.1")
    finding = doctor.check_gpus()
    assert finding.verdict is Verdict.WARNING and "--nv" in finding.remedy


def test_a_gpu_without_cupy(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    finding = doctor.check_gpus()
    assert finding.saw == "1 (NVIDIA H200), driver for CUDA up to 12.8; CuPy not installed"
    assert finding.remedy.startswith("pip install 'hpcdp[cuda12]'")


def test_versions_and_places(driver: None, cupy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_aware", lambda: "no, it says")
    monkeypatch.setattr(doctor, "driver_release", lambda: "570.86.15")
    assert doctor.shown() == {
        "GPU": "0: NVIDIA H200 at 0000:3b:00.0",
        "GPU driver": "570.86.15, for CUDA up to 12.8",
        "CuPy": "14.2.0 NCCL 2.25.1",
        "CUDA-aware MPI": "no, it says",
    }


def test_a_cupy_without_nccl_and_one_that_breaks(cupy: Path) -> None:
    (cupy / "cuda" / "nccl.py").write_text("available = False")
    assert doctor.cupy() == (True, "14.2.0 without NCCL")
    (cupy / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    works, said = doctor.cupy()
    assert not works and said.startswith("does not work: ImportError: libcudart.so.12")


def test_a_cupy_that_does_not_work_is_not_told_to_be_missing(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cupy", lambda: (False, "does not work: ImportError: libcudart.so.12"))
    finding = doctor.check_gpus()
    assert finding.saw.endswith("CuPy does not work: ImportError: libcudart.so.12")
    assert finding.remedy == "repair it, or reinstall CuPy; or use the CPU with hpcdp train --device cpu"


@pytest.mark.thorough
def test_a_driver_that_is_too_old_for_cupy(driver: None, cupy: Path) -> None:
    old = CUDA.replace("lambda: 1,", "lambda: 1 / 0,").replace(
        "driverGetVersion=lambda: 13000", "driverGetVersion=lambda: 12080"
    )
    (cupy / "cuda" / "__init__.py").write_text(old)
    assert (
        "got a driver for CUDA up to 12.8; install a newer driver, or in an environment without this CuPy: pip install"
        in doctor.shown()["CuPy"]
    )


@pytest.mark.slow
def test_a_library_is_asked(cupy: Path) -> None:
    assert doctor.cuda_aware() == "no, it says"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_library_that_says_yes_is_tried(driver: None, cupy: Path, says_yes: None) -> None:
    assert doctor.cuda_aware() == "yes, it says and does between two ranks of this machine"
    (cupy / "__init__.py").write_text(
        CUPY.replace("from numpy import arange", "from numpy.random import rand as arange")
    )
    assert doctor.cuda_aware() == "no: it says so, but sends something else"
    (cupy / "__init__.py").write_text("import os\nos.kill(os.getpid(), 11)")
    assert doctor.cuda_aware().startswith("no: it says so, but ranks that try it end with ")


def test_within_a_job_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    assert doctor.cuda_aware() == "not tried: this is itself a rank of a job"
