"""Which run ``--resume`` means, and what may be said beside it."""

import errno
import os
from pathlib import Path

import pytest
from raises import raises

from hpcdp.checkpoint import Manager, complete_steps
from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError
from hpcdp.train import run_dir
from hpcdp.train.config import TrainConfig
from hpcdp.train.run_dir import is_finished, settled


def leave_run(folder: Path, *, complete: bool = True, epoch: int = 2, ended: int | None = None, **settings) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(TrainConfig(**settings).to_toml())
    (folder / "metrics.jsonl").write_text("")
    if complete:

        def save(world):
            with Manager(folder / "checkpoints", world) as manager:
                position = {"epoch": epoch, "step": 0, "total": 7} | ({} if ended is None else {"ended": ended})
                manager.save(7, {"position": position})

        thread_comm.run(1, save)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_was_not_said_is_as_it_was(here):
    leave_run(here / "a", model="mlp", ranks=2, lr=0.1, checkpoint_every=5)
    found = settled({"resume": "a", "keep": 9}, launched=False)
    assert (found.model, found.ranks, found.lr, found.checkpoint_every, found.keep) == ("mlp", 2, 0.1, 5, 9)
    assert (found.resume, found.run_dir) == ("a", "a")
    assert settled({"resume": "a"}, launched=True).ranks is None
    assert settled({"resume": "a", "early_stopping": 3}, launched=False).early_stopping == 3
    assert settled({"resume": "a", "ranks": 3, "threads": 2, "owner": "rank"}, launched=False).ranks == 3


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"lr": 0.2}, "expected lr = 0.1, got lr = 0.2"),
        ({"model": "lenet", "seed": 1}, "expected model = mlp, seed = 0, got model = lenet, seed = 1"),
        ({"epochs": 30}, "expected epochs = 20, got epochs = 30; omit it, because the cosine schedule"),
        ({"batch_size": 64}, "expected batch_size = 32, got batch_size = 64"),
        ({"reproducible": True}, "expected reproducible = False, virtual_shards = None, got reproducible = True, virt"),
    ],
)
def test_what_would_change_the_run_is_refused_by_name(said, says, here):
    leave_run(here / "a", model="mlp", lr=0.1)
    with pytest.raises(ConfigError) as caught:
        settled({"resume": "a"} | said, launched=False)
    assert f"resume [a]: {says}" in str(caught.value)


def test_a_constant_rate_allows_more_epochs(here):
    leave_run(here / "a", schedule="constant", epochs=2)
    assert settled({"resume": "a", "epochs": 5}, launched=False).epochs == 5


def test_a_folder_that_is_named_must_have_a_checkpoint(here):
    leave_run(here / "a", complete=False)
    for name in ("a", "b"):
        with raises(ConfigError, operation="resume", where=name):
            settled({"resume": name}, launched=False)


def test_a_checkpoint_without_its_settings_is_none_to_go_on_from(here):
    leave_run(here / "a")
    (here / "a" / "config.toml").unlink()
    with raises(ConfigError, operation="resume", where="a", got="config.toml"):
        settled({"resume": "a"}, launched=False)


def test_what_may_not_be_looked_into_is_passed_over_unless_it_was_named(here, monkeypatch):
    def refuse(folder):
        if "mlp-digits-002" in str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return find(folder)

    for number in (1, 2):
        leave_run(here / "runs" / f"mlp-digits-00{number}", model="mlp")
    find = complete_steps.find
    monkeypatch.setattr(complete_steps, "find", refuse)
    assert settled({"resume": "auto", "model": "mlp"}, launched=False).run_dir == "runs/mlp-digits-001"
    with raises(ConfigError, operation="resume", where="runs/mlp-digits-002/checkpoints"):
        settled({"resume": "runs/mlp-digits-002"}, launched=False)
    with raises(
        ConfigError,
        operation="resume",
        where="aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/config.toml",
    ):
        settled({"resume": "a" * 300}, launched=False)


def test_a_run_that_still_goes_on_is_refused(here):
    leave_run(here / "a")
    lock = WriterLock(here / "a" / "checkpoints")
    for said in ({"resume": "a"}, {"resume": "auto", "run_dir": "a"}):
        with raises(DataError, operation="lock the checkpoints", where="a/checkpoints/writer.lock"):
            settled(said, launched=True)
    lock.release()
    assert settled({"resume": "a"}, launched=True).resume == "a"


