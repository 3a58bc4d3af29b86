"""The cost model of collectives: predicted seconds from a `MachineModel` and a `Topology`.

`algorithm_choice` calls it where `hpcdp tune` has measured nothing. `hpcdp bench` and `hpcdp tune` print predictions.

A message of m bytes takes ``alpha + m beta`` seconds, and reducing it into another array ``m gamma`` more (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 3; Chan et al.,
"Collective communication: theory, practice, and experience", 2007, section 3). The model adds four things:

- There are two classes of links, inside a node and across nodes. All ranks of a node share its network link (in each
  direction) and its memory bandwidth.
- beta and gamma depend on the size, because MPI libraries use other protocols for short messages, and long arrays
  exceed the caches. They are measured at several sizes.
- The algorithms here are machines in Python, so a message costs a core some microseconds, unlike in the MPI library.
- Long arrays are sent in segments. One is reduced while another is on the network, so every segment after the first
  adds the time of the slowest stage, while unsegmented algorithms add up all stages.

Ranks are assumed to be placed node by node, so neighbors in a ring are mostly on one node.

In the formulas n is the number of ranks, m of nodes, and S the bytes of the whole array (for an allgather: of all
shards).

Sources: the papers above; Rabenseifner, "Optimization of collective reduction operations", 2004; Sanders, Speck and
Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; Patarasu and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..comm.progress import LANES, messages
from ..core.checks import choices
from ..errors import UnsupportedError
from . import hierarchical, intra_node, tree

_LEAST_S_PER_BYTE = 1e-15  # a petabyte per second; keeps the logarithm finite


Rates = tuple[int, float, float]
"""A size in bytes, and two rates at it in seconds per byte."""


def _between(rates: tuple[Rates, ...], nbytes: float) -> tuple[float, float]:
    """Interpolate both rates at ``nbytes``, log-log; constant outside of the measured sizes."""
    sizes, *both = np.log(np.maximum(np.array(rates), _LEAST_S_PER_BYTE)).T
    first, second = (float(np.exp(np.interp(np.log(max(nbytes, 1.0)), sizes, rate))) for rate in both)
    return first, second


@dataclass(frozen=True)
class Link:
    """One class of links."""

    alpha_s: float
    """Latency: seconds of the shortest message."""
    beta_s_per_byte: float
    """Seconds per byte of a single message."""
    shared_s_per_byte: float
    """Seconds per byte of all simultaneous traffic of a node, over its network link or in its memory."""
    by_size: tuple[Rates, ...] = ()
    """Measured ``(nbytes, beta, shared)`` in ascending order of message sizes; empty for constant rates."""

    def at(self, nbytes: float) -> Link:
        """Return the link with its rates for messages of ``nbytes``."""
        if not self.by_size:
            return self
        beta, shared = _between(self.by_size, nbytes)
        return Link(self.alpha_s, beta, shared)


@dataclass(frozen=True)
class MachineModel:
    """Speed of the links and cores of a machine."""

    inside: Link
    """Link between ranks of one node."""
    across: Link
    """Link between nodes."""
    copy_s_per_byte: float
    """Seconds per byte to copy data that another rank of the node has written, while all ranks copy."""
    gamma_s_per_byte: float
    """Seconds per byte to reduce one array into another."""
    message_s: float
    """Seconds of a core to send one message and receive one, in these algorithms."""
    wait_s: float
    """Seconds of a barrier in shared memory between the ranks of a node."""
    call_s: float
    """Fixed overhead of a call, in seconds."""
    by_size: tuple[Rates, ...] = ()
    """Measured ``(nbytes, copy, gamma)`` in ascending order of a rank's array sizes; empty for constant rates."""

    def at(self, nbytes: float) -> MachineModel:
        """Return the machine with its rates for arrays of ``nbytes``, which may or may not fit in its caches."""
        if not self.by_size:
            return self
        copy, gamma = _between(self.by_size, nbytes)
        return replace(self, copy_s_per_byte=copy, gamma_s_per_byte=gamma, by_size=())


