"""Update strategies: every rank updates all parameters, or the owner of a shard its part.

Parameters of 16 bits: the float32 copies that are updated in their place, and rounded to them after each update.

An update of less than half a unit in the last place of a weight would be lost in 16 bits (Micikevicius et al., "Mixed
precision training", 2018, section 3.1). The copies are part of the optimizer's state: of each element whoever updates
it has one, and checkpoints have them all.

Norms of summed gradients: of a whole model, and of its layers for rules that need them (`hpcdp.optim.LARS`).

A layer lies in the shards of several ranks. Where several ranks have parts of one model together, not copies of it,
what is cut into parts counts in each of them, and what is whole counts once.

Who updates: every rank all parameters, or the owner of a shard its part of parameters that a node holds once.

Both take the optimizer to the flat buckets, element by element, so they give the same bits.

Where parameters lie when nobody says: once per node, updated by the owners of shards, or on every rank.

[Note: lines that others have read] What all ranks of a node share takes the least memory and the fewest bytes, but a
core that writes a cache line of which another one holds a copy waits until that copy is gone. In every step owners
write parameters that all ranks have read, and ranks write gradients that owners have read. On an EPYC with Zen 4 that
goes at 7 to 10 GB/s between cores that share a last cache and at 2.3 between cores that do not. Lines that nobody else
holds, and those that another core has *written* to, take 40 and 17, as those do of an allreduce, whose owners write
sums back where they have read. So parameters of which all copies fit in the caches are each rank's own; longer ones,
which leave the caches between two uses anyhow, lie once per node.

Steps of SGD with momentum on 2 ranks (parameters read, gradients written, summed, updated) in us, with parameters once
per node and on every rank: near 175 and 150 at 1 MB, 620 and 630 at 4, 1425 and 1860 at 8, 3400 and 4600 at 16; far 700
and 175, 2700 and 650, 4600 and 1650, 6500 to 7300 and 3800; at 64 MB 15 and 22 ms near, 16 and 25 far.

Parameters that a program has changed by itself: within `Trainer.changing_parameters`, or where nobody sees it.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import kernels
from ..collectives import allreduce
from ..comm import Communicator
from ..comm.consistency import on_every_rank
from ..comm.tasks import ProgressEngine
from ..comm.watchdog import nobody
from ..core import state as core_state
from ..core.arrays import Array, array_namespace, from_host, is_half, is_host, to_host, words
from ..core.state import cut_of
from ..errors import ConfigError
from ..kernels.buffers import empty
from ..optim import Optimizer, Schedule
from ..optim.optimizer import segment_squares, squares
from .buckets import Bucket, Parameter
from .reducer import Reducer

being_changed: set[int] = set()
"""The ids of parameters that are copies now, within `changing`."""
Places = Sequence[tuple[Parameter, Array]]
"""Parameters, and where their values, or their gradients, lie."""

_OF_ONE_BEFORE = "one of an array from before the block, in which copies count"


def places_of(params: Sequence[Parameter]) -> Places:
    """Waits for updates under way."""
    return [(param, param.data) for param in params]


def of_rank_0(values: Array, comm: Communicator) -> np.ndarray:
    """A new array in host memory: the values that rank 0 has; every rank must call."""
    host = np.array(to_host(values), order="C")
    comm.native_broadcast(host, 0)
    return host


def moved(places: Places, grads: Places = ()) -> list[str]:
    """What of parameters has another array than its place, by name: what is updated, or summed, there is not theirs."""
    values = [param.name for param, place in places if hasattr(param, "held") and param.held() is not place]
    return values + [f"{param.name}.grad" for param, place in grads if param.grad is not place]


def moved_anywhere(comm: Communicator | None, names: Sequence[str], operation: str = "step") -> ConfigError | None:
    """The same error on all ranks, where on some ``names`` are `moved`; every rank must call.

    Args:
        comm: the ranks; None: this one alone.
        operation: what the error calls itself.
    """
    by_rank = [list(names[:1])] if comm is None else comm.allgather_json(list(names[:1]))
    rank = next((rank for rank, found in enumerate(by_rank) if found), None)
    if rank is None:
        return None
    name = by_rank[rank][0]
    where = name if comm is None else f"{name}, rank {rank}"
    if name.endswith(".grad"):
        return ConfigError(
            operation, where=where, expected="the array in which the Trainer sums it", got="another one, or none",
            remedy="leave it where it is: backward overwrites it, grad[...] = 0 makes it zero",
        )  # fmt: skip
    return ConfigError(
        operation, where=where, expected="the array in which the Trainer updates it",
        got="another one, which would not be trained",
        remedy="set arrays, and dtypes, before the Trainer is made, values in changing_parameters() of the last one",
    )  # fmt: skip


@contextmanager
def changing(
    places: Places, comm: Communicator | None, writes: bool, meet: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Within it parameters are copies, and behind it their places have what rank 0 has made of them; every rank must
    enter and leave it.

    Args:
        comm: the ranks; None: there are no others.
        writes: whether this rank writes to the places.
        meet: waits for those that share the places.

    Raises:
        ConfigError: a parameter has another shape or dtype now, or an array from before, and then all places are as
            before; or somebody has changed a place by an array that is older than the copies. On every rank.
    """
    meet()
    marks = _marks(places)
    for param, place in places:
        param.data = place.copy()
    meet()
    being_changed.update(id(param) for param, _ in places)
    found: list[Array] = []
    older: list[str] = []
    try:
        with core_state.refusing([place for _, place in places], _OF_ONE_BEFORE):
            try:
                yield
            finally:
                found += [param.data for param, _ in places]
                older += [param.name for param, place in places if _is_older(param.data, place)]
    finally:
        being_changed.difference_update(id(param) for param, _ in places)
        for param, place in places:
            param.data = place
        stale = _marks(places) != marks  # now: when all have come, some write there
        _on_every_rank(comm, lambda: _check_alike(places, found, older))
        agreed = [np.array(to_host(each)) if comm is None else of_rank_0(each, comm) for each in found]
        if writes:
            for (_, place), values in zip(places, agreed, strict=True):
                place[...] = from_host(values, place)
        _on_every_rank(comm, lambda: _refuse_older(stale))
        meet()


