"""The hosts themselves: names, links, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_harness.cluster import SCRIPT, Cluster, ClusterError, obstacle

pytestmark = pytest.mark.cluster

KEEPS_HOSTS = """
import shutil, sys, time
from bench_harness.cluster import Cluster
with Cluster(2, networks=2) as cluster:
    (cluster.folder / "a-file").write_text("of a test")
    if shutil.which("slurmctld"):
        cluster.slurm()
    print(cluster.folder, flush=True)
    cluster.mpirun(1, [sys.executable, "-c", "import time; time.sleep(60)"])
"""

FAILS = """
import pytest
def test_that_fails(two_hosts):
    (two_hosts.folder / "a-file").write_text("of a test")
    print("FOLDER", two_hosts.folder)
    assert two_hosts.on(2, ["hostname"]).stdout == "node3"
"""


def processes_of(folder: Path) -> list[str]:
    """The command lines of the processes that were started for the cluster of this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"HPCDP_CLUSTER={folder}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def links_and_mounts() -> list[str]:
    """Of this machine itself, which a cluster must not change."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return sorted(os.listdir("/sys/class/net")) + [line for line in mounts if "hpcdp" in line]


def gone(folder: Path, limit_s: float = 10) -> bool:
    deadline = time.monotonic() + limit_s
    while (folder.exists() or processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists() and not processes_of(folder)


def test_a_host_has_a_name_and_folders_of_its_own(two_hosts: Cluster) -> None:
    assert two_hosts.on(2, ["hostname"]).stdout == "node2\n"
    assert two_hosts.on(1, ["ssh", "node2", "hostname"]).stdout == "node2\n"
    two_hosts.on(1, ["touch", "/tmp/mine", two_hosts.folder / "ours"])
    assert two_hosts.on(2, ["ls", "/tmp/mine"]).returncode != 0
    assert two_hosts.on(2, ["ls", two_hosts.folder / "ours"]).returncode == 0
    assert not Path("/tmp/mine").exists()


def test_a_cable_can_be_pulled_and_plugged_in(two_hosts: Cluster) -> None:
    ssh = ["ssh", "-o", "ConnectTimeout=1", "node2", "true"]
    two_hosts.cut(2)
    try:
        assert two_hosts.on(1, ssh).returncode != 0
    finally:
        two_hosts.join(2)
    assert two_hosts.on(1, ssh).returncode == 0


def test_a_command_is_ended_at_its_limit(two_hosts: Cluster) -> None:
    done = two_hosts.on(1, ["sleep", "61"], timeout_s=0.5)
    assert done.returncode == 124
    assert "ended after 0.5 s" in done.stderr
    assert two_hosts.on(1, ["pgrep", "-fc", "^sleep 61"]).stdout == "0\n"


def test_nothing_is_left_after_an_error(hosts_possible: None) -> None:
    with pytest.raises(ZeroDivisionError), Cluster(1) as cluster:
        assert processes_of(cluster.folder)
        _ = 1 / 0
    assert gone(cluster.folder, 0)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sign: sign.name)
def test_nothing_is_left_of_a_process_that_is_ended(hosts_possible: None, sign: signal.Signals) -> None:
    before = links_and_mounts()
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPS_HOSTS], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert keeper.stdout is not None
    folder = Path(keeper.stdout.readline().decode().strip())
    time.sleep(0.5)
    assert processes_of(folder)
    keeper.send_signal(sign)
    keeper.wait(20)
    keeper.stdout.close()
    assert gone(folder), processes_of(folder)
    assert links_and_mounts() == before


def test_nothing_is_left_after_a_test_that_fails(hosts_possible: None, tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    path = f"{Path(__file__).parent}:{SCRIPT.parent}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "test_fails.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    (folder,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FOLDER ")]
    assert gone(Path(folder), 0)


def test_a_host_dies_and_comes_back(hosts_possible: None) -> None:
    """It comes back with nothing of what it had, under its name and address."""
    with Cluster(2, networks=2) as cluster:
        for end in (cluster.kill, cluster.crash):
            cluster.on(2, ["touch", "/tmp/mine"])
            end(2)
            with pytest.raises(ClusterError, match="there is no host 2; up: 1"):
                cluster.cut(2)
            cluster.boot(2)
            assert cluster.on(2, ["ls", "/tmp/mine"]).returncode != 0
            for network in (0, 1):
                assert cluster.on(1, ["ssh", f"10.77.{network}.2", "hostname"]).stdout == "node2\n"


def test_a_rate_that_is_none_is_told_and_nothing_is_left(hosts_possible: None) -> None:
    cluster = Cluster(2, rate="fast")
    with pytest.raises(ClusterError, match="expected a rate such as 1gbit"):
        cluster.__enter__()
    assert gone(cluster.folder, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "0"], "expected 1 to 99, got '0'"),
        (["up", "2", "--speed", "1"], "expected --rate R"),
        (["up", "2", "--networks", "10"], "expected 1 to 9 networks, got '10'"),
        (["fly"], "got 'fly'; see --help"),
        (["sh", "1"], "a command is missing"),
        (["cut", "7"], "there is no host 7"),
    ],
)
def test_wrong_use_is_told_in_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    environ = os.environ | {"HPCDP_CLUSTER": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("bash", "id", "readlink"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = "ip is not installed" if os.geteuid() == 0 else "needs root"
    assert expected in (obstacle() or "")
