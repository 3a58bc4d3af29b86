"""`hpcdp tune`: measure the links and every algorithm in this world once, and save which algorithm suits which size.

Later jobs of the same shape follow the table with ``algorithm="auto"``. An algorithm replaces the MPI library's own
where it is at least 8% faster in the median of the ratios of alternating turns, and one of hpcdp's replaces another by
the same margin, so noise does not choose. Between two measured sizes that disagree the library's own runs; beyond what
was measured, see `entries`. Sizes and collectives that a job leaves out stay as they were saved. Each time stands
beside what the cost model expects of the links measured with it. ``reference`` is timed too, but never chosen: it is
the specification, and its memory grows with the number of ranks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.checks import one_of
from ..errors import ConfigError, listed
from ..launch.checks import Parser

if TYPE_CHECKING:
    from ..collectives.cost_model import MachineModel
    from ..collectives.registry import Table
    from ..comm import World

LIBRARY = "native"
GAIN = 1.08
"""So many times as fast must an algorithm be as the one that it replaces: less is in the noise of a busy machine."""

_IN_REACH = 1.5  # algorithms slower than this many times the best of the first heat are not timed again
_STEADY = 0.75  # of the turns, in which an algorithm must not be slower than the library's own
_SMALL_NBYTES, _LARGE_NBYTES = 64, 16_000_000  # beyond these a neighbour's choice holds, see `entries`
_REFERENCE_NBYTES = 64 << 20  # everybody's arrays at everybody's: more only fills the memory
_EPILOG = """\
examples:
  hpcdp launch -n 2 -- hpcdp tune
  srun hpcdp tune --quick
  hpcdp launch -n 4 -- hpcdp tune allreduce -m 64K:64M
  mpirun -n 8 hpcdp tune --show

Tables are in HPCDP_TUNING_DIR, else beside the compiled kernels.
"""


def parser() -> Parser:
    """The options of ``hpcdp tune``."""
    made = Parser(
        prog="hpcdp tune",
        usage="hpcdp tune [COLLECTIVE ...] [-m MIN:MAX] [--quick] [--dry-run | --show]",
        description="Measure links and algorithms, and save which is the fastest at each size.",
        epilog=_EPILOG,
    )
    made.add_argument("collectives", nargs="*", metavar="COLLECTIVE", help="only these; what was saved of others stays")
    made.add_argument("-m", dest="sizes", metavar="MIN:MAX", help="array sizes in bytes (4:64M); others stay")
    made.add_argument("--quick", action="store_true", help="sizes 4:4M and fewer timings, some seconds in all")
    either = made.add_mutually_exclusive_group()
    either.add_argument("--dry-run", action="store_true", help="measure and print, save nothing")
    either.add_argument("--show", action="store_true", help="print the table that fits these ranks, measure nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for and return the exit status: 1 when a result was wrong. Every rank of a job must call.

    Raises:
        ConfigError: on every rank, for what cannot be done.
    """
    given = parser().parse_args(argv)
    from ..collectives import ALGORITHMS
    from .measure import size_range

    for name in given.collectives:
        one_of("tune", "collective", name, ALGORITHMS)
    sizes = size_range(given.sizes or ("4:4M" if given.quick else "4:64M"), 4 if given.quick else 2)
    if sizes[0] < 4:
        raise ConfigError("tune -m", expected="4 bytes or more, a float32", got=given.sizes)

    from .. import comm
    from .results import pin_to_own_core

    world = comm.init()
    if given.show:
        show(world)
        return 0
    if world.size > 1:
        from ..collectives import registry

        registry.fingerprint(world)
        pin_to_own_core(world)
    effort = Effort.quick(sizes) if given.quick else Effort(sizes)
    return tune(world, effort, given.dry_run, given.collectives)


@dataclass(frozen=True)
class Effort:
    """What is measured, and how long: ``seconds`` for the finals of one collective at one size, by estimate."""

    sizes: Sequence[int]
    seconds: float = 0.6
    iterations: int = 60

    @classmethod
    def quick(cls, sizes: Sequence[int]) -> Effort:
        """For a first impression."""
        return cls(sizes, 0.1, 20)


