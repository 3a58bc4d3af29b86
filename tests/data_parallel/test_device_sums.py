"""Gradients on GPUs: summed in the node by NCCL or CUDA IPC, across nodes through the host, on late streams."""

import shutil
import threading
import time

import numpy as np
import pytest
from gpu_on_host import on_new_stream
from pairs import in_turn, pairs
from parameters_on_gpus import (
    SHAPES,
    Parameter,
    bring_to_host,
    check_steps,
    device_of,
    gradient,
    show_gpus,
    use_gpu,
    wanted,
    way_of,
)
from raises import raises

import hpcdp
from hpcdp import compression, optim
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.progress import RunningTask, run_until_complete
from hpcdp.comm.world import Gpu
from hpcdp.compression import Compression
from hpcdp.core.arrays import Streams, dtype_of, gpu, is_host, to_host
from hpcdp.data_parallel import Reducer, bucket_layout, gpu_reduction, sharded_update
from hpcdp.data_parallel.trainer_state import gather_residuals, regrouped, take_residuals
from hpcdp.errors import DeviceError, MismatchError, UnsupportedError
from hpcdp.kernels.cuda import kernels
from hpcdp.train.trainer import Trainer

NODES = [(2, None), (3, None), (2, 1), (3, 1), (4, 2), (5, (2, 3)), (7, (4, 3))]
STEPS = 3
ORDERS = [0, 1]
"""In which streams take turns."""
WAYS = [GpuTransport.NCCL, GpuTransport.CUDA_IPC, GpuTransport.GROUPS, GpuTransport.HOST]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    go(request.param, monkeypatch)
    return request.param


def go(way, monkeypatch):
    """GPUs for the ranks of a machine to go that way."""
    if way in (GpuTransport.CUDA_IPC, GpuTransport.GROUPS) and not shutil.which("g++"):
        pytest.skip("needs g++, which compiles kernels for this processor")
    show_gpus(
        monkeypatch, {GpuTransport.NCCL: 8, GpuTransport.CUDA_IPC: 1, GpuTransport.GROUPS: 8, GpuTransport.HOST: 0}[way]
    )
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", 1000)


def make(world, overlap, dtype="f4", compression=None):
    params = [Parameter(f"p{i}", shape, dtype) for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, np.dtype(dtype)) for p in params], 0.004, 0.004)
    return Reducer(params, layout, world, overlap, Compression.of(compression)), params


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "way", "overlap", "layout"),
    pairs(ORDERS, WAYS, [False, True], NODES),
    indirect=["gpus_on_host", "way"],
)
def test_every_rank_holds_the_sums_of_each_step(gpus_on_host, way, overlap, layout):
    n, nodes = layout

    def rank(world):
        import cupy

        kept = []
        use_gpu(world, way)
        streams = Streams(device_of(world, way))
        reducer, params = make(world, overlap)
        assert reducer.reduction.way is way_of(world, way)
        with on_new_stream(streams) as compute:  # which is late as well
            for step in range(STEPS):
                written = [cupy.asarray(gradient(world.rank, step, param.data.shape)) for param in params]
                for param, x in zip(reversed(params), reversed(written), strict=True):
                    streams.copy_async(param.grad, x, compute)
                    param.grad_hook(param)
                reducer.launch_rest()
                reducer.tally(0)
                reducer.reduce_everywhere()
                found = [cupy.zeros(param.data.shape, "f4") for param in params]
                for x, param in zip(found, params, strict=True):
                    streams.copy_async(x, param.grad, compute)
                reducer.reset()
                kept.append((step, found, written))
            compute.synchronize()
        for step, found, _ in kept:
            for x in found:
                np.testing.assert_array_equal(x.to_host(), wanted(n, step, x.shape))

    thread_comm.run(n, rank, nodes)


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "way", "overlap", "layout"),
    pairs(ORDERS, WAYS, [False, True], [(2, None), (3, None), (4, 2)]),
    indirect=["gpus_on_host", "way"],
)
def test_gradients_of_one_bucket_may_be_written_on_several_streams(gpus_on_host, way, overlap, layout):
    n, nodes = layout

    def rank(world):
        import cupy

        use_gpu(world, way)
        streams = Streams(device_of(world, way))
        reducer, params = make(world, overlap)
        assert any(len(bucket.slots) > 1 for bucket in reducer.buckets)
        writers, read, kept = [streams.stream() for _ in range(3)], streams.event(), []
        with on_new_stream(streams) as compute:
            for step in range(STEPS):
                written = [streams.array(np.asarray(gradient(world.rank, step, each.data.shape))) for each in params]
                streams.synchronize(compute)
                for i, (param, x) in enumerate(zip(params, written, strict=True)):
                    with writers[i % 3]:
                        streams.wait_event(writers[i % 3], read)
                        streams.copy_async(param.grad, x, writers[i % 3])
                        param.grad_hook(param)
                reducer.launch_rest()
                reducer.tally(0)
                reducer.reduce_everywhere()
                found = [cupy.zeros(each.data.shape, "f4") for each in params]
                for x, param in zip(found, params, strict=True):
                    streams.copy_async(x, param.grad, compute)
                streams.record(read, compute)
                reducer.reset()
                kept.append((step, found, written))
            compute.synchronize()
        for step, found, _ in kept:
            for x in found:
                np.testing.assert_array_equal(x.to_host(), wanted(n, step, x.shape))

    thread_comm.run(n, rank, nodes)


