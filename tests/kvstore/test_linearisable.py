"""Each key of an asynchronous store behaves as if pushes and pulls took effect one after another, at some moment
between the call and its end (Herlihy and Wing, "Linearizability", 1990): searched for in the histories of random
schedules."""

import os
import time

import numpy as np
import pytest

from hpcdp import kvstore
from hpcdp.comm import thread_comm
from hpcdp.kvstore import server_keys
from hpcdp.kvstore.serve import serve

PRIME = 1_000_003
COUNT = 6


def mixed(key, received, stored):
    stored[...] = (stored * 31 + received) % PRIME


def run_schedules(ranks, per_node, num_servers, num_keys, seed):
    """Random operations of all ranks on all keys. For every key: (begin, end, pushed or None, found or None)."""

    def one(world):
        store = kvstore.create("dist_async", world)
        keys = list(range(num_keys))
        store.init(keys, [np.full(COUNT, key, np.int64) for key in keys])
        store.set_updater(mixed)
        world.barrier()
        rng = np.random.default_rng([seed, world.rank])
        history, open_pushes = {key: [] for key in keys}, {key: [] for key in keys}

        def close(key):
            """A push has ended at the latest when a later read of its rank has."""
            now = time.monotonic_ns()
            for begin, pushed in open_pushes[key]:
                history[key].append((begin, now, pushed, None))
            open_pushes[key].clear()

        for key in rng.permutation(np.repeat(keys, rng.integers(2, 4, num_keys))).tolist():
            kind, begin = rng.integers(5), time.monotonic_ns()
            pushed = int(rng.integers(1, PRIME))
            if kind < 2:
                store.push(key, np.full(COUNT, pushed, np.int64), priority=int(rng.integers(3)))
                open_pushes[key].append((begin, pushed))
            elif kind == 2:
                pulled = store.pull(key)
                found = (pulled.version, np.asarray(pulled).tolist())
                close(key)
                history[key].append((begin, time.monotonic_ns(), None, found))
            elif kind == 3:
                out = np.empty(COUNT, np.int64)
                store.pull(key, out)
                close(key)
                history[key].append((begin, time.monotonic_ns(), None, (None, out.tolist())))
            else:
                out = np.empty(COUNT, np.int64)
                store.pushpull(key, np.full(COUNT, pushed, np.int64), out)
                close(key)
                history[key].append((begin, time.monotonic_ns(), pushed, (None, out.tolist())))
            if rng.random() < 0.2:
                time.sleep(float(rng.random()) * 1e-3)
        store.wait()
        for key in keys:
            close(key)
        return history

    found = thread_comm.run(ranks, one, per_node, num_servers, serve)
    return {key: [operation for history in found for operation in history[key]] for key in range(num_keys)}


def is_linearisable(start, operations):
    """Whether some order of the operations that keeps those apart that were apart explains all that was found."""
    operations = sorted(operations)
    seen = set()

    def search(left, value, version):
        if not left:
            return True
        if (left, value) in seen:
            return False
        seen.add((left, value))
        first_end = min(operations[i][1] for i in left)
        for i in left:
            begin, _, pushed, found = operations[i]
            if begin > first_end:
                continue
            after = value if pushed is None else (value * 31 + pushed) % PRIME
            number = version + (pushed is not None)
            if found is not None and (found[1] != [after] * COUNT or found[0] not in (None, number)):
                continue
            if search(left - {i}, after, number):
                return True
        return False

    return search(frozenset(range(len(operations))), start, 0)


def test_the_search_tells_right_from_wrong():
    push, late = (0, 10, 5, None), (20, 30, None, (1, [36] * COUNT))
    assert is_linearisable(1, [push, late])
    assert is_linearisable(1, [push, (5, 15, None, (0, [1] * COUNT))])
    assert not is_linearisable(1, [push, (20, 30, None, (0, [1] * COUNT))])  # too old
    assert not is_linearisable(1, [push, (20, 30, None, (1, [36] * (COUNT - 1) + [1]))])  # of two versions
    assert not is_linearisable(1, [push, (20, 30, None, (2, [36] * COUNT))])  # another number
    assert not is_linearisable(1, [push, late, (40, 50, None, (0, [1] * COUNT))])  # back again


WORLDS = [(2, None, 0), (3, None, 0), (4, None, 0), (2, 1, 0), (3, 1, 0), (4, 2, 0), (3, 2, 0), (2, 1, 1), (3, 2, 2)]
WHOLE_TOO = [(2, None, 0), (4, 2, 0), (2, 1, 1)]
"""One node, several, and servers; ordinary runs split keys in all worlds, and leave them whole in these."""


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        pytest.param(world, cut, marks=() if cut or world in WHOLE_TOO else pytest.mark.thorough)
        for cut in (False, True)
        for world in WORLDS
    ],
)
def test_random_schedules(world, cut, monkeypatch):
    ranks, per_node, num_servers = world
    if cut:
        monkeypatch.setattr(server_keys, "SPLIT_NBYTES", 8)
    for seed in range(2 if os.environ.get("HPCDP_TEST_THOROUGH") else 1):
        for key, operations in run_schedules(ranks, per_node, num_servers, 60, seed).items():
            assert is_linearisable(key, operations), (key, seed, sorted(operations))
