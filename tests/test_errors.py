import pickle

import pytest

from hpcdp.errors import ConfigError, HpcdpError


def test_an_error_is_one_line_with_all_its_parts():
    error = ConfigError("read", where="a.toml", expected="a number", got="'x\n y'", remedy="fix it", rank=3)
    assert str(error) == "rank 3: read [a.toml]: expected a number, got 'x y'; fix it"


@pytest.mark.parametrize(
    ("parts", "text"),
    [({}, "op"), ({"got": 0}, "op: got 0"), ({"expected": 1}, "op: expected 1"), ({"remedy": "r"}, "op; r")],
)
def test_parts_that_are_missing_leave_no_trace(parts, text):
    assert str(HpcdpError("op", **parts)) == text


def test_an_error_survives_a_copy_with_its_kind():
    error = pickle.loads(pickle.dumps(ConfigError("op", where="w", got=1)))
    assert type(error) is ConfigError
    assert str(error) == "op [w]: got 1"
