"""Horovod's optimizer, which reduces gradients while backward runs, and broadcasts of parameters and states.

Gradients are packed in buckets, in the reverse order of their parameters, in which backward completes them. When the
last gradient of a bucket is complete, and all buckets before it have started, the reduction of the bucket starts and
progresses beside backward. So all ranks start the same reductions in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import collectives
from .. import torch as hpcdp_torch
from ..core.checks import whole_number
from ..errors import ConfigError, StaleGradientError, UnsupportedError
from . import ProcessSet, global_process_set
from .operations import Average, Compressions, Handle, ReduceOp, allreduce_async_, reduction_named

_FIRST_NBYTES, _MOST_NBYTES = 1 << 20, 25 << 20
"""The lengths of the first bucket, which starts early, and of the others."""


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced together; of one dtype, on one device."""

    params: list[torch.Tensor]
    missing: set[torch.Tensor] = field(default_factory=set)
    """Parameters whose gradients are not complete in this step."""
    handle: Handle | None = None
    context: Any = None
    """The second argument of ``compression.decompress``."""


class _Reduction:
    """The gradients of one optimizer.

    Args:
        groups: the parameters that are reduced together.
        compression: encodes what is sent.
        passes: the backwards of each step.
        op: `Sum`, `Average`, ...
        predivide: divides gradients before the sum, and multiplies the sum.
        process_set: the ranks.
    """

    def __init__(
        self, groups: Sequence[list[torch.Tensor]], compression: Any, passes: int, op: ReduceOp, predivide: float,
        process_set: ProcessSet,
    ) -> None:  # fmt: skip
        self.passes = passes
        self.process_set = process_set
        self.is_synchronized = False
        """True from `synchronize` to the next step or gradient."""
        self._compression, self._op, self._predivide = compression, op, predivide
        self._buckets = [_Bucket(params) for params in groups]
        self._of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._delay: dict[torch.Tensor, int] = {}
        self.reset()
        weak = weakref.ref(self)  # a parameter keeps its hooks alive

        def written(param: torch.Tensor) -> None:
            owner = weak()
            if owner is not None:
                owner._written(param)

        for param in self._of:
            param.register_post_accumulate_grad_hook(written)

    def reset(self) -> None:
        """Forget the gradients of the current step."""
        self._next = 0  # the first bucket that has not started
        self._delay = dict.fromkeys(self._of, self.passes)
        for bucket in self._buckets:
            bucket.handle, bucket.missing = None, set(bucket.params)

    @property
    def has_begun(self) -> bool:
        """True if a gradient of this step has been written."""
        return any(delay < self.passes for delay in self._delay.values())

    def _written(self, param: torch.Tensor) -> None:
        if not self.process_set.included():
            return
        self.is_synchronized = False
        self._delay[param] -= 1
        if self._delay[param] < 0:
            raise StaleGradientError(
                "backward",
                expected=f"at most {self.passes} backward passes before step() or synchronize()",
                got=f"backward pass {self.passes + 1}",
                remedy="pass backward_passes_per_step= to hvd.DistributedOptimizer",
            )  # fmt: skip
        if self._delay[param] == 0:
            self._of[param].missing.discard(param)
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        self._next += 1
        parts = []
        for param in bucket.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
            parts.append(grad.detach().reshape(-1))
        flat, bucket.context = self._compression.compress(torch.cat(parts))
        bucket.handle = allreduce_async_(
            flat, op=self._op, prescale_factor=1 / self._predivide, postscale_factor=self._predivide,
            process_set=self.process_set,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Reduce what is left, wait for all reductions, and write the results to the gradients."""
        if self.process_set.included():
            for bucket in self._buckets[self._next :]:
                self._launch(bucket)
            for bucket in self._buckets:
                assert bucket.handle is not None
                flat = self._compression.decompress(bucket.handle.wait(), bucket.context)
                for param, part in zip(bucket.params, flat.split([p.numel() for p in bucket.params]), strict=True):
                    _write(param, part.view(param.shape))
            self.reset()
        self.is_synchronized = True


def _write(param: torch.Tensor, values: torch.Tensor) -> None:
    assert param.grad is not None
    if param.grad.is_sparse:
        param.grad = values.to_sparse(param.grad.sparse_dim())
    else:
        param.grad.copy_(values)


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to the class of an optimizer."""

    param_groups: list[dict[str, Any]]
    _reduction: _Reduction
    _skips: bool

    def synchronize(self) -> None:
        """Reduce the gradients of all ranks, and wait; every rank must call."""
        self._reduction.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` not reduce gradients within the context, after `synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backwards of each step."""
        self._reduction.passes = whole_number("set_backward_passes_per_step", "passes", passes, 1)
        self._reduction.reset()

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients, unless `synchronize` has, and update the parameters; every rank must call.

        Gradients that ``closure`` computes are reduced after each call of it.
        """
        reduction = self._reduction
        if closure is not None:

            def reduced() -> Any:
                with torch.enable_grad():
                    loss = closure()
                if not self._skips:
                    reduction.synchronize()
                return loss

            result = super().step(reduced)
        else:
            if not self._skips:
                if reduction.is_synchronized:
                    warnings.warn(
                        "step() after synchronize() without skip_synchronize(): gradients are not reduced again",
                        stacklevel=2,
                    )
                else:
                    reduction.synchronize()
            result = super().step()
        reduction.is_synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            StaleGradientError: a backward has begun to reduce them.
        """
        if self._reduction.has_begun:
            raise StaleGradientError(
                "zero_grad", expected="step() or synchronize() after a backward", got="zero_grad()",
                remedy="call zero_grad() before backward()",
            )  # fmt: skip
        self._reduction.is_synchronized = False
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, and forget the gradients of the current step.

        The groups stay the same objects, which the optimizer in it shares: a scheduler may have been made for that one.
        """
        self._reduction.reset()
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compressions.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like ``optimizer`` that reduces gradients over ranks while backward runs.

    It is of a subclass of the optimizer's class, and takes over its state. Every rank must make it.

    Args:
        optimizer: an optimizer of PyTorch, but not LBFGS.
        named_parameters: names of all parameters, for checks; default none.
        compression: ``hvd.Compression.none`` or ``hvd.Compression.fp16``.
        backward_passes_per_step: the number of backwards whose gradients are added up before each step.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: divides gradients before the sum and multiplies the result, with `Average`.
        num_groups: Horovod's older name of ``groups``.
        groups: lists of parameters that are reduced together; parameters in none are packed by size. A number has no
            effect: parameters are packed by size.
        sparse_as_dense: has no effect: sparse gradients are always reduced as dense ones, and stay sparse.
        process_set: the ranks that reduce; on other ranks it is as ``optimizer``.

    Raises:
        ConfigError: an argument is not valid.
        UnsupportedError: ``op`` is Adasum.
    """
    operation = "DistributedOptimizer"
    passes = whole_number(operation, "backward_passes_per_step", backward_passes_per_step, 1)
    reduction_named(operation, op, None)
    process_set.require_registered()
    if gradient_predivide_factor != 1 and op is not Average:
        expected = "1 unless op is hvd.Average"
        raise ConfigError(
            operation, where="gradient_predivide_factor", expected=expected, got=gradient_predivide_factor
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is not None:
        _check_names(list(named_parameters), params)
    kind = type(optimizer)
    wrapper: Any = object.__new__(type(kind.__name__, (_DistributedOptimizer, kind), {"__module__": __name__}))
    wrapper.__dict__.update(optimizer.__dict__)
    wrapper.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
    trained = [param for param in params if param.requires_grad]
    chosen = [list(group) for group in groups] if isinstance(groups, Sequence) else []
    wrapper._reduction = _Reduction(
        _groups_of(trained, chosen), compression, passes, op, gradient_predivide_factor, process_set
    )
    wrapper._skips = False
    return wrapper


def _check_names(named: Sequence[Any], params: Sequence[torch.Tensor]) -> None:
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ConfigError(
            "DistributedOptimizer", where="named_parameters", expected="pairs of a name and a parameter",
            got="something else", remedy="pass model.named_parameters()",
        )  # fmt: skip
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    unnamed = len({id(param) for param in params} - {id(param) for _, param in named})
    if twice or unnamed:
        raise ConfigError(
            "DistributedOptimizer", where="named_parameters", expected="one name for each parameter",
            got=f"{', '.join(twice)} more than once" if twice else f"{unnamed} parameters without a name",
            remedy="pass model.named_parameters()",
        )  # fmt: skip


def _groups_of(trained: Sequence[torch.Tensor], chosen: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return the parameters of each bucket, in the reverse order of registration."""
    grouped = {param for group in chosen for param in group}
    ungrouped = [param for param in trained if param not in grouped]
    groups: list[list[torch.Tensor]] = []
    for group in [[param for param in group if param.requires_grad] for group in reversed(chosen)]:
        for _, alike in itertools.groupby(group, key=lambda param: (param.dtype, param.device)):
            groups.append(list(alike))
    nbytes = 0
    for before, param in zip([None, *reversed(ungrouped)], reversed(ungrouped), strict=False):
        most = _FIRST_NBYTES if len(groups) <= 1 else _MOST_NBYTES
        is_alike = before is not None and (before.dtype, before.device) == (param.dtype, param.device)
        if not is_alike or nbytes + param.nbytes > most:
            groups.append([])
            nbytes = 0
        groups[-1].append(param)
        nbytes += param.nbytes
    return groups


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite parameters on all ranks with those of rank ``root_rank``; every rank must call.

    Args:
        params: a state dict, or tensors, or pairs of a name and a tensor, such as ``model.named_parameters()``.
        root_rank: the rank whose values are sent, numbered among all ranks.
        process_set: the ranks.
    """
    items = sorted(params.items()) if isinstance(params, dict) else list(params)
    values = [item[1] if isinstance(item, tuple) else item for item in items]
    odd = next((value for value in values if not isinstance(value, torch.Tensor)), None)
    if odd is not None:
        raise ConfigError(
            "broadcast_parameters", where="params", expected="tensors", got=type(odd).__name__,
            remedy="use hvd.broadcast_object() for other values",
        )  # fmt: skip
    if values:
        with torch.no_grad():
            collectives.grouped_broadcast(values, process_set.rank_of(root_rank), process_set.world)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Overwrite the optimizer's state and settings on all ranks with those of rank ``root_rank``; every rank must call.

    Args:
        optimizer: an optimizer, or a `DistributedOptimizer`; but not LBFGS.
        root_rank: the rank whose state is sent.
        model: ignored.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("broadcast_optimizer_state", expected="another optimizer", got="LBFGS")
    hpcdp_torch.broadcast_optimizer_state(optimizer, root_rank, global_process_set.world)
