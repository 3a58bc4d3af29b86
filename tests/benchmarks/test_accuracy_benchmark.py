"""The table of what networks learn: its rows are commands that work."""

import pytest

from hpcdp.benchmarks import accuracy
from hpcdp.errors import ConfigError
from hpcdp.train.config import TrainConfig


def test_a_row_is_a_run() -> None:
    found = accuracy.row(("mlp", "--epochs", "1"), accuracy.train(("mlp", "--epochs", "1", "--warmup-epochs", "0")))
    cells = [cell.strip() for cell in found.strip("|").split("|")]
    assert cells[:2] == ["`hpcdp train mlp --epochs 1`", "1"]
    assert 50 < float(cells[2].rstrip("%")) <= 100 and 0 < float(cells[3]) < 2 and cells[4] == ""
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
    with pytest.raises(ConfigError, match=r"accuracy \[mlp --lr 0\]"):
        accuracy.train(("mlp", "--lr", "0"))
