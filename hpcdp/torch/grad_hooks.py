"""Hooks of PyTorch's backward, and joining of uneven inputs.

Ranks that have run out of data go on with the others, until nobody has any.

While a model is joined, each rank says what it is about to do before anything that all ranks must do together. A rank
without data says that it has none, and does its part of whatever the others have said, with gradients of zero.

From the first gradient of a backward to the average over all ranks.

Autograd makes a gradient of its own for every parameter. A hook copies it, once, to its place in the bucket, which is
memory that the node's ranks share, or the GPU's, and tells the reducer; the sum over all ranks is then found in that
place. On a GPU all of it is given to the stream that is torch's there, and the host waits for none of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm import World
from ..comm.consistency import require_same
from ..data_parallel import Reducer
from ..errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError, listed
from . import tensors
from .tensors import TorchParameter

_JOINED = "joined model"
"""What a world keeps the turns under that are taken just now."""


class Turns:
    """What the ranks of one model do together, in turn.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.events: dict[str, Callable[[Any], object]] = {}
        """What a rank without data does about each event, given what was announced with it."""
        self.active = list(range(world.size))
        """The ranks that had data at the latest turn."""
        self.last_rank = 0
        """The lowest of the ranks that had data at the last turn of the last `joined`."""
        self._world = world
        self.following = False
        """Whether this rank has run out of data, and others have not."""
        self._open = False
        self._divides_by_all = True

    @property
    def divisor(self) -> int:
        """By how many ranks sums of gradients are divided."""
        return self._world.size if self._divides_by_all else len(self.active)

    def announce(self, event: str, what: object = None) -> None:
        """Say that this rank is about to do something that all ranks do together; outside of `joined` nothing happens.

        Args:
            event: one of `events`.
            what: given to those without data; anything that JSON knows.

        Raises:
            MismatchError: ranks with data do different things; on every rank.
        """
        if self._open and not self.following:
            self._meet([event, what])

    @contextmanager
    def joined(self, divides_by_all: bool) -> Iterator[None]:
        """Within it ranks may run out of data; who leaves waits until all have.

        Raises:
            ConfigError: within another one, also of another model, whose turns would be taken for this one's.
        """
        if _JOINED in self._world.kept:
            raise ConfigError(
                "join", expected="one at a time", got="join() within join()", remedy="wrap one module that holds both"
            )
        self._world.kept[_JOINED] = self
        self._open, self._divides_by_all = True, divides_by_all
        try:
            yield
            self.following = True
            last = self.active
            while (said := self._meet(None)) is not None:
                last = self.active
                self.events[said[0]](said[1])
            self.last_rank = last[0]
        finally:
            del self._world.kept[_JOINED]
            self._open, self.following, self._divides_by_all = False, False, True
            self.active = list(range(self._world.size))

    def _meet(self, mine: list[Any] | None) -> list[Any] | None:
        """What the ranks with data are about to do; None where there is none."""
        everyone = self._world.comm.allgather_json(mine)
        self.active = [rank for rank, said in enumerate(everyone) if said is not None]
        if not self.active:
            return None
        first = everyone[self.active[0]]
        for rank in self.active:
            if everyone[rank] != first:
                raise MismatchError(
                    "join", expected=f"the same as on rank {self.active[0]}: {_named(first)}",
                    got=f"{_named(everyone[rank])} on rank {rank}",
                    remedy="ranks may run out of data, but do the same for each batch",
                )  # fmt: skip
        return list(first)


def _named(said: list[Any]) -> str:
    event, what = said
    return f"{event} ({what})" if what is not None else str(event)


_NO_BACKWARD = -1

_takers: Any = WeakTensorKeyDictionary()
"""By parameter who takes its gradients, a weak reference, and the handle of the hook: the last that was made."""


