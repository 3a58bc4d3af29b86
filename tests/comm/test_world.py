"""Real ranks; run under mpirun by tests/run.py."""

import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp.comm import shared_memory, thread_comm
from hpcdp.comm.communicator import make_tag
from hpcdp.comm.consistency import require_same
from hpcdp.comm.shared_memory import NodeBarrier
from hpcdp.comm.startup import _world_of
from hpcdp.comm.watchdog import Watchdog
from hpcdp.errors import ConfigError, HpcdpError, LaunchError, MismatchError


@pytest.fixture
def world():
    return hpcdp.init()


@pytest.mark.mpi
def test_ranks_of_one_machine_share_a_node(world):
    assert world is hpcdp.init()
    assert (world.num_nodes, world.node, world.local_rank, world.local_size) == (1, 0, world.rank, world.size)
    assert world.num_rails == world.size
    assert world.node_memory.size == world.size
    assert world.comm.allgather_json(world.rank) == list(range(world.size))


def test_a_world_is_printed_on_one_line():
    (text,) = thread_comm.run(1, repr)
    assert text.startswith("World(rank=0, size=1, local_rank=0,") and " object at " not in text


class LateIn:
    """A communicator on which rank 0 comes half a second late to the collective ``name``, blocking or not."""

    def __init__(self, comm, name):
        self._comm, self._name = comm, name

    def __getattr__(self, name):
        if self._comm.rank == 0 and name.lower().removeprefix("i") == self._name:
            time.sleep(0.5)
        return getattr(self._comm, name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("exchange", ["allreduce"])
def test_ranks_that_wait_for_a_late_one_to_agree_leave_it_the_core(world, exchange):
    world.barrier()
    comm = type(world.comm)(LateIn(world.comm.mpi, exchange))
    before_s = time.thread_time()
    assert comm.allgather_json(world.rank) == list(range(world.size))
    assert time.thread_time() - before_s < 0.1


@pytest.mark.mpi
def test_tags_of_parts_carry_as_much_as_those_of_all(world):
    part = type(world.comm)(world.comm.mpi.Split(world.rank % 2))
    assert part.signatures == world.comm.signatures == world.comm.duplicate().signatures > 1 << 10
    part.mpi.Free()


@pytest.mark.mpi
def test_shared_memory_is_the_same_bytes_for_all_and_starts_zeroed(world):
    x = world.node_memory.alloc((world.size, 1000), np.float64)
    gate = NodeBarrier(world.node_memory)
    assert not x.any()
    gate.barrier()
    x[world.rank] = world.rank + 1
    gate.barrier()
    assert (x == np.arange(1, world.size + 1)[:, None]).all()
    assert world.size == 1 or "/memfd:hpcdp" in Path("/proc/self/maps").read_text()  # no name: nothing to leave behind


@pytest.mark.mpi
def test_shared_memory_keeps_no_descriptor_and_is_given_back_with_its_last_view(world):
    def mapped():
        return Path("/proc/self/maps").read_text().count("/memfd:hpcdp")

    begun = mapped()
    descriptors = len(os.listdir("/proc/self/fd"))
    views = [world.node_memory.alloc((3, 5), np.float64)[1:] for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped() == begun + (20 if world.size > 1 else 0)
    views[0][...] = world.rank
    del views[1:]
    assert mapped() == begun + (world.size > 1)
    views.clear()
    assert mapped() == begun


@pytest.mark.mpi(min_size=2)
def test_shared_memory_that_is_not_to_be_had_is_an_error_of_one_line_on_every_rank(world):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with raises(HpcdpError, operation="share memory", where=f"{world.size} ranks of a node", expected=8388608):
            world.node_memory.alloc((1 << 20,), np.float64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert world.node_memory.alloc((1 << 20,), np.float64).nbytes == 8 << 20


@pytest.mark.mpi
def test_messages_and_pieces_arrive(world, monkeypatch):
    monkeypatch.setattr("hpcdp.comm.mpi_communicator.MAX_ELEMENTS", 7)
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for dtype in (np.float16, np.float32, np.int64):
        sent, got = (np.arange(20) + world.rank).astype(dtype), np.zeros(20, dtype)
        receive = world.comm.irecv(got, left)
        send = world.comm.isend(sent, right)
        receive.wait()
        send.wait()
        np.testing.assert_array_equal(got, (np.arange(20) + left).astype(dtype))
        x = (np.arange(20) + world.rank).astype(dtype)
        world.comm.native_broadcast(x, world.size - 1)
        np.testing.assert_array_equal(x, (np.arange(20) + world.size - 1).astype(dtype))
        world.comm.native_allreduce(x, "max")
        np.testing.assert_array_equal(x, (np.arange(20) + world.size - 1).astype(dtype))


@pytest.mark.mpi
def test_a_mismatch_names_rank_and_item_on_every_rank(world):
    last = world.size - 1
    if last == 0:
        require_same(world.comm, "check", ["a"])
        return
    with raises(MismatchError, operation="check", expected=["a", "rank 0"], got=["b", f"rank {last}"]):
        require_same(world.comm, "check", ["b" if world.rank == last else "a"])


@pytest.mark.mpi
def test_init_refuses_another_node_size_later(world):
    with raises(ConfigError, operation="init", where="ranks_per_node", got=17):
        hpcdp.init(ranks_per_node=17)


def launched(n, code, **environ):
    """Run ``code`` on ``n`` ranks of its own."""
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(n), "--", sys.executable, "-c"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX", "PRTE"))}
    return subprocess.run(
        [*command, textwrap.dedent(code)], env=env | environ, capture_output=True, text=True, timeout=100
    )


@pytest.mark.mpi
@pytest.mark.parametrize(("sharing", "per_node"), [("memfd", None), ("window", None), ("none", None), ("auto", 2)])
def test_every_way_of_sharing_and_virtual_nodes(sharing, per_node, world, monkeypatch):
    monkeypatch.setenv("HPCDP_SHARED_MEMORY", sharing)
    other = _world_of(world.comm.duplicate(), per_node)
    x = other.node_memory.alloc((other.node_memory.size,), np.int64)
    gate = NodeBarrier(other.node_memory)
    x[other.node_memory.rank] = 10**other.rank
    gate.barrier()
    per_node = per_node or other.size
    node, place = divmod(other.rank, per_node)
    members = [rank for rank in range(other.size) if rank // per_node == node]
    num_rails = other.size - per_node * (other.num_nodes - 1)  # as many as the last node has, the smallest
    if sharing == "none":
        members, num_rails = [other.rank], 1
    found = (int(x.sum()), other.node, other.local_rank, other.num_rails, other.num_nodes)
    assert found == (sum(10**rank for rank in members), node, place, num_rails, -(-other.size // per_node))
    gate.barrier()  # else one would give up memory that another looks at
    other.kept[Watchdog].end()


OF_TORCH = """
    earlier = sys.excepthook
    def hook(*args):  # as torch.distributed's
        was, sys.stderr = sys.stderr, io.StringIO()
        earlier(*args)
        was.write(sys.stderr.getvalue())
"""
CALLS_NO_OTHER = """
    def hook(*args): print("logged", args[0].__name__, flush=True)  # as those of loggers, and rich's
"""


@pytest.mark.parametrize(
    ("hook", "logged"),
    [(OF_TORCH, "before"), pytest.param(CALLS_NO_OTHER, "logged", marks=pytest.mark.thorough)],
    ids=["of torch", "of a logger"],
)
def test_a_rank_that_fails_alone_ends_the_job_with_its_traceback(hook, logged):
    """Other hooks are called, too, and none of them keeps the traceback or the end of the job back."""
    code = f"""
    import io, sys, hpcdp
    sys.excepthook = lambda *args: print("before", args[0].__name__, flush=True)
    world = hpcdp.init()
    {hook}
    sys.excepthook = hook
    if world.rank == 1:
        raise ValueError("only here")
    world.barrier()
    """
    result = launched(2, code)
    assert result.returncode != 0
    assert result.stderr.count("rank 1 of 2 failed:\nTraceback") == result.stderr.count("\nValueError: only here") == 1
    assert "watchdog" not in result.stderr
    assert result.stdout == f"{logged} ValueError\n"


MEETS = """
    import sys, time, hpcdp
    from hpcdp.comm.watchdog import Watchdog
    def meet():  # as world.barrier, but what waits leaves others the core
        with Watchdog.of(world).watching("a barrier"): world.comm.allgather_json(0)
"""
LEAVES = """
    world = hpcdp.init()
    try: sys.exit(9)
    except SystemExit as error: assert error.code == 9 and type(error).__name__ == "SystemExit"
    if world.rank == world.size - 1: {}
    meet()
"""


@pytest.mark.parametrize(
    ("n", "leaves", "status", "says"),
    [
        pytest.param(  # as in the next test
            3,
            "sys.exit(3)",
            3,
            r"^rank 2 of 3 has left with status 3 before the others; the job ends now$",
            marks=pytest.mark.thorough,
        ),
        (2, "sys.exit()", 1, "^hpcdp launch: the watchdog has ended the job: rank 1 .* has left the program"),
    ],
)
def test_a_rank_that_leaves_alone_ends_the_job(n, leaves, status, says):
    result = launched(n, MEETS + LEAVES.format(leaves))
    assert result.returncode == status, result.stderr
    assert re.search(says, result.stderr, re.MULTILINE), result.stderr


def test_the_status_of_a_program_that_ends_by_its_main_is_noted():
    """``sys.exit`` is looked up before ``main`` has called `hpcdp.init`."""
    main = "def main(): world = hpcdp.init(); world.rank and world.comm.allgather_json(0); return 3"
    result = launched(2, f"import sys, hpcdp\n{main}\nsys.exit(main())")
    assert result.returncode == 3, result.stderr
    assert re.search("^rank 0 of 2 has left with status 3 before the others; the job ends", result.stderr, re.MULTILINE)


def test_the_status_of_a_rank_that_others_have_waited_for_is_that_of_the_job():
    """The watchdog, too, ends a job that waits for a rank that has left, later and with another status."""
    code = "    world = hpcdp.init(); world.rank or (time.sleep(1.2), sys.exit(3)); meet()"
    result = launched(2, MEETS + code)
    assert result.returncode == 3, result.stderr
    assert "watchdog" not in result.stderr


@pytest.mark.parametrize(("status", "for_s"), [pytest.param(0, 0.3, marks=pytest.mark.thorough), (75, 2.4)])
def test_a_rank_that_leaves_early_waits_also_where_the_library_does_not(status, for_s):
    result = launched(
        3,
        f"""
        import os, sys, time, hpcdp
        from pathlib import Path
        world = hpcdp.init()
        pids = world.comm.allgather_json(os.getpid())
        time.sleep({for_s} * (world.rank == 1))  # another one may write for long at its end
        if world.rank == 1: print([Path("/proc", str(pid)).exists() for pid in pids])
        sys.exit({status})
        """,
        OMPI_MCA_async_mpi_finalize="1",  # as it is under srun
    )
    assert (result.returncode, result.stdout, result.stderr) == (status, "[True, True, True]\n", "")


THREAD_LEAVES = "from threading import Thread; t = Thread(target=lambda: sys.exit(3)); t.start(); t.join()"


@pytest.mark.parametrize(
    ("leaves", "status"),
    [
        # As in the last test.
        *(pytest.param(f"sys.exit({each})", each, marks=pytest.mark.thorough) for each in (0, 75)),
        (f"{THREAD_LEAVES}; raise SystemExit(4)", 4),
    ],
)
def test_ranks_that_all_leave_end_as_they_would(leaves, status):
    """Threads that leave end themselves alone. And virtual nodes are what the environment says."""
    code = f"""
        import atexit, sys, time, hpcdp
        places = []
        atexit.register(lambda: print(places))
        world = hpcdp.init()
        places += world.comm.allgather_json([world.node, world.local_rank])
        time.sleep(world.rank / 5)
        {leaves}
        """
    result = launched(3, code, HPCDP_RANKS_PER_NODE="2")
    assert (result.returncode, result.stdout) == (status, "[[0, 0], [0, 1], [1, 0]]\n" * 3), result.stderr
    assert "has left" not in result.stderr and "Traceback" not in result.stderr


def test_wrong_settings_are_refused_by_name(monkeypatch):
    from hpcdp.comm import startup

    with raises(ConfigError, operation="init", where="ranks per node", got="'0'"):
        startup._virtual_node_size(0)
    monkeypatch.setenv("HPCDP_RANKS_PER_NODE", "two")
    with raises(ConfigError, operation="init", where="ranks per node", got="two"):
        startup._virtual_node_size(None)


def test_a_lonely_world_is_refused_for_real():
    code = "import hpcdp; hpcdp.init()"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX", "PRTE"))}
    env["PMI_SIZE"] = env["SLURM_STEP_NUM_TASKS"] = "2"
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert LaunchError.__name__ in result.stderr
    assert "2 separate worlds of one" in result.stderr


@pytest.mark.mpi
def test_a_complete_receive_stays_complete():
    world = hpcdp.init()
    x, y = np.full(3, world.rank), np.empty(3, int)
    sent = world.comm.isend(x, (world.rank + 1) % world.size)
    received = world.comm.irecv(y, (world.rank - 1) % world.size)
    while not received.test():
        pass
    assert received.test()
    received.wait()
    sent.wait()
    assert y.tolist() == [(world.rank - 1) % world.size] * 3


@pytest.mark.mpi
def test_who_asks_now_and_then_soon_learns_that_another_rank_does_something_else():
    world = hpcdp.init()
    comm, left, right = world.comm.duplicate(), (world.rank - 1) % world.size, (world.rank + 1) % world.size
    x, y = np.full(3, world.rank), np.empty(3, int)
    sent = [comm.isend(x, right, make_tag(1, 0))]
    received = comm.irecv(y, left, make_tag(2, 0))
    begin = time.monotonic()
    with raises(MismatchError, where=f"from rank {left} of this communicator"):
        while not received.test():
            assert time.monotonic() - begin < 5
            time.sleep(1e-3)  # as often as a lane at rest
    comm.irecv(np.empty(3, int), left, make_tag(1, 0)).wait()  # or it would be seen again, where the next one is late
    comm.barrier()
    sent.append(comm.isend(x, right, make_tag(2, 0)))
    received.wait()
    assert (y == left).all()
    for each in sent:
        each.wait()


FILES = """
from pathlib import Path
mapped = {line.split()[5] for line in open("/proc/self/maps") if "/sm_segment" in line}
print(sorted(path for path in mapped if Path(path).exists()))
"""


@pytest.mark.parametrize(("first", "of_srun"), [("", False), ("from mpi4py import MPI; ", False), ("refused", True)])
def test_a_world_of_one_has_no_memory_that_a_kill_would_leave(first, of_srun):
    """Nor would its good end: srun removes nothing, and only mpirun does."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    tasks = 4 if first == "refused" else 1
    bare |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_PROCID": "0"} if of_srun else {}
    init = "hpcdp.init()" if tasks == 1 else "try: hpcdp.init()\nexcept hpcdp.errors.LaunchError: pass"
    code = f"{first if tasks == 1 else ''}import hpcdp\n{init}\n{FILES}"
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_files_are_removed_once_all_ranks_of_a_machine_have_mapped_them(tmp_path, monkeypatch):
    srun = {"SLURM_STEP_ID": "0"}

    def rank(world):
        files = [tmp_path / f"sm_segment.host.0.1a.{number}" for number in range(3)]
        in_mpirun = srun | {"OMPI_COMM_WORLD_SIZE": "3"}
        for seen, environ, left in ((3, in_mpirun, 3), (2 + world.rank % 2, srun, 3), (3, srun, 0)):
            if world.rank == 0:
                for path in files:
                    path.touch()
            mapped.value = set(files[:seen])
            world.barrier()
            shared_memory.remove(world.comm, environ)
            world.barrier()
            assert len(list(tmp_path.iterdir())) == left, (seen, environ)
            world.barrier()

    mapped = threading.local()
    monkeypatch.setattr(shared_memory, "_mapped", lambda: mapped.value)
    thread_comm.run(3, rank)


@pytest.mark.mpi
@pytest.mark.parametrize("longest", [0, 9, 600_000])  # beside each other, along a tree, and more than goes along one
def test_what_ranks_gather_may_differ_in_length(longest, world):
    own = str(world.rank) * (longest * (world.rank + 1) // world.size)
    expected = [str(rank) * (longest * (rank + 1) // world.size) for rank in range(world.size)]
    assert world.comm.allgather_json(own) == expected
    assert world.comm.broadcast_json(own) == expected[0]
    assert world.comm.largest(world.rank, -world.rank) == [world.size - 1, 0]
    odd = [rank for rank in range(world.size) if rank % 2]
    assert world.comm.count_before(world.rank % 2 == 1) == (sum(rank < world.rank for rank in odd), len(odd))


@pytest.mark.mpi
def test_windows_are_given_back_when_no_rank_views_them(world):
    node = world.comm.split_by_machine()
    kept = node.window(1000)
    kept[node.rank] = 7
    for _ in range(3):
        node.window(1 << 20)[node.rank] = 1
    node.release()
    assert len(node._lease.made) == 1
    node.barrier()
    assert kept[: node.size].tolist() == [7] * node.size