def tune(world: World, effort: Effort, dry_run: bool = False, collectives: Sequence[str] = ()) -> int:
    """`main` for ranks that know their world; rank 0 prints and writes.

    What was saved of other collectives, and of other sizes, stays.

    Raises:
        ConfigError: on every rank: a world of one, too little memory, or a folder that cannot be written.
    """
    from .. import __version__
    from ..collectives import ALGORITHMS, registry
    from . import probe

    if world.size < 2:
        raise ConfigError("tune", expected="2 ranks or more", got="1", remedy="hpcdp launch -n 2 -- hpcdp tune")
    _check_memory(world, effort.sizes[-1])
    if not dry_run:
        registry.check_folder(world)
    nodes = f"{world.num_nodes} node{'s' if world.num_nodes > 1 else ''}"
    facts = [f"hpcdp tune v{__version__}, {world.size} ranks on {nodes}, {world.library}"]
    machine = probe.probe(world)
    crowded = registry.crowded(world)
    facts += probe.describe(machine, world.num_nodes > 1)
    facts += [f"no predictions: {crowded}, and the model takes a core for each"] if crowded else []
    _say(world, _comments([*facts, _GAIN_IS]))
    before = registry.loaded(world) or {}
    choices, measured, faulty = dict(before.get("choices", {})), dict(before.get("measured", {})), 0
    for collective in collectives or ALGORITHMS:
        rows = []
        names = usable(world, collective)
        _say(world, ["", *textwrap.wrap(f"# {collective}: {', '.join(names)}", 80, subsequent_indent="# "), HEADING])
        incumbent = LIBRARY
        parts = world.size if collective == "allgather" else 1
        for nbytes in dict.fromkeys(max(1, size // 4 // parts) * 4 * parts for size in effort.sizes):
            row = measure(world, collective, names, nbytes, effort)
            incumbent = row["chosen"] = chosen(row["gain"], incumbent)
            algorithms = () if crowded else row["median_us"]
            row["predicted_us"] = predictions(world, machine, collective, row["nbytes"], algorithms)
            faulty += sum(row["wrong"].values())
            _say(world, [line(row)])
            rows.append(row)
        measured[collective] = merged(measured.get(collective, []), rows)
        choices[collective] = entries(
            *zip(*((row["nbytes"], row["chosen"]) for row in measured[collective]), strict=True)
        )
    table = registry.make(world, machine, choices, measured)
    if faulty:
        _say(world, ["", f"# {faulty} elements were WRONG: nothing is saved"])
        return 1
    if dry_run:
        _say(world, ["", "# nothing is saved"])
    else:
        _say(world, ["", f"# saved in {registry.save(world, table)}"])
    return 0


def _comments(facts: Iterable[str]) -> list[str]:
    return [line for fact in facts for line in textwrap.wrap(fact, 80, initial_indent="# ", subsequent_indent="#   ")]


def _say(world: World, lines: Iterable[str]) -> None:
    if world.rank == 0:
        print("\n".join(lines), flush=True)


def _check_memory(world: World, nbytes: int) -> None:
    from ..launch.hosts import memory_mib

    needed = 4 * nbytes * world.local_size >> 20
    available, needed = min(world.comm.allgather_json([memory_mib()[1], needed]), key=lambda pair: pair[0] - pair[1])
    if needed > available:
        raise ConfigError(
            "tune -m",
            expected=f"arrays for which the {available} MiB of memory that are free are enough",
            got=f"{nbytes} bytes, for which a node's ranks need {needed} MiB",
        )


def usable(world: World, collective: str) -> list[str]:
    """The algorithms of ``collective`` that can run in ``world``; every rank must call."""
    import numpy as np

    from ..collectives import ALGORITHMS
    from ..errors import UnsupportedError
    from .collective import CALLS, CollectiveSweep

    found = []
    for name in ALGORITHMS[collective]:
        x = np.ones(world.size, np.float32)
        out = x if collective in ("allreduce", "broadcast", "reduce") else np.ones(1, np.float32)
        arrays = (out, x) if collective == "allgather" else (x, out)
        try:
            CALLS[collective](*arrays, CollectiveSweep(collective, x.dtype, algorithm=name), world)
        except UnsupportedError:
            continue
        found.append(name)
    return found


def measure(world: World, collective: str, names: Sequence[str], nbytes: int, effort: Effort) -> dict[str, Any]:
    """Time the algorithms at one size; every rank must call, and gets the same.

    Args:
        nbytes: of the whole float32 array; of an allgather that of all ranks' parts, which are equal.

    Returns ``nbytes`` and by algorithm ``median_us`` (of the slowest rank), ``wrong`` (elements over all ranks) and
    ``gain``: how many times as fast as the MPI library's own, for those that may be chosen: they were in reach of the
    fastest, right, and no slower than the library's own in most turns.
    """
    import numpy as np

    from .collective import Buffers, CollectiveSweep, exchange
    from .measure import MeasuringSchedule, alternate, gather, median_ratio, turn_medians, wrong

    how = CollectiveSweep(collective, np.dtype(np.float32))
    count = nbytes // 4 // (world.size if collective == "allgather" else 1)
    buffers = Buffers(how, count, world)

    def timed(algorithms: Sequence[str], schedule: MeasuringSchedule) -> tuple[dict[str, Any], dict[str, int]]:
        candidates = [_named(exchange(replace(how, algorithm=each), buffers, count), each) for each in algorithms]
        found = gather(world, alternate(candidates, world.comm.barrier, schedule))
        turns = {name: turn_medians(ranks) for name, ranks in found.items()}
        return turns, {name: wrong(ranks) for name, ranks in found.items()}

    affordable = [name for name in names if name != "reference" or world.size * nbytes <= _REFERENCE_NBYTES]
    long = nbytes > 1 << 20
    heat, faults = timed(affordable, MeasuringSchedule(1 if long else 3, 1 if long else 5, 1))
    median_us = {name: float(np.median(us)) for name, us in heat.items()}
    right = [name for name in affordable if not faults[name] and name != "reference"]
    best = min((median_us[name] for name in right), default=0.0)
    finalists = [name for name in right if name == LIBRARY or median_us[name] <= _IN_REACH * best]
    gain = {LIBRARY: 1.0}
    if len(finalists) > 1 and LIBRARY in finalists:
        turns, again = timed(finalists, _finals(nbytes, sum(median_us[name] for name in finalists), effort))
        median_us |= {name: float(np.median(us)) for name, us in turns.items()}
        faults |= again
        gain |= {
            name: median_ratio(turns[LIBRARY], us)
            for name, us in turns.items()
            if not again[name] and np.mean(turns[LIBRARY] >= us) >= _STEADY
        }
    return {"nbytes": nbytes, "median_us": median_us, "gain": gain, "wrong": faults}


def _named(made: Any, name: str) -> Any:
    made.name = name
    return made


def _finals(nbytes: int, once_us: float, effort: Effort) -> Any:
    from .measure import MeasuringSchedule

    schedule = MeasuringSchedule.for_size(nbytes, effort.iterations, 1)
    affordable = int(effort.seconds * 1e6 / max(once_us * schedule.repeats, 1.0))
    return replace(schedule, turns=max(3, min(schedule.turns, affordable)))


def chosen(gain: dict[str, float], incumbent: str) -> str:
    """Which algorithm a size gets.

    Args:
        gain: by algorithm, how many times as fast as the MPI library's own it is.
        incumbent: what the next smaller size has got, which stays where the best is not `GAIN` times as fast.
    """
    best = max(gain, key=gain.__getitem__)
    if gain[best] < GAIN:
        return LIBRARY
    return incumbent if gain.get(incumbent, 0.0) >= max(GAIN, gain[best] / GAIN) else best


def merged(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one collective by size, where both have measured one those of ``rows``."""
    by_size = {row["nbytes"]: row for row in (*before, *rows)}
    return [by_size[nbytes] for nbytes in sorted(by_size)]


def entries(sizes: Sequence[int], names: Sequence[str]) -> list[list[Any]]:
    """The choices as `tuning.Table` has them, of sizes in ascending order and what each has got.

    What is between two sizes that disagree gets the library's own, and so does what is below the smallest, unless that
    is at most 64 bytes. Above the largest the last choice holds from 16 MB on; without so large a size there is none.
    """
    found: list[list[Any]] = [[sizes[0] - 1, LIBRARY]] if sizes[0] > _SMALL_NBYTES else []
    for number, name in enumerate(names):
        after = names[number + 1] if number + 1 < len(names) else name
        last = number + 1 == len(names)
        most = None if last and sizes[number] >= _LARGE_NBYTES else sizes[number]
        if not last and after != name and name == LIBRARY:
            most = sizes[number + 1] - 1
        if found and found[-1][1] == name:
            found[-1][0] = most
        else:
            found.append([most, name])
        if after != name and LIBRARY not in (name, after):
            found.append([sizes[number + 1] - 1, LIBRARY])
    return found


def predictions(
    world: World, machine: MachineModel, collective: str, nbytes: int, algorithms: Iterable[str]
) -> dict[str, float]:
    """Microseconds that the model expects, by algorithm; every rank must call."""
    from ..collectives.cost_model import predicted_s
    from ..collectives.registry import topology

    nodes = topology(world)
    return {name: 1e6 * predicted_s(collective, name, nbytes, nodes, machine) for name in algorithms}


_GAIN_IS = "gain: how many times as fast as native, the MPI library's own, chosen is"
HEADING = f"{'# size':<8}{'chosen':<18}{'us':>10}{'predicted':>11}{'native us':>11}{'predicted':>11}{'gain':>7}"


def line(row: dict[str, Any]) -> str:
    """One size of `tune`, at most 80 columns wide unless a result was wrong."""
    from .measure import format_size

    name, us, predicted = row["chosen"], row["median_us"], row["predicted_us"]
    expected = {each: f"{predicted[each]:.1f}" if each in predicted else "-" for each in (name, LIBRARY)}
    figures = f"{us[name]:>10.1f}{expected[name]:>11}{us[LIBRARY]:>11.1f}{expected[LIBRARY]:>11}"
    text = f"{format_size(row['nbytes']):<8}{name:<18}{figures}{row['gain'].get(name, 1.0):>7.2f}"
    wrongly = [f"{each} {count} WRONG" for each, count in row["wrong"].items() if count]
    return " ".join([text, *wrongly])


def show(world: World) -> None:
    """Print the table that fits ``world``; every rank must call.

    Raises:
        ConfigError: on every rank: there is none.
    """
    from ..collectives import registry
    from ..comm.consistency import on_rank_0
    from . import probe

    table = registry.loaded(world)
    where = on_rank_0(world.comm, lambda: str(registry.path(registry.fingerprint(world))))
    if table is None:
        raise ConfigError("tune --show", where=where, expected="a table for these ranks", remedy="hpcdp tune makes it")
    several = len(table["fingerprint"]["ranks_per_node"]) > 1
    _say(world, [f"# {where}", *_fingerprint_lines(table)])
    _say(world, _comments([*probe.describe(registry.machine(world), several), _GAIN_IS]))
    for collective, found in table["choices"].items():
        _say(world, ["", f"# {collective}", HEADING, *map(line, table["measured"].get(collective, []))])
        _say(world, _comments([f"auto: {_as_ranges(found)}"]))


def _fingerprint_lines(table: Table) -> list[str]:
    return [f"# {name.replace('_', ' ')}: {_short(value)}" for name, value in table["fingerprint"].items()]


def _short(value: Any) -> str:
    return listed(value, 8) if isinstance(value, list) else str(value)


def _as_ranges(found: Sequence[Sequence[Any]]) -> str:
    from .measure import format_size

    parts = [f"{name} to {format_size(most)}" for most, name in found if most is not None]
    above = found[-1][1] if found and found[-1][0] is None else "the model's choice"
    return ", ".join([*parts, f"{above} above"]) if parts else above
