"""What Slurm's variables say: hosts, tasks and cores."""

import json
import os
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp.cli import doctor, launch
from hpcdp.errors import LaunchError
from hpcdp.launch import launchers
from hpcdp.launch.hosts import Allocation, allocation, check_allocation, expand_counts, expand_hosts
from hpcdp.launch.launchers import Host, Job


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b-2", ["a", "b-2"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("gpu[008-011]-ib", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "gpu011-ib"]),
        ("r[0-1]n[9-10]", ["r0n9", "r0n10", "r1n9", "r1n10"]),
        ("[1-2].site.org", ["1.site.org", "2.site.org"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x1),0", [1, 0])])
def test_numbers_per_host(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "a,", "n[1-", "n1]", "n[]", "n[3-1]", "n[a]", "a b", "$(reboot)", "n[[1]]", "a/b"]
)
def test_what_is_no_host_list(text: str) -> None:
    with raises(LaunchError, operation="read Slurm's host list", expected="[01-03,7]"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[0-999999999999]", "a[1-999]b[1-999]", "a[1-60000],b[1-60000]"])
def test_more_hosts_than_there_are(text: str) -> None:
    with raises(LaunchError, operation="read Slurm's host list", expected=[100, "000"]):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["", "2(3)", "2(x0)", "x", "1,,2", "-1", "2(x3"])
def test_what_is_no_list_of_numbers(text: str) -> None:
    with raises(LaunchError, operation="read Slurm's numbers per host", expected=["list", 2, "x3", 1]):
        expand_counts(text)
    with raises(LaunchError, operation="read Slurm's numbers per host", expected=[100, "000"]):
        expand_counts("1(x99999),2(x9)")


INPUTS = 100_000 if os.environ.get("HPCDP_TEST_THOROUGH") else 300


@settings(max_examples=INPUTS)
@given(st.text("an0123456789[],-x() \n", max_size=24))
@example("[" * 20)
@example("n[0-9][0-9][0-9][0-9][0-9]")
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for expand in (expand_hosts, expand_counts):
        try:
            assert len(expand(text)) <= 100_000
        except LaunchError as error:
            assert "\n" not in str(error)


NAMES = st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{1,3}", fullmatch=True), min_size=1, max_size=9, unique=True)


@given(NAMES, st.data())
@pytest.mark.thorough
def test_a_list_that_is_written_in_ranges_is_read_back(names: list[str], data: st.DataObject) -> None:
    text = ",".join(
        f"{name.rstrip('0123456789')}[{name.lstrip('abcdefghijklmnopqrstuvwxyz')}]"
        if data.draw(st.booleans())
        else name
        for name in names
    )
    assert expand_hosts(text) == names


JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2],m", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def test_an_allocation() -> None:
    found = allocation(JOB | {"SLURM_CPUS_PER_TASK": "4"})
    assert found is not None
    assert [(host.name, host.slots) for host in found.hosts] == [("n1", 2), ("n2", 2), ("m", 1)]
    assert (found.tasks, found.cpus_per_task, found.hosts_alike) == (5, 4, False)
    assert str(found) == "job 4711, 5 tasks on 3 hosts (n1:2, n2:2, m:1)"
    one_each = allocation({name: text for name, text in JOB.items() if name != "SLURM_TASKS_PER_NODE"})
    assert one_each is not None and one_each.tasks == 3 and one_each.hosts_alike and one_each.cpus_per_task is None


def test_outside_of_a_job_there_is_none() -> None:
    assert allocation({}) is None
    assert allocation({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "1"}) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURM_TASKS_PER_NODE": "2,1"}, "expected a number for each of the 3 hosts of SLURM_JOB_NODELIST, got 2"),
        ({"SLURM_CPUS_PER_TASK": "many"}, "SLURM_CPUS_PER_TASK: expected a number of cores, got 'many'"),
        ({"SLURM_CPUS_PER_TASK": "0"}, "got '0'"),
    ],
)
def test_variables_that_cannot_be(changed: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError) as raised:
        allocation(JOB | changed)
    assert says in str(raised.value)


