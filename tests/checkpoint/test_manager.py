"""Checkpoints of all ranks, saved and restored."""

import json
import os
import threading
import warnings

import h5py
import numpy as np
import pytest
import samples

from hpcdp import checkpoint, nn
from hpcdp.checkpoint import Manager, Part, PerRank, Sharded, verify
from hpcdp.comm import threads
from hpcdp.errors import ConfigError, DataError, MismatchError, UnsupportedError

SIZES = [1, 2, 3, 4, 6]


def save(folder, step, n, state=samples.state, **options):
    def one(world):
        with Manager(folder, world, **options) as manager:
            manager.save(step, state(step, world))

    threads.run(n, one)


def restore(folder, n, into=lambda world: None, step=None, ranks_per_node=None, **options):
    def one(world):
        with Manager(folder, world) as manager:
            return manager.restore(step, into(world), **options)

    return threads.run(n, one, ranks_per_node)


@pytest.mark.parametrize("into", [lambda world: None, samples.blank])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("saved_on", SIZES)
def test_any_number_of_ranks_restores(saved_on, size, into, tmp_path):
    save(tmp_path, 0, saved_on)
    for rank, restored in enumerate(restore(tmp_path, size, into)):
        samples.check(restored.state, 0, rank, saved_on, size)
        assert (restored.step, restored.missing, restored.left_over) == (0, [], [])
        assert restored.kept == ([] if saved_on == size else ["own"])
        if saved_on != size and into is samples.blank:
            assert [*restored.state["own"]["values"]] == [-1] * (rank + 2)
        elif saved_on != size:
            assert restored.state["own"] is None


@pytest.mark.parametrize(
    "options", [{"compression": "gzip"}, {"compression": "lzf"}, {"shards": "node"}, {"atomic_rename": False}]
)
@pytest.mark.parametrize("wait", [True, False])
def test_other_ways_to_write(wait, options, tmp_path):
    def one(world):
        with Manager(tmp_path, world, **options) as manager:
            for step in (7, 14, 14):
                manager.save(step, samples.state(step, world), wait=wait)
            manager.wait()
            assert manager.steps() == [7, 14] and manager.latest() == 14

    threads.run(4, one, ranks_per_node=2)
    for rank, restored in enumerate(restore(tmp_path, 3, ranks_per_node=2)):
        samples.check(restored.state, 14, rank, 4, 3)


@pytest.mark.parametrize("n", [1, 3])
def test_everything_is_seen_as_one_file(n, tmp_path):
    save(tmp_path, 6, n)
    with h5py.File(tmp_path / "step-0000000006" / "index.h5") as file:
        assert np.array_equal(file["weights"][...], samples.weights(6))
        assert np.array_equal(file["moments"][...], samples.moments(6))
        assert np.array_equal(file[f"own/rank-{n - 1}/values"][...], samples.own(6, n - 1))
        assert file.attrs["step"] == 6
    manifest = json.loads((tmp_path / "step-0000000006" / "manifest.json").read_text())
    assert manifest["world"] == {"size": n, "num_nodes": 1} and manifest["versions"]["numpy"] == np.__version__
    names = sorted(path.name for path in (tmp_path / "step-0000000006").iterdir())
    assert names == ["index.h5", "manifest.json", *(f"shard-{rank:05d}.h5" for rank in range(n))]


