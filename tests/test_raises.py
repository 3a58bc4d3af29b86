import numpy as np
import pytest
from raises import raises

from hpcdp.errors import ConfigError, HpcdpError, UnsupportedError

ERROR = {
    "operation": "matmul",
    "where": "out",
    "expected": "float32 of shape (2, 3)",
    "got": "float64 of shape (12, 3), scale -1.5",
    "remedy": "call astype(x), or pass --cast",
}


def check(kind=UnsupportedError, **fields):
    with raises(kind, **fields):
        raise UnsupportedError(**ERROR, rank=1)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"operation": "matmul"}, {"where": "out"}, {"rank": 1}, {"got": "float64"}, {"got": np.dtype("float64")},
        {"got": (12, 3)}, {"got": 12}, {"got": -1.5}, {"got": ["float64", (12, 3)]}, {"expected": (2, 3)},
        {"expected": "float32", "got": -1.5}, {"remedy": "astype(x)"}, {"remedy": "--cast"},
    ],
)  # fmt: skip
def test_fields_that_agree_pass(fields):
    check(**fields)
    check((ValueError, KeyError), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "mat"}, {"where": None}, {"where": "ou"}, {"rank": None}, {"rank": 0}, {"got": "float6"},
        {"got": 2}, {"got": 1.5}, {"got": -1}, {"got": ["float64", 13]}, {"expected": (2,)}, {"got": None},
        {"expected": "float64"}, {"operation": "matmul", "where": "x"}, {"remedy": "--cas"},
    ],
)  # fmt: skip
def test_a_field_that_differs_fails(fields):
    with pytest.raises(pytest.fail.Exception, match="matmul"):
        check(**fields)


def test_another_kind_is_passed_on_and_none_at_all_fails():
    with pytest.raises(UnsupportedError):
        check(ConfigError, operation="matmul")
    with pytest.raises(pytest.fail.Exception), raises(HpcdpError):
        pass
    with pytest.raises(pytest.fail.Exception), raises(ZeroDivisionError, operation="divide"):
        1 / 0  # noqa: B018
    with pytest.raises(TypeError), raises(HpcdpError, words="anything"):
        raise HpcdpError("divide")


def test_the_error_can_be_looked_at_further():
    with raises(HpcdpError, operation="save", where=None) as caught:
        raise HpcdpError("save", remedy="try again")
    assert caught.value.remedy == "try again"
