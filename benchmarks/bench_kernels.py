"""Compiled kernels for CPU against a plain memory copy of as many bytes as they must move, and against PyTorch's.

``python benchmarks/bench_kernels.py -m 1M:64M`` on one core. A size is that of one float32 array (so Adam's four are
four times as large); bytes that must be moved are those of every array read and of every array written, each once. A
share is the copy's time over the kernel's, turn by turn; in place it can exceed 1, since a line that is written was
read anyway. The peer of unpacking, which only writes, is NumPy's fill of the result. Every kernel's arrays are compared
with its plain reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.programs import sweep_parser
from hpcdp import comm, kernels
from hpcdp.bench.measure import (
    MeasuringSchedule,
    alternate,
    check_writable,
    describe,
    format_size,
    median_ratio,
    pin_to_own_core,
    size_range,
    turn_medians,
)
from hpcdp.kernels import reference as plain

_THRESHOLD = 0.5
_LAYERS = 50  # as ResNet-50's
_FACTOR = -1.0  # can be applied for ever
_SGD = (1e-3, 1e-4, 0.5)
_MOMENTUM = (*_SGD, 0.9)
_ADAMW = (1e-3, 0.0, 0.5, 1 - 1e-5, 0.1, 0.999, 0.001, 1.0, 1e-8)
UPDATES = (
    ("SGD", "sgd", 2, _SGD),
    ("momentum", "sgd_momentum", 3, _MOMENTUM),
    ("Nesterov", "sgd_nesterov", 3, _MOMENTUM),
    ("AdamW", "adam", 4, _ADAMW),
)


@dataclass
class Kernel:
    """One kernel on its arrays.

    Args:
        name: as printed.
        arrays: what it reads and writes.
        call: the kernel, which takes them and returns None or a number.
        reference: the same in plain array operations.
        moved: bytes that it must move.
        peer: does as much, on arrays of its own; None without one.
        rtol: how far from the reference's its arrays may be; 0: the same bits.
    """

    name: str
    arrays: tuple[np.ndarray, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    moved: int
    peer: Callable[[], Any] | None = None
    rtol: float = 0.0

    def wrong(self) -> int:
        """Return the number of elements that differ from the reference after one call on the current arrays."""
        expected = tuple(x.copy() for x in self.arrays)
        answer, plain = self.call(*self.arrays), self.reference(*expected)
        differ = sum(
            int(np.count_nonzero(~np.isclose(x, y, rtol=self.rtol, atol=0)))
            for x, y in zip(self.arrays, expected, strict=True)
        )
        return differ + (answer is not None and not np.isclose(answer, plain, rtol=1e-12, atol=0))


@dataclass
class Repeated:
    """Something that finds the caches as it left them itself, since an untimed call goes before each timed one.

    What comes out is checked before (`Kernel.wrong`): in place, repeated calls run away from what they began with.
    """

    name: str
    call: Callable[[], Any]

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        self.call()

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        begin = time.perf_counter_ns()
        self.call()
        return time.perf_counter_ns() - begin

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return 0


def aligned(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that begin with a cache line, as the library's arrays do.

    NumPy's large arrays begin 16 bytes into one: every other store of a kernel then meets two lines (1 MB on Zen 3:
    unpacking 1 bit 28 us instead of 16, 2 bits 28 instead of 18, AdamW 125 instead of 110).
    """
    x = kernels.empty(shape if isinstance(shape, tuple) else (shape,), dtype)
    x[...] = 0
    return x


