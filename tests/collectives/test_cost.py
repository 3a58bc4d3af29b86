"""The cost model gives the papers' figures, and counts the messages that share a link as they are."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from hpcdp.collectives import ALGORITHMS, algorithm_choice, cost_model, intra_node
from hpcdp.collectives.cost_model import ETHERNET, FABRIC, Link, MachineModel, Topology, model_choice, predicted_s
from hpcdp.errors import UnsupportedError

MB = 10**6
NOTHING = Link(0.0, 0.0, 0.0)
ALPHA, BETA, GAMMA = 3e-6, 2e-10, 1e-10
PLAIN = MachineModel(NOTHING, Link(ALPHA, BETA, BETA), 0.0, GAMMA, 0.0, 0.0, 0.0)
"""Nothing but alpha, beta and gamma: for the textbooks' formulas, with a rank a node."""
NODES = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)


def one_rank_a_node(n):
    return Topology((1,) * n)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_textbook_formulas_of_one_segment(n):
    nbytes, log = 9600, n.bit_length() - 1
    share = (n - 1) / n * nbytes
    wanted = {
        ("allreduce", "ring"): 2 * (n - 1) * ALPHA + 2 * share * BETA + share * GAMMA,
        ("allreduce", "halving_doubling"): 2 * log * ALPHA + 2 * share * BETA + share * GAMMA,
        ("allreduce", "tree"): 2 * log * (ALPHA + nbytes * BETA) + log * nbytes * GAMMA,
        ("reduce_scatter", "ring"): (n - 1) * ALPHA + share * (BETA + GAMMA),
        ("reduce_scatter", "halving_doubling"): log * ALPHA + share * (BETA + GAMMA),
        ("allgather", "ring"): (n - 1) * ALPHA + share * BETA,
        ("broadcast", "tree"): log * (ALPHA + nbytes * BETA),
        ("reduce", "tree"): log * (ALPHA + nbytes * (BETA + GAMMA)),
        ("allreduce", "reference"): ALPHA + (n - 1) * nbytes * (BETA + GAMMA),
        ("allgatherv", "ring"): (n - 1) * ALPHA + share * BETA,
        ("allgatherv", "bruck_allgather"): log * ALPHA + share * BETA,
        ("alltoall", "pairwise"): (n - 1) * ALPHA + share * BETA,
        ("alltoall", "bruck"): log * (ALPHA + nbytes / 2 * BETA),
    }
    for (collective, algorithm), seconds in wanted.items():
        found = predicted_s(collective, algorithm, nbytes, one_rank_a_node(n), PLAIN)
        assert found == pytest.approx(seconds), (collective, algorithm)


def test_the_library_takes_few_messages_for_short_arrays_and_few_bytes_for_long_ones():
    n, log = 16, 4
    short, long = 8, 64 * MB
    recursive_doubling = log * (ALPHA + short * (BETA + GAMMA))
    rabenseifner = 2 * log * ALPHA + 15 / 16 * long * (2 * BETA + GAMMA)
    assert predicted_s("allreduce", "native", short, one_rank_a_node(n), PLAIN) == pytest.approx(recursive_doubling)
    assert predicted_s("allreduce", "native", long, one_rank_a_node(n), PLAIN) == pytest.approx(rabenseifner)


@pytest.mark.parametrize(("fewer", "more"), [(2, 3), (4, 6), (8, 15)])
def test_more_ranks_than_a_power_of_two_cost_what_a_pair_exchanges(fewer, more):
    nbytes = 9600
    halves = 2 * (ALPHA + nbytes / 2 * BETA) + nbytes / 2 * GAMMA
    wanted = {"allreduce": halves + ALPHA + nbytes * BETA, "reduce_scatter": halves + ALPHA + nbytes / more * BETA}
    for collective, seconds in wanted.items():
        of_fewer, of_more = (
            predicted_s(collective, "halving_doubling", nbytes, one_rank_a_node(n), PLAIN) for n in (fewer, more)
        )
        assert of_more - of_fewer == pytest.approx(seconds), collective


def counted(edges, sizes):
    """The most messages of one node that leave it or come to it, and that stay, and of one rank that come to it."""
    node = [number for number, size in enumerate(sizes) for _ in range(size)]
    leaving, coming, staying, received = ({} for _ in range(4))
    for source, dest in edges:
        received[dest] = received.get(dest, 0) + 1
        if node[source] == node[dest]:
            staying[node[dest]] = staying.get(node[dest], 0) + 1
        else:
            leaving[node[source]] = leaving.get(node[source], 0) + 1
            coming[node[dest]] = coming.get(node[dest], 0) + 1
    most = [max(count.values(), default=0) for count in (leaving, coming, staying, received)]
    return max(most[:2]), most[2], most[3]


