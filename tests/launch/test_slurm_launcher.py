"""The srun of a job, and what it refuses; ranks under a real one are tests/cluster's."""

import sys
from pathlib import Path

import pytest
from raises import raises

from hpcdp.errors import ConfigError, LaunchError
from hpcdp.launch import mpi_library
from hpcdp.launch.launchers import Host, Job, slurm
from hpcdp.launch.mpi_library import MpiLibrary

LIST = (
    "MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"
)
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
COMMON = ["--export=ALL", "--quit-on-interrupt", "--kill-on-bad-exit=1"]


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that lists the usual plugins, under Open MPI and outside of a job."""
    path = tmp_path / "srun"
    says(path, LIST)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_CPUS_PER_TASK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mpi_library, "find_library", lambda: MpiLibrary("openmpi", Path("/x/libmpi.so.40")))
    for name in ("p", "q"):
        says(tmp_path / name, "")
    return path


def says(path: Path, text: str, stream: int = 1, status: int = 0) -> None:
    path.write_text(f"#!/bin/sh\ncat >&{stream} <<'EOT'\n{text}\nEOT\nexit {status}\n")
    path.chmod(0o755)


def argv(job: Job) -> list[str]:
    (command,) = slurm.plan_slurm(job).commands
    return list(command.argv)


def inside(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, text in (JOB | changed).items():
        monkeypatch.setenv(name, text)


def test_outside_of_a_job(srun: Path) -> None:
    assert argv(Job(("p", "a b"), 3)) == ["srun", "--mpi=pmix", *COMMON, "--ntasks=3", "p", "a b"]
    spread = ["--nodes=2", "--ntasks=3", "--distribution=plane=2"]
    assert argv(Job(("p",), 3, ranks_per_node=2))[5:] == [*spread, "p"]


@pytest.mark.parametrize(
    ("hosts", "ranks", "servers", "per_node", "names"),
    [
        ((Host("n1", 1), Host("n2", 2)), 3, 0, None, "n1,n2,n2"),
        ((Host("n2", 2), Host("n1", 2)), 3, 0, None, "n2,n2,n1"),
        ((Host("n2"), Host("n1")), 3, 0, None, "n2,n2,n1"),
        ((Host("n1"), Host("n2")), 2, 2, None, "n1,n2,n1,n2"),
        ((Host("n1", 4), Host("n2", 4)), 2, 0, 1, "n1,n2"),
    ],
)
def test_ranks_go_to_the_hosts_that_are_named(
    srun: Path, hosts: tuple[Host, ...], ranks: int, servers: int, per_node: int | None, names: str
) -> None:
    words = argv(Job(("p",), ranks, servers, hosts=hosts, ranks_per_node=per_node))
    layout = ["--nodes=2", f"--ntasks={ranks + servers}", "--distribution=arbitrary", f"--nodelist={names}"]
    assert words[5:9] == layout


def test_a_colon_is_none_of_sruns(srun: Path) -> None:
    assert argv(Job(("p", "a b", ":"), 3))[-4:] == ["--ntasks=3", "sh", "-c", "exec p 'a b' :"]
    assert argv(Job(("p", ":"), 2, 1))[-5:] == ["2", sys.executable, "sh", "-c", "exec p :"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--time=soon", "launch --mpi-args: expected for time a time as Slurm writes it, e.g. 04:00:00 or 2-12"),
        ("--time=99:99:99", "minutes and seconds below 60, or 0 for no limit, got '99:99:99'"),
        ("-t soon", "expected for time a time as Slurm writes it"),
        ("-tsoon", "expected for time a time as Slurm writes it"),
        ("--mem 4X", "expected for mem a number of MiB, or with K, M, G or T behind it, e.g. 16G, got '4X'"),
        ("--partition='a b'", "expected for partition a name of letters, digits and _.+@:*-, got 'a b'"),
        ("-c 0", "expected for cpus-per-task a whole number from 1, got '0'"),
    ],
)
def test_values_that_srun_would_refuse(srun: Path, options: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        slurm.plan_slurm(Job(("p",), 2, mpi_args=options))
    assert says in str(raised.value)


def test_values_that_srun_takes(srun: Path) -> None:
    options = ["-t", "5", "-pmain,long", "--mem=16G", "--gres=gpu:a100:2", "--exclusive", "-v", "--time=1-12:30"]
    options += ["--time=90:30", "--time=48:00:00", "--time=0", "--time=unlimited", "--mem=16g", "--mem-per-cpu=500m"]
    options += ["--gpus-per-node=a100-40gb:2,v100:1"]
    assert argv(Job(("p",), 2, mpi_args=" ".join(options)))[-len(options) - 1 :] == [*options, "p"]


@pytest.mark.parametrize(
    ("ranks", "tasks", "layout"),
    [
        (4, "2(x2)", ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]),
        (3, "2(x2)", ["--nodes=2", "--ntasks=3", "--distribution=plane=2"]),
        (1, "2(x2)", ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]),
        (4, "3,1", ["--nodes=2", "--ntasks=4"]),
        (3, "3,1", ["--nodes=2", "--ntasks=3", "--distribution=plane=2"]),
    ],
)
def test_inside_of_a_job_ranks_are_spread(
    srun: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, tasks: str, layout: list[str]
) -> None:
    inside(monkeypatch, SLURM_TASKS_PER_NODE=tasks)
    assert argv(Job(("p",), ranks)) == ["srun", "--mpi=pmix", *COMMON, *layout, "p"]


def test_servers_are_the_last_ranks(srun: Path) -> None:
    *_, shell, flag, script, name, workers, python, program = argv(Job(("p",), 3, servers=2))
    assert (shell, flag, name, workers, python, program) == ("sh", "-c", "hpcdp-rank", "3", sys.executable, "p")
    assert "exec" in script and "hpcdp.kvstore.serve" in script


def test_options(srun: Path) -> None:
    found = argv(Job(("p",), 2, bind="numa", tag_output=True, mpi_args="--mpi=pmix_v4 --comment='a b'"))
    further = ["--mpi=pmix_v4", "--comment=a b"]
    assert found == ["srun", *COMMON, "--ntasks=2", "--cpu-bind=ldoms", "--label", *further, "p"]


def test_variables(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    monkeypatch.setenv("OMPI_MCA_osc", "rdma")
    (command,) = slurm.plan_slurm(Job(("p",), 2, env={"A": "b c"}, interface="ib0")).commands
    assert command.env["A"] == "b c"
    assert command.env["OMPI_MCA_btl_tcp_if_include"] == command.env["GLOO_SOCKET_IFNAME"] == "ib0"
    assert command.env["SRUN_CPUS_PER_TASK"] == command.env["OMP_NUM_THREADS"] == "4"
    assert "OMPI_MCA_osc" not in command.env


def test_a_loopback_leads_to_no_other_host_of_the_job(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    with raises(ConfigError, operation="launch --interface", got="lo"):
        slurm.plan_slurm(Job(("sh",), 2, interface="lo"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    (command,) = slurm.plan_slurm(Job(("sh",), 2, interface="lo")).commands
    assert command.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_mpich_speaks_pmi2(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_library", lambda: MpiLibrary("mpich", Path("/x/libmpi.so.12")))
    assert argv(Job(("p",), 2)) == ["srun", "--mpi=pmi2", *COMMON, "--ntasks=2", "p"]


@pytest.mark.parametrize("text", [LIST, "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\nsrun: pmix"])
@pytest.mark.parametrize("stream", [1, 2])
def test_lists_of_plugins(srun: Path, text: str, stream: int) -> None:
    says(srun, text, stream)
    assert {"none", "pmi2", "pmix"} <= set(slurm.mpi_types())


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        (
            "MPI plugin types are...\n\tnone\n\tpmi2\n",
            0,
            "expected srun --mpi=pmix, which Open MPI needs, got only none",
        ),
        ("broken", 1, "srun --mpi=list: got"),
    ],
)
def test_a_plugin_that_is_missing_is_told_before_anything_starts(
    srun: Path, text: str, status: int, expected: str
) -> None:
    says(srun, text, status=status)
    with pytest.raises(LaunchError) as raised:
        slurm.run_slurm(Job(("p",), 2))
    assert expected in str(raised.value)


def test_a_dry_run_asks_no_cluster(srun: Path) -> None:
    says(srun, "srun: fatal: Could not establish a configuration source", status=1)
    assert argv(Job(("p",), 2)) == ["srun", "--mpi=pmix", *COMMON, "--ntasks=2", "p"]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job(("p",), 2, sync_dst_dir="/x"), "a file system that all hosts of a Slurm job see"),
        (Job(("p",), 2, mpi_args="'x"), "closed quotes"),
        (Job(("p",), 5, hosts=(Host("a"), Host("b")), ranks_per_node=2), "slots for 5 ranks, got 4 on a, b with 2"),
        (Job(("p",), 3, hosts=(Host("a", 1), Host("b", 1))), "slots for 3 ranks, got 2 on a:1, b:1"),
    ],
)
def test_what_srun_cannot_do(srun: Path, job: Job, expected: str) -> None:
    with pytest.raises(LaunchError) as raised:
        slurm.plan_slurm(job)
    assert expected in str(raised.value)


def test_without_srun_and_inside_of_ranks(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with raises(LaunchError, operation="launch ranks", got=2):
        slurm.plan_slurm(Job(("p",), 2))
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    srun.unlink()
    monkeypatch.setenv("PATH", str(srun.parent))
    with raises(LaunchError, operation="launch --launcher slurm", expected="PATH"):
        slurm.run_slurm(Job(("p",), 2))
    assert argv(Job(("p",), 2)) == ["srun", "--mpi=pmix", *COMMON, "--ntasks=2", "p"], "a dry run needs none"
