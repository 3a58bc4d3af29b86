"""The cost model of collectives, and measured links.

What a stage of messages costs: links inside a node and across nodes, what their messages share, segments.

A message of m bytes takes ``alpha + m beta`` seconds, and reducing it into another array ``m gamma`` more (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3; Chan et al.,
"Collective communication: theory, practice, and experience", 2007, section 3). To this come four things:

- there are two classes of links, inside a node and across nodes, and their messages share something: all ranks of a
  node its network link (in each direction), and its memory;
- beta and gamma depend on the size: MPI libraries send short messages in another way than long ones, and long arrays
  do not fit in the caches. So they are measured at some sizes;
- our algorithms are machines in Python, so a message costs a core some microseconds, unlike in the MPI library's own;
- long arrays go in segments. While one is on the network another is added up, so every segment after the first adds
  what the slowest stage takes, where algorithms without segments add up all stages.

Ranks are taken to be placed node by node, so neighbours in a ring are mostly on one node.

What every collective costs by every algorithm, predicted in seconds from a `Machine` and a `Topology`.

In the formulas n is the number of ranks, m of nodes, S the bytes of the whole array (of an allgather: of all parts);
alpha, beta and gamma are those of `links`, which also says how shared links and segments are accounted for.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; Chan et
al., "Collective communication: theory, practice, and experience", 2007; Rabenseifner, "Optimization of collective
reduction operations", 2004; Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..comm.tasks import LANES, MESSAGE_NBYTES
from ..errors import UnsupportedError
from . import halving_doubling, hierarchical, intra_node, tree

_LEAST_S_PER_BYTE = 1e-15  # a petabyte a second, for the logarithm's sake


Rates = tuple[int, float, float]
"""A size in bytes, and two rates at it in seconds a byte."""


def _between(rates: tuple[Rates, ...], nbytes: float) -> tuple[float, float]:
    """Both rates at ``nbytes``, by powers of it between the sizes next to it, and as at the last one beyond."""
    sizes, *both = np.log(np.maximum(np.array(rates), _LEAST_S_PER_BYTE)).T
    first, second = (float(np.exp(np.interp(np.log(max(nbytes, 1.0)), sizes, each))) for each in both)
    return first, second


@dataclass(frozen=True)
class Link:
    """One class of links."""

    alpha_s: float
    """What the shortest message takes, in seconds."""
    beta_s_per_byte: float
    """What each byte of one message alone takes."""
    shared_s_per_byte: float
    """What each byte takes of all that a node carries at once: over its network link, or in its memory."""
    by_size: tuple[Rates, ...] = ()
    """Where they depend on it, ``(nbytes, beta, shared)`` of some sizes of messages, the least first."""

    def at(self, nbytes: float) -> Link:
        """The same link for messages of ``nbytes``."""
        if not self.by_size:
            return self
        beta, shared = _between(self.by_size, nbytes)
        return Link(self.alpha_s, beta, shared)


@dataclass(frozen=True)
class MachineModel:
    """What predictions depend on, beside the topology."""

    inside: Link
    """Between ranks of one node."""
    across: Link
    """Between nodes."""
    copy_s_per_byte: float
    """What a core needs to copy a byte that another rank of its node has written, while all of them do."""
    gamma_s_per_byte: float
    """What a core needs to reduce a byte of one array into another."""
    message_s: float
    """What our machines keep a core busy for a message that they send and one that they receive."""
    wait_s: float
    """What it takes until the ranks of a node have met in shared memory."""
    call_s: float
    """What a call of a collective takes beside all this."""
    by_size: tuple[Rates, ...] = ()
    """Where they depend on it, ``(nbytes, copy, gamma)`` of some sizes of a rank's array, the least first."""

    def at(self, nbytes: float) -> MachineModel:
        """The same machine for arrays of ``nbytes``, which its caches hold or not."""
        if not self.by_size:
            return self
        copy, gamma = _between(self.by_size, nbytes)
        return replace(self, copy_s_per_byte=copy, gamma_s_per_byte=gamma, by_size=())


