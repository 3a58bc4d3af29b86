"""What mpirun takes for ssh: hands the command for a host to the launcher, whose guard there runs it.

A program of its own that imports nothing of this library, since one is started for every host:
``python agent.py SOCKET [OPTION ...] HOST COMMAND ...``.
"""

import json
import socket
import sys


def main() -> int:
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
