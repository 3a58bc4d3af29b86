"""What stores over the ranks of a world have in common: what ranks must agree on, and who speaks for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..arrays import Array, is_host
from ..comm import World
from ..comm.agreement import on_every_rank, on_rank_0, require_same
from ..compression import Compression, Settings
from ..engine import Engine
from ..optim import Optimizer, require_optimizer
from .arguments import Key, check_storable
from .compress import check_codable
from .gpu_keys import check_one_gpu
from .store import KVStore
from .updaters import Function, name_of

T = TypeVar("T")


class WorldStore(KVStore):
    """See `KVStore`; every rank of ``world`` must make it, and its keys."""

    def __init__(self, kind: str, world: World, engine: Engine, lane: str) -> None:
        super().__init__(kind, engine, lane)
        self._world = world
        self._compression: Compression | None = None
        world.closings.add(self._let_go)

    def _let_go(self) -> None:
        """The world is closed: whatever is called next fails at its first look at a key."""
        vars(self).update(_entries=self._world.comm, _engine=self._world.comm)

    @property
    def rank(self) -> int:
        """See `KVStore.rank`."""
        return self._world.rank

    @property
    def num_workers(self) -> int:
        """See `KVStore.num_workers`."""
        return self._world.size

    def barrier(self) -> None:
        """See `KVStore.barrier`."""
        self._settle()
        self._meet()  # with a push that failed, too: others wait
        self.wait()

    def _meet(self) -> None:
        """Wait until all workers have come here, with no push of theirs under way."""
        self._world.barrier()

    def init(self, key: Any, value: Any) -> None:
        """See `KVStore.init`."""
        with self._world.meeting():
            super().init(key, value)

    def assign(self, key: Any, value: Any) -> None:
        """See `KVStore.assign`."""
        with self._world.meeting():
            super().assign(key, value)

    def set_gradient_compression(self, settings: Settings) -> None:
        """See `KVStore.set_gradient_compression`."""
        with self._world.meeting():
            super().set_gradient_compression(settings)

    def set_updater(self, updater: Function) -> None:
        """See `KVStore.set_updater`."""
        require_same(self._world.comm, "set_updater", [name_of(updater)], "pass the same function on all ranks")
        super().set_updater(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """See `KVStore.set_optimizer`."""
        self._agreed(lambda: require_optimizer("set_optimizer", optimizer))
        said = f"optimizer {optimizer.config()}"
        require_same(self._world.comm, "set_optimizer", [said], "pass the same on all ranks")
        super().set_optimizer(optimizer)

    def _check_new(self, values: dict[Key, Array]) -> None:
        """Refuse keys that ranks do not make alike, or cannot share; on all of them."""
        on_gpus = {key: value for key, value in values.items() if not is_host(value)}
        items = [
            f"key {key!r} {tuple(value.shape)} {value.dtype}{' on a GPU' * (key in on_gpus)}"
            for key, value in values.items()
        ]
        require_same(self._world.comm, "init", items, "make the same keys in the same order on all ranks")

        def check() -> None:
            check_storable({key: value for key, value in values.items() if key not in on_gpus})
            check_one_gpu(on_gpus)
            if self._compression is not None:
                check_codable("init", values.items())

        self._agreed(check)

    def _check_assigned(self, values: dict[Key, Array]) -> None:
        """Refuse keys that ranks do not assign alike, on all of them; when it returns all have come."""
        items = [f"key {key!r}" for key in values]
        require_same(self._world.comm, "assign", items, "assign the same keys in the same order on all ranks")

    def _agreed(self, check: Callable[[], T]) -> T:
        return on_every_rank(self._world.comm, check)

    def _by_first(self, write: Callable[[], None]) -> None:
        on_rank_0(self._world.comm, write)
