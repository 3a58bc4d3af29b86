"""Terms made into calls that compute them: of the kernel for chains, and of NumPy, block by block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import kernels
from ...arrays import Array
from ...autograd.registry import Call
from ...kernels.reference.chain import OPERATIONS
from .formulas import BY_NUMPY, Moving, Term, in_order

_PIECE = 32768
"""Elements that NumPy is given at a time, where it takes part: they stay in the second-level cache, and a call of NumPy
takes less time than they do."""
_MOST_PIECES = 1024
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}


Operation = tuple[str, int, int, int]
"""Its name, the places of its operands, and that of its result."""


class _Operand(NamedTuple):
    array: Array
    """Flat; None where it is told later."""
    moves: bool = False
    """Whether its elements are those of the block."""
    is_row: bool = False
    """Whether they begin again after each period."""
    is_whole: bool = False
    """Whether it has all elements, and not only those of a piece."""


class Program:
    """Computes terms for all elements of a chain.

    Args:
        results: terms, and the C-contiguous array for each, or a `Moving`; None: told in each run. An array may lie
            where an operand does that no later term reads.
        size: elements of each result. Operands have as many, or fewer, all of one number, that are repeated, or one.
        dtype: of all arrays.
    """

    def __init__(self, results: Sequence[tuple[Term, Array | Moving | None]], size: int, dtype: np.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._kernel = kernels.load("chain")
        self._terms = in_order(term for term, _ in results)
        self._is_mixed = any(term.operation in BY_NUMPY for term in self._terms)
        self._operands: list[_Operand] = []
        self._repeated: list[Array] = []
        self._fillings: list[tuple[int, int, int, int]] = []
        self._numbers: dict[Any, int] = {}
        self._moving: list[tuple[int, Moving]] = []
        self._places: dict[int, int] = {}
        """Of terms, by number, among the operands."""
        leaves = [each for term in self._terms for each in term.operands if not each.operation]
        repeated = {each.value.size for each in leaves if isinstance(each.value, np.ndarray)} - {1, size}
        (self._row,) = repeated or {0}
        block = self._kernel.BLOCK
        self._is_short = self._row <= block // 2
        self._period = size if not self._row else block // self._row * self._row if self._is_short else self._row
        self._piece = _piece(size, max(1, self._row))
        self._told = [self._add(_Operand(None, moves=True, is_whole=True)) for _, array in results if array is None]
        """The operands that are told: results, then others in the order in which they are met."""
        operations = list(self._operations(results))
        self._codes: list[tuple[Array, Array]] = []
        """The code of the kernel's calls, one after the other, and how many bytes of the whole come before each."""
        self._now: dict[int, Array] = {}
        """Flat arrays of what was not known, in this run."""
        self._made = list(self._pieces(operations) if self._is_mixed else self._kernel_calls(operations, [0]))
        self.calls: list[Call] = [(self.run, ())] if self._moving else self._made

    @property
    def kept(self) -> list[Array]:
        """The arrays that the calls know by their addresses."""
        return [*self._repeated, *(each.array for each in self._operands)]

    def run(self, told: Sequence[Array] = ()) -> None:
        """Compute into, and from, arrays that are told: results first, then operands; C-contiguous."""
        moved = [(number, moving.array) for number, moving in self._moving]
        for number, array in (*zip(self._told, told, strict=True), *moved):
            address = _address(array)
            for codes, before in self._codes:
                if len(before) == 1:  # a number is set in a twentieth of the time that an array is
                    codes[0, 1 + number, 0] = address
                else:
                    codes[:, 1 + number, 0] = address + before
            if self._is_mixed:
                self._now[number] = array.reshape(-1)
        for function, args in self._made:
            function(*args)
        self._now.clear()

    def _whole(self, value: Array | Moving) -> int:
        if isinstance(value, Moving):
            number = self._add(_Operand(None, moves=True, is_whole=True))
            self._moving.append((number, value))
            return number
        return self._add(_Operand(value.reshape(-1), moves=True, is_whole=True))

    def _add(self, operand: _Operand) -> int:
        self._operands.append(operand)
        return len(self._operands) - 1

    def _operations(self, results: Sequence[tuple[Term, Array | Moving | None]]) -> Iterable[Operation]:
        """Each operation with the places of its operands and of its result."""
        targets: dict[int, list[int]] = {}
        told = iter(self._told)
        for term, array in results:
            place = next(told) if array is None else self._whole(array)
            targets.setdefault(term.number, []).append(place)
        last = {each.number: term.number for term in self._terms for each in term.operands}
        free: list[int] = []
        for term in self._terms:
            a, b = (self._place(term.operands[i]) for i in (0, -1))
            wanted = targets.get(term.number, [])
            if wanted and (term.operation in BY_NUMPY or not self._overlap(wanted[0], a, b)):
                out = wanted.pop(0)
            else:
                out = free.pop() if free else self._add(self._scratch())
            self._places[term.number] = out
            yield term.operation, a, b, out
            for other in wanted:
                yield "copy", out, out, other
            scratch = {self._places[each.number] for each in (*term.operands, term)
                       if each.operation and last.get(each.number, term.number) == term.number}  # fmt: skip
            free += [each for each in scratch if not self._operands[each].is_whole]

    def _overlap(self, target: int, *others: int) -> bool:
        written, *read = [self._operands[each].array for each in (target, *others)]
        return written is not None and any(x is not None and np.may_share_memory(written, x) for x in read)

    def _scratch(self) -> _Operand:
        if self._is_mixed:
            return _Operand(np.empty(min(self._piece, self._size), self._dtype), moves=True)
        return _Operand(np.empty(self._kernel.BLOCK, self._dtype))

    def _place(self, term: Term) -> int:
        if term.number not in self._places:
            self._places[term.number] = self._leaf(term.value)
        return self._places[term.number]

    def _leaf(self, value: Any) -> int:
        block = self._kernel.BLOCK
        if value is None:
            number = self._add(_Operand(None, moves=True, is_whole=True))
            self._told.append(number)
            return number
        if isinstance(value, Moving):
            return self._whole(value)
        if not isinstance(value, np.ndarray):
            if value not in self._numbers:
                self._numbers[value] = self._add(_Operand(np.full(block, value, self._dtype)))
            return self._numbers[value]
        flat = value.reshape(-1)
        if flat.size == self._size:
            return self._whole(value)
        if flat.size == self._row and not self._is_short:
            return self._add(_Operand(flat, is_row=True))
        self._repeated.append(flat)
        filled = np.empty(block if flat.size == 1 else self._period, self._dtype)
        self._fillings.append((_address(flat), flat.size, _address(filled), filled.size))
        return self._add(_Operand(filled, is_row=flat.size > 1))

    def _kernel_calls(self, operations: Sequence[Operation], starts: Sequence[int]) -> list[Call]:
        """The kernel's calls of ``operations`` for the elements from each of ``starts`` on."""
        size = self._dtype.itemsize
        fillings = [] if self._is_mixed and operations else self._fillings
        codes = []
        for start in starts:
            count = min(self._piece, self._size - start) if self._is_mixed else self._size
            head = (count if operations else 0, min(self._period, count), len(self._operands), len(fillings))
            places = [
                (0 if array is None else _address(array) + start * size * is_whole, size * moves, size * is_row, 0)
                for array, moves, is_row, is_whole in self._operands
            ]
            codes.append([head, *places, *fillings, *((_NUMBERS[name], a, b, out) for name, a, b, out in operations)])
        self._codes.append((np.array(codes, np.int64), size * np.array(starts)))
        zero = self._dtype.type(0)
        function, _ = direct((self._kernel.run, (self._codes[-1][0][0], zero)))
        return [(function, (code, zero)) for code in self._codes[-1][0]]

    def _pieces(self, operations: Iterable[Operation]) -> Iterable[Call]:
        """Calls of the kernel and of NumPy in turn, for one piece after the other."""
        starts = range(0, self._size, self._piece)
        parts = []
        for by_numpy, some in itertools.groupby(operations, lambda each: each[0] in BY_NUMPY):
            if not by_numpy:
                parts.append(self._kernel_calls(list(some), starts))
                continue
            for name, a, _, out in some:
                is_known = all(self._operands[each].array is not None for each in (a, out))
                make = self._bound if is_known else self._to_bind
                parts.append([make(BY_NUMPY[name], a, out, start) for start in starts])
        yield from self._kernel_calls([], [0]) if self._fillings else ()
        for calls in zip(*parts, strict=True):
            yield from calls

    def _bound(self, function: Callable[..., Any], a: int, out: int, start: int) -> Call:
        return function, (self._of_piece(a, start), self._of_piece(out, start))

    def _to_bind(self, function: Callable[..., Any], a: int, out: int, start: int) -> Call:
        return lambda: function(self._of_piece(a, start), self._of_piece(out, start)), ()

    def _of_piece(self, number: int, start: int) -> Array:
        operand = self._operands[number]
        array = self._now[number] if operand.array is None else operand.array
        first = start if operand.is_whole else 0
        return array[first : first + min(self._piece, self._size - start)]


