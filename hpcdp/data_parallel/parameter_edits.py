"""Parameters that a program has changed by itself: within `Trainer.changing_parameters`, or where nobody sees it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..comm import Communicator
from ..comm.consistency import on_every_rank
from ..core import state
from ..core.arrays import Array, from_host, is_host, to_host
from ..errors import ConfigError
from .buckets import Parameter

being_changed: set[int] = set()
"""The ids of parameters that are copies now, within `changing`."""
Places = Sequence[tuple[Parameter, Array]]
"""Parameters, and where their values, or their gradients, lie."""

_OF_ONE_BEFORE = "one of an array from before the block, in which copies count"


def places_of(params: Sequence[Parameter]) -> Places:
    """Waits for updates under way."""
    return [(param, param.data) for param in params]


def of_rank_0(values: Array, comm: Communicator) -> np.ndarray:
    """A new array in host memory: the values that rank 0 has; every rank must call."""
    host = np.array(to_host(values), order="C")
    comm.native_broadcast(host, 0)
    return host


def moved(places: Places, grads: Places = ()) -> list[str]:
    """What of parameters has another array than its place, by name: what is updated, or summed, there is not theirs."""
    values = [param.name for param, place in places if hasattr(param, "held") and param.held() is not place]
    return values + [f"{param.name}.grad" for param, place in grads if param.grad is not place]


def moved_anywhere(comm: Communicator | None, names: Sequence[str], operation: str = "step") -> ConfigError | None:
    """The same error on all ranks, where on some ``names`` are `moved`; every rank must call.

    Args:
        comm: the ranks; None: this one alone.
        operation: what the error calls itself.
    """
    by_rank = [list(names[:1])] if comm is None else comm.allgather_json(list(names[:1]))
    rank = next((rank for rank, found in enumerate(by_rank) if found), None)
    if rank is None:
        return None
    name = by_rank[rank][0]
    where = name if comm is None else f"{name}, rank {rank}"
    if name.endswith(".grad"):
        return ConfigError(
            operation, where=where, expected="the array in which the Trainer sums it", got="another one, or none",
            remedy="leave it where it is: backward overwrites it, grad[...] = 0 makes it zero",
        )  # fmt: skip
    return ConfigError(
        operation, where=where, expected="the array in which the Trainer updates it",
        got="another one, which would not be trained",
        remedy="set arrays, and dtypes, before the Trainer is made, values in changing_parameters() of the last one",
    )  # fmt: skip


@contextmanager
def changing(
    places: Places, comm: Communicator | None, writes: bool, meet: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Within it parameters are copies, and behind it their places have what rank 0 has made of them; every rank must
    enter and leave it.

    Args:
        comm: the ranks; None: there are no others.
        writes: whether this rank writes to the places.
        meet: waits for those that share the places.

    Raises:
        ConfigError: a parameter has another shape or dtype now, or an array from before, and then all places are as
            before; or somebody has changed a place by an array that is older than the copies. On every rank.
    """
    meet()
    marks = _marks(places)
    for param, place in places:
        param.data = place.copy()
    meet()
    being_changed.update(id(param) for param, _ in places)
    found: list[Array] = []
    older: list[str] = []
    try:
        with state.refusing([place for _, place in places], _OF_ONE_BEFORE):
            try:
                yield
            finally:
                found += [param.data for param, _ in places]
                older += [param.name for param, place in places if _is_older(param.data, place)]
    finally:
        being_changed.difference_update(id(param) for param, _ in places)
        for param, place in places:
            param.data = place
        stale = _marks(places) != marks  # now: when all have come, some write there
        _on_every_rank(comm, lambda: _check_alike(places, found, older))
        agreed = [np.array(to_host(each)) if comm is None else of_rank_0(each, comm) for each in found]
        if writes:
            for (_, place), values in zip(places, agreed, strict=True):
                place[...] = from_host(values, place)
        _on_every_rank(comm, lambda: _refuse_older(stale))
        meet()


def _on_every_rank(comm: Communicator | None, check: Callable[[], None]) -> None:
    if comm is None:
        check()
    else:
        on_every_rank(comm, check)


def _marks(places: Places) -> list[int]:
    """By which a change of each is seen; on a GPU the sum of its bits."""
    found = []
    for _, place in places:
        words = place.reshape(-1).view(np.dtype(f"u{place.dtype.itemsize}"))
        found.append(zlib.crc32(words.data) if is_host(place) else int(words.sum(dtype=np.uint64)))
    return found


def _is_older(values: Array, place: Array) -> bool:
    return values is place or state.change_of(values) is not None


def _check_alike(places: Places, found: Sequence[Array], older: Sequence[str]) -> None:
    for (param, place), values in zip(places, found, strict=True):
        if param.name in older:
            raise ConfigError(
                "changing_parameters", where=param.name, expected="an array of its own",
                got="one from before the block, in whose place values are written at its end",
                remedy="put a copy aside: param.data.copy()",
            )  # fmt: skip
        if not hasattr(values, "dtype"):
            got = type(values).__name__
        elif values.shape != place.shape or values.dtype != place.dtype:
            got = f"{tuple(values.shape)} {values.dtype}"
        else:
            continue
        expected = f"{tuple(place.shape)} {place.dtype}"
        raise ConfigError("changing_parameters", where=param.name, expected=expected, got=got)


def _refuse_older(stale: bool) -> None:
    if stale:
        raise ConfigError(
            "changing_parameters", expected="changes of what param.data is within it",
            got=f"{_OF_ONE_BEFORE}; such changes are lost",
        )  # fmt: skip
