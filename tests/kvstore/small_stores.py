"""Values, updaters and worlds for stores of a few keys."""

import numpy as np

from hpcdp import kvstore
from hpcdp.comm import thread_comm

WORLDS = [(1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2)]
"""Ranks, and ranks per node."""
LAYOUTS = [(*world, split) for world in WORLDS for split in (False, True) if world[1] or not split]
"""With whether keys are cut, for the fixture of this name; on one node they never are."""
SHAPE = (2, 3)


def full(value, shape=SHAPE, dtype="f4"):
    return np.full(shape, value, dtype)


def added(key, received, stored):
    stored += np.asarray(2, stored.dtype) * received


def on_one_worker(kind, fn):
    """``fn(store)`` with a store of any kind that has one worker."""
    if kvstore.KINDS[kind].scope == "process":
        return fn(kvstore.create(kind))
    return thread_comm.run(1, lambda world: fn(kvstore.create(kind, world)))[0]
