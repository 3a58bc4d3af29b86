import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_jobs import FULL
from raises import raises

from hpcdp.errors import ConfigError, LaunchError
from hpcdp.launch import runner
from hpcdp.launch.launchers import LaunchPlan, batch


def test_only_what_programs_need_travels() -> None:
    value = 'it\'s a $HOME "and"\n`two` lines'
    environ = {
        "PATH": "/x:/y",
        "HPCDP_A": value,
        "OMPI_MCA_btl": "self",
        "SSH_AUTH_SOCK": "/s",
        "A": "b",
    }
    script = "\n".join([*batch.exports(environ), "exec /usr/bin/env -0"])
    done = subprocess.run(["/bin/bash", "-c", script], env={}, capture_output=True, text=True, check=True)
    found = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    assert {name: found.get(name) for name in environ} == {
        "PATH": "/x:/y", "HPCDP_A": value, "OMPI_MCA_btl": "self", "SSH_AUTH_SOCK": None, "A": None,
    }  # fmt: skip


def test_the_words_of_batch_args() -> None:
    assert batch.split("-q 'two words'  -l a=b", ["-o"]) == ["-q", "two words", "-l", "a=b"]
    with raises(ConfigError, operation="launch --batch-args", expected=["-o", "-e"], got="'-e'"):
        batch.split("-q x -e y", ["-o", "-e"])


def test_within_a_job_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launched_ranks", lambda: 4)
    with raises(LaunchError, operation="launch --launcher sge", got=4):
        batch.check(FULL, "sge")


class Batch:
    """A batch system whose job is over when ``job``, a Python program in its folder, is."""

    def __init__(self, folder: Path, job: str, canceled: str = "") -> None:
        self.folder, self.canceled, self.cancels = folder, canceled, 0
        self.process = subprocess.Popen([sys.executable, "-c", job], cwd=folder)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def cancel(self) -> None:
        self.cancels += 1
        self.process.kill()

    def fate(self) -> tuple[int, str]:
        return 42, "it was eaten"


WRITES = "import time; f = open('output', 'a'); print('one', file=f, flush=True); time.sleep(0.5); print('two', file=f)"


def test_what_the_job_writes_is_shown_while_it_runs(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = tmp_path / "job"
    job = f"{WRITES}; open('errors', 'wb').write(bytes([255])); open('status', 'w').write('5')"
    plan = LaunchPlan([], {folder / "script": os.fsdecode(b"text \xe9")})

    def submit() -> Batch:
        assert (folder / "script").read_bytes() == b"text \xe9"
        assert (folder / "script").stat().st_mode & 0o77 == folder.stat().st_mode & 0o77 == 0
        return Batch(folder, job)

    assert batch.run(plan, folder, submit) == 5
    output, errors = capfdbinary.readouterr()
    assert (output, errors) == (b"one\ntwo\n", b"\xff")
    assert not folder.exists()


def test_a_job_without_a_status_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(batch, "_LATE_S", 0.5)
    assert batch.run(LaunchPlan([]), tmp_path / "job", lambda: Batch(tmp_path / "job", "")) == 42
    assert capsys.readouterr().err == "hpcdp launch: it was eaten\n"


@pytest.mark.parametrize(("signals", "status"), [(["SIGTERM"], 143), (["SIGUSR1"], 3), (["SIGHUP"], 3)])
def test_signals_are_left_for_the_job(signals: list[str], status: int, tmp_path: Path) -> None:
    code = f'''
import signal, sys
from pathlib import Path
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
from test_batch import Batch
from hpcdp.launch.launchers import batch
from hpcdp.launch.launchers import LaunchPlan as Plan
signal.signal(signal.SIGHUP, signal.SIG_IGN)
job = """
import os, time
while not os.path.exists('../go'):
    time.sleep(0.01)
open('status', 'w').write('3')
open('../seen', 'w').write(str(os.listdir()))
"""
folder = Path({str(tmp_path / "job")!r})
sys.exit(batch.run(Plan([]), folder, lambda: Batch(folder, job)))
'''
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not (tmp_path / "job").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    for name in signals:
        process.send_signal(signal.Signals[name])
    while signals == ["SIGUSR1"] and not (tmp_path / "job" / "SIGUSR1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if status == 3:
        (tmp_path / "go").touch()
    assert process.wait(30) == status
    if status == 3:
        assert ("SIGUSR1" in (tmp_path / "seen").read_text()) == (signals == ["SIGUSR1"])
        assert "SIGHUP" not in (tmp_path / "seen").read_text()
    assert not (tmp_path / "job").exists()


def test_a_reader_that_has_gone_cancels_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    jobs = []
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(os.fdopen(write, "wb", buffering=0)))
    with pytest.raises(BrokenPipeError):
        batch.run(LaunchPlan([]), tmp_path / "job", lambda: jobs.append(Batch(tmp_path / "job", WRITES)) or jobs[0])
    assert jobs[0].cancels == 1 and not (tmp_path / "job").exists()


def test_a_job_whose_folder_every_user_may_exchange_is_not_submitted(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with raises(LaunchError, operation="make the folder of the job", where=tmp_path / "job") as caught:
        batch.run(LaunchPlan([]), tmp_path / "job", lambda: pytest.fail("it was submitted"))
    assert caught.value.got == f"{tmp_path}, which every user may write"  # the line may be cut
    assert not (tmp_path / "job").exists()


def test_a_folder_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with raises(LaunchError, operation="make the folder of the job", where=tmp_path / "job"):
        batch.run(LaunchPlan([]), tmp_path / "job", lambda: Batch(tmp_path / "job", ""))
    assert (tmp_path / "job").exists()
