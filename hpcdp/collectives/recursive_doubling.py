"""Allreduce by recursive doubling: pairs of ranks at distances 1, 2, 4 and so on exchange all of it, for short arrays.

After log2 n steps every rank has the whole sum, so no result has to come back::

    rank             0          1          2          3        holds after the step
    distance 1       0 <------> 1          2 <------> 3        the sum of two ranks
    distance 2       0 <-----------------> 2                   the sum of all
                                1 <-----------------> 3

At the head of a message goes the signature of the call, so ranks that have called different things notice it by the
same messages: between nodes no other algorithm does without a comparison before (`hpcdp.comm.consistency`, which also
says what becomes of ranks beyond a power of two). Long arrays go one piece after another.

Sent per rank, for S bytes a piece: log2 p messages of S + 16 bytes, p the largest power of two up to n; a rank that has
a partner beyond p 1 more, and its partner 1 in all.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section
4.5.
"""

from __future__ import annotations

import numpy as np

from ..comm import Reduction, World
from ..comm.communicator import Steps
from ..comm.consistency import Call, Calls


def allreduce(x: np.ndarray, op: Reduction, world: World, call: Call) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks.

    Raises:
        MismatchError: ranks have made another ``call``.
    """
    calls, total = Calls.of(world), op.widened(x)
    if calls.memory is not None:
        calls.memory.agree(call)
    calls.messages.agree(call, total, op)
    op.finish(total, world.size, x)


def allreduce_steps(x: np.ndarray, op: Reduction, world: World, call: Call) -> Steps:
    """`allreduce` as a machine."""
    calls, total = Calls.of(world), op.widened(x)
    if calls.memory is None:
        return _then_finished(calls.messages.steps(call, total, op), total, x, op, world.size)
    return _compared_in_memory(calls.memory.steps(call), calls, call, total, x, op, world.size)


def _compared_in_memory(
    comparison: Steps, calls: Calls, call: Call, total: np.ndarray, x: np.ndarray, op: Reduction, n: int
) -> Steps:
    yield from comparison
    yield from _then_finished(calls.messages.steps(call, total, op), total, x, op, n)


def _then_finished(machine: Steps, total: np.ndarray, x: np.ndarray, op: Reduction, n: int) -> Steps:
    yield from machine
    op.finish(total, n, x)
