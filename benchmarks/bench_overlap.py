"""Training steps with communication beside them, against the least time that their parts allow.

``hpcdp launch -n 2 -- python benchmarks/bench_overlap.py`` measures the ranks that a launcher started. Without one,
``python benchmarks/bench_overlap.py --hosts 1,2,4`` starts jobs of its own: on this machine, and on as many hosts with
slow links (`bench_harness.cluster`; needs root).

Models are bound by communication or by computation. In turn they are trained with gradients that are reduced
when backward is over (``overlap=False``) or beside it (``overlap=True``), and with every rank alone, all of them
computing at the same time but without a word to each other. A turn is some steps in a row, and each counts by the
slowest rank.

Beside the steps stands their critical path (`hpcdp.data_parallel.overlap`): forward, backward, when each bucket is
ready and when the next forward needs it are measured in the steps without communication, and the reduction of each
bucket by itself, nothing else going on. Where ranks have no core to spare, updates count as computation, too. A path
takes what is measured alone for granted: processor time that messages and sums take from computation is not on it.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.cluster import add_options, measure_models, measure_places, where
from hpcdp import autograd, comm, nn, optim
from hpcdp.comm import World
from hpcdp.core.checks import check_name
from hpcdp.core.environment import launched_ranks
from hpcdp.data_parallel import Reducer, Replicated, ShardedUpdate
from hpcdp.data_parallel.bucket_layout import MIB, Layout, Slot
from hpcdp.data_parallel.bucket_trainer import BucketTrainer
from hpcdp.data_parallel.overlap import BucketCost, CriticalPath, critical_path
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least

OFF, ON, ALONE = "after backward", "overlapped", "alone"
"""The candidates."""

_LR, _MOMENTUM = 0.01, 0.9
_BATCHES = 3


@dataclass(frozen=True)
class Model:
    """A network and the batches of samples of one shape, ``batch`` a rank, that it is fed."""

    title: str
    net: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int


MODELS = {
    "wide": Model(
        "wide MLP, 21.5 M parameters, batch 16", lambda: nn.models.mlp(256, 10, (2048,) * 6, seed=0), (256,), 16
    ),
    "deep": Model(
        "MLP, 4.2 M parameters, batch 512", lambda: nn.models.mlp(1024, 10, (1024,) * 4, seed=0), (1024,), 512
    ),
    "lenet": Model("LeNet, 0.13 M parameters, batch 256", lambda: nn.models.lenet(seed=0), (1, 28, 28), 256),
}
"""By name: the first is bound by communication over slow links, the others by computation."""


@dataclass
class Found:
    """The times of a candidate's turns on this rank, in seconds per step."""

    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    """Seconds of communication that nothing ran beside."""
    communication_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    """Seconds of processor time that threads other than the computing one took."""


class Training:
    """A network and its trainer, which take one step after another on batches that differ by rank and step."""

    def __init__(
        self,
        model: Model,
        world: comm.World,
        cap_mb: float | None,
        overlap: bool = False,
        compression: str | None = None,
    ) -> None:
        self.net = model.net()
        self.optimizer = optim.SGD(lr=_LR, momentum=_MOMENTUM)
        self.trainer = BucketTrainer(
            self.net.parameters(), self.optimizer, world=world,
            overlap=overlap, bucket_cap_mb=cap_mb, compression=compression,
        )  # fmt: skip
        rng = np.random.default_rng(world.rank)
        self._batches = [
            (rng.standard_normal((model.batch, *model.sample), np.float32), rng.integers(0, 10, model.batch))
            for _ in range(_BATCHES)
        ]
        self.steps = 0
        self.marks_ns = (0, 0, 0)
        """When the last step's forward and backward began, and when its backward ended."""

    def step(self) -> None:
        """Forward, backward and what follows."""
        x, y = self._batches[self.steps % _BATCHES]
        self.steps += 1
        begin = time.perf_counter_ns()
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(self.net(x), y)
        backward = time.perf_counter_ns()
        loss.backward()
        self.marks_ns = begin, backward, time.perf_counter_ns()
        self.update(len(y))

    def update(self, count: int) -> None:
        """By the gradients of all ranks."""
        self.trainer.step(count)

    def turn(self, steps: int, found: Found) -> None:
        """So many steps in a row, after one that is not counted: each hands something on to the next."""
        self.step()
        before = self._clocks()
        for _ in range(steps):
            self.step()
        for series, begin, end in zip(vars(found).values(), before, self._clocks(), strict=True):
            series.append((end - begin) / steps)
        self.trainer.reducer.settle()

    def _clocks(self) -> tuple[float, ...]:
        """Return the clocks in the order of `Found`."""
        stats = self.trainer.stats
        return time.perf_counter(), stats.exposed_s, stats.total_s, time.process_time() - time.thread_time()

    def checksum(self) -> int:
        """Return a checksum of the bits of all parameters."""
        total = 0
        for param in self.net.parameters():
            total = zlib.crc32(np.ascontiguousarray(param.data).tobytes(), total)
        return total


