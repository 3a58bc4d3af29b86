"""From nested states to forms and back."""

import enum
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp import nn
from hpcdp.checkpoint import Manager, Part, PerRank, Sharded, flatten, load
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, UnsupportedError

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(-3, 2**70)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["?", "i1", "u8", "f2", "f4", "f8", "F", "D", ">f4", ">i8"]),
    st.lists(st.integers(0, 3), max_size=3),
)
LEAVES = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5) | ARRAYS
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3).filter(lambda x: len({str(key) for key in x}) == len(x))
    ),
    max_leaves=8,
)


def assert_same(found, saved):
    if isinstance(saved, np.ndarray):
        assert found.dtype in (saved.dtype, saved.dtype.newbyteorder("=")) and found.shape == saved.shape
        assert np.array_equal(found, saved)
    elif isinstance(saved, dict):
        assert found.keys() == saved.keys()
        for key in saved:
            assert_same(found[key], saved[key])
    elif isinstance(saved, list | tuple):
        assert type(found) is type(saved) and len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(saved)
        assert found == saved or (found != found and saved != saved)


def flat_of(state, n=1):
    return thread_comm.run(n, lambda world: flatten.flatten(state(world) if callable(state) else state, world))


@settings(max_examples=50)
@given(STATES)
def test_a_form_is_what_json_can_carry(state):
    (flat,) = flat_of(state)
    assert flat.error is None
    text = json.dumps(flat.form, allow_nan=False)
    assert json.loads(text) == flat.form
    names = [held.name for held in flat.held]
    assert len({*names}) == len(names) and all(names)
    assert not any(part in ("", ".", "..") or "@" in part for name in names for part in name.split("/"))


@settings(max_examples=50)
@given(STATES, st.booleans())
def test_states_come_back(tmp_path_factory, state, into):
    folder = tmp_path_factory.mktemp("states")

    def saved(world):
        with Manager(folder, world) as manager:
            manager.save(1, state)
            return manager.restore(into=blank(state) if into else None).state

    for found in thread_comm.run(1, saved):
        assert_same(found, state)


