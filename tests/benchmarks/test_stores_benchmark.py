"""Training on stores with a slow rank: what is measured, and the table."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from raises import raises

import bench_stores as stores
from bench_harness import programs
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.train.config import TrainConfig


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["buckets", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("dist_sync", "dist_async"))]
)
def test_one_training(name: str) -> None:
    def each(world: Any) -> dict[str, Any]:
        config = TrainConfig(ranks=world.size, epochs=1, batch_size=128, **stores.STORES[name])
        return stores.measure(world, name, config, 0.02, 10)

    found, other = thread_comm.run(2, each, ranks_per_node=1)
    assert found == other
    assert len(found["seconds"]) == len(found["test_accuracy"]) == 1
    model_mb = 4 * 129_068 / 1e6
    if name == "dist_async":
        assert found["slow_share"] < 0.45
        assert found["staleness_max"] >= found["staleness_mean"] > 0
        assert found["sent_mb"] > model_mb
    else:
        assert found["slow_share"] == 0.5
        assert found["staleness_max"] == 0
        assert found["sent_mb"] == pytest.approx(model_mb * -(-1438 // 128))


def test_when_an_accuracy_was_reached() -> None:
    run = {"seconds": [1.0, 2.5, 4.0], "test_accuracy": [0.9, 0.97, 0.96]}
    assert stores.seconds_to(run, 0.97) == 2.5
    assert stores.seconds_to(run, 0.98) is None


def test_the_table_is_narrow_and_says_what_was_not_reached() -> None:
    run = {"seconds": [1.0, 1234.5], "test_accuracy": [0.9, 0.975], "staleness_mean": 12.345, "staleness_max": 12345}
    run |= {"slow_share": 0.25, "sent_mb": 1234.5}
    found: dict[str, list[dict[str, Any]]] = {"dist_async staleness=2": [run, run], "buckets": [run]}
    lines = stores.table(found, 0.97).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["dist_async", "staleness=2", "1234.5", "97.50", "25.0", "12.35", "12345", "1234.5"]
    assert stores.table(found, 0.99).splitlines()[1].split()[2] == "-"


def test_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks are threads."""
    mine = threading.local()
    monkeypatch.setattr(stores.comm, "init", lambda: mine.world)
    monkeypatch.setattr(stores, "launched_ranks", lambda: getattr(mine, "world", None) and mine.world.size)

    def launched(command: list[str], timeout_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
        parts = " ".join(command[1:]).split(f" -- {command[0]} ")
        assert parts[0] == "-m hpcdp.cli launch -n 2 -s 0"
        assert command[9:11] == [command[0], stores.__file__]

        def each(world: Any) -> int:
            mine.world = world
            return stores.main(command[11:])

        assert thread_comm.run(2, each, int(variables["HPCDP_RANKS_PER_NODE"])) == [0, 0]
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(programs, "run_job", launched)
    path = str(tmp_path / "found.json")
    options = ["--ranks", "2", "--epochs", "1", "--pace-ms", "5", "--slow", "10", "--json", path]
    assert stores.main([*options, "--stores", "dist_async 2bit"]) == 0
    found = json.loads(Path(path).read_text())
    assert found["benchmark"] == "stores" and list(found["runs"]) == ["dist_async 2bit"]
    assert capsys.readouterr().out.splitlines()[1].startswith("dist_async 2bit ")
    (run,) = found["runs"]["dist_async 2bit"]
    assert run["slow_share"] < 0.45
    assert run["staleness_max"] >= run["staleness_mean"] > 0
    assert run["sent_mb"] > 0


@pytest.mark.thorough
@pytest.mark.alone
def test_beside_a_slow_rank_servers_get_to_an_accuracy_sooner_than_rounds(tmp_path: Path) -> None:
    """Four workers, one of them three times as slow; steps sleep for so long that the machine does not decide."""
    path = str(tmp_path / "found.json")
    options = ["--ranks", "4", "--slow", "3", "--epochs", "9", "--pace-ms", "40", "--json", path]
    assert stores.main([*options, "--stores", "dist_sync", "dist_async -s 2"]) == 0
    runs = json.loads(Path(path).read_text())["runs"]
    in_rounds, at_servers = (stores.seconds_to(*of_seeds, 0.97) for of_seeds in runs.values())
    assert in_rounds is not None and at_servers is not None
    assert at_servers < in_rounds


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["--stores", "dist_snyc"], {"operation": "unknown store 'dist_snyc'", "remedy": "'dist_sync'"}),
        (["--slow", "-1"], {"where": "--slow", "expected": 0}),
    ],
)
def test_what_is_refused(given: list[str], fields: dict[str, object]) -> None:
    with raises(ConfigError, **fields):
        stores.main(given)
