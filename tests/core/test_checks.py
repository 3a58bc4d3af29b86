import math

import numpy as np
import pytest
from raises import raises

from hpcdp.core import checks
from hpcdp.core.checks import check_name, is_number, whole_number
from hpcdp.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize("value", [True, np.True_, 0, 1.0, "1", None, np.array([1]), np.array(1.0)])
def test_what_is_no_whole_number_is_refused_by_its_name(value):
    with raises(ConfigError, operation="make", where="size", expected=1):
        whole_number("make", "size", value, 1)
    assert type(whole_number("make", "size", np.array(3), 1)) is int


@pytest.mark.parametrize("name", [3, None, "Rign", ["ring"]])
def test_a_name_that_is_none_is_told_with_those_that_are(name):
    with raises(ConfigError, operation=f"unknown algorithm {name!r}"):
        check_name("algorithm", name, ["ring", "tree"])


def test_numbers_are_those_of_python_and_of_numpy():
    assert all(map(is_number, (1, 0.5, float("nan"), np.float32(1), np.float64(1), np.float16(1), np.int8(1))))
    assert not any(map(is_number, (True, np.True_, None, "1", 1j, np.ones(1), np.array(1.0))))


@pytest.mark.parametrize(
    ("check", "expected", "got"),
    [
        (lambda: whole_number("make", "x", 4, 0, 3), "an integer from 0 to 3", "4"),
        (lambda: whole_number("make", "x", 4, 0, 3, expected="a rank"), "a rank", "4"),
        (lambda: checks.number("make", "x", 0, above=0), "a number > 0", "0"),
        (lambda: checks.number("make", "x", -1, least=0), "a number >= 0", "-1"),
        (lambda: checks.number("make", "x", math.inf, least=0), "a number >= 0", "inf"),
        (lambda: checks.number("make", "x", math.nan), "a finite number", "nan"),
        (lambda: checks.number("make", "x", 1.0, least=0, below=1), "a number in [0, 1)", "1.0"),
        (lambda: checks.number("make", "x", 1.5, above=0, most=1), "a number in (0, 1]", "1.5"),
        (lambda: checks.number("make", "x", True, expected="a share"), "a share", "True"),
        (lambda: checks.one_of("make", "x", "c", ("a", "b")), "one of a, b", "'c'"),
        (lambda: checks.one_of("make", "x", ["a"], {"a": 1}), "one of a", "['a']"),
        (lambda: checks.boolean("make", "x", 1), "True or False", "1"),
        (lambda: checks.instance("make", "x", [1], dict, "a dict"), "a dict", "[1]"),
        (lambda: checks.instance("make", "x", object(), dict, "a dict"), "a dict", "an object"),
        (lambda: checks.lengths("make", "x", (4,), ("height", "width")), "(height, width), integers >= 1", "(4,)"),
        (lambda: checks.lengths("make", "x", 4, ("time",)), "(time,), integers >= 1", "4"),
        (lambda: checks.whole_numbers("make", 1, y=1, x=0), "an integer >= 1", "0"),
        (lambda: checks.instance("make", "x", None, (int, str), "a key"), "a key", "None"),
        (lambda: checks.instances("make", "x", [1, "a"], int, "integers"), "integers", "'a'"),
        (lambda: checks.function("make", "x", 3, "a function"), "a function", "3"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_its_name(check, expected, got):
    with pytest.raises(ConfigError) as raised:
        check()
    error = raised.value
    assert (error.operation, error.where, error.expected, error.got) == ("make", "x", expected, got)


def test_an_argument_is_returned_as_its_caller_uses_it(tmp_path):
    assert type(checks.number("make", "x", np.float32(1), least=0, most=1)) is float
    assert checks.number("make", "x", math.inf, above=0, most=math.inf) == math.inf
    assert checks.instances("make", "x", iter([1, 2]), int, "integers") == (1, 2)
    assert checks.file_name("draw", "path", tmp_path / "a.svg", (".svg",)) == tmp_path / "a.svg"


def test_a_file_is_named_by_its_suffix_in_a_folder_that_exists(tmp_path):
    with raises(ConfigError, operation="draw", where="path", got="a.png"):
        checks.file_name("draw", "path", "a.png", (".svg", ".dot"))
    with raises(ConfigError, operation="draw", where=tmp_path / "none/a.svg"):
        checks.file_name("draw", "path", tmp_path / "none" / "a.svg", (".svg",))


def test_names_of_a_state_are_those_of_its_owner():
    checks.same_names("load", "the network", ["a"], {"a": 1})
    with raises(ConfigError, operation="load", where="a"):
        checks.same_names("load", "the network", ["a"], [])
    with raises(ConfigError, operation="load", where="key 'b'"):
        checks.same_names("load", "the store", ["a"], ["a", "b"], "key")


def test_an_object_that_is_not_copied_says_what_to_copy():
    class Store:
        __reduce__ = checks.not_copied("Store", "the store", "copy its values")

    with raises(UnsupportedError, operation="Store"):
        Store().__reduce__()
