"""The protocol of servers: placement of keys, messages, and values in shared memory.

Which server keeps which part of a key: a pure function of the order in which keys are made.

Small keys lie whole on the server that keeps the fewest bytes; large ones are cut in equal parts, one a server, so that
each takes its share of what all workers send (Li et al., "Scaling distributed machine learning with the parameter
server", 2014, section 4.2; there by hashes, whose servers are unevenly loaded).

What workers and servers send each other: a header of fixed length, then the array, codes, or text, byte for byte.

Whatever arrives is checked before it is used; nothing is unpickled. Numbers are little-endian. What a message of an MPI
library cannot carry at once over TCP follows its header in pieces: of long messages both ways on one link, each side's
permission to go on would queue behind the other's data.

A part of a key in the memory of a node, which every rank there reads and changes by itself, under a lock.

A count tells its version, and is odd while somebody changes it: the kernel frees the lock of a rank that dies then, and
the next one sees by the count that the value is half new.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ..comm.communicator import bounds
from ..comm.shared_memory import NodeLocks, NodeMemory
from ..comm.tasks import MESSAGE_NBYTES, segments
from ..errors import HpcdpError, MismatchError
from ..optim import Optimizer
from .arguments import STORABLE
from .updaters import apply_rule, new_state

SPLIT_NBYTES = 4 << 20
"""From so many bytes on a key is cut: below, agreeing on an order among servers costs more than sharing saves."""

MOST_NBYTES = 512 << 20
"""Of one part, so that a message of it counts its bytes in 32 bits."""


class ValuePart(NamedTuple):
    """Elements ``first`` to ``last``, the latter excluded, of a flat key, and the server that keeps them."""

    server: int
    first: int
    last: int


class Placement:
    """Places one key after another.

    Args:
        servers: their ranks.
        splits: whether large keys are cut; in one node nobody is asked, and one lock is better than several.
    """

    def __init__(self, servers: Sequence[int], splits: bool) -> None:
        self._servers, self._splits = list(servers), splits
        self.nbytes = dict.fromkeys(servers, 0)
        """That each server keeps."""

    def place(self, count: int, itemsize: int, width: int = 1) -> list[ValuePart]:
        """The parts of the next key, in order; at least one. They are cut between rows of ``width`` elements."""
        pieces = -(-count * itemsize // MOST_NBYTES) or 1
        if self._splits and count * itemsize >= SPLIT_NBYTES:
            pieces = -(-pieces // len(self._servers)) * len(self._servers)
        num_rows = count // width
        ends = [width * end for end in bounds(num_rows, min(pieces, max(num_rows, 1)))]
        parts = []
        for first, last in itertools.pairwise(ends):
            server = min(self._servers, key=self.nbytes.__getitem__)
            self.nbytes[server] += (last - first) * itemsize
            parts.append(ValuePart(server, first, last))
        return parts


VERSION = 1
_HEADER = struct.Struct("<4sBBBBHHIQqqdIQ4x")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"hkvs"
DTYPES = STORABLE
"""What a message can carry; of other dtypes its bytes are text or codes."""


NO_STATE = 2**32 - 1
"""As `Message.which`: only how often a key was updated."""
VALUE = 2**32 - 2
"""As `Message.which`, to write: the value itself."""


class MessageKind(IntEnum):
    """What a message asks for, or answers."""

    PUSH = 1
    PULL = 2
    PUSHPULL = 3
    TICKET = 4
    TAKE = 5
    READ_STATE = 6
    WRITE_STATE = 7
    CLOCK = 8
    GONE = 9
    COMMAND = 10
    DONE = 11
    """The answer to all of these."""
    FAILED = 12
    """Instead of it: a text says why."""
    SCHEDULE = 13
    """A request, too: the sender's learning rate from now on, as JSON."""
    HELD = 14
    """Before the answer to a push: by whom it is held back."""
    LEAVE = 15
    """The sender asks for nothing of a store any more; after all workers have said so its keys are dropped."""
    PASS = 16
    """The sender has nothing to push of a key this time, and holds nobody back by that."""


