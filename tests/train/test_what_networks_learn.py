"""What the documentation says that networks learn: its commands train as far, with codecs, and to the same bits."""

import re
import shlex
from pathlib import Path

import pytest
from train_command import start

from hpcdp.compression import CODECS
from hpcdp.train.config import TrainConfig
from hpcdp.train.metrics import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
ROWS = re.findall(r"^\| `hpcdp train (.*?)` \| (\d+) \| ([\d.]+)% \| ([\d.]+) \|", PAGE, re.M)
MEASURED = ("loss", "accuracy", "test_loss", "test_accuracy")


def epochs(folder: Path, *arguments: str, **environ: str) -> list[dict]:
    """The records of the epochs of one run."""
    with start(folder, *arguments, "--run-dir", "run", **environ) as run:
        _, errors = run.communicate()
    assert run.returncode == 0, errors
    return [record for record in read_metrics(folder / "run" / "metrics.jsonl") if record["kind"] == "epoch"]


def test_rows_are_settings_that_exist() -> None:
    assert len(ROWS) == 8
    for command, *_ in ROWS:
        model, *flags = shlex.split(command)
        names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
        values = [int(value) if value.isdecimal() else value for value in flags[1::2]]
        TrainConfig(model=model, **dict(zip(names, values, strict=True)))


@pytest.mark.thorough  # test_train_run.py trains for fewer epochs
@pytest.mark.parametrize(("command", "number", "accuracy", "loss"), ROWS, ids=[row[0] for row in ROWS])
def test_a_network_learns_what_the_table_says(
    command: str, number: str, accuracy: str, loss: str, tmp_path: Path
) -> None:
    """Within 1.5 points, some five images of the digits' test set."""
    last = epochs(tmp_path, *shlex.split(command))[-1]
    assert last["epoch"] == int(number)
    assert 100 * last["test_accuracy"] > float(accuracy) - 1.5
    assert last["test_loss"] < 1.3 * float(loss) + 0.02


@pytest.mark.thorough  # tests/data_parallel/test_compression.py has steps
@pytest.mark.parametrize("codec", [*CODECS, "1bit:feedback=0"])
def test_lenet_learns_with_each_codec_and_error_feedback(codec: str, tmp_path: Path) -> None:
    """On two nodes, as docs/compression.md has it: one bit without feedback learns nothing."""
    settings = ("lenet", "--ranks", "2", "--compression", codec)
    last = epochs(tmp_path, *settings, HPCDP_RANKS_PER_NODE="1")[-1]
    assert (last["test_accuracy"] > 0.97) == ("feedback=0" not in codec)


@pytest.mark.thorough  # test_train_run.py has the MLP on one rank and three
def test_lenet_is_reproducible_to_the_bit_on_any_ranks_and_nodes(tmp_path: Path) -> None:
    runs = {}
    for ranks, per_node in [(1, 1), *((n, size) for n in (2, 3, 4, 8) for size in sorted({1, 2, n}))]:
        folder = tmp_path / f"{ranks} ranks, {per_node} a node"
        folder.mkdir()
        settings = ("lenet", "--ranks", str(ranks), "--batch-size", "128", "--epochs", "2", "--reproducible")
        records = epochs(folder, *settings, HPCDP_RANKS_PER_NODE=str(per_node))
        runs[folder.name] = [[float(record[name]).hex() for name in MEASURED] for record in records]
    first, *others = runs.values()
    assert len(first) == 2 and len(others) == 11
    assert [name for name, values in runs.items() if values != first] == []
