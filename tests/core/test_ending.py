"""Who says why a job ends, and with which status."""

import os
import subprocess
import sys

import pytest

from hpcdp.core import environment as process_exit
from hpcdp.core.environment import INTERRUPTED, TERMINATED, end_early, fail
from hpcdp.errors import SaveError, Terminated

CODE = (
    "import sys; from hpcdp.core.environment import fail; print('out', end=''); fail('why', {}, by_all={}); sys.exit(9)"
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("status", "by_all"), [(1, False), (2, True), (TERMINATED, False)])
def test_a_rank_ends_at_once_and_what_all_know_is_said_by_one(rank: int, status: int, by_all: bool) -> None:
    environ = os.environ | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    code = CODE.format(status, by_all)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environ)
    silent = status in (INTERRUPTED, TERMINATED) or (by_all and rank)
    said = "" if silent else "hpcdp: why\n" if by_all else f"hpcdp: rank {rank}: why\n"
    assert (done.returncode, done.stdout, done.stderr) == (status, "out", said)


def test_outside_a_job_the_caller_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("interrupted", INTERRUPTED) == INTERRUPTED
    assert fail("why", 1, by_all=True) == 1
    assert end_early(Terminated(), "train") == TERMINATED
    assert capsys.readouterr().err == "hpcdp: interrupted\nhpcdp: why\nhpcdp: ended by SIGTERM\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_of_all_ranks_is_reported_by_one(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(process_exit.os, "_exit", ended.append)
    monkeypatch.setattr(process_exit.time, "sleep", lambda _: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    error = SaveError("save", got="No space left on device")
    error.is_on_every_rank = True
    fail(error, 1)
    assert ended == [1]
    assert capsys.readouterr().err == ("" if rank else "hpcdp: save: got No space left on device\n")
