"""What a Trainer on a store refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays import is_half
from ...comm import World
from ...errors import ConfigError
from ...gradients.bucket import Parameter
from ...kvstore import KINDS, KVStore
from .loss_scale import is_dynamic
from .policy import Policy

FOR_BUCKETS = {
    "owner": "auto",
    "bucket_cap_mb": None,
    "clip_norm": None,
    "overlap": None,
    "reproducible": False,
    "virtual_shards": None,
}
"""What a store has no use for, and what stands for "not said"."""


def check_settings(kind: object, update_on_kvstore: bool | None, policy: Policy, for_buckets: dict[str, Any]) -> None:
    """Raises `ConfigError` where a store of this kind cannot do what a Trainer is asked for."""
    if not isinstance(kind, str) or kind not in KINDS:
        expected = f"a KVStore or one of {', '.join(KINDS)}"
        raise ConfigError("Trainer", where="kvstore", expected=expected, got=repr(kind))
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ConfigError(
            "Trainer", where="update_on_kvstore", expected="True, False or None", got=repr(update_on_kvstore)
        )
    if update_on_kvstore is False and kind == "dist_async":
        raise ConfigError(
            "Trainer", where="update_on_kvstore", expected="True with dist_async", got="False",
            remedy="leave it out, or take dist_sync: pushes that do not wait for each other have no sum",
        )  # fmt: skip
    if policy.nonfinite != "ignore":
        raise ConfigError(
            "Trainer", where="policy", expected="nonfinite='ignore' with a kvstore", got=repr(policy.nonfinite),
            remedy="leave kvstore out: a store does not look at what is pushed",
        )  # fmt: skip
    for name, value in for_buckets.items():
        unsaid = FOR_BUCKETS[name]
        if type(value) is not type(unsaid) or value != unsaid:
            raise ConfigError(
                "Trainer", where=name, expected=f"{unsaid!r} with a kvstore", got=repr(value),
                remedy="leave it out, or train without a kvstore",
            )  # fmt: skip


def check_precision(params: Sequence[Parameter], loss_scale: object) -> None:
    """Raises `ConfigError` for what needs float32 copies of parameters or a look at sums, which stores have not."""
    remedy = "train without a kvstore"
    half = next((param for param in params if is_half(param.data)), None)
    if half is not None:
        raise ConfigError("Trainer", where=half.name, expected="float32 or float64 with a kvstore",
                          got=half.data.dtype, remedy=remedy)  # fmt: skip
    if is_dynamic(loss_scale):
        raise ConfigError("Trainer", where="loss_scale", expected="a number with a kvstore", got=repr(loss_scale),
                          remedy=remedy)  # fmt: skip


def check_apart(params: Sequence[Parameter]) -> None:
    """Raises `ConfigError` for layers of all ranks, where ranks do not step together."""
    joint = next((param for param in params if getattr(param, "is_joint", False)), None)
    if joint is not None:
        raise ConfigError(
            "Trainer", where=joint.name, expected="layers of this rank alone with dist_async, whose ranks do not wait",
            got="one of all ranks, as SyncBatchNorm", remedy="take nn.BatchNorm, or dist_sync",
        )  # fmt: skip


def check_unused(store: KVStore, world: World | None) -> None:
    """Raises `ConfigError` for a store that others use, or of other ranks than ``world``."""
    if world is not None and (store.rank, store.num_workers) != (world.rank, world.size):
        expected = f"a store of the same world: rank {world.rank} of {world.size}"
        got = f"rank {store.rank} of {store.num_workers}"
        raise ConfigError("Trainer", where="kvstore", expected=expected, got=got)
    if store.keys or store.has_updater:
        got = f"keys {store.keys[:3]!r}" if store.keys else "one with an updater"
        raise ConfigError(
            "Trainer", where="kvstore", expected="a store without keys and updater", got=got,
            remedy="make one for each Trainer; it calls set_optimizer itself",
        )  # fmt: skip
