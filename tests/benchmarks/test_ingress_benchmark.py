"""Asynchronous stores over hosts: what is measured is right, a wrong sum is seen, and misuse is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raises import raises

import bench_ingress as ingress
from bench_harness import traffic
from bench_harness.cluster import obstacle
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.kvstore.serve import serve


def report(wrong: int = 0) -> dict[str, Any]:
    names = ("push, one way", "pull, one way", "push", "pull", traffic.BOTH_WAYS)
    link = {"keys": 16, "link_mb_s": {"one_way": 119.0, "both_ways": 118.0}, "wrong": wrong}
    link |= {"mb_s": dict.fromkeys(names, 110.0), "share": dict.fromkeys(names, 0.93)}
    rows = [
        {"servers": n, "received_mb": [101.25 / n] * n, "expected_mb": 100.7 / n, "round_ms": 900 / n, "wrong": 0}
        for n in (1, 2, 3)
    ]
    rows = [row | {"bound_ms": 850 / row["servers"]} for row in rows]
    facts = {"library": "A library", "rate": "1gbit", "workers": 3, "nbytes": 32 << 20, "keys": 4}
    return {**facts, "link": link, "rows": rows}


def test_the_link_of_two_ranks_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "KEY_NBYTES", 1 << 14)
    found = thread_comm.run(2, lambda world: traffic.link_turns(world, 3, 2, 2), 1)[0]
    assert found["wrong"] == 0
    assert found["mb_s"].keys() == found["share"].keys() and traffic.BOTH_WAYS in found["share"]
    assert min(found["share"].values()) > 0


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 1), (2, 3)])
def test_what_comes_in_is_asked_of_every_server(
    workers: int, servers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counter = tmp_path / "rx_bytes"
    counter.write_text("5000000\n")
    monkeypatch.setattr(traffic, "_RECEIVED", counter)
    monkeypatch.setattr("hpcdp.kvstore.server_keys.SPLIT_NBYTES", 1 << 10)

    def one(world: Any) -> dict[str, Any]:
        return traffic.ingress(world, servers, 1 << 14, 2, 3)

    found = thread_comm.run(workers, one, 1, servers, serve)
    assert [each["wrong"] for each in found] == [0] * workers
    assert found[0]["received_mb"] == [0.0] * servers
    assert found[0]["round_ms"] > 0


def test_the_updater_adds_floats_and_reads_the_counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counter = tmp_path / "rx_bytes"
    counter.write_text("123456789012\n")
    monkeypatch.setattr(traffic, "_RECEIVED", counter)
    values, count = np.ones(3, np.float32), np.zeros(1, np.int64)
    traffic.add(0, values, values)
    traffic.add(1, np.zeros(1, np.int64), count)
    assert values.tolist() == [2, 2, 2] and count.tolist() == [123456789012]


def test_the_table_is_narrow_and_shows_what_is_wrong() -> None:
    lines = ingress.table(report()).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["3", "33.8,", "33.8,", "33.8", "33.6", "300.0", "283.3"]
    assert ingress.table(report(wrong=7)).endswith("# 7 WRONG")


@pytest.mark.thorough
def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ingress.draw(report(), str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough  # tests/cluster has hosts
@pytest.mark.skipif(obstacle() is not None, reason=f"no hosts can be made here: {obstacle()}")
def test_on_hosts(tmp_path: Path) -> None:
    found = tmp_path / "report.json"
    options = ["--workers", "1", "--servers", "2", "--size", "8M", "--keys", "1", "--turns", "1", "--json", str(found)]
    command = [sys.executable, ingress.__file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(found.read_text())["rows"]
    assert row["expected_mb"] == pytest.approx(4.19, abs=0.01)
    assert all(row["expected_mb"] < each < 1.1 * row["expected_mb"] for each in row["received_mb"])


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["--servers", "0"], {"where": "--servers", "expected": 1, "got": "'0'"}),
        (["--servers", "1,x"], {"where": "--servers", "got": "1,x"}),
        (["--servers", "98"], {"where": "--servers", "expected": 99, "got": 98}),
        (["--size", "big"], {"operation": "size", "expected": "64K", "got": "big"}),
        (["--size", "0K"], {"operation": "size", "expected": 1, "got": "0K"}),
        (["--plot", "/nowhere/picture.png"], {"operation": "ingress", "where": "/nowhere/picture.png"}),
    ],
)
def test_misuse_is_refused_before_a_cluster_is_made(
    given: list[str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingress, "obstacle", lambda: pytest.fail("looked for hosts"))
    with raises(ConfigError, **fields):
        ingress.main(given)
