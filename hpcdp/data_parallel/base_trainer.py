"""The base of the trainers on buckets and on key-value stores.

`BaseTrainer` declares their methods; `bucket_trainer` and `kvstore.store_trainer` define them, and
`train.trainer.Trainer` makes either. The module also checks parameters, counts and settings. `MeanLosses` warns about
losses that are means already, and `Waiting` stands for the trainer of a network that infers shapes in its first call,
as in Gluon.
"""

from __future__ import annotations

import math
import time
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
from ..core.checks import choices, not_copied, same_names, whole_number
from ..engine.engine import Trace, nvtx
from ..errors import ConfigError, MismatchError, StaleGradientError, type_named, warn
from ..nn import module
from ..nn.module import Deferred
from ..optim import Optimizer
from .bucket_layout import ParameterLike
from .gradient_policy import Policy
from .loss_scaling import first_scale
from .overlap import BucketTimes, CommunicationStats
from .sharded_update import Places, being_changed, moved, moved_anywhere, of_rank_0

if TYPE_CHECKING:
    from .bucket_trainer import GraphUpdate
    from .overlap import GpuTimes


def no_parameters(params: object) -> ConfigError:
    """Return the error of a Trainer whose ``params`` are no parameters."""
    expected = "parameters, such as those of net.parameters()"
    return ConfigError("Trainer", where="params", expected=expected, got=type_named(params))


_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of trainable parameters."""
_ELEMENT_BY_ELEMENT = ("fp16", "bf16")
"""Codecs that encode each element by itself."""


def trained(params: Sequence[ParameterLike], world: World | None) -> list[ParameterLike]:
    """Return the parameters to train: all without ``grad_req="null"``.

    Other parameters get private arrays, where an earlier Trainer has put them into memory that ranks share.

    Raises:
        ConfigError: an invalid parameter, two parameters of one name, or none to train, unless ``world`` has only one
            stage of a model.
    """
    params = list(params)
    for param in params:
        if not hasattr(param, "grad_req"):
            raise no_parameters(param)
    if any(id(param) in being_changed for param in params):
        raise ConfigError(
            "Trainer",
            expected="a call outside of changing_parameters() of another Trainer",
            got="a call within the context",
        )
    trainable = [param for param in params if param.grad_req != "null"]
    for param in params:
        if param.grad_req != "null":
            continue
        if core_state.protection_of(param.data) is not None:
            param.data = param.data.copy()
        if param.grad_hook is None:  # otherwise an earlier Trainer may train it
            param.grad_hook = _warn_of_unfrozen
    if not trainable and (world is None or world.model_comm is None):
        raise ConfigError("Trainer", where="params", expected="at least one trainable parameter", got="none")
    for param in trainable:
        if str(param.data.dtype) not in _DTYPES:
            raise ConfigError("Trainer", where=param.name, expected=choices(_DTYPES), got=param.data.dtype)
    twice = [name for name, number in Counter(param.name for param in trainable).items() if number > 1]
    if twice:
        raise ConfigError(
            "Trainer", where="params", expected="different names", got=f"{twice[0]!r} twice",
            remedy="make two networks children of one Module, which puts their names before those of their parameters",
        )  # fmt: skip
    return trainable


def _warn_of_unfrozen(param: ParameterLike) -> None:
    """Warn, once, that backward has written the gradient of a parameter that its Trainer does not train."""
    param.grad_hook = None
    warn(
        f"{param.name} has a gradient, and is not trained: it had grad_req='null' when its Trainer was made. Make a "
        "new Trainer to train it"
    )


def described(params: Sequence[ParameterLike]) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Return name, shape and dtype of each parameter."""
    return [(param.name, tuple(param.data.shape), np.dtype(param.data.dtype)) for param in params]


def _marks(param: ParameterLike) -> str:
    """Describe the settings of a parameter that must be the same on all ranks."""
    accumulated = " grad_req='add'" if param.grad_req == "add" else ""
    return accumulated + (" of a layer for all ranks together" if getattr(param, "is_joint", False) else "")


