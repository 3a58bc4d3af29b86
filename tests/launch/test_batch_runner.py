import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_jobs import wait_for

from hpcdp.launch.launchers import batch

TELLS = """
import os, signal, sys, time
from pathlib import Path
def tell(number, _):
    Path(sys.argv[1], "got").write_text(signal.Signals(number).name)
    sys.exit(75)
for sign in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
    signal.signal(sign, tell)
Path(sys.argv[1], "ready").write_text(f"{os.getpgid(0)} {os.getppid()}")
for _ in range(600):  # in one sleep a signal that comes just before it would not be seen
    time.sleep(0.1)
"""


def start(folder: Path, *command: str, stop_s: str = "inf") -> subprocess.Popen[bytes]:
    runner = [sys.executable, "-m", "hpcdp.launch.launchers.batch", str(folder), "99", stop_s]
    return subprocess.Popen([*runner, *command], start_new_session=True)


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (7, 7), (75, 99), (99, 1), (100, 1)])
def test_the_status_is_left_in_the_folder(status: int, ends: int, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("3")  # of the run before
    assert batch.main([str(tmp_path), "99", "inf", sys.executable, "-c", f"raise SystemExit({status})"]) == ends
    assert [path.name for path in tmp_path.iterdir()] == ["status"]
    assert (tmp_path / "status").read_text() == str(status)


def test_a_command_that_a_signal_ends(tmp_path: Path) -> None:
    assert batch.run_command(tmp_path, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 137
    assert (tmp_path / "status").read_text() == "137"


@pytest.mark.parametrize(
    ("how", "sign", "got"),
    [
        ("from the batch system", "SIGUSR1", "SIGUSR1"),
        ("from the batch system", "SIGUSR2", "SIGUSR1"),
        ("from the batch system", "SIGTERM", "SIGTERM"),
        ("in the folder", "SIGUSR2", "SIGUSR2"),
        ("in the folder", "SIGINT", "SIGINT"),
    ],
)
@pytest.mark.thorough
def test_signals_are_handed_on(how: str, sign: str, got: str, tmp_path: Path) -> None:
    (tmp_path / "SIGTERM").touch()  # of the run before
    runner = start(tmp_path, sys.executable, "-c", TELLS, str(tmp_path))
    wait_for((tmp_path / "ready").exists)
    wait_for((tmp_path / "ready").read_text)
    group, parent = (tmp_path / "ready").read_text().split()
    assert parent == str(runner.pid) != group, "the batch system's signals would come to it, too"
    if how == "in the folder":
        (tmp_path / sign).touch()
    else:
        runner.send_signal(signal.Signals[sign])
    assert runner.wait(20) == 99
    assert (tmp_path / "got").read_text() == got
    assert (tmp_path / "status").read_text() == "75"


def test_it_stops_early_in_time(tmp_path: Path) -> None:
    assert start(tmp_path, sys.executable, "-c", TELLS, str(tmp_path), stop_s="2").wait(20) == 99
    assert (tmp_path / "got").read_text() == "SIGUSR1"


def test_what_it_has_started_ends_with_it(tmp_path: Path) -> None:
    runner = start(tmp_path, sys.executable, "-c", TELLS, str(tmp_path))
    wait_for((tmp_path / "ready").exists)
    runner.kill()
    runner.wait()
    wait_for((tmp_path / "got").exists)
    assert (tmp_path / "got").read_text() == "SIGTERM"


def test_a_folder_that_has_gone_is_no_fault(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    assert batch.run_command(folder, [sys.executable, "-c", f"import os; os.rmdir({str(folder)!r})"]) == 0