def blank(state):
    """Of the same arrays, with zeros."""
    if isinstance(state, dict):
        return {key: blank(each) for key, each in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(blank(each) for each in state)
    return np.zeros_like(state) if isinstance(state, np.ndarray) else state


def test_what_ranks_have_for_themselves_is_joined():
    flats = flat_of(lambda world: {"a": PerRank([world.rank, PerRank(np.zeros(world.rank))]), "b": [1]}, 3)
    assert [*flatten.alike(flats[2].form)] == [
        "the state = a dict of 2",
        "a = for each rank",
        "b = a list of 1",
        "b/0 = 1",
    ]
    joined = flatten.with_ranks(flats[1].form, [iter(flatten.own_nodes(flat.form)) for flat in flats])
    nodes = [{"list": [rank, {"tensor": f"a/rank-{rank}/1"}]} for rank in range(3)]
    assert joined == {"dict": [["a", {"ranks": nodes}], ["b", {"list": [1]}]]}
    assert [held.is_own for held in flats[1].held] == [True]


class Object:
    def state_dict(self):
        return {"a": np.zeros(2), "inner": Object.Inner()}

    def load_state_dict(self, state):
        raise NotImplementedError

    class Inner:
        def state_dict(self):
            return 3.5

        def load_state_dict(self, state):
            raise NotImplementedError


def test_objects_are_their_states():
    (flat,) = flat_of([Object(), np.random.default_rng(0)])
    assert flat.form["list"][0] == {"dict": [["a", {"tensor": "0/a"}], ["inner", 3.5]]}
    assert [name for name, _ in flatten.leaves(flat.form)][:3] == ["0/a", "0/inner", "1/bit_generator"]


def test_a_text_that_is_an_enum_is_its_value():
    Phase = enum.Enum("Phase", {"WARM": "warm up"}, type=str)
    (flat,) = flat_of({"a": Phase.WARM, "b": [np.str_("c")]})
    assert flat.form == {"dict": [["a", "warm up"], ["b", {"list": ["c"]}]]}
    assert type(flat.form["dict"][0][1]) is str


@pytest.mark.parametrize(
    ("state", "where", "got"),
    [
        ({"a": [{1, 2}]}, "a/0", "got set"),
        ({"a": np.array([None])}, "a", "got an array of object"),
        ({"a": np.array(["x"])}, "a", "got an array of <U1"),
        ({"a": np.array(["2020-01-01"], "M8[D]")}, "a", "got an array of datetime64"),
        ({"a": np.zeros(2, ml_dtypes.float8_e5m2)}, "a", "got an array of float8_e5m2"),
        ({"a": Sharded((2,), np.dtype("M8[s]"), [Part(0, np.zeros(2, "M8[s]"))])}, "a", "got a Sharded of datetime"),
        ({"a": Sharded((2,), np.dtype("O"), [Part(0, np.array([1, None]))])}, "a", "got a Sharded of object"),
        ({"a": Sharded((2,), np.dtype(ml_dtypes.int4), [])}, "a", "got a Sharded of int4"),
        ({"a": {True: 1}}, "a", "got True"),
        ({"a": {1: 1, "1": 2}}, "a", "expected keys that differ as text"),
        ({(1, 2): 1}, "the state", "expected keys that are str or int"),
        ({"a": [1, -(10**4300)]}, "a/1", "expected integers of at most 4300 digits, got a longer one"),
        ({"a": {10**4300: 1}}, "a", "got an integer of over 4300 digits"),
        ({"a": np.zeros((1,) * 33)}, "a", "expected at most 32 dimensions, got 33"),
        ({"a": Sharded((1,) * 33, np.dtype("f4"), [Part(0, np.zeros(1, "f4"))])}, "a", "got 33"),
        ({"a": {"\ud800": np.zeros(1)}}, "a/\\ud800", "expected a name in Unicode, got a lone surrogate"),
        ({None: 1}, "the state", "expected keys that are str or int, got None"),
        ({"a": [{"b": {1: 2, None: 1}}]}, "a/0/b", "got None"),
        (PerRank({"a": {None: 1}}), "rank-0/a", "got None"),
        ({"a": Object}, "a", "got type"),
        (b"x", "the state", "got bytes"),
    ],
)
def test_what_cannot_be_saved_is_named(state, where, got):
    flatten.outline("save", state)
    (flat,) = flat_of(state)
    assert isinstance(flat.error, UnsupportedError)
    assert f"save [{where}]" in str(flat.error) and got in str(flat.error)


def test_what_is_just_not_too_much(tmp_path):
    state = {"a": 10**4300 - 1, "b": np.full((1,) * 32, 3.5), "\ud800": "\udfff", -(10**4300) + 1: "c"}
    (found,) = thread_comm.run(
        1, lambda world: (Manager(tmp_path, world).save(1, state), Manager(tmp_path, world).restore())
    )
    assert_same(found[1].state, state)


def test_a_state_within_itself_and_one_too_deep():
    within: dict = {"a": {}}
    within["a"]["b"] = [within]
    assert "save [a/b/0]: expected a state without cycles" in str(flat_of(within)[0].error)
    assert flatten.outline("save", within) == []
    deep: list = []
    for _ in range(flatten.DEEPEST - 1):
        deep = [deep]
    assert flat_of(deep)[0].error is None
    assert "expected at most 100 levels" in str(flat_of([deep])[0].error)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (Part(0, np.zeros(3, "f8")), {"expected": "float32"}),
        (Part(0, np.zeros((1, 3), "f4")), {"expected": "float32"}),
        (Part(0, np.zeros(6, "f4")[::2]), {"expected": "float32"}),
        (Part(8, np.zeros(3, "f4")), {"got": [8, 11]}),
        (Part(-1, np.zeros(3, "f4")), {"got": [-1, 2]}),
    ],
)
def test_parts_that_are_none(part, fields, tmp_path):
    whole = Sharded((2, 5), np.dtype("f4"), [part])
    (flat,) = flat_of({"a": whole})
    with raises(UnsupportedError, operation="save", where="a", **fields):
        raise flat.error

    def restored(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, {"a": np.zeros((2, 5), "f4")})
            manager.restore(into={"a": whole})

    with raises(UnsupportedError, operation="restore", where="a", **fields):
        thread_comm.run(1, restored)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, np.zeros(10, "f4"))], "expected a Sharded with a list of Part(first, values), got (0, array"),
        (np.zeros(10, "f4"), "expected a Sharded with a list of Part(first, values), got array"),
        (None, "got None"),
        ([Part("0", np.zeros(10, "f4"))], "got Part(first='0'"),
        ([Part(0, [1.0] * 10)], "expected a Part with an array of values, got [1.0"),
    ],
)
def test_parts_that_are_no_parts(parts, message, tmp_path):
    whole = Sharded((2, 5), np.dtype("f4"), parts)

    def one(world):
        with Manager(tmp_path, world) as manager:
            with pytest.raises(ConfigError) as saved:
                manager.save(1, {"a": whole})
            manager.save(2, {"a": np.zeros((2, 5), "f4")})
            with pytest.raises(ConfigError) as restored:
                manager.restore(into={"a": whole})
            return str(saved.value), str(restored.value)

    for each in thread_comm.run(2, one)[0]:
        assert "[a]: " in each and message in each and len(each) < 160


