"""`DistributedDataParallel`: a module whose gradients are averaged over all ranks.

- `Backward`: hooks of PyTorch's backward, from the first gradient to the average. A backward counts if it passes
  through an output of the wrapper, on which `Backward.mark` leaves a hook; any other one is this rank's alone. Autograd
  allocates a gradient for each parameter. A hook copies it once to its place in the bucket, in memory that the node's
  ranks share or on the GPU. Then it calls the reducer, which leaves the sum in that place. On a GPU all work goes to
  torch's current stream, and the host waits for none of it.
- `Turns`: uneven inputs (`DistributedDataParallel.join`). Before each collective operation on a joined model, every
  rank announces it. A rank without data announces nothing, and takes part with gradients of zero in the operations of
  the others, until no rank has data.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm import World, init
from ..comm.consistency import require_same
from ..comm.world import require_world
from ..compression import Compression, Settings
from ..core.checks import check_name, instance, not_copied, one_of
from ..core.devices import Device
from ..data_parallel import Reducer
from ..data_parallel.buckets import plan
from ..data_parallel.trainer_state import gather_residuals, regrouped, take_residuals
from ..errors import ConfigError, MismatchError, StaleGradientError, UnsupportedError, listed, warn
from . import tensors
from .sync_batch_norm import SyncBatchNorm
from .tensors import GpuBuffers, ModuleBuffers, TorchParameter

_JOINED = "joined model"
"""Key of the joined model's `Turns` in `World.kept`."""


class Turns:
    """The collective operations of one model's ranks, where some may run out of data.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.events: dict[str, Callable[[Any], object]] = {}
        """Function by event that a rank without data calls with the announced argument."""
        self.active = list(range(world.size))
        """Ranks that had data at the latest turn."""
        self.last_rank = 0
        """Lowest rank that had data at the last turn of the last `joined`."""
        self._world = world
        self.following = False
        """True if this rank has run out of data, and other ranks have not."""
        self._open = False
        self._divides_by_all = True

    @property
    def divisor(self) -> int:
        """Number of ranks by which sums of gradients are divided."""
        return self._world.size if self._divides_by_all else len(self.active)

    def announce(self, event: str, argument: object = None) -> None:
        """Announce a collective operation of this rank; does nothing outside of `joined`.

        Args:
            event: one of `events`.
            argument: the argument of the event's function on ranks without data; any JSON value.

        Raises:
            MismatchError: ranks with data announce different operations; on every rank.
        """
        if self._open and not self.following:
            self._exchange([event, argument])

    @contextmanager
    def joined(self, divides_by_all: bool) -> Iterator[None]:
        """Let ranks run out of data within this context; leaving it waits until all ranks leave.

        Raises:
            ConfigError: within another such context, even of another model, because their turns would be confused.
        """
        if _JOINED in self._world.kept:
            raise ConfigError(
                "join", expected="one joined model at a time", got="join() within join()",
                remedy="wrap one module that holds both models",
            )  # fmt: skip
        self._world.kept[_JOINED] = self
        self._open, self._divides_by_all = True, divides_by_all
        try:
            yield
            self.following = True
            last = self.active
            while (announced := self._exchange(None)) is not None:
                last = self.active
                event, argument = announced
                self.events[event](argument)
            self.last_rank = last[0]
        finally:
            del self._world.kept[_JOINED]
            self._open, self.following, self._divides_by_all = False, False, True
            self.active = list(range(self._world.size))

    def _exchange(self, own: list[Any] | None) -> list[Any] | None:
        """Return the event and argument that the ranks with data announce; None if no rank has data."""
        by_rank = self._world.comm.allgather_json(own)
        self.active = [rank for rank, announced in enumerate(by_rank) if announced is not None]
        if not self.active:
            return None
        first = by_rank[self.active[0]]
        for rank in self.active:
            if by_rank[rank] != first:
                raise MismatchError(
                    "join", expected=f"the same as on rank {self.active[0]}: {_event_text(*first)}",
                    got=f"{_event_text(*by_rank[rank])} on rank {rank}",
                    remedy="call the same operations for each batch on all ranks that have data",
                )  # fmt: skip
        return list(first)


def _event_text(event: str, argument: object) -> str:
    return f"{event} ({argument})" if argument is not None else event


_NO_BACKWARD = -1

_takers: Any = WeakTensorKeyDictionary()
"""Latest owner of each parameter's gradients, as a weak reference, and the handle of its hook."""


