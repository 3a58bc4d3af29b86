"""Training with compressed gradients: through the trainer, its states, and the settings of a run."""

import functools
import re
import warnings

import numpy as np
import pytest
from pairs import in_turn
from raises import raises
from slow_sums import slow_sums
from written_gradients import backward, model

import hpcdp
from hpcdp import optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError, MismatchError, StaleGradientError
from hpcdp.train.config import TrainConfig
from hpcdp.train.run import saved_by_compression
from hpcdp.train.trainer import Trainer

CODECS = ["fp16", "bf16", "2bit", "1bit", "topk:ratio=0.2"]


def make(world, compression, **options):
    params = model(0)
    return params, Trainer(params, optim.SGD(lr=0.02), world, bucket_cap_mb=0.01, compression=compression, **options)


def steps(params, trainer, world, number):
    for step in range(trainer.step_count, trainer.step_count + number):
        mine = range(world.rank, 6, world.size)
        if len(mine):
            backward(params, step, mine)
        trainer.step(len(mine))


def parameters(params):
    return np.concatenate([param.data.reshape(-1) for param in params])


@functools.cache
def trained(n, per_node, compression=None, **options):
    """Each rank's parameters after some steps."""

    def rank(world):
        params, trainer = make(world, compression, **options)
        steps(params, trainer, world, 12)
        trainer.reducer.settle()
        return parameters(params)

    return thread_comm.run(n, rank, per_node)


@pytest.mark.parametrize(("layout", "codec"), in_turn([(2, 1), (3, 1), (4, 2), (5, 2)], CODECS))
def test_overlap_and_owner_change_no_bits_and_the_way_is_that_without_compression(layout, codec):
    n, per_node = layout
    exact = trained(n, per_node)[0]
    runs = [
        trained(n, per_node, codec, overlap=overlap, owner=owner)
        for overlap, owner in ((True, "shard"), (False, "rank"))
    ]
    for found in (each for run in runs for each in run):
        np.testing.assert_array_equal(found, runs[0][0])
    start = np.concatenate([param.data.reshape(-1) for param in model(0)])
    moved, missed = np.linalg.norm(exact - start), np.linalg.norm(runs[0][0] - exact)
    assert 0 < missed < (0.01 if codec in ("fp16", "bf16") else 0.9) * moved


