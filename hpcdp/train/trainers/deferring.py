"""Trainers of networks that do not know all their shapes yet, as Gluon defers them: what is made is made later."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from ...arrays import from_host, to_host
from ...comm import Communicator, World, init
from ...comm.agreement import require_same
from ...errors import ConfigError, MismatchError
from ...gradients.by_hand import of_rank_0
from ...kvstore import KINDS, KVStore
from ...nn import deferred
from ...nn.deferred import Deferred
from .loss_scale import first_scale

_REMEDY = (
    "give initialisers a seed, or a `generator`, on all ranks; or call the network once, on one sample, before its "
    "Trainer is made"
)


class Waiting:
    """A Trainer whose parameters have no shapes yet, and what backward has written until it is made.

    All ranks begin with the same values, as with any Trainer: random initialisers that have a ``generator`` get the
    state of rank 0's, so that the first forward draws the same on all ranks.

    Args:
        params: the parameters.
        late: those that have had no shape when they were made, alike on all ranks.
        comm: the ranks; None: this one alone.
        make: makes the Trainer.
    """

    def __init__(
        self, params: Sequence[Any], late: Sequence[Deferred], comm: Communicator | None, make: Callable[[], None]
    ) -> None:
        self._late, self._comm, self._make = late, comm, make
        self._written: dict[int, Any] = {}
        """Parameters with a gradient by their ids, in the order in which backward has written them."""
        if comm is not None:
            _share_generators(late, comm)
            for param in params:
                if None not in deferred.shape_of(param):
                    param.data = from_host(of_rank_0(param.data, comm), param.data)
        for param in params:
            if param.grad_req != "null":
                param.grad_hook = self._note

    def _note(self, param: Any) -> None:
        self._written[id(param)] = param

    def end(self) -> Callable[[], None]:
        """Make the Trainer; every rank must call, when it has written gradients or has no samples.

        Returns:
            A function that gives the Trainer the gradients that were written before.

        Raises:
            DeviceError: no rank knows a shape.
            MismatchError: ranks have drawn other values, which their gradients belong to; on every rank.
        """
        settle_together(self._late, self._comm, bool(self._written))
        for param in self._late:
            _ = param.data  # an error where no rank has called its layer
        written = [(param, param.grad.copy()) for param in self._written.values()]
        self._make()

        def give() -> None:
            for param, gradient in written:
                param.grad[...] = gradient
                if param.grad_hook is not None:
                    param.grad_hook(param)

        return give


def settle_together(late: Sequence[Deferred], comm: Communicator | None, has_gradients: bool = False) -> None:
    """Give parameters that some ranks know, and others not, the shapes and values of the first rank that does; every
    rank must call.

    Args:
        late: parameters that had no shape when they were made, alike on all ranks.
        comm: the ranks; None: this one alone.
        has_gradients: whether this rank has computed some with the values that it knows.

    Raises:
        MismatchError: ranks with gradients know other shapes or values; on every rank.
    """
    if comm is None or comm.size == 1:
        return
    own = [None if None in deferred.shape_of(param) else [list(param.shape), _digest(param.data)] for param in late]
    exchanged = comm.allgather_json([own, has_gradients])
    for number, param in enumerate(late):
        known = [rank for rank, (each, _) in enumerate(exchanged) if each[number] is not None]
        if not known:
            continue
        shape, digest = exchanged[known[0]][0][number]
        odd = [rank for rank in known if exchanged[rank][0][number] != [shape, digest]]
        is_used = any(exchanged[rank][1] for rank in odd) or (bool(odd) and exchanged[known[0]][1])
        if is_used or any(exchanged[rank][0][number][0] != shape for rank in odd):
            raise MismatchError(
                "Trainer", where=param.name, expected=f"the values that rank {known[0]} has drawn, of shape {shape}",
                got=f"others on rank {odd[0]}, of shape {exchanged[odd[0]][0][number][0]}", remedy=_REMEDY,
            )  # fmt: skip
        if len(known) < comm.size or odd:
            if own[number] is None:
                param.draw = lambda shape: np.zeros(shape, np.float32)
                deferred.settle(param, next(n for n, each in zip(shape, param.expected, strict=True) if each is None))
            values = np.array(to_host(param.data), order="C")
            comm.native_broadcast(values, known[0])
            param.data[...] = from_host(values, param.data)


def _digest(values: Any) -> int:
    host = np.array(to_host(values), order="C")
    return zlib.crc32(host.reshape(-1).view(np.uint8).data)


def _share_generators(late: Sequence[Deferred], comm: Communicator) -> None:
    """Let the initialisers of ``late`` parameters draw on as rank 0's do; every rank must call."""
    found = {id(each): each for each in (getattr(param.initial, "generator", None) for param in late)}
    generators = [each for each in found.values() if isinstance(each, np.random.Generator)]
    states = [each.bit_generator.state for each in generators]
    plain = [state if state["bit_generator"] == np.random.PCG64.__name__ else None for state in states]
    for generator, state in zip(generators, comm.allgather_json(plain)[0], strict=False):
        if state is not None:
            generator.bit_generator.state = state


def may_wait(make: Callable[..., None]) -> Callable[..., None]:
    """Let ``make``, the ``__init__`` of a Trainer, wait where parameters have no shapes yet; see `Waiting`."""

    @wraps(make)
    def begin(self: Any, params: Sequence[Any], optimizer: Any, world: World | None = None, **options: Any) -> None:
        params = list(params)
        late = [param for param in params if isinstance(param, Deferred)]
        if late:
            kind = options.get("kvstore")
            kind = kind.kind if isinstance(kind, KVStore) else kind
            is_alone = isinstance(kind, str) and kind in KINDS and KINDS[kind].scope != "world"
            ranks = None if is_alone else init() if world is None else world
            comm = None if ranks is None else ranks.comm
            if comm is not None:
                require_same(comm, "Trainer", [f"{param.name} {param.expected}" for param in late])
            settle_together(late, comm)
            if any(None in deferred.shape_of(param) for param in late):
                _refuse(ranks, options)
                self.check_options(options)
                self.optimizer, self.world = optimizer, ranks
                self.loss_scale = first_scale(options.get("loss_scale", 1.0))
                self.steps_together = kind != "dist_async"
                self.waiting = Waiting(params, late, comm, lambda: make(self, params, optimizer, world, **options))
                return
        make(self, params, optimizer, world, **options)

    return begin


def _refuse(ranks: World | None, options: dict[str, Any]) -> None:
    """Raise `ConfigError` for what needs shapes before the first forward."""
    is_cut = ranks is not None and (ranks.part_comm is not None or ranks.model_comm is not None)
    if is_cut or options.get("reproducible"):
        raise ConfigError(
            "Trainer", expected="a network that knows its shapes", got="one that does not",
            remedy="call the network once, on one sample, before its Trainer is made",
        )  # fmt: skip
