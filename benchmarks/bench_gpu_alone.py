"""Benchmarks of one process on a GPU: LeNet, ResNet-18 and a GPT in samples per second, and kernels.

Kernels are compared with the rate of the device's own copy. `bench_gpu` starts this program as a job, because a hanging
GPU call can only be ended with its process. The file of figures is rewritten after each measurement, so it is complete
up to that point if the job is killed. It names failures, which do not end the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import CLASSES, MODELS, VOCABULARY, gpt, training_step
from bench_kernels import UPDATES
from bench_train_lenet import step_of
from hpcdp import comm, kernels, nn, optim
from hpcdp.bench.measure import check_writable, describe, parse_size
from hpcdp.comm import world as comm_world
from hpcdp.core.arrays import Array, to_host
from hpcdp.kernels.cuda import cudnn_conv
from hpcdp.kernels.reference import SUM, num_blocks
from hpcdp.launch.parser import Parser, at_least
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

_CHANNELS, _SIDE, _CLASSES, _FEATURES = 64, 32, 1000, 256
_LAYERS, _PER_ROW = 16, 8
"""Parameters of LARS, and values that are added to each row of a table."""
_DRAWN = 1 << 22
"""So many numbers are drawn; more are those again, since a GPU would wait a minute for all of them."""
_ROUNDED = 1e-5
"""Of the largest element: sums in another order, and exp and log."""


@dataclass
class Case:
    """One kernel.

    Args:
        name: as printed.
        family: as `kernels.kernels_for` takes it.
        call: takes the module and the arrays, of which it changes some; returns None or a number, perhaps on a GPU.
        arrays: NumPy's.
        moved: bytes that must be read or written.
        error: how far from the specification's they may be, of the largest element; 0: not at all.
    """

    name: str
    family: str
    call: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    moved: int
    error: float = 0.0

    def on(self, asarray: Callable[[np.ndarray], Array]) -> tuple[Callable[[], Any], tuple[Array, ...]]:
        """Return the call on copies of its arrays by ``asarray``, and the copies."""
        arrays = tuple(map(asarray, self.arrays))
        return partial(self.call, kernels.kernels_for(self.family, arrays[0]), *arrays), arrays

    def wrong(self, asarray: Callable[[np.ndarray], Array]) -> int:
        """Return the number of elements of one call's arrays that differ from the reference."""
        call, ours = self.on(asarray)
        theirs = tuple(x.copy() for x in self.arrays)
        answer, expected = call(), self.call(kernels.reference, *theirs)
        differ = 0 if expected is None else int(abs(float(answer) - expected) > 1e-12 * abs(expected))
        for x, y in zip(map(to_host, ours), theirs, strict=True):
            apart = abs(x.astype(np.float64) - y)  # unsigned integers would wrap around
            differ += int(np.count_nonzero(~(apart <= self.error * abs(y).max(initial=0))))
        return differ


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return float32 numbers of a normal distribution."""
    return np.resize(rng.standard_normal(min(_DRAWN, math.prod(shape)), np.float32), shape)


def _named(name: str, *numbers: Any, behind: int | None = None) -> Callable[..., Any]:
    """Return a call of a module's function ``name`` with arrays, then ``numbers`` after some or all of them."""

    def call(module: ModuleType, *arrays: Array) -> Any:
        first = len(arrays) if behind is None else behind
        return getattr(module, name)(*arrays[:first], *numbers, *arrays[first:])

    return call


