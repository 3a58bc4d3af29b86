"""The algorithms of each collective, and the choice between them by measurement or model.

The algorithms of every collective, by name, and how each is run.

What `hpcdp tune` has measured, saved in a table for every topology, and how a world finds the one that fits it.

A table is a JSON file in `folder()`, named by a hash of its fingerprint: all that decides which algorithm is fastest,
and no name of a host, so that it fits every job of the same shape on the same kind of machines. Rank 0 reads it once
and sends it to all ranks, so all choose alike. A table that does not fit is ignored, which rank 0 says on stderr.

Which algorithm runs: one that was asked for by name, or the one that suits the world and the size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels
from ..comm import Reduction, World
from ..comm.communicator import OPS, Steps
from ..comm.consistency import Call, on_rank_0
from ..comm.tasks import ProgressEngine, run_until_complete
from ..core.files import own_part_of, replaced
from ..errors import ConfigError, HpcdpError, UnsupportedError, reason, to_stderr
from . import cost_model, halving_doubling, hierarchical, intra_node, mpi_native, naive, ring, tree
from .cost_model import ETHERNET, FABRIC, Link, MachineModel, Topology, assumed


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
        progress = ProgressEngine.of(world)
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
        progress = ProgressEngine.of(world)
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
                run_until_complete(self.steps(x, *others, world, progress.tag(call.signature)))
        finally:
            watchdog.leave(watched)

    def _prepare(self, world: World, call: Call) -> None:
        progress = ProgressEngine.of(world)
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
    return Algorithm("shared", steps, blocking, any_monoid=any_monoid, compares=True, prepare=intra_node.prepare)


def _by_name(*algorithms: Algorithm) -> dict[str, Algorithm]:
    return {algorithm.name: algorithm for algorithm in algorithms}


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": _by_name(
        _flat("reference", naive.allreduce),
        Algorithm("native", mpi_native.allreduce_steps, mpi_native.allreduce, any_monoid=False),
        _shared(intra_node.allreduce, intra_node.allreduce_steps, any_monoid=False),
        _flat("ring", ring.allreduce),
        _flat("bidirectional", ring.bidirectional_allreduce),
        _flat("halving_doubling", halving_doubling.allreduce),
        Algorithm(
            "recursive_doubling",
            halving_doubling.recursive_doubling_steps,
            halving_doubling.recursive_doubling,
            compares=True,
        ),
        _flat("tree", tree.allreduce),
        _flat("double_tree", tree.double_tree_allreduce),
        Algorithm("hierarchical", hierarchical.allreduce, prepare=hierarchical.prepare),
    ),
    "reduce_scatter": _by_name(
        _flat("reference", naive.reduce_scatter),
        Algorithm("native", None, mpi_native.reduce_scatter, any_monoid=False),
        _shared(intra_node.reduce_scatter, intra_node.reduce_scatter_steps, any_monoid=False),
        _flat("ring", ring.reduce_scatter),
        _flat("halving_doubling", halving_doubling.reduce_scatter),
    ),
    "allgather": _by_name(
        _flat("reference", naive.allgather),
        Algorithm("native", None, mpi_native.allgather),
        _shared(intra_node.allgather),
        _flat("ring", ring.allgather),
    ),
    "broadcast": _by_name(
        _flat("reference", naive.broadcast),
        Algorithm("native", None, mpi_native.broadcast),
        _shared(intra_node.broadcast),
        _flat("tree", tree.broadcast),
    ),
    "reduce": _by_name(
        _flat("reference", naive.reduce),
        Algorithm("native", None, mpi_native.reduce, spares_input=True, any_monoid=False),
        _shared(intra_node.reduce, any_monoid=False),
        _flat("tree", tree.reduce),
    ),
}
"""For every collective its algorithms by name."""


VERSION = 2
"""Of the tables' format, and of the algorithms that were measured."""

CHOICES = "what collectives have chosen"
"""Under this a world keeps for `operations` what each call has chosen once, until another table counts."""

Fingerprint = dict[str, Any]
Table = dict[str, Any]
"""``version``, ``fingerprint``, ``machine`` (see `Machine`), ``choices`` and ``measured``, what these were made from.

``choices`` has for each collective a list of ``[nbytes, algorithm]``: up to so many bytes, and above the last one with
null, that algorithm.
"""


