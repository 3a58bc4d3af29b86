"""The examples run as users run them, over ranks, and compute the same on any number of them."""

import os
import re
import subprocess
import sys

import pytest
from started import EXAMPLES, start


def launch(name: str, ranks: int, *arguments: str) -> str:
    """What an example prints that is run by processes."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "PRTE"))}
    environment["OMP_NUM_THREADS"] = "1"  # BLAS threads that wait for each other crawl on a machine with other work
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
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
        r"step   12  held-out loss \d\.\d+, \d+\.\d+% of bytes right\n\d\.\d+ bits a byte; ranks: 3\n", said
    )


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("pipeline.py", [], "Pipeline [world]: expected 1 rank, or a multiple of the 2 stages, got 3 ranks"),
        ("split.py", ["--parts", "2"], "split_world [num_parts]: expected a number that divides the 3 ranks, got 2"),
    ],
)
def test_ranks_that_the_parts_of_a_model_do_not_divide_are_one_line(name, arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        start(name, 3, *arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{name}: {said}\n"


def test_the_reproducible_one_says_the_same_digits_on_any_number_of_ranks_and_after_a_restart(tmp_path):
    lines = start("reproducible.py", 1).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["epoch 1", "epoch 2"] and len(lines) == 3
    assert start("reproducible.py", 3, "--epochs", "1", "--save", f"{tmp_path}/half").splitlines()[0] == lines[0]
    assert start("reproducible.py", 1, "--load", f"{tmp_path}/half").splitlines() == lines[1:]


def test_on_a_store_all_ranks_wait_for_a_slow_one_or_it_does_less():
    found = {}
    for store, epochs, slow in (("dist_sync", "3", "1"), ("dist_async", "2", "20")):
        lines = start("kvstore.py", 2, "--store", store, "--epochs", epochs, "--slow", slow).splitlines()
        assert len(lines) == int(epochs)
        told = re.search(r"accuracy (\d\.\d+), (\d+\.\d) s, steps \[(.*)\]", lines[-1])
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


def test_a_model_split_by_channels_learns_the_same_on_one_rank_and_on_parts_times_copies():
    said = {ranks: start("split.py", ranks, "--epochs", "1", "--parts", parts) for ranks, parts in ((1, "1"), (4, "2"))}
    for what, tolerance in (("loss", 0.02), ("accuracy", 0.02)):
        found = {
            ranks: [float(each) for each in re.findall(rf"{what} (\d+\.\d+)", text)] for ranks, text in said.items()
        }
        assert len(found[1]) == 1 and found[4] == pytest.approx(found[1], rel=tolerance)
    held = {ranks: sorted({int(each) for each in re.findall(r"has (\d+) of", text)}) for ranks, text in said.items()}
    assert held[1] == [129068] and held[4] == [64564]


def test_asynchronous_calls_compute_the_same_and_keep_to_their_bound():
    said = [start("asynchronous.py", 1, "--size", "60", "--number", "6") for _ in range(2)]
    sums = [re.search(r"the sum of all results is (-?\d+\.\d+)", each)[1] for each in said]
    assert sums[0] == sums[1]
    megabytes = [float(each) for each in re.findall(r"results under way, .*: (\d+\.\d+) MB", said[0])]
    assert len(megabytes) == 3 and megabytes[1] <= 0.1 and megabytes[2] == 0.0
