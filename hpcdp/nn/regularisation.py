"""Layers that behave differently in training and in prediction."""

from __future__ import annotations

import numpy as np

from ..autograd import Tensor, is_training
from ..errors import ConfigError, UnsupportedError, is_number, whole_number
from ..replica import replica_number
from . import deferred, functional
from .init import Ones, Zeros
from .module import Module
from .virtual_shard import KeepsStatistics, entered_shard


class BatchNorm(KeepsStatistics, Module):
    """Batch normalisation of each channel (Ioffe and Szegedy 2015).

    In training by the batch's mean and biased variance, which also move ``running_mean`` and ``running_var`` (buffers):
    ``running = momentum * running + (1 - momentum) * batch``; in prediction by those. Under a reproducible
    `Trainer` the batch is a virtual shard, and running statistics move once a step, by the mean over all its samples
    and calls.

    Args:
        channels: the input is ``(batch, channels, ...)``; None: those of the first one.
        momentum: how much of the running statistics stays.
        eps: added to the variance.

    Raises:
        ConfigError: ``channels`` below 1, ``momentum`` outside of [0, 1], ``eps`` not above 0.
    """

    keeps_float32 = True

    def __init__(self, channels: int | None, momentum: float = 0.9, eps: float = 1e-5) -> None:
        if channels is not None:
            whole_number("BatchNorm", "channels", channels, 1)
        if not is_number(momentum) or not 0 <= momentum <= 1:
            raise ConfigError("BatchNorm", where="momentum", expected="a share in [0, 1]", got=repr(momentum))
        if not is_number(eps) or not eps > 0:
            raise ConfigError("BatchNorm", where="eps", expected="a number above 0", got=repr(eps))
        self.gamma, self.beta = deferred.parameter((channels,), Ones()), deferred.parameter((channels,), Zeros())
        self.running_mean, self.running_var = Tensor(Zeros()((channels or 0,))), Tensor(Ones()((channels or 0,)))
        self.momentum, self.eps = float(momentum), float(eps)

    def statistics(self) -> tuple[Tensor, ...]:
        """The running statistics."""
        return self.running_mean, self.running_var

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim >= 2 and not self.running_mean.shape[0]:  # a Trainer may know the other shapes from other ranks
            channels = x.shape[1]
            self.running_mean, self.running_var = Tensor(Zeros()((channels,))), Tensor(Ones()((channels,)))
            deferred.settle(self.gamma, channels)
            deferred.settle(self.beta, channels)
        channels = self.gamma.shape[0]
        if x.ndim < 2 or x.shape[1] != channels:
            raise UnsupportedError(
                "forward", where=repr(self), expected=f"input of shape (batch, {channels}, ...)", got=tuple(x.shape)
            )
        if is_training():
            return self.by_batch(x)
        return self.by_running(x)

    def by_batch(self, x: Tensor) -> Tensor:
        """``x`` by its own statistics, which move the running ones; those of an empty batch are none."""
        if not x.size:
            return self.by_running(x)
        shard = entered_shard()
        if shard is None:
            moved = self.running_mean, self.running_var, self.momentum
            return functional.batch_norm(x, self.gamma, self.beta, self.eps, *moved)[0]
        y, mean, variance = functional.batch_norm(x, self.gamma, self.beta, self.eps)
        shard.note(self.running_mean, mean)
        shard.note(self.running_var, variance)
        return y

    def by_running(self, x: Tensor) -> Tensor:
        """``x`` by the running statistics."""
        return functional.batch_norm_by_running(x, self.gamma, self.beta, self.running_mean, self.running_var, self.eps)

    def describe(self) -> str:
        return f"{deferred.shape_of(self.gamma)[0]}, momentum={self.momentum}, eps={self.eps}"


class Dropout(Module):
    """In training each element is zero with probability ``p``, else divided by ``1 - p``; in prediction it stays.

    Args:
        p: in [0, 1).
        seed: an integer >= 0, of this layer's own generator. It is mixed with the number of the replica when the layer
            draws first: ranks drop different elements, and the same ones in every run on as many ranks. Ranks that hold
            one replica together, by tensor or pipeline parallelism, drop the same ones; replica 0 draws as one process
            does. A layer that has drawn before `hpcdp.init` goes on as it has begun. None takes fresh entropy on each
            rank. Under a reproducible `Trainer` a seed must be given: what is dropped then depends on it, the step and
            the place of the sample in the global batch alone.

    Raises:
        ConfigError: ``p`` or ``seed`` is outside of that; later no seed under a reproducible trainer.
    """

    def __init__(self, p: float = 0.5, seed: int | None = None) -> None:
        if not is_number(p) or not 0 <= p < 1:
            raise ConfigError("Dropout", where="p", expected="a probability in [0, 1)", got=repr(p))
        self.p, self.seed = float(p), None if seed is None else whole_number("Dropout", "seed", seed, 0)
        self.generator = np.random.default_rng(seed)
        """The layer's own; what it gives next is part of a run's state."""
        self._beginning = _Beginning(seed, self.generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not is_training():
            return x
        return functional.dropout(x, self.p, self._drawn_from())

    def _drawn_from(self) -> np.random.Generator:
        shard = entered_shard()
        if shard is None:
            self._beginning.enter(self.generator)
            return self.generator
        if self.seed is None:
            raise ConfigError(
                "Dropout", where="seed", expected="a number, since the trainer is reproducible", got=None,
                remedy=f"Dropout({self.p:g}, seed=...)",
            )  # fmt: skip
        return shard.generator(self.seed)

    def describe(self) -> str:
        return str(self.p)


class _Beginning:
    """The state in which a seeded generator begins, which depends on the replica that draws first.

    Networks are often made before the world is, so the replica is looked up when a layer draws. A generator that has
    drawn, or was restored from a checkpoint, goes on as it is. An object of its own: a forward that is traced may not
    assign attributes of a layer.
    """

    def __init__(self, seed: int | None, generator: np.random.Generator) -> None:
        self._seed, self._replica = seed, 0
        self._state = None if seed is None else generator.bit_generator.state

    def enter(self, generator: np.random.Generator) -> None:
        """Seed a generator that has not drawn yet by the seed and the replica; replica 0 by the seed alone."""
        replica = replica_number()
        if replica == self._replica or self._state is None:
            return
        self._replica = replica
        if generator.bit_generator.state == self._state:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(replica,) if replica else ())
            generator.bit_generator.state = self._state = np.random.PCG64(sequence).state
