"""Objects of every public class are deep-copied and pickled, or say by name why not."""

import copy
import importlib
import inspect
import pickle

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import autograd, checkpoint, compression, data, engine, kvstore, nn, optim, parallel, train
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.train.callbacks import Callback, EarlyStopping

COPIES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
PACKAGES = ("", *(f".{name}" for name in (
    "autograd", "checkpoint", "compression", "data", "engine", "kvstore", "nn", "optim", "parallel", "train",
)))  # fmt: skip
SAMPLES = np.arange(24, dtype="f4").reshape(6, 4)


def parts():
    return parallel.split_world(1).parts


def hybridized():
    net = nn.Sequential(nn.Dense(4, 3), nn.ReLU())
    net.hybridize()
    for _ in range(3):
        net(SAMPLES)
    return net


NETWORKS = {
    nn.AvgPool2D: lambda: nn.AvgPool2D(2),
    nn.BatchNorm: lambda: nn.BatchNorm(4),
    nn.CausalSelfAttention: lambda: nn.CausalSelfAttention(4, 2),
    nn.Conv2D: lambda: nn.Conv2D(2, 3, 3),
    nn.Dense: lambda: nn.Dense(4, 3),
    nn.Dropout: lambda: nn.Dropout(0.5, seed=3),
    nn.Embedding: lambda: nn.Embedding(30, 2),
    nn.Flatten: nn.Flatten,
    nn.GELU: nn.GELU,
    nn.GlobalAvgPool2D: nn.GlobalAvgPool2D,
    nn.HybridConcurrent: lambda: nn.HybridConcurrent(nn.Dense(4, 3), nn.Dense(4, 2)),
    nn.LSTM: lambda: nn.LSTM(4, 3),
    nn.LayerNorm: lambda: nn.LayerNorm(4),
    nn.MaxPool2D: lambda: nn.MaxPool2D(2),
    nn.Module: lambda: train.SyncBatchNorm.convert(nn.Sequential(nn.Dense(4, 3), nn.BatchNorm(3))),
    nn.ReLU: nn.ReLU,
    nn.Replicas: lambda: nn.Replicas(nn.Dense(4, 3), [hpcdp.cpu(0), hpcdp.cpu(1)]),
    nn.Sequential: hybridized,
    nn.Sigmoid: nn.Sigmoid,
    nn.Tanh: nn.Tanh,
    parallel.ColumnConv2D: lambda: parallel.ColumnConv2D(2, 3, 3, parts=parts()),
    parallel.ColumnDense: lambda: parallel.ColumnDense(4, 3, parts=parts()),
    parallel.RowConv2D: lambda: parallel.RowConv2D(2, 3, 3, parts=parts()),
    parallel.RowDense: lambda: parallel.RowDense(4, 3, parts=parts()),
    train.SyncBatchNorm: lambda: train.SyncBatchNorm(4),
}
PARTS_OF_RANKS = {parallel.ColumnConv2D, parallel.ColumnDense, parallel.RowConv2D, parallel.RowDense, parallel.Split}
"""These have a world that `World.split` made: they are deep-copied, and not pickled."""
OTHERS = {
    **{rule: lambda rule=rule: rule(lr=0.1) for rule in (optim.SGD, optim.Adam, optim.AdamW, optim.LARS)},
    optim.ConstantSchedule: lambda: optim.ConstantSchedule(0.1),
    optim.CosineSchedule: lambda: optim.CosineSchedule(0.1, 10),
    optim.ExponentialSchedule: lambda: optim.ExponentialSchedule(0.1, 0.9),
    optim.MultiStepSchedule: lambda: optim.MultiStepSchedule(0.1, [2, 3], 0.5),
    optim.StepSchedule: lambda: optim.StepSchedule(0.1, 3, 0.5),
    optim.WarmupSchedule: lambda: optim.SGD(lr=optim.WarmupSchedule(optim.CosineSchedule(0.1, 10), 3)),
    autograd.Tensor: lambda: autograd.Tensor(SAMPLES),
    nn.Parameter: lambda: nn.Parameter(SAMPLES),
    **{kind: kind for kind in (compression.BFloat16, compression.Float16, compression.OneBit, compression.TwoBit)},
    compression.TopK: lambda: compression.TopK(0.1),
    compression.ErrorFeedback: lambda: compression.ErrorFeedback(compression.TwoBit(), 4, np.dtype("f4")),
    hpcdp.Compression: lambda: compression.Compression.of("2bit"),
    hpcdp.Device: lambda: hpcdp.cpu(0),
    hpcdp.HpcdpError: lambda: ConfigError("op", got=1),
    hpcdp.Monoid: lambda: hpcdp.Monoid(np.add, 0),
    hpcdp.Policy: hpcdp.Policy,
    hpcdp.World: hpcdp.init,
    parallel.Split: lambda: parallel.split_world(1),
    Callback: Callback,
    EarlyStopping: lambda: EarlyStopping("loss", patience=2),
    data.ArrayDataset: lambda: data.ArrayDataset(SAMPLES, SAMPLES[:, 0]),
    data.Augmentation: data.Augmentation,
    data.BatchSampler: lambda: data.BatchSampler(data.RandomSampler(6), 2),
    data.DataLoader: lambda: data.DataLoader(data.ArrayDataset(SAMPLES, SAMPLES[:, 0]), data.ShardedSampler(6, 2)),
    data.RandomCrop: lambda: data.RandomCrop(2),
    data.RandomFlip: data.RandomFlip,
    data.RandomSampler: lambda: data.RandomSampler(6),
    data.SequentialSampler: lambda: data.SequentialSampler(6),
    data.ShardedSampler: lambda: data.ShardedSampler(6, 2),
    data.VirtualShardSampler: lambda: data.VirtualShardSampler(8, 2, 2),
}
REFUSED = {
    checkpoint.Manager: checkpoint.Manager,
    engine.Engine: lambda _: engine.Engine(),
    engine.Variable: lambda _: engine.Engine().variable(),
    hpcdp.Trainer: lambda _: hpcdp.Trainer(nn.Dense(4, 3).parameters(), optim.SGD(lr=0.1)),
    kvstore.KVStore: lambda _: kvstore.create("local"),
    parallel.Pipeline: lambda _: parallel.Pipeline([lambda: nn.Dense(4, 3)], 2),
}
NOT_TRIED = {
    # Made by others alone, for a moment or as what a call returns.
    autograd.Gradient, checkpoint.Part, checkpoint.PerRank, checkpoint.Restored, checkpoint.Sharded, kvstore.PullHandle,
    nn.VirtualShard,
    # Abstract.
    compression.Codec, data.Dataset, optim.Optimizer, optim.Schedule,
    # Made of files, or of several of these.
    data.HDF5Dataset, data.ImageDataset, data.SharedSampler, data.TextDataset, nn.SymbolBlock, train.TrainStep,
}  # fmt: skip


