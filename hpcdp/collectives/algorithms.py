"""The algorithms of every collective, by name, and how each is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..comm import World
from ..comm.calls import Call
from . import (
    double_tree,
    halving_doubling,
    hierarchical,
    native,
    recursive_doubling,
    reference,
    ring,
    rings,
    shared,
    tree,
)
from .progress import Progress, Steps, drive


@dataclass(frozen=True)
class Algorithm:
    """How a collective is done.

    Each function takes the collective's arguments (see `reference`), then the world, and ``steps`` a tag after it;
    one that compares calls itself takes the `Call` instead of a tag.
    """

    name: str
    steps: Callable[..., Steps] | None
    """A machine; None for what can only block."""
    blocking: Callable[..., None] | None = None
    """What a blocking call uses instead, where it saves time."""
    spares_input: bool = False
    """Whether a reduce leaves the arrays of other ranks than the root as they are."""
    any_monoid: bool = True
    """Whether it takes reductions of a user's own, beside the named ones."""
    compares: bool = False
    """Whether its functions compare the calls of all ranks themselves."""
    prepare: Callable[[World], None] | None = None
    """Makes what a world keeps for it, such as memory; all ranks call it together, before the first use."""

    def machine(self, world: World, call: Call, x: np.ndarray, *others: object) -> Steps:
        """Return one that is still to be driven; ``x`` and the ``others`` are the collective's arguments."""
        assert self.steps is not None
        progress = Progress.of(world)
        if self.prepare is not None and self.prepare not in progress.prepared:
            self._prepare(world, call)
        if self.compares:
            progress.calls.number += 1
            return self.steps(x, *others, world, call)
        comparison = progress.calls.steps(call)
        return _one_after_another(comparison, self.steps(x, *others, world, progress.tag(call.signature)))

    def run(self, world: World, call: Call, x: np.ndarray, *others: object) -> None:
        """Do it, and return when it is done; whatever was started before is ended first.

        Raises:
            MismatchError: some rank has made another call; the same error on every rank.
        """
        if world.size == 1:
            return
        if not world.meetings:
            self._run(world, call, x, *others)
            return
        with world.meeting():
            self._run(world, call, x, *others)

    def _run(self, world: World, call: Call, x: np.ndarray, *others: object) -> None:
        progress = Progress.of(world)
        watchdog = progress.watchdog
        watchdog.calls += 1
        watched = call.operation, x
        watchdog.enter(watched)
        try:
            progress.finish()
            if self.prepare is not None and self.prepare not in progress.prepared:
                self._prepare(world, call)
            if self.compares:
                progress.calls.number += 1
                self.blocking(x, *others, world, call)  # type: ignore[misc]
                return
            progress.calls.agree(call)
            if self.blocking is not None:
                self.blocking(x, *others, world)
            elif self.steps is not None:
                drive(self.steps(x, *others, world, progress.tag(call.signature)))
        finally:
            watchdog.leave(watched)

    def _prepare(self, world: World, call: Call) -> None:
        progress = Progress.of(world)
        progress.finish()
        progress.calls.agree(call)
        self.prepare(world)  # type: ignore[misc]
        progress.prepared.add(self.prepare)


def _one_after_another(first: Steps, second: Steps) -> Steps:
    yield from first
    yield from second


def _flat(name: str, steps: Callable[..., Steps]) -> Algorithm:
    """An algorithm over one communicator, for all ranks of a world."""

    def over_all_ranks(*arguments: object) -> Steps:
        *given, world, tag = arguments
        return steps(*given, world.comm, tag)  # type: ignore[attr-defined]

    return Algorithm(name, over_all_ranks)


def _shared(
    blocking: Callable[..., None], steps: Callable[..., Steps] | None = None, any_monoid: bool = True
) -> Algorithm:
    return Algorithm("shared", steps, blocking, any_monoid=any_monoid, compares=True, prepare=shared.prepare)


def _by_name(*algorithms: Algorithm) -> dict[str, Algorithm]:
    return {algorithm.name: algorithm for algorithm in algorithms}


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": _by_name(
        _flat("reference", reference.allreduce),
        Algorithm("native", native.allreduce_steps, native.allreduce, any_monoid=False),
        _shared(shared.allreduce, shared.allreduce_steps, any_monoid=False),
        _flat("ring", ring.allreduce),
        _flat("bidirectional", rings.both_ways),
        _flat("halving_doubling", halving_doubling.allreduce),
        Algorithm(
            "recursive_doubling", recursive_doubling.allreduce_steps, recursive_doubling.allreduce, compares=True
        ),
        _flat("tree", tree.allreduce),
        _flat("double_tree", double_tree.allreduce),
        Algorithm("hierarchical", hierarchical.allreduce, prepare=hierarchical.prepare),
    ),
    "reduce_scatter": _by_name(
        _flat("reference", reference.reduce_scatter),
        Algorithm("native", None, native.reduce_scatter, any_monoid=False),
        _shared(shared.reduce_scatter, shared.reduce_scatter_steps, any_monoid=False),
        _flat("ring", ring.reduce_scatter),
        _flat("halving_doubling", halving_doubling.reduce_scatter),
    ),
    "allgather": _by_name(
        _flat("reference", reference.allgather),
        Algorithm("native", None, native.allgather),
        _shared(shared.allgather),
        _flat("ring", ring.allgather),
    ),
    "broadcast": _by_name(
        _flat("reference", reference.broadcast),
        Algorithm("native", None, native.broadcast),
        _shared(shared.broadcast),
        _flat("tree", tree.broadcast),
    ),
    "reduce": _by_name(
        _flat("reference", reference.reduce),
        Algorithm("native", None, native.reduce, spares_input=True, any_monoid=False),
        _shared(shared.reduce, any_monoid=False),
        _flat("tree", tree.reduce),
    ),
}
"""For every collective its algorithms by name."""