class Alone(Training):
    """The same without a word to other ranks, each of which updates its own part of the parameters.

    Ranks of a node share them, and so they stay as they are: every gradient counts 0 times. Notes when buckets are
    ready and needed.
    """

    def __init__(self, model: Model, world: comm.World, cap_mb: float | None) -> None:
        super().__init__(model, world, cap_mb)
        reducer = self.trainer.reducer
        self._ready_ns = [0] * len(reducer.buckets)
        self._needed_ns = [0] * len(reducer.buckets)
        self.taken: list[list[float]] = []
        """For every step: forward, backward, then of each bucket when it is ready after backward began, when it is
        needed after forward began, and how long its update takes; seconds."""
        for slot in reducer.layout.slots:
            param = reducer.params[slot.name]
            param.grad_hook = partial(self._stamp_ready, param.grad_hook, slot.bucket)
            param.data_hook = partial(self._stamp_needed, slot.bucket)  # type: ignore[attr-defined]

    def turn(self, steps: int, found: Found) -> None:
        """Time ``steps`` steps, and drop the first, which is not counted."""
        super().turn(steps, found)
        del self.taken[-1 - steps]  # that of the step which is not counted

    def _stamp_ready(self, hook: Callable[[Any], None], bucket: int, param: Any) -> None:
        hook(param)
        self._ready_ns[bucket] = time.perf_counter_ns()

    def _stamp_needed(self, bucket: int, param: Any) -> None:
        self._needed_ns[bucket] = self._needed_ns[bucket] or time.perf_counter_ns()

    def update(self, count: int) -> None:
        """Update as usual, and record when each bucket was ready and needed."""
        reducer, owner = self.trainer.reducer, self.trainer.owner
        assert isinstance(owner, Replicated | ShardedUpdate)
        begin, backward, end = self.marks_ns
        ready = [(ns - backward) / 1e9 for ns in self._ready_ns]
        needed = [(ns - begin) / 1e9 for ns in self._needed_ns]
        taken = []
        for bucket, flat, state in zip(reducer.buckets, owner.flats, owner.states, strict=True):
            start = time.perf_counter()
            part = slice(*owner.span(bucket))
            self.optimizer.update(flat[part], bucket.mine[part], state, step=self.steps, scale=0.0)
            taken.append(time.perf_counter() - start)
        reducer.reset()
        self._needed_ns = [0] * len(reducer.buckets)
        self.taken.append([(backward - begin) / 1e9, (end - backward) / 1e9, *ready, *needed, *taken])


def measure(world: comm.World, model: Model, cap_mb: float | None, turns: int, steps: int) -> dict[str, Any]:
    """One model; every rank must call. What `row` makes of it, and what is known of the model.

    ``default`` is what a Trainer chooses by itself.
    """
    off, on = Training(model, world, cap_mb), Training(model, world, cap_mb, overlap=True)
    alone = Alone(model, world, cap_mb)
    candidates: dict[str, Training] = {OFF: off, ON: on, ALONE: alone}
    found = {name: Found() for name in candidates}
    for turn in range(turns):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            world.barrier()
            candidates[name].turn(steps, found[name])
    sums = world.comm.allgather_json([off.checksum(), on.checksum()])
    reductions_s = _reductions(off.trainer.reducer, world, steps)
    ranks = world.comm.allgather_json([{name: vars(each) for name, each in found.items()}, alone.taken])
    spare = all(world.comm.allgather_json(world.cores > world.local_size))
    layout = off.trainer.reducer.layout
    return {
        "model": model.title,
        "mib": sum(layout.counts) * layout.dtypes[0].itemsize / MIB,
        "default": OFF if off.trainer.reducer.on_one_node else ON,
        "same_bits": len({each for pair in sums for each in pair}) == 1,
        **row([each[0] for each in ranks], [each[1] for each in ranks], reductions_s, spare),
    }


