import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from raises import raises

from hpcdp.errors import ConfigError
from hpcdp.train.metrics import Accumulator, MetricsLog, Timer, benchmark, number_correct, read_metrics, replace_file


def record(step: int, kind: str = "step", **numbers: float) -> dict:
    return {"kind": kind, "step": step, "epoch": step / 10, "loss": 1 / step, "accuracy": 0.5, **numbers}


def test_timer_adds_up_its_intervals():
    timer = Timer()
    for seconds in (0.01, 0.03):
        with timer:
            time.sleep(seconds)
    assert [round(t, 2) >= s for t, s in zip(timer.times, (0.01, 0.03), strict=True)] == [True, True]
    assert timer.total == sum(timer.times)
    assert timer.mean == timer.total / 2


def test_timer_without_intervals_has_mean_0():
    assert Timer().mean == 0


def test_accumulator_sums_each_column():
    sums = Accumulator(2)
    values = np.random.default_rng(0).normal(size=(7, 2))
    for row in values:
        sums.add(*row)
    np.testing.assert_allclose([sums[0], sums[1]], values.sum(axis=0))
    sums.reset()
    assert (len(sums), sums[0], sums[1]) == (2, 0, 0)


def test_accumulator_refuses_another_number_of_values_and_no_sums():
    for values in ((1.0,), (1.0, 2.0, 3.0)):
        with raises(ConfigError, operation="Accumulator.add", expected=2, got=len(values)):
            Accumulator(2).add(*values)
    for n in (0, -1, 1.5):
        with raises(ConfigError, operation="Accumulator", where="n", expected=1):
            Accumulator(n)


def test_benchmark_prints_the_seconds_also_when_the_block_raises():
    stream = io.StringIO()
    with pytest.raises(KeyError), benchmark("sleep", stream):
        time.sleep(0.02)
        raise KeyError
    match = re.fullmatch(r"sleep: (\d\.\d{4}) s\n", stream.getvalue())
    assert match is not None
    assert 0.02 <= float(match[1]) < 2


PEAK = """
import os, resource, sys
import numpy as np
from hpcdp.train.metrics import peak_memory_mb

if os.fork():  # a process that is started has the peak of the one that has started it
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
before = peak_memory_mb()
block = np.ones(int((before + 50) * 1e6), np.uint8)
print(before, peak_memory_mb(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, block[-1])
"""


def test_peak_memory_counts_pages_that_were_touched():
    """In a process of its own, which must touch as much as its peak: that of one with other tests is a gigabyte."""
    done = subprocess.run([sys.executable, "-c", PEAK], stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    before, after, of_the_system, last = map(float, done.stdout.split())
    assert before < 300  # else all this would take seconds
    assert after >= before + 50
    assert last == 1
    assert after == pytest.approx(of_the_system, rel=0.05)


def test_number_correct_against_a_loop():
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(50, 4)), rng.integers(0, 4, size=50)
    expected = sum(max(range(4), key=lambda c: logits[i, c]) == labels[i] for i in range(50))
    assert number_correct(logits, labels) == expected


@pytest.mark.parametrize(
    "labels",
    [np.zeros((6, 1), "f4"), np.zeros((6, 4), "f4"), np.zeros(6, "f4"), np.zeros((6, 1), int), np.zeros((6, 6), int)],
)
def test_other_labels_have_no_number_of_right_answers(labels):
    assert math.isnan(number_correct(np.zeros((6, 4), "f4"), labels))


def test_numbers_of_which_a_record_has_none_are_none_in_tensorboard(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(record(1) | {"accuracy": None})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["accuracy"] is None
    assert [value.tag for event in events(tmp_path) for value in event.summary.value] == ["loss"]


def test_every_record_is_on_disk_when_write_returns(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 4):
        log.write(record(step))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    log.close()


def test_read_metrics_leaves_out_a_torn_last_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write(record(step))
    log.close()
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    path.write_text(whole.replace('"step": 2', '"step": '))
    with pytest.raises(ValueError, match="Expecting value"):
        read_metrics(path)


def test_numbers_that_json_lacks_become_null(tmp_path, caplog):
    log = MetricsLog(tmp_path)
    log.write(record(1, samples_per_s=math.inf) | {"loss": math.nan})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["samples_per_s"] is None
    numbers = {v.tag: v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert math.isnan(numbers["loss"])
    assert numbers["samples_per_s"] == math.inf
    assert not caplog.records  # the progress says it, with the step


def test_tensorboard_events_hold_the_same_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(record(10, learning_rate=0.25))
    log.write(record(20, "epoch", test_accuracy=0.75, test_loss=0.5))
    log.close()
    found = {(e.step, v.tag): v.simple_value for e in events(tmp_path) for v in e.summary.value}
    assert found == pytest.approx(
        {
            (10, "loss"): 0.1,
            (10, "accuracy"): 0.5,
            (10, "learning_rate"): 0.25,
            (20, "test_accuracy"): 0.75,
            (20, "test_loss"): 0.5,
        }
    )


def events(folder) -> list:
    """The records of the folder's event file: length (8 bytes), its CRC (4), data, its CRC (4)."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.out.tfevents.*")
    raw, found = path.read_bytes(), []
    while raw:
        length = int.from_bytes(raw[:8], "little")
        found.append(Event.FromString(raw[12 : 12 + length]))
        raw = raw[16 + length :]
    return found


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, capsys):
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write(record(step))
    log.close()
    assert log.failure is not None
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "metrics.jsonl: No space left on device" in errors[0]


def test_a_log_of_a_run_does_not_load_pytorch(tmp_path):
    """It would take two seconds of every start."""
    code = "import sys; from pathlib import Path; from hpcdp.train.metrics import MetricsLog; "
    code += "MetricsLog(Path(sys.argv[1])).close(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_a_file_that_cannot_be_replaced_stays_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    replace_file(path, "before")

    def full_disk(beside, content):
        with open(beside, "wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "after")
    assert path.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["report.html"]
