"""Update strategies: every rank updates all parameters, or the owner of a shard updates it.

Both strategies apply the optimizer to the flat buckets, element by element, so they give the same bits.

- `Replicated`, `ShardedUpdate`: the strategies. `lies_once_per_node` chooses one for ``owner="auto"``.
- `changing`: the context in which a program changes parameters.
- `init_state`, `update`: master weights, which are float32 copies of 16-bit parameters, in the optimizer's state. The
  optimizer updates them, and parameters are rounded from them. 16 bits would lose an update of less than half a unit in
  the last place (Micikevicius et al., "Mixed precision training", 2018, section 3.1).
- `squares_of_model`, `Layers`: norms of summed gradients, of a model and of its layers (`hpcdp.optim.LARS`), whose
  elements are in the shards of several ranks. In a cut model, the parts of cut parameters count on every rank, and
  uncut parameters count once.

[Note: shared cache lines] Parameters in shared memory need the least memory and traffic. But a core that writes a cache
line waits until copies in other cores are invalidated. In every step owners write parameters that all ranks have read,
and ranks write gradients that owners have read. On an EPYC with Zen 4 such writes reach 7 to 10 GB/s between cores that
share a last-level cache, and 2.3 GB/s between others. Lines without copies take 40 GB/s, and lines that another core
has *written* take 17 GB/s, as in an allreduce, whose owners write sums to lines that they have read. So parameters of
which all copies fit in the caches are private to each rank. Longer ones, which are evicted between two uses anyway, are
shared by the node's ranks.

Times of a step of SGD with momentum on 2 ranks (read parameters, write gradients, sum, update), with parameters once
per node and on every rank. In us, near: 175 and 150 at 1 MB, 620 and 630 at 4, 1425 and 1860 at 8, 3400 and 4600 at 16;
far: 700 and 175, 2700 and 650, 4600 and 1650, 6500 to 7300 and 3800. At 64 MB 15 and 22 ms near, 16 and 25 far.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import kernels
from ..collectives import allreduce
from ..comm import Communicator
from ..comm.consistency import on_every_rank
from ..comm.progress import ProgressEngine
from ..comm.watchdog import nobody
from ..core import state as core_state
from ..core.arrays import Array, array_namespace, from_host, is_half, is_host, to_host, words
from ..core.state import cut_of
from ..errors import ConfigError
from ..kernels import empty
from ..optim import Optimizer, Schedule, segment_squares, squares
from .bucket_layout import Bucket, ParameterLike
from .reducer import Reducer

being_changed: set[int] = set()
"""Ids of the parameters that are copies now, within `changing`."""
Places = Sequence[tuple[ParameterLike, Array]]
"""Parameters, and the arrays of their values or gradients."""

_FROM_BEFORE = "an array from before the block"


def places_of(params: Sequence[ParameterLike]) -> Places:
    """Return the parameters with the arrays of their values, after updates under way."""
    return [(param, param.data) for param in params]


def of_rank_0(values: Array, comm: Communicator) -> np.ndarray:
    """Return the values of rank 0 as a new array in host memory; every rank must call."""
    host = np.array(to_host(values), order="C")
    comm.native_broadcast(host, 0)
    return host


def moved(places: Places, grads: Places = ()) -> list[str]:
    """Return the names of values and gradients that are no longer in the arrays that the trainer uses."""
    values = [param.name for param, place in places if hasattr(param, "held") and param.held() is not place]
    return values + [f"{param.name}.grad" for param, place in grads if param.grad is not place]


def moved_anywhere(comm: Communicator | None, names: Sequence[str], operation: str = "step") -> ConfigError | None:
    """Return the same error on all ranks if some have ``names`` that are `moved`; every rank must call.

    Args:
        comm: the ranks; None: this rank alone.
        names: the result of `moved` on this rank.
        operation: the operation of the error.
    """
    by_rank = [list(names[:1])] if comm is None else comm.allgather_json(list(names[:1]))
    rank = next((rank for rank, moved_names in enumerate(by_rank) if moved_names), None)
    if rank is None:
        return None
    name = by_rank[rank][0]
    where = name if comm is None else f"{name}, rank {rank}"
    if name.endswith(".grad"):
        return ConfigError(
            operation, where=where, expected="the array in which the Trainer sums it", got="another array, or none",
            remedy="keep the array: backward overwrites it, and grad[...] = 0 clears it",
        )  # fmt: skip
    return ConfigError(
        operation, where=where, expected="the array in which the Trainer updates it",
        got="another array, which would not be trained",
        remedy="set arrays and dtypes before making the Trainer, and values in changing_parameters() of the last one",
    )  # fmt: skip


@contextmanager
def changing(
    places: Places, comm: Communicator | None, writes: bool, meet: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Replace parameters by copies, and write the copies of rank 0 back at the end; every rank must enter and leave.

    Args:
        places: the parameters and their arrays, which change at the end.
        comm: the ranks; None: this rank alone.
        writes: whether this rank writes to the arrays.
        meet: a barrier of the ranks that share the arrays.

    Raises:
        ConfigError: a parameter has another shape or dtype, or an array from before, and then nothing is changed; or an
            array or view from before was changed, which is lost. On every rank.
    """
    meet()
    marks = _marks(places)
    for param, place in places:
        param.data = place.copy()
    meet()
    being_changed.update(id(param) for param, _ in places)
    changed: list[Array] = []
    older: list[str] = []
    try:
        with core_state.refusing([place for _, place in places], _FROM_BEFORE):
            try:
                yield
            finally:
                changed += [param.data for param, _ in places]
                held = [(param.name, param.data, place) for param, place in places]
                older += [
                    name
                    for name, values, place in held
                    if values is place or core_state.protection_of(values) is not None
                ]
    finally:
        being_changed.difference_update(id(param) for param, _ in places)
        for param, place in places:
            param.data = place
        stale = _marks(places) != marks  # before other ranks write there

        def refuse_older() -> None:
            if stale:
                raise ConfigError(
                    "changing_parameters", expected="changes of param.data within the block",
                    got=f"{_FROM_BEFORE}; such changes are lost",
                    remedy="change param.data, as it is within the block",
                )  # fmt: skip

        _on_every_rank(comm, lambda: _check_alike(places, changed, older))
        agreed = [np.array(to_host(own)) if comm is None else of_rank_0(own, comm) for own in changed]
        if writes:
            for (_, place), values in zip(places, agreed, strict=True):
                place[...] = from_host(values, place)
        _on_every_rank(comm, refuse_older)
        meet()