class Backward:
    """The hooks of a module's backward passes. All ranks must make it together.

    Args:
        params: the trained parameters, in the order of their registration. An earlier owner of their gradients raises
            an error in its next forward.
        reducer: the reducer of the same parameters.
        world: the ranks.
        find_unused: whether a parameter without a gradient is allowed.
        sums: divide after the sum, and not each gradient before it, so that codecs see the gradients unscaled.
    """

    def __init__(
        self,
        params: Sequence[TorchParameter],
        reducer: Reducer,
        world: World,
        find_unused: bool,
        sums: bool = False,
    ) -> None:
        self.reducer = reducer
        self.params = {param.name: param for param in params}
        self.syncing = True
        """True if a backward ends with the average over all ranks; otherwise it only adds to this rank's gradients."""
        self.awaits_step = False
        """True if an optimizer sums and updates in one pass, so that backward leaves this rank's own gradients."""
        self.turns = Turns(world)
        self.turns.events["backward"] = lambda _: self._average()
        self.find_unused = find_unused
        self._sums = sums
        self._world = world
        self._device = params[0].device
        self.at_close: Callable[[], object] = lambda: None
        """Called on every rank after the gradients of a step are summed."""
        self._held: set[str] = set()  # parameters written without synchronization
        self._queued = False  # the end of the current backward is scheduled
        self._counts = False  # the current backward has passed through an output, so that it ends with the average
        self._writes = False  # the current backward has written a gradient, or has reached a mark
        self._armed = False  # the next backward counts even if it passes through no known output
        self._taken_over: str | None = None  # a parameter with a later owner
        for param in params:
            self._take(param)

    def _take(self, param: TorchParameter) -> None:
        before, handle = _takers.get(param.tensor, (lambda: None, None))
        if handle is not None:
            handle.remove()
        if before() is not None:
            before()._taken_over = param.name
        weak, name = weakref.ref(self), param.name  # the tensor keeps the hook and its references alive

        def written(_tensor: torch.Tensor) -> None:
            owner = weak()
            if owner is not None:
                owner._written(owner.params[name])

        _takers[param.tensor] = weak, param.tensor.register_post_accumulate_grad_hook(written)

    def begin(self) -> None:
        """Prepare for a forward that a backward may follow: drop the gradients of a failed backward.

        Raises:
            ConfigError: a later wrapper has taken a parameter.
        """
        if self._taken_over is not None:
            raise ConfigError(
                "forward", where=self._taken_over, expected="a parameter of this wrapper alone",
                got="a parameter that was wrapped again", remedy="use the later wrapper, or wrap one module with both",
            )  # fmt: skip
        if self._queued and torch._C._current_graph_task_id() == _NO_BACKWARD:
            counted, self._queued, self._counts, self._writes = self._counts, False, False, False
            if counted and not self.awaits_step:
                self.drop()

    def arm(self) -> None:
        """Let the next backward of the parameters count, whatever it passes through, as torch's wrapper does."""
        self._armed = True

    def drop(self) -> None:
        """Drop the gradients since the last reduction; with overlap every rank must call."""
        self._held = set()
        self._queued = self._counts = self._writes = False
        reducer = self.reducer
        if not reducer.is_untouched:
            if reducer.overlap:
                with tensors.on_torchs_stream(self._device):
                    reducer.launch_rest()
                    reducer.drop()
            reducer.reset()

    def watch(self, tensors: Iterator[torch.Tensor]) -> bool:
        """Let backwards through an output of the forward count; return whether a backward can pass through one."""
        found = False
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._passed)
                found = True
        return found

    def mark(self) -> torch.Tensor:
        """Return a new tensor such that a backward that reaches it counts, even if it uses no parameter."""
        mark = torch.zeros((), requires_grad=True)
        mark.register_post_accumulate_grad_hook(self._reached)
        return mark

    def _passed(self, _gradient: torch.Tensor | None = None) -> None:
        if self.syncing:
            self._counts = True
            self._watch_end()

    def _reached(self, _tensor: torch.Tensor) -> None:
        self._writes = self._writes or self.syncing
        self._passed()

    def _watch_end(self) -> None:
        """Schedule the end of the current backward, after all its parts; called within it."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _written(self, param: TorchParameter) -> None:
        gradient = param.tensor.grad
        if gradient is None and self.find_unused:
            return  # autograd came by without a gradient, as from an output that the loss does not use
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                "backward", where=param.name, expected="a dense gradient",
                got=f"a gradient of layout {gradient.layout}", remedy="make the layer with sparse=False",
            )  # fmt: skip
        if not self.syncing:
            self._held.add(param.name)
            return
        self._writes = True
        self._counts = self._counts or self._armed
        self._watch_end()
        if not self._counts:
            self._held.add(param.name)  # this rank's alone, until a backward counts
            return
        if not self.awaits_step and not self.reducer.is_missing(param.name):
            raise StaleGradientError(
                "backward", where=param.name, expected="one gradient of a parameter in each backward",
                got="a second gradient", remedy="pass use_reentrant=False to torch.utils.checkpoint",
            )  # fmt: skip
        if not self.reducer.is_writable(param.name):
            raise StaleGradientError(
                "backward", where=param.name, expected="one backward before each step of a ShardedOptimizer",
                got="another one", remedy="call step() or zero_grad() between, or all but the last within no_sync()",
            )  # fmt: skip
        param.contribute(self._share)
        if self.awaits_step and self.reducer.overlap:
            param.tensor.grad = None  # a reduction may run in its place: nothing must be written there
        else:
            param.release()
        with tensors.on_torchs_stream(self._device):
            param.grad_hook(param)

    @property
    def _share(self) -> float:
        return 1.0 if self.awaits_step or self._sums else 1.0 / self.turns.divisor

    def _end(self) -> None:
        counts, writes = self._counts, self._writes
        self._queued = self._counts = self._writes = False
        if not counts:
            return
        self._armed = False
        # torch.autograd.grad, e.g., writes no gradient of a parameter.
        if writes and not self.awaits_step:
            self.turns.announce("backward")
            self._average()

    def _average(self) -> None:
        unused = self.close()
        with tensors.on_torchs_stream(self._device):
            self.reducer.reduce_everywhere()
        if self._sums:
            for param in self.params.values():
                param.view.mul_(1.0 / self.turns.divisor)
        if not self.turns.following:
            for name, param in self.params.items():
                if name not in unused or param.tensor.grad is not None:
                    param.take()
        self.reducer.reset()
        self.at_close()

    def close(self, settings: tuple[float, ...] = ()) -> set[str]:
        """Run the closing exchange, after which every rank has left backward; every rank must call.

        Parameters that this rank has not used count as zero. A rank without data need not use any.

        Args:
            settings: numbers that must be the same on all ranks.

        Returns:
            The parameters that no rank has used.

        Raises:
            StaleGradientError: a rank has not used all parameters, and must; on every rank.
            MismatchError: the settings differ; on every rank.
        """
        reducer, held, following = self.reducer, self._held, self.turns.following
        missing = reducer.missing
        self._held = set()
        # An optimizer's zero_grad() may have dropped held gradients.
        unused = [name for name in missing if name not in held or self.params[name].tensor.grad is None]
        waits = reducer.keeps_unsent and bool(missing)  # until all ranks know which parameters not to send
        if not waits:
            self._launch_missing(missing)
        (num_unused,), alike = reducer.tally_alike(settings, 0 if following else len(unused))
        if not alike:
            self._end_reductions()
            self.refuse(settings)
        if not num_unused:
            if waits:
                self._launch_missing(missing)
            return set()
        older = [name for name in unused if self.params[name].tensor.grad is not None]  # which other ranks add to
        exchanged = self._world.comm.allgather_json(None if following else [unused, older])
        by_rank = [None if names is None else names[0] for names in exchanged]
        if not self.find_unused:
            self._end_reductions()
            rank, names = next((rank, names) for rank, names in enumerate(by_rank) if names)
            if len(names) == len(self.params) and self.awaits_step:
                raise StaleGradientError(
                    "step", where=f"rank {rank}", expected="a backward since the last step or zero_grad()", got="none"
                )
            raise StaleGradientError(
                "backward", where=f"rank {rank}", expected="a gradient for every parameter",
                got=f"none for {listed(names)}",
                remedy="pass find_unused_parameters=True, or freeze them (requires_grad=False) before wrapping",
            )  # fmt: skip
        left_alone = set.intersection(*(set(names) for names in by_rank if names is not None))
        if waits:
            reducer.keep_unsent(left_alone.difference(*(names[1] for names in exchanged if names is not None)))
            self._launch_missing(missing)
        return left_alone

    def _launch_missing(self, missing: Sequence[str]) -> None:
        """Launch the buckets that backward has not; unwritten gradients of ``missing`` count as zero."""
        with tensors.on_torchs_stream(self._device):
            for name in missing:
                param = self.params[name]
                param.contribute(0.0 if self.turns.following else self._share)
                param.grad_hook(param)
            self.reducer.launch_rest()

    def refuse(self, settings: tuple[float, ...]) -> None:
        """Raise `MismatchError` on all ranks, whose settings of an optimizer differ."""
        item = f"a step with settings {settings}" if settings else "the sum for clip_grad_norm_ or a GradScaler"
        remedy = "set the same learning rates, and make the same calls, on all ranks"
        require_same(self._world.comm, "step", [item], remedy)

    def _end_reductions(self) -> None:
        with tensors.on_torchs_stream(self._device):
            self.reducer.drop()  # wait for the reductions that were launched
        self.reducer.reset()


OWNERS = ("rank", "shard")
"""The valid values of ``owner``."""

_OF_TORCHS = {
    "device_ids": "call module.to(device) before you wrap the module",
    "output_device": "outputs are on the device of the module",
    "dim": "split the batch before the forward",
    "init_sync": "all ranks begin with rank 0's values",
    "process_group": "pass world=world.split(color) for some of the ranks",
    "check_reduction": "reductions are always checked",
    "gradient_as_bucket_view": "gradients are always views of buckets",
    "static_graph": "it is not needed",
    "delay_all_reduce_named_params": "it is not needed",
    "param_to_hook_all_reduce": "it is not needed",
    "mixed_precision": "use torch.autocast",
    "device_mesh": "pass world=world.split(color) for some of the ranks",
    "skip_all_reduce_unused_params": "it is not needed",
    "bucket_cap_mb_list": "pass bucket_cap_mb",
    "batched_grad_copy": "it is not needed",
    "forward_sync_buffers": "pass broadcast_buffers",
}
"""Arguments of torch's wrapper that this one does not have, and the alternative."""


