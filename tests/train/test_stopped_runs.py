"""Whole runs over real ranks that are stopped or killed, and go on: their curves are those of one that was not."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_command import ENVIRONMENT, RUN, start, train, train_on_threads

from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.data import ShardedSampler
from hpcdp.launch import process_monitor
from hpcdp.train import config
from hpcdp.train.metrics import read_metrics

SAME = ("kind", "step", "epoch", "loss", "accuracy", "samples", "learning_rate", "test_loss", "test_accuracy")


def numbers(run_dir: Path) -> list[list[object]]:
    return [[record.get(name) for name in SAME] for record in read_metrics(run_dir / "metrics.jsonl")]


PLANTED = """
import os, signal, time
from pathlib import Path
from hpcdp.core.environment import launched_rank

def waits_for_the_signal():
    noted, came = signal.getsignal(signal.SIGUSR1), []
    signal.signal(signal.SIGUSR1, lambda *signals: (noted(*signals), came.append(signals)))
    Path("reached").touch()
    while not came:
        time.sleep(0.01)

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

if launched_rank() == 1:
    from hpcdp.data_parallel.bucket_trainer import BucketTrainer

    step = BucketTrainer.step

    def stepping(self, count):
        if self.step_count == int(os.environ["AT"]):
            globals()[os.environ["RANK_1"]]()
        return step(self, count)

    BucketTrainer.step = stepping
