"""Which algorithm runs: one that was asked for by name, or the one that suits the world and the size."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..comm import Reduction, World
from ..comm.reductions import OPS
from ..errors import UnsupportedError
from . import cost, shared, tuning
from .algorithms import ALGORITHMS, Algorithm


def find(
    collective: str, algorithm: str, nbytes: int, dtype: np.dtype, op: Reduction | None, world: World
) -> Algorithm:
    """The algorithm of that name, or for ``"auto"`` what `choose` says.

    Raises:
        UnsupportedError: there is none of that name, or it has no such reduction; it lists the valid ones.
    """
    known: Mapping[str, Algorithm] = ALGORITHMS[collective]
    if algorithm == "auto":
        algorithm = choose(collective, nbytes, dtype, op, world)
    if algorithm not in known:
        valid = " or ".join(["auto", *known])
        raise UnsupportedError(collective, where="algorithm", expected=valid, got=repr(algorithm))
    found = known[algorithm]
    if op is not None and not (op.named or found.any_monoid):
        raise UnsupportedError(
            collective, where=f"algorithm={algorithm!r}", expected=" or ".join(OPS), got=f"the monoid {op.name!r}",
            remedy="use algorithm='auto'",
        )  # fmt: skip
    return found


def choose(collective: str, nbytes: int, dtype: np.dtype, op: Reduction | None, world: World) -> str:
    """The name of the algorithm for ``algorithm="auto"``: what was measured in such a world, else what the model says.

    Every rank must call the first time; all get the same name.
    """
    able = _able(collective, dtype, op, world)
    measured = tuning.choice(world, collective, nbytes)
    if measured in able:
        return measured
    topology, machine = tuning.topology(world), tuning.machine(world)
    return cost.model_choice(collective, nbytes, dtype.itemsize, topology, able, machine)


def _able(collective: str, dtype: np.dtype, op: Reduction | None, world: World) -> list[str]:
    """The algorithms that can do it; the specification is none to choose."""
    by_monoid = op is not None and not op.named
    names = [each.name for each in ALGORITHMS[collective].values() if each.any_monoid or not by_monoid]
    names.remove("reference")
    can = shared.can_share(world) if op is None else shared.can_reduce(dtype, op, world)
    if "shared" in names and not can:
        names.remove("shared")
    return names
