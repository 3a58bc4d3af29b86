"""Parts of a trainer: the policy for gradients, the scale of the loss, and the saved state.

`Policy` decides on non-finite, missing and unused gradients. `LossScaling` adapts the scale of the loss: a scaled loss
keeps small gradients from underflowing in 16 bits (Micikevicius et al., "Mixed precision training", 2018, section 3.2).

The saved state is that of the optimizer, and the residuals, which are what compression has not sent yet. Each rank has
parts of both. Checkpoints save and restore them on any number of ranks, with any owner and any bucket size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.communicator import join_parts
from ..comm.consistency import require_same
from ..core import files
from ..core.arrays import Array, to_host
from ..core.checks import instance, number, one_of
from ..core.state import Cut, Part, Sharded, cut_of, take
from ..errors import ConfigError, DataError, StaleGradientError, listed, warn
from .buckets import Bucket, ParameterLike, Slot
from .reducer import Reducer
from .sharded_update import UpdateStrategy

_MOST_NAMES = 3
_EXACT_BITS = 52
"""Bits of integers whose sums are exact in float64."""

UNUSED = ("error", "warn", "zero")
NONFINITE = ("ignore", "count", "skip", "raise")
"""Valid values of the fields of a `Policy`."""


@dataclass(frozen=True)
class Policy:
    """The treatment of missing and non-finite gradients by a trainer, the same on all ranks.

    Args:
        unused: for parameters whose gradient backward has not written, though they are not frozen by
            ``grad_req="null"``. ``"error"``: raise a StaleGradientError that names them. ``"zero"``: count them as zero
            where another rank has used them, so that ranks may use different parts of a model; a parameter that no rank
            has used keeps its value and its optimizer's state. ``"warn"``: as ``"zero"``, and each rank warns of new
            ones.
        nonfinite: for a summed gradient with a NaN or an infinity. ``"ignore"``: no check, at no cost. ``"count"``:
            count it in ``trainer.num_nonfinite``. ``"skip"``: count it, and skip the update; the running statistics of
            batch normalization have moved in forward already, except with ``reproducible``. ``"raise"``: raise a
            NonFiniteGradientError.

    Raises:
        ConfigError: another value.
    """

    unused: str = "error"
    nonfinite: str = "ignore"

    def __post_init__(self) -> None:
        for name, valid in (("unused", UNUSED), ("nonfinite", NONFINITE)):
            one_of("Policy", name, getattr(self, name), valid)


def checked_policy(policy: object) -> Policy:
    """Return ``policy``, or the default for None; `ConfigError` for anything else."""
    policy = Policy() if policy is None else policy
    return instance("Trainer", "policy", policy, Policy, "a Policy, e.g. Policy(unused='zero')")


class Unwritten:
    """The treatment of unwritten gradients in one trainer, by its policy.

    No gradient differs from a gradient of zero, with which momentum and weight decay move a parameter. So the closing
    exchange of a step finds the parameters that no rank has used. By default each rank with samples must use all
    parameters except frozen ones, and the ranks compare those by a `mark`. Where the policy lets ranks use different
    parameters, `numbers` count the ranks that used each parameter, packed into float64 numbers.

    Args:
        policy: the trainer's policy.
        params: all parameters of the trainer, by name.
        rank: the number of this rank.
        size: the number of ranks that step together.
    """

    def __init__(self, policy: Policy, params: Mapping[str, ParameterLike], rank: int, size: int) -> None:
        self._policy, self._params, self._rank = policy, params, rank
        self._may_differ = policy.unused != "error"
        """True if ranks may use different parameters."""
        bits = size.bit_length()
        per_number, self._mask = _EXACT_BITS // bits, (1 << bits) - 1
        names = enumerate(params if self._may_differ else ())
        self._places = {name: (place // per_number, place % per_number * bits) for place, name in names}
        """Number, and shift in it, of the count of each parameter."""
        used_by_one = [0] * -(-len(self._places) // per_number)
        for place, shift in self._places.values():
            used_by_one[place] |= 1 << shift
        self._all = tuple(map(float, used_by_one))
        self._all_by_all = [size * packed for packed in self._all]
        self.length = len(self._all)
        """Number of `numbers`."""
        self._warned: set[str] = set()

    def frozen(self, names: Sequence[str]) -> list[str]:
        """Return those of the parameters ``names`` that are frozen by ``grad_req="null"``."""
        return [name for name in names if self._params[name].grad_req == "null"]

    def refused(self, missing: Sequence[str]) -> list[str]:
        """Return those of the parameters ``missing`` that should have a gradient on this rank.

        Warns once of each parameter that counts as zero, if the policy is to warn.
        """
        if self._policy.unused == "zero" or not missing:
            return []
        frozen = set(self.frozen(missing))
        names = [name for name in missing if name not in frozen]
        if self._policy.unused == "error":
            return names
        if not self._warned.issuperset(names):
            self._warned.update(names)
            warn(
                f"rank {self._rank}: no gradient for {listed(names)}: counted as zero; left alone where no rank has one"
            )
        return []

    def mark(self, unused: Sequence[str]) -> int:
        """Return a number that identifies the frozen ones of ``unused``; 0 if ranks may use different parameters."""
        if self._may_differ or not unused:
            return 0
        frozen = set(self.frozen(unused))
        return sum(1 << place for place, name in enumerate(self._params) if name in frozen)

    def require_same_frozen(self, comm: Communicator, operation: str, unused: Sequence[str]) -> None:
        """Raise `MismatchError` if ranks have frozen different parameters; every rank must call."""
        if not self._may_differ:
            frozen = listed(self.frozen(unused)) or "none"
            remedy = (
                "set the same grad_req on all ranks, between step() and the next backward; or let ranks use different "
                "parameters by Policy(unused='zero')"
            )
            require_same(comm, operation, [f"parameters frozen by grad_req='null': {frozen}"], remedy)

    def numbers(self, unused: Sequence[str]) -> Sequence[float]:
        """Return this rank's numbers in the closing exchange of a step that has not used the parameters ``unused``."""
        packed = list(self._all)
        for name in unused if self._may_differ else ():
            place, shift = self._places[name]
            packed[place] -= 1 << shift
        return packed

    def left_alone(self, unused: Sequence[str], sums: Sequence[float] | None) -> frozenset[str]:
        """Return the parameters that no rank has used, which the step leaves out.

        Args:
            unused: the parameters that this rank has not used.
            sums: the sums of all ranks' `numbers`; None: this rank steps alone.
        """
        if not self._may_differ:
            return frozenset(self.frozen(unused)) if unused else frozenset()
        if sums is None or list(sums) == self._all_by_all:
            return frozenset(unused if sums is None else ())
        counts = [int(packed) for packed in sums]
        places = self._places.items()
        return frozenset(name for name, (place, shift) in places if not counts[place] >> shift & self._mask)


