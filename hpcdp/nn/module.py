"""Modules: networks, their parameters, shapes that are found at the first call, and 16-bit copies.

Modules: parts of a network, their parameters and buffers.

Parameters whose shape is found when their layer is first called.

Operators on 16-bit floats: computed in float32 and rounded once, as Micikevicius et al., "Mixed precision
training", 2018, section 3.3, do with sums and products.

NumPy has no arithmetic for them that is worth the name, so on the host all operators of networks go this way. On
devices products do not: theirs multiply 16-bit factors and add up in float32 by themselves. Nor does what CUDA has
kernels of 16 bits for, which compute in float32 and round once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, overload

import numpy as np

from ..autograd import Gradient, Tensor, as_tensor, concatenate, on_tape
from ..autograd.tape import Again, Call, calls_of, captured, catch_up
from ..autograd.tensor import value_of
from ..core.arrays import (
    Array,
    array_namespace,
    dtype_of,
    from_host,
    has_namespace,
    is_cupy,
    is_float,
    is_half,
    is_host,
    on_device_of,
    to_host,
)
from ..core.checks import function, instances, same_names, whole_number
from ..core.devices import Device
from ..core.state import refuse_change, require_state
from ..errors import ConfigError, DeviceError, HpcdpError, UnsupportedError, type_named
from .jit import Graph, Hybrid, tracing
from .parameter import Parameter


class Module:
    """A part of a network. Subclasses set their parts as attributes and define ``forward``.

    Attributes that are a `Parameter` are learnt, other tensors are buffers (kept with the network, not learnt), modules
    are parts; the order of assignment is their order. What is in a list, tuple or dict is none of that. Whether layers
    train or predict is the calling thread's `autograd.is_training`.
    """

    needs_all_ranks = False
    """Whether in training all ranks must run its forwards and backwards together, those without samples, too."""
    gives_pieces = False
    """Whether it has its parts compute a batch in pieces; those that need all ranks take whole ones."""
    has_own_step = False
    """Whether it trains by a method of its own, and not by a recorded call."""
    keeps_float32 = False
    """Whether `to` leaves its own parameters and buffers float32 where others become floats of 16 bits."""
    is_traceable = True
    """Whether `hybridize` finds operators alone in its forward; a network with a part of which that is not so is called
    as usual."""
    _hybrid: Hybrid | None = None
    """Its plans, where it is hybridized."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(vars(self).get(name), Parameter) and not isinstance(value, Parameter) and hasattr(value, "dtype"):
            raise UnsupportedError(
                type(self).__name__, where=name, expected="a Parameter, or None", got=type(value).__name__,
                remedy=f"change its values, {name}[...] = values",
            )  # fmt: skip
        tracing.in_module(self, name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        tracing.in_module(self, name)
        object.__delattr__(self, name)

    def require_parts_of_this_rank(self, operation: str) -> None:
        """Raises `ConfigError` where a part needs all ranks: of a batch in pieces it would see a piece, and no other
        rank need have one then."""
        joint = next((part for part in self.modules() if part.needs_all_ranks), None)
        if joint is not None:
            name = type(joint).__name__
            raise ConfigError(
                operation, expected="layers of this rank alone, which take a piece of its batch", got=f"a {name}",
                remedy="take nn.BatchNorm, or each rank's whole batch on one device",
            )  # fmt: skip

    def forward(self, *inputs: Any) -> Any:
        """What the module computes from tensors; subclasses define it."""
        raise ConfigError(type(self).__name__, expected="a method forward(self, x)", got="none")

    def __call__(self, *inputs: Any) -> Tensor:
        """``forward`` of the inputs, arrays among them made tensors; by a plan where the module is hybridized.

        Returns:
            What ``forward`` returns: one tensor, as the type says, or several as a tuple.
        """
        if self._hybrid is not None:
            return self._hybrid(inputs)
        return self.forward(*map(as_tensor, inputs))

    def __getstate__(self) -> dict[str, Any]:
        catch_up()
        return vars(self).copy()

    def __copy__(self) -> Self:
        """The same parts in a module whose plans, where it is hybridized, are its own."""
        made = object.__new__(type(self))
        vars(made).update(self.__getstate__())
        if self._hybrid is not None:
            made.hybridize()
        return made

    def hybridize(self, active: bool = True) -> None:
        """From now on trace a call with inputs of new shapes or dtypes, and replay what it did for those that follow.

        Results, gradients and hooks are those of ``forward`` to the bit, without its Python: what it does beside
        operations on tensors (prints, counts) happens while it is traced only. See docs/hybrid.md.

        Args:
            active: False goes back to calling ``forward`` each time.

        Raises:
            HpcdpError: in a call, where ``forward`` needs the values of tensors to go on, assigns attributes, or takes
                arrays that are no attributes of the module; names the line.
        """
        self._hybrid = Hybrid(self) if active else None

    def graph(self) -> Graph:
        """What a hybridized network's last prediction in this thread has computed, call by call.

        Raises:
            ConfigError: it is not hybridized, or was not called yet outside of ``record()`` and ``asynchronous()``.
        """
        if self._hybrid is None:
            raise ConfigError(
                type(self).__name__, expected="a hybridized network", remedy="call hybridize(), then net(x) once"
            )
        return self._hybrid.graph()

    def export(self, path: str | Path) -> tuple[Path, Path]:
        """Write the graph of predictions (``path.json``) and what they read (``path.h5``), for `SymbolBlock.load`.

        The forward is traced again with other batches: where it calls other operators then, what is loaded takes
        batches of this size alone. Files that were there are replaced whole. Of several ranks one should write, as
        parameters are alike on all; where all do, the files are those of the last.

        Returns:
            The paths of both files.

        Raises:
            ConfigError: as `graph`, or something in it cannot be written down, or ``path`` is a folder's (``"nets/"``).
            DataError: the files cannot be written.
        """
        from .symbol_block import export

        catch_up()
        graph = self.graph()
        assert self._hybrid is not None
        return export(self._hybrid.for_export(graph), path)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Name and module of every direct part."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def _tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._tensors(f"{prefix}{name}.")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Path and parameter, each parameter once, in the order of assignment, which is that of first use."""
        seen = set()
        for name, tensor in self._tensors():
            if isinstance(tensor, Parameter) and tensor not in seen:
                seen.add(tensor)
                yield name, tensor

    def parameters(self) -> list[Parameter]:
        """All parameters, each once; sets each one's ``name`` to its path from this module.

        Warns of those in lists, tuples and dicts, which are no parts: they would not be trained, in silence.
        """
        found = []
        for name, parameter in self.named_parameters():
            parameter.name = name
            found.append(parameter)
        self._warn_of_unreached(set(found))
        return found

    def _warn_of_unreached(self, reached: set[Parameter]) -> None:
        for prefix, module in self._modules(""):
            for name, value in vars(module).items():
                if isinstance(value, (list, tuple, dict)) and not reached.issuperset(_parameters_in(value)):
                    warnings.warn(
                        f"{prefix}{name}: parameters in a {type(value).__name__} are not the network's, and neither "
                        "trained nor saved: keep layers in an nn.Sequential, or set each as an attribute",
                        stacklevel=3,
                    )

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Path and tensor of what is kept but not learnt, such as running statistics."""
        for name, tensor in self._tensors():
            if not isinstance(tensor, Parameter):
                yield name, tensor

    def named_generators(self) -> Iterator[tuple[str, np.random.Generator]]:
        """Path and random generator of every part that has one as an attribute, each generator once."""
        catch_up()
        seen = set()
        for prefix, module in self._modules(""):
            for name, value in vars(module).items():
                if isinstance(value, np.random.Generator) and id(value) not in seen:
                    seen.add(id(value))
                    yield prefix + name, value

    def modules(self) -> Iterator[Module]:
        """This module and all its parts, and theirs."""
        return (module for _, module in self._modules(""))

    def _modules(self, prefix: str) -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, module in self.children():
            yield from module._modules(f"{prefix}{name}.")

    def to(self, dtype: Any = None, like: Array = None) -> Module:
        """Replace all parameters and buffers by copies of another dtype, or in the namespace of the array ``like``.

        Buffers of integers and booleans, such as indices and masks, keep their dtype. Gradients start again from zero.
        Before a `Trainer` has the parameters, not after. In float16 or bfloat16 layers that normalise keep float32 for
        themselves, as Gluon's do in ``cast``, and operators compute as `nn.module` says.

        Args:
            dtype: or a `Device`, where the copies are then.

        Raises:
            ConfigError: ``dtype`` is none of floats, or ``like`` no array. Nothing is changed.
            DeviceError: the machine does not have the device; a RuntimeError. Nothing is changed.
        """
        catch_up()
        if like is not None and not hasattr(like, "dtype"):
            raise ConfigError("to", where="like", expected="an array", got=type(like).__name__)
        tensors = [tensor for _, tensor in self._tensors()]
        single = {id(each) for part in self.modules() if part.keeps_float32 for each in vars(part).values()}
        if isinstance(dtype, Device):
            copies = [dtype.put(tensor.data) for tensor in tensors]
        else:
            kind = None if dtype is None else _dtype(dtype)
            copies = [
                tensor.data if kind is None else _as_dtype(tensor, kind, id(tensor) in single) for tensor in tensors
            ]
        for tensor, data in zip(tensors, copies, strict=True):
            tensor.data = data if like is None else from_host(to_host(data), like)
            if isinstance(tensor, Parameter):
                tensor.attach_grad(tensor.grad_req)
        return self

    def state_dict(self) -> dict[str, Array]:
        """Parameters and buffers by path: the arrays themselves, not copies."""
        catch_up()
        return self._arrays()

    def _arrays(self) -> dict[str, Array]:
        return {name: tensor.changeable() for name, tensor in self._tensors()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy the arrays of a `state_dict` into this module's, in place; nothing is changed if any does not fit.

        Raises:
            ConfigError: a key is missing or too many, a value is no array, or one of another shape, or of a dtype that
                does not fit.
            HpcdpError: ranks hold a parameter together, and others may still read it: see
                `Trainer.changing_parameters`.
        """
        catch_up()
        require_state("a network", state)
        own = self._arrays()  # not what a state_dict of one's own has besides
        same_names("load_state_dict", "the network", own, state)
        others = {name: array for name, array in own.items() if state[name] is not array}
        given = {name: _fitting(name, state[name], array) for name, array in others.items()}
        for name, array in others.items():  # what a checkpoint has filled already it has on all ranks together
            refuse_change(array, name, "load_state_dict")
        for name, array in others.items():
            with on_device_of(array):
                array[...] = from_host(to_host(given[name]), array)

    def describe(self) -> str:
        """What stands in the parentheses of this module's own line in ``repr``."""
        return ""

    def __repr__(self) -> str:
        parts = [f"  ({name}): {part!r}".replace("\n", "\n  ") for name, part in self.children()]
        head = f"{type(self).__name__}({self.describe()}"
        return "\n".join([head, *parts, ")"]) if parts else head + ")"


def _parameters_in(value: Any) -> Iterator[Parameter]:
    """Those of modules, and those themselves, in lists, tuples and dicts, also in each other."""
    left, seen = [value], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, (list, tuple, dict)):
            if id(each) not in seen:  # one may be in itself
                seen.add(id(each))
                left += each.values() if isinstance(each, dict) else each
        elif isinstance(each, Module):
            yield from (parameter for _, parameter in each.named_parameters())
        elif isinstance(each, Parameter):
            yield each


