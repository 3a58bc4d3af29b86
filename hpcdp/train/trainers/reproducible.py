"""What makes a run the same to the bit on any number of ranks, beside the order in which gradients are summed.

One BLAS thread, the same arithmetic on all ranks, layers that know their virtual shard, running statistics that move
once a step by those of all shards in order. docs/reproducibility.md says why each of them is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from ...arrays import is_host
from ...autograd import Tensor
from ...comm import World
from ...comm.agreement import require_same
from ...comm.communicator import join_parts
from ...errors import ConfigError, HpcdpError
from ...gradients.bucket import Parameter
from ...gradients.virtual_shards import VirtualShards
from ...nn.virtual_shard import VirtualShard, enter_shard, entered_shard, layers_of, move
from ..runs.config import VIRTUAL_SHARDS


def arithmetic() -> str:
    """The libraries and the processor that decide what the last bits of a product or a sum are, in words."""
    from ...kernels.machine_code import target  # not before: Numba would be loaded with every Trainer

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    pools = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    blas = sorted({f"{each['internal_api']} {each['version']} {each.get('architecture', '')}" for each in pools})
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {})
    found = " ".join([*simd.get("baseline", ()), *simd.get("found", ())])
    return ", ".join([f"NumPy {np.__version__} {found}", *blas, target()])


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
    if not isinstance(num, int | np.integer) or isinstance(num, bool) or num < 1:
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
    return int(num)


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
        params: all that the trainer was given; some belong to layers with running statistics.
        world: the ranks.
    """

    def __init__(self, shards: VirtualShards, params: Sequence[Parameter], world: World) -> None:
        self._shards, self._world = shards, world
        self._layers = layers_of(params)
        self._noted: list[tuple[int, np.ndarray]] = []  # number of a shard of this step, and its row, see _row
        self.met_stranger = False
        """Whether a layer has noted something on this rank in this step that is none of the trainer's."""
        self.begin(1)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._noted.clear()
        self.met_stranger = False
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
                "step", expected="no other Trainer made in this thread since this reproducible one", got="one",
                remedy="train one model after the other",
            )  # fmt: skip
        if count and shard.statistics:
            self._noted.append((shard.number, self._row(count, shard.statistics)))

    def _row(self, count: int, statistics: Sequence[tuple[Tensor, np.ndarray]]) -> np.ndarray:
        """For each running statistic how many samples have passed, then the sums over them, one after the other."""
        buffers = self._buffers()
        sums = {id(buffer): np.zeros(buffer.data.size) for _, buffer in buffers}
        passed = dict.fromkeys(sums, 0.0)
        for buffer, value in statistics:
            if id(buffer) not in sums:
                self.met_stranger = True
                continue
            sums[id(buffer)] += count * value.reshape(-1)
            passed[id(buffer)] += count
        return np.concatenate([list(passed.values()), *sums.values()])

    def _buffers(self) -> list[tuple[float, Tensor]]:
        return [(layer.momentum, buffer) for layer in self._layers for buffer in layer.statistics()]

    def move_statistics(self) -> None:
        """Move running statistics by those of all shards of the step, in order; every rank must call."""
        buffers = self._buffers()
        if not buffers:
            return
        table = np.zeros((self._shards.num, len(buffers) + sum(buffer.data.size for _, buffer in buffers)))
        for number, row in self._noted:
            table[number] = row
        join_parts(table, self._world.comm)
        total = table.sum(axis=0)
        at = len(buffers)
        for passed, (momentum, buffer) in zip(total, buffers, strict=False):
            sums, at = total[at : at + buffer.data.size], at + buffer.data.size
            if passed:
                move(buffer, momentum, (sums / passed).reshape(buffer.shape))
