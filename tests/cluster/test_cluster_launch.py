"""`hpcdp launch` over hosts: who is where, what travels, who is named when something fails; nothing is left."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench_harness.cluster import SCRIPT, Cluster
from hpcdp.launch import mpi_library

pytestmark = pytest.mark.cluster

# All hosts share this machine's cores: ranks that spin would keep them from the others.
SHARED = ("--env", "OMPI_MCA_mpi_yield_when_idle=1", "--env", "OMPI_MCA_pml=ob1", "--env", "OMPI_MCA_btl=self,sm,tcp")
needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
SLEEPER = """
import os, signal, sys, time
from pathlib import Path
import hpcdp
world = hpcdp.init()
folder = Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: (folder / f"usr1-{world.rank}").touch())
world.barrier()
(folder / f"ready-{world.rank}").write_text(str(os.getpid()))
exec(sys.argv[2])
deadline = time.monotonic() + 100
while time.monotonic() < deadline:
    time.sleep(0.1)
    if len(sys.argv) > 3:
        world.barrier()
"""

STOPPING_SHELL = """
import os, signal, subprocess, sys, time
from pathlib import Path
job = subprocess.Popen(sys.argv[2:], process_group=0)
while not Path(sys.argv[1]).exists():
    assert job.poll() is None
    time.sleep(0.1)
os.kill(job.pid, signal.SIGTSTP)
assert os.WIFSTOPPED(os.waitpid(job.pid, os.WUNTRACED)[1])
time.sleep(35.0)
os.killpg(job.pid, signal.SIGCONT)
sys.exit(job.wait())
"""
TIMER = """
import sys, time
from pathlib import Path
import hpcdp
world, longest_s = hpcdp.init(), 0.0
for step in range(50):
    began = time.monotonic()
    time.sleep(0.1)
    world.barrier()
    longest_s = max(longest_s, time.monotonic() - began)
    if step == 5 and world.rank == 0:
        Path(sys.argv[1]).touch()
print(f"{longest_s:.0f}", flush=True)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcdp.cli", "launch", *arguments]


def launch(cluster: Cluster, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """`hpcdp launch` on host 1."""
    return cluster.on(1, command(*SHARED, *arguments), timeout_s)


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, "waited in vain"
        time.sleep(0.1)
    return time.monotonic() - started


class Job:
    """Sleeping ranks under a launcher on host 1, two on each of the hosts named."""

    def __init__(self, cluster: Cluster, hosts: str, ranks: int, does: str = "pass", *further: str) -> None:
        self.cluster, self.folder = cluster, cluster.folder / f"job-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.ranks = ranks
        line = command(*SHARED, "-n", str(ranks), "-H", hosts, "--", sys.executable, "-c", SLEEPER)
        started = ["sh", "-c", 'echo $$ >"$0/launcher"; exec "$@"', str(self.folder), *line]
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "sh", "1", *started, str(self.folder), does, *further],
            env=cluster._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "stderr").open("w"),
        )
        wait_for(lambda: all((self.folder / f"ready-{rank}").exists() for rank in range(ranks)) or self.process.poll())

    def pid(self, name: str) -> str:
        path = self.folder / name
        wait_for(path.read_text)
        return path.read_text().strip()

    def kill(self, host: int, pid: str, sign: str) -> None:
        self.cluster.on(host, ["kill", f"-{sign}", pid])

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def left(self, host: int) -> str:
        return self.cluster.on(host, ["pgrep", "-fa", str(self.folder)]).stdout

    def end(self, limit_s: float = 20.0, hosts: tuple[int, ...] = (1, 2)) -> int:
        """The status, once nothing is left on the hosts but files of this test."""
        status = self.process.wait(limit_s)
        wait_for(lambda: not any(self.left(host) for host in hosts), 12)
        for host in hosts:
            wait_for(lambda host=host: not self.cluster.on(host, ["ls", "/dev/shm"]).stdout, 6)
        return status


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()


