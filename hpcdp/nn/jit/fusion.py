"""Fusion: chains of elementwise operators computed in one compiled loop, forward and backward.

`FORWARD` and `BACKWARD` repeat the arithmetic of `autograd.operators` and of the layers, operation by operation, so a
chain gives the same bits; tests compare each operator. A `FusedProgram` computes terms by calls of the chain kernel
and, block by block, of NumPy.

A chain's forward is one program, which never writes intermediate results to memory if only the chain reads them. With a
tape, the chain is cut into parts with one result each. A part is one tape node, and its backward is one program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import kernels
from ...autograd.tape import Call, Gradient
from ...autograd.tensor import value_of
from ...core.arrays import Array
from ...kernels import empty
from ...kernels.reference import OPERATIONS
from .graph import CapturedTensor, Literal, Source

Number = int | float
_numbers = itertools.count()


class Moving:
    """Array of an input or result that differs from call to call."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


class Term:
    """Operand of a chain, or the result of an operation on terms.

    Args:
        operation: one of `kernels.reference.OPERATIONS` or of `BY_NUMPY`; "" for an operand.
        operands: the operands of the operation.
        value: an operand's array, `Moving` or number; None if each run passes it.
    """

    __slots__ = ("number", "operands", "operation", "value")

    def __init__(self, operation: str = "", operands: tuple[Term, ...] = (), value: Any = None) -> None:
        self.operation, self.operands, self.value = operation, operands, value
        self.number = next(_numbers)

    def __add__(self, other: Term | Number) -> Term:
        return _made("add", self, other)

    def __sub__(self, other: Term | Number) -> Term:
        return _made("subtract", self, other)

    def __rsub__(self, other: Number) -> Term:
        return _made("subtract", other, self)

    def __mul__(self, other: Term | Number) -> Term:
        return _made("multiply", self, other)

    def __rmul__(self, other: Number) -> Term:
        return _made("multiply", other, self)

    def __truediv__(self, other: Term | Number) -> Term:
        return _made("divide", self, other)

    def __rtruediv__(self, other: Number) -> Term:
        return _made("divide", other, self)

    def __neg__(self) -> Term:
        return _made("negative", self)


def quiet_exp(x: Array, out: Array | None = None) -> Array:
    """Compute `numpy.exp` without an overflow warning, since an infinity is acceptable."""
    with np.errstate(over="ignore"):
        return np.exp(x, out=out)


BY_NUMPY: dict[str, Callable[..., Any]] = {"tanh": np.tanh, "exp": np.exp, "quiet_exp": quiet_exp, "log": np.log}
"""Operations whose rounding is NumPy's own; NumPy computes them block by block."""


def _made(operation: str, *operands: Term | Number) -> Term:
    return Term(operation, tuple(operand if isinstance(operand, Term) else Term(value=operand) for operand in operands))


def _operation(name: str) -> Callable[..., Term]:
    return lambda *operands: _made(name, *operands)


_where_positive, _greater, _equal = _operation("where_positive"), _operation("greater"), _operation("equal")
_maximum, _sign, _formulas_gelu_gradient, _quiet_exp = map(
    _operation, ("maximum", "sign", "gelu_gradient", "quiet_exp")
)


def _of_extreme(loses: Callable[[Term, Term], Term]) -> tuple[Callable[..., Term], Callable[..., Term]]:
    def gradient(g: Term, a: Term, b: Term) -> Term:
        share = 1 - loses(a, b) - 0.5 * _equal(a, b)
        return _where_positive(share, g * share)

    return lambda g, y, a, b: gradient(g, a, b), lambda g, y, a, b: gradient(g, b, a)


