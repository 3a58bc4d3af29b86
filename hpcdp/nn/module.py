"""Modules (parts of a network), their parameters, and operators on 16-bit floats.

NumPy has no fast arithmetic for float16 and bfloat16. On the host, `in_float32` therefore has operators compute in
float32 and round once (Micikevicius et al., "Mixed precision training", 2018, section 3.3). Devices multiply 16-bit
factors and accumulate in float32 themselves, as do the CUDA kernels for 16 bits.
"""

from __future__ import annotations

import copyreg
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, overload

import numpy as np

from ..autograd import Gradient, Tensor, as_tensor, concatenate, on_tape
from ..autograd.tape import Again, Call, calls_of, captured, catch_up
from ..autograd.tensor import require_grad_req, value_of
from ..core.arrays import (
    Array,
    Device,
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
from ..core.state import Cut, refuse_change, require_state
from ..errors import ConfigError, DeviceError, HpcdpError, UnsupportedError, type_named
from .jit import Graph, Hybrid, tracing

_data: Any = Tensor.__dict__["data"]
"""The slot that `Parameter.data` wraps."""
_grad: Any = Tensor.__dict__["grad"]
_grad_req: Any = Tensor.__dict__["grad_req"]
_HOOKS = ("_data_hook", "grad_hook", "update_hook")
"""Attributes that a trainer sets on a parameter."""


class Parameter(Tensor):
    """Tensor that is learned: a leaf with a gradient.

    ``name`` is its path in the network, e.g. "0.weight", set by `Module.parameters`.

    Args:
        data: the initial values; an array is kept without a copy, a number becomes an array.
        name: the name until `Module.parameters` sets it.
        grad_req: "write", "add" or "null".
    """

    __slots__ = ("_data_hook", "cut", "is_joint", "name", "update_hook")

    def __init__(self, data: Any, name: str = "", grad_req: str = "write") -> None:
        self._data_hook: Callable[[Parameter], None] | None = None
        self.update_hook: Callable[[Parameter], None] | None = None
        """Called before ``grad`` is read, because a running update may still read it."""
        super().__init__(data)
        self.name = name
        self.cut: Cut | None = None
        """The slice of the full parameter that this rank holds, if ranks split the layer: see `hpcdp.parallel`."""
        self.is_joint = False
        """True if it belongs to a layer that all ranks must run together: see `Module.needs_all_ranks`."""
        self.attach_grad(grad_req)

    @property
    def data(self) -> Array:  # type: ignore[override]
        """The values."""
        if self._data_hook is not None:
            self._data_hook(self)
        return _data.__get__(self)

    @data.setter
    def data(self, values: Array) -> None:
        catch_up()
        _data.__set__(self, np.array(values) if isinstance(values, np.generic) else values)  # a number cannot change
        tracing.in_parameters()

    @property
    def grad(self) -> Array | None:  # type: ignore[override]
        """The gradient that the last backward stored."""
        if self.update_hook is not None:
            self.update_hook(self)
        return _grad.__get__(self)

    @grad.setter
    def grad(self, values: Array | None) -> None:
        _grad.__set__(self, values)

    @property
    def grad_req(self) -> str:  # type: ignore[override]
        """Treatment of ``grad`` by backward: "write", "add" or "null"; see `Tensor.attach_grad`."""
        return _grad_req.__get__(self)  # type: ignore[no-any-return]

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        require_grad_req("Parameter", value)
        catch_up()
        _grad_req.__set__(self, value)

    @property
    def data_hook(self) -> Callable[[Parameter], None] | None:
        """The hook called before ``data`` is read, because an update may still be changing it."""
        return self._data_hook

    @data_hook.setter
    def data_hook(self, hook: Callable[[Parameter], None] | None) -> None:
        self._data_hook = hook
        tracing.in_parameters()

    def held(self) -> Array:
        """Return the array behind ``data`` without waiting for a running update."""
        return _data.__get__(self)

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        return getattr(self, "__dict__", None), self._kept(self.data)

    def _kept(self, values: Array) -> dict[str, Any]:
        """Return the state for copies and pickles: without the hooks, which belong to one trainer."""
        names = [slot for slot in copyreg._slotnames(type(self)) if slot != "data" and hasattr(self, slot)]  # type: ignore[attr-defined]
        return {"data": values, **{name: getattr(self, name) for name in names}, **dict.fromkeys(_HOOKS)}


class Module:
    """Part of a network. Subclasses set their parts as attributes and define ``forward``.

    A `Parameter` attribute is learned; any other `Tensor` attribute is a buffer, saved with the network but fixed.
    A `Module` attribute is a child. Parameters, buffers and children keep the order of assignment. Objects in lists,
    tuples and dicts are not registered. Layers train or predict according to `autograd.is_training` of the calling
    thread.
    """

    needs_all_ranks = False
    """True if all ranks must run forward and backward together in training, including ranks without samples."""
    gives_pieces = False
    """True if its parts compute a batch in pieces. Parts that need all ranks require whole batches."""
    has_own_step = False
    """True if it trains by its own ``step`` method instead of a recorded call."""
    keeps_float32 = False
    """True if `to` keeps its own parameters and buffers in float32 when others become 16-bit floats."""
    is_traceable = True
    """True if its forward consists of operators that `hybridize` can trace. A network with an untraceable part is
    called without plans."""
    _hybrid: Hybrid | None = None
    """The plans, if the module is hybridized."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(vars(self).get(name), Parameter) and not isinstance(value, Parameter) and hasattr(value, "dtype"):
            raise UnsupportedError(
                type(self).__name__, where=name, expected="a Parameter or None", got=type(value).__name__,
                remedy=f"change the values in place: {name}[...] = values",
            )  # fmt: skip
        tracing.in_module(self, name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        tracing.in_module(self, name)
        object.__delattr__(self, name)

    def require_parts_of_this_rank(self, operation: str) -> None:
        """Raise `ConfigError` if a part needs all ranks: it would normalize pieces that other ranks may not have."""
        joint = next((part for part in self.modules() if part.needs_all_ranks), None)
        if joint is not None:
            name = type(joint).__name__
            raise ConfigError(
                operation, expected="layers that do not communicate, since each sees a piece of the batch",
                got=f"a {name}", remedy="use nn.BatchNorm, or compute each rank's whole batch on one device",
            )  # fmt: skip

    def forward(self, *inputs: Any) -> Any:
        """Compute the module's output from tensors. Subclasses define it."""
        raise ConfigError(type(self).__name__, expected="a method forward(self, x)", got="no such method")

    def __call__(self, *inputs: Any) -> Tensor:
        """Call ``forward`` with the inputs converted to tensors, or replay a plan if the module is hybridized.

        Returns:
            The result of ``forward``: one tensor, as annotated, or a tuple of several.
        """
        if self._hybrid is not None:
            return self._hybrid(inputs)
        return self.forward(*map(as_tensor, inputs))

    def __getstate__(self) -> dict[str, Any]:
        catch_up()
        return vars(self).copy()

    def __copy__(self) -> Self:
        """Return a shallow copy with the same parts. A hybridized copy traces its own plans."""
        made = object.__new__(type(self))
        vars(made).update(self.__getstate__())
        if self._hybrid is not None:
            made.hybridize()
        return made

    def hybridize(self, active: bool = True) -> None:
        """Trace the next call for each combination of input shapes and dtypes, and replay the trace afterwards.

        Results, gradients and hooks equal those of ``forward`` bit for bit. Side effects of ``forward`` other than
        tensor operations (prints, counters) happen only while it is traced. See docs/hybrid.md.

        Args:
            active: whether to use plans; False restores plain calls of ``forward``.

        Raises:
            HpcdpError: in a call, if ``forward`` reads tensor values, assigns attributes, or uses arrays that are not
                attributes of the module. The error names the line.
        """
        self._hybrid = Hybrid(self) if active else None

    def graph(self) -> Graph:
        """Return the graph of the last prediction that this thread made with the hybridized network.

        Raises:
            ConfigError: the module is not hybridized, or has made no prediction outside ``record()`` and
                ``asynchronous()``.
        """
        if self._hybrid is None:
            raise ConfigError(
                type(self).__name__, expected="a hybridized network", remedy="call hybridize(), then net(x) once"
            )
        return self._hybrid.graph()

    def export(self, path: str | Path) -> tuple[Path, Path]:
        """Write the prediction graph (``path.json``) and its tensors (``path.h5``) for `SymbolBlock.load`.

        The forward is traced again with other batch sizes. If the operators depend on the batch size, the exported
        network accepts only the current one. Existing files are replaced atomically. Parameters are equal on all ranks,
        so one rank should write; if several do, the last one wins.

        Returns:
            The paths of the ``.json`` and the ``.h5`` file.

        Raises:
            ConfigError: as `graph`; the graph holds something that cannot be serialized; or ``path`` is a folder
                (``"nets/"``).
            DataError: the files cannot be written.
        """
        from .models import export_graph

        catch_up()
        graph = self.graph()
        assert self._hybrid is not None
        return export_graph(self._hybrid.for_export(graph), path)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield name and module of every direct child."""
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
        """Yield path and parameter, each parameter once, in the order of assignment."""
        visited = set()
        for name, tensor in self._tensors():
            if isinstance(tensor, Parameter) and tensor not in visited:
                visited.add(tensor)
                yield name, tensor

    def parameters(self) -> list[Parameter]:
        """Return all parameters, each once, and set each one's ``name`` to its path in this module.

        Warns about parameters in lists, tuples and dicts: they are not registered and would not be trained.
        """
        parameters = []
        for name, parameter in self.named_parameters():
            parameter.name = name
            parameters.append(parameter)
        self._warn_of_unreached(set(parameters))
        return parameters

    def _warn_of_unreached(self, reached: set[Parameter]) -> None:
        for prefix, module in self._modules(""):
            for name, value in vars(module).items():
                if isinstance(value, (list, tuple, dict)) and not reached.issuperset(_parameters_in(value)):
                    warnings.warn(
                        f"{prefix}{name}: parameters in a {type(value).__name__} are not registered with the network, "
                        "so they are neither trained nor saved: use an nn.Sequential, or set each as an attribute",
                        stacklevel=3,
                    )

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield path and tensor of every buffer, such as running statistics."""
        for name, tensor in self._tensors():
            if not isinstance(tensor, Parameter):
                yield name, tensor

    def named_generators(self) -> Iterator[tuple[str, np.random.Generator]]:
        """Yield path and random generator of every part that has one as an attribute, each generator once."""
        catch_up()
        visited = set()
        for prefix, module in self._modules(""):
            for name, value in vars(module).items():
                if isinstance(value, np.random.Generator) and id(value) not in visited:
                    visited.add(id(value))
                    yield prefix + name, value

    def modules(self) -> Iterator[Module]:
        """Return an iterator over this module and all its descendants."""
        return (module for _, module in self._modules(""))

    def _modules(self, prefix: str) -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, module in self.children():
            yield from module._modules(f"{prefix}{name}.")

    def to(self, dtype: Any = None, like: Array = None) -> Module:
        """Convert all parameters and buffers to another dtype or device, in place.

        Integer and boolean buffers, such as indices and masks, keep their dtype. Gradients are reset to zero. Call this
        before a `Trainer` takes the parameters. With float16 or bfloat16, normalization layers keep their own tensors
        in float32, as Gluon's ``cast`` does, and operators compute as described in `hpcdp.nn.module`.

        Args:
            dtype: a float dtype, or a `Device` to copy to; None keeps the dtype.
            like: an array whose namespace and device the copies take.

        Returns:
            The module itself.

        Raises:
            ConfigError: ``dtype`` is not a float dtype, or ``like`` is not an array. Nothing is changed.
            DeviceError: the machine lacks the device; a RuntimeError. Nothing is changed.
        """
        catch_up()
        if like is not None and not hasattr(like, "dtype"):
            raise ConfigError("to", where="like", expected="an array", got=type(like).__name__)
        tensors = [tensor for _, tensor in self._tensors()]
        single = {id(value) for part in self.modules() if part.keeps_float32 for value in vars(part).values()}
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
        """Return parameters and buffers by path: the arrays themselves, not copies."""
        catch_up()
        return self._arrays()

    def _arrays(self) -> dict[str, Array]:
        return {name: tensor.changeable() for name, tensor in self._tensors()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy the arrays of a `state_dict` into this module's, in place. If one does not fit, nothing is changed.

        Args:
            state: an array for every parameter and buffer, by path.

        Raises:
            ConfigError: a key is missing or unknown, or a value is not an array of the same shape and a compatible
                dtype.
            HpcdpError: ranks share a parameter's memory, and others may still read it: see
                `Trainer.changing_parameters`.
        """
        catch_up()
        require_state("a network", state)
        own = self._arrays()  # a subclass's state_dict may have more entries
        same_names("load_state_dict", "the network", own, state)
        changed = {name: array for name, array in own.items() if state[name] is not array}
        fitted = {name: _fitting(name, state[name], array) for name, array in changed.items()}
        for name, array in changed.items():  # a checkpoint that filled them in place did so on all ranks together
            refuse_change(array, name, "load_state_dict")
        for name, array in changed.items():
            with on_device_of(array):
                array[...] = from_host(to_host(fitted[name]), array)

    def describe(self) -> str:
        """Return the text inside the parentheses of this module's line in ``repr``."""
        return ""

    def __repr__(self) -> str:
        parts = [f"  ({name}): {part!r}".replace("\n", "\n  ") for name, part in self.children()]
        head = f"{type(self).__name__}({self.describe()}"
        return "\n".join([head, *parts, ")"]) if parts else head + ")"


def _parameters_in(value: Any) -> Iterator[Parameter]:
    """Yield the parameters in nested lists, tuples, dicts and modules."""
    left, visited = [value], set[int]()
    while left:
        value_ = left.pop()
        if isinstance(value_, (list, tuple, dict)):
            if id(value_) not in visited:  # one may be in itself
                visited.add(id(value_))
                left += value_.values() if isinstance(value_, dict) else value_
        elif isinstance(value_, Module):
            yield from (parameter for _, parameter in value_.named_parameters())
        elif isinstance(value_, Parameter):
            yield value_


def _fitting(name: str, value: Any, own: Array) -> Array:
    """Return ``value`` as an array that fits ``own``, or raise `ConfigError`."""
    expected = f"an array of shape {tuple(own.shape)}"
    if not hasattr(value, "shape"):
        raise ConfigError("load_state_dict", where=name, expected=expected, got=type_named(value))
    if tuple(value.shape) != tuple(own.shape):
        got = f"shape {tuple(value.shape)}"
        raise ConfigError("load_state_dict", where=name, expected=f"shape {tuple(own.shape)}", got=got)
    try:
        array = value if has_namespace(value) else np.asarray(value)
    except HpcdpError:
        raise
    except (RuntimeError, TypeError) as error:  # PyTorch raises it for a tensor that requires a gradient
        raise ConfigError("load_state_dict", where=name, expected=expected, got=error) from error
    are_floats = is_float(array.dtype) and is_float(own.dtype)  # can_cast denies bfloat16 to float16
    if not (are_floats or np.can_cast(array.dtype, own.dtype, "same_kind")):
        raise ConfigError("load_state_dict", where=name, expected=f"a dtype castable to {own.dtype}", got=array.dtype)
    return array


def _dtype(dtype: Any) -> np.dtype:
    try:
        dtype_ = dtype_of(dtype)
    except TypeError as error:
        expected = "a dtype, or a device: hpcdp.cpu(0), hpcdp.gpu(0), world.device"
        raise ConfigError("to", where="dtype", expected=expected, got=repr(dtype)) from error
    if not is_float(dtype_):
        raise ConfigError("to", where="dtype", expected="a float dtype", got=str(dtype_))
    return dtype_


def _as_dtype(tensor: Tensor, dtype: np.dtype, is_kept_single: bool) -> Array:
    """Return a copy in ``dtype``; non-floats keep their dtype, ``is_kept_single`` keeps float32."""
    with on_device_of(tensor.data):
        if not is_float(tensor.dtype):
            return tensor.data.copy()
        return tensor.data.astype(np.float32 if is_kept_single and dtype.itemsize < 4 else dtype)


class Sequential(Module):
    """Chain of modules, each called with the result of the one before; children are named "0", "1", ..."""

    def __init__(self, *modules: Module) -> None:
        self.add(*modules)

    def add(self, *modules: Module) -> None:
        """Append modules."""
        for module in modules:
            if not isinstance(module, Module):
                remedy = "pass them as arguments: Sequential(*modules)" if isinstance(module, list | tuple) else None
                raise ConfigError("Sequential", expected="modules", got=repr(module), remedy=remedy)
            number = len(self)
            while hasattr(self, str(number)):  # an earlier module was deleted
                number += 1
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        """Return the result of the last module, of the input passed through all of them."""
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
        """Return one module, or for a slice a new `Sequential` of the same modules, renumbered."""
        selected = list(self)[index]
        return Sequential(*selected) if isinstance(selected, list) else selected


class HybridConcurrent(Module):
    """Modules in parallel: each gets the same input, and the results are concatenated along ``axis``.

    If hybridized, all of them form one plan.

    Source: Gluon's ``contrib.nn.HybridConcurrent``.
    """

    def __init__(self, *modules: Module, axis: int = 1) -> None:
        self.axis = whole_number("HybridConcurrent", "axis", axis, expected="the number of an axis")
        for number, module in enumerate(instances("HybridConcurrent", None, modules, Module, "modules")):
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        """Concatenate the results of all modules for ``x``."""
        return concatenate([module(x) for _, module in self.children()], axis=self.axis)


Shape = tuple[int | None, ...]
Draw = Callable[[tuple[int, ...]], np.ndarray]


def parameter(shape: Shape, draw: Draw, initial: object = None) -> Parameter:
    """Return a parameter with the values ``draw(shape)``, drawn now, or by `settle` if a length is None.

    ``initial`` is the initializer behind ``draw``, if it is another object.
    """
    require_draw(draw)
    known = tuple(length for length in shape if length is not None)
    if len(known) == len(shape):
        return Parameter(drawn(draw, known))
    return Deferred(shape, draw, draw if initial is None else initial)


def require_draw(draw: object) -> None:
    """Raise `ConfigError` unless ``draw`` is a function."""
    function("parameter", "weight_init", draw, "a function of a shape, such as nn.init.Xavier()")


def drawn(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Return ``draw(shape)`` as float32; `ConfigError` unless it is an array of numbers of this shape."""
    returned = draw(shape)
    try:
        values = returned.astype(np.float32, copy=False) if is_cupy(returned) else np.asarray(returned, np.float32)
    except HpcdpError:
        raise
    except (TypeError, ValueError):
        got = type_named(returned)
    else:
        if values.shape == shape:
            return values
        got = f"shape {values.shape}"
    raise ConfigError("parameter", where="weight_init", expected=f"numbers of shape {shape}", got=got)


def settle(param: Parameter, length: int) -> None:
    """Draw the values of a deferred ``param`` now that its missing dimension is known to be ``length``."""
    if isinstance(param, Deferred) and param.draw is not None:
        values = drawn(param.draw, tuple(length if n is None else n for n in param.expected))
        param.draw = param.data_hook = None
        param.data = values
        param.attach_grad(param.grad_req)


def shape_of(param: Parameter) -> Shape:
    """Return the shape, with None for a length that is not known yet."""
    return param.expected if isinstance(param, Deferred) and param.draw is not None else param.shape


def lacks_shapes(module: Module) -> bool:
    """Return whether any parameter still waits for its shape."""
    return any(None in shape_of(param) for _, param in module.named_parameters())


class Deferred(Parameter):
    """Parameter without values until its layer is first called; reading it raises `DeviceError`, a RuntimeError."""

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
        "parameter", where=param.name or None, expected="initialized values",
        got=f"a deferred shape {param.expected}", remedy="call the network once, on one sample",
    )  # fmt: skip


P = ParamSpec("P")
R = TypeVar("R")
_SINGLE = np.dtype(np.float32)


def in_float32(
    *, is_product: bool = False, has_kernels: bool = False, first_alone: bool = False, rounds: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wrap an operator to compute in float32 if any operand has 16-bit floats.

    16-bit operands are widened. The first operand (a layer's input) is rounded to the 16-bit dtype if it has more bits,
    so a 16-bit network accepts float32 images. Other operands keep their dtype.

    Args:
        is_product: whether devices compute it in 16 bits.
        has_kernels: whether CUDA has a 16-bit kernel for it.
        first_alone: whether that kernel takes only the first operand in 16 bits, and the others in float32.
        rounds: whether the (first) result is rounded to 16 bits; a loss stays float32.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            # Most calls are float32, and checking all operands takes as long as a small product.
            if (
                args
                and getattr(args[0], "dtype", None) is _SINGLE
                and (getattr(args[1], "dtype", _SINGLE) is _SINGLE if len(args) > 1 else not kwargs)
            ):
                return function(*args, **kwargs)
            operands = [value_of(x) for x in (*args, *kwargs.values())]
            x = next((operand for operand in operands if is_half(operand)), None)
            if x is None:
                return function(*args, **kwargs)
            stays = not is_host(x) and (is_product or (has_kernels and is_cupy(x)))
            to = x.dtype if stays and not first_alone else _SINGLE
            if stays and (x is operands[0] or not first_alone) and _are_all(to, operands[first_alone:]):
                return function(*args, **kwargs)
            return _CastCall(x.dtype, to, rounds).of(function, args, kwargs)

        return call

    return register


def _are_all(dtype: np.dtype, operands: Sequence[Any]) -> bool:
    return all(x.dtype == dtype for x in operands if hasattr(x, "dtype") and is_float(x.dtype))


class _CastCall:
    """One operator call with operands of the dtype ``half``, computed in the dtype ``to``."""

    def __init__(self, half: np.dtype, to: np.dtype, rounds: bool) -> None:
        self._half, self._to, self._rounds = half, to, rounds and to != half
        self._operands: dict[int, tuple[Any, Tensor]] = {}
        """Maps the id of a converted operand to the original operand and the converted tensor."""
        self._refresh: list[Call] = []

    def of(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` with converted operands and put its result on the tape."""
        with captured() as calls:
            operands = [self._converted(x, is_first=not i) for i, x in enumerate((*args, *kwargs.values()))]
            returned = function(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
        wide, *extras = returned if isinstance(returned, tuple) else (returned,)
        inputs, pullback, again = calls[0]
        result = self._on_tape(wide.data, inputs, pullback, again)
        return (result, *extras) if isinstance(returned, tuple) else result

    def _converted(self, x: Any, is_first: bool) -> Any:
        a = value_of(x)
        if not (hasattr(a, "dtype") and is_float(a.dtype)):
            return x
        if a.dtype == self._to and (not is_first or self._to == self._half):
            return x
        copied = partial(_copied, a, self._half, self._to)  # no reference to self: a cycle would keep arrays alive
        copy = copied()
        self._refresh.append((lambda: copy.__setitem__(..., copied()), ()))
        tensor = Tensor(copy)
        self._operands[id(tensor)] = (as_tensor(x), tensor)
        return tensor

    def _on_tape(self, wide: Array, inputs: Sequence[Any], pullback: Any, again: Again | None) -> Tensor:
        originals = [self._operands.get(id(x), (x, None)) for x in inputs]

        def back(gy: Array, *gradients: Gradient | None) -> None:
            xp = array_namespace(gy)
            of_call = [
                gradient if gradient is None or tensor is None else Gradient(tensor, xp)
                for gradient, (_, tensor) in zip(gradients, originals, strict=True)
            ]
            with np.errstate(over="ignore"):  # gradient sums are checked for infinities later
                pullback(gy.astype(self._to, copy=False), *of_call)
                for gradient, converted in zip(gradients, of_call, strict=True):
                    if gradient is not None and converted is not None and converted is not gradient:
                        gradient.add(converted.finish())

        def once_more(place: Array) -> list[Call]:
            assert again is not None
            calls = calls_of(again, wide if self._rounds else place)
            return [*self._refresh, *calls, *([(partial(_round, wide, place), ())] if self._rounds else [])]

        value = wide
        if self._rounds:
            value = array_namespace(wide).empty(wide.shape, dtype=self._half)
            _round(wide, value)
        return on_tape(value, tuple(x for x, _ in originals), back, None if again is None else once_more)


def _copied(a: Array, half: np.dtype, to: np.dtype) -> Array:
    with np.errstate(over="ignore"):  # overflow to infinity is expected
        return a.astype(half, copy=False).astype(to)


def _round(wide: Array, place: Array) -> None:
    with np.errstate(over="ignore"):
        place[...] = wide