def _on_every_rank(comm: Communicator | None, check: Callable[[], None]) -> None:
    if comm is None:
        check()
    else:
        on_every_rank(comm, check)


def _marks(places: Places) -> list[int]:
    """By which a change of each is seen; on a GPU the sum of its bits."""
    found = []
    for _, place in places:
        words = place.reshape(-1).view(np.dtype(f"u{place.dtype.itemsize}"))
        found.append(zlib.crc32(words.data) if is_host(place) else int(words.sum(dtype=np.uint64)))
    return found


def _is_older(values: Array, place: Array) -> bool:
    return values is place or core_state.change_of(values) is not None


def _check_alike(places: Places, found: Sequence[Array], older: Sequence[str]) -> None:
    for (param, place), values in zip(places, found, strict=True):
        if param.name in older:
            raise ConfigError(
                "changing_parameters", where=param.name, expected="an array of its own",
                got="one from before the block, in whose place values are written at its end",
                remedy="put a copy aside: param.data.copy()",
            )  # fmt: skip
        if not hasattr(values, "dtype"):
            got = type(values).__name__
        elif values.shape != place.shape or values.dtype != place.dtype:
            got = f"{tuple(values.shape)} {values.dtype}"
        else:
            continue
        expected = f"{tuple(place.shape)} {place.dtype}"
        raise ConfigError("changing_parameters", where=param.name, expected=expected, got=got)


def _refuse_older(stale: bool) -> None:
    if stale:
        raise ConfigError(
            "changing_parameters", expected="changes of what param.data is within it",
            got=f"{_OF_ONE_BEFORE}; such changes are lost",
        )  # fmt: skip


