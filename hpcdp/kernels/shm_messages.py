"""Kernels of `comm.node_messages`: short messages through memory that a node's ranks share.

Each receiver has one queue, filled by all senders.

A queue is a ring of cache lines. A sender reserves the lines of a record by a compare-and-swap of the queue's tail,
writes the first segment of the message, and then sets the record's first word, which the receiver polls. It counts
further segments in the record, which the receiver copies meanwhile. The receiver clears the first word of every line
before it moves the head, so a reserved record is not taken for one that has begun. A record does not wrap around the
end of the ring: a record without a message fills the rest.

Records of one sender arrive in order. Long data stay in the memory of the sender, which offers them in a few words that
both ranks change. The receiver notes there where its array is. Then it reads the data from their first byte on
(process_vm_readv(2)), while the sender, if it waits, writes them from their last byte on (process_vm_writev(2)): the
copy takes both cores, and each byte moves between them once. Each rank claims a part of the rest before it copies that
part, by a compare-and-swap, so the receiver waits for nothing but a part that the sender has claimed. It answers when
the data are complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from .copies import _memcpy, _word, copy_bytes, fence, stream_bytes
from .jit import kernel
from .shm_blocks import _pointer
from .shm_exchange import READ_CALL, WRITE_CALL, _pause, add, copy_memory, load, store
from .shm_repeated import ANY, arrays_at, table_at, table_of, words_of

_LINE = 16
"""``int32`` words of a cache line."""
TAIL, HEAD = 0, 2 * _LINE
"""Words of a queue before its ring; apart, because different ranks write them, and the prefetcher fetches pairs."""
RING = 4 * _LINE
"""The first word of a queue's ring, which is 2 ** k cache lines long."""

_SENDER, _TAG, _NBYTES, _THERE, _BEGIN = range(1, 6)
_PREFIX = 6
"""``int32`` words of a record before its message: its lines, the sender, the tag, the message's bytes, how many of them
are there, and the word at which the message begins.
"""
_SEGMENT_NBYTES = 8 << 10
"""A receiver copies such a segment of a message while the sender writes the next one. Data as long begin a line."""
_STREAMED_NBYTES = 16 << 10
"""The same for segments that are written past the caches, each of which ends with a fence."""
_FAR_TICKS = 1150 if binding.get_host_cpu_name() == "znver3" else 0
"""Cycles of the first segment from which the other core is taken to have another L3 cache: 0.5 us.

Then further segments are written past the caches. On an AMD EPYC (Zen 3) a message of 256 KB takes 16 instead of 28 us
if a line takes 210 ns between the cores (the first segment 1,200 to 2,400 cycles), but 18 instead of 11 us if it takes
50 (420 to 1,130). Zero on other processors, where nothing was measured: all segments are copied plainly.
"""
_FILLS = -1
"""In place of the sender: a record without a message."""

DONE, FULL = 0, 1
"""Return values of `push`."""
NOT_YET, OTHER = -1, -2
"""Return values of `receive` besides a sender: no message, or another one first, or another array."""

ANSWER, _CLAIMS, _WRITTEN, _IS_UNREADABLE, _IS_UNWRITABLE = range(5)
"""``int32`` words of an offer: the answer, the units that each rank has claimed (the receiver in the lower 16 bits),
those that the sender has written, whether the receiver cannot read the data, and whether the sender cannot write them.
"""
_SENDER_PROCESS, _DATA, _DATA_NBYTES, _RECEIVER_PROCESS, _ARRAY = range(3, 8)
"""Its ``int64`` words: the process of the sender, and the address and the length of the data there; the process of the
receiver, and the address of its array.
"""
OFFER_WORDS = 2 * _LINE
"""``int32`` words from one offer to the next."""
READ, SEND_IT, _BEGUN = 1, 2, 3
"""Answers to an offer: the receiver has the data, cannot read them, or has begun. Zero without an answer."""
QUEUE_FULL = -1
"""The return value of `push_offer` for a message that has not been sent."""
_UNIT_NBYTES, _MOST_UNITS = 4096, (1 << 15) - 1
"""The data are copied in units of so many bytes, or a multiple for longer data, which have at most so many units."""
_LEAST_CLAIM_NBYTES, _MOST_CLAIM_NBYTES = 32 << 10, 1 << 20
"""Limits of a claim: a system call costs 0.3 us, and one rank waits for the last claim of the other.

Within them a sender claims half of what is left, and a receiver a quarter, because a read of lines that the other core
has written takes twice as long as a write.
"""


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


