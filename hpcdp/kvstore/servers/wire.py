"""What workers and servers send each other: a header of fixed length, then the array, codes, or text, byte for byte.

Whatever arrives is checked before it is used; nothing is unpickled. Numbers are little-endian. What a message of an MPI
library cannot carry at once over TCP follows its header in pieces: of long messages both ways on one link, each side's
permission to go on would queue behind the other's data.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...collectives.progress import MESSAGE_NBYTES, segments
from ...errors import MismatchError
from ..arguments import STORABLE
from .placement import MOST_NBYTES

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


class Kind(IntEnum):
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

    kind: Kind
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
    def of_text(cls, kind: Kind, text: str, **fields: int) -> Message:
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
    if kind not in set(Kind) or dtype >= len(DTYPES) or coded > 1:
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
    return Message(Kind(kind), store, key, part, request, ticket, number, rate, which, bool(coded), payload)