@dataclass(frozen=True)
class Topology:
    """The number of ranks of each node, node by node."""

    local_sizes: tuple[int, ...]
    shared_memory: bool = True
    """True if the ranks of a node can read each other's memory."""
    crowded: bool = False
    """True if ranks outnumber the cores of a node."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.local_sizes)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.local_sizes)


ETHERNET = MachineModel(
    inside=Link(1e-6, 1e-10, 1e-11),
    across=Link(20e-6, 8e-10, 8e-10),
    copy_s_per_byte=1e-10,
    gamma_s_per_byte=1e-10,
    message_s=20e-6,
    wait_s=0.5e-6,
    call_s=3e-6,
)
"""TCP over a link of 10 Gbit/s; memory of 10 GB/s a core and 100 GB/s a node."""
FABRIC = replace(ETHERNET, across=Link(2e-6, 8e-11, 8e-11))
"""An RDMA adapter of 100 Gbit/s."""


def assumed(topology: Topology, base: MachineModel = ETHERNET) -> MachineModel:
    """Return the machine model for unmeasured worlds, made from `ETHERNET`, or from `FABRIC` for nodes with RDMA."""
    at_once_s_per_byte = max(topology.local_sizes) * base.inside.shared_s_per_byte
    return replace(base, copy_s_per_byte=max(base.copy_s_per_byte, at_once_s_per_byte))


@dataclass(frozen=True)
class Cost:
    """Cost of one segment of an array, in seconds."""

    alone_s: float = 0.0
    """Time from start to end without other traffic."""
    network_s: float = 0.0
    """Time for which it occupies the network link of the busiest node."""
    core_s: float = 0.0
    """Time for which it occupies the core of the busiest rank, or the memory of a node."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alone_s + other.alone_s, self.network_s + other.network_s, self.core_s + other.core_s)

    def __rmul__(self, times: float) -> Cost:
        return Cost(times * self.alone_s, times * self.network_s, times * self.core_s)


@dataclass(frozen=True)
class Load:
    """The simultaneous messages of one step."""

    across: int
    """Messages that leave the busiest node, or arrive at it."""
    inside: int
    """Messages between ranks of the busiest node."""
    a_rank: int = 1
    """Messages that the busiest rank receives."""

    def cost(self, nbytes: float, machine: MachineModel) -> Cost:
        """Return the cost of the step with messages of ``nbytes``."""
        posted_s = self.a_rank * machine.message_s
        network_s, core_s = (
            nbytes * max(min(self.a_rank, number) * link.beta_s_per_byte, number * link.shared_s_per_byte)
            for number, link in ((self.across, machine.across.at(nbytes)), (self.inside, machine.inside.at(nbytes)))
        )
        latency_s = machine.across.alpha_s if self.across else machine.inside.alpha_s if self.inside else 0.0
        return Cost(latency_s + posted_s + max(network_s, core_s), network_s, core_s + posted_s)


def pipelined_s(first: Cost, segments: int) -> float:
    """Return the seconds of ``segments`` segments, of which `LANES` are in progress at a time."""
    return first.alone_s + (segments - 1) * max(first.network_s, first.core_s, first.alone_s / LANES)


def _load(source: np.ndarray, dest: np.ndarray, topology: Topology) -> Load:
    """Return the load of one message from every rank of ``source`` to that of ``dest``."""
    node = np.repeat(np.arange(topology.nodes), topology.local_sizes)
    of, to = node[source], node[dest]
    leaving, coming, staying = (
        int(np.bincount(nodes, minlength=1).max()) for nodes in (of[of != to], to[of != to], of[of == to])
    )
    return Load(max(leaving, coming), staying, int(np.bincount(dest, minlength=1).max()))


@lru_cache
def neighbors(topology: Topology) -> Load:
    """Return the load of a ring step: a message from every rank to the next."""
    return shifted(topology, 1)


@lru_cache
def all_pairs(topology: Topology) -> Load:
    """Return the load of a message from every rank to every other."""
    n, most = topology.ranks, max(topology.local_sizes)
    return Load(max(size * (n - size) for size in topology.local_sizes), most * (most - 1), n - 1)


@lru_cache
def shifted(topology: Topology, distance: int) -> Load:
    """Return the load of a message from every rank to the one at ``distance``."""
    ranks = np.arange(topology.ranks)
    return _load(ranks, np.roll(ranks, -distance), topology)


