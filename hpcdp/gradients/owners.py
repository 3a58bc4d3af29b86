"""Who updates: every rank all parameters, or the owner of a shard its part of parameters that a node holds once.

Both take the optimizer to the flat buckets, element by element, so they give the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from .. import holders, kernels
from ..arrays import Array, array_namespace
from ..optim import Optimizer, Schedule
from . import by_hand, master_weights, norms
from .reducer import Bucket, Parameter, Reducer


class Piece(NamedTuple):
    """Columns of a bucket that are updated by one rule, in the same step of theirs."""

    first: int
    last: int
    """One after the last."""
    rule: Optimizer
    passed_over: int
    """In how many steps they were left out."""
    layer: str = ""
    """The parameter whose norms the rule needs; none where it goes by elements."""

    def joins(self, following: Piece) -> bool:
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


class Owner(Protocol):
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
    def pieces(self) -> list[list[Piece]]:
        """For every bucket the columns that this rank updates alike."""
        ...

    def update_piece(self, bucket: Bucket, piece: Piece, rule: master_weights.Rule) -> None:
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
        reducer.gate.barrier()
        for bucket, flat in zip(reducer.buckets, self.flats, strict=True):
            first, last = self.span(bucket)
            self._states.append(master_weights.init_state(optimizer, flat[first:last]))
        self._divide_all()
        self._layers = norms.Layers(reducer, self.flats)

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
        places = by_hand.places_of([*self.reducer.params.values()])
        self.is_changing = True
        try:
            with by_hand.changing(places, self.reducer.world.comm, self._writes_parameters, self.reducer.gate.barrier):
                yield
        finally:
            self.is_changing = False

    @property
    def _writes_parameters(self) -> bool:
        """Whether this rank may write to all of them, as no other then does."""
        return True

    def take_parameters(self) -> None:
        for bucket, state in zip(self.reducer.buckets, self.states, strict=True):
            if master_weights.MASTER in state:
                own = self.flats[bucket.number][slice(*self.span(bucket))]
                master_weights.follow(own, state[master_weights.MASTER])

    @property
    def nbytes_state(self) -> int:
        return sum(array.nbytes for state in self._states for array in state.values())

    @property
    def nbytes_parameters(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def _divide(self, bucket: Bucket) -> list[Piece]:
        """The columns of this rank's span that are updated alike."""
        first, last = self.span(bucket)
        pieces: list[Piece] = []
        slots = sorted((slot for slot in bucket.slots if slot.count), key=lambda slot: slot.offset)
        ends = [*(slot.offset for slot in slots[1:]), bucket.mine.shape[0]]
        for slot, next_offset in zip(slots, ends, strict=False):
            rule = None if slot.name in self._left_out else self._rules.get(slot.name, self.optimizer)
            begin, end = max(first, slot.offset), min(last, next_offset)
            if rule is None or end <= begin:
                continue
            layer = slot.name if rule.by_layer and len(slot.shape) > 1 else ""
            piece = Piece(begin, end, rule, self.passed_over.get(slot.name, 0), layer)
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

    def _views_of(self, bucket: Bucket, piece: Piece) -> tuple[Array, Array, dict[str, Array]]:
        """Its parameters, gradients and state; kept, since CuPy takes as long for three views as for a launch."""
        key = bucket.number, piece.first, piece.last
        found = self._views.get(key)
        if found is None:
            columns, offset = slice(piece.first, piece.last), self.span(bucket)[0]
            own = slice(piece.first - offset, piece.last - offset)
            state = {name: array[own] for name, array in self._states[bucket.number].items()}
            found = self._views[key] = self.flats[bucket.number][columns], bucket.mine[columns], state
        return found

    def _update_own(self, bucket: Bucket, pieces: Sequence[Piece], step: int, scale: float | Array) -> None:
        for each in pieces:
            rule, own_step = each.rule_at(step) if each.passed_over else (each.rule, step)
            self.update_piece(bucket, each, partial(rule.update, step=own_step, scale=scale))

    def update_piece(self, bucket: Bucket, piece: Piece, rule: master_weights.Rule) -> None:
        flat, gradient, state = self._views_of(bucket, piece)
        master_weights.update(rule, flat, gradient, dict(state))  # a copy, which a rule of the user's may change

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
        beside = self.reducer.beside
        assert beside is not None
        for bucket in reversed(self.reducer.buckets):
            pieces = [each._replace(rule=copy.copy(each.rule)) for each in self.pieces[bucket.number]]
            beside.update_later(bucket, partial(self._update_own, bucket, pieces, step, scale))


class EveryRank(_Flat):
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


class ShardOwner(_Flat):
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
        holders.hold_together(flat, memory.size)
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
        if self.optimizer.by_layer and self.reducer.virtual_shards is not None:
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
        reducer, fused = self.reducer, kernels.load("reduce_update")
        for bucket in reducer.buckets:
            pieces = self.pieces[bucket.number]
            rules = [each.rule_at(step) for each in pieces]
            kernels_of = [
                rule.kernel(own_step, scale) if rule.update_is_its_kernel else ("", ()) for rule, own_step in rules
            ]
            if bucket.mine.dtype in fused.DTYPES and all(name in fused.RULES for name, _ in kernels_of):
                for piece, (name, coefficients) in zip(pieces, kernels_of, strict=True):
                    flat, _, state = self._views_of(bucket, piece)
                    arrays = piece.rule.arrays_of(state)
                    fused.RULES[name](bucket.rows, piece.first, piece.last, flat, *arrays, coefficients)
            else:
                reducer.sum_shard(bucket)
                self._update_own(bucket, pieces, step, scale)
        reducer.gate.barrier()

    def update(self, step: int, scale: float | Array) -> None:
        self._update_all(step, scale)
        self.reducer.share(self.flats)
