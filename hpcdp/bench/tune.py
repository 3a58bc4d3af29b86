"""`hpcdp tune`: measure links and algorithms in this world, and save the fastest algorithm for each size.

Later jobs of the same shape use the table with ``algorithm="auto"``. An algorithm replaces the baseline, or another
one, only if it is at least 8% faster in the median of the ratios of alternating turns, so that noise does not choose.
The baseline is the MPI library's own algorithm; for blocks that messages move, where the library's would not progress
beside computation, pairwise exchange or the ring. Between two measured sizes with different choices the baseline runs;
`entries` describes sizes beyond the measured ones. Sizes and collectives that are not measured keep their saved choice.
Each time is printed beside the prediction of the cost model. ``reference`` is timed but never chosen: it is the
specification, and its memory grows with the number of ranks.

`probe` measures links and cores for the cost model, in a node at several sizes, because MPI libraries send long
messages differently and caches are small. `predictor` predicts a benchmark.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import __version__, comm
from ..collectives import ALGORITHMS, algorithm_choice, allreduce
from ..collectives.cost_model import ETHERNET, Link, MachineModel, Rates, predicted_s
from ..collectives.intra_node import can_share
from ..comm import World
from ..comm.communicator import Steps, resolve
from ..comm.consistency import on_rank_0
from ..comm.progress import LANES, TaskGroup
from ..comm.shared_memory import NodeBarrier
from ..core.checks import one_of
from ..core.environment import explained
from ..errors import ConfigError, HpcdpError, UnsupportedError, listed
from ..launch.parser import Parser
from .command import BLOCKS, PAIRS, REDUCING, Settings
from .communication import CALLS, Buffers, CollectiveSweep, exchange
from .measure import (
    FreshData,
    MeasuringSchedule,
    alternate,
    check_memory,
    format_size,
    gather,
    median_ratio,
    pin_to_own_core,
    size_range,
    sleeping_barrier,
    turn_medians,
    wrong,
)

_TRIES = 5
_SHORT_NBYTES, _LONG_NBYTES, _STAGED_NBYTES = 4, 1 << 20, 256 << 10
_FAR_NBYTES = 4 << 20  # networks transfer short bursts faster than their rate
_SIZES = (4 << 10, 64 << 10, _LONG_NBYTES, 4 << 20, 16 << 20, 64 << 20)
_NODE_NBYTES = 512 << 20  # total bytes of the arrays in a node, so many ranks use smaller arrays
_DATA = 2  # a tag
_LINK_NBYTES, _LINK_REPEATS = 8 << 20, 5
_COPIED_NBYTES = 256 << 20  # more than the caches hold

Row = dict[str, Any]


def probe(world: World) -> MachineModel:
    """Measure the links and cores of ``world``; every rank must call, and gets the same result.

    Values that cannot be measured, such as a link between nodes on a single node, are the model's defaults.
    """
    nodes = world.comm.allgather_json(world.node)
    members = [[rank for rank, node in enumerate(nodes) if node == number] for number in range(world.num_nodes)]
    machine, across = ETHERNET, []
    local_size = max(map(len, members))
    sizes = [nbytes for nbytes in _SIZES if nbytes <= max(_LONG_NBYTES, _NODE_NBYTES // local_size)]
    inside = [(a, b) for ranks in members for a, b in zip(ranks[::2], ranks[1::2], strict=False)]
    if inside:
        of_first = [pair for pair in inside if nodes[pair[0]] == nodes[inside[0][0]]]
        both_ways = of_first + [(b, a) for a, b in of_first]
        machine = replace(machine, inside=_by_size(world, both_ways, sizes))
    if world.num_nodes > 1:
        across = list(zip(members[0], members[1], strict=False))
        machine = replace(machine, across=_link(world, across, _FAR_NBYTES))
    pairs = inside or across
    staging = _NodeStaging(world)
    rates: list[Rates] = []
    for nbytes in sizes:
        copied, reduced = (_slowest(world, s) / nbytes for s in staging.copied_and_reduced_s(nbytes))
        rates.append((nbytes, copied, reduced))
    _, copy, gamma = rates[sizes.index(_LONG_NBYTES)]
    return replace(
        machine,
        copy_s_per_byte=copy,
        gamma_s_per_byte=gamma,
        by_size=tuple(rates),
        message_s=_between(world, pairs, lambda _, peer: _task_message_s(world, peer)),
        wait_s=_slowest(world, _median_s(NodeBarrier(world.node_memory).barrier, 200)),
        call_s=_slowest(world, _call_s(world)),
    )


def describe(machine: MachineModel, several_nodes: bool) -> list[str]:
    """Return the measured values as lines of text."""
    links = {"inside a node": machine.inside} | ({"across nodes": machine.across} if several_nodes else {})
    lines = [
        f"{name}: {1e6 * link.alpha_s:.1f} us, {_gb_s(link.beta_s_per_byte)} between two ranks, "
        f"{_gb_s(link.shared_s_per_byte)} between all"
        for name, link in links.items()
    ]
    core = [
        f"a core copies {_gb_s(machine.copy_s_per_byte)} from another, reduces {_gb_s(machine.gamma_s_per_byte)}",
        f"a message of a task {1e6 * machine.message_s:.1f} us, a barrier in memory {1e6 * machine.wait_s:.1f} us, "
        f"a call {1e6 * machine.call_s:.1f} us",
    ]
    return lines + core


def _gb_s(s_per_byte: float) -> str:
    return f"{1e-9 / max(s_per_byte, 1e-15):.3g} GB/s"


def _by_size(world: World, pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Link:
    """Measure the links of ``pairs`` for messages of each size."""
    links = {nbytes: _link(world, pairs, nbytes) for nbytes in sizes}
    rates = tuple((nbytes, link.beta_s_per_byte, link.shared_s_per_byte) for nbytes, link in links.items())
    return replace(links[_LONG_NBYTES], alpha_s=min(link.alpha_s for link in links.values()), by_size=rates)


def _link(world: World, pairs: Sequence[tuple[int, int]], nbytes: int) -> Link:
    """Measure the latency with all pairs active, the rate of the first pair alone, and the shared rate of all pairs."""
    meeting = [pair for pair in pairs if pair[::-1] not in pairs or pair[0] < pair[1]]
    for _ in range(_TRIES):
        short_s = _between(world, meeting, lambda first, peer: _ping_pong_s(world, first, peer, _SHORT_NBYTES))
        long_s = _between(world, pairs[:1], lambda first, peer: _ping_pong_s(world, first, peer, nbytes))
        if long_s > short_s or nbytes < _LONG_NBYTES:  # the length of short messages may have no effect
            break
    else:
        raise HpcdpError(
            "probe", where="links", expected=f"messages of {nbytes} bytes to take longer than those of {_SHORT_NBYTES}",
            got=f"{long_s * 1e6:.1f} us and {short_s * 1e6:.1f} us",
            remedy="try again when no other programs use these cores and links",
        )  # fmt: skip
    beta = max(long_s - short_s, 0.0) / (nbytes - _SHORT_NBYTES)
    at_once_s = _stream_s(world, dict(pairs), nbytes)
    return Link(short_s, beta, min(beta, max(at_once_s - short_s, 0.0) / (nbytes * len(pairs))))


def _between(world: World, pairs: Sequence[tuple[int, int]], measure: Callable[[bool, int], float]) -> float:
    """Run ``measure(is_first, peer)`` on all pairs at once, and return the slowest result of their first ranks.

    Ranks without a pair sleep, because polling would take a core from the measured ones.
    """
    peers = dict(pairs) | {second: first for first, second in pairs}
    firsts = [first for first, _ in pairs]
    value = 0.0
    world.barrier()
    if world.rank in peers:
        value = measure(world.rank in firsts, peers[world.rank])
    sleeping_barrier(world)
    values = world.comm.allgather_json(value)
    return float(max(values[first] for first in firsts))


def _rounds(nbytes: int) -> int:
    return 200 if nbytes <= 4096 else 9 + 60 * _STAGED_NBYTES // (nbytes + _STAGED_NBYTES)


def _block(nbytes: int) -> np.ndarray:
    """Return bytes at the start of a long array, whose huge pages are faster, as in buckets."""
    return np.empty(max(nbytes, _SIZES[-1]), np.uint8)[:nbytes]


def _ping_pong_s(world: World, first: bool, peer: int, nbytes: int) -> float:
    """Return half the time of a round trip of newly written data."""
    x, y, token = _block(nbytes), _block(nbytes), np.zeros(1, np.uint8)
    data = FreshData(world.rank, world.size, np.uint8)
    seconds = []
    for number in range(_rounds(nbytes) + 2):
        data.write(x, number)
        for message, answer in ((token, token), (x, y)):  # the token synchronizes the two ranks
            begin = time.perf_counter()
            for sending in (first, not first):
                if sending:
                    world.comm.isend(message, peer, _DATA).wait()
                else:
                    world.comm.irecv(answer, peer, _DATA).wait()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[2:])) / 2


def _stream_s(world: World, peers: dict[int, int], nbytes: int) -> float:
    """Return the time until all messages have arrived that the ranks in ``peers`` send to their peers at once."""
    sources = {dest: source for source, dest in peers.items()}
    x, y, data = _block(nbytes), _block(nbytes), FreshData(world.rank, world.size, np.uint8)
    seconds = []
    for number in range(_rounds(nbytes)):
        data.write(x, number)
        world.barrier()
        begin = time.perf_counter()
        requests = [world.comm.irecv(y, sources[world.rank], _DATA)] if world.rank in sources else []
        requests += [world.comm.isend(x, peers[world.rank], _DATA)] if world.rank in peers else []
        for request in requests:
            request.wait()
        seconds.append(time.perf_counter() - begin)
    every = np.array(world.comm.allgather_json(seconds))
    return float(np.median(every.max(axis=0)))


def _median_s(call: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[2:]))


class _NodeStaging:
    """Copies and reductions of all ranks of a node at once, in segments through an area that fits into the caches."""

    def __init__(self, world: World) -> None:
        self._memory = world.node_memory
        self._rows = self._memory.alloc((self._memory.size, 2, _STAGED_NBYTES // 4), np.float32)
        self._gate = NodeBarrier(self._memory)

    def copied_and_reduced_s(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds to copy ``nbytes`` bytes, and to reduce as many into an array of this rank.

        Half of the bytes are copied to the area, and half from the area of a neighbor.
        """
        mine, written = self._rows[self._memory.rank]
        other = self._rows[(self._memory.rank + 1) % self._memory.size, 0]
        x = np.ones(nbytes // 4, np.float32)
        segments = [x[at : at + mine.size] for at in range(0, x.size, mine.size)]

        def copy() -> None:
            for number, segment in enumerate(segments):
                if number % 2:
                    segment[...] = other[: segment.size]
                else:
                    written[: segment.size] = segment

        def reduce() -> None:
            for segment in segments:
                np.add(segment, other[: segment.size], out=segment)

        times: dict[Callable[[], None], list[float]] = {copy: [], reduce: []}
        for number in range(_rounds(nbytes)):
            for do, seconds in times.items():
                mine[...] = number % 3
                self._gate.barrier()
                begin = time.perf_counter()
                do()
                seconds.append(time.perf_counter() - begin)
                self._gate.barrier()
        copied, reduced = (float(np.median(seconds[1:])) for seconds in times.values())
        return copied, reduced


def _call_s(world: World) -> float:
    """Return the time of a call without data."""
    nothing = np.empty(0, np.float32)
    return _median_s(lambda: allreduce(nothing, world=world, algorithm="native"), 100)


def _task_message_s(world: World, peer: int) -> float:
    """Return the cost of sending and receiving a message on a core that runs many tasks."""
    rounds = 20

    def swap(tag: int) -> Steps:
        x, y = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        for _ in range(rounds):
            yield [world.comm.isend(x, peer, tag), world.comm.irecv(y, peer, tag)]

    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        TaskGroup([swap(_DATA + lane) for lane in range(LANES)]).wait()
        seconds.append((time.perf_counter() - begin) / (rounds * LANES))
    return float(np.median(seconds))


def _slowest(world: World, seconds: float) -> float:
    return float(max(world.comm.allgather_json(seconds)))


def copy_rates(world: World, nbytes: int = _COPIED_NBYTES, repeats: int = 5) -> dict[str, float]:
    """Return GB/s of copies between private arrays, by rank 0 alone and by all ranks at once; every rank must call.

    Each byte counts once.
    """
    source, target = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    seconds: dict[str, list[float]] = {"one_core": [], "all_cores": []}
    for _ in range(repeats):
        for how, taking_part in (("one_core", world.rank == 0), ("all_cores", True)):
            world.comm.barrier()
            begin = time.perf_counter()
            if taking_part:
                np.copyto(target, source)
            seconds[how].append(time.perf_counter() - begin)
            world.comm.barrier()
    medians = world.comm.allgather_json({how: float(np.median(times)) for how, times in seconds.items()})
    return {
        "one_core_gb_s": nbytes / medians[0]["one_core"] / 1e9,
        "all_cores_gb_s": world.size * nbytes / max(rank["all_cores"] for rank in medians) / 1e9,
    }


def link_rates(world: World, nbytes: int = _LINK_NBYTES) -> dict[str, float]:
    """Return the MB/s of a link, ``one_way`` and ``both_ways`` (per direction); every rank must call.

    They are medians over messages of ``nbytes`` between the first ranks of the first two nodes. The other ranks sleep.
    """
    nodes = world.comm.allgather_json(world.node)
    ends = [nodes.index(0), nodes.index(1)]
    block, other = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    token = np.zeros(1, np.uint8)
    rates = {}
    for name, directions in (("one_way", (0,)), ("both_ways", (0, 1))):
        taken_s = []
        world.barrier()
        if world.rank in ends:
            me = ends.index(world.rank)
            peer = ends[1 - me]
            for _ in range(1 + _LINK_REPEATS):
                _swap(world, token, peer)
                begin = time.perf_counter()
                requests = [world.comm.isend(block, peer)] if me in directions else []
                requests += [world.comm.irecv(other, peer)] if 1 - me in directions else []
                for request in requests:
                    request.wait()
                _swap(world, token, peer)
                taken_s.append(time.perf_counter() - begin)
        sleeping_barrier(world)
        rates[name] = world.comm.allgather_json(nbytes / float(np.median(taken_s[1:])) / 1e6 if taken_s else 0)[ends[0]]
    return rates


def _swap(world: World, token: np.ndarray, peer: int) -> None:
    sent = world.comm.isend(token, peer)
    world.comm.irecv(np.empty_like(token), peer).wait()
    sent.wait()


Predictor = Callable[[Row], dict[str, float]]
"""A function of a row that returns its prediction, ``predicted_us`` or ``predicted_mb_s``."""


def predictor(settings: Settings, world: World) -> tuple[Predictor | None, str]:
    """Return a predictor and a line about its basis; every rank must call, and must call the predictor.

    Links and cores are those that `hpcdp tune` has saved, else they are measured now. The predictor is None for a
    single rank, and if ranks share cores, because the model assumes one core per rank.

    The predictor raises `UnsupportedError` for an algorithm that the model does not cover.
    """
    if world.size == 1:
        return None, "No predictions for a single rank."
    if reason := algorithm_choice.crowded(world):
        return None, f"No predictions: {reason}, but the model assumes a core per rank."
    if algorithm_choice.loaded(world) is not None:
        machine, basis = algorithm_choice.machine(world), "as saved by hpcdp tune"
    else:
        machine, basis = probe(world), "as measured now; hpcdp tune saves them"
    create = _of_messages if settings.benchmark in PAIRS else _of_collective
    return create(settings, world, machine), f"Predicted for links and cores {basis}."


def _of_messages(settings: Settings, world: World, machine: MachineModel) -> Predictor:
    """Return the predictor of messages between pairs.

    Half a round trip takes ``alpha + nbytes beta`` and half the time of a call. In a window, cores prepare a message
    while links carry the one before. In a node the same cores do both, and need alpha for each message. Across nodes
    the slower of the two sets the time, and each direction has its own link.
    """
    half, name = world.size // 2, settings.benchmark
    nodes = world.comm.allgather_json(world.node)
    inside = nodes[0] == nodes[half]
    link = machine.inside if inside else machine.across
    pairs = half if name == "multi_pair" else 1
    ways = 2 if name == "bibandwidth" else 1

    def latency_us(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        seconds = link.alpha_s + nbytes * link.at(nbytes).beta_s_per_byte + machine.call_s / 2
        return {"predicted_us": 1e6 * seconds}

    def bandwidth_mb_s(row: Row) -> dict[str, float]:
        nbytes: int = row["nbytes"]
        core_s, carried_s = ways * machine.inside.alpha_s, nbytes * link.at(nbytes).shared_s_per_byte * pairs
        message_s = core_s + ways * carried_s if inside else max(core_s, carried_s)
        seconds = settings.window * message_s + 2 * link.alpha_s
        return {"predicted_mb_s": 1e-6 * settings.window * ways * pairs * nbytes / seconds}

    return latency_us if name in ("latency", "pt2pt") else bandwidth_mb_s


def _of_collective(settings: Settings, world: World, machine: MachineModel) -> Predictor:
    """Return the predictor of collectives, see `cost_model.predicted_s`; "auto" stands for the chosen algorithm."""
    collective, dtype = settings.benchmark.removeprefix("i"), np.dtype(settings.dtype)
    op = resolve(collective, settings.op, dtype) if settings.benchmark in REDUCING else None
    topology = algorithm_choice.topology(world)

    def predicted_us(row: Row) -> dict[str, float]:
        nbytes: int = row["total_nbytes"] if "total_nbytes" in row else row["nbytes"]
        algorithm = settings.algorithm
        if collective in BLOCKS:
            if algorithm == "auto" and topology.nodes == 1 and topology.shared_memory:
                algorithm = "shared"
            elif algorithm == "auto":
                algorithm = algorithm_choice.choose_movement(collective, nbytes, world)
        elif algorithm == "auto":
            algorithm = algorithm_choice.choose(collective, nbytes, dtype, op, world)
        return {"predicted_us": 1e6 * predicted_s(collective, algorithm, nbytes, topology, machine)}

    return predicted_us


def with_predictions(rows: Iterable[Row], predicted: Predictor) -> Iterator[Row]:
    """Yield the rows with their predictions."""
    for row in rows:
        yield row | predicted(row)


GAIN = 1.08
"""The minimum speedup of an algorithm over the one that it replaces; less is noise on a busy machine."""

_IN_REACH = 1.5  # algorithms that take more than this multiple of the best time are not timed again
_STEADY = 0.75  # the fraction of turns in which an algorithm must not be slower than the library's own
_SMALL_NBYTES, _LARGE_NBYTES = 64, 16_000_000  # beyond these the choice of the nearest size applies, see `entries`
_REFERENCE_NBYTES = 64 << 20  # limits the memory of ``reference``, which holds all ranks' arrays on every rank
_EPILOG = """\
examples:
  hpcdp launch -n 2 -- hpcdp tune
  srun --mpi=pmix hpcdp tune --quick
  hpcdp launch -n 4 -- hpcdp tune allreduce -m 64K:64M
  mpirun -n 8 hpcdp tune --show

Tables are in HPCDP_TUNING_DIR, else beside the compiled kernels.
"""


def parser() -> Parser:
    """Return the parser of the options of ``hpcdp tune``."""
    made = Parser(
        prog="hpcdp tune",
        usage="hpcdp tune [COLLECTIVE ...] [-m MIN:MAX] [--quick] [--dry-run | --show]",
        description="Measure links and collectives, and save the fastest algorithm for each size.",
        epilog=_EPILOG,
    )
    made.add_argument(
        "collectives", nargs="*", metavar="COLLECTIVE", help="measure only these, and keep the saved choices of others"
    )
    made.add_argument(
        "-m",
        dest="sizes",
        metavar="MIN:MAX",
        help="array sizes in bytes (default: 4:64M); others keep their saved choices",
    )
    made.add_argument(
        "--quick", action="store_true", help="sizes 4:4M and fewer timings, in some twenty seconds on two ranks"
    )
    either = made.add_mutually_exclusive_group()
    either.add_argument("--dry-run", action="store_true", help="measure and print, save nothing")
    either.add_argument("--show", action="store_true", help="print the saved table for these ranks, measure nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ``hpcdp tune`` and return the exit status, 1 if a result was wrong; every rank of a job must call.

    Raises:
        ConfigError: an option is invalid, or the measurement is impossible; on every rank.
    """
    arguments = parser().parse_args(argv)

    for name in arguments.collectives:
        one_of("tune", "collective", name, algorithm_choice.TUNED)
    sizes = size_range(arguments.sizes or ("4:4M" if arguments.quick else "4:64M"), 4 if arguments.quick else 2)
    if sizes[0] < 4:
        raise ConfigError("tune -m", expected="4 bytes or more, a float32", got=arguments.sizes)

    world = comm.init()
    if arguments.show:
        show(world)
        return 0
    if world.size > 1:
        algorithm_choice.fingerprint(world)
        pin_to_own_core(world)
    effort = Effort.quick(sizes) if arguments.quick else Effort(sizes)
    return tune(world, effort, arguments.dry_run, arguments.collectives)


@dataclass(frozen=True)
class Effort:
    """The effort of a measurement.

    Args:
        sizes: the sizes in bytes.
        seconds: the estimated duration of the final timings of one collective at one size.
        iterations: the number of timings of small sizes.
    """

    sizes: Sequence[int]
    seconds: float = 0.6
    iterations: int = 60

    @classmethod
    def quick(cls, sizes: Sequence[int]) -> Effort:
        """Return a small effort for a first impression."""
        return cls(sizes, 0.1, 20)


def tune(world: World, effort: Effort, dry_run: bool = False, collectives: Sequence[str] = ()) -> int:
    """Measure and save the table of ``world``, and return the exit status; every rank must call.

    Rank 0 prints and writes. Saved choices of other collectives and sizes stay.

    Raises:
        ConfigError: a single rank, too little memory, or a folder that cannot be written; on every rank.
    """
    if world.size < 2:
        raise ConfigError("tune", expected="2 ranks or more", got="1", remedy="run hpcdp launch -n 2 -- hpcdp tune")
    check_memory("tune -m", world, effort.sizes[-1], 4)
    if not dry_run:
        algorithm_choice.check_folder(world)
    nodes = f"{world.num_nodes} node{'s' if world.num_nodes > 1 else ''}"
    facts = [f"hpcdp tune v{__version__}, {world.size} ranks on {nodes}, {world.library}"]
    with explained("measuring links and cores", world.rank == 0, sys.stderr):
        machine = probe(world)
    crowded = algorithm_choice.crowded(world)
    facts += describe(machine, world.num_nodes > 1)
    facts += [f"no predictions: {crowded}, but the model assumes a core per rank"] if crowded else []
    _say(world, _comments([*facts, _GAIN_IS]))
    before = algorithm_choice.loaded(world) or {}
    choices, measured, faulty = dict(before.get("choices", {})), dict(before.get("measured", {})), 0
    # Blocks in the memory of a node have one way only.
    usual = ALGORITHMS if can_share(world) else algorithm_choice.TUNED
    for collective in collectives or usual:
        rows = []
        names, baseline = usable(world, collective), algorithm_choice.baseline_of(collective)
        title = textwrap.wrap(f"# {collective}: {', '.join(names)}", 80, subsequent_indent="# ")
        _say(world, ["", *title, heading(baseline)])
        incumbent = baseline
        parts = _parts(collective, world)
        for nbytes in dict.fromkeys(max(1, size // 4 // parts) * 4 * parts for size in effort.sizes):
            row = measure(world, collective, names, nbytes, effort)
            incumbent = row["chosen"] = chosen(row["gain"], incumbent, baseline)
            algorithms = () if crowded else row["median_us"]
            row["predicted_us"] = predictions(world, machine, collective, row["nbytes"], algorithms)
            faulty += sum(row["wrong"].values())
            _say(world, [line(row, baseline)])
            rows.append(row)
        measured[collective] = merged(measured.get(collective, []), rows)
        known = measured[collective]
        choices[collective] = entries([row["nbytes"] for row in known], [row["chosen"] for row in known], baseline)
    table = algorithm_choice.make(world, machine, choices, measured)
    if faulty:
        _say(world, ["", f"# {faulty} elements were WRONG: nothing is saved"])
        return 1
    if dry_run:
        _say(world, ["", "# nothing is saved"])
    else:
        _say(world, ["", f"# saved in {algorithm_choice.save(world, table)}"])
    return 0


def _comments(facts: Iterable[str]) -> list[str]:
    return [line for fact in facts for line in textwrap.wrap(fact, 80, initial_indent="# ", subsequent_indent="#   ")]


def _say(world: World, lines: Iterable[str]) -> None:
    if world.rank == 0:
        print("\n".join(lines), flush=True)


def usable(world: World, collective: str) -> list[str]:
    """Return the algorithms of ``collective`` that can run in ``world``; every rank must call."""
    if collective in algorithm_choice.MOVEMENTS:
        return algorithm_choice.movements(collective, world)
    names = []
    for name in ALGORITHMS[collective]:
        x = np.ones(world.size, np.float32)
        out = x if collective in ("allreduce", "broadcast", "reduce") else np.ones(1, np.float32)
        arrays = (out, x) if collective == "allgather" else (x, out)
        try:
            CALLS[collective](*arrays, CollectiveSweep(collective, x.dtype, algorithm=name), world)
        except UnsupportedError:
            continue
        names.append(name)
    return names


def _parts(collective: str, world: World) -> int:
    """Return the number of equal parts of an array that a collective gathers or moves."""
    return world.size if collective in ("allgather", *BLOCKS) else 1


def measure(world: World, collective: str, names: Sequence[str], nbytes: int, effort: Effort) -> dict[str, Any]:
    """Time the algorithms at one size; every rank must call, and gets the same result.

    Args:
        world: the ranks.
        collective: the collective.
        names: the algorithms.
        nbytes: the size of the whole float32 array, for an allgather that of the equal parts of all ranks, for an
            alltoall that of a rank's blocks for all ranks.
        effort: the number of timings.

    Returns:
        ``nbytes`` and by algorithm ``median_us`` (of the slowest rank), ``wrong`` (elements on all ranks) and ``gain``,
        the speedup over the baseline. ``gain`` has only algorithms that may be chosen: correct, at most 1.5 times as
        slow as the fastest in the first timing, and not slower than the baseline in 75% of the turns.
    """
    how = CollectiveSweep(collective, np.dtype(np.float32))
    count = nbytes // 4 // _parts(collective, world)
    baseline = algorithm_choice.baseline_of(collective)
    buffers = Buffers(how, count, world)

    def timed(algorithms: Sequence[str], schedule: MeasuringSchedule) -> tuple[dict[str, Any], dict[str, int]]:
        candidates = [_named(exchange(replace(how, algorithm=name), buffers, count), name) for name in algorithms]
        series = gather(world, alternate(candidates, world.comm.barrier, schedule))
        turns = {name: turn_medians(ranks) for name, ranks in series.items()}
        return turns, {name: wrong(ranks) for name, ranks in series.items()}

    affordable = [name for name in names if name != "reference" or world.size * nbytes <= _REFERENCE_NBYTES]
    long = nbytes > 1 << 20
    heat, faults = timed(affordable, MeasuringSchedule(1 if long else 3, 1 if long else 5, 1))
    median_us = {name: float(np.median(us)) for name, us in heat.items()}
    right = [name for name in affordable if not faults[name] and name != "reference"]
    best = min((median_us[name] for name in right), default=0.0)
    finalists = [name for name in right if name == baseline or median_us[name] <= _IN_REACH * best]
    gain = {baseline: 1.0}
    if len(finalists) > 1 and baseline in finalists:
        turns, again = timed(finalists, _finals(nbytes, sum(median_us[name] for name in finalists), effort))
        median_us |= {name: float(np.median(us)) for name, us in turns.items()}
        faults |= again
        gain |= {
            name: median_ratio(turns[baseline], us)
            for name, us in turns.items()
            if not again[name] and np.mean(turns[baseline] >= us) >= _STEADY
        }
    return {"nbytes": nbytes, "median_us": median_us, "gain": gain, "wrong": faults}


def _named(made: Any, name: str) -> Any:
    made.name = name
    return made


def _finals(nbytes: int, once_us: float, effort: Effort) -> Any:
    schedule = MeasuringSchedule.for_size(nbytes, effort.iterations, 1)
    affordable = int(effort.seconds * 1e6 / max(once_us * schedule.repeats, 1.0))
    return replace(schedule, turns=max(3, min(schedule.turns, affordable)))


def chosen(gain: dict[str, float], incumbent: str, baseline: str = algorithm_choice.LIBRARY) -> str:
    """Return the algorithm for a size.

    Args:
        gain: the speedup over the baseline by algorithm.
        incumbent: the choice for the next smaller size, kept unless the best one is `GAIN` times as fast.
        baseline: the algorithm that others must beat.
    """
    best = max(gain, key=gain.__getitem__)
    if gain[best] < GAIN:
        return baseline
    return incumbent if gain.get(incumbent, 0.0) >= max(GAIN, gain[best] / GAIN) else best


def merged(before: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of one collective by size; ``rows`` replace those of ``before``."""
    by_size = {row["nbytes"]: row for row in (*before, *rows)}
    return [by_size[nbytes] for nbytes in sorted(by_size)]


def entries(sizes: Sequence[int], names: Sequence[str], baseline: str = algorithm_choice.LIBRARY) -> list[list[Any]]:
    """Return the choices in the form of `algorithm_choice.Table`, as pairs of a largest size and an algorithm.

    Between two sizes with different choices the baseline runs. Below a smallest size of more than 64 bytes the cost
    model chooses, as it does without a table.
    Above the largest size the last choice holds if that size is at least 16 MB; otherwise there is no choice.

    Args:
        sizes: the measured sizes in ascending order.
        names: the choice for each size.
        baseline: the algorithm that others must beat.
    """
    ranges: list[list[Any]] = [[sizes[0] - 1, algorithm_choice.BY_MODEL]] if sizes[0] > _SMALL_NBYTES else []
    for number, name in enumerate(names):
        after = names[number + 1] if number + 1 < len(names) else name
        last = number + 1 == len(names)
        most = None if last and sizes[number] >= _LARGE_NBYTES else sizes[number]
        if not last and after != name and name == baseline:
            most = sizes[number + 1] - 1
        if ranges and ranges[-1][1] == name:
            ranges[-1][0] = most
        else:
            ranges.append([most, name])
        if after != name and baseline not in (name, after):
            ranges.append([sizes[number + 1] - 1, baseline])
    return ranges


def predictions(
    world: World, machine: MachineModel, collective: str, nbytes: int, algorithms: Iterable[str]
) -> dict[str, float]:
    """Return the microseconds that the model predicts by algorithm; every rank must call."""
    nodes = algorithm_choice.topology(world)
    return {name: 1e6 * predicted_s(collective, name, nbytes, nodes, machine) for name in algorithms}


_GAIN_IS = "gain: the speedup of the chosen algorithm over the other; native is the MPI library's own"


def heading(baseline: str) -> str:
    """Return the heading of the lines of a collective."""
    us = f"{baseline} us"
    return f"{'# size':<8}{'chosen':<18}{'us':>10}{'predicted':>11}{us:>12}{'predicted':>11}{'gain':>6}"


def line(row: dict[str, Any], baseline: str) -> str:
    """Return the line of one size, at most 80 columns wide unless a result was wrong."""
    name, us, predicted = row["chosen"], row["median_us"], row["predicted_us"]
    expected = {key: f"{predicted[key]:.1f}" if key in predicted else "-" for key in (name, baseline)}
    figures = f"{us[name]:>10.1f}{expected[name]:>11}{us[baseline]:>12.1f}{expected[baseline]:>11}"
    text = f"{format_size(row['nbytes']):<8}{name:<18}{figures}{row['gain'].get(name, 1.0):>6.2f}"
    return " ".join([text, *(f"{key} {count} WRONG" for key, count in row["wrong"].items() if count)])


def show(world: World) -> None:
    """Print the saved table of ``world``; every rank must call.

    Raises:
        ConfigError: there is no table; on every rank.
    """
    table = algorithm_choice.loaded(world)
    where = on_rank_0(world.comm, lambda: str(algorithm_choice.path(algorithm_choice.fingerprint(world))))
    if table is None:
        expected = f"a table for this number of ranks ({world.size}) and nodes ({world.num_nodes})"
        remedy = "start it with the ranks of hpcdp tune: hpcdp launch -n 2 -- hpcdp tune --show"
        if world.size > 1:
            remedy = f"measure first: hpcdp launch -n {world.size} -- hpcdp tune; each number of ranks has a table"
        raise ConfigError("tune --show", where=where, expected=expected, got="none", remedy=remedy)
    several = len(table["fingerprint"]["ranks_per_node"]) > 1
    facts = {
        name: listed(value, 8) if isinstance(value, list) else value for name, value in table["fingerprint"].items()
    }
    _say(world, [f"# {where}", *(f"# {name.replace('_', ' ')}: {value}" for name, value in facts.items())])
    _say(world, _comments([*describe(algorithm_choice.machine(world), several), _GAIN_IS]))
    for collective, ranges in table["choices"].items():
        baseline = algorithm_choice.baseline_of(collective)
        rows = [line(row, baseline) for row in table["measured"].get(collective, [])]
        _say(world, ["", f"# {collective}", heading(baseline), *rows])
        _say(world, _comments([f"auto: {_as_text(ranges)}"]))


def _as_text(ranges: Sequence[Sequence[Any]]) -> str:
    by_model = "the model's choice"
    names = [by_model if name == algorithm_choice.BY_MODEL else name for _, name in ranges]
    parts = [
        f"{name} to {format_size(most)}" for name, (most, _) in zip(names, ranges, strict=True) if most is not None
    ]
    above = names[-1] if ranges and ranges[-1][0] is None else by_model
    return ", ".join([*parts, f"{above} above"]) if parts else above