def _on_every_rank(comm: Communicator | None, check: Callable[[], None]) -> None:
    if comm is None:
        check()
    else:
        on_every_rank(comm, check)


def _marks(places: Places) -> list[int]:
    """Return a checksum of each array: CRC-32, or on a GPU the sum of its words."""
    marks = []
    for _, place in places:
        words = place.reshape(-1).view(np.dtype(f"u{place.dtype.itemsize}"))
        marks.append(zlib.crc32(words.data) if is_host(place) else int(words.sum(dtype=np.uint64)))
    return marks


def _check_alike(places: Places, changed: Sequence[Array], older: Sequence[str]) -> None:
    for (param, place), values in zip(places, changed, strict=True):
        if param.name in older:
            raise ConfigError(
                "changing_parameters", where=param.name, expected="a new array",
                got="an array from before the block, which the end of the block overwrites",
                remedy="save a copy by param.data.copy()",
            )  # fmt: skip
        if not hasattr(values, "dtype"):
            got = type(values).__name__
        elif values.shape != place.shape or values.dtype != place.dtype:
            got = f"{tuple(values.shape)} {values.dtype}"
        else:
            continue
        expected = f"{tuple(place.shape)} {place.dtype}"
        raise ConfigError("changing_parameters", where=param.name, expected=expected, got=got)


