"""Every rank gets its own samples."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import World, init


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """``torch.utils.data.DistributedSampler`` over the ranks of an hpcdp world.

    Every rank draws the same permutation, of the epoch that `set_epoch` names, and takes each n-th index of it, filled
    up from the front (or cut with ``drop_last``) so that all ranks have as many.

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
