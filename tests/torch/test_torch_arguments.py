"""What scripts for torch's wrapper pass to it: this one takes it, or says what to do instead."""

import inspect

import pytest
from raises import raises

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from toy import SEEDING, add_average, loss_of

import hpcdp.torch
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (
            {"device_ids": [0]},
            {"operation": "DistributedDataParallel", "where": "device_ids", "expected": "the module's device, cpu"},
        ),
        ({"output_device": "cuda:0"}, {"operation": "DistributedDataParallel", "where": "output_device"}),
        ({"dim": 1}, {"operation": "DistributedDataParallel", "where": "dim"}),
        ({"init_sync": False}, {"operation": "DistributedDataParallel", "where": "init_sync"}),
        (
            {"process_group": "a group"},
            {"operation": "DistributedDataParallel", "where": "process_group", "remedy": "world=world.split"},
        ),
        (
            {"bukket_cap_mb": 25},
            {
                "operation": "unknown argument 'bukket_cap_mb'",
                "where": "DistributedDataParallel",
                "remedy": "bucket_cap_mb",
            },
        ),
    ],
)
def test_arguments_that_there_are_not_are_refused_with_what_to_do(given, fields):
    with raises(ConfigError, **fields):
        hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2), **given)


def test_every_argument_of_torchs_wrapper_is_taken_at_its_default_and_otherwise_refused_by_name():
    ours, theirs = (
        inspect.signature(each.DistributedDataParallel).parameters for each in (hpcdp.torch, torch.nn.parallel)
    )
    wrap, names = hpcdp.torch.DistributedDataParallel, theirs.keys() - ours.keys()
    wrap(torch.nn.Linear(3, 2), **{name: theirs[name].default for name in names})
    for name in names:
        if not isinstance(theirs[name].default, bool) and name != "forward_sync_buffers":
            with raises(ConfigError, operation="DistributedDataParallel", where=name):
                wrap(torch.nn.Linear(3, 2), **{name: object()})


def test_what_asks_for_nothing_is_taken():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = hpcdp.torch.DistributedDataParallel(
        net, device_ids=["cpu"], output_device=torch.device("cpu"), gradient_as_bucket_view=True, static_graph=True,
        forward_sync_buffers=False,
    )  # fmt: skip
    assert model.find_unused_parameters and model.static_graph and not model.broadcast_buffers
    model = hpcdp.torch.DistributedDataParallel(net, static_graph=False, broadcast_buffers=None)
    assert not model.find_unused_parameters and model.broadcast_buffers
    model._set_static_graph()
    assert model.find_unused_parameters
    with model.join(enable=False):
        model(torch.ones(4, 3)).sum().backward()


def test_libraries_find_torchs_wrapper_and_its_attributes():
    model = hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    theirs = set(torch.distributed.algorithms.join.Joinable.__dict__) | {
        "module", "device", "device_ids", "output_device", "dim", "process_group", "broadcast_buffers", "static_graph",
        "find_unused_parameters", "gradient_as_bucket_view", "require_backward_grad_sync", "mixed_precision",
        "parameters_to_ignore", "no_sync", "join", "register_comm_hook", "train", "eval",
    }  # fmt: skip
    assert not [name for name in theirs if not hasattr(model, name)]
    assert model.device == torch.device("cpu") and model._get_ddp_logging_data() == {}
    copied = torch.optim.swa_utils.AveragedModel(model)
    copied.update_parameters(model)
    assert torch.equal(copied(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_torchs_join_says_what_to_use():
    model = hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2))
    with raises(UnsupportedError, operation="torch.distributed.algorithms.Join", remedy="with model.join():"):
        torch.distributed.algorithms.Join([model])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", ["allreduce", "fp16_compress", "bf16_compress"])
def test_communication_hooks_compress_between_nodes_as_those_of_torch_do(name, by_name):
    def rank(world):
        with SEEDING:
            torch.manual_seed(0)
            net = torch.nn.Linear(6, 4)
        model = hpcdp.torch.DistributedDataParallel(net, world)
        hook = name if by_name else getattr(default_hooks, f"{name}_hook")
        model.register_comm_hook(None, hook)
        assert (model.compression.codec.name if model.compression else "allreduce") == name.removesuffix("_compress")
        for step in range(2):
            loss_of(model, step, world.rank).backward()
        with SEEDING:
            torch.manual_seed(0)
            reference = torch.nn.Linear(6, 4)
        for step in range(2):
            add_average(reference, step, world.size)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            is_exact = name == "allreduce"
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6 if is_exact else 1e-2)
            assert is_exact or not torch.allclose(ours.grad, theirs.grad, atol=1e-6)

    thread_comm.run(2, rank, 1)


def test_hooks_that_are_not_known_are_refused_with_what_to_do():
    model = hpcdp.torch.DistributedDataParallel(torch.nn.Linear(3, 2))
    for hook in ("powersgd", 3, None):
        with raises(UnsupportedError, operation="register_comm_hook", where="hook", remedy="'hpcdp'"):
            model.register_comm_hook(None, hook)
    for hook in ("powerSGD", powerSGD_hook.powerSGD_hook, print):
        with raises(ConfigError, operation="register_comm_hook", where="hook", remedy="init_process_group"):
            model.register_comm_hook(None, hook)
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    with raises(ConfigError, operation="register_comm_hook", got="compression"):
        model.register_comm_hook("allreduce")


def test_ignored_parameters_and_buffers_are_left_alone():
    def rank(world):
        net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, ["0.weight", "1.running_mean"]
        )
        with torch.no_grad():
            net[0].weight.fill_(world.rank + 1.0)
            net[1].running_mean.fill_(world.rank + 1.0)
            net[1].running_var.fill_(world.rank + 1.0)
        model = hpcdp.torch.DistributedDataParallel(net, world)
        assert float(net[0].weight.detach()[0, 0]) == net[1].running_mean[0] == world.rank + 1.0
        assert net[1].running_var[0] == 1.0
        loss_of(model, 0, world.rank).backward()
        seen = world.comm.allgather_json([net[name].weight.grad.tolist() for name in (0, 2)])
        assert seen[0][0] != seen[1][0] and seen[0][1] == seen[1][1]

    thread_comm.run(2, rank)


def test_samplers_take_ranks_as_in_torch():
    ours, theirs = hpcdp.torch.DistributedSampler, torch.utils.data.DistributedSampler
    for given in ({"num_replicas": 3, "rank": 1}, {"num_replicas": 2, "rank": 0, "drop_last": True}):
        assert list(ours(range(11), **given)) == list(theirs(range(11), **given))
    assert list(ours(range(11), 3, 2, False)) == list(theirs(range(11), 3, 2, False))
    with raises(ConfigError, operation="DistributedSampler", where="rank"):
        ours(range(11), num_replicas=2, rank=2)