@intrinsic
def _ticks(typingctx: Any) -> Any:
    """Return the processor's cycle counter, or 0 without `_FAR_TICKS`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        if not _FAR_TICKS:
            return word(0)
        kind = ir.FunctionType(word, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


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
    nbytes, begin = 8 * header.size + data.size, _PREFIX
    if data.size >= _SEGMENT_NBYTES:
        begin += -(_PREFIX + 2 * header.size) % _LINE
    need = np.int32((4 * begin + nbytes + 4 * _LINE - 1) // (4 * _LINE))
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
    queue[record + _BEGIN] = begin
    _memcpy(_bytes_at(queue, 4 * (record + begin)), _bytes_at(header, 0), 8 * header.size)
    place = queue[record + begin + 2 * header.size :].view(np.uint8)
    first, is_far = 0, False
    while True:
        last = min(first + (_STREAMED_NBYTES if is_far else _SEGMENT_NBYTES), data.size)
        if is_far:
            stream_bytes(place[first:last], data[first:last])
            fence()
        else:
            began = _ticks()
            _copy_segment(place, data, first, last)
            is_far = first == 0 and _ticks() - began > _FAR_TICKS
        store(queue, record + _THERE, np.int32(8 * header.size + last))
        if first == 0:
            store(queue, record, need)
        if last == data.size:
            return DONE
        first = last


@kernel()
def _copy_segment(out, x, first, last):  # type: ignore[no-untyped-def]
    if last - first < _SEGMENT_NBYTES // 8:
        _memcpy(_bytes_at(out, first), _bytes_at(x, first), last - first)
    else:
        copy_bytes(out[first:last], x[first:last])


@kernel()
def _take_bytes(out, queue, record, start, spins):  # type: ignore[no-untyped-def]
    """Copy a message from byte ``start`` on, while it is written; return whether it has come within ``spins`` polls."""
    place = queue[record + queue[record + _BEGIN] :].view(np.uint8)[start:]
    taken = 0
    while taken < out.size:
        there = min(load(queue, record + _THERE) - start, out.size)
        if there > taken:
            _copy_segment(out, place, taken, there)
            taken = there
        elif spins <= 0:
            return False
        else:
            spins -= 1
            _pause()
    return True


@kernel()
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


@kernel()
def _drop_record(queue, record):  # type: ignore[no-untyped-def]
    length = queue[record]
    for line in range(length):
        queue[record + line * _LINE] = 0
    store(queue, HEAD, np.int32(queue[HEAD] + length))


@kernel()
def _unit_of(nbytes):  # type: ignore[no-untyped-def]
    return _UNIT_NBYTES * max(1, -(-nbytes // (_UNIT_NBYTES * _MOST_UNITS)))


@kernel()
def _claim(offer, nbytes, is_sender, divisor):  # type: ignore[no-untyped-def]
    """Return the limits of a part, in bytes, that this rank now has to copy; an empty one if all are claimed."""
    unit = _unit_of(nbytes)
    units = -(-nbytes // unit)
    while True:
        claims = load(offer, _CLAIMS)
        read, written = claims & 0xFFFF, claims >> 16
        rest = units - read - written
        if rest <= 0:
            return 0, 0
        share = min(rest // divisor, _MOST_CLAIM_NBYTES // unit)
        count = min(rest, max(share, _LEAST_CLAIM_NBYTES // unit, 1))
        if _swap_if(offer, _CLAIMS, claims, np.int32(claims + (count << 16 if is_sender else count))):
            first = units - written - count if is_sender else read
            return first * unit, min((first + count) * unit, nbytes)


@kernel()
def _write_part(offer):  # type: ignore[no-untyped-def]
    """Write a part of the data to the receiver, if it has begun to read them; return whether there was one."""
    if load(offer, ANSWER) != _BEGUN or offer[_IS_UNWRITABLE]:
        return False
    places = offer.view(np.int64)
    nbytes = places[_DATA_NBYTES]
    first, last = _claim(offer, nbytes, True, 2)
    if first == last:
        return False
    process, there, here = places[_RECEIVER_PROCESS], places[_ARRAY] + first, places[_DATA] + first
    if not copy_memory(WRITE_CALL, process, there, here, last - first):
        store(offer, _IS_UNWRITABLE, np.int32(1))
        return False
    add(offer, _WRITTEN, np.int32(-(-(last - first) // _unit_of(nbytes))))
    return True


@kernel()
def give(offer, spins):  # type: ignore[no-untyped-def]
    """Write offered data to the receiver, which reads them meanwhile, and wait for its answer.

    Args:
        offer: shape ``(OFFER_WORDS,)``, int32, shared by the node's ranks; it may not end meanwhile in another thread.
        spins: polls.

    Returns:
        The answer; 0 or `_BEGUN` if it has not come.
    """
    state = np.int32(0)
    for _ in range(spins):
        while _write_part(offer):
            pass
        state = load(offer, ANSWER)
        if state in (READ, SEND_IT):
            break
        _pause()
    return state


@kernel()
def push_offer(queue, me, tag, header, number, offer, process, data, is_next, spins):  # type: ignore[no-untyped-def]
    """Send a message that offers data to another rank; then `give` them.

    Args:
        queue: as for `push`.
        me: as for `push`.
        tag: as for `push`.
        header: as for `push`; the number of the offer follows it.
        number: shape ``(1,)``, int64; the number of the offer.
        offer: as for `give`.
        process: the number of this process.
        data: shape ``(nbytes,)``, uint8; the data.
        is_next: False if earlier messages wait because the queue is full.
        spins: as for `give`.

    Returns:
        What `give` returns; `QUEUE_FULL` if the message has to wait, too, and must be sent by `push`.
    """
    places = offer.view(np.int64)
    places[_SENDER_PROCESS], places[_DATA], places[_DATA_NBYTES] = process, data.ctypes.data, data.size
    store(offer, ANSWER, np.int32(0))
    if not is_next or push(queue, me, tag, header, number.view(np.uint8)) == FULL:
        return np.int32(QUEUE_FULL)
    return give(offer, spins)


@kernel()
def take(offer, data, me, spins, own):  # type: ignore[no-untyped-def]
    """Receive offered data, of which the sender may write a part; call it again until it returns an answer.

    Args:
        offer: as for `give`.
        data: shape ``(nbytes,)``, uint8; gets the data.
        me: the number of this process.
        spins: polls for the part that the sender writes.
        own: an offer of this rank, to `give` meanwhile; zeros if there is none.

    Returns:
        The answer that it has given, `READ` or `SEND_IT`; `_BEGUN` if the sender has not written its part yet.
    """
    places, here, nbytes = offer.view(np.int64), np.int64(data.ctypes.data), data.size
    if load(offer, ANSWER) != _BEGUN:
        places[_RECEIVER_PROCESS], places[_ARRAY] = me, here
        offer[_CLAIMS] = 0
        offer[_WRITTEN] = 0
        offer[_IS_UNREADABLE] = 0
        offer[_IS_UNWRITABLE] = 0
        store(offer, ANSWER, np.int32(_BEGUN))
    process, there = places[_SENDER_PROCESS], places[_DATA]
    divisor = 1 if own.view(np.int64)[_DATA_NBYTES] else 4
    while True:
        first, last = _claim(offer, nbytes, False, divisor)
        if first == last:
            break
        if offer[_IS_UNREADABLE] == 0:
            is_read = copy_memory(READ_CALL, process, there + first, here + first, last - first)
            offer[_IS_UNREADABLE] = np.int32(not is_read)
    claims = load(offer, _CLAIMS)
    for _ in range(spins + 1):
        is_left = load(offer, _IS_UNWRITABLE) != 0
        if is_left:
            first = (claims & 0xFFFF) * _unit_of(nbytes)
            if not copy_memory(READ_CALL, process, there + first, here + first, nbytes - first):
                offer[_IS_UNREADABLE] = 1
        if is_left or load(offer, _WRITTEN) == claims >> 16:
            state = SEND_IT if offer[_IS_UNREADABLE] else READ
            store(offer, ANSWER, np.int32(state))
            return state
        _write_part(own)
        _pause()
    return _BEGUN


@kernel()
def receive(queue, source, tag, header, offers, answer, data, me, spins, own):  # type: ignore[no-untyped-def]
    """Receive the next message if it is an array as expected; poll ``spins`` times for it.

    Args:
        queue: as for `push`, this rank's; no other thread may use it meanwhile.
        source: the sender, or -1 for any.
        tag: as for `push`.
        header: shape ``(k,)``, int64; the expected first part of the message, where -1 stands for any number.
        offers: shape ``(count, OFFER_WORDS)``, int32; all offers of the node's ranks.
        answer: shape ``(2,)``, int64, if the data are an offer, else ``(0,)``; gets what `take` returns, and the number
            of the offer.
        data: shape ``(nbytes,)``, uint8; gets the data, if `take` returns `READ`.
        me: as for `take`.
        spins: polls, also for the sender's part of the data, and then for the answer to ``own``.
        own: as for `take`.

    Returns:
        The sender, `NOT_YET` or `OTHER`. The message is taken in the first case only.
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
    first = record + queue[record + _BEGIN]
    words = header.size + min(answer.size, 1)
    nbytes = 8 * words + (0 if answer.size else data.size)
    if (source >= 0 and sender != source) or queue[record + _TAG] != tag or queue[record + _NBYTES] != nbytes:
        return OTHER
    numbers = queue[first : first + 2 * words].view(np.int64)
    for i in range(header.size):
        if header[i] >= 0 and numbers[i] != header[i]:
            return OTHER
    if answer.size:
        answer[1] = numbers[header.size]
        _drop_record(queue, record)
        answer[0] = take(offers[answer[1]], data, me, spins, own)
        give(own, spins if own.view(np.int64)[_DATA_NBYTES] else 0)
    else:
        if not _take_bytes(data, queue, record, 8 * header.size, spins):
            return NOT_YET
        _drop_record(queue, record)
    return sender


