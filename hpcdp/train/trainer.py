"""`Trainer`, the factory of trainers, and `TrainStep`, one step of training in Python or as one plan."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from ..autograd import Tensor, as_tensor, record
from ..comm import World
from ..comm.world import require_world
from ..compression import Settings
from ..core.checks import function, instance
from ..data_parallel.base_trainer import BaseTrainer, no_parameters
from ..data_parallel.bucket_layout import ParameterLike
from ..data_parallel.bucket_trainer import BucketTrainer
from ..data_parallel.gradient_policy import Policy
from ..errors import ConfigError, type_named
from ..kvstore import KVStore
from ..kvstore.store_trainer import StoreTrainer
from ..nn import Module
from ..nn.functional import require_per_sample, softmax_cross_entropy
from ..nn.jit.cache import UNOBSERVED, HybridStep, Phases, finish, like
from ..optim import Optimizer, require_optimizer


class Trainer(BaseTrainer, metaclass=abc.ABCMeta):
    """The update of a model's parameters by the gradients of all ranks. Every rank must create it, with the same model.

    Losses are per sample and gradients are sums over samples (as in Gluon). Each rank passes the number of its samples
    to `step`, and the trainer divides by the global number once. Uneven and empty batches therefore give exactly the
    gradient of the global batch.

    ``Trainer(...)`` creates a `BucketTrainer`, or with ``kvstore`` a `StoreTrainer`; both are instances of Trainer. All
    ranks start with the values of rank 0. The trainer replaces ``param.data`` and ``param.grad`` by views of flat
    buckets. The buckets are the rank's own, or with ``owner="shard"`` shared by the ranks of a node. A 16-bit parameter
    has a float32 copy in the optimizer's state, which is updated and then rounded.

    If the shapes of some layers are not known yet, the first call of `step` completes the Trainer, as in Gluon. A rank
    without samples gets shapes and values from the others. Until then methods that need arrays, such as `no_sync` and
    `state_dict`, raise DeviceError.

    Args:
        params: the model's parameters, ``net.parameters()``; those with ``grad_req="null"`` stay unchanged.
        optimizer: the update rule, with the same settings on every rank.
        world: the ranks; default `hpcdp.init()`. For a model that is split over ranks, the ranks with the same slice or
            stage: the ``replicas`` of `hpcdp.parallel.split_world`, or of a `Pipeline`.
        kvstore: train on a store: one of `kvstore.KINDS`, or a store without keys. Parameters become its keys 0, 1, 2,
            ... None: reduce gradients in buckets.
        update_on_kvstore: whether the store updates the parameters. False: the store sums gradients, and every rank
            updates. None: True.
        compression: the compression of gradients between nodes, or by `KVStore.set_gradient_compression`: ``"fp16"``,
            ``"bf16"``, ``"2bit"``, ``"1bit"`` or ``"topk"``, with settings after a colon (``"topk:ratio=0.05"``), or a
            `Compression`. None: no compression.
        policy: the treatment of unused parameters and of gradients that are not finite.
        owner: the rank that updates a parameter; not for stores. ``"rank"``: every rank updates all parameters.
            ``"shard"``: every rank updates its shard, with 1/n of the optimizer's state for n ranks on the smallest
            node (see `nbytes`). ``"auto"``: ``"shard"`` if the ranks of each node share memory, else ``"rank"``; also
            ``"rank"`` on GPUs, and on one node if all copies fit into its caches: up to 6 MiB, or up to 32 MiB if a
            measurement shows that its cores are far apart, but not with ``overlap`` or more ranks than cores. The
            results have the same bits (LARS on float64: except the last bit).
        bucket_cap_mb: the size of a gradient bucket in MiB; the first bucket has 1 MiB. None: an eighth of the model,
            between 1 and 25 MiB. Not for stores.
        clip_norm: the largest norm of the global batch's mean gradient; a longer one is scaled down. A gradient that
            is not finite stays unchanged. Not for stores.
        overlap: reduce a bucket as soon as backward has written it, and update its parameters during the next forward,
            until a layer needs them. Gradients must then not be modified before `step`, and each step has exactly one
            backward, with ``grad_req="write"``. None: on several nodes. The results have the same bits. Not for stores.
        reproducible: compute the same bits on any number of ranks and nodes. Each rank calls `step` after every virtual
            shard of `own_virtual_shards`, which `data.VirtualShardSampler` yields; the last of these calls updates.
            Sets BLAS to one thread. docs/reproducibility.md describes restrictions and costs. Not for stores.
        virtual_shards: the number of parts of a global batch with ``reproducible``, at least one per rank. The bits of
            the result depend on it. None: 8.
        loss_scale: the factor by which losses, and so gradients, are scaled against underflow in 16 bits: backward is
            ``loss.backward(trainer.loss_scale)``. ``"dynamic"``: initially 2^16; halved, down to 1, by each step whose
            summed gradient overflows, and doubled after 2000 steps without overflow. A step with overflow updates
            nothing on any rank, as with ``Policy(nonfinite="skip")``. Stores take a number.

    Raises:
        MismatchError: the ranks' parameters or settings differ, or later, in `step` and `update`, their learning rates
            or loss scales. The error is raised on every rank, with the ranks and the first difference.
        ConfigError: there are no parameters, two have the same name, or one is not a float of 16 to 64 bits; an unknown
            owner, codec or store; a clip_norm that is not positive; an option that a store or ``reproducible`` does not
            support.
    """

    def __new__(
        cls,
        params: Sequence[ParameterLike],
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
        """Create a `BucketTrainer`, or with ``kvstore`` a `StoreTrainer`."""
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


Trainer.register(BucketTrainer)  # for isinstance()
Trainer.register(StoreTrainer)


class _LossAndOutput(Module):
    """A network with its loss, which a hybridized `TrainStep` traces."""

    def __init__(self, net: Module, loss: Callable[[Tensor, Any], Tensor]) -> None:
        self.net, self.loss = net, loss
        self.form: list[Any] = []
        """The structure of the output if ``net`` returned several tensors."""

    def forward(self, x: Any, y: Any) -> tuple[Any, ...]:
        """Return the losses and the outputs of the network."""
        output, losses = _computed(self.net, self.loss, x, y)
        several = isinstance(output, (tuple, list))
        outputs = tuple(output) if several else (output,)
        if not outputs or not all(isinstance(value, Tensor) for value in outputs):
            kinds = ["a tensor" if isinstance(value, Tensor) else type_named(value) for value in outputs]
            raise ConfigError(
                "train step", where="net", expected="a network that returns a tensor, or a tuple or list of them",
                got=", ".join(kinds) or "none", remedy="call hybridize(False)",
            )  # fmt: skip
        self.form[:] = [like(output, [None] * len(outputs))] if several else []
        return losses, *outputs


def _computed(net: Module, loss: Callable[[Tensor, Any], Tensor], x: Any, y: Any) -> tuple[Any, Tensor]:
    output = net(x)
    losses = loss(output, y)
    require_per_sample("train step", losses, len(y))
    return output, losses


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.node is not None or x.grad_req != "null")


class TrainStep:
    """A training step: ``step(x, y)`` trains a network by one batch; every rank of the trainer must call.

    It is equivalent to ::

        with autograd.record():
            output = net(x)
            losses = loss(output, y)
        losses.backward(trainer.loss_scale)
        trainer.step(len(y))

    and after `hybridize` one plan, without the Python code of layers, tape and trainer between the kernels.

    Args:
        net: the network, called with one input.
        trainer: the trainer of its parameters.
        loss: a function of output and labels, per sample, shape ``(batch,)``.
        phases: contexts for forward, backward and `Trainer.step`, such as timers.

    Raises:
        ConfigError: an argument is invalid; in a call: the loss is not of shape ``(batch,)``.
    """

    def __init__(
        self,
        net: Module,
        trainer: BaseTrainer,
        loss: Callable[[Tensor, Any], Tensor] = softmax_cross_entropy,
        phases: Phases = UNOBSERVED,
    ) -> None:
        instance("TrainStep", "net", net, Module, "a network")
        instance("TrainStep", "trainer", trainer, BaseTrainer, "a Trainer")
        function("TrainStep", "loss", loss, "a function of output and labels")
        if net.has_own_step:
            own = f"a {type(net).__name__}, which has step()"
            raise ConfigError("TrainStep", where="net", expected="a network that is called", got=own)
        self._trainer, self._phases = trainer, phases
        self._module = _LossAndOutput(net, loss)
        self._hybrid: HybridStep | None = None

    def hybridize(self, active: bool = True) -> None:
        """Replay each later step as one plan, with the same bits; see docs/hybrid.md.

        For each new input shape, the first call runs ``forward`` and the loss in Python and records their operators.
        The second call plans their memory or captures a CUDA graph, and later calls replay it. ``forward`` and the loss
        must meet the conditions of `Module.hybridize`. The network itself need not be hybridized.

        Args:
            active: False: run steps in Python again, and drop all plans.
        """
        name = f"a step of {type(self._module.net).__name__}"
        self._hybrid = HybridStep(self._module, self._trainer, self._phases, name) if active else None

    def __call__(self, x: Any, y: Any) -> tuple[Tensor, Any]:
        """Train by a batch, changing the parameters in place.

        Args:
            x: the input of ``net``, shape ``(batch, ...)``.
            y: labels, an array or list of length ``batch``; a rank without samples passes empty arrays. The step runs
                without a plan if ``y`` is a list, or if ``x`` or ``y`` is on a tape or has a gradient attached, which
                is then computed, too.

        Returns:
            The losses before the update, shape ``(batch,)``, and the output of ``net``, both without a tape. Later
            steps do not change their arrays, unless ``net`` returns its input or a parameter.

        Raises:
            HpcdpError: forward, backward or `Trainer.step` raises; with a plan: ``net`` returns anything but a tensor,
                or a tuple or list of tensors.
        """
        if not hasattr(y, "__len__") or getattr(y, "shape", (1,)) == ():
            got = type_named(y) if getattr(y, "shape", None) is None else "an array without axes"
            raise ConfigError("train step", where="y", expected="a label for each sample", got=got)
        is_list = not hasattr(y, "shape")  # each loss converts lists in its own way
        if self._hybrid is None or not len(y) or is_list or _wants_gradient(x) or _wants_gradient(y):
            with self._phases.forward, record():
                output, losses = _computed(self._module.net, self._module.loss, x, y)
            losses, output = finish(self._trainer, self._phases, (losses, output))
            return losses, output
        with record():
            results = self._hybrid([as_tensor(x), as_tensor(y)])
        losses, *outputs = [Tensor(result.data) for result in results]
        form = self._module.form
        return losses, like(form[0], outputs) if form else outputs[0]