def _reductions(reducer: Reducer, world: comm.World, repeats: int) -> list[float]:
    """Return the seconds of each bucket's separate reduction on the slowest rank."""
    found = []
    for bucket in reducer.buckets:
        single = _only(reducer, bucket.number, world)
        taken = []
        for _ in range(1 + repeats):
            world.barrier()
            begin = time.perf_counter()
            single.reduce_shards()
            taken.append(time.perf_counter() - begin)
        found.append(float(np.median(np.max(world.comm.allgather_json(taken[1:]), axis=0))))
    return found


def _only(reducer: Reducer, number: int, world: comm.World) -> Reducer:
    """One bucket of ``reducer`` again, with nothing beside it."""
    layout = reducer.layout
    slots = tuple(Slot(s.name, s.shape, 0, s.offset) for s in layout.slots if s.bucket == number)
    params = [nn.Parameter(np.zeros(slot.shape, layout.dtypes[number]), slot.name) for slot in slots]
    return Reducer(params, Layout(slots, (layout.counts[number],), (layout.dtypes[number],)), world, False)


def _path(
    steps: np.ndarray, reductions_s: Sequence[float], spare: bool
) -> tuple[CriticalPath, tuple[float, float, float, list[BucketCost]]]:
    """Return the critical path of the median of ``steps``, and its parts.

    ``steps`` has the shape ``(steps, figures of Alone.taken)``. The parts are forward, backward, the time between steps
    and the buckets.
    """
    forward_s, backward_s, *rest = np.median(steps, axis=0).tolist()
    buckets = [
        BucketCost(number, ready_s, reduction_s, needed_s, update_s)
        for number, (ready_s, needed_s, update_s, reduction_s) in enumerate(
            zip(*np.reshape(rest, (3, -1)).tolist(), reductions_s, strict=True)
        )
    ]
    between_s = 0.0 if spare else sum(each.update_s for each in buckets)
    return critical_path(forward_s, backward_s, buckets, between_s), (forward_s, backward_s, between_s, buckets)


def row(
    found: Sequence[dict[str, Any]],
    taken: Sequence[Sequence[Sequence[float]]],
    reductions_s: Sequence[float],
    spare: bool,
) -> dict[str, Any]:
    """Return the figures of one model.

    Args:
        found: the turns of the candidates by name for each rank, as in `Found`.
        taken: the steps of each rank alone, as in `Alone.taken`.
        reductions_s: the seconds of each bucket's separate reduction.
        spare: whether ranks have cores for more than computation.

    Returns:
        ``step_ms``, ``exposed_ms``, ``hidden`` (a share of communication) and ``beside_ms`` by candidate,
        ``compute_ms``, ``reductions_ms``, ``critical_path_ms`` and what is on it, each step's ``ratio`` to it,
        and of the ``buckets`` when they are ready, their reductions, and when they are needed, in ms.
    """
    figures: dict[str, Any] = {"step_ms": {}, "exposed_ms": {}, "hidden": {}, "beside_ms": {}}
    for name in found[0]:
        series = {key: np.max([rank[name][key] for rank in found], axis=0) for key in found[0][name]}
        step_s, exposed_s, total_s, beside_s = (float(np.median(each)) for each in series.values())
        figures["step_ms"][name] = 1e3 * step_s
        figures["beside_ms"][name] = 1e3 * beside_s
        if name != ALONE:
            figures["exposed_ms"][name] = 1e3 * exposed_s
            figures["hidden"][name] = 1 - exposed_s / total_s if total_s else 0.0
    steps = np.array(taken)  # ranks, steps, figures
    slowest = np.argmax(steps[:, :, 0] + steps[:, :, 1], axis=0)
    own = steps[slowest, np.arange(steps.shape[1])]
    in_turns = {name: np.max([rank[name]["step_s"] for rank in found], axis=0) for name in found[0]}
    paths = [_path(each, reductions_s, spare)[0] for each in np.array_split(own, len(in_turns[ALONE]))]
    path_s = np.array([path.seconds for path in paths])
    path, (forward_s, backward_s, between_s, buckets) = _path(own, reductions_s, spare)
    return figures | {
        "compute_ms": 1e3 * (forward_s + backward_s + between_s),
        "reductions_ms": 1e3 * sum(reductions_s),
        "critical_path_ms": 1e3 * path.seconds,
        "critical_path": str(path),
        "ratio": {name: float(np.median(each / path_s)) for name, each in in_turns.items()},
        "buckets": [[1e3 * each.ready_s, 1e3 * each.reduction_s, 1e3 * each.needed_s] for each in buckets],
    }


