"""Training in 16 bits: float32 copies that are updated, losses scaled up, overflows skipped alike, on any ranks."""

import ml_dtypes
import numpy as np
import pytest
import standin
from pairs import in_turn, pairs
from raises import raises
from whole_state import held, joined, restore
from written_gradients import Parameter

import hpcdp
from hpcdp import data, nn, optim
from hpcdp.autograd import record
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import dtype_of, to_host
from hpcdp.data_parallel import loss_scaling
from hpcdp.data_parallel.loss_scaling import DynamicLossScaling
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

SHAPES = {"conv.weight": (20, 1, 3, 3), "norm.gamma": (20,), "dense.weight": (300, 41), "dense.bias": (7,)}
SINGLE = "norm.gamma"
WORLDS = [(1, None), (2, None), (3, None), (4, 2), (4, 3), (3, 1), (5, 2)]
HALVES = ["float16", "bfloat16"]


def kind_of(name, half):
    return np.dtype("f4") if name == SINGLE else dtype_of(half)


def model(half="float16", asarray=np.asarray):
    rng = np.random.default_rng(7)
    values = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    return [Parameter(name, asarray(x.astype(kind_of(name, half)))) for name, x in values.items()]


def gradients(step, rank, half):
    """Of which sums over up to five ranks are exact in any order."""
    rng, most = np.random.default_rng([step, rank]), {"float16": 200, "bfloat16": 50}[half]
    return {name: rng.integers(-most, most, shape) * 4.0 for name, shape in SHAPES.items()}


def write(params, step, rank, asarray=np.asarray, spoiled=None):
    """Gradients of one sample, with ``spoiled`` in place of one element."""
    half = params[0].data.dtype.name
    for param in params[::-1]:
        gradient = gradients(step, rank, half)[param.name].astype(param.data.dtype)
        if spoiled is not None and param.name == "dense.weight":
            largest = ml_dtypes.finfo(gradient.dtype).max
            gradient.flat[5000] = largest if spoiled == "the largest number" else spoiled
        param.grad[...] = asarray(gradient)
        param.grad_hook(param)


def values(params, world):
    world.comm.barrier()
    found = {param.name: np.array(to_host(param.data)) for param in params}
    world.comm.barrier()
    return found


def sgd():
    return optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)


def expected(ranks, steps, scale, half="float16"):
    """The same in NumPy: one momentum SGD in float32 on the exact sums, rounded at the end of each step."""
    masters = {param.name: param.data.astype("f4") for param in model(half)}
    rule, states = sgd(), {}
    for step in range(steps):
        for name, master in masters.items():
            total = sum(gradients(step, rank, half)[name] for rank in range(ranks)).astype("f4").reshape(-1)
            state = states.setdefault(name, rule.init_state(master.reshape(-1)))
            rule.update(master.reshape(-1), total, state, step=step + 1, scale=1.0 / (ranks * scale))
    return {name: x.astype(kind_of(name, half)) for name, x in masters.items()}


@pytest.mark.parametrize(
    ("half", "settings", "layout"),
    in_turn(HALVES, [{"owner": "rank"}, {"owner": "shard"}, {"overlap": True}, {"clip_norm": 1e9}], WORLDS),
)
def test_float32_copies_are_updated_and_rounded_whoever_updates(half, settings, layout):
    n, per_node = layout

    def rank(world):
        params = model(half)
        trainer = Trainer(params, sgd(), world, bucket_cap_mb=0.01, loss_scale=256.0, **settings)
        for step in range(4):
            write(params, step, world.rank)
            assert trainer.step(1) == n
        assert {str(param.grad.dtype) for param in params} == {half, "float32"}
        return values(params, world)

    wanted = expected(n, 4, 256.0, half)
    for found in thread_comm.run(n, rank, per_node):
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_reproducible_training_has_the_same_bits_on_any_ranks(n, half):
    def rank(world):
        params = model(half)
        trainer = Trainer(params, sgd(), world, reproducible=True, virtual_shards=4, loss_scale="dynamic")
        trainer.loss_scale = 256.0
        for step in range(3):
            for shard in trainer.own_virtual_shards:
                write(params, step, shard)
                trainer.step(1)
        assert trainer.step_count == 3
        return values(params, world)

    for per_node in (None, 1):
        for found in thread_comm.run(n, rank, per_node):
            for name, value in expected(4, 3, 256.0, half).items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("half", HALVES)
