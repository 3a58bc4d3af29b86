"""Pipelines of stages, and their schedules.

A model cut by layers into stages, which compute the micro-batches of a batch one after the other.

While a stage computes one micro-batch the next stage computes the one before. Ranks are stages times replicas: the
ranks of one stage sum their gradients as in data parallelism. Source: Huang et al., "GPipe", 2019; for the layers of a
recurrent network on several devices Wu et al., "Google's neural machine translation system", 2016, section 3.3.

In which order one stage of a pipeline computes the forwards and backwards of its micro-batches.

All schedules give the same gradients: a stage's backwards are always in the order of the micro-batches. They differ in
how many activations a stage must keep at a time. Each leaves a stage without work for ``num_stages - 1`` forwards and
backwards of one micro-batch, so that the share of time lost is ``(s - 1) / (m + s - 1)`` with ``s`` stages, as slow as
each other, and ``m`` micro-batches.

Messages between stages, and the worlds of replicas.

Which ranks compute layers together, each with its part of the channels, and which ones have the same part.

What carries activations from a stage to the next one, and their gradients back: messages, or a queue.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

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
from ..nn.jit.tracing import Look


class Split(NamedTuple):
    """The two worlds of a rank: see `split_world`."""

    parts: World
    """The ranks that hold one copy of the layers together: what `ColumnDense` and its like take."""
    replicas: World
    """The ranks that hold the same part: the `Trainer` 's world, and that of a `Pipeline`."""


