"""The runner of the tests: what it counts, and that a failing or hanging rank ends a run."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = "import os, subprocess, sys, time, pytest\n"


def run(folder: Path, tests: str, workers: int, ranks: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_planted.py").write_text(HEADER + tests)
    command = [
        sys.executable,
        "tests/run.py",
        "--workers",
        str(workers),
        "--ranks",
        ranks,
        "-p",
        "conftest",
        str(folder),
    ]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "tests")} | environ
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_counts_over_all_runs(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "def test_plain(request): assert hasattr(request.config, 'workerinput')\n"
        "@pytest.mark.alone\ndef test_alone(request): assert not hasattr(request.config, 'workerinput')\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
        "@pytest.mark.mpi\ndef test_everywhere(): pass\n"
        "@pytest.mark.mpi(min_size=2)\ndef test_two(): pass\n"
        "@pytest.mark.mpi(min_size=99)\ndef test_many(): pass\n",
        2,
        "1,2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x no GPU" in done.stdout and "Test requires 99 MPI processes" in done.stdout
    assert done.stdout.splitlines()[-1] == "5 passed, 0 failed, 2 skipped"


@pytest.mark.slow
def test_a_failing_rank_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(
        tmp_path,
        "@pytest.mark.mpi(min_size=2)\ndef test_fails():\n"
        "    from mpi4py import MPI\n"
        "    assert MPI.COMM_WORLD.rank != 1, 'rank one is unwell'\n"
        "    MPI.COMM_WORLD.Barrier()\n    time.sleep(100)\n",
        1,
        "2",
    )
    assert time.monotonic() - started < 60
    assert done.returncode == 1
    assert "=== rank 1 of 2 failed:" in done.stderr and "rank one is unwell" in done.stderr
    assert "2 MPI ranks, rank 1: " in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_hang_is_ended_and_named(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "@pytest.mark.mpi(min_size=2)\ndef test_waits():\n"
        "    from mpi4py import MPI\n"
        "    MPI.COMM_WORLD.recv() if MPI.COMM_WORLD.rank == 0 else time.sleep(100)\n",
        1,
        "2",
        HPCDP_TEST_LIMIT_S="2",
    )
    assert done.returncode == 1
    assert "in test_waits" in done.stdout
    assert "hung or crashed, rank 0, 1: " in done.stdout and "test_waits" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_hang_and_a_crash_end_a_worker_and_are_named(tmp_path: Path) -> None:
    tests = "def test_hangs(): time.sleep(100)\ndef test_crashes(): os.abort()\n"
    tests += "@pytest.mark.parametrize('number', range(20))\ndef test_passes(number): pass\n"
    done = run(tmp_path, tests, 2, "", HPCDP_TEST_LIMIT_S="2")
    assert done.returncode == 1
    assert "in test_hangs" in done.stdout and "in test_crashes" in done.stdout
    for name in ("hangs", "crashes"):
        assert re.search(rf"^  2 workers: hung or crashed: .*::test_{name}$", done.stdout, re.M), done.stdout
    assert done.stdout.splitlines()[-1] == "20 passed, 2 failed, 0 skipped"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_module_that_cannot_be_imported_fails_in_the_runs_that_import_it(tmp_path: Path) -> None:
    done = run(tmp_path, "import no_such_module\n@pytest.mark.mpi\ndef test_everywhere(): pass\n", 2, "1")
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 passed, 2 failed, 0 skipped"  # not in that of what is marked alone


@pytest.mark.slow
def test_a_marker_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "everywhere = getattr(pytest.mark, 'mpi')\n@everywhere\ndef test_one(): pass\n", 1, "")
    assert done.returncode == 1
    assert "test_one: its own file must say mark.mpi" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_ending_the_runner_ends_the_tests_and_their_jobs(workers: int, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"""
def test_long():
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    jobs = [subprocess.Popen(sleep, start_new_session=apart) for apart in (False, True)]
    with open({str(started)!r}, "w") as file:
        file.write(f"{{os.getpid()}} {{jobs[0].pid}} {{jobs[1].pid}}.")
    time.sleep(100)
"""
    (tmp_path / "test_planted.py").write_text(HEADER + code)
    command = [sys.executable, "tests/run.py", "--workers", str(workers), "-p", "conftest", str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    runner = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (started.exists() and started.read_text().endswith(".")):
        assert runner.poll() is None
        time.sleep(0.05)
    runner.terminate()
    said, _ = runner.communicate(timeout=60)
    assert runner.returncode == 1 and said.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    assert not [pid for pid in started.read_text().strip(".").split() if Path(f"/proc/{pid}").exists()]