MASTER = "master"
"""Name of master weights in the optimizer's state."""
Rule = Callable[[Array, Array, dict[str, Array]], None]
"""An optimizer's update of a flat parameter by its gradient and state, with all other arguments bound."""


def init_state(optimizer: Optimizer, param: Array) -> dict[str, Array]:
    """Return `Optimizer.init_state` of a flat array; of a 16-bit array, the state of its master weights, with them."""
    if not is_half(param):
        return optimizer.init_state(param)
    master = widened(param)
    return {MASTER: master, **optimizer.init_state(master)}


def update(rule: Rule, param: Array, grad: Array, state: dict[str, Array]) -> None:
    """Run ``rule`` on a state of `init_state`; changes ``param`` and the arrays of ``state`` in place."""
    if MASTER not in state:
        rule(param, grad, state)
        return
    follow(param, state[MASTER])
    rule(state[MASTER], widened(grad), state)
    # Rounded to nearest even; overflow becomes an infinity.
    bits = param.view(array_namespace(param).uint16)
    getattr(_casts(param), f"to_{param.dtype.name}")(state[MASTER], bits)


def follow(param: Array, master: Array) -> None:
    """Set master weights to their flat parameter, except where that equals the rounded master weight."""
    _casts(param).follow(master, words(param))


def widened(x: Array) -> Array:
    """Return a float32 copy of 16-bit floats, flat and contiguous."""
    xp = array_namespace(x)
    wide = empty(x.shape, xp.float32, xp)
    getattr(_casts(x), f"from_{x.dtype.name}")(x.view(xp.uint16), wide)
    return wide


def _casts(x: Array) -> Any:
    return kernels.kernels_for("networks", x)


Squares = tuple[float, float]
"""Squared norms of a layer's weights and of its summed gradient."""


def of_shards(reducer: Reducer) -> float:
    """Return this rank's part of the squared norm of the summed gradients, which is the sum of all ranks' parts.

    The shards must be reduced. Accumulated in float64, and not finite if a gradient is not.
    """
    if not reducer.is_counted:
        return 0.0
    return sum(squares([run for bucket in reducer.buckets for run in _counted(reducer, bucket, *bucket.shard)]))


def squares_of_model(reducer: Reducer) -> float:
    """Return the squared norm of the summed gradients of the whole model, the same on all ranks; every rank must call.

    The shards must be reduced. The model is whole also where this rank has a part (`World.model_comm`,
    `World.part_comm`). The norm is not finite if a gradient is not.
    """
    if reducer.is_deterministic and reducer.holds_sums:  # a sum by shards would depend on their number
        runs = [run for bucket in reducer.buckets for run in _counted(reducer, bucket, 0, bucket.mine.size)]
        total = sum(squares(runs))
    else:
        total = reducer.tally(of_shards(reducer))[0]
    for comm in (reducer.world.part_comm, reducer.world.model_comm):
        total = sum(_gathered(comm, reducer, total))
    return float(total)


def clipped_scale_on_gpu(reducer: Reducer, scale: float | Array, most: float) -> Array:
    """Return `reference.clipped_scale` of all sums, on the GPU: float64, shape ``(1,)``; the host does not wait."""
    sums = [words(bucket.mine) for bucket in reducer.buckets]
    kernel = kernels.kernels_for("gradients", sums[0])
    return kernel.clipped_scale(kernel.all_squares(sums), scale, most)


