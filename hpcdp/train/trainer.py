"""The factory of trainers: `Trainer(...)` makes a `BucketTrainer`, or with ``kvstore`` a `StoreTrainer`.

One step of training: forward, backward and update, as Python or as one plan.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from ..autograd import Tensor, as_tensor, record
from ..comm import World
from ..comm.world import require_world
from ..compression import Settings
from ..data_parallel.bucket_trainer import BucketTrainer
from ..data_parallel.buckets import Parameter
from ..data_parallel.policy import Policy
from ..data_parallel.trainer import BaseTrainer, no_parameters
from ..errors import ConfigError, type_named
from ..kvstore import KVStore
from ..kvstore.trainer import StoreTrainer
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.jit.cache import UNOBSERVED, HybridStep, Phases, finish, like
from ..optim import Optimizer, require_optimizer


class Trainer(BaseTrainer, metaclass=abc.ABCMeta):
    """Updates a model's parameters by the gradients of all ranks. Every rank must make it, with the same model.

    A loss is per sample and gradients are sums (as in Gluon), so each rank says how many samples its gradients stand
    for and the trainer divides by the global number once: uneven and empty shards give exactly the global batch's
    gradient.

    What ``Trainer(...)`` makes is a `BucketTrainer`, with ``kvstore`` a `StoreTrainer`; both are Trainers. All ranks
    start with rank 0's values. From construction on, ``param.data`` and ``param.grad`` are arrays of the trainer's:
    views of flat buckets, with ``owner="shard"`` in memory shared by the node, once; or a rank's own. Parameters of
    16 bits have a float32 copy each, in the optimizer's state: that is updated, and then rounded to them.

    Where layers have still to find out their shapes, the rest of the Trainer is made by the first call of `step`, as in
    Gluon; a rank without samples gets shapes and values from others. What needs arrays, as `no_sync` or `state_dict`,
    is a DeviceError before that.

    Args:
        params: the model's parameters, ``net.parameters()``; those with ``grad_req="null"`` are left alone.
        optimizer: the update rule, with the same settings on every rank.
        world: the ranks; default `hpcdp.init()`. Of a model that is cut those with the same part or stage: the
            ``replicas`` of `hpcdp.parallel.split_world`, or of a `Pipeline`.
        kvstore: train on a store: one of `kvstore.KINDS`, or a store without keys. Parameters become its keys 0, 1, 2,
            ... None: in buckets.
        update_on_kvstore: whether the store updates, or only sums, and every rank updates. None: it updates.
        compression: how gradients are compressed between nodes, or by a store's `KVStore.set_gradient_compression`:
            ``"fp16"``, ``"bf16"``, ``"2bit"``, ``"1bit"`` or ``"topk"``, with settings behind a colon
            (``"topk:ratio=0.05"``), or a `Compression`. None: not at all.
        policy: what to do about unused parameters and gradients that are not finite.
        owner: who updates. ``"rank"``: every rank all parameters. ``"shard"``: every rank its shard, with 1/n of the
            optimizer's state for n ranks on the smallest node (`nbytes` tells). ``"auto"``: ``"shard"`` where the
            node's ranks share memory, but ``"rank"`` on one node if all copies fit in its caches: up to 6 MiB of them,
            up to 32 where its cores are far from each other, which is measured; not with ``overlap``, or more ranks
            than cores. On GPUs ``"rank"``. The numbers are the same to the bit (LARS on float64: but the last). This
            and all that follows is not for stores.
        bucket_cap_mb: size of a bucket of gradients in MiB; the first has 1. None: an eighth of the model, but from
            1 to 25.
        clip_norm: scale the global batch's mean gradient down to this norm where it is longer. One that is not finite
            stays as it is.
        overlap: reduce a bucket as soon as backward has written it, and update its parameters while the next forward
            runs, as far as that does not need it; then gradients must not be changed by hand before `step`, and there
            is one backward for each, with ``grad_req="write"``. None: where there are several nodes. The numbers are
            the same to the bit.
        reproducible: the same bits on any number of ranks and nodes. Each rank calls `step` after every virtual shard
            of `own_virtual_shards`, and the last of these calls updates; `data.VirtualShardSampler` yields them. Sets
            BLAS to one thread. See docs/reproducibility.md for what it refuses, and what it costs.
        virtual_shards: into how many pieces every global batch is then cut, at least one a rank; it decides the bits.
            None: 8.
        loss_scale: how many times too large gradients are, since backward begins with ``loss.backward(
            trainer.loss_scale)``, against underflow in 16 bits. ``"dynamic"``: 2^16 at first, halved by each step whose
            summed gradient overflows, but not below 1, and doubled after 2000 steps that do not; such a step updates
            nothing on all ranks, as with ``Policy(nonfinite="skip")``. Stores take a number.

    Raises:
        MismatchError: the ranks' parameters or settings differ, later in `step` and `update` their learning rates or
            loss scales; on every rank, naming ranks and the first difference.
        ConfigError: no parameters, two of one name or one that is no float of 16 to 64 bits, an unknown owner, codec or
            store, a clip_norm that is not positive; what a store cannot do; what would keep a run from being
            reproducible.
    """

    def __new__(
        cls,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        world: World | None = None,
        *,
        kvstore: str | KVStore | None = None,
        update_on_kvstore: bool | None = None,
        compression: Settings = None,
        policy: Policy | None = None,
        owner: str = "auto",
        bucket_cap_mb: float | None = None,
        clip_norm: float | None = None,
        overlap: bool | None = None,
        reproducible: bool = False,
        virtual_shards: int | None = None,
        loss_scale: float | str = 1.0,
    ) -> Trainer:
        if not isinstance(params, Iterable):
            raise no_parameters(params)
        require_optimizer("Trainer", optimizer)
        require_world("Trainer", world)
        options: dict[str, Any] = {
            "compression": compression, "policy": policy, "owner": owner, "bucket_cap_mb": bucket_cap_mb,
            "clip_norm": clip_norm, "overlap": overlap, "reproducible": reproducible,
            "virtual_shards": virtual_shards, "loss_scale": loss_scale, "update_on_kvstore": update_on_kvstore,
        }  # fmt: skip
        trainer: BaseTrainer
        if kvstore is None:
            trainer = BucketTrainer(params, optimizer, world, **options)
        else:
            trainer = StoreTrainer(params, optimizer, world, kvstore=kvstore, **options)
        return cast(Trainer, trainer)


Trainer.register(BucketTrainer)  # both are Trainers to isinstance()
Trainer.register(StoreTrainer)


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