def test_auto_takes_the_run_folder_or_starts_anew_in_it(here):
    said = {"resume": "auto", "run_dir": "a", "model": "mlp"}
    fresh = settled(said, launched=False)
    assert (fresh.resume, fresh.run_dir, fresh.overwrite) == (None, "a", False)
    leave_run(here / "a", complete=False, lr=0.3)
    (here / "a" / "checkpoints" / "step-0000000003.tmp").mkdir(parents=True)
    lock = WriterLock(here / "a" / "checkpoints")
    fresh = settled(said, launched=False)
    assert (fresh.resume, fresh.run_dir, fresh.lr) == (None, "a", 0.05)
    with raises(DataError, operation="lock the checkpoints", where="a/checkpoints/writer.lock"):
        run_dir.reserve_run_dir(fresh)
    lock.release()
    run_dir.reserve_run_dir(fresh)
    assert list((here / "a").iterdir()) == []
    (here / "a").rmdir()
    leave_run(here / "a", model="mlp")
    assert settled(said, launched=False).resume == "a"
    (here / "b").mkdir()
    (here / "b" / "notes.txt").write_text("mine")
    with raises(ConfigError, operation="run folder exists and is not empty", where="b"):
        run_dir.reserve_run_dir(settled(said | {"run_dir": "b"}, launched=False))


def test_auto_without_a_run_folder_takes_the_newest_of_the_same_model_and_data(here):
    said = {"resume": "auto", "model": "mlp"}
    assert settled(said, launched=False).run_dir is None
    leave_run(here / "runs" / "mlp-digits-009", model="mlp")
    leave_run(here / "runs" / "mlp-digits-010", model="mlp")
    leave_run(here / "runs" / "mlp-digits-011", model="mlp", complete=False)
    leave_run(here / "runs" / "lenet-digits-012")
    assert settled(said, launched=False).run_dir == "runs/mlp-digits-010"
    assert settled(said | {"seed": 3}, launched=False).resume is None


def test_auto_passes_over_runs_that_are_done_or_others(here):
    said = {"resume": "auto", "model": "mlp", "epochs": 4, "lr": 0.05}
    same = {"model": "mlp", "epochs": 4}
    leave_run(here / "runs" / "mlp-digits-001", **same)
    leave_run(here / "runs" / "mlp-digits-002", epoch=5, **same)
    leave_run(here / "runs" / "mlp-digits-003", lr=0.3, **same)
    leave_run(here / "runs" / "mlp-digits-004", **same)
    (here / "runs" / "mlp-digits-004" / "config.toml").write_text("nothing")
    assert settled(said, launched=False).run_dir == "runs/mlp-digits-001"
    assert settled(said | {"lr": 0.3}, launched=True).run_dir == "runs/mlp-digits-003"
    assert is_finished(settled({"resume": "runs/mlp-digits-002"}, launched=True))


def test_a_run_that_a_callback_has_ended_is_done_unless_it_is_to_have_more_epochs(here):
    leave_run(here / "a", epoch=4, ended=8, epochs=8, schedule="constant")
    assert is_finished(settled({"resume": "a"}, launched=True))
    assert not is_finished(settled({"resume": "a", "epochs": 9}, launched=True))


def test_a_run_whose_last_checkpoint_is_damaged_is_not_known_to_be_done(here):
    leave_run(here / "a", epoch=9, epochs=8)
    config = settled({"resume": "a"}, launched=True)
    assert is_finished(config)
    (here / "a" / "checkpoints" / "step-0000000007" / "index.h5").unlink()
    assert not is_finished(config)


def test_the_folder_of_its_checkpoints_stands_for_a_run(here, monkeypatch):
    leave_run(here / "a")
    assert settled({"resume": "a/checkpoints"}, launched=True).run_dir == "a"
    with raises(ConfigError, operation="resume", where="a/checkpoints/step-0000000007", remedy="--resume"):
        settled({"resume": "a/checkpoints/step-0000000007"}, launched=True)
    monkeypatch.chdir(here / "a")
    assert settled({"resume": "checkpoints"}, launched=True).run_dir == "."
