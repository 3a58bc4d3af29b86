"""The algorithms of each collective by name, and the choice between them by measurement or model.

`hpcdp tune` saves its measurements in a table, a JSON file in `folder()`. Its name is a hash of the fingerprint:
everything that decides which algorithm is fastest, without host names, so that it fits every job of the same shape on
the same kind of machines. Rank 0 reads the table once and sends it to all ranks, so all choose alike. Rank 0 reports on
stderr a table that does not fit, which is ignored.

Here are also the two baselines of each collective: the reference, which specifies all other algorithms, and the MPI
library's own. In the reference every rank sends everything to every rank. Reductions run in the order of the ranks, 0
first, so all ranks get the same bits. Sent per rank: n - 1 messages of the rank's whole array (allgather: its shard;
broadcast: by the root alone). The MPI library's collectives block, except the nonblocking allreduce, which all ranks
must start in the same order. 16-bit floats are reduced in float32, which MPI supports.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels
from ..comm import Communicator, Reduction, World
from ..comm.communicator import OPS, Steps, narrow, reduce_in_order, reducible, split
from ..comm.consistency import FIRST_CALLS, Call, on_rank_0
from ..comm.progress import ProgressEngine, run_until_complete
from ..comm.repeated import BoundExchange, RepeatedRounds
from ..core.checks import choices, nearest
from ..core.files import own_part_of, replaced
from ..errors import ConfigError, HpcdpError, UnsupportedError, reason, to_stderr
from . import cost_model, halving_doubling, hierarchical, intra_node, ring, tree
from .cost_model import ETHERNET, FABRIC, Link, MachineModel, Topology, assumed


@dataclass(frozen=True)
class Algorithm:
    """An implementation of a collective.

    Each function takes the collective's arguments, as `reference_allreduce` and the others do, then the world;
    ``steps`` also takes a tag. A function that compares calls itself takes the `Call` instead of a tag.
    """

    name: str
    steps: Callable[..., Steps] | None
    """Returns a machine; None for an algorithm that can only block."""
    blocking: Callable[..., None] | None = None
    """Replaces ``steps`` in blocking calls, if that is faster."""
    spares_input: bool = False
    """True if a reduce does not change the arrays of ranks other than the root."""
    any_monoid: bool = True
    """True if it supports user-defined reductions."""
    compares: bool = False
    """True if its functions compare the calls of all ranks themselves."""
    takes_length: bool = False
    """True if its messages between nodes have the length that `ring.fit_messages` measures."""
    prepare: Callable[[World], None] | None = None
    """Allocates what a world keeps for the algorithm, such as memory; all ranks call it before the first use."""
    bind: Callable[..., BoundExchange | RepeatedRounds | None] | None = None
    """Returns ``blocking`` for arrays like its first argument with all preparations made, or None; after the first use.
    """

    def machine(self, world: World, call: Call, x: np.ndarray, *further: object) -> Steps:
        """Return a machine that has not started; ``x`` and ``further`` are the collective's arguments."""
        assert self.steps is not None
        progress = ProgressEngine.of(world)
        if self.prepare is not None:
            progress.prepare(self.prepare, world, call)
        if self.compares:
            progress.calls.number += 1
            return self.steps(x, *further, world, call)
        comparison = progress.calls.steps(call)
        return _one_after_another(comparison, self.steps(x, *further, world, progress.tag(call.signature)))

    def run(self, world: World, call: Call, x: np.ndarray, *further: object) -> None:
        """Run the collective to its end, after all operations started before.

        Raises:
            MismatchError: a rank made another call; the same error on every rank.
        """
        if world.size == 1:
            return
        if not world.meetings:
            self._run(world, call, x, *further)
            return
        with world.meeting():
            self._run(world, call, x, *further)

    def _run(self, world: World, call: Call, x: np.ndarray, *further: object) -> None:
        progress = ProgressEngine.of(world)
        with progress.watchdog.watching(call.operation, x):
            progress.finish()
            if self.prepare is not None:
                progress.prepare(self.prepare, world, call)
            if self.compares:
                progress.calls.number += 1
                self.blocking(x, *further, world, call)  # type: ignore[misc]
                return
            progress.calls.agree(call)
            if self.blocking is not None:
                self.blocking(x, *further, world)
            elif self.steps is not None:
                run_until_complete(self.steps(x, *further, world, progress.tag(call.signature)))

    def may_be_bound(self, world: World) -> bool:
        """Return whether `bound` may be called yet."""
        shares = world.node_memory.size == world.size
        return shares or ProgressEngine.of(world).calls.number >= FIRST_CALLS

    def bound(self, world: World, call: Call, x: np.ndarray, *further: object) -> BoundExchange | RepeatedRounds | None:
        """Return `run` for arrays like ``x``, which has run before, ready to be repeated; None without a kernel."""
        return None if self.bind is None or world.size == 1 else self.bind(x, *further, world, call)


