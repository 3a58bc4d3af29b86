"""The runner of the tests: what it counts, and that a failing or hanging rank ends a run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = "import time, pytest\n"


def run(folder: Path, tests: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_planted.py").write_text(HEADER + tests)
    command = [sys.executable, "tests/run.py", "--ranks", "1,2", "-p", "conftest", str(folder)]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "tests")} | environ
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_counts_over_all_runs(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "def test_plain(): pass\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
        "@pytest.mark.mpi\ndef test_everywhere(): pass\n"
        "@pytest.mark.mpi(min_size=2)\ndef test_two(): pass\n"
        "@pytest.mark.mpi(min_size=99)\ndef test_many(): pass\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x no GPU" in done.stdout and "Test requires 99 MPI processes" in done.stdout
    assert done.stdout.splitlines()[-1] == "4 passed, 0 failed, 2 skipped"


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(
        tmp_path,
        "@pytest.mark.mpi(min_size=2)\ndef test_alone():\n"
        "    from mpi4py import MPI\n"
        "    assert MPI.COMM_WORLD.rank != 1, 'rank one is unwell'\n"
        "    MPI.COMM_WORLD.Barrier()\n    time.sleep(100)\n",
    )
    assert time.monotonic() - started < 60
    assert done.returncode == 1
    assert "=== rank 1 of 2 failed:" in done.stderr and "rank one is unwell" in done.stderr
    assert "2 MPI ranks, rank 1: " in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.slow
def test_a_hang_is_ended_and_named(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "@pytest.mark.mpi(min_size=2)\ndef test_waits():\n"
        "    from mpi4py import MPI\n"
        "    MPI.COMM_WORLD.recv() if MPI.COMM_WORLD.rank == 0 else time.sleep(100)\n",
        HPCDP_TEST_LIMIT_S="2",
    )
    assert done.returncode == 1
    assert "in test_waits" in done.stderr
    assert "hung or crashed, rank 0, 1: " in done.stdout and "test_waits" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "import no_such_module\n")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 passed, 3 failed, 0 skipped"


@pytest.mark.slow
def test_ending_the_runner_ends_the_tests(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import os, pathlib\ndef test_long():\n    pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
    (tmp_path / "test_planted.py").write_text(HEADER + code + "    time.sleep(100)\n")
    command = [sys.executable, "tests/run.py", "-p", "conftest", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    runner = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (started.exists() and started.read_text()):
        assert runner.poll() is None
        time.sleep(0.05)
    runner.terminate()
    said, _ = runner.communicate(timeout=60)
    assert runner.returncode == 1 and said.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    assert not Path(f"/proc/{started.read_text()}").exists()