class Layers:
    """Norms of layers, which are the parameters of two or more axes, for rules that need them.

    Args:
        reducer: the reducer of the gradients.
        flats: the parameters of each bucket.
    """

    def __init__(self, reducer: Reducer, flats: Sequence[Array]) -> None:
        self._reducer, self._flats = reducer, flats
        self._slots = [slot for slot in reducer.layout.slots if len(slot.shape) > 1]
        self._cut = [number for number, slot in enumerate(self._slots) if cut_of(reducer.params[slot.name]) is not None]
        self._segments: dict[tuple[tuple[int, int], ...], list[_Segments]] = {}

    def squares(self, span: Callable[[Bucket], tuple[int, int]]) -> dict[str, Squares | Array]:
        """Return the squared norms by layer, the same on all ranks; every rank must call, after the sum.

        Where every rank holds all sums, each computes all norms, in an order that does not depend on the number of
        ranks. On a GPU they then stay there, shape ``(2,)``, and the host does not wait, unless a layer is cut.

        Args:
            span: the columns of a bucket whose sums this rank has, where it does not have all.
        """
        reducer, holds_sums = self._reducer, self._reducer.holds_sums
        columns = [(0, bucket.mine.shape[0]) if holds_sums else span(bucket) for bucket in reducer.buckets]
        if not (holds_sums or reducer.is_counted):
            columns = [(0, 0)] * len(columns)
        segments = self._in(tuple(columns))
        by_bucket = [
            segment_squares(self._flats[part.bucket], reducer.buckets[part.bucket].mine, part.bounds)[::2]
            for part in segments
        ]
        layers = [number for part in segments for number in part.layers]
        if holds_sums and not self._cut and not all(map(is_host, by_bucket)):
            rows = [row for squares in by_bucket for row in squares]
            return {self._slots[number].name: row for number, row in zip(layers, rows, strict=True)}
        squares = np.zeros((len(self._slots), 2))
        if by_bucket:
            squares[layers] = to_host(array_namespace(*by_bucket).concatenate(by_bucket))
        if holds_sums:
            reducer.barrier()  # before other ranks update the parameters that this rank has read
        else:
            allreduce(squares.reshape(-1), "sum", reducer.world)
        if self._cut:
            by_part = _gathered(reducer.world.part_comm, reducer, squares[self._cut].tolist())
            squares[self._cut] = np.sum(by_part, axis=0)
        return {slot.name: (row[0], row[1]) for row, slot in zip(squares.tolist(), self._slots, strict=True)}

    def _in(self, columns: tuple[tuple[int, int], ...]) -> list[_Segments]:
        """Return the layers in these columns of the buckets, cached because their bounds may be in a GPU's memory."""
        if columns not in self._segments:
            parts = (self._of_bucket(number, first, last) for number, (first, last) in enumerate(columns))
            self._segments[columns] = [part for part in parts if part is not None]
        return self._segments[columns]

    def _of_bucket(self, bucket: int, first: int, last: int) -> _Segments | None:
        slots = [(number, slot) for number, slot in enumerate(self._slots) if slot.bucket == bucket]
        layers, bounds = [], []
        for number, slot in sorted(slots, key=lambda numbered: numbered[1].offset):
            begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
            if begin < end:
                layers.append(number)
                bounds += [begin, end]
        return _Segments(bucket, layers, from_host(np.array(bounds), self._flats[bucket])) if layers else None


@dataclass
class _Segments:
    """Layers of a bucket: every other one of the segments between consecutive `bounds`."""

    bucket: int
    layers: list[int]
    bounds: Array


def _counted(reducer: Reducer, bucket: Bucket, first: int, last: int) -> Iterator[Array]:
    """Yield the gradients in these columns that count in sums over a model: on other parts than the first, cut ones."""
    part_comm = reducer.world.part_comm
    if part_comm is None or part_comm.rank == 0:
        yield bucket.mine[first:last]
        return
    for slot in bucket.slots:
        begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
        if begin < end and cut_of(reducer.params[slot.name]) is not None:
            yield bucket.mine[begin:end]


def _gathered(comm: Communicator | None, reducer: Reducer, value: Any) -> list[Any]:
    """Return every rank's ``value`` by rank, where other ranks have parts of the model; every rank must call."""
    if comm is None:
        return [value]
    watchdog = ProgressEngine.of(reducer.world).watchdog
    with watchdog.watching("norms of a model that several ranks have", behind=nobody):
        return comm.allgather_json(value)


