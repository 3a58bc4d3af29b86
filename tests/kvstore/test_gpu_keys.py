"""Stores whose values are on GPUs, on late streams: the same numbers as on the host, wherever arrays come from."""

import contextlib
import shutil
import sys

import gpu_on_host
import numpy as np
import pytest
from pairs import in_turn, pairs
from raises import raises

from hpcdp import checkpoint, kvstore, optim
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets import transport
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import Device, Streams, gpu, to_device_of
from hpcdp.data_parallel import gpu_reduction
from hpcdp.errors import MismatchError, UnsupportedError
from hpcdp.kvstore import arguments, device_sync
from hpcdp.train.trainer import Trainer

SHAPES = {"a": (7, 3), "b": (5,), "c": (40, 30), "d": ()}
NODES = [(1, None), (2, None), (3, (1, 2)), (4, 2)]
STEPS = 3
ORDERS = [0, 1]
"""In which streams take turns."""
WAYS = [GpuTransport.NCCL, GpuTransport.CUDA_IPC, GpuTransport.HOST]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles kernels here")


@pytest.fixture(params=WAYS)
def way(request, gpus_on_host, monkeypatch):
    """GPUs for the ranks of a machine to go that way."""
    if request.param is GpuTransport.CUDA_IPC and not shutil.which("g++"):
        pytest.skip("needs g++, which compiles kernels for this processor")
    use(monkeypatch, {GpuTransport.NCCL: 8, GpuTransport.CUDA_IPC: 1, GpuTransport.HOST: 0}[request.param])
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", 1000)
    return request.param


def use(monkeypatch, count):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(count))
    monkeypatch.setattr(comm_world, "visible", lambda: found)


def on_gpu(x):
    import cupy

    return cupy.asarray(x)


def on_host(x):
    return x if isinstance(x, np.ndarray) else x.to_host()


def pushed(rank, step, key, dtype="f4"):
    rng = np.random.default_rng([rank, step, ord(key)])
    return np.asarray(rng.integers(-99, 99, SHAPES[key]) / 8, dtype)


def first(key, dtype="f4"):
    return np.asarray(np.arange(np.prod(SHAPES[key], dtype=int)).reshape(SHAPES[key]), dtype)


def double_and_add(key, received, stored):
    stored += received
    stored += received


UPDATERS = {
    "sum": lambda store: None,
    "function": lambda store: store.set_updater(double_and_add),
    "adam": lambda store: store.set_optimizer(optim.Adam(lr=0.1)),
}


def program(world, kind, place, updater, dtype="f4"):
    """Values after each round, some pulled to arrays, some returned; ``place`` brings arrays to where they shall be."""
    world.device.use()
    with Streams(world.device).stream() if place is on_gpu else contextlib.nullcontext():  # late, as the store's own
        return rounds(world, kind, place, updater, dtype)


def rounds(world, kind, place, updater, dtype):
    store = kvstore.create(kind, world)
    store.init(list(SHAPES), [place(first(key, dtype) + 100 * world.rank) for key in SHAPES])
    UPDATERS[updater](store)
    found = []
    for step in range(STEPS):
        for key in SHAPES if world.rank % 2 else reversed(SHAPES):
            store.push(key, place(pushed(world.rank, step, key, dtype)))
        outs = [place(np.zeros(SHAPES[key], dtype)) for key in "ab"]
        for out in outs:
            out[...] = place(np.ones(out.shape, dtype))  # which must not come after what is pulled
        store.pull(list("ab"), out=outs)
        later = [store.pull(key) for key in "cd"]
        found += [on_host(each).copy() for each in (*outs, *(each.wait() for each in later))]
    return found