def test_on_a_device(half):
    def rank(world):
        params = model(half, standin.asarray)
        trainer = Trainer(params, sgd(), world, loss_scale="dynamic")
        trainer.loss_scale = 256.0
        for step in range(2):
            write(params, step, world.rank, standin.asarray)
            trainer.step(1)
        write(params, 2, world.rank, standin.asarray, spoiled=np.inf if world.rank else None)
        trainer.step(1)
        return values(params, world), trainer.step_count, trainer.loss_scale

    for found, steps, scale in thread_comm.run(2, rank):
        assert (steps, scale) == (2, 128.0)
        for name, value in expected(2, 2, 256.0, half).items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("half", HALVES)
def test_updates_too_small_for_16_bits_add_up(half):
    def rank(world, copies):
        weight = Parameter("weight", np.full(100, 8.0, dtype_of(half) if copies else "f4"))
        trainer = Trainer([weight], optim.SGD(lr=1.0), world)
        for _ in range(64):
            weight.grad[...] = 2.0**-9  # half a unit in the last place of 8 is 2**-8 in float16
            weight.grad_hook(weight)
            trainer.step(1)
        return weight.data

    for copies in (False, True):
        for found in thread_comm.run(2, lambda world, c=copies: rank(world, c)):
            np.testing.assert_array_equal(found, np.full(100, 8.0 - 64 * 2.0**-9))


SPOILERS = {
    "a NaN on the last rank": lambda world: np.nan if world.rank == world.size - 1 else None,
    "an infinity on the first": lambda world: None if world.rank else -np.inf,
    "no overflow but in the sum": lambda world: "the largest number",
}


@pytest.mark.parametrize(
    ("half", "spoiler", "layout", "settings"),
    pairs(
        HALVES,
        SPOILERS,
        [(2, None), (3, None), (4, 2), (3, 1)],
        [{"owner": "rank"}, {"owner": "shard"}, {"overlap": True}],
    ),
)
def test_an_overflow_anywhere_is_skipped_by_all(half, spoiler, layout, settings):
    n, per_node = layout

    def rank(world):
        params = model(half)
        trainer = Trainer(params, sgd(), world, bucket_cap_mb=0.01, loss_scale="dynamic", **settings)
        seen = []
        for step in range(6):
            is_bad = step in (1, 2)
            before = values(params, world), held(trainer.state_dict()["states"])
            write(params, step, world.rank, spoiled=SPOILERS[spoiler](world) if is_bad else None)
            trainer.step(1)
            after = values(params, world), held(trainer.state_dict()["states"])
            np.testing.assert_equal([x.tobytes() for x in before[0].values()] == [
                x.tobytes() for x in after[0].values()], is_bad)  # fmt: skip
            same = all(
                np.array_equal(a.values, b.values)
                for name, states in before[1].items()
                for kind, each in states.items()
                for a, b in zip(each.parts, after[1][name][kind].parts, strict=True)
            )
            assert same or not is_bad
            seen.append((trainer.loss_scale, trainer.step_count, trainer.num_nonfinite))
        return seen, values(params, world)

    found = thread_comm.run(n, rank, per_node)
    assert found[0][0] == [(2.0**16, 1, 0), (2.0**15, 1, 1), *((2.0**14, steps, 2) for steps in (1, 2, 3, 4))]
    for seen, params in found:
        assert seen == found[0][0]
        for name, value in params.items():
            np.testing.assert_array_equal(value, found[0][1][name])


def test_the_scale_is_doubled_after_2000_good_steps_in_a_row_and_never_below_1():
    rule, scale = DynamicLossScaling(), 8.0
    scales = []
    for step in range(1, 6001):
        scale = rule.after_step(scale, step != 1500)
        scales.append(scale)
    assert scales[1498] == 8.0 and scales[1499] == 4.0
    assert scales[3498] == 4.0 and scales[3499] == 8.0  # 2000 after the overflow, not 2000 in all
    assert scales[5498] == 8.0 and scales[5499] == 16.0
    for _ in range(10):
        scale = rule.after_step(scale, False)
    assert scale == 1.0


