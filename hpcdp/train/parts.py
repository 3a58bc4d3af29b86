"""Where ranks compute layers together (`hpcdp.parallel`): what a Trainer asks of parameters that are cut, or whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import from_host, to_host
from ..comm import World
from ..comm.agreement import require_same
from ..errors import ConfigError
from ..gradients.bucket import Parameter
from ..state import cut_of


def share_over_parts(params: Sequence[Parameter], world: World) -> None:
    """Give parameters that are whole the first part's values, so that they stay alike; every rank must call.

    Raises:
        ConfigError: parameters are parts, and ``world`` is not that of ranks with the same ones.
        MismatchError: ranks with other parts have other parameters.
    """
    comm = world.part_comm
    if comm is None:
        require_whole("Trainer", params, "give it the replicas of split_world")
        return
    require_same(comm, "Trainer", [_described(param) for param in params])
    for param in params:
        if cut_of(param) is None:
            values = np.ascontiguousarray(to_host(param.data))
            comm.native_broadcast(values, 0)
            param.data[...] = from_host(values, param.data)


def require_whole(operation: str, params: Sequence[Parameter], remedy: str) -> None:
    """Raises `ConfigError` where one is a part of a parameter that other ranks have the rest of."""
    for param in params:
        cut = cut_of(param)
        if cut is not None and cut.total != param.data.shape[cut.axis]:
            raise ConfigError(
                operation, where=param.name, expected=f"all of shape {cut.whole(tuple(param.data.shape))}",
                got=f"a part of shape {tuple(param.data.shape)}", remedy=remedy,
            )  # fmt: skip


def _described(param: Parameter) -> str:
    shape, cut = tuple(param.data.shape), cut_of(param)
    whole = f"{shape}" if cut is None else f"{cut.whole(shape)} cut along axis {cut.axis}"
    return f"{param.name} {whole} {param.data.dtype}"
