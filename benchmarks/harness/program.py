"""How the benchmarks that are programs of their own end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ...errors import ConfigError, HpcdpError
from ...launch.ending import end_early, fail


def run(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of ``main``, with 2 and one line on stderr where it raised an `HpcdpError`.

    What was asked wrongly is so on all ranks, and rank 0 says it; of another error every rank may speak.
    """
    try:
        status = main()
        sys.stdout.flush()
    except HpcdpError as error:
        status = fail(error, 2, by_all=isinstance(error, ConfigError))
    except (KeyboardInterrupt, OSError) as error:
        status = end_early(error, Path(sys.argv[0]).stem)
    raise SystemExit(status)