@pytest.mark.ordinary_ranks(2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize(("overlap", "codec"), in_turn([False, True], CODECS))
def test_real_ranks_get_the_bits_of_thread_ranks(codec, overlap):
    everywhere = f"{codec}{',' if ':' in codec else ':'}inside_nodes=on"

    def rank(world):
        params, trainer = make(world, everywhere, overlap=overlap)
        steps(params, trainer, world, 8)
        trainer.reducer.settle()
        return parameters(params)

    world = hpcdp.init()
    np.testing.assert_array_equal(rank(world), thread_comm.run(world.size, rank)[world.rank])


def without_samples(params, trainer):
    trainer.step(0)


def with_one_gradient_missing(params, trainer):
    missing = trainer.world.rank % 2
    for number, param in enumerate(params):
        if number != missing:
            param.write(np.full_like(param.data, 1 + number + trainer.world.rank))
    with pytest.raises(StaleGradientError):
        trainer.step(1)


def dropped(params, trainer):
    backward(params, 9, [trainer.world.rank])
    trainer.drop()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("nothing", [without_samples, with_one_gradient_missing, dropped])
@pytest.mark.parametrize(("n", "per_node"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_what_follows_a_step_that_updates_nothing_is_no_part_of_it(monkeypatch, n, per_node, nothing, overlap):
    is_slow = slow_sums(monkeypatch, 0.02)

    def rank(world, owner, slowly):
        params, trainer = make(world, "topk:ratio=0.2", owner=owner, overlap=overlap)
        for _ in range(3):
            steps(params, trainer, world, 1)
            if world.rank == 0:
                is_slow[0] = slowly
            nothing(params, trainer)
            if world.rank == 0:
                is_slow[0] = False
        steps(params, trainer, world, 1)
        trainer.reducer.settle()
        world.barrier()
        return parameters(params)

    expected = thread_comm.run(n, lambda world: rank(world, "rank", False), per_node)[0]
    for found in thread_comm.run(n, lambda world: rank(world, "shard", True), per_node):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("codec", ["2bit", "topk:ratio=0.2"])
@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_what_was_not_sent_is_part_of_the_states(tmp_path, n, per_node, codec):
    path = tmp_path / "states.npz"

    def straight(world):
        params, trainer = make(world, codec)
        steps(params, trainer, world, 3)
        trainer.save_states(path)
        trainer.reducer.settle()
        middle = [param.data.copy() for param in params]
        world.barrier()
        steps(params, trainer, world, 3)
        trainer.reducer.settle()
        return middle, parameters(params)

    def resumed(world, middle):
        params, trainer = make(world, codec)
        for param, value in zip(params, middle, strict=True):
            param.data[...] = value
        world.barrier()
        trainer.load_states(path)
        steps(params, trainer, world, 3)
        trainer.reducer.settle()
        return parameters(params)

    runs = thread_comm.run(n, straight, per_node)
    for found in thread_comm.run(n, lambda world: resumed(world, runs[0][0]), per_node):
        np.testing.assert_array_equal(found, runs[0][1])


def total_residual(trainer):
    coder = trainer.reducer.reduction.coder
    return 0.0 if coder is None else sum(each.residual.sum(dtype="f8") for each in coder.feedback)


def save_after_steps(world, path):
    params, trainer = make(world, "2bit")
    steps(params, trainer, world, 3)
    trainer.save_states(path)
    return total_residual(trainer)


def test_another_number_of_nodes_still_sends_all_of_it(tmp_path):
    path = tmp_path / "states.npz"

    def load(world):
        _, trainer = make(world, "2bit")
        trainer.load_states(path)
        return total_residual(trainer)

    saved = sum(thread_comm.run(4, lambda world: save_after_steps(world, path), 2))
    assert saved
    for n, per_node in ((3, 1), (6, 2), (2, 1), (4, 2)):
        assert sum(thread_comm.run(n, load, per_node)) == pytest.approx(saved, abs=1e-3)


def test_states_that_lose_what_was_not_sent_say_so(tmp_path):
    path = tmp_path / "states.npz"
    thread_comm.run(2, lambda world: save_after_steps(world, path), 1)
    with pytest.warns(UserWarning, match="not sent yet is lost"):
        thread_comm.run(1, lambda world: make(world, None)[1].load_states(path))


def test_states_with_and_without_compression(tmp_path):
    path = tmp_path / "states.npz"

    def go(world, saved_by, loaded_by):
        make(world, saved_by)[1].save_states(path)
        make(world, loaded_by)[1].load_states(path)

    for pair in (("2bit", None), (None, "2bit"), ("2bit", "1bit")):
        thread_comm.run(2, lambda world, pair=pair: go(world, *pair), 1)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["conv.bias/residual"] = np.zeros((2, 3), "f4")
    np.savez(path, **arrays)
    with raises(DataError, operation="load_states", where=f"{path}, conv.bias/residual"):
        thread_comm.run(2, lambda world: make(world, "2bit")[1].load_states(path), 1)


def test_ranks_that_compress_in_other_ways_are_told():
    with raises(MismatchError, operation="Trainer", where="item 7 of 8 on rank 0"):
        thread_comm.run(2, lambda world: make(world, ["2bit", "1bit"][world.rank]), 1)


def test_one_node_says_that_nothing_is_compressed():
    with pytest.warns(UserWarning, match=r"compression 2bit changes nothing on one node"):
        thread_comm.run(2, lambda world: make(world, "2bit"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread_comm.run(2, lambda world: make(world, "2bit:inside_nodes=on"))
        thread_comm.run(1, lambda world: make(world, "2bit"))


def test_a_run_takes_it_as_a_setting():
    assert TrainConfig(compression="topk:ratio=0.05").compression == "topk:ratio=0.05"
    with raises(ConfigError, operation="compression", expected=["fp16", "bf16"], got="zip"):
        TrainConfig(compression="zip")


@pytest.mark.parametrize(("n", "per_node"), [(2, 1), (4, 2), (5, 2)])
def test_a_run_says_what_nodes_send_less(n, per_node):
    for line in thread_comm.run(n, lambda world: saved_by_compression(make(world, "fp16")[1]), per_node):
        found = re.fullmatch(r"fp16, (.+) of (.+) MB a step and node; pays below \d+ Gbit/s", line)
        sent, plain = map(float, found.groups())
        nodes = -(-n // per_node)
        assert plain == pytest.approx(2 * (nodes - 1) / nodes * 4 * 12_507 / 1e6, abs=0.006)
        assert sent == pytest.approx(plain / 2, abs=0.006)
    for line in thread_comm.run(3, lambda world: saved_by_compression(make(world, "fp16:inside_nodes=on")[1])):
        sent, plain = map(float, re.match(r"fp16, (.+) of (.+) MB a step and node; pays below \d+ ", line).groups())
        assert (sent, plain) == pytest.approx((4 * 2 * 12_507 / 1e6, 4 * 4 * 12_507 / 1e6), abs=0.006)
    for compression in ("fp16", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert thread_comm.run(2, lambda world, c=compression: saved_by_compression(make(world, c)[1])) == [
                None,
                None,
            ]
