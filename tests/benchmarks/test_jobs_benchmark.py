import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raises import raises

from bench_harness import programs
from hpcdp.errors import LaunchError

# A job whose launcher starts another process, which runs on unless somebody ends it.
JOB = """
import pathlib, subprocess, sys
from hpcdp.launch.process_monitor import bound
below = subprocess.Popen(["sleep", "60"], preexec_fn=bound())
pathlib.Path(sys.argv[1]).write_text(str(below.pid))
below.wait()
"""
PATH = f"import sys; sys.path.insert(0, {str(programs.PROGRAMS)!r})\n"
STARTS = f"{PATH}from bench_harness import programs; programs.run_job([sys.executable, '-c', *sys.argv[1:]], 60)"
STARTS_ON_GPU = f"""{PATH}
from pathlib import Path
import bench_gpu
bench_gpu._run([sys.executable, '-c', *sys.argv[1:]], {{}}, Path("none"), 60)
"""


def ends(pid: int) -> bool:
    for _ in range(200):
        try:
            if "\tZ" in Path(f"/proc/{pid}/status").read_text().replace("State:", "\t").replace(" ", ""):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def written(path: Path) -> int:
    for _ in range(400):
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError("the job has not begun")


@pytest.mark.thorough
def test_a_job_that_takes_too_long_is_ended_with_all_below_it(tmp_path: Path) -> None:
    done = programs.run_job([sys.executable, "-c", JOB, str(tmp_path / "pid")], 4)
    assert (done.returncode, programs.reason(done)) == (programs.ENDED, "ended after 4 s")
    assert ends(written(tmp_path / "pid"))


@pytest.mark.parametrize("starts", [STARTS, STARTS_ON_GPU], ids=["usual", "on a GPU"])
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.thorough
def test_a_job_ends_with_the_benchmark_that_has_started_it(tmp_path: Path, sign: int, starts: str) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", starts, JOB, str(tmp_path / "pid")], stderr=subprocess.DEVNULL, start_new_session=True
    )
    pid = written(tmp_path / "pid")
    os.kill(benchmark.pid, sign)
    assert benchmark.wait(10) != 0
    assert ends(pid)


def test_what_has_failed_says_why() -> None:
    program = [sys.executable, "-c", "import sys; print('figures'); print('hpcdp: no', file=sys.stderr); sys.exit(3)"]
    with raises(LaunchError, operation="stores", where="dist_sync", expected=0, got=3):
        programs.finished("stores", "dist_sync", program, 60)
    assert programs.reason(programs.run_job([sys.executable, "-c", "raise SystemExit(1)"], 60)) == "no output"
    silent = [sys.executable, "-c", "raise SystemExit(1)"]
    assert programs.reason(programs.run_job(silent, 60), "a result was wrong") == "a result was wrong"
    assert programs.finished("x", "y", [sys.executable, "-c", "import os; print(os.environ['A'])"], 60, A="b") == "b\n"
