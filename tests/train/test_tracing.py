import json
import os
import re
import sys
import threading
import time
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

import hpcdp
from hpcdp import optim
from hpcdp.comm import thread_comm
from hpcdp.engine import Engine
from hpcdp.engine.engine import Slice, Trace
from hpcdp.errors import ConfigError
from hpcdp.train import chrome_trace
from hpcdp.train.chrome_trace import measure_offsets, traced, tracks


def read(path: Path) -> dict:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def by_track(trace: dict) -> dict:
    """The slices of every track, by (pid, tid), as (start, end, name, args) in integers of nanoseconds."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
            found[event["pid"], event["tid"]].append((start, start + duration, event["name"], event.get("args")))
    return found


def labels(trace: dict, what: str) -> dict:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == f"{what}_name"}


def assert_drawable(trace: dict) -> None:
    """Slices of one track are sorted, and lie beside or within each other."""
    for slices in by_track(trace).values():
        assert [start for start, *_ in slices] == sorted(start for start, *_ in slices)
        still_open: list[int] = []
        for start, end, *_ in slices:
            while still_open and still_open[-1] <= start:
                still_open.pop()
            assert not still_open or end <= still_open[-1]
            still_open.append(end)


class Parameter:
    """What a trainer asks of a parameter."""

    def __init__(self, data):
        self.name, self.data = "x", data
        self.grad, self.grad_req, self.grad_hook = None, "write", None


def test_a_traced_run_on_cpus_looks_for_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdp.comm.world.device_of", lambda place: pytest.fail("CUDA's driver is asked"))

    def job(world):
        with traced(tmp_path / "out.json", world) as recording:
            hpcdp.Trainer([Parameter(np.zeros(3, "f4"))], optim.SGD(lr=1), world=world)
            assert recording.trace.ranges is None

    thread_comm.run(2, job)


def test_spans_are_ranges_for_the_profiler_from_a_trainer_on_a_gpu_on(tmp_path, monkeypatch, gpus_on_host):
    cupy, told = sys.modules["cupy"], []
    nvtx = types.SimpleNamespace(RangePush=told.append, RangePop=lambda: told.append("end"))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", nvtx)

    def job(world):
        with traced(tmp_path / "out.json", world) as recording:
            with recording.trace.span("before"):
                pass
            hpcdp.Trainer([Parameter(cupy.zeros(3, "f4"))], optim.SGD(lr=1), world=world)
            with recording.trace.span("step"):
                pass

    thread_comm.run(1, job)
    assert told == ["step", "end"]


def test_all_ranks_and_lanes_are_in_one_file(tmp_path):
    path = tmp_path / "new" / "out.json"

    def job(world):
        with traced(path, world) as recording:
            assert world.kept[Trace] is recording.trace
            engine = world.keep(Engine, lambda: Engine(lanes=["communication"]))
            engine.observer = recording.trace.slice
            with recording.trace.span("step", number=world.rank), recording.trace.span("inner"):
                engine.push(lambda: None, lane="communication", name=f"bucket {world.rank}")
                engine.waitall()
            recording.trace.slice("odd", "zoo", 5, 5)
            recording.trace.count("loss", 0.25)
            recording.trace.count("loss", float("nan"))
        assert Trace not in world.kept
        assert engine.observer is None
        return recording.num_slices, recording.num_dropped, recording.failure

    assert thread_comm.run(3, job) == [(12, 0, None)] * 3
    trace = read(path)
    assert trace["otherData"]["ranks"] == 3
    assert_drawable(trace)
    names = labels(trace, "process")
    assert [names[rank, 0] for rank in range(3)] == [f"rank {rank} on {os.uname().nodename}" for rank in range(3)]
    lanes = labels(trace, "thread")
    assert [lanes[2, tid] for tid in range(3)] == ["main", "communication", "zoo"]
    slices = by_track(trace)
    for rank in range(3):
        (step, inner), (bucket,) = slices[rank, 0], slices[rank, 1]
        assert (step[2:], inner[2:]) == (("step", {"number": rank}), ("inner", None))
        assert step[0] <= inner[0] <= inner[1] <= step[1]
        assert bucket[2] == f"bucket {rank}"
    (instant, *_) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert instant["name"] == "odd"
    assert [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"] == [{"value": 0.25}] * 3
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]


SHIFTS_S = [0.0, 3600.0, -250.0, 0.001]


@pytest.mark.alone
def test_clocks_are_aligned(tmp_path):
    """All ranks note the same moments, on clocks that differ by an hour, and one of which runs fast."""
    path = tmp_path / "out.json"
    began = time.perf_counter_ns()

    def job(world):
        def clock() -> int:
            now = time.perf_counter_ns()
            fast = (now - began) // 100 if world.rank == 1 else 0
            return now + int(SHIFTS_S[world.rank] * 1e9) + fast

        trace = Trace(clock=clock)
        with traced(path, world, trace):
            for moment in range(5):
                time.sleep(0.02)
                world.barrier()
                with trace.span(f"moment {moment}"):
                    time.sleep(0.001)

    thread_comm.run(4, job)
    trace = read(path)
    starts = defaultdict(list)
    for slices in by_track(trace).values():
        for start, _, name, _ in slices:
            starts[name].append(start)
    assert len(starts) == 5
    # An unaligned fast clock would be 1 ms off after 0.1 s; threads take turns of 5 ms, so single moments may be late.
    assert np.median([np.ptp(each) for each in starts.values()]) < 2e6
    for rank, (before, _) in enumerate(trace["otherData"]["clocks"], 1):
        assert abs(before["ahead_ns"] - SHIFTS_S[rank] * 1e9) <= before["uncertainty_ns"] + 2e7


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_shared_clock_has_no_offset_beyond_its_uncertainty(n):
    measured = thread_comm.run(n, lambda world: measure_offsets(world.comm, time.perf_counter_ns))
    assert [len(each) for each in measured] == [n - 1] + [0] * (n - 1)
    assert all(abs(offset.ahead_ns) <= offset.uncertainty_ns for offset in measured[0])


@pytest.mark.mpi(min_size=2)
def test_clocks_of_one_machine_differ_by_less_than_a_millisecond(tmp_path_factory):
    world = hpcdp.init()
    offsets = measure_offsets(world.keep("messages of traces", world.comm.duplicate), time.perf_counter_ns)
    assert all(abs(each.ahead_ns) <= each.uncertainty_ns < 1e6 for each in offsets)
    path = world.comm.allgather_json(str(tmp_path_factory.mktemp("trace") / "out.json"))[0]
    with traced(path, world) as recording, recording.trace.span("here"):
        pass
    world.barrier()
    assert len(by_track(read(Path(path)))) == world.size


def test_pieces_are_joined_without_a_seam(tmp_path, monkeypatch):
    """Far more lines than fit in a piece, from ranks with different numbers of them, one with none."""
    monkeypatch.setattr(chrome_trace, "PIECE_NBYTES", 300)
    path = tmp_path / "out.json"
    counts = [40, 0, 77]

    def job(world):
        with traced(path, world) as recording:
            for number in range(counts[world.rank]):
                now = recording.trace.clock()
                recording.trace.slice(f'näm\\e "{number}"\n', "io", now, now + 1, rank=world.rank)

    thread_comm.run(3, job)
    slices = by_track(read(path))
    assert {pid: len(slices[pid, tid]) for pid, tid in slices} == {0: 40, 2: 77}
    assert [name for *_, name, _ in slices[2, 0]] == [f'näm\\e "{number}"\n' for number in range(77)]


def test_what_was_dropped_is_told(tmp_path):
    path = tmp_path / "out.json"

    def job(world):
        with traced(path, world, Trace(capacity=5)) as recording:
            for number in range(5 + world.rank):
                recording.trace.slice("x", "io", number, number + 1)
        return recording.num_slices, recording.num_dropped

    assert thread_comm.run(3, job) == [(15, 3)] * 3
    assert read(path)["otherData"]["dropped"] == [0, 1, 2]


def test_an_exception_leaves_the_earlier_trace_and_no_other_file(tmp_path):
    path = tmp_path / "out.json"
    (world,) = thread_comm.run(1, lambda world: world)
    with traced(path, world):
        pass
    before = path.read_bytes()
    with pytest.raises(KeyError), traced(path, world):
        raise KeyError
    assert Trace not in world.kept
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_relative_name_is_that_of_where_it_began(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "out.json").write_text("mine")
    monkeypatch.chdir(tmp_path)
    (world,) = thread_comm.run(1, lambda world: world)
    with traced("out.json", world) as recording:
        monkeypatch.chdir("elsewhere")
    assert recording.failure is None
    assert json.loads((tmp_path / "out.json").read_bytes())["traceEvents"]
    assert [each.read_text() for each in (tmp_path / "elsewhere").iterdir()] == ["mine"]


def test_an_interrupt_while_it_is_written_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chrome_trace, "_receive", interrupted)

    def job(world):
        with traced(tmp_path / "out.json", world):
            pass

    with pytest.raises(KeyboardInterrupt):
        thread_comm.run(2, job)
    assert list(tmp_path.iterdir()) == []


def refused(path, ranks: int = 2) -> str:
    def job(world):
        with pytest.raises(ConfigError) as caught, traced(path, world):
            pytest.fail("traced something")
        return str(caught.value)

    lines = thread_comm.run(ranks, job)
    assert len(set(lines)) == 1
    return lines[0]


def test_a_name_that_cannot_be_written_is_one_line_on_every_rank_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("file/out.json", f"got a file, no folder: {tmp_path / 'file'};"),
        ("folder", "got a folder"),
    ):
        line = refused(tmp_path / name)
        assert f"[{tmp_path / name}]" in line
        assert reason in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("content", ["import this\n", '{"traceEvents": 3}', " "])
def test_a_file_that_is_no_trace_of_ours_is_not_replaced(tmp_path, content):
    path = tmp_path / "train.py"
    path.write_text(content)
    assert "expected a new file, or a trace to replace" in refused(path)
    assert path.read_text() == content
    assert "expected a new file" in refused("/dev/null", ranks=1)


def test_a_file_that_the_run_itself_has_made_is_not_replaced(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    (world,) = thread_comm.run(1, lambda world: world)
    with traced(path, world) as recording:
        path.write_text("{}\n")
    assert isinstance(recording.failure, FileExistsError)
    assert capsys.readouterr().err == f"hpcdp: cannot write {path}: File exists\n"
    assert path.read_text() == "{}\n"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_gets_full_is_told_once_and_no_rank_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chrome_trace, "own_part_of", lambda path: path.with_name("full"))
    (tmp_path / "full").symlink_to("/dev/full")

    def job(world):
        recording = traced(tmp_path / "out.json", world)
        monkeypatch.setattr(chrome_trace, "check_path", lambda path: None)
        with recording:
            for number in range(5000):
                recording.trace.slice("x", "io", number, number + 1)
        return recording.failure

    failures = thread_comm.run(3, job)
    assert [failure is None for failure in failures] == [False, True, True]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"hpcdp: cannot write {tmp_path}/out.json: No space left on device"
    assert not (tmp_path / "out.json").exists()


def test_a_world_is_traced_once_at_a_time(tmp_path):
    (world,) = thread_comm.run(1, lambda world: world)
    with (
        traced(tmp_path / "a.json", world),
        raises(ConfigError, operation="traced", got="traced()"),
        traced(tmp_path / "b.json", world),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ({"path": None}, {"where": "path", "expected": ["str", "Path"], "got": None}),
        ({"path": 5}, {"where": "path", "expected": ["str", "Path"], "got": 5}),
        ({"trace": "main"}, {"where": "trace", "expected": ["Trace", None], "got": "main"}),
    ],
)
def test_what_it_is_given(wrong, fields, tmp_path):
    with raises(ConfigError, operation="traced", **fields):
        traced(**{"path": tmp_path / "a.json", "world": None} | wrong)


def test_values_that_json_lacks_become_strings(tmp_path):
    (world,) = thread_comm.run(1, lambda world: world)
    with hpcdp.train.traced(tmp_path / "out.json", world) as recording:
        recording.trace.slice("x", "main", 1, 2, loss=float("nan"), count=np.int64(5))
    ((_, _, _, args),) = by_track(read(tmp_path / "out.json"))[0, 0]
    assert args == {"loss": "nan", "count": "5"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["main", "io"]), st.integers(0, 30), st.integers(0, 8), st.booleans()), max_size=30
    )
)
def test_any_slices_become_tracks_that_can_be_drawn(found):
    slices = [
        Slice(str(number), lane, start, start + length, None, nests)
        for number, (lane, start, length, nests) in enumerate(found)
    ]
    rows = tracks(slices)
    assert sorted(each.name for _, row in rows for each in row) == sorted(each.name for each in slices)
    assert len({label for label, _ in rows}) == len(rows)
    for label, row in rows:
        assert {each.lane for each in row} == {label.partition(" ")[0]}
        assert [each.start_ns for each in row] == sorted(each.start_ns for each in row)
        long = [each for each in row if each.end_ns > each.start_ns]
        for number, outer in enumerate(long):
            for inner in long[number + 1 :]:
                within = inner.end_ns <= outer.end_ns and outer.nests and inner.nests
                assert inner.start_ns >= outer.end_ns or within


PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"
BEFORE = """
import numpy as np
import hpcdp
from hpcdp import autograd, nn, optim
net = nn.Dense(4, 3)
rng = np.random.default_rng(hpcdp.init().rank)
loader = [(rng.normal(size=(5, 4)).astype(np.float32), rng.integers(0, 3, size=5)) for _ in range(3)]
"""


def test_the_loop_of_the_guide_runs(tmp_path, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    own, loop = threading.local(), compile(BEFORE + block, "loop", "exec")

    def rank(world):
        own.world = world
        exec(loop, {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hpcdp, "init", lambda: own.world)
    thread_comm.run(2, rank)
    trace = read(tmp_path / "out.json")
    assert_drawable(trace)
    for rank in (0, 1):
        own = [(name, args) for *_, name, args in by_track(trace)[rank, 0]]
        assert [each for each in own if each[0] in ("forward", "backward", "step")] == [
            ("forward", None),
            ("backward", None),
            ("step", {"samples": 5}),
        ] * 3
    assert len([event for event in trace["traceEvents"] if event["ph"] == "C"]) == 6
