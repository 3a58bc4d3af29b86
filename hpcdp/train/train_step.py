"""One step of training: forward, backward and update, as Python or as one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autograd import Tensor, as_tensor, record
from ..data_parallel.trainer import BaseTrainer
from ..errors import ConfigError, type_named
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.jit.step_executor import UNOBSERVED, HybridStep, Phases, finish, like


class _LossAndOutput(Module):
    """A network with its loss: what a hybridized `TrainStep` has traced."""

    def __init__(self, net: Module, loss: Callable[[Tensor, Any], Tensor]) -> None:
        self.net, self.loss = net, loss
        self.form: list[Any] = []
        """What ``net`` has returned, if that was several tensors, as a pattern for others."""

    def forward(self, x: Any, y: Any) -> tuple[Any, ...]:
        """The losses, and what the network gives, one tensor or several."""
        output, losses = _computed(self.net, self.loss, x, y)
        several = isinstance(output, (tuple, list))
        found = tuple(output) if several else (output,)
        if not found or not all(isinstance(each, Tensor) for each in found):
            raise ConfigError(
                "train step", where="net", expected="a network that returns a tensor, or a tuple or list of them",
                got=", ".join("a tensor" if isinstance(each, Tensor) else type_named(each) for each in found) or "none",
                remedy="call hybridize(False)",
            )  # fmt: skip
        self.form[:] = [like(output, [None] * len(found))] if several else []
        return losses, *found


def _computed(net: Module, loss: Callable[[Tensor, Any], Tensor], x: Any, y: Any) -> tuple[Any, Tensor]:
    output = net(x)
    losses = loss(output, y)
    require_per_sample("train step", losses, len(y))
    return output, losses


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.node is not None or x.grad_req != "null")


class TrainStep:
    """``step(x, y)`` trains a network by one batch; every rank of the trainer must call.

    The same as ::

        with autograd.record():
            output = net(x)
            losses = loss(output, y)
        losses.backward(trainer.loss_scale)
        trainer.step(len(y))

    and by `hybridize` one plan, which has no Python of layers, tape and trainer between the kernels.

    Args:
        net: called with one input.
        trainer: has the parameters.
        loss: per sample, shape ``(batch,)``.
        phases: contexts that forward, backward and `Trainer.step` are computed in, as what measures them.

    Raises:
        ConfigError: an argument is none of that; in a call, the loss is not of shape ``(batch,)``.
    """

    def __init__(
        self,
        net: Module,
        trainer: BaseTrainer,
        loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
        phases: Phases = UNOBSERVED,
    ) -> None:
        for where, valid, expected, got in (
            ("net", isinstance(net, Module), "a network", net),
            ("trainer", isinstance(trainer, BaseTrainer), "a Trainer", trainer),
            ("loss", callable(loss), "a function of output and labels", loss),
        ):
            if not valid:
                raise ConfigError("TrainStep", where=where, expected=expected, got=type(got).__name__)
        if net.has_own_step:
            own = f"a {type(net).__name__}, which has step()"
            raise ConfigError("TrainStep", where="net", expected="a network that is called", got=own)
        self._trainer, self._phases = trainer, phases
        self._module = _LossAndOutput(net, loss)
        self._hybrid: HybridStep | None = None

    def hybridize(self, active: bool = True) -> None:
        """From now on replay each step as one plan, to the same bits: see docs/hybrid.md.

        The first call with inputs of new shapes runs ``forward`` and the loss as Python and notes their operators, the
        second lays them out in memory, or captures a CUDA graph, and later calls replay it. Hybridized or not, what is
        asked of ``forward`` is what `Module.hybridize` asks, also of the loss; the network itself need not be
        hybridized, and is called as before elsewhere.

        Args:
            active: False: as Python again, and forget all plans.
        """
        name = f"a step of {type(self._module.net).__name__}"
        self._hybrid = HybridStep(self._module, self._trainer, self._phases, name) if active else None

    def __call__(self, x: Any, y: Any) -> tuple[Tensor, Any]:
        """Train by a batch. Changes parameters in place.

        Args:
            x: shape ``(batch, ...)``, what ``net`` takes.
            y: labels, an array or list of length ``batch``; a rank without samples passes empty arrays. Without a plan
                go lists, and what is recorded or has a gradient attached, which is computed, too.

        Returns:
            The losses before the update, shape ``(batch,)``, and what ``net`` gave, on no tape. Nobody changes their
            arrays later, unless ``net`` returns its input or a parameter.

        Raises:
            HpcdpError: what forward, backward and `Trainer.step` raise; hybridized, ``net`` returns anything but a
                tensor, or a tuple or list of them.
        """
        if not hasattr(y, "__len__") or getattr(y, "shape", (1,)) == ():
            got = type_named(y) if getattr(y, "shape", None) is None else "an array without axes"
            raise ConfigError("train step", where="y", expected="a label for each sample", got=got)
        is_list = not hasattr(y, "shape")  # which each loss takes in its way
        if self._hybrid is None or not len(y) or is_list or _wants_gradient(x) or _wants_gradient(y):
            with self._phases.forward, record():
                output, losses = _computed(self._module.net, self._module.loss, x, y)
            losses, output = finish(self._trainer, self._phases, (losses, output))
            return losses, output
        with record():
            found = self._hybrid([as_tensor(each) for each in (x, y)])
        losses, *outputs = [Tensor(each.data) for each in found]
        form = self._module.form
        return losses, like(form[0], outputs) if form else outputs[0]
