"""Chains: elementwise operators that follow each other in a plan, made in one pass over memory, forward and backward.

A chain's forward is one `Program`, in which what the chain alone reads is never written to memory. With a tape, it is
cut into parts with one result each; a part is one node of the tape, and its backward one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import kernels
from ...arrays import Array
from ...autograd.tape import Gradient
from ...autograd.tensor import value_of
from ...kernels.buffers import empty
from .formulas import BACKWARD, BY_NUMPY, FORWARD, Moving, Term, in_order
from .graph import Held, Literal, Source
from .program import Program, evaluated

_WITH_EPILOGUE = ("affine", "dense")
_LONGEST = 64
"""So many operators are a chain at most: each is compared with all before it, and has a block of the cache."""


class Link:
    """What a chain knows of one operator's call.

    Args:
        operands: arrays and numbers; None where the call is an epilogue alone: a bias, and perhaps a ReLU, that are
            added in place to what a product has written to ``value``.
    """

    def __init__(self, step: Any, operator: str, uses: int, operands: list[Any] | None) -> None:
        self.step, self.operator, self.uses = step, operator, uses
        self.operands = operands
        self.bias: Array = None
        self.relu = False

    @property
    def value(self) -> Array:
        return self.step.value


def link(step: Any, operator: str, uses: int, operands: Sequence[Any], keeps: bool, held: Sequence[Any]) -> Link | None:
    """The call as part of a chain, where it can be one; ``keeps`` says whether backward may follow."""
    value = step.value
    is_known = value.dtype.char in "fd" and value.dtype.isnative and value.flags.c_contiguous
    if not step.calls or not is_known or not value.size:
        return None
    if operator in _WITH_EPILOGUE and step.calls[-1][0] is kernels.load("epilogue").add_bias:
        into, bias, relu = step.calls[-1][1]
        found = Link(step, operator, uses, None)
        found.bias, found.relu = bias, relu
        return found if into.size == value.size else None
    if operator not in FORWARD or (keeps and step.pullback is None):
        return None
    given = [value_of(each) for each in operands]
    whole = [each for each in given if isinstance(each, np.ndarray) and each.shape == value.shape]
    rows = [each for each in given if isinstance(each, np.ndarray) and each.shape != value.shape]
    if any(isinstance(each, list) for each in given):  # kernels know arrays and numbers
        return None
    if not whole or not all(each.dtype == value.dtype and each.flags.c_contiguous for each in (*whole, *rows)):
        return None
    if not all(_is_row_of(each, value) for each in rows):
        return None
    for each, source in zip(given, step.sources, strict=True):
        if keeps and isinstance(each, np.ndarray) and each.shape != value.shape and _may_want_gradient(source, held):
            return None  # that would be a sum, whose order is NumPy's
    return Link(step, operator, uses, given)


def _is_row_of(x: Array, value: Array) -> bool:
    lead = next((i for i, n in enumerate(x.shape) if n != 1), x.ndim)
    return value.shape[value.ndim - (x.ndim - lead) :] == x.shape[lead:]


def _may_want_gradient(source: Source, held: Sequence[Any]) -> bool:
    if isinstance(source, Held):
        return not source.is_detached and hasattr(held[source.number], "grad_req")
    return source is not None and not isinstance(source, Literal)


def chained(steps: Sequence[Any], links: Sequence[Link | None]) -> list[list[Link]]:
    """The links that follow each other, where that saves a pass over memory: where the kernel makes two operations.

    Steps without calls, which are views, break no chain.
    """
    chains: list[list[Link]] = [[]]
    for step, each in zip(steps, links, strict=True):
        if each is None:
            if step.calls:
                chains.append([])
            continue
        if each.operands is None or len(chains[-1]) == _LONGEST or not _fits(chains[-1], each):
            chains.append([])
        chains[-1].append(each)
    return [chain for chain in chains if len(chain) > 1 and _num_compiled(chain) > 1]


def _num_compiled(chain: list[Link]) -> int:
    terms = in_order(_forward(each, {}, {}) for each in chain)
    return sum(term.operation not in BY_NUMPY for term in terms)


def _fits(chain: list[Link], following: Link) -> bool:
    value = following.value
    if chain and (value.size != chain[0].value.size or value.dtype != chain[0].value.dtype):
        return False
    before = [x for one in chain for x in _read(one)]
    own = _read(following)
    if len({x.size for x in (*before, *own)} - {1, value.size}) > 1:
        return False  # rows of several lengths
    written = [one.value for one in chain]
    if any(_is_hazard(value, x) for x in (*before, *own, *written)):
        return False
    return not any(_is_hazard(target, x) for target in written for x in own)


def _read(one: Link) -> list[Array]:
    return [one.bias] if one.operands is None else [each for each in one.operands if isinstance(each, np.ndarray)]


def _is_hazard(target: Array, x: Array) -> bool:
    """Whether a block of one may lie in another block of the other."""
    if target is x or not np.may_share_memory(target, x):
        return False
    return target.size != x.size or target.ctypes.data != x.ctypes.data


def reads_of(chain: Sequence[Link], array: Array) -> int:
    """How often ``chain`` reads all of ``array``, in its order."""
    return sum(x is array for each in chain for x in each.operands or () if each.value.size == array.size)


def join(chain: list[Link], keeps: bool, moving: Mapping[int, Moving]) -> None:
    """Have the steps of ``chain`` computed by the first one's calls; what the others alone would hold is given up.

    Args:
        moving: where arrays are in a call that may be elsewhere in the next, by their ids.
    """
    first = chain[0].step
    parts = _parts([each for each in chain if each.operands is not None], moving) if keeps else []
    needed = {id(array) for part in parts for array in part.needs()}
    terms: dict[int, Term] = {}
    results: list[tuple[Term, Array | Moving | None]] = []
    given_up = []
    for each in chain:
        made = _forward(each, terms, moving)
        terms[id(each.value)] = made
        reads = reads_of(chain, each.value)
        if each.uses > reads or id(each.value) in needed or each.relu:
            results.append((made, moving.get(id(each.value), each.value)))
        elif each.operands is not None:  # else a product is there
            given_up.append(each)
    program = Program(results, chain[0].value.size, chain[0].value.dtype)
    first.calls = [*(first.calls[:-1] if chain[0].operands is None else ()), *program.calls]
    first.kept = program.kept
    for each in chain[1:]:
        each.step.calls = []
    for part in parts:
        part.take_place(given_up)
    if keeps:
        for each in given_up:
            each.step.value = nowhere(each.value)


def nowhere(array: Array) -> Array:
    """What stands for an array of this shape and dtype that is not there: nodes of the tape ask for no more."""
    return np.broadcast_to(np.empty((), array.dtype), array.shape)


def _forward(one: Link, terms: Mapping[int, Term], moving: Mapping[int, Moving]) -> Term:
    if one.operands is None:
        made = FORWARD["add"](Term(value=one.value), Term(value=one.bias))
        return FORWARD["relu"](made) if one.relu else made
    return FORWARD[one.operator](*[terms.get(id(x)) or Term(value=moving.get(id(x), x)) for x in one.operands])


def _parts(links: list[Link], moving: Mapping[int, Moving]) -> list[_Part]:
    """``links`` cut so that of each part only the last result is read by others."""
    parts, waiting = [], [links] if links else []
    while waiting:
        part = waiting.pop()
        reads = {id(each.value): 0 for each in part}
        for one in part:
            for array in one.operands or ():
                if id(array) in reads:
                    reads[id(array)] += 1
        cut = next((i for i, each in enumerate(part[:-1], 1) if each.uses > reads[id(each.value)]), None)
        if cut is None:
            parts.append(_Part(part, moving))
        else:
            waiting += [part[:cut], part[cut:]]
    return parts


class _Part:
    """Links of which one result is read by others: one node of the tape, and its pullback."""

    def __init__(self, links: list[Link], moving: Mapping[int, Moving]) -> None:
        self._links = links
        own = {id(each.value): number for number, each in enumerate(links)}
        self._operators = [each.operator for each in links]
        self._values = [Term(value=moving.get(id(each.value), each.value)) for each in links]
        self._operands = [
            [own.get(id(x), Term(value=moving.get(id(x), x))) for x in each.operands or ()] for each in links
        ]
        """Of each link: the numbers of earlier ones, and terms."""
        self._size, self._dtype, self._shape = links[-1].value.size, links[-1].value.dtype, links[-1].value.shape
        self._programs: dict[tuple[bool, ...], tuple[Term, list[Term], Program | None]] = {}

    def needs(self) -> list[Array]:
        """The arrays that backward reads."""
        count = sum(isinstance(x, Term) for operands in self._operands for x in operands)
        _, results = self._gradients([True] * count)
        waiting, found = list(results), []
        while waiting:
            term = waiting.pop()
            waiting += term.operands
            value = term.value.array if isinstance(term.value, Moving) else term.value
            found += [] if term.operation else [value]
        return found

    def take_place(self, given_up: list[Link]) -> None:
        """Be the node of the last link; those of the others are left out."""
        steps = [each.step for each in self._links]
        sources = []
        for step, operands in zip(reversed(steps), reversed(self._operands), strict=True):
            sources += [source for source, x in zip(step.sources, operands, strict=True) if isinstance(x, Term)]
            step.pullback = None
        steps[-1].pullback, steps[-1].sources = self._pull_back, tuple(sources)
        for link, value in zip(self._links, self._values, strict=True):
            if link in given_up:
                value.value = None
        self._links = []

    def _gradients(self, wanted: Sequence[bool]) -> tuple[Term, list[Term]]:
        """The gradient of the result, and those of the operands from outside that are wanted.

        They come in the order in which backward would add them up: operators from the last to the first.
        """
        head = Term()
        of: dict[int, Term] = {len(self._operators) - 1: head}
        results = []
        flags = iter(wanted)
        for number in range(len(self._operators) - 1, -1, -1):
            operands = self._operands[number]
            given = [x if isinstance(x, Term) else self._values[x] for x in operands]
            for x, formula in zip(operands, BACKWARD[self._operators[number]], strict=True):
                if isinstance(x, Term):
                    if next(flags):
                        results.append(formula(of[number], self._values[number], *given))
                else:
                    gradient = formula(of[number], self._values[number], *given)
                    of[x] = of[x] + gradient if x in of else gradient
        return head, results

    def _pull_back(self, gy: Array, *gradients: Gradient | None) -> None:
        wanted = tuple(each is not None for each in gradients)
        if wanted not in self._programs:
            head, results = self._gradients(wanted)
            made = [(each, None) for each in results if each is not head]
            self._programs[wanted] = head, results, Program(made, self._size, self._dtype) if made else None
        head, results, program = self._programs[wanted]
        into = [each for each in gradients if each is not None]
        if not _lies_in_order(gy):  # sums that follow would see another order in memory, and round otherwise
            for gradient, found in zip(into, evaluated(results, {head.number: gy}), strict=True):
                gradient.add(found)
            return
        places = []
        met = set()
        for gradient, term in zip(into, results, strict=True):
            if term is not head:
                is_first = id(gradient) not in met
                places.append(gradient.empty() if is_first else empty(self._shape, self._dtype))
            met.add(id(gradient))
        if program is not None:
            program.run([*places, np.ascontiguousarray(gy)])
        found = iter(places)
        for gradient, term in zip(into, results, strict=True):
            gradient.add(gy if term is head else next(found))


def _lies_in_order(x: Array) -> bool:
    """Whether operations on ``x`` give C-contiguous arrays."""
    if x.flags.c_contiguous:
        return True
    strides = [stride for stride, n in zip(x.strides, x.shape, strict=True) if n > 1 and stride]
    return all(stride > 0 for stride in strides) and strides == sorted(strides, reverse=True)
