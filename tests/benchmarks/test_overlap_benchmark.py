"""Steps with communication beside them: what is worked out from the ranks' times, what is said, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from raises import raises

import bench_overlap as overlap
from bench_harness import cluster as places
from bench_harness import programs, verdicts
from hpcdp import nn
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError

TINY = overlap.Model("tiny", lambda: nn.models.mlp(8, 10, (600, 600), seed=0), (8,), 4)


def turns(step_s: float, exposed_s: float) -> dict[str, list[float]]:
    return {
        "step_s": [step_s] * 3,
        "exposed_s": [exposed_s] * 3,
        "communication_s": [0.4] * 3,
        "beside_s": [0.01] * 3,
    }


def found(step_s: float = 0.5, exposed_s: float = 0.1, spare: bool = True) -> dict[str, Any]:
    """Two ranks, two buckets that are ready 0.1 and 0.2 s after backward began and take 0.2 s each."""
    ranks = [
        {"after backward": turns(0.7, 0.4), "overlapped": turns(each, exposed_s), "alone": turns(0.3, 0)}
        for each in (step_s, step_s - 0.05)
    ]
    # forward and backward, then of both buckets: ready, needed, updated
    alone = [[0.1, 0.2, 0.1, 0.2, 0.05, 0.0, 0.01, 0.02]] * 3
    faster = [[0.05, 0.1, 0.05, 0.1, 0.02, 0.0, 0.0, 0.0]] * 3
    return overlap.row(ranks, [alone, faster], [0.2, 0.2], spare)


def place(ratio_of_step: float) -> dict[str, Any]:
    path_s = found()["critical_path_ms"] / 1e3
    row = {"model": "a model", "mib": 8.0, "default": "overlapped", "same_bits": True}
    return {
        "hosts": 2,
        "ranks_per_node": 2,
        "rate": "1gbit",
        "library": "A library",
        "link_mb_s": {"one_way": 119.0, "both_ways": 118.0},
        "rows": [row | found(ratio_of_step * path_s)],
    }


def test_the_path_is_that_of_the_slowest_rank() -> None:
    row = found()
    # bucket 0 is ready at 0.1, both are sent at 0.5, and bucket 0, updated in 0.01, leaves half a forward
    assert row["critical_path_ms"] == pytest.approx(1e3 * (0.1 + 0.2 + 0.2 + 0.01 + 0.05))
    assert row["critical_path"] == "buckets 0, 1"
    assert row["compute_ms"] == pytest.approx(300)
    assert found(spare=False)["compute_ms"] == pytest.approx(330)
    assert row["reductions_ms"] == pytest.approx(400)
    assert row["buckets"] == [pytest.approx([100, 200, 50]), pytest.approx([200, 200, 0])]


def test_a_step_counts_by_the_slowest_rank() -> None:
    row = found(step_s=0.84, exposed_s=0.1)
    assert row["step_ms"] == pytest.approx({"after backward": 700, "overlapped": 840, "alone": 300})
    assert row["ratio"]["overlapped"] == pytest.approx(840 / row["critical_path_ms"])
    assert row["exposed_ms"] == pytest.approx({"after backward": 400, "overlapped": 100})
    assert row["hidden"] == pytest.approx({"after backward": 0.0, "overlapped": 0.75})


def test_the_table_is_narrow_and_shows_what_is_wrong() -> None:
    shown = place(1.25)
    assert overlap.table(shown).splitlines()[-1].endswith(" ms")
    shown["rows"][0]["same_bits"] = False
    lines = overlap.table(shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "# 2 hosts x 2 ranks, links of 1gbit, A library"
    assert next(line for line in lines if line.startswith("overlapped")).split()[2] == "1.25"
    assert lines[-1].endswith("WRONG: other bits")


def test_the_verdict_is_by_what_a_trainer_chooses() -> None:
    def met(ratio: float, default: str) -> bool:
        shown = place(ratio)
        shown["rows"][0]["default"] = default
        (verdict,) = [each for each in verdicts.verdicts({"overlap": [{"places": [shown]}]}) if each.target == "S3"]
        return verdict.met

    assert met(1.04, "overlapped")
    assert not met(1.06, "overlapped")
    assert not met(1.04, "after backward")  # 0.7 s


@pytest.mark.parametrize(("n", "ranks_per_node"), [(2, None), (4, 2)])
def test_steps_end_with_the_same_bits(n: int, ranks_per_node: int | None) -> None:
    rows = thread_comm.run(n, lambda world: overlap.measure(world, TINY, 0.1, 2, 2), ranks_per_node)
    assert all(row["same_bits"] for row in rows)
    assert rows[0]["default"] == ("after backward" if ranks_per_node is None else "overlapped")
    assert set(rows[0]["step_ms"]) == {"after backward", "overlapped", "alone"}
    assert min(rows[0]["step_ms"].values()) > 0
    assert rows[0]["critical_path_ms"] >= rows[0]["compute_ms"] > 0
    first, *_, last = rows[0]["buckets"]
    assert first[0] < last[0]  # ready
    assert first[2] > last[2]  # needed


def test_other_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = overlap.Training.update

    def wrong(self: overlap.Training, count: int) -> None:
        step(self, count)
        if self.trainer.reducer.overlap and self.trainer.world.rank == 0:
            self.net.parameters()[0].data[0, 0] += 1

    monkeypatch.setattr(overlap.Training, "update", wrong)
    rows = thread_comm.run(2, lambda world: overlap.measure(world, TINY, 0.1, 1, 1), 1)
    assert not any(row["same_bits"] for row in rows)


def test_a_job_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is launched; test_programs_under_mpirun.py has what its ranks do."""
    options = ["--models", "lenet", "--turns", "1", "--steps", "1"]
    machine = {"ranks": 2, "nodes": 1}

    def launched(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        *start, report = command
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable]
        assert start == [*launch, overlap.__file__, *options, "--json"]
        Path(report).write_text(json.dumps({"library": "A library", "machine": machine, "rows": place(1.0)["rows"]}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(programs, "run_job", launched)
    assert overlap.main([*options, "--hosts", "1", "--json", str(tmp_path / "report.json")]) == 0
    (measured,) = json.loads((tmp_path / "report.json").read_text())["places"]
    assert (measured["hosts"], measured["machine"]["ranks"], measured["rate"]) == (1, 2, None)
    assert "critical path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["--hosts", "0"], {"where": "--hosts", "expected": [1, 99], "got": "'0'"}),
        (["--hosts", "2,x"], {"where": "--hosts", "got": "2,x"}),
        (["--hosts", "2,100"], {"where": "--hosts", "expected": [1, 99], "got": "2,100"}),
        (["--models", "wide,dep"], {"remedy": ["'deep'", "lenet"]}),
        (["--bucket-cap-mb", "0"], {"where": "--bucket-cap-mb", "got": 0.0}),
        (["--ranks-per-node", "0"], {"remedy": "bench_overlap.py -h"}),
        (["--json", "/nowhere/report.json"], {"operation": "overlap", "where": "/nowhere/report.json"}),
    ],
)
def test_misuse_is_refused_before_a_cluster_is_made(
    given: list[str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "obstacle", lambda: pytest.fail("looked for hosts"))
    with raises(ConfigError, **fields) as raised:
        overlap.main(given)
    assert "\n" not in str(raised.value)
