"""Collectives of lists of arrays, each as one operation: all arrays of a dtype are packed and move together.

The time of a short collective hardly depends on its length, so many short ones cost less as one. Ranks first compare
the shapes and dtypes of all arrays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..comm import Monoid, World
from ..comm.communicator import Steps, StepsTo, bounds
from ..comm.consistency import Call
from ..comm.progress import Operation, all_ended
from ..core.arrays import Array, from_host
from ..core.checks import described
from ..errors import UnsupportedError
from . import api, data_movement
from .algorithm_choice import CHOICES
from .blocks import offsets
from .data_movement import ArrayT, Exchange, Moved
from .staging import (
    accepts_tensors,
    bring_back,
    bytes_of,
    check_writeable,
    checked_root,
    errors_of,
    movable,
    ranks_of,
    validation,
)


@accepts_tensors
def grouped_allreduce(
    xs: Sequence[ArrayT],
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[ArrayT]:
    """Reduce every array of a list elementwise over all ranks, in place; every rank must call.

    Args:
        xs: arrays as for `allreduce`, of any dtypes; the same number, shapes and dtypes on all ranks.
        op: as for `allreduce`.
        world: the ranks; default `hpcdp.init()`.
        algorithm: as for `allreduce`.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.

    Returns:
        The arrays.

    Raises:
        UnsupportedError: ``xs`` is no list of arrays, or as `allreduce`.
        MismatchError: ranks differ in an array, op or algorithm; the same error on every rank.
    """
    with _to_its_end("grouped_allreduce", world):
        return _allreduce("grouped_allreduce", xs, op, world, algorithm, (prescale, postscale)).wait()


@accepts_tensors
def igrouped_allreduce(
    xs: Sequence[ArrayT],
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Operation[list[ArrayT]]:
    """Start a `grouped_allreduce`, with the same arguments and errors; ``wait()`` returns its result."""
    return _allreduce("igrouped_allreduce", xs, op, world, algorithm, (prescale, postscale))


def _allreduce(
    name: str, xs: Sequence[ArrayT], op: str | Monoid, world: World | None, algorithm: str, factors: tuple[float, float]
) -> Operation[list[ArrayT]]:
    world = ranks_of(world)
    group, _ = _fused(name, world, xs, are_changed=True, factors=factors)
    packed: list[Array] = [np.concatenate([group.hosts[i].reshape(-1) for i in members]) for members in group.by_dtype]

    def parts() -> list[Steps]:
        return [api.part_of_group("iallreduce", part, op, world, algorithm, factors=factors) for part in packed]

    def finish() -> list[Array]:
        for members, part in zip(group.by_dtype, packed, strict=True):
            ends = offsets([group.hosts[i].size for i in members])
            for i, (first, last) in zip(members, itertools.pairwise(ends), strict=True):
                bring_back(part[first:last].reshape(group.hosts[i].shape), group.arrays[i])
        return group.arrays

    return _started(name, group, world, _reduction_facts(op, algorithm, factors), parts, finish)


@accepts_tensors
def grouped_reduce_scatter(
    xs: Sequence[ArrayT],
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[ArrayT]:
    """Reduce every array of a list over all ranks and leave every rank its shards; every rank must call.

    Args:
        xs: as for `grouped_allreduce`; unchanged.
        op: as for `allreduce`.
        world: the ranks; default `hpcdp.init()`.
        algorithm: as for `reduce_scatter`.
        prescale: as for `allreduce`.
        postscale: as for `allreduce`.

    Returns:
        New arrays, this rank's shard of each, as `reduce_scatter` has them.

    Raises:
        HpcdpError: as `grouped_allreduce`.
    """
    with _to_its_end("grouped_reduce_scatter", world):
        return _reduce_scatter("grouped_reduce_scatter", xs, op, world, algorithm, (prescale, postscale)).wait()


@accepts_tensors
def igrouped_reduce_scatter(
    xs: Sequence[ArrayT],
    op: str | Monoid = "sum",
    world: World | None = None,
    algorithm: str = "auto",
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Operation[list[ArrayT]]:
    """Start a `grouped_reduce_scatter`, with the same arguments and errors; ``wait()`` returns its result."""
    return _reduce_scatter("igrouped_reduce_scatter", xs, op, world, algorithm, (prescale, postscale))


def _reduce_scatter(
    name: str, xs: Sequence[ArrayT], op: str | Monoid, world: World | None, algorithm: str, factors: tuple[float, float]
) -> Operation[list[ArrayT]]:
    world = ranks_of(world)
    (group, _), n = _fused(name, world, xs, factors=factors), world.size
    limits = [bounds(host.size, n) for host in group.hosts]
    scattered = []
    for members in group.by_dtype:
        # A row for each rank: its shard of each array, all padded to the longest shard of that array.
        starts = offsets([-(-group.hosts[i].size // n) for i in members])
        rows = np.zeros((n, starts[-1]), group.hosts[members[0]].dtype)
        for i, start in zip(members, starts, strict=False):
            x = group.hosts[i].reshape(-1)
            for row, (first, last) in zip(rows, itertools.pairwise(limits[i]), strict=True):
                row[start : start + last - first] = x[first:last]
        scattered.append((members, starts, rows.reshape(-1), np.empty(starts[-1], rows.dtype)))

    def parts() -> list[Steps]:
        return [
            api.part_of_group("ireduce_scatter", rows, op, world, algorithm, factors=factors, result=own)
            for _, _, rows, own in scattered
        ]

    def finish() -> list[Array]:
        shards: list[Array] = list(group.arrays)
        for members, starts, _, own in scattered:
            for i, start in zip(members, starts, strict=False):
                size = limits[i][world.rank + 1] - limits[i][world.rank]
                shards[i] = from_host(own[start : start + size].copy(), group.arrays[i])
        return shards

    return _started(name, group, world, _reduction_facts(op, algorithm, factors), parts, finish)


@accepts_tensors
def grouped_allgather(xs: Sequence[ArrayT], world: World | None = None) -> list[ArrayT]:
    """Gather every rank's arrays on all ranks, each concatenated along axis 0; every rank must call.

    Args:
        xs: arrays as for `allgather`, of any dtypes; the same number on all ranks, which may differ in the length of
            axis 0 of each.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        New arrays, as `allgather` has them.

    Raises:
        HpcdpError: as `grouped_allreduce`.
    """
    world = ranks_of(world)
    return data_movement.run_exchange(_gathering("grouped_allgather", world, xs), world, xs)


@accepts_tensors
def igrouped_allgather(xs: Sequence[ArrayT], world: World | None = None) -> Operation[list[ArrayT]]:
    """Start a `grouped_allgather`, with the same arguments and errors; ``wait()`` returns its result."""
    world = ranks_of(world)
    return data_movement.start_exchange(_gathering("igrouped_allgather", world, xs), world, xs)


@contextlib.contextmanager
def _to_its_end(operation: str, world: World | None) -> Iterator[None]:
    """Abandon the world if an exception ends the wait for an operation of which the caller has no handle."""
    try:
        yield
    except BaseException as error:
        ranks_of(world).abandon(operation, error)
        raise


def _gathering(name: str, world: World, xs: Sequence[Array]) -> Exchange:
    group, _ = _fused(name, world, xs)
    hosts = [np.atleast_1d(host) for host in group.hosts]
    sent: np.ndarray = np.concatenate([bytes_of(host) for host in hosts])
    rows_nbytes = [data_movement.row_nbytes(host.shape[1:], host.dtype) for host in hosts]

    def plan(counts: np.ndarray) -> Moved:
        ends = offsets((counts @ np.array(rows_nbytes, np.int64)).tolist())

        def finish(parts: np.ndarray) -> list[Array]:
            outs, places = [], list(ends[:-1])
            for i, host in enumerate(hosts):
                pieces = []
                for other, rows in enumerate(counts[:, i].tolist()):
                    last = places[other] + rows * rows_nbytes[i]
                    pieces.append(parts[places[other] : last])
                    places[other] = last
                out = np.concatenate(pieces).view(host.dtype).reshape(counts[:, i].sum(), *host.shape[1:])
                outs.append(from_host(out, group.arrays[i]))
            return outs

        return Moved(*data_movement.parts_of_all(ends, world), (ends[-1],), np.dtype(np.uint8), finish)

    facts = [data_movement.rows_named(host.shape[1:], host.dtype.name) for host in hosts]
    compared_as = name.removeprefix("i")  # some ranks may block, and others not
    call = Call(compared_as, f"{compared_as} of {len(hosts)} arrays", *facts)
    return Exchange(call, [len(host) for host in hosts], plan, sent, prepare=data_movement.prepare_choice)


@accepts_tensors
def grouped_broadcast(xs: Sequence[ArrayT], root: int = 0, world: World | None = None) -> list[ArrayT]:
    """Overwrite every array of a list on all ranks with the values of rank ``root``; every rank must call.

    Args:
        xs: arrays as for `broadcast`, of any dtypes; the same number, shapes and dtypes on all ranks.
        root: the rank whose arrays are sent.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        The arrays.

    Raises:
        HpcdpError: as `grouped_allreduce`.
    """
    with _to_its_end("grouped_broadcast", world):
        return _broadcast("grouped_broadcast", xs, root, world).wait()


@accepts_tensors
def igrouped_broadcast(xs: Sequence[ArrayT], root: int = 0, world: World | None = None) -> Operation[list[ArrayT]]:
    """Start a `grouped_broadcast`, with the same arguments and errors; ``wait()`` returns its result."""
    return _broadcast("igrouped_broadcast", xs, root, world)


def _broadcast(name: str, xs: Sequence[ArrayT], root: int, world: World | None) -> Operation[list[ArrayT]]:
    world = ranks_of(world)
    group, root = _fused(name, world, xs, root, are_changed=world.rank != root)
    is_root = world.rank == root
    packed: Array = np.concatenate([bytes_of(host) for host in group.hosts])

    def parts() -> list[Steps]:
        return [api.part_of_group("ibroadcast", packed, "", world, root=root)]

    def finish() -> list[Array]:
        ends = offsets([host.nbytes for host in group.hosts])
        for x, host, (first, last) in zip(group.arrays, group.hosts, itertools.pairwise(ends), strict=True):
            if not is_root:
                bring_back(packed[first:last].view(host.dtype).reshape(host.shape), x)
        return group.arrays

    return _started(name, group, world, [f"root {root}"], parts, finish)


@dataclass(frozen=True)
class _FusedArrays:
    """The arrays of a call, and copies or views of them on the host."""

    arrays: list[Array]
    hosts: list[np.ndarray]
    by_dtype: list[list[int]]
    """The numbers of the arrays of each dtype."""


@validation
def _fused(
    name: str,
    world: World,
    xs: Sequence[Array],
    root: int = 0,
    *,
    are_changed: bool = False,
    factors: tuple[float, float] = (1.0, 1.0),
) -> tuple[_FusedArrays, int]:
    """Return the arrays of a call, and its root; the arrays must be writeable if they ``are_changed``."""
    if isinstance(xs, (np.ndarray, str, bytes)) or not isinstance(xs, Sequence) or not xs:
        raise UnsupportedError(name, where="xs", expected="a list of arrays, at least one", got=described(xs))
    hosts = [movable(name, x, f"xs[{i}]") for i, x in enumerate(xs)]
    root = checked_root(name, root, world)
    api.checked_factors(name, *factors)
    by_dtype: dict[np.dtype, list[int]] = {}
    for i, host in enumerate(hosts):
        if are_changed:
            check_writeable(name, "xs", xs[i])
        by_dtype.setdefault(host.dtype, []).append(i)
    return _FusedArrays(list(xs), hosts, list(by_dtype.values())), root


def _reduction_facts(op: str | Monoid, algorithm: str, factors: tuple[float, float]) -> list[str]:
    name = op.name if isinstance(op, Monoid) else op
    return [f"op {name!r}", f"algorithm {algorithm!r}", "prescale {!r} and postscale {!r}".format(*map(float, factors))]


def _started(
    name: str,
    group: _FusedArrays,
    world: World,
    facts: Sequence[str],
    parts: Callable[[], list[Steps]],
    finish: Callable[[], list[Array]],
) -> Operation[list[Array]]:
    """Start a collective of several arrays: a comparison of the calls, and then its parts.

    Parts begin only when all ranks have made the same call, because ranks with other arrays may have fewer parts.

    Args:
        name: the function.
        group: the arrays.
        world: the ranks.
        facts: what ranks must agree on beside the arrays.
        parts: returns the algorithms that move the packed arrays.
        finish: returns the result, after the ends of all parts.
    """
    arrays = [f"{host.shape} {host.dtype.name}" for host in group.hosts]
    compared_as = name.removeprefix("i")  # some ranks may block, and others not
    call = Call(compared_as, f"{compared_as} of {len(arrays)} arrays", *arrays, *facts)
    compared = data_movement.start_exchange(data_movement.comparison(call), world, group.arrays)
    if call.facts not in world.kept.get(CHOICES, ()):
        compared.wait()  # the first parts of a kind may need all ranks for their preparation
    with errors_of(name):
        machines = parts()
    world.kept.setdefault(CHOICES, {})[call.facts] = None

    def steps() -> StepsTo[list[Array]]:
        yield from all_ended(machines)
        return finish()

    return data_movement.started(name, steps(), group.arrays, world, after=compared)