def arrays():
    base = np.random.default_rng(5).integers(0, 200, (6, 8))
    found = {
        f"{dtype}": base.astype(dtype) for dtype in ("?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "F", "D", ">f4")
    }
    found |= {"0-d": np.array(2.5), "empty": np.zeros((3, 0), "f2"), "columns": base[:, ::3], "transposed": base.T}
    found |= {"reversed": base[::-1], "fortran": np.asfortranarray(base), "0-d of columns": base[3:4, 2].reshape(())}
    return found


def test_arrays_of_all_kinds_are_filled_in_place(tmp_path):
    read_only = np.broadcast_to(np.float32(3), (4, 4))
    save(tmp_path, 1, 2, lambda step, world: arrays() | {"read-only": read_only, "number": np.float32(1.5)})
    into = [arrays() | {"read-only": np.zeros((4, 4), "f4"), "number": np.float32(0)} for _ in range(3)]
    for each in into:
        for array in each.values():
            if isinstance(array, np.ndarray):
                array[...] = 0
    for rank, restored in enumerate(restore(tmp_path, 3, lambda world: into[world.rank])):
        for name, saved in (arrays() | {"read-only": read_only}).items():
            assert restored.state[name] is into[rank][name] and np.array_equal(saved, restored.state[name])
        assert restored.state["number"] == 1.5 and type(restored.state["number"]) is np.float32
    with pytest.raises(ConfigError, match=r"restore \[read-only\]: expected an array to write to, got a read-only one"):
        restore(tmp_path, 2, lambda world: into[world.rank] | {"read-only": read_only})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_shares_of_a_sum_are_dealt_anew(saved_on, size, tmp_path):
    def residuals(world, values):
        return {"a": Sharded((world.size, 6), np.dtype("f8"), [Part(6 * world.rank, values)], shares=True)}

    save(tmp_path, 1, saved_on, lambda step, world: residuals(world, np.arange(6.0) * 12 * (world.rank + 1)))
    rows = [np.empty(6) for _ in range(size)]
    restore(tmp_path, size, lambda world: residuals(world, rows[world.rank]))
    total = np.arange(6.0) * 12 * sum(range(1, saved_on + 1))
    for rank in range(size):
        expected = np.arange(6.0) * 12 * (rank + 1) if size == saved_on else total / size
        assert np.array_equal(rows[rank], expected)


def test_copies_are_written_once(tmp_path):
    values = np.random.default_rng(0).standard_normal(300_000)

    def copies(world):
        half, copy = divmod(world.rank, 2)
        part = Part(half * 150_000, values[half * 150_000 : (half + 1) * 150_000].copy())
        return {"a": Sharded((300_000,), np.dtype("f8"), [part], copies=2, copy=copy)}

    save(tmp_path, 1, 4, lambda step, world: copies(world))
    total = sum(path.stat().st_size for path in tmp_path.glob("step-*/shard-*"))
    assert values.nbytes < total < values.nbytes * 1.1
    for restored in restore(tmp_path, 1):
        assert np.array_equal(restored.state["a"], values)


class Counter:
    """An object with a state, as torch and others have them."""

    def __init__(self, value: int) -> None:
        self.array, self.value, self.loaded = np.full(4, float(value)), value, 0

    def state_dict(self):
        return {"array": self.array, "value": self.value, "groups": [{"lr": 0.1 * self.value}]}

    def load_state_dict(self, state):
        assert state["array"] is self.array
        self.value, self.loaded = state["value"], self.loaded + 1
        assert state["groups"] == [{"lr": 0.1 * self.value}]


def test_objects_take_over_their_states(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {
        "one": Counter(5), "two": [Counter(6)], "rng": PerRank(np.random.default_rng(world.rank))
    })  # fmt: skip
    made = [{"one": Counter(0), "two": [Counter(0)], "rng": PerRank(np.random.default_rng(9))} for _ in range(2)]
    for rank, restored in enumerate(restore(tmp_path, 2, lambda world: made[world.rank])):
        one, two = restored.state["one"], restored.state["two"][0]
        assert one is made[rank]["one"] and (one.value, one.loaded, one.array[0]) == (5, 1, 5.0)
        assert (two.value, two.loaded, two.array[3]) == (6, 1, 6.0)
        assert restored.state["rng"] is made[rank]["rng"].value
        assert restored.state["rng"].random() == np.random.default_rng(rank).random()


@pytest.mark.parametrize("n", [1, 3])
def test_networks_with_averaged_statistics(n, tmp_path):
    def net(value):
        made = nn.Sequential(nn.Dense(3, 4), nn.BatchNorm(4))
        for _, buffer in made.named_buffers():
            buffer.data[...] = value
        for _, parameter in made.named_parameters():
            parameter.data[...] = np.arange(parameter.data.size).reshape(parameter.data.shape)
        return made

    save(tmp_path, 1, n, lambda step, world: {"net": net(world.rank)})
    made = [net(77) for _ in range(2)]
    for _, parameter in made[0].named_parameters():
        parameter.data[...] = 0
    restore(tmp_path, 2, lambda world: {"net": made[world.rank]})
    for name, buffer in made[1].named_buffers():
        assert np.allclose(buffer.data, (n - 1) / 2), name
    first, second = (dict(each.named_parameters()) for each in made)
    assert all(np.array_equal(first[name].data, second[name].data) for name in first)


def test_what_is_missing_and_left_over(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": np.ones(2), "old": {"x": np.full(2, 2.0), "y": 3}, "gone": 4})
    into = lambda world: {"a": np.zeros(2), "new": {"x": np.zeros(2), "y": 0}, "more": np.full(1, 9.0)}  # noqa: E731
    with pytest.raises(ConfigError, match=r"got new, more missing, .*old/x, old/y, gone left over; .*strict=False"):
        restore(tmp_path, 2, into)
    for restored in restore(tmp_path, 3, into, strict=False):
        assert (restored.missing, restored.left_over) == (["new", "more"], ["old/x", "old/y", "gone"])
        assert restored.state["a"][0] == 1 and restored.state["more"][0] == 9 and restored.state["new"]["y"] == 0
    for restored in restore(tmp_path, 2, into, strict=False, rename={"old": "new"}):
        assert (restored.missing, restored.left_over) == (["more"], ["gone"])
        assert restored.state["new"]["x"][1] == 2 and restored.state["new"]["y"] == 3
    for restored in restore(tmp_path, 1, rename=lambda name: name.replace("old", "other")):
        assert restored.state["other"]["y"] == 3


HISTORY = {"losses": [3.0, 2.0], "phases": ({"at": 1, "of": [5]}, 2), "notes": {"a": 1, "b": {"c": None}}, "net": 1}


@pytest.mark.parametrize(
    "into",
    [
        HISTORY,
        {"losses": [], "phases": (), "notes": {}, "net": 0},
        {"losses": [1, 2, 3], "phases": ["x"], "notes": {"a": 0, "gone": 2, "b": {"d": "text"}}, "net": 0},
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_plain_lists_and_dicts_come_back_as_they_were(strict, into, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: HISTORY)
    for restored in restore(tmp_path, 2, lambda world: into, strict=strict):
        assert restored.state == HISTORY and (restored.missing, restored.left_over) == ([], [])
    with pytest.raises(ConfigError, match="got more missing, net left over"):
        restore(tmp_path, 2, lambda world: {"more": 1} | {key: into[key] for key in into if key != "net"})


def test_a_list_of_arrays_of_another_length(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": [np.ones(2), np.ones(3)], "b": 5})
    into = [{"a": [np.zeros(2)], "b": 0} for _ in range(2)]
    with pytest.raises(ConfigError, match=r"restore \[a\]: expected 1 elements, got 2 in the checkpoint"):
        restore(tmp_path, 2, lambda world: into[world.rank])
    for own, restored in zip(into, restore(tmp_path, 2, lambda world: into[world.rank], strict=False), strict=True):
        assert (restored.missing, restored.left_over) == (["a"], ["a"]) and restored.state["b"] == 5
        assert restored.state["a"] is own["a"] and not own["a"][0].any()


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"a": np.zeros(3)}, r"\[a\]: expected shape \(3,\) float64, got shape \(2,\) float64 in the checkpoint"),
        ({"a": np.zeros(2, "f4")}, r"expected shape \(2,\) float32, got"),
        ({"a": [1, 2]}, r"\[a\]"),
        ({"a": {"b": 1}}, r"\[a\]"),
        ([1], r"\[the state\]"),
        (np.zeros(2), r"\[the state\]"),
        ({"a": Sharded((2,), np.dtype("f4"), [])}, r"\[a\]: expected shape \(2,\) float32"),
        ({"a": Sharded((4,), np.dtype("f8"), [])}, r"\[a\]: expected shape \(4,\) float64"),
    ],
)
def test_what_does_not_fit_changes_nothing(into, message, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": np.ones(2)})
    with pytest.raises(ConfigError, match=message):
        restore(tmp_path, 2, lambda world: into)
    assert not isinstance(into, dict) or not np.any(np.asarray(into["a"]) == 1) or isinstance(into["a"], list | dict)


@pytest.mark.parametrize(
    ("saved", "into", "message"),
    [
        (3, "text", r"restore \[a\]: expected a text, got 3 in the checkpoint"),
        ("text", 3.0, "expected a number, got 'text'"),
        ("text", True, "expected a number, got 'text'"),
        (3, object(), "expected an object, got 3"),
        (np.ones(2), 3, r"expected a number, got shape \(2,\) float64"),
        (np.ones(0), 3, r"expected a number, got shape \(0,\) float64"),
        (np.ones(1), "text", r"expected a str, got a tensor of shape \(1,\)"),
        (3, 0.5, None), (0.5, 3, None), (float("inf"), 3, None), (True, 3, None), (np.float32(3), 1, None),
        (None, 3, None), (None, "text", None), (3, None, None), ("text", None, None), (np.ones(()), 0.5, None),
    ],
)  # fmt: skip
def test_kinds_of_plain_values(saved, into, message, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": saved, "b": {"c": saved}})
    if message is None:
        for restored in restore(tmp_path, 2, lambda world: {"a": into, "b": {"c": into}}):
            assert restored.state == {"a": saved, "b": {"c": saved}}
    else:
        for own in ({"a": into, "b": {"c": None}}, {"a": None, "b": {"c": into}}):
            with pytest.raises(ConfigError, match=message.replace(r"\[a\]", r"\[(a|b/c)\]")):
                restore(tmp_path, 2, lambda world, own=own: own)


@pytest.mark.parametrize("count", [5, 40_000, 3_000_000])  # parts of a block, and many blocks
def test_destinations_that_share_memory(count, tmp_path):
    def numbers(seed):
        return np.random.default_rng(seed).random(count, np.float32)

    save(tmp_path, 1, 2, lambda step, world: {"a": numbers(0), "b": numbers(0), "c": numbers(1), "d": numbers(2)})
    for _ in range(3):
        tied, memory = np.zeros(count, np.float32), np.zeros(count + 2, np.float32)
        into = {"a": tied, "b": tied, "c": memory[:count], "d": memory[2:]}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (restored,) = restore(tmp_path, 1, lambda world, into=into: into)
        assert restored.state["a"] is restored.state["b"] is tied and np.array_equal(tied, numbers(0))
        assert np.array_equal(memory[2:], numbers(2)) and np.array_equal(memory[:2], numbers(1)[:2])


def test_retention(tmp_path):
    def one(world):
        with Manager(tmp_path, world, keep=2, keep_every=100, best="-loss") as manager:
            for step, loss in [(100, 9), (110, 1), (120, 5), (130, 6), (140, 7), (150, 2)]:
                manager.save(step, {"a": step}, metrics={"loss": loss, "odd": float("nan")}, config={"lr": 0.1})
            assert manager.steps() == [100, 110, 140, 150]
            restored = manager.restore(110)
            assert (restored.state, restored.metrics, restored.config) == ({"a": 110}, {"loss": 1}, {"lr": 0.1})
            with pytest.raises(ConfigError, match=r"save \[metrics\]: expected 'loss', which decides what is best"):
                manager.save(160, {"a": 1})

    threads.run(2, one)


def test_a_damaged_manifest_does_not_keep_others_from_being_removed(tmp_path):
    save(tmp_path, 1, 1)
    (tmp_path / "step-0000000001" / "manifest.json").write_bytes(b"")

    def one(world):
        with Manager(tmp_path, world, keep=1, best="loss") as manager:
            for step in (2, 3):
                manager.save(step, {}, metrics={"loss": -step})
            return manager.steps()

    assert threads.run(1, one) == [[2, 3]]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep"),
        ({"keep": True}, "keep"),
        ({"keep": 2, "keep_every": -1}, "keep_every"),
        ({"best": "loss"}, "keep"),
        ({"compression": "zip"}, "compression"),
        ({"shards": ["rank"]}, "shards"),
        ({"keep": 1, "best": 3}, r"Manager \[best\]: expected 'metric', '-metric', or None, got 3"),
        ({"keep": 1, "best": ""}, "best"),
        ({"keep": 1, "best": "-"}, "best"),
        ({"atomic_rename": "no"}, r"Manager \[atomic_rename\]: expected True or False, got 'no'"),
        ({"path": None}, r"Manager \[path\]: expected a folder, as a str or a Path, got None"),
        ({"path": 5}, "got 5"),
        ({"path": b"x"}, "got b'x'"),
        ({"path": ""}, "got ''"),
    ],
)
def test_settings_are_checked(arguments, message, n, tmp_path):
    with pytest.raises(ConfigError, match=message):
        threads.run(n, lambda world: Manager(**({"path": tmp_path, "world": world} | arguments)))


@pytest.mark.parametrize("call", ["save", "restore", "claim"])
def test_a_closed_manager_is_an_error(call, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": step})

    def one(world):
        with Manager(tmp_path, world) as manager:
            pass
        arguments = {"save": (2, {}), "restore": (1,), "claim": ()}[call]
        text = caught(lambda: getattr(manager, call)(*arguments), ConfigError)
        assert text == f"{call} [{tmp_path}]: expected an open Manager, got one after close(); make another one"
        manager.close()
        assert manager.steps() == [1]

    threads.run(2, one)


def test_masked_arrays_are_refused(tmp_path):
    masked = np.ma.masked_array(np.arange(4.0), [False, True, False, True])
    with pytest.raises(UnsupportedError, match=r"save \[a\]: .* got MaskedArray; save its data and its mask"):
        save(tmp_path / "masked", 1, 2, lambda step, world: {"a": masked})
    assert not (tmp_path / "masked").exists()
    save(tmp_path, 1, 2, lambda step, world: {"a": masked.data})
    with pytest.raises(ConfigError, match=r"restore \[a\]: expected a MaskedArray, got a tensor of shape \(4,\)"):
        restore(tmp_path, 2, lambda world: {"a": masked})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "index.h5]: got No such file or directory"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "index.h5]: expected "),
    ],
)
def test_a_checkpoint_without_its_index_is_restored(harm, message, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, 2, lambda step, world: {"a": np.full(4, step)})
    harm(tmp_path / "step-0000000002" / "index.h5")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for restored in restore(tmp_path, 2):
            assert restored.step == 2 and np.all(restored.state["a"] == 2)
    assert len(said) == 1 and message in str(said[0].message) and "\n" not in str(said[0].message)
    assert said[0].filename == __file__
    assert any(fault.startswith("index.h5: ") for fault in verify.faults(tmp_path / "step-0000000002"))