class DistributedDataParallel(torch.nn.Module):
    """A module whose backward leaves the average over all ranks in every ``param.grad``.

    As with ``torch.nn.parallel.DistributedDataParallel``, every rank must make it with the same module and must run the
    same number of backwards through its outputs, each of which averages. All ranks start with rank 0's parameters, and
    with its buffers if those are broadcast. A gradient is copied once, into memory that the node's ranks share, and
    ``param.grad`` is then a view of that memory. It is a copy in half precision, and with ``owner="rank"`` for a
    parameter that is not contiguous. Between nodes a bucket's reduction begins as soon as backward has filled it.

    A backward that passes through no output, such as one through ``model.module``, adds to this rank's gradients alone.
    Only the first one after a training forward averages, as with torch's wrapper, because the loss may be an attribute.

    Args:
        module: the module, on the CPU, or on one GPU, where gradients are then summed, with CuPy. Frozen parameters
            (``requires_grad=False``) are left alone, and must stay frozen.
        world: the ranks; default `hpcdp.init()`.
        owner: ``"rank"``: every rank gets all averages, and updates everything with any optimizer. ``"shard"``: for a
            `ShardedOptimizer`, which sums and updates in one pass; with overlap, each of its steps needs one backward,
            or all but the last backward within `no_sync`.
        broadcast_buffers: copy rank 0's buffers, such as running statistics, to all ranks before the first training
            forward and after each backward (with a `ShardedOptimizer`: each step), so that every forward, in
            evaluation too, has the buffers that it has with torch's wrapper. No forward in evaluation mode
            communicates, so a rank may evaluate alone. On one node, buffers on GPUs are copied without waiting; between
            nodes they go through the host, which waits. False: each rank keeps its own buffers, which may also differ
            in shape.
        find_unused_parameters: allow a backward to leave out parameters, which then count as zero. A parameter that no
            rank has used keeps its gradient, or None, so that optimizers leave it alone.
        bucket_cap_mb: size of a bucket of gradients in MiB; the first bucket has 1. None: an eighth of the model, but
            from 1 to 25.
        overlap: reduce buckets while backward runs. None: on several nodes.
        compression: the compression of gradients between nodes, as in `hpcdp.Trainer`, instead of the communication
            hooks of torch's wrapper.
        of_torchs: arguments of torch's wrapper that raise an error with the alternative.

    Raises:
        MismatchError: the ranks' parameters or settings differ; on every rank, naming ranks and the first difference.
        ConfigError: no trainable parameters, an unknown owner or codec, an invalid world, another argument of torch's
            wrapper; or the module is on a GPU, and CuPy is missing.
        UnsupportedError: a parameter that is not dense and of a floating dtype, or on another device than the others.

    Source: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020, section 3.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world: World | None = None,
        *,
        owner: str = "rank",
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        overlap: bool | None = None,
        compression: Settings = None,
        **of_torchs: Any,
    ) -> None:
        super().__init__()
        _refuse(of_torchs)
        instance("DistributedDataParallel", None, module, torch.nn.Module, "a torch.nn.Module")
        require_world("DistributedDataParallel", world)  # torch's wrapper takes devices there
        one_of("DistributedDataParallel", "owner", owner, OWNERS)
        moves = owner == "shard"
        params = list(module.named_parameters())
        trained = [TorchParameter(name, tensor, moves) for name, tensor in params if tensor.requires_grad]
        self._frozen = {name: tensor for name, tensor in params if not tensor.requires_grad}
        if not trained:
            raise ConfigError(
                "DistributedDataParallel", where="module", expected="at least one parameter that requires a gradient",
                got="none",
            )  # fmt: skip
        self.device = _one_device(trained)
        """GPU of the module; None on the host."""
        settings = Compression.of(compression)
        self.module = module
        self.world = init() if world is None else world
        self.owner = owner
        self.compression = settings
        self._held_before = _places(module)
        self._buffers_of_all = ModuleBuffers(module, self.world) if broadcast_buffers else None
        alike = f"{owner=} {broadcast_buffers=} {find_unused_parameters=} {bucket_cap_mb=} {overlap=}"
        place = "" if self.device is None else " on a GPU"
        alike_tensors = (*params, *(module.named_buffers() if broadcast_buffers else ()))
        states = [f"{name} {tuple(tensor.shape)} {tensor.dtype}{' requires_grad' * tensor.requires_grad}{place}"
                  + f" strides {tensor.stride()}" * (moves and tensor.requires_grad)
                  for name, tensor in alike_tensors]  # fmt: skip
        require_same(self.world.comm, "DistributedDataParallel", [alike, f"compression {settings}"])
        require_same(self.world.comm, "DistributedDataParallel", states)
        self._broadcast_values(0)
        layout = plan([(param.name, param.shape, param.dtype) for param in trained], bucket_cap_mb)
        tensors.give_back_cache(self.device)
        with tensors.on_torchs_stream(self.device):
            reducer = Reducer(trained, layout, self.world, overlap, settings, sharded=owner == "shard")
        if self.device is not None and self.world.size > 1 and self._buffers_of_all is not None:
            self._buffers_of_all.on_gpu = GpuBuffers(self.world, self.device, reducer.way)
        self.backward_pass = Backward(trained, reducer, self.world, find_unused_parameters, settings is not None)
        self.backward_pass.turns.events["forward"] = self._before_forward
        self.backward_pass.at_close = self._after_backward
        self._buffers_differ: bool | None = None
        """True if a training forward has changed this rank's buffers since they were shared; None: no such forward."""

    def _broadcast_values(self, root: int) -> None:
        for param in self.module.parameters():
            values = param.detach().to("cpu", copy=True).contiguous()
            if values.numel():
                self.world.comm.native_broadcast(values.reshape(-1).view(torch.uint8).numpy(), root)
            with torch.no_grad():
                param.copy_(values)
        if self._buffers_of_all is not None:
            self._buffers_of_all.broadcast(root)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; see the class for ``broadcast_buffers``."""
        backward = self.backward_pass
        will_sync = backward.syncing and torch.is_grad_enabled()
        if will_sync:
            backward.begin()
            self._refuse_unfrozen()
            if any(held.get(name) is not value for held, name, value in self._held_before):
                self._refuse_others()
            backward.turns.announce("forward", self.training)
            self._before_forward(self.training)
        if self._buffers_differ and not self.training:
            self._warn_of_buffers()
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        is_watched = backward.watch(_tensors(output))
        if will_sync and (self.training or not is_watched):
            backward.arm()
        return self._marked(output) if backward.find_unused else output

    def _refuse_unfrozen(self) -> None:
        unfrozen = next((name for name, tensor in self._frozen.items() if tensor.requires_grad), None)
        if unfrozen is not None:
            raise ConfigError(
                "forward", where=unfrozen, expected="a parameter that stays frozen",
                got="requires_grad=True", remedy="wrap the module again after changing requires_grad",
            )  # fmt: skip

    def _refuse_others(self) -> None:
        """Raise if the module has a trained parameter that it did not have when it was wrapped.

        Known parameters may have moved, by pruning or tying, or may be gone.
        """
        known = {id(param.tensor) for param in self.backward_pass.params.values()}
        for name, tensor in self.module.named_parameters():
            # `torch.func.functional_call` temporarily replaces parameters by tensors.
            if tensor.requires_grad and id(tensor) not in known and isinstance(tensor, torch.nn.Parameter):
                raise ConfigError(
                    "forward", where=name, expected="a parameter that the module had when it was wrapped",
                    got="a new parameter", remedy="wrap the module again, or use load_state_dict() without assign=True",
                )  # fmt: skip
        self._held_before = _places(self.module)

    def _marked(self, output: Any) -> Any:
        """Return ``output`` so that a backward through this module is noticed, even if it uses no parameter."""
        leaves, form = tree_flatten(output)
        mark = self.backward_pass.mark()
        places = [place for place, leaf in enumerate(leaves)
                  if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf]  # fmt: skip
        for place, tensor in zip(places, _Marked.apply(mark, *(leaves[place] for place in places)), strict=True):  # type: ignore[no-untyped-call]
            leaves[place] = tensor
        for place, leaf in enumerate(leaves):
            if _is_record(leaf):  # torch's pytrees treat it as a leaf
                leaves[place] = copy.copy(leaf)
                for name, value in self._marked(_fields(leaf)).items():
                    object.__setattr__(leaves[place], name, value)
        return tree_unflatten(leaves, form)

    def compression_state(self) -> dict[str, torch.Tensor]:
        """Return the gradients that compression has not sent yet, a part of the training state; every rank must call.

        Returns:
            On rank 0 tensors of shape ``(nodes, *shape)`` by parameter, on other ranks an empty dict.
        """
        reducer = self.backward_pass.reducer
        unsent = {}
        for bucket in reducer.buckets:
            rows = gather_residuals(reducer, bucket)
            for slot in bucket.slots if self.world.rank == 0 else ():
                shaped = self.backward_pass.params[slot.name].shaped
                parts = (row[slot.offset : slot.offset + slot.count].reshape(slot.shape) for row in rows)
                unsent[slot.name] = torch.stack([shaped(torch.from_numpy(part)) for part in parts])
        return unsent

    def load_compression_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `compression_state` of rank 0; every rank must call, with the same state.

        With another number of nodes, each gets an equal share of the sum.

        Raises:
            ConfigError: the state is of another model.
        """
        reducer, params = self.backward_pass.reducer, self.backward_pass.params
        for name, rows in state.items():
            shape = tuple(params[name].tensor.shape) if name in params else None
            if shape is None or tuple(rows.shape[1:]) != shape:
                raise ConfigError(
                    "load_compression_state", where=name, got=tuple(rows.shape),
                    expected=f"a parameter of {', '.join(params)}" if shape is None else f"(nodes, *{shape})",
                )  # fmt: skip
        saved = {
            name: np.stack([params[name].flat(row).numpy().reshape(params[name].shape) for row in rows])
            for name, rows in state.items()
        }
        take_residuals(reducer, regrouped(reducer, saved))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and drop those that backward has left for a `ShardedOptimizer`."""
        self.backward_pass.drop()
        super().zero_grad(set_to_none)

    __reduce__ = not_copied(
        "DistributedDataParallel", "the wrapper", "copy model.module, save model.module.state_dict()", what="its module"
    )

    def refuse_shared_memory(self, operation: str) -> None:
        """Raise `UnsupportedError` if a parameter, whose memory moves, shares it with a buffer or parameter."""
        at: dict[int, str] = {}
        for name, tensor in self.module.named_parameters():
            first = at.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
            if first != name:
                raise UnsupportedError(
                    operation, where=name, expected="a parameter with its own memory", got=f"the memory of {first}",
                    remedy="use one Parameter for both names, or wrap the model with owner='rank'",
                )  # fmt: skip
        memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in self.module.named_parameters()}
        for name, buffer in self.module.named_buffers():
            shared = memory.get(buffer.untyped_storage().data_ptr()) if buffer.numel() else None
            if shared is not None:
                raise UnsupportedError(
                    operation, where=name, expected="a buffer with its own memory", got=f"the memory of {shared}",
                    remedy="call clone() on it, or wrap the model with owner='rank'",
                )  # fmt: skip

    def sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, also with ``broadcast_buffers=False``; every rank must call.

        Training does this by itself. Call it after forwards that change buffers and that no backward follows, such as a
        recalibration of running statistics.

        Raises:
            MismatchError: buffers differ in name, shape or dtype; on every rank.
        """
        buffers = self._buffers_of_all
        if buffers is None:
            states = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.module.named_buffers()]
            require_same(self.world.comm, "sync_buffers", states)
            buffers = ModuleBuffers(self.module, self.world)
        buffers.broadcast(self.backward_pass.turns.active[0])
        self._buffers_differ = False

    def _before_forward(self, training: bool) -> None:
        if training and self._buffers_of_all is not None:
            if self._buffers_differ is not False:
                self.sync_buffers()
            self._buffers_differ = True

    def _after_backward(self) -> None:
        # All ranks are here. At the next forward, as torch's wrapper does it, ranks that evaluate first would differ.
        if self._buffers_differ:
            self.sync_buffers()

    def _warn_of_buffers(self) -> None:
        self._buffers_differ = None  # once
        if self.world.size > 1 and next(self.module.buffers(), None) is not None:
            warn(
                f"rank {self.world.rank} evaluates with buffers, such as running statistics, that a training forward "
                "has changed and no backward has shared; call model.sync_buffers() on all ranks before the evaluation"
            )

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Let ranks have different numbers of batches within this context; every rank must enter.

        A rank that leaves it waits until all ranks leave, and takes part with gradients of zero. At the end all ranks
        have the parameters and buffers of the ranks with the most batches. A `ShardedOptimizer` updates on all ranks
        until then. The state of another optimizer stays as it was when a rank left; `broadcast_optimizer_state` from
        `last_rank` copies it to all. Gradients that a rank holds back by `no_sync` when it leaves are dropped. The
        model must not contain a `SyncBatchNorm`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks, so that the samples of
                the last batches weigh as much as others; otherwise by the number of ranks that still have data.

        Raises:
            MismatchError: ranks with data make different calls; on every rank.
            ConfigError: a model is joined already.
            UnsupportedError: the model contains a `SyncBatchNorm`.
        """
        if any(isinstance(module, SyncBatchNorm) for module in self.module.modules()):
            raise UnsupportedError(
                "join", expected="a model without SyncBatchNorm", got="a model with SyncBatchNorm",
                remedy="use the same number of batches on every rank (drop_last=True)",
            )  # fmt: skip
        turns = self.backward_pass.turns
        with turns.joined(divide_by_initial_world_size):
            yield
        self._broadcast_values(turns.last_rank)

    @property
    def last_rank(self) -> int:
        """The lowest rank of those with the most batches in the last `join`; 0 before."""
        return self.backward_pass.turns.last_rank

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only add to this rank's gradients; the next backward outside averages all of them.

        Unlike with torch's wrapper, only the place of the backward matters, not that of the forward.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward averages gradients. Loops written for torch's wrapper set it instead of `no_sync`."""
        return self.backward_pass.syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncing: bool) -> None:
        self.backward_pass.syncing = syncing


