"""Metrics: meters, timers, event files and their lines.

Measuring a run: timers, sums, peak memory, and the log that a run leaves behind.

What ranks have computed and how long it took, summed over them now and then.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import numpy as np

from ..collectives import allreduce
from ..comm import World
from ..core.arrays import Array, array_namespace, on_device_of, to_host
from ..core.checks import whole_number
from ..core.devices import to_device_of
from ..core.files import replaced
from ..core.state import Part, Sharded
from ..data_parallel.trainer import BaseTrainer
from ..errors import ConfigError, to_stderr

Record = dict[str, Any]
"""One line of ``metrics.jsonl``: ``kind`` is "step" or "epoch", the rest are numbers, names and lists of names.
docs/training.md and docs/tracing.md list them."""

_TAGS = {
    "step": ("loss", "accuracy", "samples_per_s", "learning_rate", "comm_s", "comm_exposed_s"),
    "epoch": ("test_loss", "test_accuracy", "compute_s", "critical_path_s", "slowest_ratio"),
}


class Timer:
    """Seconds of wall time over several intervals, as the document's ``Timer``; also a context manager.

    ``times`` holds one number of seconds an interval. They are the host's, which gives a GPU its work and goes on: let
    it wait for what the GPU has made (``float(loss)``) before `stop`, or look at what `fit` records of steps, which are
    measured by the GPU's own events.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._started = time.perf_counter()

    def start(self) -> None:
        """Begin an interval."""
        self._started = time.perf_counter()

    def stop(self) -> float:
        """End the interval; returns its seconds."""
        self.times.append(time.perf_counter() - self._started)
        return self.times[-1]

    @property
    def total(self) -> float:
        """Seconds of all intervals."""
        return sum(self.times)

    @property
    def mean(self) -> float:
        """Mean seconds an interval; 0 where there was none."""
        return self.total / len(self.times) if self.times else 0.0

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Accumulator:
    """``n`` running sums, as the document's ``Accumulator``: ``add(1.5, 3)`` adds to each, ``sums[i]`` reads one.

    Raises:
        ConfigError: ``n`` is not at least 1.
    """

    def __init__(self, n: int) -> None:
        self._sums = [0.0] * whole_number("Accumulator", "n", n, 1)

    def add(self, *values: float) -> None:
        """Add one value to each sum; `ConfigError` where there are not as many values as sums."""
        if len(values) != len(self):
            raise ConfigError("Accumulator.add", expected=f"{len(self)} values, one for each sum", got=len(values))
        self._sums = [total + float(value) for total, value in zip(self._sums, values, strict=True)]

    def reset(self) -> None:
        """Set every sum to 0."""
        self._sums = [0.0] * len(self._sums)

    def __getitem__(self, index: int) -> float:
        return self._sums[index]

    def __len__(self) -> int:
        return len(self._sums)


@contextlib.contextmanager
def benchmark(what: str, stream: TextIO | None = None) -> Iterator[Timer]:
    """Print on ``stream`` (standard output) how many seconds the block took, also when it raises."""
    timer = Timer()
    timer.start()
    try:
        yield timer
    finally:
        print(f"{what}: {timer.stop():.4f} s", file=stream or sys.stdout)