def message_table(dtype, size, queue, rank, tag, header):  # type: ignore[no-untyped-def]
    """Return the table of `push_at` and `receive_at` for arrays of one dtype and size.

    ``rank`` is the sender; other arguments are those of `push` and `receive`. The caller keeps the queue.
    """
    return table_of((dtype, size, None), None, ANY, [queue.ctypes.data, queue.size, rank, tag, *header.tolist()])


@kernel()
def push_at(table, x):  # type: ignore[no-untyped-def]
    """Run `push` for the array at the address ``x``, see `shm_repeated`; return `OTHER`, too, for another one."""
    known = table_at(table)
    at, _, _, nbytes = arrays_at(known, x, x)
    if at < 0:
        return OTHER
    words = words_of(known)
    queue = carray(_pointer(words[0]), (words[1],), np.int32)
    return push(queue, words[2], words[3], words[4:], carray(_pointer(at), (nbytes[0],), np.uint8))


@kernel()
def receive_at(table, out, spins):  # type: ignore[no-untyped-def]
    """Run `receive` of data within the message, for the array at the address ``out``; see `push_at`."""
    known = table_at(table)
    at, _, _, nbytes = arrays_at(known, out, out)
    if at < 0:
        return OTHER
    words = words_of(known)
    queue = carray(_pointer(words[0]), (words[1],), np.int32)
    offers = carray(_pointer(words[0]), (0, OFFER_WORDS), np.int32)
    answer, data = carray(_pointer(words[0]), (0,), np.int64), carray(_pointer(at), (nbytes[0],), np.uint8)
    return receive(queue, words[2], words[3], words[4:], offers, answer, data, 0, spins, offers[0])


@kernel()
def swap_at(sending, receiving, x, out, spins):  # type: ignore[no-untyped-def]
    """Run `push_at` for the array at the address ``x``, and then `receive_at` for that at ``out``, with their tables.

    Returns:
        The sender; `OTHER` if nothing was done, `NOT_YET` if only ``x`` was sent.
    """
    places = table_at(receiving)
    at, _, _, _ = arrays_at(places, out, out)
    if at < 0 or push_at(sending, x) != DONE:
        return OTHER
    return max(receive_at(receiving, out, spins), NOT_YET)


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
        The bytes of the message, or `NOT_YET`, also while it is written.
    """
    record = _first_record(queue)
    if record < 0:
        return NOT_YET
    facts[0], facts[1] = queue[record + _SENDER], queue[record + _TAG]
    nbytes = np.int64(queue[record + _NBYTES])
    if not _take_bytes(message[:nbytes], queue, record, 0, 0):
        return NOT_YET
    _drop_record(queue, record)
    return nbytes
