"""Floor 3: data, batches of which an iteration can be gone on with. Imports: state, errors.

An order depends on arguments and the epoch alone, so a position is a number: how many global batches were used.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError, whole_number
from ..state import require_state


class Ordered:
    """What has an order that some of its arguments and the epoch decide."""

    decides: ClassVar[tuple[str, ...]] = ()
    """The names of those arguments, which are attributes."""
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Another order, from the next iteration on; every part must call it with the same number."""
        self.epoch = whole_number("sampler", "epoch", epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The arguments that decide the order, and the epoch; where a loop is in it says the `DataLoader`."""
        return {name: getattr(self, name) for name in self.decides} | {"epoch": self.epoch}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a `state_dict` of another order; says which argument differs."""
        for name, own in self.state_dict().items():
            if name not in state or (name in self.decides and state[name] != own):
                raise ConfigError(
                    "load_state_dict", where=f"{type(self).__name__} {name}", expected=own,
                    got=state.get(name, "nothing"), remedy="make the sampler with the arguments that it had then",
                )  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the epoch of a `state_dict`.

        Raises:
            ConfigError: as `check_state`; nothing is changed.
        """
        require_state(type(self).__name__, state)
        self.check_state(state)
        self.set_epoch(state["epoch"])


class Resumable(Ordered, abc.ABC):
    """Batches of sample numbers; see `samplers.BatchIndices`."""

    @abc.abstractmethod
    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """The batches of an iteration.

        Args:
            done: go on with the iteration that has begun last, after so many of its global batches; None: a new one.
        """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.batches()

    def taken_over(self, state: Mapping[str, Any], done: int) -> int:
        """After how many of its own global batches it goes on, where ``done`` of those of a `state_dict` are done."""
        return done

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """Where a loop is; every part must call, and learns the same.

        Args:
            before: how many global batches of the iteration were done when it began, or went on.
            used: how many batches the loop has had since.
            ended: whether it has come to its end.

        Returns:
            How many global batches are done, and whether the iteration has ended.
        """
        return before + used, ended


@dataclass
class Loop:
    """Where one iteration is."""

    before: int = 0
    """What was done of its epoch when it began, or went on."""
    used: int = 0
    """What the loop has had since."""
    begun: bool = False
    ended: bool = False


class Position:
    """Where loops over epochs are, and where the next one begins."""

    def __init__(self) -> None:
        self.epoch = 0
        self.loop = Loop()
        """The last that has begun, or was restored."""
        self._goes_on: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next loop is one of ``epoch``: a whole one, except of the epoch that was restored."""
        if self.loop.begun or epoch != self.epoch:
            self.loop, self._goes_on = Loop(), None
        elif self.loop.before:
            self._goes_on = self.loop.before
        self.epoch = epoch

    def begin(self) -> int | None:
        """A loop begins, now `loop`. Returns after how much of its epoch it goes on; None: it is a new one."""
        done, self._goes_on = self._goes_on, None
        self.loop = Loop(done or 0, begun=True)
        return done

    def state(self, done: int, ended: bool) -> dict[str, Any]:
        """Such as `restore` takes, where ``done`` of the epoch is, and the loop has perhaps ``ended``."""
        begun = self.loop.begun or ended or self._goes_on is not None
        return {"epoch": self.epoch, "done": done, "begun": begun, "ended": ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where a `state` says; where it had ended, only if `set_epoch` names that epoch."""
        self.epoch = state["epoch"]
        self.loop = Loop(before=state["done"], ended=state["ended"])
        self._goes_on = state["done"] if state["begun"] and not state["ended"] else None
