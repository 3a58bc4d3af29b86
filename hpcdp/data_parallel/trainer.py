"""What trainers on buckets and on a key-value store share.

`BaseTrainer` declares their methods; `bucket_trainer` and `kvstore.trainer` define them, and `train.trainer.Trainer`
makes either. Beside it stand the checks of parameters, counts and settings that differ between ranks, the warning of
losses that are means already (`MeanLosses`), and trainers of networks that find out shapes at their first call, as
Gluon defers them (`Waiting`).
"""

from __future__ import annotations

import math
import operator
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import autograd
from ..autograd.tape import NumberHeads, modes
from ..comm import Communicator, World, init
from ..comm.consistency import require_same
from ..comm.watchdog import Watchdog
from ..compression import Compression
from ..core import state as core_state
from ..core.arrays import Array, from_host, is_cupy, is_host, to_host
from ..engine.engine import Trace, nvtx
from ..errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError, type_named
from ..nn import module
from ..nn.module import Deferred
from ..optim import Optimizer
from .buckets import Parameter
from .policy import Policy, first_scale
from .profiling import BucketTimes, CommunicationStats
from .sharded_update import Places, being_changed, moved, moved_anywhere, of_rank_0

if TYPE_CHECKING:
    from .bucket_trainer import GraphUpdate
    from .profiling import GpuTimes


def no_parameters(given: object) -> ConfigError:
    """The error of a Trainer that is given something else."""
    expected = "parameters, such as those of net.parameters()"
    return ConfigError("Trainer", where="params", expected=expected, got=type_named(given))


_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Of parameters that are trained."""


def trained(params: Sequence[Parameter], world: World | None) -> list[Parameter]:
    """Those that want a gradient; `ConfigError` for what is no parameter, two of one name, or for none, unless
    ``world`` has but one stage of a model. The others get arrays of their own where ranks hold them together, since an
    earlier Trainer had them: no later one would change those for all."""
    params = list(params)
    for param in params:
        if not hasattr(param, "grad_req"):
            raise no_parameters(param)
    if any(id(param) in being_changed for param in params):
        raise ConfigError(
            "Trainer", expected="the end of another one's changing_parameters()", got="a Trainer made within it"
        )
    found = [param for param in params if param.grad_req != "null"]
    for param in params:
        if param.grad_req != "null":
            continue
        if core_state.change_of(param.data) is not None:
            param.data = param.data.copy()
        if param.grad_hook is None:  # else an earlier Trainer may train it
            param.grad_hook = _warn_of_unfrozen
    if not found and (world is None or world.model_comm is None):
        raise ConfigError("Trainer", where="params", expected="at least one trainable parameter", got="none")
    for param in found:
        if str(param.data.dtype) not in _DTYPES:
            raise ConfigError("Trainer", where=param.name, expected=" or ".join(_DTYPES), got=param.data.dtype)
    twice = [name for name, number in Counter(param.name for param in found).items() if number > 1]
    if twice:
        raise ConfigError(
            "Trainer", where="params", expected="different names", got=f"{twice[0]!r} twice",
            remedy="make two networks children of one Module, which puts their names before those of their parameters",
        )  # fmt: skip
    return found


def _warn_of_unfrozen(param: Parameter) -> None:
    """What backward calls when it has written the gradient of a parameter that its Trainer has left alone; once."""
    param.grad_hook = None
    warnings.warn(
        f"{param.name} has a gradient, and is not trained: it had grad_req='null' when its Trainer was made. Make a "
        "new Trainer to train it",
        stacklevel=2,
    )


def described(params: Sequence[Parameter]) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Name, shape and dtype of each."""
    return [(param.name, tuple(param.data.shape), np.dtype(param.data.dtype)) for param in params]


def _marks(param: Parameter) -> str:
    """What ranks must have alike of it, in the line about it: a difference then stands beside its like."""
    accumulated = " grad_req='add'" if param.grad_req == "add" else ""
    return accumulated + (" of a layer for all ranks together" if getattr(param, "is_joint", False) else "")


def require_alike(world: World, params: Sequence[Parameter], optimizer: Optimizer, settings: Sequence[str]) -> None:
    """Raises `MismatchError` where ranks have given a Trainer other things; every rank must call."""
    places = ["" if is_host(param.data) else " on a GPU" for param in params]  # where gradients are summed follows
    items = [
        f"{name} {shape} {dtype}{place}{_marks(param)}"
        for param, (name, shape, dtype), place in zip(params, described(params), places, strict=True)
    ]
    remedy = (
        "build the same model with the same options on every rank; for the stages of a pipeline, or layers that are "
        "split, pass their replicas as the world"
    )
    require_same(world.comm, "Trainer", [*items, f"optimizer {optimizer.config()}", *settings], remedy)


