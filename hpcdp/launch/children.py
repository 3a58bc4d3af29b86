"""Commands that might crash or hang, run as children with a limit, and what they say."""

from __future__ import annotations

import re
import subprocess

LIMIT_S = 60.0
_WRAPPED_FROM = 55
"""So many characters a line has at least that an MPI library has wrapped."""


def child(command: list[str], answer: str = "") -> tuple[int, str]:
    """Exit status of ``command``, ended with all its children at the limit, and its last line or what it failed of.

    Of a command that has succeeded it is the last line that begins with ``answer``, if there is one: MPI libraries may
    have the last word.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return 124, f"nothing for {LIMIT_S:.0f} s: it hangs"
    lines = [line.rstrip() for line in said.splitlines() if set(line.strip()) - {"-"}]
    if not lines:
        return process.returncode, ""
    if process.returncode != 0:
        return process.returncode, _last_reason(said)
    return 0, next((line for line in reversed(lines) if line.startswith(answer)), lines[-1]).strip()


def _last_reason(said: str) -> str:
    """The first sentence of the last message in ``said``: MPI libraries wrap theirs, a traceback ends in one line."""
    lines = [line.rstrip() for line in said.splitlines()]
    while not set(lines[-1].strip()) - {"-"}:
        lines.pop()
    first = len(lines) - 1
    while first > 0 and len(lines[first - 1]) >= _WRAPPED_FROM and not lines[first - 1].startswith((" ", "-")):
        first -= 1
    message = " ".join(line.strip() for line in lines[first:])
    return re.split(r"(?<=[a-z])\. (?=[A-Z])", message)[0]