_JOB_TIMEOUT_S = 400


def table(place: dict[str, Any]) -> str:
    """One place's figures as text, at most 80 columns wide."""
    link = place.get("link_mb_s")
    lines = [f"# {where(place)}, {place['library']}"]
    if link:
        lines.append(f"# link: {link['one_way']:.1f} MB/s one way, {link['both_ways']:.1f} each way at once")
    for each in place["rows"]:
        lines.append(f"# {each['model']}, gradients of {each['mib']:.1f} MiB")
        lines.append(f"{'#':<16}{'step ms':>12}{'/ path':>9}{'exposed ms':>13}{'hidden':>9}{'other threads ms':>20}")
        for name, step_ms in each["step_ms"].items():
            line = f"{name:<16}{step_ms:>12.2f}{each['ratio'][name]:>9.2f}"
            if name in each["hidden"]:
                line += f"{each['exposed_ms'][name]:>13.2f}{100 * each['hidden'][name]:>8.0f}%"
                line += f"{each['beside_ms'][name]:>20.2f}"
            lines.append(line)
        lines.append(f"{'critical path':<16}{each['critical_path_ms']:>12.2f}           {each['critical_path']}"[:80])
        lines.append(
            f"# computation {each['compute_ms']:.2f} ms, reductions one by one {each['reductions_ms']:.2f} ms"
            + ("" if each["same_bits"] else "; WRONG: other bits")
        )
    return "\n".join(lines)


def job(args: argparse.Namespace) -> int:
    """Run the benchmark on the ranks of one job."""

    def row(world: World, name: str) -> dict[str, Any]:
        return measure(world, MODELS[name], args.bucket_cap_mb, args.turns, args.steps)

    place = measure_models("overlap", args, row, table)
    return 0 if all(each["same_bits"] for each in place["rows"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_overlap.py", description=__doc__)
    add_options(parser, "1,2,4")
    parser.add_argument("--models", default="wide,deep", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=at_least(1), default=5, help="of each candidate (5)")
    parser.add_argument("--steps", type=at_least(1), default=4, help="that are timed in a turn (4)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MB", help="as a Trainer takes it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    for name in args.models.split(","):
        check_name("model", name, list(MODELS))
    if args.bucket_cap_mb is not None and not args.bucket_cap_mb > 0:
        raise ConfigError("overlap", where="--bucket-cap-mb", expected="a positive size", got=args.bucket_cap_mb)
    if launched_ranks() is not None:
        return job(args)
    arguments = ["--models", args.models, "--turns", str(args.turns), "--steps", str(args.steps)]
    arguments += [] if args.bucket_cap_mb is None else ["--bucket-cap-mb", str(args.bucket_cap_mb)]
    places = measure_places("overlap", arguments, args, _JOB_TIMEOUT_S, table)
    if places is None:
        return 2
    return 0 if all(each["same_bits"] for place in places for each in place["rows"]) else 1


if __name__ == "__main__":
    programs.run(main)
