"""What compressed gradients do to training: LeNet on the digits with every codec, with error feedback and without.

``python -m hpcdp.benchmarks.convergence --ranks 2 --seeds 0,1,2 --plot digits.png`` runs ``hpcdp train`` again and
again on this machine, each rank a node of its own, so that all of them exchange compressed messages. The table gives
the test accuracy at the end, in percent, as the mean over the seeds and the lowest; the picture the test loss over
epochs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..compression import CODECS, Compression
from ..errors import ConfigError
from ..train.metrics import read_metrics
from . import program
from .files import as_json, check_writable, write
from .machine import describe
from .options import Parser, at_least

NONE = "none"
_FORGETFUL = "feedback=0"
_JOB_TIMEOUT_S = 600
_COLORS = ("#6b6b6b", "#3566a8", "#3a9d6e", "#c8552b", "#8a5fb0", "#c9a227")


def train(codec: str, seed: int, ranks: int, epochs: int) -> dict[str, list[float]]:
    """``test_loss`` and ``test_accuracy`` after every epoch of one run."""
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        command = [sys.executable, "-m", "hpcdp.cli", "train", "lenet", "--data", "digits", "--ranks", str(ranks)]
        command += ["--seed", str(seed), "--epochs", str(epochs), "--run-dir", f"{folder}/run"]
        command += [] if codec == NONE else ["--compression", codec]
        done = subprocess.run(
            command, env={**os.environ, "HPCDP_RANKS_PER_NODE": "1"},
            capture_output=True, text=True, timeout=_JOB_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ConfigError("convergence", where=" ".join(command[3:]), got=done.stderr.strip().splitlines()[-1:])
        epochs_of = [each for each in read_metrics(Path(folder, "run", "metrics.jsonl")) if each["kind"] == "epoch"]
    return {name: [each[name] for each in epochs_of] for name in ("test_loss", "test_accuracy")}


def table(found: dict[str, list[dict[str, list[float]]]]) -> str:
    """The accuracies at the end."""
    lines = [f"{'# codec':<24}{'accuracy %':>12}{'lowest':>10}{'to none':>10}"]
    final = {name: [100 * run["test_accuracy"][-1] for run in runs] for name, runs in found.items()}
    for name, values in final.items():
        mean = float(np.mean(values))
        lines.append(f"{name:<24}{mean:>12.2f}{min(values):>10.2f}{mean - float(np.mean(final[NONE])):>+10.2f}")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, list[float]]]], path: str) -> None:
    """The test loss over epochs, mean over the seeds: with error feedback on the left, without on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 3.8), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for each, title, forgets in zip(axes, ("with error feedback", "without"), (False, True), strict=True):
        for color, codec in zip(_COLORS, [NONE, *CODECS], strict=False):
            name = f"{codec}:{_FORGETFUL}" if forgets and codec != NONE else codec
            if name in found:
                loss = np.mean([run["test_loss"] for run in found[name]], axis=0)
                each.plot(range(1, len(loss) + 1), loss, color=color, linewidth=1.5, label=codec)
        each.set_title(title, fontsize=10.5)
        each.set_xlabel("epoch")
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
        each.set_yscale("log")
        each.grid(True, color="#d9d9d9", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test loss")
    axes[0].legend(frameon=False, ncols=2)
    canvas.print_png(path)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.convergence", description=__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="each a node of its own (2)")
    parser.add_argument("--epochs", type=at_least(1), default=20, help="of every run (20)")
    parser.add_argument("--seeds", default="0", metavar="N,N", help="a run with each (0)")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), metavar="CODEC", help="as a Trainer takes them")
    parser.add_argument("--plot", metavar="FILE", help="draw a PNG")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    seeds = [int(each) for each in args.seeds.split(",") if each.isdecimal()]
    if not seeds or len(seeds) != len(args.seeds.split(",")):
        raise ConfigError("convergence", where="--seeds", expected="numbers between commas", got=repr(args.seeds))
    for name in args.codecs:
        Compression.of(name)
    check_writable("convergence", [args.plot, args.json])
    names = [NONE, *args.codecs, *(f"{each}{',' if ':' in each else ':'}{_FORGETFUL}" for each in args.codecs)]
    found: dict[str, Any] = {}
    for name in names:
        found[name] = [train(name, seed, args.ranks, args.epochs) for seed in seeds]
        print(f"# {name}: {found[name][-1]['test_accuracy'][-1]:.4f}", file=sys.stderr, flush=True)
    print(table(found))
    if args.plot:
        draw(found, args.plot)
    if args.json:
        write(args.json, as_json({"benchmark": "convergence", "machine": describe(), "runs": found}))
    return 0


if __name__ == "__main__":
    program.run(main)
