"""Applications of YARN: what is rendered, compared whole, and ranks in containers that a stand-in for YARN starts."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_jobs import (
    FULL,
    GOLDEN,
    PROGRAM,
    RANKS,
    SHELLCHECK,
    SLEEPER,
    install,
    is_script,
    launch,
    processes,
    rendered,
    wait_for,
)
from raises import raises

from hpcdp.errors import ConfigError, LaunchError
from hpcdp.launch import mpi_library
from hpcdp.launch.launchers import Host, Job, yarn

IS_OPEN_MPI = mpi_library.find_library().family == "openmpi"
several = pytest.mark.skipif(IS_OPEN_MPI, reason="Open MPI needs one container a machine (tests/cluster has two)")
APART = 2 if IS_OPEN_MPI else 1
"""How many of two ranks go into a container of this machine."""

STAND_IN = Path(__file__).with_name("hadoop.py")
JAR = "share/hadoop/yarn/hadoop-yarn-applications-distributedshell-3.3.6.jar"
JOBS = {
    "yarn_one_container": Job(PROGRAM, 4),
    "yarn_containers": Job(PROGRAM, 5, ranks_per_node=2, batch_args="-queue long -container_memory 4096"),
    "yarn_full": Job(**{**vars(FULL), "batch_args": "-container_resources memory-mb=8192,vcores=3,gpu=1"}),
}


def hadoop_in(folder: Path) -> Path:
    (folder / JAR).parent.mkdir(parents=True)
    (folder / JAR).touch()
    (folder / JAR.replace(".jar", "-sources.jar")).touch()
    install(folder / "bin", STAND_IN, "yarn")
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_what_is_rendered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hadoop = hadoop_in(tmp_path / "hadoop")
    monkeypatch.setenv("HADOOP_HOME", str(hadoop))
    text = rendered(yarn.plan_yarn, JOBS[name], tmp_path, monkeypatch)
    assert text == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_scripts_have_no_faults_of_the_shell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    monkeypatch.setenv("HADOOP_HOME", str(hadoop_in(tmp_path / "hadoop")))
    scripts = [text for text in yarn.plan_yarn(JOBS[name]).files.values() if is_script(text)]
    assert len(scripts) == 3
    for text in scripts:
        done = subprocess.run(SHELLCHECK, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": (Host("node1"),)}, "launch -H with --launcher yarn"),
        ({"sync_dst_dir": "/tmp/x"}, "launch --sync-dst-dir with --launcher yarn"),
        ({"batch_args": "-num_containers 3"}, "got '-num_containers'"),
        ({"batch_args": "--shell_env A=B"}, "got '--shell_env'"),
        ({"batch_args": "-container_memory 4G"}, "expected for container_memory a whole number from 1, got '4G'"),
        ({"batch_args": "-container_vcores 0"}, "expected for container_vcores a whole number from 1, got '0'"),
        ({"batch_args": "-container_resources much"}, "expected for container_resources e.g. memory-mb=4096,vcores=2"),
        ({"batch_args": "-queue 'a b'"}, "expected for queue a name of letters, digits and _.+@:*-, got 'a b'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        yarn.plan_yarn(Job(("python",), 2, **options))
    assert says in str(caught.value)


def test_what_is_missing_of_hadoop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_YARN_HOME", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job(("python",), 1)
    with raises(LaunchError, operation="launch --launcher yarn", where="HADOOP_YARN_HOME=not set, HADOOP_HOME=not set"):
        yarn.run_yarn(job)
    jar = "hadoop-yarn-applications-distributedshell.jar"
    assert yarn.plan_yarn(job).commands[0].argv[:3] == ("yarn", "jar", jar), "a dry run needs no Hadoop"
    hadoop = hadoop_in(tmp_path / "hadoop")
    monkeypatch.setenv("HADOOP_HOME", str(hadoop))
    (hadoop / JAR).unlink()
    with pytest.raises(LaunchError) as caught:
        yarn.run_yarn(job)
    assert str(caught.value.got).startswith("no hadoop-yarn-applications-distributedshell*.jar in share")


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A shared folder, with a blank in its name, and the environment in which Hadoop is there."""
    shared = tmp_path / "shared folder"
    for folder in (shared, tmp_path / "spool"):
        folder.mkdir()
    (shared / "ranks.py").write_text(RANKS)
    (shared / "sleeper.py").write_text(SLEEPER)
    hadoop = hadoop_in(tmp_path / "hadoop")
    environ = {**os.environ, "HADOOP_HOME": str(hadoop), "HPCDP_TEST_YARN": str(tmp_path / "spool")}
    return shared, {**environ, "SSH_AUTH_SOCK": "/tmp/agent"}


