"""Buckets summed over nodes by compressed messages: by backward or at the end of a step, any ranks per node."""

import numpy as np
import pytest
from test_reducer import SHAPES, gradient, write

from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.compression import Compression
from hpcdp.data_parallel import Reducer, bucket_layout


def make(world, overlap, compression):
    params = [nn.Parameter(np.zeros(shape, "f4"), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params], 0.004, 0.004)
    return Reducer(params, layout, world, overlap, Compression.of(compression)), params


def sums(n, nodes, overlap, compression, steps=3):
    """For every rank: the sums of all steps, and what its rail keeps, adds up to, and sends."""

    def rank(world):
        made, params = make(world, overlap, compression)
        found = []
        for step in range(steps):
            write(params, world.rank, step, order=(world.rank % 2 and [2, 4, 0, 1, 3]) or None)
            made.launch_rest()
            made.tally(0)
            made.reduce_everywhere()
            found.append([param.grad.copy() for param in params])
            made.reset()
        kept = (
            0.0
            if made.reduction.coder is None
            else sum(float(each.residual.sum()) for each in made.reduction.coder.feedback)
        )
        return found, kept, (0, 0) if made.reduction.coder is None else made.reduction.coder.sent_nbytes()

    return thread_comm.run(n, rank, ranks_per_node=nodes)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("codec", ["fp16", "2bit", "topk:ratio=0.2"])
@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (3, 1), (4, 2), (5, 2), (6, (2, 1, 3))])
def test_nothing_is_lost_and_all_ranks_have_the_same(n, nodes, codec, overlap):
    found = sums(n, nodes, overlap, codec)
    for mine, _, _ in found:
        for a, b in zip(mine, found[0][0], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)
    given = sum(float(gradient(r, s, shape).sum(dtype="f8")) for r in range(n) for s in range(3) for shape in SHAPES)
    arrived = sum(float(x.sum(dtype="f8")) for step in found[0][0] for x in step)
    assert arrived + sum(kept for _, kept, _ in found) == pytest.approx(given, abs=0.05)
    sent, plain = np.sum([each for _, _, each in found], axis=0)
    assert 0 < sent < 0.6 * plain


@pytest.mark.parametrize("codec", ["fp16", "bf16", "2bit", "1bit", "topk"])
def test_overlap_changes_no_bits(codec):
    for off, on in zip(sums(4, 2, False, codec), sums(4, 2, True, codec), strict=True):
        for a, b in zip(off[0], on[0], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.filterwarnings("ignore:compression 2bit changes nothing")
def test_ranks_of_a_node_read_each_others_memory_unless_they_are_asked_to_send():
    exact = [[sum(gradient(r, 0, shape) for r in range(3)) for shape in SHAPES]]
    for compression, is_exact in (("2bit", True), ("2bit:inside_nodes=on", False)):
        for found, _, (sent, plain) in sums(3, None, False, compression, steps=1):
            same = [np.allclose(x, y, atol=1e-5) for x, y in zip(found[0], exact[0], strict=True)]
            assert all(same) == is_exact
            assert (sent == 0) == is_exact
            assert is_exact or sent < plain / 12


@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (4, 2), (5, 2)])
def test_what_belongs_to_no_parameter_stays_zero(n, nodes):
    """One bit sends something for nothing; it would be summed again in the next step."""

    def rank(world):
        made, params = make(world, False, "1bit")
        for step in range(3):
            write(params, world.rank, step)
            made.reduce_everywhere()
            made.reset()
        rest = []
        for bucket in made.buckets:
            used = np.zeros(bucket.mine.size, bool)
            for slot in bucket.slots:
                used[slot.offset : slot.offset + slot.count] = True
            rest.append(bucket.mine[~used])
            if made.reduction.coder is not None:
                rest.append(made.reduction.coder.feedback[bucket.number].residual[~used[slice(*bucket.shard)]])
        return np.concatenate(rest)

    for rest in thread_comm.run(n, rank, ranks_per_node=nodes):
        assert rest.size > 20
        assert not rest.any()
