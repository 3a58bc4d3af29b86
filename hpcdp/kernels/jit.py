"""A decorator for Numba kernels that are compiled, or read from a cache, at the first use, and LLVM intrinsics.

Reasons not to use Numba's own cache:

- It compiles all signatures when a function is decorated, although a job needs few.
- It raises out of a kernel's first call on a full disk. For a read-only folder it uses one beside the sources, where
  code stays stale when another module of this package changes.
- It trusts the contents of files. A file damaged by a power loss raises arbitrary errors or ends the process in LLVM,
  and a damaged index is never replaced. It unpickles them, so files that other users may change are never read here.

The intrinsics provide vectors, 16-bit floats and runs of elements. LLVM maps the vectors to those of the processor.

Numba has no 16-bit floats, so a kernel takes their bits as integers (`hpcdp.core.arrays.words`): uint16 is float16
(IEEE binary16), int16 is bfloat16, the upper half of a float32. They are computed in float32 and rounded once.

Short runs are moved as vectors, because a compiled loop uses vectors of 32 elements and handles the rest one by one,
which is most of a row of a small image.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.typing import signature
from numba.extending import intrinsic

from ..core.files import make_private_folder, who_else_may_write_file
from ..errors import ConfigError
from . import compiled_dir, not_kept, not_taken, one_process_compiles, refuse_what_others_may_write

_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "boundscheck": None, "no_cfunc_wrapper": True}
"""Options of all kernels; the C wrapper would be compiled with each version."""
_SUM_NBYTES = 16
_PACKAGE = Path(__file__).parent
_here = threading.local()
_opening = threading.Lock()


def _refuse_settings() -> None:
    """Refuse settings of Numba that disable kernels, or make them jump to an invalid address."""
    if config.DISABLE_JIT:
        raise ConfigError(
            "kernels", where="NUMBA_DISABLE_JIT", expected="0, because kernels need compilation",
            got=config.DISABLE_JIT, remedy="unset NUMBA_DISABLE_JIT",
        )  # fmt: skip
    features = config.CPU_FEATURES
    if features is not None and platform.machine() == "x86_64" and "+f16c" not in features.split(","):
        raise ConfigError(
            "kernels", where="NUMBA_CPU_FEATURES", expected="a list with +f16c, which converts float16",
            got=f"{features!r} for NUMBA_CPU_NAME={config.CPU_NAME}", remedy="add +f16c, or unset both variables",
        )  # fmt: skip
    if config.CACHE_DIR:
        with contextlib.suppress(OSError):  # it may not exist yet
            _refuse_shared(config.CACHE_DIR)


def _refuse_shared(folder: str) -> None:
    """Refuse a folder of ``NUMBA_CACHE_DIR`` that other users may change; `OSError` if it does not exist."""
    where, remedy = f"NUMBA_CACHE_DIR={config.CACHE_DIR}", "unset it, or set it to a folder of your own"
    refuse_what_others_may_write("kernel cache", folder, where, remedy)


_refuse_settings()


def target() -> str:
    """Return what machine code depends on besides its sources."""
    return f"numba {numba.__version__}, {binding.get_host_cpu_name()}"


class _NotKeptError(Exception):
    """A kernel requested in `_read_only` would have to be compiled."""


@contextlib.contextmanager
def _read_only(reads_only: bool) -> Iterator[None]:
    """Set whether this thread raises `_NotKeptError` instead of compiling."""
    before = getattr(_here, "reads_only", False)
    _here.reads_only = reads_only
    try:
        yield
    finally:
        _here.reads_only = before


class _Private(UserProvidedCacheLocator):
    """The folder of ``NUMBA_CACHE_DIR`` for a source, unless another user may change it."""

    def ensure_cache_path(self) -> None:
        """Create the folder, and refuse one that other users may change."""
        make_private_folder(Path(self.get_cache_path()))
        self.refuse_shared()
        super().ensure_cache_path()

    def refuse_shared(self) -> None:
        """Refuse a folder that other users may change."""
        _refuse_shared(self.get_cache_path())


class _OneFolder(_Private):
    """The folder named after all sources, shared by all clones and environments that have the same."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Return no subfolder."""
        return ""

    def get_source_stamp(self) -> Any:
        """Return None for a source of this package, which the folder's name covers, else Numba's stamp."""
        return None if Path(self._py_file).is_relative_to(_PACKAGE) else super().get_source_stamp()

    def refuse_shared(self) -> None:
        """See `_Private.refuse_shared`."""
        folder = self.get_cache_path()
        refuse_what_others_may_write("kernel cache", folder, folder, "remove it")