class UpdateRange(NamedTuple):
    """Columns of a bucket that one rule updates with the same step number."""

    first: int
    last: int
    """One after the last column."""
    rule: Optimizer
    passed_over: int
    """Number of steps that left the columns out."""
    layer: str = ""
    """Parameter whose norms the rule needs; empty for a rule by elements."""

    def joins(self, following: UpdateRange) -> bool:
        """Return whether ``following`` extends this range, with the same rule and step."""
        alike = self.rule is following.rule and self.passed_over == following.passed_over
        alike = alike and self.layer == following.layer
        return alike and self.last == following.first

    def rule_at(self, step: int) -> tuple[Optimizer, int]:
        """Return `rule_at` of this range."""
        return rule_at(self.rule, step, self.passed_over)


def rule_at(rule: Optimizer, step: int, passed_over: int) -> tuple[Optimizer, int]:
    """Return the rule of the trainer's update number ``step``, and the parameter's own number of this update.

    A schedule of learning rates counts the trainer's updates, and bias corrections count those of the parameter, which
    ``passed_over`` updates have left out.
    """
    if not passed_over:
        return rule, step
    if isinstance(rule.lr, Schedule):
        rate = rule.learning_rate(step)
        rule = copy.copy(rule)
        rule.lr = rate
    return rule, step - passed_over


