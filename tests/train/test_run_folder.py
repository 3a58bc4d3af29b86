import dataclasses
import errno
import os
import re
import time

import pytest
from raises import raises
from train_command import train_on_threads

from hpcdp.checkpoint import complete_steps
from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.cli import checkpoint
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError
from hpcdp.train import config as runs_config
from hpcdp.train.config import TrainConfig
from hpcdp.train.metrics import read_metrics
from hpcdp.train.run_dir import RunFolder, draw_run, make_run_folder, open_run_folder

STEP = {"kind": "step", "step": 1, "epoch": 0.5, "loss": 1.5, "accuracy": 0.5}


def open_on(ranks: int, config: TrainConfig) -> list:
    def job(world):
        made = make_run_folder(config.for_world(world.size), world)
        return made, open_run_folder(made, world)

    return thread_comm.run(ranks, job)


def error_on(ranks: int, config: TrainConfig, kind: type = ConfigError) -> list[str]:
    def job(world):
        with pytest.raises(kind) as caught:
            make_run_folder(config, world)
        return str(caught.value)

    return thread_comm.run(ranks, job)


def test_rank_0_opens_one_new_folder_and_all_know_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        opened = open_on(3, TrainConfig(model="mlp"))
        assert [config.run_dir for config, _ in opened] == [f"runs/mlp-digits-00{number}"] * 3
        assert [folder is None for _, folder in opened] == [False, True, True]
        assert sorted(p.name for p in (tmp_path / "runs").iterdir())[-1] == f"mlp-digits-00{number}"


def test_the_settings_in_the_folder_repeat_the_run_elsewhere(tmp_path):
    folder, trace = str(tmp_path / "a"), str(tmp_path / "trace.json")
    config = TrainConfig(model="mlp", lr=0.012, clip_norm=2.5, run_dir=folder, overwrite=True, trace=trace)
    open_on(2, config)
    again = runs_config.load(tmp_path / "a" / "config.toml")
    assert (again.model, again.lr, again.clip_norm, again.ranks) == ("mlp", 0.012, 2.5, 2)
    assert (again.run_dir, again.overwrite, again.trace) == (None, False, None)


def test_an_earlier_run_is_left_alone_and_every_rank_says_so(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "a"))
    ((_, folder),) = open_on(1, config)
    with folder:
        folder.write(STEP)
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    lines = error_on(3, config)
    assert set(lines) == {
        f"run folder exists and is not empty [{tmp_path}/a]; choose another --run-dir, or add --resume auto or "
        "--overwrite"
    }
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_job_that_has_the_folder_is_named_also_before_its_first_checkpoint(overwrite, tmp_path):
    config = TrainConfig(model="mlp", run_dir=str(tmp_path / "a"), overwrite=overwrite)
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    lock = WriterLock(tmp_path / "a" / "checkpoints")  # which is the first thing that a job makes there
    try:
        (tmp_path / "a" / "config.toml").write_text("")
        said = error_on(3, config, DataError)
    finally:
        lock.release()
    assert len({*said}) == 1
    assert f"expected no other job that saves here, got process {os.getpid()} of " in said[0]
    assert (tmp_path / "a" / "config.toml").exists()


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "a"), overwrite=True)
    ((_, folder),) = open_on(1, config)
    with folder:
        folder.write(STEP)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    ((_, folder),) = open_on(1, config)
    with folder:
        pass
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert "curves.png" not in names
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert read_metrics(tmp_path / "a" / "metrics.jsonl") == []


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    lines = error_on(2, TrainConfig(run_dir=str(tmp_path / "file" / "a")))
    assert lines[0] == lines[1]
    assert str(tmp_path / "file" / "a") in lines[0]
    assert "a path through a file" in lines[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "config.toml").symlink_to("/dev/full")
    with raises(ConfigError, operation="write the run folder", where=tmp_path, remedy="--run-dir") as caught:
        RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=1))
    assert "\n" not in str(caught.value)


