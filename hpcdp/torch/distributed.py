"""Data-parallel training of a PyTorch module: the wrapper of the module, and the sampler of its data.

`DistributedDataParallel` averages gradients over all ranks, by the hooks of `backward`. `DistributedSampler` draws
indices for each rank, and its position can be saved.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..comm import World, init
from ..comm.consistency import require_same
from ..comm.world import require_world
from ..compression import Compression, Settings
from ..core.arrays import Device
from ..core.checks import check_name, instance, one_of, whole_number
from ..data.samplers import SamplerPosition
from ..data_parallel import Reducer
from ..data_parallel.bucket_layout import plan
from ..data_parallel.trainer_state import gather_residuals, regrouped, take_residuals
from ..errors import ConfigError, UnsupportedError, warn
from . import tensors
from .backward import Backward
from .functional import SyncBatchNorm
from .tensors import GpuBuffers, ModuleBuffers, TorchParameter

T = TypeVar("T")

_CLOSING = "the average of gradients (unequal numbers of batches need `with model.join():`)"
"""The closing exchange of a backward or a step, in reports of ranks that do not come to it."""

OWNERS = ("rank", "shard")
"""The valid values of ``owner``."""

_EITHER = (None, False, True)

_OF_TORCHS: dict[str, tuple[tuple[object, ...], str]] = {
    "device_ids": ((None,), "call module.to(device) before you wrap the module"),
    "output_device": ((None,), "outputs are on the device of the module"),
    "dim": ((0,), "split the batch before the forward"),
    "init_sync": ((True,), "all ranks begin with rank 0's values"),
    "process_group": ((None,), "pass world=world.split(color) for some of the ranks"),
    "check_reduction": (_EITHER, ""),  # reductions are always checked
    "gradient_as_bucket_view": (_EITHER, ""),  # they always are
    "static_graph": (_EITHER, ""),
    "delay_all_reduce_named_params": ((None,), "leave their gradients to torch's wrapper with backend='hpcdp'"),
    "param_to_hook_all_reduce": ((None,), "leave their gradients to torch's wrapper with backend='hpcdp'"),
    "mixed_precision": ((None,), "use torch.autocast"),
    "device_mesh": ((None,), "pass world=world.split(color) for some of the ranks"),
    "skip_all_reduce_unused_params": (_EITHER, ""),  # faster or slower, with the same gradients, as the next ones
    "bucket_cap_mb_list": ((None,), "pass bucket_cap_mb"),
    "batched_grad_copy": (_EITHER, ""),
    "forward_sync_buffers": (_EITHER, ""),
}
"""Arguments of torch's wrapper: the values that this one takes, and the alternative to others."""

