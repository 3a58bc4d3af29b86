"""The digits are trained over hosts, by mpirun over ssh: the world is known, and the numbers are those of one host."""

import re
from pathlib import Path

import pytest
from runs_on_hosts import SAME, hpcdp, numbers

from bench_harness.cluster import Cluster
from hpcdp.nn.models import MODELS
from hpcdp.train.metrics import read_metrics

pytestmark = pytest.mark.cluster

LENET = ("train", "lenet", "--data", "digits", "--epochs", "3", "--batch-size", "64", "--lr", "0.1")
EXACT = ("train", "mlp", "--data", "digits", "--epochs", "2", "--batch-size", "96", "--reproducible")


def trained(cluster: Cluster, ranks_per_node: int | list[int], name: str, *arguments: str) -> tuple[Path, str]:
    """The folder of a run and what was shown of it."""
    folder = cluster.folder / name
    done = cluster.mpirun(ranks_per_node, hpcdp(*arguments, "--run-dir", folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def check_lenet(folder: Path, shown: str, ranks: int) -> None:
    """Check that it has learned, over all ranks together, and that its report is whole."""
    epochs = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "epoch"]
    assert [record["samples"] for record in epochs] == [1438] * 3
    assert epochs[-1]["test_accuracy"] > 0.9
    assert len(re.findall(r"^epoch \d/3  loss", shown, re.M)) == 3
    assert f"samples/s over {ranks} ranks" in shown
    assert {"config.toml", "metrics.jsonl", "curves.png", "checkpoints"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("ranks_per_node", "ranks"), [(1, 2), (2, 4), ([3, 1], 4)])
def test_over_two_hosts(two_hosts: Cluster, ranks_per_node: int | list[int], ranks: int) -> None:
    check_lenet(*trained(two_hosts, ranks_per_node, f"lenet-{ranks_per_node}", *LENET), ranks)


def test_over_four_hosts(four_hosts: Cluster) -> None:
    check_lenet(*trained(four_hosts, 1, "lenet", *LENET), 4)


def test_the_same_bits_on_one_host_and_on_several(two_hosts: Cluster) -> None:
    """Lost to no rounding: each number of the curves, for ranks that share memory and ranks that do not."""
    one_host, _ = trained(two_hosts, [2, 0], "one-host", *EXACT)
    expected = numbers(one_host)
    assert len(expected) == 6
    assert all(None not in line[: SAME.index("test_loss")] for line in expected)
    for ranks_per_node in (1, [1, 2]):
        several, _ = trained(two_hosts, ranks_per_node, f"several-{ranks_per_node}", *EXACT)
        assert numbers(several) == expected, ranks_per_node


def test_a_wrong_setting_is_a_line_and_status_2(two_hosts: Cluster) -> None:
    done = two_hosts.mpirun(1, hpcdp("train", "lenett", "--data", "digits"))
    assert done.returncode == 2
    assert {line for line in done.stderr.splitlines() if line.startswith("hpcdp: ")} == {
        f"hpcdp: unknown model 'lenett'; did you mean 'lenet'? valid: {', '.join(MODELS)}"
    }
    assert "Traceback" not in done.stderr