@lru_cache
def partners(topology: Topology, distance: int) -> Load:
    """Return the load of a recursive-halving step among the 2^k participating ranks."""
    n = topology.ranks
    p = 1 << n.bit_length() - 1
    numbers = np.arange(p)
    ranks = np.where(numbers < n - p, 2 * numbers, numbers + n - p)
    return _load(ranks, ranks[numbers ^ distance], topology)


@lru_cache
def pairs(topology: Topology) -> Load:
    """Return the load of the first step if n is no power of two: even and odd ranks exchange."""
    pairs = topology.ranks - (1 << topology.ranks.bit_length() - 1)
    even = 2 * np.arange(pairs)
    return _load(np.concatenate([even, even + 1]), np.concatenate([even + 1, even]), topology)


@lru_cache
def levels(topology: Topology) -> tuple[Load, ...]:
    """Return the loads of the steps up a binomial tree, from its leaves."""
    numbers = np.arange(1, topology.ranks)
    lowest = numbers & -numbers
    steps = (topology.ranks - 1).bit_length()
    at = [numbers[lowest == 1 << step] for step in range(steps)]
    return tuple(_load(level, level - (1 << step), topology) for step, level in enumerate(at))


@lru_cache
def double_levels(topology: Topology) -> tuple[Load, ...]:
    """Return the loads of the steps up two binary trees at once, from their leaves."""
    return tuple(_load(source, dest, topology) for source, dest in _edges_of_double_tree(topology.ranks))


@lru_cache
def double_tree(topology: Topology) -> Load:
    """Return the load of all messages of a segment, up and down two binary trees."""
    source, dest = np.concatenate(_edges_of_double_tree(topology.ranks), axis=1)
    return _load(np.concatenate([source, dest]), np.concatenate([dest, source]), topology)


def _edges_of_double_tree(n: int) -> list[np.ndarray]:
    """Return the ranks and their parents in both trees, shape ``(2, edges)`` for each level, from the leaves."""
    edges: dict[int, list[tuple[int, int]]] = {}
    for rank in range(n):
        for number, place in zip(tree.tree_numbers(rank, n), tree.double_trees(rank, n), strict=True):
            if place.parent is not None:
                edges.setdefault(number & -number, []).append((rank, place.parent))
    return [np.array(edges[level]).T for level in sorted(edges)]


Formula = Callable[[float, Topology, MachineModel], Cost]
"""Cost of one segment, given its bytes, the topology and the machine."""


def _busy(seconds: float) -> Cost:
    return Cost(seconds, 0.0, seconds)


def _copied(nbytes: float, of: MachineModel) -> Cost:
    return _busy(nbytes * of.copy_s_per_byte)


def _reduced(nbytes: float, of: MachineModel) -> Cost:
    return _busy(nbytes * of.gamma_s_per_byte)


def _moving(of: MachineModel) -> MachineModel:
    """Return the machine for data that is moved, not reduced."""
    return replace(of, gamma_s_per_byte=0.0)


