"""The work between the messages of a repeated collective call: one kernel call before and after each message.

A call is a number of rounds, in each of which a rank sends a message, receives one, or both; see
`hpcdp.comm.message_rounds`. Stage i of a call checks the message received in round i - 1 and writes the message to send
in round i; the last stage writes the result. Arrays are taken by the addresses of their objects, see `shm_repeated`.
Everything else is in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numba import carray, njit

from .jit import kernel
from .shm_blocks import _pointer
from .shm_exchange import DIFFERENT, DONE, _copy, _finish, _scaled_copy
from .shm_repeated import OTHER, arrays_at, table_at, words_of

OTHER_FORM = 6
"""Return value besides those of `shm_exchange` and `shm_repeated`: the message is of the same call in another form."""

X, OUT, MEMORY = range(3)
"""Places of data: in the array that is sent, in the one that receives, or at an address."""
SCALE, KEEP, MINE_FIRST, OTHERS_FIRST, TAKE = range(5)
"""Results of a stage of a sum: the scaled array, the sum before, its sum with the received one in one of two orders, or
the received one.
"""

_STAGES, _MASK, _SIGNATURE, _FORM, _FACTORS, _HEAD = 0, 1, 2, 3, 4, 7
"""Words of a table: where the list of the stages' places begins; the bits of a message's first word that are equal in
equal calls, their value, and the second word; and for sums three factors.
"""
_RECEIVED, _SENT, _WORD = range(3)
"""Words of a stage: the addresses of the received message and of the one to send, 0 for none, and the latter's first
word. Then the number of its copies or sums. A copy has five words: place and position from where, place and position to
where, and the bytes. A sum has seven: how it is made, place and position of the sum before, the address of the received
one, place and position of the new one, and the number of elements.
"""


def words_of_stages(
    stages: Sequence[Sequence[int]], header: tuple[int, int, int], factors: Sequence[float] = (1, 1, 1)
) -> np.ndarray:
    """Return the further words of a table, see `shm_repeated.table_of`; ``header`` are `_MASK` and the two after it."""
    places = [_HEAD + end for end in accumulate((len(stage) for stage in stages), initial=len(stages))]
    head = [_HEAD, *header, *np.array(factors, np.float64).view(np.int64).tolist()]
    return np.array([*head, *places[:-1], *(word for stage in stages for word in stage)], np.int64)


@njit(inline="always")
def _begun(table, stage, x, out):  # type: ignore[no-untyped-def]
    # Return the words of the stage at ``table``, the word with the number of its copies or sums, and the addresses of
    # places; before them whether the arrays and the header of the received message are as expected. Write the header of
    # the message to send.
    known = table_at(table)
    x_at, out_at, _, _ = arrays_at(known, x, out)
    words = words_of(known)
    met = np.int64(OTHER) if x_at < 0 or out_at < 0 else np.int64(_checked(words, stage))
    return met, words, words[words[_STAGES] + stage] + _WORD + 1, (x_at, out_at, np.int64(0))


@njit(inline="always")
def _checked(words, stage):  # type: ignore[no-untyped-def]
    at = words[words[_STAGES] + stage]
    if words[at + _RECEIVED] != 0:
        header = carray(_pointer(words[at + _RECEIVED]), (2,), np.int64)
        if header[0] & words[_MASK] != words[_SIGNATURE]:
            return DIFFERENT
        if header[1] != words[_FORM]:
            return OTHER_FORM
    if words[at + _SENT] != 0:
        header = carray(_pointer(words[at + _SENT]), (2,), np.int64)
        header[0] = words[at + _WORD]
        header[1] = words[_FORM]
    return DONE


@kernel()
def move_at(table, stage, x, out):  # type: ignore[no-untyped-def]
    """Run a stage of a call that moves data from the array at ``x`` to that at ``out``.

    Args:
        table: the address of a table with `words_of_stages`.
        stage: the number of the stage.
        x: the address of an array's object.
        out: likewise.
    """
    met, words, at, places = _begun(table, stage, x, out)
    if met != DONE:
        return met
    for number in range(words[at]):
        first = at + 1 + 5 * number
        source, target = places[words[first]] + words[first + 1], places[words[first + 2]] + words[first + 3]
        nbytes = words[first + 4]
        if source != target:
            _copy(carray(_pointer(target), (nbytes,), np.uint8), carray(_pointer(source), (nbytes,), np.uint8))
    return DONE


@kernel()
def sum_at(table, one, stage, x, out):  # type: ignore[no-untyped-def]
    """Run a stage of a call that sums arrays like the one at ``x`` into the array at ``out``.

    Args:
        table: the address of a table with `words_of_stages`.
        one: 1 in the type of the arrays' elements.
        stage: the number of the stage.
        x: the address of an array's object.
        out: likewise; the same address for a sum in place.
    """
    met, words, at, places = _begun(table, stage, x, out)
    if met != DONE:
        return met
    factors = words[_FACTORS : _FACTORS + 3].view(np.float64)
    kind = type(one)
    for number in range(words[at]):
        first = at + 1 + 7 * number
        how, size = words[first], words[first + 6]
        mine = carray(_pointer(places[words[first + 1]] + words[first + 2]), (size,), kind)
        other = carray(_pointer(words[first + 3]), (size,), kind)
        target = carray(_pointer(places[words[first + 4]] + words[first + 5]), (size,), kind)
        if how == SCALE:
            _scaled_copy(target, mine, kind(factors[0]))
        elif how == KEEP:
            _copy(target, mine)
        elif how == TAKE:
            _copy(target, other)
        elif how == MINE_FIRST:
            for i in range(size):
                target[i] = mine[i] + other[i]
        else:
            for i in range(size):
                target[i] = other[i] + mine[i]
        if words[first + 4] == OUT:
            _finish(target, kind(factors[1]), kind(factors[2]))
    return DONE
