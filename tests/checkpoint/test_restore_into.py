"""Restored into what is there: arrays filled in place, objects that take over their states, and what does not fit."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import standin
from on_threads import restore, save
from raises import raises
from saved import flip

from hpcdp import nn
from hpcdp.checkpoint import Part, PerRank, Sharded, complete_steps, inspect, manifest
from hpcdp.core.arrays import dtype_of, to_host
from hpcdp.errors import ConfigError, DataError, UnsupportedError

SIZES = [1, 2, 3, 4, 6]


def arrays():
    base = np.random.default_rng(5).integers(0, 200, (6, 8))
    found = {
        f"{dtype}": base.astype(dtype_of(dtype))
        for dtype in ("?", "i1", "u2", "i4", "i8", "f2", "bfloat16", "f4", "f8", "F", "D", ">f4")
    }
    found |= {"bfloat16 transposed": base.astype(dtype_of("bfloat16")).T}
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
    with raises(ConfigError, operation="restore", where="read-only"):
        restore(tmp_path, 2, lambda world: into[world.rank] | {"read-only": read_only})


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("compression", [None, "lzf"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_matrix_is_an_array_of_two_dimensions(n, compression, tmp_path):
    """Also where it has several blocks, and several ranks write it."""
    saved = np.matrix(np.arange(400_003, dtype="f4"))
    save(tmp_path, 1, n, lambda step, world: {"x": saved}, compression=compression)
    assert not [*inspect.faults(tmp_path / "step-0000000001")]
    for found in restore(tmp_path, 3 - n, lambda world: {"x": np.zeros_like(saved)}):
        assert type(found.state["x"]) is np.matrix and np.array_equal(found.state["x"], saved)
    assert np.array_equal(restore(tmp_path, 1)[0].state["x"], np.asarray(saved))


@pytest.mark.parametrize("where", [np.asarray, standin.asarray])
def test_bfloat16_comes_back_as_what_it_was(where, tmp_path):
    """By itself, as a scalar, as a run of a tensor of several ranks, and on a device; with and without a place."""
    dtype = dtype_of("bfloat16")
    values = np.array([1.5, -0.0, 3e38, np.inf, 1e-40, 0.15625], dtype)

    def state(world, values):
        own = slice(world.rank * 3, world.rank * 3 + 3)
        parts = [Part(own.start, where(values[own].copy()))]
        return {"x": where(values.reshape(2, 3)), "one": values[1], "cut": Sharded((6,), dtype, parts)}

    save(tmp_path, 1, 2, lambda step, world: state(world, values))
    for found in restore(tmp_path, 1):
        assert {each.dtype for each in found.state.values()} == {dtype}
        assert found.state["x"].tobytes() == found.state["cut"].tobytes() == values.tobytes()
        assert found.state["one"].tobytes() == values[1].tobytes()
    made = [state(SimpleNamespace(rank=rank), np.zeros(6, dtype)) for rank in range(2)]
    for rank, restored in enumerate(restore(tmp_path, 2, lambda world: made[world.rank])):
        x, cut = made[rank]["x"], made[rank]["cut"].parts[0].values
        assert restored.state["x"] is x and type(restored.state["one"]) is dtype.type
        assert to_host(x).tobytes() == values.tobytes()
        assert to_host(cut).tobytes() == values[rank * 3 : rank * 3 + 3].tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_array_of_one_element_in_the_place_of_a_number_is_one(shape, tmp_path):
    save(tmp_path, 1, 1, lambda step, world: {"a": np.full(shape, 3)})
    (found,) = restore(tmp_path, 1, lambda world: {"a": 0})
    assert range(found.state["a"]) == range(3)


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_of_a_damaged_checkpoint_stays_where_the_next_one_lacks_a_name(n, tmp_path):
    save(tmp_path, 1, n, lambda step, world: {"a": np.ones(4)})
    save(tmp_path, 2, n, lambda step, world: {"b": np.full(4, 2.0), "a": np.full(4, 2.0)})
    part = manifest.read(tmp_path / "step-0000000002").tensors["a"].parts[0]
    flip(tmp_path / "step-0000000002" / part.file, part.offset)
    into = [{"a": np.zeros(4), "b": np.zeros(4)} for _ in range(n)]
    with pytest.warns(UserWarning, match="taking step 1 instead"):
        found = restore(tmp_path, n, lambda world: into[world.rank], strict=False)
    for restored, state in zip(found, into, strict=True):
        assert (restored.step, restored.missing) == (1, ["b"])
        assert state["a"].tolist() == [1.0] * 4 and state["b"].tolist() == [0.0] * 4


class Meanwhile:
    """While it is restored, another job saves, and keeps but what it has saved."""

    def __init__(self, world, folder, steps):
        self._rank, self._folder, self._steps = world.rank, folder, steps

    def state_dict(self):
        if self._rank == 0 and (step := next(self._steps, None)) is not None:
            for path in self._folder.glob("step-*"):
                path.rename(self._folder.with_name(f"removed-{path.name}"))
            complete_steps.path_of(self._folder.with_name("saved"), step).rename(
                complete_steps.path_of(self._folder, step)
            )
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("times", [1, 3, 20])
def test_a_checkpoint_that_another_job_removes_is_followed_by_what_it_has_saved(times, n, tmp_path):
    def state(step, world):
        return {"first": Meanwhile(world, None, iter(())), "a": np.full(4, step)}

    save(tmp_path / "run", 1, n, state)
    for step in range(2, times + 2):
        save(tmp_path / "saved", step, n, state)

    def into(world):
        return {"first": Meanwhile(world, tmp_path / "run", iter(range(2, times + 2))), "a": np.zeros(4, int)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is damaged
        if times == 20:
            with raises(DataError, operation="restore", remedy="keep"):
                restore(tmp_path / "run", n, into)
            return
        for found in restore(tmp_path / "run", n, into):
            assert found.step == times + 1 and found.state["a"].tolist() == [times + 1] * 4


@pytest.mark.parametrize("n", [1, 2])
def test_where_the_next_older_one_does_not_fit_the_damage_is_the_error(n, tmp_path):
    """`ConfigError` says that nothing is changed, which of the damaged one may not be true."""
    save(tmp_path, 1, n, lambda step, world: {"a": np.ones(3), "b": np.ones(4)})
    save(tmp_path, 2, n, lambda step, world: {"a": np.ones(4), "b": np.ones(4)})
    part = manifest.read(tmp_path / "step-0000000002").tensors["b"].parts[0]
    flip(tmp_path / "step-0000000002" / part.file, part.offset)
    with (
        pytest.warns(UserWarning, match="taking step 1 instead"),
        raises(DataError, operation="restore", where=f"{tmp_path}/step-0000000002/{part.file}, b", remedy=[1, "[a]"]),
    ):
        restore(tmp_path, n, lambda world: {"a": np.zeros(4), "b": np.zeros(4)})


@pytest.mark.parametrize("dtypes", [(">f4", "<f4"), ("<f4", ">f4"), (">f4", ">f4")])
def test_parts_of_another_order_of_bytes(dtypes, tmp_path):
    """Files have little-endian bytes, whatever a part has in memory."""
    values = np.arange(6.0)

    def state(rank, dtype, values):
        return {"cut": Sharded((6,), np.dtype(dtype), [Part(3 * rank, values[3 * rank : 3 * rank + 3].astype(dtype))])}

    save(tmp_path, 1, 2, lambda step, world: state(world.rank, dtypes[0], values))
    assert [*inspect.faults(tmp_path / "step-0000000001")] == []
    assert np.array_equal(restore(tmp_path, 1)[0].state["cut"], values.astype("<f4"))
    into = [state(rank, dtypes[1], np.zeros(6)) for rank in range(2)]
    restore(tmp_path, 2, lambda world: into[world.rank])
    assert np.array_equal(np.concatenate([each["cut"].parts[0].values for each in into]), values)


@pytest.mark.parametrize("dtype", ["f8", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_shares_of_a_sum_are_dealt_anew(saved_on, size, dtype, tmp_path):
    kind = dtype_of(dtype)

    def residuals(world, values):
        return {
            "a": Sharded((world.size, 6), kind, [Part(6 * world.rank, values.astype(kind, copy=False))], shares=True)
        }

    save(tmp_path, 1, saved_on, lambda step, world: residuals(world, np.arange(6.0) * 12 * (world.rank + 1)))
    rows = [np.empty(6, kind) for _ in range(size)]
    restore(tmp_path, size, lambda world: residuals(world, rows[world.rank]))
    total = np.arange(6.0) * 12 * sum(range(1, saved_on + 1))
    for rank in range(size):
        expected = np.arange(6.0) * 12 * (rank + 1) if size == saved_on else total / size
        assert np.array_equal(rows[rank], expected)


def test_shares_of_sums_that_nobody_had_are_zero(tmp_path):
    """Ranks of one node have not sent nothing; a checkpoint of theirs does not name what those of several have."""

    def state(world, saving=False):
        weights = {"w": np.full(3, 1.0 if saving else 0.0)}
        row = np.full(4, 7.0)
        shares = {"w": Sharded((world.size, 4), np.dtype("f8"), [Part(4 * world.rank, row)], shares=True)}
        return weights if saving else weights | {"residuals": shares}

    save(tmp_path, 1, 2, lambda step, world: state(world, saving=True))
    for restored in restore(tmp_path, 3, state):
        assert not restored.missing and restored.state["w"].tolist() == [1.0] * 3
        assert not restored.state["residuals"]["w"].parts[0].values.any()
    with raises(ConfigError, operation="restore", got="residuals"):  # with other things it is the program's own
        restore(tmp_path, 3, lambda world: state(world) | {"residuals": state(world)["residuals"] | {"kept": None}})


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


@pytest.mark.parametrize("n", [2, 3, 5])
def test_statistics_that_all_ranks_have_alike_stay_what_they_are_to_the_bit(n, tmp_path):
    """As those of a reproducible trainer, which goes on with other ranks."""

    def net(values):
        made = nn.BatchNorm(500)
        for (_, buffer), value in zip(made.named_buffers(), values, strict=True):
            buffer.data[...] = value
        return made

    rng = np.random.default_rng(3)
    saved = [rng.normal(size=500).astype("f4"), np.r_[rng.random(498), np.inf, np.nan].astype("f4")]
    save(tmp_path, 1, n, lambda step, world: {"net": net(saved)})
    (found,) = restore(tmp_path, 1, lambda world: {"net": net([0, 1])})
    for (_, buffer), value in zip(found.state["net"].named_buffers(), saved, strict=True):
        assert np.array_equal(buffer.data, value, equal_nan=True)


def test_what_is_missing_and_left_over(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": np.ones(2), "old": {"x": np.full(2, 2.0), "y": 3}, "gone": 4})
    into = lambda world: {"a": np.zeros(2), "new": {"x": np.zeros(2), "y": 0}, "more": np.full(1, 9.0)}  # noqa: E731
    with raises(ConfigError, operation="restore", got=["new", "more", "old/x", "old/y", "gone"], remedy="strict=False"):
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
    with raises(ConfigError, operation="restore", got=["more", "net"]):
        restore(tmp_path, 2, lambda world: {"more": 1} | {key: into[key] for key in into if key != "net"})


def test_a_list_of_arrays_of_another_length(tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": [np.ones(2), np.ones(3)], "b": 5})
    into = [{"a": [np.zeros(2)], "b": 0} for _ in range(2)]
    with raises(ConfigError, operation="restore", where="a", expected=1, got=2):
        restore(tmp_path, 2, lambda world: into[world.rank])
    for own, restored in zip(into, restore(tmp_path, 2, lambda world: into[world.rank], strict=False), strict=True):
        assert (restored.missing, restored.left_over) == (["a"], ["a"]) and restored.state["b"] == 5
        assert restored.state["a"] is own["a"] and not own["a"][0].any()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros(3), [(3,), "float64"]),
        (np.zeros(2, "f4"), [(2,), "float32"]),
        ([1, 2], "list"),
        ({"b": 1}, "dict"),
        (Sharded((2,), np.dtype("f4"), []), [(2,), "float32"]),
        (Sharded((4,), np.dtype("f8"), []), [(4,), "float64"]),
    ],
)
def test_what_does_not_fit_changes_nothing(value, expected, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"first": np.ones(2), "a": np.ones(2), "last": np.ones(2)})
    fits = [[np.zeros(2), np.zeros(2)] for _ in range(2)]
    with raises(ConfigError, operation="restore", where="a", expected=expected, got=(2,)):
        restore(tmp_path, 2, lambda world: {"first": fits[world.rank][0], "a": value, "last": fits[world.rank][1]})
    assert not np.any(fits)


@pytest.mark.parametrize("into", [[1], np.zeros(2)])
def test_a_state_of_another_kind_does_not_fit(into, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": np.ones(2)})
    with raises(ConfigError, operation="restore", where="the state"):
        restore(tmp_path, 2, lambda world: into)


@pytest.mark.parametrize(
    ("saved", "into", "fields"),
    [
        (3, "text", {"expected": "text", "got": 3}),
        ("text", 3.0, {"expected": "number", "got": "text"}),
        ("text", True, {"expected": "number", "got": "text"}),
        (3, object(), {"expected": "object", "got": 3}),
        (np.ones(2), 3, {"expected": "number", "got": [(2,), "float64"]}),
        (np.ones(0), 3, {"expected": "number", "got": [(0,), "float64"]}),
        (np.ones(1), "text", {"expected": "str", "got": (1,)}),
        (3, 0.5, None), (0.5, 3, None), (float("inf"), 3, None), (True, 3, None), (np.float32(3), 1, None),
        (None, 3, None), (None, "text", None), (3, None, None), ("text", None, None), (np.ones(()), 0.5, None),
    ],
)  # fmt: skip
def test_kinds_of_plain_values(saved, into, fields, tmp_path):
    save(tmp_path, 1, 2, lambda step, world: {"a": saved, "b": {"c": saved}})
    if fields is None:
        for restored in restore(tmp_path, 2, lambda world: {"a": into, "b": {"c": into}}):
            assert restored.state == {"a": saved, "b": {"c": saved}}
    else:
        for where, own in (("a", {"a": into, "b": {"c": None}}), ("b/c", {"a": None, "b": {"c": into}})):
            with raises(ConfigError, operation="restore", where=where, **fields):
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


def test_masked_arrays_are_refused(tmp_path):
    masked = np.ma.masked_array(np.arange(4.0), [False, True, False, True])
    with raises(UnsupportedError, operation="save", where="a", got="MaskedArray"):
        save(tmp_path / "masked", 1, 2, lambda step, world: {"a": masked})
    assert not (tmp_path / "masked").exists()
    save(tmp_path, 1, 2, lambda step, world: {"a": masked.data})
    with raises(ConfigError, operation="restore", where="a", expected="MaskedArray", got=(4,)):
        restore(tmp_path, 2, lambda world: {"a": masked})
