"""The checkpoint manager.

The checkpoints of a run: saved, kept as long as asked, restored.

What programs may give a `Manager`, checked before ranks do anything together.
"""

from __future__ import annotations

import atexit
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..comm import World, init
from ..comm.consistency import Outcome, on_every_rank, on_rank_0, require_same, told_to_all
from ..comm.world import WeakMethods, require_world
from ..core.checks import boolean, instance, instances, not_copied, one_of, whole_number, whole_numbers
from ..engine import Engine
from ..errors import ConfigError, DataError, HpcdpError, warn
from . import directory, flatten, load, manifest
from .directory import WriterLock
from .flatten import is_utf8
from .hdf5_file import COMPRESSIONS, described, failing, own_pieces
from .load import Restored
from .save import WRITERS, Group, Saving, StagedSave, by_rank, check_shards


def absolute(path: str | os.PathLike[str]) -> Path:
    """A folder by a name that stays the same where the program goes on in another one.

    Raises:
        ConfigError: it is no path.
        DataError: the folder that the program is in is gone.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigError("Manager", where="path", expected="a folder, as a str or a Path", got=repr(path))
    with failing("Manager", lambda: path):
        return Path(os.path.abspath(text))


def check_retention(keep: object, keep_every: object, best: object) -> None:
    """Raise `ConfigError` unless they say which checkpoints stay, see `Manager`."""
    whole_numbers("Manager", 1, keep=1 if keep is None else keep, keep_every=1 if keep_every is None else keep_every)
    if best is not None:
        directory.metric_name("Manager", best, "'metric', '-metric', or None")
    if keep is None and (keep_every is not None or best is not None):
        raise ConfigError("Manager", where="keep", expected="a number with keep_every or best", got=None)


def check_ways_to_write(compression: object, atomic_rename: object) -> None:
    """Raise `ConfigError` unless files can be written so, see `Manager`."""
    if compression is not None:
        one_of("Manager", "compression", compression, COMPRESSIONS)
    boolean("Manager", "atomic_rename", atomic_rename)


def step_number(operation: str, step: object) -> int:
    """A step, as a plain integer.

    Raises:
        ConfigError: it is none.
    """
    return whole_number(operation, "step", step, 0, 10**18 - 1, expected="an integer from 0 to 10**18 - 1")


def metric_to_restore(best: object, own: str | None, step: object) -> str | None:
    """Return by which metric `Manager.restore` chooses, None where it does not.

    Args:
        best: what it was given.
        own: the manager's ``best``.
        step: what it was given.

    Raises:
        ConfigError: ``best`` is none, or asks for the manager's own, which has none; a step is given, too.
    """
    if best is False or best is None:
        return None
    if step is not None:
        raise ConfigError("restore", where="best", expected="none with a step", got=repr(best))
    if best is True and own is None:
        raise ConfigError("restore", where="best", expected="a Manager made with best=...", got="True",
                          remedy="name the metric: best='test_accuracy', best='-test_loss'")  # fmt: skip
    return directory.metric_name("restore", own if best is True else best, "True, 'metric' or '-metric'")


def numbers(metrics: object, best: str | None) -> dict[str, float]:
    """Metrics as plain numbers, by name; none of None.

    Args:
        best: see `Manager`.

    Raises:
        ConfigError: they are none, or that of ``best`` is not among them.
    """
    if metrics is None:
        return {}
    expected = "a dict of numbers by name"
    metrics = instance("save", "metrics", metrics, Mapping, expected)
    instances("save", "metrics", metrics, str, expected)
    odd = next((name for name in metrics if not is_utf8(name)), None)
    if odd is not None:
        raise ConfigError("save", where="metrics", expected="names that are Unicode", got=ascii(odd))
    found = {name: _number(name, value) for name, value in metrics.items()}
    decides = None if best is None else best.removeprefix("-")
    if decides is not None and decides not in found:
        raise ConfigError("save", where="metrics", expected=f"{decides!r}, which decides what is best", got=found)
    return found


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except Exception:  # of a library's number it may be anything
        pass
    text = type(value).__name__ if isinstance(value, int) else repr(value)  # too long to be shown
    raise ConfigError("save", where=f"metric {name}", expected="a number that a float can be", got=text)


def settings(config: object) -> dict[str, Any]:
    """A copy of a configuration that JSON can carry, as it comes back: a save behind may take a while.

    Raises:
        ConfigError: it cannot.
    """
    try:
        manifest.check_config(config)
        copied: dict[str, Any] = json.loads(json.dumps(dict(config)))  # type: ignore[call-overload]
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a dict of what JSON can carry, with keys that are str"
        raise ConfigError("save", where="config", expected=expected, got=error) from error
    return copied


def told_alike(metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[str]:
    """What of a save's arguments must be the same on all ranks, a line each, whatever their order."""
    values = [f"metric {name} = {value!r}" for name, value in metrics.items()]
    entries = [f"config {name} = {json.dumps(value, sort_keys=True)}" for name, value in config.items()]
    return sorted(values) + sorted(entries)


