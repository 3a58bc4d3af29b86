"""Parameters on the GPUs of ranks that go some way, without a network, and gradients for them."""

import numpy as np

from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import gpu

SHAPES = [(7, 3), (5,), (40, 30), (1,), (3000,)]


class Parameter:
    """What a reducer asks of a parameter, on this rank's GPU."""

    def __init__(self, name, shape, dtype="f4"):
        import cupy

        self.name, self.data = name, cupy.zeros(shape, dtype)
        self.grad, self.grad_req, self.grad_hook, self.data_hook = None, "write", None, None

    def write(self, values):
        import cupy

        self.grad[...] = cupy.asarray(values)
        self.grad_hook(self)


def show_gpus(monkeypatch, count):
    """Have the driver show so many GPUs."""
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(count))
    monkeypatch.setattr(comm_world, "visible", lambda: found)


def use_gpu(world, way):
    device_of(world, way).use()


def device_of(world, way):
    return gpu({GpuTransport.NCCL: world.place, GpuTransport.GROUPS: 2 * world.node + world.local_rank % 2}.get(way, 0))


def way_of(world, way):
    """The one that ranks of a node go on the GPUs of `device_of`."""
    if world.local_size == 1:
        return GpuTransport.ALONE
    return GpuTransport.NCCL if way is GpuTransport.GROUPS and world.local_size == 2 else way


def gradient(rank, step, shape):
    return np.random.default_rng([rank, step, *shape]).integers(-99, 99, shape).astype("f4") / 8


def wanted(n, step, shape):
    return sum(gradient(rank, step, shape) for rank in range(n))


def check_steps(world, reducer, params, steps):
    """Sums of all ranks' gradients in each step, are what they should be on this rank."""
    for step in range(steps):
        for param in reversed(params):
            param.write(gradient(world.rank, step, param.data.shape).astype(param.data.dtype))
        reducer.launch_rest()
        reducer.tally(0)
        reducer.reduce_everywhere()
        for param in params:
            np.testing.assert_array_equal(param.grad.to_host(), wanted(world.size, step, param.data.shape))
        reducer.reset()


def bring_to_host(params):
    """Parameters of a machine without GPUs."""
    for param in params:
        param.data = param.data.to_host()
        param.write = lambda values, param=param: (param.grad.__setitem__(..., values), param.grad_hook(param))
