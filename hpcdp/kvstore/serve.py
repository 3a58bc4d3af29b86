"""The program of a server: ``mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve``.

A server keeps keys for the workers, and ends after them.
"""

from __future__ import annotations

import signal
import sys

from ..errors import LaunchError


def main() -> None:
    """Run a server; every server calls, while every worker calls `hpcdp.init`."""
    # A batch system or launcher sends these signals to all processes of a job, and only workers handle them.
    for sign in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sign, signal.SIG_IGN)
    from ..comm.startup import init_server
    from .handlers import serve

    try:
        whole = init_server()
    except LaunchError as error:  # raised on every process
        sys.exit(f"hpcdp: {error}")
    serve(whole)


if __name__ == "__main__":
    main()