@needs_compiler
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "way", "layout", "updater"),
    pairs(ORDERS, WAYS, NODES, UPDATERS),
    indirect=["gpus_on_host", "way"],
)
def test_ranks_get_what_they_get_on_the_host(gpus_on_host, way, layout, updater):
    n, nodes = layout
    found = thread_comm.run(n, lambda world: program(world, "dist_device_sync", on_gpu, updater), nodes)
    wanted = thread_comm.run(n, lambda world: program(world, "dist_device_sync", np.array, updater), nodes)
    for of_rank, on_rank in zip(found, wanted, strict=True):
        for mine, theirs in zip(of_rank, on_rank, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@needs_compiler
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "way", "run"),
    in_turn(ORDERS, WAYS, [(1, None, "f4"), (2, 1, "f2"), (3, (1, 2), "f4"), (4, 2, "i8"), (4, 1, "f4")]),
    indirect=["gpus_on_host", "way"],
)
def test_keys_have_the_same_bits_by_messages_from_and_to_gpus(gpus_on_host, way, run, monkeypatch):
    n, nodes, dtype = run
    gpu_on_host.let_messages_reach(monkeypatch, sys.modules["cupy"])
    through_host = []
    staged_sum = gpu_reduction.Staging.sum

    def noted(self, *args):
        through_host.append(args)
        return staged_sum(self, *args)

    monkeypatch.setattr(gpu_reduction.Staging, "sum", noted)
    found = {}
    for setting in ("staged", "direct"):
        monkeypatch.setenv(transport.GPU_MESSAGES, setting)
        through_host.clear()
        found[setting] = thread_comm.run(
            n, lambda world: program(world, "dist_device_sync", on_gpu, "sum", dtype), nodes
        )
        between_nodes = n > 1 and (nodes is not None or way is GpuTransport.HOST)
        assert bool(through_host) == (setting == "staged" and between_nodes)
    for direct, staged in zip(found["direct"], found["staged"], strict=True):
        assert len(direct) == STEPS * len(SHAPES)
        for mine, theirs in zip(direct, staged, strict=True):
            assert mine.dtype == theirs.dtype == dtype
            np.testing.assert_array_equal(mine, theirs)


@needs_compiler
@pytest.mark.parametrize(
    ("gpus_on_host", "dtype"), in_turn(ORDERS, ["f2", "f8", "i4", "i2"]), indirect=["gpus_on_host"]
)
def test_dtypes_of_many_keys(gpus_on_host, monkeypatch, dtype):
    use(monkeypatch, 8)
    monkeypatch.setattr(device_sync, "MOST_KEYS", 3)
    found = thread_comm.run(2, lambda world: program(world, "dist_device_sync", on_gpu, "sum", dtype))
    wanted = thread_comm.run(2, lambda world: program(world, "dist_sync", np.array, "sum", dtype))
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@needs_compiler
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async", "local"])
def test_other_stores_keep_arrays_of_gpus_on_the_host(gpus_on_host, monkeypatch, kind):
    use(monkeypatch, 8)
    n, updater = (1, "sum") if kind == "local" else (3, "function")
    if kind == "dist_async":
        n = 1  # ranks that wait for nobody see different values
    found = thread_comm.run(n, lambda world: program(world, kind, on_gpu, updater))
    wanted = thread_comm.run(n, lambda world: program(world, kind, np.array, updater))
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@needs_compiler
def test_the_sum_of_a_workers_gpus_is_made_on_them(gpus_on_host):
    store = kvstore.create("device")
    for dtype in ("f4", "f2", "u1"):
        for count in (1, 2, 5, 40):
            key = f"{dtype} {count}"
            arrays = [on_gpu(np.full((3, 5), each % 4, dtype)) for each in range(count)]
            store.init(key, arrays[0])
            store.push(key, arrays)
            assert type(store.pull(key).wait()).__module__ == "cupy"
            out = np.zeros((3, 5), dtype)
            store.pull(key, out=out)
            assert (out == sum(each % 4 for each in range(count))).all()
    assert gpus_on_host.log.count("kernel") >= 6


@needs_compiler
@pytest.mark.parametrize("kind", ["device", "dist_device_sync"])
@pytest.mark.parametrize("gpus_on_host", range(3), indirect=True)
def test_calls_under_several_streams_keep_their_order(gpus_on_host, kind):
    store, streams = kvstore.create(kind), Streams(gpu(0))
    store.init("a", on_gpu(np.zeros(1000, "f4")))
    ones, twos = (on_gpu(np.full(1000, each, "f4")) for each in (1, 2))
    seen = [on_gpu(np.zeros(1000, "f4")) for _ in range(3)]
    streams.synchronize(streams.current())
    pushing, pulling = streams.stream(), streams.stream()
    with pushing:
        store.push("a", ones)
    with pulling:
        store.pull("a", out=seen[0])
    with pushing:
        store.push("a", twos)
    with pulling:
        store.pull("a", out=seen[1])
        store.assign("a", ones)
    with pushing:
        store.pull("a", out=seen[2])
        pushing.synchronize()
    pulling.synchronize()
    assert [set(each._held.tolist()) for each in seen] == [{1.0}, {2.0}, {1.0}]
    with pushing:
        store.push("a", twos)
    state = {"optimizer": None, "values": {"a": np.full(1000, 5, "f4")}}
    store.wait()
    with pulling:
        store.load_state_dict(state)
    with pushing:
        store.pull("a", out=seen[0])
        pushing.synchronize()
    assert set(seen[0]._held.tolist()) == {5.0}


