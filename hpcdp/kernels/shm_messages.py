"""Kernels of `comm.mailbox`: short messages through memory that a node's ranks share.

Each receiver has one queue, filled by all senders.

A queue is a ring of cache lines. A sender reserves the lines of a record by a compare-and-swap of the queue's tail,
writes the record, and sets its first word last, which the receiver polls. The receiver clears the first word of every
line before it moves the head, so a reserved record is not taken for a complete one. A record does not wrap around the
end of the ring: a record without a message fills the rest.

Records of one sender arrive in order. Long data stay in the memory of the sender, where the receiver reads them
(process_vm_readv(2)). It then sets a word that the sender polls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import kernel
from .shm_exchange import _memcpy, _pause, _word, load, read_memory, store

_LINE = 16
"""``int32`` words of a cache line."""
TAIL, HEAD = 0, 2 * _LINE
"""Words of a queue before its ring; apart, because different ranks write them, and the prefetcher fetches pairs."""
RING = 4 * _LINE
"""The first word of a queue's ring, which is 2 ** k cache lines long."""

_SENDER, _TAG, _NBYTES = 1, 2, 3
_PREFIX = 4
"""``int32`` words of a record before its message: its lines, the sender, the tag, the message's bytes."""
_FILLS = -1
"""In place of the sender: a record without a message."""

DONE, FULL = 0, 1
"""Return values of `push`."""
NOT_YET, OTHER, REFUSED = -1, -2, -3
"""Return values of `receive` besides a sender: no message, another one first, memory that cannot be read."""
_READ = 1
"""The answer to an offer of data that the receiver has read."""


@intrinsic
def _swap_if(typingctx: Any, counters: Any, index: Any, expected: Any, value: Any) -> Any:
    """Set a word to ``value`` if it is ``expected``, atomically; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        pair = builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), ir.IntType(8))

    return types.uint8(counters, types.intp, types.int32, types.int32), generate


@intrinsic
def _bytes_at(typingctx: Any, array: Any, index: Any) -> Any:
    """Return the address of byte ``index`` of an array of any dtype."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0]).data
        return builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [args[1]])

    return types.voidptr(array, types.intp), generate


