"""How who waits for something asks for it."""

from types import SimpleNamespace

import pytest

from hpcdp.comm import communicator
from hpcdp.comm.communicator import PolledRequest


@pytest.mark.parametrize(("yields", "naps"), [((), 41), ((50,), 1), ((51,), 0)])
def test_what_comes_soon_is_asked_for_longer_before_a_nap(monkeypatch, yields, naps):
    slept = []
    monkeypatch.setattr(communicator, "time", SimpleNamespace(sleep=slept.append))
    answers = iter([False] * 50 + [True])
    PolledRequest(lambda: next(answers), *yields).wait()
    assert len(slept) == naps
