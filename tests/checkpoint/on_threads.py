"""Checkpoints of some thread ranks, saved and restored, and what they raise."""

import pytest
import samples

from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm


def save(folder, step, n, state=samples.state, **options):
    """What ``state(step, world)`` gives, on ``n`` ranks."""

    def one(world):
        with Manager(folder, world, **options) as manager:
            manager.save(step, state(step, world))

    thread_comm.run(n, one)


def restore(folder, n, into=lambda world: None, step=None, ranks_per_node=None, **options):
    """What each of ``n`` ranks restores into ``into(world)``."""

    def one(world):
        with Manager(folder, world) as manager:
            return manager.restore(step, into(world), **options)

    return thread_comm.run(n, one, ranks_per_node)


def caught(fn, kind):
    """The text of what ``fn`` raises."""
    with pytest.raises(kind) as info:
        fn()
    return str(info.value)
