"""Parameters that a program has changed by itself, on all ranks: they become what rank 0 has made of them."""

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
        host = np.ascontiguousarray(to_host(values))
        if comm is not None:
            comm.native_broadcast(host, 0)
        if writes:
            place[...] = from_host(host, place)