@pytest.mark.parametrize("by", ["step", "update"])
def test_a_trainer_follows_its_scale(by, monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)

    def rank(world):
        params = model()
        trainer = Trainer(params, sgd(), world, loss_scale="dynamic")
        seen = [trainer.loss_scale]
        for step in range(9):
            write(params, step, world.rank, spoiled=np.inf if step == 4 and world.rank == 1 else None)
            if by == "step":
                trainer.step(1)
            else:
                trainer.allreduce_grads()
                trainer.update(1)
            seen.append(trainer.loss_scale / 2.0**16)
        trainer.step(0)  # nobody has samples: no step
        return seen, trainer.good_steps

    wanted = [2.0**16, 1, 1, 2, 2, 1, 1, 1, 2, 2], 1
    assert thread_comm.run(2, rank) == [wanted] * 2


def training(world, half, folder, steps=8, save_at=None, resume=False, settings=None):
    params = model(half)
    trainer = Trainer(params, optim.AdamW(lr=0.01), world, bucket_cap_mb=0.01, loss_scale="dynamic", **settings or {})
    with Manager(folder, world) as manager:
        if resume:
            state = {"params": {param.name: param.data for param in params}, "trainer": trainer}
            manager.restore(into=state)
        while trainer.step_count + trainer.num_nonfinite < steps:
            step = trainer.step_count + trainer.num_nonfinite
            write(params, step, world.rank, spoiled=np.nan if step in (2, 5) and world.rank == 0 else None)
            trainer.step(1)
            if step == save_at:
                manager.save(step, {"params": {param.name: param.data for param in params}, "trainer": trainer})
    return values(params, world), trainer.loss_scale, trainer.good_steps, trainer.num_nonfinite