class _BySources(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [_OneFolder]


class _OnlyThere(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [_Private]


class _Summed(IndexDataCacheFile):
    """A file for each signature, which begins with a checksum of its purpose and contents.

    A file with a wrong checksum counts as missing: it is compiled again and replaced. Numba's index, which could be
    damaged too, or name a file with replaced code, is not used: the file's name contains the key.
    """

    def load(self, key: Any) -> Any:
        """Return the cached code for ``key``, or None; `OSError` if there is none."""
        path = self._path(key)
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a link leads out of the folder, and a FIFO waits for a writer
            not_taken(f"{path}, which is no regular file")
            return None
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            writer = who_else_may_write_file(file.fileno(), path)
            if writer is not None:
                not_taken(writer)
                return None
            contents = file.read()
        data = contents[_SUM_NBYTES:]
        return pickle.loads(data) if contents[:_SUM_NBYTES] == self._sum(path, data) else None

    def save(self, key: Any, data: Any) -> None:
        """Write the code for ``key`` with its checksum."""
        path, dumped = self._path(key), self._dump(data)
        with self._open_for_write(path) as file:
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)
            file.write(self._sum(path, dumped) + dumped)

    def _path(self, key: Any) -> Path:
        number = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return Path(self._data_path(self._data_name(int.from_bytes(number))))

    def _sum(self, path: Path, data: bytes) -> bytes:
        purpose = repr((path.name, self._version, self._source_stamp))
        return hashlib.blake2b(purpose.encode() + data, digest_size=_SUM_NBYTES).digest()


class _Forgiving(FunctionCache):
    """The cached machine code of one function; unreadable code is compiled again, failed writes are reported.

    ``NUMBA_CACHE_DIR`` takes precedence over ``folder``, which is specific to these sources and this `target`.
    """

    def __init__(self, function: Any, folder: Path) -> None:
        before = config.CACHE_DIR
        self._impl_class = _OnlyThere if before else _BySources
        self._folder, self._is_open = folder, False
        config.CACHE_DIR = before or str(folder)
        try:
            make_private_folder(folder)
            super().__init__(function)
            impl = self._impl
            self._cache_file = _Summed(self._cache_path, impl.filename_base, impl.locator.get_source_stamp())
            self._is_open = True
        except (OSError, RuntimeError) as error:  # RuntimeError: Numba found no folder
            not_kept(folder, error)
        finally:
            config.CACHE_DIR = before

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached version for ``sig``, or None; `_NotKeptError` in `_read_only`."""
        code = None
        if self._is_open:
            # Numba's `load_overload` would first set up its compiler, for 0.16 s; machine code needs only the runtime.
            rtsys.initialize(target_context)
            with contextlib.suppress(OSError):
                code = self._load_overload(sig, target_context)
        if code is None and getattr(_here, "reads_only", False):
            raise _NotKeptError
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the version for ``sig``, and report a failure."""
        if not self._is_open:
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:
            not_kept(self._folder, error)


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A function decorated by `kernel`."""

    def __init__(self, function: Any, options: dict[str, Any], signatures: Sequence[Any]) -> None:
        super().__init__(function, targetoptions=_OPTIONS | options)
        self._declared = [
            signature(returned, *args) for args, returned in map(sigutils.normalize_signature, signatures)
        ]
        self._machine_code: _Forgiving | None = None
        self._converting: dict[tuple[Any, ...], Any] = {}
        """Entry points for argument types that are converted."""

    def _compilation_chain_init_hook(self) -> None:
        """Skip the search for Numba extensions of other packages, which no kernel needs."""

    def compile(self, sig: Any) -> Any:
        """Compile or read the version for the types ``sig``, and return its entry point without dispatch.

        Raises:
            TypeError: the arguments cannot be converted to any declared signature.
        """
        arg_types = tuple(map(types.unliteral, sigutils.normalize_signature(sig)[0]))
        if arg_types in self._converting:
            return self._converting[arg_types]
        known = self.overloads.get(arg_types)
        if known is not None:
            return known.entry_point
        chosen = self._chosen(arg_types)
        with _opening:
            if self._machine_code is None:
                self._cache = self._machine_code = _Forgiving(self.py_func, compiled_dir())
        if not self._is_kept(chosen):
            with one_process_compiles(lambda: self._is_kept(chosen)), _read_only(False):
                super().compile(chosen)
        args = tuple(sigutils.normalize_signature(chosen)[0])
        entry_point = self.overloads[args].entry_point
        with _opening:  # duplicates would be ambiguous, so that every call would come here and add one more
            if args != arg_types and arg_types not in self._converting:  # the next call is dispatched without `compile`
                self._insert([kind._code for kind in arg_types], entry_point, False)
                self._converting[arg_types] = entry_point
        return entry_point

    def _chosen(self, arg_types: tuple[Any, ...]) -> Any:
        """Return the declared signature for arguments of the types ``arg_types``; these types if none is declared."""
        if not self._declared:
            return arg_types
        declared = self.typingctx.resolve_overload(self.py_func, self._declared, arg_types, {})
        if declared is None:
            raise TypeError(f"No matching definition for argument type(s) {', '.join(map(str, arg_types))}")
        return declared

    def _is_kept(self, chosen: Any) -> bool:
        """Return whether the version was read from the cache; it can then be called."""
        with contextlib.suppress(_NotKeptError), _read_only(True):
            super().compile(chosen)
            return True
        return False


def kernel(signatures: Any = (), **options: Any) -> Callable[[Any], Kernel]:
    """Decorate a kernel, as ``numba.njit(..., cache=True, nogil=True, error_model="numpy")`` would.

    Each version is read or compiled at its first use, by one process of the machine. A long function that several
    kernels call is a kernel itself, so that it is compiled once; in those of `shm_exchange` and `shm_blocks` that took
    26 s in all instead of 46 with ``inline="always"``. With ``forceinline`` LLVM puts it into its callers, which takes
    longer to compile, and saves 0.3 us of a short call.

    Args:
        signatures: one or a list, of argument types to which others are converted if possible. Empty: the types of each
            call.
        **options: further options of ``numba.njit``.
    """
    several = signatures if isinstance(signatures, list | tuple) else [signatures]
    return lambda function: Kernel(function, options, several)


def float_kernel(arguments: Callable[[Any], tuple[Any, ...]], **options: Any) -> Callable[[Any], Kernel]:
    """Decorate a kernel for float32 and float64; ``arguments`` returns the argument types for a float type."""
    return kernel([types.void(*arguments(kind)) for kind in (types.float32, types.float64)], **options)


WORD = ir.IntType(32)


@functools.cache
def are_eight() -> bool:
    """Return whether the processor has vectors of eight floats with fused multiply-add, but not of sixteen."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx2") and features.get("fma") and not features.get("avx512f"))