@pytest.mark.parametrize("late", [0, 1])
def test_a_sum_waits_for_each_of_the_streams_that_have_written(gpus_on_host, monkeypatch, late):
    show_gpus(monkeypatch, 2)
    computed = threading.Event()

    def rank(world):
        use_gpu(world, GpuTransport.NCCL)
        streams = Streams(gpu(world.place))
        reducer, _ = make(world, overlap=False)
        bucket, sums = reducer.buckets[0], reducer.reduction
        row = sums.rows(bucket.number)[0]
        given = streams.array(gradient(world.rank, 0, row.shape))
        streams.synchronize(streams.current())
        for number, part in enumerate((slice(None, 5), slice(5, None))):
            with streams.stream() as writer:
                if number == late:
                    gpus_on_host.push(writer.ptr, lambda: None, computed.is_set)
                streams.copy_async(row[part], given[part], writer)
                (sums.filled if number else sums.record_writer)(bucket)
        run_until_complete(sums.sum(bucket, None))
        world.barrier()  # now all have launched it
        while gpus_on_host.step():
            pass
        world.barrier()
        computed.set()
        sums.summed(bucket)
        np.testing.assert_array_equal(row.to_host(), wanted(2, 0, row.shape))

    thread_comm.run(2, rank)


def comes_without_waiting(reducer, bucket, streams):
    """Whether the sum of a bucket, which is launched, is there before anything else is done."""
    done = streams.event()
    with streams.stream() as behind:
        reducer.reduction.summed(bucket)
        streams.record(done, behind)
    deadline = time.monotonic() + 60  # the other rank's part may come late, too
    while not (found := streams.query(done)) and time.monotonic() < deadline:
        time.sleep(1e-4)
    return found


def test_a_bucket_does_not_wait_for_the_gradients_of_those_behind_it(gpus_on_host, monkeypatch):
    show_gpus(monkeypatch, 2)
    computed = threading.Event()

    def rank(world):
        use_gpu(world, GpuTransport.NCCL)
        streams = Streams(gpu(world.place))
        reducer, _ = make(world, overlap=False)
        first, second = reducer.buckets[:2]
        with on_new_stream(streams) as compute:
            reducer.reduction.filled(first)
            gpus_on_host.push(compute.ptr, lambda: None, computed.is_set)
            reducer.reduction.filled(second)
            run_until_complete(reducer.reduction.sum(first, None))
            world.barrier()  # now all have launched it
            found = comes_without_waiting(reducer, first, streams)
            world.barrier()
            computed.set()
            run_until_complete(reducer.reduction.sum(second, None))
        return found

    assert thread_comm.run(2, rank) == [True, True]


