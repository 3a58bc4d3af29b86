"""Each collective of hpcdp beside those of MPI libraries, turn by turn in one run, inside a node or over hosts.

``python benchmarks/bench_collectives.py --peer "Intel MPI=/path/to/python" --peer MPICH=/path/to/python`` starts a job
of each candidate at once: hpcdp, and mpi4py in each named environment, whose ``mpirun`` lies beside its Python. A peer
whose Python is missing or whose job does not start is skipped by name. The ranks of all jobs sleep, reading a pipe,
except those whose turn it is; each is pinned to a core. The MPI library under hpcdp is a peer with the name "own MPI".

A turn is a number of timed calls of one operation at one size, before each of which all ranks write their data, read
their last results and meet in a barrier. Its time is the median of each rank, of the slowest rank. The table has the
median over turns in microseconds, and the ratio of the best peer's time to hpcdp's as the median over turns. Results go
to preallocated arrays. Sizes are those of OSU's benchmarks: the whole array for allreduce, reduce, reduce_scatter and
broadcast, one rank's part for the others. ``copy`` is the physical limit beside them: the time in which every rank
copies as many bytes from one private array to another.

``--slots 1`` starts the jobs on the hosts of the cluster that ``cluster.sh up`` has made, with so many ranks on each.
All meet in MPI's barrier then, because ranks leave a barrier between hosts at different times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS, OWN = "hpcdp", "own MPI"
SIZES = (4, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
OPERATIONS = (
    "copy", "allreduce", "reduce", "reduce_scatter", "broadcast", "allgather", "gather", "scatter", "alltoall",
    "sendrecv", "latency", "barrier", "iallreduce",
)  # fmt: skip
_WAIT_S = 120.0
_TURN_NBYTES, _MOST_CALLS = 256 << 20, 400

Calls = dict[str, Callable[[], Any]]


def calls_of_hpcdp(count: int) -> Calls:
    """Return the calls of hpcdp by operation, for arrays of ``count`` float32; every rank must call."""
    import hpcdp

    world = hpcdp.init()
    n, me = world.size, world.rank
    x, whole, out, part = _arrays(count, n)
    shard = np.empty(count * (me + 1) // n - count * me // n, np.float32)
    peer = n - 1 - me

    def latency() -> None:
        for sending in (me == 0, me != 0):
            if sending:
                hpcdp.send(x, peer, 0, world)
            else:
                hpcdp.recv(part, peer, 0, world)

    root = me == 0
    return {
        "allreduce": lambda: hpcdp.allreduce(x, world=world),
        "reduce": lambda: hpcdp.reduce(x, world=world, out=part if root else None),
        "reduce_scatter": lambda: hpcdp.reduce_scatter(x, world=world, out=shard),
        "broadcast": lambda: hpcdp.broadcast(x, 0, world),
        "allgather": lambda: hpcdp.allgather(x, world, out=out),
        "gather": lambda: hpcdp.gather(x, 0, world, out if root else None),
        "scatter": lambda: hpcdp.scatter(whole if root else None, 0, world, None, part),
        "alltoall": lambda: hpcdp.alltoall(whole, None, world, out),
        "sendrecv": lambda: hpcdp.sendrecv(x, (me + 1) % n, (me - 1) % n, part, 0, world),
        "latency": latency,
        "barrier": world.barrier,
        "iallreduce": lambda: hpcdp.iallreduce(x, world=world).wait(),
        "copy": lambda: np.copyto(part, x),
        "refresh": lambda: _use([x, whole], [out, part]),
    }


def calls_of_mpi(count: int) -> Calls:
    """Return the calls of the MPI library by operation, through mpi4py."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    n, me = comm.size, comm.rank
    x, whole, out, part = _arrays(count, n)
    counts = [count * (rank + 1) // n - count * rank // n for rank in range(n)]
    shard = np.empty(counts[me], np.float32)
    peer = n - 1 - me

    def latency() -> None:
        if me == 0:
            comm.Send(x, peer)
            comm.Recv(part, peer)
        else:
            comm.Recv(part, peer)
            comm.Send(x, peer)

    root = me == 0
    return {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, x),
        "reduce": lambda: comm.Reduce(x, part if root else None),
        "reduce_scatter": lambda: comm.Reduce_scatter(x, shard, counts),
        "broadcast": lambda: comm.Bcast(x),
        "allgather": lambda: comm.Allgather(x, out),
        "gather": lambda: comm.Gather(x, out if root else None),
        "scatter": lambda: comm.Scatter(whole if root else None, part),
        "alltoall": lambda: comm.Alltoall(whole, out),
        "sendrecv": lambda: comm.Sendrecv(x, (me + 1) % n, 0, part, (me - 1) % n, 0),
        "latency": latency,
        "barrier": comm.Barrier,
        "iallreduce": lambda: comm.Iallreduce(MPI.IN_PLACE, x).Wait(),
        "refresh": lambda: _use([x, whole], [out, part]),
    }