def test_ranks_know_their_places_and_their_variables(two_hosts: Cluster) -> None:
    program = (
        "import hpcdp, os, socket; w = hpcdp.init(); x = [socket.gethostname(), w.local_rank, w.num_nodes, "
        "os.environ['MODE'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['OMP_NUM_THREADS'], os.getcwd()]; "
        "a = w.comm.allgather_json(x); w.rank or print(__import__('json').dumps(a))"
    )
    done = launch(
        two_hosts, "-n", "3", "-H", "node1:2,node2:1", "--env", "MODE=it's\ttwo words", "--interface", "eth0", "-v",
        "--", sys.executable, "-c", program,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    rest = ["it's\ttwo words", "eth0"]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each[:3] for each in found] == [["node1", 0, 2], ["node1", 1, 2], ["node2", 0, 2]]
    assert all(each[3:5] == rest and each[6] == os.getcwd() for each in found)
    assert found[0][5] == found[1][5] == str(max(1, cores // 2))
    assert "node2 is reached" in done.stderr and "rank 2 is pid" in done.stderr and "on node2" in done.stderr


def test_servers_on_hosts(two_hosts: Cluster) -> None:
    program = "import hpcdp; w = hpcdp.init(); print(w.size, w.whole.size, w.whole.num_nodes)"
    done = launch(two_hosts, "-n", "2", "-s", "2", "-H", "node1,node2", "-v", "--", sys.executable, "-c", program)
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["2", "2", "2", "2", "4", "4"], done.stderr
    for name, host in {"rank 0": 1, "rank 1": 2, "server 0 (rank 2)": 1, "server 1 (rank 3)": 2}.items():
        assert re.search(rf"^hpcdp launch: {re.escape(name)} is pid \d+ on node{host},", done.stderr, re.MULTILINE), (
            done.stderr
        )


@pytest.mark.parametrize(
    ("does", "status"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("os._exit(0)", 1), ("raise ValueError('why')", 1)],
)
def test_a_rank_that_fails_elsewhere_is_named(two_hosts: Cluster, jobs: list[Job], does: str, status: int) -> None:
    jobs.append(Job(two_hosts, "node1:2,node2:2", 4, f"if world.rank == 3: time.sleep(0.5); {does}"))
    assert jobs[0].end() == status, jobs[0].said()
    ours = [line for line in jobs[0].said().splitlines() if line.startswith("hpcdp launch: ")]
    assert len(ours) == 1 and re.match(r"hpcdp launch: rank 3 \(pid \d+ on node2\) ", ours[0]), jobs[0].said()
    assert ("ValueError: why" in jobs[0].said()) == ("raise" in does)
    assert "-----" not in jobs[0].said() and "[proxy" not in jobs[0].said()


def test_ranks_that_are_killed_before_mpi_is_up_are_named_in_a_line(two_hosts: Cluster) -> None:
    if mpi_library.find_library().family != "openmpi":
        pytest.skip("MPICH's mpirun lists no ranks, and says itself which processes have ended")
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpcdp launch: ")]
    assert len(ours) == 1 and re.match(
        r"hpcdp launch: rank [01] \(pid \d+ on node[12]\) .*(SIGKILL|killed)", ours[0]
    ), ours


def test_arguments_that_mpirun_refuses_are_one_line(two_hosts: Cluster) -> None:
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--mpi-args=--bogus", "--", "hostname")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
    assert done.stderr.startswith("hpcdp: launch --mpi-args: expected arguments of ") and "bogus" in done.stderr


@pytest.mark.parametrize(("sign", "status"), [("INT", 130), ("TERM", 143), ("HUP", 129), ("KILL", 137)])
def test_a_signal_to_the_launcher_leaves_nothing(two_hosts: Cluster, jobs: list[Job], sign: str, status: int) -> None:
    jobs.append(Job(two_hosts, "node1:2,node2:2", 4))
    jobs[0].kill(1, jobs[0].pid("launcher"), sign)
    if sign == "KILL":
        jobs[0].process.wait(20)
        wait_for(lambda: not jobs[0].left(1) and not jobs[0].left(2), 12)
        wait_for(lambda: not two_hosts.on(2, ["ls", "/dev/shm"]).stdout, 6)
        # The young ones may be a job's that starts.
        two_hosts.on(1, ["sh", "-c", "touch -c -d '2 minutes ago' /dev/shm/mpich_shm_*"])
        assert launch(two_hosts, "-n", "2", "-H", "node1,node2", "--", "true").returncode == 0
        assert not two_hosts.on(1, ["sh", "-c", "ls -d /dev/shm/* /tmp/hpcdp-[hg]* 2>/dev/null"]).stdout
    else:
        assert jobs[0].end() == status, jobs[0].said()


def test_a_job_that_is_stopped_for_long_goes_on(two_hosts: Cluster) -> None:
    begun = two_hosts.folder / "begun"
    shell = [sys.executable, "-c", STOPPING_SHELL, str(begun)]
    job = command(*SHARED, "-n", "4", "-H", "node1:2,node2:2", "--", sys.executable, "-c", TIMER, str(begun))
    done = two_hosts.on(1, [*shell, *job], 90)
    assert (done.returncode, done.stderr) == (0, "")
    longest_s = [int(each) for each in done.stdout.split()]
    assert len(longest_s) == 4 and min(longest_s) >= 34


def test_an_mpirun_that_is_killed_leaves_nothing(two_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(two_hosts, "node1:2,node2:2", 4))
    names = two_hosts.on(1, ["pgrep", "-P", jobs[0].pid("launcher"), "-a"]).stdout
    (mpirun,) = [line.split()[0] for line in names.splitlines() if "ssh -T" not in line]
    jobs[0].kill(1, mpirun, "KILL")
    assert jobs[0].end() == 137, jobs[0].said()


def test_a_daemon_that_is_killed_is_named_and_the_status_is_not_0(two_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(two_hosts, "node1:2,node2:2", 4))
    daemons = two_hosts.on(2, ["pgrep", "-x", "prted|hydra_pmi_proxy"]).stdout.split()
    jobs[0].kill(2, daemons[0], "KILL")
    assert jobs[0].end() not in (0, 124)
    assert "hpcdp launch: " in jobs[0].said() and "on node2 was killed by SIGKILL" in jobs[0].said(), jobs[0].said()


def test_usr1_reaches_all_hosts(two_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(two_hosts, "node1:2,node2:2", 4))
    jobs[0].kill(1, jobs[0].pid("launcher"), "USR1")
    wait_for(lambda: all((jobs[0].folder / f"usr1-{rank}").exists() for rank in range(4)), 10)
    jobs[0].kill(1, jobs[0].pid("launcher"), "TERM")
    assert jobs[0].end() == 143


def test_a_host_that_falls_silent_ends_the_job_on_both_sides(three_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(three_hosts, "node1,node2,node3", 3, "pass", "together"))
    three_hosts.cut(3)
    try:
        assert jobs[0].process.wait(60) not in (0, 124)
        assert "node3 has not answered for 3" in jobs[0].said(), jobs[0].said()
        wait_for(lambda: not any(jobs[0].left(host) for host in (1, 2, 3)), 12)
    finally:
        three_hosts.join(3)


def test_the_loss_of_the_launching_host_ends_the_others(three_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(three_hosts, "node2,node3", 2, "print('x' * 1000, flush=True)"))
    three_hosts.cut(1)
    try:
        wait_for(lambda: not any(jobs[0].left(host) for host in (2, 3)), 50)
    finally:
        three_hosts.join(1)
    assert jobs[0].process.wait(60) not in (0, 124)


def test_a_link_that_is_cut_for_five_seconds_ends_nothing(two_hosts: Cluster, jobs: list[Job]) -> None:
    jobs.append(Job(two_hosts, "node1,node2", 2, "pass", "together"))
    two_hosts.cut(2)
    time.sleep(5)
    two_hosts.join(2)
    time.sleep(15)
    assert jobs[0].process.poll() is None, jobs[0].said()
    jobs[0].kill(1, jobs[0].pid("launcher"), "TERM")
    assert jobs[0].end() == 143


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-H", "node1,node2,nowhere"], "nowhere: Could not resolve hostname nowhere"),
        (["-H", "node1,10.77.0.99"], "10.77.0.99: connect to host 10.77.0.99 port 22"),
        (["-H", "node1,node2:1"], "expected slots for 3 ranks, got 2 on node1:1, node2:1"),
        (["-H", "node1,node2", "--interface", "ib0"], "expected one of eth0, got 'ib0'"),
        (["-H", "node1,node2", "--interface", "lo"], "expected one of eth0, got 'lo', which reaches no other host"),
    ],
)
def test_what_is_wrong_with_hosts_is_one_line(two_hosts: Cluster, arguments: list[str], says: str) -> None:
    started = time.monotonic()
    done = launch(two_hosts, "-n", "3", *arguments, "--", sys.executable, "-c", "print('started')")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr and time.monotonic() - started < 15