def split_world(num_parts: int, world: World | None = None) -> Split:
    """Ranks as parts times replicas; every rank of ``world`` must call.

    Rank r has part ``r % num_parts`` of copy ``r // num_parts``: the parts of a copy, which meet in every layer, lie
    side by side, mostly on one node, where they share memory.

    Args:
        num_parts: of every layer that is split; 1: every rank has a copy.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: no number from 1 on that divides the number of ranks.
        MismatchError: ranks have said different things.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3, and for both kinds together figure 8.
    """
    world = init() if world is None else world
    require_same(world.comm, "split_world", [f"num_parts {num_parts!r}"], "split alike on all ranks")
    expected = f"a number that divides the {world.size} ranks"
    number = whole_number("split_world", "num_parts", num_parts, 1, expected=expected)
    if world.size % number:
        raise ConfigError("split_world", where="num_parts", expected=expected, got=number)
    parts = world.split(world.rank // number)
    share_replica(parts)
    return Split(parts, world.split(world.rank % number, part_comm=parts.comm))


def share_replica(world: World) -> None:
    """Let the ranks of ``world``, which hold one replica together, draw the same random numbers; every rank must call.

    They take the lowest of their replica numbers, so that a smaller or larger group, joined before or after, agrees.
    """
    world.keep("replica", lambda: enter_replica(min(world.comm.allgather_json(replica_number()))))


_DTYPES = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8", "bool", "bfloat16")
_MOST_AXES = 8
_SIGNATURE = 1
FORWARD, BACKWARD = 1, 2
"""The numbers of the two ways, in tags."""


class StageLink(Protocol):
    """One way between two neighbouring stages; what is sent first is received first."""

    def begin(self, length: int) -> None:
        """Tell the other end of a batch of so many samples, of which what is sent next are micro-batches."""
        ...

    def expect(self, length: int) -> None:
        """Wait for such a batch.

        Raises:
            MismatchError: the other end has begun one of another length.
        """
        ...

    def send(self, arrays: tuple[Array, ...]) -> None:
        """Begin to send; the arrays must not change any more."""
        ...

    def receive(self) -> tuple[Array, ...]:
        """The next ones, in memory that nobody else has; waits for them."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        ...

    def forget(self) -> None:
        """Drop what was sent and not received, after an error."""
        ...


class Queue:
    """Between stages of one process."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Array, ...]] = deque()

    def begin(self, length: int) -> None:
        """See `Link`."""

    def expect(self, length: int) -> None:
        """See `Link`; there is one batch."""

    def send(self, arrays: tuple[Array, ...]) -> None:
        """See `Link`."""
        self._sent.append(arrays)

    def receive(self) -> tuple[Array, ...]:
        """See `Link`; what comes is there, since stages of one process take turns."""
        return self._sent.popleft()

    def finish(self) -> None:
        """See `Link`."""

    def forget(self) -> None:
        """See `Link`."""
        self._sent.clear()


class StageMessages:
    """Between ranks: a header with shapes and dtypes goes before the elements of each array.

    Args:
        comm: whose messages these alone are, with those of the other way.
        other: the rank at the other end.
        way: `FORWARD` or `BACKWARD`.
        watchdog: told what this rank waits for.
        behind: the local ranks of this node that are waited for: `other`, if it is one of them.
        like: an array of the namespace in which arrays arrive.
    """

    def __init__(
        self, comm: Communicator, other: int, way: int, watchdog: Watchdog, behind: list[int], like: Array
    ) -> None:
        self._comm, self._other, self._tag = comm, other, make_tag(_SIGNATURE, way)
        self._watchdog, self._behind, self._like = watchdog, behind, like
        what = "activations" if way == FORWARD else "gradients"
        self._label = f"wait for {what} from rank {other} of the pipeline"
        self._under_way: deque[tuple[Request, np.ndarray]] = deque()

    def begin(self, length: int) -> None:
        """See `Link`."""
        self._send(np.array([length], np.int64))

    def expect(self, length: int) -> None:
        """See `Link`."""
        with self._waiting():
            (theirs,) = self._receive(np.empty(1, np.int64))
        if theirs != length:
            raise MismatchError(
                "Pipeline.step", where="batch",
                expected=f"{theirs} samples, as rank {self._other} of this copy has, the stage before", got=length,
                remedy="give all stages of a copy the same batch; those in the middle need an array as long",
            )  # fmt: skip

    def send(self, arrays: tuple[Array, ...]) -> None:
        """See `Link`.

        Raises:
            UnsupportedError: more axes, or another dtype, than a header can tell.
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
        """See `Link`."""
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
        """See `Link`."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def forget(self) -> None:
        """See `Link`; between ranks the job ends with the error."""


class Action(NamedTuple):
    """What a stage does next: the forward or the backward of a micro-batch, which are counted from 0."""

    is_forward: bool
    micro: int


def gpipe(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """All forwards, then all backwards: a stage keeps the activations of all micro-batches.

    Source: Huang et al., "GPipe", 2019, section 2.2, but backwards in the order of the forwards.
    """
    return [Action(is_forward, micro) for is_forward in (True, False) for micro in range(num_micro)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro: int) -> list[Action]:
    """A backward as soon as there is one: a stage keeps those of at most ``num_stages - stage`` micro-batches.

    Source: Narayanan et al., "PipeDream", 2019, section 3.2, with a flush at the end of each batch as in Narayanan et
    al., "Efficient large-scale language model training", 2021, section 2.2.1.
    """
    ahead = min(num_micro, num_stages - stage - 1)
    actions = [Action(True, micro) for micro in range(ahead)]
    for micro in range(ahead, num_micro):
        actions += [Action(True, micro), Action(False, micro - ahead)]
    return actions + [Action(False, micro) for micro in range(num_micro - ahead, num_micro)]


def pieces(count: int, number: int) -> list[tuple[int, int]]:
    """Where the micro-batches of ``count`` samples begin and end: at most ``number``, none of them empty, the first
    ones longer by a sample where it does not divide."""
    number = min(count, number)
    ends = [0]
    for piece in range(number):
        ends.append(ends[-1] + count // number + (piece < count % number))
    return list(itertools.pairwise(ends))


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""By the value of a `Pipeline` 's ``schedule``; each takes stage, number of stages and number of micro-batches."""


Stage = Module | Callable[[], Module]
Loss = Callable[[Any, Array], Tensor]


class Trains(Protocol):
    """What a pipeline asks of a `Trainer`."""

    virtual_shards: int | None
    loss_scale: float

    @property
    def world(self) -> World | None: ...

    def step(self, count: int) -> int: ...

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...

    def drop(self) -> None: ...


@dataclass
class _Part:
    """A stage of this rank's."""

    stage: int
    module: Module
    before: tuple[StageLink, StageLink] | None
    """Whence its inputs come, and where their gradients go; None at the first stage."""
    after: tuple[StageLink, StageLink] | None
    """Where its outputs go, and whence their gradients come; None at the last stage."""
    kept: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=dict)
    """Inputs and outputs of the micro-batches whose backward is still to come."""

    @property
    def links(self) -> tuple[StageLink, ...]:
        return (*(self.before or ()), *(self.after or ()))


class Pipeline(Module):
    """Stages of a model on neighbouring ranks, and the ranks of each stage. Every rank of ``world`` must make it alike.

    Rank r has stage ``r // replicas`` of copy ``r % replicas``: a stage's ranks lie together, mostly on one node, where
    they share memory. As a `Module` it has this rank's stages as parts, named by their numbers, so that its parameters
    are ``"0.weight"`` and so on, as those of ``Sequential(*stages)``.

    Normalisation by batches takes the statistics of a micro-batch, and moves running ones once for each.

    Args:
        stages: a module for each, or a function that makes it, called where it is needed: no rank has all of a model
            that is made so. What one returns, a tensor or several, the next one takes. A parameter is in one stage, but
            on one rank; what functions make on different ranks nobody can compare.
        loss: of what the last stage returns and labels, per sample: shape ``(batch,)``; no mean over samples, which the
            trainer takes over those of all replicas.
        world: the ranks, as many as there are stages, or a multiple; with one rank all stages are in this process, and
            take turns. Default: `hpcdp.init()`.
        micro_batches: into how many pieces each batch is cut, the first ones longer by a sample where it does not
            divide; an empty piece is left out.
        schedule: ``"1f1b"`` or ``"gpipe"``, see `schedules`.

    Raises:
        ConfigError: no stages, an unknown schedule, ranks that the stages do not divide, ``micro_batches`` below 1; on
            all ranks: a stage that is no module, or has a layer of all ranks, as `train.SyncBatchNorm`, or a parameter
            in stages on different ranks. In forward: it is recorded.
        MismatchError: ranks have said different things.
    """

    is_traceable = False
    gives_pieces = True
    has_own_step = True
    replicas: World
    """The ranks that have the same stages as this one: the `Trainer` 's world."""

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
        instance("Pipeline", "world", world, World, "a world, that of hpcdp.init() or split_world(...).replicas")
        _check(len(stages), world.size, micro_batches, schedule)
        said = [f"{len(stages)} stages", f"micro_batches {micro_batches}", f"schedule {schedule}"]
        self._loss, self._micro_batches, self._schedule = loss, micro_batches, SCHEDULES[schedule]
        self._num_stages = len(stages)
        on_ranks = world.size > 1
        num_replicas = world.size // len(stages) if on_ranks else 1
        own = range(world.rank // num_replicas, world.rank // num_replicas + 1) if on_ranks else range(len(stages))

        def made() -> dict[int, Module]:
            modules = {stage: _made(stage, stages[stage]) for stage in own}
            if on_ranks:
                _refuse_tied(dict(enumerate(stages)) | modules)
            return modules

        modules = told_to_all(world.comm, Outcome.of(made), "Pipeline", [(said, "make it alike on all ranks")])
        column = world.split(world.rank % num_replicas) if on_ranks else None
        self._comm = None if column is None else column.comm
        """The ranks of this copy of the model, by stage."""
        if column is not None:
            share_replica(column)
        self.replicas = world if column is None else world.split(own[0], model_comm=column.comm)
        links = self._links(world, column, own, modules)
        self._parts = [_Part(stage, module, links[stage], links[stage + 1]) for stage, module in modules.items()]
        for stage, module in modules.items():
            setattr(self, str(stage), module)
        self.parameters()  # named here
        self._look = Look()
        self.replicas.closings.add(self._let_go)

    def _let_go(self) -> None:
        """The ranks' world is closed: whatever is computed next fails at its first stage."""
        if self._comm is not None:  # else all stages are in this process
            vars(self).update(_parts=self.replicas.comm)

    __reduce__ = not_copied(
        "Pipeline",
        "the pipeline, which has its ranks' messages",
        "make another one and load_state_dict() what state_dict() of this one gives",
    )

    def _links(
        self, world: World, column: World | None, own: range, modules: dict[int, Module]
    ) -> dict[int, tuple[StageLink, StageLink] | None]:
        """By the number of the later stage, for each boundary that this rank has to do with: forward and backward."""
        found: dict[int, tuple[StageLink, StageLink] | None] = {0: None, self._num_stages: None}
        if column is None:
            return found | {stage: (Queue(), Queue()) for stage in range(1, self._num_stages)}
        places = column.comm.allgather_json([world.node, world.local_rank])
        comm, watchdog = column.comm.duplicate(), Watchdog.of(world)
        like = next(iter(modules[own[0]].state_dict().values()), np.empty(0))
        for boundary, other in ((own[0], own[0] - 1), (own[0] + 1, own[0] + 1)):
            if 0 < boundary < self._num_stages:
                node, local_rank = places[other]
                behind = [local_rank] if node == world.node else []
                found[boundary] = (
                    StageMessages(comm, other, FORWARD, watchdog, behind, like),
                    StageMessages(comm, other, BACKWARD, watchdog, behind, like),
                )
        return found

    def hybridize(self, active: bool = True) -> None:
        """Each of this rank's stages, see `Module.hybridize`; what they send each other is in no plan."""
        for part in self._parts:
            part.module.hybridize(active)

    def graph(self) -> NoReturn:
        """`ConfigError`: there is one of each stage."""
        raise ConfigError("graph", where="Pipeline", expected="a stage, each of which has one", got="all of them")

    def forward(self, x: Any) -> Any:
        """What the whole model computes from ``x``, on every rank of this copy; each must call, the first stage with
        the input, the others with one as long. Nothing is recorded, and within ``record()`` that is refused."""
        if autograd.is_recording():
            raise ConfigError(
                "Pipeline", expected="pipeline.step(trainer, x, y), which trains", got="a call within record()",
                remedy="outside of it pipeline(x) predicts; train.fit and train.TrainStep record, and take no Pipeline",
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

    def step(self, trainer: Trains, x: Array, y: Array) -> float:
        """Forward, backward and update by one batch of this copy; every rank of ``world`` must call.

        Args:
            trainer: of this pipeline's parameters and its `replicas`.
            x: this copy's batch, along its first axis; ranks other than those of the first stage need an array as long.
            y: its labels; ranks other than those of the last stage need nothing of them.

        Returns:
            The sum of the losses of this copy's samples, before the update, on each of its ranks.

        An error leaves nothing of the batch behind where all stages are in this process.

        Raises:
            ConfigError: the trainer has another world, or is reproducible: it sums virtual shards, not micro-batches;
                on ranks of the last stage: the loss is not of shape ``(batch,)``.
            DataError: ``x`` and ``y`` differ in length.
            MismatchError: on a rank behind one of this copy that has a batch of another length.
        """
        if self._look.is_due():
            self.require_parts_of_this_rank("Pipeline.step")
        if getattr(trainer, "world", None) is not self.replicas:
            raise ConfigError(
                "Pipeline.step", where="trainer", expected="one whose world is the pipeline's replicas", got="another",
                remedy="Trainer(pipeline.parameters(), optimizer, pipeline.replicas)",
            )  # fmt: skip
        if trainer.virtual_shards is not None:
            raise ConfigError("Pipeline.step", where="trainer", expected="one without reproducible=True",
                              got=f"one of {trainer.virtual_shards} virtual shards")  # fmt: skip
        if not all(hasattr(each, "__len__") for each in (x, y)):
            got = f"{type_named(x)} and {type_named(y)}"
            raise ConfigError("Pipeline.step", expected="samples and a label for each", got=got)
        if len(x) != len(y):
            raise DataError("Pipeline.step", expected="a label for each sample", got=f"{len(x)} and {len(y)}")
        with self._forgetting_at_errors(trainer):
            total = self._train(trainer, x, y)
        return float(self._from_last((np.array([total]),))[0][0])

    def _train(self, trainer: Trains, x: Array, y: Array) -> float:
        """The sum of the losses, where the last stage is one of this rank's."""
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
            # This rank's last backward completes the step's gradients; those before add to them.
            ends = action.micro == len(spans) - 1 and part is self._parts[0]
            with contextlib.nullcontext() if ends else trainer.no_sync():
                self._backward(part, action.micro, trainer.loss_scale)
                if part is self._parts[0]:
                    trainer.step(last - first)
        self._finish()
        return total

    @contextlib.contextmanager
    def _forgetting_at_errors(self, trainer: Trains | None = None) -> Iterator[None]:
        """Within it an error drops what the next call would take for its own; between ranks the job ends."""
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
        """What this rank does, in order: its stages take turns where it has several, each as soon as it can."""
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
        """The sum of the losses, at the last stage."""
        with autograd.record():
            inputs = (as_tensor(x),) if part.before is None else _tensors(part.before[0].receive())
            for each in _floats(inputs) if part.before is not None else ():
                each.attach_grad()
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
            part.before[1].send(tuple(each.grad for each in _floats(inputs)))

    def _finish(self) -> None:
        for part in self._parts:
            for link in part.links:
                link.finish()

    def _from_last(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Those of the last stage, on every rank of this copy."""
        if self._comm is None:
            return arrays
        comm, root = self._comm, self._comm.size - 1
        host = [native(to_host(each)) for each in arrays]
        shapes = comm.allgather_json([[list(each.shape), each.dtype.name] for each in host])[root]
        if comm.rank != root:
            host = [np.empty(shape, dtype_of(dtype)) for shape, dtype in shapes]
        for each in host:
            comm.native_broadcast(each, root)
        return tuple(host)


def _recorded(output: Tensor) -> Tensor:
    """A leaf that a stage hands on, its input or a parameter, as a result, from which its gradient comes back."""
    return output * 1 if output.node is None and output.grad_req != "null" else output


def _check(num_stages: int, size: int, micro_batches: int, schedule: str) -> None:
    one_of("Pipeline", "schedule", schedule, SCHEDULES)
    if num_stages < 1:
        raise ConfigError("Pipeline", where="stages", expected="at least one", got="none")
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
    """Raises `ConfigError` where two have a parameter in common: the ranks of each would train a copy of their own."""
    found: dict[int, tuple[int, str]] = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters() if isinstance(stage, Module) else ():
            first, first_name = found.setdefault(id(parameter), (number, name))
            if first != number:
                raise ConfigError(
                    "Pipeline", where="stages",
                    expected="each parameter in one stage, where stages are on different ranks",
                    got=f"'{first}.{first_name}' of stage {first} in stage {number}, too, as '{number}.{name}'",
                    remedy="give each stage layers of its own, or put those that share a parameter into one stage",
                )  # fmt: skip


def _is_ready(stage: int, action: Action, num_stages: int, done: set[tuple[int, Action]]) -> bool:
    """Whether its input is there, where all stages are in one process."""
    source = stage - 1 if action.is_forward else stage + 1
    return not 0 <= source < num_stages or (source, action) in done


def _several(x: Any) -> tuple[Tensor, ...]:
    several = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not all(isinstance(each, Tensor) for each in several):
        got = ", ".join(map(type_named, several))
        raise ConfigError("Pipeline", expected="stages that return a tensor, or several", got=got)
    return several


def _alone(xs: tuple[Any, ...]) -> Any:
    return xs[0] if len(xs) == 1 else xs


def _tensors(arrays: tuple[Array, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(each) for each in arrays)


def _floats(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Those that have gradients."""
    return [each for each in tensors if is_float(each.dtype)]


def _arrays(tensors: tuple[Tensor, ...]) -> tuple[Array, ...]:
    return tuple(each.data for each in tensors)
