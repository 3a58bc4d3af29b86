"""The program that mpirun starts instead of ssh to run a daemon in a container: ``container_agent FOLDER HOST WORD``.

The words are a shell command, as ssh takes them; HOST is a `hpcdp.launch.launchers.yarn.container_name`. The program
waits for the command's end in the container, writes its output and exits with its status.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import to_stderr
from .batch import replace
from .launchers.yarn import COMMAND, ENDED, WRITTEN

_POLL_S = 0.1


def main(argv: Sequence[str]) -> int:
    """Run the command in its container and return its exit status."""
    folder, *words = argv
    while words[:1] and words[0].startswith("-"):  # options of ssh
        del words[0]
    if not words or not (place := Path(folder, words[0])).is_dir():
        to_stderr(f"hpcdp: start a daemon of mpirun [{' '.join(words[:1])}]: no such container")
        return 255
    name = f"{socket.gethostname()}-{os.getpid()}"  # daemons start daemons, so agents run on several hosts
    replace(place / f"{name}{COMMAND}", " ".join(words[1:]))
    ended = place / f"{name}{ENDED}"
    while not ended.exists():
        if not place.exists():
            return 255
        time.sleep(_POLL_S)
    sys.stderr.write((place / f"{name}{WRITTEN}").read_text(errors="replace"))
    return int(ended.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
