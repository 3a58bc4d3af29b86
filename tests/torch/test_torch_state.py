"""What torch has, in checkpoints: through files, into what is there and into nothing."""

from itertools import islice

import pytest
from raises import raises

torch = pytest.importorskip("torch")

from hpcdp import checkpoint
from hpcdp.checkpoint.flatten import as_array
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, UnsupportedError
from hpcdp.torch import DistributedDataParallel, DistributedSampler, GradScaler, ShardedOptimizer


def save_and_restore(folder, make, change, n=1, m=None):
    """``change`` what ``make`` gave, save it on n ranks, restore it on m; what was saved and what came back."""

    def save(world):
        state = make(world)
        change(state, world)
        with checkpoint.Manager(folder, world) as manager:
            manager.save(1, state)
        return state

    def restore(world):
        state = make(world)
        with checkpoint.Manager(folder, world) as manager:
            restored = manager.restore(into=state)
        assert not restored.missing and not restored.left_over
        return state, restored.state

    return thread_comm.run(n, save)[0], thread_comm.run(m or n, restore)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "bool", "uint8", "complex64"])
def test_tensors_of_all_dtypes_and_layouts(dtype, tmp_path):
    kind = getattr(torch, dtype)

    def make(world):
        return {"whole": torch.zeros(3, 4, dtype=kind), "turned": torch.zeros(4, 3, dtype=kind).T,
                "scalar": torch.zeros((), dtype=kind), "none": torch.zeros(0, 2, dtype=kind)}  # fmt: skip

    def change(state, world):
        for each in state.values():
            each.copy_(
                (torch.arange(each.numel()) % 2 if dtype == "bool" else 1.5 + torch.arange(each.numel())).reshape(
                    each.shape
                )
            )

    state, (into, came) = save_and_restore(tmp_path, make, change)
    for name, each in state.items():
        assert into[name].dtype is kind and torch.equal(into[name], each)
        assert came[name] is into[name]
    with checkpoint.Manager(tmp_path) as manager:
        for name, each in manager.restore().state.items():
            assert isinstance(each, torch.Tensor) and each.dtype is kind and torch.equal(each, state[name])


def test_a_view_shares_memory_where_it_can():
    tensor = torch.zeros(3, 4, requires_grad=True)
    found = as_array(tensor)
    found.array[1, 2] = 5
    assert tensor[1, 2] == 5 and found.write_back is None
    assert as_array(torch.zeros(3, 4).T).write_back is not None
    with raises(UnsupportedError, operation="checkpoint"):
        as_array(torch.zeros(3, 4).to_sparse())


def test_a_generator_goes_on(tmp_path):
    def make(world):
        return {"generator": torch.Generator().manual_seed(3)}

    first = torch.Generator().manual_seed(3)
    torch.rand(5, generator=first)
    expected = torch.rand(5, generator=first)

    _, (into, _) = save_and_restore(tmp_path, make, lambda state, world: torch.rand(5, generator=state["generator"]))
    assert torch.equal(torch.rand(5, generator=into["generator"]), expected)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "plain": lambda params: torch.optim.SGD(params, 0.1),
    "adam": lambda params: torch.optim.AdamW(params, 0.1, amsgrad=True),
    "groups": lambda params: torch.optim.Adam([{"params": [*params][:1], "lr": 0.2}, {"params": [*params][1:]}]),
    "adagrad": lambda params: torch.optim.Adagrad(params),
}
SCHEDULES = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4], 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, 20, cycle_momentum=False),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])],
        [3],
    ),
}


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [*((name, "steps") for name in OPTIMIZERS), *(("sgd", name) for name in SCHEDULES)]
)
def test_training_goes_on_with_the_same_bits(optimizer, schedule, tmp_path):
    def make(world):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        made = OPTIMIZERS[optimizer](model.parameters())
        return {"model": model, "optimizer": made, "schedule": SCHEDULES[schedule](made), "step": 0}

    def train(state, steps):
        for step in range(state["step"], state["step"] + steps):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            state["optimizer"].zero_grad()
            loss = state["model"](x).square().mean()
            loss.backward()
            state["optimizer"].step()
            state["schedule"].step(*([float(step % 3)] if schedule == "plateau" else []))
        state["step"] += steps

    straight = make(None)
    train(straight, 7)
    _, (into, came) = save_and_restore(tmp_path, make, lambda state, world: train(state, 3))
    into["step"] = came["step"]
    train(into, 4)
    for name, each in straight["model"].state_dict().items():
        assert torch.equal(into["model"].state_dict()[name], each), name
    assert str(into["optimizer"].state_dict()) == str(straight["optimizer"].state_dict())
    before, after = vars(straight["schedule"]), vars(into["schedule"])
    assert {name: type(each) for name, each in before.items()} == {name: type(each) for name, each in after.items()}