def require_same_settings(comm: Communicator, operation: str, learning_rate: float, loss_scale: float) -> None:
    """Raises `MismatchError` where ranks would update in different ways; every rank must call."""
    items = [f"learning rate {learning_rate}", f"loss scale {loss_scale}"]
    require_same(comm, operation, items, "change them alike on all ranks")


def require_same_parameters(own: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raises `ConfigError` where a state that is ``given`` has other parameters than the trainer's ``own``."""
    if set(given) != set(own):
        odd = min(set(given) ^ set(own))
        held, lacks = ("the trainer", "the state") if odd in own else ("the state", "the trainer")
        raise ConfigError("load_state_dict", where=odd, expected=f"it in {lacks}", got=f"it in {held} only")


def require_whole(operation: str, params: Sequence[Parameter], remedy: str) -> None:
    """Raise `ConfigError` where one is a part of a parameter that other ranks have the rest of."""
    for param in params:
        cut = core_state.cut_of(param)
        if cut is not None and cut.total != param.data.shape[cut.axis]:
            raise ConfigError(
                operation, where=param.name, expected=f"all of shape {cut.whole(tuple(param.data.shape))}",
                got=f"a part of shape {tuple(param.data.shape)}", remedy=remedy,
            )  # fmt: skip


def checked_count(operation: str, count: int) -> int:
    """``count`` as an int; `ConfigError` unless it is a number of samples."""
    try:
        checked = operator.index(count)
    except TypeError:
        checked = -1
    if checked < 0:
        raise ConfigError(operation, where="count", expected="a number of samples, 0 or more", got=repr(count))
    return checked


def unfinished(operation: str) -> StaleGradientError:
    """There are gradients that a later update would have used."""
    return StaleGradientError(
        operation, expected="the end of a step", got="gradients that no_sync() or allreduce_grads() holds",
        remedy="call it after step(count), or drop them by step(0)",
    )  # fmt: skip


def completed(form: Any, later: Mapping[str, Any]) -> Any:
    """Return the form of a saved state with the entries ``later`` that it lacks, because earlier versions had none."""
    if not isinstance(form, dict) or "dict" not in form:
        return form
    names = {name for name, _ in form["dict"]}
    return {"dict": [*form["dict"], *([name, node] for name, node in later.items() if name not in names)]}


_NEAR = 1e-3


class MeanLosses:
    """A look at how a program's first backwards begin, which warns where that is with a mean over samples.

    Losses are per sample, and `Trainer.step` divides the sum of their gradients by the global count. A single number is
    right where it is the sum of the losses, or where each stands for one sample; the gradients of a mean would be
    divided twice. What a single number is the tape says: by the weight of each operand of the operation that made it.

    Args:
        warns: whether this rank does; one says it for all.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns
        self._met: list[NumberHeads] = []
        """Of the backwards since the last step."""
        self._met_others = False
        """Whether another one was among them, which began with several losses."""

    def note(self) -> None:
        """Note the backward that this thread is in."""
        heads = modes.number_heads
        if heads is None:
            self._met_others = True
        elif not self._met or self._met[-1] is not heads:
            self._met.append(heads)

    def forget(self) -> None:
        """Forget the backwards since the last step."""
        self._met, self._met_others = [], False

    def look(self, operation: str, count: int, loss_scale: float, stacklevel: int) -> bool:
        """Warn where the backwards before a step of ``count`` samples began with means.

        Returns:
            Whether it has seen enough; a program does the same in each step.
        """
        met, others = self._met, self._met_others
        self.forget()
        num_heads = sum(heads.count for heads in met)
        if others or not met or count <= num_heads:  # each number may be the loss of one sample
            return others
        size = _averaged([each for heads in met for each in heads.reductions], count / num_heads, loss_scale)
        if size and self._warns:
            scale = "" if loss_scale == 1 else " * trainer.loss_scale"
            warnings.warn(
                f"{operation}({count}): backward began with a single number, the mean over {size} losses, and "
                f"{operation}() divides by the number of samples again, so the update is {size} times too small; call "
                f"backward() on the losses, one a sample, or loss.backward(len(y){scale}), which is exact for uneven "
                "batches, too",
                stacklevel=stacklevel,
            )
        return True


def _averaged(reductions: list[tuple[Array, tuple[int, ...]]], count: float, loss_scale: float) -> int:
    """Return over how many elements, of ``count`` samples, a mean was taken; 0 where none was, or a sum, too."""
    found = 0
    for weight, shape in reductions:
        size, factor = math.prod(shape), float(weight.item())
        if size % count and count % size:
            continue  # not of samples, as a penalty on weights
        if _is_near(factor, 1) or _is_near(factor, loss_scale):
            return 0
        if any(_is_near(factor * each, scale) for each in (size, count) for scale in (1, loss_scale)):
            found = size
    return found


def _is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= _NEAR * expected


_REMEDY = (
    "give initialisers a seed, or a `generator`, on all ranks; or call the network once, on one sample, before its "
    "Trainer is made"
)


class Waiting:
    """A Trainer whose parameters have no shapes yet, and what backward has written until it is made.

    All ranks begin with the same values, as with any Trainer: random initialisers that have a ``generator`` get the
    state of rank 0's, so that the first forward draws the same on all ranks.

    Args:
        params: the parameters.
        late: those that have had no shape when they were made, alike on all ranks.
        comm: the ranks; None: this one alone.
        make: makes the Trainer.
    """

    def __init__(
        self, params: Sequence[Any], late: Sequence[Deferred], comm: Communicator | None, make: Callable[[], None]
    ) -> None:
        self._late, self._comm, self._make = late, comm, make
        self._written: dict[int, Any] = {}
        """Parameters with a gradient by their ids, in the order in which backward has written them."""
        if comm is not None:
            _share_generators(late, comm)
            for param in params:
                if None not in module.shape_of(param):
                    param.data = from_host(of_rank_0(param.data, comm), param.data)
        for param in params:
            if param.grad_req != "null":
                param.grad_hook = self._note

    def _note(self, param: Any) -> None:
        self._written[id(param)] = param

    def end(self) -> Callable[[], None]:
        """Make the Trainer; every rank must call, when it has written gradients or has no samples.

        Returns:
            A function that gives the Trainer the gradients that were written before.

        Raises:
            DeviceError: no rank knows a shape.
            MismatchError: ranks have drawn other values, which their gradients belong to; on every rank.
        """
        settle_together(self._late, self._comm, bool(self._written))
        for param in self._late:
            _ = param.data  # an error where no rank has called its layer
        written = [(param, param.grad.copy()) for param in self._written.values()]
        self._make()

        def give() -> None:
            for param, gradient in written:
                param.grad[...] = gradient
                if param.grad_hook is not None:
                    param.grad_hook(param)

        return give


def settle_together(late: Sequence[Deferred], comm: Communicator | None, has_gradients: bool = False) -> None:
    """Give parameters that some ranks know, and others not, the shapes and values of the first rank that does; every
    rank must call.

    Args:
        late: parameters that had no shape when they were made, alike on all ranks.
        comm: the ranks; None: this one alone.
        has_gradients: whether this rank has computed some with the values that it knows.

    Raises:
        MismatchError: ranks with gradients know other shapes or values; on every rank.
    """
    if comm is None or comm.size == 1:
        return
    own = [None if None in module.shape_of(param) else [list(param.shape), _digest(param.data)] for param in late]
    exchanged = comm.allgather_json([own, has_gradients])
    for number, param in enumerate(late):
        known = [rank for rank, (each, _) in enumerate(exchanged) if each[number] is not None]
        if not known:
            continue
        shape, digest = exchanged[known[0]][0][number]
        odd = [rank for rank in known if exchanged[rank][0][number] != [shape, digest]]
        is_used = any(exchanged[rank][1] for rank in odd) or (bool(odd) and exchanged[known[0]][1])
        if is_used or any(exchanged[rank][0][number][0] != shape for rank in odd):
            raise MismatchError(
                "Trainer", where=param.name, expected=f"the values that rank {known[0]} has drawn, of shape {shape}",
                got=f"others on rank {odd[0]}, of shape {exchanged[odd[0]][0][number][0]}", remedy=_REMEDY,
            )  # fmt: skip
        if len(known) < comm.size or odd:
            if own[number] is None:
                param.draw = lambda shape: np.zeros(shape, np.float32)
                module.settle(param, next(n for n, each in zip(shape, param.expected, strict=True) if each is None))
            values = np.array(to_host(param.data), order="C")
            comm.native_broadcast(values, known[0])
            param.data[...] = from_host(values, param.data)


def _digest(values: Any) -> int:
    host = np.array(to_host(values), order="C")
    return zlib.crc32(host.reshape(-1).view(np.uint8).data)


def _share_generators(late: Sequence[Deferred], comm: Communicator) -> None:
    """Let the initialisers of ``late`` parameters draw on as rank 0's do; every rank must call."""
    found = {id(each): each for each in (getattr(param.initial, "generator", None) for param in late)}
    generators = [each for each in found.values() if isinstance(each, np.random.Generator)]
    states = [each.bit_generator.state for each in generators]
    plain = [state if state["bit_generator"] == np.random.PCG64.__name__ else None for state in states]
    for generator, state in zip(generators, comm.allgather_json(plain)[0], strict=False):
        if state is not None:
            generator.bit_generator.state = state


def may_wait(make: Callable[..., None]) -> Callable[..., None]:
    """Let ``make``, the ``__init__`` of a Trainer, wait where parameters have no shapes yet; see `Waiting`."""

    @wraps(make)
    def begin(self: Any, params: Sequence[Any], optimizer: Any, world: World | None = None, **options: Any) -> None:
        params = list(params)
        late = [param for param in params if isinstance(param, Deferred)]
        if late:
            self.world = self.ranks(world, options)
            comm = None if self.world is None else self.world.comm
            if comm is not None:
                require_same(comm, "Trainer", [f"{param.name} {param.expected}" for param in late])
            settle_together(late, comm)
            if any(None in module.shape_of(param) for param in late):
                _refuse(self.world, options)
                self.check_options(options)
                self.optimizer = optimizer
                self.loss_scale = first_scale(options.get("loss_scale", 1.0))
                self.waiting = Waiting(params, late, comm, lambda: make(self, params, optimizer, world, **options))
                return
        make(self, params, optimizer, world, **options)

    return begin


def _refuse(ranks: World | None, options: dict[str, Any]) -> None:
    """Raise `ConfigError` for what needs shapes before the first forward."""
    is_cut = ranks is not None and (ranks.part_comm is not None or ranks.model_comm is not None)
    if is_cut or options.get("reproducible"):
        raise ConfigError(
            "Trainer", expected="a network that knows its shapes", got="one that does not",
            remedy="call the network once, on one sample, before its Trainer is made",
        )  # fmt: skip


class BaseTrainer:
    """What the trainers on buckets and on a store have in common; see `hpcdp.Trainer`, which makes either."""

    public_name = "Trainer"
    """What errors call it: programs make it by that name."""
    world: World | None
    """The ranks; None where a store of this process alone is given."""
    optimizer: Optimizer
    """The update rule; its learning rate may be assigned between steps."""
    policy: Policy
    stats: CommunicationStats
    compression: Compression | None
    step_count: int = 0
    """Updates made so far."""
    accumulation: tuple[bool, bool] = (False, False)
    """Whether backward adds to gradients, and whether `step` only counts, as within `no_sync`."""
    num_nonfinite: int = 0
    """Steps whose summed gradients held a NaN or an infinity, as far as the policy looks."""
    loss_scale: float = 1.0
    """How many times too large the gradients are, because the loss was scaled up before backward."""
    virtual_shards: int | None = None
    """Into how many pieces global batches are cut; None where the trainer is not reproducible."""
    waiting: Waiting | None = None
    """The rest of the Trainer, to be made when the network knows its shapes; None from then on."""
    _means: MeanLosses | None = None
    """How backward began in the first steps."""
    _is_changing: bool = False
    _places: Places
    """Where it updates its parameters."""
    steps_together: bool = True
    """Whether a step is one of all ranks, which wait for each other; not with ``dist_async``."""

    def __getattr__(self, name: str) -> Any:
        waiting = self.waiting
        if waiting is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.waiting = None  # else what its making looks for would make it again
        try:
            give = waiting.end()
        except BaseException:
            self.waiting = waiting
            raise
        give()
        if self._means is not None:
            self._means.forget()  # how backward began that has written them
        return getattr(self, name)

    def _warn_of_mean_losses(self, operation: str, count: int) -> None:
        """Warn where the backwards before a step of ``count`` samples began with means, until that is clear."""
        if self._means is not None and self._means.look(operation, count, self.loss_scale, stacklevel=4):
            self._means = None

    @staticmethod
    def ranks(world: World | None, options: dict[str, Any]) -> World | None:
        """Return the ranks of a trainer of these options; None where it has a store of this process alone."""
        return init() if world is None else world

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise `ConfigError` for options that are wrong, whatever the parameters are."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "Trainer", expected="its network and states to be copied or saved", got="the trainer",
            remedy="copy the network, save with save_states() or a checkpoint.Manager",
        )  # fmt: skip

    # [Note: no abstract methods] Both trainers define what raises below. Abstract methods would make type checkers
    # refuse `hpcdp.Trainer(...)`, which is how a program makes either.

    @property
    def own_virtual_shards(self) -> range:
        """The virtual shards of every global batch that this rank computes, in order: one for each call of `step`.

        One, number 0, where the trainer is not reproducible.
        """
        return range(1)

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """When the buckets of the last step that is over were ready, launched and done; empty where none are reduced
        beside computation."""
        return ()

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of this rank: its share of the ``"parameters"``, its ``"gradients"``, with the sums of virtual shards
        where it is reproducible, its part of the ``"state"``, unless a store has it."""
        raise NotImplementedError

    def measure_on_gpu(self) -> GpuTimes | None:
        """What measures steps from now on where they are computed on a GPU; None where they are not, and for stores.

        Parts that wait for other ranks it calls `EXPOSED`; they count in `stats`.
        """
        return None

    def step(self, count: int) -> int:
        """Reduce the gradients over all ranks and update; every rank must call. Changes parameters in place.

        A parameter that no rank has used since the last step, or that is frozen by ``grad_req="null"``, keeps its value
        and its optimizer's state. The gradients are not changed in a way to rely on; see `allreduce_grads` for looking
        at their sum.

        Args:
            count: samples of this rank whose gradients backward has written. A rank that has run out of data passes 0
                and needs no backward.

        Returns:
            The global count (on a store whose ranks do not step together this rank's); 0 when no rank had samples, and
            then nothing is updated. Inside `no_sync`, and before this rank's last virtual shard, the count held back so
            far on this rank.

        Raises:
            StaleGradientError: backward did not write all gradients on a rank with samples; raised on every rank. Or
                `allreduce_grads` has summed them already, and `update` is to follow.
            MismatchError: some ranks have frozen a parameter by ``grad_req="null"`` and others have not, and the policy
                does not let ranks use different parameters.
        """
        raise NotImplementedError

    def allreduce_grads(self) -> None:
        """Make every parameter's ``grad``, on every rank, the sum over all ranks; `update` is to follow.

        Every rank must call, after backward. For gradients that are changed by hand before the update.

        Raises:
            StaleGradientError: as `step`.
            ConfigError: the trainer is reproducible, or its store updates.
        """
        raise NotImplementedError

    def update(self, count: int) -> int:
        """Update from gradients that `allreduce_grads` has summed; every rank must call. Changes parameters in place.

        Args:
            count: samples of this rank behind the sum.

        Returns:
            The global count; 0 when no rank had samples, and then nothing is updated.
        """
        raise NotImplementedError

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """What `TrainStep` has a CUDA graph do after backward; None where the update must be `step`'s.

        Args:
            leaves: the parameters to which backward goes.
        """
        return None

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Those of ``leaves`` with whose gradients sums over ranks begin beside backward, which a `TrainStep`'s CUDA
        graph is cut for.

        Args:
            leaves: the parameters to which backward goes, in the order in which it completes their gradients.
        """
        return ()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it `step` only counts: backward adds to the gradients, and the next step outside takes them all.

        Ranks may accumulate different numbers of batches.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Drop what backward and `no_sync` have added for a step that ends with an error; every rank must call."""
        self._begin_step()

    def _begin_step(self) -> None:
        raise NotImplementedError

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Within it a program changes parameters by itself, alike on all ranks; every rank must enter and leave it::

            with trainer.changing_parameters():
                net.weight *= 0.5

        Within it each rank has copies, so that such a line counts once where a node holds parameters once, and nobody
        reads what is half changed. When all have left, all have what rank 0 has made of the parameters that are
        trained, also where an exception has ended it; of a model that is cut, rank 0 of each part. Buffers, and
        parameters that are left alone, are each rank's own, within it and elsewhere. Elsewhere in-place changes of what
        several ranks hold are refused, but not those of their ``data`` by NumPy. Ends with `take_parameters`; within
        itself it does nothing.

        Raises:
            ConfigError: a later Trainer has the parameters; or one has another shape or dtype now, and then nothing is
                changed; or an array, or view, from before was changed within, and that is lost. On every rank.
        """
        if self._is_changing:
            yield
            return
        autograd.waitall()
        watched = nullcontext() if self.world is None else Watchdog.of(self.world).watching("changing_parameters")
        with watched:  # here ranks notice that others do something else
            error = moved_anywhere(self._comm, moved(self._places), "changing_parameters")
        if error is not None:
            raise error
        try:
            with self._changing():
                self._is_changing = True
                yield
        finally:
            self._is_changing = False
            self.take_parameters()

    def _changing(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def _comm(self) -> Communicator | None:
        """Of the ranks; None where there are no others."""
        return None if self.world is None else self.world.comm

    def _settle(self, operation: str) -> None:
        """Before parameters or gradients change: nobody reads them then, and no program changes parameters."""
        if self._is_changing:
            raise ConfigError(operation, expected="the end of changing_parameters()", got="a call within it")
        autograd.waitall()

    def take_parameters(self) -> None:
        """Go on from what the parameters hold now; every rank must call when it has written to them by itself.

        A store that updates has values of its own, which parameters are at the next step: it takes those of rank 0, and
        so do all ranks. Of parameters of 16 bits the float32 copies that are updated become what they hold. In other
        buckets, and where each rank updates, what they hold counts anyway; where ranks hold them together that is what
        all have made of them: see `changing_parameters`.
        """

    def synchronize(self) -> None:
        """Wait until all ranks have come here, and give each the values that all their updates have made.

        Every rank must call. For ranks that do not step together: before they evaluate, and when they have ended. From
        then on `step_count` counts the updates of all. In buckets, where ranks step together, there is nothing to do.
        """

    def statistics(self) -> dict[str, float]:
        """What the pushes of all ranks have met so far, where they do not step together; every rank must call.

        Returns:
            ``staleness_mean`` and ``staleness_max``: how many pushes of others took effect on a parameter between a
            rank's last pull of it and its push; ``waited_s``: seconds for which slower ranks have held a rank back,
            mean over ranks; ``sent_nbytes``: to other nodes, of all ranks. Nothing where they step together.
        """
        return {}

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state, of all ranks, to one file, which replaces ``path`` whole; every rank must call.

        Raises:
            DataError: rank 0 cannot write there; on every rank.
            StaleGradientError: some, but not all virtual shards of a step are computed; on every rank.
        """
        raise NotImplementedError

    def load_states(self, path: str | Path) -> None:
        """Restore what `save_states` wrote, whatever the number of ranks and the owner then; every rank must call.

        Buckets and stores have files of their own.

        Raises:
            DataError: the file is missing, damaged or of another model or optimizer; on every rank, nothing is changed.
            StaleGradientError: as `save_states`.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What training goes on from, beside the network's parameters; every rank must call.

        Returns:
            ``states``: the optimizer's, by parameter and name, of which this rank holds its parts, and ``passed_over``:
            in how many updates a parameter was left alone; or ``store``: that of the store that updates;
            ``residuals``: what compression has not sent yet; ``optimizer``: its settings, as JSON; ``step_count``,
            ``loss_scale``, ``good_steps``, ``num_nonfinite``; and what decides the bits:
            ``virtual_shards``, ``arithmetic``, ``layout``. Arrays are the trainer's own, which the next `step` changes.

        Raises:
            StaleGradientError: a step is under way: some, but not all virtual shards of it are computed, or gradients
                are accumulated or summed; on every rank.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; every rank must call. Settings of the optimizer become those of then.

        A checkpoint restores that of any number of ranks and any owner. From another layout of buckets, or on another
        kind of processor, it warns that last bits may differ.

        Raises:
            ConfigError: it is no trainer's, or of another optimizer, other parameters or another number of virtual
                shards.
            StaleGradientError: as `state_dict`.
        """
        raise NotImplementedError


def show_to_profiler(params: Sequence[Parameter], world: World | None) -> None:
    """Where parameters are on a GPU, let the spans of a world that is traced be ranges for its profiler, too."""
    trace: Trace | None = None if world is None else world.kept.get(Trace)
    if trace is not None and trace.ranges is None and any(is_cupy(param.data) for param in params):
        trace.ranges = nvtx()
