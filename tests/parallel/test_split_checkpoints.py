"""What parts have saved together another number of parts restores, and the unsplit network."""

import os

import numpy as np
import pytest
from pairs import pairs
from raises import raises
from split_networks import convolutions, mlp

from hpcdp import autograd, nn, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.core.state import Cut
from hpcdp.errors import DataError
from hpcdp.parallel import split_world
from hpcdp.train.trainer import Trainer

LOSS = nn.functional.softmax_cross_entropy
SHAPES = {mlp: (6,), convolutions: (1, 8, 8)}


def step(net, trainer, copies, shape, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(12, *shape)).astype("f4"), rng.integers(0, 4, 12)
    mine = slice(12 * copies.rank // copies.size, 12 * (copies.rank + 1) // copies.size)
    with autograd.record():
        loss = LOSS(net(x[mine]), y[mine])
    loss.backward()
    trainer.step(len(y[mine]))


def rank(world, num_parts, make, path, saves, owner):
    """Saves after a step, or restores; then one more step. The results for some inputs, before and after that."""
    parts, copies = split_world(num_parts, world)
    net = make(parts if num_parts > 1 else None)
    if not saves:
        for param in net.parameters():
            param.data[...] = 9
    trainer = Trainer(net.parameters(), optim.Adam(lr=0.05), copies, owner=owner)
    with Manager(path, world) as manager:
        if saves:
            step(net, trainer, copies, SHAPES[make], 0)
            manager.save(1, {"net": net, "trainer": trainer})
        else:
            manager.restore(into={"net": net, "trainer": trainer})
        world.comm.barrier()
        x = np.random.default_rng(5).normal(size=(4, *SHAPES[make])).astype("f4")
        before = net(x).data.copy()
        step(net, trainer, copies, SHAPES[make], 1)
        world.comm.barrier()
        return before, net(x).data.copy()


@pytest.mark.filterwarnings("ignore:.*another layout of buckets")
@pytest.mark.parametrize(
    ("saved_by", "make", "owner"), pairs([(4, 4), (4, 2), (3, 3), (1, 1)], [mlp, convolutions], ["rank", "shard"])
)
def test_another_number_of_parts_goes_on(tmp_path, saved_by, make, owner):
    n, num_parts = saved_by
    went_on = thread_comm.run(n, lambda world: rank(world, num_parts, make, tmp_path, True, owner))[0]
    numbers = [(1, 1), (3, 3), (4, 2)]
    if os.environ.get("HPCDP_TEST_THOROUGH"):
        numbers += [(2, 1), (2, 2), (4, 4)]
    for m, others in numbers:
        restored = thread_comm.run(m, lambda world, others=others: rank(world, others, make, tmp_path, False, owner))
        for before, after in restored:
            np.testing.assert_allclose(before, went_on[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(after, went_on[1], rtol=1e-4, atol=1e-4)
    assert not np.allclose(went_on[0], went_on[1], atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*another layout of buckets")
@pytest.mark.parametrize(("m", "others"), [(4, 2), (2, 1), (6, 3)])
def test_what_compression_has_not_sent_is_saved_whole(tmp_path, m, others):
    """Of copies on two nodes: with as many parts the next step is the same to the bit."""

    def train(world, num_parts, saves):
        parts, copies = split_world(num_parts, world)
        net = mlp(parts if num_parts > 1 else None)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.05), copies, compression="bf16")
        with Manager(tmp_path, world) as manager:
            if saves:
                step(net, trainer, copies, (6,), 0)
                manager.save(1, {"net": net, "trainer": trainer})
            else:
                manager.restore(into={"net": net, "trainer": trainer})
            step(net, trainer, copies, (6,), 1)
        return net(np.ones((3, 6), "f4")).data.copy()

    saved = thread_comm.run(4, lambda world: train(world, 2, True), ranks_per_node=2)[0]
    for found in thread_comm.run(m, lambda world: train(world, others, False), ranks_per_node=m // 2):
        np.testing.assert_allclose(found, saved, rtol=0 if m == 4 else 1e-4, atol=0 if m == 4 else 1e-5)


def test_the_file_has_whole_tensors(tmp_path):
    def save(world):
        parts, _ = split_world(3, world)
        with Manager(tmp_path, world) as manager:
            manager.save(0, {"net": mlp(parts)})

    thread_comm.run(3, save)
    found = thread_comm.run(1, lambda world: Manager(tmp_path, world).restore().state)[0]["net"]
    for name, whole in mlp(None).state_dict().items():
        np.testing.assert_array_equal(found[name], whole)


def test_saving_without_the_ranks_that_have_the_rest_is_an_error_on_all(tmp_path):
    def save(world):
        parts, copies = split_world(2, world)
        with (
            Manager(tmp_path / str(parts.rank), copies) as manager,
            raises(DataError, operation="save", where="net/0.weight"),
        ):
            manager.save(0, {"net": mlp(parts)})

    thread_comm.run(4, save)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4,), (2, 3)])
def test_runs_of_a_part_cover_its_elements_of_the_whole(shape):
    for axis in range(len(shape)):
        whole = np.arange(np.prod([n + 3 * (at == axis) for at, n in enumerate(shape)]))
        cut = Cut(axis, 2, shape[axis] + 3)
        part = np.take(whole.reshape(cut.whole(shape)), range(2, 2 + shape[axis]), axis).reshape(-1)
        for first, last in ((0, part.size), (1, part.size), (0, part.size - 1), (1, 1)):
            found = np.full(last - first, -1)
            for begin, place, count in cut.runs(shape, first, last):
                found[begin - first : begin - first + count] = whole[place : place + count]
            np.testing.assert_array_equal(found, part[first:last])