def test_gradient_scalers(tmp_path):
    def make(world):
        return {"scaler": GradScaler(init_scale=64.0)}

    def change(state, world):
        state["scaler"].scale(torch.ones(1))
        state["scaler"].update(4.0)

    _, (into, _) = save_and_restore(tmp_path, make, change)
    assert into["scaler"].get_scale() == 4.0


@pytest.mark.parametrize("m", [1, 2, 3])
def test_an_optimizer_by_shards_goes_on_on_any_number_of_ranks(m, tmp_path):
    saved = {}

    def make(world):
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(4, 3), world, owner="shard")
        return {"model": model, "optimizer": ShardedOptimizer(model, torch.optim.Adam, lr=0.1)}

    def change(state, world):
        for step in range(3):
            state["model"](torch.full((2, 4), step + 1.0 + world.rank)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        saved[world.rank] = str(state["optimizer"].state_dict()), str(state["model"].state_dict())
        world.comm.barrier()

    def restore(world):
        state = make(world)
        with checkpoint.Manager(tmp_path, world) as manager:
            manager.restore(into=state)
        return str(state["optimizer"].state_dict()), str(state["model"].state_dict())

    def save(world):
        state = make(world)
        change(state, world)
        with checkpoint.Manager(tmp_path, world) as manager:
            manager.save(1, state)

    thread_comm.run(2, save)
    assert thread_comm.run(m, restore) == [saved[0]] * m


@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 2), (4, 2)])
def test_what_compression_has_not_sent_goes_on_with_the_same_bits(n, per_node, tmp_path):
    def run(world, steps, save=False, restore=False, compression="2bit"):
        model = DistributedDataParallel(torch.nn.Linear(40, 30), world, compression=compression)
        with torch.no_grad():
            model.module.weight.copy_(torch.arange(1200).reshape(30, 40) % 7 - 3.0)
            model.module.bias.zero_()
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "step": 0}
        with checkpoint.Manager(tmp_path, world) as manager:
            if restore:
                state["step"] = manager.restore(into=state).state["step"]
            for step in range(state["step"], state["step"] + steps):
                x = torch.randn(2, 40, generator=torch.Generator().manual_seed(10 * step + world.rank))
                state["optimizer"].zero_grad()
                model(x).square().mean().backward()
                state["optimizer"].step()
            if save:
                manager.save(1, state | {"step": state["step"] + steps})
        return model.module.weight.detach().clone()

    thread_comm.run(n, lambda world: run(world, 3, save=True), per_node)
    resumed = thread_comm.run(n, lambda world: run(world, 3, restore=True), per_node)
    straight = thread_comm.run(n, lambda world: run(world, 6), per_node)
    plain = thread_comm.run(n, lambda world: run(world, 6, compression=None), per_node)
    assert torch.equal(resumed[0], straight[0]) and not torch.equal(straight[0], plain[0])
    thread_comm.run(2, lambda world: run(world, 1, restore=True), 1)
    with pytest.warns(UserWarning, match="what compression had not sent yet is lost"):
        thread_comm.run(1, lambda world: run(world, 0, restore=True, compression=None))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_samplers_draw_as_torchs_do_and_go_on_anywhere(n, shuffle, drop_last):
    data = range(23)

    def draw(world, state, count):
        sampler = DistributedSampler(data, shuffle=shuffle, seed=5, drop_last=drop_last, world=world)
        if state is None:
            sampler.set_epoch(4)
        else:
            sampler.load_state_dict(state)
        drawn = list(islice(sampler, count))
        state = sampler.state_dict()
        world.comm.barrier()
        return drawn, state, sampler

    def torchs(rank):
        sampler = torch.utils.data.DistributedSampler(data, n, rank, shuffle, 5, drop_last)
        sampler.set_epoch(4)
        return list(sampler)

    whole = [torchs(rank) for rank in range(n)]
    assert [drawn for drawn, _, _ in thread_comm.run(n, lambda world: draw(world, None, None))] == whole
    for count in range(len(whole[0])):
        first = thread_comm.run(n, lambda world, c=count: draw(world, None, c))
        state = first[0][1]
        assert all(each == state for _, each, _ in first)
        assert state["done"] == count * n
        rest = thread_comm.run(n, lambda world, s=state: draw(world, s, None))
        assert [a + b for (a, _, _), (b, _, _) in zip(first, rest, strict=True)] == whole
        sampler = rest[0][2]
        assert list(sampler) == whole[0]  # whole again
        others = thread_comm.run(2, lambda world, s=state: draw(world, s, None))
        seen = [index for drawn, _, _ in [*first, *others] for index in drawn]
        assert len(set(seen)) >= len(data) - (2 if drop_last else 0) and len(seen) <= len(data) + 1


