"""Jobs of a real Grid Engine over hosts of this machine, by ``hpcdp launch --launcher sge``."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_harness.cluster import Cluster

pytestmark = pytest.mark.cluster

SETUP = Path(__file__).with_name("grid_engine.sh")
WORLD = """
import os, socket, sys
import hpcdp
world = hpcdp.init()
assert os.environ["GREETING"] == "it's me"
found = world.comm.allgather_json([world.rank, world.node, socket.gethostname()])
if world.rank == 0:
    print(world.size, world.num_nodes, found, flush=True)
    print("to stderr", file=sys.stderr, flush=True)
"""
STOPS_EARLY = """
import os, signal, sys, time
from pathlib import Path
from mpi4py import MPI
rank, place = MPI.COMM_WORLD.rank, Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
runs = len(list(place.glob(f"run-*-{rank}")))
MPI.COMM_WORLD.barrier()
(place / f"run-{runs}-{rank}").touch()
time.sleep(90 if runs == 0 else 0)
"""


@pytest.fixture(scope="module")
def grid(hosts_possible: None) -> Iterator[Cluster]:
    for tool in ("/usr/lib/gridengine/sge_qmaster", "/usr/lib/gridengine/sge_execd", "qsub"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: gridengine-master gridengine-exec gridengine-client)")
    with Cluster(2) as cluster:
        environ = {**os.environ, "HPCDP_CLUSTER": str(cluster.folder)}
        done = subprocess.run(
            ["bash", SETUP, cluster.folder, "2"], env=environ, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield cluster


@pytest.fixture
def place(grid: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder that all hosts see, with a blank in its name."""
    folder = grid.folder / f"job of {request.node.name}"
    folder.mkdir()
    (folder / "world.py").write_text(WORLD)
    (folder / "stops_early.py").write_text(STOPS_EARLY)
    return folder


def shell(cluster: Cluster, place: Path, script: str, limit_s: float = 90) -> subprocess.CompletedProcess[str]:
    """Runs a script on node1, with Grid Engine's commands at hand, and ``launch`` for that launcher."""
    launch = f'launch() {{ {shlex.quote(sys.executable)} -m hpcdp.cli launch --launcher sge "$@"; }}'
    lines = [f". {cluster.folder}/settings.sh", f"cd {shlex.quote(str(place))}", launch, script]
    return cluster.on(1, ["bash", "-c", "\n".join(lines)], limit_s)


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("hpcdp-sge-*"))


def test_ranks_of_two_hosts_form_one_world(grid: Cluster, place: Path) -> None:
    program = f"{shlex.quote(sys.executable)} world.py"
    done = shell(grid, place, f"launch -n 4 --env \"GREETING=it's me\" --batch-args '-pe spread' -- {program}")
    assert done.returncode == 0, done.stdout + done.stderr
    orders = (("node1", "node2"), ("node2", "node1"))  # the scheduler chooses the first
    worlds = [[[rank, rank // 2, hosts[rank // 2]] for rank in range(4)] for hosts in orders]
    assert done.stdout in [f"4 2 {world}\n" for world in worlds]
    assert done.stderr == "to stderr\n"
    assert left(place) == []


def test_a_script_of_ones_own_has_ranks_on_all_hosts(grid: Cluster, place: Path) -> None:
    launch = f'{shlex.quote(sys.executable)} -m hpcdp.cli launch --env "GREETING=it\'s me" -n 4'
    (place / "own.sh").write_text(f"{launch} -- {shlex.quote(sys.executable)} world.py\n")
    submits = "qsub -cwd -o said -e errors -S /bin/bash -V -pe spread 4 own.sh >/dev/null"
    done = shell(grid, place, f"{submits}; while [ -n \"$(qstat -u '*')\" ]; do sleep .5; done; cat said errors")
    assert done.stdout.startswith("4 2 [[0, 0, 'node"), done.stdout + done.stderr


def test_the_status_of_a_rank_is_that_of_the_launcher(grid: Cluster, place: Path) -> None:
    code = "import os, time; from mpi4py import MPI; os._exit(7) if MPI.COMM_WORLD.rank == 1 else time.sleep(60)"
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = shell(grid, place, f"launch -n 2 --batch-args '-pe spread' -- {program}")
    assert done.returncode == 7, done.stdout + done.stderr


def test_a_job_stops_before_its_limit_and_is_started_again(grid: Cluster, place: Path) -> None:
    program = f"{shlex.quote(sys.executable)} stops_early.py {shlex.quote(str(place))}"
    done = shell(grid, place, f"launch -n 2 --batch-args '-pe spread -l h_rt=40' -- {program}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in place.glob("run-*")) == ["run-0-0", "run-0-1", "run-1-0", "run-1-1"]


def test_a_hard_limit_is_told_of(grid: Cluster, place: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(80)"
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = shell(grid, place, f"launch -n 1 --batch-args '-l h_rt=10' -- {program}")
    assert done.returncode != 0
    assert "of Grid Engine was ended from outside" in done.stderr, done.stderr


@pytest.mark.parametrize("sign", ["TERM", "HUP"])
def test_an_ending_signal_deletes_the_job(sign: str, grid: Cluster, place: Path) -> None:
    program = f"{shlex.quote(sys.executable)} stops_early.py {shlex.quote(str(place))}"
    waits = "for _ in $(seq 400); do [ -e run-0-0 ] && [ -e run-0-1 ] && break; sleep .1; done"
    begins = f"launch -n 2 --batch-args '-pe spread' -- {program} & job=$!"
    # The function runs in a shell of its own, whose child the launcher is.
    ends = f"pkill -{sign} -P $job; wait $job; echo status $?; qstat -u '*'; pgrep -fc stops_early.py"
    done = shell(grid, place, f"{begins}; {waits}; {ends}")
    number = {"TERM": 143, "HUP": 129}[sign]
    assert done.stdout.splitlines() == [f"status {number}", "0"], done.stdout + done.stderr
    assert grid.on(2, ["pgrep", "-fc", "stops_early.py"]).stdout == "0\n"
    assert left(place) == []


def test_what_qsub_refuses_is_said(grid: Cluster, place: Path) -> None:
    done = shell(grid, place, "launch -n 2 --batch-args '-pe nosuch' -- python")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and 'parallel environment "nosuch" does not exist' in done.stderr, done.stderr