def test_a_sum_that_comes_first_on_all_ranks_does_not_wait_for_gradients_of_one_that_some_have_begun(
    gpus_on_host, monkeypatch
):
    show_gpus(monkeypatch, 2)
    computed = threading.Event()

    def rank(world):
        use_gpu(world, GpuTransport.NCCL)
        streams = Streams(gpu(world.place))
        reducer, _ = make(world, overlap=False)
        late, early = reducer.buckets[:2]
        with on_new_stream(streams) as compute:
            reducer.reduction.filled(early)
            gpus_on_host.push(compute.ptr, lambda: None, computed.is_set)
            reducer.reduction.filled(late)
            if world.rank == 0:
                begun = RunningTask(reducer.reduction.sum(late, None))
                assert not begun.advance()  # rank 1 is not ready for it
            run_until_complete(reducer.reduction.sum(early, None))
            found = comes_without_waiting(reducer, early, streams)
            world.barrier()
            computed.set()
            if world.rank == 0:
                while not begun.advance():
                    pass
            else:
                run_until_complete(reducer.reduction.sum(late, None))
        return found

    assert thread_comm.run(2, rank) == [True, True]


def test_lanes_make_no_context_on_gpus_of_other_ranks(gpus_on_host, monkeypatch):
    show_gpus(monkeypatch, 8)

    def rank(world):
        gpu(1 + world.place).use()
        reducer, params = make(world, overlap=True)
        for _ in range(2):
            for param in reversed(params):
                param.write(gradient(world.rank, 0, param.data.shape))
            reducer.launch_rest()
            reducer.tally(0)
            reducer.reduce_everywhere()
            reducer.reset()

    thread_comm.run(4, rank, 2)
    assert gpus_on_host.contexts == {1, 2, 3, 4}


