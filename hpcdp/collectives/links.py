"""What a stage of messages costs: links inside a node and across nodes, what their messages share, segments.

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
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from . import double_tree
from .progress import LANES

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
class Machine:
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

    def at(self, nbytes: float) -> Machine:
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


ETHERNET = Machine(
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


def assumed(topology: Topology, base: Machine = ETHERNET) -> Machine:
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

    def cost(self, nbytes: float, machine: Machine) -> Cost:
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
        for number, place in zip(double_tree.numbers(rank, n), double_tree.trees(rank, n), strict=True):
            if place.parent is not None:
                edges.setdefault(number & -number, []).append((rank, place.parent))
    sources_and_dests = [np.array(edges[level]).T for level in sorted(edges)]
    return tuple(_load(source, dest, topology) for source, dest in sources_and_dests)
