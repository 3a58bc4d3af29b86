"""Jobs that a benchmark starts, one after another."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Sequence

from hpcdp.errors import LaunchError
from hpcdp.launch.orphans import bound

ENDED = 124
"""The status of a job that has taken too long, as of timeout(1)."""

_ENDING_S = 20.0
"""So long a launcher may take to end its ranks."""


def run(command: Sequence[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``command``, with ``variables`` in its environment, to its end, or for ``timeout_s`` seconds.

    Nothing of it runs on then, nor when this process ends, however that may be: it would take time from what is
    measured next.
    """
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=bound(),
    )  # fmt: skip
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
            return subprocess.CompletedProcess(command, process.returncode, out, err)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_S)
            process.kill()
    return subprocess.CompletedProcess(command, ENDED, "", f"ended after {timeout_s:g} s")


def finished(what: str, where: str, command: Sequence[str], timeout_s: float, **variables: str) -> str:
    """What ``command`` has written, see `run`.

    Raises:
        LaunchError: its status is not 0.
    """
    done = run(command, timeout_s, **variables)
    if done.returncode:
        raise LaunchError(what, where=where, expected="status 0", got=f"{done.returncode}: {reason(done)}")
    return done.stdout


def reason(done: subprocess.CompletedProcess[str], known: str = "") -> str:
    """Why a job has failed: the first error that it tells of, else what is ``known``, else what it has said last."""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip(" -")]
    errors = [line for line in lines if re.match(r"hpcdp: |[\w.]+(Error|Exception)\b", line)]
    return next(filter(None, [*errors[:1], known, *lines[-1:], "it said nothing"]))
