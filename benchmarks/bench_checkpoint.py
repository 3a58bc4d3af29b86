"""Checkpoints against plain files and PyTorch's, turn by turn in one run.

``mpirun -n 2 python benchmarks/bench_checkpoint.py -m 512M``: all ranks save the same state, float32 tensors of a
network and its optimizer, and read it back. ``raw`` is what the disk allows: each rank writes as many bytes to a file
of its own and brings it to disk; it reads all of these files into the same arrays. ``torch.save`` is rank 0 alone with
all of it, and an fsync; ``torch DCP`` is ``torch.distributed.checkpoint`` over gloo. Loads are measured with files in
the page cache, and without. An asynchronous save stops training until `Manager.save` returns; beside it, one copy of
the state, and of the part of it that this rank writes, which is all that is copied.

Times are medians of the slowest rank, ratios are medians of those within turns.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import Gloo, gloo_or_reason
from hpcdp import checkpoint, comm
from hpcdp.bench.measure import check_writable, describe, format_size, median_ratio, parse_size
from hpcdp.comm.consistency import on_rank_0
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least

RAW, OURS, TORCH, DCP = "raw", "hpcdp", "torch.save", "torch DCP"
COPY, SHARE = "one copy of the state", "one copy of this rank's part"
STOP, WHOLE = "asynchronous, until it returns", "asynchronous, until it is on disk"
_LAYERS, _KEPT = 16, ("weight", "momentum", "velocity")
_UNIT_NBYTES = 4 << 20


def make_state(nbytes: int) -> dict[str, dict[str, np.ndarray]]:
    """Tensors of about so many bytes together, alike on all ranks, no two alike."""
    columns = 1024
    rows = max(1, nbytes // (len(_KEPT) * _LAYERS * columns * 4))
    generator = np.random.default_rng(1)
    return {
        f"layer{layer}": {name: generator.random((rows, columns), np.float32) for name in _KEPT}
        for layer in range(_LAYERS)
    }


class Disk:
    """The operations of all candidates in one empty folder. Every rank must create it.

    Args:
        world: the ranks.
        folder: an existing, empty folder.
        state: the state to save.
        gloo: the process group of PyTorch's candidates; None omits them.
    """

    def __init__(
        self, world: comm.World, folder: Path, state: dict[str, dict[str, np.ndarray]], gloo: Gloo | None
    ) -> None:
        self._world, self._folder, self._gloo = world, folder, gloo
        self._arrays = [array for layer in state.values() for array in layer.values()]
        self._state = state
        self._into = {layer: {name: np.zeros_like(x) for name, x in each.items()} for layer, each in state.items()}
        flat = np.concatenate([array.reshape(-1) for array in self._arrays]).view(np.uint8)
        ends = [flat.size * rank // world.size for rank in range(world.size + 1)]
        self._own = flat[ends[world.rank] : ends[world.rank + 1]].copy()
        self._pieces = [array[len(array) * world.rank // world.size : len(array) * (world.rank + 1) // world.size]
                        for array in self._arrays]  # fmt: skip
        self._copies = [np.zeros_like(piece) for piece in self._pieces]
        self._number = 0
        self.manager = checkpoint.Manager(folder / "ours", world)

    @property
    def nbytes(self) -> int:
        """The bytes of the state."""
        return sum(array.nbytes for array in self._arrays)

    def write_raw(self) -> None:
        """Write this rank's share of the bytes to a new file."""
        file = os.open(self._raw(self._world.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for first in range(0, self._own.size, _UNIT_NBYTES):
            os.write(file, self._own[first : first + _UNIT_NBYTES].data)
        os.fsync(file)
        os.close(file)

    def _raw(self, rank: int) -> Path:
        return self._folder / f"raw-{rank}"

    def save(self) -> None:
        """`Manager.save`, complete on disk."""
        self._number += 1
        self.manager.save(self._number, self._state)

    def save_behind(self) -> None:
        """`Manager.save`, until it returns."""
        self._number += 1
        self.manager.save(self._number, self._state, wait=False)

    def copy(self) -> None:
        """One copy of the state, tensor by tensor."""
        for array, into in zip(self._arrays, (x for each in self._into.values() for x in each.values()), strict=True):
            np.copyto(into, array)

    def copy_share(self) -> None:
        """One copy of this rank's share, tensor by tensor."""
        for copy, piece in zip(self._copies, self._pieces, strict=True):
            np.copyto(copy, piece)

    def torch_save(self) -> None:
        """Save the whole state on rank 0."""
        assert self._gloo is not None
        if self._world.rank == 0:
            with open(self._folder / "whole.pt", "wb") as file:
                self._gloo.torch.save(self._tensors(self._state), file)
                file.flush()
                os.fsync(file.fileno())

    def dcp_save(self) -> None:
        """``torch.distributed.checkpoint.save``, which every rank calls."""
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        dcp.save(self._tensors(self._state), checkpoint_id=str(self._folder / "dcp"))

    def dcp_load(self) -> None:
        """``torch.distributed.checkpoint.load`` into the arrays."""
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        dcp.load(self._tensors(self._into), checkpoint_id=str(self._folder / "dcp"))

    def torch_load(self) -> None:
        """Every rank the whole state."""
        assert self._gloo is not None
        self._gloo.torch.load(self._folder / "whole.pt", weights_only=True)

    def _tensors(self, state: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
        assert self._gloo is not None
        make = self._gloo.torch.from_numpy
        return {f"{layer}.{name}": make(x) for layer, each in state.items() for name, x in each.items()}

    def read_raw(self) -> None:
        """All ranks' files, into the arrays."""
        flats = iter(each.reshape(-1).view(np.uint8) for layer in self._into.values() for each in layer.values())
        flat = next(flats)
        for rank in range(self._world.size):
            file, at = os.open(self._raw(rank), os.O_RDONLY), 0
            while got := os.preadv(file, [flat[:_UNIT_NBYTES].data], at):
                at, flat = at + got, flat[got:]
                if not flat.size:
                    flat = next(flats, flat)
            os.close(file)

    def restore(self) -> None:
        """`Manager.restore` into the arrays."""
        self.manager.restore(into=self._into)

    def wrong(self) -> int:
        """Return the number of tensors that differ from the saved ones, and set them to zero."""
        count = 0
        for layer, each in self._state.items():
            for name, x in each.items():
                count += not np.array_equal(self._into[layer][name], x)
                self._into[layer][name][...] = 0
        return count

    def forget(self) -> None:
        """Take all files out of the page cache."""
        if self._world.rank == 0:
            for path in self._folder.rglob("*"):
                if path.is_file():
                    file = os.open(path, os.O_RDONLY)
                    os.fsync(file)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)
        self._world.barrier()

    def clear(self) -> None:
        """Remove what was written before; not timed."""
        if self._world.rank == 0:
            for folder in (self._folder / "dcp", *self._folder.glob("ours/step-*")):
                shutil.rmtree(folder, ignore_errors=True)
            for path in (*self._folder.glob("raw-*"), *self._folder.glob("whole.pt")):
                path.unlink()
        self._world.barrier()


def measure(world: comm.World, disk: Disk, turns: int, with_torch: bool) -> dict[str, Any]:
    """Time all candidates in turns; every rank must call.

    Returns ``median_s`` and ``ratio`` (RAW's time over each) of ``save``, ``load`` and ``load, not cached``, ``stop``,
    medians of what an asynchronous save takes, ``stop_ratio``, its time until it returns over that of either copy, and
    ``wrong``, the tensors that came back changed.
    """
    saves: dict[str, Callable[[], None]] = {RAW: disk.write_raw, OURS: disk.save}
    loads: dict[str, Callable[[], None]] = {RAW: disk.read_raw, OURS: disk.restore}
    if with_torch:
        saves |= {TORCH: disk.torch_save, DCP: disk.dcp_save}
        loads |= {TORCH: disk.torch_load, DCP: disk.dcp_load}
    taken: dict[str, dict[str, list[float]]] = {}
    wrong = 0

    def timed(what: str, name: str, call: Callable[[], None]) -> float:
        _touch_memory(disk.nbytes)
        world.barrier()
        begin = time.perf_counter()
        call()
        seconds = max(world.comm.allgather_json(time.perf_counter() - begin))
        taken.setdefault(what, {}).setdefault(name, []).append(seconds)
        return begin

    disk.save_behind()  # memory of copies is new now, and only now
    disk.manager.wait()
    for turn in range(turns + 1):
        if turn == 1:
            taken.clear()  # the first turn was the warm-up
        disk.clear()
        order = list(saves) if turn % 2 == 0 else list(saves)[::-1]
        for name in order:
            timed("save", name, saves[name])
        for name in order:
            disk.forget()
            for what in ("load, not cached", "load"):  # the second time its files are in the cache
                timed(what, name, loads[name])
                wrong += 0 if name == TORCH else disk.wrong()
        timed("stop", COPY, disk.copy)
        timed("stop", SHARE, disk.copy_share)
        begin = timed("stop", STOP, disk.save_behind)
        disk.manager.wait()
        taken["stop"].setdefault(WHOLE, []).append(max(world.comm.allgather_json(time.perf_counter() - begin)))
    compared = ("save", "load", "load, not cached")
    return {
        "median_s": {what: {name: float(np.median(s)) for name, s in each.items()} for what, each in taken.items()},
        "ratio": {what: {name: median_ratio(taken[what][RAW], s) for name, s in taken[what].items()}
                  for what in compared},
        "stop_ratio": {name: median_ratio(taken["stop"][STOP], taken["stop"][name]) for name in (COPY, SHARE)},
        "wrong": sum(world.comm.allgather_json(wrong)),
    }  # fmt: skip


def _touch_memory(nbytes: int) -> None:
    """Fill the page cache with memory of this machine.

    A page that a virtual machine has returned to its host costs ten times as much as a write into it.
    """
    memory = np.empty(nbytes, np.uint8)
    memory[:: resource.getpagesize()] = 1


def _table(found: dict[str, Any], nbytes: int) -> str:
    lines = [f"{'':<36}{'ms':>10}{'GB/s':>8}{'of raw':>9}"]
    for what in ("save", "load", "load, not cached"):
        for name, seconds in found["median_s"][what].items():
            rate, ratio = nbytes / seconds / 1e9, found["ratio"][what][name]
            lines.append(f"{what + ', ' + name:<36}{seconds * 1e3:>10.1f}{rate:>8.2f}{ratio:>9.2f}")
    for name, seconds in found["median_s"]["stop"].items():
        lines.append(f"{name:<36}{seconds * 1e3:>10.1f}")
    for name, ratio in found["stop_ratio"].items():
        lines.append(f"{'stopped, of ' + name:<36}{ratio:>10.2f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python benchmarks/bench_checkpoint.py", description=__doc__)
    parser.add_argument("-m", dest="size", default="512M", metavar="SIZE", help="of the state (512M)")
    parser.add_argument("-i", dest="turns", type=at_least(1), default=7, metavar="N", help="turns (7)")
    parser.add_argument("--folder", default=".", metavar="DIR", help="on the disk that is measured (.)")
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    return parser


def _folder_in(where: str) -> str:
    try:
        return tempfile.mkdtemp(prefix="checkpoint-", dir=where)
    except OSError as error:
        expected, got = "a folder that can be written", f"{where}: {error.strerror}"
        raise ConfigError("checkpoint", where="--folder", expected=expected, got=got) from error


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    args = _parser().parse_args(argv)
    nbytes = parse_size(args.size)
    check_writable("checkpoint --json", [args.json])
    world = comm.init()
    folder = Path(on_rank_0(world.comm, lambda: _folder_in(args.folder)))
    gloo, reason = gloo_or_reason(world)
    try:
        disk = Disk(world, folder, make_state(nbytes), gloo)
        found = measure(world, disk, args.turns, gloo is not None)
        disk.manager.close()
        if gloo is not None:
            gloo.close()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    report = {"benchmark": "checkpoint", "machine": describe(world), "library": world.library, "skipped": reason}
    if world.rank == 0:
        print(f"# {format_size(nbytes)} by {world.size} ranks, {args.turns} turns; {world.library}")
        print(_table(found, disk.nbytes))
        if reason:
            print(f"# skipped: {reason}")
    write_json(args.json, world, {**report, "nbytes": disk.nbytes, "ranks": world.size, **found})
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    programs.run(main)