_SAVES, _REMOVALS = "save", "remove"
_PATIENCE_S = 8.0
"""After an exception: so long what is under way may take to end."""
_ALIKE = "what each rank has for itself goes into a PerRank"


class Manager:
    """Saves the state of a run in a folder, and restores it; every rank must make it, and call what it says.

    What is saved is on disk, or is not there: files are written to a folder of another name, brought to disk, and the
    folder gets its name when all ranks have done so. At most one job at a time saves in a folder. As a context it ends
    with `close`.

    Args:
        path: the folder; is made by the first `save`, with the folders above it. A relative one is taken from where
            the program is now, which must be the same folder on all ranks.
        world: the ranks; default `hpcdp.init()`.
        keep: so many of the newest checkpoints stay, at least one; None: all.
        keep_every: those stay, too, whose step this divides.
        best: ``"metric"`` or ``"-metric"``: that one stays, too, whose `save` was given the greatest (smallest) value
            of it; one that was given no metrics, or a value that is not finite, is never the best.
        shards: ``"rank"``: every rank writes a file; ``"node"``: the ranks of a node write to one; ``"all"``: all ranks
            write to one, through parallel HDF5, where h5py was built with it.
        compression: ``"gzip"`` or ``"lzf"``, by HDF5 in chunks with checksums: a fraction of the speed. None: not.
        atomic_rename: whether renaming a folder is one step of the file system. Without, a file ``committed`` in it
            makes it complete.

    Raises:
        ConfigError: a value outside of that.
        MismatchError: the ranks' folders or settings differ; on every rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World | None = None,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        shards: str = "rank",
        compression: str | None = None,
        atomic_rename: bool = True,
    ) -> None:
        require_world("Manager", world)
        self.world = init() if world is None else world

        def checked() -> Path:
            check_retention(keep, keep_every, best)
            check_ways_to_write(compression, atomic_rename)
            return absolute(path)

        self.path = on_every_rank(self.world.comm, checked)
        self.keep, self.keep_every, self.best = keep, keep_every, best
        self._atomic_rename = atomic_rename
        settings = [
            os.fspath(self.path),
            f"{keep=} {keep_every=} {best=}",
            f"{shards=} {compression=} {atomic_rename=}",
        ]
        require_same(self.world.comm, "Manager", settings, "make it alike on all ranks")
        self._group = Group.of(self.world)
        check_shards(shards, compression, self._group)
        self._write = partial(by_rank, compression=compression) if shards == "rank" else WRITERS[shards]
        self._lock: WriterLock | None = None
        self._engine = Engine(lanes=(_SAVES, _REMOVALS))
        self._saving: Saving | None = None
        self._is_registered = self._is_claimed = self._is_closed = self._is_left = False
        self._staging = StagedSave()
        self.world.endings.add(self._let_end)

    __reduce__ = not_copied("Manager", "the manager", "make another one by checkpoint.Manager(manager.path)")

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if error is None:
            self.close()
        else:  # others may be elsewhere: no collective, and no waiting for ever
            self._is_left = True
            if self._saving is not None:
                self._saving.wait(_PATIENCE_S)
            self._release(_PATIENCE_S)

    def close(self) -> None:
        """Wait for the save under way, and let other jobs write; every rank must call. Raises what `wait` does.

        The manager neither saves nor restores after that.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._release()

    def _require_open(self, operation: str) -> None:
        if self._is_closed:
            raise ConfigError(operation, where=self.path, expected="an open Manager", got="one after close()",
                              remedy="make another one")  # fmt: skip

    def _release(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._engine.waitall()
        is_over, self._saving = self._engine.shutdown(timeout_s), None
        if self._lock is not None and is_over:  # else another job would clean the folder where this one still writes
            self._lock.release()
            self._lock = None

    def _let_end(self) -> None:
        """When the program ends, what is under way ends first; after an exception nobody waits any more."""
        if self._is_left:
            return
        try:
            self.wait()
        except HpcdpError as error:
            if self.world.rank == 0:
                warn(str(error))
        self._release()

    @property
    def pending(self) -> bool:
        """Whether a save is under way that `wait` or `poll` has not yet found to be over; alike on all ranks."""
        return self._saving is not None

    @property
    def over(self) -> bool:
        """Whether nothing is under way on this rank any more; on others it may last a little longer."""
        return self._saving is None or self._saving.is_over

    def poll(self) -> bool:
        """Whether the save under way is over on all ranks, and if so, what `wait` does; every rank must call.

        Raises:
            HpcdpError: as `wait`.
        """
        if self._saving is None:
            return True
        if self._saving.is_over and not isinstance(self._saving.error, HpcdpError | None):
            self.wait()  # of this rank alone, and so the end of the job
        over = np.array([self._saving.is_over], np.int32)
        self.world.comm.native_allreduce(over, "min")
        if over[0]:
            self.wait()
        return bool(over[0])

    def wait(self) -> None:
        """Until the save under way is complete on disk; every rank must call.

        Raises:
            DataError: what kept it from that, on every rank; the state and older checkpoints are as they were.
        """
        if self._saving is None:
            return
        self._saving.wait()
        saving, self._saving = self._saving, None  # not before: Ctrl-C ends the waiting, not the save
        if saving.error is not None:
            raise saving.error

    def claim(self) -> None:
        """Keep other jobs from saving here until `close`; every rank must call. The first `save` does it by itself.

        Makes the folder, and removes what saves that did not end have left behind.

        Raises:
            DataError: another job saves here, which is named, or the folder cannot be written; on every rank.
        """
        self._require_open("claim")
        on_rank_0(self.world.comm, self._claim)
        self._is_claimed = True

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        """Save ``state`` as that of a step; every rank must call. Waits for the save before.

        Args:
            step: its number, at least 0; a checkpoint of the same number is replaced.
            state: dicts (of str or int), lists, tuples, arrays, numbers, texts, None, `Sharded`, `PerRank`, and objects
                with ``state_dict()`` and ``load_state_dict()``: networks, trainers, stores, loaders, random generators,
                what torch has. What is no `Sharded` and no `PerRank` must be alike on all ranks; running statistics of
                networks are saved averaged, too.
            metrics: numbers that say how good it is, that of ``best`` among them; alike on all ranks. NaN and
                infinities are left out. None: of a step that was not measured.
            config: what JSON can carry, for `restore` to give back; alike on all ranks.
            wait: return when it is complete on disk. False: when it is copied; the rest is written behind, by a thread,
                and errors come from the next `wait`, `poll` or `save`.

        Raises:
            MismatchError: the ranks' states or arguments differ; on every rank, names ranks and the first difference.
            ConfigError: a step, metrics or a config that are none; the manager is closed.
            UnsupportedError: something that cannot be saved, or whose ``state_dict()`` has raised something else.
            DataError: a file that cannot be written, another job that saves here; on every rank. Nothing is changed.
        """
        self._require_open("save")
        self.wait()
        comm = self.world.comm
        header = self._agreed_header(step, state, metrics, config, wait)
        flat = flatten.flatten(state, self.world)
        items = [] if flat.error else [*flatten.alike(flat.form), *described(flat.held, self.world.size)]
        told_to_all(comm, Outcome(error=flat.error), "save", [(items, _ALIKE)])
        if not self._is_claimed:
            self.claim()
        path = directory.partial_path(self.path, header["step"])
        prepared = Outcome.of(lambda: self._prepare(path)) if self.world.rank == 0 else Outcome[None]()
        behind = not wait and self.world.concurrent
        own = list(own_pieces(flat.held))
        pieces = Outcome.of(lambda: self._staging.copied(own)) if behind else Outcome(own)
        commit = partial(self._commit, header["step"])
        saving = Saving(self._group, path, flat, prepared, pieces, header, self._write, commit)
        self._saving = saving
        if behind:
            self._end_before_h5py()

            def run() -> None:
                self.world.use_gpu_of_messages()
                saving.run()

            self._engine.push(run, lane=_SAVES, name="save")
        else:
            saving.run()
        if wait:
            self.wait()

    def _end_before_h5py(self) -> None:
        """What h5py does when the program ends makes writing impossible; what is registered later is called before."""
        if not self._is_registered:
            import h5py  # type: ignore[import-untyped]  # noqa: F401

            if not _let_end:
                atexit.register(_let_all_end)
            _let_end.add(self._let_end)
            self._is_registered = True

    def _agreed_header(
        self, step: int, state: Any, metrics: Mapping[str, float] | None, config: Mapping[str, Any] | None, wait: bool
    ) -> dict[str, Any]:
        """Members of the manifest; on all ranks, which have called alike with states of which they may now ask."""
        header: dict[str, Any] = {"commit_file": not self._atomic_rename}

        def checked() -> list[tuple[list[str], str]]:
            header["step"] = step_number("save", step)
            header["metrics"] = numbers(metrics, self.best)
            header["config"] = settings({} if config is None else config)
            told = told_alike(header["metrics"], header["config"])
            called = [f"step {header['step']}", f"wait={wait}", *told]
            return [(called, "call save alike on all ranks"), (flatten.outline("save", state), _ALIKE)]

        outcome = Outcome.of(checked)
        told_to_all(self.world.comm, outcome, "save", outcome.value or ())
        header["metrics"] = {name: value for name, value in header["metrics"].items() if math.isfinite(value)}
        return header

    def _claim(self) -> None:
        """On rank 0: the folder, and its lock."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            got = "a link to nothing" if self.path.is_symlink() and not self.path.exists() else "a file"
            raise DataError("save", where=self.path, expected="a folder, or nothing yet", got=got)
        with failing("save", lambda: self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = WriterLock(self.path)
                for path in directory.clean(self.path, self._atomic_rename):
                    warn(f"{path}: removed, a save that did not end had left it behind")
            else:
                self._lock.require_held()

    def _prepare(self, partial: Path) -> None:
        """On rank 0: an empty folder to write to, while the lock is held."""
        assert self._lock is not None
        with failing("save", lambda: self.path):
            self._lock.require_held()
            directory.require_room(self.path, directory.step_of(partial))
            if partial.exists():  # to be removed, or of a save that has failed
                self._engine.waitall()
                directory.remove(partial, ignore_errors=True)
            partial.mkdir()

    def _commit(self, step: int) -> Path:
        """On rank 0: all files are on disk."""
        path = directory.commit(self.path, step, self._atomic_rename)
        try:
            directory.remove_old(self.path, step)
            if self.keep is not None:
                self._remove_older(step, self.keep)
        except OSError as error:  # the checkpoint is there all the same
            warn(f"{error.filename or self.path}: {error.strerror}: an older checkpoint stays")
        return path

    def _remove_older(self, step: int, keep: int) -> None:
        """What need not be kept, and what has lost its manifest and has so many complete ones after it."""
        found = directory.find(self.path)
        older = directory.dropped(found, keep, self.keep_every, directory.worth(found, self.best))
        lost = directory.without_manifest(self.path, found)
        for each in [*older, *(each for each in lost if sum(other > each for other in found) >= keep)]:
            if each != step:
                self._remove_behind(directory.retire(self.path, each))

    def _remove_behind(self, path: Path) -> None:
        """It may take as long as a save, and nobody needs to wait for it."""
        remove = partial(directory.remove, path, ignore_errors=True)
        if self._is_left:  # the engine is shut down
            remove()
        else:
            self._engine.push(remove, lane=_REMOVALS, name="remove")

    def steps(self) -> list[int]:
        """The steps of which there are complete checkpoints, in order, alike on all ranks; every rank must call."""
        return on_rank_0(self.world.comm, lambda: list(load.found("list the checkpoints", self.path)))

    def latest(self) -> int | None:
        """The greatest of `steps`, whichever run has saved it, None where there is none; every rank must call."""
        return max(self.steps(), default=None)

    def restore(
        self,
        step: int | None = None,
        into: Any = None,
        *,
        best: bool | str = False,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> Restored:
        """Restore what was saved, on any number of ranks; every rank must call, and reads what it holds.

        Args:
            step: which checkpoint. None: the newest that is undamaged; of damaged ones a warning says what is wrong.
            best: the checkpoint with the best value of the manager's own ``best``, or of the ``"metric"`` or
                ``"-metric"`` that is given here; instead of ``step``.
            into: a state as `save` takes it. Its arrays and `Sharded` parts are filled in place, its objects take over
                their states; numbers are in the result. None: the whole state as arrays, on every rank.
            strict: the names in the checkpoint and in ``into`` must be the same. False: what there is, is restored;
                `Restored.missing` and `Restored.left_over` say what is not.
            rename: names of ``into`` by those of the checkpoint, each for all that begins with it and a slash, unless
                another one is longer; or a function from the one to the other. What stands in lists keeps its place.

        Raises:
            ConfigError: no step; a ``best`` that names no metric, or with a step; a closed manager; names, shapes or
                dtypes that do not fit; on every rank, nothing is changed.
            MismatchError: the ranks' arguments differ; on every rank, nothing is changed.
            UnsupportedError: what an object of ``into`` has raised, e.g. its ``load_state_dict()``; on every rank.
                ``into`` may then hold some of what was saved.
            DataError: there is no such checkpoint, or none with the metric, or it is damaged: names file and data set,
                and an older checkpoint that can be restored, or why the next older one does not fit. ``into`` may then
                hold some of its elements.
        """
        self._require_open("restore")
        self.wait()
        comm = self.world.comm
        metric = on_every_rank(comm, lambda: metric_to_restore(best, self.best, step))
        step = on_every_rank(comm, lambda: None if step is None else step_number("restore", step))
        require_same(comm, "restore", [f"step {step}", f"best {metric}"], "call restore alike on all ranks")
        if metric is not None:
            step = on_rank_0(comm, lambda: load.best("restore", self.path, metric))
        return load.restore(self.path, self.world, self.steps() if step is None else step, into, strict, rename)


_let_end: WeakMethods[None] = WeakMethods()
"""The ends of all managers that have saved behind the program."""


def _let_all_end() -> None:
    for end in reversed(_let_end.living()):
        end()
