"""LeNet is trained by every framework that is installed, with the same losses from the same weights."""

import importlib.util

import numpy as np

import bench_train_lenet as train_lenet
from hpcdp.comm import World, thread_comm

HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_against_torch_where_it_is_installed() -> None:
    found = thread_comm.run(1, lambda world: train_lenet.against_torch(world, 8, 2, 0.01))[0]
    assert set(found["samples_s"]) == ({"hpcdp", "torch"} if HAS_TORCH else {"hpcdp"})
    assert min(found["samples_s"].values()) > 0
    if HAS_TORCH:
        assert found["ratio"] > 0
        assert found["loss_difference"] < 1e-3
    else:
        assert found["ratio"] is None


def test_the_network_is_trained() -> None:
    def each(world: World) -> list[float]:
        step, initial, _ = train_lenet.hpcdp_step(world, train_lenet.random_batches(16, world.rank)[:1])
        assert sum(param.size for param in initial) == 129_068
        return [step(i) for i in range(12)]

    losses = np.array(thread_comm.run(2, each))
    assert (losses[:, -1] < losses[:, 0] - 0.1).all()
    assert losses[0, 0] != losses[1, 0]