def reference_allreduce(x: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks of ``comm``."""
    inputs = [x if rank == comm.rank else np.empty_like(x) for rank in range(comm.size)]
    yield [comm.irecv(inputs[rank], rank, tag) for rank in _other_ranks(comm)] + [
        comm.isend(x, rank, tag) for rank in _other_ranks(comm)
    ]
    narrow(reduce_in_order(inputs, op), x)


def reference_reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    yield from reference_allreduce(x, op, comm, tag)
    out[...] = split(x, comm.size)[comm.rank]


def reference_allgather(out: np.ndarray, comm: Communicator, tag: int) -> Steps:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    parts = split(out, comm.size)
    yield [comm.irecv(parts[rank], rank, tag) for rank in _other_ranks(comm)] + [
        comm.isend(parts[comm.rank], rank, tag) for rank in _other_ranks(comm)
    ]


def reference_broadcast(x: np.ndarray, root: int, comm: Communicator, tag: int) -> Steps:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    if comm.rank == root:
        yield [comm.isend(x, rank, tag) for rank in _other_ranks(comm)]
    else:
        yield [comm.irecv(x, root, tag)]


def reference_reduce(x: np.ndarray, op: Reduction, root: int, comm: Communicator, tag: int) -> Steps:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    yield from reference_allreduce(x, op, comm, tag)


def _other_ranks(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def native_allreduce(x: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, in place over all ranks."""
    total = op.widened(x)
    world.comm.native_allreduce(total, op.of_partial_results().name)
    op.finish(total, world.size, x)


def native_allreduce_steps(x: np.ndarray, op: Reduction, world: World, tag: int) -> Steps:
    """Run `native_allreduce` as a machine."""
    name, total = op.name, reducible(op.widened(x))
    nan = np.isnan(total) if name in ("min", "max") and total.dtype.kind == "f" else None
    started = [world.comm.native_iallreduce(total, op.of_partial_results().name)]
    if nan is not None:  # MPI's minimum and maximum may drop a NaN
        started.append(world.comm.native_iallreduce(nan.view(np.uint8), "max"))
    yield started  # at once: MPI needs the same order of operations on all ranks
    if nan is not None:
        total[nan] = np.nan
    op.finish(total, world.size, x)


def native_reduce_scatter(x: np.ndarray, out: np.ndarray, op: Reduction, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, with this rank's shard in ``out``; ``x`` is overwritten."""
    total = op.widened(x)
    shard = out if total.dtype == out.dtype else np.empty(out.size, total.dtype)
    world.comm.native_reduce_scatter(total, shard, op.of_partial_results().name)
    op.finish(shard, world.size, out)


def native_allgather(out: np.ndarray, world: World) -> None:
    """Complete ``out``, shape ``(count,)``, in which every rank has written its shard."""
    world.comm.native_allgather(out)


def native_broadcast(x: np.ndarray, root: int, world: World) -> None:
    """Overwrite ``x``, shape ``(count,)``, on all ranks with the values of ``root``."""
    world.comm.native_broadcast(x, root)


def native_reduce(x: np.ndarray, op: Reduction, root: int, world: World) -> None:
    """Reduce ``x``, shape ``(count,)``, over all ranks, in place on ``root``; elsewhere it may be overwritten."""
    total = op.widened(x)
    world.comm.native_reduce(total, op.of_partial_results().name, root)
    if world.rank == root:
        op.finish(total, world.size, x)


def _one_after_another(first: Steps, second: Steps) -> Steps:
    yield from first
    yield from second


def _flat(name: str, steps: Callable[..., Steps], takes_length: bool = False) -> Algorithm:
    """Return an algorithm over the communicator of all ranks of a world, which may take the length of messages."""

    def over_all_ranks(*arguments: Any) -> Steps:
        *arrays, world, tag = arguments
        return steps(*arrays, world.comm, tag, *([ring.message_nbytes(world)] if takes_length else []))

    return Algorithm(name, over_all_ranks, takes_length=takes_length)


def _shared(
    blocking: Callable[..., None],
    steps: Callable[..., Steps] | None = None,
    any_monoid: bool = True,
    bind: Callable[..., BoundExchange | None] | None = None,
) -> Algorithm:
    prepare = intra_node.prepare
    return Algorithm("shared", steps, blocking, any_monoid=any_monoid, compares=True, prepare=prepare, bind=bind)


def _doubling(
    of: Callable[..., halving_doubling.Combined],
    bind: Callable[..., RepeatedRounds | None],
    spares_input: bool = False,
) -> Algorithm:
    return Algorithm(
        "recursive_doubling",
        functools.partial(halving_doubling.recursive_doubling_steps, of),
        functools.partial(halving_doubling.recursive_doubling, of),
        spares_input=spares_input,
        compares=True,
        bind=bind,
    )


def _by_name(*algorithms: Algorithm) -> dict[str, Algorithm]:
    return {algorithm.name: algorithm for algorithm in algorithms}


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": _by_name(
        _flat("reference", reference_allreduce),
        Algorithm("native", native_allreduce_steps, native_allreduce, any_monoid=False),
        _shared(
            intra_node.allreduce,
            intra_node.allreduce_steps,
            any_monoid=False,
            bind=intra_node.bound_allreduce,
        ),
        _flat("ring", ring.allreduce, True),
        _flat("bidirectional", ring.bidirectional_allreduce),
        _flat("halving_doubling", halving_doubling.allreduce, True),
        _doubling(halving_doubling.of_allreduce, halving_doubling.bound_allreduce),
        _flat("tree", tree.allreduce, True),
        _flat("double_tree", tree.double_tree_allreduce, True),
        Algorithm("hierarchical", hierarchical.allreduce, takes_length=True, prepare=hierarchical.prepare),
    ),
    "reduce_scatter": _by_name(
        _flat("reference", reference_reduce_scatter),
        Algorithm("native", None, native_reduce_scatter, any_monoid=False),
        _shared(
            intra_node.reduce_scatter,
            intra_node.reduce_scatter_steps,
            any_monoid=False,
            bind=intra_node.bound_reduce_scatter,
        ),
        _flat("ring", ring.reduce_scatter),
        _flat("halving_doubling", halving_doubling.reduce_scatter, True),
        _doubling(halving_doubling.of_reduce_scatter, halving_doubling.bound_reduce_scatter),
    ),
    "allgather": _by_name(
        _flat("reference", reference_allgather),
        Algorithm("native", None, native_allgather),
        _shared(intra_node.allgather, intra_node.allgather_steps, bind=intra_node.bound_allgather),
        _flat("ring", ring.allgather),
        _doubling(halving_doubling.of_allgather, halving_doubling.bound_allgather),
    ),
    "broadcast": _by_name(
        _flat("reference", reference_broadcast),
        Algorithm("native", None, native_broadcast),
        _shared(intra_node.broadcast, intra_node.broadcast_steps, bind=intra_node.bound_broadcast),
        _flat("tree", tree.broadcast, True),
        _doubling(halving_doubling.of_broadcast, halving_doubling.bound_broadcast),
    ),
    "reduce": _by_name(
        _flat("reference", reference_reduce),
        Algorithm("native", None, native_reduce, spares_input=True, any_monoid=False),
        _shared(intra_node.reduce, intra_node.reduce_steps, any_monoid=False, bind=intra_node.bound_reduce),
        _flat("tree", tree.reduce, True),
        _doubling(halving_doubling.of_reduce, halving_doubling.bound_reduce, spares_input=True),
    ),
}
"""The algorithms of every collective by name."""

