"""What the networks learn on the sets that ship with the package, each with the defaults of ``hpcdp train``.

``python -m hpcdp.benchmarks.accuracy`` trains them one after the other on this machine and prints a table in Markdown:
the test accuracy and loss at the end, of text the perplexity, and the seconds of training. ``--only lenet`` takes the
rows of one network.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

from hpcdp.errors import check_name
from hpcdp.launch.arguments import Parser
from hpcdp.nn.models import MODELS
from hpcdp.train.metrics import Record, read_metrics
from hpcdp.train.runs.usual import SEQUENCE_MODELS

from .harness import jobs, program

ROWS = (
    ("mlp",),
    ("lenet",),
    ("lenet", "--ranks", "2"),
    ("lenet", "--ranks", "2", "--kv-store", "dist_sync"),
    ("lenet", "--ranks", "2", "--kv-store", "dist_async"),
    ("resnet18", "--epochs", "3"),
    ("char_lstm", "--epochs", "10"),
    ("gpt", "--epochs", "10"),
)
"""What ``hpcdp train`` is given for each row."""

_JOB_TIMEOUT_S = 3600


def train(arguments: tuple[str, ...]) -> Record:
    """The record of the last epoch of one run, with the seconds of all of them."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        command = [sys.executable, "-m", "hpcdp.cli", "train", *arguments, "--run-dir", f"{folder}/run"]
        jobs.finished("accuracy", " ".join(arguments), command, _JOB_TIMEOUT_S)
        records = [each for each in read_metrics(Path(folder, "run", "metrics.jsonl")) if each["kind"] == "epoch"]
    return records[-1] | {"seconds": sum(each["seconds"] for each in records)}


def row(arguments: tuple[str, ...], record: Record) -> str:
    """A line of the table."""
    loss = record["test_loss"]
    perplexity = f"{math.exp(loss):.2f}" if arguments[0] in SEQUENCE_MODELS else ""
    told = f"{record['test_accuracy']:.2%} | {loss:.4f} | {perplexity} | {record['seconds']:.0f}"
    return f"| `hpcdp train {' '.join(arguments)}` | {record['epoch']} | {told} |"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.accuracy", description=__doc__)
    parser.add_argument("--only", metavar="MODEL", help="rows of this network")
    args = parser.parse_args(argv)
    if args.only is not None:
        check_name("network", args.only, MODELS)
    print(
        "| command | epochs | test accuracy | test loss | perplexity | seconds |\n|---|---|---|---|---|---|", flush=True
    )
    for arguments in ROWS:
        if args.only in (None, arguments[0]):
            print(row(arguments, train(arguments)), flush=True)
    return 0


if __name__ == "__main__":
    program.run(main)
