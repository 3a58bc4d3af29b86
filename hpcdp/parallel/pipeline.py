"""Pipeline parallelism: a model cut into stages, which process the micro-batches of a batch one after the other.

While a stage computes one micro-batch, the next stage computes the previous one. Ranks are stages times replicas, and
the ranks of one stage sum their gradients as in data parallelism (Huang et al., "GPipe", 2019; for layers of a
recurrent network, Wu et al., "Google's neural machine translation system", 2016, section 3.3).

All schedules give the same gradients, since a stage's backwards always run in the order of the micro-batches. They
differ in the number of activations a stage must keep. Each idles a stage for ``num_stages - 1`` forwards and backwards,
so the bubble is ``(s - 1) / (m + s - 1)`` of the time, for ``s`` equally fast stages and ``m`` micro-batches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from .. import autograd
from ..autograd import Tensor, as_tensor
from ..comm import Communicator, Request, World, init
from ..comm.communicator import make_tag
from ..comm.consistency import Outcome, require_same, told_to_all
from ..comm.watchdog import OWN, Watchdog
from ..core.arrays import Array, dtype_of, from_host, is_float, native, to_host
from ..core.checks import instance, not_copied, one_of, whole_number
from ..core.environment import enter_replica, replica_number
from ..errors import ConfigError, DataError, MismatchError, UnsupportedError, type_named
from ..nn import Module
from ..nn.functional import require_per_sample
from ..nn.jit.tracing import ChangeDetector

if TYPE_CHECKING:
    from ..data_parallel.base_trainer import BaseTrainer


class Split(NamedTuple):
    """Both worlds of a rank: see `split_world`."""

    parts: World
    """The ranks that hold one copy of the layers together, as `ColumnDense` and its siblings need."""
    replicas: World
    """The ranks that hold the same part: the world of a `Trainer` or a `Pipeline`."""


def split_world(num_parts: int, world: World | None = None) -> Split:
    """Split ranks into parts times replicas; every rank of ``world`` must call.

    Rank r has part ``r % num_parts`` of copy ``r // num_parts``. The parts of a copy, which communicate in every layer,
    are neighboring ranks, usually on one node, where they use shared memory.

    Args:
        num_parts: parts of every split layer; with 1 every rank has a full copy.
        world: the ranks; default `hpcdp.init()`.

    Returns:
        The worlds of this rank.

    Raises:
        ConfigError: ``num_parts`` is not an integer >= 1 that divides the number of ranks.
        MismatchError: ranks pass different arguments.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3, and for both kinds together figure 8.
    """
    world = init() if world is None else world
    require_same(world.comm, "split_world", [f"num_parts {num_parts!r}"], "pass the same num_parts on all ranks")
    expected = f"a number that divides the {world.size} ranks"
    number = whole_number("split_world", "num_parts", num_parts, 1, expected=expected)
    if world.size % number:
        raise ConfigError("split_world", where="num_parts", expected=expected, got=number)
    parts = world.split(world.rank // number)
    share_replica(parts)
    return Split(parts, world.split(world.rank % number, part_comm=parts.comm))


def share_replica(world: World) -> None:
    """Make the ranks of ``world``, which form one replica, draw the same random numbers; every rank must call.

    They adopt their lowest replica number, so that overlapping groups joined earlier or later agree.
    """
    world.keep("replica", lambda: enter_replica(min(world.comm.allgather_json(replica_number()))))


_DTYPES = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8", "bool", "bfloat16")
_MOST_AXES = 8
_SIGNATURE = 1
FORWARD, BACKWARD = 1, 2
"""Directions of messages, as used in tags."""


class StageLink:
    """One direction between two neighboring stages, first in, first out; here a queue within one process."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Array, ...]] = deque()

    def begin(self, length: int) -> None:
        """Announce a batch of ``length`` samples, whose micro-batches are sent next."""

    def expect(self, length: int) -> None:
        """Wait for the announcement of a batch of ``length`` samples."""

    def send(self, arrays: tuple[Array, ...]) -> None:
        """Start to send; the arrays must not change afterwards."""
        self._sent.append(arrays)

    def receive(self) -> tuple[Array, ...]:
        """Wait for the next arrays and return them; stages of one process take turns and never wait."""
        return self._sent.popleft()

    def finish(self) -> None:
        """Wait until everything sent has left."""

    def forget(self) -> None:
        """Drop arrays that were sent but not received, after an error; between ranks the job ends with it."""
        self._sent.clear()


