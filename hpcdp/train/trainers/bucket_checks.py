"""What a Trainer that sums gradients in buckets refuses: settings, and calls while gradients are under way."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError, StaleGradientError, is_number
from ...gradients import Reducer

OWNERS = ("auto", "rank", "shard")
"""The valid values of ``owner``."""


def check_settings(
    kvstore: object,
    update_on_kvstore: object,
    owner: object,
    clip_norm: object,
    overlap: object,
    adding: Sequence[str],
) -> None:
    """Raises `ConfigError` for settings that buckets have not; ``adding`` names parameters with ``grad_req="add"``."""
    if kvstore is not None:
        raise ConfigError("Trainer", where="kvstore", expected="None in buckets", got=repr(kvstore))
    if update_on_kvstore is not None:
        expected = "None without a kvstore"
        raise ConfigError("Trainer", where="update_on_kvstore", expected=expected, got=repr(update_on_kvstore))
    if not (isinstance(owner, str) and owner in OWNERS):  # an array answers for each of its elements
        raise ConfigError("Trainer", where="owner", expected=" or ".join(OWNERS), got=repr(owner))
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise ConfigError("Trainer", where="clip_norm", expected="a positive norm", got=repr(clip_norm))
    if not (overlap is None or isinstance(overlap, bool)):
        raise ConfigError("Trainer", where="overlap", expected="True, False or None", got=repr(overlap))
    if overlap and adding:
        raise ConfigError(
            "Trainer", where=adding[0], expected="grad_req='write' with overlap", got="grad_req='add'",
            remedy="add up within no_sync(), or pass overlap=False",
        )  # fmt: skip


def refuse_reproducible(operation: str, reducer: Reducer, remedy: str) -> None:
    """Raises `ConfigError` where gradients are summed by virtual shards."""
    if reducer.virtual_shards is not None:
        raise ConfigError(
            operation, expected="a Trainer without reproducible=True", got="one with it",
            remedy=f"{remedy}, or train without it",
        )  # fmt: skip


def refuse_half_a_step(operation: str, reducer: Reducer) -> None:
    """Raises `StaleGradientError` between the virtual shards of a step."""
    shards = reducer.virtual_shards
    if shards is not None and (shards.current != shards.run.start or not reducer.arrivals.is_untouched):
        raise StaleGradientError(
            operation, expected="the end of a step", got=f"gradients of virtual shard {shards.current} under way",
            remedy="call it after the step of the last of own_virtual_shards, or drop this one by step(0) for each",
        )  # fmt: skip


def refuse_sums(operation: str, reducer: Reducer) -> None:
    """Raises `StaleGradientError` between `Trainer.allreduce_grads` and `Trainer.update`."""
    if reducer.holds_sums:
        raise StaleGradientError(
            operation, expected="gradients of this rank", got="those that allreduce_grads() has summed",
            remedy="call update(count), or step(0) to drop them",
        )  # fmt: skip
