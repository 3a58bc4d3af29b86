"""Which ranks compute layers together, each with its part of the channels, and which ones have the same part."""

from __future__ import annotations

import operator
from typing import NamedTuple

from ..comm import World, init
from ..comm.agreement import require_same
from ..errors import ConfigError
from ..replica import enter_replica, replica_number


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
    try:
        number = operator.index(num_parts)
    except TypeError:
        number = 0
    if number < 1 or world.size % number:
        raise ConfigError(
            "split_world",
            where="num_parts",
            expected=f"a number that divides the {world.size} ranks",
            got=repr(num_parts),
        )
    parts = world.split(world.rank // number)
    share_replica(parts)
    return Split(parts, world.split(world.rank % number, part_comm=parts.comm))


def share_replica(world: World) -> None:
    """Let the ranks of ``world``, which hold one replica together, draw the same random numbers; every rank must call.

    They take the lowest of their replica numbers, so that a smaller or larger group, joined before or after, agrees.
    """
    world.keep("replica", lambda: enter_replica(min(world.comm.allgather_json(replica_number()))))
