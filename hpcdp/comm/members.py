"""The processes of a job, as those of the same machine can look at them: nobody needs to answer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Member(NamedTuple):
    """A rank as the others know it."""

    rank: int
    host: str
    pid: int
    born: str
    """When its process began, as /proc puts it: a process of the same number may be another one."""
    shows_stacks: bool

    @property
    def state(self) -> str:
        """Of its process, a letter as proc(5) gives it; X: it has ended."""
        state, born = look_at(self.pid)
        return "X" if born != self.born or state == "Z" else state

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def look_at(pid: int) -> tuple[str, str]:
    """State and birth of a process; empty where there is none to be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", ""
    return fields[0], fields[19]