def test_every_public_class_is_tried():
    modules = [importlib.import_module(f"hpcdp{name}") for name in PACKAGES]
    public = [getattr(module, name) for module in modules for name in module.__all__]
    classes = {each for each in public if inspect.isclass(each)}
    assert classes - (NETWORKS.keys() | OTHERS.keys() | REFUSED.keys() | NOT_TRIED) == set()


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
def test_a_copy_of_a_network_computes_the_same_and_is_its_own(kind):
    net = NETWORKS[kind]()
    x = {
        nn.Embedding: np.arange(6),
        nn.LSTM: SAMPLES.reshape(2, 3, 4),
        nn.CausalSelfAttention: SAMPLES.reshape(2, 3, 4),
    }
    x = x.get(kind, np.ones((2, 2, 4, 4), "f4") if "2D" in kind.__name__ else SAMPLES)
    copied = [each(net) for each in COPIES[: 1 if kind in PARTS_OF_RANKS else 2]]
    for other in copied:
        for own, param in zip(net.parameters(), other.parameters(), strict=True):
            assert not np.shares_memory(own.data, param.data)
        for each in (net, other):
            each(x)
        with autograd.record():
            outputs = [each(x) for each in (net, copy.deepcopy(other))]
            outputs = [each[0] if isinstance(each, tuple) else each for each in outputs]
        if kind is not nn.Dropout or other is copied[0]:  # `net` has drawn another time then
            np.testing.assert_array_equal(*(each.asnumpy() for each in outputs))


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_other_objects_are_copied(kind):
    one = OTHERS[kind]()
    for each in COPIES[: 1 if kind in PARTS_OF_RANKS else 2]:
        other = each(one)
        assert type(other) is type(one)
        assert (other is one) == (kind is hpcdp.World) or kind is hpcdp.Device


@pytest.mark.parametrize(
    "kind", sorted([*REFUSED, *PARTS_OF_RANKS], key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__
)
def test_what_is_not_copied_says_so_by_name(kind, tmp_path):
    one = REFUSED[kind](tmp_path) if kind in REFUSED else (NETWORKS | OTHERS)[kind]()
    for each in COPIES[1 if kind in PARTS_OF_RANKS else 0 :]:
        with raises(UnsupportedError, operation="World" if kind in PARTS_OF_RANKS else kind.__name__):
            each(one)


@pytest.mark.parametrize("n", [2, 3])
def test_a_copy_of_a_layer_of_all_ranks_is_one_of_the_same_ranks(n):
    """As for an average of the parameters, or the best network so far."""

    def rank(world):
        net = train.SyncBatchNorm.convert(nn.Sequential(nn.Dense(4, 3), nn.BatchNorm(3)), world)
        best = copy.deepcopy(net)
        x = np.random.default_rng(world.rank).standard_normal((2 + world.rank, 4), "f4")
        with autograd.record():
            outputs = [each(x).asnumpy() for each in (net, best)]
        np.testing.assert_array_equal(*outputs)
        alone = nn.BatchNorm(3)
        with autograd.record():
            assert not np.array_equal(alone(net[0](x)).asnumpy(), outputs[1])

    thread_comm.run(n, rank)
