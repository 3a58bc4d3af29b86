"""Shorter messages in pipelines, so that small arrays go in many."""

import pytest

from hpcdp.comm import progress


def set_message_nbytes(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let pipelines send messages of ``nbytes`` bytes at most, until ``patch`` is undone."""
    for name in ("SHORT_MESSAGE_NBYTES", "LONG_MESSAGE_NBYTES"):
        patch.setattr(progress, name, nbytes)