def stale(rank: int, names: Sequence[str]) -> StaleGradientError:
    """Return the error of a step for which the parameters ``names`` have no gradient on ``rank``."""
    return StaleGradientError(
        "step",
        where=f"rank {rank}",
        expected="a gradient for every parameter since the last step",
        got="none for " + ", ".join(names[:_MOST_NAMES]),
        remedy="call backward() before step(); freeze untrained parameters by grad_req='null' on all ranks; or pass "
        "Policy(unused='zero'), which leaves alone parameters that no rank has used",
    )


def stale_anywhere(comm: Communicator, names: Sequence[str]) -> StaleGradientError:
    """Return the error of `stale` for the first rank that has such ``names``; every rank must call."""
    by_rank = comm.allgather_json(list(names[:_MOST_NAMES]))
    rank = next(rank for rank, names in enumerate(by_rank) if names)
    return stale(rank, by_rank[rank])


DYNAMIC = "dynamic"
_FIRST, _LEAST = 2.0**16, 1.0
GROWTH_INTERVAL = 2000
"""Number of consecutive good steps after which the scale doubles."""


class LossScaling:
    """The rule of a loss scale that never changes. Every rank has one, with the same calls, so all scales are equal."""

    is_dynamic = False
    good_steps = 0
    """Good steps since the last change of a dynamic scale."""

    def after_step(self, scale: float, is_finite: bool) -> float:
        """Return the scale of the next step, after a step with ``scale`` whose summed gradient was finite or not."""
        return scale

    def restore(self, good_steps: int) -> None:
        """Continue from the `good_steps` of a saved state."""


class DynamicLossScaling(LossScaling):
    """The rule of a loss scale that an overflow halves, down to 1, and `GROWTH_INTERVAL` good steps double."""

    is_dynamic = True

    def after_step(self, scale: float, is_finite: bool) -> float:
        """See `LossScaling.after_step`."""
        if not is_finite:
            self.good_steps = 0
            return max(_LEAST, scale / 2)
        self.good_steps = (self.good_steps + 1) % GROWTH_INTERVAL
        return scale if self.good_steps else scale * 2

    def restore(self, good_steps: int) -> None:
        """See `LossScaling.restore`."""
        self.good_steps = good_steps


def is_dynamic(loss_scale: object) -> bool:
    """Return whether a loss scale is dynamic."""
    return isinstance(loss_scale, str) and loss_scale == DYNAMIC  # == of an array compares its elements


