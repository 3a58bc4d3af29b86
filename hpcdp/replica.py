"""Floor 0: replica, the number of the model replica that this process computes. Imports: nothing.

Layers that draw random numbers mix it into their seeds: replicas draw different numbers, and ranks that hold one
replica together draw the same ones. It is 0 before ``hpcdp.init()``, then the rank, and under tensor or pipeline
parallelism the lowest rank of those that share the replica.
"""

from __future__ import annotations

import threading

_number = 0
_of_thread = threading.local()


def replica_number() -> int:
    """Return the number of the replica that this thread computes."""
    found: int = getattr(_of_thread, "number", _number)
    return found


def enter_replica(number: int) -> None:
    """Set the number of this process, or of this thread where it has a number of its own."""
    global _number
    if hasattr(_of_thread, "number"):
        _of_thread.number = number
    else:
        _number = number


def enter_replica_of_thread(number: int) -> None:
    """Give this thread a number of its own, as a rank that is a thread needs."""
    _of_thread.number = number
