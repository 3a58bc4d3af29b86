"""Where ranks compute layers together (`hpcdp.parallel`): what a Trainer asks of parameters that are cut, or whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...arrays import from_host
from ...comm import World
from ...comm.agreement import require_same
from ...compression import Compression
from ...errors import ConfigError
from ...gradients.bucket import Parameter
from ...gradients.by_hand import of_rank_0
from ...state import cut_of

_ELEMENT_BY_ELEMENT = ("fp16", "bf16")


def share_over_parts(params: Sequence[Parameter], world: World, compression: Compression | None) -> list[int] | None:
    """Give parameters that are whole the first part's values; every rank must call.

    They stay alike to the bit if their gradients are summed alike. For that they must lie at the same places of the
    buckets, whatever the sizes of parts before them, since a sum may depend on where in a message an element lies.

    Returns:
        For each parameter the elements of its largest part; None where there are no parts.

    Raises:
        ConfigError: parameters are parts, and ``world`` is not that of ranks with the same ones; or ``compression``
            makes of an element what depends on those beside it.
        MismatchError: ranks with other parts have other parameters.
    """
    comm = world.part_comm
    if comm is None:
        require_whole("Trainer", params, "give it the replicas of split_world")
        return None
    codec = None if compression is None else compression.codec.name
    require_same(comm, "Trainer", [*map(_described, params), f"compression {compression}"])
    if codec is not None and codec not in _ELEMENT_BY_ELEMENT and comm.size > 1:
        expected = f"{' or '.join(_ELEMENT_BY_ELEMENT)} with layers that are split"
        raise ConfigError("Trainer", where="compression", expected=expected, got=codec)
    for param in params:
        if cut_of(param) is None:
            param.data = from_host(of_rank_0(param.data, comm), param.data)
    counts = comm.allgather_json([math.prod(param.data.shape) for param in params])
    return [max(each) for each in zip(*counts, strict=True)]


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
