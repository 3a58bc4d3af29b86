"""What `fit` asks of its arguments before the first step: on each rank, and of all together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..comm import World
from ..data import DataLoader, ShardedSampler, SharedSampler, VirtualShardSampler
from ..errors import ConfigError, MismatchError, whole_number
from ..nn import Module
from .callbacks import Callback, EarlyStopping
from .checkpoints import Checkpoints
from .trainers.trainer import Trainer
from .work_load import AdaptWorkLoad


def check_arguments(net: object, trainer: object, loader: object, **others: Any) -> None:
    """Raises `ConfigError` where an argument of `fit` is of another kind."""
    callbacks, checkpoints = others["callbacks"], others["checkpoints"]
    whole_number("fit", "epochs", others["epochs"], 0)
    for where, valid, expected, got in (
        ("net", isinstance(net, Module), "a network", net),
        ("trainer", isinstance(trainer, Trainer), "a Trainer", trainer),
        ("loader", isinstance(loader, DataLoader), "a DataLoader", loader),
        ("callbacks", isinstance(callbacks, Sequence), "a list of callbacks", callbacks),
        ("checkpoints", isinstance(checkpoints, Checkpoints | None), "Checkpoints or None", checkpoints),
        ("evaluate", others["evaluate"] is None or callable(others["evaluate"]), "a function", others["evaluate"]),
    ):
        if not valid:
            raise ConfigError("fit", where=where, expected=expected, got=type(got).__name__)
    if net.has_own_step:  # type: ignore[attr-defined]
        name = type(net).__name__
        raise ConfigError("fit", where="net", expected="a network that is called", got=f"a {name}, which has step()")
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ConfigError("fit", where="callbacks", expected="instances of Callback", got=repr(each))


def what_ranks_share(
    net: Module, loader: DataLoader, callbacks: Sequence[Callback], *, epochs: int, evaluate: object,
    checkpoints: Checkpoints | None,
) -> list[str]:  # fmt: skip
    """What must be the same on all ranks, in words. Of ``evaluate`` ranks must have one or none; they may differ."""
    given = [f"evaluate {'None' if evaluate is None else 'given'}"]
    given += ["checkpoints None"] if checkpoints is None else checkpoints.alike()
    deciding = [each for each in (callback.alike() for callback in callbacks) if each is not None]
    callbacks_too = f"callbacks {', '.join(deciding) or 'none'} that decide"
    return [f"epochs {epochs}", *given, callbacks_too, _order(getattr(loader, "sampler", None)), *_layers(net, "net")]


def _order(sampler: Any) -> str:
    """Which samples come when, where parts of one order fall to the ranks; else each rank has its own."""
    if isinstance(sampler, VirtualShardSampler):
        sampler = sampler.shards[0]
    if not isinstance(sampler, SharedSampler | ShardedSampler) or getattr(sampler, "num_parts", None) == 1:
        return "a sampler for each rank alone"
    names = ("n", "batch_size", "shuffle", "seed", "last", "num_parts", "weights")
    settings = ", ".join(f"{name}={getattr(sampler, name)!r}" for name in names if hasattr(sampler, name))
    return f"{type(sampler).__name__}({settings})"


def check_parts(loader: DataLoader, world: World) -> None:
    """Raises `MismatchError`, on all ranks, where ranks among which an order is cut have the same part of it.

    Every rank must call, after they have compared `what_ranks_share`.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, ShardedSampler) or sampler.num_parts != world.size:
        return  # ranks with a part in common, as those of a split layer, are more than parts
    parts = world.comm.allgather_json(sampler.part_index)
    for part in parts:
        if parts.count(part) > 1:
            ranks = ", ".join(str(rank) for rank, other in enumerate(parts) if other == part)
            raise MismatchError(
                "fit", where="loader", expected="another part_index on each rank", got=f"{part} on ranks {ranks}",
                remedy="make its sampler with part_index=world.rank",
            )  # fmt: skip


def _layers(module: Module, path: str) -> Iterator[str]:
    yield f"{path} {type(module).__name__}"
    for name, part in module.children():
        yield from _layers(part, f"{path}.{name}")


def check_callbacks(callbacks: Sequence[Callback], evaluates: bool, loader: DataLoader) -> None:
    """Raises `ConfigError` where one waits for numbers of a test set, and there is no ``evaluate``, or changes the
    shares of another sampler than the loader's."""
    for each in callbacks:
        if isinstance(each, EarlyStopping) and not evaluates:
            each.require_in(("loss", "accuracy"))
        if isinstance(each, AdaptWorkLoad) and each.sampler is not getattr(loader, "sampler", None):
            raise ConfigError("AdaptWorkLoad", where="sampler", expected="that of fit's loader", got="another one")


def check_loader(loader: DataLoader, trainer: Trainer) -> None:
    """Raises `ConfigError` where one of them has virtual shards, or another number of them, or ranks step together on
    batches that they take as they come."""
    sampler = getattr(loader, "sampler", None)
    if trainer.steps_together and isinstance(sampler, SharedSampler):
        raise ConfigError(
            "fit", where="loader", expected="batches of a rank's own where ranks step together", got="a SharedSampler",
            remedy="take a ShardedSampler, or kvstore='dist_async'",
        )  # fmt: skip
    num, own = getattr(sampler, "num_shards", None), getattr(sampler, "numbers", range(1))
    if num == trainer.virtual_shards and (num is None or own == trainer.own_virtual_shards):
        return
    expected = _loader_of(trainer.virtual_shards, trainer.own_virtual_shards)
    raise ConfigError("fit", where="loader", expected=expected, got=_loader_of(num, own))


def _loader_of(num_shards: int | None, own: range) -> str:
    """What a loader yields, in words."""
    if num_shards is None:
        return "one of whole batches of a rank"
    return f"that of a VirtualShardSampler for shards {own.start} to {own.stop - 1} of {num_shards}"