def test_a_folder_that_the_user_names_for_segments_stays(two_hosts: Cluster) -> None:
    for host in (1, 2):
        two_hosts.on(host, ["sh", "-c", "mkdir /dev/shm/mine; echo kept >/dev/shm/mine/file"])
    mine = ["--env", "OMPI_MCA_btl_sm_backing_directory=/dev/shm/mine"]
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", *mine, "--", sys.executable, "-c", "import hpcdp")
    assert done.returncode == 0, done.stderr
    for host in (1, 2):
        assert two_hosts.on(host, ["cat", "/dev/shm/mine/file"]).stdout == "kept\n"
        two_hosts.on(host, ["rm", "-r", "/dev/shm/mine"])


def test_more_ranks_than_cores_are_not_bound(two_hosts: Cluster) -> None:
    cores = len(os.sched_getaffinity(0))
    if mpi_library.find_library().family == "openmpi":
        hosts = f"node1:{cores},node2:{cores + 1}"
        done = launch(two_hosts, "-n", str(2 * cores + 1), "-H", hosts, "--bind", "core", "--", "true")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"expected at most {cores} processes, the cores of node2, got {cores + 1}" in done.stderr
    code = "import os; from mpi4py import MPI; print(len(os.sched_getaffinity(0)), flush=True)"
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--bind", "core", "--", sys.executable, "-c", code)
    assert done.stdout.replace("\n", "") == "11", done.stderr  # hydra mixes lines


