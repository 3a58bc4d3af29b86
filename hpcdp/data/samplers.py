"""Samplers, which choose the samples that each rank reads, and their state.

Samplers are deterministic. The order depends only on the arguments and the epoch, and iterating twice without
``set_epoch`` gives the same order twice (except `BatchSampler` with ``last="rollover"``). All ranks therefore agree on
a shuffle without communication. A position in an epoch is one number, the global batches used, so a resumed run
continues exactly.
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
    """Order of samples that is determined by some of its arguments and the epoch."""

    decides: ClassVar[tuple[str, ...]] = ()
    """Attribute names of the arguments that determine the order."""
    optional: ClassVar[Mapping[str, Any]] = {}
    """Entries that a `state_dict` may lack, with their values."""
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and so the order, of the next iteration; every part must call it with the same number."""
        self.epoch = whole_number("sampler", "epoch", epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments that determine the order, and the epoch; the `DataLoader` holds the position in it."""
        return {name: getattr(self, name) for name in self.decides} | {"epoch": self.epoch}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a `state_dict` of another order; the error names the argument that differs."""
        state = {**self.optional, **state}
        for name, value in self.state_dict().items():
            if name not in state or (name in self.decides and state[name] != value):
                raise ConfigError(
                    "load_state_dict", where=f"{type(self).__name__} {name}", expected=value,
                    got=state.get(name, "nothing"), remedy="create the sampler with its original arguments",
                )  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the epoch of a `state_dict`.

        Raises:
            ConfigError: as `check_state`; nothing is changed.
        """
        require_state(type(self).__name__, state)
        self.check_state(state)
        self.set_epoch(state["epoch"])


class Resumable(Ordered, abc.ABC):
    """Batches of sample numbers whose iteration can be resumed; see `BatchIndices`."""

    @abc.abstractmethod
    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """Yield the batches of one iteration.

        Args:
            done: resume the last iteration after this many of its global batches; None starts a new one.
        """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.batches()

    def taken_over(self, state: Mapping[str, Any], done: int) -> int:
        """Return the global batches of its own that are done, given that ``done`` of those of a `state_dict` are."""
        return done

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """Return the position of a loop; every part must call it, and gets the same result.

        Args:
            before: global batches of the iteration that were done when the loop started or resumed.
            used: batches that the loop has used since.
            ended: whether the loop has ended.

        Returns:
            The number of global batches done, and whether the iteration has ended.
        """
        return before + used, ended


@dataclass
class Loop:
    """Position of one iteration."""

    before: int = 0
    """Global batches of its epoch that were done when it started or resumed."""
    used: int = 0
    """Batches that the loop has used since."""
    begun: bool = False
    ended: bool = False


class SamplerPosition:
    """Position of loops over epochs, and where the next one starts."""

    def __init__(self) -> None:
        self.epoch = 0
        self.loop = Loop()
        """The loop that was started or restored last."""
        self._goes_on: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop run over ``epoch``, from its start unless this epoch was restored."""
        if self.loop.begun or epoch != self.epoch:
            self.loop, self._goes_on = Loop(), None
        elif self.loop.before:
            self._goes_on = self.loop.before
        self.epoch = epoch

    def begin(self) -> int | None:
        """Start a new `loop`; return the global batches of its epoch already done, or None for a new epoch."""
        done, self._goes_on = self._goes_on, None
        self.loop = Loop(done or 0, begun=True)
        return done

    def state(self, done: int, ended: bool) -> dict[str, Any]:
        """Return the state for `restore`, after ``done`` global batches; ``ended`` if the loop has ended."""
        begun = self.loop.begun or ended or self._goes_on is not None
        return {"epoch": self.epoch, "done": done, "begun": begun, "ended": ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Have the next loop continue from a `state`; if that loop had ended, only if `set_epoch` names its epoch."""
        self.epoch = state["epoch"]
        self.loop = Loop(before=state["done"], ended=state["ended"])
        self._goes_on = state["done"] if state["begun"] and not state["ended"] else None


class Sampler(Protocol):
    """Sample numbers, in an order that may depend on the epoch."""

    def __iter__(self) -> Iterator[int]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""


class BatchIndices(Protocol):
    """Batches of sample numbers, int64 arrays of shape ``(count,)``, as a `DataLoader` iterates them."""

    def __iter__(self) -> Iterator[np.ndarray]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""


def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``n`` samples, int64, drawn from the seed and the epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


class SequentialSampler(Ordered):
    """Samples 0, 1, ..., n - 1, in the same order in every epoch.

    Args:
        n: number of samples.
    """

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
        last: treatment of a short last batch: "keep" yields it, "discard" drops it, "rollover" prepends its samples to
            the next iteration, even if a loop is left early.
        epoch_size: number of full batches an iteration, restarting the sampler when it is exhausted; an empty sampler
            gives none. If parts of a data set differ in size, use N / b / n on each of n parts. None: one pass over all
            samples.

    Raises:
        ConfigError: an argument is out of range, or ``epoch_size`` is combined with "rollover".
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
        self._rolled_over: list[int] = []
        self._began_with: list[int] = []
        """Samples left over when the last iteration began."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """Yield int64 arrays of sample numbers; see `Resumable.batches`."""
        if done is None:
            self._began_with = self._rolled_over
        numbers: Iterable[int] = self.sampler
        if self.epoch_size is not None:
            numbers = islice(cycle(self.sampler), self.epoch_size * self.batch_size)
        if self.last == "rollover":
            numbers = [*self._began_with, *self.sampler]
            self._rolled_over = [int(number) for number in numbers[len(numbers) - len(numbers) % self.batch_size :]]
        source = islice(numbers, (done or 0) * self.batch_size, None)
        while batch := list(islice(source, self.batch_size)):
            if len(batch) == self.batch_size or self.last == "keep":
                yield np.array(batch, np.int64)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        if self.epoch_size is not None:
            return self.epoch_size if len(self.sampler) else 0
        total = len(self._rolled_over) + len(self.sampler)
        return -(-total // self.batch_size) if self.last == "keep" else total // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, here and in the sampler."""
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return `Ordered.state_dict` with the sampler's state, if it has one, and the samples left over."""
        inner = self.sampler.state_dict() if isinstance(self.sampler, Ordered) else None
        return super().state_dict() | {"sampler": inner, "rest": self._rolled_over, "began_with": self._began_with}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` as `Ordered.check_state`, also for the sampler's state."""
        super().check_state(state)
        if isinstance(self.sampler, Ordered):
            self.sampler.check_state(state["sampler"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as `Ordered.load_state_dict`, with the samples left over."""
        super().load_state_dict(state)
        self._rolled_over, self._began_with = list(state["rest"]), list(state["began_with"])


class ShardedSampler(Resumable):
    """One part's pieces of **global** batches.

    One global order is cut into batches, and each batch into ``num_parts`` pieces. In step k the parts together see
    exactly the samples that a single part would see. All parts have the same number of steps, so none waits at the end
    of an epoch.

    Args:
        n: number of samples in the data set.
        batch_size: samples of a **global** batch, over all parts; at least ``num_parts``.
        num_parts: usually the number of ranks.
        part_index: usually the rank, 0 to ``num_parts - 1``.
        shuffle: whether to draw a new order from ``seed`` and the epoch; otherwise 0, 1, ..., n - 1.
        seed: an integer >= 0, the same on all parts.
        last: treatment of a short last global batch. "keep" splits it like the others (pieces may be empty). "discard"
            drops it. "pad" fills it up with the first samples of the epoch's order. "rollover" prepends its samples to
            the next epoch, which may then have one batch more. The samples that roll over depend only on the epoch's
            number, whichever epochs were iterated before.
        weights: one positive number a part; ``[3, 1]`` gives 192 and 64 of a global batch of 256. Without weights, the
            pieces of a batch differ by at most one sample.

    Raises:
        ConfigError: an argument is out of range.
    """

    decides = ("n", "batch_size", "shuffle", "seed", "last")
    optional: ClassVar = {"weights": None}

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
            remedy="use fewer ranks or a larger batch",
        )  # fmt: skip
        self.shuffle, self.seed = bool(shuffle), whole_number("sampler", "seed", seed, 0)
        self.last = one_of("sampler", "last", last, ("keep", "discard", "pad", "rollover"))
        self.weights: tuple[float, ...] | None = None
        self.set_weights(weights)

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Set the weights from the next iteration on; all parts must pass the same ones.

        The samples of a global batch do not depend on the weights.

        Args:
            weights: one positive number a part, or None for equal pieces.

        Raises:
            ConfigError: not one positive number a part; nothing is changed.
        """
        piece_bounds(self.batch_size, self.num_parts, weights)
        self.weights = None if weights is None else tuple(float(weight) for weight in weights)

    def state_dict(self) -> dict[str, Any]:
        """Return `Ordered.state_dict`, with the weights if there are any."""
        return super().state_dict() | ({} if self.weights is None else {"weights": list(self.weights)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as `Ordered.load_state_dict`, with the saved weights if the number of parts is the same."""
        super().load_state_dict(state)
        if len(state.get("weights") or ()) == self.num_parts:
            self.set_weights(state["weights"])

    def _bounds(self, count: int, weights: Sequence[float] | None) -> tuple[int, int]:
        bounds = piece_bounds(count, self.num_parts, weights)
        return bounds[self.part_index], bounds[self.part_index + 1]

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """Yield this part's int64 sample numbers; see `Resumable.batches`."""
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
        """Return the samples of this epoch, after those rolled over from earlier epochs."""
        order = self._order_of(self.epoch)
        if not self._rolled:
            return order
        before = -(-self._rolled // self.n)  # epochs; several if a batch is larger than the data set
        rolled = [self._order_of(epoch) for epoch in range(self.epoch - before, self.epoch)]
        return np.concatenate([np.concatenate(rolled)[-self._rolled :], order])

    def _order_of(self, epoch: int) -> np.ndarray:
        return shuffled(self.n, self.seed, epoch) if self.shuffle else np.arange(self.n)

    @property
    def _rolled(self) -> int:
        """Samples left over from earlier epochs, which together form one stream of full batches."""
        return self.epoch * self.n % self.batch_size if self.last == "rollover" else 0

    def __len__(self) -> int:
        """Return the number of global batches of this epoch, the same on every part.

        With "discard" it is ``n // batch_size``: the ``epoch_size`` that other libraries compute as N / b / n.
        """
        if self.last in ("discard", "rollover"):
            return (self._rolled + self.n) // self.batch_size
        return -(-self.n // self.batch_size)


class VirtualShardSampler(Resumable):
    """**Virtual shards** of global batches that this part computes, one after another.

    Every global batch is cut into ``num_shards`` pieces that do not depend on the number of parts. Each part takes a
    consecutive range of them. A reproducible `Trainer` expects one `step` for each, and updates at the last one of a
    global batch.

    Args:
        n: number of samples in the data set.
        batch_size: samples of a global batch; at least ``num_shards``.
        num_shards: the trainer's ``virtual_shards``; at least ``num_parts``.
        num_parts: the number of ranks.
        part_index: the rank, 0 to ``num_parts - 1``.
        shuffle: as in `ShardedSampler`.
        seed: as in `ShardedSampler`.
        last: as in `ShardedSampler`.

    Raises:
        ConfigError: an argument is out of range.
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
            remedy="use a larger batch or fewer virtual shards",
        )  # fmt: skip
        ends = piece_bounds(num_shards, parts)
        self.numbers = range(ends[index], ends[index + 1])
        """The virtual shards of this part."""
        self.shards = [ShardedSampler(n, batch_size, num_shards, shard, shuffle, seed, last) for shard in self.numbers]
        """One sampler for each virtual shard of this part."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """Yield the int64 sample numbers of one virtual shard after another; see `Resumable.batches`."""
        order = self.shards[0]._order()  # shared by all shards: it takes 8 bytes a sample
        for pieces in zip(*(shard._pieces(order, done or 0) for shard in self.shards), strict=True):
            yield from pieces

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """Return the position of a loop; see `Resumable.place`.

        Raises:
            ConfigError: the loop is in the middle of a global batch.
        """
        batches, shards = divmod(used, len(self.numbers))
        if shards:
            raise ConfigError(
                "state_dict", where="VirtualShardSampler", expected="a loop after the last shard of a global batch",
                got=f"{shards} of {len(self.numbers)} shards", remedy="call it after the step of the last shard",
            )  # fmt: skip
        return before + batches, ended

    def __len__(self) -> int:
        """Return the number of virtual shards of this part in an epoch."""
        return sum(len(shard) for shard in self.shards)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for all shards."""
        super().set_epoch(epoch)
        for shard in self.shards:
            shard.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return `Ordered.state_dict` with ``num_shards``."""
        return self.shards[0].state_dict() | super().state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` as `Ordered.check_state`."""
        self.shards[0].check_state(state)
        super().check_state(state)


class SharedSampler(Resumable):
    """Batches that parts claim dynamically, so that a slower part processes fewer.

    One global order, the same on all parts, is cut into batches. A part claims the batch of the next unclaimed number
    until none is left. A position counts samples of that order, so a resumed epoch may use another batch size.

    Args:
        n: number of samples in the data set.
        batch_size: samples of one batch, for one part.
        numbers: iterable of 0, 1, 2, ..., each number given to one part only; each iteration starts at 0 again on all
            parts. An optional method ``given() -> int``, called by all parts, returns the numbers given to all of them
            together.
        shuffle: as in `ShardedSampler`.
        seed: as in `ShardedSampler`.
        last: treatment of a short last batch: "keep" or "discard".

    Raises:
        ConfigError: an argument is out of range.
    """

    decides = ("n", "shuffle", "seed", "last")
    optional: ClassVar = {"blank": 0}

    def __init__(
        self, n: int, batch_size: int, numbers: Iterable[int], shuffle: bool = True, seed: int = 0, last: str = "keep"
    ) -> None:
        self.n = whole_number("sampler", "n", n, 0)
        self.batch_size = whole_number("sampler", "batch_size", batch_size, 1)
        self.shuffle, self.seed = bool(shuffle), whole_number("sampler", "seed", seed, 0)
        self.last = one_of("sampler", "last", last, ("keep", "discard"))
        self.numbers = numbers
        self.taken = 0
        """Batches of this epoch claimed by all parts when this part claimed its last one."""
        self._blank = 0
        """Samples by which the batches before a resumption fall short of whole batches of the present size."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        """Yield int64 sample numbers of the batches that this part claims; see `Resumable.batches`."""
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
        """Set the epoch of the next iteration."""
        if epoch != self.epoch:
            self._blank = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return `Ordered.state_dict` with the batch size."""
        blank = {"blank": self._blank} if self._blank else {}
        return super().state_dict() | {"batch_size": self.batch_size} | blank

    def taken_over(self, state: Mapping[str, Any], done: int) -> int:
        """Return the batches that are done; see `Resumable.taken_over`. Samples count, whatever their batch size."""
        num_samples = min(max(0, done * state["batch_size"] - state.get("blank", 0)), self.n)
        batches = -(-num_samples // self.batch_size)
        self._blank = batches * self.batch_size - num_samples
        return batches

    def close(self) -> None:
        """End this iteration early for all parts, by ``numbers.close()`` if there is one; only one part may call."""
        close = getattr(self.numbers, "close", None)
        if close is not None:
            close()

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """Return the position of a loop; see `Resumable.place`. Batches claimed by any part count, even if unused."""
        count_given = getattr(self.numbers, "given", None)
        done = self.taken if count_given is None else min(before + count_given(), len(self))
        return done, done == len(self)

    def __len__(self) -> int:
        """Return the number of batches an epoch, over all parts."""
        count = self.n + self._blank
        return count // self.batch_size if self.last == "discard" else -(-count // self.batch_size)
