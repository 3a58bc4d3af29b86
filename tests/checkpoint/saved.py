"""Checkpoints for the tests of what looks at them."""

import numpy as np

from hpcdp.checkpoint import Manager, Part, PerRank, Sharded
from hpcdp.checkpoint.flatten import HostView, as_array
from hpcdp.comm import thread_comm


def sharded(array, world):
    """Rank r of n has the r-th of n runs of elements, of different lengths."""
    flat = array.reshape(-1)
    bounds = [flat.size * rank * (rank + 1) // (world.size * (world.size + 1)) for rank in range(world.size + 1)]
    first, last = bounds[world.rank], bounds[world.rank + 1]
    return Sharded(array.shape, array.dtype, [Part(first, flat[first:last])])


class Bfloat16:
    """Stands for an array of a library that has this dtype."""

    def __init__(self, values):
        self.bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@as_array.register
def _(value: Bfloat16):
    return HostView(value.bits, "bfloat16")


def arrays(seed=0):
    """Some of many dtypes, one of them of several MiB."""
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.standard_normal((700, 1000)).astype(np.float32),
        "bias": rng.standard_normal(12),
        "half": np.arange(24, dtype=np.float16).reshape(2, 3, 4),
        "steps": np.arange(6, dtype=np.int64) + 2**53,
        "mask": np.array([True, False]),
        "empty": np.empty((0, 3), np.float32),
        "number": np.float64(2.5),
        "brain": Bfloat16([[1.0, -2.0], [3.0, 0.15625]]),
    }


def save(folder, steps=(100,), ranks=2, state=None, metrics=None, **options):
    """Checkpoints of what ``state(step, world)`` gives, by default of `arrays` and all else that can be saved."""

    def default(step, world):
        tensors = arrays()
        tensors["weight"] = sharded(tensors["weight"], world)
        values = {"epoch": 3, "lr": 0.5, "loss": float("nan"), "milestones": [1, 2], "name": "sgd"}
        return {"net": tensors, "optimizer": values, "rng": PerRank({"seed": world.rank, "x": np.full(3, world.rank)})}

    def one(world):
        with Manager(folder, world, **options) as manager:
            for step in steps:
                values = (state or default)(step, world)
                manager.save(step, values, metrics=metrics and metrics(step), config={"model": {"depth": 3}})

    thread_comm.run(ranks, one)
    return [folder / f"step-{step:010d}" for step in steps]


def flip(path, at):
    """Change a bit of the byte number ``at`` of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
