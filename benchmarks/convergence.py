"""What compressed gradients do to training, with every codec, with error feedback and without.

``python -m hpcdp.benchmarks.convergence --seeds 0,1,2 --plot digits.png`` trains LeNet on the digits again and again on
this machine, ``--model gpt`` the small GPT of ``examples/torch_gpt.py`` on the documentation; each rank is a node of
its own, so that all of them exchange compressed messages. The table gives the test accuracy at the end, in percent, as
the mean over the seeds and the lowest (of the GPT: which share of the bytes of a text that was held out it foretells);
the picture the test loss over epochs or steps.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpcdp.bench.results import as_json, check_writable, describe, write
from hpcdp.compression import CODECS, Compression
from hpcdp.errors import ConfigError
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.train.metrics import read_metrics

from .harness import jobs, program

NONE = "none"
_FORGETFUL = "feedback=0"
_JOB_TIMEOUT_S = 1800
_GPT = Path(__file__).resolve().parents[1] / "examples" / "torch_gpt.py"
_GPT_SIZE = ("--context", "64", "--width", "64", "--layers", "2")
_TESTS = 16
"""How often the GPT is tested on its way."""
_TESTED = re.compile(r"^step +(\d+)  held-out loss ([\d.]+), ([\d.]+)% of bytes right$", re.M)
_COLORS = ("#6b6b6b", "#3566a8", "#3a9d6e", "#c8552b", "#8a5fb0", "#c9a227")


def _run(command: list[str], codec: str) -> str:
    command = [sys.executable, *command, *([] if codec == NONE else ["--compression", codec])]
    return jobs.finished("convergence", " ".join(command[1:]), command, _JOB_TIMEOUT_S, HPCDP_RANKS_PER_NODE="1")


def train_lenet(codec: str, seed: int, ranks: int, epochs: int) -> dict[str, list[float]]:
    """``test_loss`` and ``test_accuracy`` of one run, and ``at`` which epochs: after each."""
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        command = ["-m", "hpcdp.cli", "train", "lenet", "--data", "digits", "--ranks", str(ranks)]
        _run([*command, "--seed", str(seed), "--epochs", str(epochs), "--run-dir", f"{folder}/run"], codec)
        found = [each for each in read_metrics(Path(folder, "run", "metrics.jsonl")) if each["kind"] == "epoch"]
    values = {name: [each[name] for each in found] for name in ("test_loss", "test_accuracy")}
    return {"at": [each["epoch"] for each in found]} | values


def train_gpt(codec: str, seed: int, ranks: int, steps: int) -> dict[str, list[float]]:
    """As `train_lenet`, after every so many steps."""
    if not _GPT.is_file():
        raise ConfigError(
            "convergence", where="--model gpt", expected=f"the example {_GPT}", got="none", remedy="use a clone"
        )
    command = ["-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable, str(_GPT), "--steps", str(steps)]
    often = ["--test-every", str(max(1, steps // _TESTS)), "--every", str(steps)]
    found = _TESTED.findall(_run([*command, *_GPT_SIZE, *often, "--seed", str(seed)], codec))
    at, losses, right = zip(*((float(a), float(b), float(c) / 100) for a, b, c in found), strict=True)
    return {"at": list(at), "test_loss": list(losses), "test_accuracy": list(right)}


_MODELS = {"lenet": (train_lenet, "epoch", 20), "gpt": (train_gpt, "step", 8000)}
"""How each model is trained, in what its way is counted, and how much of it there is."""


def table(found: dict[str, list[dict[str, list[float]]]]) -> str:
    """The accuracies at the end, and the highest on the way."""
    lines = [f"{'# codec':<24}{'accuracy %':>12}{'lowest':>10}{'to none':>10}{'best %':>10}"]
    final = {name: [100 * run["test_accuracy"][-1] for run in runs] for name, runs in found.items()}
    for name, values in final.items():
        mean = float(np.mean(values))
        best = float(np.mean([100 * max(run["test_accuracy"]) for run in found[name]]))
        to_none = mean - float(np.mean(final[NONE]))
        lines.append(f"{name:<24}{mean:>12.2f}{min(values):>10.2f}{to_none:>+10.2f}{best:>10.2f}")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, list[float]]]], unit: str, path: str) -> None:
    """The test loss on the way, mean over the seeds: with error feedback on the left, without on the right."""
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
                each.plot(found[name][0]["at"], loss, color=color, linewidth=1.5, label=codec)
        each.set_title(title, fontsize=10.5)
        each.set_xlabel(unit)
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
    parser.add_argument("--model", choices=list(_MODELS), default="lenet", help="what is trained (lenet)")
    parser.add_argument("--length", type=at_least(1), metavar="N", help="epochs of lenet (20), steps of gpt (8000)")
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
    train, unit, length = _MODELS[args.model]
    names = [NONE, *args.codecs, *(f"{each}{',' if ':' in each else ':'}{_FORGETFUL}" for each in args.codecs)]
    found: dict[str, Any] = {}
    for name in names:
        found[name] = [train(name, seed, args.ranks, args.length or length) for seed in seeds]
        print(f"# {name}: {found[name][-1]['test_accuracy'][-1]:.4f}", file=sys.stderr, flush=True)
    print(table(found))
    if args.plot:
        draw(found, unit, args.plot)
    if args.json:
        write(
            args.json, as_json({"benchmark": "convergence", "model": args.model, "machine": describe(), "runs": found})
        )
    return 0


if __name__ == "__main__":
    program.run(main)