def _refuse(of_torchs: Mapping[str, object]) -> None:
    for name in of_torchs:
        if name in _OF_TORCHS:
            expected = "no argument of torch's wrapper alone"
            remedy = f"leave it out: {_OF_TORCHS[name]}"
            raise ConfigError("DistributedDataParallel", where=name, expected=expected, got=name, remedy=remedy)
        check_name("argument", name, [*inspect.signature(DistributedDataParallel).parameters][:-1],
                   "DistributedDataParallel")  # fmt: skip


def _places(module: torch.nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Return the dicts, names and values of all parameters and submodules, except inside scripted modules."""
    return [(held, name, value) for part in module.modules() for held in (part._parameters, part._modules)
            if isinstance(held, dict) for name, value in held.items()]  # fmt: skip


def _one_device(trained: Sequence[TorchParameter]) -> Device | None:
    """Return the GPU of all parameters, None for the host; `UnsupportedError` if devices differ."""
    device = trained[0].device
    odd = next((param for param in trained if param.device != device), None)
    if odd is not None:
        raise UnsupportedError(
            "DistributedDataParallel", where=odd.name, expected=f"all parameters on {trained[0].tensor.device}",
            got=odd.tensor.device, remedy="call module.to(device), with a GPU for each rank",
        )  # fmt: skip
    return device


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for member in output:
            yield from _tensors(member)
    elif _is_record(output):
        yield from _tensors(_fields(output))


def _is_record(output: Any) -> bool:
    return dataclasses.is_dataclass(output) and not isinstance(output, type)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


class _Marked(torch.autograd.Function):
    """Identity of tensors that adds a dependency on a mark."""

    @staticmethod
    def forward(ctx: Any, mark: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.zeros(()), *gradients
