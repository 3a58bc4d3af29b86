"""What entries of a state raise: one error on all ranks, which names the entry."""

import sys

import numpy as np
import pytest
from raises import raises

from hpcdp.checkpoint import Manager, PerRank, Sharded
from hpcdp.comm import thread_comm
from hpcdp.core.state import Part
from hpcdp.errors import ConfigError, HpcdpError, UnsupportedError

WORST = 1
"""The rank that fails."""


class Counts:
    """Fails on one rank, where it is asked to."""

    def __init__(self, world, saving=False, restoring=False):
        self.value = world.rank
        self._saving = saving and world.rank == WORST
        self._restoring = restoring and world.rank == WORST

    def state_dict(self):
        if self._saving:
            raise ValueError("no counts today")
        return {"value": 5}

    def load_state_dict(self, state):
        if self._restoring:
            raise ValueError("no counts today")
        self.value = state["value"]


class Exits:
    """Ends the program on one rank, where it is asked to."""

    def __init__(self, world, name="", code=3):
        self._name, self._code = name if world.rank == WORST else "", code

    def state_dict(self):
        if self._name == "state_dict":
            sys.exit(self._code)
        return {"value": 5}

    def load_state_dict(self, state):
        if self._name == "load_state_dict":
            sys.exit(self._code)


class Odd(dict):
    def items(self):
        raise ZeroDivisionError("no items")


def told_alike(n, act, kind):
    """What every rank's error says, which is the same."""

    def one(world):
        with pytest.raises(kind) as caught:
            act(world)
        return str(caught.value)

    results = thread_comm.run(n, one)
    assert len({*results}) == 1
    return results[0]


def save(folder, state, n=3):
    def one(world):
        with Manager(folder, world) as manager:
            manager.save(1, state(world))

    thread_comm.run(n, one)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda world: {"c": Counts(world, saving=True)}, "save [c]: expected its state, to save it, got ValueError"),
        (lambda world: {"c": [PerRank(Counts(world, saving=True))]}, "[c/0/rank-1]: expected"),
        (lambda world: {"c": Exits(world, "state_dict")}, "[c]: expected its state, to save it, got SystemExit: 3"),
        (lambda world: {"c": [Exits(world, "state_dict", None)]}, "to save it, got SystemExit"),
        (lambda world: {"c": Odd() if world.rank == WORST else {}}, "save [the state]: expected"),
    ],
)
def test_what_cannot_be_taken_is_named_before_anything_is_written(n, state, message, tmp_path):
    def act(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, state(world))

    said = told_alike(n, act, UnsupportedError)
    assert said.startswith("rank 1: save [") and message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [2, 3])
def test_an_object_that_does_not_take_its_state_is_told_to_all(n, tmp_path):
    save(tmp_path, lambda world: {"a": Counts(world), "b": Counts(world)})
    others = {}

    def act(world):
        others[world.rank] = Counts(world)
        with Manager(tmp_path, world) as manager:
            manager.restore(into={"a": Counts(world, restoring=True), "b": others[world.rank]})

    said = told_alike(n, act, UnsupportedError)
    assert said == "rank 1: restore [a]: expected it to take its state, got ValueError: no counts today"
    assert [others[rank].value for rank in range(n)] == [5] * n  # which ranks may do together, and so all


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_rank_that_exits_while_others_restore_is_told_to_all(name, tmp_path):
    save(tmp_path, lambda world: {"a": Exits(world)})

    def act(world):
        with Manager(tmp_path, world) as manager:
            manager.restore(into={"a": Exits(world, name)})

    said = told_alike(2, act, UnsupportedError)
    assert said == "rank 1: restore [a]: expected it to take its state, got SystemExit: 3"


def test_ctrl_c_stays_what_it_is(tmp_path):
    class Interrupted(Counts):
        def state_dict(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thread_comm.run(1, lambda world: Manager(tmp_path, world).save(1, {"a": Interrupted(world)}))


def test_names_by_a_function_that_fails_on_one_rank(tmp_path):
    save(tmp_path, lambda world: {"a": 1})

    def act(world):
        def name(old):
            return "a" if world.rank != WORST else {}[old]

        with Manager(tmp_path, world) as manager:
            manager.restore(rename=name)

    assert told_alike(2, act, UnsupportedError).startswith("rank 1: restore [rename]: expected")


@pytest.mark.parametrize(
    "place",
    [
        np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)),
        np.lib.stride_tricks.as_strided(np.zeros(4), (3,), (4,)),
        np.broadcast_to(np.zeros(1), 3),
        Sharded((3,), np.dtype("f8"), [Part(0, np.broadcast_to(np.zeros(3), 3))]),
    ],
)
def test_a_place_that_cannot_be_written_to_changes_no_other(place, tmp_path):
    save(tmp_path, lambda world: {"b": np.ones(2), "a": np.arange(3.0), "p": np.ones(2)})
    others = [[np.zeros(2), np.zeros(2)] for _ in range(2)]

    def act(world):
        b, p = others[world.rank]
        with Manager(tmp_path, world) as manager:
            manager.restore(into={"b": b, "a": place if world.rank == WORST else np.zeros(3), "p": p})

    assert told_alike(2, act, ConfigError).startswith("rank 1: restore [a]: expected a writable array, got")
    assert not np.any(others)