def _fitting(name: str, given: Any, own: Array) -> Array:
    """What is given for ``own``, as an array; `ConfigError` where it does not fit."""
    expected = f"an array of shape {tuple(own.shape)}"
    if not hasattr(given, "shape"):
        raise ConfigError("load_state_dict", where=name, expected=expected, got=type_named(given))
    if tuple(given.shape) != tuple(own.shape):
        got = f"shape {tuple(given.shape)}"
        raise ConfigError("load_state_dict", where=name, expected=f"shape {tuple(own.shape)}", got=got)
    try:
        array = given if has_namespace(given) else np.asarray(given)
    except HpcdpError:
        raise
    except (RuntimeError, TypeError) as error:  # as PyTorch says it of a tensor that wants a gradient
        raise ConfigError("load_state_dict", where=name, expected=expected, got=error) from error
    are_floats = is_float(array.dtype) and is_float(own.dtype)  # NumPy casts bfloat16 to float16 only if told to
    if not (are_floats or np.can_cast(array.dtype, own.dtype, "same_kind")):
        raise ConfigError("load_state_dict", where=name, expected=f"numbers that fit {own.dtype}", got=array.dtype)
    return array


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = dtype_of(dtype)
    except TypeError as error:
        expected = "a dtype, or a device: hpcdp.cpu(0), hpcdp.gpu(0), world.device"
        raise ConfigError("to", where="dtype", expected=expected, got=repr(dtype)) from error
    if not is_float(found):
        raise ConfigError("to", where="dtype", expected="one of floats, as gradients have", got=str(found))
    return found


