"""Convolutions on one core, forward and both backwards, against a bare product of the same size and PyTorch.

``python benchmarks/bench_convolutions.py`` takes the layers of LeNet and those of ResNet-18 on images of 32 x 32. The
product is the one that a convolution comes down to (im2col): weights, ``(out, in * kernel)``, times the patches of the
whole batch, or one of them times gradients, by ``numpy.matmul`` with all arrays at hand and nothing to unfold. From 64
channels on it is the limit for whatever unfolds and calls it; below, PyTorch is what there is to compare with. The
results of hpcdp are compared with the plain reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import write_json
from bench_kernels import Repeated, torch_or_reason
from hpcdp import comm, kernels
from hpcdp.bench.measure import (
    MeasuringSchedule,
    alternate,
    check_writable,
    describe,
    median_ratio,
    pin_to_own_core,
    turn_medians,
)
from hpcdp.kernels import reference
from hpcdp.kernels.reference import output_size
from hpcdp.launch.parser import Parser, at_least

_TOLERANCE = 2e-4
"""Of the largest element: sums of up to 16384 products, in another order than the reference's."""
PASSES = ("forward", "to weights", "to input")


@dataclass(frozen=True)
class Layer:
    """A convolution of ``channels`` (in, out) on square images."""

    channels: tuple[int, int]
    size: int
    kernel: int
    stride: int
    padding: int
    batch: int

    def __str__(self) -> str:
        strided = f", stride {self.stride}" if self.stride > 1 else ""
        name = f"{self.channels[0]} to {self.channels[1]}, {self.kernel} x {self.kernel}{strided}"
        return f"{name}, on {self.size} x {self.size}, batch {self.batch}"

    @property
    def out_size(self) -> int:
        """The height and width of the output."""
        return output_size(self.size, self.kernel, self.stride, self.padding)

    @property
    def gflop(self) -> float:
        """The GFLOP of each pass."""
        depth = self.channels[0] * self.kernel**2
        return 2e-9 * self.batch * self.channels[1] * depth * self.out_size**2


LAYERS = (
    Layer((1, 20), 28, 3, 1, 0, 64),
    Layer((20, 50), 13, 5, 1, 0, 64),
    Layer((3, 64), 32, 3, 1, 1, 8),
    Layer((64, 64), 32, 3, 1, 1, 8),
    Layer((64, 128), 32, 3, 2, 1, 8),
    Layer((64, 128), 32, 1, 2, 0, 8),
    Layer((128, 128), 16, 3, 1, 1, 8),
    Layer((256, 256), 8, 3, 1, 1, 8),
    Layer((512, 512), 4, 3, 1, 1, 8),
)