def peak_memory_mb() -> float:
    """The largest resident memory of this process so far, in decimal MB (getrusage); pages shared by ranks included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def number_correct(logits: Array, labels: Array) -> Array | float:
    """How many of ``logits``, shape ``(batch, ..., classes)``, are largest at ``labels``, integers ``(batch, ...)``.

    A number where they are, so that nobody waits for a GPU. A sample with several labels counts with the share of them
    that are right. NaN where labels are other than that, e.g. what a regression is to reach.
    """
    if labels.dtype.kind not in "iub" or labels.shape != logits.shape[:-1]:
        return math.nan
    xp = array_namespace(logits, labels)
    with on_device_of(logits):
        return (xp.argmax(logits, axis=-1) == labels).sum() / max(1, math.prod(labels.shape[1:]))


class BatchSums:
    """Losses, right answers and samples of batches, added up where the network computes.

    On a GPU nobody waits for it until `rows` is asked for, so not in every step.

    Args:
        num: of the rows, which are summed each for itself.
    """

    def __init__(self, num: int) -> None:
        self._rows: Array = np.zeros((num, 3))

    def add(self, row: int, losses: Array, logits: Array, labels: Array) -> None:
        """Add a batch: ``losses`` of shape ``(batch,)``, and what `number_correct` takes; all on one device."""
        array_namespace(losses, logits, labels)  # before anything is added
        self._rows = to_device_of(self._rows, losses)
        with on_device_of(losses):
            place = self._rows[row]
            place[0] += losses.sum()
            place[1] += number_correct(logits, labels)
            place[2] += len(labels)

    @property
    def rows(self) -> np.ndarray:
        """Loss, right answers and samples of each row, shape ``(num, 3)``, float64; on a GPU it is waited for."""
        return to_host(self._rows)

    def set(self, rows: np.ndarray) -> None:
        """Go on from these sums, shape ``(num, 3)``."""
        self._rows = np.array(rows, np.float64)


class MetricsLog:
    """Writes records to ``metrics.jsonl`` and to a TensorBoard event file; for one rank.

    A record is one JSON object on a line of its own, handed to the operating system at once, so that a killed run
    leaves every record but at most the last. When the disk is full or gone, the log says so once on standard error,
    keeps the reason in ``failure`` and stops writing: training is worth more than its log.

    Args:
        folder: an existing folder. Raises OSError where it cannot be written.
        append: keep the records that are there; see `go_on`.
    """

    def __init__(self, folder: Path, append: bool = False) -> None:
        # The writer of events alone: SummaryWriter adds a thread and a queue in /dev/shm, and hides errors in both.
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter

        self.failure: OSError | None = None
        self._path = folder / "metrics.jsonl"
        self._lines = self._open("a" if append else "w")
        self._events = EventsWriter(os.path.join(folder, "events"))
        self._events.flush()

    def _open(self, mode: Literal["a", "w"]) -> TextIO:
        return open(self._path, mode, encoding="utf-8", buffering=1)

    def go_on(self, epochs: int, steps: int) -> None:
        """Drop the records of what comes after ``epochs`` whole epochs and ``steps`` steps: it is done again.

        Raises:
            OSError: the file cannot be written anew; it is as it was.
            ValueError: it is damaged.
        """
        done = {"step": ("step", steps), "epoch": ("epoch", epochs)}
        kept = [each for each in read_metrics(self._path) if each[done[each["kind"]][0]] <= done[each["kind"]][1]]
        text = "".join(json.dumps(each) + "\n" for each in kept)
        replace_file(self._path, text)
        self._lines.close()
        self._lines = self._open("a")
        self._purge_events(steps + 1)

    def _purge_events(self, step: int) -> None:
        """Tell TensorBoard that what earlier files have from ``step`` on does not count."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=time.time(), step=step, session_log=start))
        self._events.flush()

    def write(self, record: Record) -> None:
        """Append ``record``; a value that JSON does not know is an error of the caller (TypeError)."""
        line = json.dumps(_finite(record)) + "\n"
        if self.failure is not None:
            return
        try:
            self._lines.write(line)
            self._write_events(record)
        except OSError as error:
            self.failure = error
            to_stderr(
                f"hpcdp: cannot write {self._lines.name}: {error.strerror}; training goes on without its log",
            )

    def close(self) -> None:
        """Close both files; what could not be written before is not tried again."""
        for file in (self._lines, self._events):
            with contextlib.suppress(OSError):
                file.close()

    def _write_events(self, record: Record) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for name in _TAGS[record["kind"]]:
            if record.get(name) is not None:
                value = Summary.Value(tag=name, simple_value=record[name])
                event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=[value]))
                self._events.write_event(event)
        self._events.flush()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports PyTorch where that is installed, for 2 s and 250 MB, and needs it to write tensors only."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _finite(record: Mapping[str, Any]) -> Record:
    """``record`` with None for NaN and infinities, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
        for key, value in record.items()
    }


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file anew, whole or not at all; text in UTF-8. Raises OSError."""
    with replaced(path) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def read_metrics(path: str | Path) -> list[Record]:
    """The records of a ``metrics.jsonl``; a last line torn by a kill is left out. Raises OSError, or ValueError for a
    damaged line before the last."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records += [json.loads(line)] if line else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of the file is none of JSON: {error}") from error
    if lines[-1]:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(lines[-1]))
    return records


class Meter:
    """Sums of this rank since the last exchange, and of all ranks over the epoch.

    They are part of a run's state, so that the numbers of a resumed run are those of one that was not interrupted.
    """

    def __init__(self, trainer: BaseTrainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._step = self._own_steps = 0
        # A row for each virtual shard: sums over ranks are exact then, and those over rows have one order.
        self._own = BatchSums(trainer.virtual_shards or 1)
        self._before = np.zeros(3)
        """Seconds since the last exchange, and those of communication, that an interrupted run has spent."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin an epoch; the time since the last one is not counted."""
        self._epoch = np.zeros(6)
        self.go_on()

    def go_on(self) -> None:
        """Go on with an epoch that was restored; the time until now is not counted."""
        self._comm = self._comm_seconds()
        self._started = time.perf_counter()

    @property
    def steps(self) -> int:
        """Steps since the start of the run, where ranks make them together; else until they have last met."""
        return self._step + (self._own_steps if self._trainer.steps_together else 0)

    def add(self, shard: int, losses: Array, outputs: Array, labels: Array) -> None:
        """Add what this rank has computed of a step; a GPU is waited for when sums are exchanged."""
        self._own.add(shard, losses, outputs, labels)

    def end_step(self) -> None:
        """Count a step, of all ranks or of this one alone."""
        self._own_steps += 1

    def exchange(self, epoch: float) -> Record:
        """Sum over ranks what was added since the last exchange; every rank must call."""
        own = self._own.rows  # before the time is taken: it is there when a GPU has computed it
        sums = np.concatenate([own.reshape(-1), self._spent(), [self._own_steps]])
        self.go_on()
        allreduce(sums, world=self._world)
        counted, times = sums[: own.size].reshape(own.shape), sums[own.size : -1]
        self._step += round(sums[-1] / (self._world.size if self._trainer.steps_together else 1))
        sums = np.concatenate([counted.sum(axis=0), times / self._world.size])
        self._own.set(np.zeros_like(own))
        self._own_steps, self._before[:] = 0, 0
        self._epoch += sums
        return self._record("step", epoch, sums)

    def end_epoch(self, epoch: int) -> Record:
        """The record of the epoch's exchanged sums."""
        return self._record("epoch", epoch, self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Numbers that all ranks have, and the rows of this one; see `hpcdp.core.state`."""
        world, shards, run = self._world, self._trainer.virtual_shards, self._trainer.own_virtual_shards
        own = self._own.rows[run.start : run.stop]
        if shards is None:
            sums = _rows(own, world.size, world.rank, shares=True)
        else:
            sums = _rows(own, shards, run.start, shares=False)
        spent = _rows(self._spent()[None], world.size, world.rank, shares=True)
        return {"step": self._step, "own_steps": self._own_steps, "epoch": self._epoch, "sums": sums, "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these sums."""
        self._step, self._own_steps, self._epoch = state["step"], state["own_steps"], np.array(state["epoch"])
        first = self._trainer.own_virtual_shards.start
        own = np.zeros((self._trainer.virtual_shards or 1, 3))
        for part in state["sums"].parts:
            rows = part.values.reshape(-1, 3)
            own[first : first + len(rows)] = rows
        self._own.set(own)
        for part in state["spent"].parts:
            self._before[:] = part.values
        self.go_on()

    def _spent(self) -> np.ndarray:
        """Seconds since the last exchange, in all and in communication, all and exposed."""
        now = [time.perf_counter() - self._started]
        return self._before + np.concatenate([now, self._comm_seconds() - self._comm])

    def _comm_seconds(self) -> np.ndarray:
        stats = self._trainer.stats
        return np.array([stats.total_s, stats.exposed_s])

    def _record(self, kind: str, epoch: float, sums: np.ndarray) -> Record:
        loss, correct, count, seconds, comm, exposed = (float(value) for value in sums)
        return {
            "kind": kind,
            "step": self._step,
            "epoch": epoch,
            "loss": loss / max(count, 1),
            "accuracy": None if math.isnan(correct) else correct / max(count, 1),
            "samples": round(count),  # of a run that went on with other ranks, the sum of shares of what each had
            "seconds": seconds,
            "samples_per_s": count / seconds if seconds else 0.0,
            "comm_s": comm,
            "comm_exposed_s": exposed,
            "learning_rate": self._trainer.optimizer.learning_rate(max(1, self._trainer.step_count)),
        }


def _rows(own: np.ndarray, num: int, first: int, shares: bool) -> Sharded:
    """This rank's ``own`` rows, from number ``first`` on, of ``num`` over all ranks."""
    part = Part(first * own.shape[1], np.array(own).reshape(-1))
    return Sharded((num, own.shape[1]), own.dtype, [part], shares=shares)
