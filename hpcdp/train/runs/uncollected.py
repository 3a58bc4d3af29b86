"""Python's garbage collector, at rest while a program starts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked through for garbage meanwhile, where this process has not switched that off itself.

    Modules and compiled kernels make hundreds of thousands of objects that stay: to look through them over and over was
    a tenth of the time of a short job.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