MASTER = "master"
"""Their name in the state."""
Rule = Callable[[Array, Array, dict[str, Array]], None]
"""An optimizer's update of a flat parameter by its gradient and state, with all that it depends on besides."""


def init_state(optimizer: Optimizer, param: Array) -> dict[str, Array]:
    """`Optimizer.init_state` for a flat array; of 16 bits that of its float32 copy, which is in it, too."""
    if not is_half(param):
        return optimizer.init_state(param)
    master = widened(param)
    return {MASTER: master, **optimizer.init_state(master)}


def update(rule: Rule, param: Array, grad: Array, state: dict[str, Array]) -> None:
    """``rule`` with the state of `init_state`; changes ``param`` and the arrays of ``state`` in place."""
    if MASTER not in state:
        rule(param, grad, state)
        return
    follow(param, state[MASTER])
    rule(state[MASTER], widened(grad), state)
    round_to(param, state[MASTER])


def follow(param: Array, master: Array) -> None:
    """Let a copy be what a program has set its parameter to, flat; where that is the copy, rounded, it stays exact."""
    _casts(param).follow(master, words(param))


def widened(x: Array) -> Array:
    """A copy of 16-bit floats, flat and contiguous, in float32."""
    xp = array_namespace(x)
    wide = empty(x.shape, xp.float32, xp)
    getattr(_casts(x), f"from_{x.dtype.name}")(x.view(xp.uint16), wide)
    return wide


def round_to(param: Array, master: Array) -> None:
    """Write float32 values to a flat array of 16 bits, to nearest, ties to even; what is too large becomes infinite."""
    getattr(_casts(param), f"to_{param.dtype.name}")(master, param.view(array_namespace(param).uint16))


def _casts(x: Array) -> Any:
    return kernels.kernels_for("elementwise", x)


Squares = tuple[float, float]
"""Of the norms of a layer's weights and of its summed gradient."""


def of_shards(reducer: Reducer) -> float:
    """This rank's part of the summed gradients' squared norm; the parts of all ranks add up to it.

    The shards must be reduced. Accumulated in float64; it is not finite where some gradient is not.
    """
    if not reducer.is_counted:
        return 0.0
    return sum(squares([run for bucket in reducer.buckets for run in _counted(reducer, bucket, *bucket.shard)]))


def squares_of_model(reducer: Reducer) -> float:
    """The squared norm of the summed gradients, the same on all ranks, which must call; the shards must be reduced.

    It is that of a whole model, also where this rank has a part of one (`World.model_comm`, `World.part_comm`). It is
    not finite where some gradient is not.
    """
    if reducer.is_deterministic and reducer.holds_sums:  # by shards its bits would depend on their number
        runs = [run for bucket in reducer.buckets for run in _counted(reducer, bucket, 0, bucket.mine.size)]
        total = sum(squares(runs))
    else:
        total = reducer.tally(of_shards(reducer))[0]
    for comm in (reducer.world.part_comm, reducer.world.model_comm):
        total = sum(_told_by(comm, reducer, total))
    return float(total)


def clipped_scale_on_gpu(reducer: Reducer, scale: float | Array, most: float) -> Array:
    """`reference.clipped_scale` of all sums, which the rank has on its GPU: float64, shape ``(1,)``, there.

    Nothing waits for it.
    """
    sums = [words(bucket.mine) for bucket in reducer.buckets]
    kernel = kernels.kernels_for("reduce", sums[0])
    return kernel.clipped_scale(kernel.all_squares(sums), scale, most)


