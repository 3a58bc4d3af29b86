"""The benchmark of checkpoints: what it measures comes back right, and what it prints fits."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from raises import raises

import bench_checkpoint as checkpoint
from bench_checkpoint import Disk, main, make_state, measure
from hpcdp.comm import World, thread_comm


def test_all_ranks_read_what_they_saved(tmp_path: Path) -> None:
    state = make_state(1 << 20)

    def run(world: World) -> dict[str, object]:
        return measure(world, Disk(world, tmp_path, state, None), turns=1, with_torch=False)

    for found in thread_comm.run(2, run):
        assert found["wrong"] == 0
        assert set(found["ratio"]["save"]) == {"raw", "hpcdp"}  # type: ignore[index]


def test_no_clock_runs_while_memory_is_made_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(checkpoint, "_touch_memory", lambda nbytes: waited.append(1e6))
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(waited)))

    def run(world: World) -> dict[str, Any]:
        return measure(world, Disk(world, tmp_path, make_state(1 << 20), None), turns=1, with_torch=False)

    (found,) = thread_comm.run(1, run)
    medians = [seconds for each in found["median_s"].values() for seconds in each.values()]
    assert waited and max(medians) < 1e6


def test_a_tensor_that_comes_back_changed_is_counted(tmp_path: Path) -> None:
    def run(world: World) -> tuple[int, int]:
        disk = Disk(world, tmp_path, make_state(1 << 20), None)
        disk.save()
        disk.restore()
        disk._into["layer3"]["momentum"][0, 0] += 1
        return disk.wrong(), disk.wrong()

    assert thread_comm.run(1, run) == [(1, 48)]


@pytest.mark.thorough
def test_the_program_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["-m", "4M", "-i", "1", "--folder", str(tmp_path), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines()), printed
    found = json.loads(report.read_text())
    assert found["wrong"] == 0 and found["ratio"]["load"]["raw"] == 1
    assert not list(tmp_path.glob("checkpoint-*")), "it leaves nothing behind"


def test_a_wrong_size_is_one_line() -> None:
    with raises(Exception, operation="size", expected=["K", "M", "G"]):
        main(["-m", "much"])
