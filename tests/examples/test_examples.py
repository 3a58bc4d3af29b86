"""The examples run as users run them, over ranks, and compute the same on any number of them."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from started import EXAMPLES, start


def launched(name: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An example that is run by processes."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "PRTE"))}
    environment["OMP_NUM_THREADS"] = "1"  # BLAS threads that wait for each other crawl on a machine with other work
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable]
    return subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def launch(name: str, ranks: int, *arguments: str) -> str:
    """What it prints that way."""
    done = launched(name, ranks, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("pipeline.py", []), ("split.py", ["--parts", "2"])],
)
def test_ranks_are_processes(name, arguments):
    """As commands in the docs start the other ones."""
    assert "accuracy" in launch(name, 2, "--epochs", "1", *arguments)


@pytest.mark.thorough
def test_a_gpt_learns_on_three_ranks():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    said = launch("torch_gpt.py", 3, "--steps", "12", "--every", "4", "--context", "32", "--owner", "rank")
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\d+\.\d+)", said)]
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.3
    assert re.search(
        r"step   12  held-out loss \d\.\d+, \d+\.\d+% of bytes right\n\d\.\d+ bits per byte; ranks: 3\n", said
    )


NUMBER = "argument --%s: expected a whole number from 1, got '%s'; {name} -h lists the options"


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "said"),
    [
        ("asynchronous.py", 1, "--number 0", NUMBER % ("number", 0)),
        ("data_parallel_concise.py", 2, "--epochs 0", NUMBER % ("epochs", 0)),
        ("data_parallel_concise.py", 2, "--devices 0", NUMBER % ("devices", 0)),
        ("data_parallel_concise.py", 2, "--kv-store local", "kvstore"),
        ("data_parallel_from_scratch.py", 2, "--epochs=-1", NUMBER % ("epochs", -1)),
        ("data_parallel_from_scratch.py", 2, "--batch-size 0", NUMBER % ("batch-size", 0)),
        ("hybridize.py", 1, "--calls 2 --draw a.txt", "a.txt"),
        ("kvstore.py", 2, "--epochs 0", NUMBER % ("epochs", 0)),
        ("kvstore.py", 2, "--slow=-1", "argument --slow: expected a number from 0, got '-1'"),
        ("kvstore.py", 2, "--staleness 2", "staleness"),
        (
            "kvstore.py",
            2,
            "--batch-size 1 --store dist_async",
            "--batch-size: expected a sample for each of the 2 ranks,",
        ),
        ("pipeline.py", 3, "", "Pipeline [world]: expected 1 rank, or a multiple of the 2 stages, got 3 ranks"),
        ("pipeline.py", 1, "--epochs 0", NUMBER % ("epochs", 0)),
        ("reproducible.py", 1, "--load nosuch", "[nosuch-states.npz]: expected a file of"),
        ("split.py", 3, "--parts 2", "split_world [num_parts]: expected a number that divides the 3 ranks, got 2"),
        ("split.py", 2, "--parts 0", NUMBER % ("parts", 0)),
        ("torch_gpt.py", 2, "--every 0", NUMBER % ("every", 0)),
        ("torch_gpt.py", 2, "--heads 3", "--heads: expected a number that divides the width 128, got 3"),
    ],
)
def test_a_setting_that_is_wrong_is_one_line(name, ranks, arguments, said, tmp_path, monkeypatch, capsys):
    if name == "torch_gpt.py":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        start(name, ranks, *arguments.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("hpcdp: ") and error.count("\n") == 1 and said.format(name=name) in error


@pytest.mark.parametrize(
    "arguments", [pytest.param(["--epochs", "0"], marks=pytest.mark.thorough), ["--staleness", "2"]]
)
def test_of_ranks_that_are_processes_one_says_it(arguments):
    done = launched("kvstore.py", 2, *arguments)
    said = [line for line in done.stderr.splitlines() if "expected" in line]
    assert done.returncode == 2 and len(said) == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_help_fits_a_terminal_and_shows_defaults(path, monkeypatch, capsys):
    if path.name == "torch_gpt.py":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert not ended.value.code
    assert max(map(len, said.splitlines())) <= 80
    assert re.search(r"\(default:\s", said)


@pytest.mark.thorough
def test_the_reproducible_one_says_the_same_digits_on_any_number_of_ranks_and_after_a_restart(tmp_path):
    lines = start("reproducible.py", 1).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["epoch 1", "epoch 2"] and len(lines) == 3
    assert start("reproducible.py", 3, "--epochs", "1", "--save", f"{tmp_path}/half").splitlines()[0] == lines[0]
    assert start("reproducible.py", 1, "--load", f"{tmp_path}/half").splitlines() == lines[1:]


@pytest.mark.thorough
def test_on_a_store_all_ranks_wait_for_a_slow_one_or_it_does_less():
    found = {}
    for store, epochs, slow in (("dist_sync", "3", "1"), ("dist_async", "2", "20")):
        lines = start("kvstore.py", 2, "--store", store, "--epochs", epochs, "--slow", slow).splitlines()
        assert len(lines) == int(epochs)
        told = re.search(r"accuracy (\d\.\d+), (\d+\.\d) s, steps of each rank \[(.*)\]", lines[-1])
        found[store] = float(told[1]), [int(steps) for steps in told[3].split(",")]
    assert found["dist_sync"][0] > 0.7
    assert found["dist_async"][0] > 0.3  # which varies from run to run
    assert found["dist_sync"][1] == [23] * 2
    fast, slow = found["dist_async"][1]
    assert fast + slow == -(-1438 // 32) and slow < fast


def test_a_hybridized_network_computes_the_same_and_is_exported(tmp_path):
    said = start("hybridize.py", 1, "--calls", "20", "--draw", f"{tmp_path}/mlp.png")
    assert re.match(r"20 calls: \d\.\d+ s as written, \d\.\d+ s hybridized, \d+\.\dx\nsame output: True\n", said)
    assert "3 operations, 164,482 parameters" in said
    assert said.endswith("exported to mlp.json and mlp.h5; same output without the class: True\n")
    assert (tmp_path / "mlp.png").stat().st_size > 1000


@pytest.mark.thorough
def test_a_model_in_two_stages_learns_the_same_on_one_rank_and_on_two_copies():
    # At 0.05 rounding alone, 1e-7 of the first weights, moves the accuracy after an epoch between 0.64 and 0.69.
    said = {ranks: start("pipeline.py", ranks, "--epochs", "1", "--lr", "0.03") for ranks in (1, 4)}
    losses, accuracies = (
        {ranks: [float(each) for each in re.findall(rf"{what} (\d+\.\d+)", text)] for ranks, text in said.items()}
        for what in ("loss", "accuracy")
    )
    assert len(accuracies[1]) == 1 and accuracies[1][-1] > 0.5
    assert accuracies[4] == pytest.approx(accuracies[1], abs=0.012)
    assert losses[4] == pytest.approx(losses[1], rel=0.02)  # of both copies together


@pytest.mark.thorough
def test_a_model_split_by_channels_learns_the_same_on_one_rank_and_on_parts_times_copies():
    said = {ranks: start("split.py", ranks, "--epochs", "1", "--parts", parts) for ranks, parts in ((1, "1"), (4, "2"))}
    for what, tolerance in (("loss", 0.02), ("accuracy", 0.02)):
        found = {
            ranks: [float(each) for each in re.findall(rf"{what} (\d+\.\d+)", text)] for ranks, text in said.items()
        }
        assert len(found[1]) == 1 and found[4] == pytest.approx(found[1], rel=tolerance)
    held = {ranks: sorted({int(each) for each in re.findall(r"\d{5,}", text)}) for ranks, text in said.items()}
    assert held[1] == [129068] and held[4] == [64564]


def test_asynchronous_calls_compute_the_same_and_keep_to_their_bound():
    said = [start("asynchronous.py", 1, "--size", "60", "--number", "6") for _ in range(2)]
    sums = [re.search(r"the sum of all results is (-?\d+\.\d+)", each)[1] for each in said]
    assert sums[0] == sums[1]
    megabytes = [float(each) for each in re.findall(r"unfinished results, .*: (\d+\.\d+) MB", said[0])]
    assert len(megabytes) == 3 and megabytes[1] <= 0.1 and megabytes[2] == 0.0
