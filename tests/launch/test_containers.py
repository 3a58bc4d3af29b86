import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_jobs import processes, wait_for

from hpcdp.launch import mpi_library
from hpcdp.launch.launchers import yarn

IS_OPEN_MPI = mpi_library.find_library().family == "openmpi"
LEADS = "import time; from pathlib import Path\nwhile not Path('enough').exists(): time.sleep(0.02)"
QUICK = """
import sys
from hpcdp.launch.launchers import yarn as containers
containers.{name} = {value}
containers._together = lambda folder, count: None  # as if each were on a machine of its own
sys.exit(containers.main(sys.argv[1:]))
"""


def start(folder: Path, count: int, constant: tuple[str, float] | None = None) -> subprocess.Popen[str]:
    name, value = constant or ("_POLL_S", 0.1)
    how = ["-c", QUICK.format(name=name, value=value)]
    return subprocess.Popen(
        [sys.executable, *how, str(folder / "job"), str(count), sys.executable, "-c", LEADS],
        cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def agent(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "job" / "agent"
    script.write_text(yarn.agent_script(folder / "job"))
    script.chmod(0o755)
    return subprocess.run([script, *words], capture_output=True, text=True, timeout=30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one for a job in it, both with a blank in their names."""
    path = tmp_path / "a folder"
    (path / "job").mkdir(parents=True)
    return path


def test_commands_run_in_the_container_that_is_named(folder: Path) -> None:
    running = [start(folder, 3) for _ in range(3)]
    wait_for(lambda: (folder / "job" / "container-3").exists())
    homes = set()
    for number in (1, 2, 3):
        done = agent(folder, "-x", f"container-{number}", "echo", "$PPID 'two  words' >&2;", "echo '$HOME'; exit 7")
        assert done.returncode == 7 and done.stdout == ""
        pid, _, words = done.stderr.partition(" ")
        assert words == "two  words\n$HOME\n"
        homes.add(int(pid))
    assert homes == {each.pid for each in running}
    (folder / "enough").touch()
    assert [each.wait(20) for each in running] == [0, 0, 0]
    assert (folder / "job" / "status").read_text() == "0"


def test_a_host_that_is_no_container_is_refused(folder: Path) -> None:
    done = agent(folder, "container-1", "true")
    assert done.returncode == 255
    assert done.stderr == "hpcdp: start a daemon of mpirun [container-1]: no such container\n"


@pytest.mark.thorough
def test_what_a_container_has_started_ends_with_it(folder: Path) -> None:
    running = [start(folder, 2)]
    wait_for(lambda: (folder / "job" / "container-1").exists())
    running.append(start(folder, 2))
    wait_for(lambda: (folder / "job" / "container-2").exists())
    mark = f"sleep 60.{running[0].pid}"
    for number in (1, 2):  # as a daemon does that leaves who has called it
        assert agent(folder, f"container-{number}", f"setsid {mark} </dev/null >/dev/null 2>&1 &").returncode == 0
    wait_for(lambda: len(processes(mark.replace(" ", "\0"))) == 2)
    for each in reversed(running):  # once the first is over the other may end by itself, with 0
        each.send_signal(signal.SIGTERM)
    assert [each.wait(20) for each in running] == [143, 143]
    wait_for(lambda: not processes(mark.replace(" ", "\0")))


def test_a_second_signal_does_not_keep_a_container_from_ending_what_it_has_started(folder: Path) -> None:
    running = start(folder, 1)
    wait_for(lambda: (folder / "job" / "container-1").exists())
    mark = f"sleep 61.{running.pid}"
    stubborn = f"setsid /bin/sh -c 'trap \"\" TERM; {mark}; :' </dev/null >/dev/null 2>&1 &"
    assert agent(folder, "container-1", stubborn).returncode == 0
    wait_for(lambda: processes(mark.replace(" ", "\0")))
    running.send_signal(signal.SIGTERM)
    time.sleep(0.25)  # orphans are killed half a second after they have been asked
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 143
    assert not processes(mark.replace(" ", "\0"))


def test_the_others_end_with_the_first_one(folder: Path) -> None:
    running = [start(folder, 2, ("_LOST_S", 3.0))]
    wait_for(lambda: (folder / "job" / "container-1").exists())
    running.append(start(folder, 2, ("_LOST_S", 3.0)))
    wait_for(lambda: (folder / "job" / "beat").exists())
    with pytest.raises(subprocess.TimeoutExpired):
        running[1].wait(4)
    running[0].kill()
    assert running[1].wait(20) == 1
    assert running[1].stderr is not None
    assert "run ranks [container-2]: got no sign of container-1" in running[1].stderr.read()
    wait_for(lambda: not processes("hpcdp.launch.launchers.batch\0" + str(folder)))


def test_containers_that_do_not_come_are_told_of(folder: Path) -> None:
    first = start(folder, 3, ("_GATHER_S", 1.0))
    wait_for(lambda: (folder / "job" / "container-1").exists())
    second = start(folder, 3)
    assert first.wait(20) == 0 and second.wait(20) == 0
    assert (folder / "job" / "status").read_text() == "1"
    assert "1 of 3 containers have not started in 1 s" in (folder / "job" / "errors").read_text()


def test_open_mpi_is_not_started_in_two_containers_of_a_machine(folder: Path) -> None:
    both = [
        subprocess.Popen([sys.executable, "-m", "hpcdp.launch.launchers.yarn", str(folder / "job"), "2", "true"])
        for _ in range(2)
    ]
    assert [each.wait(20) for each in both] == [0, 0]
    said = (folder / "job" / "errors").read_text()
    assert ("Open MPI needs one container a machine, got several on" in said) == IS_OPEN_MPI
    assert (folder / "job" / "status").read_text() == ("1" if IS_OPEN_MPI else "0")


def test_one_in_the_place_of_a_lost_one_is_refused(folder: Path) -> None:
    first = start(folder, 1)
    wait_for(lambda: (folder / "job" / "container-1").exists())
    second = start(folder, 1)
    assert second.wait(20) == 1
    assert second.stderr is not None and "a replacement for a lost container" in second.stderr.read()
    (folder / "enough").touch()
    assert first.wait(20) == 0
