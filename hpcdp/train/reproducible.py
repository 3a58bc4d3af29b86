"""What makes a run the same to the bit on any number of ranks, beside the order in which gradients are summed.

One BLAS thread, the same arithmetic on all ranks, layers that know their virtual shard, running statistics that move
once a step by those of all shards in order. docs/reproducibility.md says why each of them is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from ..arrays import is_host
from ..autograd import Tensor
from ..comm import World
from ..comm.agreement import require_same
from ..errors import ConfigError, HpcdpError, MismatchError
from ..gradients.bucket import Parameter
from ..gradients.virtual_shards import VirtualShards
from ..kernels import machine_code
from ..nn.virtual_shard import VirtualShard, enter_shard, entered_shard, move
from .config import VIRTUAL_SHARDS


def arithmetic() -> str:
    """The libraries and the processor that decide what the last bits of a product or a sum are, in words."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    blas = sorted({f"{each['internal_api']} {each['version']} {each.get('architecture', '')}" for each in pools})
    return ", ".join([f"NumPy {np.__version__}", *blas, machine_code.target()])


def checked_virtual_shards(
    reproducible: bool, num: int | None, params: Sequence[Parameter], compression: object, world: World
) -> int | None:
    """How many virtual shards a `Trainer` of these arguments has, None where it is not reproducible.

    Raises:
        ConfigError: something among them would make bits depend on the number of ranks, or make no sense.
    """
    if not isinstance(reproducible, bool):
        raise ConfigError("Trainer", where="reproducible", expected="True or False", got=repr(reproducible))
    if not reproducible:
        if num is not None:
            raise ConfigError("Trainer", where="virtual_shards", expected="None without reproducible=True", got=num)
        return None
    num = VIRTUAL_SHARDS if num is None else num
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
        raise ConfigError("Trainer", where="virtual_shards", expected="an integer >= 1", got=repr(num))

    def refuse(where: str, expected: str, got: object, remedy: str | None = None) -> ConfigError:
        return ConfigError("Trainer(reproducible=True)", where=where, expected=expected, got=got, remedy=remedy)

    if num < world.size:
        raise refuse("virtual_shards", f"at least one for each of {world.size} ranks", num, "take fewer ranks, or more "
                     "virtual shards from the first step on: their number decides the bits")  # fmt: skip
    if compression is not None:
        raise refuse("compression", "none, since what a node leaves out depends on the number of nodes", compression)
    adding = next((param.name for param in params if param.grad_req == "add"), None)
    if adding is not None:
        raise refuse(adding, "grad_req='write'", "grad_req='add'", "make the global batch larger instead")
    if not all(is_host(param.data) for param in params):
        raise refuse("params", "NumPy arrays, since sums on devices have no fixed order", "arrays on a device")
    return num


def fix_arithmetic(world: World) -> None:
    """Set BLAS to one thread, in which it adds up in one order; every rank must call.

    Raises:
        MismatchError: the ranks compute with different libraries or processors; on every rank.
    """
    threadpool_limits(1, user_api="blas")
    items = [f"arithmetic {arithmetic()}"]
    require_same(world.comm, "Trainer(reproducible=True)", items, "take nodes of one kind, with the same libraries")


class ReproducibleSteps:
    """Which virtual shard of which step this rank computes, and what layers have noted about those of this step.

    Args:
        shards: of the gradients.
        world: the ranks.
    """

    def __init__(self, shards: VirtualShards, world: World) -> None:
        self._shards, self._world = shards, world
        self._noted: list[tuple[int, int, np.ndarray]] = []  # number, samples and statistics of shards of this step
        self._buffers: list[tuple[Tensor, float]] = []
        self.begin(1)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._noted.clear()
        self.enter(step)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes no other virtual shard in this step."""
        return self._shards.is_last

    def enter(self, step: int) -> None:
        """The next forward is that of the current virtual shard."""
        enter_shard(VirtualShard(self, step, self._shards.current))

    def leave(self, count: int) -> None:
        """The current virtual shard of ``count`` samples is computed."""
        shard = entered_shard()
        if shard is None or not shard.is_of(self):
            raise HpcdpError(
                "step", expected="one reproducible Trainer at a time in a thread", got="another one, made since",
                remedy="train one model after the other, or with reproducible=False",
            )  # fmt: skip
        if not count or not shard.statistics:
            return
        buffers = [(buffer, momentum) for buffer, momentum, _ in shard.statistics]
        self._buffers = self._buffers or buffers
        if [id(buffer) for buffer, _ in buffers] != [id(buffer) for buffer, _ in self._buffers]:
            raise HpcdpError(
                "step", where=f"virtual shard {shard.number}", expected="the BatchNorm layers of the shards before",
                got="others, or in another order", remedy="call every BatchNorm as often in each shard",
            )  # fmt: skip
        self._noted.append((shard.number, count, np.concatenate([value for _, _, value in shard.statistics])))

    def numbers(self) -> tuple[float, float, float, float]:
        """What `move_statistics` needs the sums of, over all ranks."""
        noted = float(self._noted[0][2].size) if self._noted else 0.0
        return noted, noted * noted, float(noted > 0), float(not self._buffers)

    def move_statistics(self, noted: float, squares: float, num_noting: float, num_unknown: float) -> None:
        """Move running statistics by those of all shards of the step; every rank must call, with the sums of `numbers`.

        Raises:
            MismatchError: ranks differ in the layers that keep statistics; on every rank.
        """
        if not num_noting:
            return
        if noted * noted != squares * num_noting or num_unknown:
            raise MismatchError(
                "step", expected="the same BatchNorm layers on every rank",
                got="none yet on a rank that has had no samples" if num_unknown else "other ones on some rank",
                remedy="build the same model on every rank; take no first batch with empty virtual shards",
            )  # fmt: skip
        table = np.zeros((self._shards.num, 1 + round(noted / num_noting)))
        for number, count, values in self._noted:
            table[number] = count, *values
        # Whole numbers of which all but one are 0: their sum is exact, whatever bits they stand for.
        self._world.comm.native_allreduce(table.view(np.uint64), "sum")
        counts, values = table[:, :1], table[:, 1:]
        means = (counts * values).sum(axis=0) / counts.sum()
        for buffer, momentum in self._buffers:
            size = buffer.data.size
            move(buffer, momentum, means[:size].reshape(buffer.shape))
            means = means[size:]
