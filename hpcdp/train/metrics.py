"""Metrics of a run: timers, sums over batches and ranks, evaluation, peak memory, and the log in the run folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

import numpy as np

from ..autograd import Tensor, predict_mode
from ..collectives import allreduce
from ..comm import World, init
from ..comm.consistency import require_same
from ..comm.world import require_world
from ..core.arrays import Array, array_namespace, on_device_of, to_device_of, to_host, values_on_device_of
from ..core.checks import function, instance, whole_number
from ..core.files import replaced
from ..core.state import Part, Sharded
from ..data import Dataset
from ..data.datasets import piece_bounds, require_dataset
from ..data_parallel.base_trainer import BaseTrainer
from ..errors import ConfigError, UnsupportedError, to_stderr, type_named
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.module import shape_of

Record = dict[str, Any]
"""One line of ``metrics.jsonl``: ``kind`` is "step" or "epoch", the other fields are numbers, names and lists of names.
docs/training.md and docs/tracing.md list them."""

_TAGS = {
    "step": ("loss", "accuracy", "samples_per_s", "learning_rate", "comm_s", "comm_exposed_s"),
    "epoch": ("test_loss", "test_accuracy", "compute_s", "critical_path_s", "slowest_ratio"),
}


class Timer:
    """Wall time of several intervals in seconds, as ``Timer`` of "Dive into Deep Learning"; also a context manager.

    ``times`` has one number for each interval, by the host's clock. GPU work is asynchronous: wait for a result of the
    GPU (``float(loss)``) before `stop`. The records of `fit` use events of the GPU instead.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self._started = time.perf_counter()

    def start(self) -> None:
        """Start an interval."""
        self._started = time.perf_counter()

    def stop(self) -> float:
        """End the interval and return its seconds."""
        self.times.append(time.perf_counter() - self._started)
        return self.times[-1]

    @property
    def total(self) -> float:
        """Seconds of all intervals."""
        return sum(self.times)

    @property
    def mean(self) -> float:
        """Mean seconds per interval; 0 without intervals."""
        return self.total / len(self.times) if self.times else 0.0

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Accumulator:
    """``n`` running sums, as ``Accumulator`` of "Dive into Deep Learning".

    Args:
        n: the number of sums, at least 1.

    Raises:
        ConfigError: ``n`` is invalid.
    """

    def __init__(self, n: int) -> None:
        self._sums = [0.0] * whole_number("Accumulator", "n", n, 1)

    def add(self, *values: float) -> None:
        """Add one value to each sum.

        Raises:
            ConfigError: the number of values is not that of the sums.
        """
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
    """Print the seconds that the block took on ``stream`` (default: standard output), also when it raises."""
    timer = Timer()
    timer.start()
    try:
        yield timer
    finally:
        print(f"{what}: {timer.stop():.4f} s", file=stream or sys.stdout)