def test_a_program_that_only_this_host_has(two_hosts: Cluster) -> None:
    two_hosts.on(1, ["sh", "-c", "cp /bin/true /tmp/mine"])
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--", "/tmp/mine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "node2: there is no program /tmp/mine; install it at the same path on all hosts" in done.stderr


@needs_rsync
def test_the_working_folder_is_copied_and_the_ranks_start_there(two_hosts: Cluster) -> None:
    source = two_hosts.folder / "a project"
    (source / ".git").mkdir(parents=True)
    (source / ".git" / "big").touch()
    (source / "train.py").write_text("import os; print(os.getcwd(), *sorted(os.listdir()), flush=True)")
    there = "/tmp/it's copied"
    line = command(*SHARED, "-n", "2", "-H", "node1,node2", "--sync-dst-dir", there, "--", sys.executable, "train.py")
    done = two_hosts.on(1, ["sh", "-c", 'cd "$0" && exec "$@"', source, *line])
    assert (done.returncode, done.stdout) == (0, f"{there} train.py\n" * 2), done.stderr


@needs_rsync
def test_a_host_that_cannot_be_copied_to(two_hosts: Cluster) -> None:
    done = launch(
        two_hosts, "-n", "2", "-H", "node1,node2", "--sync-dst-dir", "/proc/x", "--", sys.executable, "-c", "1"
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "/proc/x" in done.stderr


def test_a_plan_can_be_pasted(two_hosts: Cluster) -> None:
    program = ["--", sys.executable, "-c", "import hpcdp; w = hpcdp.init(); print(w.size, w.num_nodes)"]
    planned = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--dry-run", *program)
    assert planned.returncode == 0, planned.stderr
    lines = planned.stdout.splitlines()
    folder = two_hosts.folder / "pasted"
    folder.mkdir()
    (folder / "hosts").write_text("\n".join(line for line in lines if line.startswith("node")) + "\n")
    (folder / "run").write_text(f"cd {folder}\n{lines[-1]}\n")
    done = two_hosts.on(1, ["sh", folder / "run"])
    assert sorted(done.stdout.splitlines()) == ["2 2", "2 2"], done.stderr + (folder / "run").read_text()


def test_output_is_tagged_by_rank(two_hosts: Cluster) -> None:
    done = launch(two_hosts, "-n", "2", "-H", "node1,node2", "--tag-output", "--", "echo", "hello")
    assert done.returncode == 0, done.stderr
    assert sorted(line[-5:] for line in done.stdout.splitlines()) == ["hello", "hello"]
    for rank in (0, 1):
        assert any(f"{rank}]" in line for line in done.stdout.splitlines()), done.stdout


def test_it_is_found_by_an_alias_of_ssh(two_hosts: Cluster) -> None:
    config = Path(two_hosts.folder, "etc", "ssh", "ssh_config")
    kept = config.read_text()
    config.write_text(f"Host quick\n  HostName node2\n{kept}")
    try:
        code = "import hpcdp, os, socket; w = hpcdp.init(); os.write(1, f'{w.rank} {socket.gethostname()}\\n'.encode())"
        done = launch(two_hosts, "-n", "2", "-H", "node1,quick", "--", sys.executable, "-c", code)
    finally:
        config.write_text(kept)
    assert sorted(done.stdout.splitlines()) == ["0 node1", "1 node2"], done.stderr
