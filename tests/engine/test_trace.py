import sys
import threading
import types

import pytest
from raises import raises

from hpcdp.engine import Engine
from hpcdp.engine.engine import Trace, nvtx
from hpcdp.errors import ConfigError


def ticking(*times: int):
    return iter(times).__next__


def test_spans_become_slices_also_when_they_raise():
    trace = Trace(clock=ticking(10, 20, 30, 40))
    with pytest.raises(KeyError), trace.span("outer", step=3), trace.span("inner", lane="mine"):
        raise KeyError
    assert [each[:5] for each in trace.slices] == [
        ("inner", "mine", 20, 30, None),
        ("outer", "main", 10, 40, {"step": 3}),
    ]
    assert all(each.nests for each in trace.slices)


def test_an_engine_takes_it_as_observer():
    trace = Trace()
    with Engine(lanes=["io"]) as engine:
        engine.observer = trace.slice
        before = trace.clock()
        engine.push(lambda: None, name="read")
        engine.waitall()
    ((name, lane, start, end, args, nests),) = trace.slices
    assert (name, lane, args, nests) == ("read", "io", None, False)
    assert before <= start <= end <= trace.clock()


def test_beyond_its_capacity_it_only_counts_from_any_thread():
    trace = Trace(capacity=1000)

    def add():
        for number in range(600):
            trace.slice("x", "io", number, number + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trace.slices) + trace.dropped == 2400
    assert 1000 <= len(trace.slices) < 1004  # as many more as threads looked at the same moment
    trace.count("loss", 1.0)
    assert trace.counts == []


def test_what_comes_after_its_end_is_not_kept_and_not_missed():
    trace = Trace(clock=ticking(5))
    trace.count("loss", 0.5)
    trace.end()
    trace.slice("late", "io", 1, 2)
    assert (trace.slices, trace.counts, trace.dropped) == ([], [("loss", 5, 0.5)], 0)


@pytest.mark.parametrize("capacity", [0, "9", None, float("nan")])
def test_a_capacity_that_is_no_number_of_slices_is_refused(capacity):
    with raises(ConfigError, operation="Trace", where="capacity", expected=1):
        Trace(capacity=capacity)


def test_spans_are_ranges_for_the_profiler_of_a_device(monkeypatch):
    told = []
    module = types.ModuleType("cupy.cuda.nvtx")
    module.RangePush = lambda name: told.append(name)
    module.RangePop = lambda: told.append("end")
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", module)
    trace = Trace(ranges=nvtx())
    with trace.span("forward"), trace.span("layer"):
        pass
    assert told == ["forward", "layer", "end", "end"]


def test_without_the_module_there_are_no_ranges(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert nvtx() is None
