"""The script of a session on a lent GPU, with an interpreter that only notes what it is to run."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def session(folder: Path, interpreter: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a session whose Python is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\n{interpreter}\n")
    python.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(python), "PATH": f"{folder}:{os.environ['PATH']}"}
    return [str(SCRIPT), *options, str(folder / "out")], environ


def run(folder: Path, interpreter: str, *options: str) -> subprocess.CompletedProcess[str]:
    command, environ = session(folder, interpreter, *options)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


@pytest.fixture
def sanitizer(tmp_path: Path) -> None:
    (tmp_path / "compute-sanitizer").write_text("#!/bin/bash\necho sanitized\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)


def test_every_part_runs_and_leaves_a_log(tmp_path: Path, sanitizer: None) -> None:
    (tmp_path / "wheels").mkdir()
    done = run(tmp_path, 'echo "ran $*"', "-w", str(tmp_path / "wheels"))
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert len(logs) <= 8  # as many files as some machines return
    assert logs["summary.txt"] == done.stdout and "-m pip install" in logs["machine.log"]
    assert "ran -m pytest" in logs["jobs.log"] and "tests/gpu" in logs["jobs.log"]
    for test in re.findall(r"tests/[\w/]+\.py", logs["tests.log"].splitlines()[1]):
        assert (SCRIPT.parents[1] / test).exists()
    assert "tests/kernels/test_cuda_nn.py" in logs["tests.log"] and "tests/train/" in logs["tests.log"]
    torch = [line.split("bench_torch_gpu.py ")[1] for line in logs["torch.log"].splitlines() if line.startswith("ran")]
    assert torch == ["nccl", "hpcdp", "hpcdp", "gloo"]
    assert logs["sanitizer.log"].count("sanitized\n") == 2
    for test in re.findall(r"tests/[\w/]+\.py", logs["sanitizer.log"]):
        assert (SCRIPT.parents[1] / test).exists()


def test_parts_run_alone(tmp_path: Path) -> None:
    command, environ = session(tmp_path, "true")
    done = subprocess.run([*command, "bench", "torch"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and sorted(path.stem for path in (tmp_path / "out").iterdir()) == [
        "bench", "machine", "summary", "torch",
    ]  # fmt: skip


def test_a_part_that_fails_or_hangs_ends_no_other(tmp_path: Path) -> None:
    fails_or_hangs = 'case "$*" in *tests/gpu) exit 3 ;; *"cli info") sleep 60 ;; *) echo ran ;; esac'
    done = run(tmp_path, fails_or_hangs, "-t", "3")
    assert done.returncode == 1
    assert re.search(r"^machine: status 124 after \d+ s of 3", done.stdout, re.M)
    assert "no time left" in done.stdout and "jobs: not started" in done.stdout
    done = run(tmp_path, fails_or_hangs.replace("sleep 60", "true"))
    assert done.returncode == 1 and "jobs: status 3 " in done.stdout and "tests: status 0 " in done.stdout


def test_a_session_that_is_killed_keeps_what_it_has(tmp_path: Path) -> None:
    command, environ = session(tmp_path, 'case "$*" in *tests/gpu) echo begun; exec sleep 3 ;; *) echo ran ;; esac')
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, start_new_session=True)
    jobs = tmp_path / "out" / "jobs.log"
    until = time.monotonic() + 20
    while not (jobs.exists() and "begun" in jobs.read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for line in (tmp_path / "out" / "jobs.log", tmp_path / "out" / "machine.log"):
        assert line.exists()
    assert "machine: status 0" in (tmp_path / "out" / "summary.txt").read_text()


def test_wrong_options_are_an_error(tmp_path: Path) -> None:
    for options in (["-x"], ["-t"]):
        done = run(tmp_path, "true", *options)
        assert done.returncode == 2 and "benchmarks/gpu_session.sh [-t SECONDS]" in done.stderr
