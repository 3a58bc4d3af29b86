"""Types of public calls as a user's type checker sees them: mypy reads this file in `make check`, nothing runs it."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import hpcdp
from hpcdp import autograd, checkpoint, data, kvstore, nn, optim
from hpcdp.autograd import Tensor
from hpcdp.comm.progress import Operation
from hpcdp.train import TrainStep
from hpcdp.train.fit import fit
from hpcdp.train.metrics import Evaluation, evaluate


def of_networks(x: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10), nn.ReLU())
    assert_type(net(x), Tensor)
    assert_type(nn.Dense(64, 10)(net(x)), Tensor)
    assert_type(nn.models.create("lenet"), nn.Module)
    assert_type(nn.models.lenet(seed=0)(x), Tensor)
    assert_type(net.parameters(), list[nn.Parameter])
    loss = nn.functional.softmax_cross_entropy(net(x), labels)
    assert_type(loss, Tensor)
    assert_type(nn.functional.l2_loss(net(x), x), Tensor)
    assert_type(loss.backward(), None)
    assert_type((loss * 2 + 1).mean(), Tensor)
    assert_type(loss[0], Tensor)
    assert_type(loss.data, np.ndarray)
    assert_type(loss.grad, np.ndarray | None)
    with autograd.record():
        assert_type(autograd.maximum(loss, 0), Tensor)
    assert_type(autograd.is_recording(), bool)


def of_collectives(x: NDArray[np.float32], world: hpcdp.World) -> None:
    assert_type(hpcdp.init(), hpcdp.World)
    assert_type(hpcdp.allreduce(x), NDArray[np.float32])
    assert_type(hpcdp.allreduce(x, op="mean", world=world, out=x), NDArray[np.float32])
    assert_type(hpcdp.broadcast(x, root=1), NDArray[np.float32])
    assert_type(hpcdp.reduce(x), NDArray[np.float32])
    assert_type(hpcdp.iallreduce(x), Operation[NDArray[np.float32]])
    assert_type(hpcdp.reduce_scatter(x), NDArray[np.float32])
    assert_type(hpcdp.allgather(x), NDArray[np.float32])
    assert_type(hpcdp.gather(x), NDArray[np.float32] | None)
    assert_type(hpcdp.iallgather(x), Operation[NDArray[np.float32]])
    assert_type(hpcdp.grouped_allreduce([x]), list[NDArray[np.float32]])
    assert_type(hpcdp.scatter(x if world.rank == 0 else None), NDArray[np.float32])
    assert_type(hpcdp.scatter(None, out=x), NDArray[np.float32])
    assert_type(hpcdp.alltoall(x), NDArray[np.float32])
    assert_type(hpcdp.alltoall(x, [1, 2]), tuple[NDArray[np.float32], np.ndarray])
    assert_type(hpcdp.recv(x, 1), NDArray[np.float32])
    assert_type(hpcdp.recv(x, None), tuple[NDArray[np.float32], int])
    assert_type(hpcdp.irecv(x), Operation[NDArray[np.float32]])
    assert_type(hpcdp.sendrecv(x, 1, 0, x), NDArray[np.float32])
    assert_type(hpcdp.isendrecv(x, 1, 0, x).wait(), NDArray[np.float32])
    assert_type(world.rank, int)
    assert_type(world.split(0), hpcdp.World)
    assert_type(hpcdp.gpu(0), hpcdp.Device)


def of_training(x: NDArray[np.float32], world: hpcdp.World) -> None:
    net = nn.Dense(64, 10)
    optimizer = optim.SGD(lr=optim.CosineSchedule(lr=0.1, steps=10))
    assert_type(optim.create("adam", lr=0.1), optim.Optimizer)
    trainer = hpcdp.Trainer(net.parameters(), optimizer, world)
    assert_type(trainer, hpcdp.Trainer)
    assert_type(trainer.step(8), int)
    dataset = data.load("digits")
    assert_type(dataset, data.Dataset)
    loader = data.DataLoader(dataset, data.BatchSampler(data.SequentialSampler(8), 4))
    assert_type(fit(net, trainer, loader, epochs=1), list[dict[str, Any]])
    assert_type(evaluate(net, dataset, world), Evaluation)
    assert_type(evaluate(net, dataset, world).accuracy, float)
    losses, _ = TrainStep(net, trainer)(x, x)
    assert_type(losses, Tensor)
    for inputs, _ in loader:
        assert_type(net(inputs), Tensor)
    assert_type(nn.Replicas(net, [hpcdp.cpu(0)])(x), Tensor)
    assert_type(nn.SymbolBlock.load("net")(x), Tensor)
    assert_type(autograd.where(x > 0, x, 0), Tensor)


def of_stores(x: NDArray[np.float32]) -> None:
    store = kvstore.create("local")
    assert_type(store, kvstore.KVStore)
    assert_type(store.push("weight", x), None)
    assert_type(store.pull("weight"), kvstore.PullHandle)
    assert_type(store.pull(["weight"]), list[kvstore.PullHandle])
    with checkpoint.Manager("saved") as manager:
        assert_type(manager, checkpoint.Manager)
        assert_type(manager.latest(), int | None)
        assert_type(manager.restore(), checkpoint.Restored)
