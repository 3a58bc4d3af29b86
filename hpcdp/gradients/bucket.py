"""One bucket of gradients: its memory, and where it is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from ..arrays import Array, words
from ..errors import listed
from .buckets import Slot

_MOST_NAMES = 2


class Parameter(Protocol):
    """What a parameter must be for its gradient to be reduced; `hpcdp.nn.Parameter` is one.

    If it has a ``data_hook``, too, which is called before ``data`` is read, its update may run beside the next forward;
    it is then given an ``update_hook``, to be called before ``grad`` is read.
    """

    name: str
    data: Array
    grad: Array
    grad_req: str
    grad_hook: Any


class State(Enum):
    """Where a bucket is on its way."""

    FILLING = "backward has still to write some of its gradients"
    READY = "all its gradients are written"
    LAUNCHED = "its reduction is under way; nobody may write its gradients"
    REDUCED = "this rank's shard, or all of it, holds the sum over all ranks"


class Bucket:
    """One flat buffer of gradients and this rank's part in it."""

    def __init__(self, number: int, slots: Sequence[Slot], rows: Array, rank: int, shard: tuple[int, int]) -> None:
        self.number = number
        self.slots = slots
        self.rows = rows
        """Shape ``(ranks that share it, elements)``."""
        self.words = words(rows)
        """``rows`` as the kernels take them."""
        self.mine: Array = rows[rank]
        """This rank's row, shape ``(elements,)``."""
        self.shard = shard
        """The columns that this rank sums: first, and one after the last."""
        self.names = frozenset(slot.name for slot in slots)
        self.missing = self.awaited = set(self.names)
        """Parameters whose gradient backward has not written in this step, and those that it has still to write before
        the reduction can be launched: others only while gradients accumulate."""
        self.state = State.FILLING
        self.ready_ns = self.launched_ns = self.done_ns = 0

    def view(self, slot: Slot) -> Array:
        """The gradient of one parameter: a view of this rank's row in the parameter's shape."""
        return self.mine[slot.offset : slot.offset + slot.count].reshape(slot.shape)

    def described(self) -> str:
        """Its number, first parameters and size, for messages."""
        names = listed([slot.name for slot in self.slots], _MOST_NAMES)
        return f"bucket {self.number} ({names}; {self.mine.nbytes} bytes)"