class Layers:
    """The norms of the parameters of two axes or more, which are layers for a rule that needs norms.

    Args:
        reducer: of their gradients.
        flats: the parameters of each bucket.
    """

    def __init__(self, reducer: Reducer, flats: Sequence[Array]) -> None:
        self._reducer, self._flats = reducer, flats
        self._slots = [slot for slot in reducer.layout.slots if len(slot.shape) > 1]
        self._cut = [number for number, slot in enumerate(self._slots) if cut_of(reducer.params[slot.name]) is not None]
        self._segments: dict[tuple[tuple[int, int], ...], list[_Segments]] = {}

    def squares(self, span: Callable[[Bucket], tuple[int, int]]) -> dict[str, Squares | Array]:
        """By the name of each layer, alike on all ranks, which must call once gradients are summed.

        Where every rank holds all sums each adds up for itself, in an order that does not depend on the number of
        ranks; on a GPU they stay there, shape ``(2,)``, and nothing waits, if no other rank has more of a layer.

        Args:
            span: the columns of a bucket whose sums this rank has, where it has not all.
        """
        reducer, holds_sums = self._reducer, self._reducer.holds_sums
        columns = [(0, bucket.mine.shape[0]) if holds_sums else span(bucket) for bucket in reducer.buckets]
        if not (holds_sums or reducer.is_counted):
            columns = [(0, 0)] * len(columns)
        segments = self._in(tuple(columns))
        found = [
            segment_squares(self._flats[each.bucket], reducer.buckets[each.bucket].mine, each.bounds)[::2]
            for each in segments
        ]
        layers = [number for each in segments for number in each.layers]
        if holds_sums and not self._cut and not all(map(is_host, found)):
            rows = [row for each in found for row in each]
            return {self._slots[number].name: row for number, row in zip(layers, rows, strict=True)}
        squares = np.zeros((len(self._slots), 2))
        if found:
            squares[layers] = to_host(array_namespace(*found).concatenate(found))
        if holds_sums:
            reducer.barrier()  # before others update what this rank has read
        else:
            allreduce(squares.reshape(-1), "sum", reducer.world)
        if self._cut:
            whole = _told_by(reducer.world.part_comm, reducer, squares[self._cut].tolist())
            squares[self._cut] = np.sum(whole, axis=0)
        return {slot.name: (row[0], row[1]) for row, slot in zip(squares.tolist(), self._slots, strict=True)}

    def _in(self, columns: tuple[tuple[int, int], ...]) -> list[_Segments]:
        """What lies in these columns of the buckets; kept, for a GPU has it in its memory."""
        if columns not in self._segments:
            every = (self._of_bucket(number, first, last) for number, (first, last) in enumerate(columns))
            self._segments[columns] = [each for each in every if each is not None]
        return self._segments[columns]

    def _of_bucket(self, bucket: int, first: int, last: int) -> _Segments | None:
        slots = [(number, slot) for number, slot in enumerate(self._slots) if slot.bucket == bucket]
        layers, bounds = [], []
        for number, slot in sorted(slots, key=lambda each: each[1].offset):
            begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
            if begin < end:
                layers.append(number)
                bounds += [begin, end]
        return _Segments(bucket, layers, from_host(np.array(bounds), self._flats[bucket])) if layers else None


@dataclass
class _Segments:
    """Layers of a bucket: every other one of the segments within `bounds`, between which other things lie."""

    bucket: int
    layers: list[int]
    bounds: Array


def _counted(reducer: Reducer, bucket: Bucket, first: int, last: int) -> Iterator[Array]:
    """What counts in sums over a model among these columns: all of it on the first part, elsewhere what is cut."""
    part_comm = reducer.world.part_comm
    if part_comm is None or part_comm.rank == 0:
        yield bucket.mine[first:last]
        return
    for slot in bucket.slots:
        begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
        if begin < end and cut_of(reducer.params[slot.name]) is not None:
            yield bucket.mine[begin:end]


def _told_by(comm: Communicator | None, reducer: Reducer, value: Any) -> list[Any]:
    """Every rank's ``value``, by rank, where other ranks have more of the model; all must call."""
    if comm is None:
        return [value]
    watchdog = ProgressEngine.of(reducer.world).watchdog
    with watchdog.watching("norms of a model that several ranks have", behind=nobody):
        return comm.allgather_json(value)


