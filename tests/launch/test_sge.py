"""Jobs of Grid Engine: what is rendered, compared whole, and what a stand-in for its commands makes of them."""

import os
import shlex
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
from hpcdp.launch.launchers import Host, Job, sge

STAND_IN = Path(__file__).with_name("grid_engine.py")
JOBS = {
    "sge_one_rank": Job(PROGRAM, 1),
    "sge_ranks": Job(PROGRAM, 4, batch_args="-pe mpi -q long -l h_rt=1:00:00"),
    "sge_full": Job(**{**vars(FULL), "batch_args": "-q long -pe 'mpi*' -N digits"}),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_rendered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered(sge.plan_sge, JOBS[name], tmp_path, monkeypatch) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_scripts_have_no_faults_of_the_shell(name: str, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for text in filter(is_script, sge.plan_sge(JOBS[name]).files.values()):
        done = subprocess.run(SHELLCHECK, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "stop_s"),
    [
        ("", float("inf")),
        ("-l h_rt=600", 480.0),
        ("-q long -l mem=1G,h_rt=1:00:00 -l gpu", 3480.0),
        ("-l h_rt=100", 50.0),
        ("-l h_rt=:10:", 480.0),
        ("-l s_rt=600", float("inf")),
    ],
)
def test_a_job_stops_before_its_time_limit(arguments: str, stop_s: float) -> None:
    assert sge._stop_s(arguments.split()) == stop_s


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": (Host("node1"),), "batch_args": "-pe mpi"}, "launch -H with --launcher sge"),
        ({"sync_dst_dir": "/tmp/x", "batch_args": "-pe mpi"}, "launch --sync-dst-dir with --launcher sge"),
        ({}, "expected a parallel environment for 2 ranks and servers, such as -pe mpi"),
        ({"batch_args": "-pe mpi 4"}, "as the launcher adds 2 slots"),
        ({"batch_args": "-q long -pe"}, "the name of a parallel environment after -pe"),
        ({"batch_args": "-pe mpi -o out"}, "got '-o'"),
        ({"batch_args": "-pe 'mpi"}, "expected closed quotes"),
        ({"batch_args": "-pe mpi -l h_rt=soon"}, "expected for h_rt seconds, or H:M:S, e.g. 4:00:00, got 'soon'"),
        ({"batch_args": "-pe mpi -l gpu,h_vmem=4X"}, "expected for h_vmem a number of bytes, or with K, M or G behind"),
        (
            {"batch_args": "-pe mpi -N 4abc"},
            "expected for N a name that begins with no digit, and has no blanks and no / :",
        ),
        ({"batch_args": "-pe mpi -N 'a b'"}, "got 'a b'"),
        ({"batch_args": "-pe mpi -q 'a b'"}, "expected for q a name of letters, digits and _.+@:*-, got 'a b'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sge.plan_sge(Job(("python",), 2, **options))
    assert says in str(caught.value)


def test_commands_of_mpirun_reach_the_shell_of_a_host_as_they_are(tmp_path: Path) -> None:
    """Through the agent and the shell that qrsh starts on the host."""
    words = ["a'b", "$(touch injected)", 'c"d', "e\\f", "g  h"]
    (tmp_path / "agent").write_text(sge._AGENT)
    (tmp_path / "qrsh").write_text('#!/bin/sh\nwhile [ "$1" != setsid ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
    for name in ("agent", "qrsh"):
        (tmp_path / name).chmod(0o755)
    command = shlex.join([sys.executable, "-c", "import sys; print(sys.argv[1:])", *words])
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/sh"}
    done = subprocess.run(
        [tmp_path / "agent", "-x", "node2", command], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"{words}\n", done.stderr
    assert not (tmp_path / "injected").exists()


def test_a_folder_that_qsub_would_take_apart_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a:b").mkdir()
    monkeypatch.chdir(tmp_path / "a:b")
    with raises(ConfigError, operation="launch --launcher sge"):
        sge.plan_sge(Job(("python",), 1))


def test_without_grid_engine_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(LaunchError, operation="run qsub", remedy="PATH"):
        sge.run_sge(Job(("python",), 1))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def grid(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A shared folder, with a blank in its name, and the environment in which Grid Engine is there."""
    environ = install(tmp_path / "bin", STAND_IN, "qsub", "qstat", "qdel", "qacct")
    shared = tmp_path / "shared folder"
    for folder in (shared, tmp_path / "spool"):
        folder.mkdir()
    (shared / "ranks.py").write_text(RANKS)
    (shared / "sleeper.py").write_text(SLEEPER)
    return shared, {**environ, "HPCDP_TEST_GRID": str(tmp_path / "spool"), "SSH_AUTH_SOCK": "/tmp/agent"}


def ranks(count: int, *program: str) -> list[str]:
    return ["--launcher", "sge", "-n", str(count), "--batch-args=-pe mpi", "--", sys.executable, *program]


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
def test_ranks_form_one_world(count: int, grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    environ["GREETING"] = "a 'quoted' word"
    arguments = ["--env", "GREETING", *ranks(count, "ranks.py", "two words", "$HOME")]
    job = launch(arguments, shared, environ)
    output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert output == f"{list(range(count))} a 'quoted' word None ['two words', '$HOME']\n"
    assert errors.endswith("to stderr\n")  # on a busy machine Open MPI may have warned of something
    assert sorted(path.name for path in shared.iterdir()) == ["ranks.py", "sleeper.py"]


def test_the_status_is_that_of_the_program(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    for status in (7, 99):  # 99 would start the job again
        job = launch(ranks(1, "-c", f"raise SystemExit({status})"), shared, environ)
        job.communicate(timeout=60)
        assert job.returncode == status


@pytest.mark.thorough
def test_a_job_that_stops_early_is_started_again(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(ranks(2, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    # As -notify does before a job is killed; ranks would die of it, were they in the process group that it comes to.
    (Path(environ["HPCDP_TEST_GRID"]) / "7001.SIGUSR2").touch()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert (shared / "run-1-0").exists() and (shared / "run-1-1").exists()


@pytest.mark.thorough
def test_usr1_reaches_the_ranks(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(ranks(2, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 0 and (shared / "run-1-1").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ending_signal_deletes_the_job(sign: signal.Signals, grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(ranks(2, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    job.send_signal(sign)
    job.communicate(timeout=60)
    assert job.returncode == 128 + sign
    assert (Path(environ["HPCDP_TEST_GRID"]) / "7001.delete").exists()
    wait_for(lambda: not processes(str(shared)), limit_s=10)
    assert not list(shared.glob("hpcdp-sge-*"))


@pytest.mark.thorough
def test_a_job_that_grid_engine_kills_says_why(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(ranks(2, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: all((shared / f"run-0-{rank}").exists() for rank in (0, 1)))
    (Path(environ["HPCDP_TEST_GRID"]) / "7001.kill").touch()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 137
    assert "exit status 137, failed 37  : qmaster enforced h_rt limit" in errors
    wait_for(lambda: not processes(str(shared)), limit_s=10)


@pytest.mark.thorough
def test_a_job_that_cannot_start_is_deleted(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(ranks(2, "sleeper.py", str(shared)), shared, environ)
    wait_for(lambda: (Path(environ["HPCDP_TEST_GRID"]) / "7001.running").exists())
    (Path(environ["HPCDP_TEST_GRID"]) / "7001.error").touch()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "job 7001 of Grid Engine could not be started: " in errors and "can't open output file" in errors


def test_what_qsub_refuses_is_said_on_one_line(grid: tuple[Path, dict[str, str]]) -> None:
    shared, environ = grid
    job = launch(["--launcher", "sge", "-n", "2", "--batch-args=-pe smp", "--", "python"], shared, environ)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert errors.count("\n") == 1 and 'parallel environment "smp" does not exist' in errors
    assert not os.listdir(environ["HPCDP_TEST_GRID"])
