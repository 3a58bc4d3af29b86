"""Shorter messages in pipelines, so that small arrays go in many."""

import pytest

from hpcdp.collectives import ring
from hpcdp.comm import progress


def set_message_nbytes(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let pipelines send messages of about ``nbytes`` bytes, until ``patch`` is undone; none are measured."""
    patch.setattr(progress, "MESSAGE_NBYTES", nbytes)
    patch.setattr(ring, "message_nbytes", lambda world: nbytes)
