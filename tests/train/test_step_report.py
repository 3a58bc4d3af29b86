import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.data_parallel.overlap import BucketTimes
from hpcdp.engine.engine import Trace
from hpcdp.train import report as train_report
from hpcdp.train.fit import fit
from hpcdp.train.report import StepReport, compare
from hpcdp.train.trainer import Trainer

RNG = np.random.default_rng(3)
SAMPLES = ArrayDataset(RNG.normal(size=(64, 5)).astype(np.float32), RNG.integers(0, 3, size=64))


def rank(data=0.0, forward=0.0, backward=0.0, step=0.0, exposed=0.0, steps=1, buckets=(), host="a") -> dict:
    return json.loads(json.dumps(locals()))


def test_computation_is_what_a_rank_did_but_wait():
    found = compare([
        rank(data=0.5, forward=2.0, backward=4.0, step=1.0, exposed=1.5),
        rank(data=0.1, forward=3.0, backward=5.0, step=0.5, exposed=0.1),
    ])  # fmt: skip
    assert found["compute_s"] == pytest.approx((5.5 + 8.4) / 2)
    assert found["data_s"] == pytest.approx(0.3)
    assert (found["slowest_rank"], found["stragglers"]) == (1, ["rank 1 on a"])
    assert found["slowest_ratio"] == pytest.approx(8.5 / 6.0)
    # data, forward, backward and update of rank 1, and what even the rank that waited least was in communication
    assert found["critical_path_s"] == pytest.approx(0.1 + 3.0 + 5.0 + 0.4 + 0.1)
    assert found["critical_path"] == "computation, then communication"


def test_the_critical_path_takes_what_no_rank_can_avoid():
    ranks = [
        rank(forward=20.0, backward=40.0, steps=10, buckets=[[0, 1.0, 2.0], [1, 4.0, 2.5]]),
        rank(forward=10.0, backward=30.0, steps=10, buckets=[[0, 1.5, 1.5], [1, 3.0, 3.5]]),
    ]
    found = compare(ranks)
    # bucket 1 holds the first layers: ready after 4 s on rank 0, 2.5 s on the way, then rank 0's forward of 2 s
    assert found["critical_path_s"] == pytest.approx(10 * (4.0 + 2.5 + 2.0))
    assert found["critical_path"] == "bucket 1"


def test_a_rank_alone_has_no_slowest():
    found = compare([rank(data=1.0, forward=2.0, backward=4.0, step=1.0)])
    assert found == {
        "data_s": 1.0,
        "compute_s": 7.0,
        "critical_path_s": 8.0,
        "critical_path": "computation",
    }


def test_stragglers_are_named_the_slowest_first():
    works = [1.0, 1.19, 3.0, 1.0, 1.3, 0.9]
    found = compare([rank(forward=work, host=f"node{n}") for n, work in enumerate(works)])
    assert found["stragglers"] == ["rank 2 on node2", "rank 4 on node4"]
    assert found["slowest_host"] == "node2"
    assert found["slowest_ratio"] == pytest.approx(3.0)


def test_ranks_that_did_nothing_are_alike():
    found = compare([rank(), rank()])
    assert (found["slowest_ratio"], found["stragglers"], found["critical_path_s"]) == (1.0, [], 0.0)


def train(world, hinder, callbacks=()):
    net = nn.Sequential(nn.Dense(5, 8), nn.ReLU(), nn.Dense(8, 3))
    for param in net.parameters():
        param.data[...] = np.random.default_rng(5).normal(size=param.shape)
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
    sampler = ShardedSampler(len(SAMPLES), 16, world.size, world.rank, seed=4)
    loader = DataLoader(SAMPLES, sampler, prefetch=0, transform=hinder(world))
    return fit(net, trainer, loader, epochs=2, world=world, callbacks=callbacks)


def test_fit_names_a_rank_that_is_late(monkeypatch):
    monkeypatch.setattr(train_report.socket, "gethostname", lambda: "node7")

    def hinder(world):
        def transform(x, y):
            time.sleep(0.03 if world.rank == 1 else 0.0)
            return x, y

        return transform

    results = thread_comm.run(3, lambda world: train(world, hinder))
    assert results[1] == results[0] == results[2]
    for record in results[0][1:]:  # the first epoch may compile
        assert record["slowest_rank"] == 1
        assert "rank 1 on node7" in record["stragglers"]
        assert record["slowest_ratio"] > 1.2
        assert record["data_s"] >= 4 * 0.03 / 3
        assert 0 < record["compute_s"] < record["seconds"]
        assert record["critical_path_s"] >= 4 * 0.03


def test_phases_of_fit_are_in_the_trace():
    def job(world):
        world.kept[Trace] = trace = Trace()
        train(world, lambda world: None)
        return trace

    for rank_number, trace in enumerate(thread_comm.run(2, job)):
        names = [each.name for each in trace.slices if each.lane == "main"]
        own = [name for name in names if name in ("data", "forward", "backward", "step")]
        assert own == ["data", "forward", "backward", "step"] * 8
        assert (names.count("metrics"), names.count("evaluate")) == (2, 2)
        assert [each.name for each in trace.counts] == (["samples/s"] * 2 if rank_number == 0 else [])


def test_buckets_count_for_the_backward_that_made_them(monkeypatch):
    """Also where the trainer knows their times a step later; those of a step without samples are left out."""
    world, _ = thread_comm.run(2, lambda world: world)
    trainer = SimpleNamespace(
        bucket_times=[], measure_on_gpu=lambda: None, stats=SimpleNamespace(exposed_s=0.0), policy=None
    )
    report = StepReport(trainer, world)
    now = iter(range(0, 10**12, 10**9)).__next__
    monkeypatch.setattr(train_report.time, "perf_counter_ns", now)

    def backward(times):
        with report.phase["backward"]:
            pass
        trainer.bucket_times = times
        report.end_step()

    second = 10**9
    backward([])  # 0 to 1 s
    backward([BucketTimes(0, 8, second // 2, second, 3 * second), BucketTimes(1, 8, second, second, 2 * second)])
    backward(trainer.bucket_times)  # the same ones
    backward([BucketTimes(0, 8, second * 11 // 2, 10 * second, 10 * second)])  # ready between backwards
    found = json.loads(json.dumps(report._summary()))
    assert (found["steps"], found["backward"]) == (4, 4.0)
    assert found["buckets"] == [[0, 0.5, 1.5], [1, 1.0, 0.5]]


def test_of_a_long_epoch_one_step_in_eight_is_looked_at():
    world, _ = thread_comm.run(2, lambda world: world)
    trainer = SimpleNamespace(bucket_times=[], measure_on_gpu=lambda: None, stats=SimpleNamespace(exposed_s=0.0))
    report = StepReport(trainer, world)
    durations = [7] * 8 + [1] * 88  # looked at: the first eight, and eleven of the others
    for duration in durations:
        with report.phase["backward"]:
            now = time.perf_counter_ns()
            trainer.bucket_times = [BucketTimes(5, 8, now, now, now + duration * 10**9)]
        report.end_step()
    ((number, ready_s, reduction_s),) = report._summary()["buckets"]
    assert (number, reduction_s) == (5, 1.0)
    assert 0 <= ready_s < 0.01
    assert len(report._buckets[5]) == 8 + 88 // 8
