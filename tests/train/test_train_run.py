"""Whole runs, over real ranks and as users start them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest

from hpcdp.train import config as settings
from hpcdp.train.metrics import read_metrics
from hpcdp.train.run import report

ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("OMPI_", "PMI", "PRTE", "TTY_")) and key != "COLUMNS"
}


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcdp.cli", "train", *arguments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of a run of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    done = train(folder, "mlp", "--data", "digits", "--ranks", "2", "--epochs", "3", "--batch-size", "50")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / "mlp-digits-001", done.stdout


def test_a_log_has_a_plain_line_an_epoch_and_the_report(finished):
    folder, shown = finished
    lines = shown.splitlines()
    assert shown.isascii()
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) <= 100
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    told = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines if not line.startswith("epoch"))
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert told["test accuracy"] == f"{last['test_accuracy']:.4f}"
    assert re.match(r"[\d,]+ samples/s over 2 ranks", told["speed"])
    assert re.match(r"\d+% hidden", told["communication"])
    assert told["run folder"] == "runs/mlp-digits-001"


def test_the_folder_holds_metrics_events_curves_and_settings(finished):
    folder, _ = finished
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if not name.startswith("events.out.tfevents.")] == [
        "config.toml",
        "curves.png",
        "metrics.jsonl",
    ]
    assert len(names) == 4
    records = read_metrics(folder / "metrics.jsonl")
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    assert [record["step"] for record in epochs] == [29, 58, 87]
    assert [record["samples"] for record in epochs] == [1438] * 3
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert 0.5 < epochs[-1]["test_accuracy"] <= 1
    assert epochs[0]["learning_rate"] > epochs[-1]["learning_rate"] > 0
    assert all(0 <= r["comm_exposed_s"] <= r["comm_s"] for r in records)
    assert matplotlib.image.imread(folder / "curves.png").shape[0] > 300


def test_the_settings_in_the_folder_repeat_the_run(finished, tmp_path):
    folder, _ = finished
    assert settings.load(folder / "config.toml").batch_size == 50
    done = train(tmp_path, "--config", str(folder / "config.toml"))
    assert done.returncode == 0, done.stderr
    again = read_metrics(tmp_path / "runs" / "mlp-digits-001" / "metrics.jsonl")
    for record, other in zip(read_metrics(folder / "metrics.jsonl"), again, strict=True):
        same = ("step", "loss", "accuracy", "learning_rate", "test_accuracy", "test_loss")
        assert [record.get(name) for name in same] == [other.get(name) for name in same]


def test_three_ranks_with_an_uneven_split_learn_as_two(finished, tmp_path):
    folder, _ = finished
    done = train(tmp_path, "--config", str(folder / "config.toml"), "--ranks", "3", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
    for record, other in zip(
        read_metrics(folder / "metrics.jsonl"), read_metrics(tmp_path / "r" / "metrics.jsonl"), strict=True
    ):
        assert record["loss"] == pytest.approx(other["loss"], rel=5e-3)


def test_an_earlier_run_is_not_overwritten_unless_asked(finished, tmp_path):
    arguments = ("mlp", "--ranks", "2", "--epochs", "1", "--run-dir", "a")
    assert train(tmp_path, *arguments).returncode == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    refused = train(tmp_path, *arguments)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "choose another --run-dir, or add --overwrite" in refused.stderr
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before
    assert train(tmp_path, *arguments, "--overwrite", "--seed", "3").returncode == 0
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("lenett",), "lenet"),
        (("mlp", "--data", "digit"), "digits"),
        (("mlp", "--data", "mnist", "--data-dir", "nowhere"), "nowhere"),
        (("mlp", "--batch-size", "1"), "batch"),
    ],
)
def test_bad_settings_are_one_line_that_names_what_is_valid(tmp_path, arguments, named):
    done = train(tmp_path, *arguments, "--ranks", "2", "--epochs", "1")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpcdp: ")]
    assert len(lines) == 1, done.stderr
    assert named in lines[0]
    assert "Traceback" not in done.stderr


def test_after_an_interrupt_the_ranks_end_and_the_folder_is_readable(tmp_path):
    run = subprocess.Popen(
        command("mlp", "--ranks", "2", "--epochs", "100000", "--run-dir", "a"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count('"epoch", ') >= 2):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in errors
    records = read_metrics(metrics)
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)
    assert json.loads(json.dumps(records)) == records
    assert "mlp" in (tmp_path / "a" / "config.toml").read_text()
    assert subprocess.run(["pgrep", "-f", f"hpcdp.cli train mlp.*{tmp_path}"], capture_output=True).stdout == b""


def test_the_report_of_one_rank_speaks_of_no_communication():
    result = {
        "test_accuracy": 0.98761,
        "samples_per_s": 12345.6,
        "seconds": 3.21,
        "comm_s": 0.0,
        "comm_hidden": None,
        "peak_memory_mb": 155.2,
        "ranks": 1,
        "run_dir": "runs/a",
    }
    lines = report(result).splitlines()
    assert lines[0].split() == ["test", "accuracy", "0.9876"]
    assert "12,346 samples/s over 1 rank," in lines[1]
    assert lines[2].endswith("none, there is one rank")
    assert "No space left" in report(result, OSError(28, "No space left on device"))
