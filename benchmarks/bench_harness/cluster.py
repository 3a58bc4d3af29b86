"""Emulated hosts on this machine with links of a chosen rate (``cluster.sh``), and jobs of a program on them.

For tests and benchmarks across machines where there is only one. It needs root and Linux namespaces; `obstacle` says
what is missing. MPI takes the hosts for separate machines, but they share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import write_json
from hpcdp import errors
from hpcdp.bench.measure import as_json, check_writable, describe, write
from hpcdp.bench.tune import link_rates
from hpcdp.comm import World, init
from hpcdp.errors import ConfigError, HpcdpError
from hpcdp.kernels import cache_dir
from hpcdp.launch.parser import at_least

SCRIPT = programs.PROGRAMS / "cluster.sh"

# The folder that holds the package.
_LIBRARY = Path(errors.__file__).resolve().parent.parent

# Each host has these for itself.
_PRIVATE = tuple(map(Path, ("/tmp", "/run", "/dev/shm")))


class ClusterError(HpcdpError):
    """A cluster could not be made, or a command on it failed."""


def obstacle() -> str | None:
    """Why no cluster can be made here (not root, a missing tool, no namespaces), in one line; None where it can."""
    if sys.platform != "linux" or shutil.which("bash") is None:
        return "needs Linux and bash"
    done = subprocess.run(["bash", SCRIPT, "check"], capture_output=True, text=True)
    return _reason(done) if done.returncode else None


class Cluster:
    """``hosts`` hosts, numbered from 1, as a context manager: they are up inside it and are gone after it.

    They end also when this process is killed. ``folder`` is a new one that every host sees under the same path, as it
    does everything outside /tmp, /run and /dev/shm, and of those the Python environment, the source tree, the compiled
    kernels and the folders in ``share``.

    Args:
        hosts: how many, 1 to 99.
        rate: of every host's link in each direction, as tc(8) writes it, e.g. ``"1gbit"``.
        share: further folders that all hosts see.
        networks: how many, 1 to 9. Host i is 10.77.k.i on network k, its interface ``eth`` k; its name is that on eth0.
        tcp_retries: unanswered repetitions after which a host closes a connection: 15 as Linux does, a quarter of
            an hour; 4 are some 6 s.

    Raises:
        ClusterError: on entry, where no cluster can be made.
    """

    def __init__(
        self,
        hosts: int,
        rate: str = "1gbit",
        share: Sequence[str | Path] = (),
        networks: int = 1,
        tcp_retries: int = 15,
    ) -> None:
        self.hosts = hosts
        self.folder = Path()
        self._rate, self._networks, self._tcp_retries = rate, networks, tcp_retries
        wanted = [sys.prefix, sys.base_prefix, _LIBRARY, programs.PROGRAMS, cache_dir(), *share]
        self._shared = sorted({path for path in (Path(folder).resolve() for folder in wanted) if _is_private(path)})

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="hpcdp-cluster-"))
        shares = [argument for path in self._shared for argument in ("--share", str(path))]
        command = ["up", str(self.hosts), "--rate", self._rate, "--networks", str(self._networks), *shares]
        command += ["--until", str(os.getpid()), "--temporary"]
        try:
            self._control(*command)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def mpirun(
        self, ranks_per_node: int | Sequence[int], argv: Sequence[str | Path], timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` as ranks of all hosts, by the mpirun in the folder of the program ``argv[0]``.

        Args:
            ranks_per_node: of every host that is up, or one number for each; 0 leaves a host out.
            argv: the program and its arguments. It gets this process's environment; with Open MPI only what begins
                with ``HPCDP_``, ``PYTHON`` or ``OMPI_MCA_``.
            timeout_s: time limit of the job in seconds.

        Returns:
            The job's exit status and what it wrote; 124 when it was ended.
        """
        slots = str(ranks_per_node) if isinstance(ranks_per_node, int) else ",".join(map(str, ranks_per_node))
        return self._run(["mpirun", slots, *map(str, argv)], timeout_s)

    def on(self, host: int, argv: Sequence[str | Path], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on one host; 124 as its exit status when it was ended after ``timeout_s`` seconds."""
        return self._run(["sh", str(host), *map(str, argv)], timeout_s)

    def slurm(self) -> None:
        """Start Slurm on all hosts, with its commands in the PATH of each.

        Raises:
            ClusterError: it is not installed, or does not start.
        """
        self._control("slurm")

    def cut(self, host: int) -> None:
        """Pull the cables of ``host``."""
        self._control("cut", str(host))

    def join(self, host: int) -> None:
        """Plug the cables of ``host`` in again."""
        self._control("join", str(host))

    def rate(self, host: int, rate: str) -> None:
        """Give the links of ``host`` another rate."""
        self._control("rate", str(host), rate)

    def kill(self, host: int) -> None:
        """End ``host`` and all that runs on it, as at a reboot: the others see its connections closed."""
        self._control("kill", str(host))

    def crash(self, host: int) -> None:
        """Stop ``host`` without notice to the others, as in a power loss."""
        self._control("crash", str(host))

    def boot(self, host: int) -> None:
        """Start ``host`` again, which `kill` or `crash` has ended. `slurmd` joins it to Slurm."""
        self._control("boot", str(host))

    def slurmd(self, host: int) -> None:
        """Start Slurm's daemons on ``host``, which has come back."""
        self._control("slurmd", str(host))

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(_LIBRARY), os.environ.get("PYTHONPATH", "")]))
        return {
            **os.environ,
            "HPCDP_CLUSTER": str(self.folder),
            "TCP_RETRIES2": str(self._tcp_retries),
            "HPCDP_CACHE_DIR": str(cache_dir()),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
        }

    def _run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out = err = ended = ""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            ended = f"ended after {timeout_s:g} s\n"
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
        if ended:
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired as late:  # what has outlived the command has its pipes
                out, err = ((text or b"").decode(errors="replace") for text in (late.output, late.stderr))
        return subprocess.CompletedProcess(command, 124 if ended else process.returncode, out, err + ended)

    def _control(self, *command: str) -> None:
        done = self._run(list(command), 60)
        if done.returncode:
            raise ClusterError(f"cluster {command[0]}", got=_reason(done))

    def _end(self) -> None:
        self._control("down")  # where Ctrl-C ends this, the script's watcher takes the hosts down with this process
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_private(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _PRIVATE)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("cluster.sh: ") if lines else f"status {done.returncode}"