class Backward:
    """Every backward of a module's parameters, one after another. All ranks must make it together.

    Args:
        params: the trained parameters, in the order of their registration. Who took their gradients before is told that
            they are taken over.
        reducer: of the same parameters.
        world: the ranks.
        find_unused: whether parameters may be without a gradient; else that is an error.
        sums: average after the sum, and not each gradient before it, so that codecs see them as they are.
    """

    def __init__(
        self,
        params: Sequence[TorchParameter],
        reducer: Reducer,
        world: World,
        find_unused: bool,
        sums: bool = False,
    ) -> None:
        self.reducer = reducer
        self.params = {param.name: param for param in params}
        self.syncing = True
        """Whether a backward ends with the average over all ranks, or only adds to this rank's gradients."""
        self.awaits_step = False
        """Whether an optimizer sums and updates in one, so that a backward leaves this rank's own gradients."""
        self.turns = Turns(world)
        self.turns.events["backward"] = lambda _: self._average()
        self.find_unused = find_unused
        self._sums = sums
        self._world = world
        self._device = params[0].device
        self._held: set[str] = set()  # written without synchronising
        self._queued = self._reached = False
        self._taken_over: str | None = None  # the name of a parameter
        for param in params:
            self._take(param)

    def _take(self, param: TorchParameter) -> None:
        before, handle = _takers.get(param.tensor, (lambda: None, None))
        if handle is not None:
            handle.remove()
        if before() is not None:
            before()._taken_over = param.name
        weak, name = weakref.ref(self), param.name  # what the hook holds lives as long as the tensor

        def written(_tensor: torch.Tensor) -> None:
            living = weak()
            if living is not None:
                living._written(living.params[name])

        _takers[param.tensor] = weak, param.tensor.register_post_accumulate_grad_hook(written)

    def begin(self) -> None:
        """Called before a forward that a backward may follow: what a backward that has failed has left is dropped.

        Raises:
            ConfigError: another wrapper has taken parameters over.
        """
        if self._taken_over is not None:
            raise ConfigError(
                "forward", where=self._taken_over, expected="a parameter of this wrapper alone",
                got="one that was wrapped again", remedy="use the later wrapper, or wrap one module that holds both",
            )  # fmt: skip
        if self._queued and torch._C._current_graph_task_id() == _NO_BACKWARD:
            self._queued = False
            if not self.awaits_step:
                self.drop()

    def drop(self) -> None:
        """Forget what was written since the last reduction; every rank must call, if any does with overlap."""
        self._held = set()
        self._queued = self._reached = False
        reducer = self.reducer
        if not reducer.is_untouched:
            if reducer.overlap:
                with tensors.on_torchs_stream(self._device):
                    reducer.launch_rest()
                    reducer.drop()
            reducer.reset()

    def watch_end(self, _gradient: torch.Tensor | None = None) -> None:
        """Called within a backward: close it when all of it is over, also parts that run as backwards of their own."""
        if self.syncing and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def reached(self, _tensor: torch.Tensor) -> None:
        """Called within a backward that goes through the module, whether it uses parameters or not."""
        self._reached = self.syncing
        self.watch_end()

    def _written(self, param: TorchParameter) -> None:
        gradient = param.tensor.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                "backward", where=param.name, expected="a dense gradient", got=f"one of layout {gradient.layout}",
                remedy="make the layer with sparse=False",
            )  # fmt: skip
        if not self.syncing:
            self._held.add(param.name)
            return
        self.watch_end()
        if not self.awaits_step and not self.reducer.is_missing(param.name):
            raise StaleGradientError(
                "backward", where=param.name, expected="one gradient of a parameter in each backward",
                got="a second one", remedy="checkpoint with use_reentrant=False",
            )  # fmt: skip
        if not self.reducer.is_writable(param.name):
            raise StaleGradientError(
                "backward", where=param.name, expected="one backward before each step of a ShardedOptimizer",
                got="another one", remedy="call step() or zero_grad() in between, or all but the last within no_sync()",
            )  # fmt: skip
        param.contribute(self._share)
        if self.awaits_step and self.reducer.overlap:
            param.tensor.grad = None  # its place may be summed already: nobody is to write there
        else:
            param.release()
        with tensors.on_torchs_stream(self._device):
            param.grad_hook(param)

    @property
    def _share(self) -> float:
        return 1.0 if self.awaits_step or self._sums else 1.0 / self.turns.divisor

    def _end(self) -> None:
        self._queued = False
        # As in torch.autograd.grad, which leaves parameters alone.
        nothing_written = self.reducer.num_missing == len(self.params) and not self._held and not self._reached
        self._reached = False
        if nothing_written or self.awaits_step:
            return
        self.turns.announce("backward")
        self._average()

    def _average(self) -> None:
        unused = self.close()
        with tensors.on_torchs_stream(self._device):
            self.reducer.reduce_everywhere()
        if self._sums:
            for param in self.params.values():
                param.view.mul_(1.0 / self.turns.divisor)
        if not self.turns.following:
            for name, param in self.params.items():
                if name not in unused or param.tensor.grad is not None:
                    param.take()
        self.reducer.reset()

    def close(self, settings: tuple[float, ...] = ()) -> set[str]:
        """The exchange after which every rank has left backward. Returns the parameters that no rank has used.

        Every rank must call. What this rank has not used counts as zero; of one that has run out of data nothing is
        expected.

        Args:
            settings: numbers that are to be the same on all ranks.

        Raises:
            StaleGradientError: some rank has not used all parameters, and may not; on every rank.
            MismatchError: the settings differ; on every rank.
        """
        reducer, held, following = self.reducer, self._held, self.turns.following
        missing = reducer.missing
        self._held = set()
        # What was held may be dropped since, by an optimizer's zero_grad().
        unused = [name for name in missing if name not in held or self.params[name].tensor.grad is None]
        waits = reducer.keeps_unsent and bool(missing)  # for what is not to be sent
        if not waits:
            self._launch_missing(missing)
        (num_unused,), alike = reducer.tally_alike(settings, 0 if following else len(unused))
        if not alike:
            self._end_reductions()
            self.refuse(settings)
        if not num_unused:
            if waits:
                self._launch_missing(missing)
            return set()
        older = [name for name in unused if self.params[name].tensor.grad is not None]  # which others add up
        exchanged = self._world.comm.allgather_json(None if following else [unused, older])
        by_rank = [None if names is None else names[0] for names in exchanged]
        if not self.find_unused:
            self._end_reductions()
            rank, names = next((rank, names) for rank, names in enumerate(by_rank) if names)
            if len(names) == len(self.params) and self.awaits_step:
                raise StaleGradientError(
                    "step", where=f"rank {rank}", expected="a backward since the last step or zero_grad()", got="none"
                )
            raise StaleGradientError(
                "backward", where=f"rank {rank}", expected="a gradient for every parameter",
                got=f"none for {listed(names)}",
                remedy="pass find_unused_parameters=True, or freeze them (requires_grad=False) before wrapping",
            )  # fmt: skip
        left_alone = set.intersection(*(set(names) for names in by_rank if names is not None))
        if waits:
            reducer.keep_unsent(left_alone.difference(*(names[1] for names in exchanged if names is not None)))
            self._launch_missing(missing)
        return left_alone

    def _launch_missing(self, missing: Sequence[str]) -> None:
        """Launch what backward has not: what it has not written of ``missing`` counts as zero."""
        with tensors.on_torchs_stream(self._device):
            for name in missing:
                param = self.params[name]
                param.contribute(0.0 if self.turns.following else self._share)
                param.grad_hook(param)
            self.reducer.launch_rest()

    def refuse(self, settings: tuple[float, ...]) -> None:
        """Raise that the ranks' settings of an optimizer differ, on all of them."""
        said = f"a step with settings {settings}" if settings else "the sum for clip_grad_norm_ or a GradScaler"
        require_same(self._world.comm, "step", [said], "change learning rates alike on all ranks, and call alike")

    def _end_reductions(self) -> None:
        with tensors.on_torchs_stream(self._device):
            self.reducer.drop()  # nobody leaves before what was launched has ended
        self.reducer.reset()