def folder() -> Path:
    """Where tables are: ``HPCDP_TUNING_DIR``, else ``tuning`` beside the compiled kernels."""
    chosen = os.environ.get("HPCDP_TUNING_DIR")
    return Path(chosen) if chosen else kernels.cache_dir() / "tuning"


def path(fingerprint: Fingerprint) -> Path:
    """The file of the table with this fingerprint; on rank 0."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:12]}.json"


def processor_name() -> str:
    """The model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _has_fabric() -> bool:
    """Whether this machine has an adapter for remote memory access: InfiniBand, Omni-Path, RoCE or the like."""
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def fingerprint(world: World) -> Fingerprint:
    """What decides which algorithm is fastest in ``world``; every rank must call the first time."""
    found: Fingerprint | None = world.kept.get("tuning fingerprint")
    return found or world.keep("tuning fingerprint", lambda: _fingerprint(world))


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
    """The nodes of ``world`` for the cost model; every rank must call the first time."""
    found = fingerprint(world)
    return Topology(tuple(found["ranks_per_node"]), found["shared_memory"], bool(crowded(world)))


def machine(world: World) -> MachineModel:
    """What was measured of links and cores in ``world``, else what is assumed; every rank must call the first time."""
    table = loaded(world)
    if table is None:
        return assumed(topology(world), FABRIC if fingerprint(world)["network"] == "fabric" else ETHERNET)
    return _machine(table["machine"])


def crowded(world: World) -> str:
    """Why the cost model does not hold in ``world``: ranks that share cores; every rank must call the first time."""
    found = fingerprint(world)
    ranks, cores, machines = found["ranks_per_node"], found["cores_per_node"], found["machines"]
    full = [(have, of) for have, of in zip(ranks, cores, strict=True) if have > of]
    if machines < len(ranks) and sum(ranks) > machines * max(cores):  # nodes by name, that share a machine
        full.append((sum(ranks), machines * max(cores)))
    return f"{full[-1][0]} ranks share {full[-1][1]} core{'s' if full[-1][1] > 1 else ''}" if full else ""


def _machine(values: dict[str, Any]) -> MachineModel:
    inside, across = (Link(**_seconds(values[name])) for name in ("inside", "across"))
    rest = {name: value for name, value in values.items() if name not in ("inside", "across")}
    return MachineModel(inside, across, **_seconds(rest))


def _seconds(values: dict[str, Any]) -> dict[str, Any]:
    rates = tuple((size, first, second) for size, first, second in values.get("by_size", ()))
    sizes = [rate[0] for rate in rates]
    single = [value for name, value in values.items() if name != "by_size"]
    for value in (*single, *(each for rate in rates for each in rate[1:])):
        if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
            raise ValueError(value)
    if any(type(size) is not int for size in sizes) or sizes != sorted({1, *sizes} - {1}):
        raise ValueError(sizes)
    return {**values, "by_size": rates}


def choice(world: World, collective: str, nbytes: int) -> str | None:
    """The algorithm that the table of ``world`` names for arrays of ``nbytes``, None without a table that fits.

    Every rank must call the first time; all get the same answer. It was measured with sums of float32: whether it can
    do another dtype or reduction is for the caller to see.
    """
    table = loaded(world)
    for most, algorithm in table["choices"].get(collective, ()) if table else ():
        if most is None or nbytes <= most:
            return str(algorithm)
    return None


def is_loaded(world: World) -> bool:
    """Whether ranks have exchanged what `loaded`, `topology` and `machine` say."""
    return "tuning table" in world.kept and "tuning fingerprint" in world.kept