class UpdateRange(NamedTuple):
    """Columns of a bucket that are updated by one rule, in the same step of theirs."""

    first: int
    last: int
    """One after the last."""
    rule: Optimizer
    passed_over: int
    """In how many steps they were left out."""
    layer: str = ""
    """The parameter whose norms the rule needs; none where it goes by elements."""

    def joins(self, following: UpdateRange) -> bool:
        alike = self.rule is following.rule and self.passed_over == following.passed_over
        alike = alike and self.layer == following.layer
        return alike and self.last == following.first

    def rule_at(self, step: int) -> tuple[Optimizer, int]:
        """See `rule_at`."""
        return rule_at(self.rule, step, self.passed_over)


def rule_at(rule: Optimizer, step: int, passed_over: int) -> tuple[Optimizer, int]:
    """Return the rule of the trainer's update number ``step``, and which update that is of what was ``passed_over``.

    A schedule of learning rates goes by the trainer's updates, and bias corrections go by those of the parameter.
    """
    if not passed_over:
        return rule, step
    if isinstance(rule.lr, Schedule):
        rate = rule.learning_rate(step)
        rule = copy.copy(rule)
        rule.lr = rate
    return rule, step - passed_over


class UpdateStrategy(Protocol):
    """Who updates the parameters, and where those and the optimizer's state live."""

    holds_all: bool
    """Whether every rank updates everything, and so holds the state of all parameters; alike on all ranks."""

    @property
    def states(self) -> list[dict[str, Array]]:
        """For every bucket the optimizer's state of the elements that this rank updates, flat, by name."""
        ...

    @property
    def nbytes_state(self) -> int:
        """Bytes of optimizer state on this rank."""
        ...

    @property
    def nbytes_parameters(self) -> int:
        """This rank's share of the bytes of the parameters: they lie on every rank, or once per node."""
        ...

    def span(self, bucket: Bucket) -> tuple[int, int]:
        """Which columns of a bucket this rank updates: first, and one after the last."""
        ...

    def reduce(self) -> None:
        """Sum the gradients that this rank will update over all ranks; every rank must call, outside of backward."""
        ...

    def take_parameters(self) -> None:
        """Let the float32 copies of parameters of 16 bits be what those hold now; every rank must call."""
        ...

    def changing(self) -> AbstractContextManager[None]:
        """Within it parameters are each rank's own copies, to be changed by all ranks alike; every rank must call.

        Within itself it does nothing.
        """
        ...

    def update(self, step: int, scale: float | Array) -> None:
        """Update from gradients that are summed already, over this rank's `span` at least; every rank must call.

        The scale may be an array as `Optimizer.update` takes it.
        """
        ...

    def leave_out(self, names: Set[str]) -> None:
        """In the next step update no parameter of these; alike on all ranks."""
        ...

    def pass_over(self) -> None:
        """The last step does not count for what was left out in it, or has no rule yet."""
        ...

    @property
    def passed_over(self) -> dict[str, int]:
        """In how many steps a parameter was left out, which do not count for it, by name."""
        ...

    def take_passed_over(self, counts: Mapping[str, int]) -> None:
        """Go on from other counts; alike on all ranks."""
        ...

    @property
    def pieces(self) -> list[list[UpdateRange]]:
        """For every bucket the columns that this rank updates alike."""
        ...

    def update_piece(self, bucket: Bucket, piece: UpdateRange, rule: Rule) -> None:
        """Update these columns by ``rule``, from gradients that are summed."""
        ...

    def reduce_and_update(self, step: int, scale: float) -> None:
        """Both, with fewer passes over memory or beside the next forward where that is possible; every rank must call.

        Where updates run beside the next forward, whoever reads ``data`` of a parameter waits for its own.
        """
        ...