_MOST_HOSTS = 99


def add_options(parser: argparse.ArgumentParser, hosts: str) -> None:
    """``--hosts``, ``--ranks-per-node``, ``--rate`` and ``--json``."""
    parser.add_argument("--hosts", default=hosts, metavar="N,N", help="jobs on each number of hosts; 1: this machine")
    parser.add_argument("--ranks-per-node", type=at_least(1), default=2, metavar="N", help="of every host (2)")
    parser.add_argument("--rate", default="1gbit", help="of every host's link, as tc(8) writes it")
    parser.add_argument("--json", metavar="FILE")


def measure_places(
    name: str, arguments: list[str], args: argparse.Namespace, timeout_s: float, show: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]] | None:
    """Run ``bench_<name>.py`` with ``arguments`` on the hosts and links in ``args``.

    Print each report by ``show``, and write all of them to ``args.json``.

    Returns:
        The reports, with ``hosts``, ``ranks_per_node`` and ``rate``; None, after a message, where no hosts can be made.

    Raises:
        ConfigError: a number of hosts that is none.
        ClusterError: the hosts cannot be made, or a job failed.
    """
    hosts = [int(number) if number.isdecimal() else 0 for number in args.hosts.split(",")]
    if min(hosts) < 1 or max(hosts) > _MOST_HOSTS:
        expected = f"numbers from 1 to {_MOST_HOSTS}, e.g. 1,2,4"
        raise ConfigError(name, where="--hosts", expected=expected, got=repr(args.hosts))
    check_writable(name, [args.json])
    reason = obstacle() if max(hosts) > 1 else None
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return None
    places = []
    for number in hosts:
        place = _run_on(number, name, arguments, args, timeout_s)
        rate = args.rate if number > 1 else None
        places.append({"hosts": number, "ranks_per_node": args.ranks_per_node, "rate": rate, **place})
        print(show(places[-1]), flush=True)
    if args.json:
        write(args.json, as_json({"benchmark": name, "machine": describe(), "places": places}))
    return places


def measure_models(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[World, str], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Run ``measure(world, model)`` for each of ``args.models`` on one BLAS thread; every rank must call.

    Rank 0 prints the report with ``show``, and writes it to ``args.json``.

    Returns:
        The report: the results as ``rows``, and on several nodes the rates of a link.
    """
    world = init()
    check_writable(name, [args.json], world)
    place: dict[str, Any] = {"library": world.library, "machine": describe(world)}
    with threadpool_limits(1):
        if world.num_nodes > 1:
            place["link_mb_s"] = link_rates(world)
        place["rows"] = [measure(world, model) for model in args.models.split(",")]
    if world.rank == 0:
        print(show(place), flush=True)
    write_json(args.json, world, {"benchmark": name, **place})
    return place


def where(place: dict[str, Any]) -> str:
    """Describe a place."""
    if place.get("hosts", 1) > 1:
        return f"{place['hosts']} hosts x {place['ranks_per_node']} ranks, links of {place['rate']}"
    machine = place["machine"]
    return f"{machine['ranks']} ranks on {machine['nodes']} node" + ("s" if machine["nodes"] > 1 else "")


def _run_on(hosts: int, name: str, arguments: list[str], args: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, str(programs.path_of(name)), *arguments]
    if hosts > 1:
        with Cluster(hosts, args.rate) as cluster:
            report = cluster.folder / "report.json"
            return _read(name, report, cluster.mpirun(args.ranks_per_node, [*command, "--json", report], timeout_s))
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        report = Path(folder, "report.json")
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(args.ranks_per_node), "--"]
        return _read(name, report, programs.run_job([*launch, *command, "--json", str(report)], timeout_s))


def _read(name: str, report: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if not report.exists():
        raise ClusterError(name, where="job", got=f"status {done.returncode}: {programs.reason(done)}")
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures
