"""Modules: parts of a network, their parameters and buffers."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from ..arrays import Array, dtype_of, from_host, has_namespace, is_float, on_device_of, to_host
from ..autograd import Tensor, as_tensor, concatenate
from ..autograd.registry import catch_up
from ..devices import Device
from ..errors import ConfigError, UnsupportedError, type_named
from ..holders import refuse_change
from ..state import require_state
from .hybrid import Graph, Hybrid, changed
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
        changed.in_module(self, name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        changed.in_module(self, name)
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

    def __call__(self, *inputs: Any) -> Any:
        """``forward`` of the inputs, arrays among them made tensors; by a plan where the module is hybridized."""
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
        themselves, as Gluon's do in ``cast``, and operators compute as `nn.half` says.

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
        for name in [*own, *state]:
            if name not in state or name not in own:
                held, lacks = ("the network", "the state") if name in own else ("the state", "the network")
                raise ConfigError("load_state_dict", where=name, expected=f"it in {lacks}", got=f"it in {held} only")
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
        for module in modules:
            if not isinstance(module, Module):
                raise ConfigError("Sequential", expected="modules", got=type(module).__name__)
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
        try:
            self.axis = operator.index(axis)
        except TypeError as error:
            expected = "the number of an axis"
            raise ConfigError("HybridConcurrent", where="axis", expected=expected, got=repr(axis)) from error
        for number, module in enumerate(modules):
            if not isinstance(module, Module):
                raise ConfigError("HybridConcurrent", expected="modules", got=type(module).__name__)
            setattr(self, str(number), module)

    def forward(self, x: Any) -> Any:
        return concatenate([module(x) for _, module in self.children()], axis=self.axis)