class Lanes:
    """A vector of ``width`` elements of an array from ``index`` on; uint16 holds the bits of float16."""

    def __init__(self, context: Any, builder: Any, array: tuple[Any, Any], index: Any, width: int) -> None:
        array_type, value = array
        stored = {types.uint16: ir.HalfType(), types.float32: ir.FloatType()}.get(array_type.dtype, ir.DoubleType())
        computed = ir.FloatType() if stored == ir.HalfType() else stored
        self._builder, self._width = builder, width
        self._stored, self._computed = ir.VectorType(stored, width), ir.VectorType(computed, width)
        self._alignment = array_type.dtype.bitwidth // 8
        data = cgutils.create_struct_proxy(array_type)(context, builder, value).data
        self._pointer = builder.bitcast(builder.gep(data, [index]), self._stored.as_pointer())

    def load(self) -> Any:
        """Load the vector, with 16-bit floats widened."""
        return self._widened(self._builder.load(self._pointer, align=self._alignment))

    def store(self, value: Any) -> None:
        """Store a vector, rounded to the array's dtype."""
        self._builder.store(self._narrowed(value), self._pointer, align=self._alignment)

    def store_bits(self, value: Any) -> None:
        """Store a vector of integers of the elements' size."""
        self._builder.store(self._builder.bitcast(value, self._stored), self._pointer, align=self._alignment)

    def rounded(self, value: Any) -> Any:
        """Return ``value`` as it would be loaded after a store."""
        return self._widened(self._narrowed(value))

    def _widened(self, value: Any) -> Any:
        return value if self._stored == self._computed else self._builder.fpext(value, self._computed)

    def _narrowed(self, value: Any) -> Any:
        return value if self._stored == self._computed else self._builder.fptrunc(value, self._stored)

    def repeat(self, number: Any) -> Any:
        """Return a float64 in all lanes, rounded as an element."""
        builder = self._builder
        kind = self._computed.element
        number = number if kind == ir.DoubleType() else builder.fptrunc(number, kind)
        one = builder.insert_element(ir.Constant(self._computed, ir.Undefined), number, WORD(0))
        zeros = ir.Constant(ir.VectorType(WORD, self._width), None)
        return self.rounded(builder.shuffle_vector(one, one, zeros))

    def constant(self, number: float) -> Any:
        """Return a vector of one constant."""
        return ir.Constant(self._computed, [number] * self._width)

    def bits(self, flags: Any) -> Any:
        """Return a vector of truth values as a 32-bit number, the first one lowest."""
        number = self._builder.bitcast(flags, ir.IntType(self._width))
        return number if self._width == 32 else self._builder.zext(number, WORD)

    def flags(self, number: Any, lowest: int) -> Any:
        """Return the bits of a 32-bit number from ``lowest`` on as truth values, each shifted to the sign."""
        kind = ir.VectorType(WORD, self._width)
        one = self._builder.insert_element(ir.Constant(kind, ir.Undefined), number, WORD(0))
        numbers = self._builder.shuffle_vector(one, one, ir.Constant(kind, None))
        shifts = ir.Constant(kind, [31 - lowest - lane for lane in range(self._width)])
        return self._builder.icmp_signed("<", self._builder.shl(numbers, shifts), ir.Constant(kind, None))