@pytest.mark.parametrize(
    ("half", "settings", "layout"),
    in_turn(HALVES, [{"owner": "rank"}, {"owner": "shard"}], [(1, None), (2, None), (3, None), (4, 2), (3, 1)]),
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(half, settings, layout, tmp_path):
    def run(folder, *more, **options):
        return thread_comm.run(
            n, lambda world: training(world, half, tmp_path / folder, *more, settings=settings, **options), per_node
        )

    n, per_node = layout
    whole = run("whole")
    run("a", 5, 3)
    resumed = run("a", resume=True)
    assert whole[0][1:] == (2.0**14, 2, 2)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours[1:] == theirs[1:]
        for name, value in theirs[0].items():
            np.testing.assert_array_equal(ours[0][name], value, err_msg=name)


@pytest.mark.parametrize(("half", "into"), [("float16", (1, None)), ("bfloat16", (3, None)), ("float16", (4, 2))])
def test_float32_copies_come_back_whole_on_other_ranks(half, into):
    def rank(world, state=None, held_params=None):
        params = model(half)
        trainer = Trainer(params, sgd(), world, bucket_cap_mb=0.01, loss_scale="dynamic")
        if state is None:
            for step in range(3):
                write(params, step, world.rank, spoiled=np.inf if step == 1 else None)
                trainer.step(1)
        else:
            for param in params:
                param.data[...] = held_params[param.name]
            restore(trainer, state, world)
        return held(trainer.state_dict()), values(params, world)

    states, params = zip(*thread_comm.run(2, rank), strict=True)
    before = joined(list(states))
    assert set(before["states"]["dense.weight"]) == {"master", "momentum"}
    assert set(before["states"][SINGLE]) == {"momentum"}
    assert before["states"]["dense.weight"]["master"].dtype == np.float32
    assert (before["loss_scale"], before["good_steps"], before["num_nonfinite"]) == (2.0**15, 1, 1)
    for name in ("conv.weight", "dense.weight"):
        master = before["states"][name]["master"]
        np.testing.assert_array_equal(master.astype(dtype_of(half)), params[0][name])
        assert (master != params[0][name]).any(), "the copies have bits that the parameters have not"
    n, per_node = into
    after, _ = zip(*thread_comm.run(n, lambda world: rank(world, before, params[0]), per_node), strict=True)
    np.testing.assert_equal({**joined(list(after)), "layout": None}, {**before, "layout": None})


def test_save_states_has_the_copies_and_the_scale(tmp_path):
    def rank(world, loads=False, owner="shard"):
        params = model()
        trainer = Trainer(params, sgd(), world, owner=owner, loss_scale="dynamic")
        if loads:
            trainer.load_states(tmp_path / "states")
        else:
            for step in range(3):
                write(params, step, world.rank, spoiled=np.inf if step == 0 else None)
                trainer.step(1)
            trainer.save_states(tmp_path / "states")
        return held({name: trainer.state_dict()[name] for name in ("states", "loss_scale", "good_steps")})

    saved = joined(thread_comm.run(3, rank))
    assert (saved["loss_scale"], saved["good_steps"]) == (2.0**15, 2)
    for n, owner in ((2, "rank"), (4, "shard")):
        np.testing.assert_equal(joined(thread_comm.run(n, lambda world, o=owner: rank(world, True, o))), saved)


@pytest.mark.parametrize(("half", "codec"), [("float16", "2bit"), ("bfloat16", "2bit"), ("bfloat16", "topk:ratio=0.3")])
def test_gradients_of_16_bits_are_compressed_and_what_was_not_sent_is_in_saved_states(half, codec, tmp_path):
    def rank(world, steps, before=None):
        params = model(half)
        for param in params if before else ():
            param.data[...] = before[param.name]
        trainer = Trainer(params, sgd(), world, owner="rank", compression=codec)
        if before:
            trainer.load_states(tmp_path / "states")
        for step in steps:
            write(params, step, world.rank)
            trainer.step(1)
        trainer.save_states(tmp_path / "states")
        kept = [each.residual for each in trainer.reducer.reduction.coder.feedback]
        assert {each.dtype.name for each in kept} == {half, "float32"} and all(each.any() for each in kept)
        return values(params, world)

    whole = thread_comm.run(4, lambda world: rank(world, range(6)), 2)
    begun = thread_comm.run(4, lambda world: rank(world, range(3)), 2)
    for found, wanted in zip(thread_comm.run(4, lambda w: rank(w, range(3, 6), begun[w.rank]), 2), whole, strict=True):
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_not_sent_keeps_to_a_loss_scale_that_changes(overlap):
    """Of a step that overflows nothing comes later as if it were twice as much."""
    gradient = np.arange(1, 65, dtype="f4") / 64

    def rank(world):
        param = Parameter("weight", np.zeros(64, "f4"))
        options = {"loss_scale": "dynamic", "compression": "topk:ratio=0.1", "overlap": overlap}
        trainer = Trainer([param], optim.SGD(lr=1.0), world, **options)
        for step in range(60):
            param.grad[...] = trainer.loss_scale * gradient if step == 0 else 0
            if step == world.rank == 0:
                param.grad[7] = np.inf
            param.grad_hook(param)
            trainer.step(1)
        assert trainer.num_nonfinite == 1 and trainer.loss_scale == 2.0**15
        return -np.array(param.data)

    for moved in thread_comm.run(2, rank, 1):
        assert np.all(moved <= gradient) and np.sum(moved == gradient) > 32  # the largest went with the step


@pytest.mark.parametrize("half", HALVES)
def test_a_state_of_another_precision_is_refused(half):
    def rank(world):
        states = []
        for dtype in ("f4", half):
            param = Parameter("weight", np.ones(100, dtype_of(dtype)))
            trainer = Trainer([param], optim.SGD(lr=0.1, momentum=0.9), world)
            if states:
                with raises(ConfigError, operation="load_state_dict", where="weight", expected=16):
                    trainer.load_state_dict(states[0])
            states.append(held(trainer.state_dict()))

    thread_comm.run(2, rank)


def test_parameters_that_are_written_by_hand_are_taken():
    def rank(world):
        params = model()
        trainer = Trainer(params, optim.SGD(lr=1.0), world)
        world.comm.barrier()
        if world.rank == 0 or trainer.nbytes["parameters"] * world.size > 2 * 300 * 41 * world.size:
            params[3].data[...] = 3.0
        world.comm.barrier()
        trainer.take_parameters()
        write(params, 0, world.rank)
        for param in params:
            param.grad[...] = 0
        trainer.step(1)
        return values(params, world)["dense.bias"]

    for found in thread_comm.run(2, rank):
        np.testing.assert_array_equal(found, np.full(7, 3.0))


@pytest.mark.parametrize(
    "scale",
    [0, -2.0, float("inf"), float("nan"), "auto", True, None, pytest.param(10**400, id="huge"), np.ones(2, "f4")],
)
def test_a_scale_that_is_none_is_refused(scale):
    with raises(ConfigError, operation="Trainer", where="loss_scale", expected="dynamic"):
        thread_comm.run(1, lambda world: Trainer(model(), sgd(), world, loss_scale=scale))


@pytest.mark.parametrize("nonfinite", ["count", "raise"])
def test_a_policy_that_does_not_skip_is_refused_with_a_dynamic_scale(nonfinite):
    policy = hpcdp.Policy(nonfinite=nonfinite)
    with raises(
        ConfigError, operation="Trainer", where="policy", expected=["nonfinite='skip'", "loss_scale='dynamic'"]
    ):
        thread_comm.run(1, lambda world: Trainer(model(), sgd(), world, loss_scale="dynamic", policy=policy))


def test_scales_must_be_alike_on_all_ranks():
    with raises(MismatchError, operation="Trainer", where="item 6 of 8 on rank 0", expected="loss_scale=2.0"):
        thread_comm.run(2, lambda world: Trainer(model(), sgd(), world, loss_scale=2.0 + world.rank))


@pytest.mark.parametrize("half", HALVES)
def test_what_stores_do_not_do(half):
    def rank(world):
        with raises(ConfigError, operation="Trainer", where="weight", expected=["float32", "float64"], got=half):
            Trainer([Parameter("weight", np.ones(3, dtype_of(half)))], sgd(), world, kvstore="dist_sync")
        with raises(ConfigError, operation="Trainer", where="loss_scale", got="dynamic"):
            Trainer([Parameter("weight", np.ones(3, "f4"))], sgd(), world, kvstore="dist_sync", loss_scale="dynamic")
        assert Trainer(
            [Parameter("weight", np.ones(3, "f4"))], sgd(), world, kvstore="dist_sync", loss_scale=8
        ).loss_scale == 8.0  # fmt: skip

    thread_comm.run(2, rank)


def learn(world, dtype, epochs=4):
    """A network on the digits; its accuracy on the test images, and how many steps were skipped."""
    train_set, test_set = (data.load("digits", split, image_size=28) for split in ("train", "test"))
    net = nn.models.mlp(train_set.sample_shape, 10, (64,), seed=1)
    net.to(dtype)
    scale = "dynamic" if dtype == "float16" else 1.0
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.05, momentum=0.9), world, loss_scale=scale)
    sampler = data.ShardedSampler(len(train_set), 64, world.size, world.rank, seed=3)
    fit(net, trainer, data.DataLoader(train_set, sampler), epochs=epochs, world=world)
    found = evaluate(net, test_set, world)
    return found.accuracy, trainer.num_nonfinite, trainer.step_count + trainer.num_nonfinite, trainer.loss_scale


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_the_digits_are_learnt_as_well_as_in_float32(n):
    wide, narrow, brain = (thread_comm.run(n, lambda world, d=d: learn(world, d))[0] for d in ("float32", *HALVES))
    assert wide[0] > 0.93 and abs(narrow[0] - wide[0]) < 0.015 and abs(brain[0] - wide[0]) < 0.02
    assert wide[1] == brain[1] == 0 and 1 <= narrow[1] < 12  # the first scales are too large, and that is all
    assert brain[2] == narrow[2] == wide[2] and narrow[3] >= 16


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_real_ranks_update_and_skip_alike(owner, half):
    world = hpcdp.init()
    if world.size > 5:
        pytest.skip("sums of more gradients are rounded (`gradients`)")
    params = model(half)
    trainer = Trainer(params, sgd(), world, owner=owner, loss_scale="dynamic")
    trainer.loss_scale = 256.0
    for step in range(3):
        write(params, step, world.rank)
        trainer.step(1)
    before = values(params, world)
    for name, value in expected(world.size, 3, 256.0, half).items():
        np.testing.assert_array_equal(before[name], value, err_msg=name)
    write(params, 3, world.rank, spoiled=np.inf if world.rank == world.size - 1 else None)
    trainer.step(1)
    assert (trainer.loss_scale, trainer.step_count, trainer.num_nonfinite) == (128.0, 3, 1)
    for name, value in values(params, world).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_a_loss_that_begins_backward_with_the_scale_gives_the_same_step():
    def rank(world, scale):
        net = nn.models.mlp(6, 3, (5,), seed=2)
        trainer = Trainer(net.parameters(), sgd(), world, loss_scale=scale)
        for step in range(3):
            rng = np.random.default_rng([step, world.rank])
            x, y = rng.standard_normal((4, 6)).astype("f4"), rng.integers(0, 3, 4)
            with record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward(trainer.loss_scale)
            trainer.step(4)
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])

    plain, scaled = (thread_comm.run(2, lambda world, s=s: rank(world, s))[0] for s in (1.0, 1024.0))
    np.testing.assert_array_equal(plain, scaled)