class _Flat:
    """Parameters laid out as their buckets, and what both owners do alike."""

    holds_all = False

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, rules: Mapping[str, Optimizer | None] | None = None
    ) -> None:
        """Takes the parameters over. ``rules``: by name those with settings of their own, or None: not to be updated;
        all must keep the same state."""
        self.reducer = reducer
        self.optimizer = optimizer
        self._rules = {} if rules is None else rules
        self._left_out: Set[str] = frozenset()
        self.passed_over: dict[str, int] = {}
        """In how many steps a parameter was left out, which do not count for it, by name."""
        self.is_changing = False
        """Whether a program is within `changing`."""
        self.flats: list[Array] = []
        self._states: list[dict[str, Array]] = []
        for bucket in reducer.buckets:
            self.flats.append(self._home(bucket))
        for slot in reducer.layout.slots:
            param = reducer.params[slot.name]
            place = self.flats[slot.bucket][slot.offset : slot.offset + slot.count].reshape(slot.shape)
            self._move(param, place)
        reducer.barrier()
        for bucket, flat in zip(reducer.buckets, self.flats, strict=True):
            first, last = self.span(bucket)
            self._states.append(init_state(optimizer, flat[first:last]))
        self._divide_all()
        self._layers = Layers(reducer, self.flats)

    def span(self, bucket: Bucket) -> tuple[int, int]:
        return 0, bucket.mine.shape[0]

    def _home(self, bucket: Bucket) -> Array:
        return array_namespace(bucket.rows).zeros((bucket.mine.shape[0],), dtype=bucket.mine.dtype)

    def _move(self, param: Parameter, place: Array) -> None:
        place[...] = param.data
        param.data = place

    @property
    def states(self) -> list[dict[str, Array]]:
        self.reducer.settle()
        return self._states

    @contextmanager
    def changing(self) -> Iterator[None]:
        if self.is_changing:
            yield
            return
        places = places_of([*self.reducer.params.values()])
        self.is_changing = True
        try:
            with changing(places, self.reducer.world.comm, self._writes_parameters, self.reducer.barrier):
                yield
        finally:
            self.is_changing = False

    @property
    def _writes_parameters(self) -> bool:
        """Whether this rank may write to all of them, as no other then does."""
        return True

    def take_parameters(self) -> None:
        for bucket, state in zip(self.reducer.buckets, self.states, strict=True):
            if MASTER in state:
                own = self.flats[bucket.number][slice(*self.span(bucket))]
                follow(own, state[MASTER])

    @property
    def nbytes_state(self) -> int:
        return sum(array.nbytes for state in self._states for array in state.values())

    @property
    def nbytes_parameters(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def _divide(self, bucket: Bucket) -> list[UpdateRange]:
        """The columns of this rank's span that are updated alike."""
        first, last = self.span(bucket)
        pieces: list[UpdateRange] = []
        slots = sorted((slot for slot in bucket.slots if slot.count), key=lambda slot: slot.offset)
        ends = [*(slot.offset for slot in slots[1:]), bucket.mine.shape[0]]
        for slot, next_offset in zip(slots, ends, strict=False):
            rule = None if slot.name in self._left_out else self._rules.get(slot.name, self.optimizer)
            begin, end = max(first, slot.offset), min(last, next_offset)
            if rule is None or end <= begin:
                continue
            layer = slot.name if rule.by_layer and len(slot.shape) > 1 else ""
            piece = UpdateRange(begin, end, rule, self.passed_over.get(slot.name, 0), layer)
            if pieces and pieces[-1].joins(piece):
                piece = piece._replace(first=pieces.pop().first)
            pieces.append(piece)
        return pieces

    def set_rules(self, rules: Mapping[str, Optimizer | None]) -> None:
        """From now on ``rules``, as at construction; alike on all ranks."""
        self._rules = rules
        self._divide_all()

    def leave_out(self, names: Set[str]) -> None:
        if names != self._left_out:
            self._left_out = names
            self._divide_all()

    def pass_over(self) -> None:
        if not (self._left_out or self._rules):
            return
        for name in self._left_out | {name for name, rule in self._rules.items() if rule is None}:
            self.passed_over[name] = self.passed_over.get(name, 0) + 1

    def take_passed_over(self, counts: Mapping[str, int]) -> None:
        self.passed_over = dict(counts)
        self._divide_all()

    def _divide_all(self) -> None:
        self.pieces = [self._divide(bucket) for bucket in self.reducer.buckets]
        self._views: dict[tuple[int, int, int], tuple[Array, Array, dict[str, Array]]] = {}

    def _views_of(self, bucket: Bucket, piece: UpdateRange) -> tuple[Array, Array, dict[str, Array]]:
        """Its parameters, gradients and state; kept, since CuPy takes as long for three views as for a launch."""
        key = bucket.number, piece.first, piece.last
        found = self._views.get(key)
        if found is None:
            columns, offset = slice(piece.first, piece.last), self.span(bucket)[0]
            own = slice(piece.first - offset, piece.last - offset)
            state = {name: array[own] for name, array in self._states[bucket.number].items()}
            found = self._views[key] = self.flats[bucket.number][columns], bucket.mine[columns], state
        return found

    def _update_own(self, bucket: Bucket, pieces: Sequence[UpdateRange], step: int, scale: float | Array) -> None:
        for each in pieces:
            rule, own_step = each.rule_at(step) if each.passed_over else (each.rule, step)
            self.update_piece(bucket, each, partial(rule.update, step=own_step, scale=scale))

    def update_piece(self, bucket: Bucket, piece: UpdateRange, rule: Rule) -> None:
        flat, gradient, state = self._views_of(bucket, piece)
        update(rule, flat, gradient, dict(state))  # a copy, which a rule of the user's may change

    def _update_all(self, step: int, scale: float | Array) -> None:
        if not self.optimizer.by_layer:
            for bucket in self.reducer.buckets:
                self._update_own(bucket, self.pieces[bucket.number], step, scale)
            return
        found = self._layers.squares(self.span)
        for bucket in self.reducer.buckets:
            for piece in self.pieces[bucket.number]:
                rule, own_step = piece.rule_at(step)
                rule, scale_of = rule.of_layer(own_step, scale, found.get(piece.layer))
                self._update_own(bucket, [piece._replace(rule=rule)], step, scale_of)

    def _update_later(self, step: int, scale: float) -> None:
        """Update every bucket as soon as it is reduced, with the rules' settings of this moment."""
        for bucket in reversed(self.reducer.buckets):
            pieces = [each._replace(rule=copy.copy(each.rule)) for each in self.pieces[bucket.number]]
            self.reducer.update_later(bucket, partial(self._update_own, bucket, pieces, step, scale))


class Replicated(_Flat):
    """Each rank holds and updates all parameters: the reference, and the way where memory is not shared."""

    holds_all = True

    def reduce(self) -> None:
        self.reducer.reduce_everywhere()

    def reduce_and_update(self, step: int, scale: float) -> None:
        if self.reducer.updates_later and self.reducer.memory.size == 1 and not self.optimizer.by_layer:
            self._update_later(step, scale)
        else:
            self.reduce()
            self.update(step, scale)

    def update(self, step: int, scale: float | Array) -> None:
        self._update_all(step, scale)


class ShardedUpdate(_Flat):
    """Parameters live once per node; each rank updates its shard of every bucket, with 1/n of the optimizer's state.

    There are as many shards as the smallest node has ranks; further ranks of larger nodes own none.

    Nothing is gathered inside the node: when the owners are done, every rank sees the new parameters (Rajbhandari et
    al., "ZeRO", 2020, stage 1, with the allgather replaced by shared memory). On GPUs each rank has parameters of its
    own, and they are gathered.
    """

    def _home(self, bucket: Bucket) -> Array:
        memory = self.reducer.memory
        if memory.size == 1:
            return super()._home(bucket)
        flat = memory.alloc((bucket.mine.shape[0],), bucket.mine.dtype)
        core_state.hold_together(flat, memory.size)
        return flat

    def _move(self, param: Parameter, place: Array) -> None:
        if self._writes_parameters:
            place[...] = param.data
        param.data = place

    @property
    def _writes_parameters(self) -> bool:
        return self.reducer.memory.rank == 0

    @property
    def nbytes_parameters(self) -> int:
        return super().nbytes_parameters // self.reducer.memory.size

    def span(self, bucket: Bucket) -> tuple[int, int]:
        return bucket.shard

    def reduce(self) -> None:
        if self.optimizer.by_layer and self.reducer.is_deterministic:
            self.reducer.reduce_everywhere()  # norms of parts would depend on what the parts are
        else:
            self.reducer.reduce_shards()

    def reduce_and_update(self, step: int, scale: float) -> None:
        if self.optimizer.by_layer:
            self.reduce()
            self.update(step, scale)
        elif self.reducer.updates_later:
            self._update_later(step, scale)
        elif self.reducer.sums_rows and self.reducer.memory.size > 1:
            self._sum_and_update(step, scale)
        else:
            self.reduce()
            self.update(step, scale)

    def _sum_and_update(self, step: int, scale: float) -> None:
        reducer, fused = self.reducer, kernels.load("update")
        for bucket in reducer.buckets:
            pieces = self.pieces[bucket.number]
            rules = [each.rule_at(step) for each in pieces]
            kernels_of = [
                rule.kernel(own_step, scale) if rule.update_is_its_kernel else ("", ()) for rule, own_step in rules
            ]
            if bucket.mine.dtype in fused.REDUCING_DTYPES and all(
                name in fused.REDUCING_RULES for name, _ in kernels_of
            ):
                for piece, (name, coefficients) in zip(pieces, kernels_of, strict=True):
                    flat, _, state = self._views_of(bucket, piece)
                    arrays = piece.rule.arrays_of(state)
                    fused.REDUCING_RULES[name](bucket.rows, piece.first, piece.last, flat, *arrays, coefficients)
            else:
                reducer.reduce_bucket(bucket)
                self._update_own(bucket, pieces, step, scale)
        reducer.barrier()

    def update(self, step: int, scale: float | Array) -> None:
        self._update_all(step, scale)
        self.reducer.gather_parameters(self.flats)


NEAR_NBYTES, FAR_NBYTES = 6 << 20, 32 << 20
"""So many bytes may all copies of a node's parameters have, if its cores are near each other, and far."""

_FAR_GB_S = 4.0
_PROBE_NBYTES, _TURNS = 256 << 10, 5


def lies_once_per_node(reducer: Reducer) -> bool:
    """Whether ``owner="auto"`` is ``"shard"``; every rank must call, and gets the same.

    Over several nodes, and with updates beside the next forward, it is wherever ranks share memory.
    """
    world, memory = reducer.world, reducer.memory
    if not any(world.comm.allgather_json(memory.size > 1)):  # nodes may differ
        return False
    copies_nbytes = memory.size * sum(bucket.mine.nbytes for bucket in reducer.buckets)
    if world.num_nodes > 1 or reducer.updates_later or world.cores < world.size or copies_nbytes > FAR_NBYTES:
        return True
    if copies_nbytes <= NEAR_NBYTES:
        return False
    return min(world.comm.allgather_json(rate_gb_s(reducer))) >= _FAR_GB_S


def rate_gb_s(reducer: Reducer) -> float:
    """GB/s of writing what the next rank of the node has read; every rank of the node must call. Takes some 0.5 ms."""
    memory = reducer.memory
    rows = memory.alloc((memory.size, _PROBE_NBYTES // 4), np.float32)
    mine, of_next = rows[memory.rank], rows[(memory.rank + 1) % memory.size]
    least_ns = float("inf")
    for turn in range(_TURNS):
        reducer.barrier()
        begin = time.perf_counter_ns()
        mine.fill(turn)
        if turn > 0:
            least_ns = min(least_ns, time.perf_counter_ns() - begin)
        reducer.barrier()
        of_next.sum()
    reducer.barrier()
    return mine.nbytes / least_ns
