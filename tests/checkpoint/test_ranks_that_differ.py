"""Ranks that save or restore different things, or of which one fails: one error on all of them."""

import os
import threading

import numpy as np
import pytest
from on_threads import caught, restore, save
from raises import raises

from hpcdp import nn
from hpcdp.checkpoint import Manager, Part, PerRank, Sharded
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError, MismatchError, UnsupportedError


@pytest.mark.parametrize("argument", [{"keep": 0}, {"path": None}, {"best": "-"}])
def test_settings_that_are_wrong_on_one_rank(argument, tmp_path):
    def one(world):
        given = {"path": tmp_path, "world": world} | (argument if world.rank == 1 else {})
        return caught(lambda: Manager(**given), ConfigError)

    assert len({*thread_comm.run(2, one)}) == 1


def test_ranks_in_other_folders_are_refused(tmp_path, monkeypatch):
    places = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr("os.path.abspath", lambda path, own=os.path.abspath: own(place_of_rank() / path))
    ranks = threading.local()

    def place_of_rank():
        return places[getattr(ranks, "number", 0)]

    def one(world):
        ranks.number = world.rank
        return caught(lambda: Manager("own", world), MismatchError)

    assert len({*thread_comm.run(2, one)}) == 1
    assert not any(place.exists() for place in places)


UNEQUAL = {
    "names": lambda rank: {"a": 1, "b" if rank == 2 else "c": 2},
    "shapes": lambda rank: {"a": np.zeros(rank // 2)},
    "numbers": lambda rank: {"a": rank // 2},
    "values": lambda rank: {"a": np.zeros(3) + rank // 2},
    "empty ones": lambda rank: {"a": {}} if rank == 2 else {"a": []},
    "kinds": lambda rank: [1] if rank == 2 else (1,),
    "objects": lambda rank: {"a": 1} | ({"net": nn.Sequential(nn.BatchNorm(2))} if rank == 2 else {}),
    "order": lambda rank: {"a": 1, "b": 2} if rank == 2 else {"b": 2, "a": 1},
}


@pytest.mark.parametrize("what", UNEQUAL)
def test_states_that_differ_are_refused_on_every_rank(what, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, {"a": 1})
            text = caught(lambda: manager.save(2, UNEQUAL[what](world.rank)), MismatchError)
            manager.save(3, {"a": 2})
            return text, manager.steps()

    results = thread_comm.run(3, one)
    assert len({text for text, _ in results}) == 1 and "rank 2" in results[0][0]
    assert results[0][1] == [1, 3]


def test_one_rank_that_cannot_save_does_not_leave_others_waiting(tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            own = {"a": PerRank({1} if world.rank == 1 else 1), "net": nn.BatchNorm(4)}
            text = caught(lambda: manager.save(2, own), UnsupportedError)
            return text, manager.steps()

    results = thread_comm.run(3, one, ranks_per_node=2)
    assert len({text for text, _ in results}) == 1 and "rank 1: save [a/rank-1]" in results[0][0]
    assert results[0][1] == []


def test_one_rank_that_cannot_restore_does_not_leave_others_waiting(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": PerRank(np.zeros(2)), "net": nn.BatchNorm(4)})

    def one(world):
        with Manager(tmp_path, world) as manager:
            into = {"a": PerRank(np.zeros(2 + world.rank)), "net": nn.BatchNorm(4)}
            return caught(lambda: manager.restore(into=into), ConfigError)

    results = thread_comm.run(2, one)
    assert len({*results}) == 1 and "rank 1: restore [a/rank-1]: expected shape (3,)" in results[0]
    with raises(MismatchError, operation="restore", where="item 2 of 2 on rank 1"):
        restore(tmp_path, 2, lambda world: {"net": nn.BatchNorm(4)} if world.rank else {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda rank: {"metrics": {"loss": 0.5 + rank}},
            "expected metric loss = 0.5 as on rank 0, got metric loss = 1.5",
        ),
        (lambda rank: {"metrics": {"loss": 0.5} if rank else {}}, "got metric loss = 0.5 on rank 1"),
        (lambda rank: {"metrics": {"loss": float("nan") if rank else 0.5}}, "got metric loss = nan on rank 1"),
        (lambda rank: {"config": {"a": 1, "host": f"n{rank}"}}, 'got config host = "n1" on rank 1'),
        (lambda rank: {"config": {"a": {"b": [rank]}}}, "got config a = "),
        (lambda rank: {"step": 2 + rank}, "expected step 2 as on rank 0, got step 3 on rank 1"),
        (lambda rank: {"wait": rank == 0}, "expected wait=True as on rank 0, got wait=False on rank 1"),
    ],
)
def test_arguments_that_differ_between_ranks(options, message, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            alike = {"metrics": {"x": 1, "y": float("nan")}, "config": {"a": 1, "b": {"c": 2, "d": 3}}}
            backwards = {"metrics": {"y": float("nan"), "x": 1.0}, "config": {"b": {"d": 3, "c": 2}, "a": 1}}
            manager.save(1, {"a": 1}, **(backwards if world.rank else alike))
            text = caught(lambda: manager.save(**({"step": 2, "state": {}} | options(world.rank))), MismatchError)
            return text, manager.steps()

    first, second = thread_comm.run(2, one)
    assert first == second and first[1] == [1]
    assert message in first[0] and first[0].endswith("; pass the same on all ranks")


@pytest.mark.parametrize("steps", [(1, 2), (None, 1), (3, None)])
def test_steps_to_restore_that_differ_between_ranks(steps, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, 2, lambda step, world: {"a": step})

    def one(world):
        with Manager(tmp_path, world) as manager:
            text = caught(lambda: manager.restore(steps[world.rank]), MismatchError)
            return text, manager.restore().state

    first, second = thread_comm.run(2, one)
    assert first == second and first[0].endswith("; pass the same on all ranks") and first[1] == {"a": 2}


@pytest.mark.parametrize(
    "rename",
    [{"a": "b", "b": "a"}, {"b": "c"}, {"nowhere": "c"}, ["a"], lambda name: name.upper(), lambda name: None],
)
def test_names_that_differ_between_ranks(rename, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": np.zeros(2), "b": np.ones(2)})

    def one(world):
        with Manager(tmp_path, world) as manager:
            texts = []
            for odd in (0, 1):
                own = rename if world.rank == odd else None
                texts.append(caught(lambda own=own: manager.restore(rename=own), (MismatchError, ConfigError)))
            assert np.all(manager.restore().state["b"] == 1)
            return texts

    first, second = thread_comm.run(2, one)
    assert first == second and all("rank " in text for text in first)


@pytest.mark.parametrize("first", [0, 3])
def test_parts_that_leave_some_out_or_overlap(first, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            part = Part(first * world.rank, np.zeros(2, "f4"))
            state = {"a": Sharded((4,), np.dtype("f4"), [part] if first * world.rank < 3 else [])}
            return caught(lambda: manager.save(2, state), DataError), manager.steps()

    (text, steps), other = thread_comm.run(2, one)
    assert "save [a]: expected each element on one rank" in text and steps == [] and other == (text, steps)
    assert [path.name for path in tmp_path.iterdir()] == ["writer.lock"]
