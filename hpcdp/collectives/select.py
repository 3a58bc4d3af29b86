"""Which algorithm runs: one that was asked for by name, or the one that suits the world and the size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..comm import Reduction, World
from ..errors import UnsupportedError
from . import cost, double_tree, halving_doubling, hierarchical, native, reference, ring, rings, shared, tree, tuning
from .progress import Progress, Steps, drive


@dataclass(frozen=True)
class Algorithm:
    """How a collective is done.

    Each function takes the collective's arguments (see `reference`), then the world, and ``steps`` a tag after it.
    """

    steps: Callable[..., Steps] | None
    """A machine; None for what can only block."""
    blocking: Callable[..., None] | None = None
    """What a blocking call uses instead, where it saves time."""
    spares_input: bool = False
    """Whether a reduce leaves the arrays of other ranks than the root as they are."""

    def run(self, world: World, operation: str, *arguments: object) -> None:
        """Do it, and return when it is done; whatever was started before is ended first."""
        progress = Progress.of(world)
        watchdog = progress.watchdog
        watchdog.calls += 1
        watchdog.call = operation, arguments[0]
        try:
            progress.finish()
            if self.blocking is not None:
                self.blocking(*arguments, world)
            else:
                assert self.steps is not None
                drive(self.steps(*arguments, world, progress.tag()))
        finally:
            watchdog.call = None


def _flat(steps: Callable[..., Steps]) -> Algorithm:
    """An algorithm over one communicator, for all ranks of a world."""

    def over_all_ranks(*arguments: object) -> Steps:
        *given, world, tag = arguments
        return steps(*given, world.comm, tag)  # type: ignore[attr-defined]

    return Algorithm(over_all_ranks)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": {
        "reference": _flat(reference.allreduce),
        "native": Algorithm(native.allreduce_steps, native.allreduce),
        "shared": Algorithm(shared.allreduce_steps, shared.allreduce),
        "ring": _flat(ring.allreduce),
        "bidirectional": _flat(rings.both_ways),
        "halving_doubling": _flat(halving_doubling.allreduce),
        "tree": _flat(tree.allreduce),
        "double_tree": _flat(double_tree.allreduce),
        "hierarchical": Algorithm(hierarchical.allreduce),
    },
    "reduce_scatter": {
        "reference": _flat(reference.reduce_scatter),
        "native": Algorithm(None, native.reduce_scatter),
        "shared": Algorithm(shared.reduce_scatter_steps, shared.reduce_scatter),
        "ring": _flat(ring.reduce_scatter),
        "halving_doubling": _flat(halving_doubling.reduce_scatter),
    },
    "allgather": {
        "reference": _flat(reference.allgather),
        "native": Algorithm(None, native.allgather),
        "ring": _flat(ring.allgather),
    },
    "broadcast": {
        "reference": _flat(reference.broadcast),
        "native": Algorithm(None, native.broadcast),
        "tree": _flat(tree.broadcast),
    },
    "reduce": {
        "reference": _flat(reference.reduce),
        "native": Algorithm(None, native.reduce, spares_input=True),
        "tree": _flat(tree.reduce),
    },
}
"""For every collective its algorithms by name."""


def find(
    collective: str, algorithm: str, nbytes: int, dtype: np.dtype, op: Reduction | None, world: World
) -> Algorithm:
    """The algorithm of that name, or for ``"auto"`` what `choose` says.

    Raises:
        UnsupportedError: there is none of that name; it lists the valid ones.
    """
    known: Mapping[str, Algorithm] = ALGORITHMS[collective]
    if algorithm == "auto":
        algorithm = choose(collective, nbytes, dtype, op, world)
    if algorithm not in known:
        valid = " or ".join(["auto", *known])
        raise UnsupportedError(collective, where="algorithm", expected=valid, got=repr(algorithm))
    return known[algorithm]


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
    names = [name for name in ALGORITHMS[collective] if name != "reference"]
    if op is not None and not op.named:
        names.remove("native")
    if "shared" in names and not (op is not None and shared.can_reduce(dtype, op, world)):
        names.remove("shared")
    return names