def peak_memory_mb() -> float:
    """Return the peak resident memory of this process in decimal MB (getrusage), including pages shared by ranks."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def number_correct(logits: Array, labels: Array) -> Array | float:
    """Return the number of correct predictions of a batch, on the device of the arrays, without waiting for a GPU.

    A sample with several labels counts as the fraction of its correct labels.

    Args:
        logits: shape ``(batch, ..., classes)``; the largest one is the prediction.
        labels: integers, shape ``(batch, ...)``. For other labels, as of a regression, the result is NaN.
    """
    if labels.dtype.kind not in "iub" or labels.shape != logits.shape[:-1]:
        return math.nan
    xp = array_namespace(logits, labels)
    with on_device_of(logits):
        return (xp.argmax(logits, axis=-1) == labels).sum() / max(1, math.prod(labels.shape[1:]))


class BatchSums:
    """Sums of losses, correct predictions and samples over batches, on the device of the network.

    On a GPU only reading `rows` waits for the device.

    Args:
        num: the number of rows, each of which has its own sums.
    """

    def __init__(self, num: int) -> None:
        self._rows: Array = np.zeros((num, 3))

    def add(self, row: int, losses: Array, logits: Array, labels: Array) -> None:
        """Add a batch to a row.

        Args:
            row: the number of the row.
            losses: shape ``(batch,)``.
            logits: as in `number_correct`.
            labels: as in `number_correct`; all three arrays are on one device.
        """
        array_namespace(losses, logits, labels)  # raises before a sum has changed
        self._rows = to_device_of(self._rows, losses)
        with on_device_of(losses):
            sums = self._rows[row]
            sums[0] += losses.sum()
            sums[1] += number_correct(logits, labels)
            sums[2] += len(labels)

    @property
    def rows(self) -> np.ndarray:
        """Loss, correct predictions and samples of each row, shape ``(num, 3)``, float64; waits for a GPU."""
        return to_host(self._rows)

    def set(self, rows: np.ndarray) -> None:
        """Replace the sums by ``rows``, shape ``(num, 3)``."""
        self._rows = np.array(rows, np.float64)


class MetricsLog:
    """A writer of records to ``metrics.jsonl`` and to a TensorBoard event file; for one rank.

    Each record is one line of JSON. It is passed to the operating system at once, so a killed run loses at most the
    last record. A write error does not end the run: it is reported once on standard error and kept in ``failure``, and
    the log stops.

    Args:
        folder: an existing folder.
        append: keep the existing records; see `go_on`.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, append: bool = False) -> None:
        # EventsWriter alone: SummaryWriter adds a thread and a queue in /dev/shm, and hides errors in both.
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
        """Drop the records after a checkpoint, because a resumed run repeats those steps.

        Args:
            epochs: complete epochs before the checkpoint.
            steps: steps before the checkpoint.

        Raises:
            OSError: the file cannot be rewritten; it is unchanged.
            ValueError: the file is damaged.
        """
        last = {"step": steps, "epoch": epochs}
        records = [record for record in read_metrics(self._path) if record[record["kind"]] <= last[record["kind"]]]
        replace_file(self._path, "".join(json.dumps(record) + "\n" for record in records))
        self._lines.close()
        self._lines = self._open("a")
        self._purge_events(steps + 1)

    def _purge_events(self, step: int) -> None:
        """Make TensorBoard ignore the events of earlier files from ``step`` on."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=time.time(), step=step, session_log=start))
        self._events.flush()

    def write(self, record: Record) -> None:
        """Append ``record``.

        Raises:
            TypeError: a value is not JSON serializable.
        """
        line = json.dumps(_finite(record)) + "\n"
        if self.failure is not None:
            return
        try:
            self._lines.write(line)
            self._write_events(record)
        except OSError as error:
            self.failure = error
            to_stderr(f"hpcdp: cannot write {self._lines.name}: {error.strerror}; training continues without its log")

    def close(self) -> None:
        """Close both files, ignoring errors."""
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
    """Keep tensorboardX from importing PyTorch, which takes 2 s and 250 MB and is needed only to write tensors."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _finite(record: Mapping[str, Any]) -> Record:
    """Replace NaN and infinities, which JSON lacks, by None."""
    return {
        key: None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
        for key, value in record.items()
    }


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; text is written in UTF-8. Raises OSError."""
    with replaced(path) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def read_metrics(path: str | Path) -> list[Record]:
    """Return the records of a ``metrics.jsonl``, without a last line that is incomplete because the run was killed.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line before the last is damaged.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records += [json.loads(line)] if line else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of the file is not JSON: {error}") from error
    if lines[-1]:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(lines[-1]))
    return records