def test_what_another_gpu_has_is_copied(gpus_on_host, monkeypatch):
    values = np.arange(12, dtype="f4").reshape(3, 4)
    x, here, out = on_gpu(values), on_gpu(np.ones((3, 4), "f4")), on_gpu(np.zeros((3, 4), "f4"))
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, array: gpu(1 if array is x else 0)))
    with gpu_on_host.on_new_stream(Streams(gpu(0))):  # the current one of both, for the stand-in
        copy = to_device_of(x, out)
        x[...] = here  # after the copy
        arguments.carry(copy, out)
        np.testing.assert_array_equal(out.to_host(), values)
        np.testing.assert_array_equal(x.to_host(), np.ones((3, 4)))
    assert copy is not x
    assert to_device_of(here, out) is here
    assert gpus_on_host.log.count("copy") == 1


def test_what_is_pulled_and_given_up_is_not_written_over_what_comes_there(gpus_on_host):
    gpu(0).use()
    store = kvstore.create("dist_device_sync")
    values = np.arange(600, dtype="f4")
    with Streams(gpu(0)).stream() as compute:
        store.init("a", on_gpu(values))
        store.pull("a")  # nobody waits for it, nor has it
        store._engine.waitall()  # the copy is given to the store's stream
        mine = on_gpu(-values)  # as much memory, on the stream from which the pull had its own
        gpus_on_host.reach(compute.ptr)
        while gpus_on_host.step():
            pass
        np.testing.assert_array_equal(mine.to_host(), -values)
        np.testing.assert_array_equal(store.pull("a").wait().to_host(), values)


@needs_compiler
@pytest.mark.parametrize("kind", ["device", "dist_device_sync", "dist_sync"])
def test_arrays_come_and_go_anywhere(gpus_on_host, monkeypatch, kind):
    use(monkeypatch, 8)

    def one(world):
        store = kvstore.create(kind, world)
        for key, place in (("gpu", on_gpu), ("host", np.array)):
            store.init(key, place(np.zeros((4, 2), "f4")))
            store.push(key, [on_gpu(np.full((4, 2), 1 + world.rank, "f4")), np.full((4, 2), 10, "f4")])
            there, here = on_gpu(np.zeros((4, 2), "f4")), np.zeros((4, 2), "f4")
            store.pull(key, out=[there, here])
            total = 10 * world.size + world.size * (world.size + 1) / 2
            assert (there.to_host() == total).all()
            assert (here == total).all()
            store.row_sparse_pull(key, out=[there, here], row_ids=[on_gpu(np.array([3, 1, 3])), [2]])
            np.testing.assert_array_equal(there.to_host(), total * np.array([[0], [1], [0], [1]]) * np.ones((4, 2)))
            np.testing.assert_array_equal(here, total * np.array([[0], [0], [1], [0]]) * np.ones((4, 2)))
            store.pushpull(key, there_too := on_gpu(np.ones((4, 2), "f4")))
            assert (there_too.to_host() == world.size).all()
            store.assign(key, on_gpu(np.full((4, 2), 7, "f4")))
            assert (np.asarray(store.pull(key)) == 7).all()

    thread_comm.run(1 if kind == "device" else 2, one)


def test_ranks_with_values_elsewhere_are_told(gpus_on_host, monkeypatch):
    use(monkeypatch, 8)

    def one(world):
        store = kvstore.create("dist_device_sync", world)
        value = np.zeros(3, "f4")
        with raises(
            MismatchError,
            operation="init",
            where="item 1 of 1 on rank 0",
            expected=["a", (3,), "float32", "GPU", "rank 0"],
        ):
            store.init("a", value if world.rank else on_gpu(value))

    thread_comm.run(2, one)


def test_learning_rates_that_differ_are_told_to_all(gpus_on_host, monkeypatch):
    use(monkeypatch, 8)

    def one(world):
        world.device.use()
        store = kvstore.create("dist_device_sync", world)
        store.init("a", on_gpu(np.zeros(3, "f4")))
        rule = optim.SGD(lr=0.5)
        store.set_optimizer(rule)
        rule.lr = 0.5 + world.rank
        store.push("a", on_gpu(np.ones(3, "f4")))
        with raises(MismatchError, operation="push", where="key 'a'", got=[0.5, "rank 0", 1.5, "rank 1"]):
            store.pull("a").wait()
        rule.lr = 1.0
        store.push("a", on_gpu(np.ones(3, "f4")))
        return store.pull("a").wait().to_host()

    if shutil.which("g++"):
        np.testing.assert_array_equal(thread_comm.run(2, one), np.full((2, 3), -2.0))