MOVEMENTS = {
    "allgatherv": ("ring", "bruck_allgather", "by_node_allgather"),
    "alltoall": ("pairwise", "bruck", "by_node"),
}
"""The algorithms in `blocks.ALGORITHMS` by which messages move blocks, the one first that others must beat."""

LIBRARY = "native"
"""The MPI library's own algorithms, which those in `ALGORITHMS` must beat."""


def algorithms_of(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms that a table may choose for a key of `ALGORITHMS` or `MOVEMENTS`."""
    return MOVEMENTS.get(collective) or tuple(ALGORITHMS[collective])


def baseline_of(collective: str) -> str:
    """Return the algorithm that the others of a collective must beat."""
    return MOVEMENTS[collective][0] if collective in MOVEMENTS else LIBRARY


TUNED = (*ALGORITHMS, *MOVEMENTS)
"""The collectives of a table."""

VERSION = 2
"""Version of the table format and of the measured algorithms."""

CHOICES = "what collectives have chosen"
"""Key of `World.kept` for the cached plans of `api`, which a new table invalidates."""

Fingerprint = dict[str, Any]
Table = dict[str, Any]
"""``version``, ``fingerprint``, ``machine`` (see `MachineModel`), ``choices`` and the ``measured`` rows behind them.

``choices`` has for each collective a list of ``[nbytes, algorithm]``: the algorithm up to that size; null in the last
entry means any size.
"""
BY_MODEL = "auto"
"""In a table's choices: the cost model chooses, as it does without a table."""


def folder() -> Path:
    """Return the folder of tables: ``HPCDP_TUNING_DIR``, else ``tuning`` beside the compiled kernels."""
    configured = os.environ.get("HPCDP_TUNING_DIR")
    return Path(configured) if configured else kernels.cache_dir() / "tuning"


def path(fingerprint: Fingerprint) -> Path:
    """Return the file of the table with this fingerprint; on rank 0."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:12]}.json"


def processor_name() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _has_fabric() -> bool:
    """Return whether this machine has an RDMA adapter: InfiniBand, Omni-Path, RoCE or the like."""
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def fingerprint(world: World) -> Fingerprint:
    """Return everything that decides which algorithm is fastest in ``world``; every rank must call the first time."""
    known: Fingerprint | None = world.kept.get("tuning fingerprint")
    return known or world.keep("tuning fingerprint", lambda: _fingerprint(world))


def _fingerprint(world: World) -> Fingerprint:
    mine = [world.node, world.cores, processor_name(), _has_fabric(), socket.gethostname(), world.node_memory.size]
    ranks = world.comm.allgather_json(mine)
    nodes = [[rank for rank in ranks if rank[0] == node] for node in range(world.num_nodes)]
    network = "fabric" if all(rank[3] for rank in ranks) else "ethernet"
    return {
        "library": world.library,
        "ranks_per_node": [len(node) for node in nodes],
        "cores_per_node": [node[0][1] for node in nodes],
        "shared_memory": all(rank[5] == len(node) for node in nodes for rank in node),
        "processors": sorted({rank[2] for rank in ranks}),
        "machines": len({rank[4] for rank in ranks}),
        "network": network if world.num_nodes > 1 else "none",
    }


def topology(world: World) -> Topology:
    """Return the nodes of ``world`` for the cost model; every rank must call the first time."""
    facts = fingerprint(world)
    return Topology(tuple(facts["ranks_per_node"]), facts["shared_memory"], bool(crowded(world)))


def machine(world: World) -> MachineModel:
    """Return the measured machine model of ``world``, else the assumed one; every rank must call the first time."""
    table = loaded(world)
    if table is None:
        return assumed(topology(world), FABRIC if fingerprint(world)["network"] == "fabric" else ETHERNET)
    return _machine(table["machine"])


def crowded(world: World) -> str:
    """Return why the cost model does not apply (ranks share cores), or ""; every rank must call the first time."""
    facts = fingerprint(world)
    ranks, cores, machines = facts["ranks_per_node"], facts["cores_per_node"], facts["machines"]
    full = [(have, of) for have, of in zip(ranks, cores, strict=True) if have > of]
    if machines < len(ranks) and sum(ranks) > machines * max(cores):  # simulated nodes share a machine
        full.append((sum(ranks), machines * max(cores)))
    return f"{full[-1][0]} ranks share {full[-1][1]} core{'s' if full[-1][1] > 1 else ''}" if full else ""


def _machine(values: dict[str, Any]) -> MachineModel:
    inside, across = (Link(**_seconds(values[name])) for name in ("inside", "across"))
    other_rates = {name: value for name, value in values.items() if name not in ("inside", "across")}
    return MachineModel(inside, across, **_seconds(other_rates))


def _seconds(values: dict[str, Any]) -> dict[str, Any]:
    rates = tuple((size, first, second) for size, first, second in values.get("by_size", ()))
    sizes = [rate[0] for rate in rates]
    single = [value for name, value in values.items() if name != "by_size"]
    for value in (*single, *(seconds for rate in rates for seconds in rate[1:])):
        if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
            raise ValueError(value)
    if any(type(size) is not int for size in sizes) or sizes != sorted({1, *sizes} - {1}):
        raise ValueError(sizes)
    return {**values, "by_size": rates}


def choice(world: World, collective: str, nbytes: int) -> str | None:
    """Return the algorithm that the table of ``world`` names for arrays of ``nbytes``; None without a table that fits.

    Every rank must call the first time; all get the same answer. The measurements were float32 sums: the caller must
    check that the algorithm supports another dtype or reduction.
    """
    table = loaded(world)
    for most, algorithm in table["choices"].get(collective, ()) if table else ():
        if most is None or nbytes <= most:
            return None if algorithm == BY_MODEL else str(algorithm)
    return None


def is_loaded(world: World) -> bool:
    """Return whether the ranks have exchanged the results of `loaded`, `topology` and `machine`."""
    return "tuning table" in world.kept and "tuning fingerprint" in world.kept


def loaded(world: World) -> Table | None:
    """Return the table that fits ``world``, or None; rank 0 reads it once, in its environment. Every rank must call."""
    if "tuning table" not in world.kept:
        expected = fingerprint(world)
        table = world.comm.allgather_json(_read(expected) if world.rank == 0 else None)[0]
        world.keep("tuning table", lambda: table)
    return world.kept["tuning table"]  # type: ignore[no-any-return]


def _read(expected: Fingerprint) -> Table | None:
    where: Path | None = None
    try:
        where = path(expected)
        if where.parent.exists() and not where.parent.is_dir():
            raise ConfigError("HPCDP_TUNING_DIR", expected="a folder", got=f"the file {where.parent}")
        if not where.exists():
            return None
        table = json.loads(where.read_text(encoding="utf-8"))
        reason = misfit(table, expected)
    except (OSError, ValueError, RecursionError, HpcdpError) as error:
        table, reason = None, str(error)
    if reason:
        name = "no tuning table" if where is None else f"tuning table {where}"
        reason = " ".join(reason.split())
        to_stderr(f"hpcdp: {name} is ignored: {reason}; `hpcdp tune` writes a new one")
        return None
    assert isinstance(table, dict)
    return table


def misfit(table: Any, expected: Fingerprint) -> str:
    """Return why ``table`` cannot be used in a world with this fingerprint, or ""."""
    if not isinstance(table, dict) or table.get("version") != VERSION:
        version = table.get("version") if isinstance(table, dict) else None
        return f"its version is {version!r}, not {VERSION}"
    saved = table.get("fingerprint")
    if not isinstance(saved, dict):
        return "it has no fingerprint"
    for name, value in expected.items():
        if saved.get(name) != value:
            return f"{name} is {saved.get(name)!r}, here it is {value!r}"
    try:
        _machine(table["machine"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return "its machine lacks seconds that the cost model needs"
    return _wrong_choices(table.get("choices")) or _wrong_rows(table.get("measured"))


def _wrong_choices(choices: Any) -> str:
    if not isinstance(choices, dict):
        return "it has no choices"
    for collective, entries in choices.items():
        if collective not in TUNED:
            return f"unknown collective {collective!r}, valid: {', '.join(TUNED)}"
        if not isinstance(entries, list):
            return f"the choices of {collective} are no list"
        before = -1
        for number, entry in enumerate(entries, start=1):
            last = number == len(entries)
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
                return f"choice {number} of {collective} is {entry!r}, not [nbytes, algorithm]"
            most, algorithm = entry
            if algorithm not in (BY_MODEL, *algorithms_of(collective)):
                valid = ", ".join(algorithms_of(collective))
                return f"unknown algorithm {algorithm!r} of {collective}, valid: {valid}"
            is_integer = isinstance(most, int) and not isinstance(most, bool)
            if not (last and most is None) and not (is_integer and most > before):
                return f"choice {number} of {collective} is up to {most!r} bytes, after {before}"
            before = most
    return ""


def _wrong_rows(measured: Any) -> str:
    if not isinstance(measured, dict):
        return f"measured is {measured!r:.40}, not rows by collective"
    for collective, rows in measured.items():
        if collective not in TUNED:
            return f"measured has an unknown collective {collective!r}, valid: {', '.join(TUNED)}"
        if not isinstance(rows, list):
            return f"the measurements of {collective} are no list"
        for number, row in enumerate(rows, start=1):
            if not _is_row(row, collective):
                return f"row {number} of the measurements of {collective} lacks figures that `hpcdp tune` writes"
    return ""


def _is_row(row: Any, collective: str) -> bool:
    if not isinstance(row, dict) or type(row.get("nbytes")) is not int or row["nbytes"] < 1:
        return False
    figures = [row.get(name) for name in ("median_us", "predicted_us", "gain", "wrong")]
    for values in figures:
        if not isinstance(values, dict) or not all(type(value) in (int, float) for value in values.values()):
            return False
    chosen = row.get("chosen")
    known = isinstance(chosen, str) and chosen in algorithms_of(collective)
    needed = [figures[0], figures[1] or figures[0]]  # no predictions if ranks share cores
    compared = baseline_of(collective), chosen
    return known and all(name in values for values in needed for name in compared)  # type: ignore[operator]


def make(world: World, measured: MachineModel, choices: dict[str, list[list[Any]]], details: Any) -> Table:
    """Return a table for ``world`` of measurements made there; every rank must call the first time."""
    return {
        "version": VERSION,
        "fingerprint": fingerprint(world),
        "machine": asdict(measured),
        "choices": choices,
        "measured": details,
    }


def save(world: World, table: Table) -> Path:
    """Write ``table`` atomically for this and later jobs, and use it from now on; every rank must call.

    Returns:
        The file.

    Raises:
        ConfigError: on every rank: it cannot be written.
    """
    name = on_rank_0(world.comm, lambda: str(_write(table)))
    world.kept["tuning table"] = table
    world.kept.pop(CHOICES, None)
    return Path(name)


def check_folder(world: World) -> None:
    """Create `folder()` before anything is measured for it; every rank must call.

    Raises:
        ConfigError: on every rank: it cannot be written.
    """
    on_rank_0(world.comm, lambda: _make_folder(folder()))


def _make_folder(where: Path) -> None:
    try:
        where.mkdir(parents=True, exist_ok=True)
        if not os.access(where, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(where, error) from error


def _unwritable(where: Path, error: OSError) -> ConfigError:
    remedy = "set HPCDP_TUNING_DIR to a writable folder"
    return ConfigError("tuning table", where=where, expected="a writable folder", got=reason(error), remedy=remedy)


def _write(table: Table) -> Path:
    target = path(table["fingerprint"])
    _make_folder(target.parent)
    try:
        with replaced(target, own_part_of) as part, part.open("w", encoding="utf-8") as file:
            file.write(as_text(table))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(target, error) from error
    return target


def as_text(value: Any, indent: str = "") -> str:
    """Return readable JSON: values that fit are on one line."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 100:
        return line if indent else line + "\n"
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {as_text(item, inner)}" for key, item in value.items()]
    else:
        items = [inner + as_text(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(items) + f"\n{indent}{end}" + ("" if indent else "\n")


def find(
    collective: str,
    algorithm: str,
    nbytes: int,
    dtype: np.dtype,
    op: Reduction | None,
    world: World,
    blocks: bool = True,
) -> Algorithm:
    """Return the algorithm of that name, or the one that `choose` names for ``"auto"``.

    Args:
        collective: a key of `ALGORITHMS`.
        algorithm: a name in it, or ``"auto"``.
        nbytes: the size of the array.
        dtype: the dtype that is reduced or moved.
        op: the reduction; None for data that is only moved.
        world: the ranks.
        blocks: False for a nonblocking call, which some algorithms do not support.

    Raises:
        UnsupportedError: no such algorithm, or it does not support the reduction; lists the valid ones.
    """
    known: Mapping[str, Algorithm] = ALGORITHMS[collective]
    if algorithm == "auto":
        algorithm = choose(collective, nbytes, dtype, op, world, blocks)
    if algorithm not in known or not (blocks or known[algorithm].steps):
        valid = ["auto", *(name for name in known if blocks or known[name].steps)]
        close = nearest(algorithm, valid)
        raise UnsupportedError(
            collective, where="algorithm", expected=choices(valid), got=repr(algorithm),
            remedy=close and f"did you mean {close!r}?",
        )  # fmt: skip
    chosen = known[algorithm]
    if op is not None and not (op.named or chosen.any_monoid):
        raise UnsupportedError(
            collective, where=f"algorithm={algorithm!r}", expected=choices(OPS), got=f"the monoid {op.name!r}",
            remedy="use algorithm='auto'",
        )  # fmt: skip
    return chosen


def choose(
    collective: str, nbytes: int, dtype: np.dtype, op: Reduction | None, world: World, blocks: bool = True
) -> str:
    """Return the algorithm for ``algorithm="auto"``: by measurements of such a world, else by the cost model.

    Every rank must call the first time; all get the same name.
    """
    able = _able(collective, dtype, op, world, blocks)
    measured = choice(world, collective, nbytes)
    if measured in able:
        return measured
    return cost_model.model_choice(collective, nbytes, dtype.itemsize, topology(world), able, machine(world))


def movements(collective: str, world: World, is_even: bool = True) -> list[str]:
    """Return the names of ``MOVEMENTS[collective]`` that can move blocks, of one size if ``is_even``, in ``world``."""
    names = list(MOVEMENTS[collective])
    if "bruck" in names and not is_even:
        names.remove("bruck")
    return names if 1 < world.num_nodes < world.size else [name for name in names if not name.startswith("by_node")]


def choose_movement(collective: str, nbytes: int, world: World, is_even: bool = True) -> str:
    """Return the algorithm by which messages move blocks: by measurements of such a world, else by the cost model.

    Args:
        collective: the collective; one that is not in `MOVEMENTS` sends directly, as ranks do that share memory.
        nbytes: the size of the whole array of a rank, for an allgather of all parts; equal on all ranks.
        world: the ranks, which have called `machine` and `topology` before.
        is_even: as for `movements`.
    """
    if collective not in MOVEMENTS or intra_node.can_share(world):
        return "direct"
    nbytes = 1 << nbytes.bit_length() >> 1  # one choice per power of two
    known: dict[Any, str] = world.kept.setdefault(CHOICES, {})
    key = collective, nbytes, is_even
    if key not in known:
        names, measured = movements(collective, world, is_even), choice(world, collective, nbytes)
        nodes = topology(world)
        predicted = cost_model.choose_movement(collective, nbytes, nodes, names, machine(world))
        known[key] = measured if measured in names else predicted
    return known[key]


def _able(collective: str, dtype: np.dtype, op: Reduction | None, world: World, blocks: bool) -> list[str]:
    """Return the algorithms that support the call, without the reference."""
    by_monoid = op is not None and not op.named
    names = [
        known.name
        for known in ALGORITHMS[collective].values()
        if (known.any_monoid or not by_monoid) and (blocks or known.steps)
    ]
    names.remove("reference")
    if not blocks and "native" in names:  # Open MPI 5 crashes where several threads progress nonblocking collectives
        names.remove("native")
    can = intra_node.can_share(world) if op is None else intra_node.can_reduce(dtype, op, world)
    if "shared" in names and not can:
        names.remove("shared")
    return names
