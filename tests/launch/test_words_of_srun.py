"""The status of a job, and which rank failed first, are read out of what srun says, which is copied on."""

import os
import signal
import subprocess
import sys

import pytest

SRUN = """\
srun: error: node1: task 7: Killed
slurmstepd-node1: error: *** STEP 9.0 ON node1 CANCELLED ***
srun: error: node1: {}
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node2: task 2: Killed
srun: error: node2: task 3: Exited with exit code 14
"""
UNKNOWN = "a rank was killed, and srun has killed others: which one failed first is not known"
RUN = """
import os, sys
from hpcdp.launch.runner import supervise
from hpcdp.launch.launchers import Job
sys.exit(supervise(["sh", "-c", 'printf "%s" "$0" >&2; exit 14', sys.argv[1]], os.environ, "srun", Job(("sh",), 4),
                   elsewhere=4))
"""


@pytest.mark.parametrize(
    ("first", "status", "named"),
    [
        ("task 1: Exited with exit code 3", 3, "rank 1 (on node1) ended with status 3 before the others"),
        ("tasks 0-1: Killed", 128 + signal.SIGKILL, UNKNOWN),
        (
            "tasks 0,[2-3]: Segmentation fault (core dumped)",
            128 + signal.SIGSEGV,
            "ranks 0,[2-3] (on node1) were killed by SIGSEGV",
        ),
        ("task 0: Out Of Memory", 128 + signal.SIGKILL, UNKNOWN),
        ("task 0: a word of a later version", 128 + signal.SIGKILL, UNKNOWN),
        ("no task", 128 + signal.SIGKILL, UNKNOWN),
        ("task 3: Terminated", 128 + signal.SIGTERM, "rank 3 (on node1) was killed by SIGTERM"),
    ],
)
def test_the_status_is_that_of_the_task_that_failed_first_and_it_is_named(first: str, status: int, named: str) -> None:
    said = SRUN.format(first)
    done = subprocess.run([sys.executable, "-c", RUN, said], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, f"{said}hpcdp launch: {named}\n")


@pytest.mark.parametrize(
    ("first", "others", "status", "named"),
    [
        ("task 2: Killed", "tasks 0-1: Exited with exit code 14", 137, "rank 2 (on node2) was killed by SIGKILL"),
        ("task 2: Killed", "tasks 0-1: Terminated", 137, "rank 2 (on node2) was killed by SIGKILL"),
        ("task 2: Terminated", "tasks 0-1: Killed", 143, "rank 2 (on node2) was killed by SIGTERM"),
        ("task 2: Terminated", "task 1: Killed", 143, UNKNOWN),
        ("tasks 2-3: Terminated", "tasks 0-1: Killed", 143, UNKNOWN),
    ],
)
def test_a_task_that_alone_was_ended_so_is_named(first: str, others: str, status: int, named: str) -> None:
    said = f"srun: error: node2: {first}\nsrun: error: node1: {others}\n"
    run = RUN.replace("exit 14", f"exit {status}")
    done = subprocess.run([sys.executable, "-c", run, said], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, f"{said}hpcdp launch: {named}\n")


def test_a_rank_that_has_aborted_and_was_killed_leaves_its_status_with_srun() -> None:
    said = "".join(f"srun: error: node{number}: tasks {2 * number}-{2 * number + 1}: Killed\n" for number in (0, 1))
    run = RUN.replace("exit 14", "exit 3")
    done = subprocess.run([sys.executable, "-c", run, said], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, said + "hpcdp launch: a rank has aborted the job with status 3\n")


@pytest.mark.parametrize("tasks", [["task 0", "task 1"], ["tasks 0-1"]])
def test_tasks_that_have_failed_alike_speak_for_themselves(tasks: list[str]) -> None:
    said = "".join(f"srun: error: node{number}: {each}: Exited with exit code 5\n" for number, each in enumerate(tasks))
    done = subprocess.run([sys.executable, "-c", RUN, said], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (5, said)


def test_a_host_that_slurm_has_lost_is_named_and_no_rank_that_it_has_ended_for_it() -> None:
    said = (
        "srun: error: Node failure on node2\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: node1: tasks 0-1: Terminated\n"
    )
    done = subprocess.run([sys.executable, "-c", RUN, said], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, f"{said}hpcdp launch: Slurm has lost node2\n")


def test_a_job_without_failures_has_the_status_of_srun() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "nothing"], env=os.environ, capture_output=True, timeout=60)
    assert done.returncode == 14