FORWARD: dict[str, Callable[..., Term]] = {
    **{name: _operation(name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{name: _operation(name) for name in ("negative", "abs", "sqrt", "exp", "log", "tanh", "gelu")},
    "sigmoid": lambda x: 1 / (_quiet_exp(-x) + 1),
    "relu": lambda x: _maximum(x, 0),
}
"""Result of each operator, as a function of its operands."""

BACKWARD: dict[str, tuple[Callable[..., Term], ...]] = {
    "add": (lambda g, y, a, b: g, lambda g, y, a, b: g),
    "subtract": (lambda g, y, a, b: g, lambda g, y, a, b: -g),
    "multiply": (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a),
    "divide": (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * y / b),
    "maximum": _of_extreme(lambda a, b: _greater(b, a)),
    "minimum": _of_extreme(_greater),
    "negative": (lambda g, y, x: -g,),
    "abs": (lambda g, y, x: g * _sign(x),),
    "sqrt": (lambda g, y, x: g / (2 * y),),
    "exp": (lambda g, y, x: g * y,),
    "log": (lambda g, y, x: g / x,),
    "tanh": (lambda g, y, x: (1 - y * y) * g,),
    "gelu": (lambda g, y, x: _formulas_gelu_gradient(g, x),),
    "sigmoid": (lambda g, y, x: (1 - y) * y * g,),
    "relu": (lambda g, y, x: _where_positive(y, g),),
}
"""Gradients of each operator's operands, as functions of the result's gradient, the result and the operands."""


def in_order(results: Iterable[Term]) -> list[Term]:
    """Return the operations that ``results`` need, each once, in order of creation."""
    operations: dict[int, Term] = {}
    waiting = list(results)
    while waiting:
        term = waiting.pop()
        if term.operation and term.number not in operations:
            operations[term.number] = term
            waiting += term.operands
    return [operations[number] for number in sorted(operations)]


_PIECE = 32768
"""Elements of a NumPy call, if NumPy takes part: they fit the second-level cache, and outweigh the call overhead."""
_MOST_PIECES = 1024
_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}


Operation = tuple[str, int, int, int]
"""Operation name, the places of its operands, and the place of its result."""


class _Operand(NamedTuple):
    array: Array
    """Flat array; None if each run passes it."""
    moves: bool = False
    """True if its elements advance with the block."""
    is_row: bool = False
    """True if its elements repeat with each period."""
    is_whole: bool = False
    """True if it has all elements, not only those of a piece."""


class FusedProgram:
    """Computation of terms for all elements of a chain.

    Args:
        results: terms, each with its C-contiguous array or a `Moving`, or None if each run passes it. An array may be
            that of an operand which no later term reads.
        size: elements of each result. Operands have as many, or one element, or a common number of elements that
            repeat.
        dtype: dtype of all arrays.
    """

    def __init__(self, results: Sequence[tuple[Term, Array | Moving | None]], size: int, dtype: np.dtype) -> None:
        self._size, self._dtype = size, dtype
        self._kernel = kernels.load("networks")
        self._terms = in_order(term for term, _ in results)
        self._is_mixed = any(term.operation in BY_NUMPY for term in self._terms)
        self._operands: list[_Operand] = []
        self._repeated: list[Array] = []
        self._fillings: list[tuple[int, int, int, int]] = []
        self._numbers: dict[Any, int] = {}
        self._moving: list[tuple[int, Moving]] = []
        self._places: dict[int, int] = {}
        """Places of terms among the operands, by term number."""
        leaves = [operand for term in self._terms for operand in term.operands if not operand.operation]
        repeated = {leaf.value.size for leaf in leaves if isinstance(leaf.value, np.ndarray)} - {1, size}
        (self._row,) = repeated or {0}
        block = self._kernel.CHAIN_BLOCK
        self._is_short = self._row <= block // 2
        self._period = size if not self._row else block // self._row * self._row if self._is_short else self._row
        self._piece = _piece(size, max(1, self._row))
        self._passed = [self._add(_Operand(None, moves=True, is_whole=True)) for _, array in results if array is None]
        """Operands passed to each run: results, then others in the order of their first use."""
        operations = list(self._operations(results))
        self._codes: list[tuple[Array, Array]] = []
        """Codes of the kernel's calls, and the byte offset of each call's piece."""
        self._now: dict[int, Array] = {}
        """Flat arrays passed to this run."""
        self._made = list(self._pieces(operations) if self._is_mixed else self._kernel_calls(operations, [0]))
        self.calls: list[Call] = [(self.run, ())] if self._moving else self._made

    @property
    def kept(self) -> list[Array]:
        """The arrays that calls refer to by address."""
        return [*self._repeated, *(operand.array for operand in self._operands)]

    def run(self, passed: Sequence[Array] = ()) -> None:
        """Compute with the arrays passed, C-contiguous: results first, then operands."""
        moved = [(number, moving.array) for number, moving in self._moving]
        for number, array in (*zip(self._passed, passed, strict=True), *moved):
            address = _address(array)
            for codes, before in self._codes:
                if len(before) == 1:  # setting a number is twenty times faster than an array
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
        """Yield each operation with the places of its operands and its result."""
        targets: dict[int, list[int]] = {}
        passed = iter(self._passed)
        for term, array in results:
            place = next(passed) if array is None else self._whole(array)
            targets.setdefault(term.number, []).append(place)
        last = {operand.number: term.number for term in self._terms for operand in term.operands}
        free: list[int] = []
        for term in self._terms:
            a, b = (self._place(term.operands[i]) for i in (0, -1))
            places = targets.get(term.number, [])
            if places and (term.operation in BY_NUMPY or not self._overlap(places[0], a, b)):
                out = places.pop(0)
            else:
                out = free.pop() if free else self._add(self._scratch())
            self._places[term.number] = out
            yield term.operation, a, b, out
            for other in places:
                yield "copy", out, out, other
            scratch = {self._places[operand.number] for operand in (*term.operands, term)
                       if operand.operation and last.get(operand.number, term.number) == term.number}  # fmt: skip
            free += [place for place in scratch if not self._operands[place].is_whole]

    def _overlap(self, target: int, *others: int) -> bool:
        written, *read = [self._operands[place].array for place in (target, *others)]
        return written is not None and any(x is not None and np.may_share_memory(written, x) for x in read)

    def _scratch(self) -> _Operand:
        if self._is_mixed:
            return _Operand(np.empty(min(self._piece, self._size), self._dtype), moves=True)
        return _Operand(np.empty(self._kernel.CHAIN_BLOCK, self._dtype))

    def _place(self, term: Term) -> int:
        if term.number not in self._places:
            self._places[term.number] = self._leaf(term.value)
        return self._places[term.number]

    def _leaf(self, value: Any) -> int:
        block = self._kernel.CHAIN_BLOCK
        if value is None:
            number = self._add(_Operand(None, moves=True, is_whole=True))
            self._passed.append(number)
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
        """Return the kernel's calls of ``operations`` for the pieces that begin at ``starts``."""
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
        function, _ = direct((self._kernel.run_chain, (self._codes[-1][0][0], zero)))
        return [(function, (code, zero)) for code in self._codes[-1][0]]

    def _pieces(self, operations: Iterable[Operation]) -> Iterable[Call]:
        """Yield calls of the kernel and of NumPy in turn, for one piece after the other."""
        starts = range(0, self._size, self._piece)
        parts = []
        for by_numpy, some in itertools.groupby(operations, lambda operation: operation[0] in BY_NUMPY):
            if not by_numpy:
                parts.append(self._kernel_calls(list(some), starts))
                continue
            for name, a, _, out in some:
                is_known = all(self._operands[place].array is not None for place in (a, out))
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
    """Return a compiled kernel's call without Numba's dispatch, which doubles the time of a small one."""
    function: Any = call[0]
    args = call[1]
    if not hasattr(function, "typeof_pyval"):
        return call
    return function.compile(tuple(map(function.typeof_pyval, args))), args


def _piece(size: int, row: int) -> int:
    """Return the number of elements of a NumPy call, a multiple of ``row``."""
    least = max(_PIECE, -(-size // _MOST_PIECES))
    return max(1, least // row) * row


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def evaluated(terms: Sequence[Term], passed: dict[int, Array]) -> list[Array]:
    """Compute ``terms`` one operation at a time in NumPy's own memory layout; ``passed`` are values by term number."""
    values: dict[int, Any] = dict(passed)
    functions: dict[str, Callable[..., Any]] = {**OPERATIONS, **BY_NUMPY, "gelu_gradient": _gelu_gradient}
    for term in in_order(terms):
        inputs = [values.get(operand.number, operand.value) for operand in term.operands]
        operands = [x.array if isinstance(x, Moving) else x for x in inputs]
        values[term.number] = functions[term.operation](*operands)
    return [values[term.number] for term in terms]


def _gelu_gradient(gy: Array, x: Array) -> Array:
    out = np.empty_like(x)
    kernels.load("networks").gelu_gradient(np.ascontiguousarray(gy), x, out)
    return out


_WITH_EPILOGUE = ("affine", "dense")
_LONGEST = 64
"""Operators of a chain at most: each is compared with all before it, and needs a block of the cache."""


class ChainLink:
    """Operator call as a link of a chain.

    Args:
        step: the plan's step.
        operator: its name.
        uses: number of readers.
        operands: arrays and numbers; None for the epilogue of a product, which adds a bias, and optionally a ReLU, to
            ``value`` in place.
    """

    def __init__(self, step: Any, operator: str, uses: int, operands: list[Any] | None) -> None:
        self.step, self.operator, self.uses = step, operator, uses
        self.operands = operands
        self.bias: Array = None
        self.relu = False

    @property
    def value(self) -> Array:
        """The result's array."""
        return self.step.value


def link(
    step: Any, operator: str, uses: int, operands: Sequence[Any], keeps: bool, held: Sequence[Any]
) -> ChainLink | None:
    """Return the call as a link, or None if it cannot be one; ``keeps`` says whether backward may follow."""
    value = step.value
    is_known = value.dtype.char in "fd" and value.dtype.isnative and value.flags.c_contiguous
    if not step.calls or not is_known or not value.size:
        return None
    if operator in _WITH_EPILOGUE and step.calls[-1][0] is kernels.load("networks").add_bias:
        into, bias, relu = step.calls[-1][1]
        epilogue = ChainLink(step, operator, uses, None)
        epilogue.bias, epilogue.relu = bias, relu
        return epilogue if into.size == value.size else None
    if operator not in FORWARD or (keeps and step.pullback is None):
        return None
    values = [value_of(operand) for operand in operands]
    arrays = [x for x in values if isinstance(x, np.ndarray) and x.shape == value.shape]
    rows = [x for x in values if isinstance(x, np.ndarray) and x.shape != value.shape]
    if any(isinstance(x, list) for x in values):  # kernels accept arrays and numbers
        return None
    if not arrays or not all(x.dtype == value.dtype and x.flags.c_contiguous for x in (*arrays, *rows)):
        return None
    if not all(_is_row_of(row, value) for row in rows):
        return None
    for x, source in zip(values, step.sources, strict=True):
        if keeps and isinstance(x, np.ndarray) and x.shape != value.shape and _may_want_gradient(source, held):
            return None  # its gradient is a sum, whose order is NumPy's
    return ChainLink(step, operator, uses, values)


def _is_row_of(x: Array, value: Array) -> bool:
    lead = next((i for i, n in enumerate(x.shape) if n != 1), x.ndim)
    return value.shape[value.ndim - (x.ndim - lead) :] == x.shape[lead:]


def _may_want_gradient(source: Source, held: Sequence[Any]) -> bool:
    if isinstance(source, CapturedTensor):
        return not source.is_detached and hasattr(held[source.number], "grad_req")
    return source is not None and not isinstance(source, Literal)


def chained(steps: Sequence[Any], links: Sequence[ChainLink | None]) -> list[list[ChainLink]]:
    """Return chains of consecutive links that save a pass over memory: those with at least two kernel operations.

    Steps without calls, which are views, do not interrupt a chain.
    """
    chains: list[list[ChainLink]] = [[]]
    for step, op in zip(steps, links, strict=True):
        if op is None:
            if step.calls:
                chains.append([])
            continue
        if op.operands is None or len(chains[-1]) == _LONGEST or not _fits(chains[-1], op):
            chains.append([])
        chains[-1].append(op)
    return [chain for chain in chains if len(chain) > 1 and _num_compiled(chain) > 1]


def _num_compiled(chain: list[ChainLink]) -> int:
    terms = in_order(_forward(op, {}, {}) for op in chain)
    return sum(term.operation not in BY_NUMPY for term in terms)


def _fits(chain: list[ChainLink], following: ChainLink) -> bool:
    value = following.value
    if chain and (value.size != chain[0].value.size or value.dtype != chain[0].value.dtype):
        return False
    before = [x for link in chain for x in _read(link)]
    read = _read(following)
    if len({x.size for x in (*before, *read)} - {1, value.size}) > 1:
        return False  # rows of several lengths
    written = [link.value for link in chain]
    if any(_is_hazard(value, x) for x in (*before, *read, *written)):
        return False
    return not any(_is_hazard(target, x) for target in written for x in read)


def _read(link: ChainLink) -> list[Array]:
    return [link.bias] if link.operands is None else [x for x in link.operands if isinstance(x, np.ndarray)]


def _is_hazard(target: Array, x: Array) -> bool:
    """Return whether a block of one may overlap another block of the other."""
    if target is x or not np.may_share_memory(target, x):
        return False
    return target.size != x.size or target.ctypes.data != x.ctypes.data


def reads_of(chain: Sequence[ChainLink], array: Array) -> int:
    """Return how often ``chain`` reads all of ``array`` in order."""
    return sum(x is array for op in chain for x in op.operands or () if op.value.size == array.size)


def join(chain: list[ChainLink], keeps: bool, moving: Mapping[int, Moving]) -> None:
    """Compute all steps of ``chain`` by the first one's calls, without memory for results that only the chain reads.

    Args:
        chain: the links.
        keeps: whether backward may follow.
        moving: arrays that differ from call to call, by the ids of their first ones.
    """
    first = chain[0].step
    parts = _parts([op for op in chain if op.operands is not None], moving) if keeps else []
    needed = {id(array) for part in parts for array in part.needs()}
    terms: dict[int, Term] = {}
    results: list[tuple[Term, Array | Moving | None]] = []
    given_up = []
    for op in chain:
        made = _forward(op, terms, moving)
        terms[id(op.value)] = made
        reads = reads_of(chain, op.value)
        if op.uses > reads or id(op.value) in needed or op.relu:
            results.append((made, moving.get(id(op.value), op.value)))
        elif op.operands is not None:  # otherwise the product needs the memory
            given_up.append(op)
    program = FusedProgram(results, chain[0].value.size, chain[0].value.dtype)
    first.calls = [*(first.calls[:-1] if chain[0].operands is None else ()), *program.calls]
    first.kept = program.kept
    for op in chain[1:]:
        op.step.calls = []
    for part in parts:
        part.take_place(given_up)
    if keeps:
        for op in given_up:
            op.step.value = nowhere(op.value)


def nowhere(array: Array) -> Array:
    """Return a placeholder of the array's shape and dtype without memory, which is all that tape nodes need."""
    return np.broadcast_to(np.empty((), array.dtype), array.shape)


def _forward(link: ChainLink, terms: Mapping[int, Term], moving: Mapping[int, Moving]) -> Term:
    if link.operands is None:
        made = FORWARD["add"](Term(value=link.value), Term(value=link.bias))
        return FORWARD["relu"](made) if link.relu else made
    return FORWARD[link.operator](*[terms.get(id(x)) or Term(value=moving.get(id(x), x)) for x in link.operands])


def _parts(links: list[ChainLink], moving: Mapping[int, Moving]) -> list[_ChainLinks]:
    """Cut ``links`` so that only the last result of each part has other readers."""
    parts, waiting = [], [links] if links else []
    while waiting:
        part = waiting.pop()
        reads = {id(op.value): 0 for op in part}
        for link in part:
            for array in link.operands or ():
                if id(array) in reads:
                    reads[id(array)] += 1
        cut = next((i for i, op in enumerate(part[:-1], 1) if op.uses > reads[id(op.value)]), None)
        if cut is None:
            parts.append(_ChainLinks(part, moving))
        else:
            waiting += [part[:cut], part[cut:]]
    return parts


class _ChainLinks:
    """Links with one result read by others: one tape node, and its pullback."""

    def __init__(self, links: list[ChainLink], moving: Mapping[int, Moving]) -> None:
        self._links = links
        own = {id(op.value): number for number, op in enumerate(links)}
        self._operators = [op.operator for op in links]
        self._values = [Term(value=moving.get(id(op.value), op.value)) for op in links]
        self._operands = [[own.get(id(x), Term(value=moving.get(id(x), x))) for x in op.operands or ()] for op in links]
        """Operands of each link: numbers of earlier links, and terms."""
        self._size, self._dtype, self._shape = links[-1].value.size, links[-1].value.dtype, links[-1].value.shape
        self._programs: dict[tuple[bool, ...], tuple[Term, list[Term], FusedProgram | None]] = {}

    def needs(self) -> list[Array]:
        """Return the arrays that backward reads."""
        count = sum(isinstance(x, Term) for operands in self._operands for x in operands)
        _, results = self._gradients([True] * count)
        waiting, arrays = list(results), []
        while waiting:
            term = waiting.pop()
            waiting += term.operands
            value = term.value.array if isinstance(term.value, Moving) else term.value
            arrays += [] if term.operation else [value]
        return arrays

    def take_place(self, given_up: list[ChainLink]) -> None:
        """Become the tape node of the last link and remove those of the others."""
        steps = [op.step for op in self._links]
        sources = []
        for step, operands in zip(reversed(steps), reversed(self._operands), strict=True):
            sources += [source for source, x in zip(step.sources, operands, strict=True) if isinstance(x, Term)]
            step.pullback = None
        steps[-1].pullback, steps[-1].sources = self._pull_back, tuple(sources)
        for link, value in zip(self._links, self._values, strict=True):
            if link in given_up:
                value.value = None
        self._links = []

    def _gradients(self, has_gradient: Sequence[bool]) -> tuple[Term, list[Term]]:
        """Return the term of the result's gradient, and the gradients of the wanted outside operands.

        They are in the order in which backward would sum them: operators from the last to the first.
        """
        head = Term()
        of: dict[int, Term] = {len(self._operators) - 1: head}
        results = []
        flags = iter(has_gradient)
        for number in range(len(self._operators) - 1, -1, -1):
            operands = self._operands[number]
            values = [x if isinstance(x, Term) else self._values[x] for x in operands]
            for x, formula in zip(operands, BACKWARD[self._operators[number]], strict=True):
                if isinstance(x, Term):
                    if next(flags):
                        results.append(formula(of[number], self._values[number], *values))
                else:
                    gradient = formula(of[number], self._values[number], *values)
                    of[x] = of[x] + gradient if x in of else gradient
        return head, results

    def _pull_back(self, gy: Array, *gradients: Gradient | None) -> None:
        has_gradient = tuple(gradient is not None for gradient in gradients)
        if has_gradient not in self._programs:
            head, results = self._gradients(has_gradient)
            made = [(result, None) for result in results if result is not head]
            self._programs[has_gradient] = head, results, FusedProgram(made, self._size, self._dtype) if made else None
        head, results, program = self._programs[has_gradient]
        into = [gradient for gradient in gradients if gradient is not None]
        if not _lies_in_order(gy):  # later sums would see another memory order, and round differently
            for gradient, value in zip(into, evaluated(results, {head.number: gy}), strict=True):
                gradient.add(value)
            return
        places = []
        written = set()
        for gradient, term in zip(into, results, strict=True):
            if term is not head:
                is_first = id(gradient) not in written
                places.append(gradient.empty() if is_first else empty(self._shape, self._dtype))
            written.add(id(gradient))
        if program is not None:
            program.run([*places, np.ascontiguousarray(gy)])
        values = iter(places)
        for gradient, term in zip(into, results, strict=True):
            gradient.add(gy if term is head else next(values))


def _lies_in_order(x: Array) -> bool:
    """Return whether operations on ``x`` give C-contiguous arrays."""
    if x.flags.c_contiguous:
        return True
    strides = [stride for stride, n in zip(x.strides, x.shape, strict=True) if n > 1 and stride]
    return all(stride > 0 for stride in strides) and strides == sorted(strides, reverse=True)
