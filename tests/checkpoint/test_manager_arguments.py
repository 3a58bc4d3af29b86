"""What a Manager is asked for, and what it refuses, by name."""

import numpy as np
import pytest
from on_threads import caught, save
from raises import raises

from hpcdp import checkpoint
from hpcdp.checkpoint import Manager
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"keep": 0}, {"where": "keep"}),
        ({"keep": True}, {"where": "keep"}),
        ({"keep": 2, "keep_every": -1}, {"where": "keep_every"}),
        ({"best": "loss"}, {"where": "keep"}),
        ({"compression": "zip"}, {"where": "compression"}),
        ({"shards": ["rank"]}, {"where": "shards"}),
        ({"keep": 1, "best": 3}, {"where": "best", "expected": ["metric", "'-metric'", None], "got": 3}),
        ({"keep": 1, "best": ""}, {"where": "best"}),
        ({"keep": 1, "best": "-"}, {"where": "best"}),
        ({"atomic_rename": "no"}, {"where": "atomic_rename", "expected": False, "got": "no"}),
        ({"path": None}, {"where": "path", "expected": ["str", "Path"], "got": None}),
        ({"path": 5}, {"where": "path", "got": 5}),
        ({"path": b"x"}, {"where": "path"}),
        ({"path": ""}, {"where": "path"}),
        ({"world": 3}, {"where": "world", "expected": ["hpcdp.init()", None], "got": 3}),
    ],
)
def test_settings_are_checked(arguments, fields, n, tmp_path):
    with raises(ConfigError, operation="Manager", **fields):
        thread_comm.run(n, lambda world: Manager(**({"path": tmp_path, "world": world} | arguments)))


@pytest.mark.parametrize("call", ["save", "restore", "claim"])
def test_a_closed_manager_is_an_error(call, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": step})

    def one(world):
        with Manager(tmp_path, world) as manager:
            pass
        arguments = {"save": (2, {}), "restore": (1,), "claim": ()}[call]
        text = caught(lambda: getattr(manager, call)(*arguments), ConfigError)
        assert text == f"{call} [{tmp_path}]: expected an open Manager, got a closed Manager; make another Manager"
        manager.close()
        assert manager.steps() == [1]

    thread_comm.run(2, one)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        *((step, {}) for step in (-1, 1.5, "1", True, None, 10**18, np.arange(2))),
        *(
            (1, {"config": each})
            for each in ({"a": {1}}, [1], "text", {1: 2}, {None: 2}, {"a": [{"b": {2: 3}}]}, {"a": float("nan")})
        ),
        *(
            (1, {"metrics": each})
            for each in ([1], 5, "text", {"a": "1"}, {"a": None}, {"a": 10**400}, {3: 1.0}, {"\ud800": 1})
        ),
    ],
)
def test_arguments_of_save_are_checked(step, options, tmp_path):
    def one(world):
        manager = Manager(tmp_path, world)
        text = caught(lambda: manager.save(step, {}, **options), ConfigError)
        manager.save(np.int64(1), {"a": 1}, metrics={"a": np.float32(2), "b": np.ones(()), "c": True})
        manager.close()
        return text

    (text,) = {*thread_comm.run(2, one)}
    assert len(text) < 200 and text.startswith("save [") and "Traceback" not in text


def test_what_config_must_be_is_said(tmp_path):
    with Manager(tmp_path, thread_comm.run(1, lambda world: world)[0]) as manager:
        text = caught(lambda: manager.save(1, {}, config=[1]), ConfigError)
    assert text == "save [config]: expected a dict of JSON values, with keys that are str, got [1]"


@pytest.mark.parametrize("step", ["904", 904.0, True, -1, [1]])
@pytest.mark.parametrize("n", [1, 2])
def test_steps_to_restore_are_checked(step, n, tmp_path):
    save(tmp_path, 904, n, lambda step, world: {"a": 1})

    def one(world):
        with Manager(tmp_path, world) as manager:
            text = caught(lambda: manager.restore(step if world.rank == n - 1 else None), ConfigError)
            return text, manager.restore(np.int64(904)).state

    for text, state in thread_comm.run(n, one):
        assert f"restore [step]: expected an integer from 0 to 10**18 - 1, got {step!r}" in text and state == {"a": 1}


@pytest.mark.parametrize("what", ["a file", "a dangling symbolic link"])
def test_a_folder_that_is_none_is_refused(what, tmp_path):
    path = tmp_path / "here"
    path.symlink_to("nowhere") if what != "a file" else path.touch()

    def one(world):
        with raises(DataError, operation="save", where=path):
            Manager(path, world).save(world.rank * 0, {"w": np.ones(2)})

    thread_comm.run(2, one)


def test_the_names_of_the_package():
    assert checkpoint.__all__ == ["Manager", "Part", "PerRank", "Restored", "Sharded"]
