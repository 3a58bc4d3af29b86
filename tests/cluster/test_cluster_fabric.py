"""The benchmark of allreduce across hosts: its jobs start, report, and are merged."""

import json
from pathlib import Path

import pytest

import bench_fabric as fabric

pytestmark = pytest.mark.cluster


def test_jobs_run_on_hosts_and_report(hosts_possible: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fabric.json"
    arguments = ["--hosts", "2", "--rate", "400mbit", "--sizes", "4,256K", "--algorithms", "auto,ring", "-i", "3"]
    assert fabric.main([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["fabrics"][0]
    assert [row["nbytes"] for row in found["rows"]] == [4, 256 << 10]
    assert {"MPI", "auto", "ring"} <= set(found["rows"][0]["median_ms"])
    assert 30 < found["link_mb_s"]["one_way"] < 60, "400 Mbit/s are 50 MB/s"
    assert not any(count for row in found["rows"] for count in row["wrong"].values())
    assert "2 hosts x 2 ranks, links of 400mbit" in capsys.readouterr().out
    assert found["nodes"] == 2