_float16, _bfloat16 = types.uint16, types.int16
_HALF = ir.IntType(16)


def nearest_bfloat16(builder: Any, value: Any, width: int) -> Any:
    """Round ``width`` floats that are not NaN to the nearest bfloat16, ties to even, in 32-bit arithmetic."""
    word, half = ir.VectorType(WORD, width), ir.VectorType(_HALF, width)
    sixteen, one, below_half = (ir.Constant(word, [number] * width) for number in (16, 1, 0x7FFF))
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    return builder.trunc(builder.lshr(builder.add(bits, builder.add(odd, below_half)), sixteen), half)


def any_bfloat16(builder: Any, value: Any) -> Any:
    """Round a float32 to the bits of the nearest bfloat16; NaNs are made quiet, else rounding could give infinity."""
    quiet = builder.or_(builder.lshr(builder.bitcast(value, WORD), WORD(16)), WORD(0x40))
    rounded = builder.bitcast(nearest_bfloat16(builder, value, 1), _HALF)
    return builder.select(builder.fcmp_unordered("uno", value, value), builder.trunc(quiet, _HALF), rounded)


def of_bfloat16(builder: Any, bits: Any) -> Any:
    """Return the float32 of the bits of a bfloat16."""
    return builder.bitcast(builder.shl(builder.zext(bits, WORD), WORD(16)), ir.FloatType())


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """Return the value in its accumulator's type: 16-bit floats as float32, others unchanged."""
    if value not in (_float16, _bfloat16):
        return value(value), lambda context, builder, signature, args: args[0]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == _bfloat16:
            return of_bfloat16(builder, args[0])
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def narrow(typingctx: Any, value: Any, like: Any) -> Any:
    """Return an accumulator as an element of the array ``like``, rounded to nearest even."""
    dtype = like.dtype
    if dtype not in (_float16, _bfloat16):
        return dtype(dtype, like), lambda context, builder, signature, args: args[0]  # integers wrap

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if dtype == _bfloat16:
            return any_bfloat16(builder, args[0])
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _HALF)

    return dtype(types.float32, like), generate


