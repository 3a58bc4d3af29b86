"""Sums over nodes by messages from and to GPUs' memory: the staging's bits, on late streams, by real messages."""

import gc
import sys
import threading
import time
from contextlib import nullcontext

import gpu_on_host
import numpy as np
import pytest
from pairs import in_turn, pairs
from parameters_on_gpus import SHAPES, Parameter, check_steps, device_of, show_gpus, use_gpu
from raises import raises

import hpcdp
from hpcdp.checkpoint.manager import Manager, Saving
from hpcdp.collectives import ring
from hpcdp.comm import progress, thread_comm
from hpcdp.comm.communicator import wait_for
from hpcdp.comm.gpu_buckets import transport
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.roll_call import RollCall
from hpcdp.comm.watchdog import Watchdog
from hpcdp.core.arrays import Device, Streams, dtype_of, gpu
from hpcdp.data_parallel import Reducer, bucket_layout, cpu_reduction, gpu_reduction
from hpcdp.errors import ConfigError, DeviceError

COUNTS = {GpuTransport.NCCL: 8, GpuTransport.CUDA_IPC: 1, GpuTransport.HOST: 0}
RUNS = [
    (GpuTransport.NCCL, 2, 1, "f4", False),
    (GpuTransport.NCCL, 3, 1, "f2", True),
    (GpuTransport.NCCL, 4, 2, "f4", True),
    (GpuTransport.CUDA_IPC, 4, 2, "f8", False),
    (GpuTransport.CUDA_IPC, 5, (2, 3), "f4", True),
    (GpuTransport.CUDA_IPC, 4, 2, "bfloat16", True),
    (GpuTransport.NCCL, 4, 1, "i4", False),
    (GpuTransport.HOST, 2, None, "f4", False),
    (GpuTransport.HOST, 3, None, "f4", True),
]
STEPS = 2
ORDERS = [0, 1]
"""In which streams take turns."""


@pytest.fixture
def reached(gpus_on_host, monkeypatch):
    """Streams and GPUs, whose memory messages reach."""
    gpu_on_host.let_messages_reach(monkeypatch, sys.modules["cupy"])
    monkeypatch.setattr(transport, "mpi_claims_cuda_support", lambda: True)
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", 5000)
    return gpus_on_host


def values(rank, step, shape, dtype):
    """Of which each order of adding up has another sum."""
    x = np.random.default_rng([rank, step, *shape]).standard_normal(shape) * 1000
    return x.astype(dtype_of(dtype))


