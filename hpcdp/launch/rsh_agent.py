"""The program that mpirun starts instead of ssh: it passes a host's command to the launcher, whose guard runs it.

It imports nothing of this library, because mpirun starts one process for every host:
``python rsh_agent.py SOCKET [OPTION ...] HOST COMMAND ...``.
"""

import json
import socket
import sys


def main() -> int:
    """Pass the command to the launcher and return its exit status, 255 without an answer."""
    path, *words = sys.argv[1:]
    while words[0].startswith("-"):
        words.pop(0)
    host, *command = words
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(path)
        launcher.sendall(json.dumps({"host": host, "command": " ".join(command)}).encode() + b"\n")
        status = launcher.recv(8)
    return int(status) if status else 255


if __name__ == "__main__":
    sys.exit(main())