@dataclass(frozen=True)
class Topology:
    """How many ranks every node has, node by node."""

    local_sizes: tuple[int, ...]
    shared_memory: bool = True
    """Whether the ranks of a node can read each other's memory."""
    crowded: bool = False
    """Whether ranks outnumber the cores of some node."""

    @property
    def ranks(self) -> int:
        return sum(self.local_sizes)

    @property
    def nodes(self) -> int:
        return len(self.local_sizes)


ETHERNET = MachineModel(
    inside=Link(1e-6, 1e-10, 1e-11),
    across=Link(20e-6, 8e-10, 8e-10),
    copy_s_per_byte=1e-10,
    gamma_s_per_byte=1e-10,
    message_s=5e-6,
    wait_s=0.5e-6,
    call_s=3e-6,
)
"""TCP over a link of 10 Gbit/s; 10 GB/s a core and 100 GB/s a node in memory."""
FABRIC = replace(ETHERNET, across=Link(2e-6, 8e-11, 8e-11))
"""An adapter for remote memory access, 100 Gbit/s."""


def assumed(topology: Topology, base: MachineModel = ETHERNET) -> MachineModel:
    """The machine that is taken where nothing was measured: `ETHERNET`, or `FABRIC` where nodes have such adapters."""
    at_once_s_per_byte = max(topology.local_sizes) * base.inside.shared_s_per_byte
    return replace(base, copy_s_per_byte=max(base.copy_s_per_byte, at_once_s_per_byte))


@dataclass(frozen=True)
class Cost:
    """Of one segment of an array, in seconds."""

    alone_s: float = 0.0
    """From its start to its end, when nothing else is under way."""
    network_s: float = 0.0
    """How long it occupies the network link of the busiest node."""
    core_s: float = 0.0
    """How long it occupies the core of the busiest rank, or the memory of a node."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alone_s + other.alone_s, self.network_s + other.network_s, self.core_s + other.core_s)

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.alone_s, times * self.network_s, times * self.core_s)


@dataclass(frozen=True)
class Load:
    """The messages of one stage, all under way at once."""

    across: int
    """That leave the busiest node, or come to it."""
    inside: int
    """Between ranks of the busiest node."""
    a_rank: int = 1
    """That the busiest rank receives."""

    def cost(self, nbytes: float, machine: MachineModel) -> Cost:
        """What the stage costs with messages of ``nbytes``."""
        posted_s = self.a_rank * machine.message_s
        network_s, core_s = (
            nbytes * max(min(self.a_rank, number) * link.beta_s_per_byte, number * link.shared_s_per_byte)
            for number, link in ((self.across, machine.across.at(nbytes)), (self.inside, machine.inside.at(nbytes)))
        )
        latency_s = machine.across.alpha_s if self.across else machine.inside.alpha_s if self.inside else 0.0
        return Cost(latency_s + posted_s + max(network_s, core_s), network_s, core_s + posted_s)


def pipelined_s(first: Cost, segments: int) -> float:
    """Seconds of so many segments after another, of which the machines keep `LANES` under way."""
    return first.alone_s + (segments - 1) * max(first.network_s, first.core_s, first.alone_s / LANES)


def _load(source: np.ndarray, dest: np.ndarray, topology: Topology) -> Load:
    """Of one message from every rank of ``source`` to that of ``dest``."""
    node = np.repeat(np.arange(topology.nodes), topology.local_sizes)
    of, to = node[source], node[dest]
    leaving, coming, staying = (
        int(np.bincount(nodes, minlength=1).max()) for nodes in (of[of != to], to[of != to], of[of == to])
    )
    return Load(max(leaving, coming), staying, int(np.bincount(dest, minlength=1).max()))


@lru_cache
def neighbours(topology: Topology) -> Load:
    ranks = np.arange(topology.ranks)
    return _load(ranks, np.roll(ranks, -1), topology)


@lru_cache
def everybody(topology: Topology) -> Load:
    n, most = topology.ranks, max(topology.local_sizes)
    return Load(max(size * (n - size) for size in topology.local_sizes), most * (most - 1), n - 1)


@lru_cache
def partners(topology: Topology, distance: int) -> Load:
    """Of a step of recursive halving; where n is no power of two, of the ranks that take part."""
    n = topology.ranks
    p = 1 << n.bit_length() - 1
    numbers = np.arange(p)
    ranks = np.where(numbers < n - p, 2 * numbers, numbers + n - p)
    return _load(ranks, ranks[numbers ^ distance], topology)


@lru_cache
def pairs(topology: Topology) -> Load:
    """Of the first step of halving where n is no power of two: even ranks and odd ones exchange."""
    pairs = topology.ranks - (1 << topology.ranks.bit_length() - 1)
    even = 2 * np.arange(pairs)
    return _load(np.concatenate([even, even + 1]), np.concatenate([even + 1, even]), topology)


@lru_cache
def levels(topology: Topology) -> tuple[Load, ...]:
    """Of the steps up a binomial tree, its leaves first."""
    numbers = np.arange(1, topology.ranks)
    lowest = numbers & -numbers
    steps = (topology.ranks - 1).bit_length()
    at = [numbers[lowest == 1 << step] for step in range(steps)]
    return tuple(_load(level, level - (1 << step), topology) for step, level in enumerate(at))


@lru_cache
def double_levels(topology: Topology) -> tuple[Load, ...]:
    """Of the steps up two binary trees at once, their leaves first."""
    n = topology.ranks
    edges: dict[int, list[tuple[int, int]]] = {}
    for rank in range(n):
        for number, place in zip(tree.tree_numbers(rank, n), tree.double_trees(rank, n), strict=True):
            if place.parent is not None:
                edges.setdefault(number & -number, []).append((rank, place.parent))
    sources_and_dests = [np.array(edges[level]).T for level in sorted(edges)]
    return tuple(_load(source, dest, topology) for source, dest in sources_and_dests)


Formula = Callable[[float, Topology, MachineModel], Cost]
"""What so many bytes cost, sent as one segment."""


def _busy(seconds: float) -> Cost:
    return Cost(seconds, 0.0, seconds)


def _reduced(nbytes: float, of: MachineModel) -> Cost:
    return _busy(nbytes * of.gamma_s_per_byte)


def _moving(of: MachineModel) -> MachineModel:
    """The same machine for what is not reduced."""
    return replace(of, gamma_s_per_byte=0.0)


def _ring_reduce_scatter(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(n - 1) (alpha + S / n (beta + gamma)) (Patarasu and Yuan, 2009, section 3)."""
    part = nbytes / on.ranks
    return (on.ranks - 1) * (neighbours(on).cost(part, of) + _reduced(part, of))


