"""Kinds of stores, and where the keys of asynchronous ones lie."""

import pytest

from hpcdp import kvstore
from hpcdp.kvstore import server_keys


@pytest.fixture(params=list(kvstore.KINDS))
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def split(request, monkeypatch):
    """Whether keys of dist_async are cut over all servers, where there are several nodes."""
    if request.param:
        monkeypatch.setattr(server_keys, "SPLIT_NBYTES", 8)
    return request.param