_HOOKS = {
    "allreduce": None, "allreduce_hook": None, "ALLREDUCE": None,
    "fp16_compress": "fp16", "fp16_compress_hook": "fp16", "FP16_COMPRESS": "fp16",
    "bf16_compress": "bf16", "bf16_compress_hook": "bf16",
}  # fmt: skip
"""Compression that does what a communication hook of torch does, by the names of both."""


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
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
            (``requires_grad=False``) are left alone, and must stay frozen. Gradients of embeddings with ``sparse=True``
            stay sparse: the rows of all ranks are gathered, and summed on each.
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
        compression: the compression of gradients between nodes, as in `hpcdp.Trainer`; see `register_comm_hook`.
        of_torchs: arguments of torch's wrapper. Those that only ask for what this one does anyway are taken:
            ``device_ids`` and ``output_device`` of the module's own device, ``process_group`` if it is the default
            group of the same ranks, ``gradient_as_bucket_view``, ``static_graph``, which allows unused parameters as
            in torch, and defaults. Others raise an error with the alternative.

    It is a subclass of torch's wrapper, because libraries ask for that to find the module inside, and `no_sync`. It
    shares none of that wrapper's state, so its private methods do not work. Names in the module's
    ``_ddp_params_and_buffers_to_ignore`` are left alone, as in torch. ``copy.deepcopy``, `pickle` and
    ``torch.optim.swa_utils.AveragedModel`` copy the module inside, without the wrapper. Within backward, as in a hook
    that steps an optimizer, ``param.grad`` is this rank's share of the average: step after backward.

    Raises:
        MismatchError: the ranks' parameters or settings differ; on every rank, naming ranks and the first difference.
        ConfigError: no trainable parameters, an unknown owner or codec, an invalid world, another argument of torch's
            wrapper; or the module is on a GPU, and CuPy is missing.
        UnsupportedError: a parameter that is not dense, of a floating or complex dtype, or is on another device than
            the others; an embedding with sparse gradients, with ``owner="shard"``.

    Source: Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020, section 3.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        world: World | None = None,
        *,
        owner: str = "rank",
        broadcast_buffers: bool | None = True,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        overlap: bool | None = None,
        compression: Settings = None,
        **of_torchs: Any,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)  # and not that of torch's wrapper, which wants a process group
        instance("DistributedDataParallel", None, module, torch.nn.Module, "a torch.nn.Module")
        require_world("DistributedDataParallel", world)  # torch's wrapper takes devices there
        if (forward_sync_buffers := of_torchs.get("forward_sync_buffers")) is not None:
            broadcast_buffers = bool(forward_sync_buffers)
        broadcast_buffers = broadcast_buffers is None or bool(broadcast_buffers)
        find_unused_parameters = bool(find_unused_parameters or of_torchs.get("static_graph"))
        one_of("DistributedDataParallel", "owner", owner, OWNERS)
        moves = owner == "shard"
        self.parameters_to_ignore = frozenset(
            str(name).removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        params = self._shared(module.named_parameters())
        sparse = _sparse(module)
        trained = [TorchParameter(name, tensor, moves) for name, tensor in params
                   if tensor.requires_grad and id(tensor) not in sparse]  # fmt: skip
        gathered = {name: tensor for name, tensor in params if tensor.requires_grad and id(tensor) in sparse}
        if gathered and moves:
            raise UnsupportedError(
                "DistributedDataParallel", where=next(iter(gathered)), expected="a dense gradient with owner='shard'",
                got="an embedding with sparse=True", remedy="make it with sparse=False, or pass owner='rank'",
            )  # fmt: skip
        self._frozen = {name: tensor for name, tensor in params if not tensor.requires_grad}
        if not trained and not gathered:
            raise ConfigError(
                "DistributedDataParallel", where="module", expected="at least one parameter that requires a gradient",
                got="none",
            )  # fmt: skip
        self.device = next(tensor for _, tensor in params if tensor.requires_grad).device
        self.gpu = _one_device(trained)
        """GPU of the module; None on the host."""
        self.world = init() if world is None else world
        _refuse(of_torchs, self.device, self.world)
        settings = Compression.of(compression)
        self.module = module
        self.owner = owner
        self.forward_sync_buffers = broadcast_buffers
        self._held_before = _places(module)
        buffers = self._shared(module.named_buffers()) if broadcast_buffers else []
        self._buffers_of_all = ModuleBuffers(module, self.world, self.parameters_to_ignore) if buffers else None
        alike = f"{owner=} {broadcast_buffers=} {find_unused_parameters=} {bucket_cap_mb=} {overlap=}"
        place = "" if self.gpu is None else " on a GPU"
        states = [f"{name} {tuple(tensor.shape)} {tensor.dtype}{' requires_grad' * tensor.requires_grad}{place}"
                  + f" strides {tensor.stride()}" * (moves and tensor.requires_grad)
                  for name, tensor in (*params, *buffers)]  # fmt: skip
        require_same(self.world.comm, "DistributedDataParallel", [alike, f"compression {settings}"])
        require_same(self.world.comm, "DistributedDataParallel", states)
        self._broadcast_values(0)
        self._trained, self._layout_settings = trained, (bucket_cap_mb, overlap)
        reducer = self._make_reducer(settings)
        if self.gpu is not None and self.world.size > 1 and self._buffers_of_all is not None:
            self._buffers_of_all.on_gpu = GpuBuffers(self.world, self.gpu, reducer.way)
        self.backward_pass = Backward(
            trained, gathered, reducer, self.world, find_unused_parameters, settings is not None
        )
        self.backward_pass.turns.events["forward"] = self._before_forward
        self.backward_pass.at_close = self._after_backward
        self._buffers_differ: bool | None = None
        """True if a training forward has changed this rank's buffers since they were shared; None: no such forward."""
        self.device_type, self.device_ids, self.output_device, self.dim = self.device.type, None, None, 0
        self.static_graph, self.gradient_as_bucket_view = bool(of_torchs.get("static_graph")), True
        self.mixed_precision = None

    def _shared(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return the parameters or buffers that this wrapper does not ignore."""
        return [(name, tensor) for name, tensor in named if name not in self.parameters_to_ignore]

    def _make_reducer(self, compression: Compression | None) -> Reducer:
        self.compression = compression
        bucket_cap_mb, overlap = self._layout_settings
        layout = plan([(param.name, param.shape, param.dtype) for param in self._trained], bucket_cap_mb)
        tensors.give_back_cache(self.gpu)
        with tensors.on_torchs_stream(self.gpu):
            return Reducer(
                self._trained, layout, self.world, overlap, compression, sharded=self.owner == "shard", closing=_CLOSING
            )

    @property
    def find_unused_parameters(self) -> bool:
        """True if a backward may leave out parameters."""
        return self.backward_pass.find_unused

    def _set_static_graph(self) -> None:
        """Allow unused parameters, as torch's wrapper does; the graph may also change. Every rank must call."""
        self.static_graph = self.backward_pass.find_unused = True

    def register_comm_hook(self, state: Any = None, hook: Any = None) -> None:
        """Compress gradients between nodes, or average them by a hook of torch's wrapper; every rank must call, once.

        Args:
            state: the first argument of a hook that is a function of another name; or the name, as in
                ``register_comm_hook("fp16_compress")``.
            hook: ``"allreduce"``, ``"fp16_compress"`` or ``"bf16_compress"``, or the function of this name in
                ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``: gradients of the ranks of a node are not
                compressed, because they send no messages. ``"powerSGD"``, or another function ``hook(state, bucket)``
                as torch's wrapper takes: it averages the buckets when backward has ended, by ``torch.distributed``,
                which must be initialized. Gradients in half precision are in single there.

        Raises:
            UnsupportedError: another name, or a function for a module on a GPU.
            ConfigError: the wrapper has compression, a hook or a ShardedOptimizer; a backward is under way; or
                ``torch.distributed`` is not initialized.
            MismatchError: the ranks' hooks differ; on every rank.
        """
        if hook is None:
            state, hook = None, state
        name = hook if isinstance(hook, str) else getattr(hook, "__name__", repr(hook))
        if name == "powerSGD":
            module = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
            hook, state = module.powerSGD_hook, state or module.PowerSGDState(None)
        is_function = name not in _HOOKS and callable(hook)
        if name not in _HOOKS and (not is_function or self.gpu is not None):
            raise UnsupportedError(
                "register_comm_hook", where="hook", expected="allreduce, fp16_compress, bf16_compress, powerSGD, or, "
                "for a module on the CPU, a function", got=name,
                remedy="torch's DistributedDataParallel over dist.init_process_group('hpcdp') has any hook",
            )  # fmt: skip
        if is_function and not torch.distributed.is_initialized():
            raise ConfigError(
                "register_comm_hook", where="hook", expected="torch.distributed, by which the hook communicates",
                got="no process group", remedy='call torch.distributed.init_process_group("hpcdp") before',
            )  # fmt: skip
        backward = self.backward_pass
        has_hook = self.compression is not None or backward.hook is not None
        if has_hook or backward.awaits_step or not backward.reducer.is_untouched:
            raise ConfigError(
                "register_comm_hook", expected="a wrapper without compression, before training",
                got="compression" if has_hook else "a ShardedOptimizer, or a backward",
                remedy="call it once, directly after you wrap the module",
            )  # fmt: skip
        require_same(self.world.comm, "register_comm_hook", [f"hook {_HOOKS.get(name, name)}"])
        if is_function:
            self._layout_settings = self._layout_settings[0], False
            backward.use(self._make_reducer(None), True)
            backward.hook = functools.partial(hook, state)
        elif _HOOKS[name] is not None:
            compression = Compression.of(_HOOKS[name])
            backward.use(self._make_reducer(compression), True)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(None, comm_hook_type.name)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        pass

    def join_hook(self, **settings: Any) -> JoinHook:
        """Raise an error, because ``torch.distributed.algorithms.Join`` announces nothing; see `join`.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "torch.distributed.algorithms.Join", expected="torch's DistributedDataParallel",
            got="hpcdp.torch.DistributedDataParallel", remedy="use `with model.join():`",
        )  # fmt: skip

    @property
    def process_group(self) -> Any:
        """The default group of ``torch.distributed``, for libraries that ask; None without. Gradients do not use it."""
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    @property
    def join_device(self) -> torch.device:
        """The device of the module."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """See `process_group`."""
        return self.process_group

    def _broadcast_values(self, root: int) -> None:
        for _, param in self._shared(self.module.named_parameters()):
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
        known = {id(tensor) for tensor in self.backward_pass.tensors.values()}
        for name, tensor in self._shared(self.module.named_parameters()):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a deep copy of the module, without the wrapper."""
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> Any:
        """Copy and pickle the module, without the wrapper."""
        return _unwrapped, (self.module,)

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
            own = self._shared(self.module.named_buffers())
            require_same(self.world.comm, "sync_buffers", [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in own])
            buffers = ModuleBuffers(self.module, self.world, self.parameters_to_ignore)
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
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of batches within this context; every rank must enter.

        A rank that leaves it waits until all ranks leave, and takes part with gradients of zero. At the end all ranks
        have the parameters and buffers of the ranks with the most batches. A `ShardedOptimizer` updates on all ranks
        until then. The state of another optimizer stays as it was when a rank left; `broadcast_optimizer_state` from
        `last_rank` copies it to all. Gradients that a rank holds back by `no_sync` when it leaves are dropped. The
        model must not contain a `SyncBatchNorm`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks, so that the samples of
                the last batches weigh as much as others; otherwise by the number of ranks that still have data.
            enable: False: the context does nothing, for data that is known to be even.
            throw_on_early_termination: raise an error on all ranks as soon as one runs out of batches before others.

        Raises:
            MismatchError: ranks with data make different calls, or a rank has run out of batches and
                ``throw_on_early_termination`` is set; on every rank.
            ConfigError: a model is joined already.
            UnsupportedError: the model contains a `SyncBatchNorm`.
        """
        if not enable:
            yield
            return
        if any(isinstance(module, SyncBatchNorm) for module in self.module.modules()):
            raise UnsupportedError(
                "join", expected="a model without SyncBatchNorm", got="a model with SyncBatchNorm",
                remedy="use the same number of batches on every rank (drop_last=True)",
            )  # fmt: skip
        turns = self.backward_pass.turns
        with turns.joined(divide_by_initial_world_size, throw_on_early_termination):
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


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """``torch.utils.data.DistributedSampler`` over the ranks of an hpcdp world.

    Every rank draws the same permutation for the epoch of `set_epoch`, and takes every n-th index. The permutation is
    padded from its front, or cut with ``drop_last``, so that all ranks have the same number of indices. The state is a
    position, from which any number of ranks can continue in the same order with the next iteration.

    Args:
        dataset: a dataset with a length.
        num_replicas, rank: as in torch; default those of the world.
        shuffle, seed, drop_last: as in torch.
        world: the ranks; default `hpcdp.init()`.

    Raises:
        ConfigError: ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        world: World | None = None,
    ) -> None:
        require_world("DistributedSampler", world)
        if num_replicas is None or rank is None:
            world = init() if world is None else world
            num_replicas = world.size if num_replicas is None else num_replicas
            rank = world.rank if rank is None else rank
        whole_number("DistributedSampler", "num_replicas", num_replicas, 1)
        whole_number("DistributedSampler", "rank", rank, 0, num_replicas - 1)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._position = SamplerPosition()
        self.used: int | None = None
        """Number of samples of this iteration that this rank's loop has used; None: all that were drawn. Assign it
        before `state_dict` if a loader with workers draws ahead."""

    def __iter__(self) -> Iterator[Any]:
        done = self._position.begin() or 0
        loop, self.used = self._position.loop, None
        order = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        if self.drop_last:
            order = order[: len(order) - len(order[done:]) % self.num_replicas]
        indices, at = order[done:], 0
        while len(indices) % self.num_replicas:
            indices.append(order[at % len(order)])
            at += 1
        for index in indices[self.rank :: self.num_replicas]:
            loop.used += 1
            yield index
        loop.ended = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order of the next iteration; a restored epoch continues."""
        super().set_epoch(epoch)
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop, the same on all ranks; see `used` for samples that are drawn ahead.

        Returns:
            ``epoch``; ``done``: the number of its samples that all ranks together have used; ``begun`` and ``ended``:
            whether an iteration has begun, and has ended; and ``n``, ``shuffle``, ``seed``, which decide the order.
        """
        loop = self._position.loop
        drawn = loop.used if self.used is None else self.used
        ended = loop.ended and drawn == loop.used
        return self._position.state(loop.before + drawn * self.num_replicas, ended) | self._order

    @property
    def _order(self) -> dict[str, Any]:
        return {"n": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` with the next iteration; the one after that is complete.

        Raises:
            ConfigError: the order differs, because of another dataset length, ``shuffle`` or ``seed``.
        """
        for name, own in self._order.items():
            if state.get(name) != own:
                where = f"DistributedSampler {name}"
                raise ConfigError("load_state_dict", where=where, expected=own, got=state.get(name))
        super().set_epoch(state["epoch"])
        self._position.restore(state)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _refuse(of_torchs: Mapping[str, object], device: torch.device, world: World) -> None:
    """Raise `ConfigError` for an argument of torch's wrapper that asks for what this one does not do."""
    for name, value in of_torchs.items():
        if name not in _OF_TORCHS:
            check_name("argument", name, [*inspect.signature(DistributedDataParallel).parameters][:-1],
                       "DistributedDataParallel")  # fmt: skip
        valid, remedy = _OF_TORCHS[name]
        if name == "device_ids" and isinstance(value, list | tuple) and all(_is_at(device, place) for place in value):
            continue
        if name == "output_device" and _is_at(device, value):
            continue
        if name == "process_group" and _is_everyone(value, world):
            continue
        if not isinstance(value, int | None) or value not in valid:
            expected = f"{' or '.join(map(repr, valid))}, as by default"
            if name in ("device_ids", "output_device"):
                expected = f"None, or the module's device, {device}"
            raise ConfigError("DistributedDataParallel", where=name, expected=expected, got=repr(value), remedy=remedy)


def _is_everyone(group: object, world: World) -> bool:
    """Return whether ``group`` is the default group of ``torch.distributed``, over the ranks of ``world``."""
    distributed = torch.distributed
    if group is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    same = (distributed.get_rank(), distributed.get_world_size()) == (world.rank, world.size)
    return group is distributed.group.WORLD and same


def _is_at(device: torch.device, place: Any) -> bool:
    """Return whether ``place``, a device or the number of a GPU, is ``device``."""
    if isinstance(place, int):
        return device.type != "cpu" and place == device.index
    return isinstance(place, str | torch.device) and torch.device(place) == device


def _places(module: torch.nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """Return the dicts, names and values of all parameters and submodules, except inside scripted modules."""
    return [(held, name, value) for part in module.modules() for held in (part._parameters, part._modules)
            if isinstance(held, dict) for name, value in held.items()]  # fmt: skip


def _sparse(module: torch.nn.Module) -> set[int]:
    """Return the ids of parameters whose gradients are sparse."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(layer.weight) for layer in module.modules() if isinstance(layer, embeddings) and layer.sparse}


def _one_device(trained: Sequence[TorchParameter]) -> Device | None:
    """Return the GPU of all parameters, None for the host; `UnsupportedError` if devices differ."""
    device = trained[0].device if trained else None
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