def require_alike(world: World, params: Sequence[ParameterLike], optimizer: Optimizer, settings: Sequence[str]) -> None:
    """Raise `MismatchError` where the arguments of a Trainer differ between ranks; every rank must call."""
    places = ["" if is_host(param.data) else " on a GPU" for param in params]  # decides where gradients are summed
    items = [
        f"{name} {shape} {dtype}{place}{_marks(param)}"
        for param, (name, shape, dtype), place in zip(params, described(params), places, strict=True)
    ]
    remedy = (
        "build the same model with the same options on every rank; for the stages of a pipeline, or split layers, pass "
        "their replicas as the world"
    )
    require_same(world.comm, "Trainer", [*items, f"optimizer {optimizer.config()}", *settings], remedy)


def require_same_settings(comm: Communicator, operation: str, learning_rate: float, loss_scale: float) -> None:
    """Raise `MismatchError` where learning rate or loss scale differ between ranks; every rank must call."""
    items = [f"learning rate {learning_rate}", f"loss scale {loss_scale}"]
    require_same(comm, operation, items, "make the same changes on all ranks")


def require_same_parameters(own: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise `ConfigError` where a saved state has other parameters than the trainer's ``own``."""
    same_names("load_state_dict", "the trainer", sorted(own), sorted(saved))


def require_whole(operation: str, params: Sequence[ParameterLike], remedy: str) -> None:
    """Raise `ConfigError` if a parameter is a part of a cut parameter."""
    for param in params:
        cut = core_state.cut_of(param)
        if cut is not None and cut.total != param.data.shape[cut.axis]:
            raise ConfigError(
                operation, where=param.name, expected=f"all of shape {cut.whole(tuple(param.data.shape))}",
                got=f"a part of shape {tuple(param.data.shape)}", remedy=remedy,
            )  # fmt: skip


def share_over_parts(
    params: Sequence[ParameterLike], world: World, compression: Compression | None
) -> list[int] | None:
    """Give all ranks of a cut model the same values of its uncut parameters; every rank must call.

    Uncut parameters stay equal to the bit if their gradients are summed alike. So they must have the same places in the
    buckets, whatever the sizes of the cut parameters before them: a sum may depend on an element's place in a message.

    Returns:
        For each parameter the number of elements of its largest part; None where no parameter is cut.

    Raises:
        ConfigError: parameters are cut, and ``world`` is not the ranks with the same parts; or the codec's result for
            an element depends on its neighbors.
        MismatchError: ranks with other parts have other parameters.
    """
    comm = world.part_comm
    if comm is None:
        require_whole("Trainer", params, "pass the replicas of split_world as the world")
        return None
    codec = None if compression is None else compression.codec.name
    require_same(comm, "Trainer", [*map(_parameter_line, params), f"compression {compression}"])
    if codec is not None and codec not in _ELEMENT_BY_ELEMENT and comm.size > 1:
        expected = f"{' or '.join(_ELEMENT_BY_ELEMENT)} with split layers"
        raise ConfigError("Trainer", where="compression", expected=expected, got=codec)
    for param in params:
        if core_state.cut_of(param) is None:
            param.data = from_host(of_rank_0(param.data, comm), param.data)
    counts = comm.allgather_json([math.prod(param.data.shape) for param in params])
    return [max(of_param) for of_param in zip(*counts, strict=True)]


def _parameter_line(param: ParameterLike) -> str:
    shape, cut = tuple(param.data.shape), core_state.cut_of(param)
    extent = f"{shape}" if cut is None else f"{cut.whole(shape)} cut along axis {cut.axis}"
    return f"{param.name} {extent} {param.data.dtype}"


def _checked_count(operation: str, count: int) -> int:
    """Return a number of samples as an int; `ConfigError` for anything else."""
    return whole_number(operation, "count", count, 0, expected="a number of samples, 0 or more")


def unfinished(operation: str) -> StaleGradientError:
    """Return the error of an operation that would lose gradients of a later update."""
    return StaleGradientError(
        operation, expected="the end of a step", got="gradients that no_sync() or allreduce_grads() holds",
        remedy="call it after step(count), or drop them by step(0)",
    )  # fmt: skip


def completed(form: Any, later: Mapping[str, Any]) -> Any:
    """Return the form of a saved state, with those of the entries ``later`` that it lacks, as earlier versions do."""
    if not isinstance(form, dict) or "dict" not in form:
        return form
    names = {name for name, _ in form["dict"]}
    return {"dict": [*form["dict"], *([name, node] for name, node in later.items() if name not in names)]}


def members_of(form: Any) -> dict[Any, Any]:
    """Return the nodes of a dict's form by key; empty for another form."""
    return dict(form["dict"]) if isinstance(form, dict) and "dict" in form else {}


_NEAR = 1e-3


class MeanLosses:
    """A check of a program's first backwards, which warns if they begin with a mean over samples.

    Losses are per sample, and `Trainer.step` divides the sum of their gradients by the global count. A single number is
    right if it is the sum of the losses, or the loss of one sample; the gradients of a mean would be divided twice. The
    tape tells these cases apart by the weight of each operand of the operation that made the number.

    Args:
        warns: whether this rank warns; one rank warns for all.
    """

    def __init__(self, warns: bool) -> None:
        self._warns = warns
        self._met: list[NumberHeads] = []
        """Heads of the backwards since the last step."""
        self._met_others = False
        """True if a backward since the last step began with several losses."""

    def note(self) -> None:
        """Record the backward that this thread runs."""
        heads = modes.number_heads
        if heads is None:
            self._met_others = True
        elif not self._met or self._met[-1] is not heads:
            self._met.append(heads)

    def forget(self) -> None:
        """Forget the backwards since the last step."""
        self._met, self._met_others = [], False

    def look(self, operation: str, count: int, loss_scale: float) -> bool:
        """Warn if the backwards before a step of ``count`` samples began with means.

        Returns:
            Whether the check is complete; a program does the same in each step.
        """
        met, met_others = self._met, self._met_others
        self.forget()
        num_heads = sum(heads.count for heads in met)
        if met_others or not met or count <= num_heads:  # each number may be the loss of one sample
            return met_others
        reductions = [reduction for heads in met for reduction in heads.reductions]
        size = _averaged(reductions, count / num_heads, loss_scale)
        if size and self._warns:
            scale = "" if loss_scale == 1 else " * trainer.loss_scale"
            warn(
                f"{operation}({count}): backward() was called on the mean of {size} losses, and {operation}() divides "
                f"by the number of samples again: the update is {size} times too small; call backward() on the loss "
                f"of each sample, without a mean, or loss.backward(len(y){scale})"
            )
        return True


def _averaged(reductions: list[tuple[Array, tuple[int, ...]]], count: float, loss_scale: float) -> int:
    """Return the number of elements, of ``count`` samples, of a mean; 0 if there was none, or also a sum."""
    mean_size = 0
    for weight, shape in reductions:
        size, factor = math.prod(shape), float(weight.item())
        if size % count and count % size:
            continue  # not over samples, e.g. a penalty on weights
        if _is_near(factor, 1) or _is_near(factor, loss_scale):
            return 0
        if any(_is_near(factor * divisor, scale) for divisor in (size, count) for scale in (1, loss_scale)):
            mean_size = size
    return mean_size


def _is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= _NEAR * expected


_REMEDY = (
    "give initializers a seed, or a `generator`, on all ranks; or call the network once, on one sample, before making "
    "its Trainer"
)


class Waiting:
    """A Trainer whose parameters have no shapes yet, with the gradients that backward writes until it is made.

    All ranks begin with the same values, as with any Trainer: random initializers with a ``generator`` get the state of
    rank 0's generator, so that the first forward draws the same values on all ranks.

    Args:
        params: the parameters.
        late: the parameters made without a shape, the same on all ranks.
        comm: the ranks; None: this rank alone.
        make: makes the Trainer.
    """

    def __init__(
        self, params: Sequence[Any], late: Sequence[Deferred], comm: Communicator | None, make: Callable[[], None]
    ) -> None:
        self._late, self._comm, self._make = late, comm, make
        self._written: dict[int, Any] = {}
        """Parameters with a gradient, by id, in the order in which backward wrote them."""
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
        """Make the Trainer; every rank must call, after its backward or without samples.

        Returns:
            A function that passes the gradients written before to the Trainer.

        Raises:
            DeviceError: no rank knows a shape.
            MismatchError: ranks with gradients have drawn different values; on every rank.
        """
        settle_together(self._late, self._comm, bool(self._written))
        for param in self._late:
            _ = param.data  # raises if no rank has called its layer
        written = [(param, param.grad.copy()) for param in self._written.values()]
        self._make()

        def give() -> None:
            for param, gradient in written:
                param.grad[...] = gradient
                if param.grad_hook is not None:
                    param.grad_hook(param)

        return give


def settle_together(late: Sequence[Deferred], comm: Communicator | None, has_gradients: bool = False) -> None:
    """Give parameters the shapes and values of the first rank that knows them; every rank must call.

    Args:
        late: the parameters made without a shape, the same on all ranks; changed in place.
        comm: the ranks; None: this rank alone.
        has_gradients: whether this rank has computed gradients with its values.

    Raises:
        MismatchError: ranks with gradients know other shapes or values; on every rank.
    """
    if comm is None or comm.size == 1:
        return
    own = [None if None in module.shape_of(param) else [list(param.shape), _digest(param.data)] for param in late]
    exchanged = comm.allgather_json([own, has_gradients])
    for number, param in enumerate(late):
        known = [rank for rank, (settled, _) in enumerate(exchanged) if settled[number] is not None]
        if not known:
            continue
        shape, digest = exchanged[known[0]][0][number]
        odd = [rank for rank in known if exchanged[rank][0][number] != [shape, digest]]
        is_used = any(exchanged[rank][1] for rank in odd) or (bool(odd) and exchanged[known[0]][1])
        if is_used or any(exchanged[rank][0][number][0] != shape for rank in odd):
            raise MismatchError(
                "Trainer", where=param.name, expected=f"the values that rank {known[0]} has drawn, of shape {shape}",
                got=f"other values on rank {odd[0]}, of shape {exchanged[odd[0]][0][number][0]}", remedy=_REMEDY,
            )  # fmt: skip
        if len(known) < comm.size or odd:
            if own[number] is None:
                param.draw = lambda shape: np.zeros(shape, np.float32)
                module.settle(param, next(n for n, size in zip(shape, param.expected, strict=True) if size is None))
            values = np.array(to_host(param.data), order="C")
            comm.native_broadcast(values, known[0])
            param.data[...] = from_host(values, param.data)


def _digest(values: Any) -> int:
    host = np.array(to_host(values), order="C")
    return zlib.crc32(host.reshape(-1).view(np.uint8).data)


def _share_generators(late: Sequence[Deferred], comm: Communicator) -> None:
    """Set the generators of the initializers of ``late`` to the states of rank 0; every rank must call."""
    by_id = {id(made): made for made in (getattr(param.initial, "generator", None) for param in late)}
    generators = [made for made in by_id.values() if isinstance(made, np.random.Generator)]
    states = [generator.bit_generator.state for generator in generators]
    plain = [state if state["bit_generator"] == np.random.PCG64.__name__ else None for state in states]
    for generator, state in zip(generators, comm.allgather_json(plain)[0], strict=False):
        if state is not None:
            generator.bit_generator.state = state


def may_wait(make: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``make``, the ``__init__`` of a Trainer, to wait until parameters have shapes; see `Waiting`."""

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
    """Raise `ConfigError` for options that need shapes before the first forward."""
    is_cut = ranks is not None and (ranks.part_comm is not None or ranks.model_comm is not None)
    if is_cut or options.get("reproducible"):
        raise ConfigError(
            "Trainer", expected="a network that knows its shapes", got="a network that infers them later",
            remedy="call the network once, on one sample, before making its Trainer",
        )  # fmt: skip


class BaseTrainer:
    """Base of the trainers on buckets and on a store; see `hpcdp.Trainer`, which makes either."""

    public_name = "Trainer"
    """The name in errors, by which programs make a trainer."""
    world: World | None
    """The ranks; None for a store of this process alone."""
    optimizer: Optimizer
    """The update rule; its learning rate may be assigned between steps."""
    policy: Policy
    stats: CommunicationStats
    compression: Compression | None
    step_count: int = 0
    """Number of updates so far."""
    accumulation: tuple[bool, bool] = (False, False)
    """True if backward adds to gradients, and whether `step` only counts, as within `no_sync`."""
    num_nonfinite: int = 0
    """Number of steps whose summed gradients held a NaN or an infinity, if the policy checks."""
    loss_scale: float = 1.0
    """Factor by which gradients are too large, because the loss was scaled before backward."""
    virtual_shards: int | None = None
    """Number of pieces of a global batch; None where the trainer is not reproducible."""
    waiting: Waiting | None = None
    """The unmade rest of a Trainer whose network has no shapes yet; None from then on."""
    _means: MeanLosses | None = None
    """The check of how the first backwards begin."""
    _is_changing: bool = False
    _syncing: bool
    """False within `no_sync`."""
    _held_count: int
    """Samples that earlier calls of `step` have counted for the next update."""
    _holds_sums: bool
    """True between `allreduce_grads` and `update`."""
    _places: Places
    """The arrays in which the trainer updates its parameters."""
    steps_together: bool = True
    """True if all ranks step together and wait for each other; not with ``dist_async``."""

    def __getattr__(self, name: str) -> Any:
        waiting = self.waiting
        if waiting is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.waiting = None  # otherwise an attribute read while it is made would make it again
        try:
            give = waiting.end()
        except BaseException:
            self.waiting = waiting
            raise
        give()
        if self._means is not None:
            self._means.forget()  # `give` has called the hooks outside of their backwards
        return getattr(self, name)

    def _warn_of_mean_losses(self, operation: str, count: int) -> None:
        """Warn if the backwards before a step of ``count`` samples began with means; see `MeanLosses`."""
        if self._means is not None and self._means.look(operation, count, self.loss_scale):
            self._means = None

    @staticmethod
    def ranks(world: World | None, options: dict[str, Any]) -> World | None:
        """Return the ranks of a trainer with these options; None for a store of this process alone."""
        return init() if world is None else world

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise `ConfigError` for options that are invalid for any parameters."""
        raise NotImplementedError

    __reduce__ = not_copied(
        "Trainer", "the trainer", "copy the network, save with save_states() or a checkpoint.Manager",
        what="its network and states",
    )  # fmt: skip

    # [Note: no abstract methods] Both trainers define the methods that raise NotImplementedError below. Abstract
    # methods would make type checkers refuse `hpcdp.Trainer(...)`, by which a program makes either.

    @property
    def own_virtual_shards(self) -> range:
        """The virtual shards of a global batch that this rank computes, in order, one for each call of `step`.

        Only number 0 where the trainer is not reproducible.
        """
        return range(1)

    @property
    def bucket_times(self) -> Sequence[BucketTimes]:
        """Times of the buckets in the last finished step; empty without overlap."""
        return ()

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes on this rank of ``"parameters"``, ``"gradients"`` and the optimizer's ``"state"``.

        Of shared parameters it is this rank's share. Gradients include the sums of virtual shards, and the state counts
        unless a store holds it.
        """
        raise NotImplementedError

    def measure_on_gpu(self) -> GpuTimes | None:
        """Measure later steps on the GPU; return None where they are computed on the host, and for stores.

        Waits for other ranks are named `EXPOSED`, and count in `stats`.
        """
        return None

    def step(self, count: int) -> int:
        """Reduce the gradients over all ranks and update; every rank must call. Changes parameters in place.

        A parameter that no rank has used since the last step, or that is frozen by ``grad_req="null"``, keeps its value
        and its optimizer's state. The contents of gradients are undefined afterwards: `allreduce_grads` sums them.

        Args:
            count: samples of this rank whose gradients backward has written. A rank without data passes 0 and needs no
                backward.

        Returns:
            The global count, or this rank's count on a store whose ranks do not step together. If it is 0, nothing is
            updated. Within `no_sync`, and before this rank's last virtual shard, the count held back so far.

        Raises:
            StaleGradientError: backward has not written all gradients on a rank with samples; on every rank. Or
                `allreduce_grads` has summed them, and `update` must follow.
            MismatchError: some ranks have frozen a parameter by ``grad_req="null"`` and others have not, and the policy
                does not let ranks use different parameters.
        """
        with self._on_its_gpu():
            count = _checked_count("step", count)
            self._settle("step")
            self._warn_of_mean_losses("step", count)
            if not self._syncing:
                self._held_count += count
                return self._held_count
            if count:
                self._refuse_sums("step")
            return self._step(count)

    def _step(self, count: int) -> int:
        raise NotImplementedError

    def _on_its_gpu(self) -> AbstractContextManager[object]:
        """Make the GPU of the parameters, if they are on one, this thread's current GPU."""
        return nullcontext()

    def _refuse_sums(self, operation: str) -> None:
        """Raise `StaleGradientError` between `allreduce_grads` and `update`."""
        if self._holds_sums:
            raise StaleGradientError(
                operation, expected="gradients of this rank", got="gradients summed by allreduce_grads()",
                remedy="call update(count), or step(0) to drop them",
            )  # fmt: skip

    def allreduce_grads(self) -> None:
        """Make every parameter's ``grad``, on every rank, the sum over all ranks; `update` must follow.

        Every rank must call, after backward. A program may change the gradients before the update.

        Raises:
            StaleGradientError: as `step`.
            ConfigError: the trainer is reproducible, or its store updates.
        """
        with self._on_its_gpu():
            self._settle("allreduce_grads")
            self._require_own_sums("allreduce_grads")
            self._refuse_sums("allreduce_grads")
            began_ns = time.perf_counter_ns()
            self._sum_gradients()
            self._account(began_ns)

    def _require_own_sums(self, operation: str) -> None:
        """Raise `ConfigError` where `step` alone can sum gradients."""

    def _sum_gradients(self) -> None:
        raise NotImplementedError

    def _account(self, began_ns: int) -> None:
        raise NotImplementedError

    def update(self, count: int) -> int:
        """Update from gradients that `allreduce_grads` has summed; every rank must call. Changes parameters in place.

        Args:
            count: samples of this rank behind the sum.

        Returns:
            The global count; if it is 0, nothing is updated.
        """
        with self._on_its_gpu():
            self._settle("update")
            self._require_own_sums("update")
            if not self._holds_sums:
                raise StaleGradientError(
                    "update", expected="gradients summed by allreduce_grads()", got="gradients of this rank alone",
                    remedy="call allreduce_grads() before, or step(count) instead",
                )  # fmt: skip
            held = _checked_count("update", count) + self._held_count
            self._warn_of_mean_losses("update", count)
            return self._update_from_sums(held)

    def _update_from_sums(self, held: int) -> int:
        raise NotImplementedError

    def graph_update(self, leaves: Sequence[Any]) -> GraphUpdate | None:
        """Return the update that a `TrainStep` captures in a CUDA graph after backward; None if `step` must update.

        Args:
            leaves: the parameters whose gradients backward writes.
        """
        return None

    def launching(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return those of ``leaves`` whose gradients launch a reduction, where a `TrainStep` splits its CUDA graph.

        Args:
            leaves: the parameters whose gradients backward writes, in the order of completion.
        """
        return ()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate, and `step` only counts samples.

        The next step outside uses all gradients. Ranks may accumulate different numbers of batches.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """Drop the gradients of a step that ends with an error; every rank must call."""
        self._begin_step()

    def _begin_step(self) -> None:
        raise NotImplementedError

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Let the program change parameters within this context; every rank must enter and leave it.

        For example::

            with trainer.changing_parameters():
                net.weight *= 0.5

        Within it each rank has copies of the trained parameters, so a change applies once where ranks share them. At
        its end, also after an exception, all ranks get the values of rank 0, or of rank 0 of each part of a cut model,
        and `take_parameters` runs. Buffers and untrained parameters stay private to each rank. Outside of the context,
        in-place changes of shared parameters raise an error, except changes of their ``data`` by NumPy. A nested
        context does nothing.

        Raises:
            ConfigError: a later Trainer has taken the parameters; or a parameter has another shape or dtype, and then
                nothing is changed; or an array or view from before was changed, which is lost. On every rank.
        """
        if self._is_changing:
            yield
            return
        autograd.waitall()
        watched = nullcontext() if self.world is None else Watchdog.of(self.world).watching("changing_parameters")
        with watched:  # detects ranks that call something else
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
        """Communicator of the ranks; None if there are no other ranks."""
        return None if self.world is None else self.world.comm

    def _settle(self, operation: str) -> None:
        """Wait for readers before parameters or gradients change; `ConfigError` within `changing_parameters`."""
        if self._is_changing:
            raise ConfigError(
                operation, expected="a call outside of changing_parameters()", got="a call within the context"
            )
        autograd.waitall()

    def take_parameters(self) -> None:
        """Continue from the current values of the parameters; every rank must call after it has written to them.

        A store that updates takes the values of rank 0, and so do all ranks. Master weights of 16-bit parameters take
        their values. In all other cases the trainer reads the parameters themselves, and nothing is to do. Parameters
        that ranks share have the changes of all ranks: see `changing_parameters`.
        """

    def synchronize(self) -> None:
        """Wait for all ranks, and give each the values after all their updates; every rank must call.

        Ranks that do not step together call it before they evaluate, and at the end of training. From then on
        `step_count` counts the updates of all ranks. On buckets, where ranks step together, it does nothing.
        """

    def statistics(self) -> dict[str, float]:
        """Return statistics of all ranks' pushes to a store; every rank must call.

        Returns:
            ``staleness_mean`` and ``staleness_max``: the number of pushes of other ranks to a parameter between a
            rank's last pull of it and its push; ``waited_s``: seconds of waiting for slower ranks, mean over ranks;
            ``sent_nbytes``: bytes sent to other nodes by all ranks. Empty where ranks step together.
        """
        return {}

    def save_states(self, path: str | Path) -> None:
        """Write the optimizer's state of all ranks to the file ``path``, atomically; every rank must call.

        Raises:
            DataError: rank 0 cannot write the file; on every rank.
            StaleGradientError: some, but not all virtual shards of a step are computed; on every rank.
        """
        raise NotImplementedError

    def load_states(self, path: str | Path) -> None:
        """Restore a file of `save_states`, written by any number of ranks with any owner; every rank must call.

        Trainers with and without a ``kvstore`` load each other's files; without one, compression residuals load, too.

        Raises:
            DataError: the file is missing, damaged or of another model or optimizer; on every rank, nothing is changed.
            StaleGradientError: as `save_states`.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without the network's parameters; every rank must call.

        Returns:
            ``states``: the optimizer's state by parameter and name, with this rank's parts, and ``passed_over``: the
            number of updates that left a parameter out; or ``store``: the state of the store that updates;
            ``residuals``: gradients that compression has not sent yet; ``optimizer``: its settings, as JSON;
            ``step_count``, ``loss_scale``, ``good_steps``, ``num_nonfinite``; and ``virtual_shards``, ``arithmetic``
            and ``layout``, which decide the bits. The arrays are the trainer's own, which the next `step` changes.

        Raises:
            StaleGradientError: within a step: some, but not all virtual shards are computed, or gradients are
                accumulated or summed; on every rank.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the saved settings of the optimizer; every rank must call.

        A checkpoint restores the state of any number of ranks and any owner. With another layout of buckets, or on
        another kind of processor, rank 0 warns that last bits may differ.

        Raises:
            ConfigError: it is no state of a trainer, or of another optimizer, other parameters or another number of
                virtual shards.
            StaleGradientError: as `state_dict`.
        """
        raise NotImplementedError


def show_to_profiler(params: Sequence[ParameterLike], world: World | None) -> None:
    """Record the spans of a traced world also as NVTX ranges, if parameters are on a GPU."""
    trace: Trace | None = None if world is None else world.kept.get(Trace)
    if trace is not None and trace.ranges is None and any(is_cupy(param.data) for param in params):
        trace.ranges = nvtx()
