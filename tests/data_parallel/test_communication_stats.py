"""What counts as communication, and that no moment of it counts twice."""

import time

import numpy as np
import pytest

from hpcdp import nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.data_parallel.overlap import CommunicationStats
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation
from hpcdp.train.trainer import Trainer

MS = 1_000_000


def seconds(stats: CommunicationStats) -> tuple[float, float]:
    return pytest.approx(1e3 * stats.exposed_s), pytest.approx(1e3 * stats.total_s)


def test_a_wait_within_another_counts_once() -> None:
    stats = CommunicationStats()
    stats.waited(2 * MS, 3 * MS)
    stats.waited(4 * MS, 5 * MS)
    stats.waited(1 * MS, 6 * MS)
    stats.waited(8 * MS, 9 * MS)
    assert seconds(stats) == (6, 6)


def test_what_ran_while_this_rank_waited_is_exposed_and_no_more() -> None:
    """A rank that waits at the end of a step for a slow one has had its own buckets under way all the while."""
    stats = CommunicationStats()
    stats.waited(10 * MS, 30 * MS)
    stats.ran([])
    stats.waited(32 * MS, 34 * MS)
    stats.ran([(5 * MS, 33 * MS), (6 * MS, 31 * MS)])
    assert seconds(stats) == (22, 29)


def test_what_is_told_again_counts_once() -> None:
    stats = CommunicationStats()
    for _ in range(3):
        stats.ran([(5 * MS, 7 * MS)])
    stats.ran([(6 * MS, 8 * MS)])
    assert seconds(stats) == (0, 3)


def test_what_an_evaluation_waits_for_is_no_part_of_the_training() -> None:
    def rank(world):
        net = nn.Dense(2, 2)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world=world)
        samples = ArrayDataset(np.zeros((8, 2), np.float32), np.zeros(8, np.int64))

        def evaluate() -> Evaluation:
            now_ns = time.perf_counter_ns()
            trainer.stats.waited(now_ns - 10**15, now_ns)
            return Evaluation(0.0, 0.0, 0, 1)

        sampler = ShardedSampler(8, 4, world.size, world.rank, seed=1)
        return fit(net, trainer, DataLoader(samples, sampler), epochs=3, evaluate=evaluate, world=world)

    for record in thread_comm.run(2, rank)[0]:
        assert record["comm_exposed_s"] <= record["comm_s"] <= record["seconds"]
        assert record["compute_s"] <= record["seconds"]