class UpdateStrategy:
    """Strategy of the update: which rank updates which parameters, and holds their optimizer state.

    Parameters are moved to flat arrays in the layout of their buckets.

    Args:
        reducer: the reducer, whose parameters it takes over.
        optimizer: the rule of parameters that are not in ``rules``.
        rules: rules with their own settings, by parameter; None as a rule: no update. All must keep the same state.
    """

    holds_all = False
    """True if every rank updates all parameters, and so holds their whole state; the same on all ranks."""

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, rules: Mapping[str, Optimizer | None] | None = None
    ) -> None:
        self.reducer = reducer
        self.optimizer = optimizer
        self._rules = {} if rules is None else rules
        self._left_out: Set[str] = frozenset()
        self.passed_over: dict[str, int] = {}
        """Number of steps that left a parameter out, by name; they do not count in its own steps."""
        self.is_changing = False
        """True if the program is within `changing`."""
        self.flats: list[Array] = []
        self._states: list[dict[str, Array]] = []
        for bucket in reducer.buckets:
            self.flats.append(self._allocate(bucket))
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
        """Return the columns of a bucket that this rank updates: the first, and one after the last."""
        return 0, bucket.mine.shape[0]

    def _allocate(self, bucket: Bucket) -> Array:
        return array_namespace(bucket.rows).zeros((bucket.mine.shape[0],), dtype=bucket.mine.dtype)

    def _move(self, param: ParameterLike, place: Array) -> None:
        place[...] = param.data
        param.data = place

    @property
    def states(self) -> list[dict[str, Array]]:
        """The optimizer's state of the elements that this rank updates, flat, by bucket and name."""
        self.reducer.settle()
        return self._states

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run the context of `Trainer.changing_parameters`; a nested one does nothing. Every rank must call."""
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
        """True if this rank writes to all parameters, while no other rank does."""
        return True

    def take_parameters(self) -> None:
        """Set master weights to the current values of their 16-bit parameters; every rank must call."""
        for bucket, state in zip(self.reducer.buckets, self.states, strict=True):
            if MASTER in state:
                own = self.flats[bucket.number][slice(*self.span(bucket))]
                follow(own, state[MASTER])

    @property
    def nbytes_state(self) -> int:
        """Bytes of optimizer state on this rank."""
        return sum(array.nbytes for state in self._states for array in state.values())

    @property
    def nbytes_parameters(self) -> int:
        """This rank's share of the bytes of the parameters, which exist on every rank or once per node."""
        return sum(flat.nbytes for flat in self.flats)

    def _divide(self, bucket: Bucket) -> list[UpdateRange]:
        """Return the ranges of this rank's span, each with one rule and step number."""
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
        """Set ``rules``, as at construction; the same on all ranks."""
        self._rules = rules
        self._divide_all()

    def leave_out(self, names: Set[str]) -> None:
        """Leave the parameters ``names`` out of the next step; the same on all ranks."""
        if names != self._left_out:
            self._left_out = names
            self._divide_all()

    def pass_over(self) -> None:
        """Count the last step in `passed_over` of parameters that it left out, or that have no rule yet."""
        if not (self._left_out or self._rules):
            return
        for name in self._left_out | {name for name, rule in self._rules.items() if rule is None}:
            self.passed_over[name] = self.passed_over.get(name, 0) + 1

    def take_passed_over(self, counts: Mapping[str, int]) -> None:
        """Set `passed_over`; the same on all ranks."""
        self.passed_over = dict(counts)
        self._divide_all()

    def _divide_all(self) -> None:
        self.pieces = [self._divide(bucket) for bucket in self.reducer.buckets]
        """Ranges of columns that this rank updates, by bucket."""
        self._views: dict[tuple[int, int, int], tuple[Array, Array, dict[str, Array]]] = {}

    def _views_of(self, bucket: Bucket, piece: UpdateRange) -> tuple[Array, Array, dict[str, Array]]:
        """Return parameters, gradients and state; cached, because three views in CuPy take as long as a launch."""
        key = bucket.number, piece.first, piece.last
        views = self._views.get(key)
        if views is None:
            columns, offset = slice(piece.first, piece.last), self.span(bucket)[0]
            own = slice(piece.first - offset, piece.last - offset)
            state = {name: array[own] for name, array in self._states[bucket.number].items()}
            views = self._views[key] = self.flats[bucket.number][columns], bucket.mine[columns], state
        return views

    def _update_own(self, bucket: Bucket, pieces: Sequence[UpdateRange], step: int, scale: float | Array) -> None:
        for piece in pieces:
            rule, own_step = piece.rule_at(step)
            self.update_piece(bucket, piece, partial(rule.update, step=own_step, scale=scale))

    def update_piece(self, bucket: Bucket, piece: UpdateRange, rule: Rule) -> None:
        """Update the columns of ``piece`` by ``rule``, from gradients that are summed."""
        flat, gradient, state = self._views_of(bucket, piece)
        update(rule, flat, gradient, dict(state))  # a copy of the dict, which a user's rule may change

    def reduce(self) -> None:
        """Sum the gradients that this rank updates with over all ranks; every rank must call, after backward."""
        raise NotImplementedError

    def reduce_and_update(self, step: int, scale: float) -> None:
        """Reduce and update, if possible in one pass over memory or beside the next forward; every rank must call.

        Where updates run beside the next forward, a reader of a parameter's ``data`` waits for its update.
        """
        self.reduce()
        self.update(step, scale)

    def update(self, step: int, scale: float | Array) -> None:
        """Update from gradients that are summed, at least in this rank's `span`; every rank must call.

        The scale may be an array, as in `Optimizer.update`.
        """
        if not self.optimizer.by_layer:
            for bucket in self.reducer.buckets:
                self._update_own(bucket, self.pieces[bucket.number], step, scale)
            return
        norms = self._layers.squares(self.span)
        for bucket in self.reducer.buckets:
            for piece in self.pieces[bucket.number]:
                rule, own_step = piece.rule_at(step)
                rule, scale_of = rule.of_layer(own_step, scale, norms.get(piece.layer))
                self._update_own(bucket, [piece._replace(rule=rule)], step, scale_of)

    def _update_later(self, step: int, scale: float) -> None:
        """Update every bucket as soon as it is reduced, with the current settings of the rules."""
        for bucket in reversed(self.reducer.buckets):
            pieces = [piece._replace(rule=copy.copy(piece.rule)) for piece in self.pieces[bucket.number]]
            self.reducer.update_later(bucket, partial(self._update_own, bucket, pieces, step, scale))