@dataclass
class Message:
    """One message; see `Kind`."""

    kind: MessageKind
    store: int = 0
    key: int = 0
    """The number of a key, in the order of `init`."""
    part: int = 0
    request: int = 0
    """By which the answer is known; of its sender's choice."""
    ticket: int = -1
    """When to take effect, among the operations of a key that lies in several parts; -1 where that is at once."""
    number: int = 0
    """A version, or what else `kind` says."""
    rate: float = float("nan")
    """The learning rate of the moment; NaN: as a schedule says. Of an answer to a push: how long it was held back."""
    which: int = 0
    """Of the optimizer's states, in the order of their names."""
    coded: bool = False
    """Whether ``payload`` is what a codec made."""
    payload: np.ndarray | None = None
    """Contiguous, one of `DTYPES`."""

    def encode(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """As bytes, dtype uint8: a message, and the pieces that follow it, which are views of a long payload."""
        body = np.empty(0, np.uint8) if self.payload is None else self.payload
        data = body.reshape(-1).view(np.uint8)
        follows = HEADER_NBYTES + data.size > MESSAGE_NBYTES
        message = np.empty(HEADER_NBYTES + (0 if follows else data.size), np.uint8)
        _HEADER.pack_into(
            message.data, 0, _MAGIC, VERSION, self.kind, DTYPES.index(body.dtype), self.coded, self.store, self.part,
            self.key, self.request, self.ticket, self.number, self.rate, self.which, data.size if follows else 0,
        )  # fmt: skip
        if follows:
            return message, pieces(data)
        message[HEADER_NBYTES:] = data
        return message, []

    def text(self) -> str:
        """The payload of a message of text."""
        return "" if self.payload is None else self.payload.tobytes().decode(errors="replace")

    @classmethod
    def of_text(cls, kind: MessageKind, text: str, **fields: int) -> Message:
        """One that carries text; what UTF-8 cannot say, as halves of surrogate pairs in names of files, is escaped."""
        return cls(kind, payload=np.frombuffer(text.encode(errors="backslashreplace"), np.uint8), **fields)  # type: ignore[arg-type]


def pieces(data: np.ndarray) -> list[np.ndarray]:
    """Views of a long payload's bytes, in the order in which they are sent."""
    return segments(data, MESSAGE_NBYTES)


def following_nbytes(message: np.ndarray) -> int:
    """How many bytes follow a message in `pieces`; 0 where they are in it, or it is none."""
    if message.size != HEADER_NBYTES or bytes(message[:4]) != _MAGIC:
        return 0
    nbytes: int = _HEADER.unpack_from(message.data)[-1]
    return nbytes if MESSAGE_NBYTES - HEADER_NBYTES < nbytes <= MOST_NBYTES else 0


def decode(message: np.ndarray, rest: np.ndarray | None = None) -> Message:
    """A message from its bytes, dtype uint8, and what has followed; the payload is a view of them.

    Raises:
        MismatchError: these are not what `Message.encode` makes, in this version.
    """
    if message.size < HEADER_NBYTES:
        raise MismatchError(
            "key-value store message", expected=f"{HEADER_NBYTES} bytes or more", got=f"{message.size} bytes"
        )
    magic, version, kind, dtype, coded, store, part, *fields, follow = _HEADER.unpack_from(message.data)
    if magic != _MAGIC or version != VERSION:
        got = f"{bytes(magic)!r}, version {version}"
        raise MismatchError("key-value store message", expected=f"{_MAGIC!r}, version {VERSION}", got=got)
    if kind not in set(MessageKind) or dtype >= len(DTYPES) or coded > 1:
        got = f"kind {kind}, dtype {dtype}, coded {coded}"
        raise MismatchError("key-value store message", expected="a known kind and dtype", got=got)
    body = message[HEADER_NBYTES:] if rest is None else rest
    if follow != (0 if rest is None else rest.size):
        raise MismatchError("key-value store message", expected="bytes that follow", got=f"a length of {follow}")
    if body.size % DTYPES[dtype].itemsize:
        got = f"{body.size} bytes"
        raise MismatchError("key-value store message", expected=f"whole elements of {DTYPES[dtype]}", got=got)
    payload = np.frombuffer(body, DTYPES[dtype]) if body.size else np.empty(0, DTYPES[dtype])
    key, request, ticket, number, rate, which = fields
    return Message(MessageKind(kind), store, key, part, request, ticket, number, rate, which, bool(coded), payload)


_COUNT, _HOLDER, _STEPS, _TICKETS, _TURN, _NUMBERS = 0, 1, 2, 3, 4, 8
AWAY = np.iinfo(np.int64).max
"""The clock of a worker that holds nobody back."""
BACK = -1
"""Instead of a clock: as before it was `AWAY`."""

Change = Callable[[np.ndarray], object]
"""Changes a flat value in place."""


class ShmValue:
    """One part. Every rank of the node must make it, in the same order.

    Args:
        name: for errors.
        memory: the node's.
        locks: the node's.
        lock: its number among them.
        count, dtype: of the part.
        num_workers: how many clocks it keeps.
    """

    def __init__(
        self, name: str, memory: NodeMemory, locks: NodeLocks, lock: int, count: int, dtype: np.dtype, num_workers: int
    ) -> None:
        self.name = name
        self.flat = memory.alloc((count,), dtype)
        """The value, shape ``(count,)``."""
        self.states: dict[str, np.ndarray] = {}
        """The optimizer's, by name, like `flat`."""
        self.clocks = memory.alloc((num_workers,), np.int64)
        """How often each worker has pushed; `AWAY` for one that holds nobody back."""
        self._clocks_before = memory.alloc((num_workers,), np.int64)
        self._numbers = memory.alloc((_NUMBERS,), np.int64)
        self._memory, self._locks, self._lock = memory, locks, lock

    @property
    def version(self) -> int:
        """How many pushes have taken effect."""
        return int(self._numbers[_COUNT]) // 2

    @property
    def steps(self) -> int:
        """How many updates the optimizer has made."""
        return int(self._numbers[_STEPS])

    @property
    def turn(self) -> int:
        """The ticket that is served next."""
        return int(self._numbers[_TURN])

    def ticket(self) -> int:
        """The next one: operations of a key that lies in several parts take effect in the same order in all of them."""
        with self._locks.hold(self._lock):
            self._numbers[_TICKETS] += 1
            return int(self._numbers[_TICKETS]) - 1

    def may_push(self, worker: int, staleness: int) -> bool:
        """Whether a worker leads by no more than ``staleness`` pushes, or has been away."""
        clock = int(self.clocks[worker])
        return clock == AWAY or clock - int(self.clocks.min()) <= staleness

    def behind(self, worker: int, staleness: int) -> list[int]:
        """The workers that hold it back."""
        return np.flatnonzero(self.clocks < self.clocks[worker] - staleness).tolist()

    def tick(self, worker: int) -> None:
        """Count a push of a worker."""
        if self.clocks[worker] == AWAY:  # it has come back: from where the slowest is
            others = self.clocks[self.clocks != AWAY]
            self.clocks[worker] = others.min() if others.size else 0
        self.clocks[worker] += 1

    def set_clock(self, worker: int, number: int) -> None:
        """Set a worker's clock to 0, to `AWAY`, or `BACK` to what it was before that."""
        if number == BACK and self.clocks[worker] == AWAY:
            self.clocks[worker] = self._clocks_before[worker]
        elif number != BACK:
            if self.clocks[worker] != AWAY:
                self._clocks_before[worker] = self.clocks[worker]
            self.clocks[worker] = number

    def change(self, change: Change, rank: int, ticketed: bool = False) -> int:
        """Let a push take effect, alone. Returns the version that it has made.

        Raises:
            HpcdpError: a rank has died in the middle of an earlier one.
        """
        numbers = self._numbers
        with self._locks.hold(self._lock):
            try:
                self._check()
                numbers[_HOLDER] = rank
                numbers[_COUNT] += 1
                try:
                    change(self.flat)
                except BaseException:
                    numbers[_COUNT] -= 1
                    raise
                numbers[_COUNT] += 1
            finally:
                numbers[_TURN] += ticketed
            return int(numbers[_COUNT]) // 2

    def update(self, rule: Optimizer, received: np.ndarray, flat: np.ndarray) -> None:
        """Within `change`: apply a rule."""
        self._numbers[_STEPS] += 1
        try:
            apply_rule(rule, flat, received, self.states, int(self._numbers[_STEPS]))
        except BaseException:
            self._numbers[_STEPS] -= 1
            raise

    def read(self, take: Change, ticketed: bool = False) -> int:
        """Call ``take(flat)`` while nobody changes it; it must not, either. Returns the version that it has seen.

        Raises:
            HpcdpError: as `change`.
        """
        with self._locks.hold(self._lock, shared=not ticketed):
            try:
                self._check()
                take(self.flat)
                return int(self._numbers[_COUNT]) // 2
            finally:
                self._numbers[_TURN] += ticketed

    def assign(self, value: np.ndarray) -> None:
        """Set the value; that is no new version."""
        with self._locks.hold(self._lock):
            self.flat[:] = value

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of the states."""
        with self._locks.hold(self._lock):
            self.states[name][:] = value

    def set_steps(self, steps: int) -> None:
        """Set how often the rule has updated."""
        with self._locks.hold(self._lock):
            self._numbers[_STEPS] = steps

    def keep_states_of(self, rule: Optimizer) -> None:
        """Make room for a rule's state, zero as it begins; every rank of the node must call."""
        self._numbers[_STEPS] = 0
        like = new_state(rule, self.flat[:0])
        self.states = {name: self._memory.alloc((self.flat.size,), like[name].dtype) for name in rule.state_names()}

    def _check(self) -> None:
        if self._numbers[_COUNT] % 2:
            raise HpcdpError(
                "key-value store",
                where=self.name,
                expected="a whole value",
                got=f"one that rank {self._numbers[_HOLDER]} has changed by half when it died",
                remedy="start again from the last checkpoint",
            )
