"""Every rank gets its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..comm import World, init
from ..data.samplers import SamplerPosition
from ..errors import ConfigError


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """``torch.utils.data.DistributedSampler`` over the ranks of an hpcdp world.

    Every rank draws the same permutation, of the epoch that `set_epoch` names, and takes each n-th index of it, filled
    up from the front (or cut with ``drop_last``) so that all ranks have as many.

    Its state is a position, from which any number of ranks goes on, with the next iteration, in the same order of all.

    Args:
        dataset: what has a length.
        shuffle, seed, drop_last: as torch has them.
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(
        self, dataset: Any, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, world: World | None = None
    ) -> None:
        world = init() if world is None else world
        super().__init__(dataset, world.size, world.rank, shuffle, seed, drop_last)
        self._position = SamplerPosition()
        self.used: int | None = None
        """How many samples of this iteration this rank's loop has had. None: as many as were drawn. To be assigned
        before `state_dict` where a loader with workers draws ahead."""

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
        """Another order, from the next iteration on; of the epoch that was restored what is left."""
        super().set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, which `used` says where samples are drawn ahead; alike on all ranks.

        Returns:
            ``epoch``; ``done``: how many samples of it all ranks together have had; ``begun`` and ``ended``: whether an
            iteration has begun, and come to its end; and what decides the order.
        """
        loop = self._position.loop
        drawn = loop.used if self.used is None else self.used
        ended = loop.ended and drawn == loop.used
        return self._position.state(loop.before + drawn * self.num_replicas, ended) | self._order

    @property
    def _order(self) -> dict[str, Any]:
        return {"n": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a `state_dict` says, with the next iteration; the one after that is whole.

        Raises:
            ConfigError: it is of another order; says what differs.
        """
        for name, own in self._order.items():
            if state.get(name) != own:
                raise ConfigError(
                    "load_state_dict", where=f"DistributedSampler {name}", expected=own, got=state.get(name)
                )
        super().set_epoch(state["epoch"])
        self._position.restore(state)