def test_compression_is_for_keys_on_the_host(gpus_on_host, monkeypatch):
    use(monkeypatch, 8)

    def one(world):
        store = kvstore.create("dist_device_sync", world)
        store.init("a", on_gpu(np.zeros(3, "f4")))
        with raises(UnsupportedError, operation="set_gradient_compression", where="key 'a'", remedy="init()"):
            store.set_gradient_compression("2bit")
        coded = kvstore.create("dist_device_sync", world)
        coded.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        coded.init("a", on_gpu(np.zeros(3, "f4")))
        out = on_gpu(np.zeros(3, "f4"))
        coded.pushpull("a", on_gpu(np.full(3, 0.6, "f4")), out=out)
        assert (out.to_host() == 0.5 * world.size).all()

    thread_comm.run(2, one)


@needs_compiler
@pytest.mark.parametrize(
    ("gpus_on_host", "ends", "n"),
    pairs(ORDERS, [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], [1, 3]),
    indirect=["gpus_on_host"],
)
def test_state_goes_from_gpus_to_the_host_and_back(gpus_on_host, monkeypatch, tmp_path, ends, n):
    before, after = ends
    use(monkeypatch, 8)
    places = {"gpu": on_gpu, "host": np.array}

    def made(world, place):
        world.device.use()
        store = kvstore.create("dist_device_sync", world)
        store.init("a", places[place](first("a")))
        store.set_optimizer(optim.Adam(lr=0.1))
        return store

    def push(world, store, place, step):
        store.push("a", places[place](pushed(world.rank, step, "a")))

    def one(world):
        straight, saved, resumed, by_file = (made(world, place) for place in (before, before, after, after))
        push(world, straight, before, 0)
        push(world, saved, before, 0)
        with checkpoint.Manager(tmp_path / f"{before}{after}", world) as manager:
            manager.save(1, {"store": saved})
            manager.restore(into={"store": resumed})
        saved.save_optimizer_states(str(tmp_path / f"{before}{after}.npz"))
        by_file.assign("a", saved.pull("a").wait())
        by_file.load_optimizer_states(str(tmp_path / f"{before}{after}.npz"))
        for store, place in ((straight, before), (resumed, after), (by_file, after)):
            push(world, store, place, 1)
        return [np.asarray(store.pull("a")) for store in (straight, resumed, by_file)]

    for straight, resumed, by_file in thread_comm.run(n, one):
        np.testing.assert_allclose(resumed, straight, rtol=1e-6)
        np.testing.assert_allclose(by_file, straight, rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("gpus_on_host", "run", "update_on_kvstore"),
    pairs(ORDERS, [("dist_device_sync", 2), ("dist_sync", 3), ("dist_async", 1), ("device", 1)], [True, False]),
    indirect=["gpus_on_host"],
)
def test_a_trainer_on_a_store_of_gpus(gpus_on_host, monkeypatch, run, update_on_kvstore):
    from hpcdp import autograd, nn

    kind, n = run

    if kind == "dist_async" and not update_on_kvstore:
        return

    def train(world):
        world.device.use()
        net = nn.Dense(4, 3)
        net.weight.data[...] = np.arange(12).reshape(net.weight.shape) / 12
        net.to(world.device)
        trainer = Trainer(
            net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world if n > 1 else None,
            kvstore=kvstore.create(kind, world), update_on_kvstore=update_on_kvstore,
        )  # fmt: skip
        for step in range(3):
            rng = np.random.default_rng([world.rank, step])
            x = world.device.put(rng.standard_normal((5, 4)).astype("f4"))
            with autograd.record():
                loss = nn.functional.softmax_cross_entropy(net(x), world.device.put(rng.integers(0, 3, 5)))
            loss.backward()
            trainer.step(5)
        trainer.synchronize()
        return [on_host(each.data).copy() for each in net.parameters()]

    use(monkeypatch, 8)
    found = thread_comm.run(n, train)
    use(monkeypatch, 0)
    wanted = thread_comm.run(n, train)
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


SIZES = {"small": 10, "large": 1000, "middle": 600, "tiny": 1, "other": 500}


