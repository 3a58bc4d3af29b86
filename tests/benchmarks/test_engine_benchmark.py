"""What a push costs: that the benchmark runs, checks itself, and says whether the target is met."""

import json
from pathlib import Path

import pytest

import bench_engine as engine


def test_the_table_and_the_file_have_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "engine.json"
    assert engine.main(["--turns", "2", "--count", "20", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "target: a push below 10 us:" in said
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) >= 3 and engine.POOL in [row["name"] for row in rows]
    for row in rows:
        assert row["name"] in said
        assert 0 < row["call_us"] <= row["p99_us"] and row["all_run_us"] > 0 and row["round_trip_us"] > 0
    assert [row["call_pool_ratio"] for row in rows if row["name"] == engine.POOL] == [1.0]


def test_the_table_of_a_slow_machine_fits_a_terminal() -> None:
    times = {f"{when}_us": 43210.98 for when in ("call", "p99", "all_run", "round_trip")}
    ratios = {f"{when}_pool_ratio": 1234.56 for when in ("call", "all_run", "round_trip")}
    line = engine._line({"name": "hpcdp", **times, **ratios})
    assert len(line) <= 80 and line.split() == [
        "hpcdp",
        "43211",
        "(1235)",
        "43211",
        "43211",
        "(1235)",
        "43211",
        "(1235)",
    ]
