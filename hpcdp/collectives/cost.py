"""What every collective costs by every algorithm, predicted in seconds from a `Machine` and a `Topology`.

In the formulas n is the number of ranks, m of nodes, S the bytes of the whole array (of an allgather: of all parts);
alpha, beta and gamma are those of `links`, which also says how shared links and segments are accounted for.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; Chan et
al., "Collective communication: theory, practice, and experience", 2007; Rabenseifner, "Optimization of collective
reduction operations", 2004; Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..errors import UnsupportedError
from . import double_tree, halving_doubling, hierarchical, shared, tree
from .links import (
    Cost,
    Load,
    Machine,
    Topology,
    assumed,
    double_levels,
    everybody,
    levels,
    neighbours,
    pairs,
    partners,
    pipelined_s,
)
from .progress import MESSAGE_NBYTES

Formula = Callable[[float, Topology, Machine], Cost]
"""What so many bytes cost, sent as one segment."""


def _busy(seconds: float) -> Cost:
    return Cost(seconds, 0.0, seconds)


def _reduced(nbytes: float, of: Machine) -> Cost:
    return _busy(nbytes * of.gamma_s_per_byte)


def _moving(of: Machine) -> Machine:
    """The same machine for what is not reduced."""
    return replace(of, gamma_s_per_byte=0.0)


def _ring_reduce_scatter(nbytes: float, on: Topology, of: Machine) -> Cost:
    """(n - 1) (alpha + S / n (beta + gamma)) (Patarasu and Yuan, 2009, section 3)."""
    part = nbytes / on.ranks
    return (on.ranks - 1) * (neighbours(on).cost(part, of) + _reduced(part, of))


def _ring_allgather(nbytes: float, on: Topology, of: Machine) -> Cost:
    """(n - 1) (alpha + S / n beta) (Thakur et al., 2005, section 4.1)."""
    return _ring_reduce_scatter(nbytes, on, _moving(of))


def _ring(nbytes: float, on: Topology, of: Machine) -> Cost:
    """2 (n - 1) alpha + 2 (n - 1) / n S beta + (n - 1) / n S gamma (Patarasu and Yuan, 2009, section 3)."""
    return _ring_reduce_scatter(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _both_ways(nbytes: float, on: Topology, of: Machine) -> Cost:
    """A ring already sends and receives at once, so halves in two directions only double the messages."""
    return _ring(nbytes, on, of) + _busy(2 * (on.ranks - 1) * of.message_s)


def _folded(on: Topology) -> bool:
    """Whether some ranks form pairs that count as one, since there is no power of two of them."""
    return on.ranks & (on.ranks - 1) != 0


def _fold(nbytes: float, on: Topology, of: Machine) -> Cost:
    """2 alpha + S beta + S / 2 gamma: pairs exchange halves and hand one over (Rabenseifner, 2004, section 4)."""
    if not _folded(on):
        return Cost()
    return 2 * pairs(on).cost(nbytes / 2, of) + _reduced(nbytes / 2, of)


def _unfold(nbytes: float, on: Topology, of: Machine) -> Cost:
    """alpha + S beta: the other rank of a pair gets the result."""
    return pairs(on).cost(nbytes, of) if _folded(on) else Cost()


def _halving(nbytes: float, on: Topology, of: Machine, nearest_first: bool = True) -> Cost:
    """log2 p alpha + (p - 1) / p S (beta + gamma), p the power of two (Thakur et al., 2005, section 4.3)."""
    distances = [1 << bit for bit in range(on.ranks.bit_length() - 1)]
    cost = Cost()
    for step, distance in enumerate(distances if nearest_first else reversed(distances), start=1):
        cost += partners(on, distance).cost(nbytes / 2**step, of) + _reduced(nbytes / 2**step, of)
    return cost


def _halving_reduce_scatter(nbytes: float, on: Topology, of: Machine) -> Cost:
    far_first = _halving(nbytes, on, of, nearest_first=False)
    return _fold(nbytes, on, of) + far_first + _unfold(nbytes / on.ranks, on, of)


def _doubling(nbytes: float, on: Topology, of: Machine) -> Cost:
    """log2 n alpha + (n - 1) / n S beta: the way back from halving (Thakur et al., 2005, section 4.1)."""
    return _halving(nbytes, on, _moving(of), nearest_first=False) + _unfold(nbytes, on, of)


def _halving_doubling(nbytes: float, on: Topology, of: Machine) -> Cost:
    """2 log2 p alpha + 2 (p - 1) / p S beta + (p - 1) / p S gamma (Thakur et al., 2005, section 4.5)."""
    there, back = _halving(nbytes, on, of), _halving(nbytes, on, _moving(of))
    return _fold(nbytes, on, of) + there + back + _unfold(nbytes, on, of)


def _recursive_doubling(nbytes: float, on: Topology, of: Machine) -> Cost:
    """log2 n (alpha + S beta + S gamma), for short arrays (Thakur et al., 2005, section 4.5)."""
    cost = _unfold(nbytes, on, of) + _reduced(nbytes, of) if _folded(on) else Cost()
    for bit in range(on.ranks.bit_length() - 1):
        cost += partners(on, 1 << bit).cost(nbytes, of) + _reduced(nbytes, of)
    return cost + _unfold(nbytes, on, of)


def _tree_up(nbytes: float, on: Topology, of: Machine) -> Cost:
    """log2 n (alpha + S beta + S gamma) (Chan et al., 2007, section 4.1)."""
    return sum((load.cost(nbytes, of) + _reduced(nbytes, of) for load in levels(on)), Cost())


def _tree_down(nbytes: float, on: Topology, of: Machine) -> Cost:
    """log2 n (alpha + S beta) (Chan et al., 2007, section 4.1)."""
    return _tree_up(nbytes, on, _moving(of))


def _up_and_down(up: Cost, down: Cost) -> Cost:
    """Later sums go up while earlier results come down: in the two directions of the network."""
    return Cost(up.alone_s + down.alone_s, max(up.network_s, down.network_s), up.core_s + down.core_s)


def _tree(nbytes: float, on: Topology, of: Machine) -> Cost:
    return _up_and_down(_tree_up(nbytes, on, of), _tree_down(nbytes, on, of))


def _double_tree(nbytes: float, on: Topology, of: Machine) -> Cost:
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


def _reference(nbytes: float, on: Topology, of: Machine) -> Cost:
    """alpha + (n - 1) S (beta + gamma): all send all to all."""
    return everybody(on).cost(nbytes, of) + (on.ranks - 1) * _reduced(nbytes, of)


def _reference_moving(nbytes: float, on: Topology, of: Machine) -> Cost:
    """alpha + (n - 1) S / n beta: all send their parts to all."""
    return everybody(on).cost(nbytes / on.ranks, of)


def _reference_broadcast(nbytes: float, on: Topology, of: Machine) -> Cost:
    """alpha + (n - 1) S beta: the root sends to all."""
    n, local = on.ranks, on.local_sizes[0]
    return Load(n - local, local - 1, n - 1).cost(nbytes, of)


def _shared_reduce_scatter(nbytes: float, on: Topology, of: Machine) -> Cost:
    """2 waits a chunk, (n - 1) / n S copied to where others read it, and (n - 1) / n S reduced."""
    chunks = max(1, -(-int(nbytes) // shared.CHUNK_NBYTES))
    share = (on.ranks - 1) / on.ranks * nbytes
    return _busy(2 * chunks * of.wait_s + share * of.copy_s_per_byte) + _reduced(share, of)


def _shared(nbytes: float, on: Topology, of: Machine) -> Cost:
    """The same, and (n - 1) / n S copied back: a reduce-scatter and an allgather in memory."""
    return _shared_reduce_scatter(nbytes, on, of) + _busy((on.ranks - 1) / on.ranks * nbytes * of.copy_s_per_byte)


def _shared_allgather(nbytes: float, on: Topology, of: Machine) -> Cost:
    """1 wait a chunk, S / n copied to where others read it, and (n - 1) / n S from there."""
    chunks = max(1, -(-int(nbytes) // (shared.CHUNK_NBYTES * on.ranks)))
    return _busy(chunks * of.wait_s + nbytes * of.copy_s_per_byte)


def _shared_broadcast(nbytes: float, on: Topology, of: Machine) -> Cost:
    """1 wait a chunk, S copied by the root to where others read it, and S from there."""
    return _shared_allgather(nbytes, on, of) + _busy(nbytes * of.copy_s_per_byte)


def _hierarchical(nbytes: float, on: Topology, of: Machine) -> Cost:
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


def _scatter_allgather(nbytes: float, on: Topology, of: Machine) -> Cost:
    """(log2 n + n - 1) alpha + 2 (n - 1) / n S beta, for long broadcasts (Thakur et al., 2005, section 4.2)."""
    return _doubling(nbytes, on, of) + _ring_allgather(nbytes, on, of)


def _halving_gather(nbytes: float, on: Topology, of: Machine) -> Cost:
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
        "double_tree": (_double_tree, lambda on: 2 * double_tree.SEGMENT_NBYTES),
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
    collective: str, algorithm: str, nbytes: int, topology: Topology, machine: Machine | None = None
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
    machine: Machine | None = None,
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