"""


def planted(folder: Path, what: str, at: int, *arguments: str) -> subprocess.Popen[str]:
    """A run in ``a``, on from where it is, whose rank 1 does ``what`` after so many steps."""
    (folder / "planted").mkdir(exist_ok=True)
    (folder / "planted" / "sitecustomize.py").write_text(PLANTED)
    path = os.pathsep.join([str(folder / "planted"), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    arguments = (*RUN, "--run-dir", "a", "--resume", "auto", *arguments)
    return start(folder, *arguments, PYTHONPATH=path, RANK_1=what, AT=str(at))


@pytest.mark.thorough
def test_a_run_that_is_told_to_stop_and_then_loses_a_rank_goes_on_as_if_nothing_had_happened(
    finished, tmp_path, monkeypatch, capfd
):
    whole, _ = finished
    process = planted(tmp_path, "waits_for_the_signal", 33, "--checkpoint-every", "15")
    deadline = time.monotonic() + 90
    while not (tmp_path / "reached").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    # One complete checkpoint at least is there to go on from: that of step 15.
    files = {path: path.stat().st_ino for path in (tmp_path / "a").iterdir()}
    assert train_on_threads(monkeypatch, tmp_path, 1, "--resume", "a", "--ranks", "1") == [2]
    shown, said = capfd.readouterr()
    assert (shown, said.count("\n")) == ("", 1) and "got process" in said and "another folder" in said
    assert {path: path.stat().st_ino for path in (tmp_path / "a").iterdir()} == files
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    shown, errors = process.communicate(timeout=100)
    assert process.returncode == 75
    assert "Traceback" not in errors
    *_, stopped = saved(tmp_path / "a")
    assert f"stopped early  after step {stopped} (SIGUSR1)\ncheckpoint     a" in shown
    assert (tmp_path / "a" / "curves.png").exists()
    said, wanted = (folder.joinpath("config.toml").read_text() for folder in (tmp_path / "a", whole))
    assert said.replace("checkpoint_every = 15\n", "") == wanted

    # The checkpoint of step 40 is complete: that of step 80 was not begun before.
    process = planted(tmp_path, "dies", 90, "--checkpoint-every", "40")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[-1] == (
        "hpcdp: ended by SIGKILL, all ranks have ended; its files are in a; resume with: hpcdp train --resume a"
    )
    assert saved(tmp_path / "a")[-1] > stopped

    again = train(tmp_path, "--resume", "a")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resuming a\n" in again.stdout
    assert numbers(tmp_path / "a") == numbers(whole)
    assert not list((tmp_path / "a" / "checkpoints").glob("*.tmp"))


def saved(run_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*[0-9]"))


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["the launcher", "mpirun", "ranks"])
def test_a_signal_while_it_starts_is_not_lost_and_ends_nobody(moment, tmp_path):
    process = start(tmp_path, *RUN, "--epochs", "4000", "--run-dir", "a")
    deadline = time.monotonic() + 90
    while not has_come_to(moment, process.pid):
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGUSR1)
    shown, errors = process.communicate(timeout=100)
    assert process.returncode == 75, errors[-3000:]
    assert "stopped early  after step 2 (SIGUSR1)\ncheckpoint     a/checkpoints\n" in shown


def has_come_to(moment: str, launcher: int) -> bool:
    if moment == "the launcher":  # its handler
        return process_monitor._takes(launcher, signal.SIGUSR1)
    if moment == "mpirun":
        return bool(Path(f"/proc/{launcher}/task/{launcher}/children").read_text())
    return any(process_monitor._ranks_below(launcher))


@pytest.mark.thorough
def test_of_two_jobs_that_start_in_one_folder_the_second_writes_nothing(tmp_path):
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    lock = WriterLock(tmp_path / "a" / "checkpoints")
    refused = train(tmp_path, *RUN, "--run-dir", "a")
    lock.release()
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"hpcdp: lock the checkpoints [{tmp_path}/a/checkpoints/writer.lock]: expected no "
                                     f"other job that saves here, got process {os.getpid()} of ")  # fmt: skip
    assert refused.stdout == ""
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["checkpoints", "writer.lock"]


def test_a_time_limit(tmp_path, monkeypatch, capsys):
    arguments = ("mlp", "--data", "digits", "--epochs", "40", "--run-dir", "a b", "--time-limit-s", "0.01")
    assert train_on_threads(monkeypatch, tmp_path, 1, *arguments) == [75]
    shown = capsys.readouterr().out
    assert "stopped early  after step 2 (time_limit_s)\ncheckpoint     a b/checkpoints\n" in shown
    assert shown.endswith("resume with    hpcdp train --resume 'a b'\n")


def test_a_run_goes_on_with_the_shares_that_are_said_then(tmp_path, monkeypatch):
    batches, used = ShardedSampler.batches, []

    def noted(sampler, done=None):
        used.append((done, sampler.weights))
        return batches(sampler, done)

    monkeypatch.setattr(ShardedSampler, "batches", noted)
    arguments = ("mlp", "--data", "digits", "--epochs", "2", "--run-dir", "a", "--ranks", "2", "--work-load", "3,1")
    assert train_on_threads(monkeypatch, tmp_path, 2, *arguments, "--time-limit-s", "0.01") == [75, 75]
    assert train_on_threads(monkeypatch, tmp_path, 2, "--resume", "a", "--work-load", "1,3") == [0, 0]
    assert used == [(None, (3.0, 1.0))] * 2 + [(2, (1.0, 3.0))] * 2 + [(None, (1.0, 3.0))] * 2


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_named_in_a_line_and_the_one_before_is_taken(tmp_path):
    done = train(tmp_path, *RUN, "--epochs", "2", "--run-dir", "a", "--checkpoint-every", "20")
    assert done.returncode == 0, done.stderr[-3000:]
    *_, older, newest = sorted((tmp_path / "a" / "checkpoints").glob("step-*"))
    for path in (newest, older):
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes().replace(b"step", b"stop", 1))
    again = train(tmp_path, "--resume", "a")
    assert again.returncode == 0, again.stderr[-3000:]
    assert [re.sub(r"step-0+", "", line) for line in again.stderr.splitlines()] == [
        f"hpcdp: read the checkpoint [{tmp_path}/a/checkpoints/{damaged}/manifest.json]: expected an undamaged "
        f"manifest, got a checksum that does not fit: taking step {step} instead"
        for damaged, step in ((int(newest.name[5:]), int(older.name[5:])), (int(older.name[5:]), 20))
    ]


@pytest.mark.thorough
def test_what_a_killed_start_has_left_is_started_over(tmp_path):
    quick = ("mlp", "--epochs", "1", "--warmup-epochs", "0", "--run-dir", "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text("model = 'lenet'\n")
    (tmp_path / "a" / "metrics.jsonl").write_text("{")
    assert "is not empty" in train(tmp_path, *quick).stderr
    done = train(tmp_path, *quick, "--resume", "auto")
    assert done.returncode == 0, done.stderr[-3000:]
    assert config.load(tmp_path / "a" / "config.toml").model == "mlp"
    refused = train(tmp_path, *quick, "--resume", "auto", "--lr", "0.2", "--threads", "2", "--seed", "3")
    assert refused.returncode == 2
    assert refused.stderr == (
        "hpcdp: resume [a]: expected lr = 0.05, seed = 0, got lr = 0.2, seed = 3; leave out what would change the run, "
        "or start another one without --resume\n"
    )