def direct(call: Call) -> Call:
    """A compiled kernel without the choice among its versions, which takes as long again as a call of a small one."""
    function: Any = call[0]
    args = call[1]
    if not hasattr(function, "typeof_pyval"):
        return call
    return function.compile(tuple(map(function.typeof_pyval, args))), args


def _piece(size: int, row: int) -> int:
    """How many elements NumPy is given at a time: whole rows."""
    least = max(_PIECE, -(-size // _MOST_PIECES))
    return max(1, least // row) * row


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def evaluated(terms: Sequence[Term], told: dict[int, Array]) -> list[Array]:
    """The values of ``terms`` one operation after the other, laid out in memory as NumPy does it.

    Args:
        told: arrays of the terms that were not known, by number.
    """
    values: dict[int, Any] = dict(told)
    functions: dict[str, Callable[..., Any]] = {**OPERATIONS, **BY_NUMPY, "gelu_gradient": _gelu_gradient}
    for term in in_order(terms):
        given = [values.get(each.number, each.value) for each in term.operands]
        operands = [each.array if isinstance(each, Moving) else each for each in given]
        values[term.number] = functions[term.operation](*operands)
    return [values[term.number] for term in terms]


def _gelu_gradient(gy: Array, x: Array) -> Array:
    out = np.empty_like(x)
    kernels.load("sequences").gelu_gradient(np.ascontiguousarray(gy), x, out)
    return out
