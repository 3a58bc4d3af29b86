"""What was made for a world that is closed now: refused by the name of what was called, and parameters stay."""

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import autograd, checkpoint, kvstore, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.parallel import Pipeline
from hpcdp.train import SyncBatchNorm, TrainStep

KINDS = {
    "buckets": {"overlap": False},
    "overlap": {"overlap": True},
    "shard": {"owner": "shard"},
    "reproducible": {"reproducible": True, "virtual_shards": 4},
    "dist_sync": {"kvstore": "dist_sync"},
    "sums": {"kvstore": "dist_sync", "update_on_kvstore": False},
    "dist_async": {"kvstore": "dist_async"},
}
CAN_WAIT = ("buckets", "overlap", "dist_sync")
"""For networks that do not know their shapes yet."""


def refused(name, use, size=2):
    with raises(ConfigError, operation=name, got=[size, "close()"], remedy="world.split(color)"):
        use()


def backward(net):
    with autograd.record():
        loss = net(np.ones((3, 4), np.float32)).sum()
    loss.backward()


@pytest.mark.parametrize("per_node", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_a_closed_world_is_refused(kind, per_node, tmp_path):
    def rank(world):
        with world.split(0) as part:
            net = nn.Dense(4, 2)
            trainer = hpcdp.Trainer(net.parameters(), optim.SGD(0.1), part, **KINDS[kind])
            for _ in trainer.own_virtual_shards:
                backward(net)
                trainer.step(3)
            state = trainer.state_dict()
            late, waits = nn.Dense(4, 2), None
            if kind in CAN_WAIT:
                late = nn.Dense(None, 2)
                waits = hpcdp.Trainer(late.parameters(), optim.SGD(0.1), part, **KINDS[kind])
        values = net.weight.data.copy()
        backward(net)
        backward(late)
        for count in (3, 0):
            refused("step", lambda count=count: trainer.step(count))
            if waits is not None:
                refused("step", lambda count=count: waits.step(count))
        refused("state_dict", trainer.state_dict)
        refused("load_state_dict", lambda: trainer.load_state_dict(state))
        refused("save_states", lambda: trainer.save_states(tmp_path / "states"))
        refused("load_states", lambda: trainer.load_states(tmp_path / "states"))
        refused("changing_parameters", lambda: trainer.changing_parameters().__enter__())
        if kind in ("buckets", "overlap", "shard", "sums"):
            refused("allreduce_grads", trainer.allreduce_grads)
        if "kvstore" not in KINDS[kind]:
            refused("own_virtual_shards", lambda: trainer.own_virtual_shards)
        step = TrainStep(net, trainer, lambda y, t: (y - t).sum(axis=1))
        refused("TrainStep", lambda: step(np.ones((3, 4), np.float32), np.ones((3, 2), np.float32)))
        np.testing.assert_array_equal(net.weight.data, values)
        hpcdp.Trainer(net.parameters(), optim.SGD(0.1), world)  # takes them over
        return True

    assert thread_comm.run(2, rank, ranks_per_node=per_node) == [True] * 2


@pytest.mark.parametrize("per_node", [None, 1])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_store_of_a_closed_world_is_refused(kind, per_node, tmp_path):
    def rank(world):
        x = np.ones(3, np.float32)
        with world.split(0) as part:
            store = kvstore.create(kind, part)
            store.set_optimizer(optim.SGD(0.1))
            store.init("w", x)
            store.pushpull("w", x.copy())
            state = store.state_dict()
        uses = {
            "push": lambda: store.push("w", x), "pull": lambda: store.pull("w"), "pull out": lambda: store.pull("w", x),
            "pushpull": lambda: store.pushpull("w", x), "init": lambda: store.init("v", x), "wait": store.wait,
            "assign": lambda: store.assign("w", x), "broadcast": lambda: store.broadcast("v", x),
            "barrier": store.barrier, "set_optimizer": lambda: store.set_optimizer(optim.SGD(0.1)),
            "set_updater": lambda: store.set_updater(print), "keys": lambda: store.keys,
            "set_gradient_compression": lambda: store.set_gradient_compression("fp16"),
            "row_sparse_pull": lambda: store.row_sparse_pull("w", row_ids=[0]), "state_dict": store.state_dict,
            "load_state_dict": lambda: store.load_state_dict(state),
            "save_optimizer_states": lambda: store.save_optimizer_states(tmp_path / "s"),
        }  # fmt: skip
        if kind == "dist_async":
            uses |= {"take": lambda: store.take("w"), "statistics": store.statistics}
        for name, use in uses.items():
            refused(name.partition(" ")[0], use)
        return True

    assert thread_comm.run(2, rank, ranks_per_node=per_node) == [True] * 2


def test_what_else_has_a_closed_world_is_refused(tmp_path):
    def rank(world):
        x = np.ones((3, 4), np.float32)
        with world.split(0) as part:
            manager = checkpoint.Manager(tmp_path / "run", part)
            norm = SyncBatchNorm(4, world=part)
            manager.save(1, {"net": norm})
            pipeline = Pipeline([nn.Dense(4, 4), nn.Dense(4, 2)], lambda y, t: (y - t).sum(axis=1), part)
            trainer = hpcdp.Trainer(pipeline.parameters(), optim.SGD(0.1), pipeline.replicas)
            pipeline.step(trainer, x, x[:, :2])
        refused("save", lambda: manager.save(2, {"net": norm}))
        refused("restore", lambda: manager.restore({"net": norm}))
        with autograd.record():
            refused("SyncBatchNorm", lambda: norm(x))
        for name, use in {"step": lambda: pipeline.step(trainer, x, x[:, :2]), "Pipeline": lambda: pipeline(x)}.items():
            refused(name, use, size=1)
        return True

    assert thread_comm.run(2, rank) == [True] * 2