def _as_dtype(tensor: Tensor, dtype: np.dtype, is_kept_single: bool) -> Array:
    """A copy; of what is kept float32 where others get fewer bits, in that, and of what are no floats, as they are."""
    with on_device_of(tensor.data):
        if not is_float(tensor.dtype):
            return tensor.data.copy()
        return tensor.data.astype(np.float32 if is_kept_single and dtype.itemsize < 4 else dtype)


class Sequential(Module):
    """Modules one after the other, each called with the result of the one before; they are named "0", "1", ..."""

    def __init__(self, *modules: Module) -> None:
        self.add(*modules)

    def add(self, *modules: Module) -> None:
        """Put modules at the end."""
        for module in instances("Sequential", None, modules, Module, "modules"):
            number = len(self)
            while hasattr(self, str(number)):  # where one before it was deleted
                number += 1
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x

    def __iter__(self) -> Iterator[Module]:
        return iter([value for value in vars(self).values() if isinstance(value, Module)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> Module:
        """One of the modules; of a slice the same modules in a `Sequential`, as of which they are named anew."""
        found = list(self)[index]
        return Sequential(*found) if isinstance(found, list) else found


class HybridConcurrent(Module):
    """Modules side by side: each is called with the same input, and their results are joined along ``axis``.

    Hybridized, as any module can be, all of them are one plan.

    Source: Gluon's ``contrib.nn.HybridConcurrent``.
    """

    def __init__(self, *modules: Module, axis: int = 1) -> None:
        self.axis = whole_number("HybridConcurrent", "axis", axis, expected="the number of an axis")
        for number, module in enumerate(instances("HybridConcurrent", None, modules, Module, "modules")):
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        return concatenate([module(x) for _, module in self.children()], axis=self.axis)


Shape = tuple[int | None, ...]
Draw = Callable[[tuple[int, ...]], np.ndarray]


def parameter(shape: Shape, draw: Draw, initial: object = None) -> Parameter:
    """A parameter with the values of ``draw(shape)``: now, or, where a length is None, from its first `settle` on.

    Args:
        initial: the initialiser by which ``draw`` draws, if that is another one.
    """
    require_draw(draw)
    known = tuple(length for length in shape if length is not None)
    if len(known) == len(shape):
        return Parameter(drawn(draw, known))
    return Deferred(shape, draw, draw if initial is None else initial)


def require_draw(draw: object) -> None:
    """Raises `ConfigError` unless it is a function."""
    function("parameter", "weight_init", draw, "a function of a shape, such as nn.init.Xavier()")


def drawn(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """``draw(shape)`` in float32, as layers begin; `ConfigError` where it gives something else than so many numbers."""
    given = draw(shape)
    try:
        values = given.astype(np.float32, copy=False) if is_cupy(given) else np.asarray(given, np.float32)
    except HpcdpError:
        raise
    except (TypeError, ValueError):
        got = type_named(given)
    else:
        if values.shape == shape:
            return values
        got = f"shape {values.shape}"
    raise ConfigError("parameter", where="weight_init", expected=f"numbers of shape {shape}", got=got)


def settle(param: Parameter, length: int) -> None:
    """Where ``param`` waits for the one length of its shape that is not known, draw its values with this one."""
    if isinstance(param, Deferred) and param.draw is not None:
        values = drawn(param.draw, tuple(length if each is None else each for each in param.expected))
        param.draw = param.data_hook = None
        param.data = values
        param.attach_grad(param.grad_req)


def shape_of(param: Parameter) -> Shape:
    """The shape, with None for a length that is not known yet."""
    return param.expected if isinstance(param, Deferred) and param.draw is not None else param.shape


def lacks_shapes(module: Module) -> bool:
    """Whether layers are still to find out their shapes."""
    return any(None in shape_of(param) for _, param in module.named_parameters())


class Deferred(Parameter):
    """A parameter that has no values until its layer is called.

    To look at it before that is a DeviceError, which is a RuntimeError.
    """

    __slots__ = ("draw", "expected", "initial")

    def __init__(self, expected: Shape, draw: Draw, initial: object) -> None:
        super().__init__(np.empty(0, np.float32))
        self.expected, self.initial = expected, initial
        self.draw: Draw | None = draw
        self.data_hook = _has_no_values

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        if self.draw is None:
            return super().__getstate__()
        return getattr(self, "__dict__", None), {**self._kept(self.held()), "_data_hook": _has_no_values}


def _has_no_values(param: Any) -> None:
    raise DeviceError(
        "parameter", where=param.name or None, expected="values", got=f"none yet, its shape is {param.expected}",
        remedy="call the network once, on one sample",
    )  # fmt: skip


P = ParamSpec("P")
R = TypeVar("R")
_SINGLE = np.dtype(np.float32)


def in_float32(
    *, is_product: bool = False, has_kernels: bool = False, first_alone: bool = False, rounds: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have an operator that meets a 16-bit operand compute in float32; others are called as they are.

    Operands of 16 bits are widened. The first one, what a layer is called with, is rounded to them if it has more bits,
    so that a network of 16 bits takes images of float32; the others stay as they are.

    Args:
        is_product: whether devices compute it in 16 bits.
        has_kernels: whether CUDA does.
        first_alone: whether these kernels take the first operand alone in 16 bits, and others in float32.
        rounds: whether the result, the first one of several, is rounded to 16 bits; a loss stays float32.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # By far the most calls are of float32, and looking at all operands takes as long as a small product.
            if (
                args
                and getattr(args[0], "dtype", None) is _SINGLE
                and (getattr(args[1], "dtype", _SINGLE) is _SINGLE if len(args) > 1 else not kwargs)
            ):
                return function(*args, **kwargs)
            given = [value_of(x) for x in (*args, *kwargs.values())]
            x = next((each for each in given if is_half(each)), None)
            if x is None:
                return function(*args, **kwargs)
            stays = not is_host(x) and (is_product or (has_kernels and is_cupy(x)))
            to = x.dtype if stays and not first_alone else _SINGLE
            if stays and (x is given[0] or not first_alone) and _are_all(to, given[first_alone:]):
                return function(*args, **kwargs)
            return _Call(x.dtype, to, rounds).of(function, args, kwargs)

        return call

    return register


def _are_all(dtype: np.dtype, operands: Sequence[Any]) -> bool:
    return all(x.dtype == dtype for x in operands if hasattr(x, "dtype") and is_float(x.dtype))


class _Call:
    """One call of an operator on operands of which some have the dtype ``half``, computed in the dtype ``to``."""

    def __init__(self, half: np.dtype, to: np.dtype, rounds: bool) -> None:
        self._half, self._to, self._rounds = half, to, rounds and to != half
        self._given: dict[int, tuple[Any, Tensor]] = {}
        """By the id of what an operand was converted to the operand itself, and that."""
        self._refresh: list[Call] = []

    def of(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives, on the tape."""
        with captured() as told:
            operands = [self._converted(x, is_first=not i) for i, x in enumerate((*args, *kwargs.values()))]
            found = function(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
        result, *others = found if isinstance(found, tuple) else (found,)
        inputs, pullback, again = told[0]
        own = self._on_tape(result.data, inputs, pullback, again)
        return (own, *others) if isinstance(found, tuple) else own

    def _converted(self, x: Any, is_first: bool) -> Any:
        a = value_of(x)
        if not (hasattr(a, "dtype") and is_float(a.dtype)):
            return x
        if a.dtype == self._to and (not is_first or self._to == self._half):
            return x
        copied = partial(_copied, a, self._half, self._to)  # not of this call: a ring keeps arrays until it is found
        copy = copied()
        self._refresh.append((lambda: copy.__setitem__(..., copied()), ()))
        tensor = Tensor(copy)
        self._given[id(tensor)] = (as_tensor(x), tensor)
        return tensor

    def _on_tape(self, wide: Array, inputs: Sequence[Any], pullback: Any, again: Again | None) -> Tensor:
        given = [self._given.get(id(each), (each, None)) for each in inputs]

        def back(gy: Array, *gradients: Gradient | None) -> None:
            xp = array_namespace(gy)
            of_call = [
                gradient if gradient is None or tensor is None else Gradient(tensor, xp)
                for gradient, (_, tensor) in zip(gradients, given, strict=True)
            ]
            with np.errstate(over="ignore"):  # to an infinity, for which the sums of gradients are searched
                pullback(gy.astype(self._to, copy=False), *of_call)
                for gradient, each in zip(gradients, of_call, strict=True):
                    if gradient is not None and each is not None and each is not gradient:
                        gradient.add(each.finish())

        def once_more(place: Array) -> list[Call]:
            assert again is not None
            calls = calls_of(again, wide if self._rounds else place)
            return [*self._refresh, *calls, *([(partial(_round, wide, place), ())] if self._rounds else [])]

        value = wide
        if self._rounds:
            value = array_namespace(wide).empty(wide.shape, dtype=self._half)
            _round(wide, value)
        return on_tape(value, tuple(each for each, _ in given), back, None if again is None else once_more)


def _copied(a: Array, half: np.dtype, to: np.dtype) -> Array:
    with np.errstate(over="ignore"):  # to an infinity, which is no surprise
        return a.astype(half, copy=False).astype(to)


def _round(wide: Array, place: Array) -> None:
    with np.errstate(over="ignore"):
        place[...] = wide
