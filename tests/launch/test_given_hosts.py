"""Jobs of Grid Engine and LSF: on their hosts also where this mpirun does not read which those are."""

from pathlib import Path

import pytest
from raises import raises

from hpcdp.errors import LaunchError
from hpcdp.launch import hosts, launchers, mpi_library, runner
from hpcdp.launch.launchers import Host, Job, batch

HOSTS = (Host("node1", 2), Host("node2", 3))
GRID_ENGINE = "node1 1 all.q@node1 UNDEFINED\nnode2 3 all.q@node2 UNDEFINED\nnode1 1 long.q@node1 UNDEFINED\n"


@pytest.fixture
def batch_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job of a batch system, where Open MPI 5 was built with what ``reader`` names."""

    def become(variables: dict[str, str], reader: str = "ras_slurm") -> None:
        for name in (
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_ID",
            "PBS_NODEFILE",
            "PE_HOSTFILE",
            "LSB_HOSTS",
            "LSB_MCPU_HOSTS",
        ):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "file").write_text(GRID_ENGINE)
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "file")))
        for folder in ("bin", "lib"):
            (tmp_path / folder).mkdir()
        (tmp_path / "bin" / "prterun").touch()
        (tmp_path / "lib" / "libprrte.so.3").write_bytes(f"\0prte_mca_{reader}_component\0".encode())
        monkeypatch.setattr(mpi_library, "find_library", lambda: mpi_library.MpiLibrary("openmpi", tmp_path / "lib"))
        monkeypatch.setattr(mpi_library, "find_mpirun", lambda _: tmp_path / "bin" / "mpirun")
        monkeypatch.setattr(runner, "check_program", lambda *_: None)

    return become


@pytest.mark.parametrize(
    "variables",
    [
        {"PE_HOSTFILE": "FILE"},
        {"LSB_HOSTS": "node1 node1 node2 node2 node2", "LSB_MCPU_HOSTS": "node1 2 node2 3"},
        {"LSB_MCPU_HOSTS": "node1 2 node2 3 "},
    ],
    ids=["Grid Engine", "LSF", "a large job of LSF"],
)
def test_ranks_go_to_the_hosts_of_the_job(variables: dict[str, str], batch_job) -> None:
    batch_job(variables)
    assert batch.read() == HOSTS
    plan = launchers.launcher("mpi").plan(Job(("train",), 3, 1))
    assert list(plan.files.values()) == ["node1\nnode1\nnode2\nnode2\n"]
    assert "--default-hostfile" in plan.commands[0].argv


@pytest.mark.parametrize(
    ("variables", "reader"),
    [
        ({"PE_HOSTFILE": "FILE"}, "ras_gridengine"),
        ({"LSB_HOSTS": "node1 node2"}, "ras_lsf"),
        ({"PBS_NODEFILE": "FILE"}, "ras_pbs"),
    ],
)
def test_an_mpirun_that_reads_them_itself_is_left_alone(variables: dict[str, str], reader: str, batch_job) -> None:
    batch_job(variables, reader)
    plan = launchers.launcher("mpi").plan(Job(("train",), 2))
    assert not plan.files
    assert "--map-by" not in plan.commands[0].argv


def test_more_ranks_than_slots_are_a_line(batch_job) -> None:
    batch_job({"PE_HOSTFILE": "FILE"})
    where = "launch in a job of Grid Engine"
    with raises(LaunchError, operation=where, expected=6, got=[5, "node1:2", "node2:3"]):
        launchers.launcher("mpi").plan(Job(("train",), 6))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"PE_HOSTFILE": "/none"}, "[PE_HOSTFILE]: expected a file of hosts, got /none, no such file or folder"),
        (
            {"LSB_MCPU_HOSTS": "node1 2 node2"},
            "[LSB_MCPU_HOSTS]: expected hosts, each with a number of slots, got 'node2 '",
        ),
        ({"LSB_MCPU_HOSTS": "node1 0"}, "got 'node1 0'"),
    ],
)
def test_what_cannot_be_read_is_a_line(variables: dict[str, str], says: str, batch_job) -> None:
    batch_job(variables)
    with pytest.raises(LaunchError) as caught:
        launchers.launcher("mpi").plan(Job(("train",), 2))
    assert says in str(caught.value)


def test_traffic_between_their_hosts_takes_no_loopback(batch_job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "here", lambda: ["lo", "eth0"])
    monkeypatch.setattr(hosts, "to_other_hosts", lambda: ["eth0"])
    batch_job({"LSB_HOSTS": "node1 node2"})
    with raises(Exception, operation="launch --interface", got="lo"):
        launchers.launcher("mpi").plan(Job(("train",), 2, interface="lo"))