@intrinsic
def magnitude_bits(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float without its sign as an unsigned integer.

    For `hpcdp.core.arrays.words` the result keeps their type, which determines the format.
    """
    bits = value.bitwidth
    result = {32: types.uint32, 64: types.uint64}.get(bits, value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(bits)
        return builder.and_(builder.bitcast(args[0], word), word((1 << (bits - 1)) - 1))

    return result(value), generate


def _moves_eight(adds: bool) -> Any:
    """Make an intrinsic that copies, or ``adds``, eight elements from one flat array and index to another."""

    @intrinsic
    def move(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            read = Lanes(context, builder, (signature.args[0], args[0]), args[1], 8).load()
            into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 8)
            into.store(builder.fadd(into.load(), read) if adds else read)
            return context.get_dummy_value()

        return types.none(source, types.intp, target, types.intp), generate

    return move


_copy_eight, _add_eight = _moves_eight(False), _moves_eight(True)


@intrinsic
def _copy_every_other(context: Any, source: Any, first: Any, target: Any, start: Any) -> Any:
    """Copy every second of fifteen elements, else as ``_copy_eight``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = partial(Lanes, context, builder)
        last = builder.add(args[1], args[1].type(7))
        one, two = (lanes((signature.args[0], args[0]), index, 8).load() for index in (args[1], last))
        chosen = ir.Constant(ir.VectorType(WORD, 8), [0, 2, 4, 6, 9, 11, 13, 15])
        lanes((signature.args[2], args[2]), args[3], 8).store(builder.shuffle_vector(one, two, chosen))
        return context.get_dummy_value()

    return types.none(source, types.intp, target, types.intp), generate


def _weaves(adds: bool) -> Any:
    """Make an intrinsic that writes, or ``adds``, sixteen elements, alternating between two runs of eight."""

    @intrinsic
    def weave(context: Any, source: Any, first: Any, other: Any, target: Any, start: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = partial(Lanes, context, builder)
            one, two = (lanes((signature.args[0], args[0]), args[k], 8).load() for k in (1, 2))
            into = lanes((signature.args[3], args[3]), args[4], 16)
            alternating = [lane // 2 + lane % 2 * 8 for lane in range(16)]
            both = builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(WORD, 16), alternating))
            into.store(builder.fadd(into.load(), both) if adds else both)
            return context.get_dummy_value()

        return types.none(source, types.intp, types.intp, target, types.intp), generate

    return weave


_copy_in_turn, _add_in_turn = _weaves(False), _weaves(True)


@numba.njit(inline="always")
def copy_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    """Copy ``size`` elements from one flat array and index to another."""
    if size < 8:
        for k in range(size):
            target[start + k] = source[first + k]
        return
    for k in range(0, size - 8, 8):
        _copy_eight(source, first + k, target, start + k)
    _copy_eight(source, first + size - 8, target, start + size - 8)  # overlaps the run before


@numba.njit(inline="always")
def add_run(source, first, target, start, size):  # type: ignore[no-untyped-def]
    """Add ``size`` elements, else as `copy_run`."""
    whole = size - size % 8
    for k in range(0, whole, 8):
        _add_eight(source, first + k, target, start + k)
    for k in range(whole, size):
        target[start + k] += source[first + k]


@numba.njit(inline="always")
def copy_strided(source, first, stride, target, start, size):  # type: ignore[no-untyped-def]
    """Copy elements ``stride`` apart, else as `copy_run`."""
    if stride == 1:
        copy_run(source, first, target, start, size)
        return
    whole = size - size % 8 if stride == 2 else 0
    for k in range(0, whole, 8):
        _copy_every_other(source, first + 2 * k, target, start + k)
    for k in range(whole, size):
        target[start + k] = source[first + stride * k]


@numba.njit(inline="always")
def add_both(source, even, odd, wide, target, line, width, padding):  # type: ignore[no-untyped-def]
    """Add rows of both components to a line of the plane, which starts with a sample of either."""
    first, other = (odd, even) if padding % 2 else (even, odd)
    first += (padding + 1) // 2 - padding % 2
    other += (padding + 1) // 2
    visible = min(width, 2 * wide - padding)
    whole = visible - visible % 16
    for x in range(0, whole, 16):
        _add_in_turn(source, first + x // 2, other + x // 2, target, line + x)
    for x in range(whole, visible):
        target[line + x] += source[(other if x % 2 else first) + x // 2]


@numba.njit(inline="always")
def weave_run(source, even, odd, target, start, size):  # type: ignore[no-untyped-def]
    """Write ``size`` elements, alternating between two runs."""
    whole = size - size % 16
    for k in range(0, whole, 16):
        _copy_in_turn(source, even + k // 2, odd + k // 2, target, start + k)
    for k in range(whole, size):
        target[start + k] = source[(odd if k % 2 else even) + k // 2]
