"""What ``reproducible=True`` costs, and whether it keeps its word: LeNet on the digits with and without, in turns.

``python -m hpcdp.benchmarks.reproducible`` runs ``hpcdp train`` on this machine. First the price: samples per second
with and without on the same ranks, for several global batches; the more samples a virtual shard has, the less it is.
Beside it stands what computing in small pieces costs by itself: one rank, without, whose global batch is as small as a
virtual shard, over one with the whole batch (it updates as often as it computes, which the other does not). Then the
word: the losses of every step and of the test set on all ``--alike`` ranks, on one node and on several, to the bit; the
status is 1 where they differ.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcdp.bench.results import as_json, check_writable, describe, write
from hpcdp.errors import ConfigError
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.train.metrics import Record, read_metrics
from hpcdp.train.runs.config import VIRTUAL_SHARDS

from .harness import jobs, program

_JOB_TIMEOUT_S = 600
_MEASURED = ("loss", "accuracy", "test_loss", "test_accuracy")
_ALIKE_EPOCHS = 2


def train(ranks: int, batch: int, epochs: int, *flags: str, per_node: int | None = None) -> list[Record]:
    """The records of one run of ``hpcdp train``."""
    with tempfile.TemporaryDirectory(prefix="reproducible-") as folder:
        command = [sys.executable, "-m", "hpcdp.cli", "train", "lenet", "--data", "digits", "--ranks", str(ranks)]
        command += ["--batch-size", str(batch), "--epochs", str(epochs), "--run-dir", f"{folder}/run", *flags]
        nodes = {} if per_node is None else {"HPCDP_RANKS_PER_NODE": str(per_node)}
        jobs.finished("reproducible", " ".join(command[3:]), command, _JOB_TIMEOUT_S, **nodes)
        return list(read_metrics(Path(folder, "run", "metrics.jsonl")))


def speed(records: Sequence[Record]) -> float:
    """Samples per second, median over the epochs but the first."""
    epochs = [each for each in records if each["kind"] == "epoch"]
    return statistics.median(each["samples_per_s"] for each in epochs[1:] or epochs)


def fingerprint(records: Sequence[Record]) -> str:
    """Of every loss and accuracy of a run, to the bit."""
    found = [float(each[name]).hex() for each in records for name in _MEASURED if name in each]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:16]


def price(ranks: int, batch: int, epochs: int, turns: int) -> dict[str, Any]:
    """Samples per second without, with, and in small pieces, one after the other, ``turns`` times."""
    found: dict[str, list[float]] = {"without": [], "with": [], "whole, 1 rank": [], "pieces, 1 rank": []}
    for _ in range(turns):
        found["without"].append(speed(train(ranks, batch, epochs)))
        found["with"].append(speed(train(ranks, batch, epochs, "--reproducible")))
        found["whole, 1 rank"].append(speed(train(1, batch, epochs)))
        found["pieces, 1 rank"].append(speed(train(1, batch // VIRTUAL_SHARDS, epochs)))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = [b / a for a, b in zip(found["without"], found["with"], strict=True)]
    return {
        "ranks": ranks, "batch": batch, "samples_per_s": medians, "ratio": statistics.median(ratios),
        "lowest": min(ratios), "highest": max(ratios),
        "pieces": medians["pieces, 1 rank"] / medians["whole, 1 rank"],
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    """The prices, a line each."""
    names = f"{'# ranks':<9}{'batch':>7}{'without/s':>12}{'with/s':>10}{'ratio':>8}{'from':>7}{'to':>7}"
    lines = [f"{names}{'pieces alone':>14}"]
    for each in found:
        rate = each["samples_per_s"]
        lines.append(
            f"{each['ranks']:<9}{each['batch']:>7}{rate['without']:>12,.0f}{rate['with']:>10,.0f}{each['ratio']:>8.2f}"
            f"{each['lowest']:>7.2f}{each['highest']:>7.2f}{each['pieces']:>14.2f}"
        )
    return "\n".join(lines)


def alike(ranks: Sequence[int], batch: int) -> dict[str, str]:
    """The fingerprint of a run on each number of ranks, on one node and on nodes of one and of two ranks."""
    found = {}
    for n in ranks:
        for per_node in (None, 1, 2):
            if per_node is None or per_node < n:
                name = f"{n} ranks" + ("" if per_node is None else f", {per_node} a node")
                found[name] = fingerprint(train(n, batch, _ALIKE_EPOCHS, "--reproducible", per_node=per_node))
                print(f"# {name:<24}{found[name]}", file=sys.stderr, flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.reproducible", description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=at_least(1), default=[1, 2], help="that pay the price (1 2)")
    parser.add_argument("--batches", nargs="+", type=at_least(VIRTUAL_SHARDS), default=[32, 128, 512],
                        help="global batches (32 128 512)")  # fmt: skip
    parser.add_argument("--epochs", type=at_least(2), default=4, help="of every run (4)")
    parser.add_argument("--turns", type=at_least(1), default=3, help="of every run (3)")
    parser.add_argument("--alike", nargs="*", type=at_least(1), default=[1, 2, 3, 4, 8], metavar="RANKS",
                        help="which must end with the same bits (1 2 3 4 8)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    most = max(args.alike, default=0)
    if most > VIRTUAL_SHARDS:
        raise ConfigError("reproducible", where="--alike", expected=f"at most {VIRTUAL_SHARDS} ranks", got=most)
    check_writable("reproducible", [args.json])
    prices = [price(ranks, batch, args.epochs, args.turns) for ranks in args.ranks for batch in args.batches]
    print(table(prices))
    bits = alike(args.alike, args.batches[0])
    if bits:
        verdict = "the same bits" if len(set(bits.values())) == 1 else "DIFFERENT BITS"
        print(f"# {verdict} on {', '.join(bits)}")
    if args.json:
        report = {"benchmark": "reproducible", "machine": describe(), "prices": prices, "fingerprints": bits}
        write(args.json, as_json(report))
    return 0 if len(set(bits.values())) <= 1 else 1


if __name__ == "__main__":
    program.run(main)
