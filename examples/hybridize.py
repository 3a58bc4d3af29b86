"""A network called 1000 times at batch 1, as it is written and hybridized; then exported, and called without its class.

    python examples/hybridize.py
    python examples/hybridize.py --calls 5000 --draw mlp.svg

This is the experiment of "Dive into Deep Learning", section 12.1, which goes from 0.5037 s to 0.1873 s.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from hpcdp import nn
from hpcdp.launch.parser import Program, at_least


class MLP(nn.Module):
    """512-256-128-2, written with Python that a replay leaves out."""

    def __init__(self):
        weights = nn.init.Xavier(seed=0)
        self.first = nn.Dense(512, 256, activation="relu", weight_init=weights)
        self.second = nn.Dense(256, 128, activation="relu", weight_init=weights)
        self.last = nn.Dense(128, 2, weight_init=weights)

    def forward(self, x):
        for layer in (self.first, self.second, self.last):
            x = layer(x)
        return x


def timed(net, x, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        net(x)
    return time.perf_counter() - begin


def main(calls=1000, draw=None):
    x = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    net = MLP()
    expected = net(x).asnumpy()
    without = timed(net, x, calls)
    net.hybridize()
    for _ in range(2):  # the first call is traced, the second lays out memory
        net(x)
    with_plan = timed(net, x, calls)
    print(f"{calls} calls: {without:.4f} s as written, {with_plan:.4f} s hybridized, {without / with_plan:.1f}x")
    print("same output:", np.array_equal(net(x).asnumpy(), expected))
    print(net.graph().summary())
    if draw:
        net.graph().draw(draw)
    with tempfile.TemporaryDirectory() as folder:
        paths = net.export(Path(folder, "mlp"))
        loaded = nn.SymbolBlock.load(Path(folder, "mlp"))
        print(f"exported to {' and '.join(path.name for path in paths)};",
              "same output without the class:", np.array_equal(loaded(x).asnumpy(), expected))  # fmt: skip


if __name__ == "__main__":
    parser = Program(description="time a network with and without hybridize, and export it")
    parser.add_argument("--calls", type=at_least(1), default=1000, help="calls of the network that are timed")
    parser.add_argument("--draw", metavar="FILE", help="draw the graph as PNG, SVG or PDF")
    with parser.settings() as args:
        main(args.calls, args.draw)