def test_a_sampler_whose_loader_draws_ahead_is_told_what_was_used():
    def rank(world):
        sampler = DistributedSampler(range(20), shuffle=False, world=world)
        for _ in islice(sampler, 8):
            pass
        sampler.used = 6
        state = sampler.state_dict()
        other = DistributedSampler(range(20), shuffle=False, world=world)
        other.load_state_dict(state)
        other.set_epoch(0)
        assert list(other) == list(range(12 + world.rank, 20, 2))
        with raises(ConfigError, operation="load_state_dict", where="DistributedSampler n", expected=21, got=20):
            DistributedSampler(range(21), world=world).load_state_dict(state)
        return state["done"]

    assert thread_comm.run(2, rank) == [12, 12]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("wrapped", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.bfloat16), (False, torch.half)]
)
def test_running_statistics_are_those_of_each_rank_and_elsewhere_the_mean(n, wrapped, dtype, tmp_path):
    def build(world):
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).to(dtype)
        net = DistributedDataParallel(module, world) if wrapped else module
        for param in net.parameters():
            param.data.fill_(0.5)
        found = dict(net.named_buffers())
        return net, *(next(found[name] for name in found if name.endswith(end)) for end in ("mean", "tracked"))

    def save(world):
        net, mean, count = build(world)
        mean.fill_(world.rank)
        count.fill_(7 + world.rank)
        with checkpoint.Manager(tmp_path, world) as manager:
            manager.save(1, {"net": net})
        assert torch.equal(mean, torch.full((8,), float(world.rank), dtype=dtype)) and int(count) == 7 + world.rank

    def restore(world):
        net, mean, count = build(world)
        with checkpoint.Manager(tmp_path, world) as manager:
            manager.restore(into={"net": net})
        assert all(torch.equal(x, torch.full_like(x, 0.5)) for x in net.parameters())
        return float(mean[0]), int(count)

    thread_comm.run(n, save)
    assert thread_comm.run(n, restore) == [(rank, 7 + rank) for rank in range(n)]
    assert thread_comm.run(n + 1, restore) == [((n - 1) / 2, 7)] * (n + 1)
