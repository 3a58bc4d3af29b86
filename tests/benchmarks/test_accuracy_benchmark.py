"""The table of what networks learn: its rows are commands that work."""

from typing import Any

import pytest

from hpcdp.benchmarks import accuracy
from hpcdp.errors import ConfigError, LaunchError
from hpcdp.train.runs.config import TrainConfig

RUN = ("mlp", "--epochs", "1", "--warmup-epochs", "0")


@pytest.mark.thorough  # the next one has all of it but the training, which tests/train/runs/test_train_run.py has
def test_a_run_learns() -> None:
    record = accuracy.train(RUN)
    assert 0.5 < record["test_accuracy"] <= 1 and 0 < record["test_loss"] < 2


def test_a_row_is_a_run(trains: Any) -> None:
    epoch = {"kind": "epoch", "epoch": 1, "test_loss": 0.25, "test_accuracy": 0.75, "seconds": 1.5}
    programs = trains(accuracy, [epoch | {"test_loss": 9.0}, {"kind": "step", "loss": 1.5}, epoch])
    record = accuracy.train(RUN)
    assert {"mlp", "--epochs=1", "--warmup-epochs=0.0"} < set(programs[0])
    assert record == epoch | {"seconds": 3.0}
    found = accuracy.row(("mlp", "--epochs", "1"), record)
    cells = [cell.strip() for cell in found.strip("|").split("|")]
    assert cells[:2] == ["`hpcdp train mlp --epochs 1`", "1"]
    assert cells[2:] == ["75.00%", "0.2500", "", "3"]
    text = accuracy.row(("gpt",), {"epoch": 2, "test_loss": 0.0, "test_accuracy": 1, "seconds": 1})
    assert text.split("|")[5] == " 1.00 "


def test_rows_are_settings_that_exist() -> None:
    for model, *flags in accuracy.ROWS:
        names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
        values = [int(value) if value.isdecimal() else value for value in flags[1::2]]
        TrainConfig(model=model, **dict(zip(names, values, strict=True)))


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match="unknown network 'lenett'; did you mean 'lenet'"):
        accuracy.main(["--only", "lenett"])
    with pytest.raises(LaunchError, match=r"accuracy \[mlp --lr 0\]: expected status 0, got 2: hpcdp: .*lr"):
        accuracy.train(("mlp", "--lr", "0"))
