"""The program of a server: ``mpirun -n 4 python train.py : -n 2 python -m hpcdp.kvstore.serve``.

It keeps keys for the workers, and ends when they have ended.
"""

from __future__ import annotations

import signal
import sys

from ..errors import LaunchError


def main() -> None:
    """Every server calls, while every worker calls `hpcdp.init`."""
    # A batch system or a launcher sends them to every process of a job, and what the workers do then is their affair.
    for sign in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sign, signal.SIG_IGN)
    from ..comm.startup import init_server
    from .handlers import serve

    try:
        whole = init_server()
    except LaunchError as error:  # on every process: each has said so
        sys.exit(f"hpcdp: {error}")
    serve(whole)


if __name__ == "__main__":
    main()