def test_an_interrupted_run_keeps_its_numbers_and_gets_its_curves(tmp_path):
    folder = RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=2))
    with pytest.raises(KeyboardInterrupt), folder:
        folder.write(STEP)
        raise KeyboardInterrupt
    assert read_metrics(tmp_path / "metrics.jsonl") == [STEP]
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_resumed_run_says_that_its_numbers_are_gone(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path), ranks=2)
    with RunFolder(config) as folder:
        folder.write(STEP)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"metrics.jsonl is gone: what came before is not shown"):
        RunFolder(dataclasses.replace(config, resume=str(tmp_path)))


@pytest.mark.parametrize("line", ["{bad", "5", "[" * 100_000, '{"kind": "epoch"}', '{"kind": "other", "epoch": 1}'])
@pytest.mark.thorough
def test_numbers_that_are_damaged_are_a_failure_of_the_folder_not_of_the_run_that_goes_on(line, tmp_path):
    config = TrainConfig(run_dir=str(tmp_path), ranks=2)
    with RunFolder(config) as folder:
        folder.write(STEP)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with RunFolder(dataclasses.replace(config, resume=str(tmp_path))) as folder:
        folder.go_on(1, 1)
        folder.write({**STEP, "step": 2})
    assert folder.failure.strerror.startswith("metrics.jsonl is damaged: ")
    assert f"{line}\n" in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_that_fails_before_its_first_number_has_no_curves(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=2)):
        raise ZeroDivisionError
    assert not (tmp_path / "curves.png").exists()


def test_a_run_whose_files_are_not_complete_fails_on_every_rank_after_its_report(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpcdp.train.run_dir.draw_curves", full)
    assert train_on_threads(monkeypatch, tmp_path, 3, "mlp", "--epochs", "1", "--run-dir", "runs/a") == [1, 1, 1]
    shown = capsys.readouterr()
    assert "run folder     runs/a, not complete: No space left on device" in shown.out
    assert "hpcdp: write the results of the run [runs/a]: got no space left on device; free disk space" in shown.err


def test_curves_that_cannot_be_drawn_are_a_failure_of_the_folder_not_of_the_run(tmp_path):
    folder = RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=2))
    (tmp_path / "curves.png").mkdir()
    with folder:
        folder.write(STEP)
    assert folder.failure is not None


@pytest.mark.parametrize("changed", [None, "lr = 'mine'", "[half of it"])
def test_settings_that_were_changed_meanwhile_do_not_fail_the_run(changed, tmp_path):
    with RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=2)) as folder:
        folder.write(STEP)
        (tmp_path / "config.toml").unlink()
        if changed:
            (tmp_path / "config.toml").write_text(changed)
    assert folder.failure is None
    assert (tmp_path / "curves.png").exists()


def test_the_curves_of_a_killed_run_can_be_drawn_later(tmp_path):
    folder = RunFolder(TrainConfig(run_dir=str(tmp_path), ranks=2))
    for number in (1, 2, 3):
        folder.write(STEP | {"step": number})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-9])
    draw_run(tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.thorough
def test_names_in_the_help_of_checkpoint_are_those_of_a_run(tmp_path, monkeypatch):
    train_on_threads(monkeypatch, tmp_path, 1, "lenet", "--epochs", "1", "--run-dir", "runs/a")
    monkeypatch.chdir(tmp_path)
    for command in ("show", "export"):
        (named,) = re.findall(rf"hpcdp checkpoint {command} \S+ (.*)", checkpoint._EPILOG)
        assert checkpoint.main([command, "runs/a", *named.replace(".pt", ".npz").split()]) == 0


def test_no_rank_ends_the_job_before_rank_0_can_report_why(tmp_path, monkeypatch):
    """Rank 0 draws the curves first, and the launcher ends it when another rank has ended."""
    order = []

    def full(folder, step, atomic_rename):
        raise OSError(errno.ENOSPC, "No space left on device")

    def draw(*_):
        time.sleep(0.5)
        order.append("drawn")

    monkeypatch.setattr(complete_steps, "commit", full)
    monkeypatch.setattr("hpcdp.train.run_dir.draw_curves", draw)
    monkeypatch.setattr("hpcdp.cli.fail", lambda error, status: order.append(str(error)) or status)
    assert train_on_threads(monkeypatch, tmp_path, 3, "mlp", "--epochs", "1", "--run-dir", "a") == [1, 1, 1]
    assert order[0] == "drawn" and len(order) == 4
    assert all("got no space left on device; free disk space" in why for why in order[1:])
