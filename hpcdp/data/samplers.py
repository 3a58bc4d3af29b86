"""Samplers, which say which rank reads which samples, and their state.

Which samples come next.

Samplers are deterministic: the order depends on the arguments and on the epoch alone, and iterating twice without
``set_epoch`` in between gives the same order twice (`BatchSampler` with ``last="rollover"`` excepted). So all ranks
agree on a shuffle without talking, and a resumed run sees what it would have seen: see `resumable`.

Batches of which an iteration can be gone on with.

An order depends on arguments and the epoch alone, so a position is a number: how many global batches were used.

Batches that parts take as they come to them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar, Protocol

import numpy as np

from ..core.checks import one_of, part_of, whole_number
from ..core.state import require_state
from ..errors import ConfigError
from .datasets import piece_bounds


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


class SamplerPosition:
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


class Sampler(Protocol):
    """Sample numbers, in an order that may depend on the epoch."""

    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...


class BatchIndices(Protocol):
    """Batches of sample numbers, int64 arrays of shape ``(count,)``; what a `DataLoader` iterates."""

    def __iter__(self) -> Iterator[np.ndarray]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...


def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


class SequentialSampler(Ordered):
    """0, 1, ..., n - 1, the same in every epoch."""

    decides = ("n",)

    def __init__(self, n: int) -> None:
        self.n = whole_number("sampler", "n", n, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class RandomSampler(Ordered):
    """Each of n samples once, in an order drawn from ``seed`` and the epoch.

    Args:
        n: number of samples.
        seed: an integer >= 0.
    """

    decides = ("n", "seed")

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n, self.seed = whole_number("sampler", "n", n, 0), whole_number("sampler", "seed", seed, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(shuffled(self.n, self.seed, self.epoch).tolist())

    def __len__(self) -> int:
        return self.n


class BatchSampler(Resumable):
    """Batches of another sampler's numbers, for a single process.

    Args:
        sampler: e.g. a `RandomSampler`.
        batch_size: samples a batch.
        last: what becomes of a short last batch: "keep" yields it, "discard" drops it, "rollover" puts its samples
            before those of the next iteration, also where a loop is left early.
        epoch_size: so many whole batches an iteration, of numbers that begin anew where they run out: where parts of a
            data set have not as many samples each, N / b / n on all n of them; none of a part without samples. None:
            once through all.

    Raises:
        ConfigError: a value outside of that, or both an ``epoch_size`` and "rollover".
    """

    decides = ("batch_size", "last", "epoch_size")

    def __init__(self, sampler: Sampler, batch_size: int, last: str = "keep", epoch_size: int | None = None) -> None:
        self.sampler, self.batch_size = sampler, whole_number("sampler", "batch_size", batch_size, 1)
        if epoch_size is None:
            self.last = one_of("sampler", "last", last, ("keep", "discard", "rollover"))
        else:
            expected = "keep or discard with epoch_size"
            self.last = one_of("sampler", "last", last, ("keep", "discard"), expected=expected)
        self.epoch_size = None if epoch_size is None else whole_number("sampler", "epoch_size", epoch_size, 1)
        self._rest: list[int] = []
        self._began_with: list[int] = []
        """What was left over when the last iteration began."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        if done is None:
            self._began_with = self._rest
        numbers: Iterable[int] = self.sampler
        if self.epoch_size is not None:
            numbers = islice(cycle(self.sampler), self.epoch_size * self.batch_size)
        if self.last == "rollover":
            numbers = [*self._began_with, *self.sampler]
            self._rest = [int(each) for each in numbers[len(numbers) - len(numbers) % self.batch_size :]]
        source = islice(numbers, (done or 0) * self.batch_size, None)
        while batch := list(islice(source, self.batch_size)):
            if len(batch) == self.batch_size or self.last == "keep":
                yield np.array(batch, np.int64)

    def __len__(self) -> int:
        """The number of batches of the next iteration."""
        if self.epoch_size is not None:
            return self.epoch_size if len(self.sampler) else 0
        total = len(self._rest) + len(self.sampler)
        return -(-total // self.batch_size) if self.last == "keep" else total // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the sampler."""
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `Ordered.state_dict`; with the sampler's own, if it has one, and what is left over."""
        inner = self.sampler.state_dict() if isinstance(self.sampler, Ordered) else None
        return super().state_dict() | {"sampler": inner, "rest": self._rest, "began_with": self._began_with}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        if isinstance(self.sampler, Ordered):
            self.sampler.check_state(state["sampler"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rest, self._began_with = list(state["rest"]), list(state["began_with"])


class ShardedSampler(Resumable):
    """This part's pieces of **global** batches: one global order, cut into batches, each cut into ``num_parts`` pieces.

    The parts together see in step k exactly the samples that a single part would see in step k, and all parts have the
    same number of steps, so no part waits for another at the end of an epoch.

    Args:
        n: number of samples in the data set.
        batch_size: samples of a **global** batch, all parts together; at least ``num_parts``.
        num_parts: usually the number of ranks.
        part_index: usually the rank, 0 to ``num_parts - 1``.
        shuffle: draw a new order from ``seed`` and the epoch; else 0, 1, ..., n - 1.
        seed: an integer >= 0, the same on all parts.
        last: what becomes of a short last global batch: "keep" splits it like the others (pieces may be empty),
            "discard" drops it, "pad" fills it up with the first samples of the epoch's order, "rollover" puts its
            samples before those of the next epoch, which may so have a batch more. What comes first in an epoch follows
            from its number alone, whichever epochs were iterated before.
        weights: one positive number a part; ``[3, 1]`` gives 192 and 64 of a global batch of 256. Without, the pieces
            of a batch differ by at most one sample.

    Raises:
        ConfigError: a value outside of that.
    """

    decides = ("n", "batch_size", "shuffle", "seed", "last")

    def __init__(
        self,
        n: int,
        batch_size: int,
        num_parts: int = 1,
        part_index: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "keep",
        weights: Sequence[float] | None = None,
    ) -> None:
        self.n = whole_number("sampler", "n", n, 0)
        self.batch_size = whole_number("sampler", "batch_size", batch_size, 1)
        self.num_parts, self.part_index = part_of("sampler", num_parts, part_index)
        whole_number(
            "sampler", "batch_size", batch_size, num_parts,
            expected=f"at least one sample for each of {num_parts} ranks",
            remedy="the batch is smaller than the ranks: use fewer ranks or a larger batch",
        )  # fmt: skip
        self.shuffle, self.seed = bool(shuffle), whole_number("sampler", "seed", seed, 0)
        self.last = one_of("sampler", "last", last, ("keep", "discard", "pad", "rollover"))
        self.weights: tuple[float, ...] | None = None
        self.set_weights(weights)

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Other weights from the next iteration on; all parts must call with the same ones. Which samples a global
        batch has does not depend on them.

        Raises:
            ConfigError: not one positive number a part; nothing is changed.
        """
        piece_bounds(self.batch_size, self.num_parts, weights)
        self.weights = None if weights is None else tuple(float(weight) for weight in weights)

    def state_dict(self) -> dict[str, Any]:
        """See `Ordered.state_dict`; with the weights, if there are any."""
        return super().state_dict() | ({} if self.weights is None else {"weights": list(self.weights)})

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state({"weights": None, **state})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Ordered.load_state_dict`; weights of as many parts are taken over."""
        super().load_state_dict(state)
        if len(state.get("weights") or ()) == self.num_parts:
            self.set_weights(state["weights"])

    def _bounds(self, count: int, weights: Sequence[float] | None) -> tuple[int, int]:
        bounds = piece_bounds(count, self.num_parts, weights)
        return bounds[self.part_index], bounds[self.part_index + 1]

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        yield from self._pieces(self._order(), done or 0)

    def _pieces(self, order: np.ndarray, done: int) -> Iterator[np.ndarray]:
        weights = self.weights
        start, stop = self._bounds(self.batch_size, weights)
        for k in range(done, len(self)):
            batch = order[k * self.batch_size : (k + 1) * self.batch_size]
            if len(batch) == self.batch_size:
                yield batch[start:stop]
            elif self.last == "pad":
                yield np.resize(np.roll(order, -k * self.batch_size), self.batch_size)[start:stop]
            else:
                yield batch[slice(*self._bounds(len(batch), weights))]

    def _order(self) -> np.ndarray:
        """The samples of this epoch, with what rolled over from those before it."""
        own = self._order_of(self.epoch)
        if not self._rolled:
            return own
        before = -(-self._rolled // self.n)  # epochs, several where a batch is larger than the data set
        rolled = [self._order_of(epoch) for epoch in range(self.epoch - before, self.epoch)]
        return np.concatenate([np.concatenate(rolled)[-self._rolled :], own])

    def _order_of(self, epoch: int) -> np.ndarray:
        return shuffled(self.n, self.seed, epoch) if self.shuffle else np.arange(self.n)

    @property
    def _rolled(self) -> int:
        """How many samples the epochs before this one have left over: all of them are one stream of whole batches."""
        return self.epoch * self.n % self.batch_size if self.last == "rollover" else 0

    def __len__(self) -> int:
        """The number of global batches of this epoch, the same on every part (``n // batch_size`` where the last is
        discarded: the ``epoch_size`` that others compute as N / b / n)."""
        if self.last in ("discard", "rollover"):
            return (self._rolled + self.n) // self.batch_size
        return -(-self.n // self.batch_size)


class VirtualShardSampler(Resumable):
    """The **virtual shards** of global batches that fall to this part, one after another.

    Every global batch is cut into ``num_shards`` pieces that do not depend on the number of parts; each part takes a
    run of them. A reproducible `Trainer` wants one `step` for each, and updates at the last one of a global batch.

    Args:
        n: number of samples in the data set.
        batch_size: samples of a global batch; at least ``num_shards``.
        num_shards: the trainer's ``virtual_shards``; at least ``num_parts``.
        num_parts: the number of ranks.
        part_index: the rank, 0 to ``num_parts - 1``.
        shuffle, seed, last: as `ShardedSampler`.

    Raises:
        ConfigError: a value outside of that.
    """

    decides = ("num_shards",)

    def __init__(
        self,
        n: int,
        batch_size: int,
        num_shards: int,
        num_parts: int = 1,
        part_index: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "keep",
    ) -> None:
        parts, index = part_of("sampler", num_parts, part_index)
        expected = f"at least one for each of {parts} ranks"
        self.num_shards = whole_number("sampler", "num_shards", num_shards, parts, expected=expected)
        whole_number(
            "sampler", "batch_size", batch_size, num_shards,
            expected=f"at least one sample for each of {num_shards} virtual shards",
            remedy="take a larger batch or fewer virtual shards",
        )  # fmt: skip
        ends = piece_bounds(num_shards, parts)
        self.numbers = range(ends[index], ends[index + 1])
        """The virtual shards of this part."""
        self.shards = [ShardedSampler(n, batch_size, num_shards, each, shuffle, seed, last) for each in self.numbers]
        """One sampler for each of them."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        order = self.shards[0]._order()  # that of all, which takes as much memory as a number a sample
        for pieces in zip(*(shard._pieces(order, done or 0) for shard in self.shards), strict=True):
            yield from pieces

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """See `Resumable.place`.

        Raises:
            ConfigError: the loop is in the middle of a global batch.
        """
        whole, rest = divmod(used, len(self.numbers))
        if rest:
            raise ConfigError(
                "state_dict", where="VirtualShardSampler", expected="a loop that has all shards of a global batch",
                got=f"{rest} of {len(self.numbers)}", remedy="call it after the step of the last of them",
            )  # fmt: skip
        return before + whole, ended

    def __len__(self) -> int:
        """The number of virtual shards of this part in an epoch."""
        return sum(len(shard) for shard in self.shards)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for shard in self.shards:
            shard.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.shards[0].state_dict() | super().state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.shards[0].check_state(state)
        super().check_state(state)


class SharedSampler(Resumable):
    """Batches that parts take as they come to them, so that a slower part does fewer.

    One global order, alike on all parts, is cut into batches; a part takes the batch of the next number that nobody
    has, until there is none left. A position is one in that order: batches of what is left of an epoch may have another
    size than those before.

    Args:
        n: number of samples in the data set.
        batch_size: samples of one batch, which one part takes.
        numbers: 0, 1, 2, ..., each given to one part alone; each iteration of it begins at 0 again, on all parts. A
            method ``given() -> int``, if it has one, says on all parts, when all call, how many all have together.
        shuffle, seed: as `ShardedSampler`.
        last: what becomes of a short last batch: "keep" or "discard".

    Raises:
        ConfigError: a value outside of that.
    """

    decides = ("n", "shuffle", "seed", "last")

    def __init__(
        self, n: int, batch_size: int, numbers: Iterable[int], shuffle: bool = True, seed: int = 0, last: str = "keep"
    ) -> None:
        self.n = whole_number("sampler", "n", n, 0)
        self.batch_size = whole_number("sampler", "batch_size", batch_size, 1)
        self.shuffle, self.seed = bool(shuffle), whole_number("sampler", "seed", seed, 0)
        self.last = one_of("sampler", "last", last, ("keep", "discard"))
        self.numbers = numbers
        self.taken = 0
        """How many batches of this epoch were taken, by all parts, when this part took its last one."""
        self._blank = 0
        """The first batches count as if they had so many samples more, where they had another size."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        order = shuffled(self.n, self.seed, self.epoch) if self.shuffle else np.arange(self.n)
        if done is None:
            self._blank = 0
        first = self.taken = done or 0
        for number in self.numbers:
            if first + number >= len(self):
                return
            self.taken = first + number + 1
            end = self.taken * self.batch_size - self._blank
            yield order[end - self.batch_size : end]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._blank = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        blank = {"blank": self._blank} if self._blank else {}
        return super().state_dict() | {"batch_size": self.batch_size} | blank

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state({"blank": 0, **state})

    def taken_over(self, state: Mapping[str, Any], done: int) -> int:
        """See `Resumable.taken_over`; the samples that were taken count, whatever the size of their batches."""
        taken = min(max(0, done * state["batch_size"] - state.get("blank", 0)), self.n)
        batches = -(-taken // self.batch_size)
        self._blank = batches * self.batch_size - taken
        return batches

    def close(self) -> None:
        """Let this iteration end early, for all parts, where ``numbers`` has a method ``close``; one part calls."""
        close = getattr(self.numbers, "close", None)
        if close is not None:
            close()

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """See `Resumable.place`; what any part has taken counts, also where it has not come to use it."""
        given = getattr(self.numbers, "given", None)
        done = self.taken if given is None else min(before + given(), len(self))
        return done, done == len(self)

    def __len__(self) -> int:
        """The number of batches an epoch, all parts together."""
        count = self.n + self._blank
        return count // self.batch_size if self.last == "discard" else -(-count // self.batch_size)