def pushes_of_gpus(store, count, updates):
    """Keys that begin on the first GPU, are pushed from each of several, and pulled to each."""
    place = []
    for number in range(count):
        gpu(number).use()
        place.append({key: on_gpu(np.arange(size, dtype="f4") + number) for key, size in SIZES.items()})
    gpu(0).use()
    store.init(list(SIZES), [on_gpu(np.full(size, 5, "f4")) for size in SIZES.values()])
    if updates:
        store.set_optimizer(optim.SGD(lr=0.5, momentum=0.9))
    found = []
    for _ in range(2):
        for key in SIZES:
            store.push(key, [each[key] for each in place])
            outs = []
            for number in range(count):
                gpu(number).use()
                outs.append(on_gpu(np.zeros(SIZES[key], "f4")))
            gpu(0).use()
            store.pull(key, out=outs)
            found += [on_host(out) for out in outs]
    return found


@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_keys_that_several_gpus_push_are_spread_over_them_by_size(gpus_on_host, count, updates):
    store, on_cpu = kvstore.create("device"), kvstore.create("local")
    found = pushes_of_gpus(store, count, updates)
    wanted = {1: {"large": 0, "middle": 0, "other": 0, "small": 0, "tiny": 0},
              2: {"large": 0, "middle": 1, "other": 1, "small": 0, "tiny": 0},
              3: {"large": 0, "middle": 1, "other": 2, "small": 2, "tiny": 2}}[count]  # fmt: skip
    assert {key: Device.of(store._entries[key].stored).index for key in SIZES} == wanted
    for mine, theirs in zip(found, pushes_of_gpus(on_cpu, count, updates), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_a_key_that_was_updated_stays_on_its_gpu(gpus_on_host):
    store = kvstore.create("device")
    gpu(0).use()
    store.init(["a", "b"], [on_gpu(np.zeros(8, "f4")), on_gpu(np.zeros(4, "f4"))])
    store.set_optimizer(optim.SGD(lr=0.5, momentum=0.9))
    store.push("b", on_gpu(np.ones(4, "f4")))
    gpu(1).use()
    there = on_gpu(np.ones(8, "f4"))
    gpu(0).use()
    store.push("a", [there, on_gpu(np.ones(8, "f4"))])  # the first of the two GPUs with the least gets the largest key
    store.push("b", on_gpu(np.ones(4, "f4")))
    assert [Device.of(store._entries[key].stored).index for key in "ab"] == [1, 0]
    for key, wanted in (("a", -1.0), ("b", -0.5 - 0.95)):
        np.testing.assert_allclose(on_host(store._entries[key].stored), wanted, rtol=1e-6)


def test_a_key_whose_state_was_loaded_stays_on_its_gpu(gpus_on_host, tmp_path):
    gpu(1).use()
    there = on_gpu(np.ones(8, "f4"))
    gpu(0).use()
    stores = [kvstore.create("device") for _ in range(2)]
    for store in stores:
        store.init("a", on_gpu(np.zeros(8, "f4")))
        store.set_optimizer(optim.SGD(lr=0.5, momentum=0.9))
    stores[0].push("a", on_gpu(np.ones(8, "f4")))
    stores[0].save_optimizer_states(str(tmp_path / "states"))
    stores[1].load_optimizer_states(str(tmp_path / "states"))
    stores[1].push("a", [there, on_gpu(np.ones(8, "f4"))])
    found = stores[1]._entries["a"].stored
    assert Device.of(found) == gpu(0)
    np.testing.assert_allclose(on_host(found), -0.5 * (0.9 * 1 + 2), rtol=1e-6)


def test_a_key_that_could_not_be_moved_is_free(gpus_on_host, monkeypatch):
    def full(device, x):
        raise MemoryError(device)

    store = kvstore.create("device")
    gpu(0).use()
    store.init("a", on_gpu(np.zeros(8, "f4")))
    gpu(1).use()
    there = on_gpu(np.ones(8, "f4"))
    gpu(0).use()
    arrays = [there, on_gpu(np.ones(8, "f4"))]
    with monkeypatch.context() as changed, pytest.raises(MemoryError):
        changed.setattr(Device, "put", full)
        store.push("a", arrays)
    assert not store._entries["a"].variable.held
    store.push("a", arrays)
    np.testing.assert_array_equal(on_host(store._entries["a"].stored), 2)


@pytest.mark.parametrize("dtype", ["?", "c8"])
def test_a_store_on_devices_refuses_what_the_host_refuses(gpus_on_host, dtype):
    with raises(UnsupportedError, operation="init", where="key 'x'", expected=["uint8", "float64"]):
        kvstore.create("device").init("x", gpu(1).put(np.zeros(3, dtype)))
