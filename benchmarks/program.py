"""How the benchmarks that are programs of their own read their line, and end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ..errors import ConfigError, HpcdpError


def run(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of ``main``, with 2 and one line on stderr where it raised an `HpcdpError`.

    A rank of a job ends without MPI_Finalize, which would wait for all ranks. What was asked wrongly is so on all, and
    rank 0 says it; of another error every rank may speak, rank 0 first, and mpirun ends those that would repeat it.
    """
    try:
        raise SystemExit(main())
    except HpcdpError as error:
        from ..launch.local import launched_rank

        rank = launched_rank()
        by_all = isinstance(error, ConfigError)
        if rank:
            time.sleep(1.0 if by_all else 0.2)
        if not (rank and by_all):
            print(f"hpcdp: {error}", file=sys.stderr, flush=True)
        if rank is not None:
            sys.stdout.flush()
            os._exit(2)
        raise SystemExit(2) from None
