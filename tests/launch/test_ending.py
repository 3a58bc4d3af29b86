"""Who says why a job ends, and with which status."""

import os
import subprocess
import sys

import pytest

from hpcdp.launch.ending import INTERRUPTED, fail

CODE = "import sys; from hpcdp.launch.ending import fail; print('out', end=''); fail('why', {}, by_all={}); sys.exit(9)"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("status", "by_all"), [(1, False), (2, True), (INTERRUPTED, False)])
def test_a_rank_ends_at_once_and_what_all_know_is_said_by_one(rank: int, status: int, by_all: bool) -> None:
    environ = os.environ | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    code = CODE.format(status, by_all)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environ)
    silent = status == INTERRUPTED or (by_all and rank)
    assert (done.returncode, done.stdout, done.stderr) == (status, "out", "" if silent else "hpcdp: why\n")


def test_outside_a_job_the_caller_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("interrupted", INTERRUPTED) == INTERRUPTED
    assert fail("why", 1, by_all=True) == 1
    assert capsys.readouterr().err == "hpcdp: interrupted\nhpcdp: why\n"