def cases(count: int) -> Iterator[Case]:
    """Yield each kernel with arrays of about ``count`` elements."""
    yield from _flat(count)
    yield from _of_layers(count)
    yield from _codecs(count)
    yield from _bits(count)
    yield from _rows(max(1, count // _FEATURES))
    yield from _layers(max(1, count // (_CHANNELS * _SIDE * _SIDE)))


def _flat(count: int) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    nbytes = 4 * count
    for name, rule, number, coefficients in UPDATES:
        arrays = tuple(abs(_random(rng, count)) for _ in range(number))
        call = _named(rule, coefficients)
        yield Case(name, "gradients", call, arrays, (2 * number - 1) * nbytes)
    x, wide, half = _random(rng, count), np.zeros(count, np.float32), np.zeros(count, np.uint16)
    for word in ("float16", "bfloat16"):
        for name, both in ((f"to_{word}", (x, half)), (f"from_{word}", (half, wide))):
            yield Case(name.replace("_", " "), "networks", _named(name), both, nbytes * 3 // 2)
    scaled = _named("scale", -1.0)
    yield Case("scale", "networks", scaled, (x,), 2 * nbytes)
    yield Case("sum of squares", "gradients", _sum_of_squares, (x,), nbytes)
    yield Case("add", "networks", _named("add"), (x, x[::-1].copy(), wide), 3 * nbytes)
    yield Case("ReLU", "networks", _named("relu"), (x, wide), 2 * nbytes)
    for n in (2, 4, 8):
        rows = _random(rng, n, count)
        call = partial(_sum_rows, count)
        yield Case(f"sum of {n} rows", "gradients", call, (rows, wide), (n + 1) * nbytes)


def _sum_of_squares(module: ModuleType, x: Array) -> Any:
    """Left on the GPU, as for a trainer's clipping."""
    return module.sum_of_squares(x) if module is kernels.reference else module.all_squares([x])[0]


def _sum_rows(count: int, module: ModuleType, rows: Array, out: Array) -> None:
    module.combine(rows, 0, count, out, SUM)


def _of_layers(count: int) -> Iterator[Case]:
    """Return the operations of LARS on its layers."""
    params, grads, velocity = _random(np.random.default_rng(4), 3, count)
    bounds, squares = np.arange(_LAYERS + 1) * count // _LAYERS, np.zeros((_LAYERS, 2))
    of_norms = (params, grads, bounds, squares)
    yield Case("LARS norms", "gradients", _named("segment_squares"), of_norms, 2 * params.nbytes, _ROUNDED)
    into = (params, grads, velocity, np.array([4.0, 9.0]))
    update = _named("lars_sgd_momentum", (0.1, 1e-4, 0.5, 0.9, 1e-3))
    yield Case("LARS", "gradients", update, into, 5 * params.nbytes)


def _codecs(count: int) -> Iterator[Case]:
    grad, residual = _random(np.random.default_rng(2), 2, count)
    nbytes, scales = 4 * count, np.zeros(num_blocks(count), np.float32)
    for name, width, numbers in (("two_bit", 16, (0.5,)), ("one_bit", 32, (0.1, 0.5))):
        words = np.zeros(-(-count // width), np.uint32)
        codes = scales.nbytes + words.nbytes
        call = _named(f"encode_{name}", *numbers, behind=2)
        arrays = (grad, residual, scales, words)
        yield Case(f"encode {name.replace('_', ' ')}", "gradients", call, arrays, 3 * nbytes + codes)
        decode = _named(f"decode_{name}")
        full = (abs(scales) + 0.5, words, np.zeros_like(grad))
        yield Case(f"decode {name.replace('_', ' ')}", "gradients", decode, full, nbytes + codes)
    halves = np.zeros(count, np.uint16)
    for name in ("encode_float16", "encode_bfloat16"):
        moved = 3 * nbytes + halves.nbytes
        into = (grad, residual, halves)
        yield Case(name.replace("_", " "), "gradients", _named(name), into, moved)
    k = max(1, count // 100)
    chosen = (grad, residual, np.zeros(k, np.uint32), np.zeros(k, np.float32))
    moved = 3 * nbytes + 8 * k  # of which the sum alone is most
    yield Case("top 1%", "gradients", _named("encode_top_k"), chosen, moved)


def _bits(count: int) -> Iterator[Case]:
    """MXNet's codecs, of one threshold for all elements."""
    grad, residual = _random(np.random.default_rng(5), 2, count)
    for name, width in (("two bit", 16), ("one bit", 32)):
        words, of_name = np.zeros(-(-count // width), np.uint32), name.replace(" ", "_")
        pack = _named(f"pack_{of_name}", 0.5, 0.5, behind=2)
        unpack = _named(f"unpack_{of_name}", 0.5, behind=1)
        yield Case(f"pack {name}", "gradients", pack, (grad, residual, words), 3 * grad.nbytes + words.nbytes)
        yield Case(f"unpack {name}", "gradients", unpack, (words + 7, grad), grad.nbytes + words.nbytes)


def _rows(count: int) -> Iterator[Case]:
    """Return the gradient of an embedding."""
    rng = np.random.default_rng(6)
    values, table = _random(rng, count, _FEATURES), np.zeros((-(-count // _PER_ROW), _FEATURES), np.float32)
    rows = rng.integers(0, len(table), count)
    moved = values.nbytes + rows.nbytes + 2 * table.nbytes
    yield Case("add to rows", "networks", _named("add_rows"), (table, rows, values), moved)


def _layers(batch: int) -> Iterator[Case]:
    rng = np.random.default_rng(3)
    x, gy = _random(rng, 2, batch, _CHANNELS, _SIDE, _SIDE)
    half = (batch, _CHANNELS, _SIDE // 2, _SIDE // 2)
    small, chosen, twice = np.zeros(half, np.float32), np.zeros(half, np.int32), ((2, 2), (2, 2), (0, 0))
    for name, pooled in (
        ("average_pool", (x, small)), ("average_pool_gradient", (gy[:, :, ::2, ::2].copy(), np.zeros_like(x))),
        ("max_pool", (x, small, chosen)), ("max_pool_gradient", (gy[:, :, ::2, ::2].copy(), chosen, np.zeros_like(x))),
    ):  # fmt: skip
        moved = sum(array.nbytes for array in pooled)
        yield Case(name.replace("_", " "), "convolution", _named(name, *twice), pooled, moved)
    planes = x.reshape(batch, _CHANNELS, -1)
    scale, shift, *saved = abs(rng.standard_normal((4, _CHANNELS), np.float32))
    for name, dtype, error in (("batch norm", np.float32, _ROUNDED), ("batch norm, float16", np.float16, 2.0**-10)):
        own = planes.astype(dtype)
        into = (own, scale, shift, np.zeros_like(own), *saved)
        yield Case(name, "networks", _batch_norm, into, 3 * own.nbytes, error)
    grads, dx, of_channels = gy.reshape(planes.shape), np.zeros_like(planes), np.zeros((2, _CHANNELS), np.float32)
    into = (grads, planes, scale, planes.mean(axis=(0, 2)), planes.var(axis=(0, 2)), dx, *of_channels)
    yield Case("batch norm gradient", "networks", _batch_norm_gradients, into, 5 * x.nbytes, _ROUNDED)
    into, of_bias = (grads, np.maximum(planes, 0), dx, of_channels[0]), _named("bias_gradient")
    yield Case("bias gradient, ReLU", "networks", of_bias, into, 3 * x.nbytes, _ROUNDED)
    rows = x.reshape(-1, _CHANNELS * _SIDE)
    yield Case("bias, ReLU", "networks", _named("add_bias", True), (rows, rows[0].copy()), 2 * x.nbytes)
    logits = x.reshape(-1)[: x.size // _CLASSES * _CLASSES].reshape(-1, _CLASSES)
    labels = rng.integers(0, _CLASSES, len(logits))
    losses = np.zeros(len(logits), np.float32)
    call, of_rows = _named("softmax_cross_entropy"), (logits, labels, np.zeros_like(logits), losses)
    yield Case("softmax, loss", "networks", call, of_rows, 2 * logits.nbytes, _ROUNDED)


def _batch_norm(module: ModuleType, *arrays: Array) -> None:
    x, scale, shift, out, mean, variance = arrays
    if module is kernels.reference:
        x = x.astype(np.float32)  # in which the kernels compute with 16 bits
    module.batch_norm(x, scale, shift, out, (mean, variance), 1e-5)


def _batch_norm_gradients(module: ModuleType, *arrays: Array) -> None:
    gy, x, scale, mean, variance, dx, dscale, dshift = arrays
    module.batch_norm_gradients(gy, x, scale, (mean, variance), (dx, dscale, dshift), 1e-5)


_GPT = {"width": 768, "heads": 12, "layers": 12}
"""GPT-2 small (Radford et al. 2019, table 2)."""
_PEERS = {
    "lenet": MODELS["lenet"].net, "resnet18_cifar": MODELS["resnet18"].net,
    "gpt": lambda nn: gpt(nn, _MODELS["gpt"][0], **_GPT),
}  # fmt: skip
"""PyTorch's network by the name of ours."""
_WARM_UP = 11
"""Steps before a capture: cuDNN then has chosen its engines, and memory and optimizer state are allocated."""


def sees_a_gpu() -> bool:
    """Return whether PyTorch is installed and detects a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    torch: Any = importlib.import_module("torch")
    return bool(torch.cuda.is_available())


def torch_steps(name: str, dtype: str, x: Any, labels: Any) -> dict[str, Callable[[], Any]]:
    """Return training steps on PyTorch's current GPU and default stream, by key.

    ``torch`` trains on one batch, ``x`` of shape ``(batch, *sample)`` and ``labels`` as NumPy arrays; ``torch_graphs``
    replays a CUDA graph of that; ``torch_compiled``, of the GPT alone, is compiled at its first call.
    """
    torch: Any = importlib.import_module("torch")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    net = _PEERS[name](torch.nn).to("cuda", getattr(torch, dtype))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    batch = torch.from_numpy(x).to(device="cuda", dtype=getattr(torch, dtype) if x.dtype == np.float32 else None)
    batches = [(batch, torch.from_numpy(labels).cuda().flatten())]
    step = partial(training_step(net, optimizer, batches), 0)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    steps = {"torch": step, "torch_graphs": graph.replay}
    if name == "gpt":
        steps["torch_compiled"] = partial(training_step(torch.compile(net), optimizer, batches), 0)
    return steps


_CHECKED = 1 << 16
"""Elements that are compared with the reference, which takes seconds for more."""
_TURNS, _TURN_S = 5, 0.02
_MODELS: dict[str, tuple[int, ...]] = {"lenet": (1, 28, 28), "resnet18_cifar": (3, 32, 32), "gpt": (1024,)}
"""The networks by name, with the shape of their samples: images, or tokens."""
_DTYPES = ("float32", "bfloat16")
"""The dtypes of weights, activations and gradients; the GPT has bfloat16 alone."""
_IMAGES_PER_TEXT = 32
"""The number of images in a batch for each text."""


def random_batch(name: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random samples of a network, and their labels: of a text the tokens that follow each."""
    rng, shape = np.random.default_rng(0), _MODELS[name]
    if name != "gpt":
        return rng.standard_normal((batch, *shape), np.float32), rng.integers(0, CLASSES, batch)
    texts = rng.integers(0, VOCABULARY, (max(1, batch // _IMAGES_PER_TEXT), shape[0] + 1))
    return texts[:, :-1].copy(), texts[:, 1:].copy()


def facts(cupy: Any) -> dict[str, Any]:
    """Return the device and the versions of its driver, CUDA in CuPy, CuPy and cuDNN (None if it is not used)."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "gpu": properties["name"].decode(), "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": comm_world.driver_release(), "cuda": runtime.runtimeGetVersion(), "cupy": cupy.__version__,
        "cudnn": importlib.import_module("cudnn").backend_version_string() if cudnn_conv.is_there() else None,
    }  # fmt: skip


def seconds(call: Callable[[], Any], marker: Array) -> float:
    """Return the seconds of one ``call``: the median over turns of calls in a row for `_TURN_S`, without waits.

    Args:
        call: the call to time.
        marker: an array of one element; its copy to the host waits for all that was launched before.
    """

    def turn(number: int) -> float:
        to_host(marker)
        begin = time.perf_counter()
        for _ in range(number):
            call()
        to_host(marker)
        return time.perf_counter() - begin

    turn(1)
    number = 1
    while turn(number) < _TURN_S:
        number *= 2
    return float(np.median([turn(number) / number for _ in range(_TURNS)]))


def measure_kernel(case: Case, asarray: Callable[[np.ndarray], Array], wrong: int) -> dict[str, Any]:
    """One row of the table: ``name``, ``us``, ``gb_s``, ``copy_gb_s``, ``share``, ``wrong``."""
    marker = asarray(np.zeros(1, np.float32))
    source, target = (asarray(np.zeros(case.moved // 2, np.uint8)) for _ in range(2))
    ours = seconds(case.on(asarray)[0], marker)
    copy = seconds(lambda: target.__setitem__(..., source), marker)
    return {
        "name": case.name, "us": 1e6 * ours, "gb_s": 1e-9 * case.moved / ours, "copy_gb_s": 1e-9 * case.moved / copy,
        "share": copy / ours, "wrong": wrong,
    }  # fmt: skip


def _graphs_step_of(net: nn.Module, trainer: Trainer, x: Array, labels: Array) -> Callable[[int], Array]:
    """Return a step by one CUDA graph that returns each image's loss."""
    train_step = TrainStep(net, trainer)
    train_step.hybridize()
    return lambda _: train_step(x, labels)[0].data


def measure_model(
    name: str, dtype: str, batch: int, asarray: Callable[[np.ndarray], Array], world: comm.World
) -> dict[str, Any]:
    """Measure forward, backward and update on one batch.

    Returns ``name``, ``dtype``, ``batch``, ``samples_s``, ``loss`` of the last step, and ``graphs_samples_s`` with one
    CUDA graph per step. With PyTorch also those of `torch_steps`, or ``torch_failed`` with the reason.
    """
    batch_arrays = random_batch(name, batch)
    batch = len(batch_arrays[0])
    sizes = {"num_classes": VOCABULARY, **_GPT} if name == "gpt" else {"num_classes": CLASSES}
    x, labels, marker = asarray(batch_arrays[0]), asarray(batch_arrays[1]), asarray(np.zeros(1, np.float32))
    row: dict[str, Any] = {"name": name, "dtype": dtype, "batch": batch}
    for key in ("samples_s", "graphs_samples_s"):
        net = nn.models.create(name, input_shape=_MODELS[name], seed=0, **sizes).to(like=x).to(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.01, momentum=0.9), world=world)
        by_graphs = key == "graphs_samples_s"
        step = _graphs_step_of(net, trainer, x, labels) if by_graphs else step_of(net, trainer, [(x, labels)])
        row[key] = batch / seconds(partial(step, 0), marker)
        row["loss"] = float(step(0).mean())
    if sees_a_gpu():
        try:  # the figures of hpcdp stay
            for key, peer in torch_steps(name, dtype, *batch_arrays).items():
                row[f"{key}_samples_s"] = batch / seconds(peer, marker)
        except Exception as error:
            row["torch_failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def all_kernels(
    count: int, asarray: Callable[[np.ndarray], Array], ends: float
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """All kernels by name, and what gives their rows; none more once ``ends``, in `time.monotonic`, is over."""

    def row(small: Case, large: Case) -> dict[str, Any]:
        return measure_kernel(large, asarray, small.wrong(asarray))

    for small, large in zip(cases(min(count, _CHECKED)), cases(count), strict=True):
        if time.monotonic() > ends:
            return
        yield large.name, partial(row, small, large)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_gpu_alone.py", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=200, help="start no kernel after so many seconds (200)")
    parser.add_argument("--json", metavar="FILE", required=True, help="for the figures")
    args = parser.parse_args(argv)
    ends = time.monotonic() + args.limit_s
    world = comm.init()
    check_writable("gpu_alone", [args.json], world)
    cupy = importlib.import_module("cupy")
    figures: dict[str, Any] = {"machine": describe(world), "device": facts(cupy), "models": [], "kernels": []}
    failed: dict[str, list[str]] = {}
    """Names by reason: after some errors CUDA refuses everything."""

    def write(*more: str) -> None:
        reasons = [*(f"{', '.join(names)}: {reason}" for reason, names in failed.items()), *more]
        write_json(args.json, world, {**figures, **({"failed": "; ".join(reasons)} if reasons else {})})

    def measure(kind: str, name: str, row: Callable[[], dict[str, Any]]) -> None:
        try:
            figures[kind].append(row())
        except Exception as error:
            failed.setdefault(f"{type(error).__name__}: {error}", []).append(name)
        write(f"it ended after {name}")

    write("nothing is measured")
    for name, dtype in itertools.product(_MODELS, _DTYPES):
        if name == "gpt" and dtype != "bfloat16":
            continue
        measure("models", f"{name} of {dtype}", partial(measure_model, name, dtype, args.batch, cupy.asarray, world))
    for name, row in all_kernels(max(1, parse_size(args.size) // 4), cupy.asarray, ends):
        measure("kernels", name, row)
    write()
    return 1 if failed else 0


if __name__ == "__main__":
    programs.run(main)
