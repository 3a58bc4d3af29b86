"""Makes a store of a kind, by its name."""

from __future__ import annotations

from ..comm import World, init
from ..comm.agreement import on_every_rank, require_same
from ..comm.world import require_world
from ..errors import ConfigError
from .asynchronous import AsyncStore
from .device_sync import DeviceSyncStore
from .kinds import KINDS
from .local import LocalStore
from .store import KVStore
from .sync import SyncStore


def create(
    name: str = "local", world: World | None = None, *, staleness: int | None = None, replay: int | None = None
) -> KVStore:
    """A new store, without keys.

    Args:
        name: one of `KINDS`, exactly. Those that begin with ``dist`` every rank must make, in the same order.
        world: for those; default `hpcdp.init()`. The others start no MPI.
        staleness: for ``dist_async``: by how many pushes of a key a worker may lead the slowest one before it waits.
            None: by any. 0: pushes go in rounds, which are merged: that is ``dist_sync``, and that is what is made.
        replay: for ``dist_async`` on thread ranks: a seed that decides in which order operations take effect, of this
            store and of those of ``dist_async`` that are made later in ``world``.

    Raises:
        ConfigError: there is no such kind, or it has no such setting.
    """
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError("kvstore.create", where="name", expected=f"one of {', '.join(KINDS)}", got=repr(name))
    require_world("kvstore.create", world)
    if KINDS[name].scope == "process":
        _check_settings(name, staleness, replay)
        return LocalStore(name)
    world = init() if world is None else world
    on_every_rank(world.comm, lambda: _check_settings(name, staleness, replay))
    require_same(world.comm, "kvstore.create", [f"{name} {staleness=} {replay=}"], "make it alike on all ranks")
    if name == "dist_async" and staleness != 0:
        return AsyncStore(name, world, staleness, replay)
    if KINDS[name].sums == "device":
        return DeviceSyncStore(name, world)
    return SyncStore("dist_sync" if name == "dist_async" else name, world)


def _check_settings(name: str, staleness: int | None, replay: int | None) -> None:
    for setting, value in (("staleness", staleness), ("replay", replay)):
        if value is not None and name != "dist_async":
            raise ConfigError(
                "kvstore.create", where=setting, expected="None, or dist_async", got=f"{value!r} of {name}"
            )
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            expected = "an integer, 0 or more, or None"
            raise ConfigError("kvstore.create", where=setting, expected=expected, got=repr(value))
