"""Whole runs, over real ranks and as users start them."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import matplotlib.image
import pytest
from train_command import ENVIRONMENT, start, train, train_on_threads

from hpcdp import cli
from hpcdp.cli import train as cli_train
from hpcdp.core.environment import end_early
from hpcdp.errors import Terminated
from hpcdp.train import config as runs_config
from hpcdp.train.checkpoints import StopRequests
from hpcdp.train.config import TrainConfig
from hpcdp.train.metrics import read_metrics
from hpcdp.train.run import _interruptible, report
from hpcdp.train.run_dir import RunFolder


def widest(lines: list[str]) -> int:
    """Return the length of the longest line, where the run and this host have short names."""
    return max(len(line.replace("runs/mlp-digits-001", "a").replace(gethostname(), "node")) for line in lines)


@pytest.mark.thorough
def test_a_log_has_a_plain_line_an_epoch_and_the_report(finished):
    folder, shown = finished
    lines = shown.splitlines()
    assert shown.isascii()
    assert all(line.isprintable() for line in lines)
    assert widest(lines) <= 80
    assert [line[:9] for line in lines if line.startswith("epoch")] == [f"epoch {n}/4" for n in range(1, 5)]
    assert not any(line.startswith("  compute ") for line in lines)
    told = {line[:15].rstrip(): line[15:] for line in lines if not line.startswith(("epoch", " "))}
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert told["test accuracy"] == f"{last['test_accuracy']:.4f}"
    assert re.match(r"[\d,]+ samples/s over 2 ranks", told["speed"])
    assert re.search(r"\d s exposed, \d+% hidden$", told["communication"])
    assert re.match(r"compute \d+\.\d\d s, exposed communication \d+\.\d\d, data ", told["time per rank"])
    assert re.match(r"\d+\.\d\d s, \d+% of the time: (computation|bucket)", told["critical path"])
    assert re.match(r"rank [01] on \S+ in [1-4] of 4 epochs, \d\.\d\d x the median$", told["slowest rank"])
    assert re.match(r"traces/out.json, \d[\d,]+ spans: open", told["trace"])
    assert told["run folder"] == "runs/mlp-digits-001"


def test_the_folder_holds_metrics_events_curves_and_settings(finished):
    folder, _ = finished
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if not name.startswith("events.out.tfevents.")] == [
        "checkpoints",
        "config.toml",
        "curves.png",
        "metrics.jsonl",
    ]
    assert len(names) == 5
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-0000000116"]
    records = read_metrics(folder / "metrics.jsonl")
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4]
    assert [record["step"] for record in epochs] == [29, 58, 87, 116]
    assert [record["samples"] for record in epochs] == [1438] * 4
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert 0.5 < epochs[-1]["test_accuracy"] <= 1
    assert epochs[0]["learning_rate"] > epochs[-1]["learning_rate"] > 0
    assert all(0 <= r["comm_exposed_s"] <= r["comm_s"] for r in records)
    assert matplotlib.image.imread(folder / "curves.png").shape[0] > 300
    config = (folder / "config.toml").read_text()
    assert "ranks = 2\n" in config and "epochs = 4\n" in config and "batch_size = 50\n" in config
    assert runs_config.load(folder / "config.toml").trace is None


def test_records_of_an_epoch_say_where_the_time_went(finished):
    folder, _ = finished
    epochs = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "epoch"]
    for record in epochs:
        own_s = record["compute_s"] + record["comm_exposed_s"] + record["data_s"]
        assert 0 < record["compute_s"] < own_s <= record["seconds"] * 1.001
        assert record["critical_path_s"] > 0
        assert record["slowest_rank"] in (0, 1)
        assert record["slowest_ratio"] >= 1
        assert bool(record["stragglers"]) == (record["slowest_ratio"] > 1.2)


def test_the_trace_shows_every_step_of_every_rank(finished):
    folder, _ = finished
    path = folder.parents[1] / "traces" / "out.json"
    events = json.loads(path.read_text())["traceEvents"]
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X" and event["tid"] == 0]
        starts = [event["ts"] for event in own]
        assert starts == sorted(starts)
        for name in ("data", "forward", "backward", "step"):
            assert len([event for event in own if event["name"] == name]) == 116
        steps = [e for e in own if e["name"] in ("data", "forward", "backward", "step")]
        assert [e["name"] for e in steps] == ["data", "forward", "backward", "step"] * 116
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.001 for a, b in itertools.pairwise(steps))
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


@pytest.mark.thorough  # tests/kvstore/test_async_training.py trains so, and test_doctor.py has such files
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_run_on_a_store_beside_files_named_as_modules_of_pythons(kind, tmp_path):
    settings = ("--ranks", "2", "--epochs", "2", "--batch-size", "49", "--kv-store", kind)
    settings += ("--servers", "1", "--staleness", "4") if kind == "dist_async" else ("--no-update-on-kvstore",)
    for name in ("random", "queue", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')")
    program = "import sys; from hpcdp import cli; sys.path.insert(0, sys.prefix); sys.exit(cli.main())"  # as bin/hpcdp
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "train", "mlp", "--data", "digits", *settings],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert widest(lines) <= 80
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    told = {line[:15].rstrip(): line[15:] for line in lines if not line.startswith(("epoch", " "))}
    assert told["store"] == f"{kind}, {'the store' if kind == 'dist_async' else 'every rank'} updates"
    assert re.fullmatch(r"\d+\.\d\d s exposed per rank, \d+\.\d% of the time", told["communication"])
    assert float(told["test accuracy"]) > 0.8
    records = read_metrics(tmp_path / "runs" / "mlp-digits-001" / "metrics.jsonl")
    epochs = [each for each in records if each["kind"] == "epoch"]
    batches = -(-1438 // (49 // 2)) if kind == "dist_async" else -(-1438 // 49)
    assert [(each["epoch"], each["step"]) for each in epochs] == [(n, n * batches) for n in (1, 2)]
    assert all(each["samples"] == 1438 for each in epochs)
    if kind == "dist_async":
        config = (tmp_path / "runs" / "mlp-digits-001" / "config.toml").read_text()
        assert "ranks = 2\n" in config and "servers = 1\n" in config
        assert re.match(r"\d+\.\d pushes, at most \d+; waited for \d+\.\d\d s per rank; ", told["staleness"])
        assert epochs[-1]["staleness_max"] >= epochs[-1]["staleness_mean"] >= 0
        assert len(records) == 2 * len(epochs)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_an_earlier_run_is_not_overwritten_unless_asked_which_repeats_it_on_three_ranks(tmp_path, monkeypatch):
    """By the settings in its folder, and to the bit, for it was reproducible: on one rank; the others have two nodes.

    LeNet's on up to 8 ranks: test_what_networks_learn.py.
    """
    earlier = ("mlp", "--data", "digits", "--epochs", "1", "--batch-size", "128", "--clip-norm", "5", "--reproducible")
    assert train_on_threads(monkeypatch, tmp_path, 1, *earlier, "--run-dir", "a") == [0]
    records = read_metrics(tmp_path / "a" / "metrics.jsonl")
    arguments = ("--config", "a/config.toml", "--ranks", "3", "--run-dir", "a", "--owner", "rank")
    before = contents(tmp_path / "a")
    refused = train(tmp_path, *arguments)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "run folder exists and is not empty" in refused.stderr
    assert "choose another --run-dir, or add --resume auto or --overwrite" in refused.stderr
    assert contents(tmp_path / "a") == before
    monkeypatch.setitem(ENVIRONMENT, "HPCDP_RANKS_PER_NODE", "2")
    done = train(tmp_path, *arguments, "--overwrite")
    assert done.returncode == 0, done.stderr
    after = contents(tmp_path / "a")
    assert after[tmp_path / "a" / "metrics.jsonl"] != before[tmp_path / "a" / "metrics.jsonl"]
    (manifest,) = [path for path in after if path.name == "manifest.json"]
    assert manifest in before and after[manifest] != before[manifest]
    same = ("kind", "step", "epoch", "samples", "learning_rate", "loss", "accuracy", "test_loss", "test_accuracy")
    first, again = (
        [[record.get(name) for name in same] for record in each]
        for each in (records, read_metrics(tmp_path / "a" / "metrics.jsonl"))
    )
    assert len(first) > 1
    assert again == first


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("lenett",), "lenet"),
        (("mlp", "--data", "digit"), "digits"),
        (("mlp", "--data", "mnist", "--data-dir", "nowhere"), "nowhere"),
        (("mlp", "--batch-size", "1"), "batch"),
        (("mlp", "--trace", "/proc/out.json"), "write the trace [/proc/out.json]"),
        (("mlp", "--trace", "."), "got a folder"),
    ],
)
def test_bad_settings_are_one_line_that_names_what_is_valid(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments, "--ranks", "2", "--epochs", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcdp: ") and named in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", ["--shift", "--checkpoint-every", "--keep"])
def test_ranks_with_other_settings_are_told_before_they_train(flag, tmp_path, monkeypatch, capsys):
    statuses = train_on_threads(monkeypatch, tmp_path, 2, "mlp", "--run-dir={rank}", flag, "1{rank}")
    assert statuses == [1, 1]
    name = flag.removeprefix("--").replace("-", "_")
    said = f"expected {name} = 10 as on rank 0, got {name} = 11 on rank 1; start all ranks with the same settings"
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_after_an_interrupt_the_ranks_end_and_the_folder_is_readable(tmp_path):
    run = start(tmp_path, "mlp", "--ranks", "2", "--epochs", "100000", "--run-dir", "a", "--checkpoint-every", "30")
    metrics = tmp_path / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count('"epoch", ') >= 2):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        "hpcdp: interrupted, all ranks have ended; its files are in a; resume with: hpcdp train --resume a"
    )
    records = read_metrics(metrics)
    assert [record["step"] for record in records] == sorted(record["step"] for record in records)
    assert json.loads(json.dumps(records)) == records
    assert "mlp" in (tmp_path / "a" / "config.toml").read_text()
    assert subprocess.run(["pgrep", "-f", f"hpcdp.cli train mlp.*{tmp_path}"], capture_output=True).stdout == b""


def test_sigterm_unwinds_a_run_and_is_told_from_ctrl_c(capsys):
    with pytest.raises(Terminated) as caught, _interruptible(StopRequests()):
        signal.raise_signal(signal.SIGTERM)
    assert end_early(caught.value, "train") == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "hpcdp: ended by SIGTERM\n"


def test_what_a_signal_has_ended_says_so_and_what_is_left(tmp_path, monkeypatch, capsys):
    def interrupted(job, usr1_has_come):
        with RunFolder(TrainConfig(run_dir="a", ranks=job.ranks)) as folder:
            folder.write({"kind": "step", "step": 1, "epoch": 0.5, "loss": 1.5, "accuracy": 0.5})
        (tmp_path / "a" / "curves.png").unlink()  # ranks that are killed draw none
        return 130

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcdp.launch.launchers.mpirun.run_local", interrupted)
    assert cli.main(["train", "mlp", "--ranks", "2", "--run-dir", "a"]) == 130
    said = "hpcdp: interrupted, all ranks have ended; its files are in a\n"
    assert capsys.readouterr().err == said
    assert (tmp_path / "a" / "curves.png").stat().st_size > 1000
    assert [cli_train._ended_by(status) for status in (143, 255)] == ["ended by SIGTERM", "ended with status 255"]


def result(**numbers) -> dict:
    ran = {"compute_s": 2.5, "data_s": 0.25, "critical_path_s": 2.75, "seconds": 3.21, "comm_s": 0.0}
    record = {"epoch": 1, "loss": 0.5, "test_loss": 0.5, "critical_path": "computation"}
    about = {
        "test_accuracy": 0.98761,
        "perplexity": None,
        "samples_per_s": 12345.6,
        "comm_exposed_s": 0.0,
        "comm_hidden": None,
    }
    nbytes = {"parameters": 260_000, "gradients": 520_000, "state": 0}
    place = {
        "nbytes": nbytes,
        "peak_memory_mb": 155.2,
        "ranks": 1,
        "compression": None,
        "gpus": None,
        "store": [],
        "run_dir": "runs/a",
        "trace": None,
        "records": [record],
    }
    return ran | about | place | numbers


def test_the_report_of_one_rank_speaks_of_no_communication():
    lines = report(result()).splitlines()
    assert lines[0].split() == ["test", "accuracy", "0.9876"]
    assert "12,346 samples/s over 1 rank," in lines[1]
    assert lines[2].endswith("none, there is one rank")
    assert "compute 2.50 s, exposed communication 0.00, data 0.25, rest 0.46" in lines[3]
    assert lines[4].endswith(" 2.75 s, 86% of the time: computation")
    assert "held per rank  parameters 0.26 MB, gradients 0.52 MB, state 0.00 MB" in lines
    assert not any(line.startswith(("slowest", "stragglers", "trace")) for line in lines)
    assert "perplexity     5.22 a token" in report(result(perplexity=5.218))
    assert "No space left" in report(result(), OSError(28, "No space left on device"))


def test_the_report_of_many_ranks_names_who_was_waited_for():
    epochs = [(3, 1.5, "bucket 2"), (1, 1.1, "bucket 2"), (3, 1.25, "computation"), (3, 2.0, "bucket 2")]
    records = [
        {
            "epoch": 1,
            "loss": 0.5,
            "test_loss": 0.5,
            "critical_path": path,
            "slowest_rank": rank,
            "slowest_host": f"node{rank}",
            "slowest_ratio": ratio,
            "stragglers": [f"rank {rank} on node{rank}"] if ratio > 1.2 else [],
        }
        for rank, ratio, path in epochs
    ]
    records[-1]["stragglers"] += ["rank 4 on node4", "rank 5 on node4"]
    shown = report(
        result(
            ranks=8,
            comm_s=0.5,
            comm_exposed_s=0.1,
            comm_hidden=0.8,
            records=records,
            trace="x.json, 7 slices",
            compression="topk, 123.46 of 1234.57 MB a step and node; pays below 10 Gbit/s",
        )
    )
    told = {line[:15].rstrip(): line[15:] for line in shown.splitlines()}
    assert told["communication"] == "0.50 s per rank, 15.6% of the time; 0.10 s exposed, 80% hidden"
    assert told["critical path"] == "2.75 s, 86% of the time: bucket 2"
    assert told["slowest rank"] == "rank 3 on node3 in 3 of 4 epochs, 1.50 x the median"
    assert told["stragglers"] == "rank 3 on node3 (3 epochs), rank 4 on node4 (1 epoch) and 1 more"
    assert told["compression"].startswith("topk, 123.46 of")
    assert told["trace"] == "x.json, 7 slices"
    on_a_store = report(
        result(ranks=2, comm_s=0.5, comm_exposed_s=0.5, records=records, store=[("store", "dist_sync")])
    )
    assert "communication  0.50 s exposed per rank, 15.6% of the time\nstore          dist_sync\n" in on_a_store
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.thorough
def test_a_run_on_text_tells_its_perplexity(tmp_path):
    done = train(tmp_path, "char_lstm", "--ranks", "2", "--epochs", "1", "--warmup-epochs", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    last = read_metrics(tmp_path / "runs" / "char_lstm-shakespeare-001" / "metrics.jsonl")[-1]
    assert f"perplexity     {math.exp(last['test_loss']):.2f} a token" in done.stdout
    assert math.exp(last["test_loss"]) < 20  # of 62


def test_early_stopping_ends_a_run_which_is_at_its_end_then(tmp_path, monkeypatch, capsys):
    # steps that are too small to be seen in float32: the first epoch stays the best
    settings = ("--data", "digits", "--epochs", "9", "--warmup-epochs", "0", "--lr", "1e-30", "--run-dir", "a")
    assert train_on_threads(monkeypatch, tmp_path, 1, "mlp", *settings, "--early-stopping", "2") == [0]
    assert "early stopping after epoch 3: test loss was lowest after epoch 1\n" in capsys.readouterr().out
    assert [
        record["epoch"] for record in read_metrics(tmp_path / "a" / "metrics.jsonl") if record["kind"] == "epoch"
    ] == [1, 2, 3]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert train_on_threads(monkeypatch, tmp_path, 1, "--resume", "a") == [0]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == files
    assert capsys.readouterr().out == "a: this run is complete, there is nothing to resume\n"


def test_a_run_that_diverges_says_so_at_its_end_and_nothing_of_numpy(tmp_path, monkeypatch, capsys):
    settings = ("--epochs", "2", "--lr", "1e10", "--early-stopping", "1")
    assert train_on_threads(monkeypatch, tmp_path, 1, "mlp", *settings) == [0]
    said = capsys.readouterr()
    assert said.err == ""
    assert "\nearly stopping after epoch 1: test loss was never a number\n" in said.out
    assert "\nloss           not finite since epoch 1: try a smaller --lr, or --clip-norm\n" in said.out