class Arrays:
    """Random input and room for results, ``count`` elements each, aligned to cache lines."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.nbytes = 4 * count
        self._rng = np.random.default_rng(count)

    def normal(self) -> np.ndarray:
        """float32, shape ``(count,)``."""
        x = aligned(self.count, np.float32)
        return self._rng.standard_normal(out=x, dtype=np.float32)

    def zeros(self, dtype: type = np.float32, per_element: int = 1) -> np.ndarray:
        """Shape ``(count / per_element,)``, rounded up."""
        return aligned(-(-self.count // per_element), dtype)


def torch_or_reason() -> tuple[Any, str]:
    """PyTorch, kept to one thread, or None and why not."""
    if importlib.util.find_spec("torch") is None:
        return None, "PyTorch: not installed"
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    return torch, ""


def _torch_update(torch: Any, name: str, arrays: Arrays) -> Callable[[], Any]:
    param = torch.from_numpy(arrays.normal()).requires_grad_()
    param.grad = torch.from_numpy(arrays.normal())
    if name == "AdamW":
        return torch.optim.AdamW([param], lr=_ADAMW[0], fused=True).step
    options = {} if name == "SGD" else {"momentum": _MOMENTUM[-1], "nesterov": name == "Nesterov"}
    return torch.optim.SGD([param], lr=_SGD[0], weight_decay=_SGD[1], fused=True, **options).step


def updates(arrays: Arrays, torch: Any) -> Iterator[Kernel]:
    """Fused updates; each reads all its arrays and writes all but the gradient."""

    def step(module: Any, rule: str, coefficients: tuple[float, ...], *xs: np.ndarray) -> None:
        getattr(module, rule)(*xs, coefficients)

    for name, rule, number, coefficients in UPDATES:
        xs = tuple(arrays.normal() for _ in range(number))
        for state in xs[2:]:
            np.abs(state, out=state)
        call, reference = (partial(step, each, rule, coefficients) for each in (kernels.load("gradients"), plain))
        peer = _torch_update(torch, name, arrays) if torch else None
        yield Kernel(name, xs, call, reference, (2 * number - 1) * arrays.nbytes, peer)


def casts(arrays: Arrays, torch: Any) -> Iterator[Kernel]:
    """Both ways between float32 and the 16-bit formats, and scaling in place."""
    cast = kernels.load("networks")
    for word in ("float16", "bfloat16"):
        wide, narrow = arrays.normal(), arrays.zeros(np.uint16)
        down = up = None
        if torch:
            source, into = torch.from_numpy(arrays.normal()), torch.empty(arrays.count, dtype=getattr(torch, word))
            down = partial(into.copy_, source)
            up = partial(torch.empty(arrays.count).copy_, source.to(into.dtype))
        for name, xs, peer in ((f"to_{word}", (wide, narrow), down), (f"from_{word}", (narrow, arrays.zeros()), up)):
            call, reference = getattr(cast, name), getattr(plain, name)
            yield Kernel(name.replace("_", " "), xs, call, reference, wide.nbytes + narrow.nbytes, peer)

    def scale(module: Any, x: np.ndarray) -> None:
        module.scale(x, _FACTOR)

    times = partial(torch.from_numpy(arrays.normal()).mul_, _FACTOR) if torch else None
    call, reference = partial(scale, cast), partial(scale, plain)
    yield Kernel("scale", (arrays.normal(),), call, reference, 2 * arrays.nbytes, times)


def packing(arrays: Arrays) -> Iterator[Kernel]:
    """2 bits and 1 bit an element; packing reads the gradient and reads and writes the residual."""

    def pack(module: Any, bits: str, grad: np.ndarray, residual: np.ndarray, words: np.ndarray) -> None:
        if bits == "one":
            module.pack_one_bit(grad, residual, 0.0, _THRESHOLD, words)
        else:
            module.pack_two_bit(grad, residual, _THRESHOLD, _THRESHOLD, words)

    def unpack(module: Any, bits: str, words: np.ndarray, out: np.ndarray) -> None:
        if bits == "one":
            module.unpack_one_bit(words, _THRESHOLD, out)
        else:
            module.unpack_two_bit(words, _THRESHOLD, out)

    modules = (kernels.load("gradients"), plain)
    for bits, in_a_word in (("two", 16), ("one", 32)):
        words, out = arrays.zeros(np.uint32, in_a_word), arrays.zeros()
        call, reference = (partial(pack, module, bits) for module in modules)
        inputs = (arrays.normal(), arrays.zeros(), words)
        yield Kernel(f"pack {bits} bit", inputs, call, reference, 3 * arrays.nbytes + words.nbytes)
        call, reference = (partial(unpack, module, bits) for module in modules)
        fill = partial(arrays.zeros().fill, _THRESHOLD)
        yield Kernel(f"unpack {bits} bit", (words, out), call, reference, arrays.nbytes + words.nbytes, fill)


def sums(arrays: Arrays, torch: Any) -> Iterator[Kernel]:
    """Return the sum of the rows of a node's ranks, out of place and written back."""
    reduce = kernels.load("gradients")

    def combine(rows: np.ndarray, out: np.ndarray) -> None:
        reduce.combine(rows, 0, out.size, out, reduce.SUM)

    def plain(rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = np.add.reduce(rows, axis=0)

    def combine_everywhere(rows: np.ndarray) -> None:
        reduce.combine_into(rows, 0, rows.shape[1], reduce.EVERY_ROW, reduce.SUM)

    def plain_everywhere(rows: np.ndarray) -> None:
        rows[...] = np.add.reduce(rows, axis=0)

    for n in (2, 4):
        rows = np.stack([arrays.normal() for _ in range(n)], out=aligned((n, arrays.count), np.float32))
        peer = None
        if torch:
            tensor, into = torch.from_numpy(rows), torch.empty(arrays.count)
            two = partial(torch.add, tensor[0], tensor[1], out=into)
            peer = two if n == 2 else partial(torch.sum, tensor, 0, out=into)
        yield Kernel(f"sum of {n} rows", (rows, arrays.zeros()), combine, plain, (n + 1) * arrays.nbytes, peer)
    rows = np.stack([arrays.normal(), arrays.normal()], out=aligned((2, arrays.count), np.float32))
    yield Kernel("sum of 2, into both", (rows,), combine_everywhere, plain_everywhere, 4 * arrays.nbytes)


def norms(arrays: Arrays, torch: Any) -> Iterator[Kernel]:
    """Return the sum of squares, which only reads."""
    x = arrays.normal()
    peer = partial(torch.linalg.vector_norm, torch.from_numpy(x)) if torch else None
    yield Kernel(
        "sum of squares", (x,), kernels.load("gradients").sum_of_squares, plain.sum_of_squares, arrays.nbytes, peer
    )


def layer_norms(arrays: Arrays) -> Iterator[Kernel]:
    """Return the squared norms of `_LAYERS` layers' weights and gradients, as LARS needs them; they only read."""

    def squares(module: Any, params: np.ndarray, grads: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> None:
        module.segment_squares(params, grads, bounds, out)

    bounds = np.linspace(0, arrays.count, _LAYERS + 1).astype(np.int64)
    inputs = (arrays.normal(), arrays.normal(), bounds, np.zeros((_LAYERS, 2)))
    call, reference = (partial(squares, module) for module in (kernels.load("gradients"), plain))
    yield Kernel("LARS norms", inputs, call, reference, 2 * arrays.nbytes, rtol=1e-12)


def all_kernels(count: int, torch: Any) -> Iterator[Kernel]:
    """Every kernel of target S7 and those beside them, on ``count`` elements, each made when it is asked for."""
    arrays = Arrays(count)
    yield from updates(arrays, torch)
    yield from casts(arrays, torch)
    yield from packing(arrays)
    yield from sums(arrays, torch)
    yield from norms(arrays, torch)
    yield from layer_norms(arrays)


def measure_kernel(kernel: Kernel, nbytes: int, iterations: int, warmup: int) -> dict[str, Any]:
    """One kernel against the copy and its peer.

    Returns ``kernel``, ``nbytes``, ``moved_bytes``, ``median_us`` by name (``kernel``, ``copy``, ``peer``), ``gb_s``
    (moved bytes over time), ``share`` (of the copy rate), ``peer_ratio`` (its time over the kernel's, or None) and
    ``wrong``, the wrong elements.
    """
    wrong = kernel.wrong()
    source, target = (aligned(kernel.moved // 2, np.uint8) for _ in range(2))
    candidates = [
        Repeated("kernel", partial(kernel.call, *kernel.arrays)),
        Repeated("copy", partial(np.copyto, target, source)),
        *([Repeated("peer", kernel.peer)] if kernel.peer else []),
    ]
    schedule = MeasuringSchedule.for_size(nbytes, iterations, warmup)
    found = alternate(candidates, lambda: None, schedule, validate=False)
    taken = {name: turn_medians([series]) for name, series in found.items()}
    medians = {name: float(np.median(us)) for name, us in taken.items()}
    return {
        "kernel": kernel.name,
        "nbytes": nbytes,
        "moved_bytes": kernel.moved,
        "median_us": medians,
        "gb_s": kernel.moved / medians["kernel"] / 1e3,
        "share": median_ratio(taken["copy"], taken["kernel"]),
        "peer_ratio": median_ratio(taken["peer"], taken["kernel"]) if kernel.peer else None,
        "wrong": wrong,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = sweep_parser("kernels", __doc__, "1M:64M", "bytes of one float32 array", 2, 64)
    args = parser.parse_args(argv)
    sizes = size_range(args.sizes, args.factor)
    world = comm.init()
    check_writable("kernels", [args.json], world)
    core = pin_to_own_core(world)
    torch, reason = torch_or_reason()
    print(f"# kernels on core {core}: microseconds, share of the copy rate, the peer's time over ours")
    print(f"{'# kernel':<22}{'size':>6}{'us':>12}{'GB/s':>8}{'copy':>8}{'share':>8}{'peer':>8}")
    rows = []
    for nbytes in sizes:
        for kernel in all_kernels(max(1, nbytes // 4), torch):
            row = measure_kernel(kernel, nbytes, args.iterations, args.warmup)
            rows.append(row)
            copied = row["moved_bytes"] / row["median_us"]["copy"] / 1e3
            peer = "-" if row["peer_ratio"] is None else f"{row['peer_ratio']:.2f}"
            print(
                f"{kernel.name:<22}{format_size(nbytes):>6}{row['median_us']['kernel']:>12.1f}{row['gb_s']:>8.1f}"
                f"{copied:>8.1f}{row['share']:>8.2f}{peer:>8}" + (f"  WRONG: {row['wrong']}" if row["wrong"] else ""),
                flush=True,
            )
    write_json(args.json, world, {"benchmark": "kernels", "machine": describe(world), "skipped": reason, "rows": rows})
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    programs.run(main)
