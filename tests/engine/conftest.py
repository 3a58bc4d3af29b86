"""Engines of two lanes, in the mode that the tests choose."""

import pytest

from hpcdp.engine import Engine


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.delenv("HPCDP_ENGINE", raising=False)


@pytest.fixture
def engine():
    engine = Engine(lanes=("io", "other"))
    yield engine
    engine.shutdown()