def test_info_tells_the_allocation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in JOB.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(doctor, "_version_of", lambda *_: "")
    assert doctor.show_info(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["Slurm"].startswith("job 4711, 5 tasks on 3 hosts")


GIVEN = Allocation("7", (Host("node1", 2), Host("node2", 1)))
POLICY = "PRTE_MCA_rmaps_default_mapping_policy"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job(("x",), 2, hosts=(Host("node2"),)), "launch -H: expected at most 1 on node2 in job 7, 3 tasks on 2 hosts"),
        (Job(("x",), 2, 1, hosts=(Host("node2.site"), Host("node1"))), "at most 1 on node2.site in job 7"),
        (
            Job(("x",), 1, hosts=(Host("n3"),)),
            "expected hosts of job 7, 3 tasks on 2 hosts (node1:2, node2:1), got n3",
        ),
        (
            Job(("x",), 3, 1),
            "launch: expected at most 3 in job 7, 3 tasks on 2 hosts (node1:2, node2:1), got 4 ",
        ),
        (Job(("x",), 3, ranks_per_node=1), "launch: expected at most 2 with 1 per node in job 7"),
    ],
)
def test_what_the_mpirun_of_open_mpi_could_not_start_in_a_job(job: Job, says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        check_allocation(job, GIVEN, "openmpi")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("family", "job"),
    [
        ("openmpi", Job(("x",), 3)),
        ("openmpi", Job(("x",), 2, ranks_per_node=1)),
        ("openmpi", Job(("x",), 2, 1, hosts=(Host("node1.site"), Host("node2")))),
        ("openmpi", Job(("x",), 2, hosts=(Host("10.77.0.2"),))),
        ("openmpi", Job(("x",), 9, mpi_args="--map-by node:OVERSUBSCRIBE")),
        ("openmpi", Job(("x",), 9, hosts=(Host("node2"),), env={POLICY: ":oversubscribe"})),
        ("mpich", Job(("x",), 9)),
        ("mpich", Job(("x",), 9, hosts=(Host("node2"),))),
    ],
)
def test_what_an_mpirun_starts_in_a_job_is_not_refused(family: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POLICY, raising=False)
    check_allocation(job, GIVEN, family)


def test_mpich_is_not_asked_for_a_host_that_it_would_wait_for() -> None:
    for name in ("node3", "10.77.0.2"):
        with raises(LaunchError, operation="launch -H", got=name):
            check_allocation(Job(("x",), 1, hosts=(Host(name),)), GIVEN, "mpich")


def test_it_is_checked_before_mpirun_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ID": "7", "NODELIST": "node[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", POLICY):
        monkeypatch.delenv(name, raising=False)
    with raises(LaunchError, operation="launch -H", expected=[7, 2], got="node3"):
        launchers.launcher("mpi").plan(Job(("true",), 1, hosts=(Host("node3"),)))


@pytest.mark.parametrize("arguments", [[], ["-n", "3"], ["-n", "3", "--launcher", "mpi"], ["--launcher", "slurm"]])
@pytest.mark.parametrize("has_list", [False, True])
def test_a_heterogeneous_job_is_not_started_in_part(
    arguments: list[str], has_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """salloc tells of no list of hosts there, sbatch of that of the first component."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    if has_list:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    with raises(
        LaunchError, operation="launch in a heterogeneous Slurm job", got=2, remedy=["--het-group=0", "PROGRAM"]
    ):
        launch.main([*arguments, "--", "true"])


@pytest.mark.parametrize("arguments", [["--launcher", "local"], ["--launcher", "ssh", "-H", "node1:1"]])
def test_in_a_heterogeneous_job_named_hosts_are_as_elsewhere(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert launch.main(["-n", "1", "--dry-run", *arguments, "--", sys.executable]) == 0
    assert sys.executable in capsys.readouterr().out
