"""Allreduce across hosts: what is worked out from the jobs' reports, and what is said."""

from typing import Any

import pytest
from raises import raises

import bench_fabric as fabric
from bench_harness import verdicts
from hpcdp.bench import tune
from hpcdp.bench.measure import MeasuringSchedule
from hpcdp.collectives import ALGORITHMS
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError

MB = 1 << 20


def job_report(mpi_ms: float, auto_ms: float, wrong: int = 0) -> dict[str, Any]:
    """What a job on 4 nodes leaves; the link carries 100 MB/s."""
    row = {
        "nbytes": 4 * MB,
        "auto": "ring",
        "median_ms": {"MPI": mpi_ms, "auto": auto_ms},
        "spread": {"MPI": 0.1, "auto": 0.2},
        "mpi_ratio": {"MPI": 1.0, "auto": mpi_ms / auto_ms},
        "wrong": {"MPI": 0, "auto": wrong},
    }
    link = {"one_way": 100.0, "both_ways": 99.0}
    return {"library": "A library", "machine": {"nodes": 4}, "skipped": "", "rows": [row], "link_mb_s": link}


def test_the_bound_is_what_every_host_must_send() -> None:
    found = fabric.merged([job_report(200, 80)], [])
    bound_ms = (2 * 3 / 4) * 4 * MB / 100e6 * 1e3
    assert found["rows"][0]["bound_ms"] == pytest.approx(bound_ms)
    assert found["rows"][0]["bound_share"] == pytest.approx({"MPI": bound_ms / 200, "auto": bound_ms / 80})


def test_rounds_are_merged_by_medians_and_mpich_joins_by_pairs() -> None:
    rounds = [job_report(200, 80), job_report(100, 70), job_report(300, 90, wrong=5)]
    mpich = [job_report(100, 1), job_report(100, 1), job_report(100, 1)]
    row = fabric.merged(rounds, mpich)["rows"][0]
    assert row["median_ms"] == {"MPI": 200, "auto": 80, "MPICH": 100}
    assert row["mpi_ratio"]["auto"] == pytest.approx(2.5)
    assert row["mpi_ratio"]["MPICH"] == pytest.approx(2.0)
    assert row["wrong"] == {"MPI": 0, "auto": 5, "MPICH": 0}


def test_the_table_is_narrow_and_shows_what_is_wrong() -> None:
    lines = fabric.table(fabric.merged([job_report(200, 80, wrong=3)], []), "4 hosts").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[:2] == ["auto", "80.000"]
    assert lines[-1].endswith("2.50 3 WRONG")


def test_the_verdict_is_by_the_worst_size() -> None:
    def met(auto_ms: float, mpi_ms: float) -> list[bool]:
        merged = fabric.merged([job_report(mpi_ms, auto_ms)], [])
        results = {"fabric": [{"fabrics": [{"hosts": 4, "ranks_per_node": 2, "rate": "1gbit", **merged}]}]}
        return [each.met for each in verdicts.verdicts(results) if each.target == "S2"]

    bound_ms = 1.5 * 4 * MB / 100e6 * 1e3
    assert met(bound_ms / 0.951, 200) == [True, True]
    assert met(bound_ms / 0.949, 200) == [False, True]
    assert met(bound_ms / 0.951, bound_ms) == [True, False]


def test_candidates_are_validated_and_those_that_do_not_fit_are_left_out() -> None:
    def measured(world: Any) -> tuple[list[str], dict[str, Any], dict[str, float]]:
        names = fabric.usable(world, ["auto", "ring", "shared", "hierarchical"])
        row = fabric.measure(world, names, [], 4096, MeasuringSchedule(turns=2, repeats=1, warmup=1))
        return names, row, tune.link_rates(world, 1 << 16)

    answers = thread_comm.run(4, measured, ranks_per_node=2)
    names, row, rates = answers[0]
    assert names == ["auto", "ring", "hierarchical"]
    assert row["auto"] in set(ALGORITHMS["allreduce"]) - {"reference", "shared"}
    assert list(row["median_ms"]) == ["MPI", *names]
    assert all(ms > 0 for ms in row["median_ms"].values())
    assert set(row["wrong"].values()) == {0}
    assert row["mpi_ratio"]["MPI"] == 1
    assert min(rates.values()) > 0
    assert all(answer[2] == rates for answer in answers)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["--hosts", "1"], {"where": "--hosts", "expected": [2, 99], "got": "'1'"}),
        (["--hosts", "2,x"], {"where": "--hosts", "got": "2,x"}),
        (["--hosts", ""], {"where": "--hosts", "got": "''"}),
        (["--hosts", "2,"], {"where": "--hosts", "got": "'2,'"}),
        (["--hosts", "2,100"], {"where": "--hosts", "expected": [2, 99], "got": "2,100"}),
        (["--algorithms", "auto,rings"], {"remedy": ["'ring'", "hierarchical"]}),
        (["--ranks-per-node", "0"], {"remedy": "bench_fabric.py -h"}),
        (["--rounds", "no"], {"remedy": "bench_fabric.py -h"}),
        (["--rate", "fast"], {"where": "--rate", "expected": ["1gbit", "100mbit"], "got": "'fast'"}),
        (["--rate", "1..2gbit"], {"where": "--rate", "got": "1..2gbit"}),
        (["--rate", "0gbit"], {"where": "--rate", "got": "0gbit"}),
        (["--sizes", "4X"], {"operation": "size", "expected": "64K", "got": "4X"}),
        (["--sizes", "4,0"], {"operation": "size", "expected": 1, "got": 0}),
        (["--mpich", "/nowhere/python"], {"operation": "fabric --mpich", "got": "/nowhere/python"}),
        (["--json", "/nowhere/report.json"], {"operation": "fabric", "where": "/nowhere/report.json"}),
        (["--slow"], {"remedy": "bench_fabric.py -h"}),
    ],
)
def test_misuse_is_refused_before_a_cluster_is_made(
    given: list[str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fabric, "obstacle", lambda: pytest.fail("looked for hosts"))
    with raises(ConfigError, **fields) as raised:
        fabric.main(given)
    assert "\n" not in str(raised.value)


def test_what_auto_chose_is_told_by_size() -> None:
    rounds = job_report(200, 80)
    chosen = ["halving_doubling"] * 2 + ["bidirectional"] * 9 + ["ring"]
    rounds["rows"] = [rounds["rows"][0] | {"nbytes": 1024 << i, "auto": name} for i, name in enumerate(chosen)]
    found = fabric.merged([rounds], [])
    assert [row["auto"] for row in found["rows"]] == chosen
    lines = fabric.table(found, "4 hosts").splitlines()
    assert lines[2].startswith("# auto: halving_doubling at 1K, 2K; bidirectional at 4K, ")
    assert lines[3].endswith("ring at 2M")
    assert max(map(len, lines)) <= 80


def test_without_hosts_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fabric, "obstacle", lambda: "needs root")
    assert fabric.main(["--hosts", "2"]) == 2
    assert capsys.readouterr().err == "no hosts can be made here: needs root\n"
