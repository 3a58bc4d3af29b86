"""`DistributedSampler`: an index sampler for each rank, whose position can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..comm import World, init
from ..comm.world import require_world
from ..core.checks import whole_number
from ..data.samplers import SamplerPosition
from ..errors import ConfigError


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """``torch.utils.data.DistributedSampler`` over the ranks of an hpcdp world.

    Every rank draws the same permutation for the epoch of `set_epoch`, and takes every n-th index. The permutation is
    padded from its front, or cut with ``drop_last``, so that all ranks have the same number of indices. The state is a
    position, from which any number of ranks can continue in the same order with the next iteration.

    Args:
        dataset: a dataset with a length.
        num_replicas, rank: as in torch; default those of the world.
        shuffle, seed, drop_last: as in torch.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        world: World | None = None,
    ) -> None:
        require_world("DistributedSampler", world)
        if num_replicas is None or rank is None:
            world = init() if world is None else world
            num_replicas = world.size if num_replicas is None else num_replicas
            rank = world.rank if rank is None else rank
        whole_number("DistributedSampler", "num_replicas", num_replicas, 1)
        whole_number("DistributedSampler", "rank", rank, 0, num_replicas - 1)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._position = SamplerPosition()
        self.used: int | None = None
        """Number of samples of this iteration that this rank's loop has used; None: all that were drawn. Assign it
        before `state_dict` if a loader with workers draws ahead."""

    def __iter__(self) -> Iterator[Any]:
        done = self._position.begin() or 0
        loop, self.used = self._position.loop, None
        order = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        if self.drop_last:
            order = order[: len(order) - len(order[done:]) % self.num_replicas]
        rest, at = order[done:], 0
        while len(rest) % self.num_replicas:
            rest.append(order[at % len(order)])
            at += 1
        for index in rest[self.rank :: self.num_replicas]:
            loop.used += 1
            yield index
        loop.ended = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order of the next iteration; a restored epoch continues."""
        super().set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, the same on all ranks; see `used` for samples that are drawn ahead.

        Returns:
            ``epoch``; ``done``: the number of its samples that all ranks together have used; ``begun`` and ``ended``:
            whether an iteration has begun, and has ended; and ``n``, ``shuffle``, ``seed``, which decide the order.
        """
        loop = self._position.loop
        drawn = loop.used if self.used is None else self.used
        ended = loop.ended and drawn == loop.used
        return self._position.state(loop.before + drawn * self.num_replicas, ended) | self._order

    @property
    def _order(self) -> dict[str, Any]:
        return {"n": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` with the next iteration; the one after that is complete.

        Raises:
            ConfigError: the order differs, because of another dataset length, ``shuffle`` or ``seed``.
        """
        for name, own in self._order.items():
            if state.get(name) != own:
                where = f"DistributedSampler {name}"
                raise ConfigError("load_state_dict", where=where, expected=own, got=state.get(name))
        super().set_epoch(state["epoch"])
        self._position.restore(state)