class Meter:
    """The metrics of a run: this rank's sums since the last exchange, and the sums of all ranks over the epoch.

    They are part of the run's state, so a resumed run has the same metrics as an uninterrupted one.
    """

    def __init__(self, trainer: BaseTrainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self._step = self._own_steps = 0
        # One row for each virtual shard: the sum over ranks is then exact, and the sum over rows has a fixed order.
        self._own = BatchSums(trainer.virtual_shards or 1)
        self._before = np.zeros(3)
        """Seconds, total and in communication, from the last exchange to the interruption of a resumed run."""
        self.start_epoch()

    def start_epoch(self) -> None:
        """Start an epoch; the time since the last one is not counted."""
        self._epoch = np.zeros(6)
        self.go_on()

    def go_on(self) -> None:
        """Continue a restored epoch; the time until now is not counted."""
        self._comm = self._comm_seconds()
        self._started = time.perf_counter()

    @property
    def steps(self) -> int:
        """Steps since the start of the run; up to the last exchange if ranks do not step together."""
        return self._step + (self._own_steps if self._trainer.steps_together else 0)

    def add(self, shard: int, losses: Array, outputs: Array, labels: Array) -> None:
        """Add a batch of this rank, see `BatchSums.add`; ``shard`` is its virtual shard."""
        self._own.add(shard, losses, outputs, labels)

    def end_step(self) -> None:
        """Count a step of all ranks, or of this rank if ranks do not step together."""
        self._own_steps += 1

    def exchange(self, epoch: float) -> Record:
        """Sum the metrics since the last exchange over ranks, and return them as a record; every rank must call."""
        own = self._own.rows  # waits for a GPU, so it comes before the time is taken
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
        """Return the record of the epoch's exchanged sums."""
        return self._record("epoch", epoch, self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks, and the rows of this rank; see `hpcdp.core.state`."""
        world, shards, run = self._world, self._trainer.virtual_shards, self._trainer.own_virtual_shards
        own = self._own.rows[run.start : run.stop]
        if shards is None:
            sums = _rows(own, world.size, world.rank, shares=True)
        else:
            sums = _rows(own, shards, run.start, shares=False)
        spent = _rows(self._spent()[None], world.size, world.rank, shares=True)
        return {"step": self._step, "own_steps": self._own_steps, "epoch": self._epoch, "sums": sums, "spent": spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums."""
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
        """Return the seconds since the last exchange: total, in communication, and in exposed communication."""
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
            "samples": round(count),  # a run resumed on other ranks has fractional counts
            "seconds": seconds,
            "samples_per_s": count / seconds if seconds else 0.0,
            "comm_s": comm,
            "comm_exposed_s": exposed,
            "learning_rate": self._trainer.optimizer.learning_rate(max(1, self._trainer.step_count)),
        }


def _rows(own: np.ndarray, num: int, first: int, shares: bool) -> Sharded:
    """Return the rows from ``first`` on that this rank contributes to the ``num`` rows of all ranks."""
    part = Part(first * own.shape[1], np.array(own).reshape(-1))
    return Sharded((num, own.shape[1]), own.dtype, [part], shares=shares)


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`, the same on every rank."""

    accuracy: float
    """``correct / count``; NaN for a regression."""
    loss: float
    """The mean loss of a sample."""
    correct: float
    """The number of correct samples, see `metrics.number_correct`; NaN for a regression."""
    count: int
    """The number of samples."""

    @property
    def perplexity(self) -> float:
        """``exp(loss)``: the number of equally likely labels with the same uncertainty."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity if that exceeds a float, so that a diverged run can still end with a report."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluate(
    net: Module,
    dataset: Dataset,
    world: World | None = None,
    batch_size: int = 256,
    num_parts: int | None = None,
    own_data: bool = False,
    loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
) -> Evaluation:
    """Return the accuracy and the mean loss of a network; every rank must call.

    Each rank evaluates a contiguous part of the data set; the parts differ in size by at most one sample and may be
    empty. The sums over samples are then reduced over ranks ("Dive into Deep Learning", section 12.5, exercise 4). An
    empty data set gives 0 for all numbers. Batches are copied to the device of the parameters.

    Args:
        net: the network, called with one input.
        dataset: the whole data set, on every rank; see ``own_data``.
        world: the ranks; default `hpcdp.init()`.
        batch_size: samples per batch of a rank.
        num_parts: cut ``dataset`` into this many parts, and give each rank a contiguous range of them. With the
            ``virtual_shards`` of a reproducible `Trainer`, the result has the same bits on any number of ranks. None:
            one part per rank.
        own_data: each rank has its own samples, as from ``read_csv(num_parts=..., part_index=...)``, and evaluates all
            of them. Not with ``num_parts``.
        loss: a function of the network's output and labels, per sample, shape ``(batch,)``, as in `fit`. Softmax
            cross-entropy takes the first output. The accuracy is NaN unless labels are integers ``(batch, ...)``.

    Raises:
        ConfigError: an argument is invalid; ``own_data`` with ``num_parts``; the loss has another shape.
        UnsupportedError: softmax cross-entropy got labels that are not integers, or of another shape.
        MismatchError: the ranks' data sets differ in length or in their first sample, or ranks differ in
            ``own_data``; on every rank.
    """
    require_world("evaluate", world)
    world = init() if world is None else world
    instance("evaluate", "net", net, Module, "a network")
    require_dataset("evaluate", dataset)
    if own_data and num_parts is not None:
        raise ConfigError("evaluate", where="num_parts", expected="None with own_data", got=num_parts)
    data_description = ["data of each rank's own"] if own_data else _described(dataset)
    remedy = "pass the whole data set on all ranks, or own_data=True on all ranks"
    require_same(world.comm, "evaluate", data_description, remedy)
    whole_number("evaluate", "batch_size", batch_size, 1)
    num_parts = world.size if num_parts is None else whole_number("evaluate", "num_parts", num_parts, 1)
    own, ends = piece_bounds(num_parts, world.size), piece_bounds(len(dataset), num_parts)
    if own_data:
        ends = [0, *[0] * world.rank, *[len(dataset)] * (world.size - world.rank)]
    function("evaluate", "loss", loss, "a function of output and labels")
    target = place_of(net)
    counted = BatchSums(num_parts)
    with predict_mode():
        for part in range(own[world.rank], own[world.rank + 1]):
            for first in range(ends[part], ends[part + 1], batch_size):
                x, y = dataset[np.arange(first, min(first + batch_size, ends[part + 1]))]
                x, y = brought_to(x, target), brought_to(y, target)
                output = net(x)
                first_of = first_output("evaluate", output)
                losses = _losses(loss, first_of if loss is softmax_cross_entropy else output, y)
                counted.add(part, losses.data, first_of.data, y)
    sums = np.array(counted.rows)
    allreduce(sums, world=world)  # exact: only one rank has non-zero numbers in a row
    total, correct, count = (float(value) for value in sums.sum(axis=0))
    return Evaluation(correct / max(count, 1), total / max(count, 1), correct, int(count))


def _losses(loss: Callable[[Tensor, Any], Tensor], output: Any, y: Any) -> Tensor:
    try:
        losses = loss(output, y)
    except UnsupportedError as error:
        if loss is softmax_cross_entropy and error.remedy is None:
            error.remedy = "pass evaluate(loss=...) with the loss of fit"
        raise
    require_per_sample("evaluate", losses, len(y))
    return losses


def place_of(net: Module) -> Array | None:
    """Return the first parameter array, which shows the device; None if no parameter has values yet."""
    return next((param.data for param in net.parameters() if None not in shape_of(param)), None)


def brought_to(x: Any, target: Array | None) -> Any:
    """Copy ``x`` of a batch to the device of ``target``; return it unchanged if it is there, or is a tensor."""
    return x if target is None or isinstance(x, Tensor) else values_on_device_of(x, target)


def first_output(operation: str, output: Any) -> Tensor:
    """Return the output of a network, or the first of several outputs, from which the accuracy is computed."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        expected = "a network that returns a tensor, or a sequence that begins with one"
        raise ConfigError(operation, where="net", expected=expected, got=type_named(first))
    return first


def _described(dataset: Dataset) -> list[str]:
    """Describe a data set in words that are equal on ranks with the same data set."""
    lines = [f"a data set of {len(dataset)} samples"]
    if len(dataset):
        first = zlib.crc32(b"".join(to_host(array).tobytes() for array in dataset[np.zeros(1, np.int64)]))
        lines.append(f"a first sample with CRC-32 {first:08x}")
    return lines
