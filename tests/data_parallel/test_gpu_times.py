"""Parts of a step on a GPU, by events on its late streams, whose clock tests let go on."""

import numpy as np
import pytest
from parameters_on_gpus import Parameter, gradient, show_gpus

from hpcdp import optim
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import Streams, gpu
from hpcdp.data_parallel.gpu_reduction import GpuReduction
from hpcdp.data_parallel.overlap import GpuTimes
from hpcdp.train.report import BACKWARD, FORWARD, STEP, StepReport
from hpcdp.train.trainer import Trainer


def test_a_step_is_read_when_the_next_one_is_done(gpus_on_host, monkeypatch):
    streams, told, waits = Streams(gpu(0)), [], []
    wait = Streams.synchronize
    monkeypatch.setattr(Streams, "synchronize", lambda self, awaited: waits.append(awaited) or wait(self, awaited))
    times = GpuTimes(streams, lambda name, seconds: told.append((name, seconds)))
    with streams.stream() as compute:
        done = []
        for step in range(4):
            with times.part("all"):
                with times.part("inner"):
                    gpus_on_host.take_ms(10 + step)
                gpus_on_host.take_ms(100)
            times.end_step()
            done.append(len(told))
        assert not waits and done[0] == 0
        for _ in range(1000):
            gpus_on_host.step()
        times.end_step()
        assert len(told) == 2 * 3 and not waits  # nothing follows the fourth
        times.finish()
        assert len(waits) == 1
        assert compute.ptr
    assert told[:2] == [("inner", pytest.approx(0.010)), ("all", pytest.approx(0.110))]
    assert times.seconds == {"inner": pytest.approx(0.046), "all": pytest.approx(0.446)}
    assert len(gpus_on_host.events) <= 4 * 4
    times.start()
    assert not times.seconds


@pytest.mark.parametrize("owner", ["rank", "shard"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("n", "nodes"), [(1, None), (2, None), (3, 1), (4, 2)])
def test_the_report_has_the_times_of_the_gpu(gpus_on_host, monkeypatch, n, nodes, owner, overlap):
    show_gpus(monkeypatch, 8)
    summed = GpuReduction.summed
    monkeypatch.setattr(GpuReduction, "summed", lambda self, bucket: (gpus_on_host.take_ms(5), summed(self, bucket)))
    steps = 3

    def rank(world):
        gpu(world.place).use()
        params = [Parameter(f"p{i}", shape) for i, shape in enumerate([(40, 30), (7,)])]
        trainer = Trainer(params, optim.SGD(lr=0.1), world, owner=owner, overlap=overlap and n > 1)
        report = StepReport(trainer, world)
        for _ in range(2):
            report.start_epoch()
            for step in range(steps):
                with report.phase[FORWARD]:
                    gpus_on_host.take_ms(1000 * (1 + world.rank))
                with report.phase[BACKWARD]:
                    gpus_on_host.take_ms(100 * (1 + world.rank))
                    for param in reversed(params):
                        param.write(gradient(world.rank, step, param.data.shape))
                with report.phase[STEP]:
                    trainer.step(1)
                report.end_step()
            own, found = report._summary(), report.end_epoch()
        return own, found, trainer.stats.exposed_s, len(trainer.reducer.buckets)

    sizes = np.arange(n) + 1
    for (own, found, exposed_s, buckets), size in zip(thread_comm.run(n, rank, nodes), sizes, strict=True):
        waits_s = 0.005 * steps * buckets * (2 if owner == "shard" else 1) * (n > 1)
        assert own[FORWARD] == pytest.approx(steps * size) and own[BACKWARD] == pytest.approx(0.1 * steps * size)
        assert own[STEP] == pytest.approx(waits_s) and own["exposed"] == pytest.approx(waits_s)
        assert exposed_s == pytest.approx(2 * waits_s)  # of both epochs
        assert found["compute_s"] == pytest.approx(1.1 * steps * sizes.mean())
        assert found["critical_path_s"] == pytest.approx(1.1 * steps * n + waits_s, rel=0.01)
        if n > 1:
            assert found["by_rank"]["compute_s"] == pytest.approx(list(1.1 * steps * sizes))
            assert found["slowest_rank"] == n - 1