@pytest.mark.parametrize("argument", [{"keep": 0}, {"path": None}, {"best": "-"}])
def test_settings_that_are_wrong_on_one_rank(argument, tmp_path):
    def one(world):
        given = {"path": tmp_path, "world": world} | (argument if world.rank == 1 else {})
        return caught(lambda: Manager(**given), ConfigError)

    assert len({*threads.run(2, one)}) == 1


def caught(fn, kind):
    """The text of what ``fn`` raises."""
    with pytest.raises(kind) as info:
        fn()
    return str(info.value)


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

    (text,) = {*threads.run(2, one)}
    assert len(text) < 200 and text.startswith("save [") and "Traceback" not in text


def test_what_config_must_be_is_said(tmp_path):
    with Manager(tmp_path, threads.run(1, lambda world: world)[0]) as manager:
        text = caught(lambda: manager.save(1, {}, config=[1]), ConfigError)
    assert text == "save [config]: expected a dict of what JSON can carry, with keys that are str, got [1]"


@pytest.mark.parametrize("step", ["904", 904.0, True, -1, [1]])
@pytest.mark.parametrize("n", [1, 2])
def test_steps_to_restore_are_checked(step, n, tmp_path):
    save(tmp_path, 904, n, lambda step, world: {"a": 1})

    def one(world):
        with Manager(tmp_path, world) as manager:
            text = caught(lambda: manager.restore(step if world.rank == n - 1 else None), ConfigError)
            return text, manager.restore(np.int64(904)).state

    for text, state in threads.run(n, one):
        assert f"restore [step]: expected an integer from 0 to 10**18 - 1, got {step!r}" in text and state == {"a": 1}