def _ring_reduce_scatter(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(n - 1) (alpha + S / n (beta + gamma)) (Patarasu and Yuan, 2009, section 3)."""
    part = nbytes / on.ranks
    return (on.ranks - 1) * (neighbors(on).cost(part, of) + _reduced(part, of))


def _ring_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(n - 1) (alpha + S / n beta) (Thakur et al., 2005, section 4.1)."""
    return _ring_reduce_scatter(nbytes, on, _moving(of))


def _ring(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 (n - 1) alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma (Patarasu and Yuan, 2009, section 3)."""
    return _ring_reduce_scatter(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _both_ways(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Ring with halves in both directions: a ring already sends and receives at once, so only the messages double."""
    return _ring(nbytes, on, of) + _busy(2 * (on.ranks - 1) * of.message_s)


def _folded(on: Topology) -> bool:
    """Return whether n is no power of two, so that some ranks form pairs that count as one."""
    return on.ranks & (on.ranks - 1) != 0


def _fold(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 alpha + S beta + S / 2 gamma: pairs exchange halves and hand one over (Rabenseifner, 2004, section 4)."""
    if not _folded(on):
        return Cost()
    return 2 * pairs(on).cost(nbytes / 2, of) + _reduced(nbytes / 2, of)


def _unfold(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost alpha + S beta: the other rank of a pair gets the result."""
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
    forth, back = _halving(nbytes, on, of), _halving(nbytes, on, _moving(of))
    return _fold(nbytes, on, of) + forth + back + _unfold(nbytes, on, of)


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
    """Cost of sums that go up while earlier results come down, in the two directions of the network."""
    return Cost(up.alone_s + down.alone_s, max(up.network_s, down.network_s), up.core_s + down.core_s)


def _tree(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    return _up_and_down(_tree_up(nbytes, on, of), _tree_down(nbytes, on, of))


def _double_tree(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 log2 n steps for the first segment; a rank receives and sends at most 2 S (Sanders et al., 2009, section 3).

    A rank is an inner node in one tree only. There it receives and reduces the halves of two children and gets one
    result from its parent; in the other tree it gets the other result.
    """
    half, steps = nbytes / 2, double_levels(on)
    down = sum((load.cost(half, of) for load in steps), Cost())
    up = down + 2 * len(steps) * _reduced(half, of)
    all_messages = double_tree(on).cost(half, of)
    core_s = all_messages.core_s + _reduced(nbytes, of).core_s
    return Cost(up.alone_s + down.alone_s, all_messages.network_s, core_s)


def _reference(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost alpha + (n - 1) S (beta + gamma): all ranks send everything to all."""
    return all_pairs(on).cost(nbytes, of) + (on.ranks - 1) * _reduced(nbytes, of)


def _reference_moving(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost alpha + (n - 1) S / n beta: all ranks send their shards to all."""
    return all_pairs(on).cost(nbytes / on.ranks, of)


def _reference_broadcast(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost alpha + (n - 1) S beta: the root sends to all."""
    n, local = on.ranks, on.local_sizes[0]
    return Load(n - local, local - 1, n - 1).cost(nbytes, of)


def _shared_reduce_scatter(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 waits a chunk, (n - 1) / n S staged for the others, and (n - 1) / n S reduced."""
    chunks = max(1, -(-int(nbytes) // intra_node.CHUNK_NBYTES))
    share = (on.ranks - 1) / on.ranks * nbytes
    return _busy(2 * chunks * of.wait_s + share * of.copy_s_per_byte) + _reduced(share, of)


def _shared(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost of `_shared_reduce_scatter` and an allgather in memory, (n - 1) / n S copied back."""
    return _shared_reduce_scatter(nbytes, on, of) + _copied((on.ranks - 1) / on.ranks * nbytes, of)


def _shared_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """1 wait a chunk, S / n staged for the others, and (n - 1) / n S copied from them."""
    chunks = max(1, -(-int(nbytes) // (intra_node.CHUNK_NBYTES * on.ranks)))
    return _busy(chunks * of.wait_s + nbytes * of.copy_s_per_byte)


def _shared_broadcast(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 waits, S staged by the root, and S copied by the others; 3 and (n - 1) / n S copied once if S is long."""
    if nbytes > intra_node.STAGED_NBYTES:
        return _busy(3 * of.wait_s + (on.ranks - 1) / on.ranks * nbytes * of.copy_s_per_byte)
    return _busy(2 * of.wait_s + 2 * nbytes * of.copy_s_per_byte)


def _shared_exchange(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 waits, S staged, and S copied from the others and from its own data; only the latter if S is long."""
    copies = 1 if nbytes > intra_node.STAGED_NBYTES else 2
    return _busy(2 * of.wait_s + copies * nbytes * of.copy_s_per_byte)


def _shared_rooted(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 waits, S staged by the root and S / n copied by the others, or S / n and S; 3 and S / n copied if S is long."""
    if nbytes > intra_node.STAGED_NBYTES:
        return _busy(3 * of.wait_s + nbytes / on.ranks * of.copy_s_per_byte)
    return _busy(2 * of.wait_s + (on.ranks + 1) / on.ranks * nbytes * of.copy_s_per_byte)


def _pairwise(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(n - 1) (alpha + S / n beta) (Thakur et al., 2005, section 4.3), with the load of a step as the mean of all."""
    steps, every = on.ranks - 1, all_pairs(on)
    return steps * Load(-(-every.across // steps), -(-every.inside // steps)).cost(nbytes / on.ranks, of)


def _bruck(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n (alpha + S / 2 beta), of data that are copied before and after (Bruck et al., 1997, section 3)."""
    distances = [1 << bit for bit in range((on.ranks - 1).bit_length())]
    stages = (shifted(on, distance).cost(nbytes / 2, of) + _copied(nbytes, of) for distance in distances)
    return sum(stages, 2 * _copied(nbytes, of))


def _bruck_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """log2 n alpha + (n - 1) / n S beta, of data that are copied before and after (Bruck et al., 1997, section 4)."""
    cost, distance = Cost(), 1
    while distance < on.ranks:
        part = min(distance, on.ranks - distance) / on.ranks * nbytes
        cost += shifted(on, distance).cost(part, of) + _copied(2 * part, of)
        distance *= 2
    return cost


def _by_node(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 (k - 1) (alpha + S / k beta) in nodes of k ranks, and m - 1 messages of k S / n to other nodes."""
    k, m = max(on.local_sizes), on.nodes
    collected = Load(0, 2 * k * (k - 1), 2 * (k - 1)).cost(nbytes / (2 * k), of)
    sent = Load(k * (m - 1), 0, m - 1).cost(k * nbytes / on.ranks, of)
    return collected + sent + _copied(4 * nbytes, of)


def _rooted(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost alpha + (n - 1) S / n beta: the root exchanges a message with each rank."""
    return _reference_broadcast(nbytes / on.ranks, on, of)


def _hierarchical(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Stages in memory, and r rings of m ranks that share a link: 2 (m - 1) (alpha + S / m beta).

    A rank reduces its shard S / r over its node and in its ring (Cho et al., "BlueConnect", 2019).
    """
    if max(on.local_sizes) == 1:
        return _ring(nbytes, on, of)
    m, most = on.nodes, max(on.local_sizes)
    rails = min(on.local_sizes) if on.shared_memory else 1
    memory = 2 * _copied(nbytes, of) + (most - 1) * _reduced(nbytes / rails, of)
    step = Load(rails, 0).cost(nbytes / rails / m, of) if m > 1 else Cost()
    network = 2 * (m - 1) * step + (m - 1) * _reduced(nbytes / rails / m, of)
    return memory + 3 * _busy(of.wait_s + of.message_s) + network


def _scatter_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """(log2 n + n - 1) alpha + 2 (n - 1) / n S beta, for long broadcasts (Thakur et al., 2005, section 4.2)."""
    return _doubling(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _halving_gather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """2 log2 n alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma, for long reduces (Thakur et al., 2005, 4.4)."""
    return _halving_reduce_scatter(nbytes, on, of) + _doubling(nbytes, on, of)


def _by_node_allgather(nbytes: float, on: Topology, of: MachineModel) -> Cost:
    """Cost m - 1 messages of S / n to other nodes of k ranks, beside k - 1 in the node, and then k - 1 of S / k."""
    k, m = max(on.local_sizes), on.nodes
    sent = Load(k * (m - 1), k * (k - 1), m + k - 2).cost(nbytes / on.ranks, of)
    passed_on = Load(0, k * (k - 1), k - 1).cost(nbytes * (m - 1) / m / k, of)
    return sent + passed_on + _copied(2 * nbytes, of)


_LIBRARY: dict[str, tuple[Formula, ...]] = {
    "allreduce": (_recursive_doubling, _halving_doubling, _ring),
    "reduce_scatter": (_halving_reduce_scatter, _ring_reduce_scatter),
    "allgather": (_doubling, _ring_allgather),
    "broadcast": (_tree_down, _scatter_allgather),
    "reduce": (_tree_up, _halving_gather),
    "allgatherv": (_doubling, _ring_allgather),
    "alltoall": (_pairwise,),
    "gather": (_rooted,),
    "scatter": (_rooted,),
}
"""Algorithms between which MPI libraries choose by size; in C, in one segment."""


Segments = Callable[[int, Topology], int]
"""The number of segments, given the bytes of an array and the topology."""


def _one(nbytes: int, on: Topology) -> int:
    return 1


def _of_a_ring(nbytes: int, on: Topology) -> int:
    return messages(nbytes / on.ranks)


def _of_a_tree(nbytes: int, on: Topology) -> int:
    return messages(nbytes)


def _of_halves(nbytes: int, on: Topology) -> int:
    return messages(nbytes / 2)


_OURS: dict[str, dict[str, tuple[Formula, Segments]]] = {
    "allreduce": {
        "reference": (_reference, _one),
        "shared": (_shared, _one),
        "ring": (_ring, _of_a_ring),
        "bidirectional": (_both_ways, lambda nbytes, on: messages(nbytes / 2 / on.ranks)),
        "halving_doubling": (_halving_doubling, _of_halves),
        "recursive_doubling": (_recursive_doubling, _one),
        "tree": (_tree, _of_a_tree),
        "double_tree": (_double_tree, _of_halves),
        "hierarchical": (
            _hierarchical,
            lambda nbytes, on: hierarchical.num_segments(nbytes, min(on.local_sizes) * on.nodes),
        ),
    },
    "reduce_scatter": {
        "reference": (_reference, _one),
        "shared": (_shared_reduce_scatter, _one),
        "ring": (_ring_reduce_scatter, _of_a_ring),
        "halving_doubling": (_halving_reduce_scatter, _of_halves),
        "recursive_doubling": (_recursive_doubling, _one),
    },
    "allgather": {
        "reference": (_reference_moving, _one),
        "shared": (_shared_allgather, _one),
        "ring": (_ring_allgather, _of_a_ring),
        "recursive_doubling": (_recursive_doubling, _one),
    },
    "broadcast": {
        "reference": (_reference_broadcast, _one),
        "shared": (_shared_broadcast, _one),
        "tree": (_tree_down, _of_a_tree),
        "recursive_doubling": (_recursive_doubling, _one),
    },
    "reduce": {
        "reference": (_reference, _one),
        "shared": (_shared, _one),
        "tree": (_tree_up, _of_a_tree),
        "recursive_doubling": (_recursive_doubling, _one),
    },
    "allgatherv": {
        "shared": (_shared_exchange, _one),
        "ring": (_ring_allgather, _one),
        "bruck_allgather": (_bruck_allgather, _one),
        "by_node_allgather": (_by_node_allgather, _one),
    },
    "alltoall": {
        "shared": (_shared_exchange, _one),
        "pairwise": (_pairwise, _one),
        "bruck": (_bruck, _one),
        "by_node": (_by_node, _one),
    },
    "gather": {"shared": (_shared_rooted, _one), "direct": (_rooted, _one)},
    "scatter": {"shared": (_shared_rooted, _one), "direct": (_rooted, _one)},
}
"""Algorithms of this package: the formula of a segment, and the number of segments."""


def predicted_s(
    collective: str, algorithm: str, nbytes: int, topology: Topology, machine: MachineModel | None = None
) -> float:
    """Return the predicted seconds of a collective over all ranks of ``topology``.

    Args:
        collective: a key of `hpcdp.collectives.ALGORITHMS`, or a movement of blocks of any size (`blocks`): allgatherv,
            alltoall, gather or scatter.
        algorithm: a name in ``ALGORITHMS[collective]``, for blocks "shared" or a name in `blocks.ALGORITHMS`. "native"
            is assumed to use the best algorithm of the papers above.
        nbytes: bytes of the whole array, for an allgather of all shards.
        topology: the nodes and their ranks.
        machine: speed of links and cores, with a core for each rank; default `assumed`.

    Raises:
        UnsupportedError: no formula for this algorithm; lists the available ones.
    """
    if algorithm != "native" and algorithm not in _OURS[collective]:
        valid = choices(["native", *_OURS[collective]])
        raise UnsupportedError(f"predict {collective}", where="algorithm", expected=valid, got=repr(algorithm))
    if topology.ranks == 1:
        return 0.0
    machine = (machine or assumed(topology)).at(nbytes)
    if algorithm == "native":
        in_c = replace(machine, message_s=0.0)
        return machine.call_s + min(formula(nbytes, topology, in_c).alone_s for formula in _LIBRARY[collective])
    formula, number = _OURS[collective][algorithm]
    segments = number(nbytes, topology)
    return machine.call_s + pipelined_s(formula(nbytes / segments, topology, machine), segments)


_CROWDED_NBYTES = 64 << 10
_SHORT_NBYTES, _SHORT_MOVED_NBYTES, _MOST_ON_TCP_NBYTES = 16 << 10, 2 << 10, 128 << 10
"""Short arrays, of a sum and of other collectives, and the most bytes of such arrays of all ranks over TCP, where a
comparison of the calls by messages of their own costs as much as the library's collective.
"""
_TCP_ALPHA_S, _LONG_NBYTES, _GAIN_OF_LONG = 10e-6, 2 << 20, 0.98
"""A latency that only TCP has, arrays from which the library's sums reach 0.65 to 0.75 of its prediction there (Open
MPI 5 on links of 1 and 10 Gbit/s), and the least predicted speed-up in this case.
"""
_GAIN = 1.1
"""Predicted speed-up over the MPI library that an algorithm must reach, because predictions are no more precise."""


def choose_movement(
    collective: str, nbytes: int, topology: Topology, names: Sequence[str], machine: MachineModel
) -> str:
    """Choose how messages move blocks; ``names[0]`` unless the best prediction is `_GAIN` times as fast.

    Arguments are those of `predicted_s`.
    """

    def seconds(name: str) -> float:
        return predicted_s(collective, name, nbytes, topology, machine)

    best = min(names, key=seconds)
    return best if seconds(names[0]) >= _GAIN * seconds(best) else names[0]


def _short_nbytes(collective: str, topology: Topology, machine: MachineModel) -> int:
    """Return the longest arrays that go by recursive doubling over several nodes."""
    is_moved = collective in ("allgather", "broadcast")
    least = _SHORT_MOVED_NBYTES if is_moved else _SHORT_NBYTES
    if machine.across.alpha_s < _TCP_ALPHA_S:
        return least
    whole = 2 if collective == "allgather" else 1  # whose longest message has half of all
    return max(least, whole * _MOST_ON_TCP_NBYTES // topology.ranks)


def model_choice(
    collective: str,
    nbytes: int,
    dtype_itemsize: int,
    topology: Topology,
    candidates: Iterable[str],
    machine: MachineModel | None = None,
) -> str:
    """Choose an algorithm from ``candidates`` for a world without measurements; other arguments as for `predicted_s`.

    - One node with shared memory: ``shared``. ``native`` is faster if ranks outnumber cores and the array is below
      `_CROWDED_NBYTES`, because a waiting rank yields its core at once.
    - Several nodes, short arrays (`_SHORT_NBYTES`, or `_SHORT_MOVED_NBYTES` of a broadcast or allgather; over TCP up to
      64 KB on two ranks, `_MOST_ON_TCP_NBYTES`):
      ``recursive_doubling``, whose messages also compare the calls of the ranks, for which the others need messages of
      their own.
    - Several nodes, longer arrays: ``native``, because the MPI library knows networks that this model does not. The
      exception is ``hierarchical`` on TCP, if the network is its slowest stage and its prediction is `_GAIN` times as
      fast as the library's best algorithm, or `_GAIN_OF_LONG` times for long arrays. That holds for long arrays on
      links of 10 Gbit/s, where fewer bytes and the overlap outweigh the cost of Python. On a fabric no gain is known.
    - Without ``native`` (a reduction that MPI does not have): the lowest prediction.

    Only a measurement can choose others. All candidates must be able to run, and be the same on all ranks. An array
    with fewer elements (of ``dtype_itemsize`` bytes) than ranks is split only as a last resort.
    """
    names = list(candidates)
    machine = machine or assumed(topology)
    in_memory = topology.nodes == 1 and topology.shared_memory
    if "shared" in names and in_memory:
        short = topology.crowded and nbytes < _CROWDED_NBYTES
        return "native" if short and "native" in names else "shared"

    def seconds(name: str) -> float:
        return predicted_s(collective, name, nbytes, topology, machine)

    if "recursive_doubling" in names and nbytes <= _short_nbytes(collective, topology, machine) and not in_memory:
        return "recursive_doubling"
    if "native" in names:
        stages = _hierarchical(nbytes, topology, machine.at(nbytes))
        suits = "hierarchical" in names and nbytes >= dtype_itemsize * topology.ranks
        slow = machine.across.alpha_s >= _TCP_ALPHA_S and stages.network_s >= stages.core_s
        gain = _GAIN if nbytes < _LONG_NBYTES else _GAIN_OF_LONG
        return "hierarchical" if suits and slow and seconds("native") >= gain * seconds("hierarchical") else "native"
    names = [name for name in names if name in _OURS[collective] and name not in ("shared", "reference")] or names
    if nbytes < dtype_itemsize * topology.ranks:
        names = [name for name in names if name == "tree"] or names
    return min(names, key=seconds)
