"""How the benchmarks that are programs of their own end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..errors import ConfigError, HpcdpError
from ..launch.ending import fail


def run(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of ``main``, with 2 and one line on stderr where it raised an `HpcdpError`.

    What was asked wrongly is so on all ranks, and rank 0 says it; of another error every rank may speak.
    """
    try:
        raise SystemExit(main())
    except HpcdpError as error:
        raise SystemExit(fail(error, 2, by_all=isinstance(error, ConfigError))) from None
