"""Collectives of Python objects, sent as JSON with arrays beside it, and never pickled.

An object is encoded as one JSON document followed by the bytes of its arrays. JSON's own types (None, bool, int, float,
str, list, dict with string keys) stand for themselves. Any other value is a list that begins with the name of its kind.
A receiver makes only values of the kinds that are listed here. Dataclasses, named tuples and enumerations must be
classes of a module that the receiver has imported itself: nothing is imported or executed because of a message.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import sys
import traceback
import uuid
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ..comm import World
from ..comm.progress import Operation
from ..core.arrays import dtype_of, has_namespace, is_float, kind_named, kinds, to_host
from ..core.checks import described
from ..errors import UnsupportedError, type_named
from . import data_movement
from .blocks import offsets
from .point_to_point import irecv_object_as_bytes, isend_as, recv_object_as_bytes, send_as
from .staging import bytes_of, checked_root, ranks_of, refuse_mask, validation

_ALIGNED = 16
"""The alignment of arrays in a message, in bytes."""
_MOST_DEPTH = 200
_JSON_INTEGERS = 1 << 63
"""Larger integers are sent as hexadecimal text, because Python limits the digits of decimal text."""

_of_base64 = base64.b64decode
_AS_TEXT: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    complex: ("complex", repr, complex),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), _of_base64),
    bytearray: ("bytearray", lambda value: base64.b64encode(value).decode(), lambda text: bytearray(_of_base64(text))),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    fractions.Fraction: ("fraction", str, fractions.Fraction),
    uuid.UUID: ("uuid", str, uuid.UUID),
    pathlib.PosixPath: ("path", str, pathlib.PosixPath),
    pathlib.PurePosixPath: ("pure path", str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: ("windows path", str, pathlib.PureWindowsPath),
    zoneinfo.ZoneInfo: ("zone", lambda zone: zone.key, zoneinfo.ZoneInfo),
}  # fmt: skip
_FROM_TEXT = {kind: decode for kind, _, decode in _AS_TEXT.values()}
_HEADER = np.dtype([("nbytes", np.int64), ("length", np.int64), ("kind", np.int64), ("unused", np.int64)])
_KINDS = "numbers, text, bytes, lists, tuples, sets, dicts, arrays, paths, dates, enumerations or dataclasses"
_TIMES: dict[str, Any] = {"datetime": datetime.datetime, "time": datetime.time}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def broadcast_object(value: Any = None, root: int = 0, world: World | None = None) -> Any:
    """Return the object that rank ``root`` passes, on all ranks; every rank must call.

    Args:
        value: on ``root`` the object; ignored on other ranks. It consists of None, bools, numbers, strings, bytes,
            lists, tuples, sets, dicts, arrays of NumPy, CuPy and PyTorch, NumPy's dtypes, paths, dates, times and
            their differences and zones, `Decimal`, `Fraction`, `UUID`, enumeration members, named tuples and
            dataclasses.
        root: the rank whose object is sent.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        ``value`` itself on ``root``, an equal object on other ranks, with arrays of NumPy, and tensors of PyTorch
            without gradients, in host memory.

    Raises:
        UnsupportedError: ``value`` contains anything else, which is named; on every rank.
        MismatchError: ranks differ in root or operation; the same error on every rank.
    """
    return _broadcast("broadcast_object", ranks_of(world), value, root).run()


def ibroadcast_object(value: Any = None, root: int = 0, world: World | None = None) -> Operation[Any]:
    """Start a `broadcast_object`, whose arguments it has; ``wait()`` returns its result, or raises its error."""
    return _broadcast("ibroadcast_object", ranks_of(world), value, root).start()


@validation
def _broadcast(name: str, world: World, value: Any, root: int) -> _ObjectCall:
    is_root = world.rank == checked_root(name, root, world)
    message = _encoded(value, name, root) if is_root else _NOTHING
    exchange = data_movement.allgather_exchange(name, world, message, "auto", None, f"root {root}")

    def finish(sent: np.ndarray) -> Any:
        message = _messages(name, sent)[0]  # raises if it was refused, on the root, too
        return value if is_root else decoded(message)

    return _ObjectCall(world, exchange, finish)


def allgather_object(value: Any, world: World | None = None) -> list[Any]:
    """Return every rank's object, by rank, on all ranks; every rank must call.

    Args:
        value: as for `broadcast_object`.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        Equal objects; not ``value`` itself.

    Raises:
        HpcdpError: as `broadcast_object`.
    """
    return _allgather("allgather_object", value, ranks_of(world)).run()  # type: ignore[no-any-return]


def iallgather_object(value: Any, world: World | None = None) -> Operation[list[Any]]:
    """Start an `allgather_object`, whose arguments it has; ``wait()`` returns its result, or raises its error."""
    return _allgather("iallgather_object", value, ranks_of(world)).start()


def _allgather(name: str, value: Any, world: World) -> _ObjectCall:
    exchange = data_movement.allgather_exchange(name, world, _encoded(value, name, world.rank), "auto", None)
    return _ObjectCall(world, exchange, lambda all_: [decoded(message) for message in _messages(name, all_)])


def gather_object(value: Any, root: int = 0, world: World | None = None) -> list[Any] | None:
    """Return every rank's object, by rank, on rank ``root``, and None on other ranks; every rank must call.

    Args:
        value: as for `broadcast_object`.
        root: the rank that receives.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        HpcdpError: as `broadcast_object`, but a value that cannot be sent is an error on its rank and ``root`` only.
    """
    return _gather("gather_object", ranks_of(world), value, root).run()  # type: ignore[no-any-return]


def igather_object(value: Any, root: int = 0, world: World | None = None) -> Operation[list[Any] | None]:
    """Start a `gather_object`, whose arguments it has; ``wait()`` returns its result, or raises its error."""
    return _gather("igather_object", ranks_of(world), value, root).start()


@validation
def _gather(name: str, world: World, value: Any, root: int) -> _ObjectCall:
    own = _encoded(value, name, world.rank)
    exchange = data_movement.gather_exchange(name, world, own, root, None, None)

    def finish(all_: np.ndarray | None) -> list[Any] | None:
        messages = _messages(name, own if all_ is None else all_, is_on_every_rank=False)
        return None if all_ is None else [decoded(message) for message in messages]

    return _ObjectCall(world, exchange, finish)


def scatter_object(values: Sequence[Any] | None = None, root: int = 0, world: World | None = None) -> Any:
    """Return this rank's object of the list that rank ``root`` passes; every rank must call.

    Args:
        values: on ``root`` one object for each rank, as for `broadcast_object`; ignored on other ranks.
        root: the rank that sends.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        HpcdpError: as `broadcast_object`, or ``values`` is no list of one object for each rank; on every rank.
    """
    return _scatter("scatter_object", ranks_of(world), values, root).run()


def iscatter_object(values: Sequence[Any] | None = None, root: int = 0, world: World | None = None) -> Operation[Any]:
    """Start a `scatter_object`, whose arguments it has; ``wait()`` returns its result, or raises its error."""
    return _scatter("iscatter_object", ranks_of(world), values, root).start()


@validation
def _scatter(name: str, world: World, values: Any, root: int) -> _ObjectCall:
    messages = [_NOTHING] * world.size
    if world.rank == checked_root(name, root, world):
        try:
            messages = [encoded(value, name) for value in _one_for_each_rank(name, values, world.size)]
        except UnsupportedError as error:
            messages = [_refusal(error, root)] * world.size
    sizes = [message.size for message in messages]
    exchange = data_movement.scatter_exchange(name, world, np.concatenate(messages), root, sizes, None, None)
    return _ObjectCall(world, exchange, lambda mine: decoded(_messages(name, mine)[0]))


def _one_for_each_rank(name: str, values: Any, n: int) -> list[Any]:
    try:
        if isinstance(values, Sequence) and not isinstance(values, str) and len(objects := list(values)) == n:
            return objects
        got = described(values)
    except Exception as error:
        raise _unreadable(name, "values", error) from error
    raise UnsupportedError(name, where="values", expected=f"a list of {n} objects, one for each rank", got=got)


@dataclasses.dataclass(frozen=True)
class _ObjectCall:
    """An exchange of messages, and the function that makes the objects of what it returns."""

    world: World
    exchange: data_movement.Exchange
    finish: Callable[[Any], Any]

    def run(self) -> Any:
        return self.finish(data_movement.run_exchange(self.exchange, self.world, None))

    def start(self) -> Operation[Any]:
        operation = data_movement.start_exchange(self.exchange, self.world, None)
        operation.convert = self.finish
        return operation


def send_object(value: Any, dest: int, tag: int = 0, world: World | None = None) -> None:
    """Send an object to rank ``dest``, which calls `recv_object`.

    Args:
        value: as for `broadcast_object`.
        dest: the receiver.
        tag: as for `send`.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        UnsupportedError: ``value`` cannot be sent; the receiver gets no message.
    """
    send_as("send_object", encoded(value, "send_object"), dest, tag, ranks_of(world))


def isend_object(value: Any, dest: int, tag: int = 0, world: World | None = None) -> Operation[None]:
    """Start a `send_object`, with the same arguments and errors; ``value`` may change at once."""
    return isend_as("isend_object", encoded(value, "isend_object"), dest, tag, ranks_of(world))


def recv_object(source: int | None, tag: int = 0, world: World | None = None) -> Any:
    """Return an object that rank ``source`` sends with `send_object`.

    Args:
        source: the sender; None for any rank, and then the result is a pair: the object, and its sender.
        tag: as for `recv`.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        MismatchError: the message is of `send`, and has an array.
        HpcdpError: as `recv`.
    """
    return _decoded_message(recv_object_as_bytes(source, tag, ranks_of(world)), source)


def irecv_object(source: int | None, tag: int = 0, world: World | None = None) -> Operation[Any]:
    """Start a `recv_object`, whose arguments it has; ``wait()`` returns its result."""
    operation = irecv_object_as_bytes(source, tag, ranks_of(world))
    operation.convert = lambda received: _decoded_message(received, source)
    return operation


def _decoded_message(received: Any, source: int | None) -> Any:
    return (decoded(received[0]), received[1]) if source is None else decoded(received)


_NOTHING = np.empty(0, np.uint8)
_SENT, _REFUSED = 0, 1  # what a message contains: an object, or the error of a rank that cannot send one


def _encoded(value: Any, operation: str, rank: int) -> np.ndarray:
    """Return `encoded` for this ``rank``, or a message that raises its error on all ranks that receive it."""
    try:
        return encoded(value, operation)
    except UnsupportedError as error:
        return _refusal(error, rank)


def _refusal(error: UnsupportedError, rank: int) -> np.ndarray:
    parts = {"where": f"{error.where} on rank {rank}", "expected": error.expected, "got": error.got}
    return _message(_REFUSED, json.dumps({name: str(part) for name, part in parts.items()}), [])


def _message(kind: int, text: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    document = text.encode("utf-8", "surrogatepass")
    parts = [np.frombuffer(document, np.uint8), *(bytes_of(array) for array in arrays)]
    ends = offsets([-(-part.size // _ALIGNED) * _ALIGNED for part in parts])
    message = np.zeros(_HEADER.itemsize + ends[-1], np.uint8)
    message[: _HEADER.itemsize].view(_HEADER)[0] = message.size, len(document), kind, 0
    for first, part in zip(ends, parts, strict=False):
        message[_HEADER.itemsize + first :][: part.size] = part
    return message


def _messages(operation: str, joined: np.ndarray, is_on_every_rank: bool = True) -> list[np.ndarray]:
    """Return the messages that follow each other in ``joined``; raise the error of the first that is a refusal."""
    messages = []
    while joined.size:
        nbytes, length, kind, _ = joined[: _HEADER.itemsize].view(_HEADER)[0].tolist()
        if kind == _REFUSED:
            text = joined[_HEADER.itemsize :][:length].tobytes()
            error = UnsupportedError(operation, **json.loads(text))
            error.is_on_every_rank = is_on_every_rank
            raise error
        messages.append(joined[:nbytes])
        joined = joined[nbytes:]
    return messages


def encoded(value: Any, operation: str = "broadcast_object") -> np.ndarray:
    """Return an object as a message, shape ``(nbytes,)``, uint8.

    Raises:
        UnsupportedError: it contains a value of a kind that is not sent, or reading it raises an error, as a property
            or an unset field does.
    """
    encoder = _Encoder(operation)
    try:
        document = encoder.plain(value, "value", 0)
        return _message(_SENT, json.dumps(document, separators=(",", ":")), encoder.arrays)
    except UnsupportedError:
        raise
    except Exception as error:  # from the object's own code; on this rank alone it would leave the others waiting
        raise _unreadable(operation, encoder.where, error) from error


def _unreadable(operation: str, where: str, error: Exception) -> UnsupportedError:
    raised = "".join(traceback.format_exception_only(error)).strip()  # also if str(error) fails
    return UnsupportedError(operation, where=where, expected="an object that can be read", got=raised)


def decoded(message: np.ndarray) -> Any:
    """Return the object of a message of `encoded`.

    Raises:
        UnsupportedError: a class that this process has not imported.
    """
    _, length, _, _ = message[: _HEADER.itemsize].view(_HEADER)[0].tolist()
    data = message[_HEADER.itemsize :]
    text = data[:length].tobytes().decode("utf-8", "surrogatepass")
    return _Decoder(data[-(-length // _ALIGNED) * _ALIGNED :]).value(json.loads(text))


class _Encoder:
    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.arrays: list[np.ndarray] = []
        """The arrays of the object, which follow the document."""
        self.where = ""
        """The name of the part that is being read."""

    def plain(self, value: Any, where: str, depth: int) -> Any:
        """Return a value as JSON has it; ``where`` names it in errors."""
        self.where, kind = where, type(value)
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _JSON_INTEGERS):
            return value
        if depth > _MOST_DEPTH:
            self._refuse(where, f"values nested at most {_MOST_DEPTH} deep", "deeper ones, or one that contains itself")
        if kind is int:
            return ["int", hex(value)]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *(self.plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))]
        if kind in (dict, OrderedDict):
            return self._mapping(value, where, depth)
        if kind is zoneinfo.ZoneInfo and value.key is None:
            self._refuse(where, "a zone with a name", "one of a file")
        if kind in _AS_TEXT:
            name, encode, _ = _AS_TEXT[kind]
            return [name, encode(value)]
        if kind in _TIMES.values():
            zone = self.plain(value.tzinfo, f"{where}.tzinfo", depth + 1)
            return [kind.__name__, value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone]
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind is datetime.timezone:
            return ["timezone", *(self.plain(part, where, depth + 1) for part in value.__getinitargs__())]
        if isinstance(value, enum.Flag):  # combined flags may have no name
            return ["flag", *_class_name(kind), self.plain(value.value, f"{where}.value", depth + 1)]
        if isinstance(value, enum.Enum):
            return ["enum", *_class_name(kind), value.name]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            object.__new__(kind)  # receivers do this, which raises an error for subclasses of dict, int and others
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            others = [name for name in getattr(value, "__dict__", {}) if name not in fields and not hasattr(kind, name)]
            if others:
                self._refuse(where, f"a {kind.__name__} without attributes beside its fields", f"one with {others[0]}")
            items = {name: self.plain(item, f"{where}.{name}", depth + 1) for name, item in fields.items()}
            return ["dataclass", *_class_name(kind), items]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            parts = [self.plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
            return ["namedtuple", *_class_name(kind), *parts]
        if isinstance(value, np.dtype):
            if value.names is not None or value.name.startswith("void"):
                self._refuse(where, "a dtype of numbers, text or times", str(value))
            return ["dtype", _dtype_name(value)]
        if isinstance(value, np.generic) or kind is np.ndarray or has_namespace(value):
            return self._array(value, where)
        tensors = kinds[kind]
        if tensors is not None:
            return ["tensor", tensors.name, self._array(tensors.as_values(value), where)]
        got = f"the class {value.__qualname__}" if isinstance(value, type) else type_named(value)
        return self._refuse(where, _KINDS, got)

    def _mapping(self, value: Any, where: str, depth: int) -> Any:
        items = [(key, self.plain(item, f"{where}[{key!r}]", depth + 1)) for key, item in value.items()]
        if type(value) is dict and all(type(key) is str for key, _ in items):
            return dict(items)
        pairs = [[self.plain(key, f"key {key!r} of {where}", depth + 1), item] for key, item in items]
        return ["dict" if type(value) is dict else "ordered", *pairs]

    def _array(self, value: Any, where: str) -> Any:
        refuse_mask(self._operation, where, value)
        host = np.asarray(to_host(value))
        if host.dtype.kind not in "iufcbUSmM" and not is_float(host.dtype):
            self._refuse(where, "an array of numbers, bools, text or times", f"one of dtype {host.dtype}")
        host = np.asarray(host, order="C")  # in the byte order that its dtype names
        self.arrays.append(host)
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return [kind, _dtype_name(host.dtype), *host.shape]

    def _refuse(self, where: str, expected: str, got: str) -> NoReturn:
        raise UnsupportedError(self._operation, where=where, expected=expected, got=got)


class _Decoder:
    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def value(self, plain: Any) -> Any:
        """Return the value that `_Encoder.plain` has made ``plain`` of; arrays in the order in which it met them."""
        if isinstance(plain, dict):
            return {key: self.value(item) for key, item in plain.items()}
        if not isinstance(plain, list):
            return plain
        kind, *items = plain
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in items)
        if kind in ("dict", "ordered"):
            # A pair was encoded with its value first.
            pairs = [(self.value(item), key) for key, item in items]
            made = [(self.value(key), item) for item, key in pairs]
            return dict(made) if kind == "dict" else OrderedDict(made)
        if kind == "int":
            return int(items[0], 16)
        if kind in _FROM_TEXT:
            return _FROM_TEXT[kind](items[0])
        if kind in _TIMES:
            text, fold, zone = items
            return _TIMES[kind].fromisoformat(text).replace(fold=fold, tzinfo=self.value(zone))
        if kind == "timedelta":
            return datetime.timedelta(*items)
        if kind == "timezone":
            return datetime.timezone(*map(self.value, items))
        if kind == "dtype":
            return dtype_of(items[0])
        if kind in ("array", "scalar"):
            return self._array(kind, *items)
        if kind == "tensor":
            return kind_named(items[0]).of_array(self.value(items[1]))
        module, name, *items = items
        cls = _class_of(module, name)
        if kind == "enum":
            return cls[items[0]]
        if kind == "flag":
            return cls(self.value(items[0]))
        if kind == "namedtuple":
            return tuple.__new__(cls, map(self.value, items))  # subclasses may have constructors of their own
        made = object.__new__(cls)
        for field, item in items[0].items():
            object.__setattr__(made, field, self.value(item))
        return made

    def _array(self, kind: str, dtype: str, *shape: int) -> Any:
        array: np.ndarray = np.empty(shape, dtype_of(dtype))
        bytes_of(array)[...] = self._data[: array.nbytes]
        self._data = self._data[-(-array.nbytes // _ALIGNED) * _ALIGNED :]
        return array if kind == "array" else array[()]


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind != "V" else dtype.name


def _class_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _class_of(module: str, name: str) -> Any:
    """Return a class by name, if this process has imported its module and the class carries only data."""
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    is_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    is_enum = isinstance(cls, type) and issubclass(cls, enum.Enum)
    if not (is_tuple or is_enum or (isinstance(cls, type) and dataclasses.is_dataclass(cls))):
        raise UnsupportedError(
            "receive an object", where=f"{module}.{name}", got="no such class",
            expected="a dataclass, named tuple or enumeration that this rank has imported",
            remedy="import its module, and define it at the top level, on all ranks",
        )  # fmt: skip
    return cls
