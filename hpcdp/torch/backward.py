"""From the first gradient of a backward to the average over all ranks.

Autograd makes a gradient of its own for every parameter. A hook copies it, once, to its place in the bucket, which is
memory that the node's ranks share, and tells the reducer; the sum over all ranks is then found in that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..comm import World
from ..comm.agreement import require_same
from ..errors import StaleGradientError
from ..gradients import Reducer
from .join import Turns
from .parameters import TorchParameter

_MOST_NAMES = 3


class Backward:
    """Every backward of a module's parameters, one after another. All ranks must make it together.

    Args:
        params: the trained parameters, in the order of their registration.
        reducer: of the same parameters.
        world: the ranks.
        find_unused: whether parameters may be without a gradient; else that is an error.
    """

    def __init__(self, params: Sequence[TorchParameter], reducer: Reducer, world: World, find_unused: bool) -> None:
        self.reducer = reducer
        self.params = {param.name: param for param in params}
        self.syncing = True
        """Whether a backward ends with the average over all ranks, or only adds to this rank's gradients."""
        self.awaits_step = False
        """Whether an optimizer sums and updates in one, so that a backward leaves this rank's own gradients."""
        self.turns = Turns(world)
        self.turns.events["backward"] = lambda _: self._average(following=True)
        self._world = world
        self._find_unused = find_unused
        self._held: set[str] = set()  # written without synchronising
        self._queued = False
        for param in params:
            param.tensor.register_post_accumulate_grad_hook(partial(self._written, param))

    def watch_end(self, _gradient: torch.Tensor | None = None) -> None:
        """Called within a backward: close it when all of it is over, also parts that run as backwards of their own."""
        if self.syncing and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _written(self, param: TorchParameter, _tensor: torch.Tensor) -> None:
        if not self.syncing:
            self._held.add(param.name)
            return
        self.watch_end()
        if not self.awaits_step and not self.reducer.is_missing(param.name):
            raise StaleGradientError(
                "backward", where=param.name, expected="one gradient of a parameter in each backward",
                got="a second one", remedy="checkpoint with use_reentrant=False",
            )  # fmt: skip
        param.contribute(self._share)
        param.release()
        param.grad_hook(param)

    @property
    def _share(self) -> float:
        return 1.0 if self.awaits_step else 1.0 / self.turns.divisor

    def _end(self) -> None:
        self._queued = False
        nothing_written = self.reducer.num_missing == len(self.params) and not self._held
        if nothing_written or self.awaits_step:  # as in torch.autograd.grad, or until the optimizer's step
            return
        self.turns.announce("backward")
        self._average(following=False)

    def _average(self, following: bool) -> None:
        unused = self.close(following)
        self.reducer.reduce_everywhere()
        if not following:
            for name, param in self.params.items():
                if name not in unused or param.tensor.grad is not None:
                    param.take()
        self.reducer.reset()

    def close(self, following: bool = False, settings: tuple[float, ...] = ()) -> set[str]:
        """The exchange after which every rank has left backward. Returns the parameters that no rank has used.

        Every rank must call. What this rank has not used counts as zero.

        Args:
            following: whether this rank has run out of data, so that nothing is expected of it.
            settings: numbers that are to be the same on all ranks.

        Raises:
            StaleGradientError: some rank has not used all parameters, and may not; on every rank.
            MismatchError: the settings differ; on every rank.
        """
        reducer, held = self.reducer, self._held
        missing = reducer.missing
        self._held = set()
        unused = [name for name in missing if name not in held]
        for name in missing:
            param = self.params[name]
            param.contribute(0.0 if following else self._share)
            param.grad_hook(param)
        reducer.launch_rest()
        (num_unused,), alike = reducer.tally_alike(settings, 0 if following else len(unused))
        if not alike:
            self._end_reductions()
            self.refuse(settings)
        if not num_unused:
            return set()
        by_rank = self._world.comm.allgather_json(None if following else unused)
        if not self._find_unused:
            self._end_reductions()
            rank, names = next((rank, names) for rank, names in enumerate(by_rank) if names)
            listed = ", ".join(names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise StaleGradientError(
                "backward", where=f"rank {rank}", expected="a gradient for every parameter",
                got=f"none for {listed}{more}",
                remedy="freeze them (requires_grad=False) or pass find_unused_parameters=True",
            )  # fmt: skip
        return set.intersection(*(set(names) for names in by_rank if names is not None))

    def refuse(self, settings: tuple[float, ...]) -> None:
        """Raise that the ranks' settings of an optimizer differ, on all of them."""
        require_same(self._world.comm, "step", [f"settings {settings}"], "change learning rates alike on all ranks")

    def _end_reductions(self) -> None:
        self.reducer.reduce_shards()  # nobody leaves before what was launched has ended
        self.reducer.reset()
