"""Steps with every codec, turn by turn; what codecs do to training."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdp import nn
from hpcdp.benchmarks import compression, convergence, steps
from hpcdp.comm import threads
from hpcdp.compression import OneBit, TwoBit, pays_below
from hpcdp.errors import ConfigError, LaunchError

TINY = steps.Model("a model", lambda: nn.models.mlp(6, 10, (40, 50), seed=0), (6,), 4)


@pytest.mark.parametrize(("n", "ranks_per_node"), [(2, 1), (4, 2), (5, 2)])
def test_what_hosts_send(n: int, ranks_per_node: int) -> None:
    rows = threads.run(n, lambda world: compression.measure(world, TINY, ["2bit", "fp16"], 2, 2), ranks_per_node)
    assert all(row["codecs"].keys() == {"none", "2bit", "fp16"} for row in rows)
    found = rows[0]["codecs"]
    assert all(each["steps_s"] > 0 for each in found.values())
    assert found["none"]["ratio"] == 1
    assert found["fp16"]["sent_mb"] == pytest.approx(found["none"]["sent_mb"] / 2)
    assert found["none"]["sent_mb"] / 17 < found["2bit"]["sent_mb"] < found["none"]["sent_mb"] / 14
    assert found["none"]["pays_below_mb_s"] is None
    assert found["fp16"]["pays_below_mb_s"] > 1


def test_the_table_is_narrow() -> None:
    codec = {"steps_s": 1234.5, "ratio": 12.34, "sent_mb": 123.456, "pays_below_mb_s": 1250.0}
    place: dict[str, Any] = {"hosts": 4, "ranks_per_node": 2, "rate": "100mbit", "library": "A library"}
    place |= {"link_mb_s": {"one_way": 12.0, "both_ways": 12.0}, "rows": [{"model": "a model", "codecs": {}}]}
    place["rows"][0]["codecs"] = {"none": codec | {"pays_below_mb_s": None}, "topk:ratio=0.2": codec}
    lines = compression.table(place).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["topk:ratio=0.2", "1234.50", "12.34", "123.456", "10288.0", "10.0", "Gbit/s"]


def test_slower_codecs_pay_on_slower_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdp.compression.worth.coding_s", lambda codec: (1e-3, 0.5e-3))
    nbytes = 4 * 2**18
    left = nbytes - TwoBit().nbytes(2**18, np.dtype("f4"))
    assert pays_below(TwoBit(), 2) == pytest.approx(left / (1e-3 + 1.5 * 0.5e-3))
    assert pays_below("1bit", 2) == pays_below(OneBit(), 2) > pays_below(TwoBit(), 2)
    for wrong in ((None, 2), ("2bit", 1)):
        with pytest.raises(ConfigError, match="2 nodes or more"):
            pays_below(*wrong)
    assert pays_below(TwoBit(), 4) == pytest.approx(1.5 * left / (1e-3 + 1.75 * 0.5e-3))


@pytest.mark.thorough  # the next one has all of it but the training, which tests/train/trainers/test_compression.py has
def test_a_run_with_a_codec() -> None:
    run = convergence.train_lenet("2bit", 0, 1, 1)
    assert len(run["test_accuracy"]) == len(run["test_loss"]) == 1 and run["at"] == [1]
    assert 0.3 < run["test_accuracy"][0] <= 1


def test_runs_and_the_picture(tmp_path: Path, trains: Any) -> None:
    epoch = {"kind": "epoch", "epoch": 1, "test_loss": 0.5, "test_accuracy": 0.75}
    programs = trains(convergence, [{"kind": "step", "loss": 1.5}, epoch])
    run = convergence.train_lenet("2bit", 3, 1, 1)
    assert run == {"at": [1], "test_loss": [0.5], "test_accuracy": [0.75]}
    assert {"lenet", "--data=digits", "--seed=3", "--epochs=1", "--compression=2bit"} < set(programs[0])
    assert convergence.train_lenet("none", 0, 2, 1) == run
    assert not any("compression" in each for each in programs[1])
    found = {"none": [run], "2bit": [run], "2bit:feedback=0": [run]}
    lines = convergence.table(found).splitlines()
    assert [line.split()[-2] for line in lines[1:]] == ["+0.00"] * 3
    assert len({line.split()[-1] for line in lines[1:]}) == 1
    convergence.draw(found, "epoch", str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(LaunchError, match=r"--compression 3bit.*expected one of fp16"):
        convergence.train_lenet("3bit", 0, 2, 1)


@pytest.mark.thorough
def test_a_run_of_the_gpt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(convergence, "_TESTS", 2)
    run = convergence.train_gpt("2bit", 0, 2, 8)
    assert run["at"] == [4, 8]
    assert run["test_loss"][1] < run["test_loss"][0] < 7
    assert 0 <= run["test_accuracy"][1] < 0.5
    monkeypatch.setattr(convergence, "_GPT", tmp_path / "torch_gpt.py")
    with pytest.raises(ConfigError, match=r"expected the example .*, got none; use a clone"):
        convergence.train_gpt("2bit", 0, 2, 8)


def test_ranks_that_send_no_messages_are_refused() -> None:
    args = argparse.Namespace(models="lenet", codecs=["2bit"], turns=1, steps=1, json=None)
    with pytest.raises(ConfigError, match=r"expected several nodes, got one.*HPCDP_RANKS_PER_NODE=1"):
        compression.job(args)


@pytest.mark.parametrize(
    ("main", "given", "says"),
    [
        (compression.main, ["--codecs", "3bit"], "expected one of fp16"),
        (compression.main, ["--models", "huge"], "unknown model"),
        (convergence.main, ["--codecs", "3bit"], "expected one of fp16"),
        (convergence.main, ["--seeds", "0,x"], "numbers between commas"),
    ],
)
def test_what_is_refused(main: Any, given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(given)