@pytest.mark.parametrize(("n", "wrong"), [(1, (0,)), (2, (1,)), (3, (0, 1, 2))])
def test_parameters_that_are_not_on_the_current_device_are_told_on_all_ranks(gpus_on_host, n, wrong):
    told = []

    def rank(world):
        gpu(1 + world.place).use()
        params = [Parameter(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        gpu(7 if world.rank in wrong else 1 + world.place).use()
        who = None if len(wrong) == n else wrong[0]
        with raises(
            DeviceError, operation="reduction", where="device", expected=gpu(1 + wrong[0]), got=gpu(7), rank=who
        ):
            Reducer(params, bucket_layout.plan([(p.name, p.data.shape, np.dtype("f4")) for p in params]), world)
        told.append(world.rank)

    thread_comm.run(n, rank)
    assert sorted(told) == list(range(n))


class CudaCodes:
    """CUDA's codecs for NumPy's arrays: the scales of blocks, which are sums, have their rounding."""

    def __getattr__(self, name):
        import cupy

        def call(*given):
            found = getattr(kernels, name)(*(cupy.Array(x) if isinstance(x, np.ndarray) else x for x in given))
            cupy.cuda.get_current_stream().synchronize()
            return found

        return call


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "run"),
    in_turn(
        ORDERS,
        [
            (GpuTransport.NCCL, "2bit", 2, 1),
            (GpuTransport.CUDA_IPC, "1bit", 4, 2),
            (GpuTransport.NCCL, "2bit:threshold=4.0", 5, (2, 3)),
            (GpuTransport.HOST, "fp16", 2, 1),
            (GpuTransport.CUDA_IPC, "bf16", 5, (2, 3)),
            (GpuTransport.NCCL, "topk:ratio=0.1", 4, 2),
            (GpuTransport.NCCL, "fp16:inside_nodes=on", 3, None),
        ],
    ),
    indirect=["gpus_on_host"],
)
def test_codes_of_gpus_are_those_of_the_host(gpus_on_host, run, monkeypatch):
    way, codec, n, nodes = run
    go(way, monkeypatch)
    monkeypatch.setattr(compression, "MESSAGE_NBYTES", 2000)
    if codec in ("1bit", "2bit"):
        on_host = compression._kernels
        monkeypatch.setattr(compression, "_kernels", lambda x: CudaCodes() if is_host(x) else on_host(x))

    def rank(world, on_gpu, overlap):
        use_gpu(world, way)
        reducer, params = made(world, on_gpu, overlap)
        steps = []
        for step in range(2):
            for param in reversed(params):
                param.write(gradient(world.rank, step, param.data.shape))
            reducer.launch_rest()
            reducer.tally(0)
            reducer.reduce_everywhere()
            steps.append([np.array(to_host(param.grad)) for param in params])
            steps.append([gather_residuals(reducer, each) for each in reducer.buckets])
            reducer.reset()
        return steps, reducer.node_nbytes()[:2]

    def made(world, on_gpu, overlap):
        params = [Parameter(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        if not on_gpu:
            bring_to_host(params)
        layout = bucket_layout.plan([(p.name, p.data.shape, np.dtype("f4")) for p in params], 0.004, 0.004)
        return Reducer(params, layout, world, overlap, Compression.of(codec)), params

    host = thread_comm.run(n, lambda world: rank(world, False, False), nodes)
    there = thread_comm.run(n, lambda world: rank(world, True, n % 2 == 0), nodes)
    for (steps, sent), (steps_of_host, sent_by_host) in zip(there, host, strict=True):
        assert sent == sent_by_host and sent[0] > 0
        for mine, theirs in zip(steps, steps_of_host, strict=True):
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(x, y)
    assert "copy" in gpus_on_host.log


def test_codes_alone_go_through_the_host(gpus_on_host, monkeypatch):
    """Not gradients: 2 bits an element, and the scales."""
    monkeypatch.setattr(comm_world, "visible", lambda: ())
    nbytes = []
    copy = Streams.copy_async
    monkeypatch.setattr(
        Streams, "copy_async", lambda self, target, *rest: (nbytes.append(target.nbytes), copy(self, target, *rest))
    )

    def rank(world):
        reducer, params = make(world, False, compression="2bit:inside_nodes=on")
        for param in reversed(params):
            param.write(gradient(world.rank, 0, param.data.shape))
        reducer.tally(0)
        reducer.reduce_everywhere()
        return sum(param.grad.nbytes for param in params)

    moved = 2 * thread_comm.run(2, rank)[0]  # by two ranks
    assert 0 < sum(nbytes) < moved  # to the host and back twice, a sixteenth each, in whole blocks of 256 bytes


def test_codes_on_one_node_change_nothing_and_that_is_told(gpus_on_host, monkeypatch):
    show_gpus(monkeypatch, 2)

    def rank(world):
        use_gpu(world, GpuTransport.NCCL)
        reducer, params = make(world, False, compression="1bit")
        for param in params:
            param.write(gradient(world.rank, 0, param.data.shape))
        reducer.tally(0)
        reducer.reduce_everywhere()
        assert reducer.reduction.way is GpuTransport.NCCL and reducer.reduction.coder is None
        for param in params:
            np.testing.assert_array_equal(to_host(param.grad), wanted(2, 0, param.data.shape))

    with pytest.warns(UserWarning, match="compression 1bit changes nothing on one node"):
        thread_comm.run(2, rank)


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
def test_what_codes_have_not_sent_is_given_back_to_gpus(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "visible", lambda: ())

    def rank(world):
        reducer, params = make(world, False, compression="fp16")
        saved = {p.name: np.random.default_rng(7).random((world.num_nodes, *p.data.shape), "f4") for p in params}
        take_residuals(reducer, regrouped(reducer, saved))
        for slot in reducer.layout.slots:
            kept = gather_residuals(reducer, reducer.buckets[slot.bucket])[:, slot.offset : slot.offset + slot.count]
            if world.rank == 0:
                np.testing.assert_array_equal(kept.reshape(saved[slot.name].shape), saved[slot.name])

    thread_comm.run(3, rank, 1)


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(("gpus_on_host", "way"), in_turn(ORDERS, WAYS), indirect=True)
def test_training_on_gpus_is_training_on_the_host(gpus_on_host, monkeypatch, way):
    """Gradients are clipped by each GPU for itself, alike."""
    norms, squares_of_model = [], sharded_update.squares_of_model

    def noted(reducer):
        squares = squares_of_model(reducer)
        norms.append(squares**0.5)
        return squares

    monkeypatch.setattr("hpcdp.data_parallel.bucket_trainer.squares_of_model", noted)

    def rank(world, on_gpu):
        if on_gpu:
            use_gpu(world, way)
        params = [Parameter(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        if not on_gpu:
            bring_to_host(params)
        trainer = Trainer(params, optim.SGD(lr=0.5, momentum=0.5), world, clip_norm=100.0)
        for step in range(STEPS):
            for param in reversed(params):
                param.write(gradient(world.rank, step, param.data.shape))
            trainer.step(1)
        return [param.data.to_host() if on_gpu else param.data.copy() for param in params]

    for n, nodes in ((3, None), (4, 2)):
        host = thread_comm.run(n, lambda world: rank(world, False), nodes)[0]
        assert norms and min(norms) > n * 100.0
        norms.clear()
        everyone = thread_comm.run(n, lambda world: rank(world, True), nodes)
        assert not norms, "the host knows none"
        for found in everyone:
            for mine, first, theirs in zip(found, everyone[0], host, strict=True):
                np.testing.assert_array_equal(mine, first)
                np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_who_cannot_sum_in_the_node_is_told_why(gpus_on_host, monkeypatch):
    monkeypatch.setattr(comm_world, "visible", lambda: (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),))
    monkeypatch.setattr("hpcdp.comm.gpu_buckets.transport._nccl_version", lambda: 0)
    with pytest.warns(UserWarning, match="summed in host memory, each rank for itself: local rank 0 has no GPU"):
        monkeypatch.setattr(comm_world, "visible", lambda: ())
        thread_comm.run(2, lambda world: make(world, False)[0].way)


def test_what_the_host_cannot_sum_is_refused_by_name(gpus_on_host):
    with raises(UnsupportedError, operation="reduction over nodes", where="dtype", expected="float16", got="int8"):
        thread_comm.run(2, lambda world: make(world, False, np.dtype("int8")), 1)


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("way", "overlap", "layout"), in_turn(WAYS, [False, True], [(2, None), (4, 2), (3, 1)]), indirect=["way"]
)
def test_bfloat16_is_summed_on_every_way(gpus_on_host, way, overlap, layout):
    n, nodes = layout

    def rank(world):
        use_gpu(world, way)
        reducer, params = make(world, overlap, dtype_of("bfloat16"))
        for param in reversed(params):  # sums of numbers below 16 are exact
            param.write((gradient(world.rank, 0, param.data.shape) / 12).round().astype(param.data.dtype))
        reducer.launch_rest()
        reducer.tally(0)
        reducer.reduce_everywhere()
        return [param.grad.to_host() for param in params]

    for found in thread_comm.run(n, rank, nodes):
        for x, shape in zip(found, SHAPES, strict=True):
            assert x.dtype == dtype_of("bfloat16")
            np.testing.assert_array_equal(x, sum((gradient(each, 0, shape) / 12).round() for each in range(n)))


def test_ranks_with_parameters_on_the_host_and_on_a_gpu_are_told_on_all(gpus_on_host):
    told = []

    def rank(world):
        params = [Parameter(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        for param in params if world.rank == 1 else []:
            param.data = param.data.to_host()
        with raises(
            MismatchError,
            operation="Trainer",
            where="item 1 of 9 on rank 0",
            expected=["float32", "GPU", "rank 0"],
            got=["p0", (7, 3), "float32", "rank 1"],
        ):
            Trainer(params, optim.SGD(lr=0.5), world)
        told.append(world.rank)

    thread_comm.run(3, rank)
    assert sorted(told) == [0, 1, 2]


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize(("gpus_on_host", "overlap"), in_turn(ORDERS, [False, True]), indirect=["gpus_on_host"])
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
def test_real_ranks_sum_through_pinned_memory(gpus_on_host, monkeypatch, overlap):
    monkeypatch.setattr(comm_world, "visible", lambda: ())
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", 1000)
    world = hpcdp.init()
    reducer, params = make(world, overlap)
    check_steps(world, reducer, params, STEPS)


def test_parameters_on_several_gpus_are_refused(gpus_on_host):
    def rank(world):
        params = [Parameter(f"p{i}", (3,)) for i in range(2)]
        for number, param in enumerate(params):
            param.data = type("Array", (), {"__module__": "cupy", "device": type("Device", (), {"id": number})})()
        layout = bucket_layout.plan([(p.name, (3,), np.dtype("f4")) for p in params])
        Reducer(params, layout, world)

    with raises(UnsupportedError, operation="reduction", where="device", got=["gpu(0)", "gpu(1)"]):
        thread_comm.run(2, rank)