class StageMessages(StageLink):
    """Messages between ranks: a header with shape and dtype precedes each array.

    Args:
        comm: a communicator for these messages and those of the other direction.
        other: the rank at the other end.
        way: `FORWARD` or `BACKWARD`.
        watchdog: informed of what this rank waits for.
        behind: the local ranks of this node that are waited for: ``other``, if it is one of them.
        like: an array of the namespace in which arrays arrive.
    """

    def __init__(
        self, comm: Communicator, other: int, way: int, watchdog: Watchdog, behind: list[int], like: Array
    ) -> None:
        super().__init__()
        self._comm, self._other, self._tag = comm, other, make_tag(_SIGNATURE, way)
        self._watchdog, self._behind, self._like = watchdog, behind, like
        content = "activations" if way == FORWARD else "gradients"
        self._label = f"wait for {content} from rank {other} of the pipeline"
        self._under_way: deque[tuple[Request, np.ndarray]] = deque()

    def begin(self, length: int) -> None:
        """See `StageLink.begin`."""
        self._send(np.array([length], np.int64))

    def expect(self, length: int) -> None:
        """See `StageLink.expect`; a batch of another length is a `MismatchError`."""
        with self._waiting():
            (previous_length,) = self._receive(np.empty(1, np.int64))
        if previous_length != length:
            raise MismatchError(
                "Pipeline.step", where="batch",
                expected=f"{previous_length} samples, as on rank {self._other} of this copy, the previous stage",
                got=length, remedy="pass the same batch to all stages of a copy, or arrays of its length",
            )  # fmt: skip

    def send(self, arrays: tuple[Array, ...]) -> None:
        """See `StageLink.send`.

        Raises:
            UnsupportedError: too many axes, or an unsupported dtype.
        """
        while self._under_way and self._under_way[0][0].test():
            self._under_way.popleft()
        self._send(np.array([len(arrays)], np.int64))
        for array in arrays:
            values = native(to_host(array))
            if values.dtype.name not in _DTYPES or values.ndim > _MOST_AXES:
                expected = f"at most {_MOST_AXES} axes, of {', '.join(_DTYPES)}"
                raise UnsupportedError(
                    "pipeline", where="activations", expected=expected, got=f"{values.shape} {values.dtype}"
                )
            header = np.zeros(2 + _MOST_AXES, np.int64)
            header[:2] = _DTYPES.index(values.dtype.name), values.ndim
            header[2 : 2 + values.ndim] = values.shape
            self._send(header)
            if values.size:
                self._send(values)

    def _send(self, values: np.ndarray) -> None:
        self._under_way.append((self._comm.isend(values, self._other, self._tag), values))

    def receive(self) -> tuple[Array, ...]:
        """See `StageLink.receive`."""
        with self._waiting():
            (count,) = self._receive(np.empty(1, np.int64))
            return tuple(self._receive_one() for _ in range(count))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        call = self._label, None, lambda: self._behind, OWN
        self._watchdog.enter(call)
        try:
            yield
        finally:
            self._watchdog.leave(call)

    def _receive_one(self) -> Array:
        dtype, ndim, *shape = self._receive(np.empty(2 + _MOST_AXES, np.int64)).tolist()
        values = np.empty(shape[:ndim], dtype_of(_DTYPES[dtype]))
        return from_host(self._receive(values) if values.size else values, self._like)

    def _receive(self, into: np.ndarray) -> np.ndarray:
        self._comm.irecv(into, self._other, self._tag).wait()
        return into

    def finish(self) -> None:
        """See `StageLink.finish`."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


class Action(NamedTuple):
    """Next action of a stage: forward or backward of a micro-batch, counted from 0."""

    is_forward: bool
    micro: int


def gpipe(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """Return all forwards, then all backwards: a stage keeps the activations of all micro-batches.

    Source: Huang et al., "GPipe", 2019, section 2.2, but backwards in the order of the forwards.
    """
    return [Action(is_forward, micro) for is_forward in (True, False) for micro in range(num_micro)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """Return backwards as early as possible: a stage keeps activations of at most ``num_stages - stage`` micro-batches.

    Source: Narayanan et al., "PipeDream", 2019, section 3.2, with a flush at the end of each batch as in Narayanan et
    al., "Efficient large-scale language model training", 2021, section 2.2.1.
    """
    ahead = min(num_micro, num_stages - stage - 1)
    actions = [Action(True, micro) for micro in range(ahead)]
    for micro in range(ahead, num_micro):
        actions += [Action(True, micro), Action(False, micro - ahead)]
    return actions + [Action(False, micro) for micro in range(num_micro - ahead, num_micro)]


def pieces(count: int, number: int) -> list[tuple[int, int]]:
    """Return the bounds of the micro-batches of ``count`` samples.

    There are at most ``number``, none is empty, and the first ones have one sample more if it does not divide.
    """
    number = min(count, number)
    ends = [0]
    for piece in range(number):
        ends.append(ends[-1] + count // number + (piece < count % number))
    return list(itertools.pairwise(ends))


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Schedules by the value of a `Pipeline` 's ``schedule``. Each takes stage, number of stages and number of micro-
batches."""


