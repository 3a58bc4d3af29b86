"""Runs that are killed, or stopped, and go on from their checkpoints: to the bit as if nothing had happened."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from pairs import in_turn
from raises import raises
from threadpoolctl import threadpool_limits

from hpcdp import data, nn, optim
from hpcdp.checkpoint import Manager, complete_steps
from hpcdp.checkpoint.complete_steps import WriterLock
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError, SaveError
from hpcdp.train.callbacks import Callback
from hpcdp.train.checkpoints import Checkpoints, Reason, StopRequests
from hpcdp.train.fit import SharedCount, fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

RNG = np.random.default_rng(11)
CENTERS = RNG.normal(size=(3, 1, 4, 4)) * 2
LABELS = RNG.integers(0, 3, size=70)
SAMPLES = data.ArrayDataset((CENTERS[LABELS] + RNG.normal(size=(70, 1, 4, 4))).astype(np.float32), LABELS)
EPOCHS, BATCH, STEPS = 3, 6, 12
TIMES = ("seconds", "samples_per_s", "comm_s", "comm_exposed_s", "data_s", "compute_s", "critical_path_s",
         "critical_path", "slowest_rank", "slowest_host", "slowest_ratio", "stragglers", "by_rank")  # fmt: skip

OPTIMIZERS = {
    "momentum": lambda: optim.SGD(lr=optim.CosineSchedule(0.1, steps=EPOCHS * STEPS), momentum=0.9),
    "adam": lambda: optim.Adam(lr=0.01),
}


@pytest.fixture(autouse=True)
def _one_blas_thread():
    """As ``hpcdp train`` has; several, shared by thread ranks, do not give the same bits twice."""
    with threadpool_limits(1, user_api="blas"):
        yield


class Killed(BaseException):
    pass


class Listen(Callback):
    """Hears all records; may end the run, or ask for that, after a step."""

    def __init__(
        self, kill_at: int | None = None, stop: StopRequests | None = None, stop_at: int | None = None
    ) -> None:
        self.records: list[dict] = []
        self.resumed: tuple[int, int] | None = None
        self._kill_at, self._stop, self._stop_at = kill_at, stop, stop_at

    def on_resume(self, epochs: int, steps: int) -> None:
        self.resumed = epochs, steps

    def on_step(self, epoch: int, step: int) -> None:
        total = (epoch - 1) * STEPS + step
        if total == self._stop_at:
            self._stop.request()
        if total == self._kill_at:
            raise Killed

    def on_record(self, record: dict) -> None:
        self.records.append({name: value for name, value in record.items() if name not in TIMES})


def network() -> nn.Module:
    net = nn.Sequential(nn.Conv2D(1, 3, 3), nn.Tanh(), nn.BatchNorm(3), nn.Flatten(), nn.Dropout(0.2, seed=3),
                        nn.Dense(12, 3))  # fmt: skip
    rng = np.random.default_rng(5)
    for name, param in net.named_parameters():
        if not name.startswith("2."):
            param.data[...] = rng.normal(size=param.shape) * 0.3
    return net


def train(world, folder: Path, optimizer="momentum", reproducible=False, owner="auto", overlap=None, resume=False,
          every=None, kill_at=None, stop_at=None, kvstore=None, epochs=EPOCHS, last="keep", best=None):  # fmt: skip
    net = network()
    arguments = {"kvstore": kvstore} if kvstore else {"owner": owner, "overlap": overlap, "reproducible": reproducible}
    if reproducible:
        arguments["virtual_shards"] = 4
        sampler = data.VirtualShardSampler(len(SAMPLES), BATCH, 4, world.size, world.rank, seed=2)
    else:
        sampler = data.ShardedSampler(len(SAMPLES), BATCH, world.size, world.rank, seed=2, last=last)
    trainer = Trainer(net.parameters(), OPTIMIZERS[optimizer](), world=world, **arguments)
    stop = StopRequests(environ={})
    listen = Listen(kill_at, stop, stop_at if world.rank == world.size - 1 else None)
    with Manager(folder, world, keep=2, best=best) as manager:
        checkpoints = Checkpoints(manager, every=every, stop=stop, resume=resume)
        fit(
            net,
            trainer,
            data.DataLoader(SAMPLES, sampler, prefetch=1),
            epochs=epochs,
            evaluate=lambda: evaluate(net, SAMPLES, world, num_parts=trainer.virtual_shards),
            callbacks=[listen],
            checkpoints=checkpoints,
            world=world,
        )
        return listen, [np.array(param.data) for param in net.parameters()], checkpoints.stopped, manager.steps()


def killed(ranks: int, folder: Path, **arguments) -> None:
    with pytest.raises(Killed):
        thread_comm.run(ranks, lambda world: train(world, folder, **arguments))


def whole_run(ranks: int, folder: Path, **arguments):
    return thread_comm.run(ranks, lambda world: train(world, folder, **arguments))[0]


@functools.cache
def undisturbed(ranks: int, **arguments):
    """A whole run that several tests compare with."""
    with tempfile.TemporaryDirectory() as folder:
        return whole_run(ranks, Path(folder), **arguments)


def assert_goes_on_as(whole, resumed) -> None:
    """To the bit: the records from where it went on, and the parameters at the end."""
    listen, params, *_ = resumed
    records = whole[0].records
    assert records[-1]["test_loss"] < 0.7 * records[0]["loss"]
    assert listen.records
    assert listen.records == records[len(records) - len(listen.records) :]
    for a, b in zip(params, whole[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("optimizer", "ranks"), in_turn(list(OPTIMIZERS), [1, 2, 3, 4]))
def test_a_killed_run_goes_on_to_the_bit(optimizer, ranks, tmp_path):
    whole = undisturbed(ranks, optimizer=optimizer)
    kill_at = int(np.random.default_rng([ranks, len(optimizer)]).integers(9, EPOCHS * STEPS))
    killed(ranks, tmp_path / "a", optimizer=optimizer, every=4, kill_at=kill_at)
    results = thread_comm.run(ranks, lambda world: train(world, tmp_path / "a", optimizer=optimizer, resume=True))
    for resumed in results:
        assert_goes_on_as(whole, resumed)
        epochs, steps = resumed[0].resumed
        assert (steps % 4, epochs) == (0, steps // STEPS)
        assert 0 <= kill_at - steps <= 8  # the last save may have been under way


@pytest.mark.parametrize(("owner", "overlap"), [("rank", False), ("shard", True)])
def test_with_either_owner_and_overlap(owner, overlap, tmp_path):
    options = {"owner": owner, "overlap": overlap}
    whole = undisturbed(2, **options)
    killed(2, tmp_path / "a", every=5, kill_at=17, **options)
    assert_goes_on_as(whole, whole_run(2, tmp_path / "a", resume=True, **options))


def test_where_short_batches_roll_over(tmp_path):
    whole = undisturbed(2, last="rollover")
    killed(2, tmp_path / "a", every=2, kill_at=17, last="rollover")
    assert_goes_on_as(whole, whole_run(2, tmp_path / "a", resume=True, last="rollover"))


@pytest.mark.parametrize("stop_at", [1, 5, STEPS - 1, STEPS + 7])
def test_a_rank_that_is_asked_to_stop_stops_all(stop_at, tmp_path):
    whole = undisturbed(3)
    results = thread_comm.run(3, lambda world: train(world, tmp_path / "a", stop_at=stop_at))
    for _, _, stopped, steps in results:
        assert stopped.reason is Reason.PROGRAM
        assert stopped.position.total == stop_at + 1
        assert steps == [stop_at + 1]
    resumed = whole_run(3, tmp_path / "a", resume=True)
    assert_goes_on_as(whole, resumed)
    assert resumed[0].resumed == (stop_at // STEPS, stop_at + 1)
    assert resumed[2] is None


def test_a_run_is_stopped_again_and_again(tmp_path):
    whole = undisturbed(2, optimizer="adam")
    records: list[dict] = []
    for stop_at in (3, 11, 13, 30, None):
        listen, params, stopped, _ = whole_run(
            2, tmp_path / "a", optimizer="adam", resume=stop_at != 3, stop_at=stop_at
        )
        assert (stopped is None) == (stop_at is None)
        records += listen.records
    assert records == whole[0].records
    for a, b in zip(params, whole[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("before", "after"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((4, 2), (3, 4)))]
)
def test_a_reproducible_run_goes_on_with_other_ranks(before, after, tmp_path):
    whole = undisturbed(2, reproducible=True)
    killed(before, tmp_path / "a", reproducible=True, every=5, kill_at=18)
    for resumed in thread_comm.run(after, lambda world: train(world, tmp_path / "a", reproducible=True, resume=True)):
        assert_goes_on_as(whole, resumed)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4)])
def test_any_run_goes_on_with_other_ranks(before, after, tmp_path):
    whole = undisturbed(before)
    assert thread_comm.run(before, lambda world: train(world, tmp_path / "a", stop_at=STEPS + 4))[0][2]
    listen, *_ = whole_run(after, tmp_path / "a", resume=True)
    records = whole[0].records[-len(listen.records) :]
    for record, other in zip(listen.records, records, strict=True):
        assert record["samples"] == other["samples"]
        assert record["step"] == other["step"]
        assert record["loss"] == pytest.approx(other["loss"], abs=0.1)  # dropout and batch norm are others


def test_a_checkpoint_an_epoch_has_its_numbers_and_the_last_is_of_the_end(tmp_path):
    listen, _, _, steps = whole_run(2, tmp_path / "a", every="epoch")
    assert steps == [2 * STEPS, 3 * STEPS]

    def job(world):
        with Manager(tmp_path / "a", world) as manager:
            return [manager.restore(step) for step in steps]

    epochs = [record for record in listen.records if record["kind"] == "epoch"]
    for restored, record in zip(thread_comm.run(1, job)[0], epochs[1:], strict=True):
        assert restored.metrics["test_accuracy"] == record["test_accuracy"]
        assert restored.state["position"]["step"] == 0
    again = whole_run(2, tmp_path / "a", resume=True)
    assert again[0].records == []
    assert again[3] == steps


@pytest.mark.parametrize("every", [5, "epoch"])
def test_a_run_that_keeps_the_best_epoch_is_stopped_within_another(every, tmp_path):
    arguments = {"every": every, "best": "test_accuracy"}
    stopped = whole_run(2, tmp_path / "a", stop_at=STEPS + 4, **arguments)
    assert stopped[2].position.total in (STEPS + 4, STEPS + 5)
    assert_goes_on_as(undisturbed(2), whole_run(2, tmp_path / "a", resume=True, **arguments))


def test_a_run_that_was_stopped_after_its_last_step_is_done_when_it_has_gone_on(tmp_path):
    whole = undisturbed(2)
    stopped = whole_run(2, tmp_path / "a", stop_at=EPOCHS * STEPS - 1)
    assert stopped[2].position == (EPOCHS, STEPS, EPOCHS * STEPS)
    resumed = whole_run(2, tmp_path / "a", resume=True)
    assert stopped[0].records + resumed[0].records == whole[0].records
    again = whole_run(2, tmp_path / "a", resume=True)
    assert (again[0].records, again[3]) == ([], [EPOCHS * STEPS])


def test_more_epochs_go_on_after_the_last(tmp_path):
    whole = undisturbed(2, optimizer="adam")
    whole_run(2, tmp_path / "a", optimizer="adam", epochs=2)
    assert_goes_on_as(whole, whole_run(2, tmp_path / "a", optimizer="adam", epochs=3, resume=True))


def test_the_users_own_entries_are_saved_and_restored(tmp_path):
    def job(world, resume):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
        sampler = data.ShardedSampler(len(SAMPLES), BATCH, world.size, world.rank)
        mean = np.zeros(3) if resume else np.arange(3.0)
        extra = {"mean": mean, "best": 0 if resume else 7}
        with Manager(tmp_path / "a", world) as manager:
            checkpoints = Checkpoints(manager, resume=resume, extra=extra)
            fit(net, trainer, data.DataLoader(SAMPLES, sampler), epochs=1, checkpoints=checkpoints, world=world)
        return mean, checkpoints.restored

    thread_comm.run(2, lambda world: job(world, False))
    for mean, restored in thread_comm.run(2, lambda world: job(world, True)):
        np.testing.assert_array_equal(mean, [0, 1, 2])
        assert restored["best"] == 7


def test_on_a_synchronous_store(tmp_path):
    whole = undisturbed(2, kvstore="dist_sync")
    assert whole_run(2, tmp_path / "a", kvstore="dist_sync", stop_at=STEPS + 4)[2]
    assert_goes_on_as(whole, whole_run(2, tmp_path / "a", resume=True, kvstore="dist_sync"))


def test_one_rank_stops_ranks_that_do_not_wait_for_each_other(tmp_path):
    class Ask(Listen):
        def on_step(self, epoch, step):
            if epoch == 2 and step >= 4:
                self._stop.request()

    def stopped(world, resume):
        net = network()
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.03), world=world, kvstore="dist_async")
        sampler = data.SharedSampler(len(SAMPLES), 6 // world.size, SharedCount(world), seed=2)
        stop = StopRequests(environ={})
        listen = Listen() if resume or world.rank else Ask(stop=stop)
        with Manager(tmp_path / "a", world) as manager:
            checkpoints = Checkpoints(manager, stop=stop, resume=resume)
            fit(net, trainer, data.DataLoader(SAMPLES, sampler, prefetch=1), epochs=3, callbacks=[listen],
                checkpoints=checkpoints, world=world)  # fmt: skip
        return checkpoints.stopped, listen

    results = thread_comm.run(3, lambda world: stopped(world, False))
    position = results[0][0].position
    assert all(each.position == position for each, _ in results)
    assert position.epoch == 2
    assert 4 <= position.step <= 35
    assert position.total == 35 + position.step
    for none, listen in thread_comm.run(2, lambda world: stopped(world, True)):
        assert none is None
        epochs = [record for record in listen.records if record["kind"] == "epoch"]
        assert [record["samples"] for record in epochs] == [70, 70]
        left = -(-(len(SAMPLES) - 2 * position.step) // 3)  # in batches of 3, of which 2 ranks have a global one of 6
        assert [record["step"] for record in epochs] == [position.total + left, position.total + left + 24]


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    with raises(DataError, operation="restore", where=tmp_path / "a"):
        whole_run(2, tmp_path / "a", resume=True)


def test_in_the_folder_of_another_job_not_a_step_is_made(tmp_path):
    whole_run(1, tmp_path / "a", epochs=1)
    lock = WriterLock(tmp_path / "a")
    for resume in (False, True):
        with raises(DataError, operation="lock the checkpoints", where=tmp_path / "a/writer.lock"):
            whole_run(2, tmp_path / "a", resume=resume, kill_at=1)
    lock.release()


def test_steps_between_checkpoints_may_be_a_number_of_numpys(tmp_path):
    by_ours, by_numpys = (whole_run(2, tmp_path / type(every).__name__, every=every) for every in (7, np.int64(7)))
    assert by_numpys[3] == by_ours[3]


@pytest.mark.parametrize(
    ("short_s", "long_s", "times", "kept"),
    [(0, 1e9, 0, [[24, 36]]), (0, 1e9, 1e9, [[12, 36]]), (1e9, 0, 0, [[n, 36] for n in range(25, 36)])],
    ids=["each epoch", "once", "within"],
)
def test_by_itself_it_saves_what_is_old_enough(short_s, long_s, times, kept, tmp_path, monkeypatch):
    for name, value in (("_SHORT_S", short_s), ("_LONG_S", long_s), ("_TIMES", times)):
        monkeypatch.setattr(f"hpcdp.train.checkpoints.{name}", value)
    assert whole_run(2, tmp_path, every="auto")[3] in kept


def test_a_run_goes_on_from_what_it_has_saved_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdp.train.checkpoints._LONG_S", 0)
    monkeypatch.setattr("hpcdp.train.checkpoints._TIMES", 0)
    whole = whole_run(2, tmp_path / "whole", every="auto")
    killed(2, tmp_path / "a", every="auto", kill_at=20)
    again = whole_run(2, tmp_path / "a", every="auto", resume=True)
    assert again[0].resumed is not None and again[0].resumed[1] > 12
    assert [values.tobytes() for values in again[1]] == [values.tobytes() for values in whole[1]]


@pytest.mark.parametrize("every", [0, 1.0, True, "step", [3], np.array([3, 4])])
def test_what_it_is_made_of(every):
    with raises(ConfigError, operation="Checkpoints", where="every", expected=["epoch", "auto", None]):
        Checkpoints(None, every=every)
    with raises(ConfigError, operation="Checkpoints", where="manager", expected="checkpoint.Manager", got="folder"):
        Checkpoints("folder")


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ({"stop": 5}, {"where": "stop", "expected": ["StopRequests()", None], "got": 5}),
        (
            {"stop": StopRequests},
            {"where": "stop", "expected": ["StopRequests()", None], "got": "hpcdp.train.checkpoints.StopRequests"},
        ),
        ({"extra": ["average"]}, {"where": "extra", "expected": ["dict", None], "got": "['average']"}),
        ({"config": 5}, {"where": "config", "expected": ["dict", None], "got": 5}),
    ],
)
def test_what_else_it_is_made_of(wrong, fields, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager, raises(ConfigError, operation="Checkpoints", **fields):
            Checkpoints(manager, **wrong)
        with Manager(tmp_path, world) as manager:
            return Checkpoints(manager, extra={1: 2, "a": 3}).alike()[0]

    assert thread_comm.run(1, one) == ["checkpoints every=None, resume=False, extra=['1', 'a']"]


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(tmp_path):
    _, _, _, steps = whole_run(2, tmp_path / "a", epochs=1)
    with raises(ConfigError, operation="Checkpoints", where=tmp_path / "a", got=STEPS, remedy="resume=True"):
        whole_run(2, tmp_path / "a", epochs=1, kill_at=1)
    assert steps == [STEPS]


def test_without_a_complete_checkpoint_there_is_nowhere_to_go_on(tmp_path, monkeypatch):
    def full(folder, step, atomic_rename):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(complete_steps, "commit", full)
    with raises(SaveError, operation="save", where=tmp_path / "a/step-0000000004.tmp"):
        whole_run(2, tmp_path / "a", every=4, epochs=1)


@pytest.mark.parametrize("at", ["in between", "at the end"])
def test_what_cannot_be_written_ends_the_training_and_says_where_to_go_on(at, tmp_path, monkeypatch):
    commit = complete_steps.commit

    def full(folder, step, atomic_rename):
        if step == (8 if at == "in between" else STEPS):
            raise OSError(28, "No space left on device")
        return commit(folder, step, atomic_rename)

    monkeypatch.setattr(complete_steps, "commit", full)
    newest = 4 if at == "in between" else 8
    with raises(SaveError, operation="save", remedy=[newest, "--resume"]):
        whole_run(2, tmp_path / "a", every=4, epochs=1)
    monkeypatch.undo()
    assert whole_run(2, tmp_path / "a", resume=True, epochs=1)[0].resumed == (0, newest)


def test_a_disk_that_is_gone_ends_the_training_and_says_so(tmp_path, monkeypatch):
    commit, find, is_gone = complete_steps.commit, complete_steps.find, []

    def losing(folder, step, atomic_rename):
        if step == 8:
            is_gone.append(True)
            raise OSError(5, "Input/output error")
        return commit(folder, step, atomic_rename)

    def found(folder):
        if is_gone:
            raise OSError(5, "Input/output error")
        return find(folder)

    monkeypatch.setattr(complete_steps, "commit", losing)
    monkeypatch.setattr(complete_steps, "find", found)
    with raises(SaveError, operation="save", where=tmp_path / "a/step-0000000008.tmp", remedy="--resume"):
        whole_run(2, tmp_path / "a", every=4, epochs=1)