class Replicated(UpdateStrategy):
    """Strategy in which each rank holds and updates all parameters."""

    holds_all = True

    def reduce(self) -> None:
        """See `UpdateStrategy.reduce`."""
        self.reducer.reduce_everywhere()

    def reduce_and_update(self, step: int, scale: float) -> None:
        """See `UpdateStrategy.reduce_and_update`."""
        if self.reducer.updates_later and self.reducer.memory.size == 1 and not self.optimizer.by_layer:
            self._update_later(step, scale)
        else:
            super().reduce_and_update(step, scale)


class ShardedUpdate(UpdateStrategy):
    """Strategy in which parameters exist once per node, and each rank updates its shard of every bucket.

    A rank holds 1/n of the optimizer's state. There are as many shards as the smallest node has ranks; further ranks of
    larger nodes own none. Inside the node nothing is gathered: after the update every rank sees the new parameters
    (Rajbhandari et al., "ZeRO", 2020, stage 1, with the allgather replaced by shared memory). On GPUs each rank has all
    parameters, and shards are gathered.
    """

    def _allocate(self, bucket: Bucket) -> Array:
        memory = self.reducer.memory
        if memory.size == 1:
            return super()._allocate(bucket)
        flat = memory.alloc((bucket.mine.shape[0],), bucket.mine.dtype)
        core_state.hold_together(flat, memory.size)
        return flat

    def _move(self, param: ParameterLike, place: Array) -> None:
        if self._writes_parameters:
            place[...] = param.data
        param.data = place

    @property
    def _writes_parameters(self) -> bool:
        return self.reducer.memory.rank == 0

    @property
    def nbytes_parameters(self) -> int:
        """See `UpdateStrategy.nbytes_parameters`."""
        return super().nbytes_parameters // self.reducer.memory.size

    def span(self, bucket: Bucket) -> tuple[int, int]:
        """See `UpdateStrategy.span`: this rank's shard."""
        return bucket.shard

    def reduce(self) -> None:
        """See `UpdateStrategy.reduce`."""
        if self.optimizer.by_layer and self.reducer.is_deterministic:
            self.reducer.reduce_everywhere()  # norms of shards would depend on the number of ranks
        else:
            self.reducer.reduce_shards()

    def reduce_and_update(self, step: int, scale: float) -> None:
        """See `UpdateStrategy.reduce_and_update`: in one pass over the rows where possible."""
        if self.optimizer.by_layer:
            super().reduce_and_update(step, scale)
        elif self.reducer.updates_later:
            self._update_later(step, scale)
        elif self.reducer.sums_rows and self.reducer.memory.size > 1:
            self._sum_and_update(step, scale)
        else:
            super().reduce_and_update(step, scale)

    def _sum_and_update(self, step: int, scale: float) -> None:
        reducer, fused = self.reducer, kernels.load("gradients")
        for bucket in reducer.buckets:
            pieces = self.pieces[bucket.number]
            rules = [piece.rule_at(step) for piece in pieces]
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
                reducer.reduce_shard(bucket)
                self._update_own(bucket, pieces, step, scale)
        reducer.barrier()

    def update(self, step: int, scale: float | Array) -> None:
        """See `UpdateStrategy.update`: gathers the shards on GPUs."""
        super().update(step, scale)
        self.reducer.gather_parameters(self.flats)


NEAR_NBYTES, FAR_NBYTES = 6 << 20, 32 << 20
"""Largest size of all copies of a node's parameters for `Replicated`, if its cores are near each other, and far."""

_FAR_GB_S = 4.0
_PROBE_NBYTES, _TURNS = 256 << 10, 5


def lies_once_per_node(reducer: Reducer) -> bool:
    """Return whether ``owner="auto"`` means ``"shard"``, the same on all ranks; every rank must call.

    Over several nodes, and with updates beside the next forward, it does wherever ranks share memory. Otherwise the
    size decides; see [Note: shared cache lines].
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
    """Return the GB/s of writing lines that the next rank of the node has read; every rank of the node must call.

    Takes about 0.5 ms.
    """
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