def first_scale(loss_scale: float | str) -> float:
    """Return the scale of the first step; `ConfigError` unless it is a positive number or ``"dynamic"``."""
    if is_dynamic(loss_scale):
        return _FIRST
    return number("Trainer", "loss_scale", loss_scale, above=0, expected=f"a positive number, or {DYNAMIC!r}")


def skipping(policy: Policy) -> Policy:
    """Return ``policy`` with steps that overflow skipped, as a dynamic scale needs.

    Raises:
        ConfigError: the policy is to count, or to raise.
    """
    if policy.nonfinite not in ("ignore", "skip"):
        raise ConfigError(
            "Trainer", where="policy", expected=f"nonfinite='skip' with loss_scale={DYNAMIC!r}",
            got=repr(policy.nonfinite), remedy="leave nonfinite out: steps that overflow are skipped and counted",
        )  # fmt: skip
    return Policy(unused=policy.unused, nonfinite="skip")


RESIDUAL = "residual"
"""Name of a parameter's residual, beside the names of the optimizer's state."""
FILE_HEADER = "hpcdp/trainer"
"""Kind of the files of `Trainer.save_states`."""


def warn_of_lost_residuals() -> None:
    """Warn that residuals of a saved state have no use here."""
    warn("what compression had not sent yet is lost: nothing is compressed here")


def gather_residuals(reducer: Reducer, bucket: Bucket) -> np.ndarray:
    """Return the residuals of a bucket of all nodes on rank 0; every rank must call.

    Returns:
        On rank 0 an array of shape ``(nodes, elements)``, on other ranks ``(0, elements)``.
    """
    world, own, rows = reducer.world, reducer.residual(bucket), []
    nodes, count = own.shape
    for node in range(nodes):  # one node at a time: all residuals together are one model a node
        row = np.zeros(count, own.dtype)
        for part in own.parts if own.parts and own.parts[0].first // count == node else ():
            first = part.first - node * count
            row[first : first + part.values.shape[0]] = to_host(part.values)
        world.comm.native_reduce(row.view(f"u{row.dtype.itemsize}"), "sum", 0)
        if world.rank == 0:
            rows.append(row)
    return np.array(rows, own.dtype).reshape(len(rows), count)


def optimizer_states(owner: UpdateStrategy, reducer: Reducer) -> dict[str, dict[str, Sharded]]:
    """Return the optimizer's state by parameter and name; empty where the rule keeps none.

    Parts are views of the owner's arrays. Waits for updates under way.
    """
    world = reducer.world
    copies, copy = reducer.copies
    if owner.holds_all:
        copies, copy = world.size, world.rank
    states: dict[str, dict[str, Sharded]] = {}
    for bucket, state in zip(reducer.buckets, owner.states, strict=True):
        span = owner.span(bucket)
        for slot in bucket.slots if state else ():
            cut = cut_of(reducer.params[slot.name])
            own = {
                name: Sharded(slot.shape, np.dtype(array.dtype), _parts(slot, array, span), copies, copy)
                for name, array in state.items()
            }
            states[slot.name] = {name: _of_whole(tensor, cut, world.part_comm) for name, tensor in own.items()}
    return {slot.name: states[slot.name] for slot in reducer.layout.slots if slot.name in states}


def residuals(reducer: Reducer) -> dict[str, Sharded]:
    """Return the residuals by parameter, of shape ``(nodes, *shape)``; empty where nothing is compressed.

    Parts are views.
    """
    tensors: dict[str, Sharded] = {}
    for slot in reducer.layout.slots if reducer.keeps_unsent else ():
        residual = reducer.residual(reducer.buckets[slot.bucket])
        nodes, count = residual.shape
        if nodes == 1:
            return {}
        parts = []
        for part in residual.parts:
            node, first = divmod(part.first, count)
            of_slot = _parts(slot, part.values, (first, first + part.values.shape[0]))
            parts += [Part(node * slot.count + own.first, own.values) for own in of_slot]
        tensor = Sharded((nodes, *slot.shape), residual.dtype, parts, shares=True)
        cut = cut_of(reducer.params[slot.name])
        shifted = None if cut is None else replace(cut, axis=cut.axis + 1)
        tensors[slot.name] = _of_whole(tensor, shifted, reducer.world.part_comm)
    return tensors


def _of_whole(own: Sharded, cut: Cut | None, part_comm: Communicator | None) -> Sharded:
    """Return this rank's share of a whole tensor of a cut model, where ``own`` is its part, or an uncut tensor."""
    if cut is not None:
        parts = [
            Part(place, part.values[begin - part.first : begin - part.first + count])
            for part in own.parts
            for begin, place, count in cut.runs(own.shape, part.first, part.first + part.values.shape[0])
        ]
        return replace(own, shape=cut.whole(own.shape), parts=parts)
    if part_comm is None:
        return own
    return replace(own, copies=own.copies * part_comm.size, copy=own.copy + own.copies * part_comm.rank)