def sums_of(world, way, dtype, overlap, reducers=None):
    use_gpu(world, way)
    params = [Parameter(f"p{i}", shape, dtype_of(dtype)) for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, dtype_of(dtype)) for p in params], 0.004, 0.004)
    reducer = Reducer(params, layout, world, overlap)
    if reducers is not None:
        reducers.append(reducer)
    streams, found = Streams(device_of(world, way)), []
    with gpu_on_host.on_new_stream(streams) as compute:
        for step in range(STEPS):
            for param in reversed(params):
                param.write(values(world.rank, step, param.data.shape, dtype))
            reducer.launch_rest()
            reducer.tally(0)
            reducer.reduce_everywhere()
            compute.synchronize()
            found += [param.grad.to_host() for param in params]
            reducer.reset()
    return found, reducer.reduction.goes_direct


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(
    ("gpus_on_host", "run", "short_nbytes"), pairs(ORDERS, RUNS, [0, 64 << 10]), indirect=["gpus_on_host"]
)
def test_sums_have_the_bits_of_those_through_the_host(reached, monkeypatch, run, short_nbytes):
    way, n, nodes, dtype, overlap = run
    show_gpus(monkeypatch, COUNTS[way])
    monkeypatch.setattr(cpu_reduction, "SHORT_NBYTES", short_nbytes)  # by a ring, and by halving
    monkeypatch.setattr(ring, "message_nbytes", lambda world: 300)
    through_host = []
    copy = Streams.copy_async

    def noted(self, target, source, stream):
        through_host.extend(x.nbytes for x in (target, source) if isinstance(x, np.ndarray))
        copy(self, target, source, stream)

    monkeypatch.setattr(Streams, "copy_async", noted)
    found = {}
    for setting in ("staged", "direct"):
        monkeypatch.setenv(transport.GPU_MESSAGES, setting)
        through_host.clear()
        found[setting] = thread_comm.run(n, lambda world: sums_of(world, way, dtype, overlap), nodes)
        assert bool(through_host) == (setting == "staged")
    for (direct, is_direct), (staged, is_staged) in zip(found["direct"], found["staged"], strict=True):
        assert is_direct and not is_staged
        for mine, theirs in zip(direct, staged, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:gradients on GPUs")
@pytest.mark.parametrize(("gpus_on_host", "n"), in_turn(ORDERS, [2, 3, 4]), indirect=["gpus_on_host"])
def test_a_message_is_a_whole_chunk_of_a_segment(reached, monkeypatch, n):
    show_gpus(monkeypatch, 0)
    monkeypatch.setattr(cpu_reduction, "SHORT_NBYTES", 0)
    segment_nbytes = 300_000
    monkeypatch.setattr(gpu_reduction, "SEGMENT_NBYTES", segment_nbytes)
    sent = []
    isend = thread_comm.ThreadCommunicator.isend

    def noted(self, x, dest, tag=0):
        sent.append(x.nbytes)
        return isend(self, x, dest, tag)

    def sums(world):
        param = Parameter("p", (segment_nbytes - 500,))  # four segments of 32 bits, almost
        layout = bucket_layout.plan([("p", param.data.shape, np.dtype("f4"))])
        reducer = Reducer([param], layout, world, False)
        sent.clear()
        world.barrier()
        check_steps(world, reducer, [param], 1)

    monkeypatch.setattr(thread_comm.ThreadCommunicator, "isend", noted)
    counts = {}
    for setting in ("staged", "direct"):
        monkeypatch.setenv(transport.GPU_MESSAGES, setting)
        thread_comm.run(n, sums)
        counts[setting] = [nbytes for nbytes in sent if nbytes > 1000]  # others are of the step
    most = segment_nbytes / n
    assert len(counts["direct"]) == 4 * n * 2 * (n - 1)
    assert 0.99 * most <= min(counts["direct"]) <= max(counts["direct"]) <= most
    assert max(counts["staged"]) <= progress.MESSAGE_NBYTES + 8


def test_who_waits_for_the_gpu_looks_after_the_node(reached, monkeypatch):
    show_gpus(monkeypatch, 0)
    monkeypatch.setenv(transport.GPU_MESSAGES, "direct")
    monkeypatch.setattr(Streams, "query", lambda *_: False)  # a GPU that has been stuck

    def check(self):
        raise DeviceError("NCCL", got="a rank that is gone")

    monkeypatch.setattr("hpcdp.comm.gpu_buckets.transport.LoneRow.check", check)
    with raises(DeviceError, operation="NCCL", got="gone"), pytest.warns(UserWarning, match="gradients on GPUs"):
        thread_comm.run(2, lambda world: sums_of(world, GpuTransport.HOST, "f4", False))


def test_all_threads_in_mpi_have_the_gpu_of_messages(reached, monkeypatch, tmp_path):
    """The watchdog, which answers other nodes, and a save behind; also where a part of the world has such messages.

    MPI goes on with any thread's messages in them, by the context that they have.
    """
    show_gpus(monkeypatch, 2)
    monkeypatch.setenv(transport.GPU_MESSAGES, "direct")
    found = set()

    def noted(cls, method):
        before = getattr(cls, method)

        def call(self, *arguments):
            found.add((cls, reached.process(), getattr(reached.of_thread, "device", 0)))
            return before(self, *arguments)

        monkeypatch.setattr(cls, method, call)

    noted(RollCall, "turn")
    noted(Saving, "run")

    def rank(world):
        reducers = []
        sums_of(part := world.split(0), GpuTransport.NCCL, "f4", False, reducers)
        watchdog = Watchdog(world, 0.4, 600)
        manager = Manager(tmp_path, world)
        manager.save(1, {"step": 1}, wait=False)
        manager.wait()
        wait_for(lambda: (RollCall, f"rank-{world.rank}") in {each[:2] for each in found})
        watchdog.end()
        assert part.gpu_of_messages == gpu(world.rank)

    thread_comm.run(2, rank, 1)
    assert found == {(each, f"rank-{number}", number) for each in (RollCall, Saving) for number in range(2)}


def test_threads_in_mpi_use_a_gpu_no_longer_than_its_sender_lives(reached, monkeypatch):
    show_gpus(monkeypatch, 2)
    monkeypatch.setenv(transport.GPU_MESSAGES, "direct")
    used, use = [], Device.use

    def noted(self):
        used.append((threading.current_thread().name, self))
        use(self)

    def uses_on_lanes(world):
        world.barrier()
        used.clear()
        world.barrier()
        hpcdp.iallreduce(np.ones(3), world=world, algorithm="ring").wait()
        world.engine.wait_for_all()
        world.barrier()
        return {device for thread, device in used if not thread.startswith("rank-")}

    def rank(world):
        reducers = []
        sums_of(world, GpuTransport.NCCL, "f4", False, reducers)
        before = uses_on_lanes(world)
        reducers.clear()
        world.barrier()
        if world.rank == 0:  # a collection beside another one does nothing
            gc.collect()
        return before, uses_on_lanes(world)

    monkeypatch.setattr(Device, "use", noted)
    both = {gpu(0), gpu(1)}
    assert thread_comm.run(2, rank, [1, 1]) == [(both, set())] * 2


def agreed_by(n, nodes=None):
    def rank(world):
        return transport.agree_on_cuda_aware_mpi(world)

    return thread_comm.run(n, rank, nodes)


def test_a_library_that_says_no_is_not_tried(monkeypatch):
    monkeypatch.setattr(transport, "mpi_claims_cuda_support", lambda: False)
    monkeypatch.setattr(transport, "try_cuda_aware_mpi", lambda: pytest.fail("tried"))
    assert agreed_by(2, 1) == [(False, "no, the MPI library says")] * 2


def test_all_nodes_must_be_able_and_each_is_tried_once(reached, monkeypatch):
    monkeypatch.setattr(transport, "_exchange_seconds", lambda comm: (1.0, 2.0))
    tries = []

    def answers(*given):
        left = iter(given)

        def tried():
            tries.append(next(left))
            return tries[-1]

        monkeypatch.setattr(transport, "try_cuda_aware_mpi", tried)

    answers("yes, it says and does", "yes, it says and does")
    assert agreed_by(4, 2) == [(True, "yes, it says and does, and messages between nodes arrive")] * 4
    assert len(tries) == 2
    answers("yes, it says and does", "no: it hangs")
    assert agreed_by(4, 2) == [(False, "no: it hangs")] * 4


def test_the_way_through_the_host_is_taken_where_one_rank_finds_it_faster(reached, monkeypatch):
    monkeypatch.setattr(transport, "try_cuda_aware_mpi", lambda: "yes, it says and does")
    monkeypatch.setattr(transport, "_exchange_seconds", lambda comm: (0.025 if comm.rank == 1 else 0.001, 0.002))
    why = "no: staging in host memory is faster, 2.0 ms for 4 MiB, not 25.0"
    for nodes in (2, 1, None):
        assert agreed_by(4, nodes) == [(False, why)] * 4


def test_both_ways_are_timed(reached, monkeypatch):
    """By messages that wait: some go from memory of a GPU, and as many from the host's."""
    sent, isend = [], thread_comm.ThreadCommunicator.isend

    def late(self, x, dest, tag=0):
        is_on_gpu = type(x).__module__ == "cupy"
        sent.append((is_on_gpu, x.nbytes))
        time.sleep(0.02 if is_on_gpu else 0.001)
        return isend(self, x, dest, tag)

    monkeypatch.setattr(thread_comm.ThreadCommunicator, "isend", late)
    monkeypatch.setattr(transport, "_TIMED", 1001)
    found = thread_comm.run(3, lambda world: transport._exchange_seconds(world.rail_comm), 1)
    assert all(direct > 4 * 0.02 and staged > 4 * 0.001 for direct, staged in found)
    nbytes = sorted([1000, 1000, 1000, 1004] * 3 * 3)
    assert [sorted(each for there, each in sent if there == wanted) for wanted in (True, False)] == [nbytes, nbytes]


@pytest.mark.parametrize("wrong_from", [300, 1 << 20])
def test_what_comes_from_another_node_must_be_what_was_sent(reached, monkeypatch, wrong_from):
    monkeypatch.setattr(transport, "mpi_claims_cuda_support", lambda: True)
    monkeypatch.setattr(transport, "try_cuda_aware_mpi", lambda: "yes, it says and does")
    isend = thread_comm.ThreadCommunicator.isend

    def spoilt(self, x, dest, tag=0):
        is_array = type(x).__module__ == "cupy"
        return isend(self, x * 0 if is_array and x.nbytes >= wrong_from and self.rank == 1 else x, dest, tag)

    monkeypatch.setattr(thread_comm.ThreadCommunicator, "isend", spoilt)
    why = "no: rank 4 receives other data from another node than was sent"
    assert agreed_by(6, 2) == [(False, why)] * 6


def test_the_setting_of_rank_0_counts_and_a_wrong_one_is_told_on_all(monkeypatch):
    monkeypatch.setattr(transport, "mpi_claims_cuda_support", lambda: False)
    for setting, there in (("direct", True), ("staged", False)):
        monkeypatch.setenv(transport.GPU_MESSAGES, setting)
        with pytest.warns(UserWarning, match="it may crash") if there else nullcontext():
            assert agreed_by(3, 1) == [(there, f"HPCDP_GPU_MESSAGES={setting}")] * 3
    monkeypatch.setenv(transport.GPU_MESSAGES, "fast")
    told = []

    def rank(world):
        with pytest.raises(ConfigError) as caught:
            transport.agree_on_cuda_aware_mpi(world)
        told.append(str(caught.value))

    thread_comm.run(3, rank, 1)
    assert told == ["reduction [HPCDP_GPU_MESSAGES]: expected one of auto, direct, staged, got 'fast'"] * 3


def test_what_cannot_be_tried_is_a_no(monkeypatch):
    monkeypatch.setattr(transport, "_TRY", "raise SystemExit('mpirun: none')")
    assert transport.try_cuda_aware_mpi() == "no: it cannot be tried, mpirun: none"
    monkeypatch.setattr(transport, "_LIMIT_S", 0.5)
    monkeypatch.setattr(transport, "_TRY", "import time; time.sleep(60)")
    assert transport.try_cuda_aware_mpi().startswith("no: it cannot be tried, Command")


def test_it_is_tried_beside_a_users_file_of_a_modules_name(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('taken for the random of Python')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transport, "_TRY", "import random; print('yes', random.Random.__name__)")
    assert transport.try_cuda_aware_mpi() == "yes Random"


def test_an_environment_outside_of_jobs_keeps_what_a_user_has_set():
    kept = {"OMPI_MCA_pml": "ucx", "PATH": "/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    of_jobs = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "0",
               "OMPI_MCA_ess_base_vpid": "1", "OMPI_MCA_orte_ess_num_procs": "2"}  # fmt: skip
    assert transport.outside_of_jobs({**kept, **of_jobs}) == kept


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize(("gpus_on_host", "overlap"), in_turn(ORDERS, [False, True]), indirect=["gpus_on_host"])
@pytest.mark.filterwarnings("ignore:gradients on GPUs")
def test_real_messages_go_from_and_to_the_memory_of_gpus(reached, monkeypatch, overlap):
    show_gpus(monkeypatch, 0)
    monkeypatch.setenv(transport.GPU_MESSAGES, "direct")
    world = hpcdp.init()
    monkeypatch.setitem(
        world.kept, "messages of GPUs", transport._agree_on_cuda_aware_mpi(world)
    )  # for this test alone
    for dtype in ("f4", "f2"):
        params = [Parameter(f"p{i}", shape, dtype_of(dtype)) for i, shape in enumerate(SHAPES)]
        layout = bucket_layout.plan([(p.name, p.data.shape, dtype_of(dtype)) for p in params], 0.004, 0.004)
        reducer = Reducer(params, layout, world, overlap)
        assert world.size == 1 or reducer.reduction.goes_direct
        check_steps(world, reducer, params, STEPS)
    del reducer, params
    gc.collect()  # parameters and their reducer hold each other, and later tests have no such GPU


@pytest.mark.mpi
def test_a_rank_of_a_job_can_start_the_try():
    world = hpcdp.init()
    if world.size != 2:
        pytest.skip("a rank has the same environment in a job of any size, and one of 2 ranks tries")
    said = transport.try_cuda_aware_mpi() if world.rank == 0 else ""
    assert world.comm.allgather_json(said)[0] == "no, it says"  # of the wheel that is tested with