def ranks(count: int, in_each: int, *program: str) -> list[str]:
    options = ["--launcher", "yarn", "-n", str(count), "--ranks-per-node", str(in_each), "--batch-args=-queue main"]
    return [*options, "--", sys.executable, *program]


@pytest.mark.parametrize(
    ("count", "in_each"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        (2, 2),
        pytest.param(3, 3, marks=pytest.mark.thorough),
        pytest.param(4, 4, marks=pytest.mark.thorough),
        pytest.param(2, 1, marks=several),
        pytest.param(3, 2, marks=several),
        pytest.param(4, 1, marks=several),
    ],
)
def test_ranks_form_one_world(count: int, in_each: int, cluster: tuple[Path, dict[str, str]]) -> None:
    shared, environ = cluster
    environ["GREETING"] = "a 'quoted' word"
    arguments = ["--env", "GREETING", *ranks(count, in_each, "ranks.py", "two words", "$HOME")]
    job = launch(arguments, shared, environ)
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert output == f"{list(range(count))} a 'quoted' word None ['two words', '$HOME']\n"
    assert errors.endswith("to stderr\n")
    assert sorted(path.name for path in shared.iterdir()) == ["ranks.py", "sleeper.py"]
    wait_for(lambda: not processes(str(shared)), limit_s=10)


@pytest.mark.thorough
def test_the_status_is_that_of_the_rank_that_failed(cluster: tuple[Path, dict[str, str]]) -> None:
    shared, environ = cluster
    fail = "os._exit(7)" if IS_OPEN_MPI else "MPI.COMM_WORLD.Abort(7)"  # MPICH's mpirun misses who leaves otherwise
    code = f"import os, time; from mpi4py import MPI; {fail} if MPI.COMM_WORLD.rank == 1 else time.sleep(60)"
    job = launch(ranks(2, APART, "-c", code), shared, environ)
    job.communicate(timeout=60)
    assert job.returncode == 7
    wait_for(lambda: not processes(str(shared)), limit_s=10)


@pytest.mark.thorough
@pytest.mark.parametrize(("sign", "status"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_ranks(sign: signal.Signals, status: int, cluster: tuple[Path, dict[str, str]]) -> None:
    shared, environ = cluster
    job = launch(ranks(2, APART, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    job.send_signal(sign)
    job.communicate(timeout=60)
    assert job.returncode == status
    wait_for(lambda: not processes(str(shared)), limit_s=10)
    assert not list(shared.glob("hpcdp-yarn-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=several)])
def test_a_lost_container_ends_the_job(number: int, cluster: tuple[Path, dict[str, str]]) -> None:
    shared, environ = cluster
    job = launch(ranks(2, APART, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    lost = [pid for pid in processes("hpcdp.launch.launchers.yarn") if pid in processes(str(shared))]
    leading = {pid: b"hpcdp.launch.launchers.batch" in children(pid) for pid in lost}
    os.killpg(next(pid for pid, leads in leading.items() if leads == (number == 1)), signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert job.returncode not in (0, None), errors
    wait_for(lambda: not processes(str(shared)), limit_s=15)


def children(pid: int) -> bytes:
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return b" ".join(Path(f"/proc/{child}/cmdline").read_bytes() for child in pids)


@pytest.mark.thorough
def test_an_application_that_is_killed_says_why(cluster: tuple[Path, dict[str, str]]) -> None:
    shared, environ = cluster
    job = launch(ranks(2, APART, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    (Path(environ["HPCDP_TEST_YARN"]) / "application_1700000000000_0001.kill").touch()
    _, errors = job.communicate(timeout=60)
    # YARN gives a quarter of a second, in which the job may still have told its status.
    why = "Application was killed by user root; yarn logs -applicationId application_1700000000000_0001"
    assert job.returncode == 143 or (job.returncode == 1 and why in errors), errors
    wait_for(lambda: not processes(str(shared)), limit_s=10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("-queue closed", "queue closed is STOPPED"), ("-qeue main", "Unrecognized option: -qeue")],
)
def test_what_the_client_refuses_is_said_on_one_line(
    arguments: str, says: str, cluster: tuple[Path, dict[str, str]]
) -> None:
    shared, environ = cluster
    job = launch(["--launcher", "yarn", "-n", "2", f"--batch-args={arguments}", "--", "python"], shared, environ)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert errors.count("\n") == 1 and says in errors