@pytest.mark.parametrize(
    "make", [lambda x: x.T, lambda x: x[::-1, :3:2], lambda x: x[:, 1::2], lambda x: x[:, :1], lambda x: x[:0].T]
)
def test_places_whose_elements_lie_apart_are_written_to(make, tmp_path):
    saved = make(np.arange(15.0).reshape(3, 5))
    save(tmp_path, lambda world: {"a": saved})
    place = make(np.zeros((3, 5)))

    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.restore(into={"a": place})

    thread_comm.run(1, one)
    assert np.array_equal(place, saved)


def test_tensors_of_torch_that_cannot_be_taken_or_filled_are_named(tmp_path):
    torch = pytest.importorskip("torch")
    import hpcdp.torch  # noqa: F401

    def saves(state):
        def act(world):
            with Manager(tmp_path / "none", world) as manager:
                manager.save(1, state(world))

        return told_alike(2, act, HpcdpError)

    of_meta = saves(lambda world: {"x": torch.empty(2, device="meta") if world.rank else torch.ones(2)})
    assert of_meta.startswith("rank 1: save [x]: expected its state, to save it, got NotImplementedError: ")
    sampler = torch.utils.data.DistributedSampler([1, 2], num_replicas=1, rank=0)
    assert saves(lambda world: {"s": sampler}).endswith("; use hpcdp.torch.DistributedSampler, which has a state")
    assert "checkpoint [x]: expected dense tensors" in saves(lambda world: {"x": torch.eye(2).to_sparse()})
    assert "checkpoint [y/0]: expected a dtype of NumPy" in saves(
        lambda world: {"y": [torch.zeros(2, dtype=torch.float8_e5m2)]}
    )
    assert not (tmp_path / "none").exists()

    save(tmp_path / "a", lambda world: {"b": torch.ones(2), "a": torch.ones(3), "p": torch.ones(2)})
    b, p = torch.zeros(2), torch.zeros(2)

    def restores(world):
        with Manager(tmp_path / "a", world) as manager:
            a = torch.ones(1).expand(3) if world.rank == WORST else torch.zeros(3)
            manager.restore(into={"b": b, "a": a, "p": p})

    said = told_alike(2, restores, ConfigError)
    assert said.startswith("rank 1: restore [a]: expected a writable array, got an array whose elements share memory")
    assert not b.any() and not p.any()


class CountsTogether(Counts):
    def state_dict(self):
        return super().state_dict() | {"of all": self.world.comm.allgather_json(self.value)}


def test_a_rank_that_fails_while_others_make_their_state_together_says_why(tmp_path):
    def one(world):
        counts = CountsTogether(world, saving=True)
        counts.world = world
        Manager(tmp_path, world).save(1, {"counts": counts})

    with raises(HpcdpError, operation="save", where="counts", got="ValueError"):
        thread_comm.run(2, one)


def test_a_function_of_names_that_raises_is_told_as_one(tmp_path):
    save(tmp_path, lambda world: {"a": 1})

    def act(world):
        with Manager(tmp_path, world) as manager:
            manager.restore(rename=lambda name: 1 / 0)

    said = told_alike(2, act, HpcdpError)
    assert said == "restore [rename]: expected a function of a name, got ZeroDivisionError: division by zero"


def test_what_one_rank_has_more_is_counted_on_that_rank(tmp_path):
    def act(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, {"x": Counts(world) if world.rank == 1 else 1})

    assert "save [item 1 of 1 on rank 1]: expected nothing more as on rank 0, got x Counts" in told_alike(
        2, act, HpcdpError
    )


@pytest.mark.parametrize(("into", "said"), [(5, "an int"), ({1}, "a set"), (object(), "an object")])
def test_what_does_not_fit_is_named_with_its_article(into, said, tmp_path):
    save(tmp_path, lambda world: {"a": {"b": np.ones(3)}})

    def act(world):
        with Manager(tmp_path, world) as manager:
            manager.restore(into={"a": into})

    assert f"restore [a]: expected {said}, got a dict" in told_alike(1, act, ConfigError)