Stage = Module | Callable[[], Module]
Loss = Callable[[Any, Array], Tensor]


@dataclass
class _Part:
    """One stage of this rank."""

    stage: int
    module: Module
    before: tuple[StageLink, StageLink] | None
    """Links for its inputs and for their gradients; None at the first stage."""
    after: tuple[StageLink, StageLink] | None
    """Links for its outputs and for their gradients; None at the last stage."""
    kept: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=dict)
    """Inputs and outputs of the micro-batches whose backward is pending."""

    @property
    def links(self) -> tuple[StageLink, ...]:
        """All links of the stage."""
        return (*(self.before or ()), *(self.after or ()))


class Pipeline(Module):
    """Pipeline of model stages on neighboring ranks. Every rank of ``world`` must construct it identically.

    Rank r has stage ``r // replicas`` of copy ``r % replicas``. The ranks of a stage are neighbors, usually on one
    node, where they use shared memory. As a `Module` it has this rank's stages as children, named by their numbers.
    Parameter names are therefore those of ``Sequential(*stages)``, e.g. ``"0.weight"``.

    Batch normalization uses the statistics of a micro-batch, and updates the running ones once for each.

    Args:
        stages: a module for each stage, or a function that builds it, called only on the ranks that need it. A stage
            takes the results of the previous one, a tensor or several. On several ranks, a parameter must belong to one
            stage; this cannot be checked for stages built by functions.
        loss: function of the last stage's result and labels that returns per-sample losses, shape ``(batch,)``. The
            trainer averages over the samples of all replicas.
        world: the ranks, a multiple of the number of stages. With one rank all stages are in this process and take
            turns. Default: `hpcdp.init()`.
        micro_batches: number of pieces of each batch. The first ones have one sample more if it does not divide; empty
            pieces are skipped.
        schedule: ``"1f1b"`` or ``"gpipe"``, see `one_forward_one_backward` and `gpipe`.

    Raises:
        ConfigError: no stages, an unknown schedule, ranks that are not a multiple of the stages, or ``micro_batches``
            below 1. On all ranks: a stage is not a module, has a layer such as `train.SyncBatchNorm` that needs all
            ranks, or shares a parameter with a stage on another rank. In forward: the call is recorded.
        MismatchError: ranks pass different arguments.
    """

    is_traceable = False
    gives_pieces = True
    has_own_step = True
    replicas: World
    """The ranks that have the same stages as this one: the world of the `Trainer`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        loss: Loss,
        world: World | None = None,
        *,
        micro_batches: int = 4,
        schedule: str = "1f1b",
    ) -> None:
        world = init() if world is None else world
        instance("Pipeline", "stages", stages, Sequence, "a list of modules")
        instance("Pipeline", "world", world, World, "a World, such as hpcdp.init() or split_world(...).replicas")
        _check(len(stages), world.size, micro_batches, schedule)
        arguments = [f"{len(stages)} stages", f"micro_batches {micro_batches}", f"schedule {schedule}"]
        self._loss, self._micro_batches, self._schedule = loss, micro_batches, SCHEDULES[schedule]
        self._num_stages = len(stages)
        on_ranks = world.size > 1
        num_replicas = world.size // len(stages) if on_ranks else 1
        first = world.rank // num_replicas
        own_stages = range(first, first + 1) if on_ranks else range(len(stages))

        def built() -> dict[int, Module]:
            modules = {stage: _made(stage, stages[stage]) for stage in own_stages}
            if on_ranks:
                _refuse_tied(dict(enumerate(stages)) | modules)
            return modules

        same = (arguments, "pass the same arguments on all ranks")
        modules = told_to_all(world.comm, Outcome.of(built), "Pipeline", [same])
        column = world.split(world.rank % num_replicas) if on_ranks else None
        self._comm = None if column is None else column.comm
        """The ranks of this copy of the model, by stage; None if all stages are in this process."""
        if column is not None:
            share_replica(column)
        self.replicas = world if column is None else world.split(own_stages[0], model_comm=column.comm)
        links = self._links(world, column, own_stages, modules)
        self._parts = [_Part(stage, module, links[stage], links[stage + 1]) for stage, module in modules.items()]
        for stage, module in modules.items():
            setattr(self, str(stage), module)
        self.parameters()  # sets their names
        self._look = ChangeDetector()
        self.replicas.closings.add(self._let_go)

    def _let_go(self) -> None:
        """Release the links when the ranks' world is closed; later computations fail at their first stage."""
        if self._comm is not None:  # else all stages are in this process
            vars(self).update(_parts=self.replicas.comm)

    __reduce__ = not_copied(
        "Pipeline",
        "a pipeline, which owns communicators",
        "construct another Pipeline and call load_state_dict(pipeline.state_dict())",
    )

    def _links(
        self, world: World, column: World | None, stages: range, modules: dict[int, Module]
    ) -> dict[int, tuple[StageLink, StageLink] | None]:
        """Return the forward and backward links of each boundary of this rank, by the number of the later stage."""
        links: dict[int, tuple[StageLink, StageLink] | None] = {0: None, self._num_stages: None}
        if column is None:
            return links | {stage: (StageLink(), StageLink()) for stage in range(1, self._num_stages)}
        places = column.comm.allgather_json([world.node, world.local_rank])
        comm, watchdog = column.comm.duplicate(), Watchdog.of(world)
        like = next(iter(modules[stages[0]].state_dict().values()), np.empty(0))
        for boundary, other in ((stages[0], stages[0] - 1), (stages[0] + 1, stages[0] + 1)):
            if 0 < boundary < self._num_stages:
                node, local_rank = places[other]
                behind = [local_rank] if node == world.node else []
                links[boundary] = (
                    StageMessages(comm, other, FORWARD, watchdog, behind, like),
                    StageMessages(comm, other, BACKWARD, watchdog, behind, like),
                )
        return links

    def hybridize(self, active: bool = True) -> None:
        """Hybridize each of this rank's stages, see `Module.hybridize`; communication is not part of the plans."""
        for part in self._parts:
            part.module.hybridize(active)

    def graph(self) -> NoReturn:
        """Raise `ConfigError`: graphs exist for each stage only."""
        raise ConfigError("graph", where="Pipeline", expected="a single stage", got="the whole pipeline")

    def forward(self, x: Any) -> Any:
        """Predict with the whole model; every rank of this copy must call.

        The first stage needs the input ``x``, the others an array of the same length. Nothing is recorded, and a call
        within ``record()`` raises `ConfigError`.

        Returns:
            The result of the last stage, on every rank of this copy.
        """
        if autograd.is_recording():
            raise ConfigError(
                "Pipeline", expected="a call outside record(), which predicts", got="a call within record()",
                remedy="train by pipeline.step(trainer, x, y), not by train.fit or train.TrainStep",
            )  # fmt: skip
        with self._forgetting_at_errors(), autograd.pause(train_mode=autograd.is_training()):
            outputs: tuple[Tensor, ...] = ()
            for part in self._parts:
                inputs = (as_tensor(x),) if part.before is None else _tensors(part.before[0].receive())
                outputs = _several(part.module(*inputs))
                if part.after is not None:
                    part.after[0].send(_arrays(outputs))
        self._finish()
        return _alone(_tensors(self._from_last(_arrays(outputs))))

    def step(self, trainer: BaseTrainer, x: Array, y: Array) -> float:
        """Run forward, backward and update for one batch of this copy; every rank of ``world`` must call.

        If an error occurs, and all stages are in this process, the batch leaves no state behind.

        Args:
            trainer: the trainer of this pipeline's parameters and its `replicas`.
            x: this copy's batch, along axis 0; only the first stage reads it, other ranks need an array of the same
                length.
            y: its labels; only the last stage reads them, other ranks need as many.

        Returns:
            The sum of the losses of this copy's samples, before the update, on each of its ranks.

        Raises:
            ConfigError: the trainer has another world, or is reproducible (it sums virtual shards, not micro-batches);
                on ranks of the last stage: the loss does not have shape ``(batch,)``.
            DataError: ``x`` and ``y`` differ in length.
            MismatchError: the previous stage's rank of this copy has a batch of another length.
        """
        if self._look.is_due():
            self.require_parts_of_this_rank("Pipeline.step")
        if getattr(trainer, "world", None) is not self.replicas:
            raise ConfigError(
                "Pipeline.step", where="trainer", expected="a trainer of the pipeline's replicas", got="another world",
                remedy="create Trainer(pipeline.parameters(), optimizer, pipeline.replicas)",
            )  # fmt: skip
        if trainer.virtual_shards is not None:
            raise ConfigError("Pipeline.step", where="trainer", expected="a trainer without reproducible=True",
                              got=f"{trainer.virtual_shards} virtual shards")  # fmt: skip
        if not all(hasattr(array, "__len__") for array in (x, y)):
            got = f"{type_named(x)} and {type_named(y)}"
            raise ConfigError("Pipeline.step", expected="samples and a label for each", got=got)
        if len(x) != len(y):
            raise DataError("Pipeline.step", expected="a label for each sample", got=f"{len(x)} and {len(y)}")
        with self._forgetting_at_errors(trainer):
            total = self._train(trainer, x, y)
        return float(self._from_last((np.array([total]),))[0][0])

    def _train(self, trainer: BaseTrainer, x: Array, y: Array) -> float:
        """Return the sum of the losses on ranks with the last stage, else 0."""
        spans = pieces(len(x), self._micro_batches)
        for part in self._parts:
            if part.before is not None:
                part.before[0].expect(len(x))
            if part.after is not None:
                part.after[0].begin(len(x))
        if not spans:
            trainer.step(0)
        total = 0.0
        for part, action in self._turns(len(spans)):
            first, last = spans[action.micro]
            if action.is_forward:
                total += self._forward(part, action.micro, x[first:last], y[first:last])
                continue
            # This rank's last backward completes the step's gradients; earlier ones accumulate.
            ends = action.micro == len(spans) - 1 and part is self._parts[0]
            with contextlib.nullcontext() if ends else trainer.no_sync():
                self._backward(part, action.micro, trainer.loss_scale)
                if part is self._parts[0]:
                    trainer.step(last - first)
        self._finish()
        return total

    @contextlib.contextmanager
    def _forgetting_at_errors(self, trainer: BaseTrainer | None = None) -> Iterator[None]:
        """Drop messages that the next call would mistake for its own, after an error; between ranks the job ends."""
        try:
            yield
        except BaseException:
            if self._comm is None:
                for part in self._parts:
                    part.kept.clear()
                    for link in part.links:
                        link.forget()
                if trainer is not None:
                    trainer.drop()
            raise

    def _turns(self, num_micro: int) -> Iterator[tuple[_Part, Action]]:
        """Yield this rank's actions in order; several stages take turns, each as soon as it can."""
        left = {part.stage: self._schedule(part.stage, self._num_stages, num_micro)[::-1] for part in self._parts}
        if len(self._parts) == 1:
            yield from ((self._parts[0], action) for action in reversed(left[self._parts[0].stage]))
            return
        done: set[tuple[int, Action]] = set()
        while any(left.values()):
            for part in self._parts:
                actions, stage = left[part.stage], part.stage
                while actions and _is_ready(stage, actions[-1], self._num_stages, done):
                    done.add((stage, actions[-1]))
                    yield part, actions.pop()

    def _forward(self, part: _Part, micro: int, x: Array, y: Array) -> float:
        """Return the sum of the losses at the last stage, else 0."""
        with autograd.record():
            inputs = (as_tensor(x),) if part.before is None else _tensors(part.before[0].receive())
            for tensor in _floats(inputs) if part.before is not None else ():
                tensor.attach_grad()
            outputs = tuple(map(_recorded, _several(part.module(*inputs))))
            if part.after is None:
                losses = self._loss(_alone(outputs), y)
        if part.after is not None:
            part.after[0].send(_arrays(outputs))
            part.kept[micro] = inputs, outputs
            return 0.0
        require_per_sample("Pipeline.step", losses, len(y))
        part.kept[micro] = inputs, (losses,)
        return float(to_host(losses.data).sum(dtype=np.float64))

    def _backward(self, part: _Part, micro: int, loss_scale: float) -> None:
        inputs, outputs = part.kept.pop(micro)
        gradients: tuple[Array | float, ...] = (loss_scale,) if part.after is None else part.after[1].receive()
        pairs = [pair for pair in zip(_floats(outputs), gradients, strict=True) if pair[0].node is not None]
        autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        if part.before is not None:
            part.before[1].send(tuple(x.grad for x in _floats(inputs)))

    def _finish(self) -> None:
        for part in self._parts:
            for link in part.links:
                link.finish()

    def _from_last(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the last stage's arrays on every rank of this copy."""
        if self._comm is None:
            return arrays
        comm, root = self._comm, self._comm.size - 1
        host = [native(to_host(array)) for array in arrays]
        shapes = comm.allgather_json([[list(array.shape), array.dtype.name] for array in host])[root]
        if comm.rank != root:
            host = [np.empty(shape, dtype_of(dtype)) for shape, dtype in shapes]
        for array in host:
            comm.native_broadcast(array, root)
        return tuple(host)


def _recorded(output: Tensor) -> Tensor:
    """Return a leaf that a stage passes through, an input or parameter, as a result that gets a gradient."""
    return output * 1 if output.node is None and output.grad_req != "null" else output


def _check(num_stages: int, size: int, micro_batches: int, schedule: str) -> None:
    one_of("Pipeline", "schedule", schedule, SCHEDULES)
    if num_stages < 1:
        raise ConfigError("Pipeline", where="stages", expected="at least one stage", got="none")
    whole_number("Pipeline", "micro_batches", micro_batches, 1)
    if size > 1 and size % num_stages:
        raise ConfigError(
            "Pipeline", where="world", expected=f"1 rank, or a multiple of the {num_stages} stages", got=f"{size} ranks"
        )


def _made(number: int, stage: Stage) -> Module:
    module = stage() if callable(stage) and not isinstance(stage, Module) else stage
    module = instance("Pipeline", f"stages[{number}]", module, Module, "a module, or a function that makes one")
    module.require_parts_of_this_rank(f"Pipeline stages[{number}]")
    return module


def _refuse_tied(stages: Mapping[int, Stage]) -> None:
    """Raise `ConfigError` if stages share a parameter, since the ranks of each would train their own copy."""
    first_seen: dict[int, tuple[int, str]] = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters() if isinstance(stage, Module) else ():
            first, first_name = first_seen.setdefault(id(parameter), (number, name))
            if first != number:
                raise ConfigError(
                    "Pipeline", where="stages",
                    expected="each parameter in one stage, where stages are on different ranks",
                    got=f"'{first}.{first_name}' of stage {first} in stage {number}, too, as '{number}.{name}'",
                    remedy="put layers that share a parameter into one stage",
                )  # fmt: skip


def _is_ready(stage: int, action: Action, num_stages: int, done: set[tuple[int, Action]]) -> bool:
    """Return whether the input of ``action`` is available, if all stages are in one process."""
    source = stage - 1 if action.is_forward else stage + 1
    return not 0 <= source < num_stages or (source, action) in done


def _several(x: Any) -> tuple[Tensor, ...]:
    several = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not all(isinstance(value, Tensor) for value in several):
        got = ", ".join(map(type_named, several))
        raise ConfigError("Pipeline", expected="stages that return one or more tensors", got=got)
    return several


def _alone(xs: tuple[Any, ...]) -> Any:
    return xs[0] if len(xs) == 1 else xs


def _tensors(arrays: tuple[Array, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(array) for array in arrays)


def _floats(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the tensors that have gradients."""
    return [tensor for tensor in tensors if is_float(tensor.dtype)]


def _arrays(tensors: tuple[Tensor, ...]) -> tuple[Array, ...]:
    return tuple(tensor.data for tensor in tensors)
