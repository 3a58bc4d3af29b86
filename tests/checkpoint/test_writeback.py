"""Which spans of a file are sent on their way to disk while it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcdp.checkpoint import hdf5_file
from hpcdp.checkpoint.hdf5_file import EVERY_NBYTES, Writeback


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    calls: list[tuple[int, int, int, int]] = []

    def start(*args: int) -> int:
        calls.append(args)  # type: ignore[arg-type]
        return -1  # as where a file system does not know it

    monkeypatch.setattr(hdf5_file, "_sync_file_range", lambda: start)
    return calls


def test_a_span_is_sent_when_it_is_long_enough_or_ends(sent: list[tuple[int, int, int, int]]) -> None:
    out, half = Writeback(7), EVERY_NBYTES // 2
    out.wrote(4096, half)
    assert sent == []
    out.wrote(4096 + half, half)
    out.wrote(4096 + 2 * half, 100)
    out.wrote(1 << 30, 50)
    assert sent == [(7, 4096, EVERY_NBYTES, 2), (7, 4096 + EVERY_NBYTES, 100, 2)]


def test_without_the_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_file, "_sync_file_range", lambda: None)
    Writeback(-1).wrote(0, 2 * EVERY_NBYTES)


def test_the_systems_call_takes_a_real_file_and_refuses_a_pipe(tmp_path: Path) -> None:
    start = hdf5_file._sync_file_range()
    if start is None:
        pytest.skip("this C library has no sync_file_range")
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert start(file.fileno(), 0, 1 << 20, 2) == 0
    ends = os.pipe()
    assert start(ends[1], 0, 1 << 20, 2) == -1
    for end in ends:
        os.close(end)
