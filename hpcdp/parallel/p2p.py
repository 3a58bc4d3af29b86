"""Messages between stages, and the worlds of replicas.

Which ranks compute layers together, each with its part of the channels, and which ones have the same part.

What carries activations from a stage to the next one, and their gradients back: messages, or a queue.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from ..comm import Communicator, Request, World, init
from ..comm.communicator import make_tag
from ..comm.consistency import require_same
from ..comm.watchdog import OWN, Watchdog
from ..core.arrays import Array, dtype_of, from_host, native, to_host
from ..core.environment import enter_replica, replica_number
from ..errors import ConfigError, MismatchError, UnsupportedError, whole_number


class Split(NamedTuple):
    """The two worlds of a rank: see `split_world`."""

    parts: World
    """The ranks that hold one copy of the layers together: what `ColumnDense` and its like take."""
    replicas: World
    """The ranks that hold the same part: the `Trainer` 's world, and that of a `Pipeline`."""


def split_world(num_parts: int, world: World | None = None) -> Split:
    """Ranks as parts times replicas; every rank of ``world`` must call.

    Rank r has part ``r % num_parts`` of copy ``r // num_parts``: the parts of a copy, which meet in every layer, lie
    side by side, mostly on one node, where they share memory.

    Args:
        num_parts: of every layer that is split; 1: every rank has a copy.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: no number from 1 on that divides the number of ranks.
        MismatchError: ranks have said different things.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3, and for both kinds together figure 8.
    """
    world = init() if world is None else world
    require_same(world.comm, "split_world", [f"num_parts {num_parts!r}"], "split alike on all ranks")
    expected = f"a number that divides the {world.size} ranks"
    number = whole_number("split_world", "num_parts", num_parts, 1, expected=expected)
    if world.size % number:
        raise ConfigError("split_world", where="num_parts", expected=expected, got=number)
    parts = world.split(world.rank // number)
    share_replica(parts)
    return Split(parts, world.split(world.rank % number, part_comm=parts.comm))


def share_replica(world: World) -> None:
    """Let the ranks of ``world``, which hold one replica together, draw the same random numbers; every rank must call.

    They take the lowest of their replica numbers, so that a smaller or larger group, joined before or after, agrees.
    """
    world.keep("replica", lambda: enter_replica(min(world.comm.allgather_json(replica_number()))))


_DTYPES = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8", "bool", "bfloat16")
_MOST_AXES = 8
_SIGNATURE = 1
FORWARD, BACKWARD = 1, 2
"""The numbers of the two ways, in tags."""


class StageLink(Protocol):
    """One way between two neighbouring stages; what is sent first is received first."""

    def begin(self, length: int) -> None:
        """Tell the other end of a batch of so many samples, of which what is sent next are micro-batches."""
        ...

    def expect(self, length: int) -> None:
        """Wait for such a batch.

        Raises:
            MismatchError: the other end has begun one of another length.
        """
        ...

    def send(self, arrays: tuple[Array, ...]) -> None:
        """Begin to send; the arrays must not change any more."""
        ...

    def receive(self) -> tuple[Array, ...]:
        """The next ones, in memory that nobody else has; waits for them."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        ...

    def forget(self) -> None:
        """Drop what was sent and not received, after an error."""
        ...


class Queue:
    """Between stages of one process."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Array, ...]] = deque()

    def begin(self, length: int) -> None:
        """See `Link`."""

    def expect(self, length: int) -> None:
        """See `Link`; there is one batch."""

    def send(self, arrays: tuple[Array, ...]) -> None:
        """See `Link`."""
        self._sent.append(arrays)

    def receive(self) -> tuple[Array, ...]:
        """See `Link`; what comes is there, since stages of one process take turns."""
        return self._sent.popleft()

    def finish(self) -> None:
        """See `Link`."""

    def forget(self) -> None:
        """See `Link`."""
        self._sent.clear()


class StageMessages:
    """Between ranks: a header with shapes and dtypes goes before the elements of each array.

    Args:
        comm: whose messages these alone are, with those of the other way.
        other: the rank at the other end.
        way: `FORWARD` or `BACKWARD`.
        watchdog: told what this rank waits for.
        behind: the local ranks of this node that are waited for: `other`, if it is one of them.
        like: an array of the namespace in which arrays arrive.
    """

    def __init__(
        self, comm: Communicator, other: int, way: int, watchdog: Watchdog, behind: list[int], like: Array
    ) -> None:
        self._comm, self._other, self._tag = comm, other, make_tag(_SIGNATURE, way)
        self._watchdog, self._behind, self._like = watchdog, behind, like
        what = "activations" if way == FORWARD else "gradients"
        self._label = f"wait for {what} from rank {other} of the pipeline"
        self._under_way: deque[tuple[Request, np.ndarray]] = deque()

    def begin(self, length: int) -> None:
        """See `Link`."""
        self._send(np.array([length], np.int64))

    def expect(self, length: int) -> None:
        """See `Link`."""
        with self._waiting():
            (theirs,) = self._receive(np.empty(1, np.int64))
        if theirs != length:
            raise MismatchError(
                "Pipeline.step", where="batch",
                expected=f"{theirs} samples, as rank {self._other} of this copy has, the stage before", got=length,
                remedy="give all stages of a copy the same batch; those in the middle need an array as long",
            )  # fmt: skip

    def send(self, arrays: tuple[Array, ...]) -> None:
        """See `Link`.

        Raises:
            UnsupportedError: more axes, or another dtype, than a header can tell.
        """
        while self._under_way and self._under_way[0][0].test():
            self._under_way.popleft()
        self._send(np.array([len(arrays)], np.int64))
        for array in arrays:
            values = native(to_host(array))
            if values.dtype.name not in _DTYPES or values.ndim > _MOST_AXES:
                expected = f"at most {_MOST_AXES} axes, of {', '.join(_DTYPES)}"
                raise UnsupportedError(
                    "pipeline", where="activations", expected=expected, got=f"{values.shape} {values.dtype}"
                )
            header = np.zeros(2 + _MOST_AXES, np.int64)
            header[:2] = _DTYPES.index(values.dtype.name), values.ndim
            header[2 : 2 + values.ndim] = values.shape
            self._send(header)
            if values.size:
                self._send(values)

    def _send(self, values: np.ndarray) -> None:
        self._under_way.append((self._comm.isend(values, self._other, self._tag), values))

    def receive(self) -> tuple[Array, ...]:
        """See `Link`."""
        with self._waiting():
            (count,) = self._receive(np.empty(1, np.int64))
            return tuple(self._receive_one() for _ in range(count))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        call = self._label, None, lambda: self._behind, OWN
        self._watchdog.enter(call)
        try:
            yield
        finally:
            self._watchdog.leave(call)

    def _receive_one(self) -> Array:
        dtype, ndim, *shape = self._receive(np.empty(2 + _MOST_AXES, np.int64)).tolist()
        values = np.empty(shape[:ndim], dtype_of(_DTYPES[dtype]))
        return from_host(self._receive(values) if values.size else values, self._like)

    def _receive(self, into: np.ndarray) -> np.ndarray:
        self._comm.irecv(into, self._other, self._tag).wait()
        return into

    def finish(self) -> None:
        """See `Link`."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def forget(self) -> None:
        """See `Link`; between ranks the job ends with the error."""
