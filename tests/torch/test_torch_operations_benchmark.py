"""The benchmark of operations of torch.distributed: its table, and that all results are right."""

import json
import subprocess
import sys

import pytest
from raises import raises

pytest.importorskip("torch", reason="PyTorch is not installed")

import bench_torch_operations as benchmark
from hpcdp.errors import ConfigError


def test_its_table_has_80_columns():
    row = {"operation": "all_to_all_single", "nbytes": 64 << 20, "us": {"gloo": 123456.7, "hpcdp": 12.5}, "ratio": 2.5}
    assert benchmark.table([row]).splitlines()[1].split() == ["all_to_all_single", "64M", "123456.7", "12.5", "2.50"]
    assert max(map(len, benchmark.table([row]).splitlines())) <= 80


def test_misuse_is_refused():
    with raises(ConfigError, operation="unknown operation 'reduced'", remedy="reduce"):
        benchmark.main(["--operations", "reduced"])


@pytest.mark.thorough
def test_a_job_of_two_ranks(tmp_path):
    found = tmp_path / "figures.json"
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, benchmark.__file__]
    options = ["-m", "8,1M", "--turns", "1", "--json", str(found)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["operation"] for row in rows] == [*benchmark.OPERATIONS, *benchmark.OPERATIONS[:-1]]
    assert not any(row["wrong"] for row in rows)
