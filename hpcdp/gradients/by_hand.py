"""Parameters that a program has changed by itself: within `Trainer.changing_parameters`, or where nobody sees it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, from_host, to_host
from ..comm import Communicator
from ..comm.agreement import on_every_rank
from ..errors import ConfigError
from .bucket import Parameter

Places = Sequence[tuple[Parameter, Array]]
"""Parameters, and where their values lie."""


def places_of(params: Sequence[Parameter]) -> Places:
    """Waits for updates under way."""
    return [(param, param.data) for param in params]


def of_rank_0(values: Array, comm: Communicator) -> np.ndarray:
    """A new array in host memory: the values that rank 0 has; every rank must call."""
    host = np.array(to_host(values), order="C")
    comm.native_broadcast(host, 0)
    return host


def moved(places: Places) -> list[str]:
    """The names of parameters that have another array than their place: what is updated there is not theirs."""
    return [param.name for param, place in places if hasattr(param, "held") and param.held() is not place]


def moved_anywhere(comm: Communicator, names: Sequence[str]) -> ConfigError | None:
    """The same error on all ranks, where some have parameters ``names`` in other arrays; every rank must call."""
    by_rank = comm.allgather_json(list(names[:1]))
    rank = next((rank for rank, found in enumerate(by_rank) if found), None)
    if rank is None:
        return None
    return ConfigError(
        "step", where=f"{by_rank[rank][0]}, rank {rank}", expected="the array in which the Trainer updates it",
        got="another one, which would not be trained",
        remedy="set arrays, and dtypes, before the Trainer is made, or values within its changing_parameters()",
    )  # fmt: skip


def take_back(places: Places, comm: Communicator | None, writes: bool) -> None:
    """Let parameters lie in their places again, with the values that they have got on rank 0; every rank must call.

    Args:
        comm: the ranks; None: there are no others.
        writes: whether this rank writes to the places.

    Raises:
        ConfigError: a parameter has another shape or dtype now; on every rank, and then all stay as they are in their
            places.
    """
    found = [param.data for param, _ in places]
    for param, place in places:
        param.data = place

    def check() -> None:
        for (param, place), values in zip(places, found, strict=True):
            if values.shape != place.shape or values.dtype != place.dtype:
                raise ConfigError(
                    "changing_parameters", where=param.name, expected=f"{tuple(place.shape)} {place.dtype}",
                    got=f"{tuple(values.shape)} {values.dtype}",
                )  # fmt: skip

    check() if comm is None else on_every_rank(comm, check)
    for (_, place), values in zip(places, found, strict=True):
        agreed = values if comm is None else from_host(of_rank_0(values, comm), place)
        if writes:
            place[...] = agreed