@pytest.mark.parametrize("what", ["a file", "a link to nothing"])
def test_a_folder_that_is_none_is_refused(what, tmp_path):
    path = tmp_path / "here"
    path.symlink_to("nowhere") if what != "a file" else path.touch()

    def one(world):
        with pytest.raises(DataError, match=rf"save \[.*here\]: expected a folder, or nothing yet, got {what}"):
            Manager(path, world).save(world.rank * 0, {"w": np.ones(2)})

    threads.run(2, one)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def one(world):
        with Manager("own", world) as manager:
            manager.save(1, {"a": 1})
            if world.rank == 0:
                monkeypatch.chdir(tmp_path / "there")
            world.comm.barrier()
            manager.save(2, {"a": 2})
            return manager.steps(), manager.restore(1).path

    path = tmp_path / "here" / "own"
    assert threads.run(2, one) == [([1, 2], path / "step-0000000001")] * 2
    assert [*(tmp_path / "there").iterdir()] == [] and len([*path.glob("step-*")]) == 2


def test_ranks_in_other_folders_are_refused(tmp_path, monkeypatch):
    places = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr("os.path.abspath", lambda path, own=os.path.abspath: own(place_of_rank() / path))
    ranks = threading.local()

    def place_of_rank():
        return places[getattr(ranks, "number", 0)]

    def one(world):
        ranks.number = world.rank
        return caught(lambda: Manager("own", world), MismatchError)

    assert len({*threads.run(2, one)}) == 1
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

    results = threads.run(3, one)
    assert len({text for text, _ in results}) == 1 and "rank 2" in results[0][0]
    assert results[0][1] == [1, 3]