def _arrays(count: int, n: int) -> tuple[np.ndarray, ...]:
    """Return arrays of one, n, n and one messages; all pages are touched."""
    return tuple(np.zeros(size, np.float32) for size in (count, n * count, n * count, count))


def _use(written: Sequence[np.ndarray], read: Sequence[np.ndarray]) -> None:
    """Write new values and read the last results, as a program does."""
    for x in written:
        x.fill(1)
    for x in read:
        x.max()


def work(kind: str, folder: str, slots: str) -> None:
    """Run the turns that the coordinator asks for, until it asks for none."""
    if kind == OURS:
        import hpcdp

        rank = hpcdp.init().rank
    else:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
    with contextlib.suppress(OSError):  # emulated hosts share the cores with other programs
        Path("/proc/self/autogroup").write_text("-20")
        os.nice(-20)
    cores = range(os.cpu_count() or 1)
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calls: tuple[int, Calls] = (0, {})
    meet = None
    if slots != "0":
        from mpi4py import MPI

        meet = MPI.COMM_WORLD.Dup().Barrier
    answers = (Path(folder) / f"answers-{rank}").open("w")
    with (Path(folder) / f"commands-{rank}").open() as commands:
        print("ready", file=answers, flush=True)
        for line in commands:
            name, nbytes, times = json.loads(line)
            count = max(1, nbytes // 4)
            if calls[0] != count:
                calls = count, (calls_of_hpcdp if kind == OURS else calls_of_mpi)(count)
            call, refresh, barrier = calls[1][name], calls[1]["refresh"], meet or calls[1]["barrier"]
            ns = []
            call()
            for _ in range(times):
                refresh()  # data and results are in the cache of this core only, as gradients and parameters are
                barrier()  # to write memory that another rank has read takes longer
                began = time.perf_counter_ns()
                call()
                ns.append(time.perf_counter_ns() - began)
            print(float(np.median(ns)) / (2e3 if name == "latency" else 1e3), file=answers, flush=True)


class Job:
    """The ranks of one candidate, which sleep between turns; on each host of a cluster ``slots``, if that is not 0.

    Raises:
        OSError: they do not start.
    """

    def __init__(self, name: str, python: str, ranks: int, folder: Path, slots: int = 0) -> None:
        self.name = name
        folder.mkdir()
        for rank in range(ranks):
            for kind in ("commands", "answers"):
                os.mkfifo(folder / f"{kind}-{rank}")
        program = [str(Path(__file__).resolve()), "--worker", name, str(folder), str(slots)]
        command = [*_launcher(name, python, ranks, slots), python, *program]
        self._process = subprocess.Popen(command, env=_environment(python))
        self._files = [_opened(folder, rank, self._process) for rank in range(ranks)]
        for _, answers in self._files:
            if not answers.readline():
                raise OSError(f"{name} has ended")

    def turn(self, operation: str, nbytes: int, times: int) -> float:
        """Return the microseconds of a call, of the slowest rank."""
        for commands, _ in self._files:
            print(json.dumps([operation, nbytes, times]), file=commands, flush=True)
        answers = [answers.readline() for _, answers in self._files]
        if not all(answers):
            raise OSError(f"{self.name} has ended in {operation} of {nbytes} bytes")
        return max(map(float, answers))

    def close(self) -> None:
        """End the job."""
        for commands, answers in self._files:
            commands.close()
            answers.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()


def _opened(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> tuple[Any, Any]:
    """Open the pipes of a rank when it has; raise OSError if its job ends first."""
    until = time.monotonic() + _WAIT_S
    answers = os.fdopen(os.open(folder / f"answers-{rank}", os.O_RDONLY | os.O_NONBLOCK))
    while time.monotonic() < until and process.poll() is None:
        try:
            descriptor = os.open(folder / f"commands-{rank}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no reader yet
            time.sleep(0.05)
            continue
        os.set_blocking(descriptor, True)
        os.set_blocking(answers.fileno(), True)
        return os.fdopen(descriptor, "w"), answers
    process.terminate()
    raise OSError("its job does not start")


def _launcher(name: str, python: str, ranks: int, slots: int) -> list[str]:
    if slots:
        return [str(Path(__file__).with_name("cluster.sh")), "mpirun", str(slots)]
    if name == OURS:
        return [python, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--"]
    return [str(Path(python).parent / "mpirun"), "-n", str(ranks)]


def _environment(python: str) -> dict[str, str]:
    """Return the variables of a job: Intel MPI's wheel needs its folder of libraries, and memory as its only fabric."""
    root = Path(python).parent.parent
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "I_MPI_ROOT": str(root)}
    libraries = f"{root / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    return {**os.environ, **threads, **own, "LD_LIBRARY_PATH": libraries, "PATH": path}


def measure(jobs: Sequence[Job], operation: str, nbytes: int, turns: int) -> dict[str, Any]:
    """Return the row of an operation at one size: medians by candidate, and the best peer's time over hpcdp's."""
    times = int(max(3, min(_MOST_CALLS, _TURN_NBYTES // max(nbytes, 1) // 8)))
    taking_part = [job for job in jobs if operation != "copy" or job.name == OURS]
    us: dict[str, list[float]] = {job.name: [] for job in taking_part}
    for turn in range(turns + 1):
        for job in taking_part:
            result = job.turn(operation, nbytes, times if turn else min(times, 20))
            if turn:  # the first one warms up
                us[job.name].append(result)
    medians = {name: float(np.median(values)) for name, values in us.items()}
    peers = [name for name in medians if name != OURS]
    best = min(peers, key=lambda name: medians[name]) if peers else None
    ratio = None if best is None else float(np.median(np.array(us[best]) / np.array(us[OURS])))
    return {"operation": operation, "nbytes": nbytes, "us": medians, "best_peer": best, "ratio": ratio}


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| operation | bytes | " + " | ".join(names) + " | best peer / hpcdp |"]
    lines.append("|---|---|" + "---|" * (len(names) + 1))
    for row in rows:
        cells = [f"{row['us'][name]:.1f}" if name in row["us"] else "" for name in names]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ({row['best_peer']})"
        lines.append(f"| {row['operation']} | {row['nbytes']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--slots", type=int, default=0, help="ranks on each host of a cluster; -n are those of all")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="an environment with mpi4py")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, e.g. 4,4096")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    peers = {OWN: sys.executable, **dict(peer.partition("=")[::2] for peer in args.peer)}
    jobs: list[Job] = []
    rows: list[dict[str, Any]] = []
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=os.environ.get("HPCDP_CLUSTER") if args.slots else None) as folder:
        try:
            for number, (name, python) in enumerate({OURS: sys.executable, **peers}.items()):
                if shutil.which(python) is None:
                    print(f"{name} is skipped: {python!r} is no Python that can be run", file=sys.stderr)
                    continue
                try:
                    jobs.append(Job(name, python, args.ranks, Path(folder) / str(number), args.slots))
                except OSError as error:
                    print(f"{name} is skipped: {error}", file=sys.stderr)
            for operation in args.operations.split(","):
                for nbytes in [4] if operation == "barrier" else map(int, args.sizes.split(",")):
                    rows.append(measure(jobs, operation, nbytes, args.turns))
                    print(table(rows[-1:], [job.name for job in jobs]).splitlines()[-1], flush=True)
                    if args.json:  # the rows until now, if a later one takes too long
                        text = json.dumps(
                            {"ranks": args.ranks, "load": load, "turns": args.turns, "rows": rows}, indent=1
                        )
                        args.json.write_text(text + "\n")
        finally:
            for job in jobs:
                job.close()
    load.append(os.getloadavg()[0])
    names = [job.name for job in jobs]
    print(f"\n{args.ranks} ranks, {os.cpu_count()} cores, load {load[0]:.1f} before and {load[1]:.1f} after\n")
    print(table(rows, names))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:5])
    else:
        sys.exit(main())