def _parts(slot: Slot, columns: Array, span: tuple[int, int]) -> list[Part]:
    """Return the part of a parameter in ``columns``, which are the columns ``span`` of its bucket."""
    first, last = span
    begin, end = max(first, slot.offset), min(last, slot.offset + slot.count)
    return [Part(begin - slot.offset, columns[begin - first : end - first])] if begin < end else []


def joined(tensor: Sharded, world: World) -> np.ndarray:
    """Return a whole tensor, on the host, from the parts of all ranks of ``world``; every rank must call."""
    flat = np.zeros(math.prod(tensor.shape), tensor.dtype)
    copies = tensor.copies if world.part_comm is None else tensor.copies // world.part_comm.size
    holds_all = copies == world.size
    if holds_all or tensor.copy % copies == 0:
        for part in tensor.parts:
            flat[part.first : part.first + part.values.shape[0]] = to_host(part.values)
    if flat.size and not holds_all:
        join_parts(flat, world.comm)
    return flat.reshape(tensor.shape)


def regrouped(reducer: Reducer, saved: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return residuals for the reducer's number of nodes, each with an equal share where the number was another.

    Args:
        reducer: the trainer's reducer.
        saved: residuals by parameter, of shape ``(saved nodes, *shape)``; those that are zero are left out.
    """
    nodes = max((reducer.residual(bucket).shape[0] for bucket in reducer.buckets), default=1)
    return {
        name: rows if len(rows) == nodes else np.broadcast_to(rows.sum(axis=0) / nodes, (nodes, *rows.shape[1:]))
        for name, rows in saved.items()
        if rows.any()
    }


def take_states(own: Mapping[str, Mapping[str, Sharded]], saved: Mapping[str, Any]) -> None:
    """Fill this rank's parts of the optimizer's state in place from saved tensors, both by parameter and name."""
    for name, tensors in own.items():
        for key, tensor in tensors.items():
            take(f"{name}/{key}", tensor, saved[name][key])


def take_residuals(reducer: Reducer, saved: Mapping[str, Any]) -> None:
    """Fill this rank's parts of the residuals in place.

    Args:
        reducer: the trainer's reducer.
        saved: saved residuals by parameter, of shape ``(nodes, *shape)`` for this number of nodes; others are zero.
    """
    own = residuals(reducer)
    for name, tensor in own.items():
        if name in saved:
            take(f"{name}/{RESIDUAL}", tensor, saved[name])
            continue
        for part in tensor.parts:  # nothing was left unsent
            part.values[...] = 0
    if saved and not own and reducer.world.rank == 0:
        warn_of_lost_residuals()


def read_states(
    path: Path,
    optimizer: str,
    shapes: Mapping[str, tuple[int, ...]],
    states: Mapping[str, Iterable[str]],
    virtual_shards: int | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return header and arrays of a file of `Trainer.save_states`.

    Args:
        path: the file.
        optimizer: the name of the trainer's rule.
        shapes: the shapes of the trainer's parameters.
        states: the names of the optimizer's state by parameter.
        virtual_shards: their number; None where the trainer is not reproducible.

    Raises:
        DataError: the file is missing, damaged or of another model or optimizer.
    """
    fields = {"step_count": int, "optimizer": str}
    header, arrays = files.read("load_states", path, FILE_HEADER, fields, "save_states")
    num_shards = header.get("virtual_shards", virtual_shards)
    if header["optimizer"] != optimizer:
        got = f"states of {header['optimizer']}"
        raise DataError("load_states", where=path, expected=f"states of {optimizer}", got=got)
    if virtual_shards not in (None, num_shards):
        raise DataError(
            "load_states", where=path, expected=f"states of {virtual_shards} virtual shards",
            got=f"states of {num_shards}", remedy=f"Trainer(reproducible=True, virtual_shards={num_shards})",
        )  # fmt: skip
    expected = {f"{name}/{key}": shape for name, shape in shapes.items() for key in states.get(name, ())}
    for name, array in arrays.items():  # residuals of any number of nodes
        param, _, key = name.rpartition("/")
        if key == RESIDUAL and param in shapes and array.ndim:
            expected[name] = (len(array), *shapes[param])
    actual = {name: array.shape for name, array in arrays.items()}
    if actual != expected:
        odd = next(name for name in [*expected, *actual] if actual.get(name) != expected.get(name))
        raise DataError(
            "load_states", where=f"{path}, {odd}", expected=expected.get(odd, "no such array"),
            got=actual.get(odd, "no such array"), remedy="build the model and optimizer of the saved states",
        )  # fmt: skip
    return header, arrays