@given(NODES)
def test_messages_that_share_a_link(sizes):
    on, n = Topology(sizes), sum(sizes)
    edges = {"neighbors": [(rank, (rank + 1) % n) for rank in range(n)]}
    found = {"neighbors": cost_model.neighbors(on)}
    if n > 1:
        edges["everybody"] = [(a, b) for a in range(n) for b in range(n) if a != b]
        found["everybody"] = cost_model.all_pairs(on)
    for distance in (1, 2, 4, 8):
        if n & (n - 1) == 0 and distance < n:
            edges[distance] = [(rank, rank ^ distance) for rank in range(n)]
            found[distance] = cost_model.partners(on, distance)
    for level, load in enumerate(cost_model.levels(on)):
        edges["tree", level] = [(rank, rank - (1 << level)) for rank in range(1, n) if rank & -rank == 1 << level]
        found["tree", level] = load
    for name, load in found.items():
        assert (load.across, load.inside, load.a_rank) == counted(edges[name], sizes), name


@pytest.mark.parametrize("n", range(2, 18))
def test_every_rank_but_the_roots_sends_up_both_trees(n):
    assert sum(load.inside for load in cost_model.double_levels(Topology((n,)))) == 2 * (n - 1)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 4, 4, 4), (8,) * 8, (3, 2, 4)])
def test_bytes_on_the_link_of_a_node(sizes):
    """Hierarchical sends 2 (m - 1) / m S over it, whatever the ranks of a node; a flat ring 2 (n - 1) / n S."""
    n, m, nbytes = sum(sizes), len(sizes), 10**9
    slow = replace(PLAIN, across=Link(0.0, 1.0, 1.0))
    wanted = {"hierarchical": 2 * (m - 1) / m * nbytes, "ring": 2 * (n - 1) / n * nbytes}
    for name, seconds in wanted.items():
        assert predicted_s("allreduce", name, nbytes, Topology(sizes), slow) == pytest.approx(seconds, rel=1e-3)


def test_the_slowest_stage_sets_the_time_of_many_segments():
    nodes, nbytes = Topology((2, 2, 2, 2)), 512 << 20
    for memory_s_per_byte in (4e-10, 2e-9):
        machine = replace(ETHERNET, copy_s_per_byte=memory_s_per_byte, gamma_s_per_byte=0.0, message_s=0.0)
        stages = 2 * nbytes * memory_s_per_byte, 2 * 3 / 4 * nbytes * machine.across.beta_s_per_byte
        found = predicted_s("allreduce", "hierarchical", nbytes, nodes, machine)
        assert max(stages) < found < 1.02 * max(stages) < sum(stages)


def test_shared_memory_waits_twice_a_chunk_copies_and_reduces():
    machine = replace(PLAIN, copy_s_per_byte=3e-11, wait_s=1e-6, call_s=5e-6)
    for n in (2, 3, 8):
        for chunks in (1, 4):
            nbytes = chunks * intra_node.CHUNK_NBYTES
            share = (n - 1) / n * nbytes
            half = 5e-6 + 2 * chunks * 1e-6 + share * (3e-11 + GAMMA)
            assert predicted_s("reduce_scatter", "shared", nbytes, Topology((n,)), machine) == pytest.approx(half)
            whole = predicted_s("allreduce", "shared", nbytes, Topology((n,)), machine)
            assert whole == pytest.approx(half + share * 3e-11)


def test_ranks_of_a_node_share_its_memory():
    memory = replace(PLAIN, inside=Link(0.0, 1e-10, 5e-11))
    two, sixteen = (predicted_s("allgather", "ring", 64 * MB, Topology((n,)), memory) for n in (2, 16))
    assert two == pytest.approx(32 * MB * 1e-10)  # as fast as alone
    assert sixteen == pytest.approx(15 * 16 * 4 * MB * 5e-11)  # all bytes, one after another


def test_blocks_by_node_are_two_stages():
    machine = replace(PLAIN, inside=Link(ALPHA / 3, BETA / 4, BETA / 4))
    nbytes, k, m = 9600, 4, 3
    collected = ALPHA / 3 + 2 * k * (k - 1) * nbytes / (2 * k) * BETA / 4
    sent = ALPHA + k * (m - 1) * k * nbytes / (k * m) * BETA
    assert predicted_s("alltoall", "by_node", nbytes, Topology((k,) * m), machine) == pytest.approx(collected + sent)


@pytest.mark.parametrize("collective", algorithm_choice.TUNED)
@pytest.mark.parametrize("sizes", [(2,), (5,), (2, 2), (4, 3, 1), (1,) * 7, (16,) * 8])
def test_every_algorithm_is_known_and_longer_arrays_take_longer(collective, sizes):
    for algorithm in algorithm_choice.algorithms_of(collective):
        taken = [predicted_s(collective, algorithm, 4**k, Topology(sizes)) for k in range(14)]
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in taken)
        assert taken[-1] > taken[0]
        assert all(b >= 0.85 * a for a, b in itertools.pairwise(taken)), (algorithm, taken)


def test_a_world_of_one_needs_no_time():
    assert predicted_s("allreduce", "native", 10**6, Topology((1,))) == 0.0


def test_an_algorithm_without_a_formula_is_named_with_those_that_have_one():
    with raises(
        UnsupportedError,
        operation="predict reduce_scatter",
        where="algorithm",
        expected="halving_doubling",
        got="butterfly",
    ):
        predicted_s("reduce_scatter", "butterfly", 4, Topology((2,)))


