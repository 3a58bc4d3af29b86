"""A silence is explained: the activity after a while, how long it has taken so far, and its duration."""

import io
import time

import pytest

from hpcdp.core import environment


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(environment, "_SILENCE_S", 0.05)
    monkeypatch.setattr(environment, "_REPEAT_S", 0.1)


def test_a_long_silence_is_explained():
    out = io.StringIO()
    with environment.explained("compiling", True, out):
        time.sleep(0.4)
    first, *later, last = out.getvalue().splitlines()
    assert first == "compiling ..."
    assert later and all(line.endswith(" s so far") for line in later)
    assert last == f"compiling: {float(last.split()[1]):.1f} s" and float(last.split()[1]) >= 0.4


def test_also_where_the_block_raises():
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), environment.explained("compiling", True, out):
        time.sleep(0.2)
        _ = 1 / 0
    assert out.getvalue().splitlines()[-1].startswith("compiling: 0.")


@pytest.mark.parametrize(("speaks", "takes_s"), [(True, 0.0), (False, 0.2)])
def test_a_short_silence_and_another_rank_say_nothing(speaks, takes_s):
    out = io.StringIO()
    with environment.explained("compiling", speaks, out):
        time.sleep(takes_s)
    assert out.getvalue() == ""