@kernel()
def push(queue, me, tag, header, data):  # type: ignore[no-untyped-def]
    """Send a message to another rank of the node, or to this one.

    Args:
        queue: shape ``(RING + 16 * lines,)``, int32, queue; the receiver's. ``lines`` is a power of two.
        me: the sender.
        tag: a number from 0 to 2^31 - 1.
        header: shape ``(k,)``, int64; the first part of the message.
        data: shape ``(nbytes,)``, uint8; the second part.

    Returns:
        `DONE`, or `FULL` if the queue is full; then nothing has changed.
    """
    lines = np.int32((queue.size - RING) // _LINE)
    nbytes = 8 * header.size + data.size
    need = np.int32((4 * _PREFIX + nbytes + 4 * _LINE - 1) // (4 * _LINE))
    while True:
        tail = load(queue, TAIL)
        at = np.int32(tail & np.int32(lines - 1))
        filling = np.int32(lines - at if at + need > lines else 0)
        end = np.int32(tail + filling + need)
        if np.int32(end - load(queue, HEAD)) > lines:
            return FULL
        if _swap_if(queue, TAIL, tail, end):
            break
    if filling:
        record = RING + at * _LINE
        queue[record + _SENDER] = _FILLS
        store(queue, record, filling)
        at = 0
    record = RING + at * _LINE
    queue[record + _SENDER] = me
    queue[record + _TAG] = tag
    queue[record + _NBYTES] = nbytes
    _memcpy(_bytes_at(queue, 4 * (record + _PREFIX)), _bytes_at(header, 0), 8 * header.size)
    _memcpy(_bytes_at(queue, 4 * (record + _PREFIX) + 8 * header.size), _bytes_at(data, 0), data.size)
    store(queue, record, need)
    return DONE


@njit(inline="always")
def _first_record(queue):  # type: ignore[no-untyped-def]
    # Only the receiver writes the head.
    lines = np.int32((queue.size - RING) // _LINE)
    while True:
        head = queue[HEAD]
        record = RING + (head & np.int32(lines - 1)) * _LINE
        length = load(queue, record)
        if length == 0:
            return -1
        if queue[record + _SENDER] != _FILLS:
            return record
        queue[record] = 0
        store(queue, HEAD, np.int32(head + length))


@njit(inline="always")
def _drop_record(queue, record):  # type: ignore[no-untyped-def]
    length = queue[record]
    for line in range(length):
        queue[record + line * _LINE] = 0
    store(queue, HEAD, np.int32(queue[HEAD] + length))


@kernel()
def receive(queue, answers, source, tag, header, offer, data, spins):  # type: ignore[no-untyped-def]
    """Receive the next message if it is an array as expected; poll ``spins`` times for it.

    Args:
        queue: as for `push`, this rank's; no other thread may use it meanwhile.
        answers: as for `answer`.
        source: the sender, or -1 for any.
        tag: as for `push`.
        header: shape ``(k,)``, int64; the expected first part of the message, where -1 stands for any number.
        offer: 3 if the data stay with their sender: then its process, their address and the place of the `answer`
            follow the header; else 0.
        data: shape ``(nbytes,)``, uint8; gets the data.
        spins: polls.

    Returns:
        The sender, `NOT_YET`, `OTHER`, or `REFUSED`. The message is taken in the first case only.
    """
    record = _first_record(queue)
    for _ in range(spins):
        if record >= 0:
            break
        _pause()
        record = _first_record(queue)
    if record < 0:
        return NOT_YET
    sender = queue[record + _SENDER]
    first = record + _PREFIX
    nbytes = 8 * (header.size + offer) + (0 if offer else data.size)
    if (source >= 0 and sender != source) or queue[record + _TAG] != tag or queue[record + _NBYTES] != nbytes:
        return OTHER
    numbers = queue[first : first + 2 * (header.size + offer)].view(np.int64)
    for i in range(header.size):
        if header[i] >= 0 and numbers[i] != header[i]:
            return OTHER
    if offer:
        at = header.size
        if not read_memory(numbers[at], numbers[at + 1], data):
            return REFUSED
        store(answers, numbers[at + 2], np.int32(_READ))
    else:
        _memcpy(_bytes_at(data, 0), _bytes_at(queue, 4 * first + 8 * header.size), data.size)
    _drop_record(queue, record)
    return sender


@kernel()
def await_message(queue, spins):  # type: ignore[no-untyped-def]
    """Poll ``spins`` times until there is a message in this rank's queue, shape as for `push`; return whether it is."""
    for _ in range(spins):
        if load(queue, TAIL) != queue[HEAD]:
            return True
        _pause()
    return False


@kernel()
def pop(queue, message, facts):  # type: ignore[no-untyped-def]
    """Remove the first record of this rank's queue.

    Args:
        queue: as for `receive`.
        message: shape ``(most,)``, uint8, as long as any message; gets it.
        facts: shape ``(2,)``, int64; gets the sender and the tag.

    Returns:
        The bytes of the message, or `NOT_YET`.
    """
    record = _first_record(queue)
    if record < 0:
        return NOT_YET
    facts[0], facts[1] = queue[record + _SENDER], queue[record + _TAG]
    nbytes = np.int64(queue[record + _NBYTES])
    _memcpy(_bytes_at(message, 0), _bytes_at(queue, 4 * (record + _PREFIX)), nbytes)
    _drop_record(queue, record)
    return nbytes


@kernel()
def answer(answers, place, value):  # type: ignore[no-untyped-def]
    """Set the word ``place`` of ``answers``, int32, shared by the node's ranks: the answer to an offer."""
    store(answers, place, np.int32(value))