def test_one_rank_that_cannot_save_does_not_leave_others_waiting(tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            own = {"a": PerRank({1} if world.rank == 1 else 1), "net": nn.BatchNorm(4)}
            text = caught(lambda: manager.save(2, own), UnsupportedError)
            return text, manager.steps()

    results = threads.run(3, one, ranks_per_node=2)
    assert len({text for text, _ in results}) == 1 and "rank 1: save [a/rank-1]" in results[0][0]
    assert results[0][1] == []


def test_one_rank_that_cannot_restore_does_not_leave_others_waiting(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": PerRank(np.zeros(2)), "net": nn.BatchNorm(4)})

    def one(world):
        with Manager(tmp_path, world) as manager:
            into = {"a": PerRank(np.zeros(2 + world.rank)), "net": nn.BatchNorm(4)}
            return caught(lambda: manager.restore(into=into), ConfigError)

    results = threads.run(2, one)
    assert len({*results}) == 1 and "rank 1: restore [a/rank-1]: expected shape (3,)" in results[0]
    with pytest.raises(MismatchError, match="restore"):
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

    first, second = threads.run(2, one)
    assert first == second and first[1] == [1]
    assert message in first[0] and first[0].endswith("; call save alike on all ranks")


@pytest.mark.parametrize("steps", [(1, 2), (None, 1), (3, None)])
def test_steps_to_restore_that_differ_between_ranks(steps, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, 2, lambda step, world: {"a": step})

    def one(world):
        with Manager(tmp_path, world) as manager:
            text = caught(lambda: manager.restore(steps[world.rank]), MismatchError)
            return text, manager.restore().state

    first, second = threads.run(2, one)
    assert first == second and first[0].endswith("; call restore alike on all ranks") and first[1] == {"a": 2}


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

    first, second = threads.run(2, one)
    assert first == second and all("rank " in text for text in first)


@pytest.mark.parametrize("first", [0, 3])
def test_parts_that_leave_some_out_or_overlap(first, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            part = Part(first * world.rank, np.zeros(2, "f4"))
            state = {"a": Sharded((4,), np.dtype("f4"), [part] if first * world.rank < 3 else [])}
            return caught(lambda: manager.save(2, state), DataError), manager.steps()

    (text, steps), other = threads.run(2, one)
    assert "save [a]: expected each element held by one rank" in text and steps == [] and other == (text, steps)
    assert [path.name for path in tmp_path.iterdir()] == ["writer.lock"]


def test_the_names_of_the_package():
    assert checkpoint.__all__ == ["Manager", "Part", "PerRank", "Restored", "Sharded"]


@pytest.mark.parametrize("n", [1, 3])
def test_what_cannot_be_read_back_removes_nothing(n, tmp_path, monkeypatch):
    def one(world):
        with Manager(tmp_path, world, keep=1) as manager:
            manager.save(1, {"a": 1})
            text = caught(lambda: manager.save(2, {"a": {None: world.size}}), UnsupportedError)
            assert text == "save [a]: expected keys that are str or int, got None"
            world.comm.barrier()
            if world.rank == 0:  # as if there were a kind of state that nobody has thought of
                monkeypatch.setattr(checkpoint.tree, "_checked", lambda value, name: value)
            world.comm.barrier()
            text = caught(lambda: manager.save(3, {"a": {None: world.size}}), DataError)
            assert text == "save [the state]: expected what can be read back, got key None"
            assert manager.restore().state == {"a": 1}

    threads.run(n, one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001", "writer.lock"]