def test_numbers_of_a_sharded_may_be_numpys(tmp_path):
    def state(world, values):
        first, last = np.array([0, 3, 10])[world.rank : world.rank + 2]
        several = Sharded(np.array([300_000]), np.dtype("f4"), [Part(np.int32(0), np.full(300_000, 2, "f4"))],
                          np.int64(2), np.int64(world.rank))  # fmt: skip
        runs = Sharded(tuple(np.array([2, 5])), np.dtype("f4"), [Part(first, values[first:last])])
        own = Sharded((np.int64(2),), np.dtype("f4"), [Part(0, np.zeros(2, "f4"))])
        return {"runs": runs, "several": several, "own": PerRank(own)}

    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, state(world, np.arange(10, dtype="f4")))
            values = np.zeros(10, "f4")
            manager.restore(into=state(world, values))
            return values, manager.restore().state["runs"]

    for rank, (values, whole) in enumerate(thread_comm.run(2, one)):
        own = slice(3) if rank == 0 else slice(3, 10)
        assert np.array_equal(whole, np.arange(10, dtype="f4").reshape(2, 5))
        assert np.array_equal(values[own], np.arange(10)[own]) and values.sum() == values[own].sum()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": 10}, "expected a Sharded with a shape, of integers >= 0, got 10"),
        ({"shape": (2.0, 5)}, "expected a Sharded with a shape, of integers >= 0, got (2.0, 5)"),
        ({"shape": (-2, -5)}, "expected a Sharded with a shape, of integers >= 0, got (-2, -5)"),
        ({"copies": 0}, "expected a Sharded of 1 copy or more, got 0"),
        ({"copies": 2, "copy": 2}, "expected a Sharded whose copy is one of its 2 copies, got 2"),
        ({"copies": 2, "copy": "0"}, "expected a Sharded whose copy is one of its 2 copies, got '0'"),
    ],
)
def test_numbers_of_a_sharded_that_are_none(wrong, message):
    whole = Sharded(**{"shape": (2, 5), "dtype": np.dtype("f4"), "parts": [Part(0, np.zeros(10, "f4"))]} | wrong)
    (flat,) = flat_of({"a": whole})
    assert isinstance(flat.error, ConfigError) and "save [a]: " in str(flat.error) and message in str(flat.error)


def test_the_outline_has_what_has_a_state_of_its_own():
    net = nn.Dense(2, 2)
    state = {"net": net, "a": [np.zeros(1), 3, {"own": PerRank(3), "text": "x"}]}
    assert flatten.outline("save", state) == ["net Dense", "a/2/own PerRank"]


ODD = {"dict": [["net", {"dict": [["a/b", 1], ["%@", 2], ["", 3], [".", 4], ["c", 5]]}]]}
FORM = {"dict": [["net", {"dict": [["a", 1], ["b", {"dict": []}]]}], ["netto", 2], [3, {"list": [4]}]]}


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({}, FORM),
        ({"net": "model/inner"}, {"model": {"inner": {"a": 1, "b": {}}}, "netto": 2, 3: [4]}),
        ({"net/a": "net/c", "3": "four"}, {"net": {"c": 1, "b": {}}, "netto": 2, "four": [4]}),
        (lambda name: name.upper(), {"NET": {"A": 1, "B": {}}, "NETTO": 2, 3: [4]}),
        ({"net": "model", "net/a": "head"}, {"model": {"b": {}}, "head": 1, "netto": 2, 3: [4]}),
        ({"net/a": "head", "net": "model"}, {"model": {"b": {}}, "head": 1, "netto": 2, 3: [4]}),
    ],
)
def test_renaming(rename, expected):
    def plain(form):
        ((tag, content),) = form.items() if isinstance(form, dict) else (("", form),)
        return {key: plain(each) for key, each in content} if tag == "dict" else content

    found = load.renamed(FORM, load.new_names(FORM, rename))
    assert plain(found) == (plain(expected) if expected is FORM else expected)


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"net": "model"}, {"model": {"a/b": 1, "%@": 2, "": 3, ".": 4, "c": 5}}),
        (lambda name: f"in/{name}", {"in": {"net": {"a/b": 1, "%@": 2, "": 3, ".": 4, "c": 5}}}),
        ({"net/a%2Fb": "x", "net/c": "net/c%2Fd"}, {"x": 1, "net": {"%@": 2, "": 3, ".": 4, "c/d": 5}}),
    ],
)
def test_keys_that_are_quoted_in_names_stay_what_they_are(rename, expected, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, flatten.built(ODD, None))
            return manager.restore(rename=rename).state

    assert thread_comm.run(1, one) == [expected]


@pytest.mark.parametrize(
    ("rename", "fields"),
    [
        ({"nett": "x"}, {"got": "nett"}),
        ({"netto": "net/a"}, {"got": ["net/a", "twice"]}),
        ({"netto": "net"}, {"got": "net"}),
        ({"netto": "net/a/b"}, {"got": "net/a/b"}),
        (lambda name: "same", {"got": "same"}),
        (lambda name: None, {"expected": "net/a", "got": None}),
        ({"netto": None}, {"expected": "netto", "got": None}),
        ({"netto": 5}, {"expected": "netto", "got": 5}),
        ({"netto": ""}, {"expected": "netto"}),
        ({7: "x"}, {"got": 7}),
        ({3: "x"}, {"got": 3}),
        ({"3/0": "x"}, {"got": "3/0"}),
    ],
)
def test_renames_that_cannot_be(rename, fields):
    with raises(ConfigError, operation="restore", where="rename", **fields):
        load.renamed(FORM, load.new_names(FORM, rename))