class Arrays:
    """The arrays of one layer, float32: ``x``, ``weight``, ``gy``, and room for what each pass writes."""

    def __init__(self, layer: Layer) -> None:
        rng = np.random.default_rng(layer.size)
        inputs, outputs = layer.channels
        self.layer = layer
        self.steps = (layer.stride,) * 2, (layer.padding,) * 2
        self.x = rng.standard_normal((layer.batch, inputs, layer.size, layer.size), np.float32)
        self.weight = rng.standard_normal((outputs, inputs, layer.kernel, layer.kernel), np.float32)
        self.gy = rng.standard_normal((layer.batch, outputs, layer.out_size, layer.out_size), np.float32)
        self.results = {"forward": self._like(self.gy), "to weights": self._like(self.weight),
                        "to input": self._like(self.x)}  # fmt: skip

    @staticmethod
    def _like(x: np.ndarray) -> np.ndarray:
        return kernels.empty(x.shape, x.dtype)

    def ours(self, module: Any, into: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
        """Return the passes by a ``module`` of convolution kernels."""
        stride, padding = self.steps
        gradients = partial(module.conv2d_gradients, self.x, self.weight, self.gy, None)
        return {
            "forward": partial(
                module.conv2d, self.x, self.weight, None, into["forward"], stride, padding, relu=False
            ),
            "to weights": partial(gradients, (None, into["to weights"], None), stride, padding),
            "to input": partial(gradients, (into["to input"], None, None), stride, padding),
        }  # fmt: skip

    def products(self) -> dict[str, Callable[[], Any]]:
        """Return the bare matrix product of each pass."""
        outputs = self.layer.channels[1]
        weight, gy = self.weight.reshape(outputs, -1), self.gy.reshape(outputs, -1)
        patches = np.random.default_rng(1).standard_normal((weight.shape[1], gy.shape[1]), np.float32)
        return {
            "forward": partial(np.matmul, weight, patches, out=self._like(gy)),
            "to weights": partial(np.matmul, gy, patches.T, out=self._like(weight)),
            "to input": partial(np.matmul, weight.T, gy, out=self._like(patches)),
        }

    def torch(self, torch: Any) -> dict[str, Callable[[], Any]]:
        """Return the passes by PyTorch."""
        (stride, padding), x = self.steps, torch.from_numpy(self.x)
        weight, gy = torch.from_numpy(self.weight), torch.from_numpy(self.gy)
        backward = partial(torch.ops.aten.convolution_backward, gy, x, weight, None, stride, padding, (1, 1), False,
                           (0, 0), 1)  # fmt: skip
        return {
            "forward": torch.no_grad()(partial(torch.nn.functional.conv2d, x, weight, None, stride, padding)),
            "to weights": partial(backward, (False, True, False)),
            "to input": partial(backward, (True, False, False)),
        }

    def wrong(self) -> dict[str, int]:
        """Return the number of elements of each pass that differ from the reference."""
        expected = {name: np.empty_like(x) for name, x in self.results.items()}
        for module, into in ((kernels.load("convolution"), self.results), (reference, expected)):
            for call in self.ours(module, into).values():
                call()
        return {
            name: int(np.count_nonzero(~(np.abs(x - self.results[name]) <= _TOLERANCE * np.abs(x).max())))
            for name, x in expected.items()
        }


def measure(layer: Layer, turns: int, torch: Any) -> Iterator[dict[str, Any]]:
    """Measure each pass of one layer.

    Returns ``median_us`` by name, ``share`` of the bare product's rate, ``peer_ratio`` (PyTorch's time over hpcdp's,
    or None), ``gflop_s`` of hpcdp, ``wrong``.
    """
    arrays = Arrays(layer)
    wrong = arrays.wrong()
    calls = {"hpcdp": arrays.ours(kernels.load("convolution"), arrays.results), "product": arrays.products()}
    if torch:
        calls["PyTorch"] = arrays.torch(torch)
    for each in PASSES:
        found = alternate(
            [Repeated(name, passes[each]) for name, passes in calls.items()],
            lambda: None,
            MeasuringSchedule(turns, 3, 2),
            validate=False,
        )  # fmt: skip
        taken = {name: turn_medians([series]) for name, series in found.items()}
        medians = {name: float(np.median(us)) for name, us in taken.items()}
        yield {
            "layer": str(layer), "channels": min(layer.channels), "pass": each, "wrong": wrong[each],
            "median_us": medians, "gflop_s": 1e6 * layer.gflop / medians["hpcdp"],
            "share": median_ratio(taken["product"], taken["hpcdp"]),
            "peer_ratio": median_ratio(taken["PyTorch"], taken["hpcdp"]) if torch else None,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_convolutions.py", description=__doc__)
    parser.add_argument("--turns", type=at_least(1), default=15, help="of each candidate (15)")
    parser.add_argument("--brief", action="store_true", help="the layers of LeNet alone")
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    args = parser.parse_args(argv)
    world = comm.init()
    check_writable("convolutions", [args.json], world)
    core = pin_to_own_core(world)
    torch, reason = torch_or_reason()
    print(f"# convolutions on core {core}: microseconds, share of a bare product's rate, PyTorch's time over ours")
    print(f"{'# pass':<14}{'us':>10}{'GFLOP/s':>9}{'share':>8}{'peer':>8}")
    rows = []
    with threadpool_limits(1):
        for layer in LAYERS[: 2 if args.brief else None]:
            print(layer)
            for row in measure(layer, args.turns, torch):
                rows.append(row)
                peer = "-" if row["peer_ratio"] is None else f"{row['peer_ratio']:.2f}"
                print(
                    f"  {row['pass']:<12}{row['median_us']['hpcdp']:>10.0f}{row['gflop_s']:>9.1f}{row['share']:>8.2f}"
                    f"{peer:>8}" + (f"  WRONG: {row['wrong']}" if row["wrong"] else ""),
                    flush=True,
                )
    write_json(
        args.json, world, {"benchmark": "convolutions", "machine": describe(world), "skipped": reason, "rows": rows}
    )
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    programs.run(main)