@pytest.mark.parametrize("nbytes", [4, 1 << 14, 1 << 26])
def test_memory_is_used_where_it_is_shared(nbytes):
    names = ALGORITHMS["allreduce"]
    assert model_choice("allreduce", nbytes, 4, Topology((4,)), names) == "shared"
    assert model_choice("allreduce", nbytes, 4, Topology((4,), shared_memory=False), names) != "shared"
    crowded = model_choice("allreduce", nbytes, 4, Topology((4,), crowded=True), names)
    assert crowded == ("native" if nbytes < 1 << 16 else "shared")
    assert model_choice("allreduce", nbytes, 4, Topology((2, 2)), names) != "shared"
    assert model_choice("allgather", nbytes, 4, Topology((4,)), ALGORITHMS["allgather"]) == "shared"
    moved = model_choice("broadcast", nbytes, 4, Topology((4,)), ALGORITHMS["broadcast"])
    assert moved == "shared"


@pytest.mark.parametrize("sizes", [(1, 1), (1,) * 4, (2, 2), (2,) * 4, (8,) * 4, (4, 3, 1), (64,) * 16])
def test_over_nodes_the_library_serves_arrays_that_are_not_short_and_hierarchical_long_ones(sizes):
    names, nodes = ALGORITHMS["allreduce"], Topology(sizes)
    for nbytes in (0, 4, 1024, 16 << 10):
        assert model_choice("allreduce", nbytes, 4, nodes, names) == "recursive_doubling"
    assert model_choice("allreduce", 128 << 10, 4, nodes, names) == "native"
    assert model_choice("allreduce", 32 << 10, 4, nodes, names, FABRIC) == "native"
    assert model_choice("allreduce", 16 << 20, 4, nodes, names) == "hierarchical"
    assert model_choice("allreduce", 16 << 20, 4, nodes, names, FABRIC) == "native"
    for collective, least, of_all in [
        ("reduce_scatter", 16, 128), ("allgather", 2, 256), ("broadcast", 2, 128), ("reduce", 16, 128),
    ]:  # fmt: skip
        known, short = ALGORITHMS[collective], max(least << 10, (of_all << 10) // sum(sizes))
        assert model_choice(collective, short, 4, nodes, known) == "recursive_doubling"
        assert model_choice(collective, short + 4, 4, nodes, known) == "native"
        assert model_choice(collective, (least << 10) + 4, 4, nodes, known, FABRIC) == "native"
        assert model_choice(collective, 16 << 20, 4, nodes, known) == "native"


def test_without_the_library_the_least_prediction_counts():
    names, nodes = ["ring", "tree", "hierarchical"], Topology((2, 2, 2))
    for nbytes in np.geomspace(64, 1 << 26, 12, dtype=int):
        best = min(names, key=lambda name: predicted_s("allreduce", name, int(nbytes), nodes))
        assert model_choice("allreduce", int(nbytes), 4, nodes, names) == best
    assert model_choice("allreduce", 8, 4, nodes, names) == "tree"  # two elements for six ranks are not cut
    assert model_choice("allreduce", 8, 4, nodes, ["ring"]) == "ring"


def test_rates_depend_on_the_size_where_they_were_measured():
    link = Link(1e-6, 5e-10, 4e-10, ((1 << 10, 8e-10, 2e-10), (1 << 14, 2e-10, 1e-10)))
    for nbytes, beta, shared_rate in ((1, 8e-10, 2e-10), (1 << 10, 8e-10, 2e-10), (1 << 12, 4e-10, 2**0.5 * 1e-10)):
        found = link.at(nbytes)
        assert (found.beta_s_per_byte, found.shared_s_per_byte) == pytest.approx((beta, shared_rate))
    assert link.at(1 << 20).beta_s_per_byte == pytest.approx(2e-10)
    assert Link(1e-6, 5e-10, 4e-10).at(7) == Link(1e-6, 5e-10, 4e-10)
    machine = replace(PLAIN, inside=link, by_size=((1 << 20, 1e-11, 2e-11), (1 << 24, 1e-10, 2e-10)))
    for nbytes in (1 << 20, 1 << 24):
        for algorithm in ("shared", "ring"):
            same = replace(machine.at(nbytes), inside=link)
            found = predicted_s("allreduce", algorithm, nbytes, Topology((2,)), machine)
            assert found == pytest.approx(predicted_s("allreduce", algorithm, nbytes, Topology((2,)), same))
    cached, not_cached = (predicted_s("allreduce", "shared", 1 << bits, Topology((2,)), machine) for bits in (20, 24))
    assert not_cached == pytest.approx(160 * cached)  # sixteen times as long, each byte ten times as slow
    halves = predicted_s("allreduce", "ring", 1 << 11, Topology((2,)), replace(PLAIN, inside=link))
    assert halves == pytest.approx(2 * (1e-6 + (1 << 10) * 8e-10) + (1 << 10) * GAMMA)  # by the size of the message
