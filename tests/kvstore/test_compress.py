"""Pushes in fewer bits: the numbers of the documents, every codec on every layout of ranks, and what is sent."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import standin
from pairs import in_turn
from raises import raises
from small_stores import added, full

import hpcdp
from hpcdp import kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.compression import BFloat16, Compression, TopK
from hpcdp.errors import ConfigError, MismatchError, UnsupportedError

WORLDS = [(1, None), (2, None), (3, None), (4, None), (5, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]
"""Ranks, and ranks per node: one to three nodes."""
CODECS = ["fp16", "bf16", "2bit", "2bit:threshold=0.5", "1bit", "1bit:threshold=0.1,magnitude=2", "topk:ratio=0.1"]


def _rated(key, received, stored):
    stored += np.asarray(0.25, stored.dtype) * received


@pytest.mark.parametrize(("dtype", "world"), in_turn(["f2", "f4", "f8"], WORLDS))
def test_two_bits_add_up_what_reaches_the_threshold(world, dtype):
    """t = 0.5, rate r: 0.4 adds nothing, then 0.1 adds t r n, then 0.2 nothing, then 0.3 adds t r n more."""

    def one(world, shape):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.ones(shape, dtype))
        store.set_updater(_rated)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found = []
        for turn, value in enumerate((0.4, 0.1, 0.2, 0.3)):
            out = np.full(shape, value, dtype)
            if turn % 2:
                store.pushpull("w", out)
            else:
                store.push("w", out)
                store.pull("w", out)
            found.append((out.min(), out.max()))
        return found

    ranks, per_node = world
    step = 0.5 * 0.25 * ranks
    wanted = [(1 + step * times,) * 2 for times in (0, 1, 1, 2)]
    for shape in ((2, 3), (41, 17), ()):
        assert thread_comm.run(ranks, partial(one, shape=shape), ranks_per_node=per_node) == [wanted] * ranks


def gradient(rank, turn, size, dtype):
    return np.random.default_rng([rank, turn]).standard_normal(size).astype(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("ranks", "per_node", "dtype"),
    [*((*world, "f4") for world in WORLDS), (3, 2, "f2"), (3, 2, "f8"), (4, None, "f2"), (4, None, "f8")],
)
@pytest.mark.parametrize("codec", CODECS)
def test_every_rank_encodes_by_itself_and_all_codes_are_added_once(codec, ranks, per_node, dtype):
    size, turns = 1237, 4

    def one(world):
        store = kvstore.create("dist_sync", world)
        store.set_gradient_compression(codec)
        store.init("w", np.zeros(size, dtype))
        traffic = [] if store._rail is None else [store._rail.comm.traffic]
        before = sum(each.nbytes for each in traffic)
        out, found = np.empty(size, dtype), []
        for turn in range(turns):
            if (turn + world.rank) % 2:
                store.pushpull("w", gradient(world.rank, turn, size, dtype), out)
            else:
                store.push("w", gradient(world.rank, turn, size, dtype))
                store.pull("w", out)
            found.append(out.copy())
        sent = sum(each.nbytes for each in traffic) - before
        return found, store._rows["w"].ends.tolist(), store.sent_nbytes(), sent

    everyone = thread_comm.run(ranks, one, ranks_per_node=per_node)
    ends = sorted(set(everyone[0][1]))
    kind, dtype = Compression.of(codec), np.dtype(dtype)
    residuals = np.zeros((ranks, size), dtype)
    share, nbytes = kind.codec.feedback, 0
    for turn in range(turns):
        total = np.zeros(size, np.result_type(dtype, np.float32))
        nbytes = 0
        for rank in range(ranks):
            residuals[rank] *= dtype.type(share)
            for first, last in pairwise(ends):
                wire, out = np.empty(kind.codec.nbytes(last - first, dtype), np.uint8), np.empty(last - first, dtype)
                grad = gradient(rank, turn, size, dtype)[first:last]
                kind.codec.encode(grad, residuals[rank, first:last], wire)
                kind.codec.decode(wire, out)
                total[first:last] += out
                nbytes += wire.size
        for found, *_ in everyone:
            assert found[turn].tobytes() == total.astype(dtype).tobytes()
    of_one, nodes = nbytes // ranks, -(-ranks // (per_node or ranks))
    assert [each[2] for each in everyone] == [(turns * of_one, turns * size * dtype.itemsize)] * ranks
    assert sum(each[3] for each in everyone) == turns * ranks * of_one * (nodes - 1)


def test_an_optimizer_takes_what_arrives_for_the_gradient():
    def one(world):
        store = kvstore.create("dist", world)
        store.init("w", np.zeros(100, "f4"))
        store.set_optimizer(optim.SGD(lr=0.5))
        store.set_gradient_compression("2bit:threshold=2")
        store.pushpull("w", np.full(100, 3, "f4"), out := np.empty(100, "f4"))
        return out

    for found in thread_comm.run(3, one, ranks_per_node=2):
        assert (found == -0.5 * 2 * 3).all()


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist", "dist_device_sync"])
@pytest.mark.parametrize(
    ("settings", "arrives"),
    [
        ({"type": "2bit", "threshold": 0.5}, [0.5, 0.5, 0.5]),
        ({"type": "2bit"}, [0.5, 0.5, 0.5]),
        ({"type": "1bit", "threshold": 0.5}, [1, -1, 1]),
        ({"type": "fp16"}, [0.75, 0.75, 0.75]),
        (BFloat16(), [0.75, 0.75, 0.75]),
        (Compression(TopK(1.0), feedback=0.5), [0.75, 0.75, 0.75]),
        ("2bit:threshold=0.7,feedback=0", [np.float32(0.7)] * 3),
        (None, [0.75, 0.75, 0.75]),
    ],
)
def test_settings_of_every_form_in_every_kind_of_store(kind, settings, arrives):
    if kvstore.KINDS[kind].scope == "process":
        found = [_pushed_thrice(kvstore.create(kind), settings)]
    else:
        found = thread_comm.run(1, lambda world: _pushed_thrice(kvstore.create(kind, world), settings))
    assert found == [arrives]


def _pushed_thrice(store, settings):
    store.init(1, np.zeros((2, 3), "f4"))
    store.set_gradient_compression(settings)
    found = []
    for _ in range(3):
        store.push(1, [np.full((2, 3), 0.5, "f4"), np.full((2, 3), 0.25, "f4")])
        found.append(float(np.asarray(store.pull(1)).max()))
    return found


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_settings_count_from_the_next_push_on_and_begin_anew(kind):
    def one(store):
        store.init("w", np.zeros(4, "f4"))
        found = []
        for settings in (None, "2bit:threshold=1", "2bit:threshold=1", None):
            store.set_gradient_compression(settings)
            store.pushpull("w", np.full(4, 0.75, "f4"), out := np.empty(4, "f4"))
            found.append(out[0])
        return found

    wanted = [0.75, 0, 0, 0.75]  # what the second has not sent would make the third send
    if kind == "local":
        assert one(kvstore.create(kind)) == wanted
    else:
        assert (
            thread_comm.run(2, lambda w: one(kvstore.create(kind, w)), ranks_per_node=1)
            == [[2 * x for x in wanted]] * 2
        )


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_is_refused(kind):
    def one(store):
        for settings, fields in (
            ("3bit", {"operation": "compression", "expected": ["fp16", "bf16"], "got": "3bit"}),
            ({"type": "3bit"}, {"operation": "compression", "expected": ["fp16", "bf16"], "got": "3bit"}),
            ({"threshold": 0.5}, {"operation": "compression", "where": "type", "expected": ["dict", "threshold", 0.5]}),
            (
                {"type": "2bit", "treshold": 1},
                {"operation": "compression 2bit", "expected": ["threshold=NUMBER", "feedback=NUMBER"]},
            ),
            ({"type": "2bit", "threshold": -1}, {"operation": "compression 2bit", "where": "threshold", "expected": 0}),
            (7, {"operation": "compression", "got": 7}),
        ):
            with raises(ConfigError, **fields):
                store.set_gradient_compression(settings)
        store.init("floats", np.zeros(3, "f4"))
        store.set_gradient_compression("fp16")
        with raises(UnsupportedError, operation="init", where="key 'ints'", got="int64"):
            store.init("ints", np.zeros(3, np.int64))
        store.set_gradient_compression(None)
        store.init("ints", np.zeros(3, np.int64))
        with raises(UnsupportedError, operation="set_gradient_compression", where="key 'ints'", got="int64"):
            store.set_gradient_compression("fp16")
        store.pushpull("ints", np.ones(3, np.int64), out := np.zeros(3, np.int64))
        assert (out == store.num_workers).all()

    if kind == "local":
        one(kvstore.create(kind))
        device = kvstore.create("device")
        device.init("w", standin.asarray(np.zeros(3, "f4")))
        with raises(UnsupportedError, operation="set_gradient_compression", where="key 'w'"):
            device.set_gradient_compression("fp16")
    else:
        thread_comm.run(2, lambda world: one(kvstore.create(kind, world)))


def test_ranks_that_differ_are_told():
    def settings(world):
        store = kvstore.create("dist_sync", world)
        store.set_gradient_compression("2bit" if world.rank else "1bit")

    def pushes(world):
        store = kvstore.create("dist_sync", world)
        store.init("w", np.zeros(3, "f4"))
        if world.rank == 1:
            store.push("w", np.zeros(3, "f4"))
        store.set_gradient_compression("2bit")

    with raises(
        MismatchError,
        operation="set_gradient_compression",
        where="item 1 of 1 on rank 0",
        expected="rank 0",
        got="ranks 1",
    ):
        thread_comm.run(3, settings)
    with raises(
        MismatchError,
        operation="set_gradient_compression",
        where="item 2 of 2 on rank 0",
        expected=[0, "w", "rank 0"],
        got=[1, "w", "rank 1"],
    ):
        thread_comm.run(2, pushes)


@pytest.mark.mpi
def test_on_real_ranks():
    world = hpcdp.init()
    store = kvstore.create("dist_sync")
    store.init("w", np.ones((300, 70), "f4"))
    store.set_updater(_rated)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    for value, times in ((0.4, 0), (0.1, 1), (0.2, 1), (0.3, 2)):
        out = np.empty((300, 70), "f4")
        store.pushpull("w", np.full((300, 70), value, "f4"), out)
        assert (out == 1 + times * 0.5 * 0.25 * world.size).all()
    store.barrier()


@pytest.mark.parametrize(
    ("ranks", "per_node", "split"),
    [
        (1, None, False),
        (3, None, False),
        (2, 1, False),
        (2, 1, True),
        (3, 2, False),
        (3, 2, True),
        (4, 1, False),
        (4, 1, True),
    ],
    indirect=["split"],
)
def test_two_bits_of_pushes_that_do_not_wait_for_each_other(ranks, per_node, split):
    """t = 0.5, rate 2: pushes of 0.4, 0.1, 0.2 and 0.3 add 0, t r n, nothing, and t r n."""

    def one(world, dtype):
        store = kvstore.create("dist_async", world)
        store.init("w", full(0, dtype=dtype))
        store.set_updater(added)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found = []
        for value in (0.4, 0.1, 0.2, 0.3):
            store.push("w", full(value, dtype=dtype))
            store.barrier()
            found.append(np.asarray(store.pull("w")))
            store.barrier()
        return found

    for dtype in ("f4", "f8"):
        for found in thread_comm.run(ranks, partial(one, dtype=dtype), per_node):
            step = 0.5 * 2 * ranks
            for value, wanted in zip(found, (0, step, step, 2 * step), strict=True):
                assert (value == wanted).all()


@pytest.mark.parametrize("codec", ["fp16", "bf16", "1bit:threshold=0,magnitude=1.5", "topk:ratio=0.5"])
def test_codes_that_do_not_wait_for_each_other_send_all_in_the_end(codec):
    """Error feedback: what pushes of one value add up to is off by no more than a few of them."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(64, "f4"))
        store.set_updater(added)
        store.set_gradient_compression(codec)
        for _ in range(40):
            store.push("w", np.linspace(-1, 1, 64, dtype="f4"))
        store.barrier()
        return np.asarray(store.pull("w"))

    for found in thread_comm.run(2, one, 1):
        np.testing.assert_allclose(found / 160, np.linspace(-1, 1, 64), atol=0.12)


@pytest.mark.parametrize("then", [None, "fp16"])
def test_pushes_under_way_are_decoded_as_they_were_encoded(then):
    """While their worker still waits for them others have come, and the server could take the new settings."""

    def one(world):
        store = kvstore.create("dist_async", world)
        store.init("w", np.zeros(400_000, "f4"))  # on the first node
        store.set_updater(added)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        if world.rank == 1:
            for _ in range(40):
                store.push("w", np.full(400_000, 0.5, "f4"))
        store.set_gradient_compression(then)
        store.barrier()
        return store.pull("w").wait().tolist()[::100_000]

    assert thread_comm.run(2, one, 1) == [[40.0] * 4] * 2