def _ring_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(n - 1) (alpha + S / n beta) (Thakur et al., 2005, section 4.1)."""
    return _ring_reduce_scatter(nbytes, on, _moving(of))


def _ring(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 (n - 1) alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma (Patarasu and Yuan, 2009, section 3)."""
    return _ring_reduce_scatter(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _both_ways(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """A ring already sends and receives at once, so halves in two directions only double the messages."""
    return _ring(nbytes, on, of) + _busy(2 * (on.ranks - 1) * of.message_s)


def _folded(on: Topology) -> bool:
    """Whether some ranks form pairs that count as one, since there is no power of two of them."""
    return on.ranks & (on.ranks - 1) != 0


def _fold(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 alpha + S beta + S / 2 gamma: pairs exchange halves and hand one over (Rabenseifner, 2004, section 4)."""
    if not _folded(on):
        return Cost()
    return 2 * pairs(on).cost(nbytes / 2, of) + _reduced(nbytes / 2, of)


def _unfold(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """alpha + S beta: the other rank of a pair gets the result."""
    return pairs(on).cost(nbytes, of) if _folded(on) else Cost()


def _halving(nbytes: float, on: Topology, of: MachineModel, nearest_first: bool = True) -> Cost:
    """log2 p alpha + (p - 1) / p S (beta + gamma), p the power of two (Thakur et al., 2005, section 4.3)."""
    distances = [1 << bit for bit in range(on.ranks.bit_length() - 1)]
    cost = Cost()
    for step, distance in enumerate(distances if nearest_first else reversed(distances), start=1):
        cost += partners(on, distance).cost(nbytes / 2**step, of) + _reduced(nbytes / 2**step, of)
    return cost


def _halving_reduce_scatter(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    far_first = _halving(nbytes, on, of, nearest_first=False)
    return _fold(nbytes, on, of) + far_first + _unfold(nbytes / on.ranks, on, of)


def _doubling(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n alpha + (n - 1) / n S beta: the way back from halving (Thakur et al., 2005, section 4.1)."""
    return _halving(nbytes, on, _moving(of), nearest_first=False) + _unfold(nbytes, on, of)


def _halving_doubling(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 log2 p alpha + 2 (p - 1) / p S beta + (p - 1) / p S gamma (Thakur et al., 2005, section 4.5)."""
    there, back = _halving(nbytes, on, of), _halving(nbytes, on, _moving(of))
    return _fold(nbytes, on, of) + there + back + _unfold(nbytes, on, of)


def _recursive_doubling(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n (alpha + S beta + S gamma), for short arrays (Thakur et al., 2005, section 4.5)."""
    cost = _unfold(nbytes, on, of) + _reduced(nbytes, of) if _folded(on) else Cost()
    for bit in range(on.ranks.bit_length() - 1):
        cost += partners(on, 1 << bit).cost(nbytes, of) + _reduced(nbytes, of)
    return cost + _unfold(nbytes, on, of)


def _tree_up(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n (alpha + S beta + S gamma) (Chan et al., 2007, section 4.1)."""
    return sum((load.cost(nbytes, of) + _reduced(nbytes, of) for load in levels(on)), Cost())


def _tree_down(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n (alpha + S beta) (Chan et al., 2007, section 4.1)."""
    return _tree_up(nbytes, on, _moving(of))


def _up_and_down(up: Cost, down: Cost) -> Cost:
    """Later sums go up while earlier results come down: in the two directions of the network."""
    return Cost(up.alone_s + down.alone_s, max(up.network_s, down.network_s), up.core_s + down.core_s)


def _tree(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    return _up_and_down(_tree_up(nbytes, on, of), _tree_down(nbytes, on, of))


def _double_tree(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 log2 n steps for the first segment; a rank receives and sends 2 S at most (Sanders et al., 2009, section 3).

    A rank is an inner one in one tree alone. There it receives and reduces halves of two children and gets one result
    from above; in the other tree it gets the other result.
    """
    half, steps = nbytes / 2, double_levels(on)
    down = sum((load.cost(half, of) for load in steps), Cost())
    both = _up_and_down(down + 2 * len(steps) * _reduced(half, of), down)
    received = min(4, 2 * (on.ranks - 1))
    everywhere = 2 * sum(load.inside for load in steps)
    core = Load(0, everywhere, received).cost(half, of) + _reduced(nbytes, of)
    return replace(both, core_s=core.core_s)


def _reference(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """alpha + (n - 1) S (beta + gamma): all send all to all."""
    return everybody(on).cost(nbytes, of) + (on.ranks - 1) * _reduced(nbytes, of)


def _reference_moving(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """alpha + (n - 1) S / n beta: all send their parts to all."""
    return everybody(on).cost(nbytes / on.ranks, of)


def _reference_broadcast(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """alpha + (n - 1) S beta: the root sends to all."""
    n, local = on.ranks, on.local_sizes[0]
    return Load(n - local, local - 1, n - 1).cost(nbytes, of)


def _shared_reduce_scatter(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 waits a chunk, (n - 1) / n S copied to where others read it, and (n - 1) / n S reduced."""
    chunks = max(1, -(-int(nbytes) // intra_node.CHUNK_NBYTES))
    share = (on.ranks - 1) / on.ranks * nbytes
    return _busy(2 * chunks * of.wait_s + share * of.copy_s_per_byte) + _reduced(share, of)


def _shared(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """The same, and (n - 1) / n S copied back: a reduce-scatter and an allgather in memory."""
    return _shared_reduce_scatter(nbytes, on, of) + _busy((on.ranks - 1) / on.ranks * nbytes * of.copy_s_per_byte)


def _shared_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """1 wait a chunk, S / n copied to where others read it, and (n - 1) / n S from there."""
    chunks = max(1, -(-int(nbytes) // (intra_node.CHUNK_NBYTES * on.ranks)))
    return _busy(chunks * of.wait_s + nbytes * of.copy_s_per_byte)


def _shared_broadcast(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """1 wait a chunk, S copied by the root to where others read it, and S from there."""
    return _shared_allgather(nbytes, on, of) + _busy(nbytes * of.copy_s_per_byte)


def _hierarchical(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Staged, summed and taken in memory; between, r rings of m ranks share a link: 2 (m - 1) (alpha + S / m beta).

    A rank reduces its shard S / r over its node and in its ring (Cho et al., "BlueConnect", 2019).
    """
    if max(on.local_sizes) == 1:
        return _ring(nbytes, on, of)
    m, most = on.nodes, max(on.local_sizes)
    rails = min(on.local_sizes) if on.shared_memory else 1
    memory = 2 * _busy(nbytes * of.copy_s_per_byte) + (most - 1) * _reduced(nbytes / rails, of)
    step = Load(rails, 0).cost(nbytes / rails / m, of) if m > 1 else Cost()
    network = 2 * (m - 1) * step + (m - 1) * _reduced(nbytes / rails / m, of)
    return memory + 3 * _busy(of.wait_s + of.message_s) + network


def _scatter_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(log2 n + n - 1) alpha + 2 (n - 1) / n S beta, for long broadcasts (Thakur et al., 2005, section 4.2)."""
    return _doubling(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _halving_gather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 log2 n alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma, for long reduces (Thakur et al., 2005, 4.4)."""
    return _halving_reduce_scatter(nbytes, on, of) + _doubling(nbytes, on, of)


_LIBRARY: dict[str, tuple[Formula, ...]] = {
    "allreduce": (_recursive_doubling, _halving_doubling, _ring),
    "reduce_scatter": (_halving_reduce_scatter, _ring_reduce_scatter),
    "allgather": (_doubling, _ring_allgather),
    "broadcast": (_tree_down, _scatter_allgather),
    "reduce": (_tree_up, _halving_gather),
}
"""What MPI libraries choose from, by size: in C, in one segment."""


def _whole(on: Topology) -> float:
    return float("inf")


_OURS: dict[str, dict[str, tuple[Formula, Callable[[Topology], float]]]] = {
    "allreduce": {
        "reference": (_reference, _whole),
        "shared": (_shared, _whole),
        "ring": (_ring, lambda on: MESSAGE_NBYTES * on.ranks),
        "bidirectional": (_both_ways, lambda on: 2 * MESSAGE_NBYTES * on.ranks),
        "halving_doubling": (_halving_doubling, lambda on: halving_doubling.SEGMENT_NBYTES),
        "recursive_doubling": (_recursive_doubling, _whole),
        "tree": (_tree, lambda on: tree.SEGMENT_NBYTES),
        "double_tree": (_double_tree, lambda on: 2 * tree.SEGMENT_NBYTES),
        "hierarchical": (
            _hierarchical,
            lambda on: min(hierarchical.SEGMENT_NBYTES, MESSAGE_NBYTES * min(on.local_sizes) * on.nodes),
        ),
    },
    "reduce_scatter": {
        "reference": (_reference, _whole),
        "shared": (_shared_reduce_scatter, _whole),
        "ring": (_ring_reduce_scatter, lambda on: MESSAGE_NBYTES * on.ranks),
        "halving_doubling": (_halving_reduce_scatter, lambda on: halving_doubling.SEGMENT_NBYTES),
    },
    "allgather": {
        "reference": (_reference_moving, _whole),
        "shared": (_shared_allgather, _whole),
        "ring": (_ring_allgather, lambda on: MESSAGE_NBYTES * on.ranks),
    },
    "broadcast": {
        "reference": (_reference_broadcast, _whole),
        "shared": (_shared_broadcast, _whole),
        "tree": (_tree_down, lambda on: tree.SEGMENT_NBYTES),
    },
    "reduce": {
        "reference": (_reference, _whole),
        "shared": (_shared, _whole),
        "tree": (_tree_up, lambda on: tree.SEGMENT_NBYTES),
    },
}
"""Our algorithms: the formula of a segment, and how long segments are."""


def predicted_s(
    collective: str, algorithm: str, nbytes: int, topology: Topology, machine: MachineModel | None = None
) -> float:
    """Seconds of a collective over all ranks of ``topology``.

    Args:
        collective, algorithm: names in `hpcdp.collectives.ALGORITHMS`. The MPI library is taken to choose the best
            algorithm of the papers above.
        nbytes: of the whole array, of an allgather of all parts.
        topology: the nodes and their ranks.
        machine: what links and cores do, of which every rank has one to itself; default `links.assumed`.

    Raises:
        UnsupportedError: there is no formula for it; it lists those there are.
    """
    if algorithm != "native" and algorithm not in _OURS[collective]:
        valid = " or ".join(["native", *_OURS[collective]])
        raise UnsupportedError(f"predict {collective}", where="algorithm", expected=valid, got=repr(algorithm))
    if topology.ranks == 1:
        return 0.0
    machine = (machine or assumed(topology)).at(nbytes)
    if algorithm == "native":
        in_c = replace(machine, message_s=0.0)
        return machine.call_s + min(formula(nbytes, topology, in_c).alone_s for formula in _LIBRARY[collective])
    formula, segment_nbytes = _OURS[collective][algorithm]
    segments = max(1, -int(-nbytes // segment_nbytes(topology)))
    return machine.call_s + pipelined_s(formula(nbytes / segments, topology, machine), segments)


_CROWDED_NBYTES = 64 << 10
_SHORT_NBYTES = 16 << 10
_LONG_BROADCAST_NBYTES = 32 << 10
_GAIN = 1.1
"""How much faster than the MPI library's own an algorithm must be predicted to be: predictions are no better."""


def model_choice(
    collective: str,
    nbytes: int,
    dtype_itemsize: int,
    topology: Topology,
    candidates: Iterable[str],
    machine: MachineModel | None = None,
) -> str:
    """The algorithm of ``candidates`` for worlds in which nothing was measured.

    In one node whose ranks share memory that is ``shared``, unless they outnumber its cores and the array is short:
    then the MPI library was faster up to `_CROWDED_NBYTES`, since a rank of it that waits leaves its core at once. It
    is faster, too, for broadcasts from `_LONG_BROADCAST_NBYTES`, which it copies once where ``shared`` copies twice.
    Over several nodes it is ``recursive_doubling`` for arrays below `_SHORT_NBYTES`, whose messages compare the calls
    of ranks as well, which for all others takes messages of its own. For longer ones it is ``native``, since the MPI
    library knows networks that this model does not, unless the network is the slowest stage of ``hierarchical`` and
    this is predicted to be `_GAIN` times as fast, although the library is taken to use the best algorithm of the
    papers. So it is for long arrays on links of 10 Gbit/s: there, fewer bytes on the link and the overlap with it
    outweigh what Python costs. On a fabric as fast as memory nothing is known to be won. What else may be faster must
    have been measured. Without ``native`` (a reduction that MPI does not have) it is the one with the lowest
    prediction.

    Args:
        collective, nbytes, topology, machine: as for `predicted_s`.
        dtype_itemsize: bytes of an element; an array of fewer elements than ranks is cut by no algorithm but as a last
            resort.
        candidates: at least one name, all of which can run; the same on all ranks.
    """
    names = list(candidates)
    machine = machine or assumed(topology)
    in_memory = topology.nodes == 1 and topology.shared_memory
    if "shared" in names and in_memory:
        short = topology.crowded and nbytes < _CROWDED_NBYTES
        long = collective == "broadcast" and nbytes >= _LONG_BROADCAST_NBYTES
        return "native" if (short or long) and "native" in names else "shared"

    def seconds(name: str) -> float:
        return predicted_s(collective, name, nbytes, topology, machine)

    if "recursive_doubling" in names and nbytes < _SHORT_NBYTES and not in_memory:
        return "recursive_doubling"
    if "native" in names:
        stages = _hierarchical(nbytes, topology, machine.at(nbytes))
        suits = "hierarchical" in names and nbytes >= dtype_itemsize * topology.ranks
        slow = stages.network_s >= stages.core_s
        return "hierarchical" if suits and slow and seconds("native") >= _GAIN * seconds("hierarchical") else "native"
    names = [name for name in names if name in _OURS[collective] and name not in ("shared", "reference")] or names
    if nbytes < dtype_itemsize * topology.ranks:
        names = [name for name in names if name == "tree"] or names
    return min(names, key=seconds)
