"""Where parameters lie when nobody says: once per node, updated by the owners of shards, or on every rank.

[Note: lines that others have read] What all ranks of a node share takes the least memory and the fewest bytes, but a
core that writes a cache line of which another one holds a copy waits until that copy is gone. In every step owners
write parameters that all ranks have read, and ranks write gradients that owners have read. On an EPYC with Zen 4 that
goes at 7 to 10 GB/s between cores that share a last cache and at 2.3 between cores that do not. Lines that nobody else
holds, and those that another core has *written* to, take 40 and 17, as those do of an allreduce, whose owners write
sums back where they have read. So parameters of which all copies fit in the caches are each rank's own; longer ones,
which leave the caches between two uses anyhow, lie once per node.

Steps of SGD with momentum on 2 ranks (parameters read, gradients written, summed, updated) in us, with parameters once
per node and on every rank: near 175 and 150 at 1 MB, 620 and 630 at 4, 1425 and 1860 at 8, 3400 and 4600 at 16; far 700
and 175, 2700 and 650, 4600 and 1650, 6500 to 7300 and 3800; at 64 MB 15 and 22 ms near, 16 and 25 far.
"""

from __future__ import annotations

import time

import numpy as np

from .reducer import Reducer

NEAR_NBYTES, FAR_NBYTES = 6 << 20, 32 << 20
"""So many bytes may all copies of a node's parameters have, if its cores are near each other, and far."""

_FAR_GB_S = 4.0
_PROBE_NBYTES, _TURNS = 256 << 10, 5


def lies_once_per_node(reducer: Reducer) -> bool:
    """Whether ``owner="auto"`` is ``"shard"``; every rank must call, and gets the same.

    Over several nodes, and with updates beside the next forward, it is wherever ranks share memory.
    """
    world, memory = reducer.world, reducer.memory
    if not any(world.comm.allgather_json(memory.size > 1)):  # nodes may differ
        return False
    copies_nbytes = memory.size * sum(bucket.mine.nbytes for bucket in reducer.buckets)
    if world.num_nodes > 1 or reducer.updates_later or world.cores < world.size or copies_nbytes > FAR_NBYTES:
        return True
    if copies_nbytes <= NEAR_NBYTES:
        return False
    return min(world.comm.allgather_json(rate_gb_s(reducer))) >= _FAR_GB_S


def rate_gb_s(reducer: Reducer) -> float:
    """GB/s of writing what the next rank of the node has read; every rank of the node must call. Takes some 0.5 ms."""
    memory, gate = reducer.memory, reducer.gate
    rows = memory.alloc((memory.size, _PROBE_NBYTES // 4), np.float32)
    mine, of_next = rows[memory.rank], rows[(memory.rank + 1) % memory.size]
    least_ns = float("inf")
    for turn in range(_TURNS):
        gate.barrier()
        begin = time.perf_counter_ns()
        mine.fill(turn)
        if turn > 0:
            least_ns = min(least_ns, time.perf_counter_ns() - begin)
        gate.barrier()
        of_next.sum()
    gate.barrier()
    return mine.nbytes / least_ns
