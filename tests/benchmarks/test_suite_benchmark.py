"""RESULTS.md says met or missed by what was measured, and the suite keeps what its jobs report."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from raises import raises

import bench_startup as startup
import bench_suite
from bench_harness import report, verdicts
from hpcdp.errors import ConfigError

_SIZES = (4, 1 << 20, 64 << 20)


def _results(ours: dict[int, float]) -> dict[str, Any]:
    """One round in which the floor takes 10 us at every size, MPI 40, and hpcdp what is asked for."""
    rows = []
    for nbytes in _SIZES:
        medians = {
            "hpcdp buckets": ours[nbytes],
            "hpcdp any array": ours[nbytes],
            "owner writes back": 10.0,
            "MPI": 40.0,
        }
        share = dict.fromkeys(("hpcdp buckets", "hpcdp any array"), 10 / ours[nbytes])
        rows.append({"nbytes": nbytes, "median_us": medians, "floor_share": share, "staged_share": 0.9})
    limits = {"one_core_gb_s": 1.0, "all_cores_gb_s": 2.0, "line_round_trip_ns": 100.0}
    processor = {"model": "A processor", "cores": 2, "caches": {"L2": "1M"}, "system": "Linux"}
    median_us = {"Trainer": 10.0, "owners of shards": 10.0, "every rank": 20.0, "MPI, fused SGD": 40.0}
    update = {"nbytes": 1 << 20, "median_us": median_us}
    lenet = {"batch": 64, "samples_s": {"hpcdp": 900.0, "torch": 1000.0}, "ratio": 0.9}
    scaling = {1: (1000.0, None), 2: (2000.0 * 0.96, 0.97)}
    return {
        "machine": {"processor": processor, "python": "3", "versions": {}, "commit": "abc", "date": "today"},
        "allreduce": [{"library": "Open MPI", "limits": limits, "rows": rows}],
        "updates": [{"rows": [update]}],
        "lenet": [lenet],
        "models": [
            {"model": "wide", "batch": batch, "samples_s": {"hpcdp": 500.0, "torch": 500.0 / ratio}, "ratio": ratio}
            for batch, ratio in ((16, 1.2), (64, 0.9), (16, 1.1))
        ],
        "scaling": [{"batch": 64, "ranks": n, "samples_s": s, "unequal": u} for n, (s, u) in scaling.items()],
        "kvstore": [{"rows": [_store(4096, 9.5), _store(1 << 20, 10.5)], "asynchronous": [_share(1 << 20, 0.3)]}],
        "ingress": [_ingress(0.88)],
        "startup": [{"ranks": 2, "import_s": 0.1, "launch_s": 0.7}],
    }


def _store(nbytes: int, apart: float) -> dict[str, Any]:
    medians = {"pushpull in place": 10.0, "allreduce in place": 9.5}
    return {"nbytes": nbytes, "median_us": medians, "ratio": {"in place": 0.95, "to another array": apart / 12}}


def _share(nbytes: int, share: float) -> dict[str, Any]:
    return {"nbytes": nbytes, "median_us": {"copy": 30.0}, "copy_share": {"push, then pull": share}}


def _ingress(share: float) -> dict[str, Any]:
    link = {"keys": 16, "link_mb_s": {"one_way": 119.0, "both_ways": 118.0}}
    both = "push all, then pull all"
    row = {"servers": 2, "received_mb": [48.1, 48.2], "expected_mb": 48.0, "round_ms": 420.0, "bound_ms": 403.0}
    return {
        "rate": "1gbit", "workers": 3, "nbytes": 32 << 20, "keys": 4, "rows": [row | {"wrong": 0}],
        "library": "A library", "link": link | {"mb_s": {both: 105.0}, "share": {both: share}, "wrong": 0},
    }  # fmt: skip


def _met(results: dict[str, Any]) -> dict[str, bool]:
    return {each.what: each.met for each in verdicts.verdicts(results)}


def test_targets_are_met_or_missed_by_what_was_measured() -> None:
    good = _met(_results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0}))
    assert good["allreduce, buckets: share of the floor above 64 KB"]
    assert good["allreduce, buckets: best peer, from 64 MB"]
    assert good["allreduce, any array: up to 64 KB, behind the MPI library"]
    assert good["reduce and update: best peer's allreduce and update, from 1 MB"]
    assert good["LeNet, 1 to 2 ranks, batch 64 a rank"]
    assert good["MLP of six layers of 2048 on one core, batch 16, against PyTorch (500 samples/s here)"]
    assert not good["MLP of six layers of 2048 on one core, batch 64, against PyTorch (500 samples/s here)"]
    assert good["dist_sync, pushpull in place: the time of an allreduce over its own"]
    assert not good["dist_sync, pushpull to another array: the time of an allreduce over its own"]
    assert good["dist_async, push and pull of 1 MB keys in a node: share of the copy rate"]
    assert not good["dist_async, push and pull of 1 MB keys over 2 hosts, 1gbit: share of the link's rate"]
    assert good["import hpcdp"]
    assert not good["hpcdp launch -n 2 until the world is known"]
    assert not next(met for what, met in good.items() if what.startswith("LeNet on one core"))
    bad = _met(_results({4: 41.1, 1 << 20: 12.0, 64 << 20: 10.1}))
    assert not bad["allreduce, buckets: share of the floor above 64 KB"]
    assert bad["allreduce, buckets: best peer, 1 to 16 MB"]
    assert not bad["allreduce, buckets: best peer, from 64 MB"]
    assert not bad["allreduce, any array: up to 64 KB, behind the MPI library"]


def test_the_best_peer_counts_also_from_another_environment() -> None:
    results = _results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0})
    results["allreduce MPICH"] = [{"rows": [{"nbytes": 64 << 20, "median": 20.0}]}]
    results["updates MPICH"] = [{"rows": [{"nbytes": 1 << 20, "median_us": {"MPI, fused SGD": 15.0}}]}]
    rounds, peers = verdicts.allreduce_rounds(results)
    assert verdicts.best_peer_ratio(rounds, "hpcdp buckets", peers)[64 << 20] == (2.0, "MPICH")
    met = _met(results)
    assert not met["allreduce, buckets: best peer, from 64 MB"]
    assert not met["reduce and update: best peer's allreduce and update, from 1 MB"]
    assert "MPICH" in report.render(results)


def test_ratios_are_medians_over_rounds() -> None:
    results = _results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0})
    slow = copy.deepcopy(results["allreduce"][0])
    for row in slow["rows"]:
        row["median_us"]["MPI"] = 400.0
    results["allreduce"] = [results["allreduce"][0], slow, slow]
    rounds, peers = verdicts.allreduce_rounds(results)
    assert verdicts.best_peer_ratio(rounds, "hpcdp buckets", peers)[64 << 20] == (40.0, "MPI")


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    results = _results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0})
    results |= {"allreduce": [], "updates": [], "failures": ["allreduce (compare): no"], "skipped": ["gloo"]}
    text = report.render(results)
    assert text.count("not measured | -") == 11
    assert "| 4K | 10.0 | 9.5 |" in text
    assert "| 2 | 48.1, 48.2 | 48.0 | 420 | 403 |" in text
    assert "Failures: allreduce (compare): no." in text
    assert "Skipped: gloo." in text


def test_efficiency_needs_both_sizes() -> None:
    assert verdicts.efficiency([{"batch": 64, "ranks": 1, "samples_s": 1.0}], 64) is None
    pairs = [{"batch": 64, "ranks": n, "samples_s": s} for n, s in ((1, 100.0), (2, 190.0), (1, 100.0), (2, 170.0))]
    assert verdicts.efficiency(pairs, 64) == pytest.approx(0.9)


@pytest.mark.thorough
def test_a_job_reports_or_fails() -> None:
    suite = bench_suite.Suite(2, "4K", 1, True, "")
    suite.job("allreduce", "bench", ["allreduce", "-m", "4:64", "-i", "2", "-x", "1"], ranks=2)
    assert [row["nbytes"] for row in suite.results["allreduce"][0]["rows"]] == [4, 8, 16, 32, 64]
    assert suite.failures == []
    suite.job("allreduce", "bench", ["allreduce", "-m", "64:4"], ranks=1)
    assert len(suite.results["allreduce"]) == 1
    assert "64:4" in suite.failures[0]
    assert "MIN <= MAX" in suite.failures[0]


def test_a_wrong_result_counts_for_no_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong_sums(command: list[str]) -> subprocess.CompletedProcess[str]:
        results = _results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0})
        Path(command[command.index("--json") + 1]).write_text(json.dumps(results["updates"][0]))
        return subprocess.CompletedProcess(command, 1, "1M 10.0 40.0  WRONG: Trainer\n# round trip\n", "")

    monkeypatch.setattr(bench_suite, "_run", wrong_sums)
    assert bench_suite.main(["--brief", "--only", "updates", "--into", str(tmp_path)]) == 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert "reduce and update: best peer's allreduce and update, from 1 MB | at least 3x | not measured | - |" in text
    assert "status 1, a result was wrong." in text


@pytest.mark.parametrize(
    ("results", "given", "fields"),
    [
        ("{", [], {"operation": "suite --into"}),
        ("[1]", [], {"operation": "suite --into", "got": "object"}),
        (
            "{}",
            ["--mpich", "/nowhere/python"],
            {"operation": "suite --mpich"},
        ),
        ("{}", ["--largest", "32K"], {"operation": "suite --largest", "got": "32K"}),
    ],
)
def test_what_the_suite_cannot_do_is_told_before_it_starts(
    results: str, given: list[str], fields: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_suite, "_run", lambda command: pytest.fail("it has started"))
    (tmp_path / "results.json").write_text(results)
    with raises(ConfigError, **fields):
        bench_suite.main([*given, "--only", "updates", "--into", str(tmp_path)])
    assert (tmp_path / "results.json").read_text() == results


def test_the_suite_writes_json_and_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def pretend(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        if startup.__file__ in command:
            text = json.dumps({"ranks": 2, "import_s": 0.01, "launch_s": 0.4})
            Path(command[command.index("--json") + 1]).write_text(text)
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 3, "", "RuntimeError: of the test")

    monkeypatch.setattr(bench_suite, "_run", pretend)
    assert bench_suite.main(["--brief", "--rounds", "1", "--into", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["startup"][0]["import_s"] == 0.01
    assert len(results["failures"]) == len(started) - 1
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| S11 | import hpcdp | at most 0.2 s | 0.010 s | met |" in text
    assert "RuntimeError: of the test" in text


def test_a_part_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = _results({4: 41.0, 1 << 20: 11.0, 64 << 20: 10.0})
    results["failures"] = ["startup (startup): status 1, earlier", "kernels (kernels): status 1, a result was wrong"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    started = []

    def pretend(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        processor = results["machine"]["processor"] | {"model": "B", "vectors": "AVX2", "caches": {"L2": "9K"}}
        machine = {"commit": "later", "processor": processor if len(started) > 1 else results["machine"]["processor"]}
        report = {"ranks": 2, "import_s": 0.01, "launch_s": 0.4, "machine": machine}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bench_suite, "_run", pretend)
    assert bench_suite.main(["--only", "startup", "--into", str(tmp_path)]) == 0
    assert len(started) == 1 and startup.__file__ in started[0]
    now = json.loads((tmp_path / "results.json").read_text())
    assert now["failures"] == results["failures"][1:]  # of what was not measured again
    assert now["allreduce"] == results["allreduce"] and now["machine"] == results["machine"]
    assert "Measured again at commit later: startup." in (tmp_path / "RESULTS.md").read_text()
    assert bench_suite.main(["--only", "startup", "--into", str(tmp_path)]) == 0
    told = (
        f"commit later on another machine (B, AVX2, {results['machine']['processor']['cores']} cores (L2 9K)): startup."
    )
    assert told in " ".join((tmp_path / "RESULTS.md").read_text().split())
    with raises(ConfigError, operation="suite --only", got=["starting", "up"]):
        bench_suite.main(["--only", "up,startup,starting", "--into", str(tmp_path)])


def test_start_up_is_measured() -> None:
    assert 0 < startup.import_seconds(1) < 60
    slowest = startup.slowest_imports(3)
    assert len(slowest) == 3
    assert slowest[0][1] >= slowest[1][1] >= slowest[2][1] > 0
    assert 0 < startup.launch_seconds(2, 1) < 60