def loaded(world: World) -> Table | None:
    """The table that fits ``world``, or None; read once by rank 0, whose environment counts. Every rank must call."""
    if "tuning table" not in world.kept:
        found = fingerprint(world)
        table = world.comm.allgather_json(_read(found) if world.rank == 0 else None)[0]
        world.keep("tuning table", lambda: table)
    kept: Table | None = world.kept["tuning table"]
    return kept


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
    """Why ``table`` cannot be used in a world with this fingerprint, or nothing."""
    if not isinstance(table, dict) or table.get("version") != VERSION:
        found = table.get("version") if isinstance(table, dict) else None
        return f"version {found!r} where {VERSION} is needed"
    found = table.get("fingerprint")
    if not isinstance(found, dict):
        return "it has no fingerprint"
    for name, value in expected.items():
        if found.get(name) != value:
            return f"{name} is {found.get(name)!r}, here it is {value!r}"
    try:
        _machine(table["machine"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return "its machine does not have the seconds that the model needs"
    return _wrong_choices(table.get("choices")) or _wrong_rows(table.get("measured"))


def _wrong_choices(choices: Any) -> str:
    if not isinstance(choices, dict):
        return "it has no choices"
    for collective, entries in choices.items():
        if collective not in ALGORITHMS:
            return f"unknown collective {collective!r}, valid: {', '.join(ALGORITHMS)}"
        if not isinstance(entries, list):
            return f"the choices of {collective} are no list"
        before = -1
        for number, entry in enumerate(entries, start=1):
            last = number == len(entries)
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
                return f"choice {number} of {collective} is {entry!r}, not [nbytes, algorithm]"
            most, algorithm = entry
            if algorithm not in ALGORITHMS[collective]:
                valid = ", ".join(ALGORITHMS[collective])
                return f"unknown algorithm {algorithm!r} of {collective}, valid: {valid}"
            whole = isinstance(most, int) and not isinstance(most, bool)
            if not (last and most is None) and not (whole and most > before):
                return f"choice {number} of {collective} is up to {most!r} bytes, after {before}"
            before = most
    return ""


def _wrong_rows(measured: Any) -> str:
    if not isinstance(measured, dict):
        return f"measured is {measured!r:.40}, not rows by collective"
    for collective, rows in measured.items():
        if collective not in ALGORITHMS:
            return f"measured has an unknown collective {collective!r}, valid: {', '.join(ALGORITHMS)}"
        if not isinstance(rows, list):
            return f"what was measured of {collective} is no list"
        for number, row in enumerate(rows, start=1):
            if not _is_row(row, ALGORITHMS[collective]):
                return f"row {number} of what was measured of {collective} lacks figures that `hpcdp tune` writes"
    return ""


def _is_row(row: Any, algorithms: Container[str]) -> bool:
    if not isinstance(row, dict) or type(row.get("nbytes")) is not int or row["nbytes"] < 1:
        return False
    figures = [row.get(name) for name in ("median_us", "predicted_us", "gain", "wrong")]
    for each in figures:
        if not isinstance(each, dict) or not all(type(value) in (int, float) for value in each.values()):
            return False
    chosen = row.get("chosen")
    known = isinstance(chosen, str) and chosen in algorithms
    needed = [figures[0], figures[1] or figures[0]]  # there are predictions of all or, where ranks share cores, none
    return known and all(name in each for each in needed for name in ("native", chosen))  # type: ignore[operator]


def make(world: World, measured: MachineModel, choices: dict[str, list[list[Any]]], details: Any) -> Table:
    """A table for ``world`` of what was measured there; every rank must call the first time."""
    return {
        "version": VERSION,
        "fingerprint": fingerprint(world),
        "machine": asdict(measured),
        "choices": choices,
        "measured": details,
    }


def save(world: World, table: Table) -> Path:
    """Write ``table`` for this and later jobs, all or nothing, and use it from now on; every rank must call.

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
    """Make `folder()`, before anything is measured for it; every rank must call.

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
    expected, remedy = "a folder that can be written", "set HPCDP_TUNING_DIR to one"
    return ConfigError("tuning table", where=where, expected=expected, got=reason(error), remedy=remedy)


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
    """JSON for readers: what fits is on one line."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= 100:
        return line if indent else line + "\n"
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {as_text(each, inner)}" for key, each in value.items()]
    else:
        items = [inner + as_text(each, inner) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(items) + f"\n{indent}{end}" + ("" if indent else "\n")


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
    measured = choice(world, collective, nbytes)
    if measured in able:
        return measured
    return cost_model.model_choice(collective, nbytes, dtype.itemsize, topology(world), able, machine(world))


def _able(collective: str, dtype: np.dtype, op: Reduction | None, world: World) -> list[str]:
    """The algorithms that can do it; the specification is none to choose."""
    by_monoid = op is not None and not op.named
    names = [each.name for each in ALGORITHMS[collective].values() if each.any_monoid or not by_monoid]
    names.remove("reference")
    can = intra_node.can_share(world) if op is None else intra_node.can_reduce(dtype, op, world)
    if "shared" in names and not can:
        names.remove("shared")
    return names
